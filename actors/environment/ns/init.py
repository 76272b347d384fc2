"""Process 1 of a sandbox: builds its root, then has commands started and ends them, for the driver.

It is our code, forked from the zygote into new namespaces; it alone keeps capabilities there, so that no command can
trace it, and the kernel lets nothing inside signal it. It ends, and with it every process of the sandbox, when the
driver closes its socket or dies, or when the zygote dies.

A command runs below a supervisor (`supervisor.py`), a free one or a new one. Killing a command means: stop all of its
supervisor's descendants until no new ones appear (a stopped process can't fork), then kill them; its end is told when
the last is gone. A process that a command orphaned, by killing its supervisor, is killed as soon as init sees it.

Messages in: warm (have a supervisor ready for the next command), exec, kill, signal, count. Messages out: ready or
failed once; exit and then over for each exec; a reply with the request's `rid` for signal and count.
"""

# ruff: noqa: PTH102, PTH123, PTH208, PTH211 - process 1 works with descriptors and plain strings, and starts often

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import time
from typing import NoReturn

from odradek.actors.environment.ns import linux, wire
from odradek.actors.environment.ns.supervisor import run_supervisor

INSIDE_UID = 1000
"""The sandbox's only user, `agent`."""

KILL_PASSES = 200
"""Rounds of stopping descendants before giving up. Each leaves only what was forked during it: a handful suffices, and
a fork bomb is bounded by the limit on processes. Too low: a bomb survives its time-out."""

SUPERVISOR_GRACE_S = 2.0
"""Seconds that a supervisor may take to collect its killed descendants. Too low: its children are left to init, which
costs only accounting; too high: a hung kernel call delays the answer to a time-out."""

KEPT_SUPERVISORS = 2
"""Free supervisors kept for the next commands. Too low: a fork for each parallel command; too high: 1 MB each."""

DEVICES = ("null", "zero", "full", "random", "urandom")
Message = wire.Message


