"""Gymnasium's MuJoCo v5 tasks on MuJoCo Warp: thousands of worlds on one GPU, torch tensors in and out.

https://github.com/google-deepmind/mujoco_warp and https://gymnasium.farama.org/environments/mujoco. Model, weights,
ranges and spaces are read from a Gymnasium env, whose options work here too. The physics of one control step is
recorded once and replayed: a CUDA graph on a GPU, Warp's own list of calls on a CPU. Observation, reward, termination
and reset are torch on views of Warp's arrays; nothing waits for the device.

These are the tasks of gym/ and envpool/ on another engine than C MuJoCo. One control step from an equal state:

| difference | effect |
|---|---|
| float32 instead of float64 | nearly all positions and velocities within 1e-5, 98 % of the worlds within 5e-4 of max(1, value); rewards within 1e-4. A contact that just begins can change a velocity by 0.3. Far from the start the x velocity loses digits (6e-4 at 500 m) |
| Newton instead of PGS solver in Humanoid and HumanoidStandup | contact forces within 2e-3 of the largest |
| Ant: shins at the ground within 30 degrees of the vertical have their friction pyramid turned about the contact's normal (as good an approximation of a cone) | concerns a third of the steps of random play: velocities differ by 0.05 (median), 0.4 (90 %), at most 1.6 |
| random numbers of resets | the same distributions, from torch's generator |
| a world that diverges | NaN, for the caller to see; C MuJoCo silently starts it anew |
| buffers: nconmax contacts a world on average, njmax constraint rows a world | what is beyond is dropped and Warp prints so; in random play Gymnasium's models need less than half of either |
"""  # noqa: E501

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import gymnasium
import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from gymnasium.envs.mujoco import MujocoEnv
from torch import Tensor

from common.envs.base import Observation, Step, VecEnv
from common.errors import InputError

wp.config.log_level = wp.LOG_WARNING  # it reports every kernel on stdout otherwise
NCONMAX, NJMAX = 32, 128  # defaults of options of the same names
# MuJoCo's arrays that the tasks read or a reset writes.
ARRAYS = """
    qpos qvel ctrl qacc_warmstart xpos xipos site_xpos cinert cvel cfrc_ext qfrc_actuator qfrc_constraint
""".split()
STATE = ("qpos", "qvel", "qacc_warmstart")  # what a step of the physics depends on, besides ctrl
DRAWS = 32  # candidates of a rejection sampling; that Pusher rejects them all has probability 3e-14


class Task:
    """N worlds of one task: each subclass says in torch what Gymnasium's class (Ant: AntEnv) says in NumPy.

    env is Gymnasium's, with its weights and ranges; data has MuJoCo's arrays, [N, ..] views that the physics rewrites.
    """

    gaussian_velocity = False  # at reset; uniform otherwise

    def __init__(self, env: MujocoEnv, data: SimpleNamespace, generator: torch.Generator):
        self.env, self.data, self.generator = env, data, generator
        self.num_envs, self.device = len(data.qpos), data.qpos.device
        self.init_qpos, self.init_qvel, self.body_mass = (
            torch.tensor(array, dtype=torch.float32, device=self.device)
            for array in (env.init_qpos, env.init_qvel, env.model.body_mass)
        )

    def x_position(self) -> Tensor:
        """[N] coordinate whose change is rewarded. A body's lags behind qpos by a substep, as in C MuJoCo."""
        return self.data.qpos[:, 0]

    def observe(self) -> Tensor:
        """[N, O]"""
        return torch.cat([self.position(), self.data.qvel], 1)

    def reward(self, action: Tensor, x_velocity: Tensor) -> Tensor:
        """[N] of the step that has led to the present state."""
        raise NotImplementedError

    def healthy(self) -> Tensor:
        """[N] bool"""
        return torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def terminated(self) -> Tensor:
        """[N] bool"""
        return ~self.healthy() & getattr(self.env, "_terminate_when_unhealthy", True)

    def first_states(self) -> tuple[Tensor, Tensor]:
        """Random qpos [N, nq] and qvel [N, nv] of a new episode."""
        scale = self.env._reset_noise_scale
        qpos = self.init_qpos + self.uniform(-scale, scale, self.env.model.nq)
        if self.gaussian_velocity:
            return qpos, self.init_qvel + scale * self.normal(self.env.model.nv)
        return qpos, self.init_qvel + self.uniform(-scale, scale, self.env.model.nv)

    # ---- what several tasks share ----

    def position(self) -> Tensor:
        """qpos [N, ..], without the place in the world unless an option asks for it."""
        return self.data.qpos[:, self.env.observation_structure["skipped_qpos"] :]

    def body(self, name: str | int) -> Tensor:
        """Coordinates [N, 3] of a body's frame."""
        return self.data.xpos[:, self.env.data.body(name).id]

    def forward_reward(self, x_velocity: Tensor) -> Tensor:
        return self.env._forward_reward_weight * x_velocity

    def healthy_reward(self) -> Tensor:
        return self.env._healthy_reward * self.healthy()

    def control_cost(self, action: Tensor) -> Tensor:
        return self.env._ctrl_cost_weight * sum_of_squares(action)

    def finite(self) -> Tensor:
        return self.data.qpos.isfinite().all(1) & self.data.qvel.isfinite().all(1)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        numbers = torch.rand(self.num_envs, *shape, generator=self.generator, device=self.device)
        return low + (high - low) * numbers

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(self.num_envs, *shape, generator=self.generator, device=self.device)


