"""What a user types: every mistake is one line and exit status 2, before anything is written."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
import torch

import ppo_continuous
from common import checkpoint, cli

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(p.name for p in ROOT.glob("*.py"))
ENV = "gym/toy_envs:Counter-v0"
SMALL = ["--num-envs", "2", "--num-steps", "8", "--num-minibatches", "2", "--hidden-sizes", "8", "--device", "cpu",
         "--torch-threads", "1", "--update-epochs", "1", "--total-timesteps", "32"]  # fmt: skip
TRAIN = ["--env-id", ENV, *SMALL]


@pytest.fixture(autouse=True)
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with one finished run, runs/base."""
    folder, before = tmp_path_factory.mktemp("cli"), os.getcwd()
    os.chdir(folder)
    ppo_continuous.main(cli.parse(ppo_continuous.Args, [*TRAIN, "--run-name", "base"]))
    os.chdir(before)
    return folder


@pytest.fixture
def base(trained):
    """runs/base in the working folder."""
    shutil.copytree(trained / "runs", "runs")
    return Path("runs/base/last.pt")


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process; returns exit status, stdout and what is left of stderr's lines."""

    def run(*argv: str, main=ppo_continuous.main) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *argv])
        capsys.readouterr()
        try:
            cli.run(main, ppo_continuous.Args)
            status = 0
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, [line for line in err.splitlines() if not line.startswith(("env:", "creating"))]

    return run


def parse(*argv: str) -> ppo_continuous.Args:
    return cli.parse(ppo_continuous.Args, list(argv))


def edit(path: Path, change) -> None:
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


# ---- help ----


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_every_field_with_its_own_docstring(script, tmp_path):
    env = os.environ | {"COLUMNS": "120"}
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and done.stderr == "" and not list(tmp_path.iterdir())
    text = re.sub(r"[│╭╮╰╯─]", " ", done.stdout)
    assert text.split()[0] == "usage:" and "{}" not in text
    text, texts = " ".join(text.split()), []
    source = (ROOT / script).read_text()
    fields = re.findall(r'^    (\w+): [^\n]+\n    """(.+?)"""', source[source.index("class Args") :], re.M | re.S)
    names = {f.name for f in dataclasses.fields(__import__(Path(script).stem).Args)}
    assert {name for name, _ in fields} == names
    for name, doc in fields:
        flag = f"--{name.replace('_', '-')}"
        assert re.search(rf"{flag}[ ,|]", text), flag
        doc = " ".join(doc.split())
        assert " ".join(doc.split()[:4]) in text, (flag, doc)
        texts.append(doc)
    assert len(set(texts)) == len(texts)


# ---- mistakes: one line, exit status 2, nothing written ----

