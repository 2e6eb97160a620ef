"""main(Args(...)) of ppo_discrete.py: known optima, invariants, every option, resume, ranks, and what is refused."""

import gc
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import driver
import gymnasium
import numpy as np
import pytest
import torch
from driver import zygote
from gymnasium import spaces
from test_resume import same
from toy_envs import Toy
from vec_envs import PROBES, Choice, Clipped, Heads, Pictures, Probe, probes  # noqa: F401  (probes is a fixture)

import ppo_continuous
import ppo_discrete as ppo
from common import checkpoint, cli
from common.errors import InputError
from common.logger import EpisodeStats
from ppo_discrete import Agent, Args, evaluate, load_agent, main

CPU = torch.device("cpu")
BASE = Args(env_id="Heads", num_envs=12, num_steps=10, num_minibatches=4, update_epochs=3, total_timesteps=120 * 3,
            hidden_sizes=(18, 14), torch_threads=1, device="cpu", games_to_track=7, learning_rate=3e-4,
            lr_schedule="adaptive", kl_threshold=0.03, num_episodes=8, norm_obs=True, norm_value=True, ent_coef=0.0,
            vf_coef=1.0, gamma=0.99)  # fmt: skip
pytestmark = pytest.mark.usefixtures("probes")


def train(name="run", base=BASE, **changes):
    return main(replace(base, run_name=name, **changes))


def weights(name="run"):
    return checkpoint.load(Path("runs") / name / "last.pt")["agent"]


def rows(name="run"):
    return [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]


def spy_on_loss(monkeypatch, look):
    """look(agent, batch) before each gradient step; returns what it returned."""
    seen, loss = [], ppo.ppo_loss

    def spy(agent, args, ent_coef, **batch):
        seen.append(look(agent, batch | {"ent_coef": ent_coef}))
        return loss(agent, args, ent_coef, **batch)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    return seen


# ---- invariants ----


def log_ratio(agent, batch):
    """The largest |log ratio|, of whole tables: also where nothing is allowed."""
    with torch.no_grad():
        return (agent.policy(batch["obs"], batch["action_mask"]) - batch["old_policy"]).abs().max().item()


FROZEN = replace(BASE, num_envs=16, num_steps=12, num_minibatches=3, learning_rate=0.0, lr_schedule="constant",
                 hidden_sizes=(64, 32), recompute_advantages=True, total_timesteps=192 * 3)  # fmt: skip


@pytest.mark.parametrize("env_id, changes", [
    ("Heads", {}), ("Heads", {"bfloat16": True, "hidden_sizes": (256, 128, 64)}), ("Heads", {"separate": False}),
    ("Pictures", {}), ("NoChoice", {}), ("Privileged", {}), ("Pictures", {"bfloat16": True, "separate": False}),
    ("PictureAndVector", {"encoder": "impala", "impala_depths": (16,)}), ("MatchObs", {"encoder": "conv1d"}),
    ("Heads", {"num_envs": 4, "num_steps": 4, "num_minibatches": 16, "total_timesteps": 48}),
])  # fmt: skip
def test_without_learning_the_ratio_is_one_and_the_kl_zero_in_every_epoch(monkeypatch, env_id, changes):
    seen = spy_on_loss(monkeypatch, log_ratio)
    train(base=FROZEN, env_id=env_id, **changes)
    assert len(seen) == 2 * 3 * changes.get("num_minibatches", 3) and set(seen) == {0.0}
    trained = [row for row in rows() if "losses/approx_kl" in row]
    assert len(trained) == 2 and all(row["losses/approx_kl"] == row["losses/clipfrac"] == 0 for row in trained)


def test_without_learning_odd_sizes_differ_by_rounding_alone(monkeypatch):
    """CPU kernels round the rows at the edge of a block in another way: widths that are no multiples of 16."""
    seen = spy_on_loss(monkeypatch, log_ratio)
    train(base=FROZEN, env_id="NoChoice", hidden_sizes=(17, 13), num_steps=11, num_minibatches=4)
    assert len(seen) == 24 and max(seen) < 1e-6


@pytest.mark.parametrize("env_id", ["Heads", "Pictures"])
def test_stored_mask_is_the_one_that_the_action_was_sampled_under(monkeypatch, env_id):
    """H13: of the observation beside it, not of the next one; the log-prob computed again is the stored one."""

    def look(agent, batch):
        assert agent.allowed(batch["action_mask"]).gather(-1, batch["actions"][..., None]).all()
        if env_id == "Heads":
            expected = batch["obs"]["obs"][:, 1:] > 0
        else:
            expected = torch.ones(len(batch["actions"]), 4, dtype=torch.bool)
            expected[:, 0] = batch["obs"]["obs"][:, 0, 0, 0] % 2 == 0
            expected[:, 3] = ~expected[:, 0]
        assert torch.equal(batch["action_mask"], expected)
        forbidden = batch["old_policy"][~agent.allowed(batch["action_mask"])]
        assert len(forbidden) > 5 and (forbidden.exp() == 0).all()
        return batch["actions"].unique().numel()

    seen = spy_on_loss(monkeypatch, look)
    train(env_id=env_id, num_steps=6, num_minibatches=3)
    assert max(seen) > 2


@pytest.mark.parametrize("env_id, sizes", [("Heads", (2, 3, 4)), ("OneHead", (5,))])
def test_env_gets_actions_of_its_own(monkeypatch, env_id, sizes):
    """H6: an env that overwrites what it was given does not change the storage."""
    given, step = [], Choice.step

    def meddle(self, actions):
        given.append(actions.clone())
        result = step(self, actions)
        actions.fill_(-7)
        return result

    monkeypatch.setattr(Choice, "step", meddle)
    seen = spy_on_loss(monkeypatch, lambda agent, batch: batch["actions"].clone())
    train(env_id=env_id, total_timesteps=240)
    counts = [torch.cat(x).view(120, len(sizes)).unique(dim=0, return_counts=True) for x in (seen[:4], given[10:])]
    assert all(torch.equal(a, b) for a, b in zip(*counts, strict=True)) and len(counts[0][0]) > 4


