"""From an environment's name to N copies of it: the prefix chooses the adapter, which is imported only then."""

import ast
import difflib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.envs.registration import registry  # the name gymnasium is taken here, by the adapter

from common.envs.base import VecEnv
from common.envs.multiagent import FrameStackVecEnv, MultiAgentVecEnv
from common.errors import InputError

# prefix: the adapter, and what installs its packages. Every adapter but envpool's and Gymnasium's has a `task_ids()`.
ADAPTERS = {
    "envpool": ("common.envs.envpool:EnvpoolVecEnv", "requirements.txt"),
    "gym": ("common.envs.gymnasium:GymnasiumVecEnv", "requirements.txt"),
    "warp": ("common.envs.warp:WarpVecEnv", "requirements-warp.txt"),
    "torch": ("common.envs.torch_tasks:TorchVecEnv", "requirements.txt"),
    "vmas": ("common.envs.vmas:VmasVecEnv", "requirements-marl.txt"),
    "pz": ("common.envs.pettingzoo:PettingZooVecEnv", "requirements-marl.txt"),
    "smax": ("common.envs.smax:SmaxVecEnv", "requirements-jaxmarl.txt"),
    "jaxmarl": ("common.envs.jaxmarl:JaxMarlVecEnv", "requirements-jaxmarl.txt"),
    "smac": ("common.envs.smac:SmacVecEnv", "requirements-smac.txt"),
    "smacv2": ("common.envs.smacv2:Smacv2VecEnv", "requirements-smac.txt"),
}
BACKENDS = tuple(ADAPTERS)
ADAPTERS["envpool multi-agent"] = ("common.envs.envpool_multiplayer:EnvpoolMultiplayerVecEnv", "requirements.txt")
MINIGRID = ("MiniGrid-", "BabyAI-")  # Gymnasium knows these once their package is imported
PLANNED = """
    brax playground mjlab isaaclab isaacgym maniskill genesis magent
""".split()


def make(
    env_id: str, num_envs: int, device: torch.device, seed: int, env_kwargs: dict[str, Any] | None = None,
    action_bins: int = 0, mask_obs: Sequence[int] = (), multi_agent: bool = False, frame_stack: int = 1,
) -> VecEnv:  # fmt: skip
    """num_envs copies of env_id on device, tensors in and out; says on stderr what a name was taken for.

    env_id is `envpool/Ant-v5`, `gym/module:Name-v0`, `pz/module:function`, or a bare name, the newest version of it in
    envpool or else in Gymnasium: Ant is envpool/Ant-v5, but warp/Ant-v5 on a GPU where that is installed. With
    action_bins, each dimension of continuous actions is cut into that many values; the entries mask_obs of a vector
    observation are 0. A MultiAgentVecEnv is made where multi_agent says so, with the last frame_stack observations of
    each agent as one. Raises InputError for an unknown name or option, a missing package, a task with another number of
    agents (one or several), or num_envs < 1.
    """
    if num_envs < 1:
        raise InputError(f"num_envs {num_envs}: must be at least 1")
    backend, name = resolve(env_id, device)
    module, class_name = _adapter(f"{backend} multi-agent" if backend == "envpool" and multi_agent else backend)
    adapter = getattr(module, class_name)
    if issubclass(adapter, MultiAgentVecEnv) != multi_agent:
        one, several = "one agent: use ppo_continuous.py or ppo_discrete.py", "several agents: use ppo_multiagent.py"
        raise InputError(f"{backend}/{name} has {one if multi_agent else several}")
    envs = adapter(name, num_envs, torch.device(device), seed, dict(env_kwargs or {}))
    if action_bins:
        from common.envs.discretize import DiscretizedVecEnv

        envs = DiscretizedVecEnv(envs, action_bins)
    if mask_obs:
        from common.envs.mask_obs import MaskedObsVecEnv

        envs = MaskedObsVecEnv(envs, mask_obs)
    if frame_stack > 1:
        envs = FrameStackVecEnv(envs, frame_stack)
    agents = f" of {envs.num_agents} agents" if multi_agent else ""
    what = f"{num_envs} envs{agents}, obs {_brief(envs.observation_space)}, actions {_brief(envs.action_space)}"
    print(f"env: {env_id} -> {envs.env_id} ({what})", file=sys.stderr, flush=True)
    return envs


def make_for_episodes(
    env_id: str, num_envs: int, num_episodes: int, device: torch.device, seed: int, env_kwargs: Sequence[str],
    action_bins: int = 0, mask_obs: Sequence[int] = (), **options: Any,
) -> VecEnv:  # fmt: skip
    """Envs for an evaluation: as many copies (at most num_envs) as divide num_episodes, on seeds of their own.

    options: further ones of `make`.
    """
    copies = max(n for n in range(1, min(num_envs, num_episodes) + 1) if num_episodes % n == 0)
    kwargs = parse_env_kwargs(env_kwargs)
    return make(env_id, copies, device, derive_seed(seed, 0, 2**31), kwargs, action_bins, mask_obs, **options)


