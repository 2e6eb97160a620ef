"""Needs a CUDA GPU: pytest -m gpu. These have not been run yet: no GPU was at hand when they were written."""

from dataclasses import replace

import pytest
import torch

from common import checkpoint
from ppo_continuous import Args, load_agent, main

ARGS = Args(env_id="envpool/Pendulum-v1", num_envs=64, num_steps=16, num_minibatches=4, update_epochs=3, device="cuda",
            total_timesteps=1024 * 6, hidden_sizes=(64, 64))  # fmt: skip


@pytest.mark.gpu
def test_captured_and_compiled_equals_eager_and_opens_on_a_cpu(monkeypatch, tmp_path):
    """H9, H23: the first gradient steps run before the capture, the others are replays."""
    monkeypatch.chdir(tmp_path)
    main(replace(ARGS, run_name="eager", compile=False, total_timesteps=1024 * 2))
    main(replace(ARGS, run_name="graph", compile=True, total_timesteps=1024 * 2))
    eager, graph = (checkpoint.load(f"runs/{name}/last.pt")["agent"] for name in ("eager", "graph"))
    for name, x in eager.items():
        torch.testing.assert_close(x, graph[name], rtol=1e-3, atol=1e-4)
    agent, _ = load_agent("runs/graph/last.pt", "cpu")
    assert agent.act(torch.zeros(2, 3)).device.type == "cpu"


@pytest.mark.gpu
def test_memory_is_steady(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    main(replace(ARGS, run_name="short"))
    before = torch.cuda.max_memory_allocated()
    main(replace(ARGS, run_name="long", total_timesteps=1024 * 30))
    assert torch.cuda.max_memory_allocated() < 1.02 * before