def test_every_entry_of_the_table_gets_noise_of_its_own(monkeypatch):
    """In every step, env and sub-action."""
    seen, draw = [], ppo.sample
    monkeypatch.setattr(ppo, "sample", lambda table, noise: seen.append(noise.clone()) or draw(table, noise))
    train()
    noise = torch.stack(seen)
    assert noise.shape == (30, 12, 3, 4) and noise.unique().numel() > 0.999 * noise.numel()
    assert noise.mean().item() == pytest.approx(0.5, abs=0.02) and noise.min() >= 0 and noise.max() < 1


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_change_training(monkeypatch, deterministic):
    closed = []
    monkeypatch.setattr(Probe, "close", lambda self: closed.append(self))
    train("plain")
    log = train("evaluated", eval_interval=1, deterministic=deterministic)
    assert len(closed) == 3 and log["eval/episodes"] == 8 and log["eval/mean"] <= 0
    plain, evaluated = weights("plain"), weights("evaluated")
    assert all(torch.equal(x, evaluated[name]) for name, x in plain.items())


def test_evaluate_reads_the_agent_only_and_leaves_the_noise():
    agent = Agent(BASE, **ppo.agent_kwargs(PROBES["Heads"](2, CPU, 0), "auto"))
    before, state = {k: v.clone() for k, v in agent.state_dict().items()}, torch.get_rng_state()
    results = [evaluate(agent, PROBES["Heads"](4, CPU, 3), 20, deterministic) for deterministic in (True, False, False)]
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(r["episodes"] == 20 and r["steps"] == 60 and r["length"] == 3 for r in results)
    assert results[0]["mean"] != results[1]["mean"] == results[2]["mean"]


