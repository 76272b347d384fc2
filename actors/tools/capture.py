"""A command's output on its way to the model: bounded while it runs, redacted before it is cut, cut with a marker.

A cut may go through a secret, and half a secret matches no pattern. So each side keeps a margin beyond what will be
shown, secrets are found in the longer piece, and one that lies across the border is replaced whole.
"""

from collections import deque
from collections.abc import Callable

from odradek.actors.tools.redact import redact
from odradek.actors.tools.text import utf8_prefix, utf8_suffix

MARGIN_CHARS = 4096
"""Text kept beyond each cut to recognise a secret on it. Too low: half a private key or token slips through."""

STREAM_LINE_CHARS = 16 * 1024
"""A line this long without an end is passed on in pieces. Too low: secrets cut in two; too high: a watcher waits."""


class Capture:
    """Holds the beginning and the end of a text of any length, at most `limit` bytes of it in the result."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._limit = limit
        self._head: list[str] = []
        self._head_room = limit + MARGIN_CHARS
        self._tail: deque[str] = deque()
        self._tail_chars = 0
        self.chars = 0

    def feed(self, text: str) -> None:
        """The next piece."""
        self.chars += len(text)
        if self._head_room > 0:
            piece, text = text[: self._head_room], text[self._head_room :]
            self._head.append(piece)
            self._head_room -= len(piece)
        if text:
            self._tail.append(text)
            self._tail_chars += len(text)
            while self._tail_chars - len(self._tail[0]) > self._half + MARGIN_CHARS:
                self._tail_chars -= len(self._tail.popleft())

    def text(self) -> str:
        """All of it, or both ends with a marker line that says how much is missing and how to get it."""
        head, tail = "".join(self._head), "".join(self._tail)
        lost = self.chars - len(head) - len(tail)
        if not lost:
            head = tail = head + tail
            if utf8_prefix(head, self._limit) == head:
                return redact(head)
        first, last = self._first(head), self._last(tail)
        missing = self.chars - len(first) - len(last)
        marker = f"[truncated: about {missing} of {self.chars} characters; redirect to a file and read it in parts]"
        return f"{first}{'' if first.endswith(chr(10)) else chr(10)}{marker}\n{last}"

    def _first(self, text: str) -> str:
        """Whole lines if a line ends in the second half of what fits."""
        shown = utf8_prefix(text, self._half)
        line_end = shown.rfind("\n") + 1
        return redact(text, 0, line_end if line_end > len(shown) // 2 else len(shown))

    def _last(self, text: str) -> str:
        shown = utf8_suffix(text, self._half)
        line_start = shown.find("\n") + 1
        if line_start > len(shown) // 2:
            line_start = 0
        return redact(text, len(text) - len(shown) + line_start)


class RedactedStream:
    """Passes output on line by line as it comes, without secrets; `close` passes on the rest.

    Lines between the BEGIN and END of a private key are held back until the END shows, so that they are known for
    what they are.
    """

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._held = ""

    def feed(self, text: str) -> None:
        self._held += text
        ready = self._held.rfind("\n") + 1
        begin = self._held.rfind("-----BEGIN")
        if 0 <= begin < ready and "-----END" not in self._held[begin:]:
            ready = self._held.rfind("\n", 0, begin) + 1
        if len(self._held) - ready > STREAM_LINE_CHARS:
            ready = len(self._held) - MARGIN_CHARS
        if ready > 0:
            self._pass_on(ready)

    def close(self) -> None:
        self._pass_on(len(self._held))

    def _pass_on(self, ready: int) -> None:
        if ready:
            self._on_output(redact(self._held, 0, ready))
            self._held = self._held[ready:]
