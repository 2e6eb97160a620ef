"""envpool: MuJoCo, Atari, classic control and more, stepped by a C++ thread pool. https://github.com/sail-sg/envpool

As shipped, an ended env returns its last observation and the next step, which ignores the action, returns the reset
observation. In synchronous mode `reset(ids)` resets just those rows, so an ended env is reset at once and no filler row
exists.
"""

import os
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import envpool
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.base import Step, VecEnv, clamped, flat_space, flatten, host_to_device
from common.errors import InputError

SLOW_START = 512  # from this many envs on, creation takes seconds (each parses its model) and is worth a message


class EnvpoolVecEnv(VecEnv):
    """Any single-player envpool task; observations that are dictionaries of vectors are concatenated in key order."""

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device = f"envpool/{name}", num_envs, device
        options = {"num_envs": num_envs, "seed": seed, "num_threads": _threads(name, num_envs)} | env_kwargs
        try:
            spec = envpool.make_spec(name, **{k: v for k, v in options.items() if k != "num_envs"})
            if spec.config.max_num_players > 1:
                raise InputError(f"{self.env_id} has several players, which needs the multi-agent script")
            with _heartbeat(f"creating {num_envs} x {name}", num_envs):
                self.envs = envpool.make(name, env_type="gymnasium", **options)
        except (TypeError, ValueError, KeyError, AssertionError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.env_id} with --env-kwargs {env_kwargs}: {str(error).splitlines()[0]}") from None
        self.max_episode_steps = getattr(spec.config, "max_episode_steps", None)
        self.action_space = self.envs.action_space
        if isinstance(self.action_space, spaces.Box):
            low, high = (np.asarray(bound, np.float32) for bound in (self.action_space.low, self.action_space.high))
            self.action_space = spaces.Box(low, high, dtype=np.float32)
        self.raw_space = self.envs.observation_space
        self.observation_space = self.critic_observation_space = flat_space(self.raw_space, self.env_id)

    def reset(self) -> tuple[Tensor, Tensor]:
        obs = host_to_device(flatten(self.envs.reset()[0], self.raw_space, self.num_envs), self.device)
        return obs, obs

    def step(self, actions: Tensor) -> Step:
        raw_obs, rewards, terminations, truncations, _ = self.envs.step(clamped(actions, self.action_space))
        obs, final_obs = flatten(raw_obs, self.raw_space, self.num_envs), None
        dones = terminations | truncations
        if dones.any():
            truncations = truncations & ~terminations
            if truncations.any():
                final_obs = host_to_device(obs.copy(), self.device)
            ids = np.flatnonzero(dones)
            obs[ids] = flatten(self.envs.reset(ids)[0], self.raw_space, len(ids))
        obs = host_to_device(obs, self.device)
        rewards, terminations, truncations = (
            host_to_device(x, self.device) for x in (rewards, terminations, truncations)
        )
        return Step(obs, obs, rewards, terminations, truncations, final_obs, final_obs)

    def close(self) -> None:
        self.envs.close()


def _threads(name: str, num_envs: int) -> int:
    """Steps of classic control are cheaper than waking a thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cheap = name.startswith(
        (
            "CartPole",
            "Pendulum",
            "MountainCar",
            "Acrobot",
            "Catch",
            "FrozenLake",
            "Taxi",
            "NChain",
            "CliffWalking",
            "Blackjack",
        )
    )
    return 1 if cheap else min(cores, num_envs)


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
