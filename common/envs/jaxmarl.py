"""JaxMARL: environments of several agents in JAX, stepped for all envs at once, on the device that trains.

https://github.com/FLAIROx/JaxMARL, https://arxiv.org/abs/2311.10090. Step, time limit, last observation and reset are
one compiled function; tensors are handed over by DLPack, without a copy and without a wait for the host.
"""

import inspect
import os
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of the GPU at its import

import jax
import jax.numpy as jnp
import jaxmarl
import numpy as np
import torch
from gymnasium import Space, spaces
from jaxmarl.environments.multi_agent_env import MultiAgentEnv
from torch import Tensor

from common.envs.multiagent import MultiAgentStep, MultiAgentVecEnv, pad_actions
from common.errors import InputError

# Those that can be made by name alone, with discrete or bounded actions and vectors to look at.
NAMES = ("MPE_", "switch_riddle")


def task_ids() -> list[str]:
    return [name for name in jaxmarl.registration.registered_envs if name.startswith(NAMES)]


class JaxMarlVecEnv(MultiAgentVecEnv):
    """num_envs copies of jaxmarl.make(name, **env_kwargs); the option max_episode_steps replaces its time limit.

    The env is given one step more than its limit and cut here, so that an end in the last step stays a termination.
    Raises InputError for what JaxMARL does not take, and where JAX does not see the GPU.
    """

    prefix = "jaxmarl"

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device = f"{self.prefix}/{name}", num_envs, device
        self.jax_device, options = self._jax_device(), dict(env_kwargs)
        limit = options.pop("max_episode_steps", None)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise InputError(f"--env-kwargs max_episode_steps={limit}: must be a whole number, at least 1")
        try:
            self.max_episode_steps = limit or self._limit(self._make(name, options))
            self.env = self._make(name, options | {"max_steps": self.max_episode_steps + 1})
        except Exception as error:  # whatever an env makes of an option
            reason = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"{self.env_id}: {type(error).__name__}: {reason} (options {env_kwargs})") from error
        self.agents = list(self.env.agents)
        self.num_agents = len(self.agents)
        sizes = [self.env.observation_space(agent).shape for agent in self.agents]
        if max(map(len, sizes)) > 1:
            raise InputError(f"{self.env_id} has observations that are no vectors: {max(sizes)}")
        self.obs_size = max(size for (size,) in sizes)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.obs_size,), np.float32)
        agent_spaces = [_gymnasium(self.env.action_space(agent), self.env_id) for agent in self.agents]
        self.action_sizes = [space.shape[0] if space.shape else None for space in agent_spaces]
        self.action_space, own = pad_actions(agent_spaces, self.env_id)
        self.own_actions = None if own is None else jnp.asarray(own)
        self.masks = type(self.env).get_avail_actions is not MultiAgentEnv.get_avail_actions
        self._begin, self._advance = jax.jit(self._first), jax.jit(self._step, donate_argnums=0)
        # Committed to the device, as everything that comes back is: else the second step would compile again.
        self.key = jax.device_put(jax.random.PRNGKey(seed), self.jax_device)
        state = jax.eval_shape(self._first, self.key)[1]["state"]
        self.state_space = None if state is None else spaces.Box(-np.inf, np.inf, state.shape[1:], np.float32)

    def _make(self, name: str, options: dict[str, Any]) -> Any:
        env = jaxmarl.make(name, **options)
        inits = [vars(cls)["__init__"] for cls in type(env).__mro__[:-1] if "__init__" in vars(cls)]
        if unknown := options.keys() - {name for init in inits for name in inspect.signature(init).parameters}:
            raise ValueError(f"there is no option {min(unknown)}")  # many envs swallow what they do not know
        return env

    def _limit(self, env: Any) -> int:
        return int(env.max_steps)

    def _won(self, state: Any) -> jax.Array | None:
        """Whether the episode was won, of one env; None where that cannot be told."""
        return None

    def _jax_device(self) -> Any:
        try:
            return jax.devices("gpu" if self.device.type == "cuda" else "cpu")[self.device.index or 0]
        except (RuntimeError, IndexError) as error:
            raise InputError(f"{self.env_id}: JAX does not see {self.device}; install jax[cuda12] of torch's CUDA "
                             "version, or use --device cpu") from error  # fmt: skip

    # ---- in JAX, of all envs ----
    def _show(self, obs: dict[str, jax.Array], state: Any, alive: jax.Array) -> dict[str, jax.Array | None]:
        """What the agents see, padded: obs [N, G, O], state [N, C], alive [N, G] and the mask [N, G, K]."""
        rows = [jnp.pad(obs[a], ((0, 0), (0, self.obs_size - obs[a].shape[1]))) for a in self.agents]
        mask = None
        if self.masks:
            allowed = jax.vmap(self.env.get_avail_actions)(state)
            mask = jnp.stack([allowed[a] for a in self.agents], 1).astype(bool)
        elif self.own_actions is not None:
            mask = jnp.broadcast_to(self.own_actions, (self.num_envs, *self.own_actions.shape))
        world = obs["world_state"].astype(jnp.float32) if "world_state" in obs else None
        return {"obs": jnp.stack(rows, 1).astype(jnp.float32), "state": world, "alive": alive, "mask": mask}

    def _start(self, key: jax.Array) -> tuple[dict[str, jax.Array], Any]:
        return jax.vmap(self.env.reset)(jax.random.split(key, self.num_envs))

    def _first(self, key: jax.Array) -> tuple[tuple, dict[str, jax.Array | None]]:
        key, own = jax.random.split(key)
        obs, state = self._start(own)
        alive = jnp.ones((self.num_envs, self.num_agents), bool)
        # Weak types become strong ones, as they are after a step, which so compiles once.
        state = jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), state)
        return (state, jnp.zeros(self.num_envs, jnp.int32), key), self._show(obs, state, alive)

    def _step(self, carry: tuple, actions: jax.Array) -> tuple[tuple, dict, dict, dict]:
        state, elapsed, key = carry
        key, step_key, reset_key = jax.random.split(key, 3)
        keys = jax.random.split(step_key, self.num_envs)
        chosen = {
            agent: actions[:, g] if size is None else actions[:, g, :size]
            for g, (agent, size) in enumerate(zip(self.agents, self.action_sizes, strict=True))
        }
        obs, state, rewards, dones, _ = jax.vmap(self.env.step_env)(keys, state, chosen)
        elapsed = elapsed + 1
        terminations = dones["__all__"]
        truncations = ~terminations & (elapsed >= self.max_episode_steps)
        ends = terminations | truncations
        alive = ~jnp.stack([dones[agent] for agent in self.agents], 1)
        results = {"rewards": jnp.stack([rewards[a] for a in self.agents], 1).astype(jnp.float32),
                   "terminations": terminations, "truncations": truncations,
                   "won": jax.vmap(self._won)(state)}  # fmt: skip
        final = self._show(obs, state, alive)
        first_obs, first_state = self._start(reset_key)

        def select(first: jax.Array, now: jax.Array) -> jax.Array:
            return jnp.where(ends.reshape(-1, *[1] * (now.ndim - 1)), first, now)

        obs, state = jax.tree.map(select, first_obs, obs), jax.tree.map(select, first_state, state)
        shown = self._show(obs, state, alive | ends[:, None])
        return (state, jnp.where(ends, 0, elapsed), key), shown, final, results

    # ---- in torch ----
    def _accept(self, shown: dict[str, jax.Array | None]) -> tuple[Tensor, Tensor | None]:
        shown = _torch(shown)
        self.alive, self.action_mask = shown["alive"], shown["mask"]
        return shown["obs"], shown["state"]

    def reset(self) -> tuple[Tensor, Tensor | None]:
        self.carry, shown = self._begin(self.key)
        self.key = self.carry[2]
        self.shown = shown
        return self._accept(shown)

    def step(self, actions: Tensor) -> MultiAgentStep:
        if isinstance(self.action_space, spaces.Box):
            bounds = self.action_space.low, self.action_space.high
            actions = actions.clamp(*(torch.as_tensor(bound, device=self.device) for bound in bounds))
        # A tensor of its own: JAX reads it later, and takes it to be constant.
        handed = jnp.from_dlpack(actions.to(torch.float32 if actions.is_floating_point() else torch.int32, copy=True))
        self.carry, self.shown, final, results = self._advance(self.carry, handed)
        obs, state = self._accept(self.shown)
        final, results = _torch(final), _torch(results)
        ends = results["terminations"], results["truncations"]
        return MultiAgentStep(obs, state, results["rewards"], *ends, self.alive, final["alive"], final["obs"],
                              final["state"], self.action_mask, results["won"])  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        leaves = jax.tree.leaves((self.carry, self.shown))
        return {"leaves": [torch.from_numpy(_signed(np.array(leaf))) for leaf in leaves]}

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        if not hasattr(self, "carry"):
            self.reset()
        like, structure = jax.tree.flatten((self.carry, self.shown))
        arrays = [saved.cpu().numpy().view(leaf.dtype) for saved, leaf in zip(state["leaves"], like, strict=True)]
        leaves = [jax.device_put(array.copy(), self.jax_device) for array in arrays]
        self.carry, self.shown = jax.tree.unflatten(structure, leaves)
        return self._accept(self.shown)


def _torch(arrays: dict[str, jax.Array | None]) -> dict[str, Tensor | None]:
    return {name: None if x is None else torch.from_dlpack(x) for name, x in arrays.items()}


def _signed(array: np.ndarray) -> np.ndarray:
    """uint32 as int32, bit by bit: what a checkpoint can hold."""
    return array.view(np.int32) if array.dtype == np.uint32 else array


def _gymnasium(space: Any, env_id: str) -> Space:
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low") and len(space.shape) == 1:
        low, high = (np.broadcast_to(np.asarray(x, np.float32), space.shape) for x in (space.low, space.high))
        return spaces.Box(low, high, dtype=np.float32)
    raise InputError(f"{env_id} has actions {space}; supported are Discrete and vectors with bounds")