BAD = [
    # what is typed, words that the line has
    (["--env-id", "envpool/Antt-v5"], ["unknown environment envpool/Antt-v5", "Ant-v"]),
    (["--env-id", "HalfCheeta"], ["unknown environment HalfCheeta", "HalfCheetah-v"]),
    (["--env-id", "gym/toy_envs:Countr-v0"], ["Countr"]),
    (["--env-id", "gym/no_such_module:X-v0"], ["no_such_module"]),
    (["--env-id", "brax/ant"], ["brax", "not available"]),
    (["--env-id", "qqqqqqqq"], ["unknown environment qqqqqqqq"]),
    (["--env-id", "gym/CartPole-v1"], ["CartPole-v1", "Discrete", "ppo_discrete.py"]),
    (["--env-id", "gym/toy_envs:Image-v0"], ["(2, 3, 3)", "ppo_discrete.py"]),
    (["--env-id", "gym/toy_envs:TupleObs-v0"], ["Tuple"]),
    (["--env-kwargs", "length"], ["length", "name=value"]),
    (["--env-kwargs", "lenght=3"], ["lenght"]),
    (["--learning-rat", "1e-3"], ["--learning-rat", "--learning-rate"]),
    (["--horizon", "16"], ["--horizon"]),
    (["stray"], ["stray"]),
    (["--activation", "elo"], ["elo", "--activation", "elu"]),
    (["--lr-schedule", "cosine"], ["cosine", "--lr-schedule", "adaptive"]),
    (["--num-envs", "many"], ["many", "--num-envs"]),
    (["--num-steps", "1.5"], ["1.5", "--num-steps"]),
    (["--num-envs"], ["--num-envs"]),
    (["--norm-adv", "maybe"], ["maybe"]),
    (["--num-envs", "0"], ["--num-envs 0", "at least 1"]),
    (["--num-envs", "-3"], ["-3"]),
    (["--num-steps", "0"], ["--num-steps 0", "at least 1"]),
    (["--num-minibatches", "0"], ["--num-minibatches 0", "at least 1"]),
    (["--update-epochs", "0"], ["--update-epochs 0", "at least 1"]),
    (["--total-timesteps", "0"], ["--total-timesteps 0", "at least 1"]),
    (["--seed", "-1"], ["-1"]),
    (["--games-to-track", "0"], ["--games-to-track 0"]),
    (["--torch-threads", "-2"], ["-2"]),
    (["--save-interval", "-1"], ["-1"]),
    (["--num-minibatches", "3"], ["--num-minibatches 3", "num_envs*num_steps = 16", "2 and 4"]),
    (["--num-minibatches", "17"], ["--num-minibatches 17", "16"]),
    (["--total-timesteps", "31"], ["--total-timesteps 31", "32"]),
    (["--gamma", "1.01"], ["--gamma 1.01", "at most 1"]),
    (["--gae-lambda", "-0.1"], ["-0.1"]),
    (["--gamma", "nan"], ["--gamma nan"]),
    (["--learning-rate", "-1"], ["-1"]),
    (["--learning-rate", "nan"], ["--learning-rate nan"]),
    (["--clip-coef", "0"], ["--clip-coef 0", "positive"]),
    (["--max-grad-norm", "0"], ["--max-grad-norm 0", "positive"]),
    (["--min-lr", "1"], ["--min-lr 1.0", "--max-lr"]),
    (["--hidden-sizes", "0"], ["--hidden-sizes (0,)"]),
    (["--critic-hidden-sizes", "8", "0"], ["hidden-sizes (8, 0)"]),
    (["--log-sigma-bounds", "0", "1"], ["--log-sigma-bounds (0.0, 1.0)"]),
    (["--reward-log"], ["--reward-log", "--reward-min"]),
    (["--reward-min", "1", "--reward-max", "1"], ["--reward-min 1.0", "--reward-max"]),
    (["--device", "cuda"], ["--device cuda", "--device cpu"]),
    (["--device", "gpu"], ["--device gpu"]),
    (["--device", "mps"], ["--device mps"]),
    (["--track"], ["pip install wandb"]),
    (["--resume", "auto"], ["--resume auto", "--run-name"]),
    (["--resume", "no/such.pt"], ["no/such.pt", "no such file"]),
    (["--resume", "."], ["checkpoint .: is a directory"]),
    (["--play"], ["--play", "--checkpoint"]),
    (["--play", "--checkpoint", "no/such.pt"], ["no/such.pt", "no such file"]),
    (["--checkpoint", "no/such.pt"], ["--checkpoint no/such.pt", "--play", "--resume"]),
    (["--seed", str(2**63)], [f"--seed {2**63}", f"at most {2**63 - 1}"]),
    (["--torch-threads", "100000"], ["--torch-threads 100000", "at most", "cores"]),
]  # fmt: skip


@pytest.mark.parametrize("argv, words", BAD, ids=[" ".join(argv) for argv, _ in BAD])
def test_mistake_is_one_line(call, monkeypatch, argv, words):
    if "cuda" in argv and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if "--track" in argv:
        monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    status, out, lines = call(*TRAIN, *argv)
    assert status == 2 and out == "" and len(lines) == 1, (status, out, lines)
    assert lines[0].startswith("ppo_continuous.py: ") and all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in lines[0] and len(lines[0]) < 400
    assert not Path("runs").exists()


BAD_FILES = [
    (lambda path: path.write_bytes(path.read_bytes()[:5000]), ["truncated or not a checkpoint"]),
    (lambda path: path.write_bytes(b""), ["truncated or not a checkpoint"]),
    (lambda path: path.write_text("not a checkpoint\n"), ["pickled code or is damaged"]),
    (lambda path: torch.save({"script": "ppo_continuous", "agent": Path("x")}, path), ["pickled code"]),
    (lambda path: torch.save(torch.zeros(3), path), ["not written by one of these scripts"]),
    (lambda path: torch.save({"script": "ppo_continuous"}, path), ["last.pt"]),
    (lambda path: edit(path, lambda s: s.update(script="sac", args=s["args"] | {"tau": 1, "alpha": 2})),
     ["written by sac.py, not by ppo_continuous.py; use sac.py"]),
    (lambda path: edit(path, lambda s: s.update(env_id="envpool/Ant-v5")), ["is of envpool/Ant-v5, not of gym/"]),
    (lambda path: edit(path, lambda s: s["args"].update(no_such_field=1)),
     ["another version of ppo_continuous.py", "no_such_field"]),
    (lambda path: edit(path, lambda s: s["agent"].update(extra=s["agent"].pop("log_sigma"))),
     ["another version of ppo_continuous.py", "extra"]),
]  # fmt: skip


