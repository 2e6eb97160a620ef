"""The formulas of ppo_continuous.py against references written in another way, mostly scalar loops in float64."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Independent, Normal, kl_divergence

from common.errors import InputError
from ppo_continuous import (
    ACTIVATIONS,
    METRICS,
    MLP,
    OBS_CLIP,
    Agent,
    Args,
    adapt_learning_rates,
    clamp_ratio,
    compute_gae,
    explained_variance,
    gaussian_kl,
    gaussian_logprob,
    initialize,
    make_optimizer,
    ppo_loss,
    shape_rewards,
    smooth_bounds,
)  # fmt: skip

SMALL = Args(num_envs=8, num_steps=8, num_minibatches=2, hidden_sizes=(16, 8))
UNIT = {"action_low": [-1.0, -1.0], "action_high": [1.0, 1.0]}


def make_agent(args=SMALL, obs_dim=3, critic_obs_dim=3, asymmetric=False, value_size=1, **bounds):
    torch.manual_seed(0)
    return Agent(args, obs_dim, critic_obs_dim, asymmetric, value_size, **(bounds or UNIT))


def brute_force_gae(rewards, values, next_values, terminated, done, gamma, lam):
    """The sum over later TD errors, term by term, for one env."""
    T = len(rewards)
    advantages = []
    for t in range(T):
        total, weight = 0.0, 1.0
        for k in range(t, T):
            total += weight * (rewards[k] + (0.0 if terminated[k] else gamma * next_values[k]) - values[k])
            if done[k]:
                break
            weight *= gamma * lam
        advantages.append(total)
    return advantages


def test_gae_equals_brute_force_on_mixed_ends():
    generator = np.random.default_rng(0)
    T, N = 40, 7
    rewards, values, next_values = generator.normal(size=(3, T, N))
    terminated, truncated = generator.random((2, T, N)) < 0.15
    done = terminated | truncated
    to = torch.from_numpy
    advantages, returns = compute_gae(to(rewards), to(values), to(next_values), to(terminated), to(done), 0.97, 0.9)
    for n in range(N):
        columns = (x[:, n].tolist() for x in (rewards, values, next_values, terminated, done))
        np.testing.assert_allclose(advantages[:, n], brute_force_gae(*columns, 0.97, 0.9), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(returns, advantages + to(values))


@pytest.mark.parametrize("terminated, expected", [
    (False, [3.65814, 1.88000, 3.755165, 1.93000]), (True, [-7.515, -10.0, 3.755165, 1.93]),
])  # fmt: skip
def test_gae_numbers_of_case_h1(terminated, expected):
    rewards, values = torch.ones(4, 2), torch.tensor([10.0, 11, 5, 6])[:, None].expand(4, 2)
    next_values = torch.tensor([11.0, 12, 6, 7])[:, None].expand(4, 2)
    done, terminal = torch.zeros(4, 2, dtype=torch.bool), torch.zeros(4, 2, dtype=torch.bool)
    done[1, 0], terminal[1, 0] = True, terminated
    advantages, _ = compute_gae(rewards, values, next_values, terminal, done, 0.99, 0.95)
    torch.testing.assert_close(advantages[:, 0], torch.tensor(expected), rtol=1e-5, atol=1e-5)
    neighbour, _ = compute_gae(rewards, values, next_values, torch.zeros(4, 2), torch.zeros(4, 2), 0.99, 0.95)
    torch.testing.assert_close(advantages[:, 1], neighbour[:, 1])  # an env next to it does not change
    assert neighbour[:2, 0].tolist() == pytest.approx([6.980, 5.412], abs=1e-3)  # what a missing boundary would give


def test_logprob_entropy_and_kl_equal_torch_distributions():
    mean0, mean1, log_sigma0, log_sigma1, x = torch.randn(5, 9, 4, dtype=torch.float64)
    p, q = (Independent(Normal(m, s.exp()), 1) for m, s in ((mean0, log_sigma0), (mean1, log_sigma1)))
    torch.testing.assert_close(gaussian_logprob(mean0, log_sigma0, x), p.log_prob(x))
    torch.testing.assert_close(gaussian_kl(mean0, log_sigma0, mean1, log_sigma1), kl_divergence(p, q))


@pytest.mark.parametrize("sigma", [0.02, 0.1, 1.0, 5.0])
def test_kl_of_equal_policies_is_exactly_zero(sigma):
    mean, log_sigma = torch.randn(100, 8), torch.full((100, 8), math.log(sigma))
    assert (gaussian_kl(mean, log_sigma, mean, log_sigma) == 0).all()


def test_stored_sample_keeps_its_logprob_and_the_env_gets_a_clamped_one():
    """H6."""
    agent = make_agent()
    sample = torch.tensor([[3.0, -3.0]])
    before = sample.clone()
    assert agent.to_env(sample).tolist() == [[1.0, -1.0]] and torch.equal(sample, before)
    mean, log_sigma = torch.full((1, 2), 3.0), torch.full((1, 2), math.log(0.1))
    expected = Normal(3.0, 0.1).log_prob(sample).sum(-1)
    torch.testing.assert_close(gaussian_logprob(mean, log_sigma, sample), expected, rtol=1e-5, atol=1e-4)


def test_actions_of_asymmetric_and_unbounded_boxes():
    agent = make_agent(action_low=[0.0, -2.0, -math.inf], action_high=[5.0, 4.0, math.inf])
    actions = agent.to_env(torch.tensor([[0.0, 0.0, 7.0], [1.0, 1.0, -7.0], [-9.0, -9.0, 0.0]]))
    torch.testing.assert_close(actions, torch.tensor([[2.5, 1.0, 7.0], [5.0, 4.0, -7.0], [0.0, -2.0, 0.0]]))


@pytest.mark.parametrize("deterministic", [True, False])
def test_act_stays_in_the_box_and_is_raw_where_there_is_none(deterministic):
    box = spaces.Box(np.float32([0, -3, -np.inf, 2]), np.float32([5, -1, np.inf, np.inf]))
    agent = make_agent(action_low=box.low.tolist(), action_high=box.high.tolist())
    for bias in (-100.0, 0.0, 100.0):
        agent.mean_head.bias.data.fill_(bias)
        actions = agent.act(torch.randn(50, 3), deterministic)
        assert actions.dtype == torch.float32 and not actions.requires_grad
        assert all(box.contains(row) for row in actions.numpy())
        assert abs(actions[:, 2].mean().item() - bias) < 1  # no bounds: units and value of the policy


def test_smooth_clamp_and_hard_clamp():
    ratio = torch.tensor([0.5, 1.0, 1.2, 3.0], requires_grad=True)
    smooth = clamp_ratio(ratio, replace(SMALL, smooth_clamp=True))
    mine = [0.8 + 0.4 / (1 + math.exp(4 * (-(r - 0.8) / 0.4 + 0.5))) for r in ratio.tolist()]  # rl_games' form
    torch.testing.assert_close(smooth, torch.tensor(mine))
    assert smooth[2].item() == pytest.approx(1.1523, abs=1e-4)
    assert torch.autograd.grad(smooth[1], ratio)[0][1].item() == pytest.approx(1.0)
    torch.testing.assert_close(clamp_ratio(ratio, SMALL), torch.tensor([0.8, 1.0, 1.2, 1.2]))


def test_reward_shaper_shifts_before_it_scales_and_clamps():
    args = replace(SMALL, reward_shift=1.0, reward_scale=2.0, reward_min=0.5, reward_max=5.0)
    rewards = torch.tensor([-3.0, 0.0, 1.0, 9.0])
    assert shape_rewards(rewards, args).tolist() == [0.5, 2.0, 4.0, 5.0]
    shaped = shape_rewards(rewards, replace(args, reward_log=True))
    torch.testing.assert_close(shaped, torch.tensor([0.5, 2.0, 4.0, 5.0]).log())


def test_log_sigma_is_untouched_inside_bounded_outside_and_never_without_gradient():
    """H10."""
    inside = torch.linspace(-4, 1, 11)
    assert torch.equal(smooth_bounds(inside, -5.0, 2.0), inside)
    outside = torch.tensor([-1e3, -20.0, -4.01, 1.01, 20.0, 1e3], requires_grad=True)
    bounded = smooth_bounds(outside, -5.0, 2.0)
    assert (bounded > -5).all() and (bounded < 2).all()
    assert (torch.autograd.grad(bounded.sum(), outside)[0] > 0).all()
    agent = make_agent()
    for value in (-1e3, 1e3):
        agent.log_sigma.data.fill_(value)
        mean, log_sigma = agent.policy(torch.randn(4, 3))
        sample = mean + log_sigma.exp() * torch.randn_like(mean)
        assert gaussian_logprob(mean, log_sigma, sample).isfinite().all()


def test_bounds_loss_is_of_bounded_actions_only():
    agent = make_agent(action_low=[-1.0, -math.inf], action_high=[1.0, math.inf])
    agent.mean_head.bias.data.copy_(torch.tensor([2.1, 50.0]))
    agent.mean_head.weight.data.zero_()
    rows = {"obs": torch.randn(4, 3), "critic_obs": torch.randn(4, 3), "actions": torch.zeros(4, 2),
            "old_mean": torch.zeros(4, 2), "old_log_sigma": torch.zeros(4, 2),
            "advantages": torch.zeros(4), "old_values": torch.zeros(4, 1), "targets": torch.zeros(4, 1)}  # fmt: skip
    metrics = ppo_loss(agent, SMALL, **rows)[1]
    assert metrics[METRICS.index("bounds_loss")].item() == pytest.approx(1.0, rel=1e-4)


def test_sigma_head_starts_uniform():
    """H44: the constant is in the bias."""
    agent = make_agent(replace(SMALL, fixed_sigma=False, log_sigma_init=-0.3))
    _, log_sigma = agent.policy(torch.randn(1000, 3) * 10)
    assert log_sigma.std() < 1e-6 and log_sigma.mean().item() == pytest.approx(-0.3)
    agent.policy(torch.randn(5, 3))[1].sum().backward()
    assert agent.sigma_head.weight.grad.abs().sum() > 0


def reference_loss(agent, args, batch):
    """PPO's objective and its metrics row by row in Python floats."""
    mean, log_sigma = (x.tolist() for x in agent.policy(batch["obs"]))
    values = agent.normalized_value(batch["critic_obs"]).tolist()
    rows = range(len(mean))
    policy = value = entropy = bounds = kl = clipped_rows = 0.0
    for i in rows:
        logprob, actions = 0.0, batch["actions"][i].tolist()
        for m, s, a in zip(mean[i], log_sigma[i], actions, strict=True):
            logprob += -0.5 * ((a - m) / math.exp(s)) ** 2 - s
            entropy += 0.5 + 0.5 * math.log(2 * math.pi) + s
            bounds += max(m - 1.1, 0) ** 2 + min(m + 1.1, 0) ** 2 if args.bounds_loss == "bound" else m * m
        olds = zip(batch["old_mean"][i].tolist(), batch["old_log_sigma"][i].tolist(), actions, strict=True)
        for m, s, (m0, s0, a) in zip(mean[i], log_sigma[i], olds, strict=True):
            kl += s - s0 + (math.exp(2 * s0) + (m0 - m) ** 2) / (2 * math.exp(2 * s)) - 0.5
            logprob -= -0.5 * ((a - m0) / math.exp(s0)) ** 2 - s0
        ratio = math.exp(logprob)
        advantage, clip = batch["advantages"][i].item(), args.clip_coef
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        if args.smooth_clamp:
            bounded = 1 - clip + 2 * clip / (1 + math.exp(-2 * (ratio - 1) / clip))
        policy += -min(advantage * ratio, advantage * bounded)
        clipped_rows += ratio > 1 + clip or ratio < 1 - clip
        heads = zip(values[i], batch["old_values"][i].tolist(), batch["targets"][i].tolist(), strict=True)
        for v, old, target in heads:
            clipped = old + min(max(v - old, -args.clip_coef), args.clip_coef)
            value += 0.5 * max((v - target) ** 2, (clipped - target) ** 2 if args.clip_vloss else 0.0)
    n = len(mean)
    loss = (policy + args.vf_coef * value - args.ent_coef * entropy + args.bounds_loss_coef * bounds) / n
    return loss, [x / n for x in (policy, value, entropy, kl, clipped_rows, bounds)]


