"""Two gloo ranks on one machine: the same learning as one rank with twice the envs, one decision, one run folder."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import driver
import pytest
import torch
from driver import BATCH, SMALL, zygote

import ppo_continuous
from common import checkpoint, distributed
from common.logger import EpisodeStats
from common.running_mean_std import RunningMeanStd

N, A = SMALL["num_envs"], 2
SHARED = {"num_minibatches": 1, "norm_adv": True, "lr_schedule": "adaptive", "kl_threshold": 1e-4, "max_lr": 0.01,
          "learning_rate": 1e-3, "seed": 0, "total_timesteps": 4 * 2 * BATCH, "max_grad_norm": 0.5,
          "games_to_track": 1000}  # fmt: skip


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- learning ----


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Real torchrun: two ranks of N envs; a seeding iteration and three updates. Returns folder and both results."""
    folder = tmp_path_factory.mktemp("pair")
    args = SHARED | {"run_name": "two", "save_interval": 1}
    job = {"call": "driver:train", "kwargs": {"args": args, "noise_rows": 2 * N}, "result": "result.pt"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*launch, driver.__file__, json.dumps(job)], cwd=folder, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, [torch.load(folder / f"result.pt.{rank}", weights_only=False) for rank in (0, 1)]


def test_two_ranks_equal_one_with_twice_the_envs(pair, tmp_path):
    args = SHARED | {"run_name": "one", "num_envs": 2 * N, "save_interval": 1}
    one = zygote().run(tmp_path, "driver:train", args=args, noise_rows=2 * N)
    two = pair[1][0]
    equal(one["initial"], two["initial"])
    for name, value in one["agent"].items():
        torch.testing.assert_close(two["agent"][name], value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    steps = [(value - one["initial"][name]).abs().max().item() for name, value in one["agent"].items()]
    assert max(steps[-8:]) > 1e-3  # a hundred times the tolerance
    assert two["agent"]["obs_rms.count"] == one["agent"]["obs_rms.count"] == 4 * 2 * BATCH
    for name, value in one["metrics"].items():
        if name not in ("charts/SPS", "losses/explained_variance"):  # these are of rank 0
            assert two["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    lrs = []
    for folder, run in ((pair[0], "two"), (tmp_path, "one")):
        rows = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        lrs.append([json.loads(row)["charts/learning_rate"] for row in rows])
    assert lrs[0] == pytest.approx(lrs[1]) and len(set(lrs[0])) > 1


def test_ranks_are_bit_equal(pair):
    first, second = pair[1]
    equal(first["initial"], second["initial"])
    equal(first["agent"], second["agent"])
    assert any(not torch.equal(first["initial"][k], first["agent"][k]) for k in ("mean_head.weight", "log_sigma"))


def test_one_run_directory_one_event_file(pair):
    """H37."""
    folder = pair[0] / "runs"
    assert [path.name for path in folder.iterdir()] == ["two"]
    for pattern in ("events.out.tfevents*", "metrics.jsonl", "args.json", "last.pt"):
        assert len(files(folder, pattern)) == 1, pattern
    rows = [json.loads(row)["global_step"] for row in (folder / "two/metrics.jsonl").read_text().splitlines()]
    assert rows == [2 * BATCH * i for i in range(1, 5)]
    assert not files(folder, ".*.tmp") and len(checkpoint.load(folder / "two/last.pt")["ranks"]) == 2


def test_unnamed_run_is_one_directory(tmp_path):
    """The default name has the time in it, and ranks may start in different seconds."""
    zygote().run_ranks(tmp_path, "test_distributed:train_late", args={"total_timesteps": 4 * BATCH})
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert len(files(tmp_path / "runs", "events.out.tfevents*")) == 1


def train_late(args):
    rank = distributed.init("cpu")[0]
    strftime = ppo_continuous.time.strftime
    ppo_continuous.time.strftime = lambda form, *t: strftime(form, *t) + str(rank)
    return driver.train(args)


def test_seeds_differ_between_ranks(tmp_path):
    """H38: environments and noise; weights are the same. 0 is a seed like any other."""
    results = [zygote().run_ranks(tmp_path, "driver:train", args={"total_timesteps": 4 * BATCH, "seed": seed})
               for seed in (0, 1)]  # fmt: skip
    ranks = sum(results, [])
    assert len({rank["seeds"][0] for rank in ranks}) == 4 and len({rank["torch_seed"] for rank in ranks}) == 4
    equal(ranks[0]["initial"], ranks[1]["initial"])
    weights = [rank["initial"]["actor.layers.0.0.weight"] for rank in ranks]
    assert not torch.equal(weights[0], weights[2])
    args = {"total_timesteps": 4 * BATCH, "seed": 0, "run_name": "again"}
    again = zygote().run_ranks(tmp_path, "driver:train", args=args)
    equal(again[0]["agent"], ranks[0]["agent"])


# ---- statistics ----


def worker_statistics():
    rank, _, _ = distributed.init("cpu")
    rms, seen = RunningMeanStd(1), []

    def look():
        seen.append((rms.mean.item(), rms.var.item(), rms.count.item()))

    rms.update(torch.tensor([[1.0, 2, 3], [10, 20, 0]][rank])[: 3 - rank, None])
    look()
    rms.update(torch.zeros(0, 1))
    look()
    other = RunningMeanStd(1)
    other.load_state_dict(rms.state_dict())
    rms = other
    rms.update(torch.zeros(0, 1))
    look()
    rms.update(torch.zeros(5, 1))
    look()
    rms.update(torch.full((4, 1), 1e9), mask=torch.tensor([False, False, False, rank == 1]))
    look()
    distributed.close()
    return seen


def test_statistics_are_of_all_ranks(tmp_path):
    """H14: exact numbers; nothing is counted twice, not after an empty update and not after a resume."""
    first, second = zygote().run_ranks(tmp_path, "test_distributed:worker_statistics")
    assert first == second
    for row in first[:3]:
        assert row == pytest.approx((7.2, 50.96, 5), rel=1e-12)
    data = torch.tensor([1.0, 2, 3, 10, 20, *[0.0] * 10], dtype=torch.float64)
    assert first[3] == pytest.approx((2.4, data.var(correction=0).item(), 15), rel=1e-12)
    data = torch.cat([data, torch.tensor([1e9], dtype=torch.float64)])
    assert first[4] == pytest.approx((data.mean().item(), data.var(correction=0).item(), 16), rel=1e-9)


def worker_collectives():
    rank, world_size, device = distributed.init("cpu")
    shared = torch.nn.Linear(2, 2)
    with torch.no_grad():
        shared.weight.fill_(rank)
    distributed.broadcast(shared)
    weight, unused = torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.arange(6.0).view(3, 2) * (1 + rank)
    grad, x = weight.grad, torch.tensor([1.0 + rank])
    result = {
        "broadcast": shared.weight.unique().tolist(),
        "extra": distributed.average_gradients([unused, weight], torch.tensor([0.03, 0.001])[rank].view(1)).item(),
        "grad": weight.grad.flatten().tolist(),
        "in place": weight.grad is grad,
        "average": distributed.average(x).item(),
        "untouched": x.item(),
        "any": [distributed.any_rank(flag, device) for flag in (rank == 1, rank == 0, False, True)],
        "objects": distributed.gather_objects({"rank": rank, "world": world_size}),
    }
    distributed.close()
    return result


def test_collectives(tmp_path):
    for rank, result in enumerate(zygote().run_ranks(tmp_path, "test_distributed:worker_collectives")):
        assert result["broadcast"] == [0] and result["extra"] == pytest.approx(0.0155)
        assert result["grad"] == [0, 1.5, 3, 4.5, 6, 7.5] and result["in place"]
        assert result["average"] == 1.5 and result["untouched"] == 1 + rank
        assert result["any"] == [True, True, False, True]
        assert result["objects"] == [{"rank": 0, "world": 2}, {"rank": 1, "world": 2}]


# ---- decisions ----


def worker_kl(kls, interval):
    """Train where the loss of rank r reports the divergence kls[r]; returns the learning rates afterwards."""
    rank, _, _ = distributed.init("cpu")
    loss_fn, optimizers, adam = ppo_continuous.ppo_loss, [], torch.optim.Adam

    def ppo_loss(*args, **kwargs):
        loss, metrics = loss_fn(*args, **kwargs)
        metrics[ppo_continuous.KL] = kls[rank]
        return loss, metrics

    def recorded(*args, **kwargs):
        optimizers.append(adam(*args, **kwargs))
        return optimizers[-1]

    ppo_continuous.ppo_loss, torch.optim.Adam = ppo_loss, recorded
    result = driver.train({"total_timesteps": 4 * BATCH, "kl_threshold": 0.01, "kl_interval": interval,
                           "learning_rate": 1e-4, "update_epochs": 1, "num_minibatches": 2})  # fmt: skip
    return [float(g["lr"]) for g in optimizers[0].param_groups], result["metrics"]["losses/approx_kl"]


@pytest.mark.parametrize("kls, interval, factor", [
    ([0.03, 0.001], "minibatch", 1.0),  # mean 0.0155: apart, each rank would move, in opposite directions
    ([0.03, 0.001], "epoch", 1.0),
    ([0.05, 0.001], "minibatch", 1 / 1.5**2),
    ([0.005, 0.001], "epoch", 1.5),
])  # fmt: skip
def test_learning_rate_follows_the_mean_divergence(tmp_path, kls, interval, factor):
    """H25."""
    results = zygote().run_ranks(tmp_path, "test_distributed:worker_kl", kls=kls, interval=interval)
    for lrs, kl in results:
        assert kl == pytest.approx(sum(kls) / 2)
        assert lrs == pytest.approx([1e-4 * factor] * 2)


def test_stop_of_one_rank_stops_both(tmp_path):
    """H25: rank 1 alone is told to stop, in its third iteration."""
    argv = ["--env-id", "toy/Linear", "--num-envs", "4", "--num-steps", "8", "--num-minibatches", "2",
            "--device", "cpu", "--hidden-sizes", "8", "8", "--run-name", "stopped", "--torch-threads", "1",
            "--total-timesteps", "1e9", "--env-kwargs", "signal=15", "signal_step=20", "signal_rank=1"]  # fmt: skip
    processes = zygote().start_ranks(tmp_path, "driver:command", argv=argv)
    assert [process.wait() for process in processes] == [0, 0], [p.stderr for p in processes]
    assert checkpoint.load(tmp_path / "runs/stopped/last.pt")["global_step"] == 3 * 2 * BATCH
    assert "interrupted" in processes[0].stdout and processes[1].stdout == ""  # rank 0 speaks


def test_score_is_of_all_ranks(tmp_path):
    """Both ranks see one window, so that both stop in the same iteration."""
    args = {"total_timesteps": 1000 * BATCH, "score_to_win": -1e3, "games_to_track": 12}
    first, second = zygote().run_ranks(tmp_path, "driver:train", args=args)
    for name in ("charts/episodic_return", "charts/episodes"):
        assert first["metrics"][name] == second["metrics"][name]
    row = json.loads(files(tmp_path, "metrics.jsonl")[0].read_text().splitlines()[-1])
    assert row["global_step"] <= 3 * 2 * BATCH
    assert row["charts/episodes"] >= 16  # two of each of the 8 envs are the least that makes 12


def worker_window():
    """Every env has one episode an iteration, of 1 step on rank 0; on rank 1 its first one takes 3 iterations."""
    rank, _, _ = distributed.init("cpu")
    stats, seen, gather, calls = EpisodeStats(2, window=7, world_size=2), [], distributed.gather_objects, []
    distributed.gather_objects = lambda x: calls.append(1) or gather(x)
    for iteration in range(4):
        stats.update(torch.ones(1, 2), torch.full((1, 2), rank == 0 or iteration > 1))
        seen.append((stats.full, *stats.metrics().values()))
    assert len(calls) == 4
    distributed.gather_objects = gather
    distributed.close()
    return seen


def test_window_is_of_each_env_of_each_rank(tmp_path):
    """7 episodes of 4 envs are two of each: full only when all have them, on both ranks at once."""
    first, second = zygote().run_ranks(tmp_path, "test_distributed:worker_window")
    assert first == second
    # full, mean return, mean length, episodes
    assert first == [(False, 1, 1, 2), (False, 1, 1, 4), (False, 10 / 6, 10 / 6, 8), (True, 1.5, 1.5, 12)]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_error_on_one_rank_ends_both(tmp_path, bad_rank):
    """No rank is left waiting in a collective: one line, status 2, and the launcher can end the other."""
    processes = zygote().start_ranks(tmp_path, "test_distributed:worker_bad_rank", bad_rank=bad_rank)
    assert processes[bad_rank].wait(20) == 2
    assert "NaN" in processes[bad_rank].stderr and "Traceback" not in processes[bad_rank].stderr
    other = processes[1 - bad_rank]
    other.kill(15), other.kill(9)  # what torchrun does
    other.wait(20)


def worker_bad_rank(bad_rank):
    step = driver.LinearEnv.step

    def broken(self, actions):
        result = step(self, actions)
        bad = self.rank == bad_rank and self.steps > 20
        return result._replace(rewards=result.rewards * float("nan")) if bad else result

    driver.LinearEnv.step = broken
    driver.command(["--env-id", "toy/Linear", "--num-envs", "4", "--num-steps", "8", "--num-minibatches", "2",
                    "--device", "cpu", "--hidden-sizes", "8", "8", "--torch-threads", "1"])  # fmt: skip


# ---- resume ----


def test_resume_under_two_ranks_is_exact(pair, tmp_path):
    """Each rank has its own random state and environments in the one file."""
    args = {"run_name": "whole", "total_timesteps": 8 * BATCH, "save_interval": 1}
    whole = zygote().run_ranks(tmp_path, "driver:train", args=args)
    half = f"runs/whole/{4 * BATCH}.pt"
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/kept")
    (tmp_path / "runs/whole/last.pt").unlink()
    halves = zygote().run_ranks(tmp_path, "driver:train", args=args | {"resume": half})
    for a, b in zip(whole, halves, strict=True):
        equal(a["agent"], b["agent"])
    a, b = (checkpoint.load(tmp_path / "runs" / run / "last.pt") for run in ("kept", "whole"))
    for rank in (0, 1):
        assert torch.equal(a["ranks"][rank]["rng"]["torch"], b["ranks"][rank]["rng"]["torch"])
        equal(a["ranks"][rank]["envs"], b["ranks"][rank]["envs"])
        assert a["ranks"][rank]["episodes"]["window"] == b["ranks"][rank]["episodes"]["window"]
    assert not torch.equal(a["ranks"][0]["rng"]["torch"], a["ranks"][1]["rng"]["torch"])
    assert not torch.equal(a["ranks"][0]["envs"]["x"], a["ranks"][1]["envs"]["x"])


@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_on_another_number_of_ranks(pair, tmp_path, ranks):
    """Not exact, but sound: the count of steps and of normaliser rows goes on and nothing is played twice."""
    shutil.copytree(pair[0] / "runs", tmp_path / "runs")
    total = 4 * 2 * BATCH + 6 * BATCH
    args = SHARED | {"run_name": "two", "total_timesteps": total, "resume": "runs/two/last.pt"}
    results = zygote().run_ranks(tmp_path, "driver:train", ranks, args=args)
    for result in results:
        equal(result["agent"], results[0]["agent"])
    state = checkpoint.load(tmp_path / "runs/two/last.pt")
    assert len(state["ranks"]) == ranks
    assert state["global_step"] == state["agent"]["obs_rms.count"]
    assert 4 * 2 * BATCH < state["global_step"] <= total
    assert len({rank["torch_seed"] for rank in results} | {tuple(r["seeds"]) for r in results}) == 2 * ranks
    streams = {tuple(r["rng"]["torch"].tolist()) for r in state["ranks"]}
    assert len(streams) == ranks


# ---- wandb ----


def worker_wandb(track):
    Path("wandb.py").write_text(
        "import json, os\n"
        "def note(**what):\n"
        "    print(json.dumps(what, default=str), file=open(f'wandb.{os.environ[\"RANK\"]}.log', 'a'))\n"
        "def init(**kwargs):\n    note(init=kwargs)\n    return type('Run', (), dict(\n"
        "        log=staticmethod(lambda metrics, step: note(step=step, metrics=metrics)),\n"
        "        finish=staticmethod(lambda: note(finish=True))))\n"
    )
    sys.path.insert(0, ".")
    return driver.train({"total_timesteps": 6 * BATCH, "track": track, "run_name": f"track{track}"})


def test_wandb_is_started_once_and_only_when_asked(tmp_path):
    """H37."""
    results = zygote().run_ranks(tmp_path, "test_distributed:worker_wandb", track=False)
    assert [rank["wandb"] for rank in results] == [False, False]
    assert not files(tmp_path, "wandb.*.log")
    zygote().run_ranks(tmp_path, "test_distributed:worker_wandb", track=True)
    assert not (tmp_path / "wandb.1.log").exists()
    lines = [json.loads(line) for line in (tmp_path / "wandb.0.log").read_text().splitlines()]
    assert [list(line)[0] for line in lines] == ["init", "step", "step", "step", "finish"]
    assert lines[0]["init"]["config"]["hidden_sizes"] == [8, 8] and lines[0]["init"]["name"] == "trackTrue"
    assert [line["step"] for line in lines[1:-1]] == [2 * BATCH, 4 * BATCH, 6 * BATCH]
    assert lines[3]["metrics"]["losses/approx_kl"] >= 0
