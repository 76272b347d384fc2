"""The person's terminal: the story in colours where it can, how long the session has been waiting, the question.

With `--json` standard output is the answer alone, so everything here goes to standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from rich.console import Console
from rich.text import Text

from odradek.infra.serve.view import Line, Style
from odradek.infra.shown import clean

STYLES: Mapping[Style, str] = {
    "text": "",
    "note": "dim",
    "command": "bold",
    "output": "",
    "error": "red",
    "add": "green",
    "remove": "red",
    "hunk": "cyan",
    "head": "bold",
}

AGE_AFTER_S = 1.0
"""Seconds of waiting after which a terminal shows the age."""
AGE_EVERY_S = 10.0
"""Seconds between two lines about a wait where there is no terminal to overwrite a line on."""


class Screen:
    """Prints lines; between them keeps one line with what is waited for and for how long."""

    def __init__(self, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live = sys.stderr.isatty()
        self._since = self._said = time.monotonic()
        self._what = ""
        self._age_shown = False

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines of the story."""
        for line in lines:
            self._clear()
            self._console.print(Text(clean(line.text), style=STYLES[line.style]))

    def waits(self, what: str) -> None:
        """From now on this is waited for."""
        self._what = what
        self._since = self._said = time.monotonic()

    def tick(self) -> None:
        """Show the age of the wait."""
        now = time.monotonic()
        age = now - self._since
        if self._live and age >= AGE_AFTER_S:
            print(f"\r\x1b[2Kwaiting for {self._what}: {age:.0f} s", end="", file=sys.stderr, flush=True)
            self._age_shown = True
        elif not self._live and now - self._said >= AGE_EVERY_S:
            self._said = now
            print(f"waiting for {self._what}: {age:.0f} s", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Nothing is waited for any more."""
        self._clear()

    def _clear(self) -> None:
        if self._age_shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._age_shown = False
