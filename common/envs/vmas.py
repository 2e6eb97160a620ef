"""VMAS: teams of simple robots, simulated in torch for all envs at once, on the device that trains.

https://github.com/proroklab/VectorizedMultiAgentSimulator, https://arxiv.org/abs/2207.03530
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import vmas
from gymnasium import Space, spaces
from torch import Tensor
from torch.nn.functional import pad
from vmas.simulator.environment import Environment

from common import checkpoint
from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv, pad_actions
from common.errors import InputError

MAX_EPISODE_STEPS = 100  # scenarios have no limit of their own; this is BenchMARL's


def task_ids() -> list[str]:
    paths = Path(vmas.__file__).parent.glob("scenarios/**/*.py")
    return sorted(path.stem for path in paths if path.stem != "__init__" and path.parent.name != "debug")


class VmasVecEnv(MultiAgentVecEnv):
    """num_envs copies of a scenario; options max_episode_steps, continuous_actions=False and those of the scenario.

    Nothing dies here and there is no state beside the observations. Raises InputError for what VMAS does not take.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device, self.seed = f"vmas/{name}", num_envs, device, seed
        options = {"max_episode_steps": MAX_EPISODE_STEPS} | env_kwargs
        self.max_episode_steps = limit = options.pop("max_episode_steps")
        if type(limit) is not int or limit < 1:
            raise InputError(f"--env-kwargs max_episode_steps={limit}: must be a whole number, at least 1")
        self.random_state = list(Environment.vmas_random_state)
        settings = {"max_steps": limit, "seed": seed, "terminated_truncated": True}
        try:
            with self._own_random(), warnings.catch_warnings():
                warnings.filterwarnings("error", message="Scenario kwargs")  # those that it does not know
                self.env = vmas.make_env(name, num_envs, device, **settings, **options)
        except Exception as error:  # whatever a scenario makes of an option
            reason = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason} (options {env_kwargs})") from error
        sizes = [space.shape for space in self.env.observation_space]
        if not all(sizes) or max(map(len, sizes)) > 1:
            raise InputError(f"{self.env_id} has observations that are no vectors: {self.env.observation_space[0]}")
        self.num_agents, self.obs_size = self.env.n_agents, max(size for (size,) in sizes)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.obs_size,), np.float32)
        agent_spaces = [_gymnasium(space) for space in self.env.action_space]
        self.action_sizes = [space.shape[0] if space.shape else 1 for space in agent_spaces]
        self.action_space, mask = pad_actions(agent_spaces, self.env_id)
        self.alive = torch.ones(num_envs, self.num_agents, dtype=torch.bool, device=device)
        if mask is not None:
            self.action_mask = torch.from_numpy(mask).to(device).expand(num_envs, -1, -1)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """VMAS has one random state for all its environments; in here it is this one's."""
        shared, on_gpu = Environment.vmas_random_state, self.device.type == "cuda"
        others, shared[:] = list(shared), self.random_state[:3]
        if on_gpu:
            outside = torch.cuda.get_rng_state(self.device)
            if len(self.random_state) > 3:
                torch.cuda.set_rng_state(self.random_state[3], self.device)
        try:
            yield
        finally:
            self.random_state, shared[:] = list(shared), others
            if on_gpu:
                self.random_state.append(torch.cuda.get_rng_state(self.device))
                torch.cuda.set_rng_state(outside, self.device)

    def _pack(self, obs: list[Tensor]) -> Tensor:
        return torch.stack([pad(x.float(), (0, self.obs_size - x.shape[1])) for x in obs], 1)

    def reset(self) -> tuple[Tensor, None]:
        with self._own_random():
            self.obs = self._pack(self.env.reset(seed=self.seed))
        self.seed = None  # only the first reset is seeded: later ones go on in the env's own stream
        return self.obs, None

    @torch.no_grad()
    def step(self, actions: Tensor) -> MultiAgentStep:
        if isinstance(self.action_space, spaces.Box):
            low, high = (torch.from_numpy(x).to(self.device) for x in (self.action_space.low, self.action_space.high))
            actions = actions.clamp(low, high)
        columns = actions.view(self.num_envs, self.num_agents, -1).unbind(1)
        columns = [x[:, :size] for x, size in zip(columns, self.action_sizes, strict=True)]
        with self._own_random():
            obs, rewards, terminations, truncations, _ = self.env.step(columns)
            final_obs = self.obs = self._pack(obs)
            truncations = truncations & ~terminations
            dones = terminations | truncations
            if dones.any():
                self.obs = torch.where(dones[:, None, None], self._begin(dones), final_obs)
        rewards = torch.stack(rewards, 1).float()
        ends, living = (terminations, truncations), (self.alive, self.alive)
        return MultiAgentStep(self.obs, None, rewards, *ends, *living, final_obs, None, self.action_mask)

    def _begin(self, dones: Tensor) -> Tensor:
        """New episodes in the envs dones [N]; returns first observations, which count in these envs only.

        VMAS resets one env in the time of all of them, so all are reset and the others get back what they had.
        """
        before = {path: holder[key].clone() for path, (holder, key) in self._tensors().items()}
        first = self._pack(self.env.reset())
        for path, (holder, key) in self._tensors().items():
            if path in before:
                x = holder[key]
                holder[key] = torch.where(dones.view(-1, *[1] * (x.dim() - 1)), x, before[path])
        return first

    def _tensors(self) -> dict[str, tuple[dict | list, Any]]:
        """Where the tensors [N, ..] of the simulation are: containers and keys, by their path in it."""
        found, seen, todo = {}, set(), [("", vars(self.env))]
        while todo:
            path, holder = todo.pop()
            for i, (key, x) in enumerate(holder.items() if isinstance(holder, dict) else enumerate(holder)):
                place = f"{path}/{key if isinstance(key, str) else i}"
                if isinstance(x, Tensor):
                    if x.dim() and len(x) == self.num_envs and not isinstance(holder, tuple):
                        found[place] = holder, key
                elif id(x) not in seen and not isinstance(x, (type, ModuleType)):
                    seen.add(id(x))
                    if isinstance(x, (dict, list, tuple)):
                        todo.append((place, x))
                    elif hasattr(x, "__dict__"):
                        todo.append((place, vars(x)))
        return found

    def state_dict(self) -> dict[str, Any]:
        """All tensors of the simulation, its random state and the current observations."""
        outside, state = checkpoint.rng_state(), self.random_state
        torch.set_rng_state(state[0]), np.random.set_state(state[1]), random.setstate(state[2])
        own = checkpoint.rng_state()
        checkpoint.set_rng_state(outside)
        tensors = {path: holder[key].clone() for path, (holder, key) in self._tensors().items()}
        return {"tensors": tensors, "obs": self.obs, "random": own, "gpu_random": state[3:]}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, None]:
        """The random stream of a GPU goes on only where there is one."""
        self.reset()
        for path, (holder, key) in self._tensors().items():
            if path in state["tensors"]:
                holder[key] = state["tensors"][path].to(self.device)
        outside = checkpoint.rng_state()
        checkpoint.set_rng_state(state["random"])
        self.random_state = [torch.get_rng_state(), np.random.get_state(), random.getstate()]
        checkpoint.set_rng_state(outside)
        if self.device.type == "cuda":
            self.random_state += [x.cpu() for x in state["gpu_random"]]
        self.obs = state["obs"].to(self.device)
        return self.obs, None


def _gymnasium(space: Any) -> Space:
    """VMAS has spaces of Gymnasium's predecessor."""
    kind = type(space).__name__
    if kind == "Box":
        return spaces.Box(space.low, space.high, dtype=np.float32)
    return spaces.Discrete(int(space.n)) if kind == "Discrete" else spaces.MultiDiscrete(space.nvec)
