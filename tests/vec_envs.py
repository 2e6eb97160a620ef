"""Small environments in torch with known optima, and a fixture that gives them to main(Args(env_id=NAME))."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

import common.envs
from common.envs.base import Step, VecEnv


def box(size: int) -> spaces.Box:
    return spaces.Box(-np.inf, np.inf, (size,), np.float32)


class Probe(VecEnv):
    """Episodes of `length` steps that end by truncation (or termination); subclasses give observation and reward."""

    obs_dim, critic_dim, length, terminates, value_size = 1, None, 5, False, 1

    def __init__(self, num_envs: int, device: torch.device, seed: int):
        self.env_id, self.num_envs, self.device = type(self).__name__, num_envs, device
        self.generator = torch.Generator().manual_seed(seed)
        self.observation_space = self.critic_observation_space = box(self.obs_dim)
        if self.critic_dim:
            self.critic_observation_space = box(self.critic_dim)
        self.action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.t = torch.zeros(num_envs, dtype=torch.int64)

    def observe(self) -> tuple[torch.Tensor, torch.Tensor]:
        obs = torch.ones(self.num_envs, self.obs_dim)
        return obs, obs

    def reward(self, actions: torch.Tensor) -> torch.Tensor:
        return torch.ones(self.num_envs)

    def reset(self):
        self.t = torch.zeros(self.num_envs, dtype=torch.int64)
        self.current = self.observe()
        return self.current

    def step(self, actions):
        rewards = self.reward(actions)
        self.t = self.t + 1
        final = self.observe()
        done = self.t >= self.length
        self.t = torch.where(done, 0, self.t)
        self.current = self.observe() if done.any() else final
        none = torch.zeros_like(done)
        ends = (done, none) if self.terminates else (none, done)
        return Step(*self.current, rewards, *ends, *(final if done.any() and not self.terminates else (None, None)))


class ConstantReward(Probe):
    pass


class ConstantRewardTerminal(Probe):
    terminates = True


class RewardIsObs(Probe):
    length, terminates = 1, True

    def observe(self):
        obs = torch.randint(0, 2, (self.num_envs, 1), generator=self.generator).float() * 2 - 1
        return obs, obs

    def reward(self, actions):
        return self.current[0][:, 0]


class DelayedReward(Probe):
    """Two steps; the reward 1 comes in the second, so the first state is worth gamma."""

    length, terminates = 2, True

    def observe(self):
        obs = self.t.float()[:, None].clamp(max=1)
        return obs, obs

    def reward(self, actions):
        return self.t.float()


class ActionIsObs(RewardIsObs):
    """The best action is half the observation."""

    def reward(self, actions):
        return -((actions[:, 0] - 0.5 * self.current[0][:, 0]) ** 2)


class Asymmetric(Probe):
    obs_dim, critic_dim = 3, 7

    def observe(self):
        obs = torch.randn(self.num_envs, 3, generator=self.generator)
        return obs, 1e3 * torch.randn(self.num_envs, 7, generator=self.generator) + 5e3


class Staggered(Asymmetric):
    """Env i starts at step i of its episode; even envs terminate, odd ones are cut. Keeps what it gave."""

    tells_final, last = True, None

    def reset(self):
        Staggered.last, self.steps = self, []
        self.t = torch.arange(self.num_envs) % self.length
        self.current = self.before = self.observe()
        return self.current

    def step(self, actions):
        self.t = self.t + 1
        done, even = self.t >= self.length, torch.arange(self.num_envs) % 2 == 0
        final, first = self.observe(), self.observe()
        self.t = torch.where(done, 0, self.t)
        self.before = self.current
        self.current = tuple(torch.where(done[:, None], b, a) for a, b in zip(final, first, strict=True))
        cut = done & ~even
        tell = cut.any() and self.tells_final
        rewards = torch.randn(self.num_envs, generator=self.generator)
        step = Step(*self.current, rewards, done & even, cut, *(final if tell else (None, None)))
        self.steps.append((self.before[1], step))
        return step


class Meddler(Probe):
    """Keeps the actions it was given, then overwrites them in place."""

    given: list = []

    def __init__(self, *args):
        super().__init__(*args)
        self.action_space = spaces.Box(0, 5, (1,), np.float32)
        Meddler.given = []

    def reward(self, actions):
        self.given.append(actions[:, 0].clone())
        actions.fill_(np.nan)
        return torch.ones(self.num_envs)


class TwoHeads(Probe):
    value_size = 2

    def reward(self, actions):
        return torch.stack([torch.ones(self.num_envs), -3 * torch.ones(self.num_envs)], 1)


class Worsening(Probe):
    """Each episode earns less than the one before."""

    episode = 0

    def reward(self, actions):
        self.episode += 1
        return torch.full((self.num_envs,), -float(self.episode))


class NanWhenTold(Probe):
    scale = 1.0

    def reward(self, actions):
        return torch.full((self.num_envs,), NanWhenTold.scale)


# ---- discrete actions ----


class Choice(Probe):
    """A probe whose actions have `sizes` values (one size: Discrete) and, where masks() gives one, a mask.

    Refuses wrong types and shapes and everything that is not allowed; in a row without anything allowed, all but 0.
    """

    sizes = (3,)

    def __init__(self, *args):
        super().__init__(*args)
        self.action_space = spaces.Discrete(self.sizes[0]) if len(self.sizes) == 1 else spaces.MultiDiscrete(self.sizes)

    def masks(self) -> torch.Tensor | None:
        """Of self.current."""
        return None

    def reset(self):
        super().reset()
        self.action_mask = self.masks()
        return self.current

    def step(self, actions):
        N, D = self.num_envs, len(self.sizes)
        assert actions.dtype == torch.int64 and actions.shape == ((N,) if D == 1 else (N, D))
        allowed = torch.ones(N, sum(self.sizes), dtype=torch.bool) if self.action_mask is None else self.action_mask
        for action, mask in zip(actions.view(N, D).T, allowed.split(self.sizes, 1), strict=True):
            assert ((action >= 0) & (action < mask.shape[1])).all(), "no such action"
            chosen = mask.gather(1, action[:, None])[:, 0]
            assert (chosen | ~mask.any(1) & (action == 0)).all(), "an action that is not allowed"
        step = super().step(actions)
        self.action_mask = self.masks()
        return step._replace(action_mask=self.action_mask)


class ConstantChoice(Choice):
    """Reward 1 whatever is done, in episodes of 5 steps that are cut."""


class ConstantChoiceTerminal(Choice):
    terminates = True


class MatchObs(Choice):
    """One step; the right action, one of 4, is the observation plus 1."""

    sizes, length, terminates = (4,), 1, True

    def observe(self):
        obs = torch.randint(-1, 3, (self.num_envs, 1), generator=self.generator).float()
        return obs, obs

    def reward(self, actions):
        return (actions == self.current[0][:, 0] + 1).float()


class Heads(Choice):
    """The observation is a sign and the mask. The reward is what is lost to the best allowed actions, so at most 0.

    Sub-action d of S values earns sign * ((action + d) mod S) / (S - 1).
    """

    sizes, obs_dim, length = (2, 3, 4), 10, 3

    def observe(self):
        sign = torch.randint(0, 2, (self.num_envs, 1), generator=self.generator) * 2.0 - 1
        masks = [sign]
        for size in self.sizes:
            numbers = torch.rand(self.num_envs, size, generator=self.generator)
            masks.append(((numbers > 0.5) | (numbers == numbers.max(1, keepdim=True).values)).float())
        obs = torch.cat(masks, 1)
        return obs, obs

    def masks(self):
        return self.current[0][:, 1:] > 0

    def reward(self, actions):
        lost, masks = torch.zeros(self.num_envs), self.action_mask.split(self.sizes, 1)
        for d, (size, mask, action) in enumerate(zip(self.sizes, masks, actions.view(len(lost), -1).T, strict=True)):
            earned = self.current[0][:, :1] * ((torch.arange(size) + d) % size) / (size - 1)
            lost += earned.gather(1, action[:, None])[:, 0] - torch.where(mask, earned, -9).max(1).values
        return lost


class OneHead(Heads):
    """The best allowed one of 5 actions changes with the sign and the mask."""

    sizes, obs_dim = (5,), 6


class Pictures(Choice):
    """Frames [2, 36, 37]; the first pixel's parity forbids action 0 or action 3."""

    shape, sizes, length = (2, 36, 37), (4,), 4

    def __init__(self, *args):
        super().__init__(*args)
        self.observation_space = self.critic_observation_space = spaces.Box(0, 255, self.shape, np.uint8)

    def observe(self):
        size = (self.num_envs, *self.shape)
        obs = torch.randint(0, 256, size, generator=self.generator, dtype=torch.uint8)
        return obs, obs

    def masks(self):
        even, allowed = self.current[0][:, 0, 0, 0] % 2 == 0, torch.ones(self.num_envs, 4, dtype=torch.bool)
        allowed[:, 0], allowed[:, 3] = even, ~even
        return allowed

    def reward(self, actions):
        return actions.float()


