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
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor

from common.envs.actions import ActionWriter
from common.envs.base import Observation, Step, VecEnv, available_cores, host_to_device
from common.envs.observations import Array, ObservationReader, replaced, to_tensors
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
            info = probe.reset(seed=seed)[1]
        except Exception as error:  # from any code of the user's: an unknown option, a missing package, a typing error
            reason = (str(error) or repr(error)).splitlines()[0]
            missing = isinstance(error, ImportError) and ":" not in name
            hint = "; pip install -r requirements.txt" if missing else f" (options {env_kwargs})"
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason}{hint}") from error
        self.max_episode_steps = probe.spec.max_episode_steps
        self.reader = ObservationReader(probe.observation_space, self.env_id)
        self.observation_space = self.reader.observation_space
        self.critic_observation_space = self.reader.critic_observation_space
        self.unflattened_shape = self.reader.unflattened_shape
        self.mask_source, mask_shape = _mask_source(probe, info, self.reader)
        self.writer = ActionWriter(probe.action_space, self.env_id, mask_shape)
        self.action_space = self.writer.space
        reward_space = getattr(probe.unwrapped, "reward_space", None)
        self.value_size = 1 if reward_space is None else int(np.prod(reward_space.shape))
        # Masked envs are not timed: a random action may be one that they refuse.
        parallel = num_envs > 1 and available_cores() > 1 and self.mask_source is None
        mode = mode or ("async" if parallel and _step_seconds(probe) > ASYNC_SECONDS else "sync")
        probe.close()
        # With copy every array that it returns is new, so tensors can share its memory.
        settings = {"autoreset_mode": AutoresetMode.SAME_STEP, "copy": True}
        if mode == "async" and self.reader.texts:  # whose spaces may be unknown to Gymnasium
            settings["shared_memory"] = False
        with _deaf_to_interrupts():
            self.envs = gymnasium.make_vec(name, num_envs, mode, settings, disable_env_checker=True, **options)
        if mode == "sync" and self.value_size > 1:  # Gymnasium's own buffer has room for one reward an env only
            self.envs._rewards = np.zeros((num_envs, self.value_size))

    def reset(self) -> tuple[Observation, Observation]:
        arrays = self._read(*self.envs.reset(seed=self.seed))
        self.seed = None  # only the first reset is seeded: later ones go on in the env's own stream
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        return obs, critic_obs

    def _read(self, raw_obs: Any, info: dict[str, Any]) -> list[Array]:
        arrays = self.reader.read(raw_obs, self.num_envs)
        if self.mask_source is None:
            return arrays
        source = info if self.mask_source == "info" else raw_obs
        if self.mask_source == "info" and not np.all(info.get("_action_mask", False)):
            raise InputError(f"{self.env_id}: info has an action_mask after the first reset, but not always later")
        mask = self.envs.call("action_masks") if self.mask_source == "method" else source["action_mask"]
        return [*arrays, self.writer.allowed(mask, self.num_envs)]

    def step(self, actions: Tensor) -> Step:
        raw_obs, rewards, terminations, truncations, info = self.envs.step(self.writer.write(actions))
        arrays, final_obs, final_critic_obs = self._read(raw_obs, info), None, None
        truncations = truncations & ~terminations
        if truncations.any():
            ids, space = np.flatnonzero(info["_final_obs"]), self.envs.single_observation_space
            lasts = concatenate(space, info["final_obs"][ids], create_empty_array(space, len(ids)))
            finals = replaced(arrays[:2], ids, self.reader.read(lasts, len(ids)))
            final_obs, final_critic_obs, _ = to_tensors(finals, self.device)
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        results = (host_to_device(x, self.device) for x in (rewards, terminations, truncations))
        return Step(obs, critic_obs, *results, final_obs, final_critic_obs, self.action_mask)

    def close(self) -> None:
        self.envs.close()


def _mask_source(
    env: gymnasium.Env, info: dict[str, Any], reader: ObservationReader
) -> tuple[str | None, tuple[int, ...] | None]:
    """Where the env, which has been reset, tells its action mask, and the mask's shape."""
    if reader.mask_shape is not None:
        return "obs", reader.mask_shape
    if "action_mask" in info:
        return "info", np.shape(info["action_mask"])
    if env.has_wrapper_attr("action_masks"):
        return "method", np.shape(env.get_wrapper_attr("action_masks")())
    return None, None


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
