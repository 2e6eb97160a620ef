"""sac.py from its command line and main(): options, learning, resume, ranks, mistakes."""

import gc
import json
import math
import os
import signal
import sys
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import driver
import pytest
import torch
from driver import zygote
from gymnasium import spaces
from vec_envs import PROBES, Probe, probes  # noqa: F401  (a fixture)

import sac
from common import cli
from common import envs as vecenvs
from common.errors import InputError
from common.logger import EpisodeStats
from sac import METRICS, Agent, Args, Replay, load_agent, main

BASE = Args(env_id="toy/Linear", num_envs=4, total_timesteps=240, learning_starts=120, batch_size=16, buffer_size=160,
            log_interval=40, hidden_sizes=(16, 16), device="cpu", torch_threads=1, games_to_track=5)  # fmt: skip


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(vecenvs, "make", driver.make)
    monkeypatch.chdir(tmp_path)


def train(name="run", base=BASE, **changes):
    return main(replace(base, run_name=name, **changes))


def saved(name="run", file="last.pt"):
    return torch.load(Path("runs") / name / file, weights_only=True)  # H9


def rows(name="run"):
    return [json.loads(line) for line in (Path("runs") / name / "metrics.jsonl").read_text().splitlines()]


def same(a, b, path="state") -> None:
    """Bit for bit, in every leaf."""
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b or (a != a and b != b), (path, a, b)


# ---- one run ----


def test_log_has_the_means_of_cleanrls_names():
    log = train()
    assert log.keys() >= {f"losses/{name}" for name in METRICS} and log["losses/nonfinite"] == 0
    assert not any(key.startswith("losses/") for key in rows()[0])  # nothing was learned yet
    assert [row["global_step"] for row in rows()] == [40, 80, 120, 160, 200, 240]
    assert log["losses/alpha"] < 1 and log["losses/grad_norm"] > 0 and log["charts/episodes"] > 10


