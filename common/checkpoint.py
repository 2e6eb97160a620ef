"""Checkpoints that survive a crash: written beside, flushed, renamed; read without running code."""

import dataclasses
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from common import distributed
from common.envs.base import VecEnv
from common.errors import InputError, flag
from common.logger import EpisodeStats

CONTENTS = {"script", "env_id", "args", "agent_kwargs", "agent"}


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings; lists, tuples and dicts of them) so that `path` is never half a file.

    A kill at any moment, a full disk included, leaves either the old file or the new one.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself must reach the disk too
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)


def load(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a checkpoint onto device, tensors and plain data only.

    Raises InputError if there is none, it is truncated, or it holds anything that would have to be executed.
    """
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise InputError(f"checkpoint {path}: {error.strerror.lower()}") from None
    except pickle.UnpicklingError:
        raise InputError(f"checkpoint {path}: holds pickled code or is damaged; only plain data is loaded") from None
    except Exception:  # whatever bytes that are no checkpoint make torch raise
        raise InputError(f"checkpoint {path}: truncated or not a checkpoint") from None
    if not isinstance(state, dict) or "script" not in state:
        raise InputError(f"checkpoint {path}: not written by one of these scripts (no 'script' entry)")
    return state


def saved_args(path: str | Path, state: dict[str, Any], args_type: type, **changes: Any) -> Any:
    """The Args of a checkpoint, with changes. Raises InputError if it has fields that args_type does not know."""
    saved = state["args"]
    if unknown := sorted(saved.keys() - {field.name for field in dataclasses.fields(args_type)}):
        where = f"another version of {state['script']}.py"
        raise InputError(f"checkpoint {path} has the arguments of {where}: there is no {', '.join(unknown)}")
    return args_type(**saved | changes)


def load_for(script: str, path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """load() of a checkpoint that `script` wrote. Raises InputError if another one did."""
    state = load(path, device)
    if state["script"] != script:
        writer = f"{state['script']}.py"
        raise InputError(f"checkpoint {path} was written by {writer}, not by {script}.py; use {writer}")
    if missing := CONTENTS - state.keys():
        raise InputError(f"checkpoint {path} is incomplete: it has no {', '.join(sorted(missing))}")
    return state


def load_weights(path: str | Path, state: dict[str, Any], agent: nn.Module) -> None:
    """Copy the checkpoint's tensors into agent. Raises InputError if their names or shapes differ."""
    saved, own = ({name: x.shape for name, x in tensors.items()} for tensors in (state["agent"], agent.state_dict()))
    if different := saved.items() ^ own.items():
        name, where = min(different)[0], f"another version of {state['script']}.py"
        raise InputError(f"checkpoint {path} has the network of {where}: {name} is not the same")
    agent.load_state_dict(state["agent"])


def check_compatible(path: str | Path, state: dict[str, Any], args: Any, env_id: str, agent_kwargs: dict[str, Any],
                     network_args: tuple[str, ...]) -> None:  # fmt: skip
    """Raises InputError if env, spaces or an Args field that shapes the network differs from the checkpoint's."""
    if state["env_id"] != env_id:
        raise InputError(f"checkpoint {path} is of {state['env_id']}, not of {env_id}; train that from the start")
    for name in network_args:
        new, old = getattr(args, name), state["args"].get(name, getattr(type(args), name, None))
        if new != old:
            raise InputError(f"{flag(name)} {new}: checkpoint {path} was trained with {old}, which cannot change")
    for name, new in agent_kwargs.items():
        if state["agent_kwargs"][name] != new:
            old = state["agent_kwargs"][name]
            raise InputError(f"checkpoint {path} has {name} {old}, the environment has {new}; see --env-kwargs")


def newest(run_dir: Path) -> Path | None:
    """The newest loadable checkpoint of a run, or None; unreadable ones are skipped."""
    candidates = [path for path in run_dir.glob("*.pt") if not path.name.startswith(".")]
    for path in sorted(candidates, key=lambda p: p.stat().st_mtime, reverse=True):
        try:
            load(path)
            return path
        except InputError:
            continue
    return None


def gather_ranks(envs: VecEnv, episodes: EpisodeStats) -> list[dict[str, Any]]:
    """What each rank has of its own: random state, env state where the simulator can tell it, running episodes."""
    own = {"rng": rng_state(), "envs": envs.state_dict(), "episodes": episodes.state_dict()}
    return distributed.gather_objects(own)


def restore_rank(
    ranks: list[dict[str, Any]], rank: int, world_size: int, envs: VecEnv, episodes: EpisodeStats
) -> tuple[Any, Any]:
    """Undo gather_ranks; returns obs and critic_obs to go on from, or (None, None) where the envs must be reset.

    With another number of ranks than before only the count of finished episodes is kept.
    """
    own, same = ranks[rank % len(ranks)], len(ranks) == world_size
    exact = same and own["envs"] is not None and len(own["episodes"]["returns"]) == envs.num_envs
    current = envs.load_state_dict(own["envs"]) if exact else (None, None)
    episodes.load_state_dict(own["episodes"], running=exact)
    if same:
        set_rng_state(own["rng"])
    return current


def rng_state() -> dict[str, Any]:
    """State of the random number generators of python, numpy, torch and CUDA, as plain data."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue the random streams of rng_state(); CUDA's only where the number of GPUs is the same."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.cpu().numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])
