"""Process 1 of a sandbox: builds its root, then starts and ends commands for the driver.

It is our code, forked from the zygote into new namespaces; it alone keeps capabilities there, so that no command can
trace it, and the kernel lets nothing inside signal it. It ends, and with it every process of the sandbox, when the
driver closes its socket or dies, or when the zygote dies.

Life of a command: init forks a supervisor S, S forks the command C. S is a subreaper: whatever C starts, however it
detaches, stays below S, so that S's descendants are exactly the command's processes. S reports C's end through a pipe
and lives until its last descendant is gone. Killing a command means: stop all descendants until no new ones appear (a
stopped process can't fork), then kill them. A process that a command managed to orphan from its S (by killing S) is
killed as soon as init sees it.

Messages in: exec, kill, signal, open, count. Messages out: ready or failed once, then exit for each exec and a reply
with the request's `rid` for the others. A reply may carry one descriptor.
"""

# ruff: noqa: PTH102, PTH123, PTH208, PTH211 - process 1 works with descriptors and plain strings, and starts often

import contextlib
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from odradek.actors.environment.ns import linux, wire

INSIDE_UID = 1000
"""The sandbox's only user, `agent`."""

KILL_PASSES = 200
"""Rounds of stopping descendants before giving up. Each leaves only what was forked during it: a handful suffices, and
a fork bomb is bounded by the limit on processes. Too low: a bomb survives its time-out."""

SUPERVISOR_GRACE_S = 2.0
"""Seconds that a supervisor may take to collect its killed descendants. Too low: its children are left to init, which
costs only accounting; too high: a hung kernel call delays the answer to a time-out."""

OOM_SCORE = "800"
"""Commands are killed first when memory ends: before init, whose end is the sandbox's, and before the host."""

DEVICES = ("null", "zero", "full", "random", "urandom")
SPAWN_FAILED = 127

_RLIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "pids": resource.RLIMIT_NPROC,
    "disk_bytes": resource.RLIMIT_FSIZE,
}

Message = wire.Message


class Running:
    """One exec: its supervisor, the pipe on which that reports, and the deadline."""

    def __init__(self, exec_id: int, supervisor: int, status_fd: int, deadline: float | None) -> None:
        self.exec_id = exec_id
        self.supervisor = supervisor
        self.status_fd = status_fd
        self.deadline = deadline
        self.reported = False
        self.status = 0
        self.timed_out = False
        self.killed_at: float | None = None
        self.told = False


