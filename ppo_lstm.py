"""PPO with memory: LSTM and GRU policies for continuous and discrete actions, vectors and pixels.

    python ppo_lstm.py --env-id CartPole --mask-obs 1 3                         # without velocities: it must remember
    torchrun --nproc-per-node 4 ppo_lstm.py --env-id Pong --num-envs 16         # num_envs is per rank
    python ppo_lstm.py --play --checkpoint runs/NAME/last.pt                    # evaluate what was trained

ppo_continuous.py and ppo_discrete.py with recurrent layers, trained by truncated backpropagation through time on
sequences of seq_length steps, each from the state that the rollout had there.
Schulman et al. 2017, https://arxiv.org/abs/1707.06347; LSTM: https://doi.org/10.1162/neco.1997.9.8.1735; GRU:
https://arxiv.org/abs/1406.1078.
Shapes: T num_steps, N num_envs, B = T*N; L seq_length, S = B/L/num_minibatches sequences and M = L*S rows of a
minibatch, step by step (row l*S + s is step l of sequence s); F numbers of recurrent state; V reward heads. A Gaussian
policy has A dimensions; a discrete one D sub-actions with K actions in all, padded to the largest, P: a table [D, P].
"""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from common import checkpoint, cli, distributed
from common import envs as vecenvs
from common.compile import TorchThreads, compile_pure, cuda_graph
from common.envs.base import Observation, Step, VecEnv
from common.errors import InputError, check_divides, check_finite, check_numbers, check_positive, check_range
from common.logger import EpisodeStats, explained_variance, import_wandb
from common.run import Run
from common.running_mean_std import RunningMeanStd

SCRIPT = "ppo_lstm"
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "bounds_loss", "grad_norm", "nonfinite")
KL, GRAD_NORM, NONFINITE = METRICS.index("approx_kl"), METRICS.index("grad_norm"), METRICS.index("nonfinite")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU,
               "softplus": nn.Softplus}  # fmt: skip
NETWORK_ARGS = ("encoder", "impala_depths", "hidden_sizes", "critic_hidden_sizes", "separate", "activation", "d2rl",
                "layer_norm", "rnn", "rnn_hidden_size", "critic_rnn_hidden_size", "rnn_layers", "rnn_before_mlp",
                "rnn_concat_input", "rnn_concat_output", "rnn_layer_norm", "prev_action_reward", "reset_on_done",
                "norm_obs", "norm_value", "mask_obs")  # fmt: skip
LOG_SIGMA_BOUNDS = (-5.0, 2.0)  # approached smoothly and never reached
OBS_CLIP = 10.0  # standard deviations
MAX_EVAL_LENGTH = 200_000  # steps of one episode, beyond which an evaluation gives up
FORBIDDEN = -1e30  # logit of an action that is not allowed: its probability is exactly 0, and 0 * FORBIDDEN is finite


