"""SMACv2: battles in StarCraft II between drawn teams at drawn places. https://github.com/oxwhirl/smacv2"""

from typing import Any

import torch
from smacv2.env import StarCraftCapabilityEnvWrapper

from common.envs.starcraft import StarcraftVecEnv

# Units of each map, their chances, and those of which alone a team cannot consist: its own examples' configurations.
TEAMS = {
    "10gen_protoss": (["stalker", "zealot", "colossus"], [0.45, 0.45, 0.1], []),
    "10gen_terran": (["marine", "marauder", "medivac"], [0.45, 0.45, 0.1], ["medivac"]),
    "10gen_zerg": (["zergling", "baneling", "hydralisk"], [0.45, 0.1, 0.45], ["baneling"]),
}
SETTINGS = {"conic_fov": False, "obs_own_pos": True, "use_unit_ranges": True, "min_attack_range": 2}


def task_ids() -> list[str]:
    return list(TEAMS)


class Smacv2VecEnv(StarcraftVecEnv):
    """num_envs copies of a map; options n_units and n_enemies, 5 of each.

    SMACv2 draws teams and places from generators that no seed reaches: runs differ.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id = f"smacv2/{name}"
        super().__init__(name, num_envs, device, seed, env_kwargs)

    def make_battle(self, name: str, options: dict[str, Any]) -> StarCraftCapabilityEnvWrapper:
        units, weights, never_alone = TEAMS[name]
        options = {"n_units": 5, "n_enemies": 5} | SETTINGS | options
        team = {"dist_type": "weighted_teams", "unit_types": units, "weights": weights, "observe": True,
                "exception_unit_types": never_alone}  # fmt: skip
        places = {"dist_type": "surrounded_and_reflect", "p": 0.5, "map_x": 32, "map_y": 32}
        config = {"n_units": options.pop("n_units"), "n_enemies": options.pop("n_enemies"), "team_gen": team,
                  "start_positions": places}  # fmt: skip
        return StarCraftCapabilityEnvWrapper(capability_config=config, map_name=name, **options)
