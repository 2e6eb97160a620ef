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


def picture(t: int, *shape: int) -> np.ndarray:
    """Every pixel another value (up to 256 of them), which moves on by one each step."""
    return (np.arange(np.prod(shape)).reshape(shape) + t).astype(np.uint8)


class Picture(Toy):
    """A uint8 image of any shape, whole or under a key."""

    def __init__(self, shape: tuple[int, ...] = (5, 4, 3), length: int = 5):
        super().__init__(length)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def observe(self):
        return picture(self.t, *self.observation_space.shape)


class MissionSpace(spaces.Space):
    """A space that Gymnasium does not know, as minigrid's texts have it."""

    def sample(self, mask=None, probability=None):
        return "go"

    def contains(self, x):
        return isinstance(x, str)

    def __eq__(self, other):
        return type(self) is type(other)


class BabyMission(MissionSpace):
    pass


class Cameras(Toy):
    """A Dict with images, vectors, a state and texts, in the given order of its keys."""

    parts = {
        "view": (spaces.Box(0, 255, (5, 4, 3), np.uint8), lambda t: picture(t, 5, 4, 3)),
        "map": (spaces.Box(0, 255, (6, 7), np.uint8), lambda t: picture(t, 6, 7)),
        "arm": (spaces.Box(-9, 9, (2, 2), np.float64), lambda t: np.array([[t, 1], [2, 3.5]])),
        "place": (spaces.Discrete(6), lambda t: t),
        "mission": (BabyMission(None, None), lambda t: "fetch"),
        "hint": (spaces.Text(9), lambda t: "left"),
        "deep": (spaces.Dict({"z": spaces.MultiBinary(2), "cam": spaces.Box(0, 255, (2, 8, 8), np.uint8)}),
                 lambda t: {"z": np.array([1, 0], np.int8), "cam": picture(t, 2, 8, 8)}),
    }  # fmt: skip

    def __init__(self, keys: str = "view map arm place mission hint deep", length: int = 5):
        super().__init__(length)
        self.keys = keys.split()
        self.observation_space = spaces.Dict([(key, self.parts[key][0]) for key in self.keys])

    def observe(self):
        return {key: self.parts[key][1](self.t) for key in self.keys}


class PrivilegedCameras(Cameras):
    """The actor sees an image and a vector, the critic a nested Dict of vectors."""

    def __init__(self):
        super().__init__()
        vector = spaces.Box(-9, 9, (2,), np.float32)
        critic = spaces.Dict([("b", spaces.Dict({"x": vector, "w": vector})), ("a", vector)])
        policy = spaces.Dict([("view", self.parts["view"][0]), ("arm", self.parts["arm"][0])])
        self.observation_space = spaces.Dict({"critic": critic, "policy": policy})

    def observe(self):
        x = np.float32([self.t, 0])
        policy = {key: self.parts[key][1](self.t) for key in ("view", "arm")}
        return {"critic": {"b": {"x": x + 2, "w": x + 1}, "a": x}, "policy": policy}


ACTION_SPACES = {
    "discrete": spaces.Discrete(3, start=-1),
    "multi": spaces.MultiDiscrete([2, 4, 3], start=[5, 0, -2]),
    "matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]]), dtype=np.int32, start=np.array([[0, 1], [2, 3]])),
    "binary": spaces.MultiBinary([2, 2]),
    "integers": spaces.Box(np.array([-1, 3], np.int16), np.array([1, 4], np.int16), dtype=np.int16),
    "endless": spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (1,), np.int64),
}  # fmt: skip


class EchoChoice(Toy):
    """The observation is the last action as it arrived, which must lie in the space and have its shape and type."""

    def __init__(self, kind: str, length: int = 50):
        super().__init__(length)
        self.action_space = ACTION_SPACES[kind]
        self.observation_space = spaces.Box(-99, 99, self.action_space.shape, np.float32)

    def reset(self, **kwargs):
        self.last = np.zeros(self.action_space.shape)
        return super().reset(**kwargs)

    def step(self, action):
        assert action in self.action_space and action.dtype == self.action_space.dtype, repr(action)
        self.last = action
        return super().step(action)

    def observe(self):
        return np.asarray(self.last, np.float32)