def run_init(sock: socket.socket, spec: Message, program: bytes) -> NoReturn:
    """Entry, in the child of `clone`. Never returns."""
    try:
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        _build_root(spec)
        for fd in spec["close"]:
            os.close(fd)  # the last ways to the host's files
        workspace = os.open("/workspace", os.O_PATH | os.O_DIRECTORY)
        wire.send(sock, {"ev": "ready"}, (workspace,))
        os.close(workspace)
    except BaseException as error:
        with contextlib.suppress(OSError):
            wire.send(sock, {"ev": "failed", "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    try:
        Init(sock, spec, program).loop()
    except BaseException as error:
        with contextlib.suppress(OSError):
            wire.send(sock, {"ev": "broken", "error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    os._exit(0)


def _build_root(spec: Message) -> None:
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{INSIDE_UID} {spec['uid']} 1")
    _write("/proc/self/gid_map", f"{INSIDE_UID} {spec['gid']} 1")
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    root = spec["mountpoint"]
    options = f"lowerdir={':'.join(spec['lower'])},upperdir={spec['upper']},workdir={spec['work']},userxattr"
    linux.mount("overlay", root, "overlay", linux.MS_NOSUID | linux.MS_NODEV, options)
    linux.mount("proc", f"{root}/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.mount("dev", f"{root}/dev", "tmpfs", linux.MS_NOSUID | linux.MS_NOEXEC, "size=64m,mode=0755")
    for name in DEVICES:
        os.close(os.open(f"{root}/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        linux.mount(f"/dev/{name}", f"{root}/dev/{name}", flags=linux.MS_BIND)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{root}/dev/{name}")
    os.mkdir(f"{root}/dev/shm", 0o1777)
    # A mount point can be neither renamed nor removed, so the workspace stays where host-side calls and `diff` look.
    linux.mount(f"{root}/workspace", f"{root}/workspace", flags=linux.MS_BIND)
    os.chdir(root)
    linux.pivot_to_here()
    os.chdir("/")
    socket.sethostname(spec["hostname"])
    if spec["network"] == "none":
        _loopback_up()


def _loopback_up() -> None:
    """Tests use 127.0.0.1; a new network namespace has it switched off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


class Init:
    """The loop of process 1. Waits for: a message, a supervisor's report, a child's death, the next deadline."""

    def __init__(self, sock: socket.socket, spec: Message, program: bytes) -> None:
        self.sock = sock
        self.spec = spec
        self.program = program
        self.running: dict[int, Running] = {}
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.wake_r, self.wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poll.register(self.wake_r, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)

    def loop(self) -> None:
        while True:
            ready = self.poll.poll(self._patience())
            for fd, _ in ready:
                if fd == self.sock.fileno():
                    received = wire.receive(self.sock)
                    if received is None:
                        return  # the driver is gone; so are we, and with process 1 the whole sandbox
                    self._handle(*received)
                elif fd == self.wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_r, 4096)
                else:
                    self._report(fd)
            self._reap()
            self._enforce_deadlines()

    def _patience(self) -> float | None:
        times = [r.deadline for r in self.running.values() if r.deadline is not None and not r.reported]
        times += [r.killed_at + SUPERVISOR_GRACE_S for r in self.running.values() if r.killed_at is not None]
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 1) if times else None

    def _handle(self, message: Message, fds: list[int]) -> None:
        kind = message["op"]
        if kind == "exec":
            self._exec(message, fds)
        elif kind == "kill":
            running = self.running.get(message["id"])
            if running is not None:
                self._kill(running)
        elif kind == "signal":
            for pid in self._commands():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, message["signal"])
            self._reply(message)
        elif kind == "count":
            self._reply(message, count=len(self._commands()))
        for fd in fds:
            os.close(fd)

    def _reply(self, message: Message, **fields: Any) -> None:
        wire.send(self.sock, {"rid": message["rid"], **fields})

    def _exec(self, message: Message, fds: list[int]) -> None:
        status_r, status_w = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError as error:
            os.close(status_r)
            os.close(status_w)
            wire.send(self.sock, {"ev": "exit", "id": message["id"], "error": f"fork: {error}"})
            return
        if pid == 0:
            _supervise(self, message, fds, status_w)
        os.close(status_w)
        timeout = message["timeout"]
        deadline = None if timeout is None else time.monotonic() + timeout
        self.running[message["id"]] = Running(message["id"], pid, status_r, deadline)
        self.poll.register(status_r, select.POLLIN)

    def _report(self, fd: int) -> None:
        """A supervisor wrote its command's status, or died without. Of a killed command the end is told only when all
        its descendants are gone.
        """
        running = next(r for r in self.running.values() if r.status_fd == fd)
        data = os.read(fd, 4)
        running.status = struct.unpack("i", data)[0] if len(data) == 4 else int(signal.SIGKILL)
        self.poll.unregister(fd)
        os.close(fd)
        running.status_fd = -1
        running.reported = True
        if running.killed_at is None:
            self._tell(running)

    def _tell(self, running: Running) -> None:
        message = {"id": running.exec_id, "status": running.status, "timed_out": running.timed_out}
        wire.send(self.sock, {"ev": "exit", **message})
        running.told = True

    def _reap(self) -> None:
        supervisors = {r.supervisor: r for r in self.running.values()}
        died = False
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            running = supervisors.get(pid)
            if running is not None:
                died = True
                if not running.reported:
                    self._report(running.status_fd)
                if not running.told:
                    self._tell(running)
                del self.running[running.exec_id]
                wire.send(self.sock, {"ev": "over", "id": running.exec_id})
        if died:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        """End whatever is a child of init and no supervisor: its supervisor was killed from inside."""
        supervisors = {r.supervisor for r in self.running.values()}
        for pid in _children(_parents(), 1) - supervisors:
            _kill_below(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill(self, running: Running) -> None:
        _kill_below(running.supervisor)
        running.killed_at = time.monotonic()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for running in list(self.running.values()):
            if not running.reported and running.deadline is not None and now >= running.deadline:
                running.timed_out = True
                running.deadline = None
                self._kill(running)
            if running.killed_at is not None and now >= running.killed_at + SUPERVISOR_GRACE_S:
                running.killed_at = None
                _kill_below(running.supervisor)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.supervisor, signal.SIGKILL)

    def _commands(self) -> list[int]:
        """Every process of the sandbox that is neither init nor a supervisor."""
        own = {1} | {r.supervisor for r in self.running.values()}
        return [pid for pid in _parents() if pid not in own]


def _parents() -> dict[int, int]:
    """pid → parent, for every process of the sandbox that is not a zombie."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            found[int(name)] = int(fields[1])
    return found


def _children(parents: dict[int, int], pid: int) -> set[int]:
    return {child for child, parent in parents.items() if parent == pid}


def _descendants(pid: int) -> set[int]:
    parents = _parents()
    found: set[int] = set()
    frontier = {pid}
    while frontier:
        frontier = {child for child, parent in parents.items() if parent in frontier} - found
        found |= frontier
    return found


def _kill_below(pid: int) -> None:
    """End all descendants of `pid`: stop them until no new ones appear, then kill."""
    stopped: set[int] = set()
    for _ in range(KILL_PASSES):
        new = _descendants(pid) - stopped
        if not new:
            break
        for descendant in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(descendant, signal.SIGSTOP)
        stopped |= new
    for descendant in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(descendant, signal.SIGKILL)


def _supervise(init: Init, message: Message, fds: list[int], status_w: int) -> NoReturn:
    """The supervisor: starts the command, reports its end, outlives its last descendant."""
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        init.sock.close()
        linux.prctl(linux.PR_SET_CHILD_SUBREAPER, 1)
        command = os.fork()
        if command == 0:
            _command(init, message, fds)
        for fd in fds:
            os.close(fd)
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == command:
                os.write(status_w, struct.pack("i", status))
                os.close(status_w)
    except BaseException as error:
        print(f"supervisor: {error}", file=sys.stderr)
    os._exit(0)


def _command(init: Init, message: Message, fds: list[int]) -> NoReturn:
    """The command: gives up everything it may not have, then becomes the program."""
    try:
        os.setsid()
        os.umask(0o022)
        null = os.open("/dev/null", os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(fds[0], 1)
        os.dup2(fds[-1], 2)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not signal.SIG_DFL:
                with contextlib.suppress(OSError, ValueError):
                    signal.signal(number, signal.SIG_DFL)
        for name, amount in init.spec["rlimits"].items():
            resource.setrlimit(_RLIMITS[name], (amount, amount))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _write("/proc/self/oom_score_adj", OOM_SCORE)
        if init.spec["processors"]:
            os.sched_setaffinity(0, init.spec["processors"])
        linux.close_from(3)
        linux.drop_capabilities()
        linux.install_filter(init.program)
        os.chdir(message["cwd"])
        argv = message["argv"]
        os.execvpe(argv[0], argv, message["env"])
    except OSError as error:
        what = message["cwd"] if error.errno == errno.ENOTDIR else message["argv"][0]
        os.write(2, f"sandbox: {error.filename or what}: {error.strerror}\n".encode(errors="backslashreplace"))
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode(errors="backslashreplace"))
    os._exit(SPAWN_FAILED)
