"""The formulas of ppo_discrete.py against references written in another way, mostly scalar loops in float64."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from common.envs.base import VecEnv
from common.envs.gymnasium import GymnasiumVecEnv
from common.envs.observations import ObservationReader
from common.errors import InputError
from ppo_discrete import (
    ACTIVATIONS,
    FORBIDDEN,
    METRICS,
    OBS_CLIP,
    Agent,
    Args,
    ResidualBlock,
    agent_kwargs,
    categorical_entropy,
    categorical_kl,
    categorical_logprob,
    compute_gae,
    image_encoder,
    make_optimizer,
    observation_spec,
    pixels,
    ppo_loss,
    sample,
    tree_map,
)  # fmt: skip

SMALL = Args(num_envs=6, num_steps=7, num_minibatches=3, hidden_sizes=(16, 11), learning_rate=3e-4,
             lr_schedule="adaptive", norm_obs=True, norm_value=True, vf_coef=1.0)  # fmt: skip
ONE = torch.ones(())
LAST = torch.nextafter(ONE, torch.zeros(())).item()  # the largest float below 1
UNIT = spaces.Box(-np.inf, np.inf, (3,), np.float32)
PICTURE, VECTOR = spaces.Box(0, 255, (2, 36, 37), np.uint8), spaces.Box(-np.inf, np.inf, (4,), np.float32)
BOTH = spaces.Dict({"picture": PICTURE, "vector": VECTOR})


def make_agent(args=SMALL, sizes=(5, 3), space=UNIT, critic_space=None, value_size=1, sequence=None):
    torch.manual_seed(0)
    spec = observation_spec(space, sequence, args.encoder, "toy")
    critic_spec = critic_space and observation_spec(critic_space, None, args.encoder, "toy")
    return Agent(args, spec, critic_spec, value_size, list(sizes), multi_discrete=len(sizes) > 1)


def with_logits(sizes, *rows):
    """An agent whose logits are the same for any observation: rows of the [D, P] table."""
    agent = make_agent(sizes=sizes)
    agent.policy_head.weight.data.zero_()
    table = torch.zeros(agent.is_action.shape)
    for d, row in enumerate(rows):
        table[d, : len(row)] = torch.tensor(row)
    agent.policy_head.bias.data = table.flatten()
    return agent


def mask_of(text, rows=1):
    """ "10000|110" -> [rows, K]."""
    return torch.tensor([c == "1" for c in text if c != "|"]).expand(rows, -1)


def random_mask(generator, rows, sizes):
    """Each sub-action has at least one allowed value."""
    masks = []
    for size in sizes:
        numbers = torch.rand(rows, size, generator=generator)
        masks.append((numbers > 0.5) | (numbers == numbers.max(1, keepdim=True).values))
    return torch.cat(masks, 1)


def scalar_tables(logits, mask, sizes):
    """Log-probabilities of one row as one dict a sub-action, allowed values only. logits: lists of unequal length."""
    tables, start = [], 0
    for row, size in zip(logits, sizes, strict=True):
        allowed = [j for j in range(size) if mask[start + j]]
        top = max(row[j] for j in allowed)
        total = math.fsum(math.exp(row[j] - top) for j in allowed)
        tables.append({j: row[j] - top - math.log(total) for j in allowed})
        start += size
    return tables


# ---- categorical ----


def test_table_logprob_entropy_and_kl_equal_scalar_loops():
    """Unequal sizes, the longest row in the middle, one sub-action without a choice."""
    sizes, M, generator = (2, 5, 1, 3), 40, torch.Generator().manual_seed(1)
    logits0, logits1 = 3 * torch.randn(2, M, 4, 5, generator=generator)
    mask = random_mask(generator, M, sizes)
    agent = make_agent(sizes=sizes)

    def table(logits):
        agent.policy_head.forward = lambda features: logits.flatten(1)
        return agent.policy(torch.zeros(M, 3), mask)

    table0, table1 = table(logits0), table(logits1)
    assert table0.shape == (M, 4, 5) and table0.dtype == torch.float32
    rows = [[scalar_tables([x[d, :s].tolist() for d, s in enumerate(sizes)], m.tolist(), sizes)
             for x, m in zip(logits.double(), mask, strict=True)] for logits in (logits0, logits1)]  # fmt: skip
    for i, (row0, row1) in enumerate(zip(*rows, strict=True)):
        for d, column in product(range(4), range(5)):
            expected = row0[d].get(column)
            if expected is None:
                assert table0[i, d, column].exp() == 0 and table0[i, d, column] <= FORBIDDEN / 2
            else:
                assert table0[i, d, column].item() == pytest.approx(expected, abs=1e-5)
        entropy = -sum(math.exp(lp) * lp for part in row0 for lp in part.values())
        pairs = [(part0[j], part1[j]) for part0, part1 in zip(row0, row1, strict=True) for j in part0]
        kl = sum(math.exp(lp0) * (lp0 - lp1) for lp0, lp1 in pairs)
        assert categorical_entropy(table0)[i].item() == pytest.approx(entropy, abs=1e-5)
        assert categorical_kl(table0, table1)[i].item() == pytest.approx(kl, rel=1e-4, abs=1e-5)
        for actions in product(*row0):
            expected = sum(part[j] for part, j in zip(row0, actions, strict=True))
            actual = categorical_logprob(table0[i : i + 1], torch.tensor([actions]))
            assert actual.shape == (1,) and actual.item() == pytest.approx(expected, abs=1e-5)
    assert (categorical_kl(table0, table0) == 0).all() and (categorical_kl(table0, table1) >= 0).all()


@pytest.mark.parametrize("batch", [1, 7])
def test_numbers_of_case_h11(batch):
    obs = torch.zeros(batch, 3)
    for sizes, entropy in (((5, 3), 2.70805), ((4, 4), 2 * math.log(4))):
        table = with_logits(sizes).policy(obs, torch.ones(batch, sum(sizes), dtype=torch.bool))
        assert categorical_entropy(table).tolist() == pytest.approx([entropy] * batch, abs=1e-5)
        logprob = categorical_logprob(table, torch.zeros(batch, 2, dtype=torch.int64))
        assert logprob.tolist() == pytest.approx([-entropy] * batch, abs=1e-5)
    for sizes, text, action in (((5, 3), "10000|110", (0, 1)), ((4, 4), "0100|0101", (1, 3))):
        agent, mask = with_logits(sizes), mask_of(text, batch)
        table = agent.policy(obs, mask)
        assert categorical_entropy(table).tolist() == pytest.approx([0.693147] * batch, abs=1e-6)
        logprob = categorical_logprob(table, torch.tensor([action] * batch))
        assert logprob.tolist() == pytest.approx([-0.693147] * batch, abs=1e-6)
        for deterministic in (True, False):
            actions = torch.cat([agent.act(obs, deterministic, mask) for _ in range(300)])
            assert actions.dtype == torch.int64 and actions.shape[1:] == (2,)
            starts = torch.tensor([0, sizes[0]])
            assert mask[0][actions + starts].all()


def test_numbers_of_case_h12():
    agent, mask = with_logits((4,), [1.0, 2.0, 3.0, 4.0]), mask_of("1100")
    table = agent.policy(torch.zeros(1, 3), mask)
    assert table.exp().flatten().tolist() == pytest.approx([0.268941, 0.731059, 0, 0], abs=1e-6)
    assert categorical_logprob(table, torch.tensor([[1]])).item() == pytest.approx(-0.313262, abs=1e-6)
    entropy = categorical_entropy(table)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)
    entropy.sum().backward()
    gradient = agent.policy_head.bias.grad.tolist()
    assert gradient[:2] == pytest.approx([0.196612, -0.196612], abs=1e-6) and gradient[2:] == [0, 0]


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_policy_maths_is_float32_and_finite_under_autocast(bfloat16, separate):
    """H12, H44: also where the caller has switched autocast on."""
    agent = make_agent(replace(SMALL, bfloat16=bfloat16, separate=separate), sizes=(4, 3))
    agent.policy_head.weight.data.mul_(1e4)
    with torch.autocast("cpu", torch.bfloat16):
        table = agent.policy(torch.randn(9, 3), mask_of("1100|010", 9))
        value = agent.normalized_value(torch.randn(9, 3))
        both = agent({"obs": torch.randn(9, 3)}, {}, mask_of("1100|010", 9))
        loss = categorical_entropy(table).sum() + categorical_kl(table, table.detach().roll(1, 0)).sum()
    assert table.dtype == value.dtype == both[0].dtype == both[1].dtype == loss.dtype == torch.float32
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in agent.actor.parameters())
    assert (table.exp().sum(-1) - 1).abs().max() < 1e-6


def test_samples_have_their_probabilities():
    """Counts within 5 standard deviations, and the sum of squares as chi-square has it; sub-actions independent."""
    agent = with_logits((4, 2, 3), [0.0, 1.0, -2.0, 2.0], [0.3, -0.3], [1.0, 5.0, 0.0])
    mask, n = mask_of("1111|11|101"), 200_000
    table = agent.policy(torch.zeros(1, 3), mask).detach()
    noise = torch.rand(n, 3, 4, generator=torch.Generator().manual_seed(2))
    actions = sample(table.expand(n, -1, -1), noise)
    assert actions.shape == (n, 3) and actions.dtype == torch.int64
    joint = torch.bincount(actions[:, 0] * 6 + actions[:, 1] * 3 + actions[:, 2], minlength=24).double()
    p = table[0].double().exp()
    expected = n * (p[0, :4, None, None] * p[1, None, :2, None] * p[2, None, None, :3]).flatten()
    assert (joint[expected == 0] == 0).all() and (expected == 0).sum() == 8
    joint, expected = joint[expected > 0], expected[expected > 0]
    assert ((joint - expected).abs() < 5 * expected.sqrt()).all()
    assert 3 < ((joint - expected) ** 2 / expected).sum() < 40  # 15 degrees of freedom


def test_forbidden_actions_are_never_sampled():
    """Also with noise at its ends: an unlikely allowed action against forbidden ones that have all the luck."""
    sizes, n = (3, 6, 1), 100_000
    agent = with_logits(sizes, [-300.0, 5.0, 0.0], [50.0, -50, 0, 50, -50, 50])
    for text in ("100|010000|1", "101|010010|1"):
        mask = mask_of(text, n)
        table = agent.policy(torch.zeros(n, 3), mask).detach()
        allowed = agent.allowed(mask)
        random = torch.rand(table.shape, generator=torch.Generator().manual_seed(3))
        for noise in (random, torch.zeros_like(random), torch.full_like(random, LAST),
                      torch.where(allowed, 0.0, LAST), torch.where(allowed, LAST, 0.0)):  # fmt: skip
            assert allowed.gather(-1, sample(table, noise)[..., None]).all()


def test_ends_of_the_noise_are_finite_and_ordered():
    table = torch.log_softmax(torch.zeros(1, 1, 3), -1)
    for low, high in ((0.0, 2**-24), (2**-24, 0.5), (0.5, LAST)):
        assert sample(table, torch.tensor([[[low, high, low]]])).item() == 1
    assert sample(torch.tensor([[[-17.0, 0.0]]]), torch.tensor([[[LAST, 0.0]]])).item() == 0


@pytest.mark.parametrize("sizes", [(3, 1), (1, 4, 2), (2, 5), (4,), (1,)])
def test_where_nothing_is_allowed_it_is_action_0_for_certain(sizes):
    agent, K, generator = make_agent(sizes=sizes), sum(sizes), torch.Generator().manual_seed(4)
    agent.policy_head.weight.data.mul_(300)
    mask = random_mask(generator, 2 ** len(sizes), sizes)
    parts = mask.split(sizes, 1)
    for row, empty in enumerate(product((False, True), repeat=len(sizes))):
        for d, is_empty in enumerate(empty):
            parts[d][row] &= not is_empty
    mask = torch.cat(parts, 1)
    assert mask.shape == (2 ** len(sizes), K)
    obs = torch.randn(len(mask), 3, generator=generator)
    table = agent.policy(obs, mask)
    for row, empty in enumerate(product((False, True), repeat=len(sizes))):
        for d, is_empty in enumerate(empty):
            if is_empty:
                assert table[row, d].exp().tolist() == [1.0] + [0.0] * (max(sizes) - 1)
    assert (table.exp().sum(-1) - 1).abs().max() < 1e-6
    assert (table.exp()[:, ~agent.is_action] == 0).all()
    assert (categorical_entropy(table)[-1] == 0) and table.isfinite().all()
    for deterministic in (True, False):
        actions = agent.act(obs, deterministic, mask).view(len(mask), -1)
        assert (actions[-1] == 0).all() and (actions < torch.tensor(sizes)).all()


def test_padding_has_no_probability_and_gets_no_gradient():
    sizes = (2, 5, 3)
    agent = make_agent(sizes=sizes, value_size=2)
    agent.policy_head.bias.data = (~agent.is_action).flatten() * 1e3  # padding would be certain
    assert agent.is_action.tolist() == [[j < s for j in range(5)] for s in sizes]
    mask = random_mask(torch.Generator().manual_seed(5), 20, sizes)
    table = agent.policy(torch.randn(20, 3), mask)
    assert (table.exp()[:, ~agent.is_action] == 0).all() and (table.exp().sum(-1) - 1).abs().max() < 1e-6
    batch = make_batch(agent, 20, mask=mask)
    ppo_loss(agent, replace(SMALL, vf_coef=0.5), torch.tensor(0.1), **batch)[0].backward()
    gradient = agent.policy_head.weight.grad.view(3, 5, -1)
    assert (gradient[~agent.is_action] == 0).all() and (gradient[agent.is_action] != 0).any(-1).all()
    assert (agent.policy_head.bias.grad.view(3, 5)[~agent.is_action] == 0).all()


def test_forbidden_logits_get_no_gradient():
    agent, mask = make_agent(sizes=(4, 3)), mask_of("1010|011", 12)
    batch = make_batch(agent, 12, mask=mask)
    ppo_loss(agent, SMALL, torch.tensor(0.3), **batch)[0].backward()
    gradient, allowed = agent.policy_head.bias.grad.view(2, 4), agent.allowed(mask)[0]
    assert (gradient[~allowed] == 0).all() and (gradient[allowed] != 0).all()


def test_mask_entries_belong_to_their_sub_actions():
    """A mask [K] is the sub-actions' masks one after the other."""
    agent = make_agent(sizes=(2, 5, 1, 3))
    for k in range(11):
        mask = torch.zeros(1, 11, dtype=torch.bool)
        mask[0, k] = True
        d, column = next((d, k - start) for d, start in reversed(list(enumerate((0, 2, 7, 8)))) if k >= start)
        expected = torch.zeros(4, 5, dtype=torch.bool)
        expected[d, column] = True
        assert torch.equal(agent.allowed(mask)[0], expected)


