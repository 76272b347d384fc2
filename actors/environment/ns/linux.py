"""The few system calls that Python 3.11 does not offer, by ctypes.

Used by the zygote and by what it forks, so nothing here may import what is slow or not in the standard library.
Failures are `OSError` with the call's name.
"""

import ctypes
import os
import platform
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
SIGCHLD = 17

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
LAST_CAPABILITY = 63

_NUMBERS = {
    "x86_64": {"clone": 56, "pivot_root": 155, "capset": 126, "close_range": 436},
    "aarch64": {"clone": 220, "pivot_root": 41, "capset": 91, "close_range": 436},
}
MACHINE = platform.machine()

# PyDLL keeps the interpreter lock: between clone and the child's first line no other code of the zygote may run.
_libc = ctypes.PyDLL(None, use_errno=True)


def supported() -> bool:
    """Whether the call numbers of this machine are known."""
    return MACHINE in _NUMBERS


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def _syscall(name: str, *arguments: object) -> int:
    return _check(_libc.syscall(_NUMBERS[MACHINE][name], *arguments), name)


def clone(flags: int) -> int:
    """Fork into new namespaces. The caller must have one thread only."""
    return _syscall("clone", ctypes.c_ulong(flags | SIGCHLD), None, None, None, None)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None
    )
    _check(result, f"mount {kind or source} on {target}")


def pivot_to_here() -> None:
    """Make the working directory the root and forget the old one."""
    _syscall("pivot_root", b".", b".")
    _check(_libc.umount2(b".", MNT_DETACH), "umount2 of the old root")


def prctl(option: int, value: int = 0) -> None:
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def set_fs_user(uid: int) -> None:
    """Files are opened and made as this user, by the calling thread only."""
    _libc.setfsgid(uid)
    _libc.setfsuid(uid)


def drop_capabilities() -> None:
    """Give up every capability, also for programs started later."""
    for capability in range(LAST_CAPABILITY + 1):
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break  # the kernel knows no capability of this number
    header = struct.pack("Ii", 0x20080522, 0)
    _syscall("capset", header, bytes(24))


def install_filter(program: bytes) -> None:
    """Install a seccomp program (see `seccomp.py`) for the calling process and all it starts."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), fprog, 0, 0), "seccomp")
