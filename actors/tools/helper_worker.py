"""The helper process: does for the tools what may never end, or may end the process. Standard library only.

A backtracking pattern holds Python's lock until it is done, so no thread and no event loop can stop it; hostile source
can exhaust the C stack. Both are harmless in a process that may be killed. It reads requests from stdin and answers on
stdout until stdin ends, so it does not outlive its owner; a request's own CPU alarm kills it even inside one match.

Started by `helper.py` as a plain script with `-I -S` (15 ms), hence no import of ours but the sibling it loads by path.
"""

import importlib.util
import marshal
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO


def search(pattern: str, texts: list[str], keep: int) -> list[tuple[list[tuple[int, int, int]], int]]:
    """For each text the first `keep` hits (line from 1, start, end in the line) and the number of lines that hit."""
    matcher = re.compile(pattern)
    results = []
    for text in texts:
        hits: list[tuple[int, int, int]] = []
        total = 0
        for number, line in enumerate(text.split("\n"), 1):
            match = matcher.search(line[:-1] if line.endswith("\r") else line)
            if match is not None:
                total += 1
                if len(hits) < keep:
                    hits.append((number, match.start(), match.end()))
        results.append((hits, total))
    return results


def lint(source: bytes, is_package: bool) -> list[tuple[int, str]]:
    """`python_lint.lint`, loaded by path."""
    path = Path(__file__).with_name("python_lint.py")
    spec = importlib.util.spec_from_file_location("python_lint", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    findings: list[tuple[int, str]] = module.lint(source, is_package)
    return findings


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the requests end: `(kind, arguments, CPU seconds)` in, `(ok, value or message, CPU used)` out."""
    while len(head := requests.read(4)) == 4:
        kind, arguments, seconds = marshal.loads(requests.read(int.from_bytes(head, "big")))
        began = time.process_time()
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)  # its default action ends the process
        ok, value = _answer(kind, arguments)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer = marshal.dumps((ok, value, time.process_time() - began))
        answers.write(len(answer).to_bytes(4, "big") + answer)
        answers.flush()


def _answer(kind: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, search(*arguments) if kind == "search" else lint(*arguments)
    except (re.error, RecursionError, MemoryError, OverflowError) as error:
        return False, f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
