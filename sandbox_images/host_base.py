"""The base `host`: a small root file system made of the building machine's own programs.

Copied are the interpreter that runs this code with its standard library (without tests, GUI and site-packages, compiled
so that it never checks a time stamp), the programs of the packages asked for, and the shared libraries that the loader
names for each of them. The result depends on the host's versions, and its digest says so; nothing of the host's
configuration, accounts or secrets is copied.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from odradek.sandbox_images.errors import RecipeError

SHELL_PROGRAMS = [
    "[", "basename", "cat", "chmod", "cp", "cut", "date", "df", "dirname", "du", "env", "expr", "false", "find", "head",
    "id", "install", "kill", "link", "ln", "ls", "md5sum", "mkdir", "mktemp", "mv", "nl", "nproc", "od", "paste",
    "printenv", "printf", "ps", "pwd", "readlink", "realpath", "rm", "rmdir", "seq", "setsid", "sha256sum", "sleep",
    "sort", "stat", "stty", "tail", "tee", "test", "timeout", "touch", "tr", "true", "truncate", "uname", "uniq", "wc",
    "which", "whoami", "xargs", "yes",
]  # fmt: skip
TEXT_PROGRAMS = ["grep", "sed", "awk", "diff", "cmp", "patch", "tar", "gzip", "less"]

PACKAGES: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    "shell": (("sh", *SHELL_PROGRAMS), frozenset({"ps", "kill", "which", "stty", "setsid"})),
    "text": (tuple(TEXT_PROGRAMS), frozenset({"less", "patch"})),
    "git": (("git",), frozenset({"git"})),
    "bash": (("bash",), frozenset()),
    "python": ((), frozenset()),
}
"""Package name → its programs, and those of them that may be missing on the building machine."""

LEFT_OUT = {
    "test", "tests", "idlelib", "tkinter", "turtledemo", "turtle.py", "ensurepip", "lib2to3", "pydoc_data",
    "site-packages", "dist-packages", "__pycache__",
}  # fmt: skip
"""Parts of the standard library that an agent's tests do not need; they are more than half of its size."""

LOADER_DIRS = ("/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/")
"""Where the loader looks without a cache; a library from anywhere else is put into /usr/lib."""

LDD_LINE = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x")
COMMAND_DEADLINE_S = 120.0
"""Seconds for `ldd` or for compiling the library. Too low: a slow disk fails the build; too high: a hang shows late."""

ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "gitconfig": "[user]\n\tname = agent\n\temail = agent@localhost\n[init]\n\tdefaultBranch = main\n",
}


def fill_host_base(tree: Path, packages: Iterable[str]) -> None:
    """Write the base into the empty directory `tree`."""
    chosen = list(dict.fromkeys(packages))
    unknown = [name for name in chosen if name not in PACKAGES]
    if unknown:
        raise RecipeError(f"unknown packages {unknown}; this base knows {sorted(PACKAGES)}")
    _skeleton(tree)
    binaries: list[Path] = []
    for package in chosen:
        programs, optional = PACKAGES[package]
        for program in programs:
            found = _copy_program(tree, program, required=program not in optional, package=package)
            binaries.extend(found)
    if "python" in chosen:
        binaries.extend(_copy_python(tree))
    for library in sorted(_libraries(binaries)):
        _copy_library(tree, library)
    for directory, _, _ in os.walk(tree):  # whatever the builder's umask was
        if Path(directory).name != "tmp":
            Path(directory).chmod(0o755)


def fingerprint(packages: Iterable[str]) -> str:
    """What the base depends on, cheap to compute: versions, and size and time of each program."""
    marks = [sys.version, sysconfig.get_path("stdlib")]
    for package in packages:
        for program in PACKAGES.get(package, ((), frozenset()))[0]:
            where = shutil.which(program)
            if where is not None:
                info = Path(where).stat()
                marks.append(f"{program} {info.st_size} {info.st_mtime_ns}")
    return "\n".join(marks)


def _skeleton(tree: Path) -> None:
    for name in ("usr/bin", "usr/lib", "usr/lib64", "etc", "proc", "dev", "tmp", "run", "var/tmp"):
        (tree / name).mkdir(parents=True)
    for name in ("home/agent", "root", "workspace"):
        (tree / name).mkdir(parents=True)
    for name in ("tmp", "var/tmp"):
        (tree / name).chmod(0o1777)
    for name, target in (("bin", "usr/bin"), ("sbin", "usr/bin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
        (tree / name).symlink_to(target)
    for name, text in ETC.items():
        (tree / "etc" / name).write_text(text)


def _copy_program(tree: Path, program: str, *, required: bool, package: str) -> list[Path]:
    where = shutil.which("dash" if program == "sh" else program) or shutil.which(program)
    if where is None:
        if required:
            raise RecipeError(f"package {package!r} needs the program {program!r}, which is not on this machine")
        return []
    source = Path(where).resolve()
    _copy_file(source, tree / "usr/bin" / program, 0o755)
    return [source]


def _copy_python(tree: Path) -> list[Path]:
    """Interpreter and library; returns the binaries whose libraries are needed as well."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    interpreter = Path(sys.base_prefix, "bin", version).resolve()
    _copy_file(interpreter, tree / "usr/bin" / version, 0o755)
    for alias in ("python", "python3"):
        (tree / "usr/bin" / alias).symlink_to(version)
    library = tree / "usr/lib" / version
    for source in dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))):
        shutil.copytree(
            source, library, dirs_exist_ok=True, ignore=_left_out, copy_function=_copy_library_file, symlinks=False
        )
    extensions = sorted((library / "lib-dynload").glob("*.so"))
    script = Path(__file__).with_name("compile_stdlib.py")
    # A fixed hash seed: the order of set constants is part of the compiled bytes, hence of the digest.
    _run(
        [str(interpreter), "-S", "-s", "-B", str(script), str(library), f"/usr/lib/{version}"], {"PYTHONHASHSEED": "0"}
    )
    return [interpreter, *extensions]


def _left_out(directory: str, names: list[str]) -> list[str]:
    top = {name for name in names if name in LEFT_OUT or name.startswith("config-")}
    return [*top, *(name for name in names if name.startswith(("_tkinter", "_test")) or name.endswith(".a"))]


def _copy_library_file(source: str, target: str) -> None:
    _copy_file(Path(source), Path(target), 0o644)


def _libraries(binaries: Iterable[Path]) -> set[str]:
    """Absolute paths of the shared libraries, the loader included, that `ldd` names."""
    found: set[str] = set()
    for binary in binaries:
        with binary.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
        for line in _run(["ldd", str(binary)], {}, may_fail=True).splitlines():
            match = LDD_LINE.match(line)
            if match:
                found.add(match.group(1))
    return found


def _copy_library(tree: Path, library: str) -> None:
    inside = library.lstrip("/") if library.startswith(LOADER_DIRS) else f"usr/lib/{Path(library).name}"
    target = tree / inside
    if not target.exists():
        _copy_file(Path(library).resolve(), target, 0o755)


def _copy_file(source: Path, target: Path, mode: int) -> None:
    """Content only: neither owner nor times nor set-id bits."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _run(argv: list[str], env: dict[str, str], *, may_fail: bool = False) -> str:
    done = subprocess.run(
        argv,
        env={"PATH": os.defpath, "LC_ALL": "C", **env},
        capture_output=True,
        text=True,
        timeout=COMMAND_DEADLINE_S,
        check=False,
    )
    if done.returncode != 0 and not may_fail:
        raise RecipeError(f"{argv[0]} ended with {done.returncode}: {done.stderr[-500:].strip()}")
    return done.stdout