def test_logged_means_are_of_all_gradient_steps(monkeypatch):
    """H44, with the actor's over its own steps."""
    seen, loss = [], sac.sac_loss

    def spy(*args, **batch):
        result = loss(*args, **batch)
        seen.append((batch["critic"], batch["actor"], result[1].clone()))
        return result

    monkeypatch.setattr(sac, "sac_loss", spy)
    log = train(total_timesteps=160, policy_frequency=3)
    for i, name in enumerate(METRICS):
        if name in ("grad_norm", "nonfinite"):
            continue
        values = [metrics[i].item() for critic, actor, metrics in seen if (actor if i >= sac.ACTOR else critic)]
        assert len(values) in (40, 42)
        assert log[f"losses/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-4)


def test_iterations_without_a_step_of_the_actor_do_not_log_one():
    """One gradient step an iteration, in every second one of the actor too: its values are not 0 in between."""
    train(log_interval=4, utd_ratio=0.25, policy_frequency=2, alpha_lr=1e-6)
    learned = [row for row in rows() if "losses/qf1_loss" in row]
    assert [row["global_step"] for row in learned] == list(range(124, 241, 4))
    for i, row in enumerate(learned):
        of_the_actor = {name for name in METRICS[sac.ACTOR :] if f"losses/{name}" in row}
        assert of_the_actor == (set() if i % 2 else set(METRICS[sac.ACTOR :]))
        assert i % 2 or row["losses/alpha"] == pytest.approx(1, abs=1e-3)


def test_update_moves_what_it_should(monkeypatch):
    """The target critics by tau of the way, in each gradient step, after the critics."""
    agents, init, lerp = [], Agent.__init__, torch._foreach_lerp_
    monkeypatch.setattr(Agent, "__init__", lambda self, *a, **k: (init(self, *a, **k), agents.append(self))[0])
    moves = []

    def spy(targets, sources, weight):
        before = [t.clone() for t in targets]
        lerp(targets, sources, weight)
        errors = [b + 0.1 * (s - b) - t for b, s, t in zip(before, sources, targets, strict=True)]
        moves.append(max(error.abs().max().item() for error in errors))
        assert {id(t) for t in targets} == {id(p) for p in agents[0].target_critic.parameters()}
        assert {id(s) for s in sources} == {id(p) for p in agents[0].critic.parameters()}

    monkeypatch.setattr(torch, "_foreach_lerp_", spy)
    train(tau=0.1)
    assert len(moves) == 120 and max(moves) < 1e-6
    state = saved()["agent"]
    assert any(not torch.equal(state[k], state["target_" + k]) for k in state if k.startswith("critic."))


def test_statistics_move_once_a_frame_and_replay_stays_raw(monkeypatch):
    """H22: 240 frames, 120 gradient steps; S-6 in play: the loaded agent acts the same."""
    seen, update = [], sac.RunningMeanStd.update
    monkeypatch.setattr(sac.RunningMeanStd, "update", lambda self, x: (seen.append(x.clone()), update(self, x))[1])
    train(norm_obs=True, save_replay=True)
    state = saved()
    frames = torch.cat(seen)
    assert state["agent"]["obs_rms.count"] == len(frames) == 240
    torch.testing.assert_close(state["agent"]["obs_rms.mean"], frames.double().mean(0))
    stored = state["replay"][0]["data"]["obs"].flatten(0, 1)
    assert torch.equal(torch.cat([stored[80:], stored[:80]]), frames[-160:])  # 40 steps of 4 envs; row 20 is the oldest
    agent, _ = load_agent("runs/run/last.pt")
    x = torch.randn(5, 3)
    mean, _ = agent.policy(((x - frames.mean(0)) / frames.std(0, correction=0)).clamp(-10, 10))
    torch.testing.assert_close(agent.act(x), agent.to_env(mean.tanh()), rtol=1e-4, atol=1e-4)


def test_without_norm_obs_there_are_no_statistics():
    train()
    assert saved()["agent"]["obs_rms.count"] == 0


def test_evaluation_changes_nothing():
    train("plain")
    log = train("evaluated", eval_interval=1, num_episodes=8, deterministic=False)
    same(saved("plain")["agent"], saved("evaluated")["agent"])
    assert log["eval/episodes"] == 8 and saved("evaluated", "best.pt")["best_return"] >= log["eval/mean"]
    agent, state = load_agent("runs/plain/last.pt")
    before = {k: v.clone() for k, v in agent.state_dict().items()}
    result = sac.evaluate(agent, driver.make("toy/Linear", 4, "cpu", 0), 20, deterministic=True)
    same(agent.state_dict(), before)
    same(agent.state_dict(), state["agent"])
    assert result["episodes"] == 20


def test_same_seed_same_run_other_seed_other_run():
    """H38: the random actions of the start too; 0 is a seed."""
    logs = [train(name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, again, other = ({k: v for k, v in log.items() if k != "charts/SPS"} for log in logs)
    assert first == again and first != other
    assert rows("a")[0]["charts/episodic_return"] != rows("c")[0]["charts/episodic_return"]
    same(saved("a")["agent"], saved("b")["agent"])


HINTS = get_type_hints(Args)
CHOICES = [(name, value) for name, hint in HINTS.items() if get_origin(hint) is Literal for value in get_args(hint)]
SWITCHES = [(f.name, not f.default) for f in fields(Args) if HINTS[f.name] is bool and f.name not in ("play", "track")]
OTHERS = [("gamma", 0.5), ("n_step", 3), ("reward_shift", 1.0), ("reward_scale", 0.1), ("reward_min", 1.0),
          ("reward_max", 1.0), ("hidden_sizes", (8,)), ("critic_hidden_sizes", (8,)),
          ("log_sigma_bounds", (-1.0, 1.5)), ("num_atoms", 11), ("v_min", -5.0), ("v_max", 5.0), ("utd_ratio", 0.5),
          ("batch_size", 8), ("buffer_size", 40), ("policy_lr", 1e-2), ("q_lr", 1e-2), ("alpha_lr", 1e-1),
          ("policy_frequency", 2), ("tau", 0.5), ("alpha", 0.1), ("target_entropy_scale", 3.0),
          ("max_grad_norm", 0.01), ("learning_starts", 80), ("compile", True)]  # fmt: skip
SHORT = replace(BASE, total_timesteps=160)
CONTEXT = {"reward_log": {"reward_min": 0.1}, "num_atoms": {"critic": "c51"}, "v_min": {"critic": "c51"},
           "v_max": {"critic": "c51"}, "log_sigma_bounds": {"policy_lr": 0.05},
           "compile": {"critic": "c51", "norm_obs": True, "n_step": 2}}  # fmt: skip
WITHOUT_EFFECT = {"deterministic", "save_replay"}
ELSEWHERE = set("""
    env_id env_kwargs seed device torch_threads run_name resume track play checkpoint num_episodes total_timesteps
    score_to_win games_to_track save_best_after save_interval eval_interval log_interval num_envs mask_obs
""".split())  # fmt: skip


def test_no_option_is_forgotten():
    named = {name for name, _ in [*CHOICES, *SWITCHES, *OTHERS]}
    assert named | ELSEWHERE == HINTS.keys() and not named & ELSEWHERE


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The weights of SHORT with a context, trained once each."""
    known = {}

    def weights(context):
        if str(context) not in known:
            before = os.getcwd()
            os.chdir(tmp_path_factory.mktemp("unchanged"))
            train(base=replace(SHORT, **context))
            known[str(context)] = saved()["agent"]
            os.chdir(before)
        return known[str(context)]

    return weights


@pytest.mark.parametrize("name, value", [*CHOICES, *SWITCHES, *OTHERS], ids=lambda x: str(x))
def test_every_option_trains_and_changes_something(monkeypatch, unchanged, name, value):
    context = CONTEXT.get(name, {})
    log = train(base=replace(SHORT, **context), **{name: value})
    assert all(math.isfinite(log[f"losses/{key}"]) for key in METRICS) and log["losses/nonfinite"] == 0
    if value == getattr(BASE, name) or name in WITHOUT_EFFECT:
        return
    old, new = unchanged(context), saved()["agent"]
    if name == "compile":  # the same numbers, faster: 40 gradient steps
        for key, x in old.items():
            torch.testing.assert_close(x, new[key], rtol=1e-3, atol=1e-3)
        return
    moved = [k for k in old if k not in new or old[k].shape != new[k].shape or not torch.equal(old[k], new[k])]
    assert len(moved) > 3


def test_compiled_gradients_follow_new_weights(monkeypatch):
    """H24: an optimizer step, loaded weights, another policy; nothing of the old ones is baked in."""
    torch.manual_seed(0)
    agent, other = (Agent(BASE, 3, [-1.0, -1.0], [1.0, 1.0]) for _ in range(2))
    act = sac.compile_pure(lambda x: agent.policy(agent.encode(x))[0].tanh(), True)
    x = torch.randn(4, 3)
    act(x)
    agent.load_state_dict(other.state_dict())
    torch.testing.assert_close(act(x), other.act(x))


def test_logged_returns_are_raw():
    """The reward shaper is for the losses alone."""
    plain = train("a", total_timesteps=160)
    shaped = train("b", total_timesteps=160, reward_scale=0.01, reward_shift=5.0)
    assert rows("a")[0] | {"seconds": 0, "charts/SPS": 0} == rows("b")[0] | {"seconds": 0, "charts/SPS": 0}
    assert plain["losses/qf1_values"] != shaped["losses/qf1_values"]


def test_memory_does_not_grow(monkeypatch):
    """H36, without the garbage collector."""
    resident, update = [], EpisodeStats.update

    def spy(self, *args):
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return update(self, *args)

    monkeypatch.setattr(EpisodeStats, "update", spy)
    gc.disable()
    try:
        train(total_timesteps=1200, learning_starts=40)
    finally:
        gc.enable()
    assert len(resident) == 30 and resident[29] - resident[9] < min(0.02 * resident[9], 4e6)


# ---- learning ----

LEARN = replace(BASE, num_envs=8, total_timesteps=3200, learning_starts=400, buffer_size=4000, utd_ratio=0.25,
                gamma=0.9, batch_size=64, q_lr=3e-3, policy_lr=3e-3, tau=0.05, alpha=1e-4, autotune=False,
                log_interval=400, hidden_sizes=(32,))  # fmt: skip


def learned_value(env_id, **changes):
    train(base=LEARN, env_id=env_id, **changes)
    agent, _ = load_agent("runs/run/last.pt")
    return agent.values(agent.critic(torch.tensor([[1.0, 0.0]]))).mean().item()


@pytest.mark.parametrize("changes", [{}, {"n_step": 3}, {"q_reduce": "mean"}, {"q_layer_norm": True},
                                     {"critic": "c51", "v_min": 0.0, "v_max": 20.0, "num_atoms": 51}])  # fmt: skip
def test_truncation_bootstraps(probes, changes):  # noqa: F811
    """H2: reward 1 for ever, cut every 5 steps, gamma .9: worth 10. Were a cut an end, 1 / (1 - .9 * .8) = 3.57."""
    assert learned_value("ConstantReward", **changes) == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("n_step", [1, 3])
def test_termination_does_not(probes, n_step):  # noqa: F811
    """One state for all: V is the mean over the five steps of their n rewards and of what is bootstrapped."""
    left = [min(5 - t, n_step) for t in range(5)]
    goes_on = [5 - t > n_step for t in range(5)]
    gained = sum(sum(0.9**k for k in range(n)) for n in left) / 5
    value = gained / (1 - sum(0.9**n_step for go in goes_on if go) / 5)
    assert learned_value("ConstantRewardTerminal", n_step=n_step) == pytest.approx(value, abs=0.15)
    assert n_step == 3 or value == pytest.approx(1 / (1 - 0.9 * 0.8))


def test_policy_finds_the_best_action(probes):  # noqa: F811
    train(base=LEARN, env_id="ActionIsObs", total_timesteps=4000, autotune=True, alpha=0.1, alpha_lr=3e-3,
          norm_obs=True, utd_ratio=0.5, target_entropy_scale=3.0)  # fmt: skip
    agent, _ = load_agent("runs/run/last.pt")
    actions = agent.act(torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(actions, torch.tensor([[0.5], [-0.5]]), rtol=0, atol=0.1)


def test_entropy_reaches_its_target(probes):  # noqa: F811
    """-1.5 nats; the uniform distribution, with which it starts, has .69."""
    log = train(base=LEARN, env_id="ConstantReward", autotune=True, alpha=0.01, alpha_lr=1e-2, target_entropy_scale=1.5,
                utd_ratio=0.5, gamma=0.0, batch_size=32)  # fmt: skip
    assert log["losses/entropy"] == pytest.approx(-1.5, abs=0.2)


# ---- resume ----

WITH = {"save_replay": True, "save_interval": 2, "norm_obs": True, "policy_frequency": 2, "n_step": 3,
        "utd_ratio": 0.37}  # fmt: skip


def run_train(args):
    driver.install()
    return main(Args(**vars(BASE) | driver.tuples(args)))


@pytest.mark.parametrize("starts, half", [(120, 160), (120, 80), (60, 160)])
def test_resume_with_replay_is_exact(tmp_path, starts, half):
    """4 iterations and 4 in a new process equal 8, also where the first half ends in the random actions."""
    args = WITH | {"run_name": "run", "total_timesteps": 320, "learning_starts": starts}
    zygote().run(tmp_path, "test_sac_train:run_train", args=args)
    whole = saved()
    Path("runs/run/last.pt").unlink()
    zygote().run(tmp_path, "test_sac_train:run_train", args=args | {"resume": f"runs/run/{half}.pt"})
    halves = saved()
    assert saved(file=f"{half}.pt")["global_step"] == half and whole["global_step"] == 320
    for state in (whole, halves):
        assert state.pop("seconds") > 0
    assert whole["replay"][0]["stored"] == 80 and whole["updates"] == 37 * (320 - starts) // 100
    same(whole, halves)
    assert [row["global_step"] for row in rows()] == list(range(40, 321, 40))
    for part in whole["optimizer"]["state"].values():  # H4: every optimizer state is there
        assert part["step"] > 0 and part["exp_avg_sq"].sum() > 0


def record_actions(monkeypatch):
    """Per env step: "random" or "policy"; and None for each gradient step."""
    events, loss, step, rand = [], sac.sac_loss, driver.LinearEnv.step, torch.rand_like
    drawn = []
    monkeypatch.setattr(torch, "rand_like", lambda x: (drawn.append(1), rand(x))[1])

    def env_step(self, actions):
        events.append("random" if drawn else "policy")
        drawn.clear()
        return step(self, actions)

    monkeypatch.setattr(driver.LinearEnv, "step", env_step)
    monkeypatch.setattr(sac, "sac_loss", lambda *a, **k: (events.append(None), loss(*a, **k))[1])
    return events


def test_resume_without_replay_lets_the_policy_fill_it_first(monkeypatch):
    """H29, S-7."""
    events = record_actions(monkeypatch)
    train(total_timesteps=200)
    assert events[:30] == ["random"] * 30 and events[30:35] == ["policy"] + [None] * 4 and "random" not in events[30:]
    assert saved()["replay"] is None
    events.clear()
    train(resume="runs/run/last.pt", total_timesteps=400)
    assert events[:30] == ["policy"] * 30 and events[30:35] == ["policy"] + [None] * 4
    assert "random" not in events and events.count(None) == 80 and saved()["updates"] == 80 + 80


@pytest.mark.parametrize("resume", ["runs/run/200.pt", "auto"])
def test_resume_near_the_end_of_the_budget_runs_on_to_it(monkeypatch, resume):
    """The replay would first have to be filled again, so nothing more is learned; a restarted job must end well."""
    train(total_timesteps=240, save_interval=1)
    for file in ("last.pt", "best.pt", "240.pt"):
        Path("runs/run", file).unlink()
    events = record_actions(monkeypatch)
    train(total_timesteps=240, resume=resume)
    assert events == ["policy"] * 10 and saved()["global_step"] == 240 and saved()["updates"] == 80


@pytest.mark.parametrize("num_envs", [1, 3, 40, 300])
@pytest.mark.parametrize("learning_starts", [0, 40, 249, 5000])
@pytest.mark.parametrize("utd_ratio", [1.0, 0.37, 1 / 15, 0.001])
@pytest.mark.parametrize("log_interval", [1, 250])
def test_shortest_run_that_is_named_learns(num_envs, learning_starts, utd_ratio, log_interval):
    """And what it is refused for is true: the plan before the named number has no gradient step."""
    args = replace(BASE, num_envs=num_envs, learning_starts=learning_starts, utd_ratio=utd_ratio, buffer_size=1000,
                   log_interval=log_interval, total_timesteps=1)  # fmt: skip
    needed = learning_starts + math.ceil(1 / Fraction(str(utd_ratio)))
    if num_envs >= needed:
        return
    with pytest.raises(InputError, match=f"after {needed} transitions.* at least [0-9]+$") as error:
        sac.plan_iterations(args, 1, 0, learning_starts)
    enough = int(str(error.value).split()[-1])
    T, last = sac.plan_iterations(replace(args, total_timesteps=enough), 1, 0, learning_starts)
    assert needed <= T * last * num_envs <= enough < needed + max(log_interval, num_envs)
    with pytest.raises(InputError):
        sac.plan_iterations(replace(args, total_timesteps=needed - 1), 1, 0, learning_starts)


def test_replay_can_be_left_behind_and_must_fit(monkeypatch):
    train(save_replay=True)
    with pytest.raises(InputError, match=r"'steps': 40.*'steps': 20.*the number of ranks.*--no-save-replay"):
        train(resume="runs/run/last.pt", total_timesteps=400, save_replay=True, buffer_size=80)
    with pytest.raises(InputError, match="'num_envs': 4.*'num_envs': 5"):
        train(resume="runs/run/last.pt", total_timesteps=400, save_replay=True, num_envs=5, buffer_size=200)
    train(resume="runs/run/last.pt", total_timesteps=480, num_envs=5, buffer_size=80)
    assert saved()["replay"] is None and saved()["global_step"] == 480


def test_envs_that_cannot_continue_cut_the_replay(monkeypatch):
    kept = []
    monkeypatch.setattr(sac, "Replay", lambda *a: kept.append(Replay(*a)) or kept[-1])
    train(save_replay=True, env_kwargs=("exact=False",), buffer_size=1000)
    train(resume="runs/run/last.pt", save_replay=True, env_kwargs=("exact=False",), buffer_size=1000,
          total_timesteps=280)  # fmt: skip
    assert kept[1].stored == 70 and kept[1].data["ends"][59].all() and not kept[1].data["ends"][58].all()


def test_changed_options_take_effect_on_resume():
    train()
    args = {"resume": "runs/run/last.pt", "total_timesteps": 480, "q_lr": 1e-5, "policy_lr": 2e-5, "alpha_lr": 3e-5}
    log = train(**args, autotune=False, alpha=0.25)
    assert [group["lr"] for group in saved()["optimizer"]["param_groups"]] == [1e-5, 2e-5, 3e-5]
    assert log["losses/alpha"] == pytest.approx(0.25)
    for name, value in (("hidden_sizes", (8,)), ("critic", "c51"), ("q_layer_norm", True), ("norm_obs", True)):
        with pytest.raises(InputError, match="cannot change"):
            train(resume="runs/run/last.pt", total_timesteps=960, **{name: value})


def test_loss_that_is_nan_leaves_the_parameters_alone(monkeypatch):
    """H10."""
    agents, loss = [], sac.sac_loss

    def spy(agent, args, **batch):
        agents.append(agent)
        values, metrics = loss(agent, args, **batch)
        return [value if value is None else value * math.nan for value in values], metrics

    monkeypatch.setattr(sac, "sac_loss", spy)
    with pytest.raises(InputError, match="loss was NaN or infinite in 40 gradient steps of iteration 4"):
        train()
    assert all(p.isfinite().all() for p in agents[0].parameters()) and not Path("runs/run/last.pt").exists()


class NanReward(Probe):
    def reward(self, actions):
        return torch.where(self.t == 3, math.nan, 1.0)


@pytest.mark.parametrize("critic", ["mse", "c51"])
def test_nan_of_the_env_is_named(monkeypatch, probes, critic):  # noqa: F811
    monkeypatch.setitem(PROBES, "NanReward", NanReward)
    with pytest.raises(InputError, match="reward of env 0 is NaN .* step 3 "):
        train(env_id="NanReward", learning_starts=0, critic=critic)


# ---- ranks ----


def run_rank(args):
    driver.install()
    agents, init = [], Agent.__init__

    def recorded(self, *a, **k):
        init(self, *a, **k)
        agents.append(self)

    Agent.__init__ = recorded
    calls, loss = [], sac.sac_loss

    def spy(*a, **k):
        calls.append(k["obs"])
        return loss(*a, **k)

    sac.sac_loss = spy
    metrics = main(Args(**vars(BASE) | driver.tuples(args)))
    return {"agent": agents[0].state_dict(), "metrics": metrics, "calls": len(calls), "batch": calls[0]}


def test_ranks_learn_as_one(tmp_path):
    """Equal parameters bit for bit, own envs, noise and batches; pooled statistics; transitions of both are counted."""
    args = {"norm_obs": True, "total_timesteps": 320, "run_name": "two", "save_replay": True, "save_interval": 2}
    first, second = zygote().run_ranks(tmp_path, "test_sac_train:run_rank", args=args)
    same(first["agent"], second["agent"])
    assert first["agent"]["obs_rms.count"] == 320 and not torch.equal(first["batch"], second["batch"])
    assert first["calls"] == second["calls"] == 200
    for name in METRICS:
        assert first["metrics"][f"losses/{name}"] == second["metrics"][f"losses/{name}"], name
    assert [row["global_step"] for row in rows("two")] == list(range(40, 321, 40))
    state = saved("two")
    assert len(state["replay"]) == 2 and len(list(Path("runs").iterdir())) == 1
    assert not torch.equal(state["replay"][0]["data"]["obs"], state["replay"][1]["data"]["obs"])
    Path("runs/two/last.pt").unlink()
    again, _ = zygote().run_ranks(tmp_path, "test_sac_train:run_rank", args=args | {"resume": "runs/two/160.pt"})
    same(first["agent"], again["agent"])


# ---- command line ----

SMALL = ["--num-envs", "2", "--total-timesteps", "160", "--learning-starts", "40", "--batch-size", "8", "--buffer-size",
         "200", "--hidden-sizes", "8", "--device", "cpu", "--torch-threads", "1", "--log-interval", "40"]  # fmt: skip
TOY = ["--env-id", "gym/toy_envs:Counter-v0", *SMALL]


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process on true environments; exit status, stdout and stderr's other lines."""
    monkeypatch.undo()

    def run(*argv: str) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["sac.py", *argv])
        capsys.readouterr()
        try:
            cli.run(main, Args)
            status = 0
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, [line for line in err.splitlines() if not line.startswith(("env:", "replay:"))]

    return run


BAD = [
    (["--env-id", "gym/CartPole-v1"], ["Discrete", "ppo_discrete.py"]),
    (["--env-id", "gym/toy_envs:Unbounded-v0"], ["without bounds", "ppo_continuous.py"]),
    (["--env-id", "gym/toy_envs:Image-v0"], ["(2, 3, 3)", "ppo_discrete.py"]),
    (["--env-id", "gym/toy_envs:Asymmetric-v0"], ["critic alone", "ppo_continuous.py"]),
    (["--buffer-size", "1e12"], ["--buffer-size", "1000000000000 transitions", "would fit"]),
    (["--buffer-size", "1"], ["--buffer-size 1", "--num-envs 2"]),
    (["--total-timesteps", "40"], ["--total-timesteps 40: nothing would be learned", "after 41 transitions",
                                   "--learning-starts 40", "--utd-ratio 1.0", "at least 80"]),
    (["--utd-ratio", "0.001"], ["--total-timesteps 160", "nothing would be learned", "1040", "at least 1040"]),
    (["--checkpoint", "x.pt"], ["--checkpoint x.pt", "--play", "--resume"]),
    (["--seed", str(2**63)], [f"--seed {2**63}", f"at most {2**63 - 1}"]),
    (["--torch-threads", "100000"], ["--torch-threads 100000", "at most", "cores"]),
    (["--utd-ratio", "0"], ["--utd-ratio 0", "positive"]),
    (["--utd-ratio", "nan"], ["--utd-ratio nan", "finite"]),
    (["--n-step", "0"], ["--n-step 0", "at least 1"]),
    (["--batch-size", "0"], ["--batch-size 0", "at least 1"]),
    (["--policy-frequency", "0"], ["--policy-frequency 0", "at least 1"]),
    (["--learning-starts", "-1"], ["-1"]),
    (["--tau", "1.5"], ["--tau 1.5", "at most 1"]),
    (["--gamma", "2"], ["--gamma 2.0", "at most 1"]),
    (["--alpha", "0"], ["--alpha 0.0", "positive"]),
    (["--q-lr", "-1"], ["-1"]),
    (["--critic", "c52"], ["c52", "--critic", "c51"]),
    (["--q-reduce", "max"], ["max", "--q-reduce", "mean"]),
    (["--v-min", "3", "--v-max", "3"], ["--v-min 3.0", "--v-max 3.0"]),
    (["--num-atoms", "1"], ["--num-atoms 1", "at least 2"]),
    (["--reward-min", "3", "--reward-max", "2"], ["--reward-min 3.0", "--reward-max 2.0"]),
    (["--reward-log"], ["--reward-log", "--reward-min"]),
    (["--hidden-sizes", "0"], ["--hidden-sizes (0,)"]),
    (["--log-sigma-bounds", "0", "1"], ["--log-sigma-bounds"]),
    (["--max-grad-norm", "0"], ["--max-grad-norm 0.0", "positive"]),
    (["--num-steps", "8"], ["--num-steps"]),
    (["--play"], ["--checkpoint"]),
    (["--play", "--checkpoint", "none.pt"], ["none.pt", "no such file"]),
    (["--resume", "none.pt"], ["none.pt", "no such file"]),
    (["--device", "cuda:7"], ["cuda:7"]),
]  # fmt: skip


@pytest.mark.parametrize("argv, words", BAD, ids=lambda x: " ".join(x))
def test_mistakes_are_one_line(call, tmp_path, argv, words):
    os.chdir(tmp_path)
    status, out, lines = call(*TOY, *argv)
    assert status == 2 and out == "" and len(lines) == 1, (status, out, lines)
    assert all(word in lines[0] for word in words), lines[0]
    assert not Path("runs").exists()


def test_command_line(call, tmp_path):
    """H41; then play and resume with the arguments of the checkpoint."""
    os.chdir(tmp_path)
    status, out, lines = call(*TOY, "--run-name", "base", "--autotune", "False", "--alpha=0.2", "--no_d2rl",
                              "--learning-starts", "4e1", "--q_layer_norm")  # fmt: skip
    assert status == 0 and lines == [] and "stopped at global_step=160: total_timesteps" in out
    told = json.loads(Path("runs/base/args.json").read_text())
    assert told["autotune"] is False and told["alpha"] == 0.2 and told["learning_starts"] == 40 and told["q_layer_norm"]
    status, out, lines = call("--play", "--checkpoint", "runs/base/last.pt", "--num-episodes", "6")
    assert status == 0 and lines == [] and json.loads(out)["mean"] == 5 and json.loads(out)["episodes"] == 6
    status, out, lines = call("--resume", "runs/base/last.pt", "--total-timesteps", "320")
    assert status == 0 and "global_step=320" in out
    assert json.loads(Path("runs/base/args.json").read_text())["alpha"] == 0.2
    status, out, lines = call("--resume", "auto", "--run-name", "base", "--total-timesteps", "350")
    assert status == 0 and lines == [] and "global_step=320: nothing left to do" in out
    state = saved("base")
    torch.save(state | {"script": "ppo_continuous"}, "runs/base/other.pt")
    (line,) = call("--play", "--checkpoint", "runs/base/other.pt")[2]
    assert line.endswith("was written by ppo_continuous.py, not by sac.py; use ppo_continuous.py")


def run_command(argv):
    driver.install()
    sys.argv = ["sac.py", *argv]
    cli.run(main, Args)


def test_stop_signal_saves_and_exits_with_status_0(tmp_path):
    argv = [*SMALL, "--env-id", "toy/Linear", "--total-timesteps", "1e9", "--run-name", "stopped", "--env-kwargs",
            f"signal={int(signal.SIGINT)}", "signal_step=50"]  # fmt: skip
    process = zygote().start(tmp_path, "test_sac_train:run_command", argv=argv)
    assert process.wait() == 0
    assert "stopped at global_step=120: interrupted" in process.stdout and "Traceback" not in process.stderr
    assert saved("stopped")["global_step"] == 120


def test_actions_are_inside_the_space(probes, monkeypatch):  # noqa: F811
    """H30: of the start, of training and of play."""
    given = []

    class Box(Probe):
        def __init__(self, *args):
            super().__init__(*args)
            self.action_space = spaces.Box(-0.7, 1.3, (1,), "float32")

        def reward(self, actions):
            given.append(actions.clone())
            return 100 * actions[:, 0]

    monkeypatch.setitem(PROBES, "Box", Box)
    train(env_id="Box", policy_lr=0.1, total_timesteps=400)
    train("played", env_id="Box", play=True, checkpoint="runs/run/last.pt", num_episodes=4)
    box = spaces.Box(-0.7, 1.3, (1,), "float32")
    assert len(given) == 105 and all(box.contains(row.numpy()) for actions in given for row in actions)
    assert torch.cat(given).max() > 1.29