def test_same_seed_same_run_other_seed_other_run():
    logs = [train(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, again, other = ({k: v for k, v in log.items() if k != "charts/SPS"} for log in logs)
    assert first == again and first != other
    assert all(torch.equal(x, y) for x, y in zip(weights("a").values(), weights("b").values(), strict=True))


@pytest.mark.parametrize("tells_final", [True, False])
def test_rollout_is_in_its_place(monkeypatch, tells_final):
    """GAE gets V of what came before and after each step; at truncations of the critic's own last state (or V(s_t))."""
    agents, checked, gae, steps, step = [], [], ppo.compute_gae, [], Choice.step
    monkeypatch.setattr(ppo, "Agent", lambda *a, **k: agents.append(Agent(*a, **k)) or agents[-1])

    def keep(self, actions):
        before = self.current
        result = step(self, actions)
        steps.append((before[1], result if tells_final else result._replace(final_obs=None, final_critic_obs=None)))
        return steps[-1][1]

    def spy(rewards, values, next_values, terminations, dones, gamma, gae_lambda):
        for t, (before, result) in enumerate(steps[-len(rewards) :]):
            torch.testing.assert_close(values[t], agents[0].value(before), rtol=1e-4, atol=1e-4)
            last = before if result.truncations.any() and not tells_final else result.final_critic_obs
            last = result.critic_obs if last is None else last
            torch.testing.assert_close(next_values[t], agents[0].value(last), rtol=1e-4, atol=1e-4)
            if result.truncations.any():
                checked.append((next_values[t] - agents[0].value(result.critic_obs)).abs().max().item())
            assert torch.equal(dones[t, :, 0], result.truncations) and not terminations.any()
            assert torch.equal(rewards[t, :, 0], result.rewards)
        return gae(rewards, values, next_values, terminations, dones, gamma, gae_lambda)

    monkeypatch.setattr(Choice, "step", keep)
    monkeypatch.setattr(ppo, "compute_gae", spy)
    monkeypatch.setattr(PROBES["Privileged"], "terminates", False)
    monkeypatch.setattr(PROBES["Privileged"], "length", 4)
    train(env_id="Privileged", learning_rate=1e-2, lr_schedule="constant", recompute_advantages=True)
    assert len(checked) > 10 and min(checked) > 1e-3


def test_targets_and_advantages_share_their_statistics(monkeypatch):
    """H7, and weights 1 where every row has a choice."""

    def look(agent, batch):
        assert (batch["weights"] == 1).all()
        error = agent.value_rms.std() * (batch["targets"] - batch["old_values"])
        assert not any(x.requires_grad for x in batch.values() if isinstance(x, torch.Tensor))  # H36
        return (error.sum(-1) - batch["advantages"]).abs().max().item()

    seen = spy_on_loss(monkeypatch, look)
    train(env_id="TwoHeadsChoice", norm_adv=False, reward_scale=50.0, reward_shift=4.0, recompute_advantages=True)
    assert len(seen) == 24 and max(seen) < 0.02 and weights()["value_rms.var"].min() > 100


def test_recomputed_advantages_leave_the_rollout_policy_as_it_was(monkeypatch):
    """The ratio is to the policy that acted, in every epoch; values and targets are of now."""
    names = ("old_policy", "targets", "old_values")
    seen = spy_on_loss(monkeypatch, lambda agent, batch: [batch[name].flatten() for name in names])
    train(learning_rate=1e-2, lr_schedule="constant", recompute_advantages=True, total_timesteps=240)
    for name, parts in zip(names, zip(*seen, strict=True), strict=True):
        epochs = [torch.cat(parts[i : i + 4]).sort().values for i in range(0, 12, 4)]
        assert torch.equal(epochs[0], epochs[1]) == torch.equal(epochs[1], epochs[2]) == (name == "old_policy"), name


def test_minibatches_are_shuffled_in_every_epoch_and_advantages_normalised(monkeypatch):
    seen = spy_on_loss(monkeypatch, lambda agent, batch: batch["advantages"].clone())
    train(total_timesteps=240)
    epochs = [torch.cat(seen[i : i + 4]) for i in range(0, 12, 4)]
    assert all(torch.equal(epochs[0].sort().values, e.sort().values) for e in epochs)
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    assert abs(epochs[0].mean()) < 1e-5 and epochs[0].std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_log_holds_the_mean_over_all_gradient_steps(monkeypatch):
    """H44."""
    seen, loss = [], ppo.ppo_loss

    def spy(*args, **batch):
        result = loss(*args, **batch)
        seen.append(result[1].clone())
        return result

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    train(total_timesteps=240, clip_coef=0.02, learning_rate=1e-2, lr_schedule="constant")
    mean = torch.stack(seen).mean(0)
    assert len(seen) == 12 and not torch.allclose(mean, seen[-1], rtol=0.01)
    for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac"):
        assert rows()[-1][f"losses/{name}"] == pytest.approx(mean[ppo.METRICS.index(name)].item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kl_interval", ["minibatch", "epoch"])
def test_kl_interval(monkeypatch, kl_interval):
    """A KL of 0.02 in every gradient step, just below half of the aim of 0.0401: times 1.5 each time."""
    loss = ppo.ppo_loss

    def spy(*args, **batch):
        value, metrics = loss(*args, **batch)
        metrics[ppo.KL] = 0.02
        return value, metrics

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    train(kl_interval=kl_interval, kl_threshold=0.0401, max_lr=1.0, learning_rate=1e-6, total_timesteps=240)
    times = 12 if kl_interval == "minibatch" else 3
    assert rows()[-1]["charts/learning_rate"] == pytest.approx(1e-6 * 1.5**times, rel=1e-4)


def test_gradients_are_clipped_jointly(monkeypatch):
    norms, step = [], torch.optim.Adam.step

    def spy(self, *args):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    log = train(max_grad_norm=1e-3)
    assert len(norms) == 24 and norms == pytest.approx([1e-3] * 24, rel=1e-2) and log["losses/grad_norm"] > 2e-3


@pytest.mark.parametrize("env_id, part", [("PictureAndVector", "vector"), ("Privileged", "state")])
def test_nan_in_a_part_of_an_observation_ends_the_run(monkeypatch, env_id, part):
    """Named, and nothing of it is saved; a part that only the critic sees too."""
    train("good", env_id=env_id)
    observe, calls = PROBES[env_id].observe, []

    def broken(self):
        obs, critic_obs = observe(self)
        calls.append(1)
        if len(calls) > 60:
            critic_obs[part][3, 1] = math.nan
        return obs, critic_obs

    monkeypatch.setattr(PROBES[env_id], "observe", broken)
    before = Path("runs/good/last.pt").read_bytes()
    with pytest.raises(InputError, match=r"observation of env 3 is NaN .*runs/good"):
        train("good", env_id=env_id, resume="runs/good/last.pt", total_timesteps=120 * 8)
    assert Path("runs/good/last.pt").read_bytes() == before


def test_a_loss_that_is_nan_leaves_the_parameters_alone(monkeypatch):
    """H10."""
    agents, loss = [], ppo.ppo_loss

    def spy(agent, *args, **batch):
        agents.append(agent)
        value, metrics = loss(agent, *args, **batch)
        return value * math.nan, metrics

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    with pytest.raises(InputError, match="loss was NaN"):
        train()
    assert all(p.isfinite().all() for p in agents[0].parameters())


def test_entropy_weight_follows_a_straight_line(monkeypatch):
    seen = spy_on_loss(monkeypatch, lambda agent, batch: batch["ent_coef"].item())
    train(ent_coef=0.5, ent_coef_end=0.1, total_timesteps=120 * 5 + 7)
    expected = [0.5 - 0.4 * i / 5 for i in range(1, 5)]  # the first iteration only seeds the statistics
    assert seen == pytest.approx([x for x in expected for _ in range(12)], rel=1e-5)
    seen.clear()
    train("still", ent_coef=0.5)
    assert set(seen) == {0.5}


def test_linear_learning_rate_ends_at_its_last_step():
    """H35."""
    train(lr_schedule="linear", total_timesteps=120 * 6 + 5, critic_learning_rate=6e-4)
    rates = [row["charts/learning_rate"] for row in rows()]
    assert rates == pytest.approx([3e-4 * (1 - i / 6) for i in range(6)])
    groups = checkpoint.load("runs/run/last.pt")["optimizer"]["param_groups"]
    assert [float(group["lr"]) for group in groups] == pytest.approx([5e-5, 1e-4])


def test_statistics_move_once_an_iteration_and_are_seeded_before_the_first_gradient_step():
    train()
    state = weights()
    assert state["obs_rms.count"] == state["value_rms.count"] == 360
    assert "losses/policy_loss" not in rows()[0] and "losses/policy_loss" in rows()[1]
    with pytest.raises(InputError, match="at least 240"):
        train("short", total_timesteps=239)
    assert not Path("runs/short").exists()
    train("raw", total_timesteps=120, norm_obs=False, norm_value=False)
    assert "losses/policy_loss" in rows("raw")[0]


# ---- every option ----

HINTS = get_type_hints(Args)
CHOICES = [(name, value) for name, hint in HINTS.items() if get_origin(hint) is Literal for value in get_args(hint)]
SWITCHES = [(name, not getattr(BASE, name)) for name in HINTS if HINTS[name] is bool and name not in ("play", "track")]
OTHERS = [("weight_decay", 0.1), ("ent_coef", 0.1), ("ent_coef_end", 0.5), ("reward_scale", 0.1), ("gamma", 0.5),
          ("reward_shift", 1.0), ("reward_max", -0.5), ("reward_min", -0.5), ("gae_lambda", 0.2), ("vf_coef", 5.0),
          ("max_grad_norm", 0.01), ("clip_coef", 0.01), ("critic_learning_rate", 9e-4), ("critic_hidden_sizes", (8,)),
          ("min_lr", 9e-4), ("kl_threshold", 1e-5), ("learning_rate", 9e-4), ("max_lr", 3.1e-4), ("hidden_sizes", (8,)),
          ("update_epochs", 1), ("impala_depths", (5,)), ("compile", True)]  # fmt: skip
PIXELS = {"env_id": "Pictures", "num_envs": 4, "num_steps": 6, "total_timesteps": 72, "update_epochs": 1}
CONTEXT = {"min_lr": {"learning_rate": 9.5e-4, "kl_threshold": 1e-9}, "reward_log": {"reward_min": 0.1},
           "max_lr": {"kl_threshold": 10.0}, "kl_interval": {"kl_threshold": 10.0},
           "clip_vloss": {"clip_coef": 0.01}, "smooth_clamp": {"clip_coef": 0.01},
           "compile": {"env_id": "OneHead", "separate": False, "hidden_sizes": (8,)},
           "encoder": PIXELS, "impala_depths": PIXELS | {"encoder": "impala"}}  # fmt: skip
WITHOUT_EFFECT = {"deterministic"}  # of evaluations only
ELSEWHERE = set("""
    env_id env_kwargs seed device torch_threads run_name resume track play checkpoint num_episodes total_timesteps
    score_to_win games_to_track save_best_after save_interval eval_interval num_envs num_steps num_minibatches
    action_bins mask_obs
""".split())  # options of the run, with tests of their own  # fmt: skip


def test_no_option_is_forgotten():
    named = {name for name, _ in [*CHOICES, *SWITCHES, *OTHERS]}
    assert named | ELSEWHERE == HINTS.keys() and not named & ELSEWHERE


def equal(old, new):
    return old.keys() == new.keys() and all(x.shape == new[k].shape and torch.equal(x, new[k]) for k, x in old.items())


@pytest.mark.parametrize("name, value", [*CHOICES, *SWITCHES, *OTHERS], ids=str)
def test_every_option_trains_and_changes_something(name, value):
    base = replace(BASE, **CONTEXT.get(name, {}))
    if value == "conv1d":
        base = BASE
    log = train("changed", base, **{name: value})
    assert all(math.isfinite(log[f"losses/{key}"]) for key in ppo.METRICS) and log["losses/nonfinite"] == 0
    if value == getattr(base, name) or name in WITHOUT_EFFECT:
        return
    train("default", base)
    old, new = weights("default"), weights("changed")
    if name == "compile":  # the same numbers, faster
        for key, x in old.items():
            torch.testing.assert_close(x, new[key], rtol=1e-3, atol=1e-4)
        return
    assert equal(old, new) == (value == "nature_cnn")  # which is what auto takes here


@pytest.mark.parametrize("num_envs, num_steps, num_minibatches", [(1, 7, 1), (3, 5, 15), (8, 1, 2)])
def test_odd_sizes(num_envs, num_steps, num_minibatches):
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "num_minibatches": num_minibatches}
    for env_id in ("Heads", "SmallPictures", "NoChoice"):
        log = train(env_id, env_id=env_id, total_timesteps=num_envs * num_steps * 3, **sizes)
        assert log["losses/nonfinite"] == 0 and math.isfinite(log["losses/policy_loss"])


# ---- learning ----

LEARN = replace(BASE, num_envs=60, num_steps=10, num_minibatches=5, update_epochs=4, learning_rate=5e-3,
                lr_schedule="constant", hidden_sizes=(32,), total_timesteps=600 * 20, games_to_track=200)  # fmt: skip


def learned(env_id, **changes):
    log = train(base=LEARN, env_id=env_id, **changes)
    return load_agent("runs/run/last.pt")[0], log


def test_truncation_bootstraps_and_termination_does_not():
    """H2: reward 1 in each of 5 steps, gamma .9. Cut: worth 10 for ever. Terminal: the mean of 4.1 .. 1."""
    cut = learned("ConstantChoice", gamma=0.9, total_timesteps=600 * 30)[0].get_value(torch.ones(1, 1))
    assert cut.item() == pytest.approx(10, abs=0.3)
    shutil.rmtree("runs")
    agent, log = learned("ConstantChoiceTerminal", gamma=0.9)
    assert agent.get_value(torch.ones(1, 1)).item() == pytest.approx((4.0951 + 3.439 + 2.71 + 1.9 + 1) / 5, abs=0.2)
    assert log["charts/episodic_return"] == log["charts/episodic_length"] == 5


@pytest.mark.parametrize("changes", [{}, {"separate": False}, {"encoder": "conv1d", "learning_rate": 1e-3}])
def test_action_that_the_observation_names(changes):
    agent, log = learned("MatchObs", **changes)
    obs = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])
    assert agent.act(obs).tolist() == [0, 1, 2, 3]
    assert log["charts/episodic_return"] > 0.9 > 0.5 > rows()[0]["charts/episodic_return"]
    assert agent.get_value(obs).tolist() == pytest.approx([1] * 4, abs=0.15)


