"""The command line run in this process, as `odradek` would: exit code and both streams.

Without a data folder of the test's own (`--data`, ODRADEK_DATA) it gets a temporary one: never the person's.
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import dataclass
from typing import Any

import pytest

from odradek.infra.cli import main
from odradek.streams.config import KafkaConfig


class Terminal(io.StringIO):
    """Standard input with somebody before it who types this."""

    def isatty(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


class Cli:
    """Calls commands against one deployment, or against none."""

    def __init__(self, capsys: pytest.CaptureFixture[str], config: KafkaConfig | None = None) -> None:
        self._capsys = capsys
        self._data = tempfile.TemporaryDirectory(prefix="odr-")
        self._where = [] if config is None else ["--set", f"kafka.bootstrap={config.bootstrap}"]
        self._where += [] if config is None else ["--set", f"kafka.prefix={config.prefix}"]

    def __call__(self, *arguments: object) -> Answer:
        self._capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            if "ODRADEK_DATA" not in os.environ:
                patch.setenv("ODRADEK_DATA", self._data.name)
            code = main.run([*map(str, arguments), *self._where])
        out, err = self._capsys.readouterr()
        return Answer(code, out, err)