def derive_seed(seed: int, rank: int, stream: int) -> int:
    """A 31-bit hash: neighbouring seeds, ranks and streams share nothing, even where env i is seeded with seed + i."""
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


def resolve(env_id: str, device: torch.device | str = "cpu") -> tuple[str, str]:
    """The backend and its own id for a name. Raises InputError with close matches if nobody has it."""
    prefix, _, rest = env_id.partition("/")
    if ":" in env_id:
        return ("pz", rest) if prefix == "pz" else ("gym", env_id.removeprefix("gym/"))
    envpool_ids = _envpool_ids()
    if rest.startswith(MINIGRID) and prefix == "gym" or env_id.startswith(MINIGRID) and not envpool_ids:
        _register_minigrid(env_id)
    gym_ids = list(registry)
    if torch.device(device).type == "cuda" and (name := newest(env_id, _warp_ids())):
        return "warp", name
    if env_id in envpool_ids:  # some of its ids have a slash of their own
        return "envpool", env_id
    if rest and prefix == "envpool":
        if not envpool_ids:
            raise InputError(f"{env_id} needs envpool: pip install -r requirements.txt (on Linux; else use gym/{rest})")
        return "envpool", newest(rest, envpool_ids) or _unknown(env_id, rest, envpool_ids)
    if rest and prefix == "gym":
        return "gym", newest(rest, gym_ids) or _unknown(env_id, rest, gym_ids)
    if rest and prefix in ADAPTERS:
        ids = _adapter(prefix)[0].task_ids()
        return prefix, newest(rest, ids) or _unknown(env_id, rest, ids)
    if rest and prefix in PLANNED:
        raise InputError(f"{env_id}: {prefix}/ is not available yet; there are {', '.join(f'{b}/' for b in BACKENDS)}")
    if name := newest(env_id, envpool_ids):
        return "envpool", name
    if name := newest(env_id, gym_ids):
        reason = f"envpool has no {env_id}" if envpool_ids else "envpool is not installed"
        print(f"{reason}; using Gymnasium, which is slower", file=sys.stderr, flush=True)
        return "gym", name
    _unknown(env_id, env_id, [*envpool_ids, *gym_ids])


def _adapter(backend: str) -> tuple[ModuleType, str]:
    """A backend's module and the name of its class. Raises InputError with the pip command if a package is missing."""
    (module, _, class_name), requirements = ADAPTERS[backend][0].partition(":"), ADAPTERS[backend][1]
    try:
        return importlib.import_module(module), class_name
    except ImportError as error:
        raise InputError(f"{backend}/ needs {error.name}: pip install -r {requirements}") from error


def newest(name: str, ids: Iterable[str]) -> str | None:
    """The id itself, else its highest -vN, else the one name that differs only in upper and lower case, or None."""
    versions = {i: _split_version(i) for i in ids}
    if name in versions:
        return name
    if matches := [i for i, (base, _) in versions.items() if base == name]:
        return max(matches, key=lambda i: versions[i][1])
    alike = [i for i in versions if i.lower() == name.lower()]
    bases = {base for base, _ in versions.values() if base.lower() == name.lower()}
    if len(alike) == 1:
        return alike[0]
    return newest(bases.pop(), versions) if len(bases) == 1 else None


def _split_version(env_id: str) -> tuple[str, int]:
    base, _, version = env_id.rpartition("-v")
    return (base, int(version)) if base and version.isdigit() else (env_id, -1)


def _unknown(env_id: str, name: str, ids: Iterable[str]) -> NoReturn:
    bases = {_split_version(i)[0].lower(): i for i in sorted(ids, key=lambda i: _split_version(i)[1])}
    close = difflib.get_close_matches(_split_version(name)[0].lower(), bases, n=4)
    if close or len(bases) < 20:
        hint = f"close names: {', '.join(bases[c] for c in close or bases)}"
    else:
        hint = "`envpool.list_all_envs()` lists many"
    raise InputError(f"unknown environment {env_id}; {hint}")


def _envpool_ids() -> list[str]:
    try:
        import envpool
    except ImportError:
        return []
    return list(envpool.list_all_envs())


def _warp_ids() -> list[str]:
    """Tasks of warp/ if it is installed, told from Gymnasium's list, since its import takes seconds."""
    if importlib.util.find_spec("mujoco_warp") is None:
        return []
    return [i for i, spec in registry.items() if "gymnasium.envs.mujoco." in str(spec.entry_point) and "-v5" in i]


def _register_minigrid(env_id: str) -> None:
    try:
        import minigrid  # noqa: F401  registers its tasks
    except ImportError as error:
        raise InputError(f"{env_id} needs minigrid: pip install -r requirements-minigrid.txt") from error


def _brief(space: Space) -> str:
    if isinstance(space, spaces.Dict):
        return ", ".join(f"{key} {_brief(part)}" for key, part in space.items())
    shape = "x".join(map(str, space.shape))
    return shape if isinstance(space, spaces.Box) else " ".join(str(space).split())