@pytest.mark.parametrize("env_id, worst", [("OneHead", -0.7), ("Heads", -1.0)])
def test_best_allowed_actions_are_found(env_id, worst):
    """The optimum is 0; the mask and the sign both change from step to step, in each of the unequal sub-actions."""
    agent, log = learned(env_id, gamma=0.0)
    untrained = Agent(LEARN, **ppo.agent_kwargs(PROBES[env_id](2, CPU, 0), "auto"))
    assert evaluate(untrained, PROBES[env_id](20, CPU, 5), 100, False)["mean"] < worst
    assert evaluate(agent, PROBES[env_id](20, CPU, 6), 100, True)["mean"] > worst / 20


@pytest.mark.parametrize("changes", [{"encoder": "impala", "impala_depths": (4,), "learning_rate": 2e-3},
                                     {"encoder": "mlp"}])  # fmt: skip
def test_picture_and_vector_are_both_used(changes):
    """Either part alone gives 0.5."""
    agent, log = learned("PictureAndVector", **changes)
    assert rows()[0]["charts/episodic_return"] < 0.7
    assert evaluate(agent, PROBES["PictureAndVector"](20, CPU, 6), 200, True)["mean"] > 0.95


def test_rows_without_a_choice_are_not_learned_from(monkeypatch):
    """H13: observations and rewards of 1e6 in a third of the rows, and what is left is worth 2."""
    names = ("weights", "action_mask", "advantages")
    seen = spy_on_loss(monkeypatch, lambda agent, batch: [batch[name].clone() for name in names])
    agent, log = learned("NoChoice")
    for some_weights, masks, _ in seen:
        possible = masks[:, :3].any(1) & masks[:, 3:].any(1)
        assert torch.equal(some_weights > 0, possible) and some_weights.unique().numel() == 2
    first, _, advantages = (torch.cat(x) for x in zip(*seen[:5], strict=True))
    assert first.mean().item() == pytest.approx(1, abs=1e-5) and 0.2 < (first == 0).float().mean() < 0.5
    valid = advantages[first > 0].double()
    assert abs(valid.mean()) < 1e-3 and valid.std(correction=0).item() == pytest.approx(1, abs=1e-2)
    assert agent.obs_rms.mean.abs().max() < 0.1 and (agent.obs_rms.var - 1).abs().max() < 0.1
    assert agent.value_rms.mean.item() == pytest.approx(2, abs=1e-4)
    assert 0.6 < agent.obs_rms.count / 12000 < 0.73 and agent.value_rms.count == agent.obs_rms.count
    assert agent.get_value(torch.randn(50, 2)).tolist() == pytest.approx([2] * 50, abs=0.05)


