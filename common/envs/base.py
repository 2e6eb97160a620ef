"""The one contract between simulators and algorithms: what an adapter returns, and when.

Shapes: N num_envs, O observation shape, C critic observation shape, A action dims, V reward heads, K actions.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.errors import InputError

PRIVILEGED = (
    ("policy", "critic"),
    ("state", "privileged_state"),
)  # a Dict observation's keys: the actor's, the critic's


class Step(NamedTuple):
    """What one vector step returns; every tensor lives on the env's device and is never written again.

    Autoreset is same-step: where an env ended, `obs` is already the first observation of its next episode and the true
    last observation of the ended one is in `final_obs`.
    """

    obs: Tensor
    """[N, *O] float32 (uint8 pixels stay uint8)"""
    critic_obs: Tensor
    """[N, *C] privileged state for the critic; the same tensor as obs where the env has none"""
    rewards: Tensor
    """[N] float32, or [N, V] where the env has several reward heads"""
    terminations: Tensor
    """[N] bool: the episode ended in a terminal state, whose value is 0"""
    truncations: Tensor
    """[N] bool: the episode was cut (time limit); never set together with terminations"""
    final_obs: Tensor | None
    """[N, *O] s_{t+1} of every row, before any reset; None when no row was truncated or the simulator cannot tell"""
    final_critic_obs: Tensor | None
    """[N, *C] the same for critic_obs"""
    action_mask: Tensor | None = None
    """[N, K] bool, True = allowed, for the obs now returned; None where every action is always allowed"""
    valid: Tensor | None = None
    """[N] bool: False marks a filler row that a simulator could not hide; None = all rows are real"""
    info: dict[str, Any] = {}
    """what a single simulator adds; algorithms do not read it"""


class VecEnv:
    """N copies of one task. Subclasses set the attributes, then implement reset and step.

    `step` clamps actions to the action space's bounds itself, and `rewards` are raw: never scaled, shifted or clipped.
    """

    env_id: str
    """canonical name with its backend, for example envpool/Ant-v5"""
    num_envs: int
    device: torch.device
    observation_space: spaces.Space
    """of one env, as the tensors are: float32 Box or uint8 Box"""
    critic_observation_space: spaces.Space
    """of one env; the same object as observation_space where the env has no privileged state"""
    action_space: spaces.Space
    """of one env"""
    value_size: int = 1
    """number of reward heads (V)"""
    max_episode_steps: int | None = None
    action_mask: Tensor | None = None
    """[N, K] bool for the obs that reset or step returned last; None where every action is always allowed"""

    def reset(self) -> tuple[Tensor, Tensor]:
        """Start an episode in every env; returns obs [N, *O] and critic_obs [N, *C]. The seed acts on the first."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> Step:
        """Advance every env by one transition. actions: [N, A] float32 in the space's units, or [N] / [N, A] int64."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """What it takes to continue exactly (tensors, numbers, strings), or None where the simulator cannot tell."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Continue from state_dict(); returns the current obs and critic_obs, as reset does."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the simulator; may be called twice."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of an array that nobody writes again; float64 becomes float32 first, since some devices lack it."""
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=device.type == "cuda")


