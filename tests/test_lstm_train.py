"""main(Args(...)) of ppo_lstm.py: sequences and their states, every option, resume, ranks, compilation, and memory."""

import json
import math
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import driver
import pytest
import torch
from driver import zygote
from test_discrete_train import call, equal, refused  # noqa: F401  (call is a fixture)
from test_lstm_math import state_of, torch_rnn
from test_resume import same
from vec_envs import PROBES, Diary, Probe, probes  # noqa: F401  (probes is a fixture)

import ppo_discrete
import ppo_lstm as ppo
from common import checkpoint
from common import envs as vecenvs
from common.compile import compile_pure
from common.errors import InputError
from ppo_lstm import Agent, Args, CategoricalHead, GaussianHead, agent_kwargs, evaluate, load_agent, main, parts

CPU = torch.device("cpu")
BASE = Args(env_id="DiaryHeads", num_envs=10, num_steps=12, seq_length=4, num_minibatches=6, update_epochs=3,
            total_timesteps=120 * 3, hidden_sizes=(14, 11), rnn_hidden_size=9, torch_threads=1, device="cpu",
            games_to_track=7, learning_rate=3e-4, lr_schedule="constant", num_episodes=8, ent_coef=0.0,
            norm_obs=False, norm_value=False)  # fmt: skip
T, N, L, S = 12, 10, 4, 5  # and 30 sequences in 6 minibatches of 20 rows: no two of these numbers are the same
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

    def spy(agent, args, **batch):
        seen.append(look(agent, batch))
        return loss(agent, args, **batch)

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    return seen


# ---- a history, unrolled ----


def vivid(monkeypatch):
    """From now on the first weights give policies far from uniform; returns the agents that are made."""
    agents, init = [], Agent.__init__

    def spy(self, *args, **kwargs):
        init(self, *args, **kwargs)
        for head, factor in ((self.head, 60), (self.value_head, 10)):
            for name, parameter in head.named_parameters():
                if name.endswith("weight"):
                    parameter.data.mul_(factor)
        agents.append(self)

    monkeypatch.setattr(Agent, "__init__", spy)
    return agents


def spy_on_samples(monkeypatch):
    """The policies that actions were drawn from, and the actions as they were drawn."""
    seen = []
    for head in (GaussianHead, CategoricalHead):

        def spy(self, policy, noise, draw=head.sample):
            actions = draw(self, policy, noise)
            seen.append((policy.clone(), actions.clone()))
            return actions

        monkeypatch.setattr(head, "sample", spy)
    return seen


class Unrolled:
    """The network run by torch's own kernels through all that a Diary holds, from its first reset on.

    For each step: previous, state before it (also of one step more), policy and value, and the value of what the action
    led to, with the state before the end of the episode. Actions are the policy's most probable ones where none are
    given.
    """

    @torch.no_grad()
    def __init__(self, agent, steps, actions=None):
        self.agent, args, N = agent, agent.args, len(steps[0][3].rewards)
        self.trunks = [agent.actor] if agent.critic is agent.actor else [agent.actor, agent.critic]
        self.nets = [torch_rnn(trunk.rnn) for trunk in self.trunks]
        width = agent.obs_spec["vectors"]["previous"]
        previous, hidden = torch.zeros(N, width), [None] * len(self.nets)
        self.previous, self.states, self.policies, self.values, self.next_values = [], [], [], [], []
        for t, (observed, mask, _, step) in enumerate(steps):
            mask = torch.ones(N, agent.head.mask_size, dtype=torch.bool) if mask is None else mask
            self.previous.append(previous)
            self.states.append(self.state(hidden, N))
            (policy, values), after = self.step(observed, previous, mask, hidden)
            self.policies.append(policy)
            self.values.append(values)
            action = agent.head.mode(policy) if actions is None else actions[t]
            if width:
                chosen = action
                if isinstance(agent.head, CategoricalHead):
                    P = agent.head.policy_shape[1]
                    chosen = torch.cat([torch.eye(P)[column] for column in action.T], 1)
                shaped = (step.rewards.view(N, -1) + args.reward_shift) * args.reward_scale
                previous = torch.cat([chosen, shaped], 1)
            ends = step.terminations | step.truncations
            final = (step.obs, step.critic_obs) if step.final_obs is None else (step.final_obs, step.final_critic_obs)
            self.next_values.append(self.step(final, previous, mask, after)[0][1])
            hidden, previous = after, previous.clone()
            for n in ends.nonzero().flatten().tolist() if args.reset_on_done else ():
                previous[n] = 0
                hidden = [self.forget(h, n) for h in hidden]
        self.states.append(self.state(hidden, N))
        self.previous.append(previous)

    @staticmethod
    def forget(hidden, n):
        tensors = [x.clone() for x in (hidden if isinstance(hidden, tuple) else (hidden,))]
        for x in tensors:
            x[:, n] = 0
        return tuple(tensors) if len(tensors) == 2 else tensors[0]

    def state(self, hidden, N):
        sizes = [trunk.rnn.state_size for trunk in self.trunks]
        pieces = [torch.zeros(N, size) if h is None else state_of(h) for h, size in zip(hidden, sizes, strict=True)]
        return torch.cat(pieces, 1)

    def step(self, observed, previous, mask, hidden):
        """Policy and value of one step of all envs, and the hidden states after it."""
        agent, features, after = self.agent, [], []
        critic_obs = observed[0] if agent.critic_obs_spec is agent.obs_spec else observed[1]
        inputs = [
            (observed[0], agent.obs_spec, agent.obs_rms),
            (critic_obs, agent.critic_obs_spec, agent.critic_obs_rms),
        ]
        for trunk, net, h, (obs, *encoding) in zip(self.trunks, self.nets, hidden, inputs, strict=False):
            x = trunk.mlp(trunk.encoder(*agent.encode(parts(obs) | {"previous": previous}, *encoding)))
            output, h = net(x[None], h)
            features.append(output[0])
            after.append(h)
        value = agent.value_head(features[-1])
        return (agent.head(features[0], mask), agent.denormalize_value(value)), after


def played(monkeypatch, **changes):
    """Train without learning; agent, Diary, policies and actions, minibatches, and GAE's arguments and results."""
    agents, samples, gae = vivid(monkeypatch), spy_on_samples(monkeypatch), ppo.compute_gae
    batches = spy_on_loss(monkeypatch, lambda agent, batch: batch)
    estimates = []

    def spy(*args):
        estimates.append([x.clone() for x in args[:5]])
        estimates[-1] += gae(*args)
        return estimates[-1][-2:]

    monkeypatch.setattr(ppo, "compute_gae", spy)
    train(**{"learning_rate": 0.0, "norm_adv": False} | changes)
    env = PROBES[changes.get("env_id", BASE.env_id)].last
    return agents[0], env, samples, batches, estimates