@pytest.mark.parametrize("damage, words", BAD_FILES)
@pytest.mark.parametrize("argv", [["--resume", "runs/base/last.pt", "--total-timesteps", "64"],
                                  ["--play", "--checkpoint", "runs/base/last.pt"]])  # fmt: skip
def test_bad_checkpoint_is_one_line(call, base, damage, words, argv):
    damage(base)
    before = base.read_bytes()
    status, out, lines = call(*argv)
    assert status == 2 and out == "" and len(lines) == 1, (status, out, lines)
    assert all(word in lines[0] for word in ("runs/base/last.pt", *words)), lines[0]
    assert len(lines[0]) < 150 and base.read_bytes() == before


@pytest.mark.parametrize("argv, words", [
    (["--hidden-sizes", "16"], ["--hidden-sizes (16,)", "(8,)"]),
    (["--norm-obs", "False"], ["--norm-obs False", "True"]),
    (["--env-id", "gym/toy_envs:EchoAction-v0"], ["toy_envs:EchoAction-v0", "Counter-v0"]),
    (["--env-id", "gym/CartPole-v1"], ["ppo_discrete.py"]),
    (["--num-minibatches", "5"], ["--num-minibatches 5", "4 and 8"]),
])  # fmt: skip
def test_change_that_a_resumed_run_cannot_make_is_one_line(call, base, argv, words):
    before = base.read_bytes()
    status, out, lines = call("--resume", str(base), "--total-timesteps", "64", *argv)
    assert status == 2 and out == "" and len(lines) == 1, (status, out, lines)
    assert all(word in lines[0] for word in words), lines[0]
    assert base.read_bytes() == before


def test_existing_run_is_not_overwritten(call, base):
    before = base.read_bytes()
    status, _, lines = call(*TRAIN, "--run-name", "base")
    assert status == 2 and len(lines) == 1 and "already holds a run" in lines[0] and "--resume auto" in lines[0]
    assert base.read_bytes() == before


def test_unwritable_run_directory_is_one_line(call):
    Path("runs").write_text("a file")
    status, out, lines = call(*TRAIN)
    assert status == 2 and out == "" and len(lines) == 1 and "runs/" in lines[0] and "cannot be written" in lines[0]
    assert Path("runs").read_text() == "a file"


def test_full_disk_is_one_line(call, monkeypatch):
    """The run ends with what happened, not with a traceback of torch's writer."""

    def full(path, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    status, _, lines = call(*TRAIN, "--run-name", "full")
    assert status == 2 and len(lines) == 1 and "No space left on device" in lines[0]


@pytest.mark.parametrize("env, words", [
    # an episode has 5 steps, its third is not finite: the third step of the run is
    ("NanObs-v0", ["observation of env 0", "step 3", "iteration 1", "runs/bad"]),
    ("NanReward-v0", ["reward of env 0", "step 2", "iteration 1", "runs/bad"]),
])  # fmt: skip
def test_values_that_are_not_finite_are_one_line(call, env, words):
    argv = ["--env-id", f"gym/toy_envs:{env}", *SMALL, "--run-name", "bad", "--save-interval", "1"]
    status, _, lines = call(*argv)
    assert status == 2 and len(lines) == 1 and all(word in lines[0] for word in words), (status, lines)
    assert not list(Path("runs/bad").glob("*.pt"))  # nothing broken is kept


def test_last_good_checkpoint_outlives_values_that_are_not_finite(call):
    """The 21st step is in the third iteration."""
    argv = ["--env-id", "gym/toy_envs:NanReward-v0", *SMALL, "--env-kwargs", "at_step=21", "length=50",
            "--total-timesteps", "160", "--run-name", "late", "--save-interval", "1"]  # fmt: skip
    status, _, lines = call(*argv)
    assert status == 2 and "step 20 (step 4 of iteration 3)" in lines[0]
    state = checkpoint.load("runs/late/last.pt")
    assert state["global_step"] == 32
    assert all(value.isfinite().all() for key, value in state["agent"].items() if key != "action_limit")


def test_mistake_is_told_where_the_terminal_has_no_unicode(tmp_path):
    """tyro then draws its box of errors with other characters."""
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, ROOT / "ppo_continuous.py", "--num-envs", "0"], env=env, text=True,
                          capture_output=True)  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "--num-envs 0: must be" in done.stderr