def test_large_masked_action_spaces_stay_finite():
    """H34: 8000 actions, logits of +-50 and more, another mask in every row, 200 updates."""
    K, M, generator = 8000, 5, torch.Generator().manual_seed(6)
    agent = make_agent(replace(SMALL, hidden_sizes=(8,)), sizes=(K,))
    agent.policy_head.weight.data = 50 * torch.randn(K, 8, generator=generator)
    optimizer = make_optimizer(agent, replace(SMALL, learning_rate=1e-3), None)
    before = agent.policy_head.weight.detach().clone()
    obs = torch.randn(M, 3, generator=generator)
    assert agent.policy_head(agent.actor([], obs)).abs().max() > 50
    for step in range(200):
        mask = torch.rand(M, K, generator=generator) < (0.5 if step % 2 else 0.001)
        mask[:, step] = True
        with torch.no_grad():
            table = agent.policy(obs, mask)
            actions = sample(table, torch.rand(table.shape, generator=generator))
        assert mask.gather(1, actions).all() and table.isfinite().all()
        assert (table.double().exp().sum(-1) - 1).abs().max() < 1e-5
        batch = {"obs": {"obs": obs}, "critic_obs": {}, "action_mask": mask, "actions": actions, "old_policy": table,
                 "old_values": torch.zeros(M, 1), "advantages": torch.randn(M, generator=generator),
                 "targets": torch.zeros(M, 1), "weights": torch.ones(M)}  # fmt: skip
        optimizer.zero_grad()
        loss, metrics = ppo_loss(agent, SMALL, torch.tensor(0.01), **batch)
        loss.backward()
        assert metrics.isfinite().all() and metrics[METRICS.index("approx_kl")] == 0
        optimizer.step()
    assert all(p.isfinite().all() for p in agent.parameters())
    assert not torch.equal(before, agent.policy_head.weight)


