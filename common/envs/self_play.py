"""A zero-sum game of two teams as an environment of one: an opponent plays the other side.

Shapes: N num_envs, G num_agents of the game, H = G/2 of one team, O observation size, K actions, A action dims.
"""

import math
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv
from common.errors import InputError


class Opponent(Protocol):
    """Who plays the other side."""

    def draw(self, count: int) -> Tensor:
        """Names [count] of the opponents in the next `count` games."""

    def act(self, obs: Tensor, action_mask: Tensor | None, who: Tensor) -> Tensor:
        """Actions, as step takes them, of the opponents who [N] for obs [N, H, O] and a mask [N, H, K].

        While it is not their turn the mask allows nothing, and what they do is ignored.
        """


class SelfPlayVecEnv:
    """envs seen from one team, whose agents they then have, while `opponent` acts for the other.

    Env i starts on side i % 2 and changes sides with every episode. Its opponent is drawn when an episode begins, and
    stays to its end. The state is hidden, since it does not tell who looks
    at it. An episode is won where the sum of the team's rewards is above 0. `games` collects (ends, who, result) [N] of
    every step, result being the sign of that sum. Raises InputError where envs is no such game.
    """

    def __init__(self, envs: MultiAgentVecEnv, opponent: Opponent | None = None):
        teams = list(envs.teams)
        if not envs.zero_sum or sorted(set(teams)) != [0, 1] or teams.count(0) != teams.count(1):
            raise InputError(f"{envs.env_id}: self-play needs a zero-sum game of two teams of one size, and this has "
                             f"teams {teams} and is {'' if envs.zero_sum else 'not '}zero-sum")  # fmt: skip
        self.envs, self.opponent = envs, opponent
        self.num_agents, self.state_space, device = len(teams) // 2, None, envs.device
        self.sides = torch.tensor([[g for g, team in enumerate(teams) if team == side] for side in (0, 1)]).to(device)
        self.rows = torch.arange(envs.num_envs, device=device)[:, None]
        self.games: list[tuple[Tensor, Tensor, Tensor]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["envs"], name)

    def _of(self, x: Tensor | None, side: Tensor) -> Tensor | None:
        """The agents of a side [N] in x [N, G, ..]: [N, H, ..]."""
        return None if x is None else x[self.rows, self.sides[side]]

    def _observe(self, obs: Tensor) -> Tensor:
        self.obs = obs
        self.alive, self.acting, self.action_mask = (
            self._of(x, self.side) for x in (self.envs.alive, self.envs.acting, self.envs.action_mask)
        )
        return self._of(obs, self.side)

    def reset(self) -> tuple[Tensor, None]:
        obs, _ = self.envs.reset()
        self.side = self.rows[:, 0] % 2
        self.who, self.score = self.opponent.draw(self.num_envs), torch.zeros(self.num_envs, device=obs.device)
        return self._observe(obs), None

    def step(self, actions: Tensor) -> MultiAgentStep:
        side, other, who = self.side, 1 - self.side, self.who
        mask = self._of(self.envs.action_mask, other)
        if mask is not None and self.envs.acting is not None:
            mask = mask & self._of(self.envs.acting & self.envs.alive, other)[..., None]
        theirs = self.opponent.act(self._of(self.obs, other), mask, who)
        joint = actions.new_zeros(self.num_envs, self.envs.num_agents, *actions.shape[2:])
        joint[self.rows, self.sides[side]], joint[self.rows, self.sides[other]] = actions, theirs
        step = self.envs.step(joint)
        before, rewards = self.alive, self._of(step.rewards, side)
        self.score = self.score + torch.where(before, rewards, 0.0).sum(1)
        ends, result = step.terminations | step.truncations, self.score.sign()
        self.games.append((ends, who, result))
        final_obs, final_alive = self._of(step.final_obs, side), self._of(step.final_alive, side)
        self.score = torch.where(ends, 0.0, self.score)
        self.side = torch.where(ends, other, side)
        self.who = torch.where(ends, self.opponent.draw(self.num_envs), who)
        obs = self._observe(step.obs)
        return step._replace(
            obs=obs, state=None, rewards=rewards, alive=self.alive, final_alive=final_alive, final_obs=final_obs,
            final_state=None, action_mask=self.action_mask, acting=self.acting, won=result > 0,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any] | None:
        """Of the envs and who plays them; None where the simulator cannot tell."""
        state = self.envs.state_dict()
        own = {"side": self.side, "who": self.who, "score": self.score}
        return None if state is None else {"envs": state} | own

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, None]:
        obs, _ = self.envs.load_state_dict(state["envs"])
        self.side, self.who, self.score = (state[name].to(obs.device) for name in ("side", "who", "score"))
        return self._observe(obs), None


class Human:
    """Somebody at the terminal, in one env of one agent a side with discrete actions.

    shape: [rows, columns, planes] of a board whose planes 0 and 1 are one's own stones and the other's; None: there is
    no board to show. Actions are numbered from 0: columns, or cells from the top left.
    """

    def __init__(self, envs: MultiAgentVecEnv):
        if envs.num_envs > 1 or len(envs.teams) > 2 or not isinstance(envs.action_space, spaces.Discrete):
            raise InputError(f"--opponent human: needs --num-envs 1 and a game of two with discrete actions, not "
                             f"{envs.num_envs} copies of {envs.env_id} with {envs.action_space}")  # fmt: skip
        self.shape = envs.unflattened_shape

    def draw(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int64)

    def act(self, obs: Tensor, action_mask: Tensor | None, who: Tensor) -> Tensor:
        """Show the board and ask until the move is allowed. Raises InputError where the input ends."""
        if action_mask is not None and not action_mask.any():
            return torch.zeros_like(who)[:, None]
        if self.shape and len(self.shape) == 3 and self.shape[2] >= 2:
            planes = obs.flatten()[: math.prod(self.shape)].view(self.shape).cpu()
            for own, theirs in zip(planes[..., 0].tolist(), planes[..., 1].tolist(), strict=True):
                print(" ".join("X" if x else "O" if o else "." for x, o in zip(own, theirs, strict=True)))
        allowed = range(1) if action_mask is None else action_mask.flatten().nonzero().flatten().tolist()
        while True:
            try:
                answer = input(f"you are X; your move, one of {' '.join(map(str, allowed))}: ").strip()
            except EOFError as error:
                raise InputError("--opponent human: the input ended before the games did") from error
            if answer.isdigit() and int(answer) in allowed:
                return torch.full_like(who, int(answer))[:, None]
            print(f"{answer!r} is not allowed here")