def test_programming_errors_keep_their_traceback(call):
    """Only what a user can mend is made short."""

    def broken(args):
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        call(*TRAIN, main=broken)


def test_command_in_a_process_of_its_own(base, tmp_path):
    """The same in earnest, side by side: a mistake, a run and an evaluation."""
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    argvs = [[*TRAIN, "--num-minibatches", "3"], [*TRAIN, "--run-name", "new"],
             ["--play", "--checkpoint", str(base), "--num-episodes", "4"]]  # fmt: skip
    processes = [subprocess.Popen([sys.executable, ROOT / "ppo_continuous.py", *argv], env=env, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE) for argv in argvs]  # fmt: skip
    bad, run, play = (process.communicate(timeout=100) for process in processes)
    assert [process.returncode for process in processes] == [2, 0, 0]
    assert bad[0] == "" and bad[1].count("\n") == 1 and "--num-minibatches 3" in bad[1]
    assert "stopped at global_step=32: total_timesteps; runs/new/last.pt" in run[0]
    assert all(line.startswith("env:") for line in run[1].splitlines()), run[1]
    assert play[0].count("\n") == 1 and json.loads(play[0])["episodes"] == 4


# ---- H41: spellings ----


@pytest.mark.parametrize("spelling, value", [
    (["--norm-adv", "False"], False), (["--norm-adv=False"], False), (["--norm_adv", "false"], False),
    (["--norm_adv=0"], False), (["--no-norm-adv"], False), (["--no_norm_adv"], False), (["--norm-adv"], True),
    (["--norm-adv", "True"], True), (["--norm-adv=1"], True), ([], True),
])  # fmt: skip
def test_booleans(spelling, value):
    assert parse(*spelling).norm_adv is value
    assert parse(*spelling, "--seed", "7").seed == 7


@pytest.mark.parametrize("spelling, value", [
    (["--compile"], True), (["--no-compile"], False), (["--compile", "False"], False), (["--compile=True"], True),
    (["--compile", "None"], None), ([], None),
])  # fmt: skip
def test_optional_boolean(spelling, value):
    assert parse(*spelling).compile is value


@pytest.mark.parametrize("text, value", [
    ("1e6", 1_000_000), ("2.5e6", 2_500_000), ("1E6", 1_000_000), ("1e+6", 1_000_000), ("3.0", 3), ("1_000", 1000),
    ("123456789012345678", 123456789012345678), ("9007199254740993", 9007199254740993),
])  # fmt: skip
def test_whole_numbers(text, value):
    assert parse("--total-timesteps", text).total_timesteps == value
    assert parse(f"--total_timesteps={text}").total_timesteps == value
    assert parse("--num-envs", "16", "--save-best-after", text).save_best_after == value


def test_other_values():
    args = parse("--learning-rate", "1e-3", "--critic-learning-rate=None", "--score-to-win=inf", "--reward-min=-2.5",
                 "--hidden-sizes", "64", "32", "--env-kwargs", "a=1", "b=x=y", "--log-sigma-bounds", "-4", "1",
                 "--run-name=True", "--learning_rate", "2e-4")  # fmt: skip
    assert args.learning_rate == 2e-4 and args.critic_learning_rate is None and args.score_to_win == float("inf")
    assert args.reward_min == -2.5 and args.hidden_sizes == (64, 32) and args.log_sigma_bounds == (-4.0, 1.0)
    assert args.env_kwargs == ("a=1", "b=x=y") and args.run_name == "True"


def test_every_boolean_and_whole_number_has_every_spelling():
    hints = typing.get_type_hints(ppo_continuous.Args)
    for name, kind in hints.items():
        flag = f"--{name.replace('_', '-')}"
        if kind is bool and name not in ("play", "reward_log"):
            default = getattr(ppo_continuous.Args(), name)
            for spelling in ([flag, str(not default)], [f"{flag}={not default}"], [f"--{name}", str(not default)]):
                assert getattr(parse(*spelling), name) is not default, spelling
        if kind is int:
            value = getattr(parse("--num-envs", "100", "--num-minibatches", "1", flag, "1e1"), name)
            assert value == 10 and type(value) is int, name


# ---- what was used is written down ----


