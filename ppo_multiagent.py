"""PPO with many agents in an environment: one policy for all, its own or a central critic, death and action masks.

    python ppo_multiagent.py --env-id vmas/simple_spread --central-critic
    torchrun --nproc-per-node 4 ppo_multiagent.py --env-id vmas/simple_spread       # num_envs is per rank
    python ppo_multiagent.py --play --checkpoint runs/NAME/last.pt                  # evaluate what was trained

Each agent acts on its own observation, by shared weights. Values are of one's own observation (independent PPO,
https://arxiv.org/abs/2011.09533) or of the whole env (MAPPO, https://arxiv.org/abs/2103.01955). The rows of dead agents
have weight 0 everywhere; an agent's own return ends with its death, that of the team goes on. Memory is out of scope,
but for --frame-stack. PPO: Schulman et al. 2017, https://arxiv.org/abs/1707.06347.
Shapes: T num_steps, N num_envs, G num_agents, B = T*N, M = B/num_minibatches; agents are an axis of every row, as in
[T, N, G, ..] or [M, G, ..]. O obs, C state; a Gaussian policy has A dimensions, a discrete one D sub-actions with K
actions in all, padded to the largest, P: a table [D, P].
"""

import copy
import itertools
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
from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv
from common.envs.self_play import Human, SelfPlayVecEnv
from common.errors import InputError, check_divides, check_finite, check_numbers, check_positive, check_range
from common.logger import EpisodeStats, explained_variance, import_wandb
from common.run import Run
from common.running_mean_std import RunningMeanStd

SCRIPT = "ppo_multiagent"
METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "bounds_loss", "grad_norm", "nonfinite")
KL, GRAD_NORM, NONFINITE = METRICS.index("approx_kl"), METRICS.index("grad_norm"), METRICS.index("nonfinite")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU,
               "softplus": nn.Softplus}  # fmt: skip
NETWORK_ARGS = ("self_play", "pool_size", "agent_ids", "central_critic", "team_value", "frame_stack", "hidden_sizes",
                "critic_hidden_sizes", "separate", "activation", "d2rl", "layer_norm", "norm_obs",
                "norm_value")  # fmt: skip
LOG_SIGMA_BOUNDS = (-5.0, 2.0)  # approached smoothly and never reached
OBS_CLIP = 10.0  # standard deviations
MAX_EVAL_LENGTH = 200_000  # steps of one episode, beyond which an evaluation gives up
RANDOM = 0  # slot of a pool
ELO_K = 16.0
SNAPSHOT_GAMES = 20_000  # last games on which it is decided that the pool is beaten; so copies are not too alike
SCORE_GAMES = 100  # games over which the score against one opponent is averaged
FORBIDDEN = -1e30  # logit of an action that is not allowed: its probability is exactly 0, and 0 * FORBIDDEN is finite


@dataclass(frozen=True)
class Args:
    # ---- run ----
    env_id: str = "vmas/simple_spread"
    """environment: a bare name (Ant is the newest Ant-vN), envpool/..., gym/... or gym/module:Name-v0"""
    env_kwargs: tuple[str, ...] = ()
    """options of the environment as name=value, for example use_contact_force=False"""
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
    gamma: float = 0.99
    """discount per environment step"""
    gae_lambda: float = 0.95
    """decay of the weight of later TD errors in the advantage"""
    finite_horizon: bool = False
    """the time limit is the end of the task, after which nothing is expected, https://arxiv.org/abs/1712.00378"""
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
    # ---- agents ----
    agent_ids: bool = False
    """append which agent it is, one-hot, to each observation"""
    central_critic: bool = False
    """the critic reads the env's state, or all agents' observations where it has none, and whose value is asked for"""
    team_value: bool = False
    """one value an env for the mean reward of the living agents, instead of one an agent (needs central_critic)"""
    frame_stack: int = 1
    """last observations of an agent that are its input"""
    # ---- self-play ----
    self_play: bool = False
    """train one side of a zero-sum game of two teams against frozen copies of the policy"""
    pool_size: int = 16
    """copies that are played against; a new one replaces the oldest"""
    snapshot_win_rate: float = 0.55
    """score (a draw is half a win) against the pool at which the policy is copied into it"""
    latest_share: float = 0.25
    """share of games against the newest copy; the others are drawn by (1 - score)^2, the hardest most often"""
    opponent_noise: float = 0.1
    """share of the opponents' moves in training that are drawn at random, so that unusual positions are seen too"""
    opponent: str = "random"
    """whom --play and --eval-interval play against: random, pool (of the checkpoint), human, or a checkpoint's path"""
    # ---- network ----
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
        check_range(self, 1, math.inf, "num_envs num_steps num_minibatches update_epochs num_episodes games_to_track "
                                       "total_timesteps frame_stack pool_size")  # fmt: skip
        check_range(self, 0, 2**63 - 1, "seed")
        check_range(self, 0, math.inf, "torch_threads save_interval save_best_after eval_interval learning_rate "
                                       "critic_learning_rate min_lr vf_coef weight_decay bounds_loss_coef")  # fmt: skip
        check_range(self, 0, 1, "gamma gae_lambda snapshot_win_rate latest_share opponent_noise")
        check_positive(self, "clip_coef max_grad_norm kl_threshold")
        if not self.play:
            check_divides("num_minibatches", self.num_minibatches, self.num_envs * self.num_steps, "num_envs*num_steps")
        if self.team_value and not self.central_critic:
            raise InputError("--team-value: one value for all agents is that of a central critic; add --central-critic")
        if self.opponent != "random" and not self.self_play:
            raise InputError(f"--opponent {self.opponent}: there are opponents in self-play only; add --self-play")
        if self.opponent not in ("random", "pool", "human") and not Path(self.opponent).is_file():
            raise InputError(f"--opponent {self.opponent}: is neither random, pool, human nor a checkpoint's path")
        if self.opponent == "human" and not self.play:
            raise InputError("--opponent human: somebody can play against a checkpoint, by --play, not in training")
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