LOSSES = pytest.mark.parametrize("changes", [
    {}, {"clip_vloss": True}, {"ent_coef": 0.1, "bounds_loss_coef": 2.0}, {"smooth_clamp": True},
    {"bounds_loss": "regularisation", "bounds_loss_coef": 0.5}, {"vf_coef": 3.0, "clip_coef": 0.05},
])  # fmt: skip


@LOSSES
@pytest.mark.parametrize("value_size", [1, 3])
def test_loss_equals_a_scalar_loop(changes, value_size):
    args = replace(SMALL, **changes)
    agent = make_agent(args, value_size=value_size)
    agent.mean_head.weight.data.mul_(300)  # means beyond the bounds
    torch.manual_seed(1)
    M = 20
    batch = {"obs": torch.randn(M, 3), "critic_obs": torch.randn(M, 3), "actions": torch.randn(M, 2)}
    mean, log_sigma = (x.detach() for x in agent.policy(batch["obs"]))
    batch |= {"old_mean": mean + 0.1, "old_log_sigma": log_sigma + 0.2, "advantages": torch.randn(M)}
    batch |= {"old_values": torch.randn(M, value_size), "targets": torch.randn(M, value_size)}
    loss, metrics = ppo_loss(agent, args, **batch)
    expected, expected_metrics = reference_loss(agent, args, batch)
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert METRICS[:6] == ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "bounds_loss")
    assert metrics[:6].tolist() == pytest.approx(expected_metrics, rel=1e-4, abs=1e-6)
    assert expected_metrics[4] > 0 and expected_metrics[5] > 0  # the case reaches the clipping and the bounds
    assert not metrics.requires_grad and loss.dtype == torch.float32


