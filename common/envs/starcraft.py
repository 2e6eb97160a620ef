"""StarCraft II micromanagement: what SMAC and SMACv2, which have one interface, share. Needs the game itself.

https://github.com/oxwhirl/smac, https://github.com/oxwhirl/smacv2. Every copy is a process of the game, and they are
stepped one after the other.
"""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.base import host_to_device
from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv
from common.errors import InputError

NO_OP = 0  # the action that all the dead have, and nobody else


class StarcraftVecEnv(MultiAgentVecEnv):
    """num_envs copies of what make_battle returns; the options are those of StarCraft2Env.

    The time limit is a truncation (continuing_episode=False: a defeat), and so is a lost connection to the game. Each
    agent gets the reward of the team.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.num_envs, self.device = num_envs, device
        options = {"continuing_episode": True} | env_kwargs
        try:
            self.battles = [self.make_battle(name, options | {"seed": seed + i}) for i in range(num_envs)]
            for battle in self.battles:
                battle.reset()  # starts the game
        except Exception as error:  # an option nobody knows, no game, another version of it
            reason = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason} (options {env_kwargs}; StarCraft II and "
                             "SMAC's maps must be installed where SC2PATH says)") from error  # fmt: skip
        info = self.battles[0].get_env_info()
        self.num_agents, self.max_episode_steps = info["n_agents"], info["episode_limit"]
        self.observation_space = spaces.Box(-np.inf, np.inf, (info["obs_shape"],), np.float32)
        self.state_space = spaces.Box(-np.inf, np.inf, (info["state_shape"],), np.float32)
        self.action_space = spaces.Discrete(info["n_actions"])

    def make_battle(self, name: str, options: dict[str, Any]) -> Any:
        """A StarCraft2Env or what has its interface."""
        raise NotImplementedError

    def _look(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Obs, state, who lives and the mask, as new tensors."""
        agents = range(self.num_agents)
        obs = np.array([battle.get_obs() for battle in self.battles], np.float32)
        state = np.array([battle.get_state() for battle in self.battles], np.float32)
        masks = [[battle.get_avail_agent_actions(agent) for agent in agents] for battle in self.battles]
        mask = np.array(masks, bool)
        return tuple(host_to_device(x, self.device) for x in (obs, state, ~mask[..., NO_OP], mask))

    def reset(self) -> tuple[Tensor, Tensor]:
        for battle in self.battles:
            battle.reset()
        obs, state, self.alive, self.action_mask = self._look()
        return obs, state

    def step(self, actions: Tensor) -> MultiAgentStep:
        N = self.num_envs
        rewards, (ends, cut, won) = np.zeros((N, self.num_agents), np.float32), np.zeros((3, N), bool)
        sent = torch.where(self.alive, actions, NO_OP).tolist()
        for i, battle in enumerate(self.battles):
            rewards[i], ends[i], info = battle.step(sent[i])
            # A game that had to be started anew tells nothing.
            cut[i], won[i] = info.get("episode_limit", not info), info.get("battle_won", False)
        final_obs, final_state, final_alive, _ = seen = self._look()
        for i in np.flatnonzero(ends):
            self.battles[i].reset()
        obs, state, self.alive, self.action_mask = self._look() if ends.any() else seen
        arrays = (rewards, ends & ~cut, ends & cut, ends & won)
        rewards, terminations, truncations, won = (host_to_device(x, self.device) for x in arrays)
        return MultiAgentStep(obs, state, rewards, terminations, truncations, self.alive, final_alive, final_obs,
                              final_state, self.action_mask, won)  # fmt: skip

    def close(self) -> None:
        for battle in self.battles:
            battle.close()
