"""PPO for discrete actions, masks and pixels. Everything that decides what is learned is in this file.

    python ppo_discrete.py --env-id CartPole
    torchrun --nproc-per-node 4 ppo_discrete.py --env-id Pong --num-envs 16         # num_envs is per rank
    python ppo_discrete.py --play --checkpoint runs/NAME/last.pt                    # evaluate what was trained

ppo_continuous.py with a categorical policy for each sub-action and convolutional encoders.
Schulman et al. 2017, https://arxiv.org/abs/1707.06347; masks: Huang and Ontanon 2020, https://arxiv.org/abs/2006.14171.
Shapes: T num_steps, N num_envs, B = T*N, M = B/num_minibatches rows; V reward heads; D sub-actions with K actions in
all, padded to the largest, P, in a [D, P] table. Observations are dicts of tensors, one entry a part of the space.
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

from common import checkpoint, cli, distributed
from common import envs as vecenvs
from common.compile import TorchThreads, compile_pure, cuda_graph
from common.envs.base import Observation, Step, VecEnv
from common.errors import InputError, check_divides, check_finite, check_numbers, check_positive, check_range
from common.logger import EpisodeStats, explained_variance, import_wandb
from common.run import Run
from common.running_mean_std import RunningMeanStd

SCRIPT = "ppo_discrete"
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm", "nonfinite")
KL, GRAD_NORM, NONFINITE = METRICS.index("approx_kl"), METRICS.index("grad_norm"), METRICS.index("nonfinite")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU,
               "softplus": nn.Softplus}  # fmt: skip
NETWORK_ARGS = ("encoder", "impala_depths", "hidden_sizes", "critic_hidden_sizes", "separate", "activation", "d2rl",
                "layer_norm", "norm_obs", "norm_value", "action_bins", "mask_obs")  # fmt: skip
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
    action_bins: int = 0
    """choices for each dimension of a Box action space, evenly spaced between its bounds; 0: Box is refused"""
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
    total_timesteps: int = 300_000
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
    bfloat16: bool = False
    """compute encoder and hidden layers in bfloat16 (fast on GPUs and on CPUs with AVX512-BF16 or AMX)"""
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
    norm_obs: bool = False
    """normalise observations by running statistics"""
    norm_value: bool = False
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
    ent_coef_end: float | None = None
    """weight of the entropy bonus at the end of a linear schedule; unset: it stays ent_coef"""
    max_grad_norm: float = 1.0
    """gradient norm over all parameters is clipped to this"""
    weight_decay: float = 0.0
    """L2 penalty of Adam"""
    recompute_advantages: bool = False
    """compute values (also those that clip_vloss compares with) and advantages anew before every pass over the batch"""

    def __post_init__(self):
        check_numbers(self, may_be_infinite="score_to_win reward_min reward_max")
        check_range(self, 1, math.inf, "num_envs num_steps num_minibatches update_epochs num_episodes games_to_track "
                                       "total_timesteps")  # fmt: skip
        check_range(self, 0, 2**63 - 1, "seed")
        check_range(self, 0, math.inf, "torch_threads save_interval save_best_after eval_interval learning_rate "
                                       "critic_learning_rate min_lr vf_coef weight_decay action_bins")  # fmt: skip
        check_range(self, 0, 1, "gamma gae_lambda")
        check_positive(self, "clip_coef max_grad_norm kl_threshold")
        if not self.play:
            check_divides("num_minibatches", self.num_minibatches, self.num_envs * self.num_steps, "num_envs*num_steps")
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


class Trunk(nn.Module):
    """Images and one vector to features [M, out_features]: an encoder, then hidden layers over all of it."""

    def __init__(self, spec: dict, sizes: tuple[int, ...], args: Args):
        super().__init__()
        self.bfloat16, self.encoder = args.bfloat16, Encoder(spec, args)
        self.mlp = MLP(self.encoder.out_features, sizes, args)
        self.out_features = self.mlp.out_features

    def forward(self, images: list[Tensor], vector: Tensor) -> Tensor:
        with torch.autocast(vector.device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.mlp(self.encoder(images, vector)).float()


class Agent(nn.Module):
    """Categorical policy and state-value critic with the statistics of their inputs: one state_dict to deploy.

    Actions are whole numbers counted from 0. Each sub-action has a row in a table [D, P] of log-probabilities; what a
    mask forbids, and the padding of shorter rows, has probability 0. Where nothing is allowed it is action 0 for
    certain, a row that training leaves out.
    """

    def __init__(self, args: Args, obs_spec: dict, critic_obs_spec: dict | None, value_size: int,
                 action_sizes: list[int], multi_discrete: bool):  # fmt: skip
        super().__init__()
        self.obs_spec, self.critic_obs_spec = obs_spec, critic_obs_spec or obs_spec
        self.multi_discrete, separate = multi_discrete, args.separate or critic_obs_spec is not None
        self.norm_obs, self.norm_value, self.value_size = args.norm_obs, args.norm_value, value_size
        self.pixel_dtype = torch.bfloat16 if args.bfloat16 else torch.float32
        column = torch.arange(max(action_sizes)).expand(len(action_sizes), -1)
        sizes = torch.tensor(action_sizes)[:, None]
        self.register_buffer("is_action", column < sizes, persistent=False)  # [D, P], False: padding
        starts = sizes.cumsum(0) - sizes  # of each sub-action in a mask [K]
        # [D, P]: where an entry of the table stands in a mask [K]
        self.register_buffer("mask_index", (starts + column).clamp(max=sum(action_sizes) - 1), persistent=False)
        self.obs_rms, self.value_rms = RunningMeanStd(sum(obs_spec["vectors"].values())), RunningMeanStd(value_size)
        self.critic_obs_rms = self.obs_rms
        if critic_obs_spec:
            self.critic_obs_rms = RunningMeanStd(sum(critic_obs_spec["vectors"].values()))
        self.actor = Trunk(obs_spec, args.hidden_sizes, args)
        critic_sizes = args.critic_hidden_sizes or args.hidden_sizes
        self.critic = Trunk(self.critic_obs_spec, critic_sizes, args) if separate else self.actor
        self.value_head = initialize(nn.Linear(self.critic.out_features, value_size), args.initializer, gain=1.0)
        logits = nn.Linear(self.actor.out_features, self.is_action.numel())
        self.policy_head = initialize(logits, args.initializer, gain=0.01)

    def encode(self, obs: Observation, spec: dict, rms: RunningMeanStd) -> tuple[list[Tensor], Tensor]:
        """Raw observations to a trunk's input: images in [0, 1] and one vector, normalised."""
        obs = parts(obs)
        images = [pixels(obs[key], spec["highs"][key], self.pixel_dtype) for key in spec["images"]]
        vector = vectors(obs, spec)
        return images, rms(vector).clamp(-OBS_CLIP, OBS_CLIP) if self.norm_obs else vector

    def forward(self, obs: Observation, critic_obs: Observation, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Both policy and normalized_value (of obs where critic_obs is empty), through a shared trunk only once."""
        features = self.actor(*self.encode(obs, self.obs_spec, self.obs_rms))
        shared = self.critic is self.actor
        values = self.value_head(features) if shared else self.normalized_value(critic_obs or obs)
        return self.log_probabilities(features, action_mask), values.float()

    def policy(self, obs: Observation, action_mask: Tensor) -> Tensor:
        """obs and action_mask [N, K] -> log-probabilities [N, D, P], float32."""
        return self.log_probabilities(self.actor(*self.encode(obs, self.obs_spec, self.obs_rms)), action_mask)

    def log_probabilities(self, features: Tensor, action_mask: Tensor) -> Tensor:
        allowed = self.allowed(action_mask)
        allowed[..., 0] |= ~allowed.any(-1)  # action 0 where nothing is allowed
        logits = self.policy_head(features).float().view(-1, *self.is_action.shape)
        return torch.where(allowed, logits, FORBIDDEN).log_softmax(-1)

    def allowed(self, action_mask: Tensor) -> Tensor:
        """A mask [N, K] as a table [N, D, P]."""
        return action_mask[:, self.mask_index] & self.is_action

    def normalized_value(self, critic_obs: Observation) -> Tensor:
        """critic_obs -> value heads [N, V] in units of value_rms."""
        return self.value_head(self.critic(*self.encode(critic_obs, self.critic_obs_spec, self.critic_obs_rms))).float()

    def value(self, critic_obs: Observation) -> Tensor:
        """critic_obs -> value heads [N, V] in units of the shaped reward."""
        return self.denormalize_value(self.normalized_value(critic_obs))

    def denormalize_value(self, value: Tensor) -> Tensor:
        return self.value_rms.denormalize(value) if self.norm_value else value

    def extra_losses(self, obs: Observation) -> dict[str, Tensor]:
        """Named scalar losses of obs, added to PPO's and logged: the place for auxiliary tasks."""
        return {}

    def update_statistics(self, obs: Observation, critic_obs: Observation, returns: Tensor, valid: Tensor) -> None:
        """Let the normalisers see a batch: obs and critic_obs of B rows, returns [B, V], valid [B] bool."""
        self.obs_rms.update(vectors(parts(obs), self.obs_spec), valid)
        self.value_rms.update(returns, valid)
        if self.critic_obs_rms is not self.obs_rms:
            self.critic_obs_rms.update(vectors(parts(critic_obs), self.critic_obs_spec), valid)

    def to_env(self, actions: Tensor) -> Tensor:
        """actions [N, D] as the environment takes them: [N] where there are no sub-actions."""
        return actions if self.multi_discrete else actions.squeeze(-1)

    @torch.no_grad()
    def act(self, obs: Observation, deterministic: bool = True, action_mask: Tensor | None = None) -> Tensor:
        """Raw observations (a tensor, or a dict of them) and a mask [N, K] -> actions [N] or [N, D] from 0."""
        if action_mask is None:
            rows = len(next(iter(parts(obs).values())))
            action_mask = self.is_action.new_ones(rows, int(self.is_action.sum()))
        logprobs = self.policy(obs, action_mask)
        return self.to_env(logprobs.argmax(-1) if deterministic else sample(logprobs, torch.rand_like(logprobs)))

    @torch.no_grad()
    def get_value(self, critic_obs: Observation) -> Tensor:
        """Raw critic observations -> discounted return [N], summed over reward heads."""
        return self.value(critic_obs).sum(-1)


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


def ppo_loss(agent: Agent, args: Args, ent_coef: Tensor, obs: dict[str, Tensor], critic_obs: dict[str, Tensor],
             action_mask: Tensor, actions: Tensor, old_policy: Tensor, old_values: Tensor, advantages: Tensor,
             targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PPO objective of one minibatch: the scalar loss, and METRICS and the extra losses as one detached tensor.

    obs and critic_obs (empty where it is obs) of M rows, action_mask [M, K], actions [M, D], old_policy [M, D, P],
    advantages [M], old_values and targets [M, V], both in units of the normalised value. weights [M] are 0 for rows
    without a choice and the same for all others, 1 on average over the batch: a mean is one over the rows that count.
    """
    logprobs, values = agent(obs, critic_obs, action_mask)
    ratio = (categorical_logprob(logprobs, actions) - categorical_logprob(old_policy, actions)).exp()
    policy_loss = -(weights * torch.min(advantages * ratio, advantages * clamp_ratio(ratio, args))).mean()
    value_error = (values - targets) ** 2
    if args.clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped_values - targets) ** 2)
    value_loss = 0.5 * (weights * value_error.sum(-1)).mean()
    entropy = (weights * categorical_entropy(logprobs)).mean()
    extra = agent.extra_losses(obs)
    loss = policy_loss + args.vf_coef * value_loss - ent_coef * entropy + sum(extra.values())
    with torch.no_grad():
        approx_kl = (weights * categorical_kl(old_policy, logprobs)).mean()
        clipfrac = (weights * ((ratio - 1).abs() > args.clip_coef)).mean()
        later = torch.zeros_like(loss)  # grad_norm and nonfinite are known after the backward pass
    metrics = [policy_loss, value_loss, entropy, approx_kl, clipfrac, later, later, *extra.values()]
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


def agent_kwargs(envs: VecEnv, encoder: str) -> dict:
    """What Agent needs to know of an environment, as plain data. Raises InputError if this script cannot act in it."""
    space, obs, critic_obs = envs.action_space, envs.observation_space, envs.critic_observation_space
    if isinstance(space, spaces.Box):
        raise InputError(f"{envs.env_id} has Box actions: use ppo_continuous.py, or give --action-bins 11")
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else space.nvec.flatten().tolist()
    critic_spec = None
    if critic_obs is not obs:
        try:
            critic_spec = observation_spec(critic_obs, None, encoder, envs.env_id)
        except InputError:  # a vector for the critic of an actor with images, for example
            critic_spec = observation_spec(critic_obs, None, "auto", envs.env_id)
    return {"obs_spec": observation_spec(obs, envs.unflattened_shape, encoder, envs.env_id),
            "critic_obs_spec": critic_spec, "value_size": envs.value_size, "action_sizes": sizes,
            "multi_discrete": not isinstance(space, spaces.Discrete)}  # fmt: skip


def load_agent(path: str | Path, device: str | torch.device = "cpu", **changes: Any) -> tuple[Agent, dict]:
    """The trained Agent, with changes of its Args, and everything else in a checkpoint.

    Raises InputError if this script did not write it.
    """
    state = checkpoint.load_for(SCRIPT, path, device)
    agent = Agent(checkpoint.saved_args(path, state, Args, **changes), **state["agent_kwargs"]).to(device)
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
    obs, _ = envs.reset()
    while min(map(len, scores)) < per_env:
        if lengths.max() > MAX_EVAL_LENGTH:
            raise InputError(f"{envs.env_id}: no end of an episode in {MAX_EVAL_LENGTH} steps; it needs a time limit")
        step = envs.step(agent.act(obs, deterministic, envs.action_mask))
        obs, (rewards, ends) = step.obs, raw_outcome(step)
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
    agent, state = load_agent(args.checkpoint, device, bfloat16=args.bfloat16)
    TorchThreads(args.torch_threads, device)
    torch.manual_seed(args.seed)
    envs = vecenvs.make_for_episodes(args.env_id, args.num_envs, args.num_episodes, device, args.seed, args.env_kwargs,
                                      args.action_bins, args.mask_obs)  # fmt: skip
    kwargs = agent_kwargs(envs, args.encoder)
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
    T, N, B = args.num_steps, args.num_envs, args.num_steps * args.num_envs
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
    envs = vecenvs.make(args.env_id, N, device, env_seed, env_kwargs, args.action_bins, args.mask_obs)
    kwargs = agent_kwargs(envs, args.encoder)
    agent = Agent(args, **kwargs).to(device)
    distributed.broadcast(agent)
    # Only now: weights are equal on all ranks, noise is not. With global_step a resumed run does not repeat its start.
    torch.manual_seed(vecenvs.derive_seed(args.seed, rank, global_step + 1))

    episodes, next_obs, next_critic_obs = EpisodeStats(N, args.games_to_track, world_size), None, None
    if state:
        checkpoint.check_compatible(resume, state, args, envs.env_id, kwargs, NETWORK_ARGS)
        checkpoint.load_weights(resume, state, agent)
        next_obs, next_critic_obs = checkpoint.restore_rank(state["ranks"], rank, world_size, envs, episodes)
    optimizer = make_optimizer(agent, args, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lrs = [group["lr"] for group in optimizer.param_groups]  # on the device: a recorded CUDA graph sees them change

    # ---- storage: allocated once and written in place, so every address in it is fixed ----
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(T, N, *shape, dtype=dtype, device=device)

    if next_obs is None:
        next_obs, next_critic_obs = envs.reset()
    next_obs, next_critic_obs = parts(next_obs), parts(next_critic_obs)
    obs = critic_obs = tree_map(lambda x: new(*x.shape[1:], dtype=x.dtype), next_obs)
    if kwargs["critic_obs_spec"]:
        critic_obs = tree_map(lambda x: new(*x.shape[1:], dtype=x.dtype), next_critic_obs)
    action_mask, rewards = new(sum(kwargs["action_sizes"]), dtype=torch.bool), new(envs.value_size)
    actions, old_policy = new(len(kwargs["action_sizes"]), dtype=torch.int64), new(*agent.is_action.shape)
    old_values, values, returns, targets = (torch.zeros_like(rewards) for _ in range(4))
    weights, advantages, terminations, truncations = new(), new(), new(dtype=torch.bool), new(dtype=torch.bool)
    batch = {"obs": obs, "critic_obs": critic_obs if kwargs["critic_obs_spec"] else {}, "action_mask": action_mask,
             "actions": actions, "old_policy": old_policy, "old_values": old_values, "advantages": advantages,
             "targets": targets, "weights": weights}  # fmt: skip
    batch = tree_map(lambda x: x.flatten(0, 1), batch)  # views, [B, ..]
    ent_coef = torch.tensor(args.ent_coef, device=device)
    in_order = torch.arange(B, device=device).view(args.num_minibatches, -1)

    # ---- hot path ----
    @torch.no_grad()
    def policy_step(obs: dict[str, Tensor], action_mask: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = sample(agent.policy(obs, action_mask), noise)
        return action, agent.to_env(action)

    @torch.no_grad()
    def estimate_advantages(new_rollout: bool) -> None:
        """Fill values, returns, targets and advantages from the rollout, its last next_critic_obs and its finals.

        For a new rollout also old_policy, in update_step's shapes and so with its rounding: equal weights give a ratio
        of exactly 1.
        """
        for mb_inds in in_order:
            mb = tree_map(lambda x: x[mb_inds], batch)  # noqa: B023
            policy, batch["old_values"][mb_inds] = agent(mb["obs"], mb["critic_obs"], mb["action_mask"])
            if new_rollout:
                batch["old_policy"][mb_inds] = policy
        values.copy_(agent.denormalize_value(old_values))
        next_values = torch.cat([values[1:], agent.value(next_critic_obs)[None]])
        # A truncated episode would have gone on from its last observation (in finals), not from the next one's first.
        # V(s_t), off by one step of reward, stays only where a simulator drops that observation.
        next_values = torch.where(truncations[..., None], values, next_values)
        for t, final_critic_obs in finals:
            next_values[t] = torch.where(truncations[t, :, None], agent.value(final_critic_obs), next_values[t])
        terminated, done = terminations[..., None], (terminations | truncations)[..., None]
        shaped = shape_rewards(rewards, args)
        heads, new_returns = compute_gae(shaped, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        returns.copy_(new_returns)
        targets.copy_(agent.value_rms(returns) if args.norm_value else returns)
        valid = agent.allowed(batch["action_mask"]).any(-1).all(-1).view(T, N).float()
        weights.copy_(valid / distributed.average(valid.mean()).clamp(min=1e-8))
        advantages.copy_(heads.sum(-1))
        if args.norm_adv:
            advantages.sub_(distributed.average((weights * advantages).mean()))
            advantages.div_(distributed.average((weights * advantages**2).mean()).sqrt() + 1e-8)

    def loss_gradients(mb_inds: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of batch rows mb_inds [M]: a gradient for each parameter, and the loss's metrics."""
        loss, metrics = ppo_loss(agent, args, ent_coef, **tree_map(lambda x: x[mb_inds], batch))
        return torch.autograd.grad(loss, parameters), metrics

    def update_step(mb_inds: Tensor) -> Tensor:
        """One gradient step on batch rows mb_inds [M]; returns METRICS, still on the device."""
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

    def train_epoch(epoch: int) -> Tensor:
        """One pass over the batch in random order; returns the sum of METRICS over its gradient steps."""
        if epoch and args.recompute_advantages:
            estimate_advantages(new_rollout=False)
        metrics_sum = torch.zeros(len(metric_names), device=device)
        for mb_inds in torch.randperm(B, device=device).view(args.num_minibatches, -1):
            metrics_sum += update_step(mb_inds)
        if args.lr_schedule == "adaptive" and args.kl_interval == "epoch":
            adapt_learning_rates(lrs, metrics_sum[KL] / args.num_minibatches, args)
        return metrics_sum

    # From here on these names mean the fast versions.
    use_compile = device.type == "cuda" if args.compile is None else args.compile
    policy_step, loss_gradients = (compile_pure(fn, use_compile) for fn in (policy_step, loss_gradients))
    update_step = cuda_graph(update_step, enabled=use_compile and device.type == "cuda" and world_size == 1)
    num_updates = args.update_epochs * args.num_minibatches
    metric_names = [f"losses/{name}" for name in (*METRICS, *agent.extra_losses(next_obs))]

    def evaluate_agent(evaluation_envs: VecEnv) -> dict[str, float]:
        return evaluate(agent, evaluation_envs, args.num_episodes, args.deterministic)

    def contents() -> dict:
        """What a checkpoint holds of this script."""
        return {"agent_kwargs": kwargs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    # ---- train ----
    with Run(SCRIPT, args, envs, episodes, resume, state, num_iterations, rank) as run:
        for iteration in range(global_step // batch_size + 1, num_iterations + 1):
            finals: list[tuple[int, dict[str, Tensor]]] = []
            outcomes: list[tuple[Tensor, Tensor]] = []
            for t in range(T):  # rollout
                for key, x in next_obs.items():
                    obs[key][t] = x
                for key, x in next_critic_obs.items() if kwargs["critic_obs_spec"] else ():
                    critic_obs[key][t] = x
                action_mask[t] = True if envs.action_mask is None else envs.action_mask
                with run.phase("policy"):
                    actions[t], env_actions = policy_step(next_obs, action_mask[t], torch.rand_like(old_policy[t]))
                with run.phase("env"):
                    step = envs.step(env_actions)
                rewards[t] = step.rewards.view(N, -1)
                terminations[t], truncations[t] = step.terminations, step.truncations
                outcomes.append(raw_outcome(step))
                if step.final_critic_obs is not None:
                    finals.append((t, parts(step.final_critic_obs)))
                next_obs, next_critic_obs = parts(step.obs), parts(step.critic_obs)
            global_step += batch_size

            # The first rollout only seeds the normalisers' statistics; a resumed run has them already.
            train = not seed_statistics or state is not None or iteration > 1
            metrics_sum = torch.zeros(len(metric_names), device=device)
            with run.phase("update"), threads.update(measure=train):
                estimate_advantages(new_rollout=True)
                progress = (iteration - 1) / num_iterations
                if args.ent_coef_end is not None:
                    ent_coef.fill_(args.ent_coef + progress * (args.ent_coef_end - args.ent_coef))
                if args.lr_schedule == "linear":
                    for lr, initial_lr in zip(lrs, learning_rates(args), strict=True):
                        lr.fill_(initial_lr * (1 - progress))
                for epoch in range(args.update_epochs if train else 0):
                    metrics_sum += train_epoch(epoch)
                # Only now: rollout and update saw the same statistics, so the first ratio of every update is exactly 1.
                agent.update_statistics(batch["obs"], batch["critic_obs"], returns.flatten(0, 1), batch["weights"] > 0)

            # ---- log and save: only here does the host wait for the device ----
            observations = [(obs, next_obs), (critic_obs, next_critic_obs)]
            check_finite(observations, finals, rewards, metrics_sum[NONFINITE].item(), iteration, run.dir)
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
