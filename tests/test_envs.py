"""Each adapter against DESIGN.md section 5: what a step returns, when an episode ends, and what a name means.

Gymnasium is compared with single environments stepped by hand, envpool with its own next-step autoreset and, state by
state, with Gymnasium's physics.
"""

import sys
from itertools import product
from types import SimpleNamespace

import envpool
import gymnasium
import numpy as np
import pytest
import torch
import toy_envs  # noqa: F401  registers the toys under their bare names too
from vec_envs import ActionIsObs, Asymmetric

from common import envs as vecenvs
from common.envs.mask_obs import MaskedObsVecEnv
from common.errors import InputError

CPU = torch.device("cpu")
TASKS = ("CartPole-v1", "Pendulum-v1", "InvertedPendulum-v5", "Hopper-v5")


@pytest.fixture
def make():
    """vecenvs.make on the CPU; what it made is closed after the test."""
    made = []

    def _make(env_id, num_envs=4, seed=0, action_bins=0, mask_obs=(), **env_kwargs):
        made.append(vecenvs.make(env_id, num_envs, CPU, seed, env_kwargs, action_bins, mask_obs))
        return made[-1]

    yield _make
    for envs in made:
        envs.close()
        envs.close()


def random_actions(space, num_envs, steps, seed=0):
    """A list of action tensors [N, A] or [N], as a policy would give them: inside the bounds."""
    rng = np.random.default_rng(seed)
    if isinstance(space, gymnasium.spaces.Discrete):
        return list(torch.from_numpy(rng.integers(0, space.n, (steps, num_envs))))
    return list(
        torch.from_numpy(rng.uniform(space.low, space.high, (steps, num_envs, *space.shape)).astype(np.float32))
    )


def step_all(envs, value, num_envs=None):
    return envs.step(torch.full((num_envs or envs.num_envs, *envs.action_space.shape), value))


# ---- shapes, types, and what is never written again ----


@pytest.mark.parametrize("num_envs", [1, 4])
@pytest.mark.parametrize(
    "backend, task", [*product(["envpool", "gym"], TASKS), *product(["torch"], ["CartPole-v1", "Pendulum-v1"])]
)
def test_shapes_and_types(make, backend, task, num_envs):
    envs = make(f"{backend}/{task}", num_envs)
    reference = gymnasium.make(task)
    assert envs.env_id == f"{backend}/{task}" and envs.num_envs == num_envs and envs.value_size == 1
    assert envs.max_episode_steps == reference.spec.max_episode_steps
    assert envs.observation_space.shape == reference.observation_space.shape
    assert envs.observation_space.dtype == np.float32 and envs.critic_observation_space is envs.observation_space
    assert envs.unflattened_shape == reference.observation_space.shape
    assert type(envs.action_space) is type(reference.action_space)
    if isinstance(envs.action_space, gymnasium.spaces.Box):
        assert envs.action_space.dtype == np.float32
        assert (envs.action_space.low == reference.action_space.low).all()
        assert (envs.action_space.high == reference.action_space.high).all()
    obs, critic_obs = envs.reset()
    assert critic_obs is obs
    for action in random_actions(envs.action_space, num_envs, 30):
        step = envs.step(action)
        assert step.obs.shape == (num_envs, *reference.observation_space.shape) and step.obs.dtype == torch.float32
        assert step.critic_obs is step.obs and step.action_mask is None and step.valid is None
        assert step.rewards.shape == (num_envs,) and step.rewards.dtype == torch.float32
        for flags in (step.terminations, step.truncations):
            assert flags.shape == (num_envs,) and flags.dtype == torch.bool
        assert step.obs.is_contiguous() and not step.obs.requires_grad


@pytest.mark.parametrize(
    "env_id",
    ["envpool/CartPole-v1", "envpool/Hopper-v5", "gym/CartPole-v1", "gym/toy_envs:Image-v0", "torch/CartPole-v1"],
)
def test_returned_tensors_are_never_written_again(make, env_id):
    envs = make(env_id)
    kept = [envs.reset()[0]]
    if not env_id.endswith("Image-v0"):
        actions = random_actions(envs.action_space, 4, 60)
    else:
        actions = [torch.zeros(4, 1)] * 60
    copies, ends = [kept[0].clone()], 0
    for action in actions:
        step = envs.step(action)
        tensors = [x for x in (*step[:6], step.final_critic_obs) if x is not None]
        kept += tensors
        copies += [x.clone() for x in tensors]
        ends += int((step.terminations | step.truncations).sum())
    assert ends > 0
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_images_stay_uint8(make):
    envs = make("gym/toy_envs:Image-v0", 2)
    assert envs.reset()[0].dtype == torch.uint8 and envs.observation_space.shape == (2, 3, 3)
    steps = [step_all(envs, 0.0) for _ in range(5)]
    assert steps[3].obs.eq(254).all() and steps[4].obs.eq(250).all() and steps[4].final_obs.eq(255).all()
    assert steps[4].final_obs.dtype == torch.uint8
    atari = make("Pong", 2)
    assert atari.env_id == "envpool/Pong-v5" and atari.reset()[0].shape == (2, 4, 84, 84)
    assert atari.step(torch.tensor([0, 5])).obs.dtype == torch.uint8


