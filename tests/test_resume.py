"""A checkpoint continues a run exactly, survives any crash, and never runs code."""

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import driver
import numpy as np
import pytest
import torch
from driver import BATCH, zygote

import ppo_continuous
from common import checkpoint, cli
from common import envs as vecenvs
from common.errors import InputError

RUNS = {
    "linear": {"lr_schedule": "linear"},
    "adaptive": {"lr_schedule": "adaptive", "env_kwargs": ["asymmetric=True"], "critic_learning_rate": 1e-3,
                 "max_lr": 1.0},
    "epoch": {"kl_interval": "epoch", "kl_threshold": 1e-4, "fixed_sigma": False, "clip_vloss": True},
}  # fmt: skip
FOUR = {"total_timesteps": 4 * BATCH, "save_interval": 1}


@pytest.fixture(autouse=True)
def linear_env(monkeypatch, tmp_path):
    monkeypatch.setattr(vecenvs, "make", driver.make)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with runs/NAME of four iterations each, numbered checkpoints, and what each process knew at its end."""
    folder = tmp_path_factory.mktemp("trained")
    runs = [FOUR | args | {"run_name": name} for name, args in RUNS.items()]
    results = zygote().run(folder, "driver:trains", runs=runs)
    return folder, dict(zip(RUNS, results, strict=True))


@pytest.fixture
def runs(trained):
    """A copy of the trained runs in the working folder."""
    shutil.copytree(trained[0] / "runs", "runs")
    return Path("runs")


def command_line(*argv: str) -> dict[str, float]:
    """Parse and run as the command does, but let InputError through."""
    return ppo_continuous.main(cli.parse(ppo_continuous.Args, list(argv)))


def same(a, b, path="state") -> None:
    """Bit for bit, in every leaf."""
    if isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b or (a != a and b != b), (path, a, b)


def steps(run: Path) -> list[int]:
    return [json.loads(line)["global_step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def edit(path: Path, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


# ---- bit for bit ----


@pytest.fixture(scope="module")
def resumed(trained, tmp_path_factory):
    """The same runs, continued from their second iteration by a new interpreter."""
    folder = tmp_path_factory.mktemp("resumed")
    jobs = []
    for name, args in RUNS.items():
        (folder / "runs" / name).mkdir(parents=True)
        for file in (f"{2 * BATCH}.pt", "metrics.jsonl"):
            shutil.copy(trained[0] / "runs" / name / file, folder / "runs" / name)
        jobs.append(FOUR | args | {"run_name": name, "resume": f"runs/{name}/{2 * BATCH}.pt"})
    job = json.dumps({"call": "driver:trains", "kwargs": {"runs": jobs}, "result": "result.pt"})
    subprocess.run([sys.executable, driver.__file__, job], cwd=folder, check=True, capture_output=True, timeout=100)
    return folder, dict(zip(RUNS, torch.load(folder / "result.pt", weights_only=False), strict=True))


@pytest.mark.parametrize("name", RUNS)
def test_two_iterations_and_two_in_a_new_process_equal_four(trained, resumed, name):
    whole, halves = (torch.load(f / "runs" / name / "last.pt", weights_only=True) for f in (trained[0], resumed[0]))
    half = torch.load(trained[0] / "runs" / name / f"{2 * BATCH}.pt", weights_only=True)
    assert half["global_step"] == 2 * BATCH and whole["global_step"] == 4 * BATCH
    moved = [k for k, v in whole["agent"].items() if v.dtype == torch.float32 and not torch.equal(v, half["agent"][k])]
    assert len(moved) >= 8  # there was something to get wrong
    lrs = [[float(g["lr"]) for g in s["optimizer"]["param_groups"]] for s in (half, whole)]
    assert lrs[0] != lrs[1]
    for state in (whole, halves):
        assert state.pop("seconds") > 0
    assert set(whole) == {"script", "env_id", "args", "agent_kwargs", "agent", "optimizer", "global_step",
                          "best_return", "ranks"}  # fmt: skip
    assert set(whole["ranks"][0]) == {"rng", "envs", "episodes"} and whole["ranks"][0]["envs"]["episode"].sum() > 0
    assert sum(map(len, whole["ranks"][0]["episodes"]["window"])) == 8  # two of each env, the least that makes 5
    same(whole, halves)
    ours, theirs = trained[1][name]["metrics"], resumed[1][name]["metrics"]
    same({k: v for k, v in ours.items() if k != "charts/SPS"}, {k: v for k, v in theirs.items() if k != "charts/SPS"})


@pytest.mark.parametrize("name", RUNS)
def test_each_optimizer_has_its_moments(trained, name):
    """H4: actor's and critic's, every parameter of both."""
    state = torch.load(trained[0] / "runs" / name / f"{2 * BATCH}.pt", weights_only=True)["optimizer"]
    groups = [g["params"] for g in state["param_groups"]]
    assert len(groups) == 2 and all(groups)
    for index in sum(groups, []):
        assert state["state"][index]["step"] == 4 and state["state"][index]["exp_avg_sq"].sum() > 0


@pytest.mark.parametrize("name", RUNS)
def test_agent_in_a_new_process_acts_as_the_trained_one(trained, name):
    """H3: parameters and normaliser statistics in one file."""
    new = zygote().run(trained[0], "driver:load_and_act", checkpoint=f"runs/{name}/last.pt")
    assert torch.equal(new["actions"], trained[1][name]["actions"]) and new["actions"].unique().numel() > 60
    for key, value in trained[1][name]["agent"].items():
        assert torch.equal(value, new["values"][key]) and value.dtype == new["values"][key].dtype, key
    assert new["values"]["obs_rms.count"] == 4 * BATCH and (new["values"]["obs_rms.var"] != 1).all()


def test_metrics_keep_one_step_axis(trained, resumed, runs):
    """Rows that the resumed run plays again are dropped; a half-written last row too."""
    axis = [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert steps(trained[0] / "runs" / "linear") == axis and steps(resumed[0] / "runs" / "linear") == axis
    with open(runs / "linear/metrics.jsonl", "a") as file:
        file.write('{"global_step": 128, "sec')
    command_line("--resume", f"runs/linear/{3 * BATCH}.pt")
    assert steps(runs / "linear") == axis
    rows = [json.loads(line)["seconds"] for line in (runs / "linear/metrics.jsonl").read_text().splitlines()]
    assert rows == sorted(rows)


def test_env_without_state_is_reset_on_other_episodes(trained, runs):
    """A simulator that cannot tell its state: another seed than at the beginning, the window begins anew."""
    driver.make.seeds.clear()
    edit(runs / "linear/last.pt", lambda s: s["ranks"][0].update(envs=None))
    argv = ["--resume", "runs/linear/last.pt", "--total-timesteps", str(5 * BATCH), "--env-kwargs", "exact=False"]
    command_line(*argv)
    assert driver.make.seeds != trained[1]["linear"]["seeds"]
    state = checkpoint.load(runs / "linear/last.pt")
    assert state["global_step"] == 5 * BATCH and state["ranks"][0]["envs"] is None
    before = checkpoint.load(trained[0] / "runs/linear/last.pt")["ranks"][0]["episodes"]
    assert state["ranks"][0]["episodes"]["episodes"] > before["episodes"] > 0
    windows = [[length for _, length in env] for env in state["ranks"][0]["episodes"]["window"]]
    # a rollout of 8 steps, in which the episode that ran across the reset would have ended
    assert [len(lengths) for lengths in windows] == [1] * 4 and all(5 <= lengths[0] <= 8 for lengths in windows)


# ---- what a resumed run takes from the command line ----


def test_changed_flags_take_effect(runs):
    command_line("--resume", "runs/adaptive/last.pt", "--learning-rate", "1e-5", "--weight-decay", "0.25",
                 "--total-timesteps", str(5 * BATCH), "--lr-schedule", "constant")  # fmt: skip
    state = checkpoint.load(runs / "adaptive/last.pt")
    assert state["global_step"] == 5 * BATCH
    actor, critic = state["optimizer"]["param_groups"]
    assert float(actor["lr"]) == pytest.approx(1e-5) and actor["weight_decay"] == critic["weight_decay"] == 0.25
    assert float(critic["lr"]) == pytest.approx(1e-3)  # the checkpoint's argument, not what the schedule had made of it
    assert state["args"]["learning_rate"] == 1e-5
    assert state["args"]["env_kwargs"] == ("asymmetric=True",)  # kept from the checkpoint
    assert json.loads((runs / "adaptive/args.json").read_text())["weight_decay"] == 0.25


@pytest.mark.parametrize("argv, kept", [
    ([], [True, True]), (["--learning-rate", "2e-4"], [False, True]),
    (["--critic-learning-rate", "2e-4"], [True, False]),
])  # fmt: skip
def test_adaptive_schedule_goes_on_from_its_learning_rates(runs, argv, kept):
    """But for those whose argument was changed; a KL between half and twice the threshold moves none."""
    before = checkpoint.load(runs / "adaptive/last.pt")["optimizer"]["param_groups"]
    assert float(before[0]["lr"]) != pytest.approx(3e-4) and float(before[1]["lr"]) != pytest.approx(1e-3)
    quiet = ["--kl-threshold", "1e9", "--kl-interval", "epoch", "--max-lr", "1", "--update-epochs", "1"]
    command_line("--resume", "runs/adaptive/last.pt", "--total-timesteps", str(5 * BATCH), *quiet, *argv)
    after = checkpoint.load(runs / "adaptive/last.pt")["optimizer"]["param_groups"]  # times 1.5, once
    expected = [1.5 * (float(g["lr"]) if keep else 2e-4) for g, keep in zip(before, kept, strict=True)]
    assert [float(g["lr"]) for g in after] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["linear", "adaptive"])
def test_constant_schedule_takes_the_rate_that_is_asked_for(runs, name):
    """Also where it is what the checkpoint's arguments say: what is left of it there is not what was meant."""
    rate = checkpoint.load(runs / f"{name}/last.pt")["args"]["learning_rate"]
    argv = ["--total-timesteps", str(5 * BATCH), "--lr-schedule", "constant", "--learning-rate", str(rate)]
    log = command_line("--resume", f"runs/{name}/last.pt", *argv)
    assert log["charts/learning_rate"] == pytest.approx(rate)


