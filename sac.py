r"""Soft actor-critic. Everything that decides what is learned is in this file; read main() top to bottom.

    python sac.py --env-id HalfCheetah                                              # one env, as in the paper
    python sac.py --env-id HalfCheetah --num-envs 32 --norm-obs --policy-frequency 2 --alpha-lr 3e-4    # as rl_games
    python sac.py --env-id Ant --num-envs 1024 --utd-ratio 0.00390625 --batch-size 8192 --buffer-size 1e6 --norm-obs \
        --layer-norm --q-layer-norm --critic c51 --v-min -20 --v-max 20 --reward-scale 0.1 --q-reduce mean \
        --gamma 0.97 --tau 0.1 --q-lr 3e-4 --alpha 0.01 --alpha-lr 3e-4 --log-interval 65536      # as FastSAC, on a GPU
    torchrun --nproc-per-node 4 sac.py --env-id Ant --num-envs 32                   # num_envs is per rank
    python sac.py --play --checkpoint runs/NAME/last.pt                             # evaluate what was trained

Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, with what makes it work with thousands of environments (large
batches, layer normalisation, distributional critics), https://github.com/amazon-far/holosoma.
Shapes: N num_envs, T env steps of an iteration, S of the replay; M batch_size, n n_step; O obs, A actions, K atoms.
"""

import copy
import json
import math
import random
import re
import sys
import time
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from common import checkpoint, cli, distributed
from common import envs as vecenvs
from common.compile import TorchThreads, compile_pure, cuda_graph
from common.envs.base import VecEnv
from common.errors import InputError, check_finite, check_numbers, check_positive, check_range
from common.logger import EpisodeStats, import_wandb
from common.run import Run
from common.running_mean_std import RunningMeanStd

SCRIPT = "sac"
METRICS = ("qf1_loss", "qf2_loss", "qf1_values", "qf2_values", "grad_norm", "nonfinite",  # of each gradient step
           "actor_loss", "alpha_loss", "alpha", "entropy")  # of each step of the actor  # fmt: skip
GRAD_NORM, NONFINITE, ACTOR = METRICS.index("grad_norm"), METRICS.index("nonfinite"), METRICS.index("actor_loss")
ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU,
               "softplus": nn.Softplus}  # fmt: skip
NETWORK_ARGS = ("hidden_sizes", "critic_hidden_sizes", "activation", "d2rl", "layer_norm", "q_layer_norm", "critic",
                "num_atoms", "v_min", "v_max", "norm_obs", "log_sigma_bounds", "mask_obs")  # fmt: skip
OBS_CLIP = 10.0  # standard deviations
MAX_EVAL_LENGTH = 200_000  # steps of one episode, beyond which an evaluation gives up


