"""Run a command as an ordinary user, from root: `python as_nobody.py DIRECTORY COMMAND…`.

The interpreter, the virtual environment and the repository may lie below directories that are root's alone; in a mount
namespace of this process only, they are shown to everybody. DIRECTORY is given to the user, as his home.
"""

import os
import sys
from pathlib import Path

from odradek.actors.environment.ns import linux

NOBODY = 65534


def closed_ancestor(path: Path) -> Path | None:
    """The topmost directory on the way that others may not enter."""
    return next((parent for parent in reversed(path.parents) if parent.stat().st_mode & 0o001 == 0), None)


def reveal(paths: list[Path]) -> None:
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    opened = {path: os.open(path, os.O_PATH) for path in paths if closed_ancestor(path) is not None}
    for ancestor in {closed_ancestor(path) for path in opened}:
        linux.mount("reveal", str(ancestor), "tmpfs", data="mode=0755")
    for path, fd in opened.items():
        path.mkdir(parents=True, exist_ok=True)
        linux.mount(f"/proc/self/fd/{fd}", str(path), flags=linux.MS_BIND)


def main() -> None:
    home, command = Path(sys.argv[1]), sys.argv[2:]
    os.chown(home, NOBODY, NOBODY)
    reveal([Path(sys.base_prefix).resolve(), Path(sys.prefix), Path.cwd(), home])
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.execve(command[0], command, {"HOME": str(home), "TMPDIR": str(home), "PATH": os.defpath, "LANG": "C.UTF-8"})


if __name__ == "__main__":
    main()