def action_box(space: spaces.Space, env_id: str) -> spaces.Space:
    """The action space as tensors are: a flat float32 Box, Discrete or MultiDiscrete. Raises InputError for others."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=np.float32)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return space
    raise InputError(f"{env_id} has {space} actions; supported are a Box of floats, Discrete and MultiDiscrete")


def clamped(actions: Tensor, space: spaces.Space) -> np.ndarray:
    """Actions on the host, inside a Box's bounds (a new array), or shifted to a discrete space's start."""
    array = actions.numpy(force=True)
    if isinstance(space, spaces.Box):
        return np.clip(array, space.low, space.high)
    return (array + space.start).astype(space.dtype)


class ObservationReader:
    """From a simulator's numpy observations to the contract's; what to do is decided once, from its space.

    Vectors become float32, a Dict of vectors is concatenated in key order, Discrete becomes one-hot, uint8 images stay.
    In a Dict, "action_mask" is split off; where just a PRIVILEGED pair is left, its second part is the critic's alone.
    """

    def __init__(self, space: spaces.Space | dict, env_id: str):
        parts = dict(space.items()) if isinstance(space, (dict, spaces.Dict)) else {}
        self.has_mask = parts.pop("action_mask", None) is not None
        self.pair = next((pair for pair in PRIVILEGED if set(pair) == set(parts)), None)
        if self.pair:
            self.policy, self.critic = (parts[key] for key in self.pair)
        else:
            self.policy, self.critic = spaces.Dict(list(parts.items())) if parts else space, None
        self.observation_space = self.critic_observation_space = flat_space(self.policy, env_id)
        if self.pair:
            self.critic_observation_space = flat_space(self.critic, env_id)

    def read(self, obs: Any, rows: int) -> list[np.ndarray]:
        """Arrays of `rows` envs: obs, critic obs (the same array where there is none) and, if any, the mask.

        They may share the memory of `obs`, which the simulator must not write again.
        """
        if self.pair:
            arrays = [flatten(obs[self.pair[0]], self.policy, rows), flatten(obs[self.pair[1]], self.critic, rows)]
        else:
            arrays = [flatten(obs, self.policy, rows)] * 2
        return [*arrays, np.asarray(obs["action_mask"], bool).reshape(rows, -1)] if self.has_mask else arrays

    def replaced(self, arrays: list[np.ndarray], ids: np.ndarray, rows: list[np.ndarray]) -> list[np.ndarray]:
        """Copies of what read() returned, with other rows at ids."""
        result = [arrays[0].copy()] * 2 if arrays[1] is arrays[0] else [arrays[0].copy(), arrays[1].copy()]
        result += [mask.copy() for mask in arrays[2:]]
        for array, row in zip(result, rows, strict=True):
            array[ids] = row
        return result


def to_tensors(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """What read() returned as obs, critic obs (the same tensor where it is the same array) and action mask."""
    obs = host_to_device(arrays[0], device)
    critic_obs = obs if arrays[1] is arrays[0] else host_to_device(arrays[1], device)
    return obs, critic_obs, host_to_device(arrays[2], device) if len(arrays) > 2 else None


def flat_space(space: spaces.Space, env_id: str) -> spaces.Box:
    """The Box of an adapter's tensors: a float32 vector or a uint8 image. Raises InputError for any other space."""
    if isinstance(space, spaces.Dict):
        parts = [flat_space(part, env_id) for part in space.values()]
        if any(len(part.shape) != 1 for part in parts):
            raise InputError(f"{env_id} has a dictionary with images as observation; only vectors can be concatenated")
        return spaces.Box(-np.inf, np.inf, (sum(part.shape[0] for part in parts),), np.float32)
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0, 1, (int(space.n),), np.float32)
    if not isinstance(space, spaces.Box):
        kind = type(space).__name__
        raise InputError(f"{env_id} has {kind} observations; supported are Box, Discrete and a Dict of them")
    return space if is_image(space) else spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape)),), np.float32)


def is_image(space: spaces.Space) -> bool:
    return space.dtype == np.uint8 and len(space.shape) == 3


def flatten(obs: Any, space: spaces.Space, rows: int) -> np.ndarray:
    """An array of one row an env, as flat_space says."""
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten(obs[key], part, rows) for key, part in space.items()], 1)
    if isinstance(space, spaces.Discrete):
        one_hot = np.zeros((rows, int(space.n)), np.float32)
        one_hot[np.arange(rows), np.asarray(obs).reshape(rows) - int(space.start)] = 1
        return one_hot
    if is_image(space):
        return np.asarray(obs).reshape(rows, *space.shape)
    return np.asarray(obs, np.float32).reshape(rows, -1)