@dataclass(frozen=True)
class Args:
    # ---- run ----
    env_id: str = "HalfCheetah"
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
    total_timesteps: int = 1_000_000
    """env transitions to train for, summed over environments and ranks"""
    score_to_win: float = math.inf
    """stop when the mean return of the last games_to_track episodes reaches this"""
    games_to_track: int = 20
    """last episodes whose mean return is logged and decides best.pt, rounded up to the same number from each env"""
    save_best_after: int = 0
    """env transitions before best.pt is first written"""
    save_interval: int = 0
    """iterations between numbered checkpoints; 0: none (last.pt is written all the same)"""
    eval_interval: int = 0
    """iterations between evaluations over num_episodes; 0: none. With it, evaluations decide best.pt"""
    log_interval: int = 250
    """env transitions of an iteration, after which metrics are logged and stops, saves and evaluations decided"""
    # ---- rollout and replay ----
    num_envs: int = 1
    """parallel environments per rank (N)"""
    gamma: float = 0.99
    """discount per environment step"""
    n_step: int = 1
    """rewards that are summed before the target bootstraps; fewer where an episode or the replay ends"""
    buffer_size: int = 1_000_000
    """transitions kept for replay, per rank"""
    learning_starts: int = 5000
    """env transitions before the first gradient step: of random actions; after a resume without replay, the policy's"""
    save_replay: bool = False
    """checkpoints hold the replay, so that a resumed run continues exactly; they are as large as it"""
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
    hidden_sizes: tuple[int, ...] = (256, 256)
    """units of the hidden layers"""
    critic_hidden_sizes: tuple[int, ...] | None = None
    """units of the critic's hidden layers; unset: as hidden_sizes"""
    activation: Literal["elu", "relu", "tanh", "silu", "gelu", "selu", "softplus"] = "relu"
    """nonlinearity after each hidden layer"""
    initializer: Literal["default", "orthogonal", "glorot", "variance_scaling"] = "default"
    """initial weights of the hidden layers; all but default also start the policy's output near zero"""
    d2rl: bool = False
    """concatenate the input to every hidden layer's input, https://arxiv.org/abs/2010.09163"""
    layer_norm: bool = False
    """layer normalisation after each hidden linear layer"""
    q_layer_norm: bool = False
    """layer normalisation after each hidden linear layer of the critics"""
    log_sigma_bounds: tuple[float, float] = (-5.0, 2.0)
    """log-sigma approaches these smoothly and never reaches them; it is untouched one unit or more inside"""
    norm_obs: bool = False
    """normalise observations by running statistics"""
    critic: Literal["mse", "c51"] = "mse"
    """what the critics learn: the mean return, or a distribution over num_atoms returns from v_min to v_max"""
    num_atoms: int = 101
    """atoms of a c51 critic"""
    v_min: float = -100.0
    """lowest return that a c51 critic can express, in units of the shaped reward"""
    v_max: float = 100.0
    """highest return that a c51 critic can express"""
    # ---- optimisation ----
    utd_ratio: float = 1.0
    """gradient steps per env transition of all ranks, fractions allowed; counted exactly from learning_starts on"""
    batch_size: int = 256
    """replay rows of a gradient step, per rank (M)"""
    policy_lr: float = 3e-4
    """step size of the actor's Adam"""
    q_lr: float = 1e-3
    """step size of the critics' Adam"""
    alpha_lr: float = 1e-3
    """step size of the temperature's Adam"""
    policy_frequency: int = 1
    """the actor learns in every policy_frequency-th gradient step, and then takes policy_frequency steps in a row"""
    tau: float = 0.005
    """fraction by which the target critics approach the critics in each gradient step"""
    q_reduce: Literal["min", "mean"] = "min"
    """how two critics make one value, in the target and for the actor"""
    alpha: float = 1.0
    """temperature, the weight of the entropy; with autotune its first value"""
    autotune: bool = True
    """adapt the temperature until the policy's entropy is the target"""
    target_entropy_scale: float = 1.0
    """target entropy is minus this, in nats per action dimension, of actions in units of [-1, 1]"""
    max_grad_norm: float = math.inf
    """gradient norm over all parameters is clipped to this"""

    def __post_init__(self):
        check_numbers(self, may_be_infinite="score_to_win reward_min reward_max max_grad_norm")
        check_range(self, 1, math.inf, "num_envs num_episodes games_to_track total_timesteps log_interval n_step "
                                       "buffer_size batch_size policy_frequency")  # fmt: skip
        check_range(self, 2, math.inf, "num_atoms")
        check_range(self, 0, 2**63 - 1, "seed")
        check_range(self, 0, math.inf, "torch_threads save_interval save_best_after eval_interval learning_starts "
                                       "policy_lr q_lr alpha_lr")  # fmt: skip
        check_range(self, 0, 1, "gamma tau")
        check_positive(self, "utd_ratio alpha max_grad_norm")
        if self.buffer_size < self.num_envs:
            raise InputError(f"--buffer-size {self.buffer_size}: must be at least --num-envs {self.num_envs}")
        for name, sizes in (("", self.hidden_sizes), ("critic-", self.critic_hidden_sizes)):
            if sizes is not None and (not sizes or min(sizes) < 1):
                raise InputError(f"--{name}hidden-sizes {sizes}: at least one layer, each of at least 1 unit")
        for name in ("v", "reward"):
            low, high = getattr(self, f"{name}_min"), getattr(self, f"{name}_max")
            if not low < high:
                raise InputError(f"--{name}-min {low}: must be less than --{name}-max {high}")
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


