"""From the command line to Args, and from an error a user can mend to one line and exit status 2."""

import contextlib
import dataclasses
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


def run(main: Callable[[Any], Any], args_type: type) -> None:
    """Parse sys.argv into args_type and call main; a checkpoint that is resumed or played gives the defaults."""
    name = Path(sys.argv[0]).name
    try:
        main(parse(args_type, sys.argv[1:]))
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            os._exit(2)  # another rank may wait in a collective that will never be complete
        sys.exit(2)


def parse(args_type: type, argv: list[str]) -> Any:
    """Args from a command line. Raises InputError with one line where it cannot be read."""
    argv = old_spellings(args_type, argv)
    args = _tyro(args_type, argv, None)
    path = resume_path(args)
    if path is None:
        return args
    saved = checkpoint.load(path).get("args", {})
    names = {f.name for f in dataclasses.fields(args_type)} - {"resume", "checkpoint", "play"}
    # The file's own argument values become the defaults, so that only what is on this command line differs from it.
    return _tyro(args_type, argv, args_type(**{k: v for k, v in saved.items() if k in names}))


def resume_path(args: Any) -> Path | None:
    """The checkpoint that these Args start from, or None for a fresh start. Raises InputError if it cannot be told."""
    if getattr(args, "play", False):
        return Path(args.checkpoint)
    if args.resume is None:
        return None
    if args.resume == "auto":
        if not args.run_name:
            raise InputError("--resume auto needs --run-name NAME, the run in runs/NAME to continue")
        return checkpoint.newest(Path("runs") / args.run_name)
    return Path(args.resume)


def old_spellings(args_type: type, argv: list[str]) -> list[str]:
    """Accept `--flag True`, `--flag=False` for booleans and 1e6 for whole numbers, which tyro itself refuses."""
    hints = typing.get_type_hints(args_type)
    argv = [part for token in argv for part in (token.split("=", 1) if re.match(r"--[\w-]+=", token) else [token])]
    result: list[str] = []
    for token in argv:
        field = result[-1].lstrip("-").replace("-", "_") if result and result[-1].startswith("--") else ""
        if hints.get(field) in (bool, bool | None) and token.lower() in ("true", "false", "1", "0"):
            result[-1] = f"--{'' if token.lower() in ('true', '1') else 'no-'}{field.replace('_', '-')}"
        elif hints.get(field) in (int, int | None) and re.fullmatch(
            r"\d[\d_]*(\.0*)?([eE]\+?\d+)?|\d*\.\d+[eE]\+?\d+", token
        ):
            result.append(str(int(float(token))) if float(token).is_integer() else token)
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
        # tyro's box of several lines as one: without frame, headings and the help text of the flag.
        text = " ".join(re.sub(r"\x1b\[[0-9;]*m|[╭╮╰╯│─┌┐└┘]+", " ", printed.getvalue()).split())
        text = re.split(r" For full helptext| Argument helptext| --------", text)[0]
        headings = r"(Value error|Parsing error|Invalid choice|Unrecognized options(?= Un))"
        text = re.sub(rf"^({headings} )*(Error parsing Args: )?", "", text)
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