def test_args_json_has_the_values_used(call):
    status, _, lines = call(*TRAIN, "--run-name", "told", "--norm-adv", "False", "--total-timesteps", "1.6e2",
                            "--learning-rate", "1e-3", "--hidden-sizes", "8", "4")  # fmt: skip
    assert status == 0 and lines == []
    told = json.loads(Path("runs/told/args.json").read_text())
    assert told["norm_adv"] is False and told["total_timesteps"] == 160 and told["learning_rate"] == 1e-3
    assert told["hidden_sizes"] == [8, 4] and told["run_name"] == "told"
    assert set(told) == {f.name for f in dataclasses.fields(ppo_continuous.Args)}
    saved = checkpoint.load("runs/told/last.pt")["args"]
    assert saved | {"resume": None} == dataclasses.asdict(ppo_continuous.Args(**saved))
    assert saved["hidden_sizes"] == (8, 4) and saved["norm_adv"] is False


def test_default_run_name_tells_env_seed_and_time(call):
    status, _, _ = call(*TRAIN, "--seed", "3")
    assert status == 0
    (run,) = Path("runs").iterdir()
    assert "Counter-v0" in run.name and "__3__" in run.name and time.strftime("%Y%m%d") in run.name
    assert not re.search(r"[^\w.-]", run.name), "a character that some file system or tool refuses"
    assert json.loads((run / "args.json").read_text())["run_name"] == run.name


# ---- resume and play from the command line ----


def test_resume_takes_the_arguments_of_the_checkpoint(call, base):
    status, out, lines = call("--resume", str(base), "--total-timesteps", "64", "--gamma", "0.9")
    assert status == 0 and lines == [] and "stopped at global_step=64" in out
    told, before = json.loads(Path("runs/base/args.json").read_text()), vars(parse(*TRAIN, "--run-name", "base"))
    changed = {name for name, value in told.items() if value != json.loads(json.dumps(before[name]))}
    assert changed == {"total_timesteps", "gamma"}
    assert [p.name for p in Path("runs").iterdir()] == ["base"]


def test_resume_auto_starts_and_continues(call):
    argv = [*TRAIN, "--run-name", "auto", "--resume", "auto"]
    assert call(*argv)[0] == 0
    assert call(*argv, "--total-timesteps", "48")[0] == 0
    rows = [json.loads(row)["global_step"] for row in Path("runs/auto/metrics.jsonl").read_text().splitlines()]
    assert rows == [16, 32, 48]


def test_play_prints_one_json_line(call, base):
    before = base.read_bytes()
    status, out, lines = call("--play", "--checkpoint", str(base), "--num-episodes", "6")
    assert status == 0 and lines == [] and out.count("\n") == 1 and out.endswith("\n")
    result = json.loads(out)
    assert set(result) == {"mean", "std", "min", "max", "length", "episodes", "steps", "seconds"}
    assert (result["mean"], result["std"], result["min"], result["max"], result["length"]) == (5, 0, 5, 5, 5)
    assert result["episodes"] == 6 and result["steps"] == 30 and 0 < result["seconds"] < 60
    assert base.read_bytes() == before and [p.name for p in Path("runs").iterdir()] == ["base"]


def test_play_counts_equal_episodes_of_every_env(call):
    """Two envs with episodes of 4 and 3 steps: first come, first served would make short ones count more."""
    argv = ["--env-id", "gym/toy_envs:Alternating-v0", "--env-kwargs", "even=9", "odd=1", *SMALL, "--run-name", "two"]
    assert call(*argv)[0] == 0
    status, out, _ = call("--play", "--checkpoint", "runs/two/last.pt", "--num-episodes", "6")
    result = json.loads(out)
    assert status == 0 and result["episodes"] == 6 and result["mean"] == 5 and result["std"] == 4
    assert result["min"] == 1 and result["max"] == 9 and result["steps"] == 30


@pytest.mark.parametrize("episodes, num_envs", [(1, 2), (5, 2), (7, 4), (6, 4)])
def test_play_plays_as_many_episodes_as_asked(call, base, episodes, num_envs):
    argv = ["--num-episodes", str(episodes), "--num-envs", str(num_envs)]
    status, out, _ = call("--play", "--checkpoint", str(base), *argv)
    assert status == 0 and json.loads(out)["episodes"] == episodes


def test_play_samples_when_asked(call):
    """The reward is the action: of the mean it is the same in every step, of a sample it is not."""
    assert call("--env-id", "gym/toy_envs:EchoAction-v0", *SMALL, "--run-name", "echo")[0] == 0
    spread = []
    for flag in ("--deterministic", "--no-deterministic"):
        _, out, _ = call("--play", "--checkpoint", "runs/echo/last.pt", "--num-episodes", "8", flag)
        spread.append(json.loads(out)["std"])
    assert spread[0] < 1e-5 and spread[1] > 0.1


def test_wandb_is_not_imported_without_track(call, monkeypatch):
    """H37."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # an import would raise
    assert call(*TRAIN)[0] == 0
