"""warp/ against Gymnasium on C MuJoCo, step by step from equal states and actions, and the contract of DESIGN.md.

Kernels are compiled in the first run on a machine (about a minute of one core for all tasks) and kept in Warp's cache.
"""

import copy
import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import mujoco
import mujoco_warp as mjw
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common import checkpoint
from common import envs as vecenvs
from common.envs import warp
from common.errors import InputError
from ppo_continuous import Args, main

CPU = torch.device("cpu")
TASKS = [name.removesuffix("-v5") for name in warp.task_ids()]
N = 256

# After a control step from an equal state, 98 % of the worlds differ by at most this: positions and velocities,
# relative to max(1, |x|); what Ant and the humanoids observe beyond them (inertias, velocities of bodies, forces),
# relative to the largest of the world's; rewards, relative to max(1, |r|). The last column: 100 % of the worlds. Where
# a contact just begins, a rounding error decides whether an engine sees it: the 2 %.
TOLERANCES = {
    #                        state  others reward  worst
    "Ant":                    (3e-5, 1e-4, 4e-5, 3e-3),
    "HalfCheetah":            (5e-4, 0e-0, 5e-5, 2e-2),
    "Hopper":                 (1e-5, 0e-0, 1e-5, 1e-3),
    "Walker2d":               (2e-4, 0e-0, 3e-5, 1e-0),
    "Humanoid":               (2e-4, 1e-4, 1e-4, 5e-2),
    "HumanoidStandup":        (2e-4, 1e-3, 1e-5, 5e-1),
    "Swimmer":                (2e-5, 0e-0, 1e-5, 1e-3),
    "Reacher":                (1e-5, 0e-0, 1e-6, 1e-3),
    "Pusher":                 (2e-5, 0e-0, 1e-6, 1e-3),
    "InvertedPendulum":       (2e-6, 0e-0, 0e-0, 1e-4),
    "InvertedDoublePendulum": (1e-5, 0e-0, 2e-6, 1e-3),
}  # fmt: skip
TERMINATING = {"Ant", "Hopper", "Walker2d", "Humanoid", "InvertedPendulum", "InvertedDoublePendulum"}
STEEP_ANT = 5.0  # bound on the state's difference where a steep shin is at the ground; see warp.py's table

# Values of Gymnasium's options that change every term; the weights are large enough for each to be seen.
OPTIONS = {
    "Ant": dict(forward_reward_weight=2, ctrl_cost_weight=0.3, contact_cost_weight=0.05, healthy_reward=3,
                main_body="front_left_leg", healthy_z_range=(0.45, 0.7), contact_force_range=(-0.5, 0.2),
                exclude_current_positions_from_observation=False, frame_skip=3),
    "HalfCheetah": dict(forward_reward_weight=2, ctrl_cost_weight=0.7, frame_skip=2,
                        exclude_current_positions_from_observation=False),
    "Hopper": dict(forward_reward_weight=2, ctrl_cost_weight=0.3, healthy_reward=3, healthy_state_range=(-2, 1.1),
                   healthy_z_range=(0.9, 1.24), healthy_angle_range=(-0.1, 0.05), frame_skip=2,
                   exclude_current_positions_from_observation=False),
    "Walker2d": dict(forward_reward_weight=2, ctrl_cost_weight=0.3, healthy_reward=3, terminate_when_unhealthy=False,
                     healthy_z_range=(1.1, 1.24), healthy_angle_range=(-0.2, 0.1), frame_skip=2,
                     exclude_current_positions_from_observation=False),
    "Humanoid": dict(forward_reward_weight=2, ctrl_cost_weight=0.3, contact_cost_weight=1e-4, healthy_reward=3,
                     contact_cost_range=(0.2, 2.0), healthy_z_range=(1.2, 1.395), frame_skip=2,
                     include_cinert_in_observation=False, include_cfrc_ext_in_observation=False,
                     exclude_current_positions_from_observation=False),
    "HumanoidStandup": dict(ctrl_cost_weight=0.3, impact_cost_weight=1e-4, impact_cost_range=(0.2, 2.0), frame_skip=2,
                            include_cvel_in_observation=False, include_qfrc_actuator_in_observation=False,
                            exclude_current_positions_from_observation=False),
    "Swimmer": dict(forward_reward_weight=2, ctrl_cost_weight=0.3, frame_skip=2,
                    exclude_current_positions_from_observation=False),
    "Reacher": dict(reward_dist_weight=2, reward_control_weight=0.3, frame_skip=3),
    "Pusher": dict(reward_near_weight=2, reward_dist_weight=3, reward_control_weight=0.7, frame_skip=3),
    "InvertedPendulum": dict(reset_noise_scale=0.19, frame_skip=4),
    "InvertedDoublePendulum": dict(healthy_reward=3, frame_skip=3),
}  # fmt: skip


