"""SMAC: battles in StarCraft II on fixed maps, say smac/3m. https://github.com/oxwhirl/smac"""

from typing import Any

import torch
from smac.env import StarCraft2Env
from smac.env.starcraft2.maps import smac_maps

from common.envs.starcraft import StarcraftVecEnv


def task_ids() -> list[str]:
    return list(smac_maps.get_smac_map_registry())


class SmacVecEnv(StarcraftVecEnv):
    """num_envs copies of a map."""

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id = f"smac/{name}"
        super().__init__(name, num_envs, device, seed, env_kwargs)

    def make_battle(self, name: str, options: dict[str, Any]) -> StarCraft2Env:
        return StarCraft2Env(map_name=name, **options)
