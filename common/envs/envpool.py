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

from common.envs.actions import ActionWriter
from common.envs.base import Observation, Step, VecEnv, available_cores, host_to_device
from common.envs.observations import Array, ObservationReader, replaced, to_tensors
from common.errors import InputError

SLOW_START = 512  # from this many envs on, creation takes seconds (each parses its model) and is worth a message
# Tasks whose step is cheaper than waking a thread, by the beginning of their names.
CHEAP = tuple("Acrobot Blackjack CartPole Catch CliffWalking FrozenLake MountainCar NChain Pendulum Taxi".split())
# Tasks whose rewards or terminations depend on the limit that envpool is given, by the beginning of their names.
LIMIT_AWARE = ("BabyAI", "MiniGrid", "LevelBasedForaging", "Jumanji/LevelBasedForaging")


class EnvpoolVecEnv(VecEnv):
    """Any single-player envpool task."""

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device = f"envpool/{name}", num_envs, device
        options = {"num_envs": num_envs, "seed": seed, "num_threads": _threads(name, num_envs)} | env_kwargs
        try:
            with warnings.catch_warnings():
                # envpool declares float64 bounds of float32 spaces, and Gymnasium says so four times a start.
                warnings.filterwarnings("ignore", message=".*precision lowered by casting")
                spec = envpool.make_spec(name, **options)
                if hasattr(spec.config, "use_combined_action") and "use_combined_action" not in options:
                    # ViZDoom's buttons: one action for each combination instead of floats without bounds
                    options["use_combined_action"] = True
                    spec = envpool.make_spec(name, **options)
                if spec.config.max_num_players > 1:
                    raise InputError(f"{self.env_id} has several players: use ppo_multiagent.py")
                self._read_spec(spec)
                self.time_limit = self._own_time_limit(name)
                if self.time_limit:
                    options["max_episode_steps"] = self.time_limit + 1
                with _heartbeat(f"creating {num_envs} x {name}", num_envs):
                    self.envs = envpool.make(name, env_type="gymnasium", **options)
                _ = self.envs.observation_space  # made at its first use, and kept: now, not in the first reset
        except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ImportError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.env_id}, options {env_kwargs}: {str(error).splitlines()[0]}") from error

    def _read_spec(self, spec: Any) -> None:
        fields = spec.state_array_spec
        self.reader = ObservationReader(spec.gymnasium_observation_space, self.env_id)
        self.observation_space = self.reader.observation_space
        self.critic_observation_space = self.reader.critic_observation_space
        self.unflattened_shape = self.reader.unflattened_shape
        in_info = fields.get("info:legal_action_mask")
        mask_shape = self.reader.mask_shape if in_info is None else tuple(in_info.shape)
        self.writer = ActionWriter(spec.gymnasium_action_space, self.env_id, mask_shape)
        self.action_space = self.writer.space
        self.is_atari = "info:terminated" in fields
        self.clips_rewards = self.is_atari and spec.config.reward_clip
        self.ends_at_lost_lives = self.is_atari and spec.config.episodic_life
        limit = getattr(spec.config, "max_episode_steps", 0)
        self.max_episode_steps = limit if 0 < limit < 2**31 - 1 else None

    def _own_time_limit(self, name: str) -> int | None:
        """The step in which the adapter truncates, or None to leave that to envpool.

        envpool reports an env that terminates in its last allowed step as truncated, and its value would be
        bootstrapped. So it is given one step more and the cut is made here; not for Atari, which tells when a game is
        over.
        """
        return None if self.is_atari or name.startswith(LIMIT_AWARE) else self.max_episode_steps

    def reset(self) -> tuple[Observation, Observation]:
        obs, critic_obs, self.action_mask = to_tensors(self._read(*self.envs.reset(), self.num_envs), self.device)
        return obs, critic_obs

    def _read(self, raw_obs: Any, info: dict[str, Any], rows: int) -> list[Array]:
        arrays = self.reader.read(raw_obs, rows)
        mask = raw_obs["action_mask"] if self.reader.mask_shape is not None else info.get("legal_action_mask")
        return arrays if mask is None else [*arrays, self.writer.allowed(mask, rows)]

    def step(self, actions: Tensor) -> Step:
        raw_obs, rewards, terminations, truncations, info = self.envs.step(self.writer.write(actions))
        arrays, final_obs, final_critic_obs = self._read(raw_obs, info, self.num_envs), None, None
        if self.time_limit:
            truncations = info["elapsed_step"] >= self.time_limit
        if self.is_atari:
            game_overs = info["terminated"] != 0
            terminations = terminations | game_overs
        dones = terminations | truncations
        if dones.any():
            truncations = truncations & ~terminations
            if truncations.any():
                final_obs, final_critic_obs, _ = to_tensors(arrays, self.device)
            ids = np.flatnonzero(dones)
            arrays = replaced(arrays, ids, self._read(*self._restart(ids), len(ids)))
        obs, critic_obs, self.action_mask = to_tensors(arrays, self.device)
        raw_rewards = info["reward"] if self.clips_rewards else None
        episode_ends = game_overs | truncations if self.ends_at_lost_lives else None
        results = (rewards, terminations, truncations, raw_rewards, episode_ends)
        results = [None if x is None else host_to_device(x, self.device) for x in results]
        return Step(obs, critic_obs, *results[:3], final_obs, final_critic_obs, self.action_mask, *results[3:])

    def _restart(self, ids: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """First observations of just those envs, and infos."""
        if not self.is_atari:
            return self.envs.reset(ids)
        # A reset would start a new game also where just a life was lost; a step starts what has to be started.
        raw_obs, _, _, _, info = self.envs.step(np.zeros(len(ids), np.int32), ids.astype(np.int32))
        return raw_obs, info

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
