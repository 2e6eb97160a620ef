"""PPO for continuous actions. Everything that decides what is learned is in this file; read main() top to bottom.

    python ppo_continuous.py --env-id Ant --num-envs 4096
    torchrun --nproc-per-node 4 ppo_continuous.py --env-id Ant --num-envs 4096      # num_envs is per rank
    python ppo_continuous.py --play --checkpoint runs/NAME/last.pt                  # evaluate what was trained

Schulman et al. 2017, https://arxiv.org/abs/1707.06347, with the large-batch practice of rl_games: normalised
observations and values, KL-adaptive learning rate, an asymmetric critic where the env has a privileged state.
Shapes: T num_steps, N num_envs, B = T*N, M = B/num_minibatches rows; O obs, C critic obs, A actions, V reward heads.
"""

import json
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from common import checkpoint, cli, distributed
from common import envs as vecenvs
from common.compile import TorchThreads, compile_pure, cuda_graph
from common.envs.base import VecEnv
from common.errors import InputError, check_divides, check_finite, check_numbers, check_positive, check_range
from common.logger import EpisodeStats, explained_variance, import_wandb
from common.run import Run
from common.running_mean_std import RunningMeanStd

SCRIPT = "ppo_continuous"
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "bounds_loss", "grad_norm", "nonfinite")
KL, GRAD_NORM, NONFINITE = METRICS.index("approx_kl"), METRICS.index("grad_norm"), METRICS.index("nonfinite")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU,
               "softplus": nn.Softplus}  # fmt: skip
NETWORK_ARGS = ("hidden_sizes", "critic_hidden_sizes", "separate", "activation", "d2rl", "layer_norm", "fixed_sigma",
                "norm_obs", "norm_value", "log_sigma_bounds", "mask_obs")  # fmt: skip
OBS_CLIP = 10.0  # standard deviations
MAX_EVAL_LENGTH = 200_000  # steps of one episode, beyond which an evaluation gives up