class HalfCheetah(Task):
    gaussian_velocity = True

    def reward(self, action, x_velocity):
        return self.forward_reward(x_velocity) - self.control_cost(action)


class Swimmer(HalfCheetah):
    gaussian_velocity = False


class Walker2d(Task):
    def observe(self):
        return torch.cat([self.position(), self.data.qvel.clamp(-10, 10)], 1)

    def reward(self, action, x_velocity):
        return self.forward_reward(x_velocity) + self.healthy_reward() - self.control_cost(action)

    def healthy(self):
        z, angle = self.data.qpos[:, 1], self.data.qpos[:, 2]
        return between(z, self.env._healthy_z_range) & between(angle, self.env._healthy_angle_range)


class Hopper(Walker2d):
    def healthy(self):
        state = torch.cat([self.data.qpos[:, 2:], self.data.qvel], 1)
        return super().healthy() & between(state, self.env._healthy_state_range).all(1)


class Ant(Task):
    gaussian_velocity = True

    def x_position(self):
        return self.body(self.env._main_body)[:, 0]

    def contact_forces(self):
        return self.data.cfrc_ext.clamp(*self.env._contact_force_range)

    def observe(self):
        parts = [self.position(), self.data.qvel]
        if self.env._include_cfrc_ext_in_observation:
            parts.append(self.contact_forces()[:, 1:].flatten(1))
        return torch.cat(parts, 1)

    def reward(self, action, x_velocity):
        contact_cost = self.env._contact_cost_weight * sum_of_squares(self.contact_forces())
        return self.forward_reward(x_velocity) + self.healthy_reward() - self.control_cost(action) - contact_cost

    def healthy(self):
        z, (low, high) = self.data.qpos[:, 2], self.env._healthy_z_range
        return self.finite() & (low <= z) & (z <= high)


class HumanoidStandup(Task):
    def observe(self):
        env, data = self.env, self.data
        parts = [
            (True, self.position()),
            (True, data.qvel),
            (env._include_cinert_in_observation, data.cinert[:, 1:]),
            (env._include_cvel_in_observation, data.cvel[:, 1:]),
            (env._include_qfrc_actuator_in_observation, data.qfrc_actuator[:, 6:]),
            (env._include_cfrc_ext_in_observation, data.cfrc_ext[:, 1:]),
        ]
        return torch.cat([part.flatten(1) for included, part in parts if included], 1)

    def reward(self, action, x_velocity):
        height_reward = self.data.qpos[:, 2] / self.env.model.opt.timestep
        impact_cost = self.env._impact_cost_weight * sum_of_squares(self.data.cfrc_ext)
        return height_reward - self.control_cost(action) - impact_cost.clamp(*self.env._impact_cost_range) + 1


