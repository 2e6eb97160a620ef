"""The ways a function is made fast: a compiled graph of what is pure, a CUDA graph of what has effects, CPU threads.

None of these changes what is computed.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor

from common.envs.base import available_cores
from common.errors import InputError


def compile_pure(fn: Callable, enabled: bool) -> Callable:
    """torch.compile of a function whose only effect may be the random state; fn itself when not enabled."""
    if not enabled:
        return fn
    torch._dynamo.config.trace_autograd_ops = True  # torch.autograd.grad in fn becomes part of its graph
    return torch.compile(fn, fullgraph=True, dynamic=False)


def cuda_graph(fn: Callable[[Tensor], Tensor], enabled: bool, warmup: int = 3) -> Callable[[Tensor], Tensor]:
    """Record fn once as a CUDA graph, then replay it; fn itself when not enabled.

    fn takes one tensor of constant shape, reads and writes tensors at fixed addresses, and returns one tensor, which
    the next call overwrites. Each call is exactly one execution of fn: the first `warmup` calls run it eagerly on a
    side stream (lazy optimizer state, compilation), then it is captured, which executes nothing, and replayed.
    """
    if not enabled:
        return fn
    graph, static_input, static_output, calls = torch.cuda.CUDAGraph(), None, None, 0

    def call(x: Tensor) -> Tensor:
        nonlocal static_input, static_output, calls
        calls += 1
        if calls <= warmup:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                output = fn(x)
            torch.cuda.current_stream().wait_stream(stream)
            return output
        if static_input is None:
            static_input = x.clone()
            with torch.cuda.graph(graph):
                static_output = fn(static_input)
        static_input.copy_(x)
        graph.replay()
        return static_output

    return call


class TorchThreads:
    """How many CPU threads torch uses: one in the rollout, a measured number in the update.

    Small matrices are slower on two threads than on one, and large ones too while another process holds a core, because
    the threads wait for each other in spinning barriers. So the first updates try each candidate in turn, the fastest
    is kept, and every `recheck` updates the trial is repeated. A fixed number (`threads` > 0) is used as given: sums
    are then split the same way in every run, which bit-equal repetition needs. Raises InputError for more than cores.
    """

    def __init__(self, threads: int, device: torch.device, trials: int = 3, recheck: int = 200):
        cores = available_cores()
        if threads > cores:
            raise InputError(f"--torch-threads {threads}: must be at most {cores}, the CPU cores of this process")
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if not threads and (device.type != "cpu" or ranks > 1):  # ranks must all split their sums in the same way
            threads = 1 if device.type != "cpu" else max(1, cores // ranks)
        self.candidates = [threads] if threads else sorted(n for n in {1, 2, cores} if n <= cores)
        self.trials, self.recheck, self.updates = trials, recheck, 0
        self.best, self.announced = self.candidates[0], None
        self._start_trial()
        self.rollout_threads = threads or 1
        torch.set_num_threads(self.rollout_threads)

    def _start_trial(self) -> None:
        self.seconds: dict[int, list[float]] = {n: [] for n in self.candidates}
        self.schedule = self.candidates * self.trials if len(self.candidates) > 1 else []

    @contextmanager
    def update(self, measure: bool = True):
        """Run one whole update of the training loop in here; measure=False: not one of the usual size."""
        measuring = measure and bool(self.schedule)
        threads = self.schedule[0] if measuring else self.best
        torch.set_num_threads(threads)
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(self.rollout_threads)
        self.updates += measure
        if measuring:
            self._record(threads, time.perf_counter() - start)
        elif self.updates % self.recheck == 0:
            self._start_trial()

    def _record(self, threads: int, seconds: float) -> None:
        self.seconds[threads].append(seconds)
        self.schedule.pop(0)
        fastest = {n: min(times) for n, times in self.seconds.items() if times}
        if seconds > 1.5 * min(fastest.values()):  # one look was enough: a spinning barrier can cost ten times as much
            self.schedule = [n for n in self.schedule if n != threads]
        if self.schedule:
            return
        self.best = min(fastest, key=fastest.get)
        if self.best != self.announced:
            times = ", ".join(f"{n}: {1e3 * t:.0f} ms" for n, t in fastest.items())
            print(f"torch threads in the update: {self.best} (measured {times}; fix with --torch-threads)", flush=True)
            self.announced = self.best