class SmallPictures(Pictures):
    shape = (2, 7, 9)


class PictureAndVector(Choice):
    """Action 1 is right where just one of the two, the picture and the vector, says so: each alone is worthless.

    The order of the keys changes from step to step.
    """

    sizes, length, terminates, flips = (2,), 1, True, 0

    def __init__(self, *args):
        super().__init__(*args)
        picture, vector = spaces.Box(0, 255, (2, 6, 5), np.uint8), box(3)
        self.observation_space = self.critic_observation_space = spaces.Dict({"picture": picture, "vector": vector})

    def observe(self):
        self.bits = torch.randint(0, 2, (2, self.num_envs), generator=self.generator)
        picture = torch.randint(0, 100, (self.num_envs, 2, 6, 5), generator=self.generator, dtype=torch.uint8)
        picture[:, 1] += 155 * self.bits[0].to(torch.uint8)[:, None, None]
        vector = torch.randn(self.num_envs, 3, generator=self.generator)
        vector[:, 1] = 40.0 + 10 * self.bits[1]
        self.flips += 1
        parts = [("picture", picture), ("vector", vector)]
        obs = dict(parts[:: (-1) ** self.flips])
        return obs, obs

    def reward(self, actions):
        right = self.current[0]["picture"][:, 1].amax((1, 2)).gt(127) ^ self.current[0]["vector"][:, 1].gt(45)
        return (actions == right).float()


