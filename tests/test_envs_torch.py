"""torch/: equal to Gymnasium's physics, resets of its distribution, exact resume, and nothing that waits for a device.

The contract's shapes, types, seeds and names are in test_envs.py.
"""

import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ppo_continuous
import ppo_discrete
from common import checkpoint
from common import envs as vecenvs
from common.envs.torch_tasks import TASKS, task_ids
from common.errors import InputError

CPU = torch.device("cpu")


def make(task, num_envs=4, seed=0, device=CPU, **env_kwargs):
    return vecenvs.make(f"torch/{task}", num_envs, device, seed, env_kwargs)


def some_actions(task, obs, rng):
    """Random in a third of the envs; controlled in the others: balanced, off the track, swung up, in circles."""
    num_envs = len(obs)
    kind, sign = torch.arange(num_envs) % 3, 1 - 2 * (torch.arange(num_envs) % 2)
    if task == "CartPole-v1":
        balance = 3 * obs[:, 2] + obs[:, 3] + 0.1 * sign * (kind - 1)
        return torch.where(kind == 0, torch.from_numpy(rng.integers(0, 2, num_envs)), (balance > 0).long())
    random = torch.from_numpy(rng.uniform(-3, 3, (num_envs, 1)).astype(np.float32))
    along = torch.where(obs[:, 2] == 0, 1.0, obs[:, 2].sign())
    return torch.where((kind == 0)[:, None], random, 2 * torch.where(kind == 1, along, sign)[:, None])