def test_whole_batches_without_a_choice_are_finite(monkeypatch):
    monkeypatch.setattr(PROBES["NoChoice"], "masks", lambda self: torch.zeros(self.num_envs, 5, dtype=torch.bool))
    log = train(env_id="NoChoice", lr_schedule="constant")
    assert log["losses/nonfinite"] == 0 and log["losses/policy_loss"] == log["losses/value_loss"] == 0
    assert weights()["obs_rms.count"] == 0


def test_critic_learns_from_what_only_it_sees():
    """H32: the reward is +-1 at random for the actor; the critic's dict tells which."""
    agent, log = learned("Privileged")
    env = PROBES["Privileged"](50, CPU, 8)
    obs, state = env.reset()
    expected = (state["state"][:, 2] - 5e3).sign()
    torch.testing.assert_close(agent.get_value(state), expected, rtol=0, atol=0.25)
    assert agent.critic_obs_rms.count == agent.obs_rms.count == 12000 and agent.critic_obs_rms.mean.shape == (19,)
    assert agent.critic_obs_rms.mean[12:].min() > 4e3
    assert log["losses/explained_variance"] > 0.9


def test_reward_heads_learn_their_own_values():
    agent, log = learned("TwoHeadsChoice", gamma=0.5)
    assert agent.value(torch.ones(1, 1))[0].tolist() == pytest.approx([2, -6], rel=0.1)
    assert log["charts/episodic_return"] == -10


def test_learner_sees_clipped_rewards_and_lives_and_the_statistics_whole_games(monkeypatch):
    gae, learner = ppo.compute_gae, []

    def spy(rewards, values, next_values, terminations, dones, *rest):
        learner.append((rewards.clone(), terminations.clone()))
        return gae(rewards, values, next_values, terminations, dones, *rest)

    monkeypatch.setattr(ppo, "compute_gae", spy)
    log = train(env_id="Clipped", eval_interval=3)
    for rewards, terminations in learner:
        assert (rewards == 1).all() and terminations[1::2].all() and not terminations[::2].any()
    assert log["charts/episodic_return"] == log["eval/mean"] == 18
    assert log["charts/episodic_length"] == log["eval/length"] == 6 and log["eval/steps"] == 48
    assert log["charts/episodes"] == 60
    agent, _ = load_agent("runs/run/last.pt")
    assert evaluate(agent, Clipped(4, CPU, 0), 4, True)["mean"] == 18