class Critic(nn.Module):
    """Two networks [M, n_in] -> [2, M, n_out] with stacked weights, so that a layer of both is one batched product."""

    def __init__(self, n_in: int, n_out: int, args: Args):
        super().__init__()
        sizes = [n_in, *(args.critic_hidden_sizes or args.hidden_sizes), n_out]
        pairs = [[initialize(nn.Linear(a, b), args.initializer) for _ in range(2)]
                 for a, b in zip(sizes, sizes[1:], strict=False)]  # fmt: skip
        self.weights = nn.ParameterList(torch.stack([linear.weight.T for linear in pair]) for pair in pairs)
        self.biases = nn.ParameterList(torch.stack([linear.bias[None] for linear in pair]) for pair in pairs)
        normed = sizes[1:-1] if args.q_layer_norm else []
        self.norm_scales = nn.ParameterList(torch.ones(2, 1, size) for size in normed)
        self.norm_shifts = nn.ParameterList(torch.zeros(2, 1, size) for size in normed)
        self.activation = ACTIVATIONS[args.activation]()

    def forward(self, x: Tensor) -> Tensor:
        h = x.expand(2, -1, -1)
        for i, weight in enumerate(self.weights[:-1]):
            h = torch.baddbmm(self.biases[i], h, weight)
            if self.norm_scales:
                h = torch.addcmul(self.norm_shifts[i], F.layer_norm(h, h.shape[-1:]), self.norm_scales[i])
            h = self.activation(h)
        if self.weights[-1].shape[-1] == 1:  # a batched product with one column is five times slower than this
            return (h * self.weights[-1].mT).sum(-1, keepdim=True) + self.biases[-1]
        return torch.baddbmm(self.biases[-1], h, self.weights[-1])