@pytest.mark.parametrize("task, limit", [("CartPole-v1", 500), ("CartPole-v1", 13), ("Pendulum-v1", 200)])
def test_equals_gymnasium_step_for_step(task, limit):
    """1000 steps with the same actions; after each reset the reference gets the same first state."""
    envs = make(task, 30, max_episode_steps=limit)
    references = [gymnasium.make(task, max_episode_steps=limit) for _ in range(30)]
    obs, rng, counts, far = envs.reset()[0], np.random.default_rng(0), {"terminated": 0, "truncated": 0}, []

    def begin(i):
        references[i].reset()
        references[i].unwrapped.state = envs.state[i].numpy().copy()

    for i in range(30):
        begin(i)
    for _ in range(1000):
        action = some_actions(task, obs, rng)
        step = envs.step(action)
        expected = [e.step(a.item() if a.ndim == 0 else a.numpy()) for e, a in zip(references, action, strict=True)]
        last, rewards, terminated, truncated, _ = map(np.array, zip(*expected, strict=True))
        np.testing.assert_allclose(step.final_obs, last, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(step.rewards, rewards, rtol=1e-6, atol=1e-6)
        truncated &= ~terminated
        assert np.array_equal(step.terminations, terminated) and np.array_equal(step.truncations, truncated)
        assert step.final_critic_obs is step.final_obs
        dones = step.terminations | step.truncations
        assert torch.equal(step.obs[~dones], step.final_obs[~dones])
        for i in dones.nonzero().flatten().tolist():
            begin(i)
            first = references[i].unwrapped._get_obs() if task == "Pendulum-v1" else envs.state[i].numpy()
            np.testing.assert_allclose(step.obs[i], first, rtol=1e-6, atol=1e-6)
        counts["terminated"] += terminated.sum()
        counts["truncated"] += truncated.sum()
        far.append(step.final_obs[:, [0, 2]])
        obs = step.obs
    assert counts["truncated"] > 0 and (counts["terminated"] > 0 or task == "Pendulum-v1")
    far = torch.stack(far)
    if limit == 500:  # all four ways to fail
        assert far[..., 0].max() > 2.4 and far[..., 0].min() < -2.4
        assert far[..., 1].max() > math.radians(12) and far[..., 1].min() < -math.radians(12)
    if task == "Pendulum-v1":
        assert far[..., 1].max() == 8 and far[..., 1].min() == -8


@pytest.mark.parametrize("turns", [0, 3, -3])
def test_pendulums_angle_is_counted_from_upright(turns):
    """The reward of an angle and of the same one some turns further, also on both sides of where it jumps."""
    angles = torch.tensor([0.0, 1.0, -1.0, 3.14, -3.14, 3.15, -3.15], dtype=torch.float64)
    envs, reference = make("Pendulum-v1", len(angles)), gymnasium.make("Pendulum-v1").unwrapped
    envs.reset()
    envs.state = torch.stack([angles + 2 * math.pi * turns, torch.linspace(-8, 8, len(angles))], -1)
    states, action = envs.state.numpy(), torch.linspace(-3, 3, len(angles))[:, None]
    step = envs.step(action)
    for i, state in enumerate(states):
        reference.reset()
        reference.state = state.copy()
        obs, reward, _, _, _ = reference.step(action[i].numpy())
        assert step.rewards[i].item() == pytest.approx(reward, rel=1e-6)
        np.testing.assert_allclose(step.final_obs[i], obs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis, edge", [(0, 2.4), (2, 12 * 2 * math.pi / 360)])
@pytest.mark.parametrize("sign", [1, -1])
def test_cartpole_falls_beyond_its_limits_and_earns_that_step(axis, edge, sign):
    """Without velocity the position and the angle after a step are those before."""
    envs = make("CartPole-v1", 2)
    envs.reset()
    envs.state = torch.zeros(2, 4, dtype=torch.float64)
    envs.state[0, axis], envs.state[1, axis] = sign * edge * (1 - 1e-12), sign * edge * (1 + 1e-12)
    step = envs.step(torch.tensor([0, 1]))
    assert step.terminations.tolist() == [False, True] and step.rewards.tolist() == [1, 1]
    assert not step.truncations.any() and envs.elapsed.tolist() == [1, 0]


@pytest.mark.parametrize("task, limit", [("CartPole-v1", 500), ("Pendulum-v1", 200)])
def test_time_limits(task, limit):
    reference = gymnasium.spec(task)
    assert make(task).max_episode_steps == reference.max_episode_steps == limit
    envs = make(task, 3, max_episode_steps=4)
    envs.reset()
    for t in range(1, 13):
        step = envs.step(torch.tensor([0, 1, 0]) if task == "CartPole-v1" else torch.zeros(3, 1))
        assert step.truncations.eq(t % 4 == 0).all() and not step.terminations.any()
        assert torch.equal(step.obs, step.final_obs) == (t % 4 > 0)


def test_termination_wins():
    envs = make("CartPole-v1", 2, max_episode_steps=1)
    envs.reset()
    envs.state = torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    step = envs.step(torch.tensor([0, 0]))
    assert step.terminations.tolist() == [True, False] and step.truncations.tolist() == [False, True]


# ---- resets ----


@pytest.mark.parametrize("task", task_ids())
def test_first_states_have_gymnasiums_distribution(task):
    """Uniform and independent, in reset() as after each ended episode (here one step long)."""
    bounds = np.array([0.05] * 4 if task == "CartPole-v1" else [np.pi, 1.0])
    reference = gymnasium.make(task).unwrapped
    drawn = np.array([(reference.reset(seed=i), reference.state)[1] for i in range(500)])
    assert (np.abs(drawn) <= bounds).all() and (np.abs(drawn).max(0) > 0.98 * bounds).all()
    envs, N = make(task, 10_000, max_episode_steps=1), 10_000
    obs = envs.reset()[0]
    states = [envs.state]
    for _ in range(2):
        step = envs.step(torch.zeros(N, *envs.action_space.shape, dtype=torch.int64))
        states.append(envs.state)
        assert step.truncations.all() and not torch.equal(step.obs, step.final_obs)
    assert torch.equal(obs, envs.task.observe(states[0])) and torch.equal(step.obs, envs.task.observe(states[2]))
    for state in states:
        unit = state / torch.from_numpy(bounds)
        assert len(unit.unique(dim=0)) == N and unit.abs().max() <= 1 and unit.abs().amax(0).min() > 0.999
        assert unit.mean(0).abs().max() < 5 / math.sqrt(3 * N)
        assert ((unit**2).mean(0) - 1 / 3).abs().max() < 5 * math.sqrt(4 / 45 / N)
        assert (torch.corrcoef(unit.T) - torch.eye(len(bounds))).abs().max() < 5 / math.sqrt(N)
    assert len(torch.cat(states).unique(dim=0)) == 3 * N


def test_only_ended_episodes_start_anew():
    envs = make("CartPole-v1", 3)
    envs.reset()
    envs.state = torch.tensor([[0, 0, 0, 0], [3.0, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    step = envs.step(torch.tensor([0, 0, 1]))
    assert envs.elapsed.tolist() == [1, 0, 1]
    assert step.final_obs[1, 0] == 3 and step.obs[1].abs().max() <= 0.05 and step.obs[1].ne(0).all()
    assert step.obs[0, 1] == -step.obs[2, 1] != 0 and torch.equal(step.obs[[0, 2]], step.final_obs[[0, 2]])


# ---- resume ----


@pytest.mark.parametrize("task", task_ids())
def test_resume_is_exact(tmp_path, task):
    """Through a file, into envs of another seed; several resets follow."""
    envs, rng = make(task, 5, 1, max_episode_steps=7), np.random.default_rng(0)
    obs = envs.reset()[0]
    for _ in range(10):
        obs = envs.step(some_actions(task, obs, rng)).obs
    state = envs.state_dict()
    checkpoint.save(tmp_path / "x.pt", {"script": "none", "envs": state})
    actions = [some_actions(task, obs, rng) for _ in range(30)]
    first = [envs.step(action) for action in actions]
    saved = checkpoint.load(tmp_path / "x.pt")["envs"]
    assert saved.keys() == state.keys() and all(torch.equal(x, saved[name]) for name, x in state.items())
    other = make(task, 5, 2, max_episode_steps=7)
    for start in ("fresh", "used"):
        again, critic_obs = other.load_state_dict(saved)
        assert torch.equal(again, obs) and critic_obs is again, start
        for a, action in zip(first, actions, strict=True):
            b = other.step(action)
            assert all(torch.equal(x, y) for x, y in zip(a[:6], b[:6], strict=True)), start


def test_a_state_from_another_kind_of_device_goes_on_with_its_own_random_stream():
    envs = make("CartPole-v1", 3, 1)
    obs = envs.reset()[0]
    again = make("CartPole-v1", 3, 2)
    loaded = again.load_state_dict(envs.state_dict() | {"generator": torch.zeros(16, dtype=torch.uint8)})[0]
    assert torch.equal(loaded, obs) and not torch.equal(again.reset()[0], envs.reset()[0])


PPO = {"num_envs": 8, "num_steps": 16, "num_minibatches": 2, "hidden_sizes": (16,), "torch_threads": 1, "device": "cpu",
       "lr_schedule": "constant"}  # fmt: skip


@pytest.mark.parametrize("script, task", [(ppo_discrete, "CartPole-v1"), (ppo_continuous, "Pendulum-v1")])
def test_a_resumed_training_equals_one_without_a_break(monkeypatch, tmp_path, script, task):
    monkeypatch.chdir(tmp_path)
    args = script.Args(env_id=f"torch/{task}", env_kwargs=("max_episode_steps=20",), **PPO)
    log = script.main(replace(args, total_timesteps=128 * 4, run_name="whole"))
    script.main(replace(args, total_timesteps=128 * 2, run_name="parts"))
    script.main(replace(args, total_timesteps=128 * 4, resume="runs/parts/last.pt"))
    whole, parts = (checkpoint.load(f"runs/{name}/last.pt") for name in ("whole", "parts"))
    assert log["charts/episodic_length"] <= 20 and whole["global_step"] == parts["global_step"] == 512
    assert all(torch.equal(x, parts["agent"][name]) for name, x in whole["agent"].items())
    a, b = (state["ranks"][0]["envs"] for state in (whole, parts))
    assert a.keys() == {"state", "elapsed", "generator"} and all(torch.equal(a[name], b[name]) for name in a)


# ---- options, devices, learning ----


@pytest.mark.parametrize(
    "options, named",
    [({"g": 9.81}, "no option g; there is only max_episode_steps"), ({"max_episode_steps": 0}, "=0: must be a whole"),
     ({"max_episode_steps": "x"}, "=x: must be a whole"), ({"max_episode_steps": 2.5}, "=2.5: must be a whole")],
)  # fmt: skip
def test_what_the_tasks_do_not_know_is_refused(options, named):
    with pytest.raises(InputError, match=named) as error:
        make("Pendulum-v1", 2, **options)
    assert "\n" not in str(error.value)


class Waits(TorchDispatchMode):
    """Collects the names of operations for which the host must know values on the device, or copies its own there."""

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, self.count = str(function), self.count + 1
        data_dependent = ("local_scalar", "nonzero", "masked_select", "unique", "lift_fresh", "aten.equal", "is_all")
        index = name.startswith("aten.index") and any(x.dtype == torch.bool for x in args[1] if x is not None)
        if index or any(word in name for word in data_dependent):
            self.found.add(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("task", task_ids())
def test_a_step_waits_for_nothing(task):
    envs = make(task, 8, max_episode_steps=3)
    action = some_actions(task, envs.reset()[0], np.random.default_rng(0))
    with Waits() as waits:
        for _ in range(4):
            step = envs.step(action)
    assert waits.count > 4 * 20 and not waits.found
    with Waits() as waits:
        bool(step.truncations.any()), step.rewards[step.truncations]
    assert len(waits.found) == 2


def test_gradients_do_not_enter_the_simulation():
    envs = make("Pendulum-v1", 2)
    envs.reset()
    step = envs.step(torch.zeros(2, 1, requires_grad=True))
    assert not any(x.requires_grad for x in (step.obs, step.rewards, envs.state))


@pytest.mark.parametrize("task", task_ids())
def test_dynamics_are_differentiable_functions(task):
    """Its Jacobian is that of finite differences: the tasks can also be taught and planned with."""
    dynamics = TASKS[task]().dynamics
    state = torch.full((1, len(TASKS[task].reset_bounds)), 0.3, dtype=torch.float64, requires_grad=True)
    action = torch.ones(1, dtype=torch.int64) if task == "CartPole-v1" else torch.ones(1, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s: dynamics(s, action), state)


@pytest.mark.gpu
@pytest.mark.parametrize("task", task_ids())
def test_on_a_gpu_as_on_a_cpu_and_without_waiting(task):
    envs, reference = make(task, 64, device="cuda", max_episode_steps=50), make(task, 64, max_episode_steps=50)
    obs, rng = envs.reset()[0].cpu(), np.random.default_rng(0)
    reference.reset()
    for _ in range(120):
        reference.state, reference.elapsed = envs.state.cpu(), envs.elapsed.cpu()
        action = some_actions(task, obs, rng)
        action_there = action.cuda()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        step = envs.step(action_there)
        torch.cuda.set_sync_debug_mode("default")
        expected, obs = reference.step(action), step.obs.cpu()
        for name in ("rewards", "terminations", "truncations", "final_obs"):
            torch.testing.assert_close(getattr(step, name).cpu(), getattr(expected, name), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_ppo_solves_cartpole(monkeypatch, tmp_path):
    """python ppo_discrete.py --env-id torch/CartPole-v1 --device cpu --torch-threads 1"""
    monkeypatch.chdir(tmp_path)
    args = ppo_discrete.Args(env_id="torch/CartPole-v1", run_name="run", device="cpu", torch_threads=1)
    ppo_discrete.main(args)
    agent, _ = ppo_discrete.load_agent("runs/run/last.pt")
    envs = vecenvs.make_for_episodes("torch/CartPole-v1", 50, 100, CPU, 1, ())
    assert ppo_discrete.evaluate(agent, envs, 100, deterministic=True)["mean"] >= 475