class Humanoid(HumanoidStandup):
    def x_position(self):
        return (self.body_mass * self.data.xipos[:, :, 0]).sum(1) / self.body_mass.sum()

    def reward(self, action, x_velocity):
        contact_cost = self.env._contact_cost_weight * sum_of_squares(self.data.cfrc_ext)
        cost = self.control_cost(action) + contact_cost.clamp(*self.env._contact_cost_range)
        return self.forward_reward(x_velocity) + self.healthy_reward() - cost

    def healthy(self):
        return between(self.data.qpos[:, 2], self.env._healthy_z_range)


class Reacher(Task):
    def distance(self):
        return self.body("fingertip") - self.body("target")

    def observe(self):
        qpos, angles = self.data.qpos, self.data.qpos[:, :2]
        return torch.cat([angles.cos(), angles.sin(), qpos[:, 2:], self.data.qvel[:, :2], self.distance()[:, :2]], 1)

    def reward(self, action, x_velocity):
        env = self.env
        distance_cost = env._reward_dist_weight * self.distance().norm(dim=1)
        return -distance_cost - env._reward_control_weight * sum_of_squares(action)

    def first_states(self):
        qpos = self.init_qpos + self.uniform(-0.1, 0.1, self.env.model.nq)
        qvel = self.init_qvel + self.uniform(-0.005, 0.005, self.env.model.nv)
        goals = self.uniform(-0.2, 0.2, DRAWS, 2)
        qpos[:, -2:] = first_allowed(goals, goals.norm(dim=2) < 0.2)
        qvel[:, -2:] = 0
        return qpos, qvel


class Pusher(Task):
    def observe(self):
        bodies = [self.body(name) for name in ("tips_arm", "object", "goal")]
        return torch.cat([self.data.qpos[:, :7], self.data.qvel[:, :7], *bodies], 1)

    def reward(self, action, x_velocity):
        env = self.env
        near_cost = env._reward_near_weight * (self.body("object") - self.body("tips_arm")).norm(dim=1)
        distance_cost = env._reward_dist_weight * (self.body("object") - self.body("goal")).norm(dim=1)
        return -distance_cost - env._reward_control_weight * sum_of_squares(action) - near_cost

    def first_states(self):
        qpos = self.init_qpos.repeat(self.num_envs, 1)
        qvel = self.init_qvel + self.uniform(-0.005, 0.005, self.env.model.nv)
        objects = torch.stack([self.uniform(-0.3, 0, DRAWS), self.uniform(-0.2, 0.2, DRAWS)], 2)
        qpos[:, -4:-2] = first_allowed(objects, objects.norm(dim=2) > 0.17)
        qpos[:, -2:] = 0
        qvel[:, -4:] = 0
        return qpos, qvel


class InvertedPendulum(Task):
    def observe(self):
        return torch.cat([self.data.qpos, self.data.qvel], 1)

    def reward(self, action, x_velocity):
        return self.healthy().float()

    def healthy(self):
        return self.finite() & (self.data.qpos[:, 1].abs() <= 0.2)


class InvertedDoublePendulum(Task):
    gaussian_velocity = True

    def observe(self):
        cart, angles = self.data.qpos[:, :1], self.data.qpos[:, 1:]
        velocity, force = self.data.qvel.clamp(-10, 10), self.data.qfrc_constraint[:, :1].clamp(-10, 10)
        return torch.cat([cart, angles.sin(), angles.cos(), velocity, force], 1)

    def reward(self, action, x_velocity):
        x, y = self.data.site_xpos[:, 0, 0], self.data.site_xpos[:, 0, 2]
        v1, v2 = self.data.qvel[:, 1], self.data.qvel[:, 2]
        distance_penalty = 0.01 * x**2 + (y - 2) ** 2
        return self.healthy_reward() - distance_penalty - (1e-3 * v1**2 + 5e-3 * v2**2)

    def healthy(self):
        return self.data.site_xpos[:, 0, 2] > 1


