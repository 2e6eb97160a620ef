"""From the command line to Args, and from an error a user can mend to one line and exit status 2."""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro

from common import checkpoint
from common.errors import InputError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


def run(main: Callable[[Any], Any], args_type: type) -> None:
    """Parse sys.argv into args_type and call main; a checkpoint that is resumed or played gives the defaults."""
    name = Path(sys.argv[0]).name
    try:
        main(parse(args_type, sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except (InputError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in DISK_ERRORS:
            raise
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(2)  # another rank may wait in a collective that will never be complete
        sys.exit(2)


def parse(args_type: type, argv: list[str]) -> Any:
    """Args from a command line. Raises InputError with one line where it cannot be read."""
    argv = old_spellings(args_type, argv)
    given = {name: _given(argv, name) for name in ("resume", "checkpoint", "run_name")}
    path = resume_path(given["resume"], given["run_name"])
    if "--play" in argv:
        path = given["checkpoint"]
    if path is None:
        return _tyro(args_type, argv, None)
    # The file's own argument values become the defaults, so that only what is on this command line differs from it.
    state = checkpoint.load_for(sys.modules[args_type.__module__].SCRIPT, path)
    saved = checkpoint.saved_args(path, state, args_type, **given, play="--play" in argv)
    return _tyro(args_type, argv, saved)


def _given(argv: list[str], name: str) -> str | None:
    """The value that the command line gives a flag."""
    flags = [token.replace("-", "_") == f"__{name}" for token in argv]
    return argv[flags.index(True) + 1] if any(flags[:-1]) else None


def resume_path(resume: str | None, run_name: str | None) -> Path | None:
    """The checkpoint to continue from, or None for a fresh start. Raises InputError if it cannot be told."""
    if resume is None:
        return None
    if resume == "auto":
        if not run_name:
            raise InputError("--resume auto needs --run-name NAME, the run in runs/NAME to continue")
        return checkpoint.newest(Path("runs") / run_name)
    return Path(resume)


def old_spellings(args_type: type, argv: list[str]) -> list[str]:
    """Accept what tyro refuses: `--flag True` and `--flag=False` for booleans, 1e6 for whole numbers."""
    hints = typing.get_type_hints(args_type)
    argv = [part for token in argv for part in (token.split("=", 1) if re.match(r"--[\w-]+=", token) else [token])]
    result: list[str] = []
    for token, following in zip(argv, [*argv[1:], ""], strict=False):
        name = token.removeprefix("--").replace("-", "_")
        field = result[-1].removeprefix("--").replace("-", "_") if result and result[-1].startswith("--") else ""
        value = token.lower()
        if hints.get(field) in (bool, bool | None) and value in ("true", "false", "1", "0"):
            if hints[field] is bool:
                result[-1] = f"--{'' if value in ('true', '1') else 'no-'}{field.replace('_', '-')}"
            else:
                result.append(str(value in ("true", "1")))
        elif hints.get(field) in (int, int | None) and re.fullmatch(r"(\d+\.?\d*|\.\d+)(e\+?\d+)?", value):
            whole = not value.isdigit() and float(value).is_integer()
            result.append(str(int(float(value))) if whole else token)
        elif token.startswith("--") and hints.get(name.removeprefix("no_")) == bool | None:
            result.append(f"--{name.removeprefix('no_').replace('_', '-')}")
            if following.lower() not in ("true", "false", "1", "0", "none"):
                result.append(str(not name.startswith("no_")))
        else:
            result.append(token)
    return result


def _tyro(args_type: type, argv: list[str], default: Any) -> Any:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(args_type, args=argv, default=default)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        # tyro's box of several lines as one: without frame (Unicode or ASCII), headings and the help text of the flag.
        text = re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─┌┐└┘]+|(?m:^[|+]| *[|+]$)|-{3,}", " ", printed.getvalue())
        text = re.split(r" For full helptext| Argument helptext", " ".join(text.split()))[0]
        headings = r"-*(Value error|Parsing error|Invalid choice|Missing argument|Unrecognized options(?= Un))"
        text = re.sub(rf"^[-+ ]*({headings} )*(Error parsing Args: )?", "", text)
        raise InputError(f"{text} (see --help)") from None


class StopSignal:
    """Ctrl-C and SIGTERM ask for a clean stop after the current iteration; a second Ctrl-C stops at once."""

    def __init__(self):
        self.requested = False
        self._previous = {}

    def __enter__(self) -> "StopSignal":
        with contextlib.suppress(ValueError):  # not in the main thread: the caller keeps its own handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            os._exit(130)
        self.requested = True
        print("\nstopping after this iteration, then saving (Ctrl-C again stops at once)", file=sys.stderr, flush=True)

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
