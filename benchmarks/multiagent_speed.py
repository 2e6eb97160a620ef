"""Speed of ppo_multiagent.py on VMAS against BenchMARL's independent PPO (https://github.com/facebookresearch/BenchMARL).

    python -m venv peer && peer/bin/pip install torch==2.13.0 benchmarl==1.5.2
    python benchmarks/multiagent_speed.py --benchmarl peer/bin/python

Both train vmas/simple_spread with the same numbers of envs, steps, epochs, minibatches and hidden units, with one torch
thread each, in turn; the first --skip iterations of a turn do not count. Neither evaluates nor writes checkpoints.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS, EPOCHS, MINIBATCHES, HIDDEN = 32, 4, 4, (64, 64)


def report(frames: int) -> None:
    """One line an iteration for the parent process: transitions so far, wall and CPU seconds."""
    print(json.dumps(["iteration", frames, time.perf_counter(), time.process_time()]), flush=True)


def run_ours(num_envs: int, central: bool) -> None:
    sys.path.insert(0, str(ROOT))
    import ppo_multiagent
    from common.logger import Logger

    line = Logger._line

    def log(self, global_step, metrics, force_line=False):
        report(global_step)
        print(line(self, global_step, metrics), file=sys.stderr, flush=True)

    Logger.log = log
    ppo_multiagent.main(ppo_multiagent.Args(
        env_id="vmas/simple_spread", num_envs=num_envs, num_steps=STEPS, update_epochs=EPOCHS, hidden_sizes=HIDDEN,
        num_minibatches=MINIBATCHES, total_timesteps=10**10, torch_threads=1, device="cpu", central_critic=central,
    ))  # fmt: skip


def run_benchmarl(num_envs: int, central: bool) -> None:
    import torch
    from benchmarl.algorithms import IppoConfig, MappoConfig
    from benchmarl.environments import VmasTask
    from benchmarl.experiment import Callback, Experiment, ExperimentConfig
    from benchmarl.models.mlp import MlpConfig

    torch.set_num_threads(1)

    class Progress(Callback):
        frames = 0

        def on_batch_collected(self, batch):
            report(self.frames)  # the updates of the batches before are done
            self.frames += batch.numel()

        def __reduce__(self):  # BenchMARL pickles it beside its results
            return object, ()

    config = ExperimentConfig.get_from_yaml()
    config.sampling_device = config.train_device = config.buffer_device = "cpu"
    config.on_policy_collected_frames_per_batch = num_envs * STEPS
    config.on_policy_n_envs_per_worker, config.on_policy_n_minibatch_iters = num_envs, EPOCHS
    config.on_policy_minibatch_size = num_envs * STEPS // MINIBATCHES
    config.max_n_iters, config.max_n_frames, config.checkpoint_interval = 10**6, None, 0
    config.evaluation, config.render, config.loggers, config.create_json = False, False, [], False
    network = MlpConfig(num_cells=list(HIDDEN), activation_class=torch.nn.ELU, layer_class=torch.nn.Linear)
    algorithm = (MappoConfig if central else IppoConfig).get_from_yaml()
    task = VmasTask.SIMPLE_SPREAD.get_from_yaml()
    Experiment(task=task, algorithm_config=algorithm, model_config=network, critic_model_config=network, seed=0,
               config=config, callbacks=[Progress()]).run()  # fmt: skip


def turn(python: str, name: str, args: argparse.Namespace) -> dict[str, float]:
    """Transitions a wall and a CPU second of one process that runs for args.seconds after its first iterations."""
    flags = ["--run", name, "--num-envs", str(args.num_envs), *(["--central"] if args.central else [])]
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "err", "w+") as err:
        command, env = [python, os.path.abspath(__file__), *flags], os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True, cwd=folder, env=env)
        rows = []
        for line in process.stdout:
            if line.startswith('["iteration"'):
                rows.append(json.loads(line)[1:])
                if len(rows) > args.skip + 1 and rows[-1][1] - rows[args.skip][1] > args.seconds:
                    break
        process.kill()
        process.wait()
        err.seek(0)
        text = err.read()
    if len(rows) < args.skip + 2:
        sys.exit(f"{name} ended early:\n{text[-2000:]}")
    (frames, wall, cpu), (last_frames, last_wall, last_cpu) = rows[args.skip], rows[-1]
    shares = text[text.rfind("(env") : text.rfind(")") + 1] if name == "ours" else ""
    steps = last_frames - frames
    return {"wall": steps / (last_wall - wall), "cpu": steps / (last_cpu - cpu), "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarl", metavar="PYTHON", help="interpreter with BenchMARL; without it, ours alone")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--central", action="store_true", help="central critics: MAPPO")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn")
    parser.add_argument("--skip", type=int, default=2, help="first iterations of a turn that do not count")
    parser.add_argument("--run", choices=("ours", "benchmarl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        return (run_ours if args.run == "ours" else run_benchmarl)(args.num_envs, args.central)
    who = {"ours": sys.executable} | ({"benchmarl": args.benchmarl} if args.benchmarl else {})
    results: dict[str, list[dict]] = {name: [] for name in who}
    for number in range(args.rounds):
        for name, python in who.items():
            results[name].append(turn(python, name, args))
            print(f"round {number} {name}: {results[name][-1]}", flush=True)
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {args.num_envs} envs x {STEPS} steps, one thread each")
    print("| | steps/s, median | min-max | steps per CPU s, median | min-max |\n|---|---|---|---|---|")
    for name, rows in results.items():
        cells = []
        for key in ("wall", "cpu"):
            values = sorted(row[key] for row in rows)
            cells += [f"{values[len(values) // 2]:.0f}", f"{values[0]:.0f}-{values[-1]:.0f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for key in ("wall", "cpu") if args.benchmarl else ():
        ratios = sorted(a[key] / b[key] for a, b in zip(results["ours"], results["benchmarl"], strict=True))
        print(f"ours / BenchMARL, by {key} seconds: {ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
