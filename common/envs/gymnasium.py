"""Gymnasium: anything registered, and `module:Name-v0` of one's own. https://gymnasium.farama.org"""

import os
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from common.envs.base import Step, VecEnv, clamped, flat_space, flatten, host_to_device, split_dict
from common.errors import InputError

ASYNC_SECONDS = 1e-3  # a step that costs more than this is worth a process


class GymnasiumVecEnv(VecEnv):
    """Copies in this process, or one process each where a step is slow (env option vectorization=sync or async to choose).

    Dictionary observations of vectors are concatenated in key order; with exactly the keys "policy" and "critic" the
    second is the critic's privileged observation. Discrete observations become one-hot vectors.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device, self.seed = f"gym/{name}", num_envs, device, seed
        mode = env_kwargs.pop("vectorization", None)
        if mode not in (None, "sync", "async"):
            raise InputError(f"--env-kwargs vectorization={mode}: choose sync or async")
        if ":" in name and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            probe = gymnasium.make(name, **env_kwargs)
            self.max_episode_steps = probe.spec.max_episode_steps
            mode = mode or ("async" if num_envs > 1 and _step_seconds(probe) > ASYNC_SECONDS else "sync")
            probe.close()
            self.envs = gymnasium.make_vec(
                name, num_envs, mode, vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}, **env_kwargs
            )
        except (gymnasium.error.Error, ImportError, TypeError, AttributeError) as error:
            raise InputError(f"{self.env_id} with options {env_kwargs}: {str(error).splitlines()[0]}") from None
        self.action_space, self.raw_space = self.envs.single_action_space, self.envs.single_observation_space
        if isinstance(self.action_space, spaces.Box):
            self.box = self.action_space
            low, high = (np.asarray(bound, np.float32).reshape(-1) for bound in (self.box.low, self.box.high))
            self.action_space = spaces.Box(low, high, dtype=np.float32)
        policy, critic = split_dict(self.raw_space)
        self.observation_space = self.critic_observation_space = flat_space(policy, self.env_id)
        if critic is not None:
            self.critic_observation_space = flat_space(critic, self.env_id)
        self.spaces = (policy, critic)

    def reset(self) -> tuple[Tensor, Tensor]:
        obs, _ = self.envs.reset(seed=self.seed)
        self.seed = None  # only the first reset is seeded: later ones go on in the env's own stream
        return self._read(obs)

    def step(self, actions: Tensor) -> Step:
        array = clamped(actions, self.action_space)
        if isinstance(self.action_space, spaces.Box):
            array = array.reshape(self.num_envs, *self.box.shape).astype(self.box.dtype)
        raw_obs, rewards, terminations, truncations, info = self.envs.step(array)
        obs, critic_obs = self._read(raw_obs)
        final_obs = final_critic_obs = None
        truncations = truncations & ~terminations
        if truncations.any():
            final_obs, final_critic_obs = obs.clone(), critic_obs.clone()
            for i in np.flatnonzero(info["_final_obs"]):
                final_obs[i], final_critic_obs[i] = (x[0] for x in self._read(info["final_obs"][i], single=True))
        rewards, terminations, truncations = (
            host_to_device(np.array(x), self.device) for x in (rewards, terminations, truncations)
        )
        return Step(obs, critic_obs, rewards, terminations, truncations, final_obs, final_critic_obs)

    def _read(self, obs: Any, single: bool = False) -> tuple[Tensor, Tensor]:
        """obs and critic_obs as fresh tensors [N, ..] (N = 1 where `single`); the vector env writes into its own again."""
        policy, critic = self.spaces
        rows = 1 if single else self.num_envs
        if critic is None:
            tensor = host_to_device(flatten(obs, policy, rows), self.device)
            return tensor, tensor
        return tuple(
            host_to_device(flatten(obs[key], space, rows), self.device)
            for key, space in (("policy", policy), ("critic", critic))
        )

    def close(self) -> None:
        self.envs.close()


def _step_seconds(env: gymnasium.Env, steps: int = 20) -> float:
    env.reset(seed=0)
    env.action_space.seed(0)
    start = time.perf_counter()
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return (time.perf_counter() - start) / steps
