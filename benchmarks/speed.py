"""Steps per second of the PPO scripts against other implementations, in alternating runs on the same envpool env.

    python -m venv peers && . peers/bin/activate
    pip install -r requirements.txt stable-baselines3 && pip install --no-deps rl-games==1.6.5
    pip install psutil tensorboardX pyyaml watchdog gym setproctitle
    python benchmarks/speed.py --task HalfCheetah-v5 --rounds 3 [--cleanrl PATH/ppo_continuous_action.py]

Each round runs every competitor once, in an order that turns round (ABC, CBA, ...). Rates are taken between lines
`global_step=...` that a competitor prints, after a warm-up: end to end, with its own logging. "per CPU s" divides by
the CPU seconds of the competitor's own processes, which neighbours disturb less. CleanRL is not a package:
give the path of its file (ppo_continuous_action.py, ppo.py or ppo_atari.py), which is run as it is, with the vector env
and the layer sizes replaced at run time. `bare` steps the envs with random actions and does nothing else.
"""

import argparse
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Task:
    env_id: str
    num_steps: int
    minibatch: int
    sizes: tuple[int, ...]
    num_envs: int = 64
    epochs: int = 4
    script: str = "ppo_continuous"
    flags: str = "--separate"


TASKS = {
    "HalfCheetah-v5": Task("HalfCheetah-v5", 64, 2048, (256, 128, 64)),
    "Ant-v5": Task("Ant-v5", 64, 2048, (256, 128, 64)),
    "InvertedPendulum-v5": Task("InvertedPendulum-v5", 32, 512, (64, 64)),
    "CartPole-v1": Task("CartPole-v1", 32, 512, (64, 64), script="ppo_discrete"),
    "CartPole-v1-1024": Task("CartPole-v1", 32, 8192, (64, 64), 1024, script="ppo_discrete"),
    "Pong-v5": Task("Pong-v5", 32, 512, (512,), script="ppo_discrete", flags="--no-separate --activation relu"),
}


def make_env(task: Task):
    import envpool

    threads = min(len(os.sched_getaffinity(0)), 8)
    return envpool.make(task.env_id, env_type="gymnasium", num_envs=task.num_envs, seed=1, num_threads=threads)


def own_command(task: Task, flags: list[str]) -> list[str]:
    sizes = [str(size) for size in task.sizes]
    minibatches = task.num_envs * task.num_steps // task.minibatch
    return [sys.executable, str(ROOT / f"{task.script}.py"), "--env-id", f"envpool/{task.env_id}",
            "--num-envs", str(task.num_envs), "--num-steps", str(task.num_steps), "--num-minibatches", str(minibatches),
            "--update-epochs", str(task.epochs), "--hidden-sizes", *sizes, *task.flags.split(),
            "--total-timesteps", "100000000", *flags]  # fmt: skip


def run_bare(task: Task) -> None:
    import numpy as np

    envs = make_env(task)
    envs.reset()
    actions = [np.array([envs.action_space.sample() for _ in range(task.num_envs)]) for _ in range(64)]
    for iteration in range(10**9):
        for t in range(task.num_steps):
            _, _, terminated, truncated, _ = envs.step(actions[(iteration + t) % 64])
            if (terminated | truncated).any():
                envs.reset(np.flatnonzero(terminated | truncated))
        print(f"global_step={(iteration + 1) * task.num_steps * task.num_envs}", flush=True)