@pytest.mark.parametrize(
    "env_id", ["envpool/Hopper-v5", "envpool/Pendulum-v1", "gym/Hopper-v5", "gym/toy_envs:ZeroDim-v0"]
)
def test_no_float64_travels_to_a_device(monkeypatch, env_id):
    seen = []

    def guard(function):
        def guarded(x, *args, **kwargs):
            assert getattr(x, "dtype", None) not in (torch.float64, np.float64), "float64 on its way to a device"
            seen.append(function.__name__)
            return function(x, *args, **kwargs)

        return guarded

    monkeypatch.setattr(torch.Tensor, "to", guard(torch.Tensor.to))
    for name in ("as_tensor", "tensor", "from_numpy"):
        monkeypatch.setattr(torch, name, guard(getattr(torch, name)))
    # The meta device stands in for an accelerator: what arrives there has a shape and a type, but no values.
    envs = vecenvs.make(env_id, 2, torch.device("meta"), 0, {"max_episode_steps": 3} if "toy" not in env_id else {})
    tensors = [*envs.reset()]
    for _ in range(6):
        step = step_all(envs, 0.5)
        tensors += [x for x in step[:7] if x is not None]
    envs.close()
    assert any(x is not None for x in (step.final_obs, seen)) and seen.count("to") >= 7 * 3
    assert {x.device.type for x in tensors} == {"meta"}
    assert {x.dtype for x in tensors} == {torch.float32, torch.bool}


# ---- episodes: same-step autoreset, final observations, termination and truncation ----


@pytest.mark.parametrize("mode, task", [*(("sync", task) for task in TASKS), ("async", "Hopper-v5")])
def test_gymnasium_equals_single_envs_by_hand(make, mode, task):
    steps, limit, seed = 100, 20 if task == "CartPole-v1" else 12, 5
    envs = make(f"gym/{task}", 3, seed, vectorization=mode, max_episode_steps=limit)
    singles = [gymnasium.make(task, max_episode_steps=limit) for _ in range(3)]
    first = np.stack([e.reset(seed=seed + i)[0] for i, e in enumerate(singles)]).astype(np.float32)
    assert np.array_equal(envs.reset()[0], first)
    counts = {"terminated": 0, "truncated": 0}
    for action in random_actions(envs.action_space, 3, steps):
        step = envs.step(action)
        for i, single in enumerate(singles):
            obs, reward, terminated, truncated, _ = single.step(action[i].numpy())
            assert step.rewards[i] == np.float32(reward)
            assert step.terminations[i] == terminated and step.truncations[i] == (truncated and not terminated)
            if step.final_obs is not None:
                assert np.array_equal(step.final_obs[i], np.asarray(obs, np.float32))
            if terminated or truncated:
                counts["terminated" if terminated else "truncated"] += 1
                obs, _ = single.reset()
            assert np.array_equal(step.obs[i], np.asarray(obs, np.float32))
        assert (step.final_obs is not None) == bool(step.truncations.any())
    assert counts["truncated"] > 0
    assert counts["terminated"] > 0 or task == "Pendulum-v1"


@pytest.mark.parametrize("task", TASKS)
def test_envpool_equals_its_next_step_autoreset_without_filler_rows(make, task):
    """The raw simulator gives each env the same transitions, with one meaningless row more after each episode."""
    num_envs, limit, seed = 5, 30, 7
    envs = make(f"envpool/{task}", num_envs, seed, max_episode_steps=limit)
    actions = torch.stack(random_actions(envs.action_space, num_envs, 120))
    obs, expected = envs.reset()[0], []
    ours: list[list[tuple]] = [[] for _ in range(num_envs)]
    for action in actions:
        step = envs.step(action)
        for i in range(num_envs):
            last = step.final_obs[i] if step.final_obs is not None else None
            ours[i].append((obs[i], step.rewards[i], step.terminations[i], step.truncations[i], last, step.obs[i]))
        obs = step.obs

    raw = envpool.make(task, env_type="gymnasium", num_envs=num_envs, seed=seed, max_episode_steps=limit)
    before, played = raw.reset()[0], np.zeros(num_envs, int)
    over, endings, expected = np.zeros(num_envs, bool), 0, [[] for _ in range(num_envs)]
    for _ in range(90):
        array = np.stack([actions[played[i], i].numpy() for i in range(num_envs)])
        after, rewards, terminated, truncated, _ = raw.step(array)
        for i in np.flatnonzero(~over):
            expected[i].append((before[i], rewards[i], terminated[i], truncated[i], after[i]))
            played[i] += 1
        over, before = (terminated | truncated) & ~over, after
        endings += over.sum()
    assert endings >= num_envs
    for i in range(num_envs):
        for (before, reward, terminated, truncated, after), transition in zip(expected[i], ours[i], strict=False):
            obs, our_reward, our_termination, our_truncation, final_obs, next_obs = transition
            assert np.array_equal(obs, before.astype(np.float32)) and our_reward == reward
            assert our_termination | our_truncation == terminated | truncated
            if not our_termination | our_truncation:
                assert np.array_equal(next_obs, after.astype(np.float32))
            if our_truncation:
                assert np.array_equal(final_obs, after.astype(np.float32))
                assert not np.array_equal(next_obs, final_obs)