@dataclass(frozen=True)
class Args:
    # ---- run ----
    env_id: str = "Ant"
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
    total_timesteps: int = 10_000_000
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
    num_envs: int = 4096
    """parallel environments per rank (N)"""
    num_steps: int = 8
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
    hidden_sizes: tuple[int, ...] = (256, 128, 64)
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
    fixed_sigma: bool = True
    """one learnable log-sigma vector; off: log-sigma is a head on the actor's features"""
    log_sigma_init: float = -0.7
    """initial log standard deviation of the policy, in units of the normalised action [-1, 1]"""
    log_sigma_bounds: tuple[float, float] = (-5.0, 2.0)
    """log-sigma approaches these smoothly and never reaches them; it is untouched one unit or more inside"""
    norm_obs: bool = True
    """normalise observations by running statistics"""
    norm_value: bool = True
    """learn values in units of the running standard deviation of returns"""
    norm_adv: bool = True
    """normalise advantages over the whole batch of all ranks"""
    # ---- optimisation ----
    learning_rate: float = 3e-4
    """initial step size of Adam"""
    critic_learning_rate: float | None = None
    """initial step size of the critic; unset: as learning_rate. The schedule moves both"""
    lr_schedule: Literal["constant", "linear", "adaptive"] = "adaptive"
    """linear: to zero over total_timesteps; adaptive: keep the KL between kl_threshold/2 and 2*kl_threshold"""
    kl_threshold: float = 0.03
    """KL from the rollout policy in nats that the adaptive schedule aims for"""
    kl_interval: Literal["minibatch", "epoch"] = "minibatch"
    """how often the adaptive schedule acts"""
    min_lr: float = 1e-6
    """lower end of the adaptive learning rate"""
    max_lr: float = 1e-3
    """upper end of the adaptive learning rate"""
    update_epochs: int = 8
    """passes over each batch"""
    num_minibatches: int = 32
    """gradient steps per pass; must divide num_envs*num_steps"""
    clip_coef: float = 0.2
    """ratio clipping range"""
    smooth_clamp: bool = False
    """bound the ratio by a logistic curve instead of a hard clamp"""
    clip_vloss: bool = False
    """clip the change of the value by clip_coef (standard deviations of the return with norm_value)"""
    vf_coef: float = 1.0
    """weight of the value loss, 0.5 * squared error"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    bounds_loss: Literal["bound", "regularisation"] = "bound"
    """penalty on the policy mean: bound acts beyond 1.1 times the action range, regularisation everywhere"""
    bounds_loss_coef: float = 0.0
    """weight of the bounds loss"""
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
                                       "critic_learning_rate min_lr vf_coef bounds_loss_coef weight_decay")  # fmt: skip
        check_range(self, 0, 1, "gamma gae_lambda")
        check_positive(self, "clip_coef max_grad_norm kl_threshold")
        if not self.play:
            check_divides("num_minibatches", self.num_minibatches, self.num_envs * self.num_steps, "num_envs*num_steps")
        for name, sizes in (("", self.hidden_sizes), ("critic-", self.critic_hidden_sizes)):
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise InputError(f"--{name}hidden-sizes {sizes}: at least one layer, each of at least 1 unit")
        if not self.min_lr < self.max_lr:
            raise InputError(f"--min-lr {self.min_lr}: must be less than --max-lr {self.max_lr}")
        lrs = learning_rates(self)
        if self.lr_schedule == "adaptive" and not all(self.min_lr <= lr <= self.max_lr for lr in lrs):
            raise InputError(f"--learning-rate {lrs[0]} (critic: {lrs[1]}): the adaptive schedule is between --min-lr "
                             f"{self.min_lr} and --max-lr {self.max_lr}; move these or use another")  # fmt: skip
        if not self.reward_min < self.reward_max:
            raise InputError(f"--reward-min {self.reward_min}: must be less than --reward-max {self.reward_max}")
        if self.log_sigma_bounds[1] - self.log_sigma_bounds[0] <= 2:
            raise InputError(f"--log-sigma-bounds {self.log_sigma_bounds}: must lie more than 2 apart")
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


def smooth_bounds(x: Tensor, low: float, high: float) -> Tensor:
    """x itself in [low+1, high-1], then a curve to low and high whose gradient falls only as 1/x^2."""
    over, under = (x - (high - 1)).clamp(min=0), ((low + 1) - x).clamp(min=0)
    return x.clamp(low + 1, high - 1) + over / (1 + over) - under / (1 + under)


class Agent(nn.Module):
    """Diagonal Gaussian policy and state-value critic with the statistics of their inputs: one state_dict to deploy.

    Actions inside the agent are in units of [-1, 1]; `act` and `to_env` return the environment's own units. Where an
    action dimension has no bounds the two are the same.
    """

    def __init__(self, args: Args, obs_dim: int, critic_obs_dim: int, asymmetric: bool, value_size: int,
                 action_low: list[float], action_high: list[float]):  # fmt: skip
        super().__init__()
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        bounded = (high - low).isfinite()
        self.register_buffer("action_low", low)
        self.register_buffer("action_high", high)
        self.register_buffer("action_bounded", bounded.float())
        self.register_buffer("action_scale", torch.where(bounded, (high - low) / 2, 1.0))
        self.register_buffer("action_center", torch.where(bounded, (high + low) / 2, 0.0))
        self.log_sigma_bounds, self.value_size = args.log_sigma_bounds, value_size
        self.norm_obs, self.norm_value = args.norm_obs, args.norm_value
        self.obs_rms, self.value_rms = RunningMeanStd(obs_dim), RunningMeanStd(value_size)
        self.critic_obs_rms = RunningMeanStd(critic_obs_dim) if asymmetric else self.obs_rms
        self.actor = MLP(obs_dim, args.hidden_sizes, args)
        critic_sizes = args.critic_hidden_sizes or args.hidden_sizes
        self.critic = MLP(critic_obs_dim, critic_sizes, args) if args.separate or asymmetric else self.actor
        self.value_head = initialize(nn.Linear(self.critic.out_features, value_size), args.initializer, gain=1.0)
        self.mean_head = initialize(nn.Linear(self.actor.out_features, len(low)), args.initializer, gain=0.01)
        self.log_sigma = nn.Parameter(torch.full((len(low),), args.log_sigma_init))
        self.sigma_head = None if args.fixed_sigma else nn.Linear(self.actor.out_features, len(low), bias=False)
        if self.sigma_head is not None:
            nn.init.zeros_(self.sigma_head.weight)  # log_sigma is its bias: one sigma for all at first

    def encode(self, obs: Tensor, rms: RunningMeanStd) -> Tensor:
        """Raw observations to network input; the place for an image encoder."""
        return rms(obs).clamp(-OBS_CLIP, OBS_CLIP) if self.norm_obs else obs

    def policy(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """obs [.., O] -> mean, log_sigma [.., A], float32, in units of [-1, 1]."""
        features = self.actor(self.encode(obs, self.obs_rms))
        mean = self.mean_head(features)
        log_sigma = self.log_sigma if self.sigma_head is None else self.log_sigma + self.sigma_head(features)
        return mean.float(), smooth_bounds(log_sigma.float(), *self.log_sigma_bounds).expand_as(mean)

    def normalized_value(self, critic_obs: Tensor) -> Tensor:
        """critic_obs [.., C] -> value heads [.., V] in units of value_rms."""
        return self.value_head(self.critic(self.encode(critic_obs, self.critic_obs_rms))).float()

    def value(self, critic_obs: Tensor) -> Tensor:
        """critic_obs [.., C] -> value heads [.., V] in units of the shaped reward."""
        return self.denormalize_value(self.normalized_value(critic_obs))

    def denormalize_value(self, value: Tensor) -> Tensor:
        return self.value_rms.denormalize(value) if self.norm_value else value

    def extra_losses(self, obs: Tensor) -> dict[str, Tensor]:
        """Named scalar losses of obs [M, O], added to PPO's and logged: the place for auxiliary tasks."""
        return {}

    def update_statistics(self, obs: Tensor, critic_obs: Tensor, returns: Tensor) -> None:
        """Let the normalisers see a batch: obs [B, O], critic_obs [B, C], returns [B, V]."""
        self.obs_rms.update(obs)
        self.value_rms.update(returns)
        if self.critic_obs_rms is not self.obs_rms:
            self.critic_obs_rms.update(critic_obs)

    def to_env(self, actions: Tensor) -> Tensor:
        """Units of [-1, 1] to the environment's, inside its bounds (the stored sample stays as it was drawn)."""
        return (actions * self.action_scale + self.action_center).clamp(self.action_low, self.action_high)

    @torch.no_grad()
    def act(self, obs: Tensor, deterministic: bool = True) -> Tensor:
        """Raw observations [N, O] -> actions [N, A] in the environment's units."""
        mean, log_sigma = self.policy(obs)
        return self.to_env(mean if deterministic else mean + log_sigma.exp() * torch.randn_like(mean))

    @torch.no_grad()
    def get_value(self, critic_obs: Tensor) -> Tensor:
        """Raw critic observations [N, C] -> discounted return [N], summed over reward heads."""
        return self.value(critic_obs).sum(-1)


