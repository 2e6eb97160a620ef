"""Observations with entries hidden: tasks that need a memory, or an estimate of what is not shown."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.base import Step, VecEnv
from common.errors import InputError


class MaskedObsVecEnv:
    """envs whose vector observations [N, O] have 0 in the entries `indices`; the shape stays.

    A privileged state of the critic stays whole. Everything else is that of envs. Raises InputError for images,
    dictionaries, an entry that does not exist and one that is named twice.
    """

    def __init__(self, envs: VecEnv, indices: Sequence[int]):
        flag, space = f"--mask-obs {' '.join(map(str, indices))}", envs.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise InputError(f"{flag}: the observations of {envs.env_id} are no vectors, but {space}")
        size = space.shape[0]
        if unknown := [i for i in indices if not 0 <= i < size]:
            raise InputError(f"{flag}: {unknown} not among the {size} entries of {envs.env_id}, 0 to {size - 1}")
        if len(set(indices)) < len(indices):
            raise InputError(f"{flag}: names an entry twice; each may be named once")
        hidden = np.isin(np.arange(size), indices)
        low, high = space.low.copy(), space.high.copy()
        low[hidden] = high[hidden] = 0
        self.observation_space = self.critic_observation_space = spaces.Box(low, high, dtype=space.dtype.type)
        self.privileged = envs.critic_observation_space is not space
        if self.privileged:
            self.critic_observation_space = envs.critic_observation_space
        self.envs, self.hidden = envs, torch.from_numpy(hidden).to(envs.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["envs"], name)

    def _mask(self, obs: Tensor | None, critic_obs: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Masked copies; one object again where both were."""
        if obs is not None:
            obs = obs.masked_fill(self.hidden, 0)
        return obs, critic_obs if self.privileged else obs

    def reset(self) -> tuple[Tensor, Tensor]:
        return self._mask(*self.envs.reset())

    def step(self, actions: Tensor) -> Step:
        step = self.envs.step(actions)
        obs, critic_obs = self._mask(step.obs, step.critic_obs)
        final_obs, final_critic_obs = self._mask(step.final_obs, step.final_critic_obs)
        return step._replace(obs=obs, critic_obs=critic_obs, final_obs=final_obs, final_critic_obs=final_critic_obs)

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self._mask(*self.envs.load_state_dict(state))