class GaussianPolicy(nn.Module):
    """Diagonal Gaussian head: a policy is [.., 2A], mean and log-sigma in units of [-1, 1] where an action has bounds.

    A dimension that an agent does not have (action_mask) is the same for every weight, with entropy 0: it is sampled
    and ignored.
    """

    action_dtype = torch.float32

    def __init__(self, n_in: int, args: Args, low: list[float], high: list[float]):
        super().__init__()
        low, high = torch.tensor(low), torch.tensor(high)
        bounded = (high - low).isfinite()
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        self.register_buffer("bounded", bounded.float())
        self.register_buffer("scale", torch.where(bounded, (high - low) / 2, 1.0))
        self.register_buffer("center", torch.where(bounded, (high + low) / 2, 0.0))
        self.action_size = self.mask_size = len(low)
        self.policy_shape = (2 * len(low),)
        self.mean = initialize(nn.Linear(n_in, len(low)), args.initializer, gain=0.01)
        self.log_sigma = nn.Parameter(torch.full((len(low),), args.log_sigma_init))

    def forward(self, features: Tensor, action_mask: Tensor) -> Tensor:
        mean = torch.where(action_mask, self.mean(features).float(), 0.0)
        log_sigma = smooth_bounds(self.log_sigma, *LOG_SIGMA_BOUNDS).expand_as(mean)
        return torch.cat([mean, torch.where(action_mask, log_sigma, -0.5 * math.log(2 * math.pi * math.e))], -1)

    def noise(self, *rows: int) -> Tensor:
        """What sample needs, drawn outside of compiled code."""
        return torch.randn(*rows, self.action_size, device=self.low.device)

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
        """Penalty [..] on a mean beyond 1.1 times the action range."""
        return ((((self.mode(policy).abs() - 1.1).clamp(min=0)) * self.bounded) ** 2).sum(-1)

    def has_choice(self, action_mask: Tensor) -> Tensor:
        """Whether a row allows anything at all, [..]."""
        return action_mask.any(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        """Units of [-1, 1] to the environment's, inside its bounds (the stored sample stays as it was drawn)."""
        return (actions * self.scale + self.center).clamp(self.low, self.high)


class CategoricalPolicy(nn.Module):
    """A categorical head for each sub-action: a policy is a table [.., D, P] of log-probabilities.

    What a mask [.., K] forbids, and the padding of shorter sub-actions, has probability 0. Where nothing is allowed it
    is action 0 for certain, a row that training leaves out.
    """

    action_dtype = torch.int64

    def __init__(self, n_in: int, args: Args, sizes: list[int], multi_discrete: bool):
        super().__init__()
        self.multi_discrete, self.action_size, self.mask_size = multi_discrete, len(sizes), sum(sizes)
        self.policy_shape = (len(sizes), max(sizes))
        column, sizes = torch.arange(max(sizes)).expand(len(sizes), -1), torch.tensor(sizes)[:, None]
        self.register_buffer("is_action", column < sizes, persistent=False)  # [D, P], False: padding
        starts = sizes.cumsum(0) - sizes  # of each sub-action in a mask [K]
        # [D, P]: where an entry of the table stands in a mask [K]
        self.register_buffer("mask_index", (starts + column).clamp(max=self.mask_size - 1), persistent=False)
        self.logits = initialize(nn.Linear(n_in, self.is_action.numel()), args.initializer, gain=0.01)

    def forward(self, features: Tensor, action_mask: Tensor) -> Tensor:
        allowed = self.allowed(action_mask)
        allowed[..., 0] |= ~allowed.any(-1)  # action 0 where nothing is allowed
        logits = self.logits(features).float().unflatten(-1, self.policy_shape)
        return torch.where(allowed, logits, FORBIDDEN).log_softmax(-1)

    def allowed(self, action_mask: Tensor) -> Tensor:
        """A mask [.., K] as a table [.., D, P]."""
        return action_mask[..., self.mask_index] & self.is_action

    def noise(self, *rows: int) -> Tensor:
        return torch.rand(*rows, *self.policy_shape, device=self.is_action.device)

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
        return torch.zeros_like(policy[..., 0, 0])

    def has_choice(self, action_mask: Tensor) -> Tensor:
        return self.allowed(action_mask).any(-1).all(-1)

    def to_env(self, actions: Tensor) -> Tensor:
        return actions if self.multi_discrete else actions.squeeze(-1)


class Policy(nn.Module):
    """What acts, observations [.., G, O] -> policies [.., G, *policy_shape] of its head: a snapshot is an opponent."""

    def __init__(self, args: Args, num_agents: int, obs_dim: int, action_spec: dict):
        super().__init__()
        self.args, self.obs_rms = args, RunningMeanStd(obs_dim)
        self.register_buffer("ids", torch.eye(num_agents), persistent=False)
        self.actor = MLP(obs_dim + num_agents * args.agent_ids, args.hidden_sizes, args)
        head = CategoricalPolicy if "sizes" in action_spec else GaussianPolicy
        self.head = head(self.actor.out_features, args, **action_spec)

    def normalize(self, x: Tensor, rms: RunningMeanStd) -> Tensor:
        return rms(x).clamp(-OBS_CLIP, OBS_CLIP) if self.args.norm_obs else x

    def with_ids(self, x: Tensor) -> Tensor:
        """x [.., G, H] -> [.., G, H+G], which agent it is appended to each row."""
        return torch.cat([x, self.ids.expand(*x.shape[:-2], -1, -1)], -1)

    def features(self, obs: Tensor) -> Tensor:
        x = self.normalize(obs, self.obs_rms)
        return self.actor(self.with_ids(x) if self.args.agent_ids else x)

    def forward(self, obs: Tensor, action_mask: Tensor) -> Tensor:
        return self.head(self.features(obs), action_mask)


class Agent(nn.Module):
    """The policy and the critic of all agents with the statistics of their inputs: one state_dict to deploy.

    Observations [.., G, O] and states [.., C] are raw, with 0 in the rows of dead agents. Where the critic reads no
    state, that is empty, [.., 0].
    """

    def __init__(self, args: Args, num_agents: int, obs_dim: int, state_dim: int, action_spec: dict):
        super().__init__()
        self.args, self.num_agents = args, num_agents
        self.policy, self.value_rms = Policy(args, num_agents, obs_dim, action_spec), RunningMeanStd(1)
        self.state_rms = RunningMeanStd(state_dim) if args.central_critic and state_dim else None
        self.critic = self.policy.actor
        critic_dim, critic_sizes = obs_dim + num_agents * args.agent_ids, args.critic_hidden_sizes or args.hidden_sizes
        if args.central_critic:
            critic_dim = (state_dim or num_agents * obs_dim) + num_agents * (not args.team_value)
        if args.separate or args.central_critic:
            self.critic = MLP(critic_dim, critic_sizes, args)
        self.value_head = initialize(nn.Linear(self.critic.out_features, 1), args.initializer, gain=1.0)

    def forward(self, obs: Tensor, state: Tensor, action_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Policies [.., G, *policy_shape] and normalized_value, through a shared trunk only once."""
        if self.critic is not self.policy.actor:
            return self.policy(obs, action_mask), self.normalized_value(obs, state)
        features = self.policy.features(obs)
        return self.policy.head(features, action_mask), self.value_head(features).squeeze(-1).float()

    def normalized_value(self, obs: Tensor, state: Tensor) -> Tensor:
        """Values [.., G] in units of value_rms; a team's value stands for each of its agents."""
        policy, args = self.policy, self.args
        x = policy.normalize(obs, policy.obs_rms)
        if args.central_critic:
            x = x.flatten(-2) if self.state_rms is None else policy.normalize(state, self.state_rms)
            x = x[..., None, :]
            x = x if args.team_value else policy.with_ids(x.expand(*x.shape[:-2], self.num_agents, -1))
        elif args.agent_ids:
            x = policy.with_ids(x)
        return self.value_head(self.critic(x)).squeeze(-1).float().expand(*obs.shape[:-1])

    def value(self, obs: Tensor, state: Tensor) -> Tensor:
        """Values [.., G] in units of the shaped reward."""
        return self.denormalize_value(self.normalized_value(obs, state))

    def denormalize_value(self, value: Tensor) -> Tensor:
        return self.value_rms.denormalize(value) if self.args.norm_value else value

    def extra_losses(self, obs: Tensor) -> dict[str, Tensor]:
        """Named scalar losses of obs [M, G, O], added to PPO's and logged: the place for auxiliary tasks."""
        return {}

    def update_statistics(self, obs: Tensor, state: Tensor, returns: Tensor, valid: Tensor) -> None:
        """Let the normalisers see a batch: obs [B, G, O], state [B, C], returns and valid (bool) [B, G]."""
        self.policy.obs_rms.update(obs.flatten(0, 1), valid.flatten())
        self.value_rms.update(returns.view(-1, 1), valid.flatten())
        if self.state_rms is not None:
            self.state_rms.update(state, valid.any(-1))

    def observe(self, obs: Tensor, state: Tensor | None, alive: Tensor) -> tuple[Tensor, Tensor]:
        """An env's observations and state as this network takes them, whatever the rows of dead agents hold."""
        return torch.where(alive[..., None], obs, 0.0), obs[:, 0, :0] if self.state_rms is None else state

    @torch.no_grad()
    def policy_step(self, obs: Tensor, action_mask: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """One step of a rollout: actions of all agents, and those in the environment's units."""
        head = self.policy.head
        actions = head.sample(self.policy(obs, action_mask), noise)
        return actions, head.to_env(actions)

    @torch.no_grad()
    def act(self, obs: Tensor, deterministic: bool = True, action_mask: Tensor | None = None) -> Tensor:
        """Observations [N, G, O] and a mask [N, G, K] -> actions [N, G] or [N, G, A] in the environment's units."""
        head = self.policy.head
        if action_mask is None:
            action_mask = torch.ones(*obs.shape[:-1], head.mask_size, dtype=torch.bool, device=obs.device)
        policy = self.policy(obs, action_mask)
        return head.to_env(head.mode(policy) if deterministic else head.sample(policy, head.noise(*obs.shape[:-1])))


class Pool:
    """Opponents of self-play: frozen copies of the policy, who of them is drawn, and how strong each is.

    The tensors of S = size + 2 policies are stacked, [S, ..], so that one batched call evaluates all of them. Slot
    RANDOM acts at random. A new copy takes the slot that is not in the pool, once no game against it goes on.
    Prioritised fictitious self-play: https://www.nature.com/articles/s41586-019-1724-z; ratings are Elo's.
    """

    def __init__(self, policy: Policy, args: Args, size: int, noise: float = 0.0):
        self.policy, self.args, self.size, self.noise = copy.deepcopy(policy), args, size, noise
        self.slots = {name: torch.stack([x] * (size + 2)) for name, x in policy.state_dict().items()}
        for name, _ in policy.head.named_parameters():  # equal logits; a Gaussian about the middle
            self.slots[f"head.{name}"][RANDOM] = 0
        self.members, self.scores, self.ratings = [1], [0.5] * (size + 2), [0.0] * (size + 2)  # members: oldest first
        self.rating, self.recent = 0.0, []  # the learner's
        self.rank()

    @torch.no_grad()
    def act(self, obs: Tensor, action_mask: Tensor | None, who: Tensor) -> Tensor:
        """Sampled actions of the opponents in slots who [N] for obs [N, G, O], a share of them at random."""
        N, S, device, head = len(obs), self.size + 2, obs.device, self.policy.head
        if action_mask is None:
            action_mask = torch.ones(*obs.shape[:-1], head.mask_size, dtype=torch.bool, device=device)
        who = torch.where(torch.rand(N, device=device) < self.noise, RANDOM, who)
        # Each opponent's rows side by side, in a table as wide as the most of them; on a GPU, that is not asked for.
        counts, (who, order) = (who == torch.arange(S, device=device)[:, None]).sum(1), who.sort(stable=True)
        place = torch.arange(N, device=device) - (counts.cumsum(0) - counts)[who]
        table = torch.zeros(S, N if device.type == "cuda" else int(counts.max()), dtype=torch.int64, device=device)
        table[who, place] = order
        call = torch.func.vmap(lambda x, *inputs: torch.func.functional_call(self.policy, x, inputs))
        policies = call(self.slots, obs[table], action_mask[table])[who, place]
        actions = head.to_env(head.sample(policies, head.noise(*obs.shape[:-1])))
        return torch.empty_like(actions).index_copy_(0, order, actions)

    def draw(self, count: int) -> Tensor:
        """Slots [count] of the next opponents."""
        return torch.multinomial(self.chances, count, replacement=True)

    def rank(self) -> None:
        """Set who is drawn how often, from the scores."""
        *others, latest = self.members
        weights = [(1 - self.scores[slot]) ** 2 + 1e-6 for slot in others]
        chances = [0.0] * (self.size + 2)
        for slot, weight in zip(others, weights, strict=True):
            chances[slot] = (1 - self.args.latest_share) * weight / sum(weights)
        chances[latest] = self.args.latest_share if others else 1.0
        self.chances = torch.tensor(chances, device=self.policy.ids.device)

    def record(self, games: list[tuple[int, float]]) -> None:
        """Learn from games: an opponent's slot and the learner's result, 1 (won), 0 or -1, in their order."""
        for slot, result in games:
            score = (1 + result) / 2
            surprise = score - 1 / (1 + 10 ** ((self.ratings[slot] - self.rating) / 400))
            self.rating += ELO_K * surprise
            self.scores[slot] += (score - self.scores[slot]) / SCORE_GAMES
            self.recent.append(score)
        self.recent = self.recent[-SNAPSHOT_GAMES:]
        self.rank()

    def grow(self, policy: Policy, playing: set[int]) -> None:
        """Copy the policy into the pool if it beats it and a slot is free. playing: slots in games that go on."""
        free = set(range(1, self.size + 2)) - set(self.members) - playing
        if not free or len(self.recent) < SNAPSHOT_GAMES or np.mean(self.recent) < self.args.snapshot_win_rate:
            return
        slot = min(free)
        for name, x in policy.state_dict().items():
            self.slots[name][slot].copy_(x)
        self.members = [*self.members, slot][-self.size :]
        self.scores[slot], self.ratings[slot], self.recent = 0.5, self.rating, []
        self.rank()

    def end_iteration(self, policy: Policy, envs: SelfPlayVecEnv) -> dict[str, float]:
        """Record the games that ended, on all ranks, and copy policy if it is time to; returns metrics."""
        ends, who, result = (torch.stack(x) for x in zip(*envs.games, strict=True))
        envs.games.clear()
        games = list(zip(who[ends].tolist(), result[ends].tolist(), strict=True))
        games, playing = zip(*distributed.gather_objects((games, set(envs.who.tolist()))), strict=True)
        self.record(list(itertools.chain(*games)))
        self.grow(policy, set().union(*playing))
        return {"charts/elo": self.rating, "charts/pool": len(self.members),
                "charts/score": float(np.mean(self.recent)) if self.recent else math.nan,
                "charts/lowest_score": min(self.scores[slot] for slot in self.members)}  # fmt: skip

    def state_dict(self) -> dict:
        names = ("slots", "members", "scores", "ratings", "rating", "recent")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: dict) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.slots = {name: x.to(self.policy.ids.device) for name, x in self.slots.items()}
        self.rank()


def with_opponent(envs: MultiAgentVecEnv, agent: Agent, pool: Pool | None, args: Args) -> MultiAgentVecEnv:
    """envs against whom args.opponent names, if there is a pool: it, one who draws his moves, a human, a checkpoint."""
    if pool is None:
        return envs
    if args.opponent in ("pool", "random"):
        opponent = pool if args.opponent == "pool" else Pool(agent.policy, args, 0, noise=1.0)
    elif args.opponent == "human":
        opponent = Human(envs)
    else:
        other, state = load_agent(args.opponent, envs.device)
        checkpoint.check_compatible(args.opponent, state, args, envs.env_id, {}, ())
        opponent = Pool(other.policy, args, 0)
    return SelfPlayVecEnv(envs, opponent)


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


def ppo_loss(agent: Agent, args: Args, obs: Tensor, state: Tensor, action_mask: Tensor, actions: Tensor,
             old_policy: Tensor, old_values: Tensor, advantages: Tensor, targets: Tensor, weights: Tensor,
             value_weights: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """PPO objective of one minibatch: the scalar loss, and METRICS and the extra losses as one detached tensor.

    obs [M, G, O], state [M, C], action_mask [M, G, K], actions [M, G, D or A], old_policy [M, G, ..], advantages,
    old_values and targets [M, G], the latter two in units of the normalised value. weights [M, G] are 0 for dead or
    waiting agents and rows without a choice and the same for all others, 1 on average over the batch: a mean is one
    over the rows that count. value_weights are 0 for the dead alone.
    """
    policy, values = agent(obs, state, action_mask)
    ratio = (agent.policy.head.logprob(policy, actions) - agent.policy.head.logprob(old_policy, actions)).exp()
    policy_loss = -(weights * torch.min(advantages * ratio, advantages * clamp_ratio(ratio, args))).mean()
    value_error = (values - targets) ** 2
    if args.clip_vloss:
        clipped_values = old_values + (values - old_values).clamp(-args.clip_coef, args.clip_coef)
        value_error = torch.max(value_error, (clipped_values - targets) ** 2)
    value_loss = 0.5 * (value_weights * value_error).mean()
    entropy = (weights * agent.policy.head.entropy(policy)).mean()
    bounds_loss = (weights * agent.policy.head.bounds_loss(policy)).mean()
    extra = agent.extra_losses(obs)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.bounds_loss_coef * bounds_loss
    loss = loss + sum(extra.values())
    with torch.no_grad():
        approx_kl = (weights * agent.policy.head.kl(old_policy, policy)).mean()
        clipfrac = (weights * ((ratio - 1).abs() > args.clip_coef)).mean()
        later = torch.zeros_like(loss)  # grad_norm and nonfinite are known after the backward pass
    metrics = [policy_loss, value_loss, entropy, approx_kl, clipfrac, bounds_loss, later, later, *extra.values()]
    return loss, torch.stack(metrics).detach()


def team_rewards(rewards: Tensor, alive: Tensor) -> Tensor:
    """Mean over the living agents, [.., G] -> [..]; 0 where nobody lives."""
    return torch.where(alive, rewards, 0.0).sum(-1) / alive.sum(-1).clamp(min=1)


def outcome(step: MultiAgentStep, alive: Tensor) -> tuple[Tensor, Tensor]:
    """What episode statistics count of a step that began with alive [N, G]: [N, 1+G+1] and the ends of episodes [N].

    The team's reward, each agent's own (0 for a dead one), and 1 for a won episode where it ends (NaN: not told).
    """
    ends = step.terminations | step.truncations
    won = torch.full_like(step.rewards[:, 0], math.nan) if step.won is None else (step.won & ends).float()
    own = torch.where(alive, step.rewards, 0.0)
    return torch.cat([team_rewards(own, alive)[:, None], own, won[:, None]], 1), ends


def count_episodes(episodes: EpisodeStats, tallies: dict[str, EpisodeStats], outcomes: list, alive: Tensor) -> dict:
    """Add a rollout, outcomes of T steps and alive [T, N, G], to the statistics; returns their metrics."""
    earned, ends = (torch.stack(x) for x in zip(*outcomes, strict=True))
    for stats, column in zip((episodes, *tallies.values()), earned.unbind(-1), strict=True):
        stats.update(column, ends, alive.any(-1))
    means = {name: tally.metrics()["charts/episodic_return"] for name, tally in tallies.items()}
    return episodes.metrics() | means


def agent_kwargs(envs: MultiAgentVecEnv) -> dict:
    """What Agent needs to know of an environment, as plain data."""
    space, state_space = envs.action_space, envs.state_space
    if isinstance(space, spaces.Box):
        action_spec = {"low": space.low.tolist(), "high": space.high.tolist()}
    else:
        discrete = isinstance(space, spaces.Discrete)
        action_spec = {"sizes": [int(space.n)] if discrete else space.nvec.tolist(), "multi_discrete": not discrete}
    return {"num_agents": envs.num_agents, "obs_dim": envs.observation_space.shape[0],
            "state_dim": state_space.shape[0] if state_space else 0, "action_spec": action_spec}  # fmt: skip


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
def evaluate(agent: Agent, envs: MultiAgentVecEnv, num_episodes: int, deterministic: bool) -> dict[str, float]:
    """Raw returns of num_episodes episodes, the same number from each env, so that short episodes are not favoured.

    mean, std, min and max are the team's; an agent's own mean is agent_I; in self-play also shares of games as seat 0
    and 1. Only reads the agent. num_episodes is a multiple of envs.num_envs (vecenvs.make_for_episodes sees to it).
    """
    start, per_env, rng_state = time.perf_counter(), num_episodes // envs.num_envs, checkpoint.rng_state()
    scores: list[list[list[float]]] = [[] for _ in range(envs.num_envs)]  # length, and what outcome returns, summed
    totals = torch.zeros(envs.num_envs, envs.num_agents + 3, dtype=torch.float64)
    obs, _ = envs.reset()
    while min(map(len, scores)) < per_env:
        if totals[:, 0].max() > MAX_EVAL_LENGTH:
            raise InputError(f"{envs.env_id}: no end of an episode in {MAX_EVAL_LENGTH} steps; it needs a time limit")
        alive = envs.alive
        obs, _ = agent.observe(obs, obs[:, 0, :0], alive)
        step = envs.step(agent.act(obs, deterministic, envs.action_mask))
        obs, (earned, ends) = step.obs, outcome(step, alive)
        totals[:, 1:] += earned.double().cpu()
        totals[:, 0] += alive.any(-1).cpu()
        for i in ends.nonzero().flatten().tolist():
            scores[i].append(totals[i].tolist())
            totals[i] = 0.0
    checkpoint.set_rng_state(rng_state)  # the training's noise goes on as if nothing had been sampled here
    lengths, returns, *agents, won = np.array([episode for episodes in scores for episode in episodes[:per_env]]).T
    result = {"mean": returns.mean(), "std": returns.std(), "min": returns.min(), "max": returns.max(),
              "length": lengths.mean(), "seconds": time.perf_counter() - start}  # fmt: skip
    result |= {f"agent_{i}": own.mean() for i, own in enumerate(agents)}
    result |= {} if np.isnan(won).any() else {"win_rate": won.mean()}
    if isinstance(envs, SelfPlayVecEnv):
        seats = np.add.outer(np.arange(envs.num_envs), np.arange(per_env)).ravel() % 2
        for seat, (name, sign) in itertools.product(set(seats.tolist()), (("won", 1), ("drawn", 0), ("lost", -1))):
            result[f"seat_{seat}_{name}"] = (np.sign(returns[seats == seat]) == sign).mean()
    return {k: float(v) for k, v in result.items()} | {"episodes": len(returns), "steps": int(lengths.sum())}


def play(args: Args) -> dict[str, float]:
    """Evaluate args.checkpoint and print one JSON line on stdout."""
    rank, _, device = distributed.init(args.device)
    agent, state = load_agent(args.checkpoint, device)
    TorchThreads(args.torch_threads, device)
    torch.manual_seed(args.seed)
    envs = vecenvs.make_for_episodes(args.env_id, args.num_envs, args.num_episodes, device, args.seed, args.env_kwargs,
                                      multi_agent=True, frame_stack=args.frame_stack)  # fmt: skip
    pool = Pool(agent.policy, args, args.pool_size) if args.self_play else None
    if pool:
        pool.load_state_dict(state["pool"])
    envs = with_opponent(envs, agent, pool, args)
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
    envs = vecenvs.make(args.env_id, N, device, env_seed, env_kwargs, multi_agent=True, frame_stack=args.frame_stack)
    envs = SelfPlayVecEnv(envs) if args.self_play else envs
    kwargs, G = agent_kwargs(envs), envs.num_agents
    agent = Agent(args, **kwargs).to(device)
    distributed.broadcast(agent)
    # Only now: weights are equal on all ranks, noise is not. With global_step a resumed run does not repeat its start.
    torch.manual_seed(vecenvs.derive_seed(args.seed, rank, global_step + 1))

    episodes, next_obs, next_state = EpisodeStats(N, args.games_to_track, world_size), None, None
    names = [*(f"charts/agent_return_{i}" for i in range(G)), "charts/win_rate"]
    tallies = {name: EpisodeStats(N, args.games_to_track, world_size) for name in names}  # of the same episodes
    pool = envs.opponent = Pool(agent.policy, args, args.pool_size, args.opponent_noise) if args.self_play else None
    if state:
        checkpoint.check_compatible(resume, state, args, envs.env_id, kwargs, NETWORK_ARGS)
        checkpoint.load_weights(resume, state, agent)
        if pool:
            pool.load_state_dict(state["pool"])
        next_obs, next_state = checkpoint.restore_rank(state["ranks"], rank, world_size, envs, episodes)
    if next_obs is None:
        next_obs, next_state = envs.reset()
    else:
        for tally, saved in zip(tallies.values(), state["tallies"][rank], strict=True):
            tally.load_state_dict(saved, running=True)
    optimizer = make_optimizer(agent, args, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    lrs = [group["lr"] for group in optimizer.param_groups]  # on the device: a recorded CUDA graph sees them change

    # ---- storage: allocated once and written in place, so every address in it is fixed ----
    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(T, N, *shape, dtype=dtype, device=device)

    next_obs, next_state = agent.observe(next_obs, next_state, envs.alive)
    head, obs, states = agent.policy.head, new(G, kwargs["obs_dim"]), new(next_state.shape[1])
    action_mask, old_policy = new(G, head.mask_size, dtype=torch.bool), new(G, *head.policy_shape)
    actions = new(G, head.action_size, dtype=head.action_dtype)
    rewards, old_values, values, returns, targets, advantages, weights, value_weights = (new(G) for _ in range(8))
    alive, acting, died = (new(G, dtype=torch.bool) for _ in range(3))
    terminations, truncations = new(dtype=torch.bool), new(dtype=torch.bool)
    batch = {"obs": obs, "state": states, "action_mask": action_mask, "actions": actions, "old_policy": old_policy,
             "old_values": old_values, "advantages": advantages, "targets": targets, "weights": weights,
             "value_weights": value_weights}  # fmt: skip
    batch = {name: x.flatten(0, 1) for name, x in batch.items()}  # views, [B, ..]
    in_order = torch.arange(B, device=device).view(args.num_minibatches, -1)

    # ---- hot path ----
    @torch.no_grad()
    def estimate_advantages() -> None:
        """Fill what the update needs from the rollout, its last observation, and its finals."""
        for mb_inds in in_order:  # update_step's shapes and so its rounding: equal weights give a ratio of exactly 1
            inputs = (batch[name][mb_inds] for name in ("obs", "state", "action_mask"))
            batch["old_policy"][mb_inds], batch["old_values"][mb_inds] = agent(*inputs)
        values.copy_(agent.denormalize_value(old_values))
        next_values = torch.cat([values[1:], agent.value(next_obs, next_state)[None]])
        # A truncated episode would have gone on from its last observation (in finals), not from the next one's first.
        # V(s_t), off by one step of reward, stays only where a simulator drops that observation.
        next_values = torch.where(truncations[..., None], values, next_values)
        for t, final in finals:
            next_values[t] = torch.where(truncations[t, :, None], agent.value(**final), next_values[t])
        # What the team earns after an agent's death is in the team's value, but not in that agent's own.
        own_rewards, terminated = rewards, terminations[..., None] | died
        if args.team_value:
            own_rewards, terminated = team_rewards(rewards, alive)[..., None], terminations[..., None]
        done = terminated | truncations[..., None]
        shaped = shape_rewards(own_rewards, args)
        raw, new_returns = compute_gae(shaped, values, next_values, terminated, done, args.gamma, args.gae_lambda)
        returns.copy_(new_returns), advantages.copy_(raw)
        targets.copy_(agent.value_rms(returns) if args.norm_value else returns)
        acts = (alive & acting & head.has_choice(action_mask)).float()
        weights.copy_(acts / distributed.average(acts.mean()).clamp(min=1e-8))
        # An agent that waits for its turn has a value too: what it did before is judged by it.
        value_weights.copy_(alive / distributed.average(alive.float().mean()).clamp(min=1e-8))
        if args.norm_adv:
            advantages.sub_(distributed.average((weights * advantages).mean()))
            advantages.div_(distributed.average((weights * advantages**2).mean()).sqrt() + 1e-8)

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

    def train_epoch() -> Tensor:
        """One pass over the batch in random order; returns the sum of METRICS over its gradient steps."""
        metrics_sum = torch.zeros(len(metric_names), device=device)
        for mb_inds in torch.randperm(B, device=device).view(args.num_minibatches, -1):
            metrics_sum += update_step(mb_inds)
        if args.lr_schedule == "adaptive" and args.kl_interval == "epoch":
            adapt_learning_rates(lrs, metrics_sum[KL] / args.num_minibatches, args)
        return metrics_sum

    # From here on these names mean the fast versions.
    use_compile = device.type == "cuda" if args.compile is None else args.compile
    policy_step, loss_gradients = (compile_pure(fn, use_compile) for fn in (agent.policy_step, loss_gradients))
    update_step = cuda_graph(update_step, enabled=use_compile and device.type == "cuda" and world_size == 1)
    num_updates = args.update_epochs * args.num_minibatches
    metric_names = [f"losses/{name}" for name in (*METRICS, *agent.extra_losses(next_obs))]

    def evaluate_agent(evaluation_envs: MultiAgentVecEnv) -> dict[str, float]:
        return evaluate(agent, with_opponent(evaluation_envs, agent, pool, args), args.num_episodes, args.deterministic)

    def contents() -> dict:
        """What a checkpoint holds of this script."""
        tallied = distributed.gather_objects([tally.state_dict() for tally in tallies.values()])
        own = {"tallies": tallied, "pool": pool and pool.state_dict()}
        return {"agent_kwargs": kwargs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict()} | own

    # ---- train ----
    with Run(SCRIPT, args, envs, episodes, resume, state, num_iterations, rank) as run:
        for iteration in range(global_step // batch_size + 1, num_iterations + 1):
            finals: list[tuple[int, dict[str, Tensor]]] = []
            outcomes: list[tuple[Tensor, Tensor]] = []
            for t in range(T):  # rollout
                obs[t], states[t], alive[t] = next_obs, next_state, envs.alive
                action_mask[t] = True if envs.action_mask is None else envs.action_mask
                acting[t] = True if envs.acting is None else envs.acting
                with run.phase("policy"):
                    actions[t], env_actions = policy_step(next_obs, action_mask[t], head.noise(N, G))
                with run.phase("env"):
                    step = envs.step(env_actions)
                rewards[t], died[t] = torch.where(alive[t], step.rewards, 0.0), alive[t] & ~step.final_alive
                terminations[t], truncations[t] = step.terminations, step.truncations
                if args.finite_horizon:
                    terminations[t] |= step.truncations
                outcomes.append(outcome(step, alive[t]))
                if step.final_obs is not None:
                    final = agent.observe(step.final_obs, step.final_state, step.final_alive)
                    finals.append((t, dict(zip(("obs", "state"), final, strict=True))))
                next_obs, next_state = agent.observe(step.obs, step.state, step.alive)
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
                agent.update_statistics(batch["obs"], batch["state"], returns.flatten(0, 1), batch["value_weights"] > 0)

            # ---- log and save: only here does the host wait for the device ----
            observations = [(obs, next_obs), (states, next_state)]
            check_finite(observations, finals, rewards, metrics_sum[NONFINITE].item(), iteration, run.dir)
            log = count_episodes(episodes, tallies, outcomes, alive) | {"charts/learning_rate": lrs[0].item()}
            log["charts/living_agents"] = distributed.average(alive.float().mean()).item() * G
            log["charts/valid_rows"] = distributed.average(alive.any(-1).float().mean()).item()
            if pool:
                log |= pool.end_iteration(agent.policy, envs)
            stuck = (alive & acting & (weights == 0)).float().sum()  # were sent action 0
            log["charts/rows_without_choice"] = distributed.average(stuck).item() * world_size
            if train:
                log |= zip(metric_names, (metrics_sum / num_updates).tolist(), strict=True)
                log["losses/explained_variance"] = explained_variance(values, returns, value_weights)
            run.end_iteration(iteration, global_step, log, evaluate_agent, contents)
            if run.stop_reason:
                break
    return run.log


if __name__ == "__main__":
    cli.run(main, Args)
