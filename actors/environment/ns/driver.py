"""The driver `ns`: makes, finds and ends sandboxes on this host.

Law: a sandbox's record is written before anything is made, and removed after everything is gone. Sandboxes die with
this process (see `zygote.py`); what a dead driver left below the same state directory is removed at start.

As root, sandboxes run as `SANDBOX_UID` and cgroup limits are used where the host offers them; otherwise all of it runs
as the calling user. Nothing is silently weakened: what this host can't hold is refused by `limits.plan`.

Production first: a sandbox that a person waits for takes the place of the youngest one that nobody waits for, where no
place is left, and its files are read and written by threads of its own (test_production_sandbox.py). Whoever used the
one that went gets `SandboxGoneError` with the reason, and rebuilds it from the log once there is room.

Waits for: the zygote's replies and an init's `ready`, each until the call's deadline.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from odradek.actors.environment.errors import (
    SandboxAdmissionError,
    SandboxInfraError,
    SandboxNotFoundError,
    SandboxSpecError,
)
from odradek.actors.environment.ns import cgroup, disk, linux, preflight, wire
from odradek.actors.environment.ns.admission import NsConfig, admit
from odradek.actors.environment.ns.host import ZygoteHost
from odradek.actors.environment.ns.instance import Record, open_instance, reap_dead, start_ticks
from odradek.actors.environment.ns.layers import Layers
from odradek.actors.environment.ns.limits import Plan, check_spec, levels, plan
from odradek.actors.environment.ns.overlay import DigestCache
from odradek.actors.environment.ns.removal import remove_cgroups, remove_tree
from odradek.actors.environment.ns.sandbox import NsSandbox
from odradek.actors.environment.ns.stack import FrozenStack, FrozenStore, Stack
from odradek.actors.environment.protocol import (
    DEFAULT_DEADLINE_S,
    Capabilities,
    DriverMetrics,
    PreflightCheck,
    SandboxInfo,
    SandboxMetrics,
    SandboxSpec,
)
from odradek.sandbox_images.store import ImageStore, store_owner
from odradek.streams.priority import ReservedThreads

T = TypeVar("T")

FILE_THREADS = 4
"""Threads for file work; production has as many again. Too low: a large diff delays every read; too high: they fight
over the interpreter."""


class _Counters:
    created = destroyed = expired = execs = reaped = 0


class NsDriver:
    """See `protocol.SandboxDriver`. Call `start` before anything else and `close` at the end.

    `state_dir` must be on a file system that overlay accepts as upper: ext4, xfs, btrfs, or tmpfs from Linux 6.6 on;
    not on an overlay itself.
    """

    def __init__(self, state_dir: Path, images: ImageStore, config: NsConfig | None = None) -> None:
        self._state_dir = state_dir
        self._config = config if config is not None else NsConfig()
        self.images = images
        self._counters = _Counters()
        self._sandboxes: dict[str, NsSandbox] = {}
        self._inits: dict[str, NsSandbox] = {}
        self._cleaning: set[asyncio.Task[None]] = set()
        self._by_key: dict[str, asyncio.Future[NsSandbox]] = {}
        self._plans: dict[str, Plan] = {}
        self._snapshots: dict[str, tuple[SandboxSpec, FrozenStack]] = {}
        self._digests = DigestCache()
        self._cgroups: cgroup.Place | None = None
        self._started = self._closed = False
        self._zygote: ZygoteHost | None = None
        self._lost = asyncio.Event()
        self._guard: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Reap what dead drivers left, then start the zygote."""
        if self._started:
            raise SandboxSpecError("this driver was started before; make another one")
        if not linux.supported():
            raise SandboxSpecError(f"driver ns does not know the system calls of {linux.MACHINE}")
        self._started = True
        owner = store_owner()
        become = partial(linux.set_fs_user, owner) if os.geteuid() == 0 else None
        self._threads = ReservedThreads(FILE_THREADS, "sandbox-files", initializer=become)
        place = await asyncio.to_thread(preflight.find_cgroups)
        self._counters.reaped = await asyncio.to_thread(reap_dead, self._state_dir)
        self._instance = open_instance(self._state_dir, owner)
        self._frozen = FrozenStore(self._instance)
        self._layers = Layers(self.images)
        try:
            if place is not None:
                groups = place.paths(f"{cgroup.SHARED}/{self._instance.name}")
                self._instance.note_cgroups([str(path) for path in groups])
                self._cgroups = preflight.try_cgroups(place, self._instance.name, owner)
            paths = [str(path) for path in self.cgroup_paths()]
            self._zygote = await ZygoteHost.start(
                self._instance, str(self.images.layers_dir.absolute()), owner, paths, self._on_gone, self._on_zygote_end
            )
            guard = disk.guard(self._config, self._instance.fd, self._held, self._evict, self._of_production)
            self._guard = asyncio.create_task(guard)
        except BaseException:
            await self.close()
            raise

    # --- protocol ---

    async def capabilities(self) -> Capabilities:
        return Capabilities(
            driver="ns",
            enforcement=levels(self._cgroups is not None),
            networks=("none", "host"),
            memory_fork=False,
            unprivileged=os.geteuid() != 0,
        )

    async def preflight(self) -> Sequence[PreflightCheck]:
        return await preflight.run(self)

    async def create(self, spec: SandboxSpec, *, key: str = "", deadline_s: float = DEFAULT_DEADLINE_S) -> NsSandbox:
        return await self._once(key, lambda: self._create(spec, None, deadline_s))

    async def create_from(
        self, snapshot_id: str, *, key: str = "", deadline_s: float = DEFAULT_DEADLINE_S
    ) -> NsSandbox:
        spec, below = self._snapshot(snapshot_id)
        return await self._once(key, lambda: self._create(spec, below, deadline_s))

    async def drop_snapshot(self, snapshot_id: str) -> None:
        _, below = self._snapshot(snapshot_id)
        del self._snapshots[snapshot_id]
        await self.in_file_thread(lambda: self._frozen.release(below.frozen))

    async def get(self, sandbox_id: str) -> NsSandbox:
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise SandboxNotFoundError(f"no sandbox {sandbox_id!r} is alive on this driver") from None

    async def list(self) -> tuple[SandboxInfo, ...]:
        now = time.monotonic()
        return tuple(
            SandboxInfo(sandbox.sandbox_id, sandbox.spec.labels, now - sandbox.created_at, sandbox.ends_at - now)
            for sandbox in self._sandboxes.values()
        )

    async def metrics(self) -> DriverMetrics:
        counters = self._counters
        return DriverMetrics(
            live=len(self._sandboxes),
            created=counters.created,
            destroyed=counters.destroyed,
            expired=counters.expired,
            execs=counters.execs,
            reaped_at_start=counters.reaped,
        )

    async def close(self) -> None:
        if self._closed or not self._started:
            return
        self._closed = True
        if self._guard is not None:
            self._guard.cancel()
            await asyncio.gather(self._guard, return_exceptions=True)
        await asyncio.gather(*(self.destroy(sandbox) for sandbox in list(self._sandboxes.values())))
        await asyncio.gather(*self._cleaning, return_exceptions=True)
        if self._zygote is not None:
            await self._zygote.stop()
        self._threads.shutdown(wait=True)
        await asyncio.to_thread(self._remove_instance)

    def live(self) -> Sequence[NsSandbox]:
        """The sandboxes alive now."""
        return tuple(self._sandboxes.values())

    @property
    def zygote_pid(self) -> int:
        """The zygote's process, also when it has ended; 0 before `start`."""
        return self._zygote.pid if self._zygote is not None else 0

    def cgroup_paths(self) -> Sequence[Path]:
        """This driver's own groups; none where limits are held by rlimits only."""
        return self._cgroups.paths("") if self._cgroups is not None else []

    # --- for NsSandbox ---

    async def in_file_thread(self, work: Callable[[], T]) -> T:
        """Run file work as the sandbox's user."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def count_exec(self) -> None:
        self._counters.execs += 1

    def keep_snapshot(self, spec: SandboxSpec, below: FrozenStack) -> str:
        snapshot_id = f"snap-{secrets.token_hex(8)}"
        self._frozen.hold(below.frozen)
        self._snapshots[snapshot_id] = (spec, below)
        return snapshot_id

    async def start_init(self, sandbox: NsSandbox, lifetime_s: float, deadline_s: float) -> None:
        """Fork an init for the sandbox's stack and wait until its root is built."""
        limits = self._plans[sandbox.sandbox_id]
        ours, theirs = wire.pair()
        ready = sandbox.attach(ours)
        self._inits[sandbox.init_name] = sandbox
        try:
            message = {
                "op": "create",
                "sandbox": sandbox.init_name,
                "hostname": sandbox.sandbox_id,
                "network": sandbox.spec.network,
                "lifetime_s": max(0.0, lifetime_s),
                "rlimits": limits.rlimits,
                "processors": limits.processors,
                **sandbox.stack.mount_paths(),
            }
            reply = await self._live_zygote().request(message, deadline_s, (theirs.fileno(),))
        finally:
            theirs.close()
        sandbox.pid = reply["pid"]
        # Meanwhile init builds its root. It starts no command before it is told to, and is told after both.
        settled = asyncio.to_thread(self._settle, sandbox, limits)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(ready, settled)
        except TimeoutError:
            raise SandboxInfraError(f"sandbox {sandbox.sandbox_id}: not ready within {deadline_s:g} s") from None
        sandbox.warm()  # only now: what init forks before it is in its cgroup stays outside

    def _settle(self, sandbox: NsSandbox, limits: Plan) -> None:
        """Put the new init into its cgroup and its pid into the record."""
        if self._cgroups is not None and limits.cgroup:
            try:
                cgroup.enter(self._cgroups, sandbox.sandbox_id, sandbox.pid, limits.cgroup)
            except OSError as error:
                raise SandboxInfraError(f"sandbox {sandbox.sandbox_id}: cgroup: {error}") from error
        sandbox.record.pid, sandbox.record.start_ticks = sandbox.pid, start_ticks(sandbox.pid)
        self._instance.write_record(sandbox.record)

    async def stop_init(self, sandbox: NsSandbox) -> None:
        """Kill the sandbox's processes and wait until the kernel has let go of them."""
        sandbox.detach()
        if sandbox.init_name and not sandbox.gone.is_set() and self._zygote is not None and not self._zygote.ended:
            await self._kill_init(sandbox.init_name)
            try:
                async with asyncio.timeout(DEFAULT_DEADLINE_S):
                    await sandbox.gone.wait()
            except TimeoutError:
                raise SandboxInfraError(f"sandbox {sandbox.sandbox_id}: its processes do not end") from None

    def release_init(self, sandbox: NsSandbox) -> None:
        """Let the sandbox's init end, without waiting for it; its end is no news any more."""
        self._inits.pop(sandbox.init_name, None)
        sandbox.detach()
        sandbox.gone.set()
        self._later(self._kill_init(sandbox.init_name))

    async def _kill_init(self, name: str) -> None:
        with suppress(SandboxInfraError):  # gone, or never made
            await self._live_zygote().request({"op": "kill", "sandbox": name}, DEFAULT_DEADLINE_S)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        """Do something that nobody waits for before `close`."""
        task = asyncio.ensure_future(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def destroy(self, sandbox: NsSandbox) -> None:
        await self._evict(sandbox.sandbox_id, "destroyed")

    async def _evict(self, sandbox_id: str, why: str) -> None:
        sandbox = self._sandboxes.pop(sandbox_id, None)
        if sandbox is None:
            return
        sandbox.fail(why)
        self._counters.destroyed += 1
        await self._end(sandbox)

    def _of_production(self, sandbox_id: str) -> bool:
        return sandbox_id in self._sandboxes and self._sandboxes[sandbox_id].spec.production

    async def _held(self) -> dict[str, int]:
        """Bytes that each live sandbox's files take; one that is just being made or ended is left out."""

        def measure() -> dict[str, int]:
            held = {}
            for sandbox in list(self._sandboxes.values()):
                with suppress(OSError, RecursionError):
                    held[sandbox.sandbox_id] = sandbox.stack.disk_bytes()
            return held

        return await self.in_file_thread(measure)

    async def renew(self, sandbox: NsSandbox, lifetime_s: float) -> None:
        message = {"op": "renew", "sandbox": sandbox.init_name, "lifetime_s": lifetime_s}
        await self._live_zygote().request(message, DEFAULT_DEADLINE_S)
        sandbox.ends_at = time.monotonic() + lifetime_s

    async def measure(self, sandbox: NsSandbox, processes: int) -> SandboxMetrics:
        memory = cgroup.memory_bytes(self._cgroups, sandbox.sandbox_id) if self._cgroups is not None else None
        held = await self.in_file_thread(sandbox.stack.disk_bytes)
        return SandboxMetrics(processes=processes, memory_bytes=memory, cpu_s=None, disk_bytes=held)

    # --- inside ---

    async def _once(self, key: str, make: Callable[[], Awaitable[NsSandbox]]) -> NsSandbox:
        """One sandbox for each idempotency key, as long as it lives."""
        if not key:
            return await make()
        task = self._by_key.get(key)
        if task is not None and task.done() and not self._is_live(task):
            task = None
        if task is None:
            task = self._by_key[key] = asyncio.ensure_future(make())
        return await asyncio.shield(task)

    def _is_live(self, task: "asyncio.Future[NsSandbox]") -> bool:
        if task.cancelled() or task.exception() is not None:
            return False
        return task.result().sandbox_id in self._sandboxes

    async def _create(self, spec: SandboxSpec, below: FrozenStack | None, deadline_s: float) -> NsSandbox:
        check_spec(spec)
        limits = plan(spec.limits, self._cgroups is not None, turn=self._counters.created)
        layers = self._layers.of(spec)
        makes_way = self._admit(spec)
        sandbox_id = f"sb-{secrets.token_hex(8)}"
        record = Record(sandbox_id, dict(spec.labels), time.time(), spec.lifetime_s)
        stack = Stack(
            sandbox_id,
            self._instance,
            self._frozen,
            layers,
            self._layers.base(layers),
            self._layers.reader(layers),
            self._digests,
            below,
        )
        sandbox = NsSandbox(self, sandbox_id, spec, stack, record)
        self._plans[sandbox_id] = limits
        self._sandboxes[sandbox_id] = sandbox
        try:
            if makes_way is not None:
                await self._evict(makes_way.sandbox_id, "its place was needed for a sandbox of production")
                admit(self._config, len(self._sandboxes) - 1, self._instance.fd)  # disk or memory may still be short
            await self.in_file_thread(lambda: self._prepare(record, stack))
            if self._cgroups is not None and limits.cgroup:
                await asyncio.to_thread(cgroup.make_group, self._cgroups, sandbox_id, limits.cgroup)
            await self.start_init(sandbox, spec.lifetime_s, deadline_s)
        except BaseException as error:
            await self.destroy(sandbox)
            if isinstance(error, OSError):
                raise SandboxInfraError(f"sandbox {sandbox_id} could not be made: {error}") from error
            raise
        self._counters.created += 1
        sandbox.made = True
        return sandbox

    def _admit(self, spec: SandboxSpec) -> NsSandbox | None:
        """Raise unless one more sandbox fits, or will once the returned one is gone. From here to its eviction nothing
        may be awaited: its place would be taken by others."""
        try:
            admit(self._config, len(self._sandboxes), self._instance.fd)
        except SandboxAdmissionError:
            rollouts = [one for one in self._sandboxes.values() if one.made and not one.spec.production]
            if not spec.production or not rollouts:
                raise
            return rollouts[-1]
        return None

    def _prepare(self, record: Record, stack: Stack) -> None:
        self._instance.write_record(record)  # intent first
        stack.make()

    def _snapshot(self, snapshot_id: str) -> tuple[SandboxSpec, FrozenStack]:
        try:
            return self._snapshots[snapshot_id]
        except KeyError:
            raise SandboxNotFoundError(f"no snapshot {snapshot_id!r} on this driver") from None

    def _live_zygote(self) -> ZygoteHost:
        if self._zygote is None or self._zygote.ended:
            raise SandboxInfraError("the driver's zygote has ended; start another driver")
        return self._zygote

    def _on_gone(self, init_name: str, status: int, expired: bool) -> None:
        """An init has ended. If it was a sandbox's present one and nobody asked for that, clean up behind it."""
        sandbox = self._inits.pop(init_name, None)
        if sandbox is None or sandbox.init_name != init_name:
            return
        how = "its lifetime is over" if expired else f"its init ended ({describe_status(status)})"
        sandbox.ended(how)
        if self._sandboxes.pop(sandbox.sandbox_id, None) is not None:
            self._counters.expired += expired
            self._later(self._end(sandbox))

    async def lost(self) -> None:
        """Returns once this driver can make no more sandboxes though nobody closed it: its process must end, so that
        the next one starts a driver."""
        await self._lost.wait()

    def _on_zygote_end(self) -> None:
        self._lost.set()
        for sandbox in list(self._sandboxes.values()):
            sandbox.gone.set()
            sandbox.fail("the driver's zygote has ended")

    async def _end(self, sandbox: NsSandbox) -> None:
        """End what runs and remove what is left, after a snapshot that may be under way."""
        async with sandbox.snapshotting:
            try:
                await self.stop_init(sandbox)
            finally:
                await self._clean_up(sandbox)

    async def _clean_up(self, sandbox: NsSandbox) -> None:
        name = sandbox.sandbox_id
        limits = self._plans.pop(name, None)
        if self._cgroups is not None and limits is not None and limits.cgroup:
            groups = self._cgroups.only(limits.cgroup).paths(name)
            await asyncio.to_thread(remove_cgroups, [str(path) for path in groups])
        await self.in_file_thread(lambda: self._remove(sandbox))

    def _remove(self, sandbox: NsSandbox) -> None:
        sandbox.stack.remove()
        self._instance.forget_record(sandbox.sandbox_id)

    def _remove_instance(self) -> None:
        remove_tree(self._instance.name, self._instance.state_fd)
        if self._cgroups is None or not cgroup.remove_parent(self._cgroups):
            remove_tree(f"{self._instance.name}.lock", self._instance.state_fd)
        self._instance.close()
        self._layers.close()


def describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"signal {-code}" if code < 0 else f"exit code {code}"
