"""Tasks that need a memory, to a score: pytest -m slow tests/test_lstm_learning.py (about fifteen minutes)."""

import pytest
import toy_envs  # noqa: F401  (registers Recall-v0)

import ppo_continuous
import ppo_discrete
import ppo_lstm
from common.envs import make_for_episodes

CARTPOLE = {"env_id": "CartPole-v1", "mask_obs": (1, 3)}  # without velocities
PENDULUM = {"env_id": "Pendulum-v1", "mask_obs": (2,), "total_timesteps": 300_000, "num_envs": 16, "num_steps": 200,
            "num_minibatches": 16, "update_epochs": 10, "gamma": 0.9, "ent_coef": 0.0,
            "log_sigma_init": 0.0}  # fmt: skip
RECALL = {"env_id": "gym/toy_envs:Recall-v0", "hidden_sizes": (32,), "rnn_hidden_size": 32, "gamma": 1.0}
pytestmark = pytest.mark.slow


def score(script, monkeypatch, tmp_path, **args) -> float:
    """Mean return over 100 evaluation episodes after a training."""
    monkeypatch.chdir(tmp_path)
    args = script.Args(run_name="run", device="cpu", torch_threads=1, **args)
    script.main(args)
    agent, _ = script.load_agent("runs/run/last.pt")
    envs = make_for_episodes(args.env_id, 50, 100, "cpu", 1, args.env_kwargs, mask_obs=args.mask_obs)
    return script.evaluate(agent, envs, 100, deterministic=True)["mean"]


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_cartpole_without_velocities(monkeypatch, tmp_path, seed):
    assert score(ppo_lstm, monkeypatch, tmp_path, seed=seed, **CARTPOLE) >= 475


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pendulum_without_velocity(monkeypatch, tmp_path, seed):
    memory = {"seq_length": 20, "rnn_concat_output": True, "seed": seed}
    assert score(ppo_lstm, monkeypatch, tmp_path, **PENDULUM, **memory) >= -250


def test_cartpole_without_a_memory_fails(monkeypatch, tmp_path):
    assert score(ppo_discrete, monkeypatch, tmp_path, total_timesteps=500_000, **CARTPOLE) < 100


def test_pendulum_without_a_memory_fails(monkeypatch, tmp_path):
    """The same size, batch and schedule."""
    same = {"hidden_sizes": (64, 64), "learning_rate": 1e-3, "lr_schedule": "linear"}
    assert score(ppo_continuous, monkeypatch, tmp_path, **PENDULUM, **same) < -500


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
@pytest.mark.parametrize("delay, steps, seq_length, total", [(16, 64, 32, 300_000), (64, 128, 128, 1_000_000)])
def test_recalls_a_cue(monkeypatch, tmp_path, rnn, delay, steps, seq_length, total):
    task = {"env_kwargs": (f"delay={delay}",), "num_steps": steps, "seq_length": seq_length, "total_timesteps": total}
    assert score(ppo_lstm, monkeypatch, tmp_path, rnn=rnn, **task, **RECALL) >= 0.95


def test_does_not_recall_a_cue_far_beyond_its_sequences(monkeypatch, tmp_path):
    """The documented limit of truncated backpropagation: chance is 0.5."""
    task = {"env_kwargs": ("delay=64",), "num_steps": 128, "seq_length": 8, "total_timesteps": 1_000_000}
    assert score(ppo_lstm, monkeypatch, tmp_path, **task, **RECALL) < 0.7
