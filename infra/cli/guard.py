"""A command that joins Ray as a driver, with a process beside it that outlives it.

Ray ends a driver whose raylet or head has died from within C++: no exception, no `finally`, only a dump on standard
error. So a guarded command works in a child. The parent passes signals on and waits; it promises:
- a command that comes to an end of its own, however, ends with its own exit code and words, and nothing is added;
- one that is ended from outside (by Ray, or by kill -9) is followed by the clean-up, and by one line that says why;
- the child ends, cleaning up by itself, when the parent is killed.

What the child writes to standard error itself is shown; what C++ libraries write there goes to a file, named in that
one line. The child has a process group of its own, so that the terminal's Ctrl-C reaches it once, by the parent.
Fork before the first thread: guard a command, not a part of one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from odradek.infra.cli.context import Context
from odradek.infra.errors import InfraError, StackError
from odradek.infra.stack import processes
from odradek.infra.stack.state import stack_id

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
SAID = "driver.log"
"""In the data folder's `ray`: what libraries said on standard error before the command was ended."""

_ENDED = b"."
"""What the child sends when the command came to an end of its own."""


class CommandLost(StackError):
    """The command's process was ended from outside, most likely by Ray, whose head or raylet has died."""


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """For a command's function, beneath `command_options`. What it started is stopped if it is lost, unless it was
    asked to `keep` it, or the services ran before."""

    @functools.wraps(function)
    def wrapped(context: Context, *args: Any, **options: Any) -> None:
        from odradek.infra.config.services import data_dir

        data = data_dir(context.config)
        before = bool(processes.marked(f"{stack_id(data)}/"))

        def on_lost(how: str) -> str:
            return _clean_up(context, how, leave=before or bool(options.get("keep")))

        run_guarded(lambda: function(context, *args, **options), on_lost, data / "ray")

    return wrapped


def run_guarded(work: Callable[[], None], on_lost: Callable[[str], str], folder: Path) -> None:
    """Run `work` in a child. In the parent this raises: the child's exit code, or `CommandLost` with what `on_lost`
    returned after cleaning up."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as said:
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until both know what to do with one
        child = os.fork()
        if child == 0:
            os.close(reading)
            _become_child(parent, said)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            try:
                work()
            finally:
                os.write(writing, _ENDED)
            return
        os.close(writing)
        for number in PASSED_ON:
            signal.signal(number, functools.partial(_pass_on, child))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        _, status = os.waitpid(child, 0)
        ended = os.read(reading, 1) == _ENDED
        os.close(reading)
        code = os.waitstatus_to_exitcode(status)
        if ended:
            raise click.exceptions.Exit(code if code >= 0 else 128 - code)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise CommandLost(on_lost(f"ended from outside ({how}){_kept(said, folder)}"))


def _become_child(parent: int, said: IO[bytes]) -> None:
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # it may write to the terminal all the same
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(128 + signal.SIGTERM)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace")
    os.dup2(said.fileno(), 2)


def _pass_on(child: int, number: int, _frame: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def _kept(said: IO[bytes], folder: Path) -> str:
    """Keep what libraries said where the service's own logs are, if there is such a place; returns how to say it."""
    said.seek(0, os.SEEK_END)
    if not said.tell() or not folder.is_dir():
        return ""
    said.seek(0)
    path = folder / SAID
    with path.open("wb") as file:
        shutil.copyfileobj(said, file)
    return f", last words in {path}"


def _clean_up(context: Context, how: str, *, leave: bool) -> str:
    """Stop what the lost command started; returns its one line."""
    from odradek.infra.config.services import stack_of

    stack = stack_of(context.config)
    causes = [f"{one.name} is {one.health}: {one.reason}" for one in stack.status() if one.reason]
    cause = "; ".join(causes) or "every service answers"
    if leave:
        return f"the command was {how}; {cause}; odradek status says what runs, odradek up starts what is missing"
    context.say("the command was ended from outside; stopping what it started")
    try:
        stack.down(context.progress)
    except InfraError as error:
        return f"the command was {how}; {cause}; not everything could be stopped: {error}"
    return f"the command was {how}; {cause}; what it had started is stopped"
