"""The one contract between simulators and algorithms: what an adapter returns, and when.

Shapes: N num_envs, O observation shape, C critic observation shape, A action dims, V reward heads, K actions.
"""

import os
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

Observation = Tensor | dict[str, Tensor]  # a dict, its keys sorted, where a simulator's Dict has an image in it


class Step(NamedTuple):
    """What one vector step returns; every tensor lives on the env's device and is never written again.

    Autoreset is same-step: where an env ended, `obs` is already the first observation of its next episode and the true
    last observation of the ended one is in `final_obs`.
    """

    obs: Observation
    """[N, *O] float32 vectors; images are [N, C, H, W] and stay uint8; a dict of both has one entry a key"""
    critic_obs: Observation
    """[N, *C] privileged state for the critic; the same object as obs where the env has none"""
    rewards: Tensor
    """[N] float32, or [N, V] where the env has several reward heads"""
    terminations: Tensor
    """[N] bool: the episode ended in a terminal state, whose value is 0"""
    truncations: Tensor
    """[N] bool: the episode was cut (time limit); never set together with terminations"""
    final_obs: Observation | None
    """[N, *O] s_{t+1} of every row, before any reset; None where the simulator cannot tell, and with some adapters when
    no row was truncated"""
    final_critic_obs: Observation | None
    """[N, *C] the same for critic_obs"""
    action_mask: Tensor | None = None
    """[N, K] bool, True = allowed, for the obs now returned; None where every action is always allowed

    K is the number of values of a Discrete action, the sum of those of a MultiDiscrete one. Where a row allows nothing
    for one of its actions, action 0 is sent and the row is left out of training.
    """
    raw_rewards: Tensor | None = None
    """[N] float32: before the simulator clipped them; None where rewards are not clipped"""
    episode_ends: Tensor | None = None
    """[N] bool: the game is over, where terminations also mark lost lives; None: it is terminations | truncations"""
    valid: Tensor | None = None
    """[N] bool: False marks a filler row that a simulator could not hide; None = all rows are real"""
    info: dict[str, Any] = {}
    """what a single simulator adds; algorithms do not read it"""


class VecEnv:
    """N copies of one task. Subclasses set the attributes, then implement reset and step.

    `step` clamps actions to the action space's bounds itself, and `rewards` are raw: never scaled, shifted or clipped,
    unless an option of the simulator asks for it.
    """

    env_id: str
    """canonical name with its backend, for example envpool/Ant-v5"""
    num_envs: int
    device: torch.device
    observation_space: spaces.Space
    """of one env, as the tensors are: a float32 or uint8 Box, or a Dict of such Boxes"""
    critic_observation_space: spaces.Space
    """of one env; the same object as observation_space where the env has no privileged state"""
    unflattened_shape: tuple[int, ...] | None = None
    """of one observation before it became a vector, say (5, 5) for a list of cars; None for images and dictionaries"""
    action_space: spaces.Space
    """of one env: a Box, or Discrete or MultiDiscrete (one axis), which count from 0"""
    value_size: int = 1
    """number of reward heads (V)"""
    max_episode_steps: int | None = None
    action_mask: Tensor | None = None
    """[N, K] bool for the obs that reset or step returned last; None where every action is always allowed"""

    def reset(self) -> tuple[Observation, Observation]:
        """Start an episode in every env; returns obs [N, *O] and critic_obs [N, *C]. The seed acts on the first."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> Step:
        """Advance every env by one transition. actions: [N, A] float32 in the space's units, or [N] / [N, A] int64."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """What it takes to continue exactly (tensors, numbers, strings), or None where the simulator cannot tell."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Observation, Observation]:
        """Continue from state_dict(); returns the current obs and critic_obs, as reset does."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the simulator; may be called twice."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_to_device(array: np.ndarray | dict[str, np.ndarray], device: torch.device) -> Observation:
    """Tensors of arrays that nobody writes again; float64 becomes float32 first, since some devices lack it."""
    if isinstance(array, dict):
        return {key: host_to_device(x, device) for key, x in array.items()}
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=device.type == "cuda")
