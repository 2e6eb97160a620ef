"""From a policy's actions to the simulator's: bounds, first values, shapes, types, and masks over all combinations."""

from typing import Any

import numpy as np
from gymnasium import Space, spaces
from torch import Tensor

from common.errors import InputError

MAX_CHOICES = 2**20  # values of one action; more would be the range of an integer type, not a choice


class ActionWriter:
    """What to do with actions, decided once, from the simulator's space and the shape of its mask.

    space is what the policy sees: a flat float32 Box, or Discrete or MultiDiscrete, which count from 0. A mask has one
    entry for each value (the sum of them over the actions). Where it has one for each combination of several actions,
    they become one Discrete action, numbered in C order; where the two counts agree (2 x 2), it is one for each value.
    """

    def __init__(self, raw: Space, env_id: str, mask_shape: tuple[int, ...] | None = None):
        self.raw, self.joint = raw, False
        if isinstance(raw, spaces.Box) and np.issubdtype(raw.dtype, np.floating):
            low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (raw.low, raw.high))
            self.space = spaces.Box(low, high, dtype=np.float32)
            if mask_shape is not None:
                raise InputError(f"{env_id} has an action mask of shape {mask_shape}, but its actions are continuous")
            return
        self.nvec, self.start = choices(raw, env_id)
        if mask_shape is not None and np.prod(mask_shape) != self.nvec.sum():
            self.joint = mask_shape in (tuple(self.nvec), (self.nvec.prod(),))
            if not self.joint:
                expected = f"{self.nvec.sum()} entries, one for each value"
                if len(self.nvec) > 1:
                    expected += f", or shape {tuple(self.nvec.tolist())}, one for each combination"
                raise InputError(f"{env_id} has an action mask of shape {mask_shape}; expected are {expected}")
        single = self.joint or isinstance(raw, spaces.Discrete)
        self.space = spaces.Discrete(int(self.nvec.prod())) if single else spaces.MultiDiscrete(self.nvec)

    def write(self, actions: Tensor) -> np.ndarray:
        """A new array on the host, inside the bounds, of the simulator's shape and type."""
        array = actions.numpy(force=True)
        if isinstance(self.space, spaces.Box):
            array = np.clip(array, self.space.low, self.space.high)
        else:
            if self.joint:
                array = np.stack(np.unravel_index(array, self.nvec), -1)
            array = array.reshape(len(array), -1) + self.start
        return array.reshape(len(array), *self.raw.shape).astype(self.raw.dtype, copy=False)

    def allowed(self, mask: Any, rows: int) -> np.ndarray:
        """The mask [rows, K] bool of an array, or of a sequence with one mask an env; rows may allow nothing."""
        if not isinstance(mask, np.ndarray) or mask.dtype == object:
            mask = np.stack(list(mask))
        return np.asarray(mask, bool).reshape(rows, -1)


def choices(space: Space, env_id: str) -> tuple[np.ndarray, np.ndarray]:
    """How many values each action has and which is its first [D] int64. Raises InputError if they cannot be counted."""
    if isinstance(space, spaces.Discrete):
        counts, start = space.n, space.start
    elif isinstance(space, spaces.MultiDiscrete):
        counts, start = space.nvec, space.start
    elif isinstance(space, spaces.MultiBinary):
        counts, start = np.full(space.shape, 2), np.zeros(space.shape)
    elif isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer):
        start = space.low.astype(np.int64)
        counts = space.high.astype(np.int64) - start + 1
    else:
        kind = type(space).__name__
        raise InputError(f"{env_id} has {kind} actions; supported are Box, Discrete, MultiDiscrete and MultiBinary")
    counts, start = (np.asarray(x, np.int64).reshape(-1) for x in (counts, start))
    if not ((counts > 0) & (counts <= MAX_CHOICES)).all():
        raise InputError(f"{env_id} has actions with more than {MAX_CHOICES} values in one dimension")
    return counts, start
