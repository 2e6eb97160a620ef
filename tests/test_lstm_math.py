"""ppo_lstm.py's network, step by step and in sequences, against torch's own kernels run episode by episode."""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from gymnasium import spaces
from test_discrete_math import BOTH, PICTURE, TINY, observe, random_mask, scalar_tables
from test_discrete_math import Outputs as CategoricalOutputs
from test_discrete_math import loss_case as categorical_case
from test_ppo_math import Outputs as GaussianOutputs
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence

import ppo_continuous
import ppo_discrete
from common.envs.base import Step, VecEnv
from common.errors import InputError
from ppo_lstm import (
    FORBIDDEN,
    METRICS,
    RNN,
    Agent,
    Args,
    CategoricalHead,
    GaussianHead,
    agent_kwargs,
    make_optimizer,
    parts,
    ppo_loss,
    sequence_rows,
    shape_rewards,
)  # fmt: skip

SMALL = Args(num_envs=3, num_steps=8, seq_length=4, num_minibatches=2, hidden_sizes=(9, 7), rnn_hidden_size=10,
             learning_rate=3e-4)  # fmt: skip
VECTOR = spaces.Box(-np.inf, np.inf, (4,), np.float32)
STATE = spaces.Dict(
    {"a": spaces.Box(-np.inf, np.inf, (5,), np.float32), "map": spaces.Box(0, 255, (1, 3, 4), np.uint8)}
)
ACTIONS = {"gaussian": spaces.Box(np.float32([-1, -2]), np.float32([3, 2])), "discrete": spaces.Discrete(4),
           "heads": spaces.MultiDiscrete([2, 4, 3])}  # fmt: skip


def toy(space=VECTOR, actions="heads", critic_space=None, value_size=1):
    """What agent_kwargs reads of an environment."""
    envs = VecEnv()
    envs.env_id, envs.value_size, envs.action_space = "toy", value_size, ACTIONS[actions]
    envs.observation_space, envs.critic_observation_space = space, critic_space or space
    return envs


def make_agent(args=SMALL, **kwargs):
    """Its policy depends on what it remembers: the first weights of a policy are near 0."""
    torch.manual_seed(0)
    agent = Agent(args, **agent_kwargs(toy(**kwargs), args))
    output = agent.head.mean if isinstance(agent.head, GaussianHead) else agent.head.logits
    output.weight.data.mul_(100)
    return agent


# ---- references ----


def torch_rnn(rnn):
    """nn.LSTM or nn.GRU with the weights of an RNN."""
    first = rnn.cells[0]
    kind = nn.LSTM if isinstance(first, nn.LSTMCell) else nn.GRU
    net = kind(first.input_size, first.hidden_size, len(rnn.cells)).to(first.weight_ih.dtype)
    for i, cell in enumerate(rnn.cells):
        for name, weight in cell.named_parameters():
            getattr(net, f"{name}_l{i}").data.copy_(weight)
    return net


def hidden_of(net, state):
    """State [N, F] as the network takes it."""
    layers = state.view(len(state), net.num_layers, -1, net.hidden_size)
    tensors = [layers[:, :, i].transpose(0, 1).contiguous() for i in range(layers.shape[2])]
    return tuple(tensors) if len(tensors) == 2 else tensors[0]


def state_of(hidden):
    """The inverse of hidden_of."""
    tensors = hidden if isinstance(hidden, tuple) else (hidden,)
    return torch.cat([tensor[i] for i in range(len(tensors[0])) for tensor in tensors], -1)


def unroll(net, x, state, starts):
    """One sequence x [L, I] from state [F], each episode on its own: outputs [L, H] and the state after them."""
    cuts = sorted({0, len(x), *starts.nonzero().flatten().tolist()})
    outputs, hidden = [], hidden_of(net, state[None])
    for begin, end in zip(cuts, cuts[1:], strict=False):
        output, hidden = net(x[begin:end, None], None if starts[begin] else hidden)
        outputs.append(output[:, 0])
    return torch.cat(outputs), state_of(hidden)[0]


