"""MLflow in a virtual environment of its own, made on demand from a lock of names, versions and hashes.

Its own, because MLflow and the trainer can't share one: MLflow 3.17 wants pyarrow below 26, our lock has 26. Nothing of
ours is imported there; we speak to its server over HTTP. Made once for each lock (620 MB); a changed lock makes it
anew; an interrupted installation is never taken for a whole one.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

from odradek.infra.dashboard.errors import DashboardError

LOCK = Path(__file__).with_name("requirements-dashboard.lock")
INSTALL_S = 1800.0
"""Seconds the installation may take. Too low fails behind a slow mirror; too high hides a stuck one."""
STAMP = "odradek-lock"
"""File in the environment that names the lock it was made from; written last."""

Say = Callable[[str], None]


def default_folder() -> Path:
    """Beside the environment that runs us."""
    prefix = Path(sys.prefix)
    return prefix.with_name(f"{prefix.name}-dashboard")


def installed(folder: Path, lock: Path = LOCK) -> bool:
    """Whether the environment is there and made from this lock."""
    stamp = folder / STAMP
    made = (folder / "bin" / "mlflow").exists() and stamp.exists()
    return made and stamp.read_text() == hashlib.sha256(lock.read_bytes()).hexdigest()


def ensure(folder: Path, say: Say, lock: Path = LOCK) -> Path:
    """The `mlflow` program of an environment made from this lock; installs it if it is not there."""
    program = folder / "bin" / "mlflow"
    if installed(folder, lock):
        return program
    say(f"installing MLflow into {folder} (once, about 620 MB) …")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=_uv() is None, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise DashboardError(f"dashboard: can't make a virtual environment in {folder}: {error}") from error
    _run(_installer(folder, lock), folder)
    if not program.exists():
        raise DashboardError(f"dashboard: {lock} was installed into {folder}, and {program} is not there")
    (folder / STAMP).write_text(hashlib.sha256(lock.read_bytes()).hexdigest())
    return program


def _uv() -> str | None:
    return shutil.which("uv", path=str(Path(sys.prefix) / "bin")) or shutil.which("uv")


def _installer(folder: Path, lock: Path) -> list[str]:
    python = str(folder / "bin" / "python")
    uv = _uv()
    if uv is not None:
        return [uv, "pip", "install", "-q", "--python", python, "--require-hashes", "-r", str(lock)]
    return [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--require-hashes", "-r", str(lock)]


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DashboardError(f"dashboard: the installation into {folder} did not end: {error}") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
        raise DashboardError(f"dashboard: MLflow can't be installed into {folder}: {last}")