@dataclass(frozen=True)
class Args:
    # ---- run ----
    env_id: str = "CartPole"
    """environment: a bare name (Ant is the newest Ant-vN), envpool/..., gym/... or gym/module:Name-v0"""
    env_kwargs: tuple[str, ...] = ()
    """options of the environment as name=value, for example use_contact_force=False"""
    mask_obs: tuple[int, ...] = ()
    """entries of a vector observation that are set to 0, for example 1 3: the velocities of CartPole"""
    seed: int = 1
    """base seed of weights, noise and environments; ranks and resumed runs derive their own from it"""
    device: str = "auto"
    """torch device of policy and storage: auto (a GPU where there is one), cpu, cuda, cuda:1"""
    compile: bool | None = None
    """torch.compile the pure functions and, on a GPU, replay gradient steps as a CUDA graph; unset: on a GPU only"""
    torch_threads: int = 0
    """CPU threads of torch; 0: one in the rollout, as many as measure fastest in the update"""
    run_name: str | None = None
    """results go to runs/RUN_NAME; unset: made of environment, seed and time"""
    resume: str | None = None
    """checkpoint to continue from; auto: the newest one of RUN_NAME, or a fresh start if there is none"""
    track: bool = False
    """mirror the metrics to Weights & Biases"""
    # ---- play ----
    play: bool = False
    """evaluate CHECKPOINT instead of training, and print one JSON line"""
    checkpoint: str | None = None
    """checkpoint that --play evaluates"""
    deterministic: bool = True
    """evaluate the most probable action (a Gaussian's mean) instead of a sample"""
    num_episodes: int = 100
    """episodes of an evaluation, the same number in every environment copy"""
    # ---- run control ----
    total_timesteps: int = 500_000
    """env transitions to train for, summed over environments and ranks"""
    score_to_win: float = math.inf
    """stop when the mean return of the last games_to_track episodes reaches this"""
    games_to_track: int = 100
    """last episodes whose mean return is logged and decides best.pt, rounded up to the same number from each env"""
    save_best_after: int = 0
    """env transitions before best.pt is first written"""
    save_interval: int = 0
    """iterations between numbered checkpoints; 0: none (last.pt is written all the same)"""
    eval_interval: int = 0
    """iterations between evaluations over num_episodes; 0: none. With it, evaluations decide best.pt"""
    # ---- rollout ----
    num_envs: int = 64
    """parallel environments per rank (N)"""
    num_steps: int = 32
    """environment steps between updates (T)"""
    seq_length: int = 16
    """steps of a training sequence, the reach of backpropagation through time (L); must divide num_steps"""
    gamma: float = 0.99
    """discount per environment step"""
    gae_lambda: float = 0.95
    """decay of the weight of later TD errors in the advantage"""
    reward_shift: float = 0.0
    """added to the reward before scaling (training only; logged returns are raw)"""
    reward_scale: float = 1.0
    """factor on the shifted reward"""
    reward_min: float = -math.inf
    """lower bound of the shaped reward"""
    reward_max: float = math.inf
    """upper bound of the shaped reward"""
    reward_log: bool = False
    """take the natural logarithm of the shaped reward, which must be positive (set reward_min)"""
    # ---- network ----
    encoder: Literal["auto", "mlp", "nature_cnn", "impala", "conv1d"] = "auto"
    """what images (conv1d: vectors) pass before the hidden layers; auto: nature_cnn from 36 pixels on, else mlp"""
    impala_depths: tuple[int, ...] = (16, 32, 32)
    """channels of the impala encoder's residual stages, each of which halves the image"""
    hidden_sizes: tuple[int, ...] = (64, 64)
    """units of the hidden layers"""
    critic_hidden_sizes: tuple[int, ...] | None = None
    """units of the critic's hidden layers; unset: as hidden_sizes"""
    separate: bool = True
    """actor and critic do not share their hidden layers (always so where the critic has its own observations)"""
    activation: Literal["elu", "relu", "tanh", "silu", "gelu", "selu", "softplus"] = "elu"
    """nonlinearity after each hidden layer"""
    initializer: Literal["default", "orthogonal", "glorot", "variance_scaling"] = "orthogonal"
    """initial weights of the hidden layers; all but default also start the policy's output near zero"""
    d2rl: bool = False
    """concatenate the input to every hidden layer's input, https://arxiv.org/abs/2010.09163"""
    layer_norm: bool = False
    """layer normalisation after each hidden linear layer"""
    rnn: Literal["lstm", "gru"] = "lstm"
    """recurrent layers"""
    rnn_hidden_size: int = 64
    """units of each recurrent layer"""
    critic_rnn_hidden_size: int | None = None
    """units of each recurrent layer of the critic; unset: as rnn_hidden_size"""
    rnn_layers: int = 1
    """recurrent layers on top of each other"""
    rnn_before_mlp: bool = False
    """the hidden layers read the recurrent layers, not the other way round"""
    rnn_concat_input: bool = False
    """the recurrent layers read the encoded observation beside the hidden layers' output"""
    rnn_concat_output: bool = False
    """what reads the recurrent layers reads the encoded observation too"""
    rnn_layer_norm: bool = False
    """layer normalisation of the recurrent layers' output"""
    prev_action_reward: bool = False
    """the previous action and its shaped reward are part of the observation"""
    reset_on_done: bool = True
    """the state is 0 at the start of an episode; off: it is kept from one episode to the next"""
    log_sigma_init: float = -0.7
    """initial log standard deviation of the policy, in units of the normalised action [-1, 1]"""
    norm_obs: bool = True
    """normalise observations by running statistics"""
    norm_value: bool = True
    """learn values in units of the running standard deviation of returns"""
    norm_adv: bool = True
    """normalise advantages over the whole batch of all ranks"""
    # ---- optimisation ----
    learning_rate: float = 1e-3
    """initial step size of Adam"""
    critic_learning_rate: float | None = None
    """initial step size of the critic; unset: as learning_rate. The schedule moves both"""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "linear"
    """linear: to zero over total_timesteps; adaptive: keep the KL between kl_threshold/2 and 2*kl_threshold"""
    kl_threshold: float = 0.01
    """KL from the rollout policy in nats that the adaptive schedule aims for"""
    kl_interval: Literal["minibatch", "epoch"] = "minibatch"
    """how often the adaptive schedule acts"""
    min_lr: float = 1e-6
    """lower end of the adaptive learning rate"""
    max_lr: float = 1e-3
    """upper end of the adaptive learning rate"""
    update_epochs: int = 4
    """passes over each batch"""
    num_minibatches: int = 4
    """gradient steps per pass; must divide num_envs*num_steps"""
    clip_coef: float = 0.2
    """ratio clipping range"""
    smooth_clamp: bool = False
    """bound the ratio by a logistic curve instead of a hard clamp"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef (standard deviations of the return with norm_value)"""
    vf_coef: float = 1.0
    """weight of the value loss, 0.5 * squared error"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    bounds_loss_coef: float = 0.0
    """weight of the bounds loss"""
    max_grad_norm: float = 1.0
    """gradient norm over all parameters is clipped to this"""
    weight_decay: float = 0.0
    """L2 penalty of Adam"""

    def __post_init__(self):
        check_numbers(self, may_be_infinite="score_to_win reward_min reward_max")
        check_range(self, 1, math.inf, "num_envs num_steps seq_length num_minibatches update_epochs num_episodes "
                                       "games_to_track total_timesteps rnn_hidden_size critic_rnn_hidden_size "
                                       "rnn_layers")  # fmt: skip
        check_range(self, 0, 2**63 - 1, "seed")
        check_range(self, 0, math.inf, "torch_threads save_interval save_best_after eval_interval learning_rate "
                                       "critic_learning_rate min_lr vf_coef weight_decay bounds_loss_coef")  # fmt: skip
        check_range(self, 0, 1, "gamma gae_lambda")
        check_positive(self, "clip_coef max_grad_norm kl_threshold")
        if not self.play:
            check_divides("seq_length", self.seq_length, self.num_steps, "num_steps")
            sequences = self.num_envs * self.num_steps // self.seq_length
            check_divides("num_minibatches", self.num_minibatches, sequences, "num_envs*num_steps/seq_length")
        if self.rnn_before_mlp and self.rnn_concat_input:
            raise InputError("--rnn-concat-input: with --rnn-before-mlp the recurrent layers read nothing else anyway")
        if self.encoder == "conv1d" and self.prev_action_reward:
            raise InputError("--prev-action-reward: --encoder conv1d reads one vector and nothing beside it; use mlp")
        for name, sizes in (("", self.hidden_sizes), ("critic-", self.critic_hidden_sizes)):
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise InputError(f"--{name}hidden-sizes {sizes}: at least one layer, each of at least 1 unit")
        if not self.impala_depths or min(self.impala_depths) < 1:
            raise InputError(f"--impala-depths {self.impala_depths}: at least one stage, each of at least 1 channel")
        if not self.min_lr < self.max_lr:
            raise InputError(f"--min-lr {self.min_lr}: must be less than --max-lr {self.max_lr}")
        lrs = learning_rates(self)
        if self.lr_schedule == "adaptive" and not all(self.min_lr <= lr <= self.max_lr for lr in lrs):
            raise InputError(f"--learning-rate {lrs[0]} (critic: {lrs[1]}): the adaptive schedule is between --min-lr "
                             f"{self.min_lr} and --max-lr {self.max_lr}; move these or use another")  # fmt: skip
        if not self.reward_min < self.reward_max:
            raise InputError(f"--reward-min {self.reward_min}: must be less than --reward-max {self.reward_max}")
        if self.reward_log and self.reward_min <= 0:
            raise InputError(f"--reward-log needs a positive --reward-min, not {self.reward_min}")
        if self.play and not self.checkpoint:
            raise InputError("--play needs --checkpoint PATH, for example runs/NAME/last.pt")
        if self.checkpoint and not self.play:
            raise InputError(f"--checkpoint {self.checkpoint} is what --play evaluates; to continue a run use --resume")


class MLP(nn.Module):
    """Hidden layers [.., n_in] -> [.., sizes[-1]]; with d2rl each but the first also reads the input."""

    def __init__(self, n_in: int, sizes: tuple[int, ...], args: Args):
        super().__init__()
        self.d2rl, self.layers, width = args.d2rl, nn.ModuleList(), n_in
        for i, size in enumerate(sizes):
            linear = initialize(nn.Linear(width + (n_in if args.d2rl and i else 0), size), args.initializer)
            norm = [nn.LayerNorm(size)] if args.layer_norm else []
            self.layers.append(nn.Sequential(linear, *norm, ACTIVATIONS[args.activation]()))
            width = size
        self.out_features = width

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for i, layer in enumerate(self.layers):
            h = layer(torch.cat([h, x], -1) if self.d2rl and i else h)
        return h


def initialize(layer: nn.Module, name: str, gain: float = 2**0.5) -> nn.Module:
    """Weights by name and a zero bias (default: torch's own of both); gain scales the weights' standard deviation."""
    if name == "orthogonal":
        nn.init.orthogonal_(layer.weight, gain)
    elif name == "glorot":
        nn.init.xavier_uniform_(layer.weight, gain)
    elif name == "variance_scaling":
        std = gain / layer.weight[0].numel() ** 0.5
        nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if name != "default":
        nn.init.zeros_(layer.bias)
    return layer


class ResidualBlock(nn.Module):
    """Two convolutions beside a skip connection, https://arxiv.org/abs/1802.01561 figure 3."""

    def __init__(self, channels: int, args: Args):
        super().__init__()
        activation = ACTIVATIONS[args.activation]
        convs = [initialize(nn.Conv2d(channels, channels, 3, padding=1), args.initializer) for _ in range(2)]
        self.residual = nn.Sequential(activation(), convs[0], activation(), convs[1])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(x)


def image_encoder(name: str, channels: int, args: Args) -> nn.Sequential:
    """Images [M, channels, H, W] in [0, 1] to features [M, ..], by name: nature_cnn or impala."""
    activation, layers = ACTIVATIONS[args.activation], []
    if name == "nature_cnn":  # https://www.nature.com/articles/nature14236, table "model architecture"
        for out, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layers += [initialize(nn.Conv2d(channels, out, kernel, stride), args.initializer), activation()]
            channels = out
        return nn.Sequential(*layers, nn.Flatten())
    for out in args.impala_depths:
        layers += [initialize(nn.Conv2d(channels, out, 3, padding=1), args.initializer), nn.MaxPool2d(3, 2, padding=1)]
        layers += [ResidualBlock(out, args), ResidualBlock(out, args)]
        channels = out
    return nn.Sequential(*layers, activation(), nn.Flatten())


class Encoder(nn.Module):
    """Images and one vector to features [M, out_features]: convolutions where the spec asks for them, else as it is."""

    def __init__(self, spec: dict, args: Args):
        super().__init__()
        shapes, self.sequence = spec["images"].values(), spec["sequence"]
        self.convs = nn.ModuleList(image_encoder(spec["encoder"], shape[0], args) for shape in shapes)
        self.out_features = sum(spec["vectors"].values())
        for conv, shape in zip(self.convs, shapes, strict=True):
            self.out_features += conv(torch.zeros(1, *shape)).shape[1]
        if self.sequence:
            length, channels = self.sequence
            convs = [initialize(nn.Conv1d(n, 64, 3, padding=1), args.initializer) for n in (channels, 64)]
            activation = ACTIVATIONS[args.activation]
            self.conv1d = nn.Sequential(convs[0], activation(), convs[1], activation(), nn.Flatten())
            self.out_features = 64 * length

    def forward(self, images: list[Tensor], vector: Tensor) -> Tensor:
        if self.sequence:
            vector = self.conv1d(vector.view(-1, *self.sequence).transpose(1, 2))
        return torch.cat([*(conv(image) for conv, image in zip(self.convs, images, strict=True)), vector], -1)


class RNN(nn.Module):
    """LSTM or GRU layers; the weights are torch's, in torch's order of gates.

    The state [.., F] is the layers' one after another: h and c of an LSTM, h of a GRU.
    """

    def __init__(self, n_in: int, size: int, args: Args):
        super().__init__()
        self.size, self.lstm = size, args.rnn == "lstm"
        cell = nn.LSTMCell if self.lstm else nn.GRUCell
        self.cells = nn.ModuleList(cell(size if i else n_in, size) for i in range(args.rnn_layers))
        self.state_size = args.rnn_layers * size * (2 if self.lstm else 1)
        for cell in self.cells if args.initializer != "default" else ():
            for weight in cell.parameters():
                nn.init.orthogonal_(weight) if weight.dim() > 1 else nn.init.zeros_(weight)
            # Units first forget over 1 to seq_length steps: https://arxiv.org/abs/1804.11188 eq. 16, for one gate.
            cell.bias_ih.data[size : 2 * size] = torch.linspace(1, args.seq_length, size).log()

    def forward(self, x: Tensor, state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [M, I] and episode_starts [M] of S sequences, step by step, from state [S, F] -> [M, H], state after them.

        Of several steps on a CPU the state after them is not known.
        """
        starts = episode_starts.view(-1, len(state))
        if len(starts) > 1 and x.device.type == "cpu":
            return self.fused(x, state, starts), None
        return self.loop(x, state, starts)

    def loop(self, x: Tensor, state: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Step by step: of fixed shapes, so that it compiles to a few kernels and a CUDA graph can record it."""
        keep, after = (~starts).to(x.dtype)[..., None], []
        for cell, layer in zip(self.cells, state.chunk(len(self.cells), -1), strict=True):
            tensors, outputs = layer.split(self.size, -1), []
            inputs = functional.linear(x, cell.weight_ih, cell.bias_ih)  # of all steps at once
            for inputs_t, keep_t in zip(inputs.view(*starts.shape, -1), keep, strict=True):
                step = lstm_step if self.lstm else gru_step
                tensors = step(cell, inputs_t, *(tensor * keep_t for tensor in tensors))
                outputs.append(tensors[0])
            x = torch.cat(outputs)
            after += tensors
        return x, torch.cat(after, -1)

    @torch.enable_grad()  # without gradients it would be another kernel, which rounds differently
    def fused(self, x: Tensor, state: Tensor, starts: Tensor) -> Tensor:
        """The outputs of loop, by torch's own kernel: each piece of a sequence between two resets is one column.

        The longest come first. A call ends where half of its pieces have, the longer ones go on in the next call: so
        little is padding. On a CPU several times as fast; a GPU would have to wait until the lengths are known.
        """
        (L, S), layers = starts.shape, len(self.cells)
        step = torch.arange(L)[:, None]
        begins = torch.cat([torch.ones_like(starts[:1]), starts[1:]])
        piece = begins.T.flatten().cumsum(0).view(S, L).T - 1  # [L, S], the piece that a row is of
        place = step - torch.where(begins, step, 0).cummax(0).values  # [L, S], steps since it began
        lengths, order = piece.flatten().bincount().sort(descending=True)
        column, calls, lasting, done = order.argsort()[piece], [], lengths.tolist(), 0
        while lasting:
            end, columns = lasting[len(lasting) // 2], max(8, len(lasting))  # very few columns round differently
            calls.append((end - done, columns))
            lasting, done = [length for length in lasting if length > end], end
        width = torch.tensor([columns for steps, columns in calls for _ in range(steps)])
        rows = ((width.cumsum(0) - width)[place] + column).flatten()
        padded = x.new_zeros(int(width.sum()), x.shape[1]).index_copy(0, rows, x)
        first = state.new_zeros(calls[0][1], state.shape[1]).index_copy(0, column[0], state * ~starts[0, :, None])
        hidden = first.view(len(first), layers, -1, self.size).permute(2, 1, 0, 3)  # [1 or 2, layers, columns, H]
        weights = [w for cell in self.cells for w in (cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh)]
        options = weights, True, layers, 0.0, False, False, False  # with biases; no dropout, one direction, time first
        outputs = []
        for (steps, columns), inputs in zip(calls, padded.split([math.prod(call) for call in calls]), strict=True):
            inputs, hidden = inputs.view(steps, columns, -1), [h[:, :columns].contiguous() for h in hidden]
            fused = torch.lstm(inputs, hidden, *options) if self.lstm else torch.gru(inputs, hidden[0], *options)
            hidden = fused[1:]
            outputs.append(fused[0].flatten(0, 1))
        return torch.cat(outputs).index_select(0, rows)


def lstm_step(cell: nn.LSTMCell, inputs: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """inputs [S, 4H] are those of the gates, from the layer below; h and c [S, H] before and after."""
    i, f, g, o = (inputs + functional.linear(h, cell.weight_hh, cell.bias_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(cell: nn.GRUCell, inputs: Tensor, h: Tensor) -> tuple[Tensor]:
    """inputs [S, 3H] are those of the gates, from the layer below; h [S, H] before and after."""
    inputs_r, inputs_z, inputs_n = inputs.chunk(3, -1)
    r, z, n = functional.linear(h, cell.weight_hh, cell.bias_hh).chunk(3, -1)
    n = (inputs_n + (inputs_r + r).sigmoid() * n).tanh()
    return (n + (inputs_z + z).sigmoid() * (h - n),)


class Trunk(nn.Module):
    """Images and one vector to features [M, out_features]: an encoder, hidden layers and recurrent layers."""

    def __init__(self, spec: dict, sizes: tuple[int, ...], rnn_size: int, args: Args):
        super().__init__()
        self.before_mlp, self.concat_input = args.rnn_before_mlp, args.rnn_concat_input
        self.concat_output, self.encoder = args.rnn_concat_output, Encoder(spec, args)
        width = self.encoder.out_features
        rnn_in = width if self.before_mlp else sizes[-1] + width * self.concat_input
        rnn_out = rnn_size + width * self.concat_output
        self.rnn = RNN(rnn_in, rnn_size, args)
        self.norm = nn.LayerNorm(rnn_size) if args.rnn_layer_norm else nn.Identity()
        self.mlp = MLP(rnn_out if self.before_mlp else width, sizes, args)
        self.out_features = sizes[-1] if self.before_mlp else rnn_out

    def forward(self, images: list[Tensor], vector: Tensor, state: Tensor,
                episode_starts: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = self.encoder(images, vector)
        h = x if self.before_mlp else self.mlp(x)
        h, state = self.rnn(torch.cat([h, x], -1) if self.concat_input else h, state, episode_starts)
        h = self.norm(h)
        h = torch.cat([h, x], -1) if self.concat_output else h
        return self.mlp(h) if self.before_mlp else h, state


class GaussianHead(nn.Module):
    """Diagonal Gaussian: a policy is [M, 2A], mean and log-sigma in units of [-1, 1] where an action has bounds."""

    action_dtype, mask_size = torch.float32, 0

    def __init__(self, n_in: int, args: Args, low: list[float], high: list[float]):
        super().__init__()
        low, high = torch.tensor(low), torch.tensor(high)
        bounded = (high - low).isfinite()
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("bounded", bounded.float())
        self.register_buffer("scale", torch.where(bounded, (high - low) / 2, 1.0))
        self.register_buffer("center", torch.where(bounded, (high + low) / 2, 0.0))
        self.action_size, self.policy_shape, self.num_features = len(low), (2 * len(low),), len(low)
        self.mean = initialize(nn.Linear(n_in, len(low)), args.initializer, gain=0.01)
        self.log_sigma = nn.Parameter(torch.full((len(low),), args.log_sigma_init))

    def forward(self, features: Tensor, action_mask: Tensor) -> Tensor:
        mean = self.mean(features).float()
        return torch.cat([mean, smooth_bounds(self.log_sigma, *LOG_SIGMA_BOUNDS).expand_as(mean)], -1)

    def noise(self, num_rows: int) -> Tensor:
        """What sample needs, drawn outside of compiled code."""
        return torch.randn(num_rows, self.action_size, device=self.low.device)

    def sample(self, policy: Tensor, noise: Tensor) -> Tensor:
        mean, log_sigma = policy.chunk(2, -1)
        return mean + log_sigma.exp() * noise

    def mode(self, policy: Tensor) -> Tensor:
        return policy.chunk(2, -1)[0]

    def logprob(self, policy: Tensor, actions: Tensor) -> Tensor:
        return gaussian_logprob(*policy.chunk(2, -1), actions)

    def entropy(self, policy: Tensor) -> Tensor:
        return (policy.chunk(2, -1)[1] + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)

    def kl(self, old_policy: Tensor, policy: Tensor) -> Tensor:
        return gaussian_kl(*old_policy.chunk(2, -1), *policy.chunk(2, -1))

    def bounds_loss(self, policy: Tensor) -> Tensor:
        """Penalty [M] on a mean beyond 1.1 times the action range."""
        return ((((self.mode(policy).abs() - 1.1).clamp(min=0)) * self.bounded) ** 2).sum(-1)

    def has_choice(self, action_mask: Tensor) -> Tensor:
        """Whether a row allows anything at all, [M]."""
        return torch.ones_like(action_mask[..., :1]).all(-1)

    def features(self, actions: Tensor) -> Tensor:
        """What the next step may read of actions, [M, num_features]."""
        return actions

    def to_env(self, actions: Tensor) -> Tensor:
        """Units of [-1, 1] to the environment's, inside its bounds (the stored sample stays as it was drawn)."""
        return (actions * self.scale + self.center).clamp(self.low, self.high)


class CategoricalHead(nn.Module):
    """A categorical for each sub-action: a policy is a table [M, D, P] of log-probabilities.

    What a mask [M, K] forbids, and the padding of shorter sub-actions, has probability 0. Where nothing is allowed it
    is action 0 for certain, a row that training leaves out.
    """

    action_dtype = torch.int64

    def __init__(self, n_in: int, args: Args, sizes: list[int], multi_discrete: bool):
        super().__init__()
        self.multi_discrete, self.action_size, self.mask_size = multi_discrete, len(sizes), sum(sizes)
        self.policy_shape, self.num_features = (len(sizes), max(sizes)), len(sizes) * max(sizes)
        column, sizes = torch.arange(max(sizes)).expand(len(sizes), -1), torch.tensor(sizes)[:, None]
        self.register_buffer("is_action", column < sizes, persistent=False)  # [D, P], False: padding
        starts = sizes.cumsum(0) - sizes  # of each sub-action in a mask [K]
        # [D, P]: where an entry of the table stands in a mask [K]
        self.register_buffer("mask_index", (starts + column).clamp(max=self.mask_size - 1), persistent=False)
        self.logits = initialize(nn.Linear(n_in, self.num_features), args.initializer, gain=0.01)

    def forward(self, features: Tensor, action_mask: Tensor) -> Tensor:
        allowed = self.allowed(action_mask)
        allowed[..., 0] |= ~allowed.any(-1)  # action 0 where nothing is allowed
        logits = self.logits(features).float().view(-1, *self.policy_shape)
        return torch.where(allowed, logits, FORBIDDEN).log_softmax(-1)

    def allowed(self, action_mask: Tensor) -> Tensor:
        """A mask [M, K] as a table [M, D, P]."""
        return action_mask[:, self.mask_index] & self.is_action

    def noise(self, num_rows: int) -> Tensor:
        return torch.rand(num_rows, *self.policy_shape, device=self.is_action.device)

    def sample(self, policy: Tensor, noise: Tensor) -> Tensor:
        return sample(policy, noise)

    def mode(self, policy: Tensor) -> Tensor:
        return policy.argmax(-1)

    def logprob(self, policy: Tensor, actions: Tensor) -> Tensor:
        return categorical_logprob(policy, actions)

    def entropy(self, policy: Tensor) -> Tensor:
        return categorical_entropy(policy)

    def kl(self, old_policy: Tensor, policy: Tensor) -> Tensor:
        return categorical_kl(old_policy, policy)

    def bounds_loss(self, policy: Tensor) -> Tensor:
        return torch.zeros_like(policy[:, 0, 0])

    def has_choice(self, action_mask: Tensor) -> Tensor:
        return self.allowed(action_mask).any(-1).all(-1)

    def features(self, actions: Tensor) -> Tensor:
        return functional.one_hot(actions, self.policy_shape[1]).flatten(1).float()

    def to_env(self, actions: Tensor) -> Tensor:
        return actions if self.multi_discrete else actions.squeeze(-1)


class Agent(nn.Module):
    """Recurrent policy and state-value critic with the statistics of their inputs: one state_dict to deploy.

    The state [.., F] is the actor's followed by the critic's, or the one of both where they share their trunk.
    """

    def __init__(self, args: Args, obs_spec: dict, critic_obs_spec: dict | None, value_size: int, action_spec: dict):
        super().__init__()
        self.obs_spec, self.critic_obs_spec = obs_spec, critic_obs_spec or obs_spec
        self.args, self.value_size = args, value_size
        self.obs_rms, self.value_rms = RunningMeanStd(sum(obs_spec["vectors"].values())), RunningMeanStd(value_size)
        self.critic_obs_rms = self.obs_rms
        if critic_obs_spec:
            self.critic_obs_rms = RunningMeanStd(sum(critic_obs_spec["vectors"].values()))
        self.actor = self.critic = Trunk(obs_spec, args.hidden_sizes, args.rnn_hidden_size, args)
        if args.separate or critic_obs_spec:
            sizes, rnn_size = args.critic_hidden_sizes or args.hidden_sizes, args.critic_rnn_hidden_size
            self.critic = Trunk(self.critic_obs_spec, sizes, rnn_size or args.rnn_hidden_size, args)
        self.value_head = initialize(nn.Linear(self.critic.out_features, value_size), args.initializer, gain=1.0)
        head = CategoricalHead if "sizes" in action_spec else GaussianHead
        self.head = head(self.actor.out_features, args, **action_spec)

    def encode(self, obs: dict[str, Tensor], spec: dict, rms: RunningMeanStd) -> tuple[list[Tensor], Tensor]:
        """Raw observations to a trunk's input: images in [0, 1] and one vector, normalised."""
        images = [pixels(obs[key], spec["highs"][key], torch.float32) for key in spec["images"]]
        vector = vectors(obs, spec)
        return images, rms(vector).clamp(-OBS_CLIP, OBS_CLIP) if self.args.norm_obs else vector

    def forward(self, obs: dict[str, Tensor], critic_obs: dict[str, Tensor], action_mask: Tensor, state: Tensor,
                episode_starts: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """Policy and values (of obs where critic_obs is empty) of M rows, and the parts of the state after one step.

        Row l*S + s is step l of sequence s; state [S, F] is the one before, which an episode start [M] makes 0.
        """
        features, actor_state = self.actor_features(obs, state, episode_starts)
        policy = self.head(features, action_mask)
        if self.critic is self.actor:
            return policy, self.value_head(features).float(), [actor_state]
        values, critic_state = self.normalized_value(critic_obs or obs, state, episode_starts)
        return policy, values, [actor_state, critic_state]

    def actor_features(self, obs: dict[str, Tensor], state: Tensor, episode_starts: Tensor) -> tuple[Tensor, Tensor]:
        state = state[:, : self.actor.rnn.state_size]
        return self.actor(*self.encode(obs, self.obs_spec, self.obs_rms), state, episode_starts)

    def normalized_value(self, critic_obs: dict[str, Tensor], state: Tensor,
                         episode_starts: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Value heads [M, V] in units of value_rms, and the critic's state after them."""
        inputs = self.encode(critic_obs, self.critic_obs_spec, self.critic_obs_rms)
        features, state = self.critic(*inputs, state[:, -self.critic.rnn.state_size :], episode_starts)
        return self.value_head(features).float(), state

    def value(self, critic_obs: dict[str, Tensor], state: Tensor) -> Tensor:
        """One step: critic_obs and the state [N, F] before it -> value heads [N, V] in units of the shaped reward."""
        return self.denormalize_value(self.normalized_value(critic_obs, state, self.no_starts(state))[0])

    def denormalize_value(self, value: Tensor) -> Tensor:
        return self.value_rms.denormalize(value) if self.args.norm_value else value

    def no_starts(self, state: Tensor) -> Tensor:
        return torch.zeros(len(state), dtype=torch.bool, device=state.device)

    def extra_losses(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Named scalar losses of obs, added to PPO's and logged: the place for auxiliary tasks."""
        return {}

    def update_statistics(self, obs: dict[str, Tensor], critic_obs: dict[str, Tensor], returns: Tensor,
                          valid: Tensor) -> None:  # fmt: skip
        """Let the normalisers see a batch: obs and critic_obs of B rows, returns [B, V], valid [B] bool."""
        self.obs_rms.update(vectors(obs, self.obs_spec), valid)
        self.value_rms.update(returns, valid)
        if self.critic_obs_rms is not self.obs_rms:
            self.critic_obs_rms.update(vectors(critic_obs, self.critic_obs_spec), valid)

    def start(self, num_envs: int) -> tuple[Tensor, Tensor]:
        """The state [N, F] and the previous actions and rewards [N, Q] of episodes that begin; all 0."""
        size = self.actor.rnn.state_size + (0 if self.critic is self.actor else self.critic.rnn.state_size)
        state = torch.zeros(num_envs, size, device=self.value_rms.mean.device)
        return state, state.new_zeros(num_envs, self.obs_spec["vectors"]["previous"])

    def previous(self, actions: Tensor, rewards: Tensor) -> Tensor:
        """What the next observation has of actions and raw rewards [N, V]: [N, Q], nothing where Q is 0."""
        features = torch.cat([self.head.features(actions), shape_rewards(rewards, self.args)], -1)
        return features[:, : self.obs_spec["vectors"]["previous"]]

    def observe(self, obs: Observation, critic_obs: Observation, previous: Tensor) -> tuple[dict, dict]:
        """Observations with what came before; that of the critic is empty where it is the same."""
        obs, critic_obs = (parts(x) | {"previous": previous} for x in (obs, critic_obs))
        return obs, {} if self.critic_obs_spec is self.obs_spec else critic_obs

    def starts(self, step: Step) -> Tensor:
        """Where step.obs begins with a new state, [N] bool."""
        return (step.terminations | step.truncations) & self.args.reset_on_done

    @torch.no_grad()
    def policy_step(self, obs: dict[str, Tensor], critic_obs: dict[str, Tensor], action_mask: Tensor, state: Tensor,
                    noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """One step of a rollout: actions of N envs, those in the environment's units, and the state [N, F] after it."""
        policy, _, states = self(obs, critic_obs, action_mask, state, self.no_starts(state))
        actions = self.head.sample(policy, noise)
        return actions, self.head.to_env(actions), torch.cat(states, -1)

    @torch.no_grad()
    def act(self, obs: dict[str, Tensor], state: Tensor, deterministic: bool = True,
            action_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Observations of N envs as rollouts store them, the state before and a mask [N, K] -> actions, state after.

        head.to_env(actions) is what the environment takes. Where an episode ended, the caller sets the state to 0.
        """
        features, state = self.actor_features(obs, state, self.no_starts(state))
        if action_mask is None:
            action_mask = torch.ones(len(state), self.head.mask_size, dtype=torch.bool, device=state.device)
        policy = self.head(features, action_mask)
        return self.head.mode(policy) if deterministic else self.head.sample(policy, self.head.noise(len(state))), state


def parts(obs: Observation) -> dict[str, Tensor]:
    """An observation as a dict; a single tensor is its only part."""
    return obs if isinstance(obs, dict) else {"obs": obs}


def tree_map(fn: Callable[[Tensor], Tensor], x: dict | Tensor) -> Any:
    """fn of every tensor in nested dicts."""
    return {key: tree_map(fn, value) for key, value in x.items()} if isinstance(x, dict) else fn(x)


def pixels(x: Tensor, high: int | None, dtype: torch.dtype) -> Tensor:
    """Images [M, C, H, W] with numbers up to high, scaled to [0, 1]; everything else (high is None) as it is."""
    if high is None:
        return x
    x = x.to(dtype) / high
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def vectors(obs: dict[str, Tensor], spec: dict) -> Tensor:
    """The parts that are no images for a convolution, side by side [M, O]."""
    if not spec["vectors"]:
        first = next(iter(obs.values()))
        return torch.zeros(len(first), 0, device=first.device)
    highs = spec["highs"]
    return torch.cat([pixels(obs[key], highs.get(key), torch.float32).flatten(1) for key in spec["vectors"]], 1)


def smooth_bounds(x: Tensor, low: float, high: float) -> Tensor:
    """x itself in [low+1, high-1], then a curve to low and high whose gradient falls only as 1/x^2."""
    over, under = (x - (high - 1)).clamp(min=0), ((low + 1) - x).clamp(min=0)
    return x.clamp(low + 1, high - 1) + over / (1 + over) - under / (1 + under)


def gaussian_logprob(mean: Tensor, log_sigma: Tensor, actions: Tensor) -> Tensor:
    """Log density in nats of actions [.., A] under the diagonal Gaussian, [..]."""
    return (-0.5 * ((actions - mean) * (-log_sigma).exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(mean0: Tensor, log_sigma0: Tensor, mean1: Tensor, log_sigma1: Tensor) -> Tensor:
    """KL(0 || 1) in nats of diagonal Gaussians [.., A], [..]; exactly 0 for equal arguments, since expm1(0) = 0."""
    d = log_sigma0 - log_sigma1
    return 0.5 * (torch.expm1(2 * d) - 2 * d + ((mean0 - mean1) * (-log_sigma1).exp()) ** 2).sum(-1)


def sample(logprobs: Tensor, noise: Tensor) -> Tensor:
    """Actions [.., D] from log-probabilities and uniform noise in [0, 1), [.., D, P] both, by the Gumbel-max trick."""
    return (logprobs - (-noise.clamp(min=2**-25).log()).log()).argmax(-1)


def categorical_logprob(logprobs: Tensor, actions: Tensor) -> Tensor:
    """Joint log-probability in nats [..] of actions [.., D] in tables [.., D, P]."""
    return logprobs.gather(-1, actions[..., None]).squeeze(-1).sum(-1)


def categorical_entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of tables [.., D, P], [..]; what is forbidden adds exactly 0 and has gradient 0."""
    return -(logprobs.exp() * logprobs).sum((-2, -1))


def categorical_kl(logprobs0: Tensor, logprobs1: Tensor) -> Tensor:
    """KL(0 || 1) in nats of tables [.., D, P] under one mask, [..]; exactly 0 for equal arguments."""
    return (logprobs0.exp() * (logprobs0 - logprobs1)).sum((-2, -1))


def shape_rewards(rewards: Tensor, args: Args) -> Tensor:
    """log(clamp((r + shift) * scale, min, max)), the logarithm if asked for; any shape."""
    shaped = ((rewards + args.reward_shift) * args.reward_scale).clamp(args.reward_min, args.reward_max)
    return shaped.log() if args.reward_log else shaped


def compute_gae(rewards: Tensor, values: Tensor, next_values: Tensor, terminations: Tensor, dones: Tensor,
                gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Generalised advantage estimation, https://arxiv.org/abs/1506.02438 eq. 16: advantages and returns, [T, ..].

    rewards, values, next_values [T, ..]; terminations and dones broadcast to them. next_values[t] is the value of the
    observation that actions[t] led to, before any reset. A termination ends the return, so it is dropped there. A
    truncation only ends the trajectory: the value of the state it stopped in counts, but the sum over later TD errors
    does not cross into the next episode.
    """
    deltas = rewards + gamma * next_values * (1 - terminations.to(rewards.dtype)) - values
    decay = (gamma * gae_lambda * (1 - dones.to(rewards.dtype))).expand_as(deltas)
    advantages, advantage = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = advantage = torch.addcmul(deltas[t], decay[t], advantage)
    return advantages, advantages + values


def clamp_ratio(ratio: Tensor, args: Args) -> Tensor:
    """Hard clamp to 1 -+ clip_coef, or rl_games' logistic with slope 1 at ratio 1 that saturates there."""
    if args.smooth_clamp:
        return 1 + args.clip_coef * torch.tanh((ratio - 1) / args.clip_coef)
    return ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)


def sequence_rows(mb_inds: Tensor, num_envs: int, seq_length: int) -> Tensor:
    """Rows [L*S], step by step, in a batch [T*N] of sequences mb_inds [S]: i is env i % N from step (i // N)*L on."""
    first = mb_inds // num_envs * seq_length * num_envs + mb_inds % num_envs
    return (first + torch.arange(seq_length, device=mb_inds.device)[:, None] * num_envs).flatten()


def ppo_loss(agent: Agent, args: Args, obs: dict[str, Tensor], critic_obs: dict[str, Tensor], action_mask: Tensor,
             state: Tensor, episode_starts: Tensor, actions: Tensor, old_policy: Tensor, old_values: Tensor,
             advantages: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PPO objective of one minibatch: the scalar loss, and METRICS and the extra losses as one detached tensor.

    obs and critic_obs (empty where it is obs) of M rows of S sequences, action_mask [M, K], state [S, F] before the
    first step, episode_starts [M], actions [M, D or A], old_policy [M, ..], advantages [M], old_values and targets
    [M, V], both in units of the normalised value. weights [M] are 0 for rows without a choice and the same for all
    others, 1 on average over the batch: a mean is one over the rows that count.
    """
    policy, values, _ = agent(obs, critic_obs, action_mask, state, episode_starts)
    ratio = (agent.head.logprob(policy, actions) - agent.head.logprob(old_policy, actions)).exp()
    policy_loss = -(weights * torch.min(advantages * ratio, advantages * clamp_ratio(ratio, args))).mean()
    value_error = (values - targets) ** 2
    if args.clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped_values - targets) ** 2)
    value_loss = 0.5 * (weights * value_error.sum(-1)).mean()
    entropy = (weights * agent.head.entropy(policy)).mean()
    bounds_loss = (weights * agent.head.bounds_loss(policy)).mean()
    extra = agent.extra_losses(obs)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.bounds_loss_coef * bounds_loss
    loss = loss + sum(extra.values())
    with torch.no_grad():
        approx_kl = (weights * agent.head.kl(old_policy, policy)).mean()
        clipfrac = (weights * ((ratio - 1).abs() > args.clip_coef)).mean()
        later = torch.zeros_like(loss)  # grad_norm and nonfinite are known after the backward pass
    metrics = [policy_loss, value_loss, entropy, approx_kl, clipfrac, bounds_loss, later, later, *extra.values()]
    return loss, torch.stack(metrics).detach()


def observation_spec(space: spaces.Space, sequence: tuple[int, ...] | None, encoder: str, env_id: str) -> dict:
    """How Trunk reads a space, as plain data. Raises InputError if the encoder cannot.

    encoder: its name; images: shapes by key of what passes convolutions; vectors: sizes by key of the rest, which is
    put side by side; highs: upper bounds of images by key; sequence: [length, channels] of the vector where it passes
    conv1d, or None.
    """
    boxes = space.spaces if isinstance(space, spaces.Dict) else {"obs": space}
    images = {key: list(box.shape) for key, box in boxes.items() if box.dtype == np.uint8 and len(box.shape) == 3}
    smallest = min((min(shape[1:]) for shape in images.values()), default=0)
    if encoder == "auto":
        encoder = "nature_cnn" if smallest >= 36 else "mlp"
    what = f"--encoder {encoder}: {env_id} has"
    if encoder in ("nature_cnn", "impala") and not images:
        raise InputError(f"{what} no images; use mlp or conv1d")
    if encoder == "nature_cnn" and smallest < 36:
        raise InputError(f"{what} images of {smallest} pixels, fewer than 36; use impala or mlp")
    if encoder == "conv1d" and (images or len(boxes) > 1):
        raise InputError(f"{what} images or several parts, not one vector; use nature_cnn, impala or mlp")
    flat = {key: int(np.prod(box.shape)) for key, box in boxes.items() if encoder == "mlp" or key not in images}
    if encoder == "conv1d":
        sequence = list(sequence) if sequence is not None and len(sequence) == 2 else [flat["obs"], 1]
    highs = {key: max(1, int(boxes[key].high.max())) for key in images}
    return {"encoder": encoder, "images": {} if encoder == "mlp" else images, "vectors": flat, "highs": highs,
            "sequence": sequence if encoder == "conv1d" else None}  # fmt: skip


def agent_kwargs(envs: VecEnv, args: Args) -> dict:
    """What Agent needs to know of an environment, as plain data. Raises InputError if this script cannot act in it."""
    space, obs, critic_obs = envs.action_space, envs.observation_space, envs.critic_observation_space
    if isinstance(space, spaces.Box):
        action_spec = {"low": space.low.flatten().tolist(), "high": space.high.flatten().tolist()}
        features = len(action_spec["low"])
    else:
        discrete = isinstance(space, spaces.Discrete)
        sizes = [int(space.n)] if discrete else space.nvec.flatten().tolist()
        action_spec = {"sizes": sizes, "multi_discrete": not discrete}
        features = len(sizes) * max(sizes)
    obs_spec, critic_spec = observation_spec(obs, envs.unflattened_shape, args.encoder, envs.env_id), None
    if critic_obs is not obs:
        try:
            critic_spec = observation_spec(critic_obs, None, args.encoder, envs.env_id)
        except InputError:  # a vector for the critic of an actor with images, for example
            critic_spec = observation_spec(critic_obs, None, "auto", envs.env_id)
    for spec in filter(None, (obs_spec, critic_spec)):
        if "previous" in spec["vectors"] | spec["images"]:
            raise InputError(f"{envs.env_id} has a part of its observation named previous, a name this script takes")
        spec["vectors"]["previous"] = (features + envs.value_size) * args.prev_action_reward
    return {"obs_spec": obs_spec, "critic_obs_spec": critic_spec, "value_size": envs.value_size,
            "action_spec": action_spec}  # fmt: skip


def load_agent(path: str | Path, device: str | torch.device = "cpu") -> tuple[Agent, dict]:
    """The trained Agent and everything else in a checkpoint. Raises InputError if this script did not write it."""
    state = checkpoint.load_for(SCRIPT, path, device)
    agent = Agent(checkpoint.saved_args(path, state, Args), **state["agent_kwargs"]).to(device)
    checkpoint.load_weights(path, state, agent)
    return agent, state


def count_iterations(total_timesteps: int, global_step: int, batch_size: int, seed_statistics: bool) -> int:
    """Iterations of batch_size env transitions, those before global_step too. Raises InputError if none would train."""
    needed = (1 + seed_statistics) * batch_size
    if total_timesteps < needed:
        why = ", twice because the first one only seeds the normalisers" if seed_statistics else ""
        raise InputError(f"--total-timesteps {total_timesteps}: must be at least {needed}, an iteration "
                         f"(num_envs*num_steps*ranks){why}")  # fmt: skip
    return global_step // batch_size + (total_timesteps - global_step) // batch_size


def learning_rates(args: Args) -> tuple[float, float]:
    """Initial step sizes of actor and critic."""
    return args.learning_rate, args.learning_rate if args.critic_learning_rate is None else args.critic_learning_rate


def adapt_learning_rates(lrs: list[Tensor], kl: Tensor, args: Args) -> None:
    """Smaller steps where the KL from the rollout policy is above twice the threshold, larger ones below half of it."""
    factor = torch.where(kl > 2 * args.kl_threshold, 1 / 1.5, torch.where(kl < args.kl_threshold / 2, 1.5, 1.0))
    for lr in lrs:
        lr.mul_(factor).clamp_(args.min_lr, args.max_lr)


def make_optimizer(agent: Agent, args: Args, state: dict | None) -> torch.optim.Adam:
    """Adam over an actor and a critic group, restored from a checkpoint except for what args change on resume."""
    critic = [p for name, p in agent.named_parameters() if name.startswith(("critic", "value_head"))]
    actor = [p for name, p in agent.named_parameters() if not name.startswith(("critic", "value_head"))]
    device = critic[0].device
    actor_lr, critic_lr = (torch.tensor(lr, device=device) for lr in learning_rates(args))
    groups = [{"params": actor, "lr": actor_lr}, {"params": critic, "lr": critic_lr}]
    adam = {"eps": 1e-5, "weight_decay": args.weight_decay, "fused": True, "capturable": device.type == "cuda"}
    optimizer = torch.optim.Adam(groups, **adam)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        old_lrs = learning_rates(checkpoint.saved_args(args.resume, state, Args))
        for group, lr, old_lr in zip(optimizer.param_groups, learning_rates(args), old_lrs, strict=True):
            group |= {"weight_decay": args.weight_decay, "capturable": adam["capturable"], "lr": group["lr"].to(device)}
            if lr != old_lr or args.lr_schedule != "adaptive":  # that one alone goes on from rates of its own
                group["lr"].fill_(lr)
    return optimizer


def raw_outcome(step: Step) -> tuple[Tensor, Tensor]:
    """Raw rewards [N], summed over heads, and the ends of episodes [N], also where the learner sees clipped rewards."""
    rewards = step.rewards if step.raw_rewards is None else step.raw_rewards
    ends = step.terminations | step.truncations if step.episode_ends is None else step.episode_ends
    return rewards.view(len(ends), -1).sum(-1), ends


@torch.no_grad()
def evaluate(agent: Agent, envs: VecEnv, num_episodes: int, deterministic: bool) -> dict[str, float]:
    """Raw returns of num_episodes episodes, the same number from each env, so that short episodes are not favoured.

    Only reads the agent. num_episodes is a multiple of envs.num_envs (vecenvs.make_for_episodes sees to it).
    """
    start, per_env, rng_state = time.perf_counter(), num_episodes // envs.num_envs, checkpoint.rng_state()
    scores: list[list[tuple[float, int]]] = [[] for _ in range(envs.num_envs)]
    returns, lengths = torch.zeros(envs.num_envs, dtype=torch.float64), torch.zeros(envs.num_envs, dtype=torch.int64)
    (obs, _), (state, previous) = envs.reset(), agent.start(envs.num_envs)
    while min(map(len, scores)) < per_env:
        if lengths.max() > MAX_EVAL_LENGTH:
            raise InputError(f"{envs.env_id}: no end of an episode in {MAX_EVAL_LENGTH} steps; it needs a time limit")
        actions, state = agent.act(parts(obs) | {"previous": previous}, state, deterministic, envs.action_mask)
        step = envs.step(agent.head.to_env(actions))
        obs, (rewards, ends) = step.obs, raw_outcome(step)
        previous = agent.previous(actions, step.rewards.view(envs.num_envs, -1))
        state, previous = (x * ~agent.starts(step)[:, None] for x in (state, previous))
        returns += rewards.double().cpu()
        lengths += 1
        for i in ends.nonzero().flatten().tolist():
            scores[i].append((returns[i].item(), lengths[i].item()))
            returns[i], lengths[i] = 0.0, 0
    checkpoint.set_rng_state(rng_state)  # the training's noise goes on as if nothing had been sampled here
    returns, lengths = np.array([episode for episodes in scores for episode in episodes[:per_env]]).T
    result = {"mean": returns.mean(), "std": returns.std(), "min": returns.min(), "max": returns.max(),
              "length": lengths.mean(), "seconds": time.perf_counter() - start}  # fmt: skip
    return {k: float(v) for k, v in result.items()} | {"episodes": len(returns), "steps": int(lengths.sum())}


def play(args: Args) -> dict[str, float]:
    """Evaluate args.checkpoint and print one JSON line on stdout."""
    rank, _, device = distributed.init(args.device)
    agent, state = load_agent(args.checkpoint, device)
    TorchThreads(args.torch_threads, device)
    torch.manual_seed(args.seed)
    envs = vecenvs.make_for_episodes(args.env_id, args.num_envs, args.num_episodes, device, args.seed, args.env_kwargs,
                                      mask_obs=args.mask_obs)  # fmt: skip
    kwargs = agent_kwargs(envs, args)
    checkpoint.check_compatible(args.checkpoint, state, args, envs.env_id, kwargs, NETWORK_ARGS)
    result = evaluate(agent, envs, args.num_episodes, args.deterministic)
    envs.close()
    if rank == 0:
        print(json.dumps(result), flush=True)
    distributed.close()
    return result


def main(args: Args) -> dict[str, float]:
    """Train (with play: evaluate) and return the last logged metrics."""
    if args.play:
        return play(args)
    # ---- setup ----
    rank, world_size, device = distributed.init(args.device)
    T, N, L, B = args.num_steps, args.num_envs, args.seq_length, args.num_steps * args.num_envs
    batch_size, seed_statistics = B * world_size, args.norm_obs or args.norm_value
    if args.track:
        import_wandb()  # now, before anything is created
    resume = cli.resume_path(args.resume, args.run_name)
    state = checkpoint.load_for(SCRIPT, resume) if resume else None
    global_step = state["global_step"] if state else 0
    num_iterations = count_iterations(args.total_timesteps, global_step, batch_size, seed_statistics)
    random.seed(args.seed + rank), np.random.seed((args.seed + rank) % 2**32), torch.manual_seed(args.seed)
    threads = TorchThreads(args.torch_threads, device)
    env_seed, env_kwargs = vecenvs.derive_seed(args.seed, rank, global_step), vecenvs.parse_env_kwargs(args.env_kwargs)
    envs = vecenvs.make(args.env_id, N, device, env_seed, env_kwargs, mask_obs=args.mask_obs)
    kwargs = agent_kwargs(envs, args)
    agent = Agent(args, **kwargs).to(device)
    distributed.broadcast(agent)
    # Only now: weights are equal on all ranks, noise is not. With global_step a resumed run does not repeat its start.
    torch.manual_seed(vecenvs.derive_seed(args.seed, rank, global_step + 1))

    episodes, next_obs, next_critic_obs = EpisodeStats(N, args.games_to_track, world_size), None, None
    if state:
        checkpoint.check_compatible(resume, state, args, envs.env_id, kwargs, NETWORK_ARGS)
        checkpoint.load_weights(resume, state, agent)
        next_obs, next_critic_obs = checkpoint.restore_rank(state["ranks"], rank, world_size, envs, episodes)
    if next_obs is None:
        (next_obs, next_critic_obs), (rnn_state, previous) = envs.reset(), agent.start(N)
    else:
        rnn_state, previous = (x.to(device) for x in state["memory"][rank])
    optimizer = make_optimizer(agent, args, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lrs = [group["lr"] for group in optimizer.param_groups]  # on the device: a recorded CUDA graph sees them change

    # ---- storage: allocated once and written in place, so every address in it is fixed ----
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(T, N, *shape, dtype=dtype, device=device)

    next_obs, next_critic_obs = agent.observe(next_obs, next_critic_obs, previous)
    obs, critic_obs = (tree_map(lambda x: new(*x.shape[1:], dtype=x.dtype), x) for x in (next_obs, next_critic_obs))
    action_mask, rewards = new(agent.head.mask_size, dtype=torch.bool), new(envs.value_size)
    actions, old_policy = new(agent.head.action_size, dtype=agent.head.action_dtype), new(*agent.head.policy_shape)
    old_values, values, returns, targets = (torch.zeros_like(rewards) for _ in range(4))
    weights, advantages = new(), new()
    terminations, truncations, episode_starts = (new(dtype=torch.bool) for _ in range(3))
    batch = {"obs": obs, "critic_obs": critic_obs, "action_mask": action_mask, "episode_starts": episode_starts,
             "actions": actions, "old_policy": old_policy, "old_values": old_values, "advantages": advantages,
             "targets": targets, "weights": weights}  # fmt: skip
    batch = tree_map(lambda x: x.flatten(0, 1), batch)  # views, [B, ..]
    seq_states = torch.zeros(T // L, N, rnn_state.shape[1], device=device)  # before the first step of each sequence
    in_order = torch.arange(B // L, device=device).view(args.num_minibatches, -1)

    # ---- hot path ----
    def minibatch(mb_inds: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Of sequences mb_inds [S]: their rows of the batch [M], step by step, and what ppo_loss needs of them."""
        rows = sequence_rows(mb_inds, N, L)
        return rows, {"state": seq_states.flatten(0, 1)[mb_inds]} | tree_map(lambda x: x[rows], batch)

    @torch.no_grad()
    def estimate_advantages() -> None:
        """Fill what the update needs from the rollout, its last observation and rnn_state, and its finals."""
        for mb_inds in in_order:  # shaped as in update_step: equal weights give a ratio of exactly 1 (compiled: nearly)
            rows, mb = minibatch(mb_inds)
            inputs = (mb[name] for name in ("obs", "critic_obs", "action_mask", "state", "episode_starts"))
            batch["old_policy"][rows], batch["old_values"][rows], _ = agent(*inputs)
        values.copy_(agent.denormalize_value(old_values))
        next_values = torch.cat([values[1:], agent.value(next_critic_obs or next_obs, rnn_state)[None]])
        # A truncated episode would have gone on from its last observation (in finals) and the state before it, not from
        # the next one's. V(s_t), off by one step of reward, stays only where a simulator drops that observation.
        next_values = torch.where(truncations[..., None], values, next_values)
        for t, final_critic_obs, final_state in finals:
            final_values = agent.value(final_critic_obs, final_state)
            next_values[t] = torch.where(truncations[t, :, None], final_values, next_values[t])
        terminated, done = terminations[..., None], (terminations | truncations)[..., None]
        shaped = shape_rewards(rewards, args)
        heads, new_returns = compute_gae(shaped, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        returns.copy_(new_returns)
        targets.copy_(agent.value_rms(returns) if args.norm_value else returns)
        valid = agent.head.has_choice(batch["action_mask"]).view(T, N).float()
        weights.copy_(valid / distributed.average(valid.mean()).clamp(min=1e-8))
        advantages.copy_(heads.sum(-1))
        if args.norm_adv:
            advantages.sub_(distributed.average((weights * advantages).mean()))
            advantages.div_(distributed.average((weights * advantages**2).mean()).sqrt() + 1e-8)

    def loss_gradients(mb_inds: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of sequences mb_inds [S]: a gradient for each parameter, and the loss's metrics."""
        loss, metrics = ppo_loss(agent, args, **minibatch(mb_inds)[1])
        return torch.autograd.grad(loss, parameters), metrics

    def update_step(mb_inds: Tensor) -> Tensor:
        """One gradient step on sequences mb_inds [S]; returns METRICS, still on the device."""
        gradients, metrics = loss_gradients(mb_inds)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        metrics = distributed.average_gradients(parameters, metrics)
        metrics[GRAD_NORM] = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm, foreach=True)
        metrics[NONFINITE] = (~metrics[GRAD_NORM].isfinite()).float()
        optimizer.found_inf = metrics[NONFINITE]  # where this is 1, fused Adam leaves the parameters alone
        optimizer.step()
        if args.lr_schedule == "adaptive" and args.kl_interval == "minibatch":
            adapt_learning_rates(lrs, metrics[KL], args)
        return metrics

    def train_epoch() -> Tensor:
        """One pass over the sequences in random order; returns the sum of METRICS over its gradient steps."""
        metrics_sum = torch.zeros(len(metric_names), device=device)
        for mb_inds in torch.randperm(B // L, device=device).view(args.num_minibatches, -1):
            metrics_sum += update_step(mb_inds)
        if args.lr_schedule == "adaptive" and args.kl_interval == "epoch":
            adapt_learning_rates(lrs, metrics_sum[KL] / args.num_minibatches, args)
        return metrics_sum

    # From here on these names mean the fast versions.
    use_compile = device.type == "cuda" if args.compile is None else args.compile
    policy_step = compile_pure(agent.policy_step, use_compile)
    # On a CPU the recurrent layers run in torch's kernel, which is faster than a compiled loop and no part of one.
    loss_gradients = compile_pure(loss_gradients, use_compile and device.type == "cuda")
    update_step = cuda_graph(update_step, enabled=use_compile and device.type == "cuda" and world_size == 1)
    num_updates = args.update_epochs * args.num_minibatches
    metric_names = [f"losses/{name}" for name in (*METRICS, *agent.extra_losses(next_obs))]

    def evaluate_agent(evaluation_envs: VecEnv) -> dict[str, float]:
        return evaluate(agent, evaluation_envs, args.num_episodes, args.deterministic)

    def contents() -> dict:
        """What a checkpoint holds of this script."""
        memory = {"memory": distributed.gather_objects((rnn_state.cpu(), next_obs["previous"].cpu()))}
        return {"agent_kwargs": kwargs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()} | memory

    # ---- train ----
    next_starts = agent.no_starts(rnn_state)  # a state that begins with an episode is 0 already
    with Run(SCRIPT, args, envs, episodes, resume, state, num_iterations, rank) as run:
        for iteration in range(global_step // batch_size + 1, num_iterations + 1):
            finals: list[tuple[int, dict[str, Tensor], Tensor]] = []  # step, last observation, state before it
            outcomes: list[tuple[Tensor, Tensor]] = []
            for t in range(T):  # rollout
                if t % L == 0:
                    seq_states[t // L] = rnn_state
                for storage, x in ((obs, next_obs), (critic_obs, next_critic_obs)):
                    for key in x:
                        storage[key][t] = x[key]
                action_mask[t] = True if envs.action_mask is None else envs.action_mask
                episode_starts[t] = next_starts
                with run.phase("policy"):
                    inputs = next_obs, next_critic_obs, action_mask[t], rnn_state, agent.head.noise(N)
                    actions[t], env_actions, rnn_state = policy_step(*inputs)
                with run.phase("env"):
                    step = envs.step(env_actions)
                rewards[t] = step.rewards.view(N, -1)
                terminations[t], truncations[t] = step.terminations, step.truncations
                outcomes.append(raw_outcome(step))
                previous = agent.previous(actions[t], rewards[t])
                if step.final_critic_obs is not None:
                    finals.append((t, parts(step.final_critic_obs) | {"previous": previous}, rnn_state))
                next_starts = agent.starts(step)
                rnn_state, previous = (x * ~next_starts[:, None] for x in (rnn_state, previous))
                next_obs, next_critic_obs = agent.observe(step.obs, step.critic_obs, previous)
            global_step += batch_size

            # The first rollout only seeds the normalisers' statistics; a resumed run has them already.
            train = not seed_statistics or state is not None or iteration > 1
            metrics_sum = torch.zeros(len(metric_names), device=device)
            with run.phase("update"), threads.update(measure=train):
                estimate_advantages()
                if args.lr_schedule == "linear":
                    for lr, initial_lr in zip(lrs, learning_rates(args), strict=True):
                        lr.fill_(initial_lr * (1 - (iteration - 1) / num_iterations))
                for _ in range(args.update_epochs if train else 0):
                    metrics_sum += train_epoch()
                # Only now: rollout and update saw the same statistics, so the first ratio of every update is exactly 1.
                agent.update_statistics(batch["obs"], batch["critic_obs"], returns.flatten(0, 1), batch["weights"] > 0)

            # ---- log and save: only here does the host wait for the device ----
            observations, lasts = [(obs, next_obs), (critic_obs, next_critic_obs)], [final[:2] for final in finals]
            check_finite(observations, lasts, rewards, metrics_sum[NONFINITE].item(), iteration, run.dir)
            episodes.update(*(torch.stack(x) for x in zip(*outcomes, strict=True)))
            log = episodes.metrics() | {"charts/learning_rate": lrs[0].item()}
            stuck = distributed.average((weights == 0).float().sum()) * world_size  # were sent action 0 all the same
            log["charts/rows_without_choice"] = stuck.item()
            if train:
                log |= zip(metric_names, (metrics_sum / num_updates).tolist(), strict=True)
                log["losses/explained_variance"] = explained_variance(values, returns, weights[..., None])
            run.end_iteration(iteration, global_step, log, evaluate_agent, contents)
            if run.stop_reason:
                break
    return run.log


if __name__ == "__main__":
    cli.run(main, Args)
