"""Gradient steps per CPU second of sac.py and others at HalfCheetah's shapes, 256-256, batch 256, in alternating turns.

    pip install -r requirements.txt stable-baselines3
    OMP_NUM_THREADS=1 python benchmarks/sac_speed.py [--cleanrl PATH/sac_continuous_action.py]          # the update
    OMP_NUM_THREADS=1 python benchmarks/sac_speed.py --loop [--cleanrl PATH/sac_continuous_action.py]   # whole runs

The update alone: each competitor draws a batch from its own replay and takes one step of critics, actor, temperature
and targets; "matmul" is the bare time of the matrix products in it. Whole runs: training as shipped, one gradient step
an env step, in an environment that costs nothing. Rates divide by the CPU seconds of the competitor's own process,
which neighbours disturb less than wall time. SB3 takes part where it is installed. CleanRL is not a package: give the
path of its file, whose text is run as it is.
"""

import argparse
import os
import platform
import re
import statistics
import sys
import tempfile
import textwrap
import time
import types
from collections.abc import Callable
from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
OBS, ACT, HIDDEN, BATCH, ROWS = 17, 6, 256, 256, 100_000


class Still(gymnasium.Env):
    """The shapes of HalfCheetah at no cost."""

    observation_space = spaces.Box(-np.inf, np.inf, (OBS,), np.float32)
    action_space = spaces.Box(-1, 1, (ACT,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.standard_normal(OBS, np.float32), {}

    def step(self, action):
        return self.np_random.standard_normal(OBS, np.float32), 0.0, False, False, {}


gymnasium.register("Still-v0", Still)


def ours(compile: bool) -> Callable[[], object]:
    """The very update_step of sac.py's main, taken out of a short run."""
    import sac

    steps, kept, folder = [], sac.cuda_graph, os.getcwd()
    sac.cuda_graph = lambda fn, enabled: steps.append(fn) or fn
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        sac.main(sac.Args(env_id="gym/Still-v0", total_timesteps=2000, learning_starts=1990, buffer_size=ROWS,
                          torch_threads=torch.get_num_threads(), device="cpu", compile=compile))  # fmt: skip
        os.chdir(folder)
    sac.cuda_graph = kept
    return lambda: steps[0](torch.randint(2000, (BATCH,)))


def sb3_model():
    from stable_baselines3 import SAC

    return SAC("MlpPolicy", Still(), buffer_size=ROWS, batch_size=BATCH, device="cpu")


def sb3() -> Callable[[], object]:
    from stable_baselines3.common.logger import configure

    model, rng = sb3_model(), np.random.default_rng(0)
    model.set_logger(configure(None, []))
    for _ in range(2000):
        obs = rng.standard_normal((2, 1, OBS), np.float32)
        model.replay_buffer.add(obs[0], obs[1], rng.uniform(-1, 1, (1, ACT)), np.zeros(1), np.zeros(1), [{}])
    return lambda: model.train(1, BATCH)


class Buffer:
    """What CleanRL imports as its replay: numpy storage, drawn rows become tensors."""

    def __init__(self, *_, **__):
        self.observations, self.next_observations = np.zeros((2, ROWS, OBS), np.float32)
        self.actions, self.rewards, self.dones = (np.zeros((ROWS, n), np.float32) for n in (ACT, 1, 1))
        self.stored = 0

    def add(self, obs, next_obs, actions, rewards, dones, infos):
        row = self.stored % ROWS
        self.observations[row], self.next_observations[row] = obs[0], next_obs[0]
        self.actions[row], self.rewards[row], self.dones[row] = actions[0], rewards[0], dones[0]
        self.stored += 1

    def sample(self, size):
        rows = np.random.randint(0, min(self.stored, ROWS), size=size)
        names = ("observations", "next_observations", "actions", "rewards", "dones")
        return types.SimpleNamespace(**{name: torch.tensor(getattr(self, name)[rows]) for name in names})


def cleanrl_source(path: str) -> str:
    sys.modules["cleanrl_utils"] = types.ModuleType("cleanrl_utils")
    sys.modules["cleanrl_utils.buffers"] = types.SimpleNamespace(ReplayBuffer=Buffer)
    return Path(path).read_text()


def cleanrl(path: str) -> Callable[[], object]:
    """Its update, cut out of its loop; the actor in every step, so that all do the same number of actor steps."""
    source = cleanrl_source(path)
    module = types.ModuleType("cleanrl_sac")
    sys.modules["cleanrl_sac"] = module  # its dataclass must be found by name
    names = module.__dict__ | {"__file__": path}
    exec(compile(source, path, "exec"), names)  # only defines: __name__ is not __main__
    body = source[source.index("    actor = Actor(envs)") :]
    setup = body[: body.index("    envs.single_observation_space.dtype")]
    update = re.search(r"            data = rb\.sample.*?(?=            if global_step % 100 == 0)", body, re.S)[0]
    buffer, rng = Buffer(), np.random.default_rng(0)
    for _ in range(2000):
        obs = rng.standard_normal((2, 1, OBS), np.float32)
        buffer.add(obs[0], obs[1], rng.uniform(-1, 1, (1, ACT)), np.zeros(1), np.zeros(1), None)
    envs = types.SimpleNamespace(single_observation_space=Still.observation_space,
                                 single_action_space=Still.action_space)  # fmt: skip
    names |= {"args": names["Args"](policy_frequency=1), "envs": envs, "rb": buffer, "global_step": 0,
              "device": torch.device("cpu")}  # fmt: skip
    exec(textwrap.dedent(setup), names)
    code = compile(textwrap.dedent(update), path, "exec")
    return lambda: exec(code, names)


def matmul() -> Callable[[], object]:
    """The matrix products of one step: each layer forward, backward by its input and backward by its weights."""
    inputs = {n: torch.randn(BATCH, n) for n in (OBS, OBS + ACT, HIDDEN, 1, 2 * ACT)}
    weights = {(a, b): torch.randn(a, b) for a in (OBS, OBS + ACT, HIDDEN) for b in (HIDDEN, 1, 2 * ACT)}
    critic = [(OBS + ACT, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1)]
    actor = [(OBS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * ACT)]

    def forward(layers):
        for a, b in layers:
            torch.mm(inputs[a], weights[a, b])

    def by_input(layers):
        for a, b in layers:
            torch.mm(inputs[b], weights[a, b].T)

    def by_weights(layers):
        for a, b in layers:
            torch.mm(inputs[a].T, inputs[b])

    def step():
        for _ in range(2):
            forward(critic)  # targets
            forward(critic), by_input(critic[1:]), by_weights(critic)  # critics
            forward(critic), by_input(critic)  # critics of the actor's action
        forward(actor)  # next action
        forward(actor), by_input(actor[1:]), by_weights(actor)  # actor

    return step


def time_updates(args: argparse.Namespace) -> dict[str, list[float]]:
    competitors = {"sac.py": ours(False), "sac.py --compile": ours(True)}
    if args.cleanrl:
        competitors["CleanRL"] = cleanrl(args.cleanrl)
    try:
        competitors["SB3"] = sb3()
    except ImportError:
        print("SB3 is not installed")
    competitors["matmul"] = matmul()
    torch.set_num_threads(args.threads)
    for step in competitors.values():
        for _ in range(20):
            step()
    rates: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(args.rounds):
        for name in list(competitors)[:: -1 if number % 2 else 1]:
            start = time.process_time()
            for _ in range(args.steps):
                competitors[name]()
            rates[name].append(args.steps / (time.process_time() - start))
    return rates


def run_peer(name: str, path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    if name == "SB3":
        from stable_baselines3.common.callbacks import BaseCallback

        class Progress(BaseCallback):
            def _on_step(self):
                if self.num_timesteps % 100 == 0:
                    print(f"global_step={self.num_timesteps}", flush=True)
                return True

        sb3_model().learn(10**9, callback=Progress())
    else:
        source = cleanrl_source(path).replace('"SPS:", ', 'f"global_step={global_step} SPS:", ')
        sys.argv = [path, "--env-id", "Still-v0", "--no-cuda", "--learning-starts", "100", "--buffer-size", str(ROWS)]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        module.__dict__.update({"__file__": path})
        exec(compile(source, path, "exec"), module.__dict__)


def time_runs(args: argparse.Namespace) -> dict[str, list[float]]:
    from speed import measure

    own = [sys.executable, str(ROOT / "sac.py"), "--env-id", "gym/sac_speed:Still-v0", "--learning-starts", "100",
           "--buffer-size", str(ROWS), "--log-interval", "100", "--torch-threads", str(args.threads)]  # fmt: skip
    peer = [sys.executable, __file__, "--threads", str(args.threads), "--run-peer"]
    commands = {"sac.py": own, "sac.py --compile": [*own, "--compile"]}
    if args.cleanrl:
        commands["CleanRL"] = [*peer, "CleanRL", "--cleanrl", str(Path(args.cleanrl).resolve())]
    commands["SB3"] = [*peer, "SB3"]
    os.environ["PYTHONPATH"] = f"{ROOT / 'benchmarks'}:{os.environ.get('PYTHONPATH', '')}"
    log, rates = Path(tempfile.gettempdir()) / "sac_speed.log", {name: [] for name in commands}
    for number in range(args.rounds):
        for name in list(commands)[:: -1 if number % 2 else 1]:
            rates[name].append(measure(commands[name], args.warmup, args.seconds, log)["cpu"])
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", action="store_true", help="time whole runs instead of the update")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150, help="gradient steps of a turn of the update")
    parser.add_argument("--seconds", type=float, default=15, help="wall seconds of a turn of a whole run")
    parser.add_argument("--warmup", type=float, default=15, help="wall seconds dropped before them")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of all")
    parser.add_argument("--cleanrl", help="path of CleanRL's sac_continuous_action.py")
    parser.add_argument("--run-peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run_peer:
        return run_peer(args.run_peer, args.cleanrl, args.threads)
    torch.set_num_threads(args.threads)
    rates = time_runs(args) if args.loop else time_updates(args)
    what = f"rounds of {args.seconds:.0f} s" if args.loop else f"rounds of {args.steps} steps"
    print(f"\n{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, {args.threads} torch thread(s), "
          f"{args.rounds} {what}")  # fmt: skip
    print("| competitor | gradient steps per CPU s | min-max | sac.py | sac.py --compile |")
    print("|---|---|---|---|---|")
    for name, row in rates.items():
        ratios = [statistics.median(a / b for a, b in zip(rates[own], row, strict=True))
                  for own in ("sac.py", "sac.py --compile")]  # fmt: skip
        print(f"| {name} | {statistics.median(row):.1f} | {min(row):.1f}-{max(row):.1f} | "
              f"{ratios[0]:.2f} x | {ratios[1]:.2f} x |")  # fmt: skip


if __name__ == "__main__":
    main()
