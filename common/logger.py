"""Where numbers go: TensorBoard, metrics.jsonl, W&B, the progress line; and the returns of finished episodes."""

import json
import math
import os
import re
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from common import distributed
from common.errors import InputError

PROGRESS_SECONDS = 2.0


def create_run_dir(
    script: str, env_id: str, seed: int, run_name: str | None, resume: Path | None, auto: bool, rank: int
) -> Path:
    """Make runs/run_name (a resumed run keeps its folder) and return it.

    Raises InputError if it cannot be written, or already holds checkpoints that a fresh run would overwrite (with auto
    there may be unreadable ones).
    """
    if run_name is None and resume is not None:
        path = resume.parent
    else:
        path = Path("runs") / (
            run_name or re.sub(r"[^\w.-]+", "-", f"{env_id}__{script}__{seed}__{time.strftime('%Y%m%d-%H%M%S')}")
        )
    path = Path(distributed.gather_objects(str(path))[0])  # ranks may start in different seconds
    if rank:
        return path
    if (resume is None or path.resolve() != resume.parent.resolve()) and not auto and any(path.glob("*.pt")):
        raise InputError(f"{path} already holds a run: continue it with --resume auto, or choose another --run-name")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{os.getpid()}.tmp"
        probe.touch()
        for leftover in path.glob(".*.tmp"):  # of writes that a kill interrupted
            leftover.unlink()
    except OSError as error:
        raise InputError(
            f"run directory {path} cannot be written ({error.strerror}); choose another --run-name or folder"
        ) from None
    return path


def import_wandb():
    """Raises InputError if Weights & Biases is not installed."""
    try:
        import wandb
    except ImportError:
        raise InputError("--track needs Weights & Biases: pip install wandb") from None
    return wandb


class Logger:
    """Writes metrics of rank 0 into run_dir; does nothing on other ranks.

    Rows of metrics.jsonl after `global_step` (env transitions) are dropped first: a resumed run continues one step
    axis, without the steps that a crash lost.
    """

    def __init__(
        self,
        run_dir: Path,
        args: dict[str, Any],
        total_timesteps: int,
        rank: int,
        track: bool,
        global_step: int = 0,
        seconds: float = 0.0,
    ):
        self.active, self.total, self.first_step = rank == 0, total_timesteps, global_step
        self.earlier_seconds, self.start, self.last_line = seconds, time.perf_counter(), 0.0
        self.phases: dict[str, float] = {"env": 0.0, "policy": 0.0, "update": 0.0}
        if not self.active:
            return
        path = run_dir / "metrics.jsonl"
        rows = path.read_text().splitlines() if path.exists() else []
        kept = [row for row in rows if row.endswith("}") and json.loads(row)["global_step"] <= global_step]
        if kept != rows:
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(row + "\n" for row in kept))
            os.replace(temporary, path)
        (run_dir / "args.json").write_text(json.dumps(args, indent=1) + "\n")
        self.jsonl = open(path, "a", buffering=1)  # noqa: SIM115
        self.tensorboard = SummaryWriter(str(run_dir), purge_step=global_step + 1 if global_step else None)
        self.wandb = None
        if track:
            self.wandb = import_wandb().init(
                project="reference", name=run_dir.name, id=run_dir.name, resume="allow", config=args
            )

    def seconds(self) -> float:
        """Wall seconds of training, those before a resume included."""
        return self.earlier_seconds + time.perf_counter() - self.start

    @contextmanager
    def phase(self, name: str):
        """Count the wall time of a block as env, policy or update (on a GPU: of launching it)."""
        start = time.perf_counter()
        yield
        self.phases[name] += time.perf_counter() - start

    def log(self, global_step: int, metrics: dict[str, float], force_line: bool = False) -> None:
        """Write one row; non-finite values (no episode has ended yet) are left out."""
        if not self.active:
            return
        metrics = {k: v for k, v in metrics.items() if math.isfinite(v)}
        self.jsonl.write(json.dumps({"global_step": global_step, "seconds": round(self.seconds(), 3)} | metrics) + "\n")
        for name, value in metrics.items():
            self.tensorboard.add_scalar(name, value, global_step)
        if self.wandb:
            self.wandb.log(metrics | {"global_step": global_step}, step=global_step)
        if force_line or time.perf_counter() - self.last_line > PROGRESS_SECONDS:
            self.last_line = time.perf_counter()
            print(self._line(global_step, metrics), flush=True)

    def sps(self, global_step: int) -> float:
        """Env transitions per wall second since this process began training."""
        return (global_step - self.first_step) / (time.perf_counter() - self.start)

    def _line(self, global_step: int, metrics: dict[str, float]) -> str:
        elapsed = time.perf_counter() - self.start
        share = " ".join(f"{name} {seconds / elapsed:.0%}" for name, seconds in self.phases.items())
        eta = (self.total - global_step) / max(self.sps(global_step), 1e-9)
        shown = ("charts/episodic_return", "charts/episodic_length", "charts/learning_rate", "losses/approx_kl")
        values = " ".join(f"{k.partition('/')[2]}={metrics[k]:.4g}" for k in shown if k in metrics)
        speed = f"SPS={self.sps(global_step):.0f} ({share}) eta={eta:.0f}s"
        return f"global_step={global_step} {global_step / self.total:.1%} {values} {speed}"

    def close(self, last_line: str) -> None:
        if self.active:
            print(last_line, flush=True)
            self.jsonl.close()
            self.tensorboard.close()
            if self.wandb:
                self.wandb.finish()


