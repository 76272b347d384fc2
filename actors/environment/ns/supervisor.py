"""The supervisor S: parent of commands, one at a time, between init and the program.

S is forked from init, gives up every right that a command may not have, and then starts programs by `posix_spawn`,
which copies no memory; so a command costs little more than its program. S is a subreaper: whatever the command starts,
however it detaches, stays below S, so that S's descendants are exactly the command's processes. When the last one is
gone S says `over` and is free for the next command.

S holds nothing worth having, but its word is trusted. It is not dumpable and tracing is refused to commands by the
filter, so none can look into it or change it. They can kill it, being the same user: then init sees its socket close,
counts the command as killed, and ends what was below S.

From init: one `exec` packet with the output descriptors. To init: `status`, then `over`.
"""

# ruff: noqa: PTH118 - plain strings, as in init

import contextlib
import os
import resource
import signal
import socket
from typing import NoReturn

from odradek.actors.environment.ns import linux, wire

OOM_SCORE = "800"
"""Commands are killed first when memory ends: before init, whose end is the sandbox's, and before the host."""

NOT_FOUND, NOT_EXECUTABLE = 127, 126

CATCHABLE = [number for number in range(1, signal.NSIG) if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33)]
"""All signals that have an action; 32 and 33 are the C library's own."""

_IGNORED = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
    signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU,
)  # fmt: skip

_RLIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "pids": resource.RLIMIT_NPROC,
    "disk_bytes": resource.RLIMIT_FSIZE,
}


def run_supervisor(sock: socket.socket, spec: wire.Message, program: bytes) -> NoReturn:
    """Entry, in a child of init. Never returns."""
    try:
        _give_up_rights(spec, program)
        while True:
            received = wire.receive(sock)
            if received is None:
                break
            _supervise(sock, *received)
    except BaseException as error:
        os.write(2, f"supervisor: {error!r}\n".encode())
    os._exit(0)


def _give_up_rights(spec: wire.Message, program: bytes) -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
    fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(fd, OOM_SCORE.encode())
    os.close(fd)
    if spec["processors"]:
        os.sched_setaffinity(0, spec["processors"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, amount in spec["rlimits"].items():
        resource.setrlimit(_RLIMITS[name], (amount, amount))
    linux.drop_capabilities()
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.install_filter(program)


def _supervise(sock: socket.socket, message: wire.Message, fds: list[int]) -> None:
    """One command from start to the end of its last descendant."""
    try:
        command = _start(message, fds)
    except OSError as error:
        shown = f"sandbox: {error.filename or message['argv'][0]}: {error.strerror}\n"
        with contextlib.suppress(OSError):
            os.write(fds[-1], shown.encode(errors="backslashreplace"))
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        wire.send(sock, {"status": code << 8})
        command = 0
    finally:
        for fd in fds:
            os.close(fd)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            break
        if pid == command:
            wire.send(sock, {"status": status})
    wire.send(sock, {"over": True})


def _start(message: wire.Message, fds: list[int]) -> int:
    os.chdir(message["cwd"])
    try:
        argv, env = message["argv"], message["env"]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, fds[0], 1),
            (os.POSIX_SPAWN_DUP2, fds[-1], 2),
        ]
        refusal: OSError = FileNotFoundError(2, "not found", argv[0])
        for path in _candidates(argv[0], env.get("PATH", os.defpath)):
            try:
                return os.posix_spawn(path, argv, env, file_actions=actions, setsid=True, setsigdef=CATCHABLE)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:
                refusal = error
        raise refusal
    finally:
        os.chdir("/")  # S must not keep a directory of the workspace busy


def _candidates(name: str, path: str) -> list[str]:
    """Where a program of that name may be, as the shell looks for it."""
    if "/" in name:
        return [name]
    return [os.path.join(directory or ".", name) for directory in path.split(":")]
