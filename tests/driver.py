"""Runs jobs in processes of their own, in a deterministic environment that can save its state.

    python tests/driver.py '{"call": "driver:train", "kwargs": {"args": {"seed": 1}}, "result": "out.pt"}'
    torchrun --nproc-per-node 2 tests/driver.py '...'              # rank r writes out.pt.r
    python tests/driver.py serve                                   # forks a process a job: no start-up of torch each

The tests use `zygote()`, which starts a server once and returns it.
"""

import functools
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import ppo_continuous  # noqa: E402, F401  (loaded once, before jobs are forked)
import ppo_discrete  # noqa: E402, F401
import ppo_lstm  # noqa: E402, F401
from common import cli  # noqa: E402
from common import envs as vecenvs  # noqa: E402
from common.envs.base import Step, VecEnv  # noqa: E402

SMALL = {"env_id": "toy/Linear", "num_envs": 4, "num_steps": 8, "num_minibatches": 2, "update_epochs": 2,
         "hidden_sizes": (8, 8), "device": "cpu", "torch_threads": 1, "games_to_track": 5}  # fmt: skip
BATCH = SMALL["num_envs"] * SMALL["num_steps"]


class LinearEnv(VecEnv):
    """A pure function of the state, the action and the index of the env over all ranks; the seed does not act.

    signal: sent to this process at vector step signal_step, on rank signal_rank only. slow: seconds a step takes.
    """

    def __init__(self, num_envs, device, asymmetric=False, exact=True, gain=1.0, slow=0.0, signal=0, signal_step=0,
                 signal_rank=0):  # fmt: skip
        self.env_id, self.num_envs, self.device = "toy/Linear", num_envs, device
        self.asymmetric, self.exact, self.gain, self.slow = asymmetric, exact, gain, slow
        self.rank, self.steps = int(os.environ.get("RANK", 0)), 0
        self.signal = (signal, signal_step) if self.rank == signal_rank else (0, 0)
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.critic_observation_space = self.observation_space
        if asymmetric:
            self.critic_observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = self.box = spaces.Box(np.float32([-1, -2]), np.float32([1, 2]), dtype=np.float32)
        self.index = self.rank * num_envs + torch.arange(num_envs)

    def first(self):
        phase = self.index[:, None].double() + 1.7 * self.episode[:, None] + torch.arange(3)
        return torch.sin(phase).float()

    def critic(self, x, t):
        return torch.cat([x, t[:, None].float()], -1) if self.asymmetric else x

    def reset(self):
        self.episode, self.t = torch.zeros_like(self.index), torch.zeros_like(self.index)
        self.x = self.first()
        return self.x, self.critic(self.x, self.t)

    def step(self, actions):
        time.sleep(self.slow)
        self.steps += 1
        if self.signal[0] and self.steps == self.signal[1]:
            os.kill(os.getpid(), self.signal[0])
        a = actions.clamp(torch.tensor(self.box.low), torch.tensor(self.box.high))
        x, t = 0.8 * self.x + 0.3 * torch.stack([a[:, 0], a[:, 1], a[:, 0] * a[:, 1]], -1), self.t + 1
        rewards = self.gain * (2 - (x**2).sum(-1) + 0.1 * a[:, 0])
        terminations = x[:, 0] > 1.2
        truncations = (t >= 5 + self.index % 4) & ~terminations
        final = (x, self.critic(x, t)) if truncations.any() else (None, None)
        dones = terminations | truncations
        self.episode = self.episode + dones
        self.t = torch.where(dones, 0, t)
        self.x = torch.where(dones[:, None], self.first(), x)
        return Step(self.x, self.critic(self.x, self.t), rewards, terminations, truncations, *final)

    def state_dict(self):
        return {"x": self.x, "t": self.t, "episode": self.episode} if self.exact else None

    def load_state_dict(self, state):
        self.x, self.t, self.episode = state["x"], state["t"], state["episode"]
        return self.x, self.critic(self.x, self.t)