class Agent(nn.Module):
    """Squashed Gaussian policy, twin critics, their targets and the temperature: one state_dict to deploy.

    Actions inside the agent are in units of [-1, 1]; `act` and `to_env` return the environment's own units. Methods
    with an argument x take encoded observations.
    """

    def __init__(self, args: Args, obs_dim: int, action_low: list[float], action_high: list[float]):
        super().__init__()
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        self.register_buffer("action_low", low)
        self.register_buffer("action_high", high)
        self.register_buffer("action_scale", (high - low) / 2)
        self.register_buffer("action_center", (high + low) / 2)
        self.register_buffer("atoms", torch.linspace(args.v_min, args.v_max, args.num_atoms))
        self.log_sigma_bounds, self.norm_obs, self.q_reduce = args.log_sigma_bounds, args.norm_obs, args.q_reduce
        self.obs_rms, self.distributional = RunningMeanStd(obs_dim), args.critic == "c51"
        self.actor = MLP(obs_dim, args.hidden_sizes, args)
        self.actor_head = initialize(nn.Linear(self.actor.out_features, 2 * len(low)), args.initializer, gain=0.01)
        self.critic = Critic(obs_dim + len(low), args.num_atoms if self.distributional else 1, args)
        self.target_critic = copy.deepcopy(self.critic).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(args.alpha)))

    def encode(self, obs: Tensor) -> Tensor:
        """Raw observations to network input; the place for an image encoder."""
        return self.obs_rms(obs).clamp(-OBS_CLIP, OBS_CLIP) if self.norm_obs else obs

    def policy(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [.., O] -> mean, log_sigma [.., A] of the Gaussian before tanh."""
        mean, log_sigma = self.actor_head(self.actor(x)).chunk(2, -1)
        return mean, smooth_bounds(log_sigma, *self.log_sigma_bounds)

    def sample(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """x [.., O] and standard normal noise [.., A] -> actions in [-1, 1] [.., A], their log density in nats [..]."""
        mean, log_sigma = self.policy(x)
        u = mean + log_sigma.exp() * noise
        return u.tanh(), squashed_logprob(u, noise, log_sigma)

    def values(self, outputs: Tensor) -> Tensor:
        """A Critic's outputs [2, M, 1 or K] -> action values [2, M] in units of the shaped reward."""
        return outputs.softmax(-1) @ self.atoms if self.distributional else outputs.squeeze(-1)

    def reduce(self, values: Tensor) -> Tensor:
        """Values of two critics [2, M] -> the one that the policy and the target go by [M]."""
        return values.amin(0) if self.q_reduce == "min" else values.mean(0)

    def to_env(self, actions: Tensor) -> Tensor:
        """Units of [-1, 1] to the environment's, inside its bounds whatever the rounding."""
        return (actions * self.action_scale + self.action_center).clamp(self.action_low, self.action_high)

    @torch.no_grad()
    def act(self, obs: Tensor, deterministic: bool = True) -> Tensor:
        """Raw observations [N, O] -> actions [N, A] in the environment's units."""
        mean, log_sigma = self.policy(self.encode(obs))
        return self.to_env((mean if deterministic else mean + log_sigma.exp() * torch.randn_like(mean)).tanh())


class Replay:
    """The last S steps of N envs, a ring on the device; a transition's index is step*N + env.

    Observations are raw. next_obs is stored too: half the memory would do where it is the next step's obs, but at the
    end of an episode it is not, and a table of those exceptions is what peers got wrong.
    """

    def __init__(self, steps: int, num_envs: int, obs_dim: int, action_dim: int, device: torch.device):
        self.steps, self.num_envs, self.stored = steps, num_envs, 0
        shapes = {"obs": (obs_dim,), "actions": (action_dim,), "rewards": (), "next_obs": (obs_dim,)}
        size = steps * num_envs * (4 * sum(math.prod(shape) for shape in shapes.values()) + 2)
        what, free = f"{steps * num_envs} transitions, {size / 1e9:.2f} GB on {device}", available_memory(device)
        if size > free:
            raise InputError(f"--buffer-size: the replay needs {what}, of which {free / 1e9:.2f} GB are free; at most "
                             f"{free * steps * num_envs // size} would fit")  # fmt: skip
        print(f"replay: {what}", file=sys.stderr, flush=True)
        self.data = {name: torch.zeros(steps, num_envs, *shape, device=device) for name, shape in shapes.items()}
        for name in ("terminations", "ends"):
            self.data[name] = torch.zeros(steps, num_envs, dtype=torch.bool, device=device)
        self.rows = {name: x.flatten(0, 1) for name, x in self.data.items()}  # views, by index
        self.last_dones = torch.ones(num_envs, dtype=torch.bool, device=device)

    def __len__(self) -> int:
        """Transitions that can be drawn: they have the indices below."""
        return min(self.stored, self.steps) * self.num_envs

    def add(self, dones: Tensor, **transitions: Tensor) -> None:
        """One step of every env: obs, next_obs [N, O], actions [N, A], rewards, terminations and dones [N]."""
        row = self.stored % self.steps
        # What is known ends with the newest step, and n-step sums stop there as at a truncation, until the next one.
        self.data["ends"][row - 1] = self.last_dones
        self.data["ends"][row] = True
        for name, x in transitions.items():
            self.data[name][row] = x
        self.stored, self.last_dones = self.stored + 1, dones

    def batch(self, inds: Tensor, args: Args) -> dict[str, Tensor]:
        """Transitions inds [M] as sac_loss takes them, with the rewards of n_step steps."""
        ahead = self.num_envs * torch.arange(args.n_step, device=inds.device)
        window = (inds[:, None] + ahead) % len(self.rows["ends"])
        rewards, terminations, ends = (self.rows[name][window] for name in ("rewards", "terminations", "ends"))
        returns, discounts, last = n_step_returns(shape_rewards(rewards, args), terminations, ends, args.gamma)
        next_obs = self.rows["next_obs"][window.gather(1, last[:, None])[:, 0]]
        return {"obs": self.rows["obs"][inds], "actions": self.rows["actions"][inds], "returns": returns,
                "discounts": discounts, "next_obs": next_obs}  # fmt: skip

    def state_dict(self) -> dict:
        filled = {name: x[: self.stored].cpu().clone() for name, x in self.data.items()}
        return {"steps": self.steps, "data": filled, "stored": self.stored, "last_dones": self.last_dones.cpu()}

    def load_state_dict(self, ranks: list[dict], rank: int, world_size: int) -> None:
        """Raises InputError if the state_dict()s of all ranks are of other sizes."""
        state = ranks[rank % len(ranks)]
        old = {"ranks": len(ranks), "num_envs": len(state["last_dones"]), "steps": state["steps"]}
        new = {"ranks": world_size, "num_envs": self.num_envs, "steps": self.steps}
        if new != old:
            raise InputError(f"the saved replay is of {old}, not of {new}: keep --num-envs, --buffer-size and the "
                             "number of ranks as they were, or leave it with --no-save-replay")  # fmt: skip
        for name, x in state["data"].items():
            self.data[name][: len(x)] = x
        self.stored, self.last_dones = state["stored"], state["last_dones"].to(self.last_dones.device)


def available_memory(device: torch.device) -> int:
    """Bytes that new tensors can have on device, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo, cgroup, limits = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"), [sys.maxsize]
    if meminfo.exists():
        limits.append(1024 * int(re.search(r"MemAvailable: +(\d+)", meminfo.read_text())[1]))
    if cgroup.exists() and (limit := cgroup.read_text().strip()) != "max":
        limits.append(int(limit))
    return min(limits)


def squashed_logprob(u: Tensor, noise: Tensor, log_sigma: Tensor) -> Tensor:
    """Log density in nats of the actions tanh(u) [.., A] in the unit box, where u = mean + sigma * noise, [..].

    log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)): the left side is -inf in float32 from |u| = 10 on.
    """
    gaussian = -0.5 * noise**2 - log_sigma - 0.5 * math.log(2 * math.pi)
    return (gaussian - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)


def shape_rewards(rewards: Tensor, args: Args) -> Tensor:
    """log(clamp((r + shift) * scale, min, max)), the logarithm if asked for; any shape."""
    shaped = ((rewards + args.reward_shift) * args.reward_scale).clamp(args.reward_min, args.reward_max)
    return shaped.log() if args.reward_log else shaped


def n_step_returns(rewards: Tensor, terminations: Tensor, ends: Tensor, gamma: float) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards [M, n] from n steps in a row -> sum to the first end [M], weight of the bootstrap [M], its step [M].

    ends [M, n] mark the last step of an episode, and the newest one that is known. The state to bootstrap from is the
    next observation of that step, or of the last of the n; its weight is gamma^k after k steps, 0 after a termination.
    """
    counts = torch.cat([torch.ones_like(rewards[:, :1]), (~ends[:, :-1]).cumprod(1)], 1)  # 1 to the first end, then 0
    powers = gamma ** torch.arange(rewards.shape[1], device=rewards.device)
    last = counts.sum(1, keepdim=True).long() - 1
    discounts = gamma * powers[last] * ~terminations.gather(1, last)
    return (counts * powers * rewards).sum(1), discounts[:, 0], last[:, 0]


