"""main(Args(...)) on small environments: invariants, that every option acts, and that it learns."""

import gc
import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from vec_envs import (  # noqa: F401  (probes is a fixture)
    PROBES,
    Asymmetric,
    Meddler,
    NanWhenTold,
    Probe,
    Staggered,
    probes,
)

import ppo_continuous as ppo
from common import checkpoint
from common.errors import InputError
from common.logger import EpisodeStats
from ppo_continuous import Agent, Args, load_agent, main

pytestmark = pytest.mark.usefixtures("probes")
BASE = Args(env_id="ActionIsObs", num_envs=16, num_steps=8, num_minibatches=4, update_epochs=3, total_timesteps=128 * 4,
            hidden_sizes=(32, 32), torch_threads=1, device="cpu", games_to_track=10)  # fmt: skip


def train(name="run", base=BASE, **changes):
    return main(replace(base, run_name=name, **changes))


def weights(name="run"):
    return checkpoint.load(Path("runs") / name / "last.pt")["agent"]


def rows(name="run"):
    return [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]


def spy_on_loss(monkeypatch):
    """The largest |log ratio| of each gradient step, from the arguments that the loss was called with."""
    seen, loss = [], ppo.ppo_loss

    def spy(agent, args, **batch):
        with torch.no_grad():
            new = ppo.gaussian_logprob(*agent.policy(batch["obs"]), batch["actions"])
            old = ppo.gaussian_logprob(batch["old_mean"], batch["old_log_sigma"], batch["actions"])
            seen.append(((new - old).abs().max().item(), batch))
        return loss(agent, args, **batch)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    return seen


@pytest.mark.parametrize("env_id", ["ActionIsObs", "Asymmetric"])
def test_without_learning_the_ratio_is_one_and_the_kl_zero_in_every_epoch(monkeypatch, env_id):
    seen = spy_on_loss(monkeypatch)
    train(env_id=env_id, learning_rate=0.0, lr_schedule="constant", num_envs=64, num_steps=16, num_minibatches=8,
          total_timesteps=1024 * 4, hidden_sizes=(256, 128, 64))  # fmt: skip
    assert len(seen) == 3 * 3 * 8 and all(difference == 0 for difference, _ in seen)
    trained = [row for row in rows() if "losses/approx_kl" in row]
    assert len(trained) == 3 and all(row["losses/approx_kl"] == row["losses/clipfrac"] == 0 for row in trained)


def test_log_holds_the_mean_over_all_gradient_steps(monkeypatch):
    """H44: peers log the last minibatch."""
    seen, loss = [], ppo.ppo_loss

    def spy(*args, **batch):
        result = loss(*args, **batch)
        seen.append(result[1].clone())
        return result

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    train(total_timesteps=128 * 2, clip_coef=0.02, learning_rate=1e-2, lr_schedule="constant")
    mean = torch.stack(seen).mean(0)
    assert len(seen) == 12 and not torch.allclose(mean, seen[-1], rtol=0.01)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        assert rows()[-1][f"losses/{name}"] == pytest.approx(mean[ppo.METRICS.index(name)].item(), rel=1e-4, abs=1e-6)


def test_env_gets_clamped_actions_of_its_own_and_the_loss_gets_the_sample(monkeypatch):
    """H6: the env overwrites what it was given; that must not be the storage."""
    seen = spy_on_loss(monkeypatch)
    train(env_id="Meddler", log_sigma_init=0.5, total_timesteps=128 * 2)
    given, stored = torch.stack(Meddler.given[8:]).flatten(), torch.cat([b["actions"][:, 0] for _, b in seen[:4]])
    assert ((given >= 0) & (given <= 5)).all() and (given == 0).any() and (given == 5).any()
    assert stored.abs().max() > 1 and seen[0][0] == 0  # beyond the bounds, and with the log-prob of what is stored
    torch.testing.assert_close(given.sort().values, (2.5 + 2.5 * stored.clamp(-1, 1)).sort().values)


