"""The maths of sac.py against float64 references written another way, and its replay against a world that counts."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces

import sac
from common import envs as vecenvs
from common.envs.base import Step, VecEnv
from common.errors import InputError
from sac import METRICS, Agent, Args, Critic, Replay, main, n_step_returns, project, sac_loss, squashed_logprob

CPU = torch.device("cpu")
ARGS = Args(hidden_sizes=(16, 12), device="cpu", torch_threads=1)


def make_agent(args=ARGS, obs_dim=3, low=(-1.0, -2.0), high=(1.0, 3.0), seed=0):
    torch.manual_seed(seed)
    agent = Agent(args, obs_dim, list(low), list(high))
    agent.critic.biases[-1].data.normal_()  # twins that differ
    for target in agent.target_critic.parameters():
        target.data.add_(0.1 * torch.randn_like(target))
    agent.actor_head.weight.data.mul_(3)
    return agent


def make_batch(rows=7, obs_dim=3, action_dim=2, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {"obs": torch.randn(rows, obs_dim, generator=g), "next_obs": torch.randn(rows, obs_dim, generator=g),
            "actions": 2 * torch.rand(rows, action_dim, generator=g) - 1, "returns": torch.randn(rows, generator=g),
            "discounts": 0.99 * (torch.rand(rows, generator=g) > 0.3).float(),
            "noise": torch.randn(2, rows, action_dim, generator=g)}  # fmt: skip


def losses(agent, args=ARGS, critic=True, actor=True, **batch):
    values, metrics = sac_loss(agent, args, **make_batch() | batch, critic=critic, actor=actor)
    return values, dict(zip(METRICS, metrics.tolist(), strict=True))


# ---- density: H16, H17 ----


@pytest.mark.parametrize("u, logprob", [(0, -0.918939), (2, -0.268933), (8, -18.3052), (10, -32.3052), (20, -162.305),
                                        (50, -1152.31), (-2, -0.268933), (-50, -1152.31)])  # fmt: skip
def test_squashed_density_far_out(u, logprob):
    """H16: the numbers of the case, in float32; N(0, 1) before tanh."""
    u = torch.tensor([float(u)], requires_grad=True)
    log_sigma = torch.zeros(1, requires_grad=True)
    result = squashed_logprob(u, u, log_sigma)
    assert result.item() == pytest.approx(logprob, rel=1e-4)
    assert all(g.isfinite().all() for g in torch.autograd.grad(result, (u, log_sigma)))


def test_squashed_density_equals_the_change_of_variables():
    """Another form in float64: log cosh by logaddexp, and the density integrates to 1 over the unit box."""
    rng = np.random.default_rng(0)
    mean, log_sigma, noise = (rng.normal(size=(50, 3)) for _ in range(3))
    u = mean + np.exp(log_sigma) * noise
    log_cosh = np.logaddexp(u, -u) - np.log(2)
    expected = (-0.5 * noise**2 - log_sigma - 0.5 * np.log(2 * np.pi) + 2 * log_cosh).sum(1)
    got = squashed_logprob(*(torch.tensor(x, dtype=torch.float32) for x in (u, noise, log_sigma)))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4)
    a = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1, None]
    u, sigma = a.atanh(), 0.7
    density = squashed_logprob(u, (u - 0.3) / sigma, torch.full_like(u, math.log(sigma))).exp()
    assert density.sum().item() * 1e-5 == pytest.approx(1, abs=1e-4)


def test_gradient_of_the_sampled_density_is_the_derivative():
    agent, x, noise = make_agent().double(), torch.randn(5, 3).double(), torch.randn(5, 2).double()
    weight = agent.actor_head.weight
    (grad,) = torch.autograd.grad(agent.sample(x, noise)[1].sum(), weight)
    for i, j in ((0, 1), (1, 4), (2, 0), (3, 7)):
        ends = []
        for step in (1e-5, -1e-5):
            weight.data[i, j] += step
            ends.append(agent.sample(x, noise)[1].sum().item())
            weight.data[i, j] -= step
        assert grad[i, j].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-6)


def test_entropy_is_of_the_unit_box():
    """H17: the same numbers in whatever units the env has; -.918939 for Box(-2, 2), not -1.612086."""
    x, noise = torch.randn(6, 3), torch.randn(6, 2)
    small, large = make_agent(low=(-1, -1), high=(1, 1)), make_agent(low=(-2, 0), high=(2, 500))
    assert torch.equal(small.sample(x, noise)[1], large.sample(x, noise)[1])
    small.actor_head.weight.data.zero_(), small.actor_head.bias.data.zero_()
    logprob = small.sample(x, torch.zeros(6, 2))[1]
    torch.testing.assert_close(logprob, torch.full((6,), 2 * -0.918939), rtol=1e-5, atol=1e-5)


def test_actions_reach_both_bounds_of_asymmetric_boxes():
    """H30."""
    agent = make_agent(low=(0, -math.pi / 4), high=(5, math.pi / 4))
    points = torch.tensor([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0]])
    expected = torch.tensor([[2.5, 0.0], [5.0, math.pi / 4], [0.0, -math.pi / 4]])
    torch.testing.assert_close(agent.to_env(points), expected)
    box = spaces.Box(np.float32([0, -math.pi / 4]), np.float32([5, math.pi / 4]))
    agent.actor_head.weight.data.mul_(1e4)
    for action in agent.act(1e3 * torch.randn(200, 3), deterministic=False):
        assert box.contains(action.numpy())
    assert agent.act(torch.ones(2, 3)).unique(dim=0).shape[0] == 1  # deterministic


def test_log_sigma_is_bounded_and_its_gradient_lives():
    """H10."""
    agent = make_agent()
    for bias in (-1e3, 1e3):
        agent.actor_head.bias.data[2:] = bias
        actions, logprob = agent.sample(torch.randn(4, 3), torch.randn(4, 2))
        (grad,) = torch.autograd.grad(logprob.sum(), agent.actor_head.bias)
        assert logprob.isfinite().all() and actions.abs().max() <= 1 and (grad[2:] != 0).all()


# ---- networks and losses ----


@pytest.mark.parametrize("layer_norm", [False, True])
def test_stacked_critics_are_two_networks(layer_norm):
    critic, x = Critic(5, 4, replace(ARGS, q_layer_norm=layer_norm)).double(), torch.randn(9, 5).double()
    for parameter in critic.parameters():
        parameter.data.normal_()
    for c in range(2):
        h = x
        for i in range(3):
            h = h @ critic.weights[i][c] + critic.biases[i][c]
            if i < 2 and layer_norm:
                h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
                h = h * critic.norm_scales[i][c] + critic.norm_shifts[i][c]
            h = h.clamp(min=0) if i < 2 else h
        torch.testing.assert_close(critic(x)[c], h)


def test_twins_start_different_and_targets_start_equal():
    agent = Agent(ARGS, 3, [-1.0], [1.0])
    assert not torch.equal(*agent.critic(torch.randn(4, 4)))
    for a, b in zip(agent.critic.parameters(), agent.target_critic.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr() and not b.requires_grad


def reference_critics(module, x, a):
    """Scalar networks in float64, one critic and one row after the other."""
    x = np.concatenate([x, a], 1)
    weights, biases = ([p.detach().double().numpy() for p in ps] for ps in (module.weights, module.biases))
    out = np.zeros((2, len(x), weights[-1].shape[-1]))
    for c in range(2):
        for m, row in enumerate(x):
            for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
                row = np.array([row @ w[c, :, j] + b[c, 0, j] for j in range(w.shape[2])])
                row = np.maximum(row, 0) if i < len(weights) - 1 else row
            out[c, m] = row
    return out


def reference_policy(agent, x, noise):
    layers = [(layer[0].weight, layer[0].bias) for layer in agent.actor.layers]
    for w, b in layers:
        x = np.maximum(x @ w.detach().double().numpy().T + b.detach().double().numpy(), 0)
    out = x @ agent.actor_head.weight.detach().double().numpy().T + agent.actor_head.bias.detach().double().numpy()
    mean, log_sigma = out[:, :2], out[:, 2:]
    assert (log_sigma > -4).all() and (log_sigma < 1).all()  # where the smooth bounds are the identity
    u = mean + np.exp(log_sigma) * noise
    logprob = -0.5 * noise**2 - log_sigma - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(u) ** 2)
    return np.tanh(u), logprob.sum(1)


@pytest.mark.parametrize("q_reduce", ["min", "mean"])
def test_losses_against_a_scalar_reference(q_reduce):
    args = replace(ARGS, q_reduce=q_reduce, alpha=0.3, target_entropy_scale=0.5)
    agent, batch = make_agent(args), {k: v.double().numpy() for k, v in make_batch().items()}
    reduce = np.min if q_reduce == "min" else np.mean
    next_a, next_logprob = reference_policy(agent, batch["next_obs"], batch["noise"][0])
    next_q = reduce(reference_critics(agent.target_critic, batch["next_obs"], next_a)[..., 0], axis=0)
    target = batch["returns"] + batch["discounts"] * (next_q - 0.3 * next_logprob)
    q = reference_critics(agent.critic, batch["obs"], batch["actions"])[..., 0]
    a, logprob = reference_policy(agent, batch["obs"], batch["noise"][1])
    q_of_policy = reduce(reference_critics(agent.critic, batch["obs"], a)[..., 0], axis=0)
    expected = {"qf1_loss": ((q[0] - target) ** 2).mean(), "qf2_loss": ((q[1] - target) ** 2).mean(),
                "qf1_values": q[0].mean(), "qf2_values": q[1].mean(),
                "actor_loss": (0.3 * logprob - q_of_policy).mean(), "alpha": 0.3, "entropy": -logprob.mean(),
                "alpha_loss": -math.log(0.3) * (logprob.mean() - 0.5 * 2)}  # fmt: skip
    (critic, actor, temperature), metrics = losses(agent, args)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert critic.item() == pytest.approx(expected["qf1_loss"] + expected["qf2_loss"], rel=1e-4)
    assert actor.item() == pytest.approx(expected["actor_loss"], rel=1e-4)
    assert temperature.item() == pytest.approx(expected["alpha_loss"], rel=1e-4)
    assert next_q.std() > 0.01 and np.abs(target - q).min() > 1e-3


def test_each_loss_reaches_what_it_may():
    """No gradient into targets, from the critics' loss into the actor, or from the actor's into the temperature."""
    agent = make_agent()
    (critic, actor, temperature), _ = losses(agent)
    everything = dict(agent.named_parameters())

    def reached(loss):
        grads = torch.autograd.grad(loss, [p for p in everything.values() if p.requires_grad], allow_unused=True)
        names = [name for name, p in everything.items() if p.requires_grad]
        return {n.split(".")[0] for n, g in zip(names, grads, strict=True) if g is not None and g.abs().sum() > 0}

    assert reached(critic) == {"critic"}
    assert reached(actor) == {"actor", "actor_head", "critic"}  # main differentiates it by the actor alone
    assert reached(temperature) == {"log_alpha"}
    assert all(not p.requires_grad for n, p in everything.items() if n.startswith("target"))


def test_parts_that_are_not_asked_for_are_left_out():
    agent = make_agent()
    (critic, actor, temperature), metrics = losses(agent, actor=False)
    assert critic is not None and actor is None and temperature is None and metrics["entropy"] == 0
    (critic, actor, temperature), metrics = losses(agent, critic=False)
    assert critic is None and actor is not None and temperature is not None and metrics["qf1_loss"] == 0
    assert losses(agent, replace(ARGS, autotune=False))[0][2] is None


def set_entropy(agent, logprob):
    """A policy whose log density is this in every state, for zero noise."""
    agent.actor_head.weight.data.zero_(), agent.actor_head.bias.data.zero_()
    agent.log_sigma_bounds = (-100.0, 100.0)
    agent.actor_head.bias.data[agent.actor_head.out_features // 2 :] = -logprob / 3 - 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("logprob, sign", [(0.0, 1), (5.0, -1), (3.0, 0)])
def test_temperature_moves_towards_the_target_entropy(logprob, sign):
    """H26: 3 dimensions, target -3. Entropy 0 is too much: alpha falls. Entropy -5 is too little: it rises."""
    agent = make_agent(low=(-1,) * 3, high=(1,) * 3)
    set_entropy(agent, logprob)
    batch = make_batch(action_dim=3) | {"noise": torch.zeros(2, 7, 3)}
    (_, _, temperature), metrics = losses(agent, **batch)
    assert metrics["entropy"] == pytest.approx(-logprob, abs=1e-4)
    (grad,) = torch.autograd.grad(temperature, agent.log_alpha)
    assert grad.item() == pytest.approx(3 - logprob, abs=1e-4) and (sign == 0 or grad.sign() == sign)


def test_one_temperature_everywhere():
    """H26, S-1: what is logged is what actor and critics use; never negative."""
    agent, batch = make_agent(), make_batch()
    for log_alpha in (-30.0, -1.0, 2.0):
        agent.log_alpha.data.fill_(log_alpha)
        alpha = math.exp(log_alpha)
        (_, actor, _), metrics = losses(agent)
        assert metrics["alpha"] == pytest.approx(alpha) and metrics["alpha"] > 0
        a, _ = agent.sample(batch["obs"], batch["noise"][1])
        q = agent.values(agent.critic(torch.cat([batch["obs"], a], 1))).amin(0)
        assert actor.item() == pytest.approx(-alpha * metrics["entropy"] - q.mean().item(), rel=1e-4)
        next_a, logprob = agent.sample(batch["next_obs"], batch["noise"][0])
        next_q = agent.values(agent.target_critic(torch.cat([batch["next_obs"], next_a], 1))).amin(0)
        target = sac.critic_target(agent, torch.tensor(alpha), batch["next_obs"], batch["returns"], batch["discounts"],
                                   batch["noise"][0])  # fmt: skip
        torch.testing.assert_close(target, batch["returns"] + batch["discounts"] * (next_q - alpha * logprob))


# ---- distributional critic ----


def reference_projection(probs, support, atoms):
    """Each atom takes a triangle's share of each return."""
    out, gap = np.zeros_like(probs), atoms[1] - atoms[0]
    for m in range(len(probs)):
        for j in range(len(atoms)):
            z = min(max(support[m, j], atoms[0]), atoms[-1])
            for i in range(len(atoms)):
                out[m, i] += probs[m, j] * max(0.0, 1 - abs(z - atoms[i]) / gap)
    return out


