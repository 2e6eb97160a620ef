"""The one contract between simulators and algorithms: what an adapter returns, and when.

Shapes: N num_envs, O observation shape, C critic observation shape, A action dims, V reward heads, K actions.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.errors import InputError


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

    def reset(self) -> tuple[Tensor, Tensor]:
        """Start an episode in every env; returns obs [N, *O] and critic_obs [N, *C]. The seed acts on the first call."""
        raise NotImplementedError

    def step(self, actions: Tensor) -> Step:
        """Advance every env by one transition. actions: [N, A] float32 in the space's units, or [N] / [N, A] int64."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any] | None:
        """Everything needed to continue exactly (tensors, numbers, strings), or None where the simulator cannot tell."""
        return None

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Continue from state_dict(); returns the current obs and critic_obs, as reset does."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the simulator; may be called twice."""


def host_to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of a fresh array; floats become float32 before they travel (some devices have no float64)."""
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    return torch.from_numpy(array).to(device, non_blocking=True)


def clamped(actions: Tensor, space: spaces.Space) -> np.ndarray:
    """Actions on the host, inside a Box's bounds (a new array), or shifted to a discrete space's start."""
    array = actions.detach().cpu().numpy()
    if isinstance(space, spaces.Box):
        return np.clip(array, space.low, space.high)
    return (array + getattr(space, "start", 0)).astype(space.dtype)


def flat_space(space: spaces.Space, env_id: str) -> spaces.Box:
    """The Box of the tensors an adapter makes: a float32 vector, or a uint8 image. Raises InputError for what has no such form."""
    if isinstance(space, spaces.Dict):
        parts = [flat_space(part, env_id) for part in space.values()]
        if any(len(part.shape) != 1 for part in parts):
            raise InputError(
                f"{env_id} has a dictionary with images as observation; only vectors can be concatenated here"
            )
        return spaces.Box(-np.inf, np.inf, (sum(part.shape[0] for part in parts),), np.float32)
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0, 1, (int(space.n),), np.float32)
    if not isinstance(space, spaces.Box):
        raise InputError(
            f"{env_id} has {type(space).__name__} observations, which are not supported: give a Box, Discrete or Dict of them"
        )
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return space
    return spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape)),), np.float32)


def split_dict(space: spaces.Space) -> tuple[spaces.Space, spaces.Space | None]:
    """The policy's and the critic's part of an observation space; None where the env has no privileged state."""
    if isinstance(space, spaces.Dict) and set(space.keys()) == {"policy", "critic"}:
        return space["policy"], space["critic"]
    return space, None


def flatten(obs: Any, space: spaces.Space, rows: int) -> np.ndarray:
    """A fresh array of one row an env, as flat_space says: float32 vectors (Discrete as one-hot), uint8 images as they are."""
    if isinstance(space, spaces.Dict):
        return np.concatenate([flatten(obs[key], part, rows) for key, part in space.items()], 1)
    if isinstance(space, spaces.Discrete):
        return np.eye(space.n, dtype=np.float32)[np.asarray(obs).reshape(rows) - space.start]
    if space.dtype == np.uint8 and len(space.shape) == 3:
        return np.array(obs).reshape(rows, *space.shape)
    return np.array(obs, np.float32).reshape(rows, -1)
