"""Threads are chosen by measurement; a compiled function is the same function."""

import time

import pytest
import torch

from common.compile import TorchThreads, compile_pure, cuda_graph
from common.errors import InputError

CPU = torch.device("cpu")


def run(threads, updates, cost):
    """`updates` updates that take cost(number of threads) seconds; the numbers used."""
    used = []
    for _ in range(updates):
        with threads.update():
            used.append(torch.get_num_threads())
            time.sleep(cost(used[-1]))
    return used


def test_the_faster_number_is_kept_and_checked_again(capsys, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    threads = TorchThreads(0, CPU, trials=2, recheck=10)
    used = run(threads, 10, lambda n: 0.02 / n)
    assert set(used[:2]) == {1, 2} and used[4:] == [2] * 6 and torch.get_num_threads() == 1
    assert "torch threads in the update: 2" in capsys.readouterr().out
    used = run(threads, 9, lambda n: 0.005 * n * n)  # now a neighbour holds the other core
    assert used.count(2) == 1 and used[-1] == 1 and threads.best == 1  # one look at the slow one was enough


def test_the_first_update_of_another_size_is_not_measured(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(2))
    threads = TorchThreads(0, CPU)
    with threads.update(measure=False):
        pass
    assert threads.updates == 0 and not any(threads.seconds.values())


def test_a_fixed_number_is_used_as_given_and_ranks_share_the_cores(monkeypatch):
    assert set(run(TorchThreads(1, CPU), 5, lambda n: 0)) == {1}
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert TorchThreads(0, CPU).candidates == [2]
    torch.set_num_threads(1)


def test_more_threads_than_cores_are_refused(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(3))
    with pytest.raises(InputError, match="--torch-threads 4: must be at most 3"):
        TorchThreads(4, CPU)
    assert TorchThreads(3, CPU).candidates == [3]
    torch.set_num_threads(1)


def test_disabled_is_the_function_itself():
    assert compile_pure(len, False) is len and cuda_graph(len, False) is len
