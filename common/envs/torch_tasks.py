"""CartPole-v1 and Pendulum-v1 in torch: any number of copies on a CPU or GPU, equal to Gymnasium's step for step.

https://gymnasium.farama.org/environments/classic_control. A task is a handful of pure functions on states [N, S];
`TorchVecEnv` adds time limits and resets. Nothing in a step waits for the device. Physics is float64, as Gymnasium's:
in float32 an episode of Pendulum drifts away from it, by up to 0.3 in its last observation.
"""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.base import Step, VecEnv
from common.errors import InputError


class CartPole:
    """A cart is pushed to the left (0) or right (1), 1 for each step until its pole falls or it leaves the track.

    State and observation: position in m, velocity, angle of the pole from upright in rad, angular velocity. Barto,
    Sutton and Anderson 1983; equations of https://coneural.org/florian/papers/05_cart_pole.pdf without friction.
    """

    max_episode_steps, obs_size = 500, 4
    action_space = spaces.Discrete(2)
    reset_bounds = (0.05, 0.05, 0.05, 0.05)  # first states are uniform between minus these and these
    gravity, cart_mass, pole_mass, half_length, force, dt = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
    max_position, max_angle = 2.4, math.radians(12)

    def dynamics(self, state: Tensor, action: Tensor) -> Tensor:
        """One explicit Euler step. state: [N, 4]; action: [N] int64."""
        x, x_dot, theta, theta_dot = state.unbind(-1)
        force = torch.where(action == 1, self.force, -self.force)
        sin, cos, mass = theta.sin(), theta.cos(), self.cart_mass + self.pole_mass
        pushed = (force + self.pole_mass * self.half_length * theta_dot**2 * sin) / mass
        inertia = self.half_length * (4 / 3 - self.pole_mass * cos**2 / mass)
        theta_acc = (self.gravity * sin - cos * pushed) / inertia
        x_acc = pushed - self.pole_mass * self.half_length * theta_acc * cos / mass
        rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], -1)
        return state + self.dt * rates

    def observe(self, state: Tensor) -> Tensor:
        return state.float()

    def reward(self, state: Tensor, action: Tensor) -> Tensor:
        """1 in every step, also in the one in which it falls."""
        return torch.ones_like(state[:, 0])

    def terminated(self, state: Tensor) -> Tensor:
        """Of the state after a step."""
        return (state[:, 0].abs() > self.max_position) | (state[:, 2].abs() > self.max_angle)


class Pendulum:
    """A torque in [-2, 2] N m, too weak to lift it at once, swings a pendulum up and holds it there.

    State: angle from upright in rad (it counts whole turns), angular velocity in rad/s. Observation: cosine and sine of
    the angle, angular velocity.
    """

    max_episode_steps, obs_size = 200, 3
    action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    reset_bounds = (math.pi, 1.0)
    gravity, mass, length, max_torque, max_speed, dt = 10.0, 1.0, 1.0, 2.0, 8.0, 0.05

    def dynamics(self, state: Tensor, action: Tensor) -> Tensor:
        """One semi-implicit Euler step of a rod that turns about its end. state: [N, 2]; action: [N, 1] float32."""
        theta, theta_dot = state.unbind(-1)
        torque = action[:, 0].clamp(-self.max_torque, self.max_torque)
        acceleration = 1.5 * self.gravity / self.length * theta.sin() + 3 / (self.mass * self.length**2) * torque
        theta_dot = (theta_dot + self.dt * acceleration).clamp(-self.max_speed, self.max_speed)
        return torch.stack([theta + self.dt * theta_dot, theta_dot], -1)

    def observe(self, state: Tensor) -> Tensor:
        theta, theta_dot = state.unbind(-1)
        return torch.stack([theta.cos(), theta.sin(), theta_dot], -1).float()

    def reward(self, state: Tensor, action: Tensor) -> Tensor:
        """Minus the cost of the angle in [-pi, pi) and the velocity before the step, and of the torque."""
        theta, theta_dot = state.unbind(-1)
        angle = (theta + math.pi) % (2 * math.pi) - math.pi
        torque = action[:, 0].clamp(-self.max_torque, self.max_torque)
        return -(angle**2 + 0.1 * theta_dot**2 + 0.001 * torque**2)

    def terminated(self, state: Tensor) -> Tensor:
        return torch.zeros_like(state[:, 0], dtype=torch.bool)


TASKS = {"CartPole-v1": CartPole, "Pendulum-v1": Pendulum}


def task_ids() -> list[str]:
    return list(TASKS)


class TorchVecEnv(VecEnv):
    """num_envs copies of one of TASKS; option max_episode_steps. final_obs is always given: to ask is to wait.

    Raises InputError for other options and a limit below 1.
    """

    def __init__(self, name: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any]):
        self.env_id, self.num_envs, self.device, self.task = f"torch/{name}", num_envs, device, TASKS[name]()
        options = dict(env_kwargs)
        self.max_episode_steps = limit = options.pop("max_episode_steps", self.task.max_episode_steps)
        if options:
            raise InputError(f"{self.env_id} has no option {', '.join(options)}; there is only max_episode_steps")
        if type(limit) is not int or limit < 1:
            raise InputError(f"--env-kwargs max_episode_steps={limit}: must be a whole number, at least 1")
        self.action_space = self.task.action_space
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.task.obs_size,), np.float32)
        self.critic_observation_space, self.unflattened_shape = self.observation_space, self.observation_space.shape
        self.generator = torch.Generator(device).manual_seed(seed)
        self.reset_bounds = torch.tensor(self.task.reset_bounds, dtype=torch.float64, device=device)

    def _first_states(self) -> Tensor:
        """[N, S] float64, new in every row."""
        size, kind = (self.num_envs, len(self.reset_bounds)), {"dtype": torch.float64, "device": self.device}
        return (2 * torch.rand(size, generator=self.generator, **kind) - 1) * self.reset_bounds

    def reset(self) -> tuple[Tensor, Tensor]:
        self.state = self._first_states()
        self.elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        obs = self.task.observe(self.state)
        return obs, obs

    @torch.no_grad()
    def step(self, actions: Tensor) -> Step:
        rewards = self.task.reward(self.state, actions).float()
        state, elapsed = self.task.dynamics(self.state, actions), self.elapsed + 1
        terminations = self.task.terminated(state)
        truncations = (elapsed >= self.max_episode_steps) & ~terminations
        dones = terminations | truncations
        self.state = torch.where(dones[:, None], self._first_states(), state)
        self.elapsed = torch.where(dones, 0, elapsed)
        obs, final_obs = self.task.observe(self.state), self.task.observe(state)
        return Step(obs, obs, rewards, terminations, truncations, final_obs, final_obs)

    def state_dict(self) -> dict[str, Tensor]:
        """States [N, S], steps of the running episodes [N] and the generator's state."""
        return {"state": self.state, "elapsed": self.elapsed, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The random stream goes on only on the same kind of device; another kind's has a state of its own."""
        self.state, self.elapsed = state["state"].to(self.device), state["elapsed"].to(self.device)
        if len(state["generator"]) == len(self.generator.get_state()):
            self.generator.set_state(state["generator"].cpu())
        obs = self.task.observe(self.state)
        return obs, obs