class Outputs:
    """Stands in for an Agent: its outputs are free variables, so that the loss can be differentiated by them."""

    def __init__(self, mean, log_sigma, values):
        self.mean, self.log_sigma, self.values = mean, log_sigma, values
        self.action_bounded = torch.ones(mean.shape[-1], dtype=torch.bool)

    def policy(self, obs):
        return self.mean, self.log_sigma

    def normalized_value(self, critic_obs):
        return self.values

    def extra_losses(self, obs):
        return {}


@LOSSES
def test_gradient_equals_finite_differences_of_the_scalar_loop(changes):
    args = replace(SMALL, **changes)
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    M, A, V, h = 6, 2, 2, 1e-6
    outputs = [2 * normal(M, A), 0.3 * normal(M, A), normal(M, V)]
    batch = {"obs": normal(M, 1), "critic_obs": normal(M, 1), "actions": outputs[0] + 0.5 * normal(M, A),
             "old_mean": outputs[0] + 0.2 * normal(M, A), "old_log_sigma": outputs[1] + 0.1 * normal(M, A),
             "advantages": normal(M), "targets": normal(M, V)}  # fmt: skip
    batch["old_values"] = outputs[2] + 0.3 * normal(M, V)
    leaves = [x.clone().requires_grad_() for x in outputs]
    ppo_loss(Outputs(*leaves), args, **batch)[0].backward()
    for x, leaf in zip(outputs, leaves, strict=True):
        for index in np.ndindex(*x.shape):
            value, losses = x[index].item(), []
            for step in (h, -h):
                x[index] = value + step
                losses.append(reference_loss(Outputs(*outputs), args, batch)[0])
            x[index] = value
            assert leaf.grad[index].item() == pytest.approx((losses[0] - losses[1]) / (2 * h), rel=1e-5, abs=1e-8)