def project(probs: Tensor, support: Tensor, atoms: Tensor) -> Tensor:
    """Move probs [M, K] at returns support [M, K] to the even atoms [K], https://arxiv.org/abs/1707.06887 eq. 7.

    A return between two atoms is shared by them in proportion to its nearness; one beyond the ends goes to the end.
    """
    position = ((support - atoms[0]) / (atoms[1] - atoms[0])).clamp(0, len(atoms) - 1)
    lower, upper_share = position.long().clamp(0, len(atoms) - 1), position.frac()  # the clamp is for NaN alone
    result = torch.zeros_like(probs).scatter_add_(1, lower, probs * (1 - upper_share))
    return result.scatter_add_(1, (lower + 1).clamp(max=len(atoms) - 1), probs * upper_share)


@torch.no_grad()
def critic_target(agent: Agent, alpha: Tensor, x: Tensor, returns: Tensor, discounts: Tensor, noise: Tensor) -> Tensor:
    """What both critics learn from n-step returns [M] and the x after them [M, O].

    The soft return [M], with the entropy bonus of the action that is bootstrapped from alone; with c51 its distribution
    over the atoms [M, K]: of the critic with the smaller mean, or the mixture of both.
    """
    actions, logprob = agent.sample(x, noise)
    outputs = agent.target_critic(torch.cat([x, actions], -1))
    values = agent.values(outputs)
    if not agent.distributional:
        return returns + discounts * (agent.reduce(values) - alpha * logprob)
    probs = outputs.softmax(-1)
    if agent.q_reduce == "min":
        probs = torch.where((values[0] < values[1])[:, None], probs[0], probs[1])
    else:
        probs = probs.mean(0)
    support = returns[:, None] + discounts[:, None] * (agent.atoms - alpha * logprob[:, None])
    return project(probs, support, agent.atoms)


