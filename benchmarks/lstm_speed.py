"""Steps per second of ppo_lstm.py against other recurrent PPOs, and the two ways to run its recurrent layers.

    python -m venv peers && . peers/bin/activate && pip install -r requirements.txt sb3-contrib
    python benchmarks/lstm_speed.py --rounds 3 [--cleanrl PATH/ppo_atari_lstm.py]
    python benchmarks/lstm_speed.py --kernels

CartPole without velocities on envpool: 64 envs, 128 steps, 4 minibatches, 4 epochs, one hidden layer of 64 units and
one LSTM of 64 that policy and value share, one torch thread each (--threads: of the peers). Sequences are the whole
rollout, as the peers have it; `ours-16` cuts them to 16 steps. Runs take turns as in speed.py. CleanRL is not a
package: its file is run as it is, with the vector env and the network replaced at run time.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from speed import ROOT, measure
from torch import nn

sys.path.insert(0, str(ROOT))
ENVS, STEPS, SIZE, HIDDEN = 64, 128, 64, [1, 3]
SHAPES = ((4, 512, 64), (16, 128, 64), (32, 64, 128))


class MaskedCartPole:
    """envpool's vector env with same-step autoreset and without velocities."""

    def __init__(self):
        import envpool

        self.envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=ENVS, seed=1, num_threads=1)
        self.single_observation_space, self.single_action_space = self.envs.observation_space, self.envs.action_space

    def reset(self, seed=None):
        obs = self.envs.reset()[0]
        obs[:, HIDDEN] = 0
        return obs, {}

    def step(self, actions):
        obs, rewards, terminated, truncated, _ = self.envs.step(actions)
        obs[:, HIDDEN] = 0
        last, dones = obs, terminated | truncated
        if dones.any():
            last = obs.copy()
            obs[dones] = self.envs.reset(np.flatnonzero(dones))[0]
            obs[:, HIDDEN] = 0
        return obs, rewards, terminated, truncated, {"last": last}

    def close(self):
        self.envs.close()


def own_command(seq_length: int) -> list[str]:
    command = f"""--env-id CartPole --mask-obs 1 3 --num-envs {ENVS} --num-steps {STEPS} --seq-length {seq_length}
        --num-minibatches 4 --update-epochs 4 --hidden-sizes {SIZE} --rnn-hidden-size {SIZE} --no-separate
        --activation tanh --device cpu --torch-threads 1 --total-timesteps 100000000"""
    return [sys.executable, str(ROOT / "ppo_lstm.py"), *command.split()]


def run_sb3(own_envs: bool) -> None:
    """own_envs: its DummyVecEnv over Gymnasium's CartPole, as its users have it, instead of envpool."""
    import gymnasium as gym
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecMonitor

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

    class Progress(BaseCallback):
        def _on_step(self):
            return True

        def _on_rollout_start(self):
            print(f"global_step={self.num_timesteps}", flush=True)

    network = {"lstm_hidden_size": SIZE, "n_lstm_layers": 1, "net_arch": [SIZE], "shared_lstm": True,
               "enable_critic_lstm": False}  # fmt: skip

    def masked_env():
        env, mask = gym.make("CartPole-v1"), np.float32([1, 0, 1, 0])
        return gym.wrappers.TransformObservation(env, lambda obs: obs * mask, env.observation_space)

    envs = DummyVecEnv([masked_env] * ENVS) if own_envs else VectorEnv()
    model = RecurrentPPO("MlpLstmPolicy", VecMonitor(envs), n_steps=STEPS, batch_size=ENVS * STEPS // 4,
                         n_epochs=4, policy_kwargs=network, device="cpu")  # fmt: skip
    model.learn(10**9, callback=Progress())


def run_cleanrl(path: str) -> None:
    import gymnasium as gym

    gym.vector.SyncVectorEnv = lambda env_fns: MaskedCartPole()
    source = Path(path).read_text()
    source = source[: source.index("from cleanrl_utils")] + source[source.index("@dataclass") :]  # Atari wrappers
    network = f"nn.Sequential(layer_init(nn.Linear(4, {SIZE})), nn.Tanh())"
    begin, end = source.index("nn.Sequential(\n"), source.index("        self.lstm =")
    source = source[:begin] + network + "\n" + source[end:]
    changes = {"nn.LSTM(512, 128)": f"nn.LSTM({SIZE}, {SIZE})", "nn.Linear(128,": f"nn.Linear({SIZE},",
               "x / 255.0": "x", 'print("SPS:"': 'print(f"global_step={global_step}", flush=True); print("SPS:"',
               }  # fmt: skip
    for old, new in changes.items():
        assert old in source, f"{path}: not the file this was written for"
        source = source.replace(old, new)
    command = f"""{path} --env-id CartPole-v1 --num-envs {ENVS} --num-steps {STEPS} --num-minibatches 4
        --update-epochs 4 --total-timesteps 100000000 --no-cuda"""
    sys.argv = command.split()
    module = type(sys)("__main__")  # its dataclass must be found by name
    sys.modules["__main__"] = module
    module.__dict__["__file__"] = path
    exec(compile(source, path, "exec"), module.__dict__)