@pytest.mark.parametrize("tells_final", [True, False])
def test_next_values_at_every_kind_of_end(monkeypatch, tells_final):
    """H1, H7 (4), H32: V of the critic's own last state, in reward units; V(s_t) where a simulator does not tell it."""
    monkeypatch.setattr(Staggered, "tells_final", tells_final)
    agents, checked, gae = [], [], ppo.compute_gae
    monkeypatch.setattr(ppo, "Agent", lambda *a, **k: agents.append(Agent(*a, **k)) or agents[-1])

    def spy(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        for t, (before, step) in enumerate(Staggered.last.steps[-len(rewards) :]):
            torch.testing.assert_close(values[t], agents[0].value(before), rtol=1e-4, atol=1e-4)
            cut, going = step.truncations, ~(step.truncations | step.terminations)
            torch.testing.assert_close(next_values[t][going], agents[0].value(step.critic_obs)[going],
                                       rtol=1e-4, atol=1e-4)  # fmt: skip
            if cut.any():
                last = step.final_critic_obs if tells_final else before
                checked.append((next_values[t] - agents[0].value(step.critic_obs))[cut].abs().min().item())
                torch.testing.assert_close(next_values[t][cut], agents[0].value(last)[cut], rtol=1e-4, atol=1e-4)
            assert torch.equal(terminations[t, :, 0], step.terminations)
            assert torch.equal(dones[t, :, 0], step.terminations | step.truncations)
            assert torch.equal(rewards[t, :, 0], step.rewards)
        return gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda)

    monkeypatch.setattr(ppo, "compute_gae", spy)
    train(env_id="Staggered", recompute_advantages=True, learning_rate=1e-2, lr_schedule="constant")
    assert len(checked) > 20 and max(checked) > 0.01  # the other candidate would have been told apart


def test_advantages_are_returns_minus_values_in_reward_units(monkeypatch):
    """H7 (2), (3): targets and old values in the same statistics."""
    worst, loss = [], ppo.ppo_loss

    def spy(agent, args, **batch):
        error = agent.value_rms.std() * (batch["targets"] - batch["old_values"]) - batch["advantages"][:, None]
        worst.append(error.abs().max().item())
        assert not any(x.requires_grad for x in batch.values())  # H36
        return loss(agent, args, **batch)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    train(env_id="Staggered", norm_adv=False, reward_scale=50.0, reward_shift=3.0, recompute_advantages=True)
    assert len(worst) == 36 and max(worst) < 0.01
    assert weights()["value_rms.var"].item() > 100


def test_minibatches_are_shuffled_in_every_epoch(monkeypatch):
    seen = spy_on_loss(monkeypatch)
    train(total_timesteps=128 * 2)
    batches = [batch["actions"][:, 0] for _, batch in seen]
    epochs = [torch.cat(batches[i : i + 4]) for i in range(0, 12, 4)]
    assert all(torch.equal(epochs[0].sort().values, e.sort().values) for e in epochs)  # the same rows
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


def test_advantages_are_normalised_over_the_whole_batch(monkeypatch):
    seen = spy_on_loss(monkeypatch)
    train(total_timesteps=128 * 2)
    advantages = torch.cat([batch["advantages"] for _, batch in seen[:4]])
    assert abs(advantages.mean()) < 1e-5 and advantages.std(correction=0).item() == pytest.approx(1.0, abs=1e-4)


def test_statistics_move_once_an_iteration_and_are_seeded_before_the_first_gradient_step():
    train()
    state = weights()
    assert state["obs_rms.count"] == state["value_rms.count"] == 128 * 4
    assert "losses/policy_loss" not in rows()[0] and "losses/policy_loss" in rows()[1]
    with pytest.raises(InputError, match="at least 256"):
        train("short", total_timesteps=255)
    assert not Path("runs/short").exists()
    train("raw", total_timesteps=128, norm_obs=False, norm_value=False)  # nothing to seed: one iteration trains
    assert "losses/policy_loss" in rows("raw")[0]


def test_evaluate_reads_the_agent_only():
    train()
    agent, state = load_agent("runs/run/last.pt")
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    result = ppo.evaluate(agent, PROBES["ActionIsObs"](5, torch.device("cpu"), 3), 20, deterministic=True)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())
    assert result["episodes"] == 20 and result["steps"] == 20 and result["mean"] <= 0
    assert torch.equal(agent.act(torch.ones(3, 1)), agent.act(torch.ones(3, 1)))
    assert not torch.equal(agent.act(torch.ones(3, 1), False), agent.act(torch.ones(3, 1), False))


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_change_training(monkeypatch, deterministic):
    made, closed = [], []
    monkeypatch.setattr(Probe, "close", lambda self: closed.append(self))
    monkeypatch.setattr(Probe, "reset", lambda self, reset=Probe.reset: made.append(self) or reset(self))
    train("plain")
    train("evaluated", eval_interval=1, num_episodes=8, deterministic=deterministic)
    assert {id(env) for env in made} == {id(env) for env in closed} and len(closed) == 3
    plain, evaluated = weights("plain"), weights("evaluated")
    assert all(torch.equal(x, evaluated[name]) for name, x in plain.items())