# ---- the loss ----


def make_batch(agent, M, mask=None, **changes):
    """Random rows of a minibatch, the old policy a little away from the present one."""
    torch.manual_seed(7)
    K = int(agent.is_action.sum())
    mask = torch.ones(M, K, dtype=torch.bool) if mask is None else mask
    obs = {"obs": torch.randn(M, 3)}
    with torch.no_grad():
        table = agent.policy(obs, mask)
        # An old policy under the same mask: other logits, the same zeros.
        old = torch.where(table > FORBIDDEN / 2, table + 0.5 * torch.randn_like(table), FORBIDDEN).log_softmax(-1)
        actions = sample(old, torch.rand_like(old))
    values = torch.randn(2, M, agent.value_size)
    return {"obs": obs, "critic_obs": {}, "action_mask": mask, "actions": actions, "old_policy": old,
            "old_values": values[0], "advantages": torch.randn(M), "targets": values[1],
            "weights": torch.ones(M)} | changes  # fmt: skip


def reference_loss(tables, values, batch, args, ent_coef):
    """PPO's objective and its metrics row by row in Python floats; tables as scalar_tables gives them."""
    policy = value = entropy = kl = clipped_rows = 0.0
    for i, (row, row_values) in enumerate(zip(tables, values, strict=True)):
        weight, advantage, clip = batch["weights"][i].item(), batch["advantages"][i].item(), args.clip_coef
        new = old = 0.0
        for d, (table, action) in enumerate(zip(row, batch["actions"][i].tolist(), strict=True)):
            old_table = batch["old_policy"][i, d].tolist()
            new, old = new + table[action], old + old_table[action]
            entropy -= weight * math.fsum(math.exp(lp) * lp for lp in table.values())
            kl += weight * math.fsum(math.exp(old_table[j]) * (old_table[j] - table[j]) for j in table)
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - clip), 1 + clip)
        if args.smooth_clamp:
            bounded = 1 - clip + 2 * clip / (1 + math.exp(-2 * (ratio - 1) / clip))
        policy -= weight * min(advantage * ratio, advantage * bounded)
        clipped_rows += weight * (ratio > 1 + clip or ratio < 1 - clip)
        heads = zip(row_values, batch["old_values"][i].tolist(), batch["targets"][i].tolist(), strict=True)
        for v, old_value, target in heads:
            clipped = old_value + min(max(v - old_value, -clip), clip)
            value += weight * 0.5 * max((v - target) ** 2, (clipped - target) ** 2 if args.clip_vloss else 0.0)
    n = len(tables)
    loss = (policy + args.vf_coef * value - ent_coef * entropy) / n
    return loss, [x / n for x in (policy, value, entropy, kl, clipped_rows)]


