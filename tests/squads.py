"""Environments of several agents for tests: pure functions of the state, the actions and the index of the env."""

import os

import numpy as np
import torch
from gymnasium import spaces

from common.envs.multiagent import FrameStackVecEnv, MultiAgentStep, MultiAgentVecEnv


class Squad(MultiAgentVecEnv):
    """Three agents with five values each and a state of four; agent g of env i dies at step 3 + (i + g) % 5, in every
    second episode.

    Episodes are cut after 6 + i % 3 steps, and end where all are dead or the first agent's x is above 1.6. junk fills
    all that a dead agent shows and earns. masked: a mask that depends on an unobserved counter. continuous: a Box.
    """

    def __init__(self, num_envs, junk=0.0, masked=True, continuous=False, exact=True, stateless=False):
        self.env_id, self.num_envs, self.device = "toy/Squad", num_envs, torch.device("cpu")
        self.junk, self.masked, self.exact, self.num_agents = junk, masked and not continuous, exact, 3
        self.observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
        self.state_space = None if stateless else spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-2, 2, (2,), np.float32) if continuous else spaces.Discrete(4)
        self.continuous = continuous
        self.index = int(os.environ.get("RANK", 0)) * num_envs + torch.arange(num_envs)

    def first(self):
        phase = self.index[:, None, None] + 1.7 * self.episode[:, None, None] + torch.arange(3)[:, None]
        return torch.sin(phase.double() * (1 + torch.arange(5))).float()

    def living(self, t):
        ages = 3 + (self.index[:, None] + torch.arange(3)) % 5
        return (self.episode[:, None] % 2 == 0) | (t[:, None] < ages)

    def show(self, x, t):
        """Obs, state and who lives."""
        alive = self.living(t)
        obs = torch.where(alive[..., None], x, self.junk)
        return obs, torch.cat([x.sum(1)[:, :3], t[:, None].float()], 1), alive

    def look(self):
        obs, state, self.alive = self.show(self.x, self.t)
        if self.masked:
            counter = self.t[:, None, None] + self.index[:, None, None] + torch.arange(3)[:, None]
            self.action_mask = (counter + torch.arange(4)) % 3 > 0
            self.action_mask[~self.alive] = False
        return obs, None if self.state_space is None else state

    def reset(self):
        self.episode, self.t = torch.zeros_like(self.index), torch.zeros_like(self.index)
        self.x = self.first()
        return self.look()

    def step(self, actions):
        before = self.alive
        if self.masked:
            allowed = self.action_mask.gather(2, actions[..., None])[..., 0]
            assert (allowed | ~before).all(), "an action that is not allowed"
        force = actions.clamp(-2, 2).sum(-1) / 4 if self.continuous else actions / 3
        force = torch.where(before, force.float(), 0.0)
        x = 0.7 * self.x + 0.2 * force[..., None] * torch.tensor([1.0, -1.0, 0.5, 0.0, 2.0])
        t = self.t + 1
        rewards = x[..., 0] + 0.5 * force - torch.tensor([0.0, 1.0, 2.0])
        rewards = torch.where(before, rewards, self.junk)
        obs, state, alive = self.show(x, t)
        terminations = ~alive.any(1) | (x[:, 0, 4] > 1.6)
        truncations = (t >= 6 + self.index % 3) & ~terminations
        dones = terminations | truncations
        final_obs = obs if truncations.any() else None
        final_state = state if truncations.any() and self.state_space is not None else None
        self.episode, self.t = self.episode + dones, torch.where(dones, 0, t)
        self.x = torch.where(dones[:, None, None], self.first(), x)
        new_obs, new_state = self.look()
        return MultiAgentStep(new_obs, new_state, rewards, terminations, truncations, self.alive, alive & before,
                              final_obs, final_state, self.action_mask, won=x[:, 0, 0] > 0)  # fmt: skip

    def state_dict(self):
        return {"x": self.x, "t": self.t, "episode": self.episode} if self.exact else None

    def load_state_dict(self, state):
        self.x, self.t, self.episode = state["x"], state["t"], state["episode"]
        return self.look()