class MaskedEnv(LinearEnv):
    """LinearEnv with three sub-actions whose mask depends on a counter that is not observed.

    stuck: index of an env of which every fourth state allows nothing; 0: none.
    """

    sizes = [2, 3, 4]

    def __init__(self, *args, stuck=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.env_id, self.stuck, self.action_space = "toy/Masked", stuck, spaces.MultiDiscrete(self.sizes)

    def count(self, counter):
        self.counter = counter  # neighbours are never both forbidden, so each sub-action has something allowed
        self.action_mask = (counter[:, None] + torch.arange(9) * (1 + self.index[:, None] % 3)) % 4 > 0
        if self.stuck:
            self.action_mask &= ~((self.index == self.stuck) & (counter % 4 == 0))[:, None]

    def reset(self):
        self.count(self.index * 5)
        return super().reset()

    def step(self, actions):
        chosen = self.action_mask.gather(1, actions + torch.tensor([0, 2, 5]))
        nothing = torch.stack([~mask.any(1) for mask in self.action_mask.split(self.sizes, 1)], 1)
        assert (chosen | nothing & (actions == 0)).all(), "an action that is not allowed"
        first, second, third = (actions / (torch.tensor(self.sizes) - 1)).T
        self.count((3 * self.counter + 1 + actions.sum(1)) % 17)
        step = super().step(torch.stack([2 * first - 1.5 * third, 3 * second - 2], 1))
        return step._replace(action_mask=self.action_mask)

    def state_dict(self):
        return super().state_dict() | {"counter": self.counter} if self.exact else None

    def load_state_dict(self, state):
        self.count(state["counter"])
        return super().load_state_dict(state)


ENVS = {"toy/Linear": LinearEnv, "toy/Masked": MaskedEnv}


def make(env_id, num_envs, device, seed, env_kwargs=None, action_bins=0, mask_obs=()):
    make.seeds.append(seed)
    return ENVS.get(env_id, LinearEnv)(num_envs, torch.device(device), **(env_kwargs or {}))


make.seeds = []


def install() -> None:
    """Every environment is a LinearEnv, or one of ENVS, from now on."""
    vecenvs.make = make


def share_noise(rows: int, seed: int = 5) -> None:
    """torch.randn_like and rand_like become this rank's rows of one stream [rows, A] for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)

    def like(draw):
        def drawn(x):
            first = int(os.environ.get("RANK", 0)) * len(x)
            return draw(rows, *x.shape[1:], generator=generator)[first : first + len(x)]

        return drawn

    torch.randn_like, torch.rand_like = like(torch.randn), like(torch.rand)


def train(args: dict[str, Any], noise_rows: int = 0, script: str = "ppo_continuous") -> dict[str, Any]:
    """Call main; returns its metrics and what became of the agent that it trained."""
    install()
    module = importlib.import_module(script)
    agents, init = [], module.Agent.__init__

    def recorded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        agents.append(self)
        agents.append({k: v.clone() for k, v in self.state_dict().items()})

    module.Agent.__init__ = recorded
    if noise_rows:
        share_noise(noise_rows)
    make.seeds.clear()
    metrics = module.main(module.Args(**tuples(SMALL | args)))
    module.Agent.__init__ = init
    return {"metrics": metrics, "agent": agents[0].state_dict(), "initial": agents[1], "seeds": list(make.seeds),
            "torch_seed": torch.initial_seed(), "actions": act(agents[0]),
            "wandb": "wandb" in sys.modules}  # fmt: skip


def trains(runs: list[dict[str, Any]], script: str = "ppo_continuous") -> list[dict[str, Any]]:
    return [train(run, script=script) for run in runs]


def command(argv: list[str], script: str = "ppo_continuous") -> None:
    """The command line, in a LinearEnv."""
    install()
    module = importlib.import_module(script)
    sys.argv = [f"{script}.py", *argv]
    cli.run(module.main, module.Args)


def load_and_act(checkpoint: str, script: str = "ppo_continuous") -> dict[str, Any]:
    agent, state = importlib.import_module(script).load_agent(checkpoint)
    return {"actions": act(agent), "values": agent.state_dict()}


def act(agent: Any) -> torch.Tensor:
    """In observations(), each the first of an episode."""
    if not hasattr(agent, "start"):
        return agent.act(observations())
    state, previous = agent.start(32)
    return agent.act({"obs": observations(), "previous": previous}, state)[0]


def observations() -> torch.Tensor:
    return 3 * torch.randn(32, 3, generator=torch.Generator().manual_seed(0))


def tuples(args: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}


def run_job(job: dict[str, Any]) -> None:
    module, name = job["call"].split(":")
    result = getattr(importlib.import_module(module), name)(**job.get("kwargs", {}))
    if job.get("result"):
        rank = f".{os.environ['RANK']}" if "RANK" in os.environ else ""
        torch.save(result, job["result"] + rank)


def serve() -> None:
    """Read one request a line, answer with one line: {"poll": pid} -> exit status or null, a job -> pid."""
    importlib.import_module("torch._dynamo")  # every optimizer imports it, which takes seconds
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(request)
        print(json.dumps(pid), flush=True)


def _child(job: dict[str, Any]) -> None:
    status = 1
    try:
        os.chdir(job["cwd"])
        os.environ.update(job["env"])
        for name, fd in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run_job(job)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Process:
    """A job that the zygote has forked."""

    def __init__(self, server: "Zygote", folder: Path, job: dict[str, Any], env: dict[str, str]):
        self.server, tag = server, f"{time.time_ns()}"
        self.out, self.err = folder / f".{tag}.out", folder / f".{tag}.err"
        request = job | {"cwd": str(folder), "env": env, "stdout": str(self.out), "stderr": str(self.err)}
        self.pid = server.ask(request)

    def wait(self, timeout: float = 60) -> int:
        end = time.monotonic() + timeout
        while (status := self.server.ask({"poll": self.pid})) is None:
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"{timeout} s\n{self.stdout}\n{self.stderr}")
            time.sleep(0.01)
        return status

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def stdout(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def stderr(self) -> str:
        return self.err.read_text() if self.err.exists() else ""


class Zygote:
    def __init__(self):
        command = [sys.executable, __file__, "serve"]
        self.server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )

    def ask(self, request: dict[str, Any]) -> Any:
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, folder: Path, call: str, env: dict[str, str] | None = None, result: str = "", **kwargs) -> Process:
        return Process(self, Path(folder), {"call": call, "kwargs": kwargs, "result": result}, env or {})

    def run(self, folder: Path, call: str, **kwargs) -> Any:
        """A job from start to end in a new process; returns what it returned."""
        result = Path(folder) / f".{time.time_ns()}.result"
        process = self.start(folder, call, result=str(result), **kwargs)
        assert process.wait() == 0, process.stdout + process.stderr
        return torch.load(result, weights_only=False)

    def start_ranks(self, folder: Path, call: str, ranks: int = 2, result: str = "", **kwargs) -> list[Process]:
        """One process a rank with the environment variables that torchrun sets."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
                  "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
        envs = [common | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        return [self.start(folder, call, env, result, **kwargs) for env in envs]

    def run_ranks(self, folder: Path, call: str, ranks: int = 2, **kwargs) -> list[Any]:
        """What each rank returned."""
        result = Path(folder) / f".{time.time_ns()}.result"
        processes = self.start_ranks(folder, call, ranks, str(result), **kwargs)
        for process in processes:
            assert process.wait() == 0, process.stdout + process.stderr
        return [torch.load(f"{result}.{rank}", weights_only=False) for rank in range(ranks)]


@functools.cache
def zygote() -> Zygote:
    """The server of this test session; it ends with its standard input."""
    return Zygote()


if __name__ == "__main__":
    sys.modules["driver"] = sys.modules["__main__"]  # one `make`, one `install`, whoever imports it
    serve() if sys.argv[1] == "serve" else run_job(json.loads(sys.argv[1]))