def set_state(env, task, obs):
    obs = obs.double().numpy()
    if task == "CartPole-v1":
        env.unwrapped.state = obs
    elif task == "Pendulum-v1":
        env.unwrapped.state = np.array([np.arctan2(obs[1], obs[0]), obs[2]])
    else:
        hidden = env.unwrapped.model.nq + env.unwrapped.model.nv - len(obs)  # the x position is not observed
        state = np.concatenate([np.zeros(hidden), obs])
        env.unwrapped.set_state(state[: env.unwrapped.model.nq], state[env.unwrapped.model.nq :])


@pytest.mark.parametrize("task", [*TASKS, "HalfCheetah-v5"])
def test_envpool_final_obs_and_reward_equal_gymnasium_physics(make, task):
    envs, reference, checked = make(f"envpool/{task}", 4, 3, max_episode_steps=3), gymnasium.make(task), 0
    reference.reset(seed=0)
    obs = envs.reset()[0]
    for action in random_actions(envs.action_space, 4, 12):
        step = envs.step(action)
        for i in step.truncations.nonzero().flatten().tolist():
            set_state(reference, task, obs[i])
            expected, reward, terminated, _, _ = reference.unwrapped.step(action[i].numpy())
            assert not terminated
            assert np.allclose(step.final_obs[i], expected, rtol=1e-3, atol=1e-3)
            assert np.isclose(step.rewards[i], reward, rtol=1e-3, atol=1e-3)
            assert not np.allclose(step.obs[i], expected, rtol=1e-3, atol=1e-3)
            checked += 1
        obs = step.obs
    assert checked >= 8


