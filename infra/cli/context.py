"""What every command shares: options, configuration, output as text or JSON, progress, and how errors reach a person.

A command is a function decorated with `command_options`; it gets a `Context`. It returns what it has to say through
`Context.result` (one JSON value with `--json`, text otherwise) and tells progress on standard error, so that standard
output is always the answer alone.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from odradek.infra.cli.output import answer
from odradek.infra.config.load import Loaded, load
from odradek.infra.errors import AnswerLost
from odradek.infra.shown import clean

EXIT_OK = 0
EXIT_CASE_FAILED = 1
EXIT_USAGE = 2
EXIT_ENVIRONMENT = 3
EXIT_INTERRUPTED = 130

EXIT_CODES = """Exit codes: 0 done; 1 a case failed (a task unsolved, a batch not rebuilt); 2 wrong usage or
configuration; 3 this machine or a service is at fault; 130 interrupted."""

_F = TypeVar("_F", bound=Callable[..., Any])


class CaseFailed(Exception):
    """The command ran, and what it checked does not hold: exit code 1."""

    exit_code = EXIT_CASE_FAILED


class Context:
    """One invocation."""

    def __init__(self, loaded: Loaded, as_json: bool) -> None:
        self.loaded = loaded
        self.config = loaded.config
        self.as_json = as_json
        self._started = time.monotonic()
        self._lock = threading.Lock()

    def result(self, value: object, text: str) -> None:
        """The command's answer: `value` as one JSON document, or `text`, its control characters written out."""
        if self.as_json:
            answer(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")
        elif text:
            answer(clean(text) + "\n")

    def say(self, message: str) -> None:
        """A line of progress, on standard error."""
        with self._lock:
            print(f"[{time.monotonic() - self._started:6.1f} s] {clean(message)}", file=sys.stderr, flush=True)

    def progress(self, component: str, message: str) -> None:
        """The same, in the form that the stack calls."""
        self.say(f"{component}: {message}")


_NO_ROOM = "make room there, or name another folder with --data"
_NO_RIGHT = "this user may not use it so: change its permissions, or name another place"
PLACES = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EROFS: _NO_RIGHT,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
}
"""What to do about a place that takes nothing, wherever it is met first."""


def command_options(function: _F) -> Callable[..., None]:
    """Adds `--json --config --data --set` and passes the `Context` first."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
    @click.option("--config", "file", type=click.Path(path_type=Path), help="Configuration file [./odradek.toml].")
    @click.option("--data", type=click.Path(path_type=Path), help="Data folder [~/.odradek/default].")
    @click.option("--set", "flags", multiple=True, metavar="SECTION.KEY=VALUE", help="One setting; repeatable.")
    @functools.wraps(function)
    def wrapped(
        *args: Any, as_json: bool, file: Path | None, data: Path | None, flags: tuple[str, ...], **kwargs: Any
    ) -> None:
        click.get_current_context().meta["as_json"] = as_json
        function(Context(load(file=file, flags=flags, data=data), as_json), *args, **kwargs)

    return wrapped


class Number(click.FloatRange):
    """A finite number: of NaN every comparison is false, so it would pass any range and then mean anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def given(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Callback of an id that may be shortened to its beginning: all of them begin with nothing."""
    if not value.strip():
        raise click.UsageError(f"{parameter.make_metavar(context)} is empty: say which one")
    return value


def report_failure(error: BaseException, as_json: bool) -> int:
    """Tell a person (or, with --json, a program) what went wrong in one line; returns the exit code."""
    if isinstance(error, click.ClickException):
        message, code = error.format_message(), error.exit_code
        if isinstance(error, click.UsageError) and error.ctx is not None:
            message += f" (see {error.ctx.command_path} --help)"
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        message, code = "interrupted", EXIT_INTERRUPTED
    elif is_expected(error):
        message = str(getattr(error, "user_message", "") or error)
        code = int(getattr(error, "exit_code", EXIT_ENVIRONMENT))
    elif isinstance(error, OSError) and error.errno in PLACES and (error.filename or PLACES[error.errno] == _NO_ROOM):
        where = str(error.filename or "where this command writes")
        message, code = f"{where}: {error.strerror}: {PLACES[error.errno]}", EXIT_ENVIRONMENT
    else:
        log = _write_detail(error)
        message, code = f"unexpected {type(error).__name__}: {_first_line(error)} (details: {log})", EXIT_ENVIRONMENT
    message = " ".join(message.split())
    if as_json and not isinstance(error, AnswerLost):
        with suppress(AnswerLost):
            answer(json.dumps({"error": message, "kind": type(error).__name__, "exit_code": code}) + "\n")
            return code
    with suppress(OSError):  # the exit code still says it
        print(f"odradek: {clean(message)}", file=sys.stderr)
    return code


def is_expected(error: BaseException) -> bool:
    """Whether it was raised on purpose: it says `user_message`, or is of a class in one of our rooms' errors.py."""
    if hasattr(error, "user_message") or isinstance(error, CaseFailed):
        return True
    return any(
        kind.__module__.startswith("odradek.") and kind.__module__.rpartition(".")[2] == "errors"
        for kind in type(error).__mro__
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]


def _write_detail(error: BaseException) -> Path:
    """The whole traceback in a file only its owner reads; errors may quote what a person would not paste."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "odradek"
    path = folder / f"error-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            traceback.print_exception(error, file=file)
    except OSError:
        traceback.print_exception(error)
    return path
