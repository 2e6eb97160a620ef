"""From a simulator's numpy observations to the contract's: vectors, images and dictionaries of both."""

import sys
from functools import reduce
from operator import getitem
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from common.envs.base import Observation, host_to_device
from common.errors import InputError

PRIVILEGED = (
    ("policy", "critic"),
    ("state", "privileged_state"),
)  # a Dict observation's keys: the actor's, the critic's

Array = np.ndarray | dict[str, np.ndarray]


class ObservationReader:
    """What to do with an observation, decided once, from its space.

    Vectors become float32, Discrete one-hot, uint8 images [C, H, W]. A Dict is concatenated in the order of its sorted
    keys, or stays a dict where it has an image (`outer/inner` is then the key of a part of a part); its texts are
    dropped. "action_mask" is split off from it; where just a PRIVILEGED pair is left, the second is the critic's alone.
    """

    def __init__(self, space: Space | dict, env_id: str):
        leaves = dict(leaves_of(space))
        self.texts = [path for path, part in leaves.items() if path and is_text(part)]
        if self.texts:
            names = ", ".join("/".join(path) for path in self.texts)
            print(f"{env_id}: text is no input of a policy: {names} dropped", file=sys.stderr, flush=True)
        leaves = {path: part for path, part in leaves.items() if path not in self.texts}
        mask = leaves.pop(("action_mask",), None)
        self.mask_shape = None if mask is None else mask.shape
        names = {path[0] for path in leaves if path}
        self.pair = next((pair for pair in PRIVILEGED if set(pair) == names), None)
        if self.pair:
            halves = ({path[1:]: part for path, part in leaves.items() if path[0] == name} for name in self.pair)
            self.policy, self.critic = (View(half, env_id) for half in halves)
        else:
            self.policy = self.critic = View(leaves, env_id)
        self.observation_space, self.critic_observation_space = self.policy.space, self.critic.space
        vector = leaves.get((self.pair[0],) if self.pair else ())
        self.unflattened_shape = vector.shape if isinstance(vector, spaces.Box) and not is_image(vector) else None

    def read(self, obs: Any, rows: int) -> list[Array]:
        """Arrays of `rows` envs: obs and critic obs (the same array where there is none).

        They may share the memory of `obs`, which the simulator must not write again.
        """
        if self.pair:
            return [self.policy.read(obs[self.pair[0]], rows), self.critic.read(obs[self.pair[1]], rows)]
        return [self.policy.read(obs, rows)] * 2


class View:
    """What one network sees of nested dictionaries, given as {path: space}; the path of a plain observation is ()."""

    def __init__(self, leaves: dict[tuple[str, ...], Space], env_id: str):
        self.leaves = leaves
        boxes = {"/".join(path): flat_box(part, env_id) for path, part in leaves.items()}
        self.has_image = any(is_image(box) for box in boxes.values())
        if not boxes:
            raise InputError(f"{env_id} has observations without any number in them")
        if () in leaves:
            self.space = boxes[""]
        elif self.has_image:
            self.space = spaces.Dict(list(boxes.items()))
        else:
            self.space = spaces.Box(-np.inf, np.inf, (sum(box.shape[0] for box in boxes.values()),), np.float32)

    def read(self, obs: Any, rows: int) -> Array:
        arrays = {"/".join(path): flatten(reduce(getitem, path, obs), x, rows) for path, x in self.leaves.items()}
        if () in self.leaves:
            return arrays[""]
        return arrays if self.has_image else np.concatenate(list(arrays.values()), 1)


def replaced(arrays: list[Array], ids: np.ndarray, rows: list[Array]) -> list[Array]:
    """Copies of what read() returned (and a mask), with other rows at ids; they lie in memory as the originals do."""

    def put(array: Array, new: Array) -> Array:
        if isinstance(array, dict):
            return {key: put(x, new[key]) for key, x in array.items()}
        array = array.copy(order="K")
        array[ids] = new
        return array

    result = [put(array, row) for array, row in zip(arrays, rows, strict=True)]
    return result[:1] * 2 + result[2:] if arrays[1] is arrays[0] else result


def to_tensors(arrays: list[Array], device: torch.device) -> tuple[Observation, Observation, Tensor | None]:
    """What read() returned as obs, critic obs (the same object where it is the same array) and, if any, the mask."""
    obs = host_to_device(arrays[0], device)
    critic_obs = obs if arrays[1] is arrays[0] else host_to_device(arrays[1], device)
    return obs, critic_obs, host_to_device(arrays[2], device) if len(arrays) > 2 else None


def leaves_of(space: Space | dict, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Space]]:
    """Paths and spaces of all that is no Dict, the keys of each Dict sorted."""
    if not isinstance(space, (dict, spaces.Dict)):
        return [(path, space)]
    return [leaf for key, part in sorted(space.items()) for leaf in leaves_of(part, (*path, key))]


def is_text(space: Space) -> bool:
    return isinstance(space, spaces.Text) or "MissionSpace" in [cls.__name__ for cls in type(space).__mro__]


def is_image(space: Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)


def flat_box(space: Space, env_id: str) -> spaces.Box:
    """A float32 vector, or a uint8 image [C, H, W]. Raises InputError for spaces that become neither."""
    if isinstance(space, spaces.Discrete):
        return spaces.Box(0, 1, (int(space.n),), np.float32)
    if not isinstance(space, (spaces.Box, spaces.MultiBinary)):
        kind = type(space).__name__
        raise InputError(f"{env_id} has {kind} observations; supported are Box, Discrete, MultiBinary and Dict")
    if is_image(space):
        low, high = (channels_first(bound[None])[0] for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=np.uint8)
    return spaces.Box(-np.inf, np.inf, (int(np.prod(space.shape)),), np.float32)


def flatten(obs: Any, space: Space, rows: int) -> np.ndarray:
    """One row an env, as flat_box says."""
    if isinstance(space, spaces.Discrete):
        one_hot = np.zeros((rows, int(space.n)), np.float32)
        one_hot[np.arange(rows), np.asarray(obs).reshape(rows) - int(space.start)] = 1
        return one_hot
    if is_image(space):
        return channels_first(np.asarray(obs).reshape(rows, *space.shape))
    return np.asarray(obs, np.float32).reshape(rows, -1)


def channels_first(images: np.ndarray) -> np.ndarray:
    """A view [N, C, H, W] of [N, H, W], [N, H, W, C] or [N, C, H, W]: of the outer two, the smaller one is C."""
    if images.ndim == 3:
        return images[:, None]
    return images.transpose(0, 3, 1, 2) if images.shape[3] < images.shape[1] else images
