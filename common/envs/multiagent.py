"""The contract of environments with several agents, and what their adapters share: padding and frame stacking.

Shapes: N num_envs, G num_agents, O observation size, C state size, A action dims, K actions, F frames.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from common.envs.actions import choices
from common.envs.base import VecEnv
from common.errors import InputError


class MultiAgentStep(NamedTuple):
    """What one vector step returns; every tensor lives on the env's device and is never written again.

    Autoreset is same-step: where an env ended, obs, state, alive and action_mask are already those of its next episode,
    and the last ones of the ended episode are final_obs, final_state and final_alive.
    """

    obs: Tensor
    """[N, G, O] float32"""
    state: Tensor | None
    """[N, C] float32: what a central critic may read; None where the env has none"""
    rewards: Tensor
    """[N, G] float32, raw; what an agent gets that was dead before the step does not count"""
    terminations: Tensor
    """[N] bool: the episode ended in a terminal state, whose value is 0"""
    truncations: Tensor
    """[N] bool: the episode was cut (time limit); never set together with terminations"""
    alive: Tensor
    """[N, G] bool, for the obs now returned; False: the agent is dead or absent, its row may hold anything and does not
    count, and its action is ignored. A row that a simulator needs for its own reset has no living agent."""
    final_alive: Tensor
    """[N, G] bool, for s_{t+1} of every row, before any reset: an agent that acted and is not alive there has died"""
    final_obs: Tensor | None
    """[N, G, O] s_{t+1} of every row, before any reset; may be None when no episode was truncated"""
    final_state: Tensor | None
    """[N, C] the same for state"""
    action_mask: Tensor | None = None
    """[N, G, K] bool, True = allowed, for the obs now returned; None where every action is always allowed

    Of discrete actions as in Step. Of a Box it is [N, G, A]: the dimensions that the agent has.
    """
    won: Tensor | None = None
    """[N] bool: the episode that ended here was won; None where the env does not tell"""
    acting: Tensor | None = None
    """[N, G] bool, for the obs now returned: whose turn it is; None: every living agent acts in every step

    An agent that waits lives on: it is rewarded, and its action is ignored.
    """


class MultiAgentVecEnv(VecEnv):
    """N copies of one task with G agents. Subclasses set the attributes, then implement reset and step.

    Agents with different spaces are padded to the largest: observations by zeros at the end, discrete actions by values
    that action_mask forbids, the dimensions of a Box by some that are ignored. Otherwise the rules of VecEnv hold.
    """

    num_agents: int
    """agents that may ever live (G)"""
    observation_space: spaces.Box
    """of one agent, a vector"""
    state_space: spaces.Box | None = None
    """of one env, a vector; None where the env has no state"""
    action_space: Space
    """of one agent: a Box, or Discrete or MultiDiscrete (one axis), which count from 0"""
    alive: Tensor
    """[N, G] bool for the obs that reset or step returned last"""
    action_mask: Tensor | None = None
    """[N, G, K] bool for the obs that reset or step returned last; None where every action is always allowed"""
    acting: Tensor | None = None
    """[N, G] bool for the obs that reset or step returned last; None: every living agent acts in every step"""
    teams: Sequence[int] = ()
    """which team each agent is of, counted from 0; empty: there are no teams"""
    zero_sum: bool = False
    """what one of two teams wins the other loses"""

    def reset(self) -> tuple[Tensor, Tensor | None]:
        """Start an episode in every env; returns obs [N, G, O] and state [N, C]. The seed acts on the first."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> MultiAgentStep:
        """Advance every env by one step. actions: [N, G, A] float32 in the space's units, or int64 [N, G(, A)]."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Continue from state_dict(); returns the current obs and state, as reset does."""
        raise NotImplementedError


def pad_actions(agent_spaces: Sequence[Space], env_id: str) -> tuple[Space, np.ndarray | None]:
    """One space for the actions of all agents and which part of it each has, [G, K] bool (None: each has all).

    agent_spaces: float32 Boxes of one axis, or Discrete or MultiDiscrete that count from 0. Raises InputError for a mix
    of kinds, Boxes whose bounds differ and MultiDiscretes of different lengths.
    """
    kinds = sorted({type(space).__name__ for space in agent_spaces})
    if len(kinds) > 1:
        raise InputError(f"{env_id} has agents with {' and '.join(kinds)} actions; all agents need one kind")
    if kinds == ["Box"]:
        largest, sizes = max(agent_spaces, key=lambda space: space.shape[0]), [s.shape[0] for s in agent_spaces]
        for space, size in zip(agent_spaces, sizes, strict=True):
            if not np.array_equal((space.low, space.high), (largest.low[:size], largest.high[:size])):
                raise InputError(f"{env_id} has agents with actions {space} and {largest}; padding can change the "
                                 "number of dimensions, not their bounds")  # fmt: skip
        mask = np.arange(max(sizes)) < np.array(sizes)[:, None]
        return largest, None if mask.all() else mask
    counts = [choices(space, env_id)[0] for space in agent_spaces]
    if len(lengths := sorted({len(x) for x in counts})) > 1:
        raise InputError(f"{env_id} has agents with {lengths} sub-actions; padding can only change their values")
    sizes = np.max(counts, 0)
    mask = np.concatenate([np.arange(size) < np.array(counts)[:, [i]] for i, size in enumerate(sizes)], 1)
    space = spaces.Discrete(int(sizes[0])) if kinds == ["Discrete"] else spaces.MultiDiscrete(sizes)
    return space, None if mask.all() else mask


class FrameStackVecEnv:
    """envs whose observations are the last `frames` ones of each agent, oldest first, [N, G, F*O].

    Where an episode begins or an agent comes to life, its first observation stands for those before. The state is not
    stacked. Everything else is that of envs.
    """

    def __init__(self, envs: MultiAgentVecEnv, frames: int):
        self.envs, self.frames, space = envs, frames, envs.observation_space
        bounds = (np.tile(bound, frames) for bound in (space.low, space.high))
        self.observation_space = spaces.Box(*bounds, dtype=np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["envs"], name)

    def _pushed(self, obs: Tensor, new: Tensor) -> Tensor:
        """The stack with obs [N, G, O] as its last frame, or in all frames of the rows `new` [N, G]."""
        shifted = torch.cat([self.stack[..., obs.shape[-1] :], obs], -1)
        return torch.where(new[..., None], obs.repeat(1, 1, self.frames), shifted)

    def reset(self) -> tuple[Tensor, Tensor | None]:
        obs, state = self.envs.reset()
        self.stack = obs.repeat(1, 1, self.frames)
        return self.stack, state

    def step(self, actions: Tensor) -> MultiAgentStep:
        before = self.envs.alive
        step = self.envs.step(actions)
        final_obs = step.final_obs
        if final_obs is not None:
            final_obs = self._pushed(final_obs, ~before & step.final_alive)
        begins = (step.terminations | step.truncations)[:, None]
        self.stack = self._pushed(step.obs, begins | ~before & step.alive)
        return step._replace(obs=self.stack, final_obs=final_obs)

    def state_dict(self) -> dict[str, Any] | None:
        state = self.envs.state_dict()
        return None if state is None else {"envs": state, "stack": self.stack}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        obs, critic_state = self.envs.load_state_dict(state["envs"])
        self.stack = state["stack"].to(obs.device)
        return self.stack, critic_state