def test_linear_schedule_follows_the_extended_total(runs):
    command_line("--resume", "runs/linear/last.pt", "--total-timesteps", str(8 * BATCH))
    rows = [json.loads(line) for line in (runs / "linear/metrics.jsonl").read_text().splitlines()]
    lrs = [row["charts/learning_rate"] for row in rows]
    assert lrs == pytest.approx([3e-4 * (1 - i / 4) for i in range(4)] + [3e-4 * (1 - i / 8) for i in range(4, 8)])


def test_finished_run_says_so(runs, capsys):
    before = checkpoint.load(runs / "linear/last.pt")
    command_line("--resume", "runs/linear/last.pt")
    assert "nothing left to do" in capsys.readouterr().out
    same(before, checkpoint.load(runs / "linear/last.pt"))


def test_resume_auto(runs):
    """Fresh where there is no run; else the newest file that can be read."""
    fresh = ["--env-id", "toy/Linear", "--num-envs", "4", "--num-steps", "8", "--num-minibatches", "2", "--device",
             "cpu", "--hidden-sizes", "8", "--torch-threads", "1", "--run-name", "new", "--resume", "auto"]  # fmt: skip
    command_line(*fresh, "--total-timesteps", str(2 * BATCH), "--save-interval", "1")
    assert steps(runs / "new") == [BATCH, 2 * BATCH]
    assert checkpoint.load(runs / "new/last.pt")["args"]["resume"] is None
    command_line("--run-name", "new", "--resume", "auto", "--total-timesteps", str(3 * BATCH))
    assert steps(runs / "new") == [BATCH, 2 * BATCH, 3 * BATCH]

    for age, name in enumerate(["last.pt", "96.pt", "64.pt", "32.pt"]):
        os.utime(runs / "new" / name, (time.time() - age, time.time() - age))
    assert checkpoint.newest(runs / "new") == runs / "new/last.pt"
    data = (runs / "new/last.pt").read_bytes()
    (runs / "new/last.pt").write_bytes(data[: len(data) // 2])
    (runs / "new/96.pt").write_bytes(b"")
    assert checkpoint.newest(runs / "new") == runs / "new/64.pt"
    command_line("--run-name", "new", "--resume", "auto", "--total-timesteps", str(4 * BATCH))
    assert steps(runs / "new") == [BATCH, 2 * BATCH, 3 * BATCH, 4 * BATCH]
    assert checkpoint.load(runs / "new/last.pt")["global_step"] == 4 * BATCH


def test_resume_auto_when_killed_between_best_and_last(runs):
    """best.pt can be half a minute older than the first last.pt: a restarted job must not end in a dead end."""
    for path in (runs / "linear").glob("*.pt"):
        if path.name != "best.pt":
            path.unlink()
    assert (runs / "linear/best.pt").exists()
    command_line("--run-name", "linear", "--resume", "auto", "--env-id", "toy/Linear", "--num-envs", "4",
                 "--num-steps", "8", "--num-minibatches", "2", "--hidden-sizes", "8", "8", "--device", "cpu",
                 "--torch-threads", "1", "--total-timesteps", str(4 * BATCH))  # fmt: skip
    assert checkpoint.load(runs / "linear/last.pt")["global_step"] == 4 * BATCH


def test_fresh_run_does_not_overwrite_another(runs):
    before = (runs / "linear/last.pt").read_bytes()
    with pytest.raises(InputError, match="runs/linear already holds a run"):
        ppo_continuous.main(ppo_continuous.Args(**driver.SMALL, run_name="linear", total_timesteps=4 * BATCH))
    assert (runs / "linear/last.pt").read_bytes() == before


def test_copied_run_continues_in_its_own_folder(runs):
    """The folder of the file that was named, not the one whose name is in it."""
    shutil.copytree(runs / "linear", "backup")
    before = hashlib.sha256((runs / "linear/last.pt").read_bytes()).digest()
    command_line("--resume", "backup/last.pt", "--total-timesteps", str(5 * BATCH))
    assert hashlib.sha256((runs / "linear/last.pt").read_bytes()).digest() == before
    assert checkpoint.load("backup/last.pt")["global_step"] == 5 * BATCH


def test_resume_under_another_name_does_not_overwrite_another_run(runs):
    before = (runs / "epoch/last.pt").read_bytes()
    argv = ["--resume", "runs/linear/last.pt", "--run-name", "epoch", "--total-timesteps", str(5 * BATCH)]
    with pytest.raises(InputError, match="runs/epoch already holds a run"):
        command_line(*argv)
    assert (runs / "epoch/last.pt").read_bytes() == before


def test_best_checkpoint_outlives_a_worse_continuation(runs):
    """H42: the mark is in the checkpoint, and so is the window, so that a few short episodes set no new one."""
    edit(runs / "linear/last.pt", lambda s: s.update(best_return=1e6))
    before = hashlib.sha256((runs / "linear/best.pt").read_bytes()).digest()
    command_line("--resume", "runs/linear/last.pt", "--total-timesteps", str(6 * BATCH))
    assert hashlib.sha256((runs / "linear/best.pt").read_bytes()).digest() == before
    assert checkpoint.load(runs / "linear/last.pt")["best_return"] == 1e6
    edit(runs / "linear/last.pt", lambda s: s.update(best_return=-1e6))
    command_line("--resume", "runs/linear/last.pt", "--total-timesteps", str(7 * BATCH))
    assert hashlib.sha256((runs / "linear/best.pt").read_bytes()).digest() != before
    assert -1e6 < checkpoint.load(runs / "linear/best.pt")["best_return"] < 1e3


# ---- refused ----


@pytest.mark.parametrize("argv, words", [
    (["--hidden-sizes", "16", "8"], ["--hidden-sizes (16, 8)", "(8, 8)", "cannot change"]),
    (["--activation", "tanh"], ["--activation tanh", "elu"]),
    (["--no-norm-value"], ["--norm-value False", "True"]),
    (["--no-fixed-sigma"], ["--fixed-sigma False", "True"]),
    (["--critic-hidden-sizes", "4"], ["--critic-hidden-sizes (4,)", "None"]),
    (["--env-kwargs", "asymmetric=True"], ["critic_obs_dim 3", "4"]),
])  # fmt: skip
def test_another_network_is_refused(runs, argv, words):
    before = (runs / "linear/last.pt").read_bytes()
    with pytest.raises(InputError) as error:
        command_line("--resume", "runs/linear/last.pt", "--total-timesteps", str(5 * BATCH), *argv)
    assert all(word in str(error.value) for word in words), error.value
    assert (runs / "linear/last.pt").read_bytes() == before


@pytest.mark.parametrize("change, words", [
    (lambda s: s.update(script="ppo_discrete"), ["written by ppo_discrete.py", "ppo_continuous.py"]),
    (lambda s: s.update(env_id="envpool/Ant-v5"), ["is of envpool/Ant-v5", "toy/Linear"]),
    (lambda s: s["agent_kwargs"].update(action_low=[-3.0, -3.0]), ["action_low [-3.0, -3.0]"]),
    (lambda s: s.pop("script"), ["no 'script' entry"]),
])  # fmt: skip
def test_foreign_checkpoint_is_refused(runs, change, words):
    edit(runs / "linear/last.pt", change)
    for argv in (["--resume", "runs/linear/last.pt", "--total-timesteps", str(5 * BATCH)],
                 ["--play", "--checkpoint", "runs/linear/last.pt"]):  # fmt: skip
        with pytest.raises(InputError) as error:
            command_line(*argv)
        assert all(word in str(error.value) for word in words), error.value


class Payload:
    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("write", [
    lambda obj, path: torch.save({"script": "ppo_continuous", "agent": obj}, path),
    lambda obj, path: torch.save(obj, path),
    lambda obj, path: torch.save({"script": obj}, path, _use_new_zipfile_serialization=False),
    lambda obj, path: path.write_bytes(pickle.dumps({"script": obj})),
])  # fmt: skip
def test_pickled_code_is_refused_and_not_executed(tmp_path, write):
    write(Payload(str(tmp_path / "executed")), tmp_path / "evil.pt")
    for argv in (["--resume", "evil.pt"], ["--play", "--checkpoint", "evil.pt"]):
        with pytest.raises(InputError, match="evil.pt: holds pickled code or is damaged"):
            command_line(*argv)
    assert checkpoint.newest(tmp_path) is None
    assert not (tmp_path / "executed").exists()
    pickle.loads(pickle.dumps(Payload(str(tmp_path / "executed"))))
    assert (tmp_path / "executed").exists()  # it would have been


def test_missing_and_damaged_files_are_one_error(runs):
    with pytest.raises(InputError, match="runs/linear/none.pt: no such file"):
        checkpoint.load(runs / "linear/none.pt")
    with pytest.raises(InputError):
        checkpoint.load(runs / "linear")  # a folder
    data, generator = (runs / "linear/last.pt").read_bytes(), np.random.default_rng(0)
    damaged = [data[:n] for n in (0, 1, 2, 10, 100, 1000, len(data) // 2, len(data) - 1)]
    damaged += [data[:n] for n in generator.integers(0, len(data), 30)]
    damaged += [b"\x80" * 300, b"no checkpoint\n", b"PK\x03\x04" + bytes(100)]
    for content in damaged:
        (runs / "linear/damaged.pt").write_bytes(content)
        with pytest.raises(InputError):
            checkpoint.load(runs / "linear/damaged.pt")


def test_random_bytes_in_a_checkpoint_raise_nothing_else(runs):
    data, generator = (runs / "linear/last.pt").read_bytes(), np.random.default_rng(1)
    refused = 0
    for _ in range(150):
        content = bytearray(data)
        for i in generator.integers(0, len(data), 20):
            content[i] = generator.integers(256)
        (runs / "linear/damaged.pt").write_bytes(content)
        try:
            checkpoint.load(runs / "linear/damaged.pt")
        except InputError:
            refused += 1
    assert refused > 20


def test_loads_without_running_code(trained):
    """H9: tensors and plain data only, whatever the run has written."""
    files = list((trained[0] / "runs").glob("*/*.pt"))
    assert len(files) == 3 * 6
    for path in files:
        state = torch.load(path, weights_only=True, map_location="cpu")
        assert type(state["best_return"]) is float and type(state["global_step"]) is int
        assert state["args"]["hidden_sizes"] == (8, 8) and state["ranks"][0]["rng"]["torch"].dtype == torch.uint8


# ---- crashes ----


def test_failing_write_keeps_the_last_good_file(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"script": "x", "n": torch.arange(1000)})
    good, write = path.read_bytes(), torch.save

    def full_disk(state, file):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(path, {"script": "x", "n": torch.zeros(1000)})
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["last.pt"]

    def interrupted(state, file):
        write(state, file)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"script": "x", "n": torch.zeros(1000)})
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["last.pt"]
    monkeypatch.setattr(torch, "save", write)
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError):
        checkpoint.save(path, {"script": "x", "n": torch.zeros(1000)})
    assert path.read_bytes() == good and os.listdir(tmp_path) == ["last.pt"]


