"""Errors that a user causes and can mend: one line each, naming the value, the limit and what would work."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class InputError(ValueError):
    """Shown by common.cli.run as one line, exit status 2, no traceback."""


def flag(name: str) -> str:
    """The command-line spelling of an Args field."""
    return f"--{name.replace('_', '-')}"


def check_range(args: Any, low: float, high: float, names: str) -> None:
    """Raises InputError unless each named field (separated by blanks; None is skipped) lies in [low, high]."""
    for name in names.split():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:
            limit = f" and at most {high}" if high < float("inf") else ""
            raise InputError(f"{flag(name)} {value}: must be at least {low}{limit}")


def check_numbers(args: Any, may_be_infinite: str) -> None:
    """Raises InputError if a float field is NaN, or infinite and not named."""
    for name, value in vars(args).items():
        numbers = [x for x in (value if isinstance(value, tuple) else (value,)) if isinstance(x, float)]
        if any(x != x or abs(x) == float("inf") and name not in may_be_infinite.split() for x in numbers):
            raise InputError(f"{flag(name)} {value}: must be a finite number")


def check_positive(args: Any, names: str) -> None:
    """Raises InputError unless each named field is above 0."""
    for name in names.split():
        if not getattr(args, name) > 0:
            raise InputError(f"{flag(name)} {getattr(args, name)}: must be positive")


def check_divides(name: str, divisor: int, number: int, meaning: str) -> None:
    """Raises InputError with the nearest divisors if `divisor` does not divide `number` (whose meaning is given)."""
    if number % divisor:
        below = max(d for d in range(1, divisor) if number % d == 0)
        above = next((d for d in range(divisor, number + 1) if number % d == 0), number)
        nearest = f"{below} and {above}" if above > divisor else f"{below}"
        raise InputError(f"{flag(name)} {divisor} does not divide {meaning} = {number}; the nearest are {nearest}")


def check_finite(
    observations: list[tuple[Any, Any]],
    finals: list[tuple[int, Any]],
    rewards: Tensor,
    bad_steps: float,
    iteration: int,
    run_dir: Path,
) -> None:
    """Raises InputError naming env and step if a rollout or a gradient step was not finite, before anything is saved.

    observations: pairs of a rollout's [T, N, ..] and the one after it [N, ..]; finals: step and last ones [N, ..];
    tensors or dicts of them. rewards [T, N, ..]; bad_steps: gradient steps skipped for a gradient that was not finite.
    """

    def floats(x: Any) -> list[Tensor]:
        return [part for part in (x.values() if isinstance(x, dict) else [x]) if part.is_floating_point()]

    pairs = [pair for obs, next_obs in observations for pair in zip(floats(obs), floats(next_obs), strict=True)]
    rows = [("observation", 0, torch.cat([x, next_x[None]])) for x, next_x in pairs]
    rows += [("final observation", t, x[None]) for t, final in finals for x in floats(final)]
    rows.append(("reward", 0, rewards))
    if all(x.isfinite().all() for _, _, x in rows) and not bad_steps:
        return
    saved = any(run_dir.glob("*.pt"))
    kept = f"the last good checkpoint is kept in {run_dir}" if saved else f"{run_dir} has no checkpoint yet"
    for name, start, x in reversed(rows):
        bad = (~x.isfinite()).flatten(2).any(-1).nonzero()
        if len(bad):
            step, env = start + int(bad[0, 0]), int(bad[0, 1])
            total = (iteration - 1) * len(rewards) + step
            where = f"step {total} (step {step} of iteration {iteration})"
            raise InputError(f"{name} of env {env} is NaN or infinite at {where}; {kept}")
    what = f"the loss was NaN or infinite in {bad_steps:.0f} gradient steps of iteration {iteration}"
    raise InputError(f"{what}; {kept}; try a smaller learning rate")