def run_sb3(task: Task) -> None:
    import numpy as np
    import torch
    from gymnasium import spaces
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor, VecNormalize

    class EnvpoolVecEnv(VecEnv):
        def __init__(self):
            self.envs = make_env(task)
            box = self.envs.action_space
            action_space = spaces.Box(box.low.astype(np.float32), box.high.astype(np.float32))
            super().__init__(task.num_envs, self.envs.observation_space, action_space)

        def reset(self):
            return self.envs.reset()[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            obs, rewards, terminated, truncated, _ = self.envs.step(self.actions)
            dones, infos = terminated | truncated, [{} for _ in range(task.num_envs)]
            for i in np.flatnonzero(dones):
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": bool(truncated[i])}
            if dones.any():
                obs[dones] = self.envs.reset(np.flatnonzero(dones))[0]
            return obs, rewards, dones, infos

        def close(self):
            self.envs.close()

        def env_is_wrapped(self, wrapper_class, indices=None):
            return [False] * task.num_envs

        def env_method(self, name, *args, indices=None, **kwargs):
            raise NotImplementedError

        def get_attr(self, name, indices=None):
            return [None] * task.num_envs

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

    class Progress(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            print(f"global_step={self.num_timesteps}", flush=True)

    torch.set_num_threads(THREADS or torch.get_num_threads())
    network = {"net_arch": {"pi": list(task.sizes), "vf": list(task.sizes)}, "activation_fn": torch.nn.ELU}
    env = VecNormalize(VecMonitor(EnvpoolVecEnv()))
    model = PPO("MlpPolicy", env, n_steps=task.num_steps, batch_size=task.minibatch, n_epochs=task.epochs,
                policy_kwargs=network, device="cpu", tensorboard_log="runs", verbose=0)  # fmt: skip
    model.learn(10**9, callback=Progress())


def run_rl_games(task: Task) -> None:
    import gym
    import numpy as np
    import torch
    from rl_games.common import env_configurations, vecenv
    from rl_games.common.algo_observer import DefaultAlgoObserver
    from rl_games.common.ivecenv import IVecEnv
    from rl_games.torch_runner import Runner

    class EnvpoolVecEnv(IVecEnv):
        def __init__(self, config_name, num_actors, **kwargs):
            self.envs, self.steps = make_env(task), 0

        def step(self, actions):
            obs, rewards, terminated, truncated, _ = self.envs.step(np.asarray(actions))
            dones = terminated | truncated
            if dones.any():
                obs[dones] = self.envs.reset(np.flatnonzero(dones))[0]
            self.steps += task.num_envs
            if self.steps % (task.num_envs * task.num_steps) == 0:
                print(f"global_step={self.steps}", flush=True)
            return obs.astype(np.float32), rewards, dones, {"time_outs": truncated & ~terminated}

        def reset(self):
            return self.envs.reset()[0].astype(np.float32)

        def get_number_of_agents(self):
            return 1

        def get_env_info(self):
            obs, action = self.envs.observation_space, self.envs.action_space
            return {"observation_space": gym.spaces.Box(-np.inf, np.inf, obs.shape, np.float32),
                    "action_space": gym.spaces.Box(np.float32(action.low), np.float32(action.high))}  # fmt: skip

    torch.set_num_threads(THREADS or torch.get_num_threads())
    vecenv.register("SPEED", lambda config_name, num_actors, **kwargs: EnvpoolVecEnv(config_name, num_actors))
    env_configurations.register("speed", {"vecenv_type": "SPEED", "env_creator": None})
    space = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"},
             "sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True}  # fmt: skip
    mlp = {"units": list(task.sizes), "activation": "elu", "initializer": {"name": "default"}, "d2rl": False}
    config = {"name": "speed", "env_name": "speed", "device": "cpu", "device_name": "cpu",
              "reward_shaper": {"scale_value": 1.0}, "normalize_advantage": True, "gamma": 0.99, "tau": 0.95,
              "learning_rate": 3e-4, "grad_norm": 1.0,
              "entropy_coef": 0.0, "truncate_grads": True, "e_clip": 0.2, "clip_value": True,
              "num_actors": task.num_envs,
              "horizon_length": task.num_steps, "minibatch_size": task.minibatch, "mini_epochs": task.epochs,
              "critic_coef": 2, "lr_schedule": "adaptive", "kl_threshold": 0.008, "normalize_input": True,
              "normalize_value": True, "value_bootstrap": True, "max_epochs": 10**6, "save_best_after": 10**6,
              "save_frequency": 0, "score_to_win": 10**9, "bounds_loss_coef": 0, "print_stats": False,
              "mixed_precision": False, "ppo": True, "train_dir": "runs"}  # fmt: skip
    runner = Runner(DefaultAlgoObserver())
    runner.load({"params": {"seed": 1, "algo": {"name": "a2c_continuous"}, "model": {"name": "continuous_a2c_logstd"},
                            "network": {"name": "actor_critic", "separate": True, "space": {"continuous": space},
                                        "mlp": mlp}, "config": config}})  # fmt: skip
    runner.run({"train": True})


def run_cleanrl(task: Task, path: str) -> None:
    import gymnasium as gym
    import numpy as np
    import torch

    class Moments:
        def __init__(self, shape):
            self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

        def update(self, x):
            mean, var, n = x.mean(0), x.var(0), len(x)
            delta, total = mean - self.mean, self.count + n
            m2 = self.var * self.count + var * n + delta**2 * self.count * n / total
            self.mean, self.var, self.count = self.mean + delta * n / total, m2 / total, total

    class EnvpoolVectorEnv:
        """What CleanRL's wrappers do (statistics, clipped actions, normalised observations and rewards), vectorised."""

        def __init__(self, env_fns, **kwargs):
            self.envs = make_env(task)
            self.single_observation_space, box = self.envs.observation_space, self.envs.action_space
            self.single_action_space, self.plain = box, task.script == "ppo_discrete"
            if not self.plain:
                self.single_action_space = gym.spaces.Box(box.low.astype(np.float32), box.high.astype(np.float32))
            self.obs_rms, self.return_rms = Moments(self.single_observation_space.shape), Moments(())
            self.discounted, self.returns, self.lengths = (np.zeros(task.num_envs) for _ in range(3))

        def normalize(self, obs):
            if self.plain:
                return obs
            self.obs_rms.update(obs)
            return np.clip((obs - self.obs_rms.mean) / np.sqrt(self.obs_rms.var + 1e-8), -10, 10)

        def reset(self, seed=None):
            return self.normalize(self.envs.reset()[0]), {}

        def step(self, actions):
            if not self.plain:
                actions = np.clip(actions, self.single_action_space.low, self.single_action_space.high)
            obs, rewards, terminated, truncated, _ = self.envs.step(actions)
            dones, infos = terminated | truncated, {}
            self.returns += rewards
            self.lengths += 1
            if dones.any():
                episode = {"r": self.returns.copy(), "l": self.lengths.copy()}
                infos["final_info"] = {"_episode": dones, "episode": episode}
                self.returns[dones] = self.lengths[dones] = 0
                obs[dones] = self.envs.reset(np.flatnonzero(dones))[0]
            if self.plain:
                return obs, rewards, terminated, truncated, infos
            self.discounted = self.discounted * 0.99 * (1 - dones) + rewards
            self.return_rms.update(self.discounted)
            rewards = np.clip(rewards / np.sqrt(self.return_rms.var + 1e-8), -10, 10)
            return self.normalize(obs), rewards, terminated, truncated, infos

    def resized(agent):
        def net(old):
            widths = [old[0].in_features, *task.sizes]
            pairs = zip(widths, widths[1:], strict=False)
            hidden = [layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.Tanh())]
            return torch.nn.Sequential(*hidden, torch.nn.Linear(widths[-1], old[-1].out_features))

        agent.critic, agent.actor_mean = net(agent.critic), net(agent.actor_mean)
        return agent

    torch.set_num_threads(THREADS or torch.get_num_threads())
    gym.vector.SyncVectorEnv = EnvpoolVectorEnv
    source = Path(path).read_text()
    anchor = "    optimizer = optim.Adam("
    assert source.count(anchor) == 1, f"{path}: not the file this was written for"
    if task.script == "ppo_continuous":
        source = source.replace(anchor, "    agent = resized(agent)\n" + anchor)
    source = source.replace('print("SPS:"', 'print(f"global_step={global_step}", flush=True); print("SPS:"')
    minibatches = task.num_envs * task.num_steps // task.minibatch
    sys.argv = [path, "--env-id", task.env_id, "--num-envs", str(task.num_envs), "--num-steps", str(task.num_steps),
                "--num-minibatches", str(minibatches), "--update-epochs", str(task.epochs), "--total-timesteps",
                "100000000", "--no-cuda"]  # fmt: skip
    module = type(sys)("__main__")  # its dataclass must be found by name
    sys.modules["__main__"] = module
    module.__dict__.update({"resized": resized, "__file__": path})
    exec(compile(source, path, "exec"), module.__dict__)


def cpu_seconds(session: int) -> float:
    """User and system seconds of all processes of a session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def measure(command: list[str], warmup: float, seconds: float, log: Path) -> dict[str, float]:
    """Steps per wall and per own CPU second between the first line after `warmup` and the first `seconds` later."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)
        first = begin = end = None
        with open(log, "a") as file:
            for line in process.stdout:
                file.write(line)
                match = re.search(r"global_step=(\d+)(?!\d|, episodic)", line)
                if not match:
                    continue
                now = time.perf_counter()
                first = first or now
                if now - first < warmup:
                    continue
                point = (now, int(match[1]), cpu_seconds(process.pid))
                begin = begin or point
                if point[0] - begin[0] >= seconds:
                    end = point
                    break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if end is None:
        raise SystemExit(f"{' '.join(command)}: ended before it was measured; see {log}")
    steps, cpu = end[1] - begin[1], end[2] - begin[2]
    return {"wall": steps / (end[0] - begin[0]), "cpu": steps / cpu, "cores": cpu / (end[0] - begin[0])}


def main() -> None:
    global THREADS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="HalfCheetah-v5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="measured wall seconds of each run")
    parser.add_argument("--warmup", type=float, default=8, help="wall seconds dropped after the first line")
    parser.add_argument("--cleanrl", help="path of CleanRL's ppo_continuous_action.py")
    parser.add_argument("--only", nargs="*", help="names of competitors")
    parser.add_argument("--threads", type=int, default=0, help="torch threads of the peers; 0: their default")
    parser.add_argument("--flags", nargs="*", default=[], metavar="NAME=FLAGS", help="another row of ours")
    parser.add_argument("--run-peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    THREADS, task = args.threads, TASKS[args.task]
    if args.run_peer:
        peers = {"bare": run_bare, "sb3": run_sb3, "rl_games": run_rl_games}
        peers["cleanrl"] = lambda task: run_cleanrl(task, args.cleanrl)
        return peers[args.run_peer](task)
    peer = [sys.executable, str(Path(__file__).resolve()), "--task", args.task, "--threads", str(args.threads)]
    commands = {"ours": own_command(task, [])}
    commands |= {name: own_command(task, flags.split()) for name, flags in (item.split("=", 1) for item in args.flags)}
    others = ("sb3", "rl_games") if task.script == "ppo_continuous" else ("bare",)
    commands |= {name: [*peer, "--run-peer", name] for name in others}
    if args.cleanrl:
        commands["cleanrl"] = [*peer, "--cleanrl", str(Path(args.cleanrl).resolve()), "--run-peer", "cleanrl"]
    if args.only:
        commands = {name: command for name, command in commands.items() if name in args.only}
    reference = "cleanrl" if "cleanrl" in commands else list(commands)[-1]
    log = Path(tempfile.gettempdir()) / "speed.log"
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(args.rounds):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            results[name].append(measure(commands[name], args.warmup, args.seconds, log))
            shown = " ".join(f"{key}={value:.2f}" for key, value in results[name][-1].items())
            print(f"round {number} {name}: {shown}", flush=True)
    versions = " ".join(f"{p} {metadata.version(p)}" for p in ("torch", "envpool", "stable-baselines3", "rl-games"))
    print(f"\n{task}; {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {versions}")
    print("| competitor | steps/s | min-max | ratio | cores used | steps per CPU s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for name, rows in results.items():
        pairs = list(zip(rows, results[reference], strict=True))
        ratios = {key: statistics.median(a[key] / b[key] for a, b in pairs) for key in ("wall", "cpu")}
        wall = [row["wall"] for row in rows]
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(f"| {name} | {middle['wall']:.0f} | {min(wall):.0f}-{max(wall):.0f} | {ratios['wall']:.2f} | "
              f"{middle['cores']:.2f} | {middle['cpu']:.0f} | {ratios['cpu']:.2f} |")  # fmt: skip


THREADS = 0

if __name__ == "__main__":
    main()