@pytest.fixture
def make():
    """vecenvs.make of a task of warp/ on the CPU; what it made is closed after the test."""
    made = []

    def _make(task, num_envs=4, seed=0, **env_kwargs):
        made.append(vecenvs.make(f"warp/{task}", num_envs, CPU, seed, env_kwargs))
        return made[-1]

    yield _make
    for envs in made:
        envs.close()
        envs.close()


def random_actions(envs, steps, seed=0):
    """A list of action tensors [N, A] inside the bounds."""
    generator, space = torch.Generator().manual_seed(seed), envs.action_space
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    return [low + (high - low) * torch.rand(envs.num_envs, len(low), generator=generator) for _ in range(steps)]


# ---- the two engines, step by step ----


def set_state(env, qpos, qvel):
    """A Gymnasium env as its reset leaves it, but in this state; returns the observation."""
    mujoco.mj_resetData(env.model, env.data)
    env.set_state(np.asarray(qpos, np.float64), np.asarray(qvel, np.float64))
    return env._get_obs()


def states_of_rollouts(task, count, seed=0):
    """qpos [count, nq] and qvel [count, nv] of random play in Gymnasium, and actions, some of which end an episode."""
    env, rng, rows, ends = gymnasium.make(f"{task}-v5"), np.random.default_rng(seed), [], 0
    data, space = env.unwrapped.data, env.action_space
    env.reset(seed=seed)
    while len(rows) < 12 * count or task in TERMINATING and ends < 20:
        state = data.qpos.copy(), data.qvel.copy()
        action = rng.uniform(space.low, space.high).astype(np.float32)
        _, _, terminated, truncated, _ = env.step(action)
        rows.append((*state, action, terminated))
        ends += terminated
        if terminated or truncated or len(rows) % 100 == 0:
            env.reset()
    ending = [row for row in rows if row[3]][: count // 4]
    going_on = [row for row in rows if not row[3]]
    rows = ending + [going_on[i] for i in rng.choice(len(going_on), count - len(ending), replace=False)]
    qpos, qvel, actions, _ = (torch.from_numpy(np.array(column)).float() for column in zip(*rows, strict=True))
    if task == "InvertedDoublePendulum":  # some carts run into the end of their track, whose force is observed
        qpos[::8, 0], qvel[::8, 0] = 0.95, 3
    return (qpos, qvel), actions


def has_steep_shin_at_the_ground(model, data):
    """Where MuJoCo Warp turns the friction pyramid: a capsule within 30 degrees of the vertical; with a margin."""
    mujoco.mj_kinematics(model, data)
    capsules = model.geom_type == mujoco.mjtGeom.mjGEOM_CAPSULE
    cosine = np.abs(data.geom_xmat[capsules][:, 8])
    height = data.geom_xpos[capsules][:, 2] - model.geom_size[capsules][:, 1] * cosine - model.geom_size[capsules][:, 0]
    return bool(((cosine > 0.8) & (height < 0.03)).any())


def step_of_ant_is_steep(env, action):
    """Whether a shin is steep at the ground somewhere in the control step that would come next."""
    data = mujoco.MjData(env.model)
    mujoco.mj_copyData(data, env.model, env.data)
    data.ctrl[:] = action
    steep = has_steep_shin_at_the_ground(env.model, data)
    for _ in range(env.frame_skip):
        mujoco.mj_step(env.model, data)
        steep |= has_steep_shin_at_the_ground(env.model, data)
    return steep


def given_starts(envs, given):
    """Make envs start from these states, one entry a call, then from random ones; returns a list that grows by all."""
    starts, draw = [], envs.task.first_states

    def first_states():
        qpos, qvel = given[len(starts)] if len(starts) < len(given) else draw()
        starts.append((qpos.clone(), qvel.clone()))
        return qpos, qvel

    envs.task.first_states = first_states
    return starts


def gymnasium_by_hand(task, starts, actions, limit, options):
    """What num_envs Gymnasium envs with same-step autoreset return: first obs, and for each step a dict of arrays.

    starts[t] are the states of episodes that begin after step t. `steep` marks Ants past a steep shin.
    """
    env = gymnasium.make(f"{task}-v5", **options).unwrapped
    env.reset(seed=0)
    first, columns = [], [[] for _ in actions]
    for i in range(len(actions[0])):
        first.append(set_state(env, starts[0][0][i], starts[0][1][i]))
        length, steep = 0, False
        for t, action in enumerate(actions):
            steep = steep or task == "Ant" and step_of_ant_is_steep(env, action[i].numpy())
            last, reward, terminated, _, _ = env.step(action[i].numpy().astype(np.float64))
            length += 1
            truncated = length == limit and not terminated
            obs = set_state(env, starts[t + 1][0][i], starts[t + 1][1][i]) if terminated or truncated else last
            length *= not (terminated or truncated)
            columns[t].append((last, reward, terminated, truncated, obs, steep))
    names = ("final_obs", "rewards", "terminations", "truncations", "obs", "steep")
    return np.array(first), [
        {name: np.array(x) for name, x in zip(names, zip(*column, strict=True), strict=True)} for column in columns
    ]


def assert_close(ours, expected, tolerance, worst):
    """Rows [N, K], relative to max(1, |expected|): 98 % within tolerance, all within worst."""
    error = (np.abs(ours.double().numpy() - expected) / np.maximum(1, np.abs(expected))).reshape(len(expected), -1)
    assert np.quantile(error.max(1), 0.98) <= tolerance and error.max() <= worst


def assert_obs_close(task, env, ours, expected, tolerance, others_tolerance, worst):
    size = expected.shape[1]
    if task in ("Ant", "Humanoid", "HumanoidStandup"):
        size = env.model.nq + env.model.nv - env.observation_structure["skipped_qpos"]
    assert_close(ours[:, :size], expected[:, :size], tolerance, worst)
    if size < expected.shape[1]:
        scale = np.maximum(1, np.abs(expected[:, size:]).max(1, keepdims=True))
        assert_close(ours[:, size:] / torch.from_numpy(scale), expected[:, size:] / scale, others_tolerance, worst)


def compare(envs, task, given, actions, limit, options):
    """Play both; returns what was compared, as gymnasium_by_hand does."""
    starts = given_starts(envs, given)
    first, taken = envs.reset()[0], [envs.step(action) for action in actions]
    expected_first, expected = gymnasium_by_hand(task, starts, actions, limit, options)
    state, others, reward, worst = TOLERANCES[task]
    env = envs.task.env
    assert_obs_close(task, env, first, expected_first, 1e-5, 1e-5, 1e-5)
    for step, wanted in zip(taken, expected, strict=True):
        same = ~wanted["steep"]
        assert same.sum() >= N / 4
        assert np.array_equal(step.terminations[same], wanted["terminations"][same])
        assert np.array_equal(step.truncations[same], wanted["truncations"][same])
        assert_obs_close(task, env, step.final_obs[same], wanted["final_obs"][same], state, others, worst)
        assert_obs_close(task, env, step.obs[same], wanted["obs"][same], state, others, worst)
        assert_close(step.rewards[same], wanted["rewards"][same], reward, worst)
    return taken, expected


@pytest.mark.parametrize("task", TASKS)
def test_equals_gymnasium(make, task):
    """From states of random play, over ends of both kinds, and again from the env's own first states."""
    (qpos, qvel), action = states_of_rollouts(task, N)
    envs = make(task, N, max_episode_steps=2)
    given = [(qpos, qvel), (qpos.roll(1, 0), qvel.roll(1, 0))]
    actions = [action, action.roll(3, 0), *random_actions(envs, 2)]
    taken, expected = compare(envs, task, given, actions, 2, {})
    ends = {name: sum(int(step[name].sum()) for step in expected) for name in ("terminations", "truncations")}
    assert ends["truncations"] > N
    assert ends["terminations"] >= 10 if task in TERMINATING else ends["terminations"] == 0
    steep = expected[0]["steep"]
    if task == "Ant":
        error = np.abs(taken[0].final_obs.numpy() - expected[0]["final_obs"])[steep, :27].max(1)
        assert 10 <= steep.sum() and np.median(error) < 0.1 and error.max() < STEEP_ANT
        assert (error > 1e-2).sum() >= 3, "the engines agree on steep shins now: compare those rows as the others"
    else:
        assert not steep.any()


@pytest.mark.parametrize("task", TASKS)
def test_options_of_gymnasium(make, task):
    (qpos, qvel), action = states_of_rollouts(task, N, seed=1)
    envs = make(task, N, **OPTIONS[task])
    given = [(qpos, qvel), (qpos.roll(1, 0), qvel.roll(1, 0))]
    _, expected = compare(envs, task, given, [action, action.roll(3, 0)], None, OPTIONS[task])
    ended = int(expected[0]["terminations"].sum())
    assert ended > 20 if task in TERMINATING - {"Walker2d"} else ended == 0


def test_a_model_of_ones_own(make, tmp_path):
    xml = gymnasium.make("Ant-v5").unwrapped.fullpath
    text = open(xml).read()
    assert 'gear="150"' in text
    (tmp_path / "weak.xml").write_text(text.replace('gear="150"', 'gear="40"'))
    options = {"xml_file": str(tmp_path / "weak.xml")}
    (qpos, qvel), action = states_of_rollouts("Ant", N, seed=2)
    compare(make("Ant", N, **options), "Ant", [(qpos, qvel)], [action], None, options)


def test_the_recorded_physics_is_that_of_the_engine(make):
    """Bit for bit, also while an env of another task is stepped in turn with it."""
    envs, other, plain = make("Ant", 8), make("Hopper", 3), make("Ant", 8)
    envs.reset(), other.reset(), plain.load_state_dict(envs.state_dict())
    for action, others in zip(random_actions(envs, 12), random_actions(other, 12), strict=True):
        plain.data.ctrl.copy_(action)
        for _ in range(5):
            mjw.step(plain.warp_model, plain.warp_data)
        mjw.rne_postconstraint(plain.warp_model, plain.warp_data)
        expected = plain.task.observe()
        other.step(others)
        assert torch.equal(envs.step(action).final_obs, expected)
        plain.load_state_dict(envs.state_dict())


@pytest.mark.parametrize("task", ["Ant", "Humanoid"])
def test_an_episode_does_not_depend_on_the_one_before(make, task):
    fresh, used = make(task, 8), make(task, 8)
    actions = random_actions(fresh, 20)
    used.reset()
    for action in actions:
        used.step(action)
    start = fresh.task.first_states()
    given_starts(fresh, [start]), given_starts(used, [start])
    assert torch.equal(fresh.reset()[0], used.reset()[0])
    for action in actions[:3]:
        a, b = fresh.step(action), used.step(action)
        assert torch.equal(a.final_obs, b.final_obs) and torch.equal(a.rewards, b.rewards)


# ---- first states ----


def gymnasium_first_states(task, count, **options):
    env = gymnasium.make(f"{task}-v5", **options).unwrapped
    env.reset(seed=1)
    rows = []
    for _ in range(count):
        env.reset()
        rows.append(np.concatenate([env.data.qpos, env.data.qvel]))
    return np.array(rows, np.float32)


def our_first_states(envs, count):
    rows = []
    while len(rows) * envs.num_envs < count:
        envs.reset()
        rows.append(torch.cat([envs.data.qpos, envs.data.qvel], 1).numpy().copy())
    return np.concatenate(rows)


@pytest.mark.parametrize("task", TASKS)
def test_first_states_are_distributed_as_gymnasiums(make, task):
    count, envs = 4096, make(task, 64)
    ours, theirs = our_first_states(envs, count), gymnasium_first_states(task, count)
    assert len(np.unique(ours, axis=0)) == count
    # Mean and standard deviation; all numbers are within the bounds of either sample, or the noise is Gaussian.
    scale = np.maximum(theirs.std(0), 1e-9)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) / scale).max() < 5 * (2 / count) ** 0.5
    assert np.abs(ours.std(0) / scale - (theirs.std(0) / scale)).max() < 0.08
    # The whole distribution of each number (Kolmogorov and Smirnov), and how they hang together.
    for a, b in zip(ours.T, theirs.T, strict=True):
        at = np.concatenate([a, b])
        cdfs = (np.searchsorted(np.sort(x), at, side="right") / count for x in (a, b))
        assert np.abs(next(cdfs) - next(cdfs)).max() < 2.4 * (2 / count) ** 0.5
    with np.errstate(invalid="ignore"):  # constants have no correlation
        correlations = [np.nan_to_num(np.corrcoef(x.T)) for x in (ours, theirs)]
    assert np.abs(correlations[0] - correlations[1]).max() < 6 * (2 / count) ** 0.5


