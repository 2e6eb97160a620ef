"""The ways a function is made fast: a compiled graph of what is pure, a CUDA graph of what has effects, CPU threads.

None of these changes what is computed.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor


def compile_pure(fn: Callable, enabled: bool) -> Callable:
    """torch.compile of a function whose only effect may be the random state; fn itself when not enabled."""
    return torch.compile(fn, fullgraph=True, dynamic=False) if enabled else fn


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
    are then split the same way in every run, which bit-equal repetition needs.
    """

    def __init__(self, threads: int, device: torch.device, trials: int = 3, recheck: int = 200):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if not threads and (device.type != "cpu" or ranks > 1):  # ranks must all split their sums in the same way
            threads = 1 if device.type != "cpu" else max(1, cores // ranks)
        self.candidates = [threads] if threads else sorted(n for n in {1, 2, cores} if n <= cores)
        self.trials, self.recheck = trials, recheck
        self.best, self.updates = self.candidates[0], 0
        self.seconds = {n: [] for n in self.candidates}
        torch.set_num_threads(1 if not threads else threads)
        self.rollout_threads = torch.get_num_threads()

    @contextmanager
    def update(self, measure: bool = True):
        """Run one whole update of the training loop in here; measure=False: not one of the usual size."""
        trial = self.updates % self.recheck
        measuring = measure and len(self.candidates) > 1 and trial < self.trials * len(self.candidates)
        threads = self.candidates[trial % len(self.candidates)] if measuring else self.best
        torch.set_num_threads(threads)
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(self.rollout_threads)
        self.updates += measure
        if measuring:
            self.seconds[threads].append(time.perf_counter() - start)
            if trial == self.trials * len(self.candidates) - 1:
                self._choose()

    def _choose(self) -> None:
        best = min(self.candidates, key=lambda n: min(self.seconds[n]))
        if best != self.best or self.updates <= self.recheck:
            times = ", ".join(f"{n}: {1e3 * min(s):.0f} ms" for n, s in self.seconds.items())
            print(f"torch threads in the update: {best} (measured {times}; fix with --torch-threads)", flush=True)
        self.best, self.seconds = best, {n: [] for n in self.candidates}