class Choosy(Toy):
    """Only one value of each action is allowed, which depends on env, episode and step; the reward tells a wrong one.

    source: where the mask stands (obs, info, method); joint: one entry for each combination; size: of a wrong mask.
    The observation is the code of the allowed combination.
    """

    def __init__(self, source: str = "info", joint: bool = False, sizes: tuple[int, ...] = (3,), size: int = 0):
        super().__init__(ending="terminate")
        self.source, self.joint, self.sizes, self.size, self.episode = source, joint, sizes, size, 0
        self.action_space = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)
        self.observation_space = spaces.Box(-99, 99, (1,), np.float32)
        if source == "obs":
            parts = {"action_mask": spaces.MultiBinary(self.mask().shape), "x": self.observation_space}
            self.observation_space = spaces.Dict(parts)
        if source == "method":
            self.action_masks = self.mask

    index, t = 0, 0

    def code(self) -> int:
        return (self.index + 2 * self.episode + self.t) % int(np.prod(self.sizes))

    def mask(self) -> np.ndarray:
        if self.size:
            return np.ones(self.size, bool)
        right = np.unravel_index(self.code(), self.sizes)
        if self.joint:
            mask = np.zeros(self.sizes, bool)
            mask[right] = True
            return mask
        return np.concatenate([np.arange(n) == k for n, k in zip(self.sizes, right, strict=True)])

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        self.index = self.index if seed is None else seed % 3
        self.episode += 1
        self.length = 3 + (self.index + self.episode) % 3
        obs, _ = super().reset(seed=seed)
        return obs, self.info()

    def step(self, action):
        wrong = tuple(np.atleast_1d(action)) != np.unravel_index(self.code(), self.sizes)
        obs, _, terminated, truncated, _ = super().step(action)
        return obs, -float(wrong), terminated, truncated, self.info()

    def info(self) -> dict:
        return {"action_mask": self.mask().astype(np.int8)} if self.source == "info" else {}

    def observe(self):
        x = np.float32([self.code()])
        return {"action_mask": self.mask().astype(np.int8), "x": x} if self.source == "obs" else x


class NothingAllowed(Choosy):
    """In the first step of an episode no value of the first action is allowed."""

    def __init__(self):
        super().__init__("obs", sizes=(2, 3))

    def mask(self):
        mask = super().mask()
        mask[:2] &= self.t > 0
        return mask


class ForgetfulMask(Choosy):
    def info(self):
        return super().info() if self.t == 0 else {}


class Forbidding(Toy):
    """Some values of three unequal actions are allowed, at random; each action earns 1 for the largest allowed value.

    Forbidden actions are counted over all copies, in `Forbidding.wrong`, and earn -9.
    """

    sizes, steps, wrong = (2, 3, 4), 0, 0
    action_space = spaces.MultiDiscrete(sizes)
    observation_space = spaces.Dict({"action_mask": spaces.MultiBinary(9), "x": spaces.Box(0, 1, (9,), np.float32)})

    def observe(self):
        pieces = []
        for size in self.sizes:
            piece = self.np_random.random(size) < 0.5
            piece[self.np_random.integers(size)] = True
            pieces.append(piece)
        self.allowed = pieces
        mask = np.concatenate(pieces)
        return {"action_mask": mask, "x": mask.astype(np.float32)}

    def reward(self, action):
        Forbidding.steps += 1
        if not all(piece[a] for piece, a in zip(self.before, action, strict=True)):
            Forbidding.wrong += 1
            return -9.0
        return float(sum(a == np.flatnonzero(piece)[-1] for piece, a in zip(self.before, action, strict=True)))

    def step(self, action):
        self.before = self.allowed
        return super().step(action)


class Slow(Counter):
    def step(self, action):
        time.sleep(0.003)
        return super().step(action)


