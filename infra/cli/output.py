"""Standard output as a place that can fail: an answer is written whole, or the person is told that it was not."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from odradek.infra.errors import AnswerLost


def answer(text: str) -> None:
    """Write to standard output, and know that it is written: else `AnswerLost`."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        with suppress(OSError):  # else what is still buffered fails again at the interpreter's end, with exit code 120
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise AnswerLost(
            f"standard output took no answer ({error.strerror}): what the command did stands; ask again with an output "
            f"that is open and has room"
        ) from error


def open_standard_streams() -> None:
    """Give each stream that was closed before the start (`>&-`) a descriptor, which no file then has by accident.
    Writing to such an output fails, and is told as any other failure; what is said on such a standard error is lost."""
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_RDONLY))
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", buffering=1)
