"""Real tasks to a score: pytest -m slow tests/test_learning.py (about ten minutes on two cores)."""

import pytest
import toy_envs

import ppo_discrete
from common.envs import make_for_episodes
from ppo_continuous import Args, evaluate, load_agent, main

COMMON = {"num_envs": 64, "num_steps": 32, "num_minibatches": 16, "update_epochs": 10, "lr_schedule": "linear",
          "recompute_advantages": True, "activation": "tanh", "log_sigma_init": -0.5, "torch_threads": 1}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("env_id, steps, score, changes", [
    ("Pendulum-v1", 300_000, -200, {"gamma": 0.9, "learning_rate": 1e-3, "hidden_sizes": (64, 64), "activation": "elu",
                                    "log_sigma_init": 0.0}),
    ("InvertedPendulum-v5", 500_000, 950, {}),
    ("Reacher-v5", 500_000, -6, {}),
    ("HalfCheetah-v5", 1_000_000, 3000, {"seed": 2}),
])  # fmt: skip
def test_reaches_its_score(monkeypatch, tmp_path, env_id, steps, score, changes):
    monkeypatch.chdir(tmp_path)
    main(Args(env_id=env_id, total_timesteps=steps, run_name="run", device="cpu", **COMMON | changes))
    agent, _ = load_agent("runs/run/last.pt")
    envs = make_for_episodes(env_id, 64, 100, "cpu", 1, ())
    assert evaluate(agent, envs, 100, deterministic=True)["mean"] >= score


@pytest.mark.slow
@pytest.mark.parametrize("env_id, score, changes", [
    ("CartPole-v1", 475, {}),
    ("Acrobot-v1", -100, {}),
    ("MiniGrid-Empty-5x5-v0", 0.95, {"norm_obs": True, "total_timesteps": 100_000}),
    ("FrozenLake-v1", 0.5, {"total_timesteps": 300_000, "norm_value": True}),
])  # fmt: skip
def test_discrete_reaches_its_score(monkeypatch, tmp_path, env_id, score, changes):
    monkeypatch.chdir(tmp_path)
    ppo_discrete.main(ppo_discrete.Args(env_id=env_id, run_name="run", device="cpu", torch_threads=1, **changes))
    agent, _ = ppo_discrete.load_agent("runs/run/last.pt")
    envs = make_for_episodes(env_id, 50, 100, "cpu", 1, ())
    assert ppo_discrete.evaluate(agent, envs, 100, deterministic=True)["mean"] >= score


@pytest.mark.slow
def test_a_million_steps_without_a_forbidden_action(monkeypatch, tmp_path):
    """A random policy that is allowed everything it does earns about 9 an episode of 5 steps, the best one 15."""
    monkeypatch.chdir(tmp_path)
    env_id = "gym/toy_envs:Forbidding-v0"
    log = ppo_discrete.main(
        ppo_discrete.Args(env_id=env_id, total_timesteps=1_000_000, run_name="run", device="cpu", torch_threads=1)
    )
    assert toy_envs.Forbidding.steps > 990_000 and toy_envs.Forbidding.wrong == 0
    assert log["charts/episodic_return"] > 14.5