def test_same_seed_same_run_other_seed_other_run():
    """H38."""

    def numbers(log):
        return {k: v for k, v in log.items() if k != "charts/SPS"}

    first, again, other = (numbers(train(name, seed=seed)) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert first == again and first != other
    assert all(torch.equal(x, y) for x, y in zip(weights("a").values(), weights("b").values(), strict=True))


HINTS = get_type_hints(Args)
CHOICES = [(name, value) for name, hint in HINTS.items() if get_origin(hint) is Literal for value in get_args(hint)]
SWITCHES = [(f.name, not f.default) for f in fields(Args) if HINTS[f.name] is bool and f.name not in ("play", "track")]
OTHERS = [("weight_decay", 0.1), ("ent_coef", 0.1), ("reward_scale", 0.1), ("reward_shift", 1.0), ("reward_max", -0.5),
          ("gamma", 0.5), ("gae_lambda", 0.2), ("vf_coef", 5.0), ("max_grad_norm", 0.01), ("clip_coef", 0.01),
          ("critic_learning_rate", 1e-2), ("critic_hidden_sizes", (8,)), ("min_lr", 9e-4), ("kl_threshold", 1e-5),
          ("learning_rate", 1e-3), ("max_lr", 2e-4), ("hidden_sizes", (8,)), ("reward_min", -0.5),
          ("bounds_loss_coef", 1.0), ("log_sigma_init", 0.3), ("log_sigma_bounds", (-1.0, 1.5)), ("update_epochs", 1),
          ("compile", True)]  # fmt: skip
CONTEXT = {"bounds_loss_coef": {"bounds_loss": "regularisation"},
           "min_lr": {"learning_rate": 9.5e-4, "kl_threshold": 1e-9},
           "max_lr": {"learning_rate": 1.9e-4},
           "clip_vloss": {"clip_coef": 0.01}, "smooth_clamp": {"clip_coef": 0.01}, "reward_log": {"reward_min": 0.1},
           "bounds_loss": {"bounds_loss_coef": 1.0}, "critic_learning_rate": {"lr_schedule": "constant"},
           "gamma": {"env_id": "ConstantReward"}, "gae_lambda": {"env_id": "ConstantReward"}}  # fmt: skip
WITHOUT_EFFECT = {"deterministic"}  # of evaluations only


ELSEWHERE = set("""
    env_id env_kwargs seed device torch_threads run_name resume track play checkpoint num_episodes total_timesteps
    score_to_win games_to_track save_best_after save_interval eval_interval num_envs num_steps num_minibatches
    mask_obs
""".split())  # options of the run, with tests of their own here or in test_cli, test_resume and test_envs  # fmt: skip


def test_no_option_is_forgotten():
    named = {name for name, _ in [*CHOICES, *SWITCHES, *OTHERS]}
    assert named | ELSEWHERE == HINTS.keys() and not named & ELSEWHERE


@pytest.mark.parametrize("name, value", [*CHOICES, *SWITCHES, *OTHERS], ids=lambda x: str(x))
def test_every_option_trains_and_changes_something(name, value):
    base = replace(BASE, **CONTEXT.get(name, {}))
    log = train("changed", base, **{name: value})
    assert all(math.isfinite(log[f"losses/{key}"]) for key in ppo.METRICS) and log["losses/nonfinite"] == 0
    default = next(f.default for f in fields(Args) if f.name == name)
    if value == default or name in WITHOUT_EFFECT:
        return
    train("default", base)
    old, new = weights("default"), weights("changed")
    if name == "compile":  # the same numbers, faster
        for key, x in old.items():
            torch.testing.assert_close(x, new[key], rtol=1e-3, atol=1e-4)
        return
    same = old.keys() == new.keys() and all(x.shape == new[k].shape and torch.equal(x, new[k]) for k, x in old.items())
    assert not same


def test_linear_learning_rate_ends_at_its_last_step():
    """H35."""
    train(lr_schedule="linear", learning_rate=3e-4, total_timesteps=128 * 10 + 5)
    rates = [row["charts/learning_rate"] for row in rows()]
    assert len(rates) == 10 and rates[0] == pytest.approx(3e-4) and rates[-1] == pytest.approx(3e-5)
    train("two", lr_schedule="linear", learning_rate=3e-4, critic_learning_rate=1e-3)
    groups = checkpoint.load("runs/two/last.pt")["optimizer"]["param_groups"]
    assert [float(group["lr"]) for group in groups] == pytest.approx([3e-4 / 4, 1e-3 / 4])


def test_both_learning_rates_follow_the_adaptive_schedule():
    """H32."""
    train(env_id="Asymmetric", critic_learning_rate=6e-4, kl_threshold=1e-9)
    groups = checkpoint.load("runs/run/last.pt")["optimizer"]["param_groups"]
    assert groups[0]["lr"] < 3e-4 and groups[1]["lr"] < 6e-4


@pytest.mark.parametrize("kl_interval", ["minibatch", "epoch"])
def test_kl_interval(kl_interval):
    """A threshold that is never reached: times 1.5 at each occasion, 12 gradient steps or 3 epochs."""
    train(kl_interval=kl_interval, kl_threshold=1e3, max_lr=1.0, learning_rate=1e-6, total_timesteps=128 * 2)
    steps = 12 if kl_interval == "minibatch" else 3
    assert rows()[-1]["charts/learning_rate"] == pytest.approx(1e-6 * 1.5**steps, rel=1e-4)


LEARN = replace(BASE, num_envs=64, num_steps=10, num_minibatches=5, update_epochs=8, learning_rate=1e-3,
                lr_schedule="constant", hidden_sizes=(32,), total_timesteps=640 * 40)  # fmt: skip


def learned_value(obs, env_id, **changes):
    train(base=LEARN, env_id=env_id, **changes)
    return load_agent("runs/run/last.pt")[0].get_value(torch.tensor(obs))


def test_truncation_bootstraps_and_termination_does_not():
    """H2: reward 1 in each of 5 steps, gamma .9. Cut: worth 10 for ever. Terminal: the mean of 4.1 .. 1 is 2.69."""
    cut = learned_value([[1.0]], "ConstantReward", gamma=0.9, total_timesteps=640 * 80)
    assert cut.item() == pytest.approx(10.0, abs=0.3)


def test_termination_ends_the_return():
    terminal = learned_value([[1.0]], "ConstantRewardTerminal", gamma=0.9)
    assert terminal.item() == pytest.approx((4.0951 + 3.439 + 2.71 + 1.9 + 1) / 5, abs=0.2)


def test_value_depends_on_the_observation():
    values = learned_value([[1.0], [-1.0]], "RewardIsObs")
    torch.testing.assert_close(values, torch.tensor([1.0, -1.0]), rtol=0, atol=0.1)


def test_value_of_a_delayed_reward_is_discounted():
    values = learned_value([[0.0], [1.0]], "DelayedReward", gamma=0.7)
    torch.testing.assert_close(values, torch.tensor([0.7, 1.0]), rtol=0, atol=0.1)


def test_policy_finds_the_best_action():
    train(base=LEARN, env_id="ActionIsObs")
    agent, _ = load_agent("runs/run/last.pt")
    actions = agent.act(torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(actions, torch.tensor([[0.5], [-0.5]]), rtol=0, atol=0.1)
    assert rows()[-1]["charts/episodic_return"] > 4 * rows()[0]["charts/episodic_return"]


def test_values_scale_with_the_reward():
    """H7 (5)."""
    base = learned_value([[1.0]], "RewardIsObs")
    train("big", LEARN, env_id="RewardIsObs", reward_scale=100.0)
    big = load_agent("runs/big/last.pt")[0].get_value(torch.tensor([[1.0]]))
    assert big.item() == pytest.approx(100 * base.item(), rel=0.05)


def test_two_reward_heads_learn_their_own_values():
    train(base=LEARN, env_id="TwoHeads", gamma=0.5)
    agent, _ = load_agent("runs/run/last.pt")
    heads = agent.value(torch.ones(1, 1))[0]
    assert heads[0].item() == pytest.approx(2, abs=0.2) and heads[1].item() == pytest.approx(-6, abs=0.6)
    assert agent.get_value(torch.ones(1, 1)).item() == pytest.approx(heads.sum().item())
    assert rows()[-1]["charts/episodic_return"] == -10  # raw, summed over heads


def test_asymmetric_critic_has_its_own_statistics_and_bootstraps_from_its_final_state(monkeypatch):
    """H32."""
    asked, value = [], Agent.value
    monkeypatch.setattr(Agent, "value", lambda self, x: (asked.append(x.shape[-1]), value(self, x))[1])
    train(env_id="Asymmetric")
    state = weights()
    assert state["critic_obs_rms.count"] == state["obs_rms.count"] == 512
    assert state["critic_obs_rms.mean"].shape == (Asymmetric.critic_dim,) and state["critic_obs_rms.mean"].min() > 4e3
    assert set(asked) == {Asymmetric.critic_dim} and len(asked) > 4  # also at the truncations inside the rollouts


def test_extra_losses_are_added_and_logged(monkeypatch):
    monkeypatch.setattr(Agent, "extra_losses", lambda self, obs: {"auxiliary": self.log_sigma.sum() * -100})
    log = train(ent_coef=0.0, lr_schedule="constant", learning_rate=1e-2)
    assert "losses/auxiliary" in log
    assert log["losses/auxiliary"] > 0 and weights()["log_sigma"].item() > -0.5  # pushed up; alone it falls from -0.7


def test_logged_returns_are_raw():
    log = train(env_id="ConstantReward", reward_scale=0.01, reward_shift=5.0)
    assert log["charts/episodic_return"] == 5 and log["charts/episodic_length"] == 5


def test_memory_does_not_grow(monkeypatch):
    """H36, without the garbage collector. Resident memory now: the peak of a whole test session would hide growth."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("reads /proc")
    resident, update = [], EpisodeStats.update

    def spy(self, *args):
        resident.append(int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return update(self, *args)

    monkeypatch.setattr(EpisodeStats, "update", spy)
    gc.disable()
    try:
        train(num_envs=256, num_steps=64, num_minibatches=8, total_timesteps=256 * 64 * 30, update_epochs=1)
    finally:
        gc.enable()
    growth = resident[29] - resident[9]
    assert len(resident) == 30 and growth < 0.02 * resident[9] and growth < 4e6  # without a leak: below 1 MB


def test_nan_ends_the_run_and_nothing_of_it_is_saved(monkeypatch):
    monkeypatch.setattr(NanWhenTold, "scale", 1.0)
    train(env_id="NanWhenTold", save_interval=1)
    good = Path("runs/run/last.pt").read_bytes()
    monkeypatch.setattr(NanWhenTold, "scale", math.nan)
    with pytest.raises(InputError, match=r"reward of env 0 is NaN .* step 32 .*runs/run"):
        train(resume="runs/run/last.pt", env_id="NanWhenTold", total_timesteps=128 * 8, save_interval=1)
    assert Path("runs/run/last.pt").read_bytes() == good


def test_a_loss_that_is_nan_leaves_the_parameters_alone(monkeypatch):
    """H10."""
    agents, loss = [], ppo.ppo_loss

    def spy(agent, args, **batch):
        agents.append(agent)
        value, metrics = loss(agent, args, **batch)
        return value * math.nan, metrics

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    with pytest.raises(InputError, match="loss was NaN"):
        train()
    assert all(p.isfinite().all() for p in agents[0].parameters())


def test_best_checkpoint_survives_worse_returns_after_resume():
    """H42: each episode of this env is worse than the one before."""
    train(env_id="Worsening", save_interval=1, games_to_track=40)
    best = Path("runs/run/best.pt").read_bytes()
    state = checkpoint.load("runs/run/best.pt")
    # three episodes of each of the 16 envs; the two of the first two iterations do not count
    assert [len(env) for env in state["ranks"][0]["episodes"]["window"]] == [3] * 16
    train(env_id="Worsening", resume="runs/run/last.pt", total_timesteps=128 * 10, games_to_track=40)
    assert Path("runs/run/best.pt").read_bytes() == best
    assert checkpoint.load("runs/run/last.pt")["best_return"] == state["best_return"]


def test_score_to_win_stops():
    log = train(env_id="ConstantReward", score_to_win=5.0, total_timesteps=128 * 1000)
    assert log["charts/episodic_return"] == 5 and len(rows()) < 5


def test_save_best_after_and_evaluation_decide_best():
    train("late", save_best_after=10**6)
    assert not Path("runs/late/best.pt").exists() and Path("runs/late/last.pt").exists()
    log = train("evaluated", eval_interval=2, num_episodes=8)
    assert log["eval/episodes"] == 8 and checkpoint.load("runs/evaluated/best.pt")["best_return"] >= log["eval/mean"]


def test_window_of_episodes():
    """H15: lengths 4 and 3, rewards 1 to 12 and 1, at the end both in one step; the last two episodes of each env."""
    stats, rewards = EpisodeStats(2, window=3, world_size=1), torch.stack([torch.arange(1.0, 13), torch.ones(12)], 1)
    done = torch.zeros(12, 2, dtype=torch.bool)
    done[3::4, 0] = True
    done[2::3, 1] = True
    stats.update(rewards[:1], done[:1])
    assert all(math.isnan(stats.metrics()[f"charts/episodic_{what}"]) for what in ("return", "length"))
    stats.update(rewards[1:7], done[1:7])  # across rollouts
    assert [list(env) for env in stats.window] == [[(10.0, 4)], [(3.0, 3)] * 2] and not stats.full
    assert stats.metrics() == {"charts/episodic_return": 16 / 3, "charts/episodic_length": 10 / 3, "charts/episodes": 3}
    stats.update(rewards[7:], done[7:])
    assert [list(env) for env in stats.window] == [[(26.0, 4), (42.0, 4)], [(3.0, 3)] * 2] and stats.full
    assert stats.metrics() == {"charts/episodic_return": 18.5, "charts/episodic_length": 3.5, "charts/episodes": 7}


@pytest.mark.parametrize("num_envs, window, each", [(1, 99, 99), (64, 100, 2), (64, 64, 1), (64, 65, 2), (512, 1, 1)])
def test_window_is_a_fair_sample_of_all_envs(num_envs, window, each):
    """All start together, so the first episodes to end are the shortest; env i takes i + 1 steps and earns as much."""
    stats, steps = EpisodeStats(num_envs, window, world_size=1), torch.arange(1, each * num_envs + 1)[:, None]
    done = steps % torch.arange(1, num_envs + 1) == 0
    for rows in done.split(13):
        assert not stats.full
        stats.update(torch.ones(rows.shape), rows)
    assert stats.full and stats.episodes == done.sum() and [len(env) for env in stats.window] == [each] * num_envs
    assert stats.metrics()["charts/episodic_return"] == stats.metrics()["charts/episodic_length"] == (num_envs + 1) / 2


def test_window_and_running_episodes_continue_only_with_the_envs():
    """After a restart of all envs the first episodes to end are the short ones again."""
    stats, ones = EpisodeStats(3, 6, world_size=1), torch.ones(8, 3)
    stats.update(ones, (torch.arange(1, 9)[:, None] % torch.tensor([2, 3, 3])) == 0)
    state = stats.state_dict()
    assert stats.full and stats.episodes == 8 and stats.metrics()["charts/episodic_return"] == pytest.approx(8 / 3)
    exact, anew = EpisodeStats(3, 6, world_size=1), EpisodeStats(3, 6, world_size=1)
    exact.load_state_dict(state, running=True)
    anew.load_state_dict(state, running=False)
    for stats in (exact, anew):
        stats.update(ones[:1], torch.tensor([[False, True, False]]))
        assert stats.episodes == 9
    assert exact.full and exact.metrics()["charts/episodic_return"] == pytest.approx(16 / 6)  # after its third step
    assert not anew.full and anew.metrics()["charts/episodic_return"] == 1
    smaller = EpisodeStats(3, 3, world_size=1)  # --games-to-track may change
    smaller.load_state_dict(state, running=True)
    assert [list(env) for env in smaller.window] == [[(2.0, 2)], [(3.0, 3)], [(3.0, 3)]]


@pytest.mark.parametrize("num_envs, num_steps, num_minibatches", [(1, 7, 1), (3, 5, 15), (16, 1, 2)])
def test_odd_sizes(num_envs, num_steps, num_minibatches):
    total = num_envs * num_steps * 4
    log = train(num_envs=num_envs, num_steps=num_steps, num_minibatches=num_minibatches, total_timesteps=total)
    assert log["losses/nonfinite"] == 0 and math.isfinite(log["losses/policy_loss"])


def test_discrete_action_space_names_the_right_script(monkeypatch):
    from gymnasium import spaces

    env = PROBES["ConstantReward"](2, torch.device("cpu"), 0)
    env.action_space = spaces.Discrete(3)
    with pytest.raises(InputError, match="ppo_discrete.py"):
        ppo.agent_kwargs(env)
