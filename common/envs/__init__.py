"""From an environment's name to N copies of it: the prefix chooses the adapter, which is imported only then."""

import ast
import difflib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from common.envs.base import VecEnv
from common.errors import InputError

BACKENDS = ("envpool", "gym")
PLANNED = ("warp", "brax", "playground", "mjlab", "isaaclab", "isaacgym", "maniskill", "genesis", "vmas", "smax", "jaxmarl", "pz", "magent", "smac", "smacv2", "torch")  # fmt: skip


def make(
    env_id: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any] | None = None
) -> VecEnv:
    """num_envs copies of env_id on device, tensors in and out; says on stderr what a name was taken for.

    env_id is `envpool/Ant-v5`, `gym/Ant-v5`, `gym/module:Name-v0`, or a bare name, which is the newest version in envpool
    or else in Gymnasium: Ant is envpool/Ant-v5. Raises InputError for an unknown name or option, a missing package, or
    num_envs < 1.
    """
    if num_envs < 1:
        raise InputError(f"num_envs {num_envs}: must be at least 1")
    backend, name = resolve(env_id)
    if backend == "envpool":
        from common.envs.envpool import EnvpoolVecEnv as adapter
    else:
        from common.envs.gymnasium import GymnasiumVecEnv as adapter
    envs = adapter(name, num_envs, torch.device(device), seed, dict(env_kwargs or {}))
    print(
        f"env: {env_id} -> {envs.env_id} ({num_envs} envs, obs {envs.observation_space.shape}, actions {envs.action_space})",
        file=sys.stderr,
        flush=True,
    )
    return envs


def make_for_episodes(
    env_id: str, num_envs: int, num_episodes: int, device: torch.device, seed: int, env_kwargs: Sequence[str]
) -> VecEnv:
    """Envs for an evaluation: as many copies (at most num_envs) as divide num_episodes, on seeds apart from training's."""
    copies = max(n for n in range(1, min(num_envs, num_episodes) + 1) if num_episodes % n == 0)
    return make(env_id, copies, device, derive_seed(seed, 0, 2**31), parse_env_kwargs(env_kwargs))


def derive_seed(seed: int, rank: int, stream: int) -> int:
    """A 31-bit seed from a hash: seeds, ranks and streams next to each other share nothing, even where env i uses seed + i."""
    return int(np.random.SeedSequence([seed, rank, stream]).generate_state(1)[0] >> 1)


def parse_env_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """["use_contact_force=False"] -> {"use_contact_force": False}; what is no Python literal stays a string."""
    result = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--env-kwargs {item}: must look like name=value, for example use_contact_force=False")
        try:
            result[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            result[name] = value
    return result


def resolve(env_id: str) -> tuple[str, str]:
    """The backend and its own id for a name. Raises InputError with close matches if nobody has it."""
    prefix, _, rest = env_id.partition("/")
    envpool_ids = _envpool_ids()
    if ":" in env_id:
        return "gym", env_id.removeprefix("gym/")
    if env_id in envpool_ids:  # some ids of envpool have a slash of their own
        return "envpool", env_id
    if rest and prefix == "envpool":
        if not envpool_ids:
            raise InputError(f"{env_id} needs envpool: pip install envpool (Linux only; gym/{rest} works everywhere)")
        return "envpool", newest(rest, envpool_ids) or _unknown(env_id, envpool_ids)
    if rest and prefix == "gym":
        return "gym", newest(rest, _gym_ids()) or _unknown(env_id, _gym_ids())
    if rest and prefix in PLANNED:
        raise InputError(
            f"{env_id}: the backend {prefix}/ is not part of this version; there are {', '.join(f'{b}/' for b in BACKENDS)}"
        )
    if name := newest(env_id, envpool_ids):
        return "envpool", name
    if name := newest(env_id, _gym_ids()):
        reason = (
            f"envpool has no {env_id}"
            if envpool_ids
            else "envpool is not installed (it has no wheels for this system?)"
        )
        print(f"{reason}; using Gymnasium, which is slower", file=sys.stderr, flush=True)
        return "gym", name
    _unknown(env_id, [*envpool_ids, *_gym_ids()])


def newest(name: str, ids: Iterable[str]) -> str | None:
    """The id itself if it exists, else its highest -vN, else the one that differs only in upper and lower case, or None."""

    def find(same: Callable[[str], str]) -> str | None:
        wanted = same(name)
        matches = [i for i in ids if same(i) == wanted or re.fullmatch(re.escape(wanted) + r"-v\d+", same(i))]
        return max(
            matches, key=lambda i: (same(i) == wanted, int((re.search(r"-v(\d+)$", i) or [0, 0])[1])), default=None
        )

    return find(str) or find(str.lower)


def _unknown(env_id: str, ids: Iterable[str]) -> str:
    name = env_id.partition("/")[2] if env_id.startswith(BACKENDS) else env_id
    close = difflib.get_close_matches(name, sorted({re.sub(r"-v\d+$", "", i) for i in ids}), n=4, cutoff=0.5)
    raise InputError(f"unknown environment {env_id}" + (f"; close names: {', '.join(close)}" if close else "; list: python -c 'import envpool; print(envpool.list_all_envs())'"))  # fmt: skip


def _envpool_ids() -> list[str]:
    if importlib.util.find_spec("envpool") is None:
        return []
    import envpool

    return list(envpool.list_all_envs())


def _gym_ids() -> list[str]:
    import gymnasium

    return [i for i in gymnasium.registry if "/" not in i or i.startswith("ALE/")]