def reference_features(trunk, args, encoded, states, starts):
    """Of encoded observations [T, N, W] from states [N, F], starts [T, N]: features [T, N, ..] and states after."""
    net, features, after = torch_rnn(trunk.rnn), [], []
    for n in range(encoded.shape[1]):
        x = encoded[:, n]
        inputs = [x] if args.rnn_before_mlp else [trunk.mlp(x)] + [x] * args.rnn_concat_input
        h, state = unroll(net, torch.cat(inputs, 1), states[n], starts[:, n])
        if args.rnn_layer_norm:
            h = (h - h.mean(1, keepdim=True)) / (h.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
            h = h * trunk.norm.weight + trunk.norm.bias
        h = torch.cat([h] + [x] * args.rnn_concat_output, 1)
        features.append(trunk.mlp(h) if args.rnn_before_mlp else h)
        after.append(state)
    return torch.stack(features, 1), torch.stack(after)


# ---- the recurrent layers ----

PATTERNS = {  # starts of episodes as (step, sequence), of L = 8 steps and S sequences
    "none": (3, []), "first": (3, [(0, 1)]), "last": (3, [(7, 2)]), "all at once": (3, [(4, 0), (4, 1), (4, 2)]),
    "several": (3, [(0, 0), (3, 0), (4, 0), (7, 0), (2, 2)]), "one sequence": (1, []), "one, first": (1, [(0, 0)]),
    "one, last": (1, [(7, 0)]), "one, both": (1, [(0, 0), (7, 0)]), "everywhere": (2, [*product(range(8), range(2))]),
    "H5": (3, [(3, 0), (6, 2)]),
}  # fmt: skip


@pytest.fixture(params=["fused", "loop"])
def path(request, monkeypatch):
    """Both ways through RNN.forward: torch's kernel, and the loop of a GPU."""
    if request.param == "loop":
        monkeypatch.setattr(RNN, "forward", lambda net, x, state, at: net.loop(x, state, at.view(-1, len(state))))
    return request.param


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_outputs_and_gradients_equal_those_of_torch(path, rnn, layers):
    """Where there is no reset in one call, else episode by episode; P-14b, H5."""
    net = RNN(5, 6, replace(SMALL, rnn=rnn, rnn_layers=layers, initializer="default")).double()
    theirs = torch_rnn(net)
    for name, (S, where) in PATTERNS.items():
        starts = torch.zeros(8, S, dtype=torch.bool)
        for index in where:
            starts[index] = True
        x, state, goal = (
            torch.randn(*shape, dtype=torch.float64) for shape in ((8, S, 5), (S, net.state_size), (8, S, 6))
        )
        x.requires_grad_(), state.requires_grad_()
        output, after = net(x.flatten(0, 1), state, starts.flatten())
        if where:
            pieces = [unroll(theirs, x[:, s], state[s], starts[:, s]) for s in range(S)]
            expected, expected_after = (torch.stack(piece, -2) for piece in zip(*pieces, strict=True))
        else:
            expected, hidden = theirs(x, hidden_of(theirs, state))
            expected_after = state_of(hidden)
        torch.testing.assert_close(
            output.view(8, S, 6), expected, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
        if path == "loop":
            torch.testing.assert_close(after, expected_after, rtol=0, atol=1e-12)
        own, others = [x, state, *net.parameters()], [x, state, *theirs.parameters()]
        gradients = torch.autograd.grad((output * goal.flatten(0, 1)).sum(), own)
        expected = torch.autograd.grad((expected * goal).sum(), others, allow_unused=True)  # all may begin at once
        assert len(gradients) == len(expected) == 2 + 4 * layers
        for gradient, theirs_gradient in zip(gradients, expected, strict=True):
            if theirs_gradient is None:
                assert not gradient.any()
            else:
                torch.testing.assert_close(gradient, theirs_gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_one_step_is_the_cells_step(rnn, layers):
    """With the state of each layer and tensor in its place; where an episode starts, from 0."""
    net = RNN(5, 6, replace(SMALL, rnn=rnn, rnn_layers=layers))
    x, state, starts = torch.randn(4, 5), torch.randn(4, net.state_size), torch.tensor([False, True, False, True])
    output, after = net(x, state, starts)
    h, pieces, expected = x, (state * ~starts[:, None]).split(6, 1), []
    for i, cell in enumerate(net.cells):
        hidden = (pieces[2 * i], pieces[2 * i + 1]) if rnn == "lstm" else pieces[i]
        new = cell(h, hidden)
        expected += new if rnn == "lstm" else [new]
        h = new[0] if rnn == "lstm" else new
    torch.testing.assert_close(after, torch.cat(expected, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(output, h, rtol=0, atol=1e-6)


def test_outputs_are_the_same_with_and_without_gradients():
    """To the bit, or the ratio of equal weights were not 1."""
    for rnn in ("lstm", "gru"):
        net = RNN(64, 64, replace(SMALL, rnn=rnn))
        x, state, starts = torch.randn(16 * 16, 64), torch.randn(16, net.state_size), torch.rand(16 * 16) < 0.2
        with torch.no_grad():
            without = net(x, state, starts)[0]
        assert torch.equal(without, net(x, state, starts)[0])


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_output_of_a_sequence_does_not_depend_on_its_company(rnn):
    """To the bit: the old policy is of other minibatches than the loss."""
    net = RNN(64, 64, replace(SMALL, rnn=rnn))
    x, state, starts = torch.randn(32, 24, 64), torch.randn(24, net.state_size), torch.rand(32, 24) < 0.05
    starts[:, 5] = False
    together = net(x.flatten(0, 1), state, starts.flatten())[0].view(32, 24, 64)
    for company in ([5], [5, 6], [7, 5, 0], [*range(3, 9)], [23, 22, 5, 20, 19, 18, 17, 16, 15, 14]):
        alone = net(x[:, company].flatten(0, 1), state[company], starts[:, company].flatten())[0]
        assert torch.equal(alone.view(32, -1, 64), together[:, company])


def test_less_than_half_of_the_kernels_rows_are_padding(monkeypatch):
    """Or one long episode would make all the short ones as slow as itself; in few calls, one where nothing resets."""
    net, lstm, sizes = RNN(5, 6, replace(SMALL, rnn="lstm")), torch.lstm, []
    monkeypatch.setattr(torch, "lstm", lambda x, *rest: sizes.append(x.shape[0] * x.shape[1]) or lstm(x, *rest))
    for share, calls, most in ((0.0, 1, 1), (0.02, 2, 2), (0.2, 3, 2), (1.0, 1, 1)):
        starts = torch.rand(64, 16) < share
        starts[:, 0] &= share == 1
        sizes.clear()
        net(torch.randn(64 * 16, 5), torch.zeros(16, net.state_size), starts.flatten())
        assert len(sizes) >= calls and sum(sizes) <= most * 64 * 16 + 7 * 64  # a call has at least 8 columns
        assert len(sizes) <= (16 + int(starts[1:].sum())).bit_length()
        assert share not in (0, 1) or len(sizes) == 1 and sum(sizes) == 64 * 16


def test_first_weights_remember_over_one_to_seq_length_steps():
    for rnn, length in (("lstm", 16), ("gru", 50)):
        net = RNN(5, 20, replace(SMALL, rnn=rnn, seq_length=length, num_steps=length, num_minibatches=1, rnn_layers=2))
        for cell in net.cells:
            torch.testing.assert_close(cell.weight_hh.T @ cell.weight_hh, torch.eye(20), rtol=0, atol=1e-5)
            gates = (cell.bias_ih + cell.bias_hh).view(-1, 20)
            kept = gates[1].sigmoid()  # the forget gate of an LSTM, the update gate of a GRU: what is left after a step
            torch.testing.assert_close(1 / (1 - kept), 1 + torch.linspace(1, length, 20), rtol=1e-3, atol=0)
            assert not gates[[i for i in range(len(gates)) if i != 1]].any()
        plain = RNN(5, 20, replace(SMALL, rnn=rnn, initializer="default"))
        assert all(0.5 / 20**0.5 < p.abs().max() <= 1 / 20**0.5 for p in plain.parameters())


def test_a_rate_of_forgetting_is_where_torch_has_it():
    """With no other weights than the biases: an LSTM's cell and a GRU's state fade by the gate's share in each step."""
    for rnn, tensors in (("lstm", 2), ("gru", 1)):
        net = RNN(3, 4, replace(SMALL, rnn=rnn))
        for cell in net.cells:
            cell.weight_ih.data.zero_(), cell.weight_hh.data.zero_()
        state = torch.ones(1, net.state_size)
        for _ in range(10):
            state = net(torch.randn(1, 3), state, torch.tensor([False]))[1]
        share = torch.linspace(1, SMALL.seq_length, 4).log().sigmoid()
        torch.testing.assert_close(state.view(tensors, 4)[-1], share**10)


# ---- sequences of a rollout ----


class Rollout:
    """T steps of N envs as main() plays them; everything is kept as [T, N, ..], and the states before each step."""

    def __init__(self, agent, space, critic_space, value_size, T, N, dones, dtype):
        generator, sizes = torch.Generator().manual_seed(1), getattr(agent.head, "is_action", torch.zeros(0, 1)).sum(1)
        state, previous = (x.to(dtype) for x in agent.start(N))
        starts, rows = torch.zeros(N, dtype=torch.bool), []
        for t in range(T):
            raw = [self.double(observe(s, N, generator), dtype) for s in (space, critic_space or space)]
            obs, critic_obs = agent.observe(*raw, previous)
            mask = torch.zeros(N, 0, dtype=torch.bool)
            if len(sizes):
                mask = random_mask(generator, N, sizes.tolist())
            policy, values, states = agent(obs, critic_obs, mask, state, agent.no_starts(state))
            noise = agent.head.noise(N)
            actions, _, after = agent.policy_step(obs, critic_obs, mask, state, noise)
            assert torch.equal(after, torch.cat(states, 1)) and torch.equal(actions, agent.head.sample(policy, noise))
            rows.append({"obs": obs, "critic_obs": critic_obs, "mask": mask, "state": state, "starts": starts,
                         "policy": policy, "values": values, "actions": actions})  # fmt: skip
            rewards = torch.randn(N, value_size, generator=generator, dtype=dtype)
            ends = torch.rand(N, generator=generator) < 0.5
            done = dones[t]
            starts = agent.starts(Step(None, None, rewards, done & ends, done & ~ends, None, None))
            rows[-1] |= {"rewards": rewards, "after": after}
            state, previous = (x * ~starts[:, None] for x in (after, agent.previous(actions, rewards)))
        self.rows, self.state, self.T, self.N = rows, state, T, N

    @staticmethod
    def double(x, dtype):
        if isinstance(x, dict):
            return {key: Rollout.double(part, dtype) for key, part in x.items()}
        return x.to(dtype) if x.is_floating_point() else x

    def __getitem__(self, name):
        return torch.stack([row[name] for row in self.rows])

    def minibatch(self, sequences, L):
        """Sequences [(first step, env)] as the update reads them: row l * S + s is step l of sequence s."""

        def pick(name):
            rows = [[self.rows[t + l][name] for t, _ in sequences] for l in range(L)]
            envs = [n for _, n in sequences]
            if isinstance(rows[0][0], dict):
                return {key: torch.stack([r[key][n] for row in rows for r, n in zip(row, envs, strict=True)])
                        for key in rows[0][0]}  # fmt: skip
            return torch.stack([r[n] for row in rows for r, n in zip(row, envs, strict=True)])

        states = torch.stack([self.rows[t]["state"][n] for t, n in sequences])
        return pick, states


OPTIONS = {
    "plain": {}, "before": {"rnn_before_mlp": True}, "in": {"rnn_concat_input": True},
    "out": {"rnn_concat_output": True}, "in and out": {"rnn_concat_input": True, "rnn_concat_output": True},
    "before, out": {"rnn_before_mlp": True, "rnn_concat_output": True, "rnn_layer_norm": True},
    "norm": {"rnn_layer_norm": True}, "previous": {"prev_action_reward": True, "rnn_concat_output": True},
    "shared": {"separate": False}, "kept": {"reset_on_done": False, "prev_action_reward": True},
    "sizes": {"critic_rnn_hidden_size": 5, "critic_hidden_sizes": (6,)}, "layers": {"d2rl": True, "layer_norm": True},
    "conv1d": {"encoder": "conv1d"},
    "normalised": {"norm_obs": True, "norm_value": True, "prev_action_reward": True, "separate": False},
}  # fmt: skip
SETTINGS = [(name, actions, "vector", False) for name, actions in zip(OPTIONS, list(ACTIONS) * 9, strict=False)]
SETTINGS += [
    ("sizes", "heads", "vector", True), ("shared", "gaussian", "vector", True), ("previous", "heads", "both", False),
    ("shared", "discrete", "picture", False), ("in and out", "gaussian", "both", True),
    ("previous", "gaussian", "vector", False), ("kept", "heads", "vector", True),
]  # fmt: skip
SPACES = {"vector": VECTOR, "both": BOTH, "picture": PICTURE}
DONES = {"random": None, "H5": [(2, 0), (5, 2)], "several": [(0, 0), (1, 0), (3, 0), (4, 0), (6, 0)]}
PLAYED = [("random", 3), ("H5", 3), ("several", 1)]  # and the number of envs


def dones_of(name, T, N):
    if name == "random":
        return torch.rand(T, N, generator=torch.Generator().manual_seed(3)) < 0.3
    dones = torch.zeros(T, N, dtype=torch.bool)
    for t, n in DONES[name]:
        dones[t, min(n, N - 1)] = True
    return dones


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
@pytest.mark.parametrize("options, actions, space, asymmetric", SETTINGS)
@torch.no_grad()
def test_sequences_from_stored_states_equal_the_rollout(options, actions, space, asymmetric, rnn, layers):
    """H5: step by step, in sequences of any length from any step on, and by torch's kernels an episode at a time."""
    args = replace(SMALL, rnn=rnn, rnn_layers=layers, **OPTIONS[options])
    dtype, critic_space, V = torch.float64 if space == "vector" else torch.float32, STATE if asymmetric else None, 2
    if asymmetric and dtype == torch.float64:
        critic_space = spaces.Box(-np.inf, np.inf, (6,), np.float32)
    agent = make_agent(args, space=SPACES[space], actions=actions, critic_space=critic_space, value_size=V).to(dtype)
    for rms in (agent.obs_rms, agent.critic_obs_rms):
        rms.update(torch.randn(50, *rms.mean.shape) * 2 + 1)
    assert (agent.critic is agent.actor) == (not args.separate and not asymmetric)
    for pattern, N in PLAYED if space == "vector" else PLAYED[:1]:
        played = Rollout(agent, SPACES[space], critic_space, V, 8, N, dones_of(pattern, 8, N), dtype)
        for L in (1, 2, 4, 8):
            sequences = [(t, n) for t in range(0, 8, L) for n in range(N)]
            sequences = [sequences[i] for i in torch.randperm(len(sequences)).tolist()]
            for mb in (sequences, sequences[:1]):
                pick, states = played.minibatch(mb, L)
                inputs = pick("obs"), pick("critic_obs"), pick("mask"), states, pick("starts")
                policy, values, _ = agent(*inputs)
                for ours, name in ((policy, "policy"), (values, "values")):
                    torch.testing.assert_close(ours, pick(name), rtol=1e-6, atol=1e-6)
        compare_with_reference(agent, args, played)


def compare_with_reference(agent, args, played):
    """Features, policy, values and states of a whole rollout, from its first state."""
    T, N, first = played.T, played.N, agent.start(played.N)[0]
    ours = [(agent.actor, agent.obs_spec, agent.obs_rms, "obs", first[:, : agent.actor.rnn.state_size])]
    if agent.critic is not agent.actor:
        size, name = agent.critic.rnn.state_size, "critic_obs" if played.rows[0]["critic_obs"] else "obs"
        ours.append((agent.critic, agent.critic_obs_spec, agent.critic_obs_rms, name, first[:, -size:]))
    features, after = [], []
    for trunk, spec, rms, name, state in ours:
        encoded = torch.stack([trunk.encoder(*agent.encode(row[name], spec, rms)) for row in played.rows])
        pair = reference_features(trunk, args, encoded, state.to(encoded.dtype), played["starts"])
        features.append(pair[0]), after.append(pair[1])
    policy = agent.head(features[0].flatten(0, 1), played["mask"].flatten(0, 1)).unflatten(0, (T, N))
    torch.testing.assert_close(policy, played["policy"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(agent.value_head(features[-1]).float(), played["values"], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat(after, 1), played.rows[-1]["after"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_no_gradient_passes_the_start_of_an_episode(path, rnn, separate):
    """H5: T = 8, N = 3, dones at (2, 0) and (5, 2); exactly 0, of the policy and of the value."""
    agent, T, N = make_agent(replace(SMALL, rnn=rnn, rnn_layers=2, separate=separate)), 8, 3
    starts, mask = torch.zeros(T, N, dtype=torch.bool), torch.ones(T * N, 9, dtype=torch.bool)
    starts[3, 0] = starts[6, 2] = True
    obs, state = torch.randn(T, N, 4, requires_grad=True), torch.randn(N, len(agent.start(1)[0][0]), requires_grad=True)
    inputs = {"obs": obs.flatten(0, 1), "previous": torch.zeros(T * N, 0)}
    policy, values, _ = agent(inputs, {}, mask, state, starts.flatten())
    policy, values = policy[:, :, :2].sum((1, 2)).view(T, N), values.view(T, N)
    for output, t, n in product((policy, values), range(T), range(N)):
        by_obs, by_state = torch.autograd.grad(output[t, n], (obs, state), retain_graph=True)
        begin = {0: 3, 2: 6}.get(n, T)
        first = begin if t >= begin else 0
        reached = by_obs.any(-1)
        assert reached[first : t + 1, n].all() and not reached[:first, n].any() and not reached[t + 1 :, n].any()
        assert not reached[:, [m for m in range(N) if m != n]].any()
        assert by_state[n].any() == (first == 0) and not by_state[[m for m in range(N) if m != n]].any()


@pytest.mark.parametrize("T, N, L", [(16, 6, 4), (12, 5, 1), (6, 1, 3), (7, 3, 7)])
def test_rows_of_sequences(T, N, L):
    """Row l * S + s of a minibatch is step l of sequence s."""
    table = torch.arange(T * N).view(T, N)
    sequences = torch.randperm(T // L * N)
    rows = sequence_rows(sequences, N, L).view(L, -1)
    for s, i in enumerate(sequences.tolist()):
        chunk, n = divmod(i, N)
        assert rows[:, s].tolist() == [table[chunk * L + step, n].item() for step in range(L)]
    assert sorted(rows.flatten().tolist()) == list(range(T * N))


# ---- what is remembered ----


@pytest.mark.parametrize("reset_on_done", [True, False])
def test_state_starts_anew_where_an_episode_ends_by_either_way(reset_on_done):
    """H20: a mask of bools, also with one env."""
    agent = make_agent(replace(SMALL, reset_on_done=reset_on_done))
    flags = torch.tensor([[False, False], [True, False], [False, True]])
    for rows in ([0, 1, 2], [1], [0]):
        terminations, truncations = flags[rows].T
        starts = agent.starts(Step(None, None, None, terminations, truncations, None, None))
        expected = [bool(i) and reset_on_done for i in rows]
        assert starts.dtype == torch.bool and starts.tolist() == expected


@pytest.mark.parametrize("rnn, tensors", [("lstm", 2), ("gru", 1)])
@pytest.mark.parametrize("changes, sizes", [
    ({}, (10, 10)), ({"critic_rnn_hidden_size": 3}, (10, 3)), ({"separate": False}, (10,)),
    ({"separate": False, "critic_rnn_hidden_size": 3}, (10,)),
    ({"rnn_layers": 3, "critic_rnn_hidden_size": 4}, (30, 12)),
])  # fmt: skip
def test_state_is_as_large_as_it_must_be(rnn, tensors, changes, sizes):
    agent = make_agent(replace(SMALL, rnn=rnn, **changes))
    state, previous = agent.start(5)
    assert state.shape == (5, tensors * sum(sizes)) and previous.shape == (5, 0) and not state.any()


@pytest.mark.parametrize("actions, action, features", [
    ("gaussian", [[0.5, -7.0]], [0.5, -7.0]), ("discrete", [[2]], [0, 0, 1, 0]),
    ("heads", [[1, 3, 0]], [0, 1, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0]),
])  # fmt: skip
def test_previous_action_and_reward_are_in_units_of_the_policy(actions, action, features):
    """A Gaussian's sample as drawn, a one-hot table, then the shaped rewards."""
    args = replace(SMALL, prev_action_reward=True, reward_scale=0.1, reward_shift=1.0, reward_max=0.7)
    agent = make_agent(args, actions=actions, value_size=2)
    previous = agent.previous(torch.tensor(action), torch.tensor([[3.0, 99.0]]))
    assert previous[0].tolist() == pytest.approx([*features, 0.4, 0.7]) and previous.dtype == torch.float32
    assert agent.start(4)[1].shape == (4, len(features) + 2) and not agent.start(4)[1].any()
    assert agent.obs_rms.mean.shape == (4 + len(features) + 2,)
    assert torch.equal(shape_rewards(torch.tensor([3.0, 99.0]), args), previous[0, -2:])
    without = make_agent(replace(args, prev_action_reward=False), actions=actions, value_size=2)
    assert without.previous(torch.tensor(action), torch.ones(1, 2)).shape == (1, 0)


def test_critic_reads_what_came_before_too():
    agent = make_agent(replace(SMALL, prev_action_reward=True), critic_space=STATE)
    obs, critic_obs = agent.observe(observe(VECTOR, 5), observe(STATE, 5), torch.ones(5, 13))
    assert torch.equal(obs["previous"], critic_obs["previous"]) and agent.critic_obs_rms.mean.shape == (5 + 12 + 13,)
    same = observe(VECTOR, 5)
    obs, critic_obs = make_agent().observe(same, same, torch.ones(5, 0))
    assert obs.keys() == {"obs", "previous"} and critic_obs == {}


# ---- policies ----


def test_gaussian_head_equals_torch_distributions():
    torch.manual_seed(2)
    head = GaussianHead(6, replace(SMALL, initializer="default"), [-1.0, 0.0, -math.inf], [1.0, 5.0, math.inf])
    head.log_sigma.data = torch.tensor([-0.5, 0.3, -2.0])
    policies = [head(5 * torch.randn(50, 6), torch.zeros(50, 0, dtype=torch.bool)).double() for _ in range(2)]
    p, q = (Independent(Normal(policy[:, :3], policy[:, 3:].exp()), 1) for policy in policies)
    torch.testing.assert_close(policies[0][0, 3:].float(), head.log_sigma)
    actions = torch.randn(50, 3, dtype=torch.float64)
    torch.testing.assert_close(head.logprob(policies[0], actions), p.log_prob(actions))
    torch.testing.assert_close(head.entropy(policies[0]), p.entropy())
    torch.testing.assert_close(head.kl(*policies), kl_divergence(p, q))
    assert not head.kl(policies[0], policies[0]).any() and torch.equal(head.mode(policies[0]), p.mean)
    noise = head.noise(20_000)
    assert noise.shape == (20_000, 3) and abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.02
    sample = head.sample(policies[0][:1].float(), noise)
    torch.testing.assert_close(
        (sample.mean(0), sample.std(0)), (p.mean[0].float(), p.stddev[0].float()), rtol=0.1, atol=0.03
    )
    beyond = torch.tensor([[3.1, 0.0, 99.0], [-1.0, -1.6, 0.0]])
    policy = torch.cat([beyond, torch.zeros(2, 3)], 1)
    assert head.bounds_loss(policy).tolist() == pytest.approx([4.0, 0.25])
    assert head.to_env(beyond).tolist() == [[1.0, 2.5, 99.0], [-1.0, 0.0, 0.0]]
    assert head.has_choice(torch.zeros(7, 0, dtype=torch.bool)).tolist() == [True] * 7


def test_categorical_head_equals_scalar_loops():
    sizes, M, generator = [2, 5, 1, 3], 30, torch.Generator().manual_seed(1)
    head, logits = CategoricalHead(6, SMALL, sizes, True), 3 * torch.randn(2, M, 4, 5, generator=generator)
    mask = random_mask(generator, M, sizes)

    def table(logits, mask=mask):
        head.logits.forward = lambda features: logits.flatten(1)
        return head(torch.zeros(len(logits), 6), mask)

    tables = table(logits[0]), table(logits[1])
    rows = [[scalar_tables([x[d, :s].tolist() for d, s in enumerate(sizes)], m.tolist(), sizes)
             for x, m in zip(logit.double(), mask, strict=True)] for logit in logits]  # fmt: skip
    actions = head.sample(tables[0], head.noise(M))
    for i, (row0, row1) in enumerate(zip(*rows, strict=True)):
        pairs = [(part0[j], part1[j]) for part0, part1 in zip(row0, row1, strict=True) for j in part0]
        entropy, kl = -sum(math.exp(a) * a for a, _ in pairs), sum(math.exp(a) * (a - b) for a, b in pairs)
        assert head.entropy(tables[0])[i].item() == pytest.approx(entropy, abs=1e-5)
        assert head.kl(*tables)[i].item() == pytest.approx(kl, rel=1e-4, abs=1e-5)
        logprob = sum(part[j] for part, j in zip(row0, actions[i].tolist(), strict=True))  # all of them are allowed
        assert head.logprob(tables[0], actions)[i].item() == pytest.approx(logprob, abs=1e-5)
        assert head.mode(tables[0])[i].tolist() == [max(part, key=part.get) for part in row0]
    assert head.has_choice(mask).all() and not head.bounds_loss(tables[0]).any()
    stuck = mask.clone()
    stuck[3], stuck[4, 2:7] = False, False
    assert head.has_choice(stuck).tolist() == [i not in (3, 4) for i in range(M)]
    certain = table(logits[0], stuck).exp()
    assert certain[3, :, 0].tolist() == [1] * 4 and certain[4, 1].tolist() == [1, 0, 0, 0, 0]
    single = CategoricalHead(6, SMALL, [4], False)
    assert single.to_env(torch.tensor([[3], [0]])).tolist() == [3, 0]
    assert head.to_env(torch.tensor([[1, 4, 0, 2]])).tolist() == [[1, 4, 0, 2]]


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("separate", [True, False])
def test_act_follows_the_mask_and_carries_the_state(actions, separate):
    """As a rollout does, with the actor's state or that of both."""
    agent, N = make_agent(replace(SMALL, separate=separate, prev_action_reward=True), actions=actions), 60
    sizes = agent.head.is_action.sum(1).tolist() if actions != "gaussian" else []
    state, previous = agent.start(N)
    whole = state
    for t in range(4):
        obs = {"obs": torch.randn(N, 4), "previous": previous}
        mask = random_mask(torch.Generator().manual_seed(t), N, sizes) if sizes else torch.zeros(N, 0, dtype=torch.bool)
        policy, _, states = agent(obs, {}, mask, whole, agent.no_starts(whole))
        best, state_after = agent.act(obs, state, True, mask)
        assert torch.equal(best, agent.head.mode(policy)) and torch.equal(state_after, states[0])
        drawn, same = agent.act(obs, state, False, mask)
        assert torch.equal(same, state_after) and not torch.equal(drawn, best) and not same.requires_grad
        for chosen in (best, drawn) if sizes else ():
            for action, allowed in zip(chosen.T, mask.split(sizes, 1), strict=True):
                assert allowed.gather(1, action[:, None]).all()
        free = torch.ones_like(mask)
        assert torch.equal(
            agent.act(obs, state)[0], agent.head.mode(agent(obs, {}, free, whole, agent.no_starts(whole))[0])
        )
        state, whole, previous = state_after, torch.cat(states, 1), agent.previous(drawn, torch.randn(N, 1))


# ---- the loss ----


class Plays:
    """Stands in for an Agent: its outputs are given."""

    def __init__(self, head, policy, values, extra=None):
        self.head, self.outputs, self.extra = head, (policy, values, None), extra or {}

    def __call__(self, *inputs):
        return self.outputs

    def extra_losses(self, obs):
        return self.extra


REST = {"critic_obs": {}, "state": torch.zeros(1, 2), "episode_starts": torch.zeros(1, dtype=torch.bool)}
LOSSES = pytest.mark.parametrize("changes", [
    {}, {"clip_vloss": True}, {"ent_coef": 0.3}, {"smooth_clamp": True, "bounds_loss_coef": 2.0},
    {"vf_coef": 3.0, "clip_coef": 0.05, "clip_vloss": True, "ent_coef": -0.1, "bounds_loss_coef": 0.5},
])  # fmt: skip


def same_loss(ours, theirs, own_leaves, their_leaves, names):
    """Loss, metrics by name, and the gradient by each leaf."""
    (loss, metrics), (expected, expected_metrics) = ours, theirs
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
    for name in names:
        i, j = METRICS.index(name), names.index(name)
        torch.testing.assert_close(metrics[i], expected_metrics[j], rtol=1e-6, atol=1e-9)
    gradients = torch.autograd.grad(loss, own_leaves), torch.autograd.grad(expected, their_leaves)
    for gradient, other in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-12)
        assert gradient.any()


@LOSSES
def test_loss_is_that_of_ppo_discrete(changes):
    """Which its own tests compare with a scalar loop; rows without a choice among them."""
    args, sizes = replace(SMALL, **changes), (2, 4, 3)
    logits, values, allowed, batch, _ = categorical_case(
        replace(ppo_discrete.Args(), **{"clip_vloss": True}), sizes, M=24
    )
    ours, theirs = ([x.clone().requires_grad_() for x in (logits, values)] for _ in range(2))
    policy = torch.where(allowed, ours[0], FORBIDDEN).log_softmax(-1)
    plays = Plays(CategoricalHead(2, args, list(sizes), True), policy, ours[1])
    other_args = ppo_discrete.Args(**{k: v for k, v in changes.items() if k != "bounds_loss_coef"} | {
        k: getattr(args, k) for k in ("clip_coef", "vf_coef", "clip_vloss", "smooth_clamp")})  # fmt: skip
    coef = torch.tensor(args.ent_coef, dtype=torch.float64)
    expected = ppo_discrete.ppo_loss(CategoricalOutputs(*theirs, allowed), other_args, coef, **batch)
    names = ppo_discrete.METRICS
    same_loss(ppo_loss(plays, args, **batch | REST), expected, ours, theirs, names)
    assert expected[1][names.index("clipfrac")] > 0 and (batch["weights"] == 0).any()


@LOSSES
def test_loss_is_that_of_ppo_continuous(changes):
    args, generator, M, A, V = replace(SMALL, **changes), torch.Generator().manual_seed(3), 40, 2, 2

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    outputs = [2 * normal(M, A), 0.3 * normal(M, A), normal(M, V)]
    batch = {"obs": normal(M, 1), "actions": outputs[0] + 0.5 * normal(M, A), "advantages": normal(M),
             "targets": normal(M, V), "old_values": outputs[2] + 0.3 * normal(M, V)}  # fmt: skip
    old = [outputs[0] + 0.2 * normal(M, A), outputs[1] + 0.1 * normal(M, A)]
    ours, theirs = ([x.clone().requires_grad_() for x in outputs] for _ in range(2))
    plays = Plays(GaussianHead(2, args, [-1.0, -1.0], [1.0, 1.0]), torch.cat(ours[:2], 1), ours[2])
    fields = ("clip_coef", "vf_coef", "clip_vloss", "smooth_clamp", "ent_coef", "bounds_loss_coef")
    other_args = ppo_continuous.Args(**{name: getattr(args, name) for name in fields})
    expected = ppo_continuous.ppo_loss(GaussianOutputs(*theirs), other_args, critic_obs=batch["obs"], old_mean=old[0],
                                       old_log_sigma=old[1], **batch)  # fmt: skip
    rest = REST | {"action_mask": torch.zeros(M, 0, dtype=torch.bool), "old_policy": torch.cat(old, 1)}
    result = ppo_loss(plays, args, **batch | rest, weights=torch.ones(M, dtype=torch.float64))
    same_loss(result, expected, ours, theirs, ppo_continuous.METRICS)
    assert result[1][METRICS.index("bounds_loss")] > 0 and not result[1].requires_grad
    weights = torch.tensor([2.0, 0.0] * (M // 2), dtype=torch.float64)
    half = ppo_loss(plays, args, **batch | rest, weights=weights)[1]
    rows = {key: x[::2] for key, x in (batch | rest).items() if key not in REST} | REST
    plays.outputs = plays.outputs[0][::2], plays.outputs[1][::2], None
    torch.testing.assert_close(half, ppo_loss(plays, args, **rows, weights=torch.ones(M // 2, dtype=torch.float64))[1])


def test_extra_losses_are_added_and_are_the_last_metrics():
    args = replace(SMALL, vf_coef=0.5)
    logits, values, allowed, batch, _ = categorical_case(ppo_discrete.Args(), (2, 3))
    policy, head = torch.where(allowed, logits, FORBIDDEN).log_softmax(-1), CategoricalHead(2, args, [2, 3], True)
    extra = {"a": torch.tensor(5.0), "b": torch.tensor(-2.0)}
    loss, metrics = ppo_loss(Plays(head, policy, values), args, **batch | REST)
    more, longer = ppo_loss(Plays(head, policy, values, extra), args, **batch | REST)
    assert (more - loss).item() == pytest.approx(3.0) and longer[len(METRICS) :].tolist() == [5, -2]
    assert torch.equal(longer[: len(METRICS)], metrics)


# ---- parameters ----


@pytest.mark.parametrize("actions", ["gaussian", "heads"])
@pytest.mark.parametrize(
    "changes, critic_space", [({}, None), ({"separate": False}, None), ({"separate": False}, STATE)]
)
def test_optimizer_holds_each_parameter_once_and_the_critic_has_its_own_rate(actions, changes, critic_space):
    args = replace(SMALL, critic_learning_rate=7e-4, rnn_layer_norm=True, **changes)
    agent = make_agent(args, actions=actions, critic_space=critic_space)
    groups = make_optimizer(agent, args, None).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in agent.parameters())
    assert [round(float(group["lr"]), 6) for group in groups] == [3e-4, 7e-4]
    own = agent.critic is not agent.actor
    expected = [*agent.value_head.parameters(), *(agent.critic.parameters() if own else ())]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in expected}


def test_critic_state_does_not_reach_the_actor():
    """H32: with memories of their own, of their own sizes."""
    agent, L, S = make_agent(replace(SMALL, critic_rnn_hidden_size=3), critic_space=STATE), 4, 5
    state = torch.randn(S, 26, requires_grad=True)
    obs, critic_obs = agent.observe(observe(VECTOR, L * S), observe(STATE, L * S), torch.zeros(L * S, 0))
    inputs = obs, critic_obs, torch.ones(L * S, 9, dtype=torch.bool), state, torch.zeros(L * S, dtype=torch.bool)
    policy, values, _ = agent(*inputs)
    by_policy = torch.autograd.grad(policy[:, 0, 0].sum(), state, retain_graph=True)[0]
    assert by_policy[:, :20].all() and not by_policy[:, 20:].any()
    by_values = torch.autograd.grad(values.sum(), [state, *agent.actor.parameters()], allow_unused=True)
    assert (
        by_values[0][:, 20:].all() and not by_values[0][:, :20].any() and not any(x is not None for x in by_values[1:])
    )


@pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)
def test_every_parameter_gets_a_gradient(changes):
    """torch.autograd.grad in the update refuses parameters that nothing depends on."""
    agent = make_agent(replace(SMALL, **changes))
    previous = torch.randn(12, agent.start(1)[1].shape[1])
    state = torch.randn(3, agent.start(1)[0].shape[1])
    inputs = {"obs": torch.randn(12, 4), "previous": previous}
    policy, values, _ = agent(inputs, {}, torch.ones(12, 9, dtype=torch.bool), state, torch.rand(12) < 0.2)
    gradients = torch.autograd.grad(
        (policy[:, :, :2] * torch.randn(12, 3, 2)).sum() + (values**2).sum(), [*agent.parameters()]
    )
    assert all(gradient.any() for gradient in gradients)


# ---- what is refused ----


@pytest.mark.parametrize("changes, words", [
    ({"seq_length": 3}, ["--seq-length 3", "num_steps = 8", "2 and 4"]),
    ({"seq_length": 16}, ["--seq-length 16", "num_steps = 8"]),
    ({"seq_length": 0}, ["--seq-length 0", "at least 1"]),
    ({"num_minibatches": 4}, ["--num-minibatches 4", "num_envs*num_steps/seq_length = 6", "3 and 6"]),
    ({"num_minibatches": 12}, ["--num-minibatches 12", "= 6"]),
    ({"rnn_before_mlp": True, "rnn_concat_input": True}, ["--rnn-concat-input", "--rnn-before-mlp"]),
    ({"encoder": "conv1d", "prev_action_reward": True}, ["--prev-action-reward", "conv1d"]),
    ({"ent_coef": math.inf}, ["--ent-coef inf", "finite"]), ({"gamma": 1.5}, ["--gamma 1.5", "at most 1"]),
    ({"impala_depths": ()}, ["--impala-depths ()", "at least one"]), ({"hidden_sizes": ()}, ["--hidden-sizes ()"]),
    ({"critic_hidden_sizes": (8, 0)}, ["--critic-hidden-sizes (8, 0)"]), ({"clip_coef": 0.0}, ["--clip-coef 0.0"]),
    ({"min_lr": 1.0}, ["--min-lr 1.0", "--max-lr"]), ({"reward_log": True}, ["--reward-log", "--reward-min"]),
    ({"learning_rate": 0.1, "lr_schedule": "adaptive"}, ["--learning-rate 0.1", "--max-lr"]),
    ({"reward_min": 1.0, "reward_max": 1.0}, ["--reward-min 1.0", "--reward-max 1.0"]),
    ({"play": True}, ["--checkpoint"]),
    *[({name: 0}, [f"--{name.replace('_', '-')} 0", "at least 1"]) for name in
      ("rnn_hidden_size", "critic_rnn_hidden_size", "rnn_layers", "num_envs", "num_steps", "num_minibatches",
       "update_epochs", "num_episodes", "games_to_track", "total_timesteps")],
    *[({name: -1}, [f"--{name.replace('_', '-')} -1"]) for name in
      ("seed", "torch_threads", "save_interval", "save_best_after", "eval_interval", "learning_rate", "vf_coef",
       "critic_learning_rate", "min_lr", "weight_decay", "bounds_loss_coef", "gae_lambda", "max_grad_norm",
       "kl_threshold")],
])  # fmt: skip
def test_what_args_refuse(changes, words):
    with pytest.raises(InputError) as error:
        replace(SMALL, **changes)
    text = str(error.value)
    assert all(word in text for word in words) and "\n" not in text


def test_sizes_of_a_training_do_not_bind_an_evaluation():
    replace(SMALL, play=True, checkpoint="x", num_envs=7, num_steps=13)


@pytest.mark.parametrize("key", ["vector", "picture"])
def test_parts_of_an_observation_keep_their_names(key):
    """Nothing of an environment is overwritten by what came before."""
    space = spaces.Dict({"previous" if name == key else name: part for name, part in BOTH.items()})
    with pytest.raises(InputError, match="toy has a part of its observation named previous"):
        agent_kwargs(toy(space), SMALL)
    with pytest.raises(InputError, match="named previous"):
        agent_kwargs(toy(critic_space=space), SMALL)


@pytest.mark.parametrize("encoder, space, words", [
    ("nature_cnn", VECTOR, ["--encoder nature_cnn", "no images"]), ("impala", VECTOR, ["no images"]),
    ("nature_cnn", TINY, ["--encoder nature_cnn", "7 pixels", "36", "impala"]),
    ("conv1d", PICTURE, ["--encoder conv1d", "images"]), ("conv1d", BOTH, ["images or several parts"]),
])  # fmt: skip
def test_what_encoders_refuse(encoder, space, words):
    with pytest.raises(InputError) as error:
        agent_kwargs(toy(space), replace(SMALL, encoder=encoder))
    text = str(error.value)
    assert all(word in text for word in [*words, "toy"]) and "\n" not in text


def test_spec_of_an_environment():
    kwargs = agent_kwargs(toy(BOTH, "gaussian", STATE, 2), replace(SMALL, prev_action_reward=True))
    assert kwargs["action_spec"] == {"low": [-1, -2], "high": [3, 2]} and kwargs["value_size"] == 2
    assert kwargs["obs_spec"]["encoder"] == "nature_cnn" and kwargs["critic_obs_spec"]["encoder"] == "mlp"
    assert kwargs["obs_spec"]["vectors"] == {"vector": 4, "previous": 4}
    assert kwargs["critic_obs_spec"]["vectors"] == {"a": 5, "map": 12, "previous": 4}
    kwargs = agent_kwargs(toy(actions="discrete"), SMALL)
    assert kwargs["action_spec"] == {"sizes": [4], "multi_discrete": False} and kwargs["critic_obs_spec"] is None
    assert kwargs["obs_spec"]["vectors"] == {"obs": 4, "previous": 0}
    assert parts(torch.ones(2)).keys() == {"obs"}
