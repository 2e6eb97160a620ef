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


PROBES = {
    cls.__name__: cls
    for cls in (ConstantReward, ConstantRewardTerminal, RewardIsObs, DelayedReward, ActionIsObs, Asymmetric, Staggered,
                Meddler, TwoHeads, Worsening, NanWhenTold)
}  # fmt: skip


@pytest.fixture
def probes(monkeypatch, tmp_path):
    """main(Args(env_id="ConstantReward")) trains on the probe of that name, in an empty folder."""

    def make(env_id, num_envs, device, seed, env_kwargs=None):
        return PROBES[env_id](num_envs, device, seed)

    def make_for_episodes(env_id, num_envs, num_episodes, device, seed, env_kwargs):
        copies = max(n for n in range(1, min(num_envs, num_episodes) + 1) if num_episodes % n == 0)
        return make(env_id, copies, device, seed)

    monkeypatch.setattr(common.envs, "make", make)
    monkeypatch.setattr(common.envs, "make_for_episodes", make_for_episodes)
    monkeypatch.chdir(tmp_path)
