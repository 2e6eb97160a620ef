"""SMAX: battles like those of StarCraft II, in JAX (JaxMARL). https://arxiv.org/abs/2311.10090"""

from typing import Any

import jax
import jaxmarl
from jaxmarl.environments.smax import map_name_to_scenario
from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

from common.envs.jaxmarl import JaxMarlVecEnv


def task_ids() -> list[str]:
    return list(MAP_NAME_TO_SCENARIO)


class SmaxVecEnv(JaxMarlVecEnv):
    """num_envs copies of a scenario, 3m or 2s3z, against JaxMARL's scripted enemy, with its options.

    Units may die, have masks and a common state. An episode is won where no enemy is left.
    """

    prefix = "smax"

    def _make(self, name: str, options: dict[str, Any]) -> Any:
        return jaxmarl.make("HeuristicEnemySMAX", scenario=map_name_to_scenario(name), **options)

    def _limit(self, env: Any) -> int:
        return int(env._env.max_steps)

    def _won(self, state: Any) -> jax.Array:
        return ~state.state.unit_alive[len(self.agents) :].any()
