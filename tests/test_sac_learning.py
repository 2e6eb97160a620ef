"""Real tasks to a score: pytest -m slow tests/test_sac_learning.py (a few minutes on one core)."""

import json
from pathlib import Path

import pytest

from common.envs import make_for_episodes
from sac import Args, evaluate, load_agent, main

PENDULUM = {"env_id": "Pendulum-v1", "total_timesteps": 20_000, "learning_starts": 1000, "hidden_sizes": (64, 64),
            "policy_lr": 1e-3, "tau": 0.01, "gamma": 0.98, "torch_threads": 1, "device": "cpu"}  # fmt: skip
WIDE = {"env_id": "Pendulum-v1", "total_timesteps": 100_000, "learning_starts": 5000, "hidden_sizes": (64, 64),
        "num_envs": 64, "utd_ratio": 0.0625, "batch_size": 1024, "norm_obs": True, "layer_norm": True,
        "q_layer_norm": True, "critic": "c51", "v_min": -60.0, "v_max": 5.0, "reward_scale": 0.1, "gamma": 0.97,
        "q_reduce": "mean", "n_step": 3, "tau": 0.05, "policy_lr": 1e-3, "alpha": 0.1, "torch_threads": 1,
        "log_interval": 6400, "device": "cpu"}  # fmt: skip


def score(path):
    agent, _ = load_agent(path)
    return evaluate(agent, make_for_episodes("Pendulum-v1", 100, 100, "cpu", 1, ()), 100, deterministic=True)["mean"]


@pytest.mark.slow
@pytest.mark.parametrize("args", [PENDULUM, WIDE], ids=["one env", "many envs"])
def test_pendulum(monkeypatch, tmp_path, args):
    monkeypatch.chdir(tmp_path)
    main(Args(**args, run_name="run"))
    assert score("runs/run/last.pt") >= -160


@pytest.mark.slow
def test_resume_without_replay_keeps_what_was_learned(monkeypatch, tmp_path):
    """H29: the mean return of the first 5000 frames is at least what would be 70 % of the one before."""
    monkeypatch.chdir(tmp_path)
    args = PENDULUM | {"games_to_track": 25}
    before = main(Args(**args, run_name="run"))["charts/episodic_return"]
    main(Args(**args | {"total_timesteps": 25_000}, run_name="more", resume="runs/run/last.pt"))
    rows = [json.loads(line) for line in Path("runs/more/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["global_step"] == 25_000 and rows[-1]["charts/episodic_return"] >= before / 0.7  # all are negative