def test_value_in_reward_units_and_targets_share_their_statistics():
    """H7 (2)-(5)."""
    agent = make_agent()
    obs = torch.randn(50, 3)
    small = agent.get_value(obs)
    agent.value_rms.update(torch.randn(1000, 1) * 70 + 90)
    torch.testing.assert_close(agent.get_value(obs), agent.value_rms.denormalize(small[:, None])[:, 0])
    torch.testing.assert_close(agent.value_rms(agent.value(obs)), agent.normalized_value(obs), rtol=1e-3, atol=1e-4)
    plain = make_agent(replace(SMALL, norm_value=False))
    plain.value_rms.update(torch.randn(1000, 1) * 70 + 90)
    torch.testing.assert_close(plain.value(obs), plain.normalized_value(obs))


def test_critic_state_does_not_reach_the_actor():
    """H32."""
    agent = make_agent(critic_obs_dim=7, asymmetric=True)
    state = torch.randn(4, 7, requires_grad=True)
    agent.value(state).sum().backward()
    assert state.grad.abs().sum() > 0
    assert all(p.grad is None for p in agent.actor.parameters())
    assert agent.critic is not agent.actor and agent.critic_obs_rms is not agent.obs_rms
    args, state.grad = replace(SMALL, vf_coef=0.0, ent_coef=0.1, bounds_loss_coef=0.1), None
    rows = {"obs": torch.randn(4, 3, requires_grad=True), "critic_obs": state, "actions": torch.randn(4, 2),
            "old_mean": torch.zeros(4, 2), "old_log_sigma": torch.zeros(4, 2),
            "advantages": torch.randn(4), "old_values": torch.zeros(4, 1), "targets": torch.ones(4, 1)}  # fmt: skip
    ppo_loss(agent, args, **rows)[0].backward()
    assert rows["obs"].grad.abs().sum() > 0 and (state.grad is None or not state.grad.any())


