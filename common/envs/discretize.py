"""Continuous actions as discrete ones: each dimension of a Box gets the same number of evenly spaced values."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.base import Step, VecEnv
from common.errors import InputError


class DiscretizedVecEnv:
    """envs with MultiDiscrete actions: bin i of a dimension is low + (high - low) i / (bins - 1).

    Everything else is that of envs. Raises InputError for fewer than 2 bins, unbounded dimensions and no Box.
    """

    def __init__(self, envs: VecEnv, bins: int):
        space = envs.action_space
        if bins < 2:
            raise InputError(f"--action-bins {bins}: must be at least 2, or 0 to leave the actions as they are")
        if not isinstance(space, spaces.Box):
            raise InputError(f"--action-bins {bins}: the actions of {envs.env_id} are discrete already")
        if unbounded := np.flatnonzero(~np.isfinite(space.low) | ~np.isfinite(space.high)).tolist():
            raise InputError(f"--action-bins {bins}: {envs.env_id} has no bounds in action dimensions {unbounded}")
        self.envs, self.action_space = envs, spaces.MultiDiscrete([bins] * len(space.low))
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        values = low + (high - low) * np.arange(bins)[:, None] / (bins - 1)
        self.values = torch.from_numpy(values.astype(np.float32)).to(envs.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["envs"], name)

    def step(self, actions: Tensor) -> Step:
        """actions: [N, A] int64 bins."""
        return self.envs.step(self.values.gather(0, actions))
