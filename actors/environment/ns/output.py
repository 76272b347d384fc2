"""Output of a command: bytes in, text out, bounded, never split inside a character.

Invalid bytes are shown as `\\xNN`. What a result keeps is the beginning and the end; what is left out between them is
counted in the text at that place.
"""

import codecs
from collections import deque

MAX_DRAINED_BYTES = 256 * 1024 * 1024
"""Bytes of one stream that are read at most before the command is killed. Too low: verbose builds die; too high: a
command that prints for ever takes a processor from everyone."""


class TextDecoder:
    """UTF-8 pieces to text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")

    def feed(self, data: bytes, *, last: bool = False) -> str:
        return self._decoder.decode(data, last)


class BoundedOutput:
    """Keeps `limit` bytes: the first half as they come, the last half of what follows."""

    def __init__(self, limit: int) -> None:
        self._head = bytearray()
        self._head_limit = max(1, limit // 2)
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._tail_limit = max(1, limit - self._head_limit)
        self.total = 0

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        room = self._head_limit - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._tail_limit:
                self._tail_size -= len(self._tail.popleft())

    @property
    def truncated(self) -> bool:
        return self.total > self._head_limit + self._tail_limit

    def text(self) -> str:
        tail = b"".join(self._tail)
        if not self.truncated:
            return TextDecoder().feed(bytes(self._head) + tail, last=True)
        head = _cut_end(bytes(self._head))
        tail = _cut_start(tail[-self._tail_limit :])
        omitted = self.total - len(head) - len(tail)
        return (
            TextDecoder().feed(head, last=True)
            + f"\n[... {omitted} bytes omitted ...]\n"
            + TextDecoder().feed(tail, last=True)
        )


def _cut_end(data: bytes) -> bytes:
    """Without the beginning of a character whose rest was cut off."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2
            return data[:-back] if back < needed else data
        if byte < 0x80:
            break
    return data


def _cut_start(data: bytes) -> bytes:
    """Without the end of a character whose beginning was cut off."""
    start = 0
    while start < min(3, len(data)) and data[start] & 0xC0 == 0x80:
        start += 1
    return data[start:]
