"""envpool: MuJoCo, Atari, classic control and more, stepped by a C++ thread pool. https://github.com/sail-sg/envpool

As shipped, an ended env returns its last observation and the next step, which ignores the action, returns the reset
observation. In synchronous mode `reset(ids)` resets just those rows, so an ended env is reset at once and no filler row
exists.
"""

import sys
import threading
import time
import warnings
from contextlib import contextmanager
from typing import Any

import envpool
import numpy as np
import torch
from torch import Tensor

from common.envs.base import (
    ObservationReader,
    Step,
    VecEnv,
    action_box,
    available_cores,
    clamped,
    host_to_device,
    is_image,
    to_tensors,
)
from common.errors import InputError

SLOW_START = 512  # from this many envs on, creation takes seconds (each parses its model) and is worth a message
# Tasks whose step is cheaper than waking a thread, by the beginning of their names.
CHEAP = tuple("Acrobot Blackjack CartPole Catch CliffWalking FrozenLake MountainCar NChain Pendulum Taxi".split())


class EnvpoolVecEnv(VecEnv):
    """Any single-player envpool task."""

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device = f"envpool/{name}", num_envs, device
        options = {"num_envs": num_envs, "seed": seed, "num_threads": _threads(name, num_envs)} | env_kwargs
        try:
            with warnings.catch_warnings():
                # envpool declares float64 bounds of float32 spaces, and Gymnasium says so four times a start.
                warnings.filterwarnings("ignore", message=".*precision lowered by casting")
                spec = envpool.make_spec(name, **{k: v for k, v in options.items() if k != "num_envs"})
                if spec.config.max_num_players > 1:
                    raise InputError(f"{self.env_id} has several players, which is not supported by this script yet")
                self.reader = ObservationReader(spec.gymnasium_observation_space, self.env_id)
                self.action_space = action_box(spec.gymnasium_action_space, self.env_id)
                self.max_episode_steps = getattr(spec.config, "max_episode_steps", None)
                self.time_limit = self._own_time_limit()
                if self.time_limit:
                    options["max_episode_steps"] = self.time_limit + 1
                with _heartbeat(f"creating {num_envs} x {name}", num_envs):
                    self.envs = envpool.make(name, env_type="gymnasium", **options)
        except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ImportError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.env_id}, options {env_kwargs}: {str(error).splitlines()[0]}") from error
        self.observation_space = self.reader.observation_space
        self.critic_observation_space = self.reader.critic_observation_space

    def _own_time_limit(self) -> int | None:
        """The step in which the adapter truncates, or None to leave that to envpool.

        envpool reports an env that terminates in its last allowed step as truncated, and its value would be
        bootstrapped. So it is given one step more and the cut is made here; not for Atari, where a reset before the
        game is over would only go on to the next life.
        """
        unlimited = self.max_episode_steps is None or self.max_episode_steps >= 2**31 - 1
        return None if unlimited or is_image(self.reader.observation_space) else self.max_episode_steps

    def reset(self) -> tuple[Tensor, Tensor]:
        arrays = self.reader.read(self.envs.reset()[0], self.num_envs)
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        return obs, critic_obs

    def step(self, actions: Tensor) -> Step:
        raw_obs, rewards, terminations, truncations, info = self.envs.step(clamped(actions, self.action_space))
        arrays, final_obs, final_critic_obs = self.reader.read(raw_obs, self.num_envs), None, None
        if self.time_limit:
            truncations = info["elapsed_step"] >= self.time_limit
        dones = terminations | truncations
        if dones.any():
            truncations = truncations & ~terminations
            if truncations.any():
                final_obs, final_critic_obs, _ = to_tensors(arrays, self.device)
            ids = np.flatnonzero(dones)
            arrays = self.reader.replaced(arrays, ids, self.reader.read(self.envs.reset(ids)[0], len(ids)))
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        results = (host_to_device(x, self.device) for x in (rewards, terminations, truncations))
        return Step(obs, critic_obs, *results, final_obs, final_critic_obs, self.action_mask)

    def close(self) -> None:
        self.envs.close()


def _threads(name: str, num_envs: int) -> int:
    return 1 if name.startswith(CHEAP) else min(available_cores(), num_envs)


@contextmanager
def _heartbeat(what: str, num_envs: int):
    """Say on stderr that a long creation is going on, every five seconds."""
    if num_envs < SLOW_START:
        yield
        return
    start, done = time.perf_counter(), threading.Event()

    def beat() -> None:
        print(f"{what}: can take half a minute for thousands of MuJoCo envs ...", file=sys.stderr, flush=True)
        while not done.wait(5):
            print(f"{what} ... {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    print(f"{what}: done in {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
