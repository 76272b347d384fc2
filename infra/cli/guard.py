"""A command that joins Ray as a driver, with a process beside it that outlives it.

A driver whose Ray has died is either ended by it from within C++ (no exception, no `finally`, a dump on standard error)
or goes on waiting for actors that nobody will start again. So a guarded command works in a child. The parent passes
signals on and watches; it promises:
- a command that comes to an end of its own, however, ends with its own exit code and words, and nothing is added;
- one that is ended from outside (by Ray, or by kill -9) is followed by the clean-up, and by one line that says why;
- one whose embedded service is gone for `GONE_S` is ended, and the same follows;
- the child ends, cleaning up by itself, when the parent is killed.

What the child writes to standard error itself is shown; what C++ libraries write there goes to a file, named in that
one line. The child has a process group of its own, so that the terminal's Ctrl-C reaches it once, by the parent.
Fork before the first thread: guard a command, not a part of one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import click

from odradek.infra.cli.context import Context
from odradek.infra.errors import InfraError, StackError
from odradek.infra.stack import processes
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import stack_id

LOOK_S = 2.0
"""Seconds between two looks at the services. Longer delays the end of a command that can't go on."""
GONE_S = 5.0
"""Seconds that a service may be gone before the command is ended. Too low ends one whose service is being replaced."""

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
SAID = "driver.log"
"""In the data folder's `ray`: what libraries said on standard error before the command was ended."""

_ENDED = b"."
"""What the child sends when the command came to an end of its own."""

Watched = Callable[[], Mapping[str, str]]
"""By start of a service why it is gone; empty: it is not. A service that is started again has another name."""


class CommandLost(StackError):
    """The command could not come to an end of its own: Ray, or another service that it needs, has died."""


def guarded(function: Callable[..., None]) -> Callable[..., None]:
    """For a command's function, beneath `command_options`. What it started is stopped if it is lost, unless it was
    asked to `keep` it, or the services ran before."""

    @functools.wraps(function)
    def wrapped(context: Context, *args: Any, **options: Any) -> None:
        from odradek.infra.config.services import stack_of

        stack = stack_of(context.config)
        leave = bool(options.get("keep")) or bool(processes.marked(f"{stack_id(stack.data)}/"))
        run_guarded(
            lambda: function(context, *args, **options),
            lambda how: _clean_up(context, stack, how, leave=leave),
            stack.watched,
            stack.data / "ray",
        )

    return wrapped


def run_guarded(
    work: Callable[[], None], on_lost: Callable[[str], str], watched: Watched = dict, folder: Path = Path()
) -> None:
    """Run `work` in a child. In the parent this raises: the child's exit code, or `CommandLost` with what `on_lost`
    returned after cleaning up."""
    sys.stdout.flush()
    sys.stderr.flush()
    stale = _starts(watched)
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
                _work(work)
            finally:
                with suppress(BrokenPipeError):  # nobody waits any more
                    os.write(writing, _ENDED)
            return
        os.close(writing)
        for number in PASSED_ON:
            signal.signal(number, functools.partial(_pass_on, child))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        gone = _watch(reading, watched, stale)
        if gone:
            os.kill(child, signal.SIGKILL)
        ended = not gone and os.read(reading, 1) == _ENDED
        _, status = os.waitpid(child, 0)
        os.close(reading)
        code = os.waitstatus_to_exitcode(status)
        if ended:
            raise click.exceptions.Exit(code if code >= 0 else 128 - code)
        how = gone or f"ended from outside by {f'signal {-code}' if code < 0 else f'exit code {code}'}{_why(watched)}"
        raise CommandLost(on_lost(f"{how}{_kept(said, folder)}"))


def _work(work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "ray":
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CommandLost(f"Ray failed under this command ({first}); odradek status says more") from error


def _starts(watched: Watched) -> frozenset[str]:
    """What was started before the command. It may be long dead, and the command about to start it again."""
    with suppress(InfraError):
        return frozenset(watched())
    return frozenset()


def _watch(reading: int, watched: Watched, stale: frozenset[str]) -> str:
    """Until the child has something to say or is dead (then empty), or a service has been gone for `GONE_S` (why). One
    that was started since counts from its start, a `stale` one from when it was first seen to live."""
    seen: set[str] = set()
    since: float | None = None
    while not select.select([reading], [], [], LOOK_S)[0]:
        try:
            looks = watched()
        except InfraError:
            continue  # nobody can say: the command itself will
        seen = {start for start in looks if start in seen or start not in stale or not looks[start]}
        gone = [why for start, why in looks.items() if why and start in seen]
        since = (since or time.monotonic()) if gone else None
        if since is not None and time.monotonic() - since >= GONE_S:
            return "; ".join(gone)
    return ""


def _why(watched: Watched) -> str:
    """What is gone, where the command fell before anybody had seen that for long enough."""
    with suppress(InfraError):
        found = [why for why in watched().values() if why]
        return f" ({'; '.join(found)})" if found else ""
    return ""


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


def _clean_up(context: Context, stack: Stack, how: str, *, leave: bool) -> str:
    """Stop what the lost command had started; returns its one line."""
    if leave:
        return f"{how}: the command was ended; odradek status says what runs, odradek up starts what is missing"
    context.say(f"{how}; stopping what the command had started")
    try:
        stack.down(context.progress)
    except InfraError as error:
        return f"{how}: the command was ended, and not everything that it had started could be stopped: {error}"
    return f"{how}: the command was ended and what it had started is stopped"