def gaussian_logprob(mean: Tensor, log_sigma: Tensor, actions: Tensor) -> Tensor:
    """Log density in nats of actions [.., A] under the diagonal Gaussian, [..]."""
    return (-0.5 * ((actions - mean) * (-log_sigma).exp()) ** 2 - log_sigma - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(mean0: Tensor, log_sigma0: Tensor, mean1: Tensor, log_sigma1: Tensor) -> Tensor:
    """KL(0 || 1) in nats of diagonal Gaussians [.., A], [..]; exactly 0 for equal arguments, since expm1(0) = 0."""
    d = log_sigma0 - log_sigma1
    return 0.5 * (torch.expm1(2 * d) - 2 * d + ((mean0 - mean1) * (-log_sigma1).exp()) ** 2).sum(-1)


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


def ppo_loss(agent: Agent, args: Args, obs: Tensor, critic_obs: Tensor, actions: Tensor, old_mean: Tensor,
             old_log_sigma: Tensor, old_values: Tensor, advantages: Tensor,
             targets: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PPO objective of one minibatch: the scalar loss, and METRICS and the extra losses as one detached tensor.

    obs [M, O], critic_obs [M, C], actions, old_mean and old_log_sigma [M, A], advantages [M], old_values and targets
    [M, V], both in units of the normalised value.
    """
    mean, log_sigma = agent.policy(obs)
    ratio = (gaussian_logprob(mean, log_sigma, actions) - gaussian_logprob(old_mean, old_log_sigma, actions)).exp()
    policy_loss = -torch.min(advantages * ratio, advantages * clamp_ratio(ratio, args)).mean()
    values = agent.normalized_value(critic_obs)
    value_error = (values - targets) ** 2
    if args.clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped_values - targets) ** 2)
    value_loss = 0.5 * value_error.sum(-1).mean()
    entropy = (log_sigma + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
    excess = (mean.abs() - 1.1).clamp(min=0) * agent.action_bounded if args.bounds_loss == "bound" else mean
    bounds_loss = (excess**2).sum(-1).mean()
    extra = agent.extra_losses(obs)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.bounds_loss_coef * bounds_loss
    loss = loss + sum(extra.values())
    with torch.no_grad():
        approx_kl = gaussian_kl(old_mean, old_log_sigma, mean, log_sigma).mean()
        clipfrac = ((ratio - 1).abs() > args.clip_coef).float().mean()
        later = torch.zeros_like(loss)  # grad_norm and nonfinite are known after the backward pass
    metrics = [policy_loss, value_loss, entropy, approx_kl, clipfrac, bounds_loss, later, later, *extra.values()]
    return loss, torch.stack(metrics).detach()


def agent_kwargs(envs: VecEnv) -> dict:
    """What Agent needs to know of an environment, as plain data. Raises InputError if this script cannot act in it."""
    space, obs, critic_obs = envs.action_space, envs.observation_space, envs.critic_observation_space
    if not isinstance(space, spaces.Box):
        raise InputError(f"{envs.env_id} has {type(space).__name__} actions, not Box: use ppo_discrete.py")
    if len(obs.shape) != 1 or len(critic_obs.shape) != 1:
        raise InputError(f"{envs.env_id} has observations of shape {obs.shape}, not vectors: use ppo_discrete.py")
    return {"obs_dim": obs.shape[0], "critic_obs_dim": critic_obs.shape[0], "asymmetric": critic_obs is not obs,
            "value_size": envs.value_size, "action_low": space.low.flatten().tolist(),
            "action_high": space.high.flatten().tolist()}  # fmt: skip


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
        step = envs.step(agent.act(obs, deterministic))
        obs = step.obs
        returns += step.rewards.view(envs.num_envs, -1).sum(-1).double().cpu()
        lengths += 1
        for i in (step.terminations | step.truncations).nonzero().flatten().tolist():
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
    checkpoint.check_compatible(args.checkpoint, state, args, envs.env_id, agent_kwargs(envs), NETWORK_ARGS)
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
    envs = vecenvs.make(args.env_id, N, device, env_seed, env_kwargs, mask_obs=args.mask_obs)
    kwargs = agent_kwargs(envs)
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

    obs, actions, rewards = new(kwargs["obs_dim"]), new(len(kwargs["action_low"])), new(envs.value_size)
    critic_obs = new(kwargs["critic_obs_dim"]) if kwargs["asymmetric"] else obs
    old_mean, old_log_sigma = torch.zeros_like(actions), torch.zeros_like(actions)
    old_values, values, returns, targets = (torch.zeros_like(rewards) for _ in range(4))
    advantages, terminations, truncations = new(), new(dtype=torch.bool), new(dtype=torch.bool)
    batch = {"obs": obs, "critic_obs": critic_obs, "actions": actions, "old_mean": old_mean,
             "old_log_sigma": old_log_sigma, "old_values": old_values, "advantages": advantages,
             "targets": targets}  # fmt: skip
    batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # views, [B, ..]
    in_order = torch.arange(B, device=device).view(args.num_minibatches, -1)

    # ---- hot path ----
    @torch.no_grad()
    def policy_step(obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_sigma = agent.policy(obs)
        action = mean + log_sigma.exp() * noise
        return action, agent.to_env(action)

    @torch.no_grad()
    def estimate_advantages(new_rollout: bool) -> None:
        """Fill values, returns, targets and advantages from the rollout, its last next_critic_obs and its finals.

        For a new rollout also old_mean and old_log_sigma, in update_step's shapes and so with its rounding: equal
        weights give a ratio of exactly 1.
        """
        for mb_inds in in_order:
            if new_rollout:
                batch["old_mean"][mb_inds], batch["old_log_sigma"][mb_inds] = agent.policy(batch["obs"][mb_inds])
            batch["old_values"][mb_inds] = agent.normalized_value(batch["critic_obs"][mb_inds])
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
        advantages.copy_(heads.sum(-1))
        if args.norm_adv:
            advantages.sub_(distributed.average(advantages.mean()))
            advantages.div_(distributed.average((advantages**2).mean()).sqrt() + 1e-8)

    def loss_gradients(mb_inds: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Of batch rows mb_inds [M]: a gradient for each parameter, and the loss's metrics."""
        loss, metrics = ppo_loss(agent, args, **{name: x[mb_inds] for name, x in batch.items()})
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
    metric_names = [f"losses/{name}" for name in (*METRICS, *agent.extra_losses(obs[0, :2]))]

    def evaluate_agent(evaluation_envs: VecEnv) -> dict[str, float]:
        return evaluate(agent, evaluation_envs, args.num_episodes, args.deterministic)

    def contents() -> dict:
        """What a checkpoint holds of this script."""
        return {"agent_kwargs": kwargs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()}

    # ---- train ----
    if next_obs is None:
        next_obs, next_critic_obs = envs.reset()
    with Run(SCRIPT, args, envs, episodes, resume, state, num_iterations, rank) as run:
        for iteration in range(global_step // batch_size + 1, num_iterations + 1):
            finals: list[tuple[int, Tensor]] = []
            for t in range(T):  # rollout
                obs[t] = next_obs
                if kwargs["asymmetric"]:
                    critic_obs[t] = next_critic_obs
                with run.phase("policy"):
                    actions[t], env_actions = policy_step(next_obs, torch.randn_like(actions[t]))
                with run.phase("env"):
                    step = envs.step(env_actions)
                rewards[t] = step.rewards.view(N, -1)
                terminations[t], truncations[t] = step.terminations, step.truncations
                if step.final_critic_obs is not None:
                    finals.append((t, step.final_critic_obs))
                next_obs, next_critic_obs = step.obs, step.critic_obs
            global_step += batch_size

            # The first rollout only seeds the normalisers' statistics; a resumed run has them already.
            train = not seed_statistics or state is not None or iteration > 1
            metrics_sum = torch.zeros(len(metric_names), device=device)
            with run.phase("update"), threads.update(measure=train):
                estimate_advantages(new_rollout=True)
                if args.lr_schedule == "linear":
                    for lr, initial_lr in zip(lrs, learning_rates(args), strict=True):
                        lr.fill_(initial_lr * (1 - (iteration - 1) / num_iterations))
                for epoch in range(args.update_epochs if train else 0):
                    metrics_sum += train_epoch(epoch)
                # Only now: rollout and update saw the same statistics, so the first ratio of every update is exactly 1.
                agent.update_statistics(batch["obs"], batch["critic_obs"], returns.flatten(0, 1))

            # ---- log and save: only here does the host wait for the device ----
            observations = [(obs, next_obs), (critic_obs, next_critic_obs)]
            check_finite(observations, finals, rewards, metrics_sum[NONFINITE].item(), iteration, run.dir)
            episodes.update(rewards.sum(-1), terminations | truncations)
            log = episodes.metrics() | {"charts/learning_rate": lrs[0].item()}
            if train:
                log |= zip(metric_names, (metrics_sum / num_updates).tolist(), strict=True)
                log["losses/explained_variance"] = explained_variance(values, returns)
            run.end_iteration(iteration, global_step, log, evaluate_agent, contents)
            if run.stop_reason:
                break
    return run.log


if __name__ == "__main__":
    cli.run(main, Args)