def test_actor_and_critic_share_their_layers_only_where_they_see_the_same():
    shared = make_agent(replace(SMALL, separate=False))
    assert shared.critic is shared.actor and shared.critic_obs_rms is shared.obs_rms
    asymmetric = make_agent(replace(SMALL, separate=False), critic_obs_dim=7, asymmetric=True)
    assert asymmetric.critic is not asymmetric.actor
    assert make_agent(replace(SMALL, critic_hidden_sizes=(5,))).critic.out_features == 5


def test_observations_are_normalised_and_outliers_cut():
    agent = make_agent()
    agent.obs_rms.update(torch.randn(1000, 3) * 10 + 100)
    encoded = agent.encode(torch.tensor([[100.0, 110.0, 1e9], [100.0, 90.0, -1e9]]), agent.obs_rms)
    torch.testing.assert_close(encoded[:, :2], torch.tensor([[0.0, 1.0], [0.0, -1.0]]), rtol=0.2, atol=0.2)
    assert encoded[:, 2].tolist() == [OBS_CLIP, -OBS_CLIP]
    raw = make_agent(replace(SMALL, norm_obs=False))
    assert torch.equal(raw.encode(torch.tensor([[1e9, 0.0, 1.0]]), raw.obs_rms), torch.tensor([[1e9, 0.0, 1.0]]))


def test_adaptive_rule_moves_both_groups_between_its_bounds():
    args = replace(SMALL, kl_threshold=0.01, min_lr=1e-4, max_lr=1e-3, learning_rate=3e-4, critic_learning_rate=6e-4)
    lrs = [group["lr"] for group in make_optimizer(make_agent(), args, None).param_groups]

    def after(kl, times=1):
        for _ in range(times):
            adapt_learning_rates(lrs, torch.tensor(kl), args)
        return [lr.item() for lr in lrs]

    assert after(0.0155) == pytest.approx([3e-4, 6e-4])  # H25: within the band
    assert after(0.0201) == pytest.approx([2e-4, 4e-4])
    assert after(0.0049) == pytest.approx([3e-4, 6e-4])
    assert after(1.0, 20) == pytest.approx([1e-4, 1e-4])
    assert after(0.0, 20) == pytest.approx([1e-3, 1e-3])


def test_optimizer_holds_each_parameter_once():
    for args, asymmetric in ((SMALL, False), (replace(SMALL, separate=False), False), (SMALL, True)):
        agent = make_agent(args, critic_obs_dim=5 if asymmetric else 3, asymmetric=asymmetric)
        held = [id(p) for group in make_optimizer(agent, args, None).param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in agent.parameters()) and len(set(held)) == len(held)


def test_explained_variance():
    returns = torch.randn(10, 4, 1)
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros_like(returns), returns) == pytest.approx(0.0, abs=1e-6)
    assert math.isnan(explained_variance(torch.randn(5, 1), torch.ones(5, 1)))


def test_explained_variance_is_of_the_rows_that_count():
    returns, values, counts = torch.randn(50, 4, 2), torch.randn(50, 4, 2), torch.rand(50, 4) < 0.7
    weights = counts / counts.float().mean()
    expected = 1 - (returns - values)[counts].var() / returns[counts].var()
    values[~counts], returns[~counts] = 1e3, -1e6
    got = explained_variance(values, returns, weights[..., None])
    assert got == pytest.approx(expected.item(), rel=1e-4)
    assert math.isnan(explained_variance(values, returns, torch.zeros(50, 4, 1)))


def test_initializers_have_their_spread():
    torch.manual_seed(0)
    weights = {name: initialize(torch.nn.Linear(400, 300), name).weight for name in
               ("default", "orthogonal", "glorot", "variance_scaling")}  # fmt: skip
    product = weights["orthogonal"] @ weights["orthogonal"].T
    torch.testing.assert_close(product, 2 * torch.eye(300), rtol=1e-3, atol=1e-3)
    assert weights["glorot"].var().item() == pytest.approx(2 * 2 / 700, rel=0.05)
    assert weights["variance_scaling"].var().item() == pytest.approx(2 / 400 * 0.774, rel=0.05)  # cut at two sigma
    assert weights["default"].abs().max() <= 1 / 20
    assert initialize(torch.nn.Linear(4, 3), "glorot").bias.abs().sum() == 0


