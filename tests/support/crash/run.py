"""A run: lives of one deployment, one after the other, each in a process of its own, and what all of them left.

A life ends with the run, or with Ray: a driver whose raylet or head was killed can't go on, so its process dies at once
(as a guarded command's does) and the next one comes up on the same data folder. Progress and words of a life arrive
over a pipe, so what it has done is known however it ends. A life that ends in any other way ends the run with an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from odradek.infra.stack.testing import stop_as_on_interrupt
from support.crash.life import live
from support.crash.load import Load
from support.crash.outcome import Carried, Outcome, Settings

Say = Callable[[str], None]
END_S = 240.0
"""Seconds for an interrupted life to stop what it started."""
PR_SET_PDEATHSIG = 1


def run(settings: Settings, say: Say = print, told: Callable[[Outcome], None] = lambda _so_far: None) -> Outcome:
    """Start everything, hurt it, let it rest, stop everything, look. `told` is given the outcome after every round."""
    began, carried = time.monotonic(), Carried(Load(settings.seed))
    told(carried.outcome)
    while not carried.outcome.checked:
        done = carried.round
        for news in _life(settings, carried):
            if isinstance(news, str):
                say(news)
            else:
                carried = news
                carried.outcome.seconds = time.monotonic() - began
                told(carried.outcome)
        if not carried.outcome.checked:
            assert carried.round > done, "a life that ends before the run has ended with a round of its own"
            say(f"Ray and this driver are dead; coming up again on {settings.data}")
    return carried.outcome


def _life(settings: Settings, carried: Carried) -> Iterator[str | Carried]:
    """One life's words and progress. Raises RuntimeError with its traceback where it failed."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe(duplex=False)
    process = spawning.Process(target=_child, args=(settings, carried, theirs), name="life")
    process.start()
    theirs.close()
    try:
        while True:
            try:
                news = ours.recv()
            except EOFError:
                break
            if isinstance(news, _Failed):
                raise RuntimeError(news.how)
            yield news
    finally:
        ours.close()
        if process.is_alive():
            process.terminate()
        process.join(END_S)


@dataclass(frozen=True)
class _Failed:
    """How a life failed."""

    how: str


def _child(settings: Settings, carried: Carried, parent: Connection) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.setpgid(0, 0)  # Ctrl-C reaches it by its parent alone
    stop_as_on_interrupt()

    def tell(news: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more, and what is up must be stopped all the same
            parent.send(news)

    try:
        live(settings, carried, tell)
    except KeyboardInterrupt:
        os._exit(130)  # the parent was told as well
    except Exception:
        tell(_Failed(traceback.format_exc()))
        raise
