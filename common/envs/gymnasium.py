"""Gymnasium: anything registered, and `module:Name-v0` of one's own. https://gymnasium.farama.org"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from common.envs.base import (
    ObservationReader,
    Step,
    VecEnv,
    action_box,
    available_cores,
    clamped,
    host_to_device,
    to_tensors,
)
from common.errors import InputError

ASYNC_SECONDS = 1e-3  # a step that costs more than this is worth a process


class GymnasiumVecEnv(VecEnv):
    """Copies in this process, or one process each where a step is slow (env option vectorization=sync or async).

    An env whose reward is a vector has it declared as `reward_space`, as in MO-Gymnasium: one head for each entry.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device, self.seed = f"gym/{name}", num_envs, device, seed
        options = dict(env_kwargs)
        mode = options.pop("vectorization", None)
        if mode not in (None, "sync", "async"):
            raise InputError(f"--env-kwargs vectorization={mode}: choose sync or async")
        if ":" in name and os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            probe = gymnasium.make(name, disable_env_checker=True, **options)
        except Exception as error:  # from any code of the user's: an unknown option, a missing package, a typing error
            reason = (str(error) or repr(error)).splitlines()[0]
            missing = isinstance(error, ImportError) and ":" not in name
            hint = "; pip install -r requirements.txt" if missing else f" (options {env_kwargs})"
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason}{hint}") from error
        self.max_episode_steps = probe.spec.max_episode_steps
        self.reader = ObservationReader(probe.observation_space, self.env_id)
        self.observation_space = self.reader.observation_space
        self.critic_observation_space = self.reader.critic_observation_space
        self.raw_action_space, self.action_space = probe.action_space, action_box(probe.action_space, self.env_id)
        reward_space = getattr(probe.unwrapped, "reward_space", None)
        self.value_size = 1 if reward_space is None else int(np.prod(reward_space.shape))
        parallel = num_envs > 1 and available_cores() > 1
        mode = mode or ("async" if parallel and _step_seconds(probe) > ASYNC_SECONDS else "sync")
        probe.close()
        # With copy every array that it returns is new, so tensors can share its memory.
        settings = {"autoreset_mode": AutoresetMode.SAME_STEP, "copy": True}
        with _deaf_to_interrupts():
            self.envs = gymnasium.make_vec(name, num_envs, mode, settings, disable_env_checker=True, **options)
        if mode == "sync" and self.value_size > 1:  # Gymnasium's own buffer has room for one reward an env only
            self.envs._rewards = np.zeros((num_envs, self.value_size))

    def reset(self) -> tuple[Tensor, Tensor]:
        raw_obs, _ = self.envs.reset(seed=self.seed)
        self.seed = None  # only the first reset is seeded: later ones go on in the env's own stream
        obs, critic_obs, self.action_mask = to_tensors(self.reader.read(raw_obs, self.num_envs), self.device)
        return obs, critic_obs

    def step(self, actions: Tensor) -> Step:
        array = clamped(actions, self.action_space)
        if isinstance(self.action_space, spaces.Box):
            array = array.reshape(self.num_envs, *self.raw_action_space.shape).astype(self.raw_action_space.dtype)
        raw_obs, rewards, terminations, truncations, info = self.envs.step(array)
        arrays, final_obs, final_critic_obs = self.reader.read(raw_obs, self.num_envs), None, None
        truncations = truncations & ~terminations
        if truncations.any():
            ids = np.flatnonzero(info["_final_obs"])
            lasts = zip(*(self.reader.read(info["final_obs"][i], 1) for i in ids), strict=True)
            finals = self.reader.replaced(arrays, ids, [np.concatenate(rows) for rows in lasts])
            final_obs, final_critic_obs, _ = to_tensors(finals, self.device)
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        results = (host_to_device(x, self.device) for x in (rewards, terminations, truncations))
        return Step(obs, critic_obs, *results, final_obs, final_critic_obs, self.action_mask)

    def close(self) -> None:
        self.envs.close()


@contextmanager
def _deaf_to_interrupts():
    """Worker processes made in here ignore Ctrl-C, which the training handles: it needs them to finish an iteration."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _step_seconds(env: gymnasium.Env, steps: int = 20) -> float:
    env.reset(seed=0)
    env.action_space.seed(0)
    start = time.perf_counter()
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            env.reset()
    return (time.perf_counter() - start) / steps