def explained_variance(values: Tensor, returns: Tensor, weights: Tensor | float = 1.0) -> float:
    """1 - Var(returns - values) / Var(returns) over all ranks; NaN where the returns do not vary.

    weights broadcast to both; they are 0 for rows that do not count and 1 on average over the rows of all ranks.
    """

    def variance(x: Tensor) -> float:
        mean = distributed.average((weights * x).mean())
        return distributed.average((weights * (x - mean) ** 2).mean()).item()

    total = variance(returns)
    return 1 - variance(returns - values) / total if total > 0 else math.nan


class EpisodeStats:
    """Raw returns and lengths of the last finished episodes, the same number of each env of each rank.

    The first episodes to end are the short ones, so the last `window` of all envs together would not be a fair sample.
    """

    def __init__(self, num_envs: int, window: int, world_size: int):
        self.returns = torch.zeros(num_envs, dtype=torch.float64)
        self.lengths = torch.zeros(num_envs, dtype=torch.int64)
        size = math.ceil(window / (num_envs * world_size))
        self.window: list[deque[tuple[float, int]]] = [deque(maxlen=size) for _ in range(num_envs)]
        self.capacity, self.count, self.sums, self.episodes = size * num_envs * world_size, 0, (0.0, 0), 0

    def update(self, rewards: Tensor, dones: Tensor, valid: Tensor | None = None) -> None:
        """Count a rollout, [T, N]; rows that are not valid have no length. Reads on the host: once an iteration."""
        rewards, dones, finished = rewards.double().cpu(), dones.cpu(), 0
        steps = torch.ones_like(dones, dtype=torch.int64) if valid is None else valid.long().cpu()
        for t, any_done in enumerate(dones.any(1).tolist()):
            self.returns += rewards[t]
            self.lengths += steps[t]
            if any_done:
                ids = dones[t].nonzero().flatten()
                ended = zip(self.returns[ids].tolist(), self.lengths[ids].tolist(), strict=True)
                for i, episode in zip(ids.tolist(), ended, strict=True):
                    self.window[i].append(episode)
                self.returns[ids], self.lengths[ids] = 0.0, 0
                finished += len(ids)
        own = [episode for env in self.window for episode in env]
        totals = finished, len(own), *(sum(episode[i] for episode in own) for i in (0, 1))
        everywhere = zip(*distributed.gather_objects(totals), strict=True)
        finished, self.count, *self.sums = (sum(x) for x in everywhere)
        self.episodes += finished

    def metrics(self) -> dict[str, float]:
        """charts/episodic_return and charts/episodic_length over the window, NaN before the first episode has ended."""
        mean_return, mean_length = (x / self.count if self.count else math.nan for x in self.sums)
        means = {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
        return means | {"charts/episodes": self.episodes}

    @property
    def full(self) -> bool:
        return self.count == self.capacity

    def state_dict(self) -> dict[str, Any]:
        running = {"returns": self.returns.clone(), "lengths": self.lengths.clone()}
        return {"window": [list(env) for env in self.window], "episodes": self.episodes} | running

    def load_state_dict(self, state: dict[str, Any], running: bool) -> None:
        """Restore the count; window and running episodes only where the envs themselves continue (`running`)."""
        self.episodes = state["episodes"]
        if running:
            for env, episodes in zip(self.window, state["window"], strict=True):
                env.extend(episodes)
            self.returns, self.lengths = state["returns"].clone().cpu(), state["lengths"].clone().cpu()