class Known(MultiAgentVecEnv):
    """Three agents, episodes of one step; agent g of env i earns g + 10 * (i % 2), whatever it does.

    Agents look alike, and only the observation (or, with hidden, the state alone) tells in which env they are.
    """

    def __init__(self, num_envs, hidden=False):
        self.env_id, self.num_envs, self.device, self.num_agents = "toy/Known", num_envs, torch.device("cpu"), 3
        self.observation_space = self.state_space = spaces.Box(-1, 1, (2,), np.float32)
        self.action_space, self.hidden = spaces.Discrete(2), hidden
        self.alive = torch.ones(num_envs, 3, dtype=torch.bool)

    def reset(self):
        kind = torch.arange(self.num_envs) % 2
        state = torch.stack([kind, 1 - kind], 1).float()
        return (0 if self.hidden else 1) * state[:, None].expand(-1, 3, -1), state

    def step(self, actions):
        rewards = torch.arange(3.0) + 10 * (torch.arange(self.num_envs) % 2)[:, None]
        ends = torch.ones(self.num_envs, dtype=torch.bool)
        return MultiAgentStep(*self.reset(), rewards, ends, ~ends, self.alive, self.alive, None, None)


class Duel(MultiAgentVecEnv):
    """Two teams of `size` agents in turn: who adds more over `rounds` rounds of 0, 1 or 2 wins what it is ahead.

    Team 0 acts in even steps. After an episode comes one row in which nobody lives, as in envpool, and earns junk.
    """

    zero_sum = True

    def __init__(self, num_envs, size=1, rounds=2, exact=True, junk=0.0):
        self.env_id, self.num_envs, self.device = "toy/Duel", num_envs, torch.device("cpu")
        self.num_agents, self.rounds, self.exact, self.junk = 2 * size, rounds, exact, junk
        self.teams = tuple(g % 2 for g in range(2 * size))
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(3)

    def look(self):
        team, turn = torch.tensor(self.teams), self.t[:, None] % 2
        self.alive = (self.t >= 0)[:, None].expand(-1, self.num_agents)
        self.acting = (turn == team) & self.alive
        ahead = torch.where(team == 0, self.ahead[:, None], -self.ahead[:, None])
        columns = [ahead, self.t[:, None].expand_as(ahead), team.expand_as(ahead), self.acting]
        return torch.stack([x.float() for x in columns], -1)

    def reset(self):
        self.t, self.ahead = torch.zeros(self.num_envs, dtype=torch.int64), torch.zeros(self.num_envs)
        return self.look(), None

    def step(self, actions):
        team, filler = torch.tensor(self.teams), self.t < 0
        moved = torch.where(self.acting, actions, 0).float()
        self.ahead = torch.where(filler, 0.0, self.ahead + (moved * torch.where(team == 0, 1, -1)).sum(1))
        ends = self.t + 1 == 2 * self.rounds
        rewards = torch.where(ends[:, None], torch.where(team == 0, 1, -1) * self.ahead[:, None], 0.0)
        rewards = torch.where(filler[:, None], self.junk, rewards)
        before = self.alive
        self.t = torch.where(ends, -1, self.t + 1)
        self.ahead = torch.where(ends, 0.0, self.ahead)
        obs = self.look()
        none = torch.zeros_like(ends)
        return MultiAgentStep(obs, None, rewards, ends, none, self.alive, before, None, None, acting=self.acting)

    def state_dict(self):
        return {"t": self.t, "ahead": self.ahead} if self.exact else None

    def load_state_dict(self, state):
        self.t, self.ahead = state["t"], state["ahead"]
        return self.look(), None


ENVS = {"toy/Squad": Squad, "toy/Known": Known, "toy/Duel": Duel}


def make(env_id, num_envs, device, seed, env_kwargs=None, action_bins=0, mask_obs=(), multi_agent=True, frame_stack=1):
    envs = ENVS[env_id](num_envs, **(env_kwargs or {}))
    return FrameStackVecEnv(envs, frame_stack) if frame_stack > 1 else envs