@pytest.mark.parametrize("env_id", ["Heads", "PictureAndVector", "Privileged"])
def test_loaded_agent_acts_and_values_as_the_trained_one(monkeypatch, env_id):
    agents = []
    monkeypatch.setattr(ppo, "Agent", lambda *a, **k: agents.append(Agent(*a, **k)) or agents[-1])
    train(env_id=env_id)
    loaded, state = load_agent("runs/run/last.pt")
    env = PROBES[env_id](33, CPU, 4)
    obs, critic_obs = env.reset()
    assert len(agents) == 2 and loaded is agents[1] and agents[0] is not loaded
    assert torch.equal(loaded.act(obs, True, env.action_mask), agents[0].act(obs, True, env.action_mask))
    assert torch.equal(loaded.get_value(critic_obs), agents[0].get_value(critic_obs))
    assert not loaded.state_dict().keys() & {"is_action", "mask_index"} and state["script"] == "ppo_discrete"


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("played", [True, False])
def test_play_computes_in_the_precision_that_is_asked_for(call, monkeypatch, trained, played):
    """As the checkpoint says where nothing is asked for."""
    seen = []
    monkeypatch.setattr(ppo, "evaluate", lambda agent, *rest: seen.append(agent.actor.bfloat16) or {})
    flags = ["--no-bfloat16", "--bfloat16"]
    assert call(*FLAGS, "--env-id", ENV, "--run-name", "run", flags[trained])[0] == 0
    for argv in ([], [flags[played]]):
        assert call("--play", "--checkpoint", "runs/run/last.pt", *argv)[0] == 0
    assert seen == [trained, played]


# ---- memory ----


def test_frames_are_stored_once_as_bytes(monkeypatch):
    def tensors():
        return [x for x in gc.get_objects() if type(x) is torch.Tensor]  # no fake ones of torch.compile

    def storages(tensors):
        return {x.untyped_storage().data_ptr(): (x.untyped_storage().nbytes(), x.dtype) for x in tensors}

    earlier, stored = tensors(), 120 * math.prod(Pictures.shape)  # kept, so that their addresses stay taken

    def look(agent, batch):
        assert batch["critic_obs"] == {} and batch["obs"]["obs"].dtype == torch.uint8
        assert batch["obs"]["obs"].shape == (30, *Pictures.shape)
        new = [x for key, x in storages(tensors()).items() if key not in storages(earlier)]
        return [dtype for size, dtype in new if size >= stored and dtype == torch.uint8 or size >= 4 * stored]

    seen = spy_on_loss(monkeypatch, look)
    train(env_id="Pictures", total_timesteps=240, update_epochs=1)
    assert seen == [[torch.uint8]] * 4


def test_frames_of_a_critic_of_its_own_are_bytes_too(monkeypatch):
    def look(agent, batch):
        assert batch["critic_obs"]["map"].dtype == torch.uint8 and batch["critic_obs"]["map"].shape == (30, 1, 3, 4)
        assert batch["critic_obs"]["state"].shape == (30, 7) and batch["obs"]["obs"].shape == (30, 4)

    assert len(spy_on_loss(monkeypatch, look)) == 0
    train(env_id="Privileged")


def test_memory_does_not_grow(monkeypatch):
    """H36, without the garbage collector."""
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
        train(num_envs=256, num_steps=32, num_minibatches=8, total_timesteps=256 * 32 * 30, update_epochs=1)
    finally:
        gc.enable()
    growth = resident[29] - resident[9]
    assert len(resident) == 30 and growth < 0.02 * resident[9] and growth < 4e6


# ---- resume and ranks ----

RESUMES = {
    "masked": {"env_kwargs": ["stuck=1"], "lr_schedule": "linear", "ent_coef": 0.02, "ent_coef_end": 0.001},
    "asymmetric": {"env_kwargs": ["asymmetric=True"], "lr_schedule": "adaptive", "max_lr": 1.0, "separate": False,
                   "critic_learning_rate": 1e-3, "recompute_advantages": True, "norm_value": False},
}  # fmt: skip
DISCRETE = {"env_id": "toy/Masked", "num_envs": 5, "num_steps": 9, "num_minibatches": 3, "hidden_sizes": [11, 7],
            "norm_obs": True, "norm_value": True}  # fmt: skip
ROWS = 45


def test_resume_is_exact(tmp_path):
    """H4: four iterations are two and two in a new process, to the last bit; the masks continue too."""
    four = DISCRETE | {"total_timesteps": 4 * ROWS, "save_interval": 1, "learning_rate": 3e-4}
    runs = [four | args | {"run_name": name} for name, args in RESUMES.items()]
    whole_log = zygote().run(tmp_path, "driver:trains", runs=runs, script="ppo_discrete")
    for name in RESUMES:
        (tmp_path / "again/runs" / name).mkdir(parents=True)
        shutil.copy(tmp_path / f"runs/{name}/{2 * ROWS}.pt", tmp_path / "again/runs" / name)
    runs = [run | {"resume": f"runs/{run['run_name']}/{2 * ROWS}.pt"} for run in runs]
    halves_log = zygote().run(tmp_path / "again", "driver:trains", runs=runs, script="ppo_discrete")
    for name, a, b in zip(RESUMES, whole_log, halves_log, strict=True):
        whole, halves = (checkpoint.load(folder / f"runs/{name}/last.pt") for folder in (tmp_path, tmp_path / "again"))
        half = checkpoint.load(tmp_path / f"runs/{name}/{2 * ROWS}.pt")
        moved = [k for k, v in whole["agent"].items() if not torch.equal(v, half["agent"][k])]
        assert len(moved) >= 10 and half["global_step"] == 2 * ROWS and whole["global_step"] == 4 * ROWS
        assert not torch.equal(whole["ranks"][0]["envs"]["counter"], half["ranks"][0]["envs"]["counter"])
        assert half["ranks"][0]["envs"]["t"].any()  # in the middle of episodes
        for state in (whole, halves):
            assert state.pop("seconds") > 0
        same(whole, halves)
        same(*({k: v for k, v in log["metrics"].items() if k != "charts/SPS"} for log in (a, b)))
    new = zygote().run(tmp_path, "driver:load_and_act", checkpoint="runs/masked/last.pt", script="ppo_discrete")
    assert torch.equal(new["actions"], whole_log[0]["actions"]) and new["actions"].shape == (32, 3)


