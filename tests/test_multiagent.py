"""ppo_multiagent.py: its maths against scalar loops, dead and waiting agents, training, resume, ranks, self-play."""

import json
import math
from pathlib import Path

import driver
import numpy as np
import pytest
import squads
import torch
from driver import zygote

import ppo_multiagent as ppo
from common import checkpoint
from common import envs as vecenvs
from common.envs.self_play import Human, SelfPlayVecEnv
from common.errors import InputError

BASE = {"env_id": "toy/Squad", "num_envs": 4, "num_steps": 9, "num_minibatches": 3, "update_epochs": 2,
        "hidden_sizes": (8,), "device": "cpu", "torch_threads": 1, "games_to_track": 5}  # fmt: skip
BATCH = 36
KINDS = [
    {},
    {"central_critic": True},
    {"central_critic": True, "team_value": True, "clip_vloss": True},
    {"central_critic": True, "agent_ids": True, "env_kwargs": ("stateless=True",)},
    {"agent_ids": True, "separate": False, "norm_obs": False, "norm_value": False, "norm_adv": False},
    {"env_kwargs": ("continuous=True",), "d2rl": True, "layer_norm": True, "hidden_sizes": (8, 6)},
    {"frame_stack": 3, "finite_horizon": True},
]


@pytest.fixture(autouse=True)
def toys(monkeypatch, tmp_path):
    monkeypatch.setattr(vecenvs, "make", squads.make)
    monkeypatch.chdir(tmp_path)


def train(iterations=3, **changes):
    args = BASE | {"total_timesteps": BATCH * iterations, "run_name": "run"} | changes
    return ppo.main(ppo.Args(**args))


def weights(name="run"):
    return checkpoint.load(Path("runs") / name / "last.pt")["agent"]