@pytest.mark.parametrize("task", TASKS)
def test_first_states_stay_within_gymnasiums_bounds(make, task):
    envs = make(task, 64)
    env, nq, states = envs.task.env, envs.task.env.model.nq, torch.from_numpy(our_first_states(envs, 4096))
    if task == "Reacher":
        goal, rest = states[:, nq - 2 : nq], torch.cat([states[:, : nq - 2], states[:, nq:] * 20], 1)
        assert goal.norm(dim=1).max() < 0.2 and goal.norm(dim=1).max() > 0.195
        assert rest.abs().max() <= 0.1 and states[:, -2:].eq(0).all()
    elif task == "Pusher":
        x, y = states[:, nq - 4], states[:, nq - 3]
        assert x.min() >= -0.3 and x.max() <= 0 and y.abs().max() <= 0.2 and (x**2 + y**2).sqrt().min() > 0.17
        assert torch.equal(states[:, : nq - 4], torch.from_numpy(env.init_qpos[:-4]).float().expand(len(states), -1))
        assert states[:, nq - 2 : nq].eq(0).all()
        assert states[:, nq:].abs().max() <= 0.005 and states[:, -4:].eq(0).all()
    else:
        scale = env._reset_noise_scale
        qpos, qvel = states[:, :nq] - torch.from_numpy(env.init_qpos).float(), states[:, nq:]
        assert 0.99 * scale < qpos.abs().max() <= scale + 1e-6
        gaussian = task in ("Ant", "HalfCheetah", "InvertedDoublePendulum")
        assert (qvel.abs().max() > 3 * scale) if gaussian else (qvel.abs().max() <= scale)