def sac_loss(agent: Agent, args: Args, obs: Tensor, actions: Tensor, returns: Tensor, discounts: Tensor,
             next_obs: Tensor, noise: Tensor, critic: bool, actor: bool) -> tuple[list, Tensor]:  # fmt: skip
    """The losses of critics, actor and temperature (None where not asked for) on one batch, and METRICS, detached.

    Each is to be differentiated by its own parameters only. obs, next_obs [M, O] raw, actions [M, A], returns and
    discounts [M], noise [2, M, A] standard normal. https://arxiv.org/abs/1812.05905 eqs. 5, 9, 18; one temperature.
    """
    x, alpha = agent.encode(obs), agent.log_alpha.exp().detach()
    losses, metrics = [None, None, None], [torch.zeros_like(alpha)] * len(METRICS)
    if critic:
        target = critic_target(agent, alpha, agent.encode(next_obs), returns, discounts, noise[0])
        outputs = agent.critic(torch.cat([x, actions], -1))
        if agent.distributional:
            qf_losses = -(target * outputs.log_softmax(-1)).sum(-1).mean(1)
        else:
            qf_losses = ((outputs.squeeze(-1) - target) ** 2).mean(1)
        losses[0] = qf_losses.sum()
        metrics[: ACTOR - 2] = [*qf_losses, *agent.values(outputs).mean(1)]
    if actor:
        new_actions, logprob = agent.sample(x, noise[1])
        values = agent.values(agent.critic(torch.cat([x, new_actions], -1)))
        entropy = -logprob.mean()
        losses[1] = (alpha * logprob - agent.reduce(values)).mean()
        alpha_loss = agent.log_alpha * (entropy.detach() + args.target_entropy_scale * actions.shape[1])
        losses[2] = alpha_loss if args.autotune else None
        metrics[ACTOR:] = [losses[1], alpha_loss, alpha, entropy]
    return losses, torch.stack(metrics).detach()


def agent_kwargs(envs: VecEnv) -> dict:
    """What Agent needs to know of an environment, as plain data. Raises InputError if this script cannot act in it."""
    space, obs = envs.action_space, envs.observation_space
    if not isinstance(space, spaces.Box):
        raise InputError(f"{envs.env_id} has {type(space).__name__} actions, not Box: use ppo_discrete.py")
    low, high = torch.from_numpy(space.low), torch.from_numpy(space.high)
    if not (high - low).isfinite().all():
        raise InputError(f"{envs.env_id} has actions without bounds, not in a box: use ppo_continuous.py")
    if not isinstance(obs, spaces.Box) or len(obs.shape) != 1:
        raise InputError(f"{envs.env_id} has observations of shape {obs.shape}, not vectors: use ppo_discrete.py")
    if envs.critic_observation_space is not obs:
        raise InputError(f"{envs.env_id} has observations for the critic alone: use ppo_continuous.py")
    return {"obs_dim": obs.shape[0], "action_low": low.flatten().tolist(), "action_high": high.flatten().tolist()}


def load_agent(path: str | Path, device: str | torch.device = "cpu") -> tuple[Agent, dict]:
    """The trained Agent and everything else in a checkpoint. Raises InputError if this script did not write it."""
    state = checkpoint.load_for(SCRIPT, path, device)
    agent = Agent(checkpoint.saved_args(path, state, Args), **state["agent_kwargs"]).to(device)
    checkpoint.load_weights(path, state, agent)
    return agent, state


def make_adam(agent: Agent, args: Args, state: dict | None) -> tuple[torch.optim.Adam, list[list[nn.Parameter]]]:
    """Adam, restored from a checkpoint except for its step sizes; and the parameters of critics, actor, temperature."""
    actor = [*agent.actor.parameters(), *agent.actor_head.parameters()]
    parts = [[*agent.critic.parameters()], actor, [agent.log_alpha]]
    lrs = (args.q_lr, args.policy_lr, args.alpha_lr)
    capturable = agent.log_alpha.device.type == "cuda"
    groups = [{"params": part, "lr": lr} for part, lr in zip(parts, lrs, strict=True)]
    optimizer = torch.optim.Adam(groups, fused=True, capturable=capturable)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group |= {"lr": lr, "capturable": capturable}
    return optimizer, parts


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