@pytest.mark.parametrize("stuck", [0, 1, 6])
def test_two_ranks_equal_one_with_twice_the_envs(tmp_path, stuck):
    """With stuck, one rank alone has rows without a choice: the loss is over the valid rows of both."""
    shared = DISCRETE | {"num_minibatches": 1, "total_timesteps": 4 * 2 * ROWS, "learning_rate": 1e-3, "max_lr": 0.01,
                         "lr_schedule": "adaptive", "kl_threshold": 1e-4, "max_grad_norm": 0.5, "ent_coef": 0.01,
                         "env_kwargs": ["asymmetric=True", f"stuck={stuck}"], "games_to_track": 99}  # fmt: skip
    job = {"script": "ppo_discrete", "noise_rows": 10}
    two = zygote().run_ranks(tmp_path, "driver:train", args=shared | {"run_name": "two"}, **job)
    one = zygote().run(tmp_path, "driver:train", args=shared | {"run_name": "one", "num_envs": 10}, **job)
    assert equal(two[0]["initial"], one["initial"]) and equal(two[0]["agent"], two[1]["agent"])
    for name, value in one["agent"].items():
        torch.testing.assert_close(two[0]["agent"][name], value, atol=1e-5, rtol=1e-5)
    assert (one["agent"]["policy_head.weight"] - one["initial"]["policy_head.weight"]).abs().max() > 1e-3
    assert (one["agent"]["obs_rms.count"] < 8 * ROWS) == (stuck > 0)
    for name, value in one["metrics"].items():
        if name not in ("charts/SPS", "losses/explained_variance"):
            assert two[0]["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_weights_are_over_the_rows_of_all_ranks(tmp_path):
    """Rank 0 alone has rows without a choice, so its weights average below 1 and rank 1's above."""
    args = DISCRETE | {"total_timesteps": 2 * 2 * ROWS, "env_kwargs": ["stuck=1"], "update_epochs": 1}
    ranks = zygote().run_ranks(tmp_path, "test_discrete_train:worker_weights", args=args)
    means, values = [r.mean().item() for r in ranks], torch.cat(ranks).unique()
    assert means[0] < 0.99 and means[1] > 1.01 and sum(means) == pytest.approx(2, abs=1e-5) and len(values) == 2


def worker_weights(args):
    seen, loss = [], ppo.ppo_loss

    def spy(*a, **batch):
        seen.append(batch["weights"].clone())
        return loss(*a, **batch)

    ppo.ppo_loss = spy
    driver.train(args, script="ppo_discrete")
    return torch.cat(seen)


def test_ranks_start_from_the_weights_of_rank_0(tmp_path):
    args = DISCRETE | {"total_timesteps": 2 * 2 * ROWS, "learning_rate": 0.0, "lr_schedule": "constant"}
    ranks = zygote().run_ranks(tmp_path, "test_discrete_train:worker_other_weights", args=args)
    own, given = ([r[key]["policy_head.bias"] for r in ranks] for key in ("initial", "agent"))
    assert not torch.equal(*own) and torch.equal(*given) and torch.equal(own[0], given[0])


def worker_other_weights(args):
    reset = torch.nn.Linear.reset_parameters
    torch.nn.Linear.reset_parameters = lambda self: (torch.rand(int(os.environ["RANK"])), reset(self))[1]
    return driver.train(args | {"initializer": "default"}, script="ppo_discrete")


# ---- the command line ----


class Small(Toy):
    observation_space, action_space = spaces.Box(0, 255, (7, 7, 3), np.uint8), spaces.Discrete(4)

    def observe(self):
        return np.full((7, 7, 3), self.t, np.uint8)


class BadMask(Toy):
    """Three actions and a mask of four entries."""

    observation_space = spaces.Dict({"x": spaces.Box(-1, 1, (2,)), "action_mask": spaces.MultiBinary(4)})
    action_space = spaces.Discrete(3)

    def observe(self):
        return {"x": np.zeros(2, np.float32), "action_mask": np.ones(4, np.int8)}


class Stuck(Toy):
    """Every second state allows nothing; what is done there is kept."""

    observation_space, action_space, done = spaces.Box(0, 9, (1,)), spaces.Discrete(3), []

    def observe(self):
        return np.float32([self.t])

    def action_masks(self):
        return np.array([self.t % 2 == 0] * 3)

    def step(self, action):
        Stuck.done.append((self.t % 2, int(action)))
        return super().step(action)


for _env in (Small, BadMask, Stuck):
    gymnasium.register(f"Discrete{_env.__name__}-v0", _env)

ENV = "gym/toy_envs:DiscreteObs-v0"
FLAGS = ["--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2", "--hidden-sizes", "8", "--device", "cpu",
         "--torch-threads", "1", "--update-epochs", "1", "--total-timesteps", "32", "--lr-schedule", "constant",
         "--learning-rate", "3e-4", "--norm-obs"]  # fmt: skip


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a command line in this process with real adapters; returns exit status, stdout and lines of stderr."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)

    def run(*argv, script=ppo):
        monkeypatch.setattr(sys, "argv", [f"{script.SCRIPT}.py", *argv])
        capsys.readouterr()
        try:
            cli.run(script.main, script.Args)
            status = 0
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, [line for line in err.splitlines() if not line.startswith(("env:", "creating"))]

    return run


def refused(call, argv, words, script=ppo):
    before = sorted(Path().rglob("*"))
    status, out, lines = call(*argv, script=script)
    assert status == 2 and out == "" and len(lines) == 1, (status, out, lines)
    assert lines[0].startswith(f"{script.SCRIPT}.py: ") and all(word in lines[0] for word in words), lines[0]
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("argv, words", [
    (["--env-id", "gym/toy_envs:Counter-v0"], ["Counter-v0", "Box actions", "ppo_continuous.py", "--action-bins"]),
    (["--env-id", "gym/toy_envs:Counter-v0", "--action-bins", "1"], ["--action-bins 1", "at least 2"]),
    (["--env-id", "gym/toy_envs:Unbounded-v0", "--action-bins", "5"], ["--action-bins 5", "bounds"]),
    (["--env-id", ENV, "--action-bins", "5"], ["--action-bins 5", "discrete already"]),
    (["--env-id", ENV, "--action-bins", "-2"], ["--action-bins -2"]),
    (["--env-id", ENV, "--encoder", "resnet"], ["resnet", "--encoder", "impala"]),
    (["--env-id", ENV, "--encoder", "nature_cnn"], ["--encoder nature_cnn", "no images"]),
    (["--env-id", ENV, "--encoder", "impala"], ["--encoder impala", "no images"]),
    (["--env-id", "gym/DiscreteSmall-v0", "--encoder", "nature_cnn"], ["--encoder nature_cnn", "7 pixels", "36"]),
    (["--env-id", "gym/DiscreteSmall-v0", "--encoder", "conv1d"], ["--encoder conv1d", "images"]),
    (["--env-id", ENV, "--impala-depths", "0"], ["--impala-depths (0,)"]),
    (["--env-id", "gym/DiscreteBadMask-v0"], ["DiscreteBadMask", "action mask of shape (4,)", "3"]),
    (["--env-id", ENV, "--num-minibatches", "3"], ["--num-minibatches 3", "16", "2 and 4"]),
    (["--env-id", ENV, "--total-timesteps", "31"], ["--total-timesteps 31", "32"]),
    (["--env-id", ENV, "--norm-adv", "maybe"], ["maybe"]),
    (["--env-id", ENV, "--fixed-sigma"], ["--fixed-sigma"]),
])  # fmt: skip
def test_mistakes_are_one_line(call, argv, words):
    refused(call, [*FLAGS, *argv], words)


def test_checkpoints_of_the_other_script_are_refused(call):
    assert call(*FLAGS, "--env-id", ENV, "--run-name", "discrete")[0] == 0
    continuous = [*FLAGS, "--env-id", "gym/toy_envs:Counter-v0", "--run-name", "continuous"]
    assert call(*continuous, script=ppo_continuous)[0] == 0
    for script, run in ((ppo, "continuous"), (ppo_continuous, "discrete")):
        path = f"runs/{run}/last.pt"
        for argv in (["--resume", path], ["--play", "--checkpoint", path]):
            refused(call, argv, [path, f"by ppo_{run}.py, not by {script.SCRIPT}.py; use ppo_{run}.py"], script)


def test_network_of_a_checkpoint_cannot_change(call):
    box = ["--env-id", "gym/toy_envs:Counter-v0", "--run-name", "base", "--action-bins", "5"]
    assert call(*FLAGS, *box)[0] == 0
    resume = ["--resume", "runs/base/last.pt", "--total-timesteps", "64"]
    refused(call, [*resume, "--action-bins", "6"], ["--action-bins 6", "5", "cannot change"])
    refused(call, [*resume, "--encoder", "conv1d"], ["--encoder conv1d", "auto", "cannot change"])
    refused(call, [*resume, "--impala-depths", "4"], ["--impala-depths (4,)", "cannot change"])
    assert call(*resume, "--ent-coef", "0.1", "--bfloat16")[0] == 0
    assert checkpoint.load("runs/base/last.pt")["global_step"] == 64


@pytest.mark.parametrize("env, flags", [
    ("gym/toy_envs:DiscreteObs-v0", ["--env-kwargs", "start=3"]), ("gym/toy_envs:Masked-v0", []),
    ("gym/toy_envs:EchoAction-v0", ["--action-bins", "3"]), ("gym/DiscreteSmall-v0", ["--encoder", "impala"]),
    ("gym/FrozenLake-v1", []),
])  # fmt: skip
def test_trains_and_plays_through_an_adapter(call, env, flags):
    """H39: FrozenLake's observation is a number."""
    status, out, lines = call(*FLAGS, "--env-id", env, "--run-name", "run", *flags, "--eval-interval", "2",
                              "--num-episodes", "4")  # fmt: skip
    assert status == 0 and lines == []
    status, out, lines = call("--play", "--checkpoint", "runs/run/last.pt", "--num-episodes", "6")
    assert status == 0 and lines == [] and json.loads(out)["episodes"] == 6
    if "DiscreteObs" in env:  # the reward is the action as the env sees it
        assert 3 * 6 <= json.loads(out)["mean"] <= 5 * 6
    if "Echo" in env:  # five actions, each -2, 0.5 or 3
        assert (json.loads(out)["mean"] + 10) / 2.5 in range(11) and json.loads(out)["std"] == 0


def test_where_an_env_allows_nothing_it_gets_action_0_and_is_not_learned_from(call, monkeypatch):
    """H13, through an adapter."""
    seen = spy_on_loss(monkeypatch, lambda agent, batch: batch["weights"].clone())
    Stuck.done = []
    argv = ["--env-id", "gym/DiscreteStuck-v0", "--run-name", "run", "--env-kwargs", "length=4"]
    assert call(*FLAGS, *argv)[0] == 0
    assert {action for odd, action in Stuck.done if odd} == {0}
    assert {action for odd, action in Stuck.done if not odd} == {0, 1, 2}
    assert torch.cat(seen).sort().values.tolist() == [0] * 8 + [2] * 8
    assert rows()[-1]["charts/rows_without_choice"] == 8
