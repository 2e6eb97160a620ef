"""Steps per second of CartPole-v1 with random actions: torch/, envpool/ and Gymnasium's own NumPy vector env.

    OMP_NUM_THREADS=1 python benchmarks/torch_envs.py --num-envs 64 1024 4096 --rounds 5

The competitors take turns in one process; a rate is the median over rounds, with its range. The first two go through
this project's adapters (exact last observations, resets in the same step), Gymnasium's does not: it is stepped bare,
and each episode costs it one step more. Rates divide by CPU seconds of the process, envpool's thread included, which
neighbours disturb less than wall time.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from common import envs as vecenvs  # noqa: E402

TASK, STEPS = "CartPole-v1", 256


def competitors(num_envs: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """Functions of actions [N] int64 that make one step."""
    made = {name: vecenvs.make(name + TASK, num_envs, "cpu", 0) for name in ("torch/", "envpool/")}
    bare = gymnasium.make_vec(TASK, num_envs, "vector_entry_point")
    for envs in (*made.values(), bare):
        envs.reset()
    return {name: envs.step for name, envs in made.items()} | {"bare Gymnasium": lambda x: bare.step(x.numpy())}


def rate(step: Callable[[torch.Tensor], object], actions: torch.Tensor) -> float:
    start = time.process_time()
    for action in actions:
        step(action)
    return actions.numel() / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_envs in args.num_envs:
        steps, actions = competitors(num_envs), torch.randint(2, (STEPS, num_envs))
        rates = [[rate(step, actions) for step in steps.values()] for _ in range(args.rounds + 1)]
        for name, each in zip(steps, zip(*rates[1:], strict=True), strict=True):  # the first round warms up
            middle = statistics.median(each)
            print(f"{num_envs:5d} envs  {name:15s} {middle:12,.0f}  ({min(each):,.0f} to {max(each):,.0f})")


if __name__ == "__main__":
    main()
