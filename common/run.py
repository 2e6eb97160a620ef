"""One training run: its folder, log and checkpoints, and when it evaluates, saves and stops."""

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import checkpoint, cli, distributed
from common import envs as vecenvs
from common.envs.base import VecEnv
from common.logger import EpisodeStats, Logger, create_run_dir

SAVE_SECONDS = 30.0  # last.pt is at most about this old when a run crashes


class Run:
    """A `with` block around the training loop; Ctrl-C and SIGTERM in it ask for a clean stop.

    args needs the fields of the scripts' groups `run` and `run control`. `stop_reason` is None until a limit is
    reached, on all ranks in the same iteration; `log` holds the last metrics.
    """

    def __init__(self, script: str, args: Any, envs: VecEnv, episodes: EpisodeStats, resume: Path | None,
                 state: dict[str, Any] | None, num_iterations: int, rank: int):  # fmt: skip
        self.script, self.args, self.envs, self.episodes, self.rank = script, args, envs, episodes, rank
        self.num_iterations, self.best_return = num_iterations, state["best_return"] if state else -math.inf
        self.dir = create_run_dir(script, args.env_id, args.seed, args.run_name, resume, args.resume == "auto", rank)
        self.saved_args = asdict(replace(args, run_name=self.dir.name, resume=None))
        self.global_step, seconds = (state["global_step"], state["seconds"]) if state else (0, 0.0)
        total = args.total_timesteps
        self.logger = Logger(self.dir, self.saved_args, total, rank, args.track, self.global_step, seconds)
        self.evaluation_envs, self.last_save, self.stop_reason = None, time.perf_counter(), None
        self.log: dict[str, float] = {}
        self.stop = cli.StopSignal()

    def __enter__(self) -> "Run":
        self.stop.__enter__()
        return self

    def phase(self, name: str) -> AbstractContextManager:
        return self.logger.phase(name)

    def end_iteration(self, iteration: int, global_step: int, log: dict[str, float],
                      evaluate: Callable[[VecEnv], dict[str, float]],
                      contents: Callable[[], dict[str, Any]]) -> None:  # fmt: skip
        """Evaluate, save and stop where it is time to, and write one row of metrics. Every rank must call it.

        log: the iteration's metrics. evaluate: of envs that are made for it, called on rank 0 alone. contents: what the
        script saves beside what is known here.
        """
        args, self.global_step = self.args, global_step
        score = log["charts/episodic_return"] if self.episodes.full else -math.inf
        if distributed.any_rank(self.stop.requested, self.envs.device):
            self.stop_reason = "interrupted"
        elif score >= args.score_to_win:
            self.stop_reason = f"score_to_win, mean return {score:.6g}"
        elif iteration == self.num_iterations:
            self.stop_reason = "total_timesteps"
        log = log | {"charts/SPS": self.logger.sps(global_step)}
        if args.eval_interval and (self.stop_reason or iteration % args.eval_interval == 0):
            result = evaluate(self._evaluation_envs()) if self.rank == 0 else {}
            log |= {f"eval/{name}": x for name, x in distributed.gather_objects(result)[0].items()}
        names, best_score = [], log.get("eval/mean", -math.inf) if args.eval_interval else score
        if best_score > self.best_return and global_step >= args.save_best_after:
            self.best_return = best_score
            names.append("best.pt")
        if args.save_interval and iteration % args.save_interval == 0:
            names += [f"{global_step}.pt", "last.pt"]
        due = bool(self.stop_reason) or time.perf_counter() - self.last_save > SAVE_SECONDS
        if distributed.any_rank(due, self.envs.device):
            names, self.last_save = [*names, "last.pt"], time.perf_counter()
        self.log = log
        self.logger.log(global_step, log, force_line=bool(self.stop_reason) or iteration == 1)
        if names:
            self._save(names, contents())

    def _evaluation_envs(self) -> VecEnv:
        if self.evaluation_envs is None:
            args, names = self.args, ("action_bins", "mask_obs", "frame_stack")
            options = {name: getattr(args, name) for name in names if getattr(args, name, None)}
            options |= {"multi_agent": True} if hasattr(self.envs, "num_agents") else {}
            self.evaluation_envs = vecenvs.make_for_episodes(
                args.env_id, args.num_envs, args.num_episodes, self.envs.device, args.seed, args.env_kwargs, **options
            )
        return self.evaluation_envs

    def _save(self, names: list[str], contents: dict[str, Any]) -> None:
        """Write checkpoints (rank 0); every rank must call it, since each has its own random state and envs."""
        state = {"script": self.script, "env_id": self.envs.env_id, "args": self.saved_args,
                 "global_step": self.global_step, "best_return": self.best_return, "seconds": self.logger.seconds(),
                 "ranks": checkpoint.gather_ranks(self.envs, self.episodes)} | contents  # fmt: skip
        for name in dict.fromkeys(names) if self.rank == 0 else ():
            checkpoint.save(self.dir / name, state)

    def __exit__(self, error: type | None, *_: Any) -> None:
        self.stop.__exit__()
        if error is None:
            reason = self.stop_reason or "nothing left to do"
            self.logger.close(f"stopped at global_step={self.global_step}: {reason}; {self.dir}/last.pt")
            for vec_env in filter(None, (self.envs, self.evaluation_envs)):
                vec_env.close()
            distributed.close()
