"""envpool's games of several players: TicTacToe, ConnectFour, Go and more of pgx, and multi-agent highway tasks.

With several players envpool returns envs and players in the order in which they finish, and it cannot reset single
envs: after the end of an episode one more step, which ignores the action, returns the first observation of the next. In
that row no agent lives.
"""

from typing import Any

import envpool
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.actions import ActionWriter
from common.envs.base import host_to_device
from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv
from common.errors import InputError


class EnvpoolMultiplayerVecEnv(MultiAgentVecEnv):
    """num_envs copies of a game. Where players take turns, agent 0 is who moves first, and the game is zero-sum.

    Observations are flattened, [N, G, H*W*C], each from its agent's own view. Where players take turns there is one
    entry more, 1 for the agent whose turn it is: the same board is worth less to who has to wait.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device = f"envpool/{name}", num_envs, device
        options = {"num_envs": num_envs, "seed": seed, "num_threads": 1} | env_kwargs
        if "max_episode_steps" in options:  # envpool would only call later ends of games truncations
            raise InputError(f"{self.env_id}: envpool has no max_episode_steps for several players; leave it out")
        try:
            self.envs = envpool.make(name, env_type="gymnasium", **options)
        except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ImportError) as error:
            raise InputError(f"{self.env_id}, options {env_kwargs}: {str(error).splitlines()[0]}") from error
        spec = self.envs.spec
        self.num_agents, fields = spec.config.max_num_players, spec.state_array_spec
        if self.num_agents == 1:
            raise InputError(f"{self.env_id} has one agent: use ppo_continuous.py or ppo_discrete.py")
        self.takes_turns = self.zero_sum = "info:current_player" in fields
        self.teams = tuple(range(self.num_agents))
        shape = spec.gymnasium_observation_space.shape
        self.unflattened_shape = shape if len(shape) > 1 else None
        self.observation_space = spaces.Box(-np.inf, np.inf, (int(np.prod(shape)) + self.takes_turns,), np.float32)
        mask = fields.get("info:legal_action_mask")
        self.writer = ActionWriter(
            spec.gymnasium_action_space, self.env_id, None if mask is None else tuple(mask.shape)
        )
        self.action_space = self.writer.space
        self.first = np.zeros(num_envs, np.int64)  # which player moved first
        limit = getattr(spec.config, "max_episode_steps", 0)
        self.max_episode_steps = limit if 0 < limit < 2**31 - 1 else None

    def _sorted(
        self, raw_obs: np.ndarray, info: dict[str, Any]
    ) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
        """Observations [N, G, O] by env and agent, what info tells of each env, and the row of each agent [N, G]."""
        N, G, envs = self.num_envs, self.num_agents, np.argsort(info["env_id"])
        own = {name: x[envs] for name, x in info.items() if isinstance(x, np.ndarray) and len(x) == N}
        if self.takes_turns:
            begins = own["elapsed_step"] == 0
            self.first[begins] = own["current_player"][begins]
        players = info["players"]
        rows = np.argsort(players["env_id"], kind="stable").reshape(N, G)  # one env's players are in order
        if self.takes_turns:
            rows = np.take_along_axis(rows, (np.arange(G) + self.first[:, None]) % G, 1)
        obs = raw_obs[rows].reshape(N, G, -1).astype(np.float32)
        if self.takes_turns:
            own["acting"] = np.arange(G) == ((own["current_player"] - self.first) % G)[:, None]
            obs = np.concatenate([obs, own["acting"][..., None]], -1, dtype=np.float32)
        return obs, own, rows

    def _set_turn(self, own: dict[str, np.ndarray], dones: np.ndarray) -> None:
        """What the envs allow, and whom, where a new row is shown."""
        N, G = self.num_envs, self.num_agents
        self.alive = host_to_device(np.repeat(~dones[:, None], G, 1), self.device)
        if self.takes_turns:
            self.acting = host_to_device(own["acting"], self.device)
        if "legal_action_mask" in own:
            allowed = self.writer.allowed(own["legal_action_mask"], N)
            self.action_mask = host_to_device(np.repeat(allowed[:, None], G, 1), self.device)

    def reset(self) -> tuple[Tensor, None]:
        raw_obs, info = self.envs.reset()
        obs, own, _ = self._sorted(raw_obs, info)
        self._set_turn(own, np.zeros(self.num_envs, bool))
        return host_to_device(obs, self.device), None

    def step(self, actions: Tensor) -> MultiAgentStep:
        before = self.alive
        if self.takes_turns:
            actions = actions[self.acting]  # [N, ..]: the game takes one action an env
        else:
            actions = actions.flatten(0, 1)
        raw_obs, rewards, terminations, truncations, info = self.envs.step(self.writer.write(actions))
        obs, own, rows = self._sorted(raw_obs, info)
        envs = np.argsort(info["env_id"])
        terminations, truncations = terminations[envs], (truncations & ~terminations)[envs]
        self._set_turn(own, terminations | truncations)
        cut = truncations.any()
        obs, rewards, terminations, truncations = (
            host_to_device(x, self.device) for x in (obs, rewards[rows], terminations, truncations)
        )
        final_alive = before | self.alive  # an episode's end is nobody's death
        final_obs = obs if cut else None
        return MultiAgentStep(obs, None, rewards, terminations, truncations, self.alive, final_alive, final_obs, None,
                              self.action_mask, acting=self.acting)  # fmt: skip

    def close(self) -> None:
        self.envs.close()