def test_reset_noise_scale(make):
    ours = our_first_states(make("Hopper", 64, reset_noise_scale=0.3), 512)
    theirs = gymnasium_first_states("Hopper", 512, reset_noise_scale=0.3)
    assert np.abs(ours.std(0) / theirs.std(0) - 1).max() < 0.2


# ---- the contract ----


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("task", TASKS)
def test_shapes_and_types(make, capsys, task, num_envs):
    envs, reference = make(task, num_envs), gymnasium.make(f"{task}-v5")
    assert capsys.readouterr().out == ""
    assert envs.env_id == f"warp/{task}-v5" and envs.num_envs == num_envs and envs.value_size == 1
    assert envs.device == CPU and envs.max_episode_steps == reference.spec.max_episode_steps
    assert envs.observation_space.shape == reference.observation_space.shape
    assert envs.observation_space.dtype == envs.action_space.dtype == np.float32
    assert envs.critic_observation_space is envs.observation_space
    assert envs.unflattened_shape == reference.observation_space.shape
    assert (envs.action_space.low == reference.action_space.low).all()
    assert (envs.action_space.high == reference.action_space.high).all()
    obs, critic_obs = envs.reset()
    assert critic_obs is obs and obs.shape == (num_envs, *reference.observation_space.shape)
    for action in random_actions(envs, 3):
        step = envs.step(action)
        assert step.critic_obs is step.obs and step.final_critic_obs is step.final_obs
        assert step.action_mask is None and step.valid is None
        for x in (step.obs, step.final_obs):
            assert x.shape == obs.shape and x.dtype == torch.float32 and x.is_contiguous()
        assert step.rewards.shape == (num_envs,) and step.rewards.dtype == torch.float32
        for flags in (step.terminations, step.truncations):
            assert flags.shape == (num_envs,) and flags.dtype == torch.bool