def equal(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def spy(monkeypatch):
    """Every call of ppo_loss: the agent, its batch, and the logarithm of the ratio."""
    calls, loss = [], ppo.ppo_loss

    def spied(agent, args, **batch):
        if torch.is_grad_enabled():
            policy, head = agent.policy(batch["obs"], batch["action_mask"]), agent.policy.head
            old = head.logprob(batch["old_policy"], batch["actions"])
            log_ratio = (head.logprob(policy, batch["actions"]) - old).detach()
            calls.append((agent, {k: v.clone() for k, v in batch.items()}, log_ratio))
        return loss(agent, args, **batch)

    monkeypatch.setattr(ppo, "ppo_loss", spied)
    return calls


# ---- order of agents and envs ----


@pytest.mark.parametrize("central", [False, True])
@pytest.mark.parametrize("team", [False, True])
def test_each_agent_learns_its_own_value(central, team):
    """Values 0, 1, 2 by agent, and 10 more in every second env: a mix-up of any two axes fails."""
    if team and not central:
        return
    changes = {"central_critic": central, "team_value": team, "agent_ids": not central, "learning_rate": 0.01}
    kwargs = ("hidden=True",) if central else ()  # a central critic sees what no agent does
    train(80, env_id="toy/Known", env_kwargs=kwargs, num_envs=6, num_steps=6, lr_schedule="constant", **changes)
    agent, _ = ppo.load_agent("runs/run/last.pt")
    envs = squads.Known(6, hidden=central)
    obs, state = agent.observe(*envs.reset(), envs.alive)
    expected = torch.arange(3.0) + 10 * (torch.arange(6) % 2)[:, None]
    if team:
        expected = expected.mean(1, keepdim=True).expand(-1, 3)
    torch.testing.assert_close(agent.value(obs, state).detach(), expected, atol=0.3, rtol=0)


def test_rows_of_the_batch_belong_together(monkeypatch):
    """Obs, state, mask and action of a row are of one env and one step, and agents keep their places."""
    calls = spy(monkeypatch)
    train(4, num_minibatches=3, central_critic=True)
    for _, batch, _ in calls:
        all_live = (batch["value_weights"] > 0).all(1)
        torch.testing.assert_close(batch["state"][all_live, :3], batch["obs"][all_live].sum(1)[:, :3])
        assert batch["action_mask"].gather(2, batch["actions"])[batch["weights"] > 0].all()
        # the mask of agent g of env n at age t depends on t + n + g, and different rows have different masks
        age = batch["state"][:, None, 3:] + torch.arange(3)[:, None]
        masks = torch.stack([(age + n + torch.arange(4)) % 3 > 0 for n in range(4)])
        same = (masks == batch["action_mask"]).all(-1)  # [env, row, agent]
        assert (same | (batch["value_weights"] == 0)).all(-1).any(0).all()


# ---- maths against scalar loops ----


def reference_gae(rewards, values, final_values, terminations, truncations, last_values, gamma, lam):
    """Of one agent, float64: sums of TD errors, each until its episode's end."""
    T, deltas = len(rewards), []
    for t in range(T):
        if terminations[t]:
            after = 0.0
        elif truncations[t]:
            after = final_values[t]
        else:
            after = values[t + 1] if t + 1 < T else last_values
        deltas.append(rewards[t] + gamma * after - values[t])
    result = []
    for t in range(T):
        total, weight = 0.0, 1.0
        for k in range(t, T):
            total += weight * deltas[k]
            weight *= gamma * lam
            if terminations[k] or truncations[k]:
                break
        result.append(total)
    return result


@pytest.mark.parametrize("changes", [*KINDS[:4], KINDS[6], {"reward_scale": 0.3, "reward_shift": 1.0}])
def test_advantages_equal_a_scalar_loop(monkeypatch, changes):
    """Own returns end with an agent's death, those of a team go on; a truncation bootstraps from the last state."""
    changes = {"norm_adv": False, "norm_value": False, "norm_obs": False, "gamma": 0.9, "gae_lambda": 0.7,
               "learning_rate": 0.0} | changes  # fmt: skip
    steps, envs_made = [], []

    def recorded(*args, **kwargs):
        envs = squads.make(*args, **kwargs)
        inner, step = getattr(envs, "envs", envs), envs.step
        envs_made.append(inner)

        def stepped(actions):
            alive = envs.alive.clone()
            result = step(actions)
            steps.append((alive, result))
            return result

        envs.step = stepped
        return envs

    monkeypatch.setattr(vecenvs, "make", recorded)
    calls = spy(monkeypatch)
    monkeypatch.setattr(torch, "randperm", lambda n, device=None: torch.arange(n))
    train(1, num_minibatches=1, update_epochs=1, **changes)
    agent, batch, _ = calls[0]
    args = agent.args
    values, raw = batch["old_values"].view(9, 4, 3).double(), batch["advantages"].view(9, 4, 3)
    scale, shift = args.reward_scale, args.reward_shift
    checked = deaths = cuts = 0
    for n in range(4):
        for g in range(3):
            rewards, ends, cut, finals = [], [], [], []
            for alive, step in steps[:9]:
                own = torch.where(alive, step.rewards, 0.0)[n]
                reward = own[alive[n]].mean() if args.team_value and alive[n].any() else own[g]
                rewards.append(((0.0 if args.team_value and not alive[n].any() else reward.item()) + shift) * scale)
                died = bool(alive[n, g] and not step.final_alive[n, g]) and not args.team_value
                over = bool(step.truncations[n])
                ends.append(bool(step.terminations[n]) or died or (over and args.finite_horizon))
                cut.append(over and not args.finite_horizon)
                deaths += died
                if over:
                    seen = agent.observe(step.final_obs, step.final_state, step.final_alive)
                    finals.append(agent.value(*seen)[n, g].item())
                else:
                    finals.append(math.nan)
                cuts += over
            last_alive, last = steps[8][1].alive, steps[8][1]
            seen = agent.observe(last.obs, last.state, last_alive)
            after = agent.value(*seen)[n, g].item()
            expected = reference_gae(rewards, values[:, n, g].tolist(), finals, ends, cut, after, 0.9, 0.7)
            for t in range(9):
                if steps[t][0][n, g] or args.team_value:
                    assert raw[t, n, g].item() == pytest.approx(expected[t], abs=1e-4), (t, n, g)
                    checked += 1
    assert checked > 60 and cuts and (deaths > 0) != args.team_value


def test_loss_is_a_mean_over_rows_that_count():
    """Against loops in float64, weights of policy and value apart."""
    args = ppo.Args(hidden_sizes=(8,), agent_ids=True, clip_vloss=True, ent_coef=0.03, vf_coef=0.7)
    agent = ppo.Agent(args, num_agents=3, obs_dim=4, state_dim=0, action_spec={"sizes": [5], "multi_discrete": False})
    g = torch.Generator().manual_seed(1)
    obs, mask = torch.randn(7, 3, 4, generator=g), torch.rand(7, 3, 5, generator=g) < 0.6
    mask[..., 1] = True
    alive, acting = torch.rand(7, 3, generator=g) < 0.7, torch.rand(7, 3, generator=g) < 0.6
    actions = torch.full((7, 3, 1), 1)
    old = torch.where(mask, torch.randn(7, 3, 5, generator=g), ppo.FORBIDDEN).log_softmax(-1)[:, :, None]
    old_values, advantages, targets = (torch.randn(7, 3, generator=g) for _ in range(3))
    acts = (alive & acting).float()
    batch = {"obs": obs, "state": obs[:, 0, :0], "action_mask": mask, "actions": actions, "old_policy": old,
             "old_values": old_values, "advantages": advantages, "targets": targets, "weights": acts / acts.mean(),
             "value_weights": alive / alive.float().mean()}  # fmt: skip
    loss, metrics = ppo.ppo_loss(agent, args, **batch)
    policy, values = (x.detach().double() for x in agent(obs, obs[:, 0, :0], mask))
    policies, errors, entropies, kls = [], [], [], []
    for m in range(7):
        for i in range(3):
            if alive[m, i]:
                v, old_v, target = values[m, i].item(), old_values[m, i].item(), targets[m, i].item()
                clipped = old_v + max(-0.2, min(0.2, v - old_v))
                errors.append(max((v - target) ** 2, (clipped - target) ** 2))
            if alive[m, i] and acting[m, i]:
                new = [policy[m, i, 0, k].item() for k in range(5) if mask[m, i, k]]
                was = [old[m, i, 0, k].item() for k in range(5) if mask[m, i, k]]
                ratio, a = math.exp(policy[m, i, 0, 1].item() - old[m, i, 0, 1].item()), advantages[m, i].item()
                policies.append(-min(ratio * a, max(0.8, min(1.2, ratio)) * a))
                entropies.append(-sum(math.exp(x) * x for x in new))
                kls.append(sum(math.exp(x) * (x - y) for x, y in zip(was, new, strict=True)))
    found = dict(zip(ppo.METRICS, metrics.tolist(), strict=True))
    assert found["policy_loss"] == pytest.approx(np.mean(policies), abs=1e-5)
    assert found["value_loss"] == pytest.approx(0.5 * np.mean(errors), abs=1e-5)
    assert found["entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert found["approx_kl"] == pytest.approx(np.mean(kls), abs=1e-5)
    total = np.mean(policies) + 0.7 * 0.5 * np.mean(errors) - 0.03 * np.mean(entropies)
    assert loss.item() == pytest.approx(total, abs=1e-5)


def test_central_critic_and_ids():
    """The actor never sees the state, the critic never an agent's number unless it has its own value."""
    spec = {"sizes": [3], "multi_discrete": False}
    args = ppo.Args(hidden_sizes=(8,), central_critic=True, norm_obs=False, norm_value=False)
    agent = ppo.Agent(args, num_agents=3, obs_dim=4, state_dim=6, action_spec=spec)
    obs, state = torch.randn(5, 3, 4, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    mask = torch.ones(5, 3, 3, dtype=torch.bool)
    policy, values = agent(obs, state, mask)
    assert torch.autograd.grad(policy[..., 0].sum(), state, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(values.sum(), obs, allow_unused=True, retain_graph=True)[0] is None
    for g in range(3):
        grad = torch.autograd.grad(policy[:, g, 0, 0].sum(), obs, retain_graph=True)[0]
        assert grad[:, g].abs().sum() > 0 and grad[:, [i for i in range(3) if i != g]].abs().sum() == 0
    assert not torch.equal(values[:, 0], values[:, 1])
    same = obs.detach()[:, :1].expand(-1, 3, -1)
    assert torch.equal(agent.policy(same, mask)[:, 0], agent.policy(same, mask)[:, 2])
    with_ids = ppo.Agent(ppo.Args(hidden_sizes=(8,), agent_ids=True), 3, 4, 0, spec)
    assert not torch.allclose(with_ids.policy(same, mask)[:, 0], with_ids.policy(same, mask)[:, 2])
    team = ppo.Agent(ppo.Args(hidden_sizes=(8,), central_critic=True, team_value=True), 3, 4, 6, spec)
    values = team.value(obs, state)
    assert values.shape == (5, 3) and torch.equal(values[:, 0], values[:, 2])
    joint = ppo.Agent(ppo.Args(hidden_sizes=(8,), central_critic=True), 3, 4, 0, spec)
    grad = torch.autograd.grad(joint.value(obs, obs[:, 0, :0])[:, 1].sum(), obs)[0]
    assert (grad.abs().sum((0, 2)) > 0).all()


# ---- dead and waiting agents ----


@pytest.mark.parametrize("changes", KINDS)
def test_what_dead_agents_show_and_earn_does_not_matter(changes):
    """H18: not for weights, statistics, nor for any metric."""
    results = []
    for junk in (0.0, 1e6):
        kwargs = (*changes.get("env_kwargs", ()), f"junk={junk}")
        metrics = train(4, **changes | {"env_kwargs": kwargs, "run_name": f"junk{junk}"})
        results.append((metrics, weights(f"junk{junk}")))
    if changes.get("frame_stack", 1) == 1:
        assert results[0][0]["charts/living_agents"] < 3
    equal(results[0][1], results[1][1])
    for name, value in results[0][0].items():
        assert name == "charts/SPS" or results[1][0][name] == value, name


def test_infinity_of_a_dead_agent_does_not_matter():
    train(3, run_name="nan", env_kwargs=("junk=1e400",))
    train(3, run_name="zero")
    equal(weights("nan"), weights("zero"))


def test_statistics_are_of_living_rows(monkeypatch):
    calls = spy(monkeypatch)
    train(2, num_minibatches=1, update_epochs=1)
    batch, state = calls[0][1], weights()
    alive = batch["value_weights"] > 0
    assert 0 < alive.sum() < alive.numel()
    valid = batch["weights"] > 0
    advantages = batch["advantages"][valid]
    assert advantages.mean().abs() < 1e-5 and abs(advantages.std(correction=0) - 1) < 1e-4
    assert batch["weights"].mean() == pytest.approx(1) and batch["value_weights"].mean() == pytest.approx(1)
    assert len(set(batch["weights"][valid].tolist())) == 1
    assert state["policy.obs_rms.count"] == state["value_rms.count"] and state["policy.obs_rms.count"] < 2 * 36 * 3


def test_who_waits_is_not_trained_as_if_it_had_acted(monkeypatch):
    """In turns: weight of the policy for one of two agents, of the value for both, and none in a row without life."""
    calls = spy(monkeypatch)
    metrics = train(2, env_id="toy/Duel", num_minibatches=1, update_epochs=1)
    batch = calls[0][1]
    lives, acts = batch["obs"].abs().sum((1, 2)) > 0, batch["obs"][..., 3] == 1
    assert torch.equal(batch["weights"] > 0, acts) and torch.equal(batch["value_weights"] > 0, acts | acts.flip(1))
    assert (~acts.any(1)).any() and lives.any()
    assert metrics["charts/valid_rows"] == pytest.approx(acts.any(1).float().mean().item(), abs=0.1)
    assert metrics["charts/episodic_length"] == 4  # the row without life is no step


# ---- training ----


@pytest.mark.parametrize("changes", KINDS)
def test_without_learning_the_ratio_is_one_and_the_kl_zero(monkeypatch, changes):
    calls = spy(monkeypatch)
    # CPU kernels round rows and columns by blocks of 16.
    sizes = {"num_steps": 16, "num_minibatches": 4, "total_timesteps": 3 * 64, "hidden_sizes": (16, 16)}
    metrics = train(3, learning_rate=0.0, **changes | sizes)
    assert metrics["losses/approx_kl"] == 0 and metrics["losses/clipfrac"] == 0
    assert len(calls) >= 16 and all(call[2].abs().max() == 0 for call in calls)


OPTIONS = {
    "gamma": 0.5, "gae_lambda": 0.5, "finite_horizon": True, "reward_shift": 1.0, "reward_scale": 3.0,
    "reward_min": 0.0, "reward_max": 0.1, "agent_ids": True, "central_critic": True, "frame_stack": 2,
    "hidden_sizes": (6, 6), "critic_hidden_sizes": (5,), "separate": False, "activation": "tanh",
    "initializer": "glorot", "d2rl": True, "layer_norm": True, "norm_obs": False, "norm_value": False,
    "norm_adv": False, "learning_rate": 3e-4, "critic_learning_rate": 1e-4, "lr_schedule": "adaptive",
    "update_epochs": 3, "clip_coef": 0.001, "clip_vloss": True, "vf_coef": 0.3,
    "ent_coef": 0.5, "max_grad_norm": 0.01, "weight_decay": 0.1, "seed": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_changes_what_is_learned(name):
    common = {"hidden_sizes": (8, 8), "learning_rate": 0.05, "max_lr": 0.1}
    train(3, run_name="base", **common)
    train(3, **common | {name: OPTIONS[name]})
    base, own = weights("base"), weights()
    assert base.keys() != own.keys() or any(
        base[k].shape != own[k].shape or not torch.equal(base[k], own[k]) for k in base
    )


@pytest.mark.parametrize("changes", KINDS)
def test_evaluation_plays_the_network_and_changes_nothing(changes):
    train(3, eval_interval=1, num_episodes=4, run_name="evaluated", **changes)
    train(3, **changes)
    equal(weights("evaluated"), weights())
    args = BASE | changes | {"play": True, "checkpoint": "runs/run/last.pt", "num_episodes": 8, "num_envs": 2}
    result = ppo.main(ppo.Args(**args))
    # by hand, the mode of the policy in each env
    kwargs = vecenvs.parse_env_kwargs(changes.get("env_kwargs", ()))
    envs = squads.make("toy/Squad", 2, "cpu", 0, kwargs, frame_stack=changes.get("frame_stack", 1))
    agent, _ = ppo.load_agent("runs/run/last.pt")
    (obs, _), totals, found = envs.reset(), [0.0, 0.0], [[], []]
    while min(map(len, found)) < 4:
        alive = envs.alive
        step = envs.step(agent.act(torch.where(alive[..., None], obs, 0.0), True, envs.action_mask))
        for n in range(2):
            if alive[n].any():
                totals[n] += step.rewards[n][alive[n]].double().mean().item()
            if step.terminations[n] or step.truncations[n]:
                found[n].append(totals[n])
                totals[n] = 0.0
        obs = step.obs
    assert result["mean"] == pytest.approx(np.mean([found[0][:4], found[1][:4]]), rel=1e-5)
    assert {"agent_0", "agent_2", "win_rate", "episodes"} <= result.keys() and result["episodes"] == 8


@pytest.mark.parametrize("changes", [*KINDS, {"env_id": "toy/Duel", "self_play": True, "pool_size": 3}])
def test_resume_is_exact(changes, monkeypatch):
    """Run 4 iterations = run 2, save, load in a new process, run 2."""
    monkeypatch.setattr(ppo, "SNAPSHOT_GAMES", 3)
    changes = {"lr_schedule": "adaptive", "snapshot_win_rate": 0.3} | changes
    whole = zygote().run(Path.cwd(), "test_multiagent:worker", iterations=4, changes=changes | {"run_name": "whole"})
    zygote().run(Path.cwd(), "test_multiagent:worker", iterations=2, changes=changes | {"run_name": "parts"})
    resumed = changes | {"run_name": "parts", "resume": "auto"}
    again = zygote().run(Path.cwd(), "test_multiagent:worker", iterations=4, changes=resumed)
    equal(weights("whole"), weights("parts"))
    for name, value in whole.items():
        same = again[name] == value or math.isnan(value) and math.isnan(again[name])
        assert name == "charts/SPS" or same, name


def worker(iterations, changes, shared_noise=0):
    vecenvs.make, ppo.SNAPSHOT_GAMES = squads.make, 3
    if shared_noise:
        rand = torch.rand
        generator = torch.Generator().manual_seed(3)
        rank = int(driver.os.environ.get("RANK", 0))

        def rows(*shape, device=None):
            drawn = rand(shared_noise, *shape[1:], generator=generator)
            return drawn[rank * shape[0] : (rank + 1) * shape[0]]

        torch.rand = rows
    return train(iterations, **driver.tuples(changes))


@pytest.mark.parametrize("changes", [{}, {"central_critic": True, "env_kwargs": ("stateless=True",)}])
def test_two_ranks_equal_one_with_twice_the_envs(changes):
    same = changes | {"num_minibatches": 1, "learning_rate": 0.01}
    zygote().run_ranks(Path.cwd(), "test_multiagent:worker", iterations=8, shared_noise=8,
                       changes=same | {"run_name": "two"})  # fmt: skip
    zygote().run(Path.cwd(), "test_multiagent:worker", iterations=8, shared_noise=8,
                 changes=same | {"run_name": "one", "num_envs": 8})  # fmt: skip
    two, one = weights("two"), weights("one")
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("changes", [KINDS[1], KINDS[5]])
def test_compiled_training_is_the_same(changes):
    """The graphs alone, by the eager backend's kernels: what is compiled computes what is written."""
    import torch._dynamo

    train(3, run_name="eager", **changes)
    compiled = torch.compile
    try:
        torch.compile = lambda fn, **kwargs: compiled(fn, **kwargs | {"backend": "aot_eager"})
        train(3, run_name="compiled", compile=True, **changes)
    finally:
        torch.compile = compiled
        torch._dynamo.reset()
    eager, own = weights("eager"), weights("compiled")
    for name in eager:
        torch.testing.assert_close(own[name], eager[name], rtol=1e-4, atol=1e-5, msg=name)


# ---- self-play ----


def duel(num_envs=6, **kwargs):
    """A self-play env whose opponents are numbered by the order in which they were drawn, and play their number."""

    class Counting:
        def __init__(self):
            self.drawn, self.asked = 0, []

        def draw(self, count):
            self.drawn += count
            return torch.arange(self.drawn - count, self.drawn)

        def act(self, obs, action_mask, who):
            self.asked.append((obs.clone(), who.clone()))
            return (who % 3)[:, None].expand(-1, obs.shape[1])

    return SelfPlayVecEnv(squads.Duel(num_envs, junk=7.0, **kwargs), Counting())


@pytest.mark.parametrize("size", [1, 2])
def test_seats_swap_and_opponents_stay(size):
    """Env i begins on side i % 2 and swaps with every game; the opponent is the same from a game's start to its end."""
    envs = duel(size=size)
    obs, state = envs.reset()
    assert state is None and obs.shape == (6, size, 4) and envs.num_agents == size
    side, games, who = torch.arange(6) % 2, torch.zeros(6), envs.who
    for _ in range(40):
        assert (obs[..., 2][envs.alive] == side[:, None].expand(-1, size)[envs.alive]).all()
        assert torch.equal(envs.acting, obs[..., 3] == 1)
        step = envs.step(torch.full((6, size), 2))
        seen, asked = envs.opponent.asked[-1]
        assert torch.equal(asked, who)
        assert (seen[..., 2] == 1 - side[:, None]).all()
        ended = step.terminations
        # both act twice, the learner adds 2 a time and its opponent who % 3, for each agent
        expected = 2 * size * (2 - who % 3)
        assert torch.equal(step.rewards[ended], expected[ended, None].expand(-1, size).float())
        ends, opponents, result = envs.games[-1]
        assert torch.equal(ends, ended) and torch.equal(opponents, who)
        assert torch.equal(result[ended], expected[ended].sign().float())
        assert torch.equal(step.won[ended], expected[ended] > 0)
        assert torch.equal(envs.who[~ended], who[~ended]) and (envs.who[ended] != who[ended]).all()
        side, games, who, obs = torch.where(ended, 1 - side, side), games + ended, envs.who, step.obs
    assert (games == 8).all()


def make_pool(size=3, noise=0.0, **changes):
    args = ppo.Args(self_play=True, pool_size=size, hidden_sizes=(8,), **changes)
    torch.manual_seed(0)
    agent = ppo.Agent(args, 1, 4, 0, {"sizes": [3], "multi_discrete": False})
    torch.nn.init.normal_(agent.policy.head.logits.weight, std=2.0)
    return agent, ppo.Pool(agent.policy, args, size, noise)


def fill(agent, pool):
    """Four different copies in three places."""
    for i in range(4):
        torch.nn.init.normal_(agent.policy.head.logits.weight, std=2.0)
        agent.policy.obs_rms.update(torch.randn(8, 4) * (i + 1))
        pool.record([(pool.members[0], 1.0)] * ppo.SNAPSHOT_GAMES)
        pool.grow(agent.policy, set())


def test_one_batched_call_equals_each_opponent_alone(monkeypatch):
    agent, pool = make_pool()
    fill(agent, pool)
    obs, who = torch.randn(50, 1, 4), torch.randint(1, 5, (50,))
    mask = torch.rand(50, 1, 3) < 0.7
    mask[..., 0] = True
    monkeypatch.setattr(ppo, "sample", lambda policy, noise: policy.argmax(-1))
    together = pool.act(obs, mask, who)
    for n in range(50):
        own = {name: x[who[n]] for name, x in pool.slots.items()}
        policy = torch.func.functional_call(agent.policy, own, (obs[n : n + 1], mask[n : n + 1]))
        assert together[n, 0] == policy[0, 0, 0].argmax(), n
    assert len({pool.slots["head.logits.weight"][slot].sum().item() for slot in range(1, 5)}) == 4


def test_a_frozen_opponent_is_frozen():
    """H43: neither its weights nor its normaliser follow the learner; it is no view of it."""
    agent, pool = make_pool()
    before = {name: x.clone() for name, x in pool.slots.items()}
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter.add_(1.0)
    agent.policy.obs_rms.update(100 + torch.randn(64, 4))
    for name, x in pool.slots.items():
        assert torch.equal(before[name], x), name
    assert (pool.slots["head.logits.weight"][ppo.RANDOM] == 0).all()


def test_a_slot_in_use_is_not_overwritten():
    agent, pool = make_pool(size=2)
    fill(agent, pool)
    (free,) = {1, 2, 3} - set(pool.members)
    members, before = list(pool.members), {name: x.clone() for name, x in pool.slots.items()}
    pool.record([(members[0], 1.0)] * ppo.SNAPSHOT_GAMES)
    pool.grow(agent.policy, {free})
    assert pool.members == members
    for name, x in pool.slots.items():
        assert torch.equal(before[name], x)
    pool.grow(agent.policy, set(members))
    assert pool.members == [members[1], free] and not pool.recent


def test_a_copy_is_taken_when_the_pool_is_beaten():
    agent, pool = make_pool(snapshot_win_rate=0.55)
    pool.record([(1, 1.0)] * (ppo.SNAPSHOT_GAMES - 1))
    pool.grow(agent.policy, set())
    assert pool.members == [1]
    wins = int(0.54 * ppo.SNAPSHOT_GAMES)
    pool.record([(1, 1.0)] * wins + [(1, -1.0)] * (ppo.SNAPSHOT_GAMES - wins))
    pool.grow(agent.policy, set())
    assert pool.members == [1]
    pool.record([(1, 0.0)] * int(0.9 * ppo.SNAPSHOT_GAMES) + [(1, 1.0)] * int(0.11 * ppo.SNAPSHOT_GAMES))
    pool.grow(agent.policy, set())  # draws are half a win
    assert pool.members == [1, 2]


def test_who_is_drawn_how_often():
    """The newest by its share, the others by (1 - score)^2, and nobody else."""
    agent, pool = make_pool(latest_share=0.4)
    fill(agent, pool)
    *others, latest = pool.members
    pool.scores[others[0]], pool.scores[others[1]] = 0.9, 0.7
    pool.rank()
    counts = torch.bincount(pool.draw(20000), minlength=5) / 20000
    assert counts[latest].item() == pytest.approx(0.4, abs=0.02)
    assert counts[others[0]].item() == pytest.approx(0.6 * 0.01 / 0.1, abs=0.02)
    assert counts[others[1]].item() == pytest.approx(0.6 * 0.09 / 0.1, abs=0.02)
    assert counts[ppo.RANDOM] == 0 and counts.sum() == pytest.approx(1)


def test_elo_and_scores():
    """K = 16: a win between equals is 8 points, and a score is a mean over about the last hundred games."""
    _, pool = make_pool()
    pool.record([(1, 1.0)])
    assert pool.rating == pytest.approx(8.0) and pool.ratings[1] == 0 and pool.scores[1] == pytest.approx(0.505)
    pool.ratings[1] = 408.0
    pool.record([(1, -1.0)])
    assert pool.rating == pytest.approx(8 - 16 / 11)


def test_noise_is_a_share_of_random_moves():
    agent, pool = make_pool(noise=0.3)
    torch.nn.init.zeros_(agent.policy.head.logits.weight)
    with torch.no_grad():
        agent.policy.head.logits.bias.copy_(torch.tensor([50.0, 0, 0]))
    noisy = ppo.Pool(agent.policy, agent.args, 0, 0.3)
    moves = noisy.act(torch.randn(9000, 1, 4), None, torch.ones(9000, dtype=torch.int64))
    shares = torch.bincount(moves.flatten(), minlength=3) / 9000
    torch.testing.assert_close(shares, torch.tensor([0.8, 0.1, 0.1]), atol=0.02, rtol=0)


def test_against_a_copy_of_itself_half_is_won():
    """H43: both seats, 400 games and more, in a game where who acts second has an advantage."""
    train(3, env_id="toy/Duel", self_play=True, pool_size=2)
    args = BASE | {"env_id": "toy/Duel", "self_play": True, "pool_size": 2, "play": True, "num_envs": 40,
                   "checkpoint": "runs/run/last.pt", "opponent": "runs/run/last.pt", "deterministic": False,
                   "num_episodes": 2000}  # fmt: skip
    result = ppo.main(ppo.Args(**args))
    won, lost = ((result[f"seat_0_{x}"] + result[f"seat_1_{x}"]) / 2 for x in ("won", "lost"))
    assert won + (1 - won - lost) / 2 == pytest.approx(0.5, abs=0.05)
    for seat in (0, 1):
        assert sum(result[f"seat_{seat}_{x}"] for x in ("won", "drawn", "lost")) == pytest.approx(1)


def test_self_play_learns_and_beats_its_beginnings(monkeypatch):
    """To add 2 in each move is the best; a random player adds 1 on average."""
    monkeypatch.setattr(ppo, "SNAPSHOT_GAMES", 60)
    metrics = train(60, env_id="toy/Duel", self_play=True, pool_size=4, num_envs=16, num_steps=15, learning_rate=0.01,
                    total_timesteps=60 * 240, num_minibatches=4, opponent_noise=0.0, eval_interval=60)  # fmt: skip
    assert metrics["charts/pool"] > 1 and metrics["charts/elo"] > 50
    assert metrics["eval/seat_0_lost"] < 0.15 and metrics["eval/seat_1_lost"] < 0.15
    assert metrics["eval/mean"] > 1.5
    args = BASE | {"env_id": "toy/Duel", "self_play": True, "pool_size": 4, "play": True, "num_envs": 20,
                   "checkpoint": "runs/run/last.pt", "opponent": "pool"}  # fmt: skip
    assert ppo.main(ppo.Args(**args))["mean"] >= 0


def test_a_human_can_play(monkeypatch, capsys):
    envs = squads.Duel(1)
    envs.unflattened_shape = (1, 2, 2)
    answers = iter(["9", "x", "1"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(answers))
    human = Human(envs)
    mask = torch.tensor([[[True, True, False]]])
    assert human.act(torch.tensor([[[1.0, 0, 0, 1, 5]]]), mask, human.draw(1)).tolist() == [[1]]
    waiting = torch.zeros(1, 1, 3, dtype=torch.bool)
    assert human.act(torch.zeros(1, 1, 5), waiting, human.draw(1)).tolist() == [[0]]  # is not asked
    out = capsys.readouterr().out
    assert "X O" in out and out.count("not allowed") == 2

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    with pytest.raises(InputError, match="input ended"):
        human.act(torch.zeros(1, 1, 4), mask, human.draw(1))
    with pytest.raises(InputError, match="--num-envs 1"):
        Human(squads.Duel(2))


# ---- mistakes ----


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"self_play": True}, "zero-sum"),
        ({"team_value": True}, "--central-critic"),
        ({"opponent": "pool"}, "--self-play"),
        ({"self_play": True, "opponent": "human"}, "--play"),
        ({"self_play": True, "opponent": "nobody.pt"}, "nobody.pt"),
        ({"num_minibatches": 5}, "num_envs*num_steps"),
        ({"pool_size": 0}, "--pool-size"),
        ({"opponent_noise": 1.5}, "--opponent-noise"),
        ({"snapshot_win_rate": -0.1}, "--snapshot-win-rate"),
        ({"frame_stack": 0}, "--frame-stack"),
        ({"hidden_sizes": ()}, "--hidden-sizes"),
        ({"total_timesteps": 10}, "--total-timesteps"),
        ({"play": True}, "--checkpoint"),
    ],
)
def test_mistakes_are_one_line(changes, words):
    with pytest.raises(InputError) as error:
        train(**changes)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert not Path("runs").exists()


def test_network_of_a_checkpoint_cannot_change():
    train(2)
    with pytest.raises(InputError, match="--agent-ids"):
        train(4, resume="auto", agent_ids=True)
    train(2, env_id="toy/Duel", self_play=True, run_name="duel")
    with pytest.raises(InputError, match="--self-play"):
        ppo.main(ppo.Args(**BASE | {"env_id": "toy/Duel", "play": True, "checkpoint": "runs/duel/last.pt"}))


def test_the_opponent_is_asked_in_its_turn_only(monkeypatch, capsys):
    """A whole game of TicTacToe against a human who takes the first free cell: no question while the policy moves."""
    monkeypatch.undo()
    asked = []

    def first_free(prompt):
        allowed = prompt.split("one of ")[1].rstrip(": ").split()
        asked.append(len(allowed))
        return allowed[0]

    monkeypatch.setattr("builtins.input", first_free)
    agent_args = {"self_play": True, "hidden_sizes": (8,), "num_envs": 1, "device": "cpu", "torch_threads": 1}
    envs = vecenvs.make("envpool/TicTacToe-v1", 1, torch.device("cpu"), 0, multi_agent=True)
    agent = ppo.Agent(ppo.Args(**agent_args), **ppo.agent_kwargs(SelfPlayVecEnv(envs)))
    game = ppo.with_opponent(envs, agent, True, ppo.Args(**agent_args, play=True, checkpoint="x", opponent="human"))
    result = ppo.evaluate(agent, game, 2, True)
    second, first = asked[: asked.index(9)], asked[asked.index(9) :]  # sides swap: it moves first in the second game
    assert result["episodes"] == 2 and {n % 2 for n in second} == {0} and {n % 2 for n in first} == {1}
    assert second == sorted(second, reverse=True) and first == sorted(first, reverse=True)
    assert capsys.readouterr().out.count(". . .") > 0


def test_an_opponent_of_another_game_is_refused():
    train(2)
    train(2, env_id="toy/Duel", self_play=True, run_name="duel")
    args = BASE | {"env_id": "toy/Duel", "self_play": True, "play": True, "checkpoint": "runs/duel/last.pt"}
    with pytest.raises(InputError, match="toy/Squad"):
        ppo.main(ppo.Args(**args, opponent="runs/run/last.pt"))


def test_log_has_every_agent(monkeypatch):
    metrics = train(4)
    assert {*(f"charts/agent_return_{g}" for g in range(3)), "charts/win_rate"} <= set(metrics)
    own = [metrics[f"charts/agent_return_{g}"] for g in range(3)]
    assert len(set(own)) == 3 and 0 <= metrics["charts/win_rate"] <= 1
    rows = [json.loads(row) for row in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["global_step"] for row in rows] == [36, 72, 108, 144]