class Supervisor:
    """A supervisor as init sees it, with the command below it, if any."""

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self.pid = pid
        self.sock = sock
        self.exec_id: int | None = None
        self.deadline: float | None = None
        self.status: int | None = None
        self.timed_out = self.told = False
        self.killed_at: float | None = None

    def take(self, exec_id: int, deadline: float | None) -> None:
        self.exec_id, self.deadline = exec_id, deadline
        self.status, self.killed_at = None, None
        self.timed_out = self.told = False


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
    """The loop of process 1. Waits for: the driver, a supervisor, a child's death, the next deadline."""

    def __init__(self, sock: socket.socket, spec: Message, program: bytes) -> None:
        self.sock = sock
        self.spec = spec
        self.program = program
        self.supervisors: dict[int, Supervisor] = {}
        """By the descriptor of its socket."""
        self.poll = select.poll()
        self.poll.register(sock, select.POLLIN)
        self.wake_r, self.wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.poll.register(self.wake_r, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w, warn_on_full_buffer=False)

    def loop(self) -> None:
        while True:
            for fd, _ in self.poll.poll(self._patience()):
                if fd == self.sock.fileno():
                    received = wire.receive(self.sock)
                    if received is None:
                        return  # the driver is gone; so are we, and with process 1 the whole sandbox
                    self._handle(*received)
                elif fd == self.wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wake_r, 4096)
                    _reap()
                elif fd in self.supervisors:
                    self._listen(self.supervisors[fd])
            self._enforce_deadlines()

    def _patience(self) -> float | None:
        times = [s.deadline for s in self.supervisors.values() if s.deadline is not None]
        times += [s.killed_at + SUPERVISOR_GRACE_S for s in self.supervisors.values() if s.killed_at is not None]
        return max(0.0, (min(times) - time.monotonic()) * 1000 + 1) if times else None

    def _handle(self, message: Message, fds: list[int]) -> None:
        kind = message["op"]
        if kind == "exec":
            self._exec(message, fds)
        elif kind == "warm":
            self._free_supervisor()
        elif kind == "kill":
            for supervisor in self.supervisors.values():
                if supervisor.exec_id == message["id"]:
                    self._kill(supervisor)
        elif kind == "signal":
            for pid in self._commands():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, message["signal"])
            wire.send(self.sock, {"rid": message["rid"]})
        elif kind == "count":
            wire.send(self.sock, {"rid": message["rid"], "count": len(self._commands())})
        for fd in fds:
            os.close(fd)

    def _exec(self, message: Message, fds: list[int]) -> None:
        timeout = message["timeout"]
        deadline = None if timeout is None else time.monotonic() + timeout
        for _ in range(2):
            try:
                supervisor = self._free_supervisor()
                wire.send(supervisor.sock, message, tuple(fds))
            except ConnectionError:
                self._lost(supervisor)  # a free one was killed from inside: take another
                continue
            except OSError as error:
                wire.send(self.sock, {"ev": "exit", "id": message["id"], "error": f"supervisor: {error}"})
                return
            supervisor.take(message["id"], deadline)
            return
        wire.send(self.sock, {"ev": "exit", "id": message["id"], "error": "supervisors are killed as they start"})

    def _free_supervisor(self) -> Supervisor:
        for supervisor in self.supervisors.values():
            if supervisor.exec_id is None:
                return supervisor
        ours, theirs = wire.pair()
        pid = os.fork()
        if pid == 0:
            self.sock.close()
            ours.close()
            for other in self.supervisors.values():
                other.sock.close()
            run_supervisor(theirs, self.spec, self.program)
        theirs.close()
        supervisor = self.supervisors[ours.fileno()] = Supervisor(pid, ours)
        self.poll.register(ours, select.POLLIN)
        return supervisor

    def _listen(self, supervisor: Supervisor) -> None:
        received = wire.receive(supervisor.sock)
        if received is None:
            self._lost(supervisor)
        elif "status" in received[0]:
            supervisor.status = received[0]["status"]
            supervisor.deadline = None
            if supervisor.killed_at is None:
                self._tell(supervisor)
        else:
            self._over(supervisor)

    def _over(self, supervisor: Supervisor) -> None:
        """Its command has no process any more."""
        if supervisor.exec_id is None:
            return
        if not supervisor.told:
            self._tell(supervisor)
        wire.send(self.sock, {"ev": "over", "id": supervisor.exec_id})
        supervisor.exec_id = supervisor.deadline = supervisor.killed_at = None
        free = [other for other in self.supervisors.values() if other.exec_id is None]
        if len(free) > KEPT_SUPERVISORS:
            self._forget(supervisor)  # it sees its socket close and ends

    def _lost(self, supervisor: Supervisor) -> None:
        self._forget(supervisor)
        _reap()
        parents = _parents()
        for pid in _children(parents, 1) - {other.pid for other in self.supervisors.values()}:
            _kill_below(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._over(supervisor)

    def _forget(self, supervisor: Supervisor) -> None:
        if self.supervisors.pop(supervisor.sock.fileno(), None) is not None:
            self.poll.unregister(supervisor.sock)
            supervisor.sock.close()

    def _tell(self, supervisor: Supervisor) -> None:
        """The command's end. Without a status its supervisor was killed, and the command with it."""
        status = int(signal.SIGKILL) if supervisor.status is None else supervisor.status
        message = {"id": supervisor.exec_id, "status": status, "timed_out": supervisor.timed_out}
        wire.send(self.sock, {"ev": "exit", **message})
        supervisor.told = True

    def _kill(self, supervisor: Supervisor) -> None:
        _kill_below(supervisor.pid)
        supervisor.killed_at = time.monotonic()

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for supervisor in list(self.supervisors.values()):
            if supervisor.deadline is not None and now >= supervisor.deadline:
                supervisor.timed_out = True
                supervisor.deadline = None
                self._kill(supervisor)
            elif supervisor.killed_at is not None and now >= supervisor.killed_at + SUPERVISOR_GRACE_S:
                supervisor.killed_at = None
                _kill_below(supervisor.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(supervisor.pid, signal.SIGKILL)

    def _commands(self) -> list[int]:
        """Every process of the sandbox that is neither init nor a supervisor."""
        own = {1} | {supervisor.pid for supervisor in self.supervisors.values()}
        return [pid for pid in _parents() if pid not in own]


def _reap() -> None:
    """Collect what has died and was init's child: supervisors and orphans. Their sockets tell the rest."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
