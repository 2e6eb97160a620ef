"""Tiny Gymnasium environments whose right answers are known by heart; used as `toy_envs:FixedLength-v0`."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

ACTION = spaces.Box(-1, 1, (1,), np.float32)


class Toy(gymnasium.Env):
    """Counts its steps in self.t; subclasses say what is seen (`observe`) and, where it is not 1, what is earned."""

    observation_space: spaces.Space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space: spaces.Space = ACTION

    def __init__(self, length: int = 5, ending: str = "truncate"):
        assert ending in ("truncate", "terminate", "both", "never"), ending
        self.length, self.ending = length, ending

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any):
        self.t += 1
        end = self.t >= self.length
        terminated, truncated = (
            end and self.ending in ("terminate", "both"),
            end and self.ending in ("truncate", "both"),
        )
        return self.observe(), self.reward(action), terminated, truncated, {}

    def observe(self) -> Any:
        return np.ones(1, np.float32)

    def reward(self, action: Any) -> Any:
        return 1.0


class Counter(Toy):
    """Observes the step of the episode, so the last observation (length) differs from the first (0)."""

    def observe(self):
        return np.array([self.t], np.float32)


class Alternating(Counter):
    """The first env that is seeded (an even seed) has episodes of `even` steps, its neighbour of `odd` steps."""

    def __init__(self, even: int = 4, odd: int = 3):
        super().__init__()
        self.lengths = (even, odd)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        if seed is not None:
            self.length = self.lengths[seed % 2]
        return super().reset(seed=seed)


class NanObs(Counter):
    """The observation after step `at_step` of each episode is NaN."""

    def __init__(self, at_step: int = 3, length: int = 5):
        super().__init__(length)
        self.at_step = at_step

    def observe(self):
        return super().observe() * (np.nan if self.t == self.at_step else 1)


class NanReward(Counter):
    """The reward of step `at_step` of each episode is NaN."""

    def __init__(self, at_step: int = 3, length: int = 5):
        super().__init__(length)
        self.at_step = at_step

    def reward(self, action):
        return float("nan") if self.t == self.at_step else 1.0


class EchoAction(Counter):
    """The reward is the action as it arrives, for looking at bounds, units and types."""

    action_space = spaces.Box(-2, 3, (1,), np.float64)

    def reward(self, action):
        assert action.dtype == np.float64 and action.shape == (1,)
        return action[0]


class Unbounded(EchoAction):
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)


class ZeroDim(Toy):
    """Box observation and action of shape (), float64, integer reward."""

    observation_space = spaces.Box(-np.inf, np.inf, (), np.float64)
    action_space = spaces.Box(-1, 1, (), np.float32)

    def observe(self):
        return np.array(self.t, np.float64)

    def reward(self, action):
        assert np.shape(action) == ()
        return int(np.float32(action) * 2)


class Matrix(Toy):
    """Whole numbers [2, 3] as observation, action [2, 2]; the reward is action[0, 1] + 10 action[1, 0]."""

    observation_space = spaces.Box(-99, 99, (2, 3), np.int64)
    action_space = spaces.Box(-1, 1, (2, 2), np.float32)

    def observe(self):
        return np.arange(6).reshape(2, 3) + self.t

    def reward(self, action):
        return np.float64(action[0, 1] + 10 * action[1, 0])


class DiscreteObs(Toy):
    """State start + t mod 4, actions start..start+2; the reward is the action as it arrives."""

    def __init__(self, start: int = 0, length: int = 6):
        super().__init__(length)
        self.start = start
        self.observation_space = spaces.Discrete(4, start=start)
        self.action_space = spaces.Discrete(3, start=start)

    def observe(self):
        return self.start + self.t % 4

    def reward(self, action):
        assert action in self.action_space, action
        return int(action)


class TupleObs(Toy):
    observation_space = spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,))))

    def observe(self):
        return (0, np.zeros(2, np.float32))


class Asymmetric(Toy):
    """The actor sees 3 numbers, the critic 7 of scale 1e3; both end with the step of the episode."""

    observation_space = spaces.Dict(
        {
            "policy": spaces.Box(-np.inf, np.inf, (3,), np.float32),
            "critic": spaces.Box(-np.inf, np.inf, (7,), np.float32),
        }
    )

    def observe(self):
        noise = self.np_random.standard_normal(8).astype(np.float32)
        t = np.float32([self.t])
        return {"policy": np.append(noise[:2], t), "critic": np.append(1e3 * noise[2:], t)}


class Masked(Toy):
    """Only action t mod 3 is allowed; the observation is a Dict of two vectors and the mask."""

    observation_space = spaces.Dict(
        {"a": spaces.Box(-9, 9, (2,), np.float64), "action_mask": spaces.MultiBinary(3), "b": spaces.Box(-9, 9, (1,))}
    )
    action_space = spaces.Discrete(3)

    def observe(self):
        t = self.t % 3
        return {"a": np.array([t, -t], np.float64), "action_mask": np.arange(3) == t, "b": np.float32([7])}


class TwoRewards(Toy):
    """A reward of two heads, declared as MO-Gymnasium does it."""

    reward_space = spaces.Box(-9, 9, (2,), np.float32)

    def reward(self, action):
        return np.array([self.t, -1.0])


class Image(Toy):
    observation_space = spaces.Box(0, 255, (2, 3, 3), np.uint8)

    def observe(self):
        return np.full((2, 3, 3), 250 + self.t, np.uint8)


class Slow(Counter):
    def step(self, action):
        time.sleep(0.003)
        return super().step(action)


for _name, _env in list(globals().items()):
    if isinstance(_env, type) and issubclass(_env, Toy):
        gymnasium.register(f"{'FixedLength' if _env is Toy else _name}-v0", _env)
gymnasium.register("ConstantReward-v0", Toy)