def milliseconds(fn, rounds: int = 20) -> float:
    """The fastest of `rounds` calls, after two."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[2:])


def compare_kernels() -> None:
    """Forward and backward of one LSTM layer, an episode starting in 1 % of the rows."""
    from ppo_lstm import RNN, Args

    print("| L x S x H | loop | compiled loop | (compiling, s) | fused, ours | fused without resets (wrong) |")
    print("|---|---|---|---|---|---|")
    torch._dynamo.config.trace_autograd_ops = True
    for L, S, H in SHAPES:
        rnn = RNN(H, H, Args(rnn="lstm"))
        parameters, plain = list(rnn.parameters()), nn.LSTM(H, H)
        x, state, starts = torch.randn(L * S, H), torch.zeros(S, rnn.state_size), torch.rand(L, S) < 0.01

        def loop(rnn=rnn, x=x, state=state, starts=starts, parameters=parameters):
            return torch.autograd.grad(rnn.loop(x, state, starts)[0].sum(), parameters)

        def fused(rnn=rnn, x=x, state=state, starts=starts, parameters=parameters):
            return torch.autograd.grad(rnn.fused(x, state, starts).sum(), parameters)

        def without(plain=plain, x=x, shape=(L, S, H)):
            return torch.autograd.grad(plain(x.view(shape))[0].sum(), list(plain.parameters()))

        start, compiled = time.perf_counter(), torch.compile(loop, fullgraph=True, dynamic=False)
        compiled()
        seconds = time.perf_counter() - start
        eager, fast, pieces, wrong = (milliseconds(fn) for fn in (loop, compiled, fused, without))
        row = f"| {L} x {S} x {H} | {eager:.2f} | {fast:.2f} | {seconds:.0f} | {pieces:.2f} | {wrong:.2f} |"
        print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12, help="measured wall seconds of each run")
    parser.add_argument("--warmup", type=float, default=4, help="wall seconds dropped after the first line")
    parser.add_argument("--cleanrl", help="path of CleanRL's ppo_atari_lstm.py")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the peers; 0: their default")
    parser.add_argument("--kernels", action="store_true", help="the recurrent layers alone")
    parser.add_argument("--run-peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.kernels:
        torch.set_num_threads(1)
        return compare_kernels()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.run_peer:
        return run_cleanrl(args.cleanrl) if args.run_peer == "cleanrl" else run_sb3(args.run_peer == "sb3-own")
    peer = [sys.executable, str(Path(__file__).resolve()), "--threads", str(args.threads), "--run-peer"]
    commands = {"ours": own_command(STEPS), "ours-16": own_command(16), "sb3-contrib": [*peer, "sb3"],
                "sb3-contrib, its own envs": [*peer, "sb3-own"]}  # fmt: skip
    if args.cleanrl:
        commands["cleanrl"] = [*peer, "cleanrl", "--cleanrl", str(Path(args.cleanrl).resolve())]
    log = Path(tempfile.gettempdir()) / "lstm_speed.log"
    results: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(args.rounds):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            results[name].append(measure(commands[name], args.warmup, args.seconds, log))
            print(f"round {number} {name}: {results[name][-1]}", flush=True)
    print("\n| | steps/s | min-max | ours is times as fast | per CPU second | ours is |\n|---|---|---|---|---|---|")
    for name, rows in results.items():
        wall, cpu = ([row[key] for row in rows] for key in ("wall", "cpu"))
        pairs = list(zip(results["ours"], rows, strict=True))
        ratios = {key: statistics.median(own[key] / row[key] for own, row in pairs) for key in ("wall", "cpu")}
        print(f"| {name} | {statistics.median(wall):.0f} | {min(wall):.0f}-{max(wall):.0f} | {ratios['wall']:.2f} | "
              f"{statistics.median(cpu):.0f} | {ratios['cpu']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