TASKS = {
    f"{task.__name__}-v5": task
    for task in (Ant, HalfCheetah, Hopper, Walker2d, Humanoid, HumanoidStandup, Swimmer, Reacher, Pusher,
                 InvertedPendulum, InvertedDoublePendulum)
}  # fmt: skip


def task_ids() -> list[str]:
    return list(TASKS)


def sum_of_squares(x: Tensor) -> Tensor:
    """[N, ..] -> [N]"""
    return x.square().flatten(1).sum(1)


def between(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    return (bounds[0] < x) & (x < bounds[1])


def first_allowed(candidates: Tensor, allowed: Tensor) -> Tensor:
    """Of candidates [N, K, ..] the first that is allowed [N, K], as a loop that rejects would find it."""
    return candidates[torch.arange(len(candidates), device=candidates.device), allowed.int().argmax(1)]


class WarpVecEnv(VecEnv):
    """num_envs worlds of one of TASKS. final_obs is always given: to ask whether a row was truncated is to wait.

    Options are those of the Gymnasium env, and nconmax and njmax, the sizes of Warp's buffers, for an xml_file that
    needs larger ones. Raises InputError for options that Gymnasium refuses and models that MuJoCo Warp cannot run.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs = f"warp/{name}", num_envs
        self.device = torch.empty(0, device=device).device  # cuda:0 where it was cuda
        self.env = self._make_gymnasium(name, env_kwargs)
        self.max_episode_steps, env = self.env.spec.max_episode_steps, self.env.unwrapped
        self.observation_space = spaces.Box(-np.inf, np.inf, self.env.observation_space.shape, np.float32)
        self.critic_observation_space, self.unflattened_shape = self.observation_space, self.observation_space.shape
        self.action_space = self.env.action_space
        bounds = self.action_space.low, self.action_space.high
        self.low, self.high = (torch.from_numpy(bound).to(self.device) for bound in bounds)
        self._start_engine(env.model, env_kwargs)
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.task = TASKS[name](env, self.data, self.generator)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=self.device)

        def physics() -> None:
            for _ in range(env.frame_skip):
                mjw.step(self.warp_model, self.warp_data)
            mjw.rne_postconstraint(self.warp_model, self.warp_data)  # cfrc_ext, as Gymnasium does

        def derive() -> None:
            """What a new episode's first observation is made of besides qpos and qvel."""
            mjw.kinematics(self.warp_model, self.warp_data)
            mjw.com_pos(self.warp_model, self.warp_data)
            mjw.com_vel(self.warp_model, self.warp_data)

        notice = "loading kernels; where a task has never run before they are compiled, for up to a minute"
        print(f"{self.env_id}: {notice}", file=sys.stderr, flush=True)
        self._physics, self._derive = self._record(physics), self._record(derive)

    def _make_gymnasium(self, name: str, env_kwargs: dict[str, Any]) -> gymnasium.Env:
        options = {key: value for key, value in env_kwargs.items() if key not in ("nconmax", "njmax")}
        if "render_mode" in options:
            raise InputError(f"{self.env_id} does not render; gym/{name} does")
        try:
            env = gymnasium.make(name, disable_env_checker=True, **options)
        except Exception as error:  # from any code behind gymnasium.make: an unknown option, a missing file
            reason = (str(error) or repr(error)).splitlines()[0]
            raise InputError(f"{self.env_id} takes gym/{name}'s options, not {env_kwargs}: {reason}") from error
        if env.unwrapped.model.na:
            raise InputError(f"{self.env_id}: actuators with a state of their own are not supported; use gym/{name}")
        return env

    def _start_engine(self, model: mujoco.MjModel, env_kwargs: dict[str, Any]) -> None:
        if model.opt.solver == mujoco.mjtSolver.mjSOL_PGS:
            model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON
        sizes = {"nconmax": env_kwargs.get("nconmax", NCONMAX), "njmax": env_kwargs.get("njmax", NJMAX)}
        wp.init()
        self.warp_device = wp.device_from_torch(self.device)
        try:
            with wp.ScopedDevice(self.warp_device):
                self.warp_model = mjw.put_model(model)
                self.warp_data = mjw.make_data(model, nworld=self.num_envs, **sizes)
        except (NotImplementedError, ValueError, TypeError) as error:
            raise InputError(f"{self.env_id}, options {env_kwargs}: MuJoCo Warp cannot run this: {error}") from error
        if self.device.type == "cuda":
            gc.collect()  # now: an old env that is freed while a graph is recorded would spoil it
            # Loops inside a CUDA graph need a driver of CUDA 12.4.
            self.warp_model.opt.graph_conditional = wp.is_conditional_graph_supported()
        self.data = SimpleNamespace(**{name: wp.to_torch(getattr(self.warp_data, name)) for name in ARRAYS})

    def _record(self, function: Callable[[], None]) -> Callable[[], None]:
        """The Warp calls of function as one, to be repeated in order with torch's work on its current stream."""
        with wp.ScopedDevice(self.warp_device):
            function()  # compiles its kernels
            wp.synchronize_device()
            with wp.ScopedCapture() as capture:
                function()
        if self.device.type == "cpu":
            return lambda: wp.capture_launch(capture.graph)
        return lambda: wp.capture_launch(capture.graph, stream=wp.stream_from_torch(self.device))

    @torch.no_grad()
    def reset(self) -> tuple[Observation, Observation]:
        self._restart(torch.ones(self.num_envs, dtype=torch.bool, device=self.device))
        self.x_position, self.obs = self.task.x_position().clone(), self.task.observe()
        return self.obs, self.obs

    def _restart(self, dones: Tensor) -> None:
        """Begin an episode in the worlds of dones [N], as mj_resetData and then Gymnasium's set_state do."""
        for array, first in zip((self.data.qpos, self.data.qvel), self.task.first_states(), strict=True):
            array.copy_(torch.where(dones[:, None], first, array))
        for name in ("qacc_warmstart", "cfrc_ext", "qfrc_actuator", "qfrc_constraint"):
            array = getattr(self.data, name)
            array.masked_fill_(dones.view(-1, *[1] * (array.dim() - 1)), 0)
        self.elapsed = self.elapsed.masked_fill(dones, 0)
        self._derive()

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        actions = actions.clamp(self.low, self.high)
        self.data.ctrl.copy_(actions)
        self._physics()
        self.elapsed = self.elapsed + 1
        x_position = self.task.x_position().clone()
        rewards = self.task.reward(actions, (x_position - self.x_position) / self.task.env.dt)
        terminations, final_obs = self.task.terminated(), self.task.observe()
        truncations = (self.elapsed >= (self.max_episode_steps or np.inf)) & ~terminations
        dones = terminations | truncations
        self._restart(dones)
        self.x_position = torch.where(dones, self.task.x_position(), x_position)
        self.obs = torch.where(dones[:, None], self.task.observe(), final_obs)
        return Step(self.obs, self.obs, rewards, terminations, truncations, final_obs, final_obs)

    def state_dict(self) -> dict[str, Tensor]:
        """Enough to go on exactly on a CPU. A GPU sums contacts in any order, which changes last digits."""
        state = {name: getattr(self.data, name) for name in STATE}
        state |= {"x_position": self.x_position, "elapsed": self.elapsed, "obs": self.obs}
        state = {name: tensor.to("cpu", copy=True) for name, tensor in state.items()}
        return state | {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> tuple[Observation, Observation]:
        """The random stream goes on only on the same kind of device; another kind's has a state of its own."""
        for name in STATE:
            getattr(self.data, name).copy_(state[name])
        self.x_position, self.elapsed, self.obs = (
            state[name].to(self.device) for name in ("x_position", "elapsed", "obs")
        )
        if len(state["generator"]) == len(self.generator.get_state()):
            self.generator.set_state(state["generator"].cpu())
        return self.obs, self.obs

    def close(self) -> None:
        self.env.close()
        self._physics = self._derive = None  # frees the graphs