@pytest.mark.parametrize("name", ["orthogonal", "glorot", "variance_scaling"])
def test_policy_starts_near_zero_with_the_asked_sigma(name):
    agent = make_agent(replace(SMALL, initializer=name, log_sigma_init=-1.5))
    mean, log_sigma = agent.policy(torch.randn(100, 3))
    assert mean.abs().max() < 0.1 and (log_sigma == -1.5).all()


def test_d2rl_reads_the_input_in_every_layer():
    args = replace(SMALL, d2rl=True, layer_norm=True, hidden_sizes=(16, 8, 4))
    net = MLP(3, args.hidden_sizes, args)
    assert [layer[0].in_features for layer in net.layers] == [3, 19, 11]
    x = torch.randn(5, 3)
    h = net.layers[0](x)
    for layer in net.layers[1:]:
        h = layer(torch.cat([h, x], 1))
    assert torch.equal(net(x), h) and h.shape == (5, 4)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_by_name(name):
    functions = {"relu": torch.relu, "tanh": torch.tanh, "selu": torch.selu}
    function = functions.get(name) or getattr(torch.nn.functional, name)
    net, x = MLP(3, (4,), replace(SMALL, activation=name)), torch.randn(6, 3)
    torch.testing.assert_close(net(x), function(net.layers[0][0](x)))


def test_everything_but_statistics_is_float32():
    """H33, H44."""
    agent = make_agent()
    kinds = {k: v.dtype for k, v in agent.state_dict().items() if "rms" not in k and v.dtype != torch.bool}
    assert set(kinds.values()) == {torch.float32} and "log_sigma" in kinds
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mean, log_sigma = agent.policy(torch.randn(4, 3))
        assert mean.dtype == log_sigma.dtype == agent.value(torch.randn(4, 3)).dtype == torch.float32


@pytest.mark.parametrize("changes, words", [
    ({"num_minibatches": 7}, ["--num-minibatches 7", "64", "4 and 8"]),
    ({"num_minibatches": 100}, ["--num-minibatches 100", "64"]),
    ({"num_envs": 0}, ["--num-envs 0", "at least 1"]),
    ({"num_steps": -3}, ["--num-steps -3"]),
    ({"gamma": 1.5}, ["--gamma 1.5", "at most 1"]),
    ({"clip_coef": 0.0}, ["--clip-coef 0.0", "positive"]),
    ({"learning_rate": math.nan}, ["--learning-rate nan", "finite"]),
    ({"ent_coef": math.inf}, ["--ent-coef inf", "finite"]),
    ({"hidden_sizes": ()}, ["--hidden-sizes ()"]),
    ({"critic_hidden_sizes": (8, 0)}, ["--critic-hidden-sizes (8, 0)"]),
    ({"min_lr": 1.0}, ["--min-lr 1.0", "--max-lr"]),
    *[({name: 0}, [f"--{name.replace('_', '-')} 0", "at least 1"])
      for name in ("num_minibatches", "update_epochs", "num_episodes", "games_to_track", "total_timesteps")],
    *[({name: -1}, [f"--{name.replace('_', '-')} -1", "at least 0"])
      for name in ("seed", "torch_threads", "save_interval", "save_best_after", "eval_interval", "learning_rate",
                   "critic_learning_rate", "min_lr", "vf_coef", "bounds_loss_coef", "weight_decay")],
    ({"gae_lambda": -0.1}, ["--gae-lambda -0.1", "at least 0"]),
    *[({name: 0.0}, [f"--{name.replace('_', '-')} 0.0", "positive"]) for name in ("max_grad_norm", "kl_threshold")],
    ({"reward_min": 1.0, "reward_max": 1.0}, ["--reward-min 1.0", "--reward-max 1.0"]),
    ({"reward_min": math.nan}, ["--reward-min nan", "finite"]),
    ({"reward_log": True}, ["--reward-log", "--reward-min"]),
    ({"log_sigma_bounds": (-1.0, 0.5)}, ["--log-sigma-bounds"]),
    ({"log_sigma_bounds": (math.nan, 2.0)}, ["--log-sigma-bounds", "finite"]),
    ({"learning_rate": 0.1}, ["--learning-rate 0.1", "--max-lr 0.001"]),
    ({"critic_learning_rate": 1e-7}, ["critic: 1e-07", "--min-lr 1e-06"]),
    ({"play": True}, ["--checkpoint"]),
])  # fmt: skip
def test_what_args_refuse(changes, words):
    with pytest.raises(InputError) as error:
        replace(SMALL, **changes)
    text = str(error.value)
    assert all(word in text for word in words) and "\n" not in text
