"""PettingZoo: environments of its parallel API, and of its AEC one, which it converts itself.

https://pettingzoo.farama.org. Copies run one after the other in this process.
"""

import importlib
import importlib.util
import pkgutil
from typing import Any

import numpy as np
import pettingzoo
import torch
from gymnasium import spaces
from pettingzoo.utils.conversions import aec_to_parallel, turn_based_aec_to_parallel
from torch import Tensor

from common.envs.actions import ActionWriter
from common.envs.base import host_to_device
from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv, pad_actions
from common.envs.observations import flat_box, flatten, is_image
from common.errors import InputError

PACKAGES = ("mpe2", "pettingzoo.butterfly", "pettingzoo.classic", "pettingzoo.sisl")
# Modules that report their time limit as a termination, and that limit: they get one step more and are cut here.
LIMIT_IS_TERMINATION = {"pettingzoo.sisl.multiwalker": 500}


def task_ids() -> list[str]:
    """Modules of PettingZoo's own environments, say mpe2.simple_spread_v3."""
    found = filter(None, (importlib.util.find_spec(name) for name in PACKAGES))
    names = [f"{spec.name}.{m.name}" for spec in found for m in pkgutil.iter_modules(spec.submodule_search_locations)]
    return [name for name in names if name[-1].isdigit()]