def decode(obs):
    """Env, step since the reset and step of the episode, of a Diary's observations [.., 5]."""
    return (10 * obs[..., :3]).round().long().unbind(-1)


ALL = {  # env_id and options
    "heads": {}, "gaussian": {"env_id": "Diary", "rnn": "gru", "prev_action_reward": True},
    "critic": {"env_id": "DiaryCritic", "critic_rnn_hidden_size": 8, "critic_hidden_sizes": (6,),
               "prev_action_reward": True, "reward_scale": 0.5, "reward_shift": 0.3},
    "kept": {"env_id": "DiaryChoice", "reset_on_done": False, "prev_action_reward": True, "rnn_layers": 2},
    "shared": {"env_id": "DiaryHeads", "separate": False, "rnn": "gru", "rnn_layers": 2, "seq_length": 12,
               "num_minibatches": 2},
    "single steps": {"env_id": "DiaryCritic", "seq_length": 1, "num_minibatches": 8},
    "one env": {"env_id": "Diary", "num_envs": 1, "num_minibatches": 3, "prev_action_reward": True,
                "total_timesteps": 36},
}  # fmt: skip


@pytest.mark.parametrize("changes", ALL.values(), ids=ALL)
def test_update_reads_what_the_rollout_did(monkeypatch, changes):
    """H5, H21: whole sequences, each once an epoch, from the states of the rollout, over three rollouts (P-13b)."""
    agent, env, samples, batches, _ = played(monkeypatch, **changes)
    args, M = agent.args, len(batches[0]["actions"])
    L, N, actions = args.seq_length, args.num_envs, [action for _, action in samples]
    expected = Unrolled(agent, env.steps, actions)
    assert len(env.steps) == len(samples) == 3 * T and len(batches) == 3 * 3 * args.num_minibatches
    for t, (policy, _) in enumerate(samples):
        torch.testing.assert_close(policy, expected.policies[t], rtol=1e-5, atol=1e-5)
    orders = []
    for i, batch in enumerate(batches):
        index, step, of_episode = (x.view(L, -1) for x in decode(batch["obs"]["obs"]))
        assert (index == index[0]).all() and (step == step[0] + torch.arange(L)[:, None]).all()
        assert (step[0] % L == 0).all() and (step[0] // T == i // (3 * args.num_minibatches)).all()
        orders.append(list(zip(step[0].tolist(), index[0].tolist(), strict=True)))
        for s, (first, n) in enumerate(orders[-1]):
            torch.testing.assert_close(batch["state"][s], expected.states[first][n], rtol=1e-5, atol=1e-5)
        where = list(zip(step.flatten().tolist(), index.flatten().tolist(), strict=True))
        for name, values in (("old_policy", expected.policies), ("old_values", expected.values)):
            rows = torch.stack([values[t][n] for t, n in where])
            torch.testing.assert_close(batch[name], rows, rtol=1e-5, atol=1e-5)
        assert torch.equal(batch["actions"], torch.stack([actions[t][n] for t, n in where]))
        previous = torch.stack([expected.previous[t][n] for t, n in where])
        torch.testing.assert_close(batch["obs"]["previous"], previous)
        assert previous.shape[1] > 1 if args.prev_action_reward else previous.shape[1] == 0
        begins = (of_episode == 0) & (step > 0) & args.reset_on_done
        assert torch.equal(batch["episode_starts"], begins.flatten())
        if env.critic_dim:
            critic = torch.stack([env.steps[t][0][1][n] for t, n in where])
            assert torch.equal(batch["critic_obs"]["obs"], critic)
            assert torch.equal(batch["critic_obs"]["previous"], batch["obs"]["previous"])
        else:
            assert batch["critic_obs"] == {}
        if env.steps[0][1] is not None:
            masks = torch.stack([env.steps[t][1][n] for t, n in where])
            assert torch.equal(batch["action_mask"], masks)
            assert torch.equal(batch["weights"] > 0, agent.head.has_choice(masks))
        assert len(where) == M and not any(
            x.requires_grad for x in batch.values() if isinstance(x, torch.Tensor)
        )  # H36
    k = args.num_minibatches
    epochs = [sum(orders[i : i + k], []) for i in range(0, len(orders), k)]
    for i, epoch in enumerate(epochs):
        rollout = i // 3 * T
        assert sorted(epoch) == [(rollout + t, n) for t in range(0, T, L) for n in range(N)]
    if N > 1:
        assert all(a != b for a, b in zip(epochs, epochs[1:], strict=False)) and epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("changes", [*ALL.values(), {"env_id": "DiaryCritic", "norm_value": True}],
                         ids=[*ALL, "normalised"])  # fmt: skip
def test_truncations_bootstrap_from_the_state_before_the_end(monkeypatch, changes):
    """H19: r + gamma V(final observation, old state); the next episode starts from nothing."""
    monkeypatch.setattr(Diary, "tells_final", True)
    agent, env, samples, batches, estimates = played(monkeypatch, **changes)
    if changes.get("norm_value"):
        estimates = estimates[-1:]  # with the statistics that the agent has now, but for the last update of them
        return check_normalised(agent, batches, estimates[0])
    steps, contrasts, at_the_end = env.steps, [], 0
    expected = Unrolled(agent, steps, [action for _, action in samples])
    for k, (rewards, values, next_values, terminations, dones, heads, returns) in enumerate(estimates):
        for t in range(T):
            step = steps[k * T + t][3]
            torch.testing.assert_close(values[t], expected.values[k * T + t], rtol=1e-5, atol=1e-5)
            counts = ~step.terminations
            torch.testing.assert_close(
                next_values[t][counts], expected.next_values[k * T + t][counts], rtol=1e-5, atol=1e-5
            )
            assert torch.equal(terminations[t, :, 0], step.terminations)
            assert torch.equal(dones[t, :, 0], step.terminations | step.truncations)
            shaped = (step.rewards.view(len(counts), -1) + agent.args.reward_shift) * agent.args.reward_scale
            torch.testing.assert_close(rewards[t], shaped)
            at_the_end += step.truncations.any().item() and t == T - 1
            if k * T + t + 1 < len(steps) and step.truncations.any():  # V of the next episode's first observation
                other = expected.values[k * T + t + 1][step.truncations]
                contrasts.append((next_values[t][step.truncations] - other).abs().max().item())
        for t in range(T):
            if dones[t].any():  # where an episode is cut, the return is the reward and the value of what would follow
                one_step = rewards[t] + agent.args.gamma * next_values[t] * ~terminations[t]
                where = dones[t, :, 0]
                torch.testing.assert_close(returns[t][where], one_step[where], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(heads, returns - values, rtol=1e-4, atol=1e-5)
    if agent.args.num_envs > 1:
        assert max(contrasts) > 0.05 and len(contrasts) > 5 and at_the_end


def check_normalised(agent, batches, estimate):
    """H7: targets, old values and advantages of one set of statistics; the loss sees normalised values."""
    _, values, next_values, _, _, heads, returns = estimate
    last = batches[-BASE.num_minibatches :]
    index, step, _ = decode(torch.cat([b["obs"]["obs"] for b in last]))
    targets, old_values, advantages = (torch.cat([b[n] for b in last]) for n in ("targets", "old_values", "advantages"))
    where = (step % T, index)
    torch.testing.assert_close(advantages, heads[where].sum(-1))
    scale = (returns[where] - values[where]) / (targets - old_values)
    assert scale.std(0).max() < 1e-2 * scale.mean(0).min() and (scale.mean(0) - 1).abs().max() > 0.1


def test_without_final_observations_the_last_value_stays(monkeypatch):
    monkeypatch.setattr(Diary, "tells_final", False)
    agent, env, _, _, estimates = played(monkeypatch)
    assert all(step[3].final_obs is None for step in env.steps)
    cut = 0
    for k, (_, values, next_values, *_) in enumerate(estimates):
        for t in range(T):
            where = env.steps[k * T + t][3].truncations
            assert torch.equal(next_values[t][where], values[t][where])
            cut += where.sum()
    assert cut > 20


# ---- invariants ----


def log_ratio(agent, batch):
    """The largest |log ratio|, of whole tables or densities: also where nothing is allowed."""
    with torch.no_grad():
        inputs = (batch[name] for name in ("obs", "critic_obs", "action_mask", "state", "episode_starts"))
        policy = agent(*inputs)[0]
    assert len(batch["state"]) % 16 == 0
    return (policy - batch["old_policy"]).abs().max().item()


FROZEN = replace(BASE, num_envs=16, num_steps=12, seq_length=4, num_minibatches=3, learning_rate=0.0, norm_obs=True,
                 norm_value=True, hidden_sizes=(64, 32), rnn_hidden_size=32, total_timesteps=192 * 3)  # fmt: skip


@pytest.mark.parametrize("changes", [
    {}, {"env_id": "Diary", "rnn": "gru"}, {"env_id": "Diary", "prev_action_reward": True},
    {"separate": False, "rnn_layers": 2}, {"env_id": "DiaryCritic", "rnn": "gru", "rnn_layers": 2},
    {"env_id": "Pictures"}, {"env_id": "NoChoice", "seq_length": 1, "num_minibatches": 12},
    {"reset_on_done": False, "rnn_before_mlp": True, "rnn_layer_norm": True, "rnn_concat_output": True},
    {"rnn_concat_input": True, "seq_length": 12, "num_minibatches": 1}, {"compile": True},
])  # fmt: skip
def test_without_learning_the_ratio_is_one_and_the_kl_zero_in_every_epoch(monkeypatch, changes):
    seen = spy_on_loss(monkeypatch, log_ratio)
    train(base=FROZEN, **changes)
    assert len(seen) == 2 * 3 * changes.get("num_minibatches", 3) and set(seen) == {0.0}
    trained = [row for row in rows() if "losses/approx_kl" in row]
    assert len(trained) == 2 and all(row["losses/approx_kl"] == row["losses/clipfrac"] == 0 for row in trained)


def test_without_learning_odd_sizes_differ_by_rounding_alone(monkeypatch):
    seen = spy_on_loss(monkeypatch, lambda agent, batch: batch["old_policy"] - agent(
        *(batch[name] for name in ("obs", "critic_obs", "action_mask", "state", "episode_starts")))[0])  # fmt: skip
    train(learning_rate=0.0, norm_obs=True, norm_value=True)
    assert len(seen) == 36 and max(x.abs().max() for x in seen) < 1e-5


def test_weights_and_advantages_are_of_rows_with_a_choice(monkeypatch):
    names = ("weights", "action_mask", "advantages", "old_policy")
    seen = spy_on_loss(monkeypatch, lambda agent, batch: [batch[name].clone() for name in names])
    train(total_timesteps=120)
    first, masks, advantages, old_policy = (torch.cat(x) for x in zip(*seen[:6], strict=True))
    possible = torch.stack([mask.any(1) for mask in masks.split((2, 3, 4), 1)]).all(0)
    assert torch.equal(first > 0, possible) and 0 < (~possible).sum() < 12 and first.unique().numel() == 2
    assert first.mean().item() == pytest.approx(1, abs=1e-5)
    assert rows()[0]["charts/rows_without_choice"] == (~possible).sum()
    valid = advantages[possible].double()
    assert abs(valid.mean()) < 1e-5 and valid.std(correction=0).item() == pytest.approx(1, abs=1e-4)
    assert (old_policy.exp()[~possible][:, 1] == torch.tensor([1.0, 0, 0, 0])).all()


def test_every_entry_of_the_noise_is_of_its_own(monkeypatch):
    seen = spy_on_samples(monkeypatch)
    noises, draw = [], GaussianHead.noise
    monkeypatch.setattr(GaussianHead, "noise", lambda self, n: noises.append(draw(self, n)) or noises[-1])
    train(env_id="Diary")
    noise = torch.stack(noises)
    assert noise.shape == (36, 10, 2) and noise.unique().numel() == noise.numel() and len(seen) == 36
    for (policy, action), x in zip(seen, noise, strict=True):
        torch.testing.assert_close(action, policy[:, :2] + policy[:, 2:].exp() * x)


@pytest.mark.parametrize("env_id", ["Diary", "DiaryHeads"])
def test_env_gets_actions_of_its_own(monkeypatch, env_id):
    """H6: in its units and inside its bounds; the stored sample stays as it was drawn, whatever the env does to it."""
    samples, step = spy_on_samples(monkeypatch), Diary.step

    def meddle(self, actions):
        result = step(self, actions)
        actions.fill_(-7)
        return result

    monkeypatch.setattr(Diary, "step", meddle)
    seen = spy_on_loss(monkeypatch, lambda agent, batch: (batch["obs"]["obs"], batch["actions"], agent))
    train(env_id=env_id, total_timesteps=120, log_sigma_init=0.5)
    env = PROBES[env_id].last
    for obs, actions, agent in seen[:6]:
        index, step, _ = decode(obs)
        for t, n, action in zip(step.tolist(), index.tolist(), actions, strict=True):
            assert torch.equal(samples[t][1][n], action)
            given = agent.head.to_env(action[None])[0]
            assert torch.equal(env.steps[t][2][n], given) and env.action_space.contains(given.numpy())
    if env_id == "Diary":
        assert max(actions.abs().max() for _, actions, _ in seen[:6]) > 2


def test_same_seed_same_run_other_seed_other_run():
    logs = [train(name, seed=seed, prev_action_reward=True) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    first, again, other = ({k: v for k, v in log.items() if k != "charts/SPS"} for log in logs)
    assert first == again and first != other
    assert all(torch.equal(x, y) for x, y in zip(weights("a").values(), weights("b").values(), strict=True))


def test_log_holds_the_mean_over_all_gradient_steps(monkeypatch):
    """H44."""
    seen, loss = [], ppo.ppo_loss

    def spy(*args, **batch):
        result = loss(*args, **batch)
        seen.append(result[1].clone())
        return result

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    train(env_id="Diary", total_timesteps=120, clip_coef=0.02, learning_rate=1e-2)
    mean = torch.stack(seen).mean(0)
    assert len(seen) == 18 and not torch.allclose(mean, seen[-1], rtol=0.01)
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
    train(kl_interval=kl_interval, kl_threshold=0.0401, max_lr=1.0, learning_rate=1e-6, lr_schedule="adaptive",
          total_timesteps=120)  # fmt: skip
    times = 18 if kl_interval == "minibatch" else 3
    assert rows()[-1]["charts/learning_rate"] == pytest.approx(1e-6 * 1.5**times, rel=1e-4)


def test_linear_learning_rate_ends_at_its_last_step():
    """H35."""
    train(lr_schedule="linear", total_timesteps=120 * 4 + 5, critic_learning_rate=6e-4)
    assert [row["charts/learning_rate"] for row in rows()] == pytest.approx([3e-4 * (1 - i / 4) for i in range(4)])
    groups = checkpoint.load("runs/run/last.pt")["optimizer"]["param_groups"]
    assert [float(group["lr"]) for group in groups] == pytest.approx([7.5e-5, 1.5e-4])


def test_gradients_are_clipped_jointly(monkeypatch):
    norms, step = [], torch.optim.Adam.step

    def spy(self, *args):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norms.append(torch.stack([g.norm() for g in grads]).norm().item())
        return step(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", spy)
    log = train(max_grad_norm=1e-3, total_timesteps=120)
    assert len(norms) == 18 and norms == pytest.approx([1e-3] * 18, rel=1e-2) and log["losses/grad_norm"] > 2e-3


def test_statistics_move_once_an_iteration_and_are_seeded_before_the_first_gradient_step():
    """And are of rows with a choice, of the observation and of what came before alike."""
    train(env_id="DiaryCritic", norm_obs=True, norm_value=True, prev_action_reward=True)
    state, env = weights(), PROBES["DiaryCritic"].last
    valid = [torch.stack([m.any(1) for m in mask.split((2, 3, 4), 1)]).all(0) for _, mask, _, _ in env.steps]
    count = sum(x.sum().item() for x in valid)
    assert 340 < count < 360
    assert state["obs_rms.count"] == state["value_rms.count"] == state["critic_obs_rms.count"] == count
    seen = torch.cat([obs[where] for ((obs, _), *_), where in zip(env.steps, valid, strict=True)]).double()
    torch.testing.assert_close(state["obs_rms.mean"][:5], seen.mean(0))
    torch.testing.assert_close(state["obs_rms.var"][:5], seen.var(0, correction=0))
    one_hot = state["obs_rms.mean"][5:17].view(3, 4)
    assert (one_hot.sum(1) > 0.5).all() and (one_hot.sum(1) < 0.9).all()  # not at the first steps of episodes
    assert state["obs_rms.mean"].shape == (19,) and state["critic_obs_rms.mean"].shape == (18,)
    torch.testing.assert_close(state["critic_obs_rms.mean"][4:], state["obs_rms.mean"][5:])
    assert "losses/policy_loss" not in rows()[0] and "losses/policy_loss" in rows()[1]
    with pytest.raises(InputError, match="at least 240"):
        train("short", total_timesteps=239, norm_obs=True)
    assert not Path("runs/short").exists()


# ---- evaluation ----


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("changes", [c for name, c in ALL.items() if name not in ("single steps", "one env")],
                         ids=[name for name in ALL if name not in ("single steps", "one env")])  # fmt: skip
def test_evaluation_plays_the_training_network(monkeypatch, changes, deterministic):
    """Step by step: state, what came before, masks; and the same number of episodes of each env."""
    vivid(monkeypatch)
    samples, args = spy_on_samples(monkeypatch), replace(BASE, **changes)
    env = PROBES[args.env_id](6, CPU, 3)
    agent = Agent(args, **agent_kwargs(env, args))
    agent.obs_rms.update(torch.randn(50, len(agent.obs_rms.mean)))
    before, noise = {k: v.clone() for k, v in agent.state_dict().items()}, torch.get_rng_state()
    result = evaluate(agent, env, 12, deterministic)
    assert all(torch.equal(v, before[k]) for k, v in agent.state_dict().items())
    assert torch.equal(torch.get_rng_state(), noise)
    expected = Unrolled(agent, env.steps, None if deterministic else [action for _, action in samples])
    for t, (_, _, given, _) in enumerate(env.steps):
        if deterministic:
            mode = agent.head.to_env(agent.head.mode(expected.policies[t]))
            torch.testing.assert_close(given, mode, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(samples[t][0], expected.policies[t], rtol=1e-4, atol=1e-4)
    assert torch.stack([given for _, _, given, _ in env.steps]).unique().numel() > 1
    returns = []
    for n in range(6):
        rewards = torch.stack([step.rewards.view(6, -1).sum(1)[n] for *_, step in env.steps])
        returns += [x.sum().item() for x in rewards[: 2 * (3 + n % 4)].split(3 + n % 4)]
    assert result["mean"] == pytest.approx(sum(returns) / 12, abs=1e-4) and result["episodes"] == 12
    assert result["min"] == pytest.approx(min(returns), abs=1e-4) and result["steps"] == 2 * (3 + 4 + 5 + 6 + 3 + 4)


@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_does_not_change_training(monkeypatch, deterministic):
    closed = []
    monkeypatch.setattr(Probe, "close", lambda self: closed.append(self))
    train("plain", total_timesteps=240)
    log = train("evaluated", total_timesteps=240, eval_interval=1, deterministic=deterministic)
    assert len(closed) == 3 and log["eval/episodes"] == 8
    assert equal(weights("plain"), weights("evaluated"))


@pytest.mark.parametrize("env_id", ["Diary", "DiaryCritic", "PictureAndVector"])
def test_loaded_agent_acts_and_remembers_as_the_trained_one(monkeypatch, env_id):
    agents = vivid(monkeypatch)
    train(env_id=env_id, prev_action_reward=True, norm_obs=True)
    loaded, state = load_agent("runs/run/last.pt")
    assert len(agents) == 2 and loaded is agents[1] and state["script"] == "ppo_lstm"
    env = PROBES[env_id](33, CPU, 4)
    obs = parts(env.reset()[0]) | {"previous": torch.randn(33, loaded.start(1)[1].shape[1])}
    memory = torch.randn(33, loaded.start(1)[0].shape[1])
    ours, theirs = (agent.act(obs, memory, True, env.action_mask) for agent in agents)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


# ---- every option ----

SHORT = replace(BASE, total_timesteps=240, update_epochs=1)
HINTS = get_type_hints(Args)
CHOICES = [(name, value) for name, hint in HINTS.items() if get_origin(hint) is Literal for value in get_args(hint)]
SWITCHES = [(name, not getattr(SHORT, name)) for name in HINTS if HINTS[name] is bool and name not in ("play", "track")]
OTHERS = [("weight_decay", 0.1), ("ent_coef", 0.1), ("reward_scale", 0.1), ("gamma", 0.5), ("bounds_loss_coef", 1.0),
          ("reward_shift", 1.0), ("reward_max", -0.5), ("reward_min", 0.5), ("gae_lambda", 0.2), ("vf_coef", 5.0),
          ("max_grad_norm", 0.01), ("clip_coef", 1e-3), ("critic_learning_rate", 9e-4), ("critic_hidden_sizes", (8,)),
          ("min_lr", 9e-4), ("kl_threshold", 1e-9), ("learning_rate", 9e-4), ("max_lr", 3.1e-4), ("hidden_sizes", (8,)),
          ("update_epochs", 2), ("impala_depths", (5,)), ("log_sigma_init", 0.5), ("seq_length", 6), ("rnn_layers", 2),
          ("rnn_hidden_size", 5), ("critic_rnn_hidden_size", 5)]  # fmt: skip
PIXELS = {"env_id": "Pictures", "num_envs": 4, "num_steps": 6, "seq_length": 3, "num_minibatches": 2,
          "total_timesteps": 48}  # fmt: skip
ADAPTIVE = {"lr_schedule": "adaptive", "kl_threshold": 10.0}
CONTEXT = {"min_lr": ADAPTIVE | {"learning_rate": 9.5e-4, "kl_threshold": 1e-9}, "reward_log": {"reward_min": 0.1},
           "max_lr": ADAPTIVE, "kl_interval": ADAPTIVE, "kl_threshold": ADAPTIVE,
           "clip_vloss": {"clip_coef": 1e-3}, "smooth_clamp": {"clip_coef": 1e-3}, "seq_length": {"num_minibatches": 5},
           "bounds_loss_coef": {"env_id": "Diary", "learning_rate": 0.1, "rnn_concat_output": True},
           "log_sigma_init": {"env_id": "Diary"},
           "encoder": PIXELS, "impala_depths": PIXELS | {"encoder": "impala"}}  # fmt: skip
WITHOUT_EFFECT = {"deterministic"}  # of evaluations only
ELSEWHERE = set(
    """
    env_id env_kwargs mask_obs seed device torch_threads run_name resume track play checkpoint num_episodes
    total_timesteps score_to_win games_to_track save_best_after save_interval eval_interval num_envs num_steps
    num_minibatches compile
""".split()
)  # options of the run, with tests of their own
UNCHANGED = {}  # weights by what is set beside the option


def test_no_option_is_forgotten():
    named = {name for name, _ in [*CHOICES, *SWITCHES, *OTHERS]}
    assert named | ELSEWHERE == HINTS.keys() and not named & ELSEWHERE


@pytest.mark.parametrize("name, value", [*CHOICES, *SWITCHES, *OTHERS], ids=str)
def test_every_option_trains_and_changes_something(name, value):
    context = {} if value == "conv1d" else CONTEXT.get(name, {})
    base = replace(SHORT, **context)
    log = train("changed", base, **{name: value})
    assert all(math.isfinite(log[f"losses/{key}"]) for key in ppo.METRICS) and log["losses/nonfinite"] == 0
    if value == getattr(base, name) or name in WITHOUT_EFFECT:
        return
    key = str(context)
    if key not in UNCHANGED:
        train("default", base)
        UNCHANGED[key] = weights("default")
    assert equal(UNCHANGED[key], weights("changed")) == (value == "nature_cnn")  # which is what auto takes here


@pytest.mark.parametrize("num_envs, num_steps, seq_length, num_minibatches", [
    (1, 7, 7, 1), (1, 1, 1, 1), (3, 5, 5, 3), (8, 2, 1, 16), (1, 6, 1, 2), (2, 6, 3, 4),
])  # fmt: skip
def test_odd_sizes(num_envs, num_steps, seq_length, num_minibatches):
    sizes = {"num_envs": num_envs, "num_steps": num_steps, "seq_length": seq_length, "num_minibatches": num_minibatches}
    for env_id in ("DiaryHeads", "Diary", "SmallPictures", "NoChoice"):
        log = train(env_id, env_id=env_id, total_timesteps=num_envs * num_steps * 3, norm_obs=True, **sizes)
        assert log["losses/nonfinite"] == 0 and math.isfinite(log["losses/policy_loss"])


# ---- environments that go wrong ----


@pytest.mark.parametrize("env_id, part", [("PictureAndVector", "vector"), ("Privileged", "state"), ("Diary", "obs")])
def test_nan_in_a_part_of_an_observation_ends_the_run(monkeypatch, env_id, part):
    """Named, and nothing of it is saved; a part that only the critic sees too."""
    train("good", env_id=env_id)
    observe, calls = PROBES[env_id].observe, []

    def broken(self):
        obs, critic_obs = observe(self)
        calls.append(1)
        if len(calls) > 60:
            parts(critic_obs)[part][3, 1] = math.nan
        return obs, critic_obs

    monkeypatch.setattr(PROBES[env_id], "observe", broken)
    before = Path("runs/good/last.pt").read_bytes()
    with pytest.raises(InputError, match=r"observation of env 3 is NaN .*runs/good"):
        train("good", env_id=env_id, resume="runs/good/last.pt", total_timesteps=120 * 8)
    assert Path("runs/good/last.pt").read_bytes() == before


@pytest.mark.parametrize("prev_action_reward", [True, False])
def test_nan_in_a_reward_is_named_as_one(monkeypatch, prev_action_reward):
    """Not as the next observation, which it is part of."""
    reward = Diary.reward

    def broken(self, actions):
        rewards = reward(self, actions)
        rewards[2] *= math.nan if len(self.steps) == 17 else 1
        return rewards

    monkeypatch.setattr(Diary, "reward", broken)
    with pytest.raises(InputError, match=r"^reward of env 2 is NaN or infinite at step 17 \(step 5 of iteration 2\)"):
        train(env_id="Diary", prev_action_reward=prev_action_reward)


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


def test_learner_sees_clipped_rewards_and_lives_and_the_statistics_whole_games():
    log = train(env_id="Clipped", eval_interval=3)
    assert log["charts/episodic_return"] == log["eval/mean"] == 18
    assert log["charts/episodic_length"] == log["eval/length"] == 6 and log["eval/steps"] == 48


def test_frames_are_stored_once_as_bytes(monkeypatch):
    def look(agent, batch):
        assert batch["critic_obs"] == {} and batch["obs"]["obs"].dtype == torch.uint8
        return batch["obs"]["obs"].shape

    seen = spy_on_loss(monkeypatch, look)
    train(base=replace(SHORT, **PIXELS))
    assert set(seen) == {(12, 2, 36, 37)}


# ---- learning ----

LEARN = replace(BASE, num_envs=32, num_steps=12, seq_length=6, num_minibatches=4, update_epochs=4, learning_rate=1e-2,
                hidden_sizes=(16,), rnn_hidden_size=16, total_timesteps=384 * 16, gamma=0.0)  # fmt: skip


def mean(agent, env_id, module=ppo):
    return module.evaluate(agent, PROBES[env_id](20, CPU, 6), 200, True)["mean"]


@pytest.mark.parametrize("env_id, rnn, good, chance", [
    ("Yesterday", "lstm", 4.0, 3.0), ("Yesterday", "gru", 4.0, 3.0), ("YesterdayBox", "lstm", -0.1, -1.0),
    ("YesterdayBox", "gru", -0.1, -1.0),
])  # fmt: skip
def test_what_was_seen_a_step_ago_is_used(monkeypatch, env_id, rnn, good, chance):
    """The same network without its memory is no better than chance."""
    train(base=LEARN, env_id=env_id, rnn=rnn, separate=rnn == "lstm")
    agent, _ = load_agent("runs/run/last.pt")
    assert mean(agent, env_id) > good
    act = Agent.act
    monkeypatch.setattr(Agent, "act", lambda self, obs, state, *rest: act(self, obs, torch.zeros_like(state), *rest))
    assert mean(agent, env_id) < chance


def test_a_policy_without_memory_learns_nothing_there():
    args = ppo_discrete.Args(
        **{
            name: getattr(LEARN, name)
            for name in (
                "num_envs",
                "num_steps",
                "num_minibatches",
                "update_epochs",
                "learning_rate",
                "hidden_sizes",
                "gamma",
                "total_timesteps",
                "device",
                "torch_threads",
                "ent_coef",
                "lr_schedule",
            )
        },
        env_id="Yesterday",
        run_name="run",
    )
    ppo_discrete.main(args)  # fmt: skip
    assert mean(ppo_discrete.load_agent("runs/run/last.pt")[0], "Yesterday", ppo_discrete) < 3.0


def test_truncation_bootstraps():
    """H2: reward 1 in each of 5 steps, gamma .9, cut: worth 10 for ever, with whatever is remembered."""
    train(base=LEARN, env_id="ConstantChoice", gamma=0.9, norm_value=True, total_timesteps=384 * 20)
    agent, _ = load_agent("runs/run/last.pt")
    state, previous = agent.start(1)
    for _ in range(5):
        obs = {"obs": torch.ones(1, 1), "previous": previous}
        assert agent.value(obs, state).item() == pytest.approx(10, abs=0.7)
        with torch.no_grad():
            state = torch.cat(agent(obs, {}, torch.ones(1, 3, dtype=torch.bool), state, agent.no_starts(state))[2], 1)


def test_reward_heads_learn_their_own_values():
    log = train(base=LEARN, env_id="TwoHeadsChoice", gamma=0.5, norm_value=True, norm_obs=True,
                total_timesteps=384 * 12)  # fmt: skip
    agent, _ = load_agent("runs/run/last.pt")
    obs = {"obs": torch.ones(1, 1), "previous": agent.start(1)[1]}
    assert agent.value(obs, agent.start(1)[0])[0].tolist() == pytest.approx([2, -6], rel=0.15)
    assert log["charts/episodic_return"] == -10


# ---- resume and ranks ----

RECURRENT = {"env_id": "toy/Masked", "num_envs": 5, "num_steps": 8, "seq_length": 4, "num_minibatches": 5,
             "hidden_sizes": [11, 7], "rnn_hidden_size": 6, "norm_obs": True, "norm_value": True}  # fmt: skip
RESUMES = {
    "masked": {"env_kwargs": ["stuck=1"], "lr_schedule": "linear", "prev_action_reward": True},
    "asymmetric": {"env_id": "toy/Linear", "env_kwargs": ["asymmetric=True"], "lr_schedule": "adaptive", "rnn": "gru",
                   "max_lr": 1.0, "critic_learning_rate": 1e-3, "critic_rnn_hidden_size": 4, "rnn_layers": 2},
    "kept": {"env_id": "toy/Linear", "reset_on_done": False, "separate": False, "prev_action_reward": True},
}  # fmt: skip
ROWS = 40


def test_resume_is_exact(tmp_path):
    """H4: four iterations are two and two in a new process, to the last bit, in the middle of episodes."""
    four = RECURRENT | {"total_timesteps": 4 * ROWS, "save_interval": 1, "learning_rate": 3e-4}
    runs = [four | args | {"run_name": name} for name, args in RESUMES.items()]
    whole_log = zygote().run(tmp_path, "driver:trains", runs=runs, script="ppo_lstm")
    for name in RESUMES:
        (tmp_path / "again/runs" / name).mkdir(parents=True)
        shutil.copy(tmp_path / f"runs/{name}/{2 * ROWS}.pt", tmp_path / "again/runs" / name)
    runs = [run | {"resume": f"runs/{run['run_name']}/{2 * ROWS}.pt"} for run in runs]
    halves_log = zygote().run(tmp_path / "again", "driver:trains", runs=runs, script="ppo_lstm")
    for name, a, b in zip(RESUMES, whole_log, halves_log, strict=True):
        whole, halves = (checkpoint.load(folder / f"runs/{name}/last.pt") for folder in (tmp_path, tmp_path / "again"))
        half = checkpoint.load(tmp_path / f"runs/{name}/{2 * ROWS}.pt")
        moved = [k for k, v in whole["agent"].items() if not torch.equal(v, half["agent"][k])]
        assert len(moved) >= 10 and half["global_step"] == 2 * ROWS and whole["global_step"] == 4 * ROWS
        assert half["ranks"][0]["envs"]["t"].any() and half["memory"][0][0].any(1).sum() > 1  # within episodes
        assert half["memory"][0][1].any() == (name != "asymmetric")
        for state in (whole, halves):
            assert state.pop("seconds") > 0
        same(whole, halves)
        same(*({k: v for k, v in log["metrics"].items() if k != "charts/SPS"} for log in (a, b)))
    new = zygote().run(tmp_path, "driver:load_and_act", checkpoint="runs/masked/last.pt", script="ppo_lstm")
    assert torch.equal(new["actions"], whole_log[0]["actions"]) and new["actions"].shape == (32, 3)


@pytest.mark.parametrize("exact, num_envs", [(True, 5), (False, 5), (True, 10)])
def test_where_the_env_cannot_go_on_nothing_is_remembered(monkeypatch, exact, num_envs):
    """Else the state would be of episodes that nobody goes on with."""
    monkeypatch.setattr(vecenvs, "make", driver.make)
    seen = spy_on_loss(monkeypatch, lambda agent, batch: (batch["state"].clone(), batch["obs"]["previous"].clone()))
    args = RECURRENT | {"env_kwargs": [f"exact={exact}"], "seq_length": 8, "num_minibatches": 1, "update_epochs": 1,
                        "torch_threads": 1, "device": "cpu", "run_name": "run", "prev_action_reward": True}  # fmt: skip
    main(Args(**driver.tuples(args | {"total_timesteps": 2 * ROWS})))
    assert seen[-1][0].any()  # of the second rollout
    resume = {"resume": "runs/run/last.pt", "num_envs": num_envs, "total_timesteps": 2 * ROWS + 8 * num_envs}
    main(Args(**driver.tuples(args | resume)))
    goes_on = exact and num_envs == 5
    assert len(seen) == 2 and seen[1][0].any() == goes_on and seen[1][1][:num_envs].any() == goes_on
    assert seen[1][1][num_envs:].any()


def worker_shared_noise(args):
    """driver.train, where each rank has its rows of one stream of noise."""
    generator, rank = torch.Generator().manual_seed(5), int(os.environ.get("RANK", 0))

    def normal(self, n):
        return torch.randn(10, self.action_size, generator=generator)[rank * n : (rank + 1) * n]

    def uniform(self, n):
        return torch.rand(10, *self.policy_shape, generator=generator)[rank * n : (rank + 1) * n]

    GaussianHead.noise, CategoricalHead.noise = normal, uniform
    return driver.train(args, script="ppo_lstm")


@pytest.mark.parametrize("changes", [
    {"env_kwargs": ["asymmetric=True", "stuck=6"]}, {"env_id": "toy/Linear", "rnn": "gru", "separate": False},
])  # fmt: skip
def test_two_ranks_equal_one_with_twice_the_envs(tmp_path, changes):
    """With stuck, one rank alone has rows without a choice: the loss is over the valid rows of both."""
    shared = RECURRENT | {"num_minibatches": 1, "total_timesteps": 4 * 2 * ROWS, "learning_rate": 1e-3, "max_lr": 0.01,
                          "lr_schedule": "adaptive", "kl_threshold": 1e-4, "max_grad_norm": 0.5, "ent_coef": 0.01,
                          "games_to_track": 99, "prev_action_reward": True} | changes  # fmt: skip
    worker = "test_lstm_train:worker_shared_noise"
    two = zygote().run_ranks(tmp_path, worker, args=shared | {"run_name": "two"})
    one = zygote().run(tmp_path, worker, args=shared | {"run_name": "one", "num_envs": 10})
    assert equal(two[0]["initial"], one["initial"]) and equal(two[0]["agent"], two[1]["agent"])
    for name, value in one["agent"].items():
        torch.testing.assert_close(two[0]["agent"][name], value, atol=1e-5, rtol=1e-5)
    steps = [(value - one["initial"][name]).abs().max() for name, value in one["agent"].items() if "rnn" in name]
    assert min(steps) > 1e-3
    for name, value in one["metrics"].items():
        if name not in ("charts/SPS", "losses/explained_variance"):
            assert two[0]["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    memories = [checkpoint.load(tmp_path / f"runs/{name}/last.pt")["memory"] for name in ("one", "two")]
    for i in (0, 1):  # the state, and what came before
        torch.testing.assert_close(
            torch.cat([rank[i] for rank in memories[1]]), memories[0][0][i], atol=1e-4, rtol=1e-4
        )
    more = {"run_name": "two", "resume": "runs/two/last.pt", "total_timesteps": 5 * 2 * ROWS}
    zygote().run(tmp_path, "driver:train", args=shared | more, script="ppo_lstm")  # one rank takes over from two
    assert checkpoint.load(tmp_path / "runs/two/last.pt")["global_step"] == 5 * 2 * ROWS


def test_resume_under_two_ranks_is_exact(tmp_path):
    """Each rank goes on with what it remembers itself."""
    args = RECURRENT | {"total_timesteps": 4 * 2 * ROWS, "save_interval": 1, "prev_action_reward": True}
    whole = zygote().run_ranks(tmp_path, "driver:train", args=args | {"run_name": "whole"}, script="ppo_lstm")
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/halves")
    (tmp_path / "runs/halves/last.pt").unlink()
    more = {"run_name": "halves", "resume": f"runs/halves/{3 * 2 * ROWS}.pt"}
    halves = zygote().run_ranks(tmp_path, "driver:train", args=args | more, script="ppo_lstm")
    assert all(equal(a["agent"], b["agent"]) for a, b in zip(whole, halves, strict=True))
    first, second = (checkpoint.load(tmp_path / f"runs/{name}/last.pt")["memory"] for name in ("whole", "halves"))
    same(first, second)
    assert len(first) == 2 and not torch.equal(first[0][0], first[1][0])


# ---- compilation ----


@pytest.mark.parametrize("backend, changes", [
    ("inductor", {"env_id": "Diary", "separate": False}),
    ("aot_eager", {"env_id": "DiaryCritic", "rnn": "gru", "prev_action_reward": True}),
])  # fmt: skip
def test_compiled_training_is_the_same(monkeypatch, backend, changes):
    """H24: in the rollout and the update, over several updates of the weights, and with weights from elsewhere.

    As on a GPU, where the update is compiled too, as a loop. With aot_eager nothing has to be built.
    """
    agents, compiled = vivid(monkeypatch), []
    base = replace(BASE, num_steps=4, seq_length=2, num_minibatches=2, update_epochs=1, total_timesteps=40 * 3,
                   hidden_sizes=(5,), learning_rate=1e-2, rnn_hidden_size=6)  # fmt: skip
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    logs = [train("eager", base, compile=False, **changes)]
    monkeypatch.setattr(ppo.RNN, "fused", lambda rnn, x, state, starts: rnn.loop(x, state, starts)[0])
    monkeypatch.setattr(ppo, "compile_pure", lambda fn, on: compiled.append(compile_pure(fn, True)) or compiled[-1])
    logs.append(train("compiled", base, compile=True, **changes))
    kls = [log["losses/approx_kl"] for log in logs]
    assert kls[0] == pytest.approx(kls[1], rel=1e-2) and kls[0] > 1e-6  # the second rollout was of other weights
    eager, fast = weights("eager"), weights("compiled")
    for name, x in eager.items():
        torch.testing.assert_close(fast[name], x, rtol=1e-3, atol=1e-4)
    agent, policy_step = agents[1], compiled[0]
    assert len(compiled) == 2
    critic_obs = {}
    if changes["env_id"] == "DiaryCritic":
        critic_obs = {"obs": torch.randn(10, 4), "previous": torch.randn(10, 14)}
    mask, (state, previous) = torch.ones(10, agent.head.mask_size, dtype=torch.bool), agent.start(10)
    for _ in range(2):
        moved = {k: x + 0.1 * torch.randn_like(x) for k, x in agent.state_dict().items() if x.dtype == torch.float32}
        agent.load_state_dict(moved, strict=False)
        obs = {"obs": torch.randn(10, 5), "previous": previous}
        inputs = obs, critic_obs, mask, torch.randn_like(state), agent.head.noise(10)
        for ours, theirs in zip(policy_step(*inputs), agent.policy_step(*inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# ---- the command line ----

ENV = "gym/toy_envs:DiscreteObs-v0"
FLAGS = ["--num-envs", "2", "--num-steps", "8", "--seq-length", "4", "--num-minibatches", "2", "--hidden-sizes", "8",
         "--rnn-hidden-size", "6", "--device", "cpu", "--torch-threads", "1", "--update-epochs", "1",
         "--total-timesteps", "32", "--lr-schedule", "constant", "--learning-rate", "3e-4"]  # fmt: skip


@pytest.mark.parametrize("argv, words", [
    (["--seq-length", "3"], ["--seq-length 3", "num_steps = 8", "2 and 4"]),
    (["--seq-length", "9"], ["--seq-length 9", "num_steps = 8"]),
    (["--num-minibatches", "3"], ["--num-minibatches 3", "num_envs*num_steps/seq_length = 4", "2 and 4"]),
    (["--num-minibatches", "8"], ["--num-minibatches 8", "= 4"]),
    (["--rnn-concat-input", "--rnn-before-mlp"], ["--rnn-concat-input", "--rnn-before-mlp"]),
    (["--rnn", "transformer"], ["transformer", "--rnn", "gru"]), (["--rnn-layers", "0"], ["--rnn-layers 0"]),
    (["--encoder", "nature_cnn"], ["--encoder nature_cnn", "no images"]),
    (["--encoder", "conv1d", "--prev-action-reward"], ["--prev-action-reward", "conv1d"]),
    (["--env-id", "gym/DiscreteSmall-v0", "--encoder", "nature_cnn"], ["--encoder nature_cnn", "7 pixels", "36"]),
    (["--env-id", "gym/DiscreteBadMask-v0"], ["DiscreteBadMask", "action mask of shape (4,)", "3"]),
    (["--mask-obs", "7"], ["--mask-obs 7"]), (["--total-timesteps", "31", "--no-norm-obs"], ["--total-timesteps 31"]),
    (["--fixed-sigma"], ["--fixed-sigma"]), (["--env-id", "gym/NoSuch-v0"], ["NoSuch"]),
])  # fmt: skip
def test_mistakes_are_one_line(call, argv, words):  # noqa: F811
    refused(call, [*FLAGS, "--env-id", ENV, *argv], words, ppo)


def test_network_of_a_checkpoint_cannot_change(call):  # noqa: F811
    box = ["--env-id", "gym/toy_envs:Counter-v0", "--run-name", "base"]
    assert call(*FLAGS, *box, script=ppo)[0] == 0
    resume = ["--resume", "runs/base/last.pt", "--total-timesteps", "64"]
    play = ["--play", "--checkpoint", "runs/base/last.pt"]
    for flags in (["--rnn", "gru"], ["--rnn-hidden-size", "5"], ["--rnn-layers", "2"], ["--rnn-layer-norm"],
                  ["--critic-rnn-hidden-size", "5"], ["--rnn-before-mlp"], ["--rnn-concat-input"],
                  ["--rnn-concat-output"], ["--prev-action-reward"], ["--no-reset-on-done"],
                  ["--no-separate"], ["--no-norm-obs"], ["--mask-obs", "0"]):  # fmt: skip
        name = flags[0].replace("--no-", "--")
        for argv in (resume, play):
            refused(call, [*argv, *flags], [name, "cannot change"], ppo)
    for path in ([*resume, "--env-id", ENV], ["--resume", "runs/base/none.pt"]):
        refused(call, path, ["checkpoint runs/base/"], ppo)
    refused(call, resume, ["by ppo_lstm.py, not by ppo_discrete.py"], ppo_discrete)
    assert call(*resume, "--seq-length", "2", "--num-minibatches", "4", "--ent-coef", "0.1", script=ppo)[0] == 0
    assert checkpoint.load("runs/base/last.pt")["global_step"] == 64


@pytest.mark.parametrize("env, flags", [
    (ENV, ["--env-kwargs", "start=3", "--prev-action-reward"]), ("gym/toy_envs:Masked-v0", ["--rnn", "gru"]),
    ("gym/toy_envs:EchoAction-v0", []), ("gym/DiscreteSmall-v0", ["--encoder", "impala", "--impala-depths", "4"]),
    ("gym/toy_envs:TwoRewards-v0", ["--prev-action-reward"]), ("gym/toy_envs:PrivilegedCameras-v0", []),
])  # fmt: skip
def test_trains_and_plays_through_an_adapter(call, env, flags):  # noqa: F811
    status, out, lines = call(*FLAGS, "--env-id", env, "--run-name", "run", *flags, "--eval-interval", "2",
                              "--num-episodes", "4", script=ppo)  # fmt: skip
    assert status == 0 and lines == []
    log = json.loads(Path("runs/run/metrics.jsonl").read_text().splitlines()[-1])
    assert log["eval/episodes"] == 4 and math.isfinite(log["losses/policy_loss"])
    status, out, lines = call("--play", "--checkpoint", "runs/run/last.pt", "--num-episodes", "6", script=ppo)
    assert status == 0 and lines == [] and json.loads(out)["episodes"] == 6
    if env == ENV:  # the reward is the action as the env sees it
        assert 3 * 6 <= json.loads(out)["mean"] <= 5 * 6
