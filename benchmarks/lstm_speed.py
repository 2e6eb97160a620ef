"""Steps per second of ppo_lstm.py against other recurrent PPOs, and of the ways to run its recurrent layers.

    python -m venv peers && . peers/bin/activate && pip install -r requirements.txt sb3-contrib
    python benchmarks/lstm_speed.py --rounds 3 [--cleanrl PATH/ppo_atari_lstm.py] [--flags "NAME=--compile"]
    python benchmarks/lstm_speed.py --kernels

CartPole without velocities on envpool: 64 envs, 128 steps, 4 minibatches, 4 epochs. All have the same network, which
policy and value share: Linear(4, 64), tanh, one LSTM (--size), a linear head each. Sequences are the whole rollout, as
the peers have it; `ours-16` cuts them to 16 steps. One torch thread each (--threads: of the peers) and one learning
rate; at 0 episodes keep the 22 steps of a random policy, otherwise they grow at each one's pace, which matters to
all that cut sequences at their ends. Runs take turns as in speed.py. CleanRL is not a package: its file is run as it
is, with the vector env (which reports no episodes to log) and the network replaced at run time.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from speed import ROOT, measure
from torch import nn

sys.path.insert(0, str(ROOT))
ENVS, STEPS, EPOCHS, MINIBATCHES, WIDTH = 64, 128, 4, 4, 64
VELOCITIES = [1, 3]
SHAPES = ((4, 512, 64), (16, 128, 64), (32, 64, 128), (128, 16, 128))  # steps, sequences, units


class MaskedCartPole:
    """envpool's vector env with same-step autoreset and without velocities."""

    def __init__(self):
        import envpool

        self.envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=ENVS, seed=1, num_threads=1)
        self.single_observation_space, self.single_action_space = self.envs.observation_space, self.envs.action_space

    def reset(self, seed=None):
        obs = self.envs.reset()[0]
        obs[:, VELOCITIES] = 0
        return obs, {}

    def step(self, actions):
        obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        obs[:, VELOCITIES] = 0
        last, dones = obs, terminated | truncated
        if dones.any():
            last = obs.copy()
            obs[dones] = self.envs.reset(np.flatnonzero(dones))[0]
            obs[:, VELOCITIES] = 0
        return obs, rewards, terminated, truncated, {"last": last}

    def close(self):
        self.envs.close()


def own_command(args: argparse.Namespace, seq_length: int, *flags: str) -> list[str]:
    command = f"""--env-id CartPole --mask-obs 1 3 --num-envs {ENVS} --num-steps {STEPS} --seq-length {seq_length}
        --num-minibatches {MINIBATCHES} --update-epochs {EPOCHS} --hidden-sizes {WIDTH} --rnn-hidden-size {args.size}
        --no-separate --activation tanh --learning-rate {args.learning_rate} --device cpu --torch-threads 1
        --total-timesteps 100000000"""
    return [sys.executable, str(ROOT / "ppo_lstm.py"), *command.split(), *flags]


def sb3_on_envpool():
    from stable_baselines3.common.vec_env import VecEnv

    class VectorEnv(VecEnv):
        def __init__(self):
            self.envs = MaskedCartPole()
            super().__init__(ENVS, self.envs.single_observation_space, self.envs.single_action_space)

        def reset(self):
            return self.envs.reset()[0]

        def step_async(self, actions):
            self.actions = actions

        def step_wait(self):
            obs, rewards, terminated, truncated, info = self.envs.step(self.actions)
            dones, infos = terminated | truncated, [{} for _ in range(ENVS)]
            for i in np.flatnonzero(dones):
                infos[i] = {"terminal_observation": info["last"][i], "TimeLimit.truncated": bool(truncated[i])}
            return obs, rewards, dones, infos

        def close(self):
            self.envs.close()

        def env_is_wrapped(self, wrapper_class, indices=None):
            return [False] * ENVS

        def env_method(self, name, *args, indices=None, **kwargs):
            raise NotImplementedError

        def get_attr(self, name, indices=None):
            return [None] * ENVS

        def set_attr(self, name, value, indices=None):
            raise NotImplementedError

    return VectorEnv()


