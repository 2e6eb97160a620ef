"""Faults that a review found: half-bounded actions, optimizers from other devices, evaluations without end, Ctrl-C."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from vec_envs import PROBES, Probe, probes  # noqa: F401  (a fixture)

import ppo_continuous as ppo
from common import checkpoint
from common.errors import InputError
from ppo_continuous import Agent, Args, evaluate, main, make_optimizer, ppo_loss

ARGS = Args(env_id="ActionIsObs", num_envs=8, num_steps=8, num_minibatches=2, hidden_sizes=(8,), torch_threads=1,
            total_timesteps=64 * 3, device="cpu")  # fmt: skip


def make_agent(low, high):
    torch.manual_seed(0)
    return Agent(ARGS, 3, 3, False, 1, low, high)


def test_half_bounded_actions_stay_inside():
    agent = make_agent([0.0, -math.inf], [math.inf, 2.0])
    actions = agent.to_env(torch.tensor([[-50.0, 50.0], [7.0, -7.0]]))
    assert actions.tolist() == [[0.0, 2.0], [7.0, -7.0]]


def test_bound_loss_leaves_unbounded_dimensions_alone():
    agent = make_agent([-1.0, -math.inf], [1.0, math.inf])
    agent.mean_head.weight.data.zero_()
    agent.mean_head.bias.data = torch.tensor([3.1, -50.0])
    obs = torch.zeros(4, 3)
    mean, log_sigma = agent.policy(obs)
    batch = {"obs": obs, "critic_obs": obs, "actions": mean, "old_mean": mean, "old_log_sigma": log_sigma,
             "old_values": torch.zeros(4, 1), "advantages": torch.ones(4), "targets": torch.zeros(4, 1)}  # fmt: skip
    _, metrics = ppo_loss(agent, ARGS, **batch)
    assert metrics[ppo.METRICS.index("bounds_loss")].item() == pytest.approx(4.0, abs=1e-4)


def test_optimizer_of_a_gpu_checkpoint_works_on_a_cpu():
    agent = make_agent([-1.0], [1.0])
    saved = make_optimizer(agent, ARGS, None).state_dict()
    for group in saved["param_groups"]:
        group["capturable"] = True
    restored = make_optimizer(agent, replace(ARGS, weight_decay=0.5), {"optimizer": saved, "args": asdict(ARGS)})
    assert all(not group["capturable"] and group["weight_decay"] == 0.5 for group in restored.param_groups)


def test_gradients_are_clipped_jointly(monkeypatch, probes):  # noqa: F811
    norms, step = [], torch.optim.Adam.step

    def spy(self, *args):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    main(replace(ARGS, run_name="clipped", max_grad_norm=1e-3))
    assert norms and all(norm == pytest.approx(1e-3, rel=1e-2) for norm in norms)


class Endless(Probe):
    length = 10**9


def test_evaluation_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(ppo, "MAX_EVAL_LENGTH", 50)
    with pytest.raises(InputError, match="no end of an episode in 50 steps"):
        evaluate(Agent(ARGS, 1, 1, False, 1, [-1.0], [1.0]), Endless(2, torch.device("cpu"), 0), 4, True)


def test_sampled_evaluation_leaves_the_training_noise_as_it_was():
    agent = Agent(ARGS, 1, 1, False, 1, [-1.0], [1.0])
    before = torch.get_rng_state()
    evaluate(agent, PROBES["ActionIsObs"](2, torch.device("cpu"), 0), 4, deterministic=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_resume_with_another_batch_size_stays_inside_the_budget(probes):  # noqa: F811
    main(replace(ARGS, run_name="first", total_timesteps=64 * 3))
    main(replace(ARGS, resume="runs/first/last.pt", num_envs=10, total_timesteps=400))
    step = checkpoint.load("runs/first/last.pt")["global_step"]
    assert step == 192 + 2 * 80  # a third iteration of 80 would pass 400


def test_ctrl_c_with_worker_processes_saves(tmp_path):
    """The terminal sends it to the whole process group, workers included."""
    script = Path(ppo.__file__)
    flags = ["--env-id", "gym/Pendulum-v1", "--env-kwargs", "vectorization=async", "--num-envs", "2",
             "--num-steps", "16", "--num-minibatches", "2",
             "--torch-threads", "1", "--run-name", "run", "--device", "cpu"]  # fmt: skip
    settings = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen([sys.executable, str(script), *flags], **settings)
    for line in process.stdout:
        if line.startswith("global_step="):
            break
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(30) == 0 and "interrupted" in rest and (tmp_path / "runs/run/last.pt").exists()


class NanAtTheEnd(Probe):
    def step(self, actions):
        step = super().step(actions)
        if step.final_critic_obs is None:
            return step
        bad = torch.full_like(step.obs, math.nan)
        return step._replace(final_obs=bad, final_critic_obs=bad)


def test_nan_in_a_final_observation_is_named(monkeypatch, probes):  # noqa: F811
    monkeypatch.setitem(PROBES, "NanAtTheEnd", NanAtTheEnd)
    with pytest.raises(InputError, match=r"final observation of env 0 .* step 4 .*no checkpoint yet"):
        main(replace(ARGS, env_id="NanAtTheEnd", run_name="bad"))