def test_returned_tensors_are_never_written_again(make):
    for task in ("InvertedPendulum", "Ant"):
        envs = make(task, max_episode_steps=9)
        kept = [envs.reset()[0]]
        copies = [kept[0].clone()]
        for action in random_actions(envs, 25):
            tensors = [x for x in envs.step(action)[:7] if x is not None]
            kept += tensors
            copies += [x.clone() for x in tensors]
        kept.append(envs.reset()[0])
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=False)) and len(kept) == len(copies) + 1


@pytest.mark.parametrize("task, limit", [("HalfCheetah", 4), ("Reacher", None)])
def test_time_limit_is_exact(make, task, limit):
    envs = make(task, 3, **({} if limit is None else {"max_episode_steps": limit}))
    limit = limit or 50
    obs = envs.reset()[0]
    for t, action in enumerate(random_actions(envs, 2 * limit + 1), 1):
        step = envs.step(action)
        assert step.truncations.eq(t % limit == 0).all() and not step.terminations.any()
        assert torch.equal(step.obs, step.final_obs) == (t % limit != 0)
        assert not torch.equal(step.final_obs, obs)
        obs = step.obs


def test_termination_wins_and_each_env_has_its_own_clock(make):
    """Pendulums that are pushed over fall after some steps; a limit of as many does not make that a truncation."""

    def ends(limit):
        envs, result = make("InvertedPendulum", 8, 3, max_episode_steps=limit), []
        envs.reset()
        for _ in range(2 * limit):
            step = envs.step(torch.linspace(0.3, 1.5, 8)[:, None])
            assert not (step.terminations & step.truncations).any()
            result.append((step.terminations, step.truncations))
        return torch.stack([t for t, _ in result]), torch.stack([t for _, t in result])

    falls, cuts = ends(1000)
    assert not cuts.any() and falls.any(0).all()
    first_fall = falls.int().argmax(0)
    limit = int(first_fall.median()) + 1
    assert first_fall.min() + 1 < limit or first_fall.max() + 1 > limit
    falls_again, cuts = ends(limit)
    for i, fall in enumerate(first_fall.tolist()):
        ended_at = min(fall + 1, limit)
        flags = torch.stack([falls_again[:ended_at, i], cuts[:ended_at, i]])
        assert not flags[:, :-1].any() and flags[:, -1].tolist() == [fall + 1 <= limit, fall + 1 > limit]