def test_same_step_autoreset_loses_and_invents_no_step(make):
    envs = make("gym/toy_envs:Alternating-v0", 2)
    returns, finished, obs = torch.zeros(2), [], envs.reset()[0]
    for t in range(10):
        step = step_all(envs, 0.0)
        dones = step.terminations | step.truncations
        returns += step.rewards
        finished += [(t, returns[i].item()) for i in dones.nonzero().flatten().tolist()]
        assert torch.equal(step.obs[:, 0], torch.where(dones, 0.0, obs[:, 0] + 1))
        if dones.any():
            assert torch.equal(step.final_obs[:, 0], obs[:, 0] + 1)
        obs, returns = step.obs, returns * ~dones
    assert finished == [(2, 3.0), (3, 4.0), (5, 3.0), (7, 4.0), (8, 3.0)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("ending, terminated", [("truncate", False), ("terminate", True), ("both", True)])
def test_termination_wins(make, mode, ending, terminated):
    envs = make("gym/toy_envs:Counter-v0", 2, length=3, ending=ending, vectorization=mode)
    envs.reset()
    for t in range(1, 7):
        step, end = step_all(envs, 0.0), t % 3 == 0
        assert step.terminations.eq(end and terminated).all() and step.truncations.eq(end and not terminated).all()
        assert (step.final_obs is not None) == (end and not terminated)
        assert step.obs.eq(t % 3).all()


def test_termination_wins_in_envpool(make):
    """A pendulum that is pushed over falls in step 7; a limit of 7 steps does not make that a truncation."""

    def first_end(limit):
        envs = make("envpool/InvertedPendulum-v5", 8, 3, max_episode_steps=limit)
        envs.reset()
        for t in range(1, 50):
            step = step_all(envs, 0.3)
            if (step.terminations | step.truncations).any():
                return t, step
        raise AssertionError("no episode has ended")

    length, step = first_end(1000)
    assert step.terminations.any() and not step.truncations.any() and step.final_obs is None
    fallen = step.terminations
    at_limit, step = first_end(length)
    assert at_limit == length and torch.equal(step.terminations, fallen) and torch.equal(step.truncations, ~fallen)
    before, step = first_end(length - 1)
    assert before == length - 1 and step.truncations.all() and not step.terminations.any()


@pytest.mark.parametrize("env_id", ["Pendulum-v1", "LunarLander-v3", "BipedalWalker-v3", "CheetahRun-v1", "Taxi-v3"])
def test_envpool_time_limit_is_exact(make, env_id):
    """The adapter cuts by itself: any kind of task must start anew from a reset in the middle of an episode."""
    envs = make(f"envpool/{env_id}", 3, max_episode_steps=4)
    envs.reset()
    zero = torch.zeros(3, *envs.action_space.shape, dtype=torch.int64 if env_id[0] in "LT" else torch.float32)
    for t in range(1, 13):
        step = envs.step(zero)
        assert step.truncations.eq(t % 4 == 0).all() and not step.terminations.any()
        assert (step.final_obs is not None) == (t % 4 == 0)


# ---- actions ----


@pytest.mark.parametrize(
    "backend, task",
    [*product(["envpool", "gym"], ["Pendulum-v1", "HalfCheetah-v5"]), ("torch", "Pendulum-v1")],
)
def test_actions_are_clamped_and_the_callers_tensor_is_not(make, backend, task):
    far, edge = make(f"{backend}/{task}", 2, 1), make(f"{backend}/{task}", 2, 1)
    far.reset(), edge.reset()
    high = torch.from_numpy(edge.action_space.high)
    for sign in (1, -1, 1):
        action = torch.full((2, len(high)), 100.0 * sign)
        a, b = far.step(action), edge.step(sign * high.expand(2, -1))
        assert torch.equal(a.obs, b.obs) and torch.equal(a.rewards, b.rewards)
        assert action.eq(100.0 * sign).all()
    if task == "HalfCheetah-v5":
        assert a.rewards.min() > -10  # the control cost of six actions of 1 is 0.6; of 100 it would be 6000


def test_action_units_and_types_arrive_unchanged(make):
    envs = make("gym/toy_envs:EchoAction-v0", 3)
    envs.reset()
    actions = torch.tensor([[-9.0], [0.25], [9.0]], requires_grad=True)
    assert envs.step(actions).rewards.tolist() == [-2.0, 0.25, 3.0]
    unbounded = make("gym/toy_envs:Unbounded-v0", 3)
    unbounded.reset()
    assert unbounded.step(actions).rewards.tolist() == [-9.0, 0.25, 9.0]


def test_matrix_spaces_are_flattened(make):
    envs = make("gym/toy_envs:Matrix-v0", 2)
    assert envs.observation_space.shape == (6,) and envs.action_space.shape == (4,)
    assert envs.reset()[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    step = envs.step(torch.tensor([[0.0, 0.5, 0.1, 0.0], [0.0, 9.0, -9.0, 0.0]]))
    assert step.obs.dtype == torch.float32 and step.obs[1].tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.allclose(step.rewards, torch.tensor([1.5, -9.0]))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_zero_dimensional_spaces(make, num_envs):
    envs = make("gym/toy_envs:ZeroDim-v0", num_envs)
    assert envs.observation_space.shape == (1,) and envs.action_space.shape == (1,)
    assert envs.reset()[0].tolist() == [[0.0]] * num_envs
    step = step_all(envs, 5.0)
    assert step.obs.tolist() == [[1.0]] * num_envs and step.rewards.tolist() == [2.0] * num_envs
    assert step.rewards.dtype == torch.float32


# ---- observations that are no plain vectors ----


@pytest.mark.parametrize("start", [0, 3, -2])
def test_discrete_observations_are_one_hot_and_actions_start_at_start(make, start):
    envs = make("gym/toy_envs:DiscreteObs-v0", 3, start=start)
    assert envs.observation_space.shape == (4,)
    assert torch.equal(envs.reset()[0], torch.eye(4)[[0, 0, 0]])
    for t in range(1, 13):
        step = envs.step(torch.tensor([0, 1, 2]))
        assert torch.equal(step.obs, torch.eye(4)[[(t % 6) % 4] * 3])
        assert step.rewards.tolist() == [start, start + 1, start + 2]
    assert torch.equal(step.final_obs, torch.eye(4)[[2] * 3])


@pytest.mark.parametrize("backend", ["envpool", "gym"])
def test_frozen_lake_is_one_hot(make, backend):
    envs = make(f"{backend}/FrozenLake-v1", 2)
    obs = envs.reset()[0]
    assert torch.equal(obs, torch.eye(16)[[0, 0]])
    for action in random_actions(envs.action_space, 2, 30):
        obs = envs.step(action).obs
        assert obs.sum(1).eq(1).all() and obs.max() == 1


def test_privileged_observations(make):
    envs = make("gym/toy_envs:Asymmetric-v0", 2, length=3)
    assert envs.observation_space.shape == (3,) and envs.critic_observation_space.shape == (7,)
    obs, critic_obs = envs.reset()
    assert obs.shape == (2, 3) and critic_obs.shape == (2, 7) and critic_obs.abs().max() > 100 > obs.abs().max()
    for t in range(1, 7):
        step = step_all(envs, 0.0)
        assert step.obs[:, -1].eq(t % 3).all() and step.critic_obs[:, -1].eq(t % 3).all()
    assert step.final_obs.shape == (2, 3) and step.final_obs[:, -1].eq(3).all()
    assert step.final_critic_obs.shape == (2, 7) and step.final_critic_obs[:, -1].eq(3).all()


def test_dictionaries_are_concatenated_and_masks_split_off(make):
    envs = make("gym/toy_envs:Masked-v0", 2, length=5)
    assert envs.observation_space.shape == (3,)
    assert envs.reset()[0].tolist() == [[0, 0, 7]] * 2 and envs.action_mask.tolist() == [[True, False, False]] * 2
    for t in range(1, 11):
        step, k = envs.step(torch.tensor([0, 0])), (t % 5) % 3
        assert step.obs.tolist() == [[k, -k, 7]] * 2
        assert step.action_mask.dtype == torch.bool and step.action_mask.tolist() == [[i == k for i in range(3)]] * 2
        assert envs.action_mask is step.action_mask
    assert step.final_obs.tolist() == [[2, -2, 7]] * 2


def test_envpool_dictionaries_are_concatenated_in_key_order(make):
    envs = make("envpool/CheetahRun-v1", 2, 3)
    raw = envpool.make("CheetahRun-v1", env_type="gymnasium", num_envs=2, seed=3).reset()[0]
    expected = np.concatenate([raw["position"], raw["velocity"]], 1).astype(np.float32)
    assert np.array_equal(envs.reset()[0], expected) and envs.observation_space.shape == (17,)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_reward_heads(make, mode):
    envs = make("gym/toy_envs:TwoRewards-v0", 3, vectorization=mode)
    envs.reset()
    assert envs.value_size == 2
    assert step_all(envs, 0.0).rewards.tolist() == [[1, -1]] * 3
    assert step_all(envs, 0.0).rewards.tolist() == [[2, -1]] * 3


@pytest.mark.parametrize(
    "env_id, named", [("gym/toy_envs:TupleObs-v0", "Tuple"), ("envpool/TicTacToe-v1", "several players")]
)
def test_what_cannot_be_read_is_refused(make, env_id, named):
    with pytest.raises(InputError, match=named):
        make(env_id)


def test_nan_is_passed_on_to_whoever_checks(make):
    envs = make("gym/toy_envs:NanObs-v0", 2, at_step=2)
    envs.reset()
    assert [step_all(envs, 0.0).obs.isnan().all().item() for _ in range(7)] == [False, True] + [False] * 4 + [True]
    envs = make("gym/toy_envs:NanReward-v0", 2, at_step=3)
    envs.reset()
    assert [step_all(envs, 0.0).rewards.isnan().all().item() for _ in range(4)] == [False, False, True, False]


# ---- hidden entries of observations ----


@pytest.mark.parametrize("backend", ["envpool", "gym"])
def test_masked_observations_are_the_same_but_for_zeros(make, backend):
    plain, masked = (make(f"{backend}/CartPole-v1", 4, 3, mask_obs=m, max_episode_steps=15) for m in ((), (1, 3)))
    keep, ends = torch.tensor([True, False, True, False]), {"terminations": 0, "truncations": 0}
    obs, critic_obs = masked.reset()
    assert torch.equal(obs, torch.where(keep, plain.reset()[0], 0.0)) and critic_obs is obs
    for action in random_actions(plain.action_space, 4, 60):
        a, b = plain.step(action), masked.step(action)
        assert a.obs.ne(0).all() and torch.equal(b.obs, torch.where(keep, a.obs, 0.0)) and b.critic_obs is b.obs
        assert (a.final_obs is None) == (b.final_obs is None) and b.final_critic_obs is b.final_obs
        if a.final_obs is not None:
            assert a.final_obs.ne(0).all() and torch.equal(b.final_obs, torch.where(keep, a.final_obs, 0.0))
        for name in ("rewards", "terminations", "truncations"):
            assert torch.equal(getattr(a, name), getattr(b, name))
        ends = {name: count + int(getattr(a, name).sum()) for name, count in ends.items()}
    assert min(ends.values()) > 0
    for name in ("env_id", "num_envs", "device", "action_space", "max_episode_steps", "value_size", "action_mask"):
        assert getattr(masked, name) == getattr(plain, name)
    assert masked.state_dict() is None and not hasattr(masked, "no_such_attribute")


def test_masked_observation_spaces(make):
    envs = make("gym/toy_envs:DiscreteObs-v0", 3, mask_obs=(0, 2))
    space = envs.observation_space
    assert space.low.tolist() == [0] * 4 and space.high.tolist() == [0, 1, 0, 1] and space.dtype == np.float32
    assert envs.critic_observation_space is space and envs.envs.observation_space.high.tolist() == [1] * 4
    assert torch.equal(envs.reset()[0], torch.zeros(3, 4))
    obs = torch.stack([envs.step(torch.zeros(3, dtype=torch.int64)).obs for _ in range(3)])
    assert torch.equal(obs[:, 0], torch.eye(4)[1:] * torch.tensor([0, 1, 0, 1]))
    low = make("envpool/Pendulum-v1", 1, mask_obs=[2]).observation_space.low
    assert low.tolist() == [-np.inf, -np.inf, 0]


def test_a_privileged_state_is_not_masked(make):
    plain, masked = (make("gym/toy_envs:Asymmetric-v0", 2, 1, length=3, mask_obs=m) for m in ((), (2, 0)))
    assert masked.observation_space.low.tolist() == [0, -np.inf, 0]
    assert masked.critic_observation_space is masked.envs.critic_observation_space
    keep = torch.tensor([0.0, 1.0, 0.0])
    first = plain.reset(), masked.reset()
    steps = [(step_all(plain, 0.0), step_all(masked, 0.0)) for _ in range(6)]
    pairs = [first] + [((a.obs, a.critic_obs), (b.obs, b.critic_obs)) for a, b in steps]
    pairs += [((a.final_obs, a.final_critic_obs), (b.final_obs, b.final_critic_obs)) for a, b in (steps[2], steps[5])]
    for (obs, critic_obs), (masked_obs, masked_critic_obs) in pairs:
        assert torch.equal(masked_obs, obs * keep) and torch.equal(masked_critic_obs, critic_obs)


@pytest.mark.parametrize("probe", [ActionIsObs, Asymmetric])
def test_masks_after_a_resume_and_never_in_the_simulators_own_tensors(probe):
    class Remembers(probe):
        def load_state_dict(self, state):
            self.current = state["obs"], state["critic_obs"]
            return self.current

    envs = Remembers(3, CPU, 0)
    masked, obs = MaskedObsVecEnv(envs, (0,)), torch.full((3, envs.obs_dim), torch.nan)
    critic_obs = obs if probe is ActionIsObs else torch.full((3, 7), 5.0)
    again, critic_again = masked.load_state_dict({"obs": obs, "critic_obs": critic_obs})
    assert again[:, 0].eq(0).all() and again[:, 1:].isnan().all() and obs.isnan().all()
    assert critic_again is (again if probe is ActionIsObs else critic_obs)
    masked.reset()
    for _ in range(5):
        before = envs.current[0].clone()
        step = masked.step(torch.zeros(3, 1))
        assert before[:, 0].ne(0).all() and envs.current[0][:, 0].ne(0).all() and step.obs[:, 0].eq(0).all()


def test_masks_go_together_with_bins_and_evaluations(make):
    envs = make("envpool/Pendulum-v1", 2, action_bins=3, mask_obs=(2,))
    envs.reset()
    step = envs.step(torch.tensor([[0], [2]]))
    assert envs.action_space == gymnasium.spaces.MultiDiscrete([3]) and step.obs[:, 2].eq(0).all()
    evaluation = vecenvs.make_for_episodes("envpool/Pendulum-v1", 4, 2, CPU, 0, [], 0, (0, 1))
    obs = evaluation.reset()[0]
    evaluation.close()
    assert obs[:, :2].eq(0).all() and obs[:, 2].ne(0).all()


@pytest.mark.parametrize(
    "env_id, mask, named",
    [("envpool/CartPole-v1", (1, 4), r"\[4\] not among the 4 entries .* 0 to 3"), ("gym/CartPole-v1", (-1,), "among"),
     ("envpool/CartPole-v1", (1, 3, 1), "twice"), ("gym/toy_envs:Image-v0", (0,), "no vectors, but Box"),
     ("gym/toy_envs:PrivilegedCameras-v0", (0,), "no vectors, but Dict")],
)  # fmt: skip
def test_what_cannot_be_masked_is_refused(make, env_id, mask, named):
    with pytest.raises(InputError, match=named) as error:
        make(env_id, mask_obs=mask)
    assert "\n" not in str(error.value) and f"--mask-obs {' '.join(map(str, mask))}: " in str(error.value)


# ---- seeds ----


@pytest.mark.parametrize(
    "env_id",
    ["envpool/CartPole-v1", "envpool/Hopper-v5", "gym/CartPole-v1", "gym/Hopper-v5", "torch/CartPole-v1",
     "torch/Pendulum-v1"],
)  # fmt: skip
def test_seeds(make, env_id):
    def play(seed):
        envs = make(env_id, 4, seed)
        obs = [envs.reset()[0]]
        obs += [envs.step(action).obs for action in random_actions(envs.action_space, 4, 40)]
        return torch.stack([*obs, envs.reset()[0]])

    zero, again, other = play(0), play(0), play(2**31 - 1)
    assert torch.equal(zero, again) and not torch.equal(zero, other)
    for runs in (zero, other):
        assert len(runs[0].unique(dim=0)) == 4, "all envs must start in different states"
        assert not torch.equal(runs[0], runs[-1]), "the seed must act on the first reset only"


@pytest.mark.parametrize("backend", ["envpool", "gym"])
def test_neighbouring_seeds_share_no_start(make, backend):
    def starts(seed):
        return set(map(tuple, make(f"{backend}/CartPole-v1", 8, seed).reset()[0].tolist()))

    assert len(starts(1) & starts(2)) == 7, "both simulators seed env i with seed + i, which is why seeds are derived"
    derived = [vecenvs.derive_seed(*key) for key in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (0, 0, 0))]
    sets = [starts(seed) for seed in derived]
    assert len(set().union(*sets)) == 8 * len(sets)
    assert all(0 <= seed < 2**31 for seed in derived)


# ---- names and options ----


@pytest.mark.parametrize(
    "env_id, backend, name",
    [
        ("Ant", "envpool", "Ant-v5"),
        ("ant", "envpool", "Ant-v5"),
        ("Ant-v4", "envpool", "Ant-v4"),
        ("envpool/Ant", "envpool", "Ant-v5"),
        ("gym/Ant", "gym", "Ant-v5"),
        ("gym/Ant-v4", "gym", "Ant-v4"),
        ("CartPole", "envpool", "CartPole-v1"),
        ("Pong", "envpool", "Pong-v5"),
        ("HUMANOID", "envpool", "Humanoid-v5"),
        ("Jumanji/Snake-v1", "envpool", "Jumanji/Snake-v1"),
        ("Jumanji/Snake", "envpool", "Jumanji/Snake-v1"),
        ("torch/CartPole", "torch", "CartPole-v1"),
        ("torch/pendulum", "torch", "Pendulum-v1"),
        ("Alternating", "gym", "Alternating-v0"),
        ("toy_envs:Slow-v0", "gym", "toy_envs:Slow-v0"),
        ("gym/toy_envs:Slow-v0", "gym", "toy_envs:Slow-v0"),
    ],
)
def test_names(env_id, backend, name):
    assert vecenvs.resolve(env_id) == (backend, name)


def test_newest_version_is_the_highest_number():
    ids = ["A-v2", "A-v10", "A-v9", "AB-v11", "b-v1", "B-v3", "Plain", "C-v1", "c-v2", "X/A-v20"]
    found = {name: vecenvs.newest(name, ids) for name in ("A", "a", "b", "B", "A-v9", "a-V9", "plain", "X/A", "A-v3")}
    assert found == {
        "A": "A-v10", "a": "A-v10", "b": "b-v1", "B": "B-v3", "A-v9": "A-v9", "a-V9": "A-v9", "plain": "Plain",
        "X/A": "X/A-v20", "A-v3": None,
    }  # fmt: skip
    assert vecenvs.newest("C", ids) == "C-v1" and vecenvs.newest("Z", ids) is None


@pytest.mark.parametrize(
    "env_id, named",
    [
        ("HalfCheeta", "HalfCheetah-v5"),
        ("torch/CarPole", "close names: CartPole-v1"),
        ("torch/Ant", "unknown environment torch/Ant"),
        ("Antt", "close names: Ant-v5"),
        ("Ant-v9", "Ant-v5"),
        ("gym/CarPole", "CartPole-v1"),
        ("envpool/Humanoidd", "Humanoid-v5"),
        ("brax/ant", "brax/ is not available yet"),
        ("isaaclab/Isaac-Ant", "isaaclab/ is not available yet"),
        ("qqqqzzzz", "unknown environment qqqqzzzz"),
        ("no_such_module:Name-v0", "no_such_module"),
        ("gym/toy_envs:NoSuchToy-v0", "NoSuchToy"),
    ],
)
def test_wrong_names_say_what_would_work(make, env_id, named):
    with pytest.raises(InputError) as error:
        make(env_id)
    assert named in str(error.value) and "\n" not in str(error.value)


def test_the_choice_is_printed_once(make, capsys):
    make("Ant", 2)
    assert capsys.readouterr().err == "env: Ant -> envpool/Ant-v5 (2 envs, obs 105, actions 8)\n"
    make("Alternating", 1)
    notice, choice = capsys.readouterr().err.splitlines()
    assert notice == "envpool has no Alternating; using Gymnasium, which is slower"
    assert choice == "env: Alternating -> gym/Alternating-v0 (1 envs, obs 1, actions 1)"


def test_without_envpool_gymnasium_is_used(make, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "envpool", None)
    assert make("CartPole", 1).env_id == "gym/CartPole-v1"
    assert "envpool is not installed" in capsys.readouterr().err
    with pytest.raises(InputError, match="pip install -r requirements.txt"):
        make("envpool/CartPole")


def test_adapters_are_imported_only_when_asked_for(make, monkeypatch):
    monkeypatch.delitem(sys.modules, "common.envs.envpool")
    make("gym/CartPole", 1)
    assert "common.envs.envpool" not in sys.modules


@pytest.mark.parametrize("installed", [True, False])
def test_on_a_gpu_a_bare_name_is_simulated_there_if_it_can_be(monkeypatch, capsys, installed):
    """No GPU and no MuJoCo Warp are needed: names alone decide."""
    made = []

    class Adapter:
        observation_space = action_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)

        def __init__(self, name, num_envs, device, seed, env_kwargs):
            made.append((name, device))
            self.env_id = name

    def adapter(backend):
        made.append(backend)
        return SimpleNamespace(Adapter=Adapter), "Adapter"

    monkeypatch.setattr(vecenvs.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(vecenvs, "_adapter", adapter)
    backend = "warp" if installed else "envpool"
    for device in (torch.device("cuda"), torch.device("cuda", 1), "cuda:0"):
        for name in ("Ant", "ant", "Ant-v5", "HalfCheetah", "InvertedDoublePendulum-v5"):
            assert vecenvs.resolve(name, device) == (backend, vecenvs.resolve(name)[1])
        for name in (
            "Ant-v4",
            "envpool/Ant",
            "gym/Ant",
            "Pendulum",
            "Pong",
            "CartPole",
            "Jumanji/Snake",
            "Alternating",
        ):
            assert vecenvs.resolve(name, device) == vecenvs.resolve(name)
    for device in ("cpu", torch.device("meta")):
        assert vecenvs.resolve("Ant", device) == ("envpool", "Ant-v5")
    vecenvs.make("Hopper", 2, torch.device("cuda", 1), 0)
    assert made == [backend, ("Hopper-v5", torch.device("cuda", 1))]


@pytest.mark.parametrize("num_envs", [0, -4])
def test_number_of_envs(make, num_envs):
    with pytest.raises(InputError, match=f"num_envs {num_envs}"):
        make("CartPole", num_envs)


def test_env_kwargs_are_parsed():
    items = ["a=False", "b=0.3", "c=(1, 2)", "d=text", "e=x=y", "f=None", "g='1'", "h="]
    expected = {"a": False, "b": 0.3, "c": (1, 2), "d": "text", "e": "x=y", "f": None, "g": "1", "h": ""}
    assert vecenvs.parse_env_kwargs(items) == expected and vecenvs.parse_env_kwargs(()) == {}


@pytest.mark.parametrize("item", ["healthy", "=3", "a b=3", "--x=1"])
def test_malformed_env_kwargs(item):
    with pytest.raises(InputError, match=item):
        vecenvs.parse_env_kwargs(["a=1", item])


@pytest.mark.parametrize("backend", ["envpool", "gym"])
def test_env_kwargs_reach_the_simulator(make, backend):
    name = "use_contact_force" if backend == "envpool" else "include_cfrc_ext_in_observation"
    assert make(f"{backend}/Ant-v5", 1).reset()[0].shape == (1, 105)
    assert make(f"{backend}/Ant-v5", 1, **{name: False}).reset()[0].shape == (1, 27)
    assert make(f"{backend}/Ant-v5", 1, max_episode_steps=17).max_episode_steps == 17
    with pytest.raises(InputError, match="no_such_option") as error:
        make(f"{backend}/Ant-v5", 1, no_such_option=1)
    assert "\n" not in str(error.value)


def test_vectorization(make):
    slow, fast = make("toy_envs:Slow-v0", 2), make("toy_envs:Counter-v0", 2)
    assert isinstance(fast.envs, gymnasium.vector.SyncVectorEnv)
    assert isinstance(slow.envs, gymnasium.vector.AsyncVectorEnv)
    assert isinstance(make("toy_envs:Slow-v0", 1).envs, gymnasium.vector.SyncVectorEnv)
    assert isinstance(make("toy_envs:Slow-v0", 2, vectorization="sync").envs, gymnasium.vector.SyncVectorEnv)
    with pytest.raises(InputError, match="vectorization=threads"):
        make("toy_envs:Counter-v0", 2, vectorization="threads")


def test_own_module_in_the_working_directory(make, monkeypatch, tmp_path):
    (tmp_path / "my_own_env.py").write_text(
        "import gymnasium, toy_envs\ngymnasium.register('Mine-v3', toy_envs.Counter, max_episode_steps=9)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert make("my_own_env:Mine-v3", 2).max_episode_steps == 9


def test_a_long_creation_is_announced(make, monkeypatch, capsys):
    monkeypatch.setattr("common.envs.envpool.SLOW_START", 2)
    make("CartPole", 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("creating 2 x CartPole-v1") and "done in" in lines[1] and len(lines) == 3


# ---- the two backends simulate the same task ----


@pytest.mark.parametrize("task, steps", [("Pendulum-v1", 100), ("HalfCheetah-v5", 40)])
def test_backends_agree_statistically(make, task, steps):
    def per_env_means(envs):
        """Rewards, observations and their squares, averaged over time: independent samples [N, 1 + 2 O]."""
        envs.reset()
        taken = [envs.step(action) for action in random_actions(envs.action_space, 32, steps)]
        obs, rewards = torch.stack([s.obs for s in taken]), torch.stack([s.rewards for s in taken])
        return torch.cat([rewards[..., None], obs, obs**2], -1).mean(0)

    a = per_env_means(make(f"envpool/{task}", 32, 11))
    b = per_env_means(make(f"gym/{task}", 32, 11, vectorization="sync"))
    assert not torch.equal(a, b)
    standard_error = ((a.var(0) + b.var(0)) / 32).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() / standard_error).max() < 4