def sb3_own_envs():
    """Its DummyVecEnv over Gymnasium's CartPole, as its users have it."""
    import gymnasium as gym
    from stable_baselines3.common.vec_env import DummyVecEnv

    def masked_env():
        env, mask = gym.make("CartPole-v1", disable_env_checker=True), np.float32([1, 0, 1, 0])
        return gym.wrappers.TransformObservation(env, lambda obs: obs * mask, env.observation_space)

    return DummyVecEnv([masked_env] * ENVS)


def run_sb3(args: argparse.Namespace, make_envs: Callable) -> None:
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
    from stable_baselines3.common.vec_env import VecMonitor

    class Hidden(BaseFeaturesExtractor):
        def __init__(self, observation_space):
            super().__init__(observation_space, WIDTH)
            self.layers = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())

        def forward(self, obs):
            return self.layers(obs)

    class Progress(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            print(f"global_step={self.num_timesteps}", flush=True)

    network = {"features_extractor_class": Hidden, "net_arch": [], "lstm_hidden_size": args.size, "n_lstm_layers": 1,
               "shared_lstm": True, "enable_critic_lstm": False}  # fmt: skip
    model = RecurrentPPO("MlpLstmPolicy", VecMonitor(make_envs()), n_steps=STEPS, n_epochs=EPOCHS,
                         batch_size=ENVS * STEPS // MINIBATCHES, learning_rate=args.learning_rate,
                         policy_kwargs=network, device="cpu")  # fmt: skip
    model.learn(10**9, callback=Progress())


def run_cleanrl(args: argparse.Namespace) -> None:
    import gymnasium as gym

    gym.vector.SyncVectorEnv = lambda env_fns: MaskedCartPole()
    path = args.cleanrl
    source = Path(path).read_text()
    source = source[: source.index("from cleanrl_utils")] + source[source.index("@dataclass") :]  # Atari wrappers
    network = f"nn.Sequential(layer_init(nn.Linear(4, {WIDTH})), nn.Tanh())\n"
    begin, end = source.index("nn.Sequential(\n"), source.index("        self.lstm =")
    source = source[:begin] + network + source[end:]
    changes = {"nn.LSTM(512, 128)": f"nn.LSTM({WIDTH}, {args.size})", "nn.Linear(128,": f"nn.Linear({args.size},",
               "x / 255.0": "x", 'print("SPS:"': 'print(f"global_step={global_step}", flush=True); print("SPS:"',
               }  # fmt: skip
    for old, new in changes.items():
        assert old in source, f"{path}: not the file this was written for"
        source = source.replace(old, new)
    command = f"""{path} --env-id CartPole-v1 --num-envs {ENVS} --num-steps {STEPS} --num-minibatches {MINIBATCHES}
        --update-epochs {EPOCHS} --learning-rate {args.learning_rate} --total-timesteps 100000000 --no-cuda"""
    sys.argv = command.split()
    module = type(sys)("__main__")  # its dataclass must be found by name
    sys.modules["__main__"] = module
    module.__dict__["__file__"] = path
    exec(compile(source, path, "exec"), module.__dict__)


def recurrent_layers(L: int, S: int, H: int, resets: float) -> dict[str, Callable[[], object]]:
    """Forward and backward of one LSTM over L steps of S sequences; episodes start in a share `resets` of the rows."""
    from ppo_lstm import RNN, Args

    rnn, plain = RNN(H, H, Args(rnn="lstm")), nn.LSTM(H, H)
    x, state, starts = torch.randn(L * S, H), torch.zeros(S, rnn.state_size), torch.rand(L, S) < resets
    parameters = list(rnn.parameters())

    def loop():
        return torch.autograd.grad(rnn.loop(x, state, starts)[0].sum(), parameters)

    def fused():
        return torch.autograd.grad(rnn.fused(x, state, starts).sum(), parameters)

    def without_resets():
        return torch.autograd.grad(plain(x.view(L, S, H))[0].sum(), list(plain.parameters()))

    return {"loop": loop, "compiled loop": torch.compile(loop, fullgraph=True, dynamic=False), "fused": fused,
            "without resets (wrong)": without_resets}  # fmt: skip


def compare_kernels(rounds: int, resets: float) -> None:
    """CPU milliseconds of a call, median and range of turns of 10 calls."""
    torch._dynamo.config.trace_autograd_ops = True
    print("| steps x sequences x units | compiling, s | loop | compiled loop | fused | without resets (wrong) |")
    print("|---|---|---|---|---|---|")
    for shape in SHAPES:
        ways, compiling = recurrent_layers(*shape, resets), 0.0
        for name, call in ways.items():
            start = time.perf_counter()
            call(), call()
            compiling += (time.perf_counter() - start) * (name == "compiled loop")
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                start = time.process_time()
                for _ in range(10):
                    ways[name]()
                times[name].append(100 * (time.process_time() - start))
        cells = [f"{statistics.median(row):.2f} ({min(row):.2f}-{max(row):.2f})" for row in times.values()]
        print(f"| {' x '.join(map(str, shape))} | {compiling:.0f} | {' | '.join(cells)} |", flush=True)


def compare_runs(args: argparse.Namespace) -> None:
    shared = ["--size", str(args.size), "--learning-rate", str(args.learning_rate), "--threads", str(args.threads)]
    peer = [sys.executable, str(Path(__file__).resolve()), *shared, "--run-peer"]
    commands = {"ours": own_command(args, STEPS), "ours-16": own_command(args, 16)}
    own = [*commands, *(item.split("=", 1)[0] for item in args.flags)]
    for name, flags in (item.split("=", 1) for item in args.flags):
        commands[name] = own_command(args, 16, *flags.split())
    commands |= {"sb3-contrib": [*peer, "sb3"], "sb3-contrib, its own envs": [*peer, "sb3-own"]}
    if args.cleanrl:
        commands["cleanrl"] = [*peer, "cleanrl", "--cleanrl", str(Path(args.cleanrl).resolve())]
    if args.only:
        commands = {name: command for name, command in commands.items() if name in args.only}
    own, log = [name for name in own if name in commands], Path(tempfile.gettempdir()) / "lstm_speed.log"
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(args.rounds):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            results[name].append(measure(commands[name], args.warmup, args.seconds, log))
            shown = " ".join(f"{key}={value:.2f}" for key, value in results[name][-1].items())
            print(f"round {number} {name}: {shown}", flush=True)
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, LSTM of {args.size}, "
          f"learning rate {args.learning_rate}, {args.rounds} rounds of {args.seconds:.0f} s; "
          "ratios by CPU seconds")  # fmt: skip
    print("| | steps/s | steps per CPU s | min-max |" + "".join(f" {name} is faster by | min-max |" for name in own))
    print("|---" * (4 + 2 * len(own)) + "|")
    for name, rows in results.items():
        wall, cpu = ([row[key] for row in rows] for key in ("wall", "cpu"))
        cells = [f"{statistics.median(wall):.0f}", f"{statistics.median(cpu):.0f}", f"{min(cpu):.0f}-{max(cpu):.0f}"]
        for fast in own:
            ratios = [a["cpu"] / b["cpu"] for a, b in zip(results[fast], rows, strict=True)]
            cells += [f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f}-{max(ratios):.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12, help="measured wall seconds of each run")
    parser.add_argument("--warmup", type=float, default=4, help="wall seconds dropped after the first line")
    parser.add_argument("--size", type=int, default=64, help="units of the LSTM")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of all; 0: the policy stays as it starts")
    parser.add_argument("--cleanrl", help="path of CleanRL's ppo_atari_lstm.py")
    parser.add_argument("--only", nargs="*", help="names of competitors")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the peers; 0: their default")
    parser.add_argument("--flags", nargs="*", default=[], metavar="NAME=FLAGS", help="another ours-16")
    parser.add_argument("--kernels", action="store_true", help="the recurrent layers alone")
    parser.add_argument("--resets", type=float, default=0.01, help="share of rows where an episode starts in --kernels")
    parser.add_argument("--run-peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_peer or args.kernels:
        torch.set_num_threads(args.threads or torch.get_num_threads())
    if args.kernels:
        return compare_kernels(args.rounds, args.resets)
    if args.run_peer == "cleanrl":
        return run_cleanrl(args)
    if args.run_peer:
        return run_sb3(args, {"sb3": sb3_on_envpool, "sb3-own": sb3_own_envs}[args.run_peer])
    compare_runs(args)


if __name__ == "__main__":
    main()