def test_an_unlimited_episode(make):
    envs = make("HalfCheetah", 2, max_episode_steps=-1)
    envs.reset()
    envs.elapsed += 100_000
    assert envs.max_episode_steps is None and not envs.step(torch.zeros(2, 6)).truncations.any()


def test_actions_are_clamped_and_the_callers_tensor_is_not(make):
    for task in ("HalfCheetah", "Pusher", "Humanoid"):
        far, edge = make(task, 2, 1), make(task, 2, 1)
        far.reset(), edge.reset()
        high = torch.from_numpy(edge.action_space.high)
        for sign in (1, -1, 1):
            action = torch.full((2, len(high)), 100.0 * sign, requires_grad=True)
            a, b = far.step(action), edge.step(sign * high.expand(2, -1))
            assert torch.equal(a.obs, b.obs) and torch.equal(a.rewards, b.rewards)
            assert action.eq(100.0 * sign).all() and not a.obs.requires_grad and not a.rewards.requires_grad
            half = far.step(action * 0 + high / 2)
            assert not torch.equal(half.obs, edge.step(action * 0 + high).obs)
            far.load_state_dict(edge.state_dict())


def test_seeds(make):
    def play(seed):
        envs = make("InvertedPendulum", 4, seed)
        obs = [envs.reset()[0], *(envs.step(action).obs for action in random_actions(envs, 40))]
        return torch.stack([*obs, envs.reset()[0]])

    zero, again, other = play(0), play(0), play(2**31 - 1)
    assert torch.equal(zero, again) and not torch.equal(zero, other)
    for runs in (zero, other):
        assert len(runs[0].unique(dim=0)) == 4, "all envs must start in different states"
        assert not torch.equal(runs[0], runs[-1]), "the seed must act on the first reset only"