class NoChoice(Choice):
    """A third of the rows allow nothing, in both sub-actions or in the second alone; there all numbers are 1e6."""

    sizes, obs_dim, length, terminates = (3, 2), 2, 1, True

    def observe(self):
        self.kind = torch.randint(0, 6, (self.num_envs,), generator=self.generator)
        obs = torch.randn(self.num_envs, 2, generator=self.generator)
        obs[self.kind < 2] = 1e6
        return obs, obs

    def masks(self):
        allowed = torch.ones(self.num_envs, 5, dtype=torch.bool)
        allowed[self.kind == 0], allowed[:, 3:] = False, (self.kind > 1)[:, None]
        return allowed

    def reward(self, actions):
        return torch.where(self.action_mask.all(1), 2.0, 1e6)


class Privileged(Choice):
    """The reward is the sign of what only the critic sees, a dict of a map and a state."""

    sizes, obs_dim, length, terminates = (2, 3), 4, 1, True

    def __init__(self, *args):
        super().__init__(*args)
        parts = {"map": spaces.Box(0, 255, (1, 3, 4), np.uint8), "state": box(7)}
        self.critic_observation_space = spaces.Dict(parts)

    def observe(self):
        obs = torch.randn(self.num_envs, 4, generator=self.generator)
        map_ = torch.randint(0, 256, (self.num_envs, 1, 3, 4), generator=self.generator, dtype=torch.uint8)
        state = 1e3 * torch.randn(self.num_envs, 7, generator=self.generator).sign() + 5e3
        return obs, {"map": map_, "state": state}

    def reward(self, actions):
        return (self.current[1]["state"][:, 2] - 5e3).sign()


class Clipped(Choice):
    """As Atari: the learner sees reward 1 and lives of 2 steps; a game earns 3 a step and has 3 lives."""

    length, terminates, played = 2, True, 0

    def reset(self):
        self.played = 0
        return super().reset()

    def step(self, actions):
        step, self.played = super().step(actions), self.played + 1
        ends = torch.full((self.num_envs,), self.played % 6 == 0)
        return step._replace(raw_rewards=3 * torch.ones(self.num_envs), episode_ends=ends)


class TwoHeadsChoice(Choice):
    value_size = 2

    def reward(self, actions):
        return torch.stack([torch.ones(self.num_envs), -3 * torch.ones(self.num_envs)], 1)