class PettingZooVecEnv(MultiAgentVecEnv):
    """num_envs copies of what module:function(**env_kwargs) makes, or a module's parallel_env, or else env.

    An agent that leaves before its env's episode ends counts as dead, whether it was terminated or truncated. Masks are
    found as "action_mask" in a Dict observation beside "observation", or in info. The option max_episode_steps cuts
    episodes where the env has no time limit, or calls it a termination. use_state=False leaves the env's state out, as
    one that is an image always is. Games in turns are played like others, but there is no self-play, since PettingZoo
    does not tell which of them are zero-sum.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device, self.seed = f"pz/{name}", num_envs, device, seed
        options = dict(env_kwargs)
        self.max_episode_steps = _take_limit(name, options)
        if type(use_state := options.pop("use_state", True)) is not bool:
            raise InputError(f"--env-kwargs use_state={use_state}: must be True or False")
        try:
            self.envs = [_make(name, options) for _ in range(num_envs)]
            _, infos = self.envs[0].reset(seed=seed)
        except Exception as error:  # from any code of a user's: an unknown option, a missing package
            reason = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason} (options {env_kwargs})") from error
        env = self.envs[0]
        self.agents = list(env.possible_agents)
        self.takes_turns = hasattr(env, "aec_env") and not _is_parallelizable(env)
        self.num_agents = len(self.agents)
        self._set_observations([env.observation_space(agent) for agent in self.agents])
        self.writers = [ActionWriter(env.action_space(agent), self.env_id) for agent in self.agents]
        self.action_space, self.own_actions = pad_actions([writer.space for writer in self.writers], self.env_id)
        sizes = getattr(self.action_space, "nvec", getattr(self.action_space, "n", self.action_space.shape))
        self.mask_size = int(np.sum(sizes))
        self.masked = self.own_actions is not None or self.dict_obs or any("action_mask" in x for x in infos.values())
        state_space = getattr(env, "state_space", None) if use_state else None
        self.state_space = None if state_space is None or is_image(state_space) else flat_box(state_space, self.env_id)

    def _set_observations(self, agent_spaces: list[Any]) -> None:
        self.dict_obs = all(isinstance(x, spaces.Dict) and "observation" in x.spaces for x in agent_spaces)
        self.obs_spaces = [x["observation"] if self.dict_obs else x for x in agent_spaces]
        boxes = [flat_box(x, self.env_id) for x in self.obs_spaces]
        if any(box.dtype == np.uint8 for box in boxes):
            raise InputError(f"{self.env_id} has images as observations; several agents need vectors")
        self.observation_space = max(boxes, key=lambda box: box.shape[0])

    def _buffers(self) -> dict[str, np.ndarray]:
        """New arrays for what all envs show; the agents that nobody writes are dead."""
        N, G, size = self.num_envs, self.num_agents, self.state_space.shape[0] if self.state_space else 0
        obs = np.zeros((N, G, *self.observation_space.shape), np.float32)
        own = np.ones((G, self.mask_size), bool) if self.own_actions is None else self.own_actions
        return {"obs": obs, "state": np.zeros((N, size), np.float32), "alive": np.zeros((N, G), bool),
                "mask": np.broadcast_to(own, (N, *own.shape)).copy(), "acting": np.zeros((N, G), bool)}  # fmt: skip

    def _write(self, buffers: dict[str, np.ndarray], i: int, obs: dict, infos: dict, alive: set[str]) -> None:
        """Fill the rows of env i with what it shows of its agents `alive`."""
        if self.state_space is not None and alive:
            buffers["state"][i] = self._state(i)
        for g, agent in enumerate(self.agents):
            if agent not in alive:
                continue
            seen = obs[agent]["observation"] if self.dict_obs else obs[agent]
            row = flatten(seen, self.obs_spaces[g], 1)[0]
            buffers["obs"][i, g, : len(row)] = row
            buffers["alive"][i, g] = True
            buffers["acting"][i, g] = self.takes_turns and agent == self.envs[i].aec_env.agent_selection
            mask = (obs if self.dict_obs else infos).get(agent, {}).get("action_mask")
            if mask is not None:
                own = np.arange(self.mask_size) if self.own_actions is None else np.flatnonzero(self.own_actions[g])
                if np.size(mask) != len(own):
                    raise InputError(f"{self.env_id}: the action mask of {agent} has {np.size(mask)} entries; expected "
                                     f"is one for each of its {len(own)} values")  # fmt: skip
                buffers["mask"][i, g, own] = np.ravel(mask).astype(bool)

    def _state(self, i: int) -> np.ndarray:
        try:
            return np.ravel(self.envs[i].state())
        except Exception as error:  # in some envs it needs all agents
            raise InputError(f"{self.env_id}: its state() fails, {type(error).__name__}: {error}; leave the state out "
                             "by --env-kwargs use_state=False") from error  # fmt: skip

    def _begin(self, buffers: dict[str, np.ndarray], i: int, seed: int | None = None) -> None:
        """A new episode in env i."""
        empty, self.elapsed[i] = self._buffers(), 0
        for name, array in buffers.items():
            array[i] = empty[name][i]
        obs, infos = self.envs[i].reset(seed=seed)
        self._write(buffers, i, obs, infos, set(self.envs[i].agents))

    def _tensors(self, buffers: dict[str, np.ndarray]) -> list[Tensor | None]:
        """Obs, state, alive, the mask and who acts."""
        told = (True, self.state_space is not None, True, self.masked, self.takes_turns)
        return [host_to_device(x, self.device) if y else None for x, y in zip(buffers.values(), told, strict=True)]

    def reset(self) -> tuple[Tensor, Tensor | None]:
        buffers, self.elapsed = self._buffers(), np.zeros(self.num_envs, np.int64)
        for i in range(self.num_envs):
            self._begin(buffers, i, None if self.seed is None else self.seed + i)
        self.seed = None  # only the first reset is seeded: later ones go on in each env's own stream
        obs, state, self.alive, self.action_mask, self.acting = self._tensors(buffers)
        return obs, state

    def step(self, actions: Tensor) -> MultiAgentStep:
        N, buffers = self.num_envs, self._buffers()
        rewards = np.zeros((N, self.num_agents), np.float32)
        terminations, truncations = np.zeros(N, bool), np.zeros(N, bool)
        sizes = [writer.space.shape[0] if writer.space.shape else None for writer in self.writers]
        columns = [actions[:, g, :size] if size else actions[:, g] for g, size in enumerate(sizes)]
        arrays = [writer.write(column) for writer, column in zip(self.writers, columns, strict=True)]
        for i, env in enumerate(self.envs):
            chosen = {agent: arrays[g][i] for g, agent in enumerate(self.agents) if agent in env.agents}
            obs, reward, terminated, truncated, infos = env.step(chosen)
            rewards[i] = [reward.get(agent, 0.0) for agent in self.agents]
            self.elapsed[i] += 1
            living = {agent for agent in env.agents if not (terminated.get(agent) or truncated.get(agent))}
            if not living or self.elapsed[i] == self.max_episode_steps:
                living = {agent for agent in chosen if not terminated[agent]}  # their episode is cut
                terminations[i], truncations[i] = not living, bool(living)
            self._write(buffers, i, obs, infos, living)
        final_obs, final_state, final_alive, *_ = self._tensors(buffers)
        dones = terminations | truncations
        if dones.any():
            buffers = {name: array.copy() for name, array in buffers.items()}
        for i in np.flatnonzero(dones):
            self._begin(buffers, i)
        obs, state, self.alive, self.action_mask, self.acting = self._tensors(buffers)
        results = (host_to_device(x, self.device) for x in (rewards, terminations, truncations))
        return MultiAgentStep(obs, state, *results, self.alive, final_alive, final_obs, final_state, self.action_mask,
                              acting=self.acting)  # fmt: skip

    def close(self) -> None:
        for env in self.envs:
            env.close()


def _make(name: str, options: dict[str, Any]) -> pettingzoo.ParallelEnv:
    name, _, function = name.partition(":")
    module = importlib.import_module(name)
    made = getattr(module, function or ("parallel_env" if hasattr(module, "parallel_env") else "env"))(**options)
    if not isinstance(made, pettingzoo.AECEnv):
        return made
    return aec_to_parallel(made) if _is_parallelizable(made) else turn_based_aec_to_parallel(made)


def _is_parallelizable(env: Any) -> bool:
    """Whether all agents of an AEC env act once before it changes."""
    return env.metadata.get("is_parallelizable", False)


def _take_limit(name: str, options: dict[str, Any]) -> int | None:
    """The time limit that is kept here, taken out of the options, or None. Raises InputError if it is none."""
    own = next((limit for module, limit in LIMIT_IS_TERMINATION.items() if name.startswith(module)), None)
    key = "max_cycles" if own and "max_episode_steps" not in options else "max_episode_steps"
    limit = options.pop(key, own)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InputError(f"--env-kwargs {key}={limit}: must be a whole number, at least 1")
    if own:
        options["max_cycles"] = limit + 1
    return limit