def test_projection():
    rng, atoms = np.random.default_rng(0), np.linspace(-2, 3, 11)
    probs = rng.dirichlet(np.ones(11), size=6)
    support = rng.normal(size=(6, 1)) + 0.9 * atoms[None] * rng.integers(0, 2, size=(6, 1))  # some rows terminate
    support[5] = atoms  # exactly on the atoms
    got = project(*(torch.tensor(x) for x in (probs, support, atoms))).numpy()
    np.testing.assert_allclose(got, reference_projection(probs, support, atoms), atol=1e-12)
    np.testing.assert_allclose(got.sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(got[5], probs[5], atol=1e-12)
    inside = (support > -2).all(1) & (support < 3).all(1)
    assert inside.any() and not inside.all()
    np.testing.assert_allclose((got @ atoms)[inside], (probs * support).sum(1)[inside])  # the mean is kept
    assert project(*(torch.tensor(x) for x in (probs, support * np.nan, atoms))).isnan().any()  # and no crash


@pytest.mark.parametrize("q_reduce", ["min", "mean"])
def test_distributional_target_and_loss(q_reduce):
    args = replace(ARGS, critic="c51", num_atoms=21, v_min=-3.0, v_max=3.0, q_reduce=q_reduce, alpha=0.2)
    agent, batch = make_agent(args), make_batch()
    next_a, logprob = agent.sample(batch["next_obs"], batch["noise"][0])
    probs = agent.target_critic(torch.cat([batch["next_obs"], next_a], 1)).softmax(-1).detach().double().numpy()
    atoms = np.linspace(-3, 3, 21)
    chosen = probs.mean(0)
    if q_reduce == "min":
        chosen = np.array([probs[0, m] if probs[0, m] @ atoms < probs[1, m] @ atoms else probs[1, m] for m in range(7)])
    bonus = -0.2 * logprob.detach().double().numpy()[:, None]
    support = batch["returns"].numpy()[:, None] + batch["discounts"].numpy()[:, None] * (atoms + bonus)
    target = reference_projection(chosen, support, atoms)
    outputs = agent.critic(torch.cat([batch["obs"], batch["actions"]], 1)).log_softmax(-1).detach().numpy()
    _, metrics = losses(agent, args)
    for c in range(2):
        assert metrics[f"qf{c + 1}_loss"] == pytest.approx(-(target * outputs[c]).sum(1).mean(), rel=1e-4)
        assert metrics[f"qf{c + 1}_values"] == pytest.approx((np.exp(outputs[c]) @ atoms).mean(), rel=1e-4)


# ---- n-step ----


def walk(rewards, terminations, ends, gamma):
    """One row, step by step: the return, the weight of the bootstrap, the step whose next observation it takes."""
    total = 0.0
    for k, reward in enumerate(rewards):
        total += gamma**k * reward
        if ends[k] or k == len(rewards) - 1:
            return total, 0.0 if terminations[k] else gamma ** (k + 1), k


@pytest.mark.parametrize("n", [1, 2, 5])
def test_n_step_returns(n):
    rng = np.random.default_rng(n)
    rewards, ends = rng.normal(size=(200, n)), rng.random((200, n)) < 0.3
    terminations = ends & (rng.random((200, n)) < 0.5)
    got = n_step_returns(torch.tensor(rewards).float(), torch.tensor(terminations), torch.tensor(ends), 0.9)
    expected = [walk(*row, 0.9) for row in zip(rewards, terminations, ends, strict=True)]
    for a, b in zip(got, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=1e-6)


# ---- replay ----


class Counting(VecEnv):
    """Observes env, episode and step. Env i's episodes have 3 + i steps; they end in turn by termination and cut.

    The reward is that number of the transition plus a hundredth of the action, in the env's units [0, 4].
    """

    tells_final = True

    def __init__(self, num_envs, device):
        self.env_id, self.num_envs, self.device = "toy/Counting", num_envs, device
        self.observation_space = self.critic_observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Box(0, 4, (1,), np.float32)
        self.index, self.actions = torch.arange(num_envs), []

    def observe(self):
        return torch.stack([self.index, self.episode, self.t], -1).float()

    def reset(self):
        self.episode, self.t = torch.zeros_like(self.index), torch.zeros_like(self.index)
        return (self.observe(),) * 2

    def step(self, actions):
        self.actions.append(actions.clone())
        rewards = reward_of(self.observe()) + 0.01 * actions[:, 0]
        self.t = self.t + 1
        final, done = self.observe(), self.t >= 3 + self.index
        terminations = done & (self.episode % 2 == 0)
        truncations = done & ~terminations
        self.episode, self.t = self.episode + done, torch.where(done, 0, self.t)
        obs = self.observe()
        finals = (final, final) if truncations.any() and self.tells_final else (None, None)
        return Step(obs, obs, rewards, terminations, truncations, *finals)


def reward_of(obs):
    return obs @ torch.tensor([100.0, 10.0, 1.0])


class Kept(Replay):
    """The replay of the last main(), with every draw from it."""

    last = None

    def __init__(self, *args):
        super().__init__(*args)
        Kept.last, self.draws = self, []

    def batch(self, inds, args):
        self.draws.append(inds.clone())
        return super().batch(inds, args)


@pytest.fixture
def counting(monkeypatch, tmp_path):
    made = []

    def make(env_id, num_envs, device, seed, env_kwargs=None, action_bins=0, mask_obs=()):
        made.append(Counting(num_envs, device))
        return made[-1]

    monkeypatch.setattr(vecenvs, "make", make)
    monkeypatch.setattr(sac, "Replay", Kept)
    monkeypatch.chdir(tmp_path)
    return made


SMALL = replace(ARGS, env_id="toy/Counting", num_envs=3, total_timesteps=120, learning_starts=60, batch_size=16,
                buffer_size=90, log_interval=30, run_name="run", hidden_sizes=(8,))  # fmt: skip


@pytest.mark.parametrize("buffer_size, tells_final", [(90, True), (1000, True), (1000, False)])
def test_replay_holds_what_happened(monkeypatch, counting, buffer_size, tells_final):
    """Transition by transition: nothing crosses an episode, the last observation is the true one, no filler.

    Where a simulator drops the last observation of a truncated episode, the one before stands in.
    """
    monkeypatch.setattr(Counting, "tells_final", tells_final)
    main(replace(SMALL, buffer_size=buffer_size))
    replay, steps = Kept.last, 40
    kept = min(steps, buffer_size // 3)
    assert replay.stored == steps and len(replay) == 3 * kept
    actions = torch.stack(counting[0].actions)
    seen = {}
    for row in range(kept):
        for env in range(3):
            x = {name: data[row, env] for name, data in replay.data.items()}
            index, episode, t = x["obs"].tolist()
            age = next(s for s in range(steps) if s % (buffer_size // 3) == row and s >= steps - kept)  # its env step
            length, before = 3 + env, age
            assert index == env and (episode, t) == divmod(before, length)
            ends, terminal = t == length - 1, episode % 2 == 0
            assert x["terminations"] == (ends and terminal)
            newest = age == steps - 1
            assert x["ends"] == (ends or newest)
            if not (ends and terminal):  # nothing is asked of what comes after a termination
                assert x["next_obs"].tolist() == [env, episode, t if ends and not tells_final else t + 1]
            sent = actions[age, env, 0]
            assert -1 <= x["actions"] <= 1 and sent.item() == pytest.approx(2 + 2 * x["actions"].item(), abs=1e-6)
            assert x["rewards"].item() == pytest.approx(reward_of(x["obs"]).item() + 0.01 * sent.item(), abs=1e-4)
            seen[env, age] = True
    assert len(seen) == 3 * kept
    assert not any(data.requires_grad for data in replay.data.values())  # H36
    assert {data.dtype for data in replay.data.values()} == {torch.float32, torch.bool}


@pytest.mark.parametrize("n_step", [1, 3, 4, 50])
@pytest.mark.parametrize("steps", [4, 7, 23])
def test_n_step_targets_of_every_transition(n_step, steps):
    """Every index of a ring of 7 steps, at several fillings: against a walk along the true trajectory."""
    env, replay, world = Counting(2, CPU), Replay(7, 2, 3, 1, CPU), [[], []]
    obs, _ = env.reset()
    for _ in range(steps):
        action = torch.rand(2, 1)
        step = env.step(action)
        true_next = step.obs if step.final_obs is None else step.final_obs
        done = step.terminations | step.truncations
        replay.add(done, obs=obs, actions=action, rewards=step.rewards, terminations=step.terminations,
                   next_obs=true_next)  # fmt: skip
        for i in range(2):
            world[i].append((obs[i], action[i], step.rewards[i], step.terminations[i], done[i], true_next[i]))
        obs = step.obs
    batch = replay.batch(torch.arange(len(replay)), replace(ARGS, n_step=n_step, gamma=0.9, reward_scale=0.5))
    kept, checked = min(steps, 7), 0
    for age in range(steps - kept, steps):
        for i in range(2):
            index = (age % 7) * 2 + i
            future = world[i][age : age + n_step]  # of what is known: the newest step is its end
            total, weight, last = walk([0.5 * f[2].item() for f in future], [f[3] for f in future],
                                       [f[4] for f in future], 0.9)  # fmt: skip
            assert torch.equal(batch["obs"][index], world[i][age][0])
            assert torch.equal(batch["actions"][index], world[i][age][1])
            assert batch["returns"][index].item() == pytest.approx(total, rel=1e-5)
            assert batch["discounts"][index].item() == pytest.approx(weight, rel=1e-5)
            assert torch.equal(batch["next_obs"][index], future[last][5])
            checked += 1
    assert checked == len(replay) == 2 * kept


def test_steps_after_a_reset_do_not_continue_those_before():
    replay, none = Replay(10, 1, 1, 1, CPU), torch.zeros(1, dtype=torch.bool)
    for t in range(6):
        if t == 3:
            replay.last_dones.fill_(True)
        x = torch.full((1, 1), float(t))
        replay.add(none.clone(), obs=x, actions=x, rewards=x[:, 0], terminations=none, next_obs=x + 1)
    assert replay.data["ends"][:6, 0].tolist() == [False, False, True, False, False, True]
    batch = replay.batch(torch.arange(6), replace(ARGS, n_step=5, gamma=1.0))
    assert batch["returns"].tolist() == [3, 3, 2, 12, 9, 5] and batch["next_obs"][:, 0].tolist() == [3, 3, 3, 6, 6, 6]


def test_replay_size_is_told_and_refused_where_it_does_not_fit(monkeypatch, capsys):
    """H28."""
    replay = Replay(1000, 4, 17, 6, CPU)
    size = sum(x.nbytes for x in replay.data.values())
    assert capsys.readouterr().err == f"replay: 4000 transitions, {size / 1e9:.2f} GB on cpu\n"
    monkeypatch.setattr(sac, "available_memory", lambda device: size)
    Replay(1000, 4, 17, 6, CPU)
    monkeypatch.setattr(sac, "available_memory", lambda device: size // 2)
    with pytest.raises(InputError, match=r"--buffer-size: .*4000 transitions, 0.00 GB .*at most 2000 would fit"):
        Replay(1000, 4, 17, 6, CPU)
    monkeypatch.undo()
    with pytest.raises(InputError, match=r"1000000000000 transitions, 166000.00 GB"):
        Replay(10**12, 1, 17, 6, CPU)
    assert 10**7 < sac.available_memory(CPU) < 10**14


# ---- how often it learns ----


def count_gradient_steps(monkeypatch):
    """What each loss was asked for; nothing is computed."""
    calls = []

    def spy(*args, critic, actor, **batch):
        calls.append((critic, actor))
        return [None, None, None], torch.zeros(len(METRICS))

    monkeypatch.setattr(sac, "sac_loss", spy)
    return calls


@pytest.mark.parametrize("num_envs", [1, 8, 32])
@pytest.mark.parametrize("utd_ratio", [0.25, 1.0, 4.0])
def test_update_to_data_ratio_is_exact(monkeypatch, counting, num_envs, utd_ratio):
    """H27: learning_starts in env transitions, whatever num_envs; 3/4 of it in transitions that are not a multiple."""
    calls = count_gradient_steps(monkeypatch)
    main(replace(SMALL, num_envs=num_envs, utd_ratio=utd_ratio, total_timesteps=320, learning_starts=203, batch_size=2,
                 log_interval=64))  # fmt: skip
    assert len(calls) == int(utd_ratio * (320 - 203))


def test_fractions_do_not_drift(monkeypatch, counting):
    calls = count_gradient_steps(monkeypatch)
    main(replace(SMALL, num_envs=1, utd_ratio=0.1, total_timesteps=1000, learning_starts=0, batch_size=2,
                 log_interval=100))  # fmt: skip
    assert len(calls) == 100  # 1000 times the float 0.1 would be 99.99..


def test_consecutive_batches_differ(counting):
    """H27: skrl drew one batch for all gradient steps."""
    main(replace(SMALL, utd_ratio=2.0))
    draws = [tuple(draw.tolist()) for draw in Kept.last.draws]
    assert len(draws) == 120 and len(set(draws)) == 120
    assert max(map(max, draws)) == 89 and min(map(min, draws)) == 0 and len(set(sum(draws, ()))) == 90


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_policy_frequency_keeps_the_number_of_actor_steps(monkeypatch, counting, frequency):
    """In every third gradient step three of the actor: as many as critic steps, S-5."""
    calls = count_gradient_steps(monkeypatch)
    main(replace(SMALL, policy_frequency=frequency))
    once = [(True, True)] + [(False, True)] * (frequency - 1) + [(True, False)] * (frequency - 1)
    assert calls == once * (60 // frequency)
    assert sum(critic for critic, _ in calls) == sum(actor for _, actor in calls) == 60


def test_first_actions_are_uniform_and_then_the_policys(monkeypatch, counting):
    """H30: in the units of the replay too."""
    policy = Agent.policy

    def narrow(self, x):
        mean, log_sigma = policy(self, x)
        return 0 * mean + 0.25, 0 * log_sigma - 20

    monkeypatch.setattr(Agent, "policy", narrow)
    main(replace(SMALL, total_timesteps=2400, learning_starts=1500, utd_ratio=0.01, buffer_size=3000, log_interval=300))
    stored, sent = Kept.last.data["actions"][:800], torch.stack(counting[0].actions)
    torch.testing.assert_close(sent, 2 + 2 * stored)
    warm, later = stored[:500].flatten(), stored[500:].flatten()
    assert warm.min() < -0.99 and warm.max() > 0.99 and abs(warm.mean()) < 0.05
    assert warm.std().item() == pytest.approx(1 / 3**0.5, abs=0.02)
    torch.testing.assert_close(later, torch.full_like(later, math.tanh(0.25)), atol=1e-4, rtol=0)