class NoWaiting(TorchDispatchMode):
    """Refuses every operation whose result's value or shape the host would have to wait for on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        assert not any(x in name for x in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")), name
        if "index" in name:
            indices = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            assert not any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in indices[1:]), name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", ["Ant", "Humanoid", "Pusher", "Reacher", "InvertedDoublePendulum"])
def test_a_step_never_waits_for_the_device(make, monkeypatch, task):
    envs = make(task, 3, max_episode_steps=2)
    actions = random_actions(envs, 3)
    envs.reset()
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    with NoWaiting():
        for action in actions:
            envs.step(action)
        envs.reset()


# ---- state ----


@pytest.mark.parametrize("task", ["Ant", "Humanoid", "InvertedDoublePendulum"])
def test_a_saved_state_goes_on_exactly(make, task):
    envs = make(task, 16, 1, max_episode_steps=23)
    envs.reset()
    actions = random_actions(envs, 60)
    for action in actions[:30]:
        before = envs.step(action)
    file = io.BytesIO()
    torch.save(envs.state_dict(), file)
    file.seek(0)
    state = envs.state_dict()
    kept = copy.deepcopy(state)
    played = [envs.step(action) for action in actions[30:]]
    assert all(torch.equal(kept[name], state[name]) for name in kept), "a state must not change with the env"
    restored = make(task, 16, 99, max_episode_steps=23)
    restored.reset()
    obs, critic_obs = restored.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(obs, before.obs) and critic_obs is obs
    ends = 0
    for action, step in zip(actions[30:], played, strict=True):
        again = restored.step(action)
        assert all(torch.equal(x, y) for x, y in zip(again[:7], step[:7], strict=True) if x is not None)
        ends += int((step.terminations | step.truncations).sum())
    assert ends >= 16


def test_a_resumed_training_is_the_same_training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    args = Args(env_id="warp/InvertedPendulum-v5", run_name="whole", total_timesteps=6 * 64, device="cpu", num_envs=8,
                num_steps=8, num_minibatches=4, update_epochs=2, hidden_sizes=(16,), torch_threads=1)  # fmt: skip
    main(args)
    main(replace(args, run_name="parts", total_timesteps=3 * 64))
    main(replace(args, run_name="parts", resume="runs/parts/last.pt"))
    whole, parts = (checkpoint.load(f"runs/{name}/last.pt") for name in ("whole", "parts"))
    assert whole["global_step"] == parts["global_step"] == 6 * 64
    assert all(torch.equal(x, parts["agent"][name]) for name, x in whole["agent"].items())
    assert torch.equal(whole["ranks"][0]["envs"]["qpos"], parts["ranks"][0]["envs"]["qpos"])


def test_a_state_of_another_kind_of_device_goes_on_with_other_random_numbers(make):
    envs = make("Hopper", 2)
    envs.reset()
    state = envs.state_dict() | {"generator": torch.zeros(16, dtype=torch.uint8)}
    assert torch.equal(envs.load_state_dict(state)[0], state["obs"])
    envs.step(torch.zeros(2, 3))


# ---- names, options and refusals ----


def test_the_resolver_knows_the_tasks_without_importing_them():
    assert sorted(vecenvs._warp_ids()) == sorted(warp.task_ids())
    assert vecenvs.resolve("warp/ant") == vecenvs.resolve("Ant", "cuda") == ("warp", "Ant-v5")
    code = "import sys; from common import envs; envs.resolve('Ant', 'cuda'), envs.resolve('Ant')"
    code += "; assert not {'warp', 'mujoco_warp', 'common.envs.warp'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
    for name, task in warp.TASKS.items():
        env = gymnasium.make(name).unwrapped
        assert f"{task.__name__}Env" == type(env).__name__


@pytest.mark.parametrize("package", ["warp", "mujoco_warp"])
def test_a_missing_package_is_named_with_what_installs_it(make, monkeypatch, package):
    monkeypatch.delitem(sys.modules, "common.envs.warp")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"warp/ needs {package}: pip install -r requirements-warp.txt"):
        make("Ant")


@pytest.mark.parametrize(
    "task, options, named",
    [
        ("Ant", {"use_contact_force": False}, "takes gym/Ant-v5's options"),
        ("Ant", {"render_mode": "rgb_array"}, "gym/Ant-v5 does"),
        ("Ant", {"xml_file": "/no/such.xml"}, "no/such.xml"),
        ("Ant", {"njmax": "many"}, "njmax"),
        ("Antt", {}, "close names: Ant-v5"),
        ("Ant-v4", {}, "close names: Ant-v5"),
        ("Doom", {}, "InvertedDoublePendulum-v5"),
    ],
)
def test_refusals(make, task, options, named):
    with pytest.raises(InputError) as error:
        make(task, **options)
    assert named in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, named",
    [
        (("<motor", '<general dyntype="filter" dynprm="0.1"'), "actuators with a state"),
        (("<option", '<option integrator="discrete" noslip_iterations="3"'), "noslip"),
    ],
)
def test_models_that_the_engine_cannot_run_are_refused(make, tmp_path, change, named):
    text = open(gymnasium.make("HalfCheetah-v5").unwrapped.fullpath).read()
    assert change[0] in text
    (tmp_path / "changed.xml").write_text(text.replace(*change))
    with pytest.raises(InputError, match=named):
        make("HalfCheetah", xml_file=str(tmp_path / "changed.xml"))


def test_buffers_of_other_sizes_give_the_same_physics(make, capfd):
    envs, small = make("Ant", 8), make("Ant", 8, njmax=64, nconmax=16)
    envs.reset(), small.reset()
    for action in random_actions(envs, 20):
        assert torch.equal(envs.step(action).obs, small.step(action).obs)
    assert "overflow" not in capfd.readouterr().out
    tiny = make("Ant", 8, njmax=2)
    tiny.reset()
    for action in random_actions(envs, 20):
        tiny.step(action)
    assert "njmax" in capfd.readouterr().out


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_a_gpu_steps_as_a_cpu_and_without_waiting(make, task):
    """Not run yet: no GPU was at hand when this was written."""
    (qpos, qvel), action = states_of_rollouts(task, N)
    envs, gpu = make(task, N), vecenvs.make(f"warp/{task}", N, torch.device("cuda"), 0, {})
    gpu_start = qpos.cuda(), qvel.cuda()
    given_starts(envs, [(qpos, qvel)]), given_starts(gpu, [gpu_start])
    assert_close(gpu.reset()[0].cpu(), envs.reset()[0].numpy(), 1e-5, 1e-4)
    gpu_action = action.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ours = gpu.step(gpu_action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, (state, others, reward, _) = envs.step(action), TOLERANCES[task]
    assert_close(ours.rewards.cpu(), expected.rewards.numpy(), 2 * reward + 1e-6, np.inf)
    assert_obs_close(
        task, envs.task.env, ours.final_obs.cpu(), expected.final_obs.numpy(), 2 * state, 2 * others, np.inf
    )
    gpu.close()