class Diary(Probe):
    """Observes a tenth of env, step since the reset and step of the episode, and two random numbers.

    Env i has episodes of 3 + i % 4 steps; those of even envs terminate, those of odd ones are cut. What the env was
    given and gave is kept: `steps` has observations, mask, actions and Step of each step.
    """

    obs_dim, tells_final, last = 5, True, None

    def __init__(self, *args):
        super().__init__(*args)
        self.lengths, self.steps = 3 + torch.arange(self.num_envs) % 4, []
        self.action_space = spaces.Box(np.float32([-1, -2]), np.float32([3, 2]))
        type(self).last = self

    def observe(self):
        index = torch.arange(self.num_envs)
        numbers = torch.stack([index, torch.full_like(index, len(self.steps)), self.t], 1) / 10
        obs = torch.cat([numbers, torch.randn(self.num_envs, 2, generator=self.generator)], 1)
        if not self.critic_dim:
            return obs, obs
        return obs, torch.cat([numbers[:, 2:], torch.randn(self.num_envs, 3, generator=self.generator)], 1)

    def reward(self, actions):
        heads = torch.arange(self.num_envs)[:, None] * 3 + len(self.steps) + torch.arange(self.value_size)
        return torch.sin(heads).squeeze(1)

    def reset(self):
        self.steps = []
        return super().reset()

    def step(self, actions):
        before, mask, rewards = self.current, self.action_mask, self.reward(actions)
        self.steps.append(None)
        self.t = self.t + 1
        done, even, final = self.t >= self.lengths, torch.arange(self.num_envs) % 2 == 0, self.observe()
        self.t = torch.where(done, 0, self.t)
        first = self.observe()
        current = [torch.where(done[:, None], b, a) for a, b in zip(final, first, strict=True)]
        self.current = current[0], current[1] if self.critic_dim else current[0]
        finals = final if self.tells_final and (done & ~even).any() else (None, None)
        step = Step(*self.current, rewards, done & even, done & ~even, *finals)
        self.steps[-1] = before, mask, actions.clone(), step
        return step


class DiaryChoice(Choice, Diary):
    """Actions of 3 values."""


class DiaryHeads(DiaryChoice):
    """Three sub-actions under a mask; in every fifth step env 1 allows nothing for the second one."""

    sizes = (2, 3, 4)

    def masks(self):
        allowed = torch.rand(self.num_envs, 9, generator=self.generator) < 0.6
        allowed[:, [0, 3, 6]] = True
        if len(self.steps) % 5 == 4:
            allowed[1:2, 2:5] = False
        return allowed


class DiaryCritic(DiaryHeads):
    """The critic has observations of its own, and there are two reward heads."""

    critic_dim, value_size = 4, 2


class YesterdayBox(Probe):
    """From the second of 6 steps on, the best action is half the observation before: worth 0, -1.25 to who forgot."""

    length, terminates, before = 6, True, torch.zeros(())

    def observe(self):
        obs = torch.randint(0, 2, (self.num_envs, 1), generator=self.generator) * 2.0 - 1
        return obs, obs

    def reward(self, actions):
        rewards = self.score(actions) * (self.t > 0)
        self.before = self.current[0][:, 0]
        return rewards

    def score(self, actions):
        return -((actions[:, 0] - 0.5 * self.before) ** 2)


class Yesterday(Choice, YesterdayBox):
    """The same with two actions, for a negative and a positive one: worth 5, 2.5 to who forgot."""

    sizes = (2,)

    def score(self, actions):
        return (actions == (self.before > 0)).float()


PROBES = {
    cls.__name__: cls
    for cls in (ConstantReward, ConstantRewardTerminal, RewardIsObs, DelayedReward, ActionIsObs, Asymmetric, Staggered,
                Meddler, TwoHeads, Worsening, NanWhenTold, ConstantChoice, ConstantChoiceTerminal, MatchObs, Heads,
                OneHead, Pictures, SmallPictures, PictureAndVector, NoChoice, Privileged, Clipped, TwoHeadsChoice,
                Diary, DiaryChoice, DiaryHeads, DiaryCritic, YesterdayBox, Yesterday)
}  # fmt: skip


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """main(Args(env_id="ConstantReward")) trains on the probe of that name, in an empty folder."""

    def make(env_id, num_envs, device, seed, env_kwargs=None, action_bins=0, mask_obs=()):
        return PROBES[env_id](num_envs, device, seed)

    def make_for_episodes(env_id, num_envs, num_episodes, device, seed, env_kwargs, action_bins=0, mask_obs=()):
        copies = max(n for n in range(1, min(num_envs, num_episodes) + 1) if num_episodes % n == 0)
        return make(env_id, copies, device, seed)

    monkeypatch.setattr(common.envs, "make", make)
    monkeypatch.setattr(common.envs, "make_for_episodes", make_for_episodes)
    monkeypatch.chdir(tmp_path)