class Outputs:
    """Stands in for an Agent: its logits [M, D, P] and values [M, V] are free variables."""

    def __init__(self, logits, values, allowed, extra=None):
        self.logits, self.values, self.table, self.extra = logits, values, allowed, extra or {}

    def __call__(self, obs, critic_obs, action_mask):
        return torch.where(self.table, self.logits, FORBIDDEN).log_softmax(-1), self.values

    def extra_losses(self, obs):
        return self.extra


def loss_case(args, sizes=(2, 4, 3), M=9, V=2, dtype=torch.float64):
    """Free logits and values, a batch for them, and the scalar loop as a function of them."""
    generator = torch.Generator().manual_seed(8)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    agent = make_agent(sizes=sizes)
    mask = random_mask(generator, M, sizes)
    allowed, logits, values = agent.allowed(mask), normal(M, len(sizes), max(sizes)), normal(M, V)
    old = torch.where(allowed, logits + 0.4 * normal(*logits.shape), FORBIDDEN).log_softmax(-1)
    weights = torch.tensor([1.5] * (M - M // 3) + [0.0] * (M // 3), dtype=dtype)[torch.randperm(M, generator=generator)]
    batch = {"obs": {"obs": normal(M, 3)}, "critic_obs": {}, "action_mask": mask, "old_policy": old,
             "actions": sample(old, torch.rand(old.shape, generator=generator)), "advantages": normal(M),
             "old_values": values + 0.3 * normal(M, V), "targets": normal(M, V), "weights": weights}  # fmt: skip

    def expected(logits, values, ent_coef):
        tables = [scalar_tables([row[d, :s].tolist() for d, s in enumerate(sizes)], m.tolist(), sizes)
                  for row, m in zip(logits, mask, strict=True)]  # fmt: skip
        return reference_loss(tables, values.tolist(), batch, args, ent_coef)

    return logits, values, allowed, batch, expected


LOSSES = pytest.mark.parametrize("changes, ent_coef", [
    ({}, 0.0), ({"clip_vloss": True}, 0.0), ({}, 0.3), ({"smooth_clamp": True}, 0.01),
    ({"vf_coef": 3.0, "clip_coef": 0.05, "clip_vloss": True}, -0.1),
])  # fmt: skip


@LOSSES
@pytest.mark.parametrize("sizes, V", [((2, 4, 3), 3), ((6,), 1)])
def test_loss_equals_a_scalar_loop(changes, ent_coef, sizes, V):
    args = replace(SMALL, **changes)
    logits, values, allowed, batch, expected = loss_case(args, sizes, M=24, V=V, dtype=torch.float32)
    outputs = Outputs(logits.clone().requires_grad_(), values, allowed)
    loss, metrics = ppo_loss(outputs, args, torch.tensor(ent_coef), **batch)
    reference, reference_metrics = expected(logits, values, ent_coef)
    assert loss.item() == pytest.approx(reference, rel=1e-4, abs=1e-6) and loss.dtype == torch.float32
    assert METRICS == ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm", "nonfinite")
    assert metrics.tolist() == pytest.approx([*reference_metrics, 0, 0], rel=1e-4, abs=1e-6)
    assert reference_metrics[4] > 0 and reference_metrics[3] > 0.01 and not metrics.requires_grad


@LOSSES
def test_gradient_equals_finite_differences_of_the_scalar_loop(changes, ent_coef):
    args, h = replace(SMALL, **changes), 1e-6
    logits, values, allowed, batch, expected = loss_case(args)
    leaves = [x.clone().requires_grad_() for x in (logits, values)]
    ppo_loss(Outputs(*leaves, allowed), args, torch.tensor(ent_coef, dtype=torch.float64), **batch)[0].backward()
    for x, leaf in zip((logits, values), leaves, strict=True):
        for index in np.ndindex(*x.shape):
            value, losses = x[index].item(), []
            for step in (h, -h):
                x[index] = value + step
                losses.append(expected(logits, values, ent_coef)[0])
            x[index] = value
            assert leaf.grad[index].item() == pytest.approx((losses[0] - losses[1]) / (2 * h), rel=1e-5, abs=1e-8)


def test_extra_losses_are_added_and_are_the_last_metrics():
    logits, values, allowed, batch, _ = loss_case(SMALL)
    plain, names = Outputs(logits, values, allowed), {"a": torch.tensor(5.0), "b": torch.tensor(-2.0)}
    loss, metrics = ppo_loss(plain, SMALL, torch.tensor(0.0), **batch)
    more, longer = ppo_loss(Outputs(logits, values, allowed, names), SMALL, torch.tensor(0.0), **batch)
    assert (more - loss).item() == pytest.approx(3.0) and longer[len(METRICS) :].tolist() == [5, -2]
    assert torch.equal(longer[: len(METRICS)], metrics)


def test_rows_without_a_choice_teach_nothing():
    """H13: whatever is in them, the gradient is the same to the bit, and it is the mean over the other rows."""
    sizes, M = (2, 3), 11
    agent = make_agent(replace(SMALL, separate=False), sizes=sizes, value_size=2)
    mask = random_mask(torch.Generator().manual_seed(9), M, sizes)
    mask[2], mask[5, 2:], mask[8, :2] = False, False, False
    good = torch.tensor([i not in (2, 5, 8) for i in range(M)])
    batch = make_batch(agent, M, mask=mask, weights=good * M / good.sum())
    fine = replace(SMALL, clip_vloss=True)

    def gradients(batch):
        agent.zero_grad()
        loss, metrics = ppo_loss(agent, fine, torch.tensor(0.1), **batch)
        loss.backward()
        return loss, metrics, [p.grad.clone() for p in agent.parameters()]

    loss, metrics, grads = gradients(batch)
    huge = tree_map(lambda x: x.clone(), batch)
    for name in ("advantages", "targets", "old_values"):
        huge[name][~good] = 1e6
    huge["obs"]["obs"][~good] = 1e6
    huge_loss, huge_metrics, huge_grads = gradients(huge)
    assert torch.equal(loss, huge_loss) and torch.equal(metrics, huge_metrics)
    assert all(torch.equal(a, b) for a, b in zip(grads, huge_grads, strict=True)) and max(map(torch.max, grads)) > 0
    rest = tree_map(lambda x: x[good], batch) | {"weights": torch.ones(int(good.sum()))}
    rest_loss, rest_metrics, rest_grads = gradients(rest)
    torch.testing.assert_close((loss, metrics, grads), (rest_loss, rest_metrics, rest_grads), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(agent.policy(batch["obs"], mask)[good], agent.policy(rest["obs"], mask[good]))


def test_minibatch_of_rows_without_a_choice_is_finite():
    agent = make_agent(sizes=(2, 3))
    batch = make_batch(agent, 7, mask=torch.zeros(7, 5, dtype=torch.bool), weights=torch.zeros(7))
    loss, metrics = ppo_loss(agent, SMALL, torch.tensor(0.1), **batch)
    loss.backward()
    assert loss == 0 and metrics.isfinite().all()
    assert all((p.grad == 0).all() for p in agent.parameters())


def brute_force_gae(rewards, values, next_values, terminated, done, gamma, lam):
    """The sum over later TD errors, term by term, for one env."""
    advantages = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for k in range(t, len(rewards)):
            total += weight * (rewards[k] + (0.0 if terminated[k] else gamma * next_values[k]) - values[k])
            if done[k]:
                break
            weight *= gamma * lam
        advantages.append(total)
    return advantages


def test_gae_equals_brute_force_on_mixed_ends():
    generator = np.random.default_rng(0)
    rewards, values, next_values = generator.normal(size=(3, 30, 7))
    terminated, truncated = generator.random((2, 30, 7)) < 0.15
    inputs = [torch.from_numpy(x) for x in (rewards, values, next_values, terminated, terminated | truncated)]
    advantages, returns = compute_gae(*inputs, 0.97, 0.9)
    for n in range(7):
        expected = brute_force_gae(*(x[:, n].tolist() for x in inputs), 0.97, 0.9)
        np.testing.assert_allclose(advantages[:, n], expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(returns, advantages + inputs[1])


@pytest.mark.parametrize("terminated, expected", [
    (False, [3.65814, 1.88000, 3.755165, 1.93000]), (True, [-7.515, -10.0, 3.755165, 1.93]),
])  # fmt: skip
def test_gae_numbers_of_case_h1(terminated, expected):
    values, next_values = torch.tensor([[10.0, 11, 5, 6], [11.0, 12, 6, 7]])[..., None].expand(2, 4, 2)
    done, terminal = torch.zeros(2, 4, 2, dtype=torch.bool)
    done[1, 0], terminal[1, 0] = True, terminated
    advantages, _ = compute_gae(torch.ones(4, 2), values, next_values, terminal, done, 0.99, 0.95)
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert advantages[:2, 1].tolist() == pytest.approx([6.980, 5.412], abs=1e-3)  # an env without an end


# ---- observations and encoders ----


def inputs_of(module):
    """What the module is called with from now on."""
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    return seen


def observe(space, rows, generator=None):
    """Random observations of a space; pixels reach 0 and 255."""
    if isinstance(space, spaces.Dict):
        return {key: observe(part, rows, generator) for key, part in space.items()}
    if space.dtype == np.uint8:
        picture = torch.randint(0, 256, (rows, *space.shape), generator=generator, dtype=torch.uint8)
        picture[:, 0, 0, 0], picture[:, -1, -1, -1] = 0, 255
        return picture
    return torch.randn(rows, *space.shape, generator=generator)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("encoder, layer", [("nature_cnn", nn.Conv2d), ("impala", nn.Conv2d), ("mlp", nn.Linear)])
@pytest.mark.parametrize("separate", [False, True])
def test_pixels_are_divided_by_255_exactly_once(encoder, layer, separate, bfloat16):
    """H31: in the rollout, in training, in the critic and in play."""
    args = replace(SMALL, encoder=encoder, impala_depths=(4,), separate=separate, norm_obs=False, bfloat16=bfloat16)
    agent = make_agent(args, sizes=(3,), space=PICTURE)
    trunks = {agent.actor, agent.critic}
    assert len(trunks) == 1 + separate
    seen = [inputs_of(next(m for m in trunk.modules() if isinstance(m, layer))) for trunk in trunks]
    M = 5
    obs = {"obs": observe(PICTURE, M)}
    mask = torch.ones(M, 3, dtype=torch.bool)
    batch = {"obs": obs, "critic_obs": {}, "action_mask": mask, "actions": torch.zeros(M, 1, dtype=torch.int64),
             "old_policy": torch.zeros(M, 1, 3), "old_values": torch.zeros(M, 1), "advantages": torch.ones(M),
             "targets": torch.zeros(M, 1), "weights": torch.ones(M)}  # fmt: skip
    before = obs["obs"].clone()
    calls = [lambda: agent.policy(obs, mask), lambda: agent.value(obs), lambda: agent.act(obs["obs"]),
             lambda: agent.get_value(obs["obs"]), lambda: ppo_loss(agent, args, ONE, **batch)]  # fmt: skip
    for call in calls:
        for inputs in seen:
            inputs.clear()
        call()
        inputs = sum(seen, [])
        assert inputs
        for x in inputs:
            assert x.max() == 1 and x.min() == 0 and x.is_floating_point()
            assert 0.45 < x.float().mean() < 0.55
    assert len(inputs) == 1 + separate  # the loss evaluates a shared trunk once
    assert torch.equal(obs["obs"], before) and before.dtype == torch.uint8


def test_pixels_are_exact_and_other_numbers_untouched():
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert pixels(x, 255, torch.float32).flatten().tolist() == pytest.approx([i / 255 for i in range(256)], abs=1e-7)
    assert pixels(x, 255, torch.bfloat16).dtype == torch.bfloat16
    vector = torch.randn(3, 4) * 255
    assert pixels(vector, None, torch.bfloat16) is vector


@pytest.mark.parametrize("encoder", ["nature_cnn", "impala", "mlp"])
def test_order_of_keys_does_not_matter(encoder):
    """Two pictures and two vectors of the same shape, which would change places."""
    args = replace(SMALL, encoder=encoder, impala_depths=(3, 5))
    names = {"a": PICTURE, "b": VECTOR, "c": PICTURE, "d": VECTOR}
    agent = make_agent(args, space=spaces.Dict(names))
    agent.obs_rms.update(torch.randn(50, agent.obs_rms.mean.numel()) * 3 + 1)
    agent.policy_head.weight.data.mul_(100)
    obs, mask = observe(spaces.Dict(names), 6), torch.ones(6, 8, dtype=torch.bool)
    flipped = dict(reversed(obs.items()))
    assert list(obs) != list(flipped)
    assert torch.equal(agent.policy(obs, mask), agent.policy(flipped, mask))
    assert torch.equal(agent.value(obs), agent.value(flipped))
    for one, two in ("ac", "bd"):
        swapped = obs | {one: obs[two], two: obs[one]}
        assert not torch.allclose(agent.policy(obs, mask), agent.policy(swapped, mask), atol=1e-3)


def test_normaliser_is_of_the_vector_alone():
    """H31: and of images only where they are given to the hidden layers as numbers."""
    agent = make_agent(space=BOTH)
    assert agent.obs_spec["encoder"] == "nature_cnn" and agent.obs_rms.mean.shape == (4,)
    obs = observe(BOTH, 50)
    obs["vector"] = obs["vector"] * 7 + 100
    agent.update_statistics(obs, {}, torch.zeros(50, 1), torch.ones(50, dtype=torch.bool))
    assert agent.obs_rms.count == 50 and (agent.obs_rms.mean - 100).abs().max() < 5
    images, vector = agent.encode(obs, agent.obs_spec, agent.obs_rms)
    assert len(images) == 1 and torch.equal(images[0], obs["picture"].float() / 255)
    torch.testing.assert_close(vector, agent.obs_rms(obs["vector"]))
    assert vector.mean().abs() < 1e-3 and (vector.std(0, correction=0) - 1).abs().max() < 1e-3
    obs["vector"][0] = 1e9
    assert agent.encode(obs, agent.obs_spec, agent.obs_rms)[1][0].tolist() == [OBS_CLIP] * 4
    flat = make_agent(replace(SMALL, encoder="mlp"), space=BOTH)
    assert flat.obs_rms.mean.shape == (2 * 36 * 37 + 4,)
    images, vector = flat.encode(obs, flat.obs_spec, flat.obs_rms)
    assert images == [] and torch.equal(vector[:, :2664], obs["picture"].flatten(1) / 255)
    raw = make_agent(replace(SMALL, norm_obs=False), space=BOTH)
    raw.obs_rms.update(obs["vector"])
    assert torch.equal(raw.encode(obs, raw.obs_spec, raw.obs_rms)[1], obs["vector"])


def test_statistics_are_of_valid_rows():
    agent = make_agent(space=UNIT, critic_space=VECTOR, value_size=2)
    valid = torch.tensor([True, False, True, False, False])
    rows = [torch.randn(5, n) for n in (3, 4, 2)]
    for x in rows:
        x[~valid] = 1e6
    agent.update_statistics(rows[0], {"obs": rows[1]}, rows[2], valid)
    for rms, x in zip((agent.obs_rms, agent.critic_obs_rms, agent.value_rms), rows, strict=True):
        assert rms.count == 2
        torch.testing.assert_close(rms.mean.float(), x[valid].mean(0))
        torch.testing.assert_close(rms.var.float(), x[valid].var(0, correction=0))


def test_same_picture_in_both_layouts():
    """HWC and CHW, through the reader that the adapters use."""
    picture = np.random.default_rng(0).integers(0, 256, (5, 36, 37, 3), np.uint8)
    outputs = []
    for shape, array in (((36, 37, 3), picture), ((3, 36, 37), np.ascontiguousarray(picture.transpose(0, 3, 1, 2)))):
        reader = ObservationReader(spaces.Box(0, 255, shape, np.uint8), "toy")
        obs = torch.from_numpy(reader.read(array, 5)[0])
        agent = make_agent(sizes=(6,), space=reader.observation_space)
        agent.policy_head.weight.data.mul_(100)
        outputs.append(agent.policy(obs, torch.ones(5, 6, dtype=torch.bool)))
    torch.testing.assert_close(outputs[0], outputs[1])
    assert outputs[0].std(0).max() > 1e-3


ENCODERS = [("mlp", UNIT), ("conv1d", UNIT), ("nature_cnn", BOTH), ("impala", BOTH), ("mlp", BOTH)]


@pytest.mark.parametrize("initializer", ["default", "orthogonal", "glorot", "variance_scaling"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_encoder_is_finite_and_starts_near_uniform(activation, initializer):
    for encoder, space in ENCODERS:
        args = replace(SMALL, encoder=encoder, activation=activation, initializer=initializer, impala_depths=(4, 3),
                       layer_norm=activation == "relu", d2rl=activation == "tanh")  # fmt: skip
        agent = make_agent(args, space=space, value_size=2)
        obs = observe(space, 3)
        table, values = agent({"obs": obs} if space is UNIT else obs, {}, mask_of("11111|111", 3))
        assert table.shape == (3, 2, 5) and values.shape == (3, 2)
        assert table.isfinite().all() and values.isfinite().all()
        if initializer != "default":
            assert (table[:, agent.is_action] - torch.tensor([1 / 5] * 5 + [1 / 3] * 3).log()).abs().max() < 0.6
            layers = [m for m in agent.modules() if isinstance(m, (nn.Linear, nn.Conv1d, nn.Conv2d))]
            assert layers and all((layer.bias == 0).all() for layer in layers)


def test_initial_convolutions_by_name():
    weights = {}
    for name in ("default", "orthogonal", "glorot", "variance_scaling"):
        torch.manual_seed(0)
        conv = image_encoder("nature_cnn", 3, replace(SMALL, initializer=name))[0]
        weights[name] = conv.weight.detach().flatten(1)
    torch.testing.assert_close(weights["orthogonal"] @ weights["orthogonal"].T, 2 * torch.eye(32), rtol=1e-4, atol=1e-4)
    assert weights["glorot"].var().item() == pytest.approx(2 * 2 / (64 * (3 + 32)), rel=0.1)
    assert weights["variance_scaling"].var().item() == pytest.approx(2 / 192 * 0.774, rel=0.1)
    assert weights["default"].abs().max() <= 1 / 192**0.5


@pytest.mark.parametrize("shape, channels, features", [((4, 84, 84), 4, 3136), ((1, 36, 44), 1, 64 * 1 * 2)])
def test_nature_cnn_has_the_published_layers(shape, channels, features):
    net = image_encoder("nature_cnn", channels, SMALL)
    convs = [m for m in net if isinstance(m, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0], c.padding[0]) for c in convs] == [
        (channels, 32, 8, 4, 0), (32, 64, 4, 2, 0), (64, 64, 3, 1, 0)]  # fmt: skip
    assert [type(m) for m in net] == [nn.Conv2d, nn.ELU] * 3 + [nn.Flatten]
    assert net(torch.zeros(2, *shape)).shape == (2, features)


def test_impala_has_five_convolutions_a_stage_and_halves():
    net = image_encoder("impala", 2, replace(SMALL, impala_depths=(3, 5), activation="relu"))
    convs = [(c.in_channels, c.out_channels) for c in net.modules() if isinstance(c, nn.Conv2d)]
    assert convs == [(2, 3), *[(3, 3)] * 4, (3, 5), *[(5, 5)] * 4]
    assert net(torch.rand(6, 2, 7, 10)).shape == (6, 5 * 2 * 3)  # 7, 10 -> 4, 5 -> 2, 3
    assert net(torch.rand(6, 2, 7, 10)).min() == 0  # the last thing before the features is a nonlinearity


def test_residual_block_adds_to_its_input():
    block, x = ResidualBlock(3, replace(SMALL, activation="tanh")), torch.randn(2, 3, 5, 4)
    first, second = (m for m in block.modules() if isinstance(m, nn.Conv2d))
    torch.testing.assert_close(block(x), x + second(torch.tanh(first(torch.tanh(x)))))
    second.weight.data.zero_()
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("sequence, expected", [((5, 6), (6, 5)), ((30,), (1, 30)), (None, (1, 30)),
                                                ((2, 3, 5), (1, 30))])  # fmt: skip
def test_conv1d_runs_along_the_first_axis(sequence, expected):
    """A list of 5 cars of 6 numbers: 6 channels, 5 positions. A plain vector is one channel."""
    space = spaces.Box(-np.inf, np.inf, (30,), np.float32)
    agent = make_agent(replace(SMALL, encoder="conv1d", norm_obs=False), space=space, sequence=sequence)
    seen = inputs_of(next(m for m in agent.actor.modules() if isinstance(m, nn.Conv1d)))
    obs = torch.arange(60.0).view(2, 30)
    agent.act(obs)
    channels, length = expected
    assert torch.equal(seen[0], obs.view(2, length, channels).transpose(1, 2))
    assert agent.actor.mlp.layers[0][0].in_features == 64 * length
    assert agent.obs_rms.mean.shape == (30,)


# ---- actor and critic ----


@pytest.mark.parametrize("space", [UNIT, BOTH], ids=["vector", "dict"])
def test_shared_trunk_is_evaluated_once_and_separate_ones_are_two(space):
    obs = observe(space, 4)
    obs = obs if isinstance(obs, dict) else {"obs": obs}
    for separate in (False, True):
        agent = make_agent(replace(SMALL, separate=separate), space=space)
        assert (agent.critic is agent.actor) != separate and agent.critic_obs_rms is agent.obs_rms
        seen = [inputs_of(trunk.mlp) for trunk in {agent.actor, agent.critic}]
        batch = make_batch(make_agent(), 4) | {"obs": obs}
        ppo_loss(agent, SMALL, torch.tensor(0.0), **batch)
        assert [len(inputs) for inputs in seen] == [1] * (1 + separate)
        mask = batch["action_mask"]
        table, values = agent(obs, {}, mask)
        assert torch.equal(table, agent.policy(obs, mask)) and torch.equal(values, agent.normalized_value(obs))


def test_critic_state_does_not_reach_the_actor():
    """H32: another dictionary, with other statistics."""
    critic_space = spaces.Dict({"map": spaces.Box(0, 255, (1, 3, 4), np.uint8), "state": spaces.Box(-1, 1, (7,))})
    agent = make_agent(replace(SMALL, separate=False), critic_space=critic_space, value_size=2)
    assert agent.critic is not agent.actor and agent.critic_obs_rms is not agent.obs_rms
    assert agent.critic_obs_rms.mean.shape == (19,) and agent.critic.mlp.layers[0][0].in_features == 19
    state = observe(critic_space, 6)
    state["state"].requires_grad_()
    batch = make_batch(agent, 6) | {"critic_obs": state}
    batch["obs"]["obs"].requires_grad_()
    ppo_loss(agent, replace(SMALL, vf_coef=0.0), torch.tensor(0.1), **batch)[0].backward()
    assert batch["obs"]["obs"].grad.any() and not state["state"].grad.any()
    agent.zero_grad()
    agent.value(state).sum().backward()
    assert state["state"].grad.any() and not any(p.grad is not None and p.grad.any() for p in agent.actor.parameters())
    assert agent.get_value(state).shape == (6,)
    torch.testing.assert_close(agent.get_value(state), agent.value(state).sum(-1))


def test_optimizer_holds_each_parameter_once_and_the_critic_has_its_own_rate():
    args = replace(SMALL, critic_learning_rate=7e-4)
    for changes, critic_space in (({}, None), ({"separate": False}, None), ({}, BOTH)):
        agent = make_agent(replace(args, **changes), space=BOTH, critic_space=critic_space)
        groups = make_optimizer(agent, args, None).param_groups
        held = [id(p) for group in groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in agent.parameters())
        assert [round(float(g["lr"]), 6) for g in groups] == [3e-4, 7e-4]
        critic = {id(p) for p in groups[1]["params"]}
        assert id(agent.value_head.weight) in critic and id(agent.policy_head.weight) not in critic
        assert (id(next(agent.critic.parameters())) in critic) == (agent.critic is not agent.actor)


def test_value_in_reward_units():
    agent = make_agent(value_size=2)
    obs = torch.randn(50, 3)
    small = agent.normalized_value(obs)
    agent.value_rms.update(torch.randn(1000, 2) * torch.tensor([70, 3]) + torch.tensor([90, -5]))
    torch.testing.assert_close(agent.value(obs), agent.value_rms.denormalize(small))
    torch.testing.assert_close(agent.get_value(obs), agent.value_rms.denormalize(small).sum(-1))
    plain = make_agent(replace(SMALL, norm_value=False), value_size=2)
    plain.value_rms.update(torch.randn(1000, 2) * 70 + 90)
    assert torch.equal(plain.value(obs), plain.normalized_value(obs))


@pytest.mark.parametrize("sizes", [(4,), (3, 2)])
def test_act_without_a_mask_allows_everything(sizes):
    agent = make_agent(sizes=sizes)
    obs, K = torch.randn(500, 3), sum(sizes)
    actions = agent.act(obs, deterministic=False)
    assert actions.shape == ((500,) if len(sizes) == 1 else (500, 2)) and actions.dtype == torch.int64
    assert all(set(column.tolist()) == set(range(s)) for column, s in zip(actions.view(500, -1).T, sizes, strict=True))
    best = agent.policy(obs, torch.ones(500, K, dtype=torch.bool)).argmax(-1)
    assert torch.equal(agent.act(obs).view(500, -1), best) and best.unique().numel() > 1
    assert torch.equal(agent.act({"obs": obs}), agent.act(obs)) and not actions.requires_grad


# ---- what is refused ----


@pytest.mark.parametrize("changes, words", [
    ({"impala_depths": ()}, ["--impala-depths ()", "at least one"]),
    ({"impala_depths": (8, 0)}, ["--impala-depths (8, 0)", "at least 1 channel"]),
    ({"action_bins": -1}, ["--action-bins -1", "at least 0"]),
    ({"ent_coef_end": math.nan}, ["--ent-coef-end nan", "finite"]),
    ({"ent_coef": math.inf}, ["--ent-coef inf", "finite"]),
    ({"num_minibatches": 5}, ["--num-minibatches 5", "42", "3 and 6"]),
    ({"num_envs": 0}, ["--num-envs 0", "at least 1"]),
    ({"gamma": 1.5}, ["--gamma 1.5", "at most 1"]),
    ({"clip_coef": 0.0}, ["--clip-coef 0.0", "positive"]),
    ({"hidden_sizes": ()}, ["--hidden-sizes ()"]),
    ({"critic_hidden_sizes": (8, 0)}, ["--critic-hidden-sizes (8, 0)"]),
    ({"min_lr": 1.0}, ["--min-lr 1.0", "--max-lr"]),
    ({"learning_rate": 0.1}, ["--learning-rate 0.1", "--max-lr 0.001"]),
    ({"reward_min": 1.0, "reward_max": 1.0}, ["--reward-min 1.0", "--reward-max 1.0"]),
    ({"reward_log": True}, ["--reward-log", "--reward-min"]),
    ({"play": True}, ["--checkpoint"]),
    *[({name: -1}, [f"--{name.replace('_', '-')} -1"]) for name in
      ("num_steps", "num_minibatches", "update_epochs", "num_episodes", "games_to_track", "total_timesteps", "seed",
       "torch_threads", "save_interval", "save_best_after", "eval_interval", "critic_learning_rate", "vf_coef",
       "weight_decay", "gae_lambda", "max_grad_norm", "kl_threshold")],
])  # fmt: skip
def test_what_args_refuse(changes, words):
    with pytest.raises(InputError) as error:
        replace(SMALL, **changes)
    text = str(error.value)
    assert all(word in text for word in words) and "\n" not in text


TINY = spaces.Box(0, 255, (3, 7, 9), np.uint8)


@pytest.mark.parametrize("encoder, space, words", [
    ("nature_cnn", UNIT, ["--encoder nature_cnn", "no images"]),
    ("impala", UNIT, ["--encoder impala", "no images"]),
    ("nature_cnn", TINY, ["--encoder nature_cnn", "7 pixels", "36", "impala"]),
    ("nature_cnn", spaces.Dict({"a": PICTURE, "b": TINY}), ["7 pixels"]),
    ("conv1d", PICTURE, ["--encoder conv1d", "images"]),
    ("conv1d", BOTH, ["--encoder conv1d", "images or several parts"]),
])  # fmt: skip
def test_what_encoders_refuse(encoder, space, words):
    with pytest.raises(InputError) as error:
        observation_spec(space, None, encoder, "toy")
    text = str(error.value)
    assert all(word in text for word in [*words, "toy"]) and "\n" not in text


@pytest.mark.parametrize("space, encoder, expected", [
    (UNIT, "auto", "mlp"), (TINY, "auto", "mlp"), (PICTURE, "auto", "nature_cnn"), (BOTH, "auto", "nature_cnn"),
    (spaces.Box(0, 255, (1, 35, 99), np.uint8), "auto", "mlp"),
    (spaces.Box(0, 255, (1, 36, 36), np.uint8), "auto", "nature_cnn"),
    (PICTURE, "mlp", "mlp"), (TINY, "impala", "impala"),
])  # fmt: skip
def test_encoder_is_chosen_from_the_space(space, encoder, expected):
    spec = observation_spec(space, None, encoder, "toy")
    boxes = space.spaces if isinstance(space, spaces.Dict) else {"obs": space}
    images = {k: list(b.shape) for k, b in boxes.items() if b.dtype == np.uint8}
    assert spec["encoder"] == expected and spec["images"] == ({} if expected == "mlp" else images)
    flat = {k: math.prod(b.shape) for k, b in boxes.items() if expected == "mlp" or k not in images}
    assert spec["vectors"] == flat


def test_agent_kwargs_of_an_environment():
    envs = GymnasiumVecEnv("CartPole-v1", 2, torch.device("cpu"), 0, {})
    kwargs = agent_kwargs(envs, "auto")
    envs.close()
    assert kwargs["action_sizes"] == [2] and kwargs["multi_discrete"] is False and kwargs["critic_obs_spec"] is None
    expected = {"encoder": "mlp", "images": {}, "vectors": {"obs": 4}, "highs": {}, "sequence": None}
    assert kwargs["obs_spec"] == expected
    for space, sizes in ((spaces.MultiDiscrete([3]), [3]), (spaces.MultiDiscrete([2, 5]), [2, 5])):
        envs.action_space = space
        kwargs = agent_kwargs(envs, "auto")
        assert kwargs["action_sizes"] == sizes and kwargs["multi_discrete"] is True
    envs.action_space = spaces.Box(-1, 1, (2,))
    with pytest.raises(InputError, match="ppo_continuous.py.*--action-bins"):
        agent_kwargs(envs, "auto")


@pytest.mark.parametrize("encoder", ["nature_cnn", "impala"])
def test_image_actor_with_a_vector_critic_takes_a_named_encoder(encoder):
    envs = VecEnv()
    envs.env_id, envs.action_space = "toy", spaces.Discrete(3)
    envs.observation_space = spaces.Box(0, 255, (3, 40, 40), np.uint8)
    envs.critic_observation_space = spaces.Box(-np.inf, np.inf, (7,), np.float32)
    kwargs = agent_kwargs(envs, encoder)
    assert kwargs["obs_spec"]["encoder"] == encoder and kwargs["critic_obs_spec"]["vectors"] == {"obs": 7}