def plan_iterations(args: Args, world_size: int, global_step: int, first_update: int) -> tuple[int, int]:
    """Env steps of an iteration (T), and the number of the last one, those before global_step counted too.

    Raises InputError if a fresh run would learn nothing in them.
    """
    vector_step = args.num_envs * world_size
    T = max(1, min(args.log_interval, args.total_timesteps) // vector_step)
    more = (args.total_timesteps - global_step) // (T * vector_step)
    needed = first_update + math.ceil(1 / Fraction(str(args.utd_ratio)))
    if not global_step and more * T * vector_step < needed:
        iteration = vector_step * max(1, args.log_interval // vector_step)
        raise InputError(f"--total-timesteps {args.total_timesteps}: nothing would be learned; the first gradient step "
                         f"is after {needed} transitions (--learning-starts {args.learning_starts}, --utd-ratio "
                         f"{args.utd_ratio}); give at least {math.ceil(needed / iteration) * iteration}")  # fmt: skip
    return T, global_step // (T * vector_step) + more


def main(args: Args) -> dict[str, float]:
    """Train (with play: evaluate) and return the last logged metrics."""
    if args.play:
        return play(args)
    # ---- setup ----
    rank, world_size, device = distributed.init(args.device)
    N = args.num_envs
    if args.track:
        import_wandb()  # now, before anything is created
    resume = cli.resume_path(args.resume, args.run_name)
    state = checkpoint.load_for(SCRIPT, resume) if resume else None
    global_step, updates, owed = (state["global_step"], state["updates"], state["owed"]) if state else (0, 0, "0")
    saved_replay = state["replay"] if state and args.save_replay else None
    # Random actions fill the replay before the first gradient step; after a resume without it the policy's actions do.
    random_until = args.learning_starts if state is None or saved_replay else 0
    first_update = state["first_update"] if saved_replay else global_step + args.learning_starts
    T, num_iterations = plan_iterations(args, world_size, global_step, first_update)
    random.seed(args.seed + rank), np.random.seed((args.seed + rank) % 2**32), torch.manual_seed(args.seed)
    threads = TorchThreads(args.torch_threads, device, recheck=2000)
    env_seed, env_kwargs = vecenvs.derive_seed(args.seed, rank, global_step), vecenvs.parse_env_kwargs(args.env_kwargs)
    envs = vecenvs.make(args.env_id, N, device, env_seed, env_kwargs, mask_obs=args.mask_obs)
    kwargs = agent_kwargs(envs)
    agent = Agent(args, **kwargs).to(device)
    distributed.broadcast(agent)
    # Only now: weights are equal on all ranks, noise is not. With global_step a resumed run does not repeat its start.
    torch.manual_seed(vecenvs.derive_seed(args.seed, rank, global_step + 1))

    episodes, next_obs = EpisodeStats(N, args.games_to_track, world_size), None
    if state:
        checkpoint.check_compatible(resume, state, args, envs.env_id, kwargs, NETWORK_ARGS)
        checkpoint.load_weights(resume, state, agent)
        if not args.autotune:
            agent.log_alpha.data.fill_(math.log(args.alpha))
        next_obs, _ = checkpoint.restore_rank(state["ranks"], rank, world_size, envs, episodes)
    optimizer, parts = make_adam(agent, args, state)
    parameters = [p for part in parts for p in part]

    # ---- storage ----
    replay = Replay(args.buffer_size // N, N, kwargs["obs_dim"], len(kwargs["action_low"]), device)
    if saved_replay:
        replay.load_state_dict(saved_replay, rank, world_size)

    # ---- hot path ----
    @torch.no_grad()
    def policy_step(obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_sigma = agent.policy(agent.encode(obs))
        actions = (mean + log_sigma.exp() * noise).tanh()
        return actions, agent.to_env(actions)

    def loss_gradients(mb_inds: Tensor, noise: Tensor, critic: bool, actor: bool) -> tuple[list, Tensor]:
        """Of transitions mb_inds [M]: a gradient for each parameter (None: not asked for), and the loss's metrics."""
        losses, metrics = sac_loss(agent, args, **replay.batch(mb_inds, args), noise=noise, critic=critic, actor=actor)
        gradients = [[None] * len(part) if loss is None else torch.autograd.grad(loss, part)
                     for loss, part in zip(losses, parts, strict=True)]  # fmt: skip
        return [gradient for part in gradients for gradient in part], metrics

    def update_step(mb_inds: Tensor, actor_steps: int) -> Tensor:
        """One gradient step on transitions mb_inds [M], with actor_steps of the actor; returns the sum of METRICS."""
        metrics_sum = torch.zeros(len(METRICS), device=device)
        for i in range(max(1, actor_steps)):
            noise = torch.randn(2, args.batch_size, len(kwargs["action_low"]), device=device)
            gradients, metrics = loss_gradients(mb_inds, noise, critic=i == 0, actor=actor_steps > 0)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            metrics = distributed.average_gradients(parameters, metrics)
            norm = nn.utils.clip_grad_norm_(parameters, args.max_grad_norm, foreach=True)
            metrics[GRAD_NORM], metrics[NONFINITE] = norm * (i == 0), (~norm.isfinite()).float()
            optimizer.found_inf = metrics[NONFINITE]  # where this is 1, fused Adam leaves the parameters alone
            optimizer.step()
            metrics_sum += metrics
        with torch.no_grad():
            torch._foreach_lerp_([*agent.target_critic.parameters()], parts[0], args.tau)
        return metrics_sum

    # From here on these names mean the fast versions.
    use_compile = device.type == "cuda" if args.compile is None else args.compile
    use_graph = use_compile and device.type == "cuda" and world_size == 1
    policy_step, loss_gradients = (compile_pure(fn, use_compile) for fn in (policy_step, loss_gradients))
    steps = (args.policy_frequency, 0)  # of the actor, in one gradient step of policy_frequency and in the others
    actor_critic_step, critic_step = (cuda_graph(partial(update_step, actor_steps=n), use_graph) for n in steps)

    def evaluate_agent(evaluation_envs: VecEnv) -> dict[str, float]:
        return evaluate(agent, evaluation_envs, args.num_episodes, args.deterministic)

    def contents() -> dict:
        """What a checkpoint holds of this script."""
        saved_replay = distributed.gather_objects(replay.state_dict()) if args.save_replay else None
        progress = {"updates": updates, "owed": str(owed), "first_update": first_update}
        return {"agent_kwargs": kwargs, "agent": agent.state_dict(), "optimizer": optimizer.state_dict(),
                "replay": saved_replay} | progress  # fmt: skip

    # ---- train ----
    if next_obs is None:
        next_obs, _ = envs.reset()
        replay.last_dones.fill_(True)  # what is added next does not follow the newest step
    owed, utd_ratio = Fraction(owed), Fraction(str(args.utd_ratio))  # gradient steps: exact, however long the run
    with Run(SCRIPT, args, envs, episodes, resume, state, num_iterations, rank) as run:
        for iteration in range(global_step // (T * N * world_size) + 1, num_iterations + 1):
            rollout, finals = [], []
            metrics_sum, gradient_steps, actor_steps = torch.zeros(len(METRICS), device=device), 0, 0
            for t in range(T):
                obs, noise = next_obs, torch.randn(N, len(kwargs["action_low"]), device=device)
                if args.norm_obs:
                    agent.obs_rms.update(obs)
                with run.phase("policy"):
                    if global_step < random_until:
                        actions = 2 * torch.rand_like(noise) - 1
                        env_actions = agent.to_env(actions)
                    else:
                        actions, env_actions = policy_step(obs, noise)
                with run.phase("env"):
                    step = envs.step(env_actions)
                if step.final_obs is not None:
                    finals.append((t, step.final_obs))
                rewards, dones = step.rewards.view(N, -1).sum(-1), step.terminations | step.truncations
                # Where a simulator drops the last observation of a truncated episode, the one before has to stand in.
                # After a termination this is of the next episode, but nobody asks for the value of that.
                last_obs = torch.where(step.truncations[:, None], obs, step.obs)
                replay.add(dones, obs=obs, actions=actions, rewards=rewards, terminations=step.terminations,
                           next_obs=last_obs if step.final_obs is None else step.final_obs)  # fmt: skip
                rollout.append((obs, rewards, dones))
                next_obs = step.obs
                global_step += N * world_size
                owed += utd_ratio * max(0, min(N * world_size, global_step - first_update))
                while owed >= 1:
                    with_actor = updates % args.policy_frequency == 0
                    with run.phase("update"), threads.update(measure=with_actor):
                        mb_inds = torch.randint(len(replay), (args.batch_size,), device=device)
                        metrics_sum += (actor_critic_step if with_actor else critic_step)(mb_inds)
                    owed, updates, gradient_steps = owed - 1, updates + 1, gradient_steps + 1
                    actor_steps += with_actor * args.policy_frequency
            # ---- log and save: only here does the host wait for the device ----
            observations, rewards, dones = (torch.stack([step[i] for step in rollout]) for i in range(3))
            bad_steps = metrics_sum[NONFINITE].item()
            check_finite([(observations, next_obs)], finals, rewards[..., None], bad_steps, iteration, run.dir)
            episodes.update(rewards, dones)
            counts = [gradient_steps] * ACTOR + [actor_steps] * (len(METRICS) - ACTOR)
            sums = zip(METRICS, metrics_sum.tolist(), counts, strict=True)
            log = episodes.metrics() | {f"losses/{name}": x / count for name, x, count in sums if count}
            run.end_iteration(iteration, global_step, log, evaluate_agent, contents)
            if run.stop_reason:
                break
    return run.log


if __name__ == "__main__":
    cli.run(main, Args)