def test_file_is_flushed_before_it_gets_its_name(tmp_path, monkeypatch):
    """A power cut after the rename must find the contents on the disk: fsync, rename, fsync of the folder."""
    calls, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.path.isdir(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b)))
    checkpoint.save(tmp_path / "last.pt", {"script": "x"})
    assert calls == [False, "rename", True]


def test_kill_at_any_moment(tmp_path):
    """20 times SIGKILL, restarted as a scheduler would; what is there under a final name is always whole."""
    argv = ["--run-name", "killed", "--resume", "auto", "--env-id", "toy/Linear", "--num-envs", "4", "--num-steps", "2",
            "--num-minibatches", "2", "--update-epochs", "1", "--hidden-sizes", "64", "64", "--device", "cpu",
            "--torch-threads", "1", "--save-interval", "1", "--total-timesteps", "1e9"]  # fmt: skip
    generator, run, last_step, during_save = random.Random(0), tmp_path / "runs/killed", 0, 0
    for _ in range(20):
        process, end = zygote().start(tmp_path, "driver:command", argv=argv), time.monotonic() + 30
        while max(numbered(run), default=0) <= last_step:  # until it has begun to save
            assert process.server.ask({"poll": process.pid}) is None and time.monotonic() < end, process.stderr
            time.sleep(0.005)
        time.sleep(generator.uniform(0, 0.1))
        process.kill(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert process.stderr == "", process.stderr
        unfinished = list(run.glob(".*.tmp"))
        during_save += bool(unfinished)
        for path in unfinished:
            path.unlink()
        newest = checkpoint.newest(run)
        assert newest is not None
        step = checkpoint.load(newest)["global_step"]
        assert step > last_step, "a resumed run went back"
        for path in run.glob("*.pt"):
            checkpoint.load(path)
        assert step == max(numbered(run))
        for old in numbered(run):
            if old < step:
                (run / f"{old}.pt").unlink()
        last_step = step
    assert during_save >= 2, "no kill hit a save"
    process = zygote().start(tmp_path, "driver:command", argv=[*argv[:-1], str(last_step + 16)])
    assert process.wait() == 0 and checkpoint.load(run / "last.pt")["global_step"] == last_step + 16
    assert steps(run) == list(range(8, last_step + 17, 8))


def numbered(run: Path) -> list[int]:
    return [int(path.stem) for path in run.glob("*.pt") if path.stem.isdigit()]


# ---- a clean stop ----

FOREVER = ["--env-id", "toy/Linear", "--num-envs", "4", "--num-steps", "8", "--num-minibatches", "2", "--hidden-sizes",
           "8", "8", "--device", "cpu", "--torch-threads", "1", "--run-name", "stopped", "--total-timesteps",
           "1e9"]  # fmt: skip


def wait_for(condition, process: driver.Process) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, process.stderr + process.stdout
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stop_signal_saves_and_exits_with_status_0(tmp_path, number):
    process = zygote().start(tmp_path, "driver:command", argv=[*FOREVER, "--env-kwargs", "slow=0.001"])
    run = tmp_path / "runs/stopped"
    wait_for(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size, process)
    process.kill(number)
    assert process.wait() == 0
    assert "stopping after this iteration, then saving" in process.stderr and "Traceback" not in process.stderr
    step = checkpoint.load(run / "last.pt")["global_step"]
    assert step == steps(run)[-1] and f"stopped at global_step={step}: interrupted" in process.stdout
    assert "runs/stopped/last.pt" in process.stdout
    more = zygote().start(tmp_path, "driver:command", argv=["--resume", "auto", "--run-name", "stopped",
                          "--total-timesteps", str(step + BATCH)])  # fmt: skip
    assert more.wait() == 0 and checkpoint.load(run / "last.pt")["global_step"] == step + BATCH


def test_second_ctrl_c_stops_at_once(tmp_path):
    """An iteration takes 8 * 5 s here."""
    process = zygote().start(tmp_path, "driver:command", argv=[*FOREVER, "--env-kwargs", "slow=5"])
    wait_for((tmp_path / "runs/stopped/metrics.jsonl").exists, process)
    time.sleep(0.3)
    process.kill(signal.SIGINT)
    wait_for(lambda: "Ctrl-C again" in process.stderr, process)
    process.kill(signal.SIGTERM)  # a second SIGTERM changes nothing
    time.sleep(0.3)
    assert process.server.ask({"poll": process.pid}) is None
    process.kill(signal.SIGINT)
    start = time.monotonic()
    assert process.wait() == 130 and time.monotonic() - start < 2
    assert "Traceback" not in process.stderr


def test_handlers_are_given_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    ppo_continuous.main(ppo_continuous.Args(**driver.SMALL, total_timesteps=2 * BATCH, run_name="handlers"))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before
