"""The zygote: one small process for each driver, from which every sandbox's init is forked.

It exists because the driver's process may hold torch, Ray and threads and must never fork itself. It has one thread, no
third-party module and an empty environment. As root it becomes the sandbox user before it serves anything, so a root
driver and an unprivileged one run the same code.

Law: a sandbox never outlives its lifetime, the zygote or the driver. The zygote kills a sandbox at its deadline; when
the driver's socket closes it kills all, removes the driver's directory and ends; when the zygote itself is killed, the
kernel kills each init (parent-death signal: it follows the *thread* that forked, and here there is but one).

Messages in: create, kill, renew (with `rid`). Out: a reply to each, and `gone` when a sandbox has ended.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
from typing import NoReturn

from odradek.actors.environment.ns import linux, removal, wire
from odradek.actors.environment.ns.init import run_init

FLAGS = (
    linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)  # fmt: skip

CGROUP_PATIENCE_S = 2.0
"""Seconds the kernel gets to let go of what was just killed. Past it, the groups are left to `instance.reap_dead`."""


class Zygote:
    """Waits for: a message, a child's death, the next lifetime's end."""

    def __init__(
        self, sock: socket.socket, state_fd: int, lock_fd: int, images: str, programs: dict[bool, bytes]
    ) -> None:
        self.sock = sock
        self.lock_fd = lock_fd
        self.state_fd = state_fd
        self.images = images
        self.programs = programs
        self.deadlines: dict[str, float] = {}
        self.pids: dict[int, str] = {}
        self.expired: set[str] = set()

    def loop(self) -> None:
        wake_r, wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.register(wake_r, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._patience()):
                if fd == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    continue
                received = wire.receive(self.sock)
                if received is None:
                    return
                message, fds = received
                try:
                    wire.send(self.sock, {"rid": message["rid"], **self._handle(message, fds)})
                finally:
                    for received_fd in fds:
                        os.close(received_fd)
            self._reap(os.WNOHANG)
            self._expire()

    def _handle(self, message: wire.Message, fds: list[int]) -> wire.Message:
        name = message["sandbox"]
        if message["op"] == "create":
            try:
                pid = self._create(message, fds[0])
            except OSError as error:
                return {"error": str(error)}
            self.pids[pid] = name
            self.deadlines[name] = time.monotonic() + message["lifetime_s"]
            return {"pid": pid}
        if name not in self.deadlines:
            return {"error": "gone"}
        if message["op"] == "renew":
            self.deadlines[name] = time.monotonic() + message["lifetime_s"]
        elif message["op"] == "kill":
            self._kill(name)
        return {}

    def _create(self, message: wire.Message, init_fd: int) -> int:
        message.update(uid=os.getuid(), gid=os.getgid())
        pid = linux.clone(FLAGS | (linux.CLONE_NEWNET if message["network"] == "none" else 0))
        if pid == 0:
            self._become_init(message, init_fd)
        return pid

    def _become_init(self, message: wire.Message, init_fd: int) -> NoReturn:
        signal.set_wakeup_fd(-1)
        sock = socket.socket(fileno=os.dup(init_fd))
        os.set_inheritable(sock.fileno(), False)
        os.close(init_fd)
        self.sock.close()
        message["close"] = [self.state_fd, self.lock_fd]
        message["lower"] = [self._resolve(path) for path in message["lower"]]
        for key in ("upper", "work", "mountpoint"):
            message[key] = self._resolve(message[key])
        run_init(sock, message, self.programs[bool(message["processors"])])

    def _resolve(self, path: str) -> str:
        """`state/…` is relative to the working directory, which keeps stacks of 64 within the kernel's 4 KiB."""
        where, _, rest = path.partition("/")
        return rest if where == "state" else f"{self.images}/{rest}"

    def _patience(self) -> float | None:
        if not self.deadlines:
            return None
        return max(0.0, (min(self.deadlines.values()) - time.monotonic()) * 1000 + 1)

    def _expire(self) -> None:
        now = time.monotonic()
        for name in [name for name, deadline in self.deadlines.items() if deadline <= now]:
            self.expired.add(name)
            self.deadlines[name] = float("inf")
            self._kill(name)

    def _kill(self, name: str) -> None:
        for pid, owner in self.pids.items():
            if owner == name:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still this init's

    def _reap(self, options: int) -> bool:
        """Collect dead inits and tell the driver; False when none is left."""
        while True:
            try:
                pid, status = os.waitpid(-1, options)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            name = self.pids.pop(pid, None)
            if name is None:
                continue
            self.deadlines.pop(name, None)
            message = {"ev": "gone", "sandbox": name, "status": status, "expired": name in self.expired}
            self.expired.discard(name)
            with contextlib.suppress(OSError):
                wire.send(self.sock, message)

    def end(self) -> None:
        """The driver is gone: leave no process and no file."""
        for name in list(self.pids.values()):
            self._kill(name)
        while self._reap(0):
            pass


def _make_reachable(images: str) -> str:
    """Show the images at a place that the sandbox user can get to, in a mount namespace that only the zygote has.

    They may lie below a directory that is root's alone. The working directory needs no such help: it stays open.
    """
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount(images, "/tmp", flags=linux.MS_BIND)
    return "/tmp"


def main() -> NoReturn:
    """`zygote SOCKET_FD STATE_FD LOCK_FD UID INSTANCE IMAGES CGROUPS`, descriptors inherited from the driver.

    The lock is held, by inheritance, until the zygote has removed everything.
    """
    from odradek.actors.environment.ns.seccomp import build_filter

    sock_fd, state_fd, lock_fd, uid = (int(value) for value in sys.argv[2:6])
    instance, images, cgroups = sys.argv[6], sys.argv[7], [path for path in sys.argv[8].split(":") if path]
    for fd in (sock_fd, state_fd, lock_fd):
        os.set_inheritable(fd, False)
    os.fchdir(state_fd)
    if os.geteuid() == 0:
        images = _make_reachable(images)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self would still be root's
    os.umask(0o022)
    zygote = Zygote(
        socket.socket(fileno=sock_fd),
        state_fd,
        lock_fd,
        images,
        {pinned: build_filter(pin_processors=pinned) for pinned in (False, True)},
    )
    gc.collect()
    gc.freeze()
    gc.disable()  # a collector would write to, and so copy, the memory that all inits share
    wire.send(zygote.sock, {"ev": "up"})
    try:
        zygote.loop()
    finally:
        zygote.end()
        removal.remove_tree(instance, state_fd)
        if not removal.remove_cgroups(cgroups, CGROUP_PATIENCE_S):
            removal.remove_tree(f"{instance}.lock", state_fd)  # last: it is what tells others of the rest
    os._exit(0)