class Recall(Toy):
    """Shows a cue, -1 or 1, in the first observation only; `delay` steps later the action must name it (0 or 1)."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay: int = 16):
        super().__init__(length=delay + 1, ending="terminate")

    def observe(self):
        """The cue, and whether it is asked for now."""
        if self.t == 0:
            self.cue = int(self.np_random.integers(2))
        return np.array([(2 * self.cue - 1) * (self.t == 0), self.t == self.length - 1], np.float32)

    def reward(self, action):
        return float(self.t == self.length and action == self.cue)


for _name, _env in list(globals().items()):
    if isinstance(_env, type) and issubclass(_env, Toy):
        gymnasium.register(f"{'FixedLength' if _env is Toy else _name}-v0", _env)
gymnasium.register("ConstantReward-v0", Toy)


class Trio:
    """Of PettingZoo's parallel API: agents a, b and c, all of whose numbers tell env, agent, episode and time.

    Agent g of the env seeded with i sees 100 i + 10 g + t and the episode, and earns 100 i + 10 g + the sum of its
    action. It leaves after leaves[g] steps (0: never), c joins after `joins`; the episode ends after `length`. padded:
    the spaces grow with g. mask: in "info" or in a "dict" observation, value (t + g) % 3 is forbidden. keeps: who has
    left is still named in `agents`.
    """

    possible_agents = ["a", "b", "c"]

    def __init__(self, length=5, ending="truncate", leaves=(0, 0, 0), leaving="terminate", joins=0, padded=False,
                 mask="", action="Discrete", state=True, keeps=False):  # fmt: skip
        self.length, self.ending, self.leaves, self.leaving, self.joins = length, ending, leaves, leaving, joins
        self.padded, self.mask, self.action, self.keeps = padded, mask, action, keeps
        if state:
            vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
            self.state_space = spaces.Box(0, 255, (8, 8, 3), np.uint8) if state == "image" else vector

    def observation_space(self, agent):
        box = spaces.Box(-np.inf, np.inf, (2 + self.padded * self.possible_agents.index(agent),), np.float32)
        masks = spaces.Box(0, 1, (3,), np.int8)
        return spaces.Dict({"observation": box, "action_mask": masks}) if self.mask == "dict" else box

    def action_space(self, agent):
        size = 3 + self.padded * self.possible_agents.index(agent)
        if self.action == "Box":
            return spaces.Box(-1, 1, (size - 2,), np.float32)
        return spaces.Discrete(size) if self.action == "Discrete" else spaces.MultiDiscrete([size, 2])

    def reset(self, seed=None, options=None):
        self.index, self.episode = (self.index, self.episode + 1) if seed is None else (seed, 0)
        self.t = 0
        self.agents = [agent for agent in self.possible_agents if agent != "c" or not self.joins]
        return self.look(self.agents)

    def look(self, agents):
        obs, infos = {}, {}
        for agent in agents:
            g = self.possible_agents.index(agent)
            row = [100 * self.index + 10 * g + self.t, self.episode] + [7.0] * (self.padded * g)
            mask = np.arange(3) != (self.t + g) % 3
            obs[agent] = np.array(row, np.float32)
            infos[agent] = {"action_mask": mask.astype(np.int8)} if self.mask == "info" else {}
            infos[agent] = {"action_mask": mask[:2]} if self.mask == "short" else infos[agent]
            obs[agent] = {"observation": obs[agent], "action_mask": mask} if self.mask == "dict" else obs[agent]
        return obs, infos

    def step(self, actions):
        assert list(actions) == self.agents, (actions, self.agents)
        self.t += 1
        acted, rewards = list(self.agents), {}
        for agent in acted:
            assert self.action_space(agent).contains(actions[agent]), actions[agent]
            rewards[agent] = 100 * self.index + 10 * self.possible_agents.index(agent) + np.sum(actions[agent])
        over = self.t >= self.length
        gone = {x: self.t == self.leaves[self.possible_agents.index(x)] for x in acted}
        ends, cut = (self.ending in (x, "both") and over for x in ("terminate", "truncate"))
        terminated = {x: bool(ends or gone[x] and self.leaving == "terminate") for x in acted}
        truncated = {x: bool(cut or gone[x] and self.leaving == "truncate") for x in acted}
        obs, infos = self.look(acted)
        self.agents = [x for x in acted if self.keeps or not (terminated[x] or truncated[x])]
        if self.t == self.joins and self.agents:
            self.agents.append("c")
            more = self.look(["c"])
            obs, infos = obs | more[0], infos | more[1]
        return obs, rewards, terminated, truncated, infos

    def state(self):
        assert self.agents or self.ending != "terminate", "asked for the state of an episode that has ended"
        return np.array([self.index, self.t, self.episode], np.float32)

    def close(self):
        pass
