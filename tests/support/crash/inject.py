"""Does to a running deployment what a plan says. Each injection returns once the fault is over.

What is over when: a killed process is gone (Ray starts the next one), a paused one goes on, a broker answers again, the
store's proxy passes again. Whether the job goes on is the harness's question. Only processes of this deployment are
signalled: actors by the cluster's own table, helpers as their children, services by the stack's mark.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import ray.exceptions
from aiokafka import AIOKafkaConsumer

from odradek.infra.stack import processes
from odradek.infra.stack.kafka import Kafka
from odradek.infra.stack.processes import in_sessions, marked, session_of
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import Stack
from odradek.infra.stack.state import stack_id
from odradek.streams import topics
from odradek.streams.log import EventLog
from support.crash.cluster import Cluster, dead, send
from support.crash.host import children_of, program_of
from support.crash.inside import die_at, move_clock
from support.crash.plan import EVERYTHING, Fault
from support.crash.proxy import FaultyProxy, Mode
from support.waiting import lasting

TESTS = Path(__file__).parents[2]
UP_S = 180.0
"""Seconds for a killed actor to be there again. Starting one takes 3 to 10 s on idle cores, and many may start."""
RIVAL_S = 12.0
"""Seconds a rival has while the owner of its role stands still: past the transaction's time-out."""
POINT_S = 20.0
"""Seconds an armed point is waited for; a role without work does not reach its own."""
STORE = "store"
"""The data folder of the object store's own stack, in the deployment's."""
ORPHANS_S = 6.0
"""Seconds that actors may go on without Ray before somebody has seen it: a guarded command takes as long."""
RECENT = 60
"""Records before a partition's end among which one is delivered twice: its session may still be running."""
PULSES, STOPPED_S, RUNNING_S = 20, 0.25, 0.05
"""A slow broker: stopped most of the time, as one whose disk is busy."""


@dataclass
class Injector:
    """One deployment's faults."""

    cluster: Cluster
    data: Path
    store: dict[str, Any]
    """Plain S3 settings, for a rival trainer."""
    proxy: FaultyProxy
    skipped: list[str]
    """Faults that found nothing to hit, with the reason."""
    duplicates: list[str]

    def __post_init__(self) -> None:
        self._broker = asyncio.Lock()
        self._store = asyncio.Lock()
        self._busy: dict[str, asyncio.Lock] = {name: asyncio.Lock() for name in self.cluster.names}

    async def inject(self, fault: Fault) -> None:
        """One fault, from beginning to end. Faults on the same actor, on the broker and on the store take turns; those
        that need the broker for a client of their own take turns with those that take it away."""
        run = getattr(self, f"_do_{fault.kind.replace(' ', '_')}")
        lock: Any = contextlib.nullcontext()
        if fault.target:
            lock = self._busy[fault.target]
        elif fault.kind.startswith("broker") or fault.kind in ("duplicate", "rebalance"):
            lock = self._broker
        elif fault.kind.startswith("store"):
            lock = self._store
        async with lock:
            await run(fault)

    # -- actors ------------------------------------------------------------------------------------------------

    async def _pid(self, name: str) -> int:
        """The actor's process; waits for one that is being started."""
        return await self.cluster.up(name, UP_S)

    async def _do_kill(self, fault: Fault) -> None:
        send(await self._pid(fault.target), signal.SIGKILL)

    async def _do_kill_at_point(self, fault: Fault) -> None:
        pid = await self._pid(fault.target)
        try:
            await self.cluster.inside(fault.target, die_at, fault.how, int(fault.amount))
        except (ray.exceptions.RayError, TimeoutError) as error:
            self._skip(fault, f"could not be armed: {type(error).__name__}")
            return
        if await dead(pid, POINT_S):
            return
        self._skip(fault, f"not reached within {POINT_S:g} s; killed where it stood")
        send(pid, signal.SIGKILL)

    async def _do_kill_helper(self, fault: Fault) -> None:
        """The sandbox host below an environment or reward actor, or the projections' worker."""
        children = children_of(await self._pid(fault.target))
        for child in children:
            send(child, signal.SIGKILL)
        if not children:
            self._skip(fault, "it has no helper now")

    async def _do_kill_sandbox(self, fault: Fault) -> None:
        """One sandbox's first process: the grandchild of its actor."""
        sandboxes = [box for helper in children_of(await self._pid(fault.target)) for box in children_of(helper)]
        if sandboxes:
            send(sandboxes[len(sandboxes) // 2], signal.SIGKILL)
        else:
            self._skip(fault, "it has no sandbox now")

    async def _do_pause(self, fault: Fault) -> None:
        pid = await self._pid(fault.target)
        if send(pid, signal.SIGSTOP):
            await lasting(fault.amount)
            send(pid, signal.SIGCONT)

    async def _do_clock(self, fault: Fault) -> None:
        await self._pid(fault.target)
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            await self.cluster.inside(fault.target, move_clock, fault.amount)

    async def _do_zombie(self, fault: Fault) -> None:
        """The owner stands still, a rival takes over and dies, the owner comes back: fenced, it must change nothing.
        A fenced owner stops for good, as it should; its operator starts it again."""
        pid = await self._pid(fault.target)
        if not send(pid, signal.SIGSTOP):
            return
        try:
            async with rival(fault.target, self.cluster.deployment, self.store):
                await lasting(RIVAL_S)
                send(pid, signal.SIGCONT)
                await lasting(RIVAL_S / 4)
        finally:
            send(pid, signal.SIGCONT)
        send(pid, signal.SIGKILL)

    # -- services ----------------------------------------------------------------------------------------------

    def _broker_pids(self) -> list[int]:
        return [name.pid for name in marked(f"{stack_id(self.data)}/kafka")]

    async def _do_broker_kill(self, _fault: Fault) -> None:
        for pid in self._broker_pids():
            send(pid, signal.SIGKILL)
        await asyncio.to_thread(Stack(self.data, [Kafka(self.data)]).up)

    async def _do_broker_pause(self, fault: Fault) -> None:
        pids = self._broker_pids()
        for pid in pids:
            send(pid, signal.SIGSTOP)
        await lasting(fault.amount)
        for pid in pids:
            send(pid, signal.SIGCONT)

    async def _do_broker_slow(self, _fault: Fault) -> None:
        pids = self._broker_pids()
        for _ in range(PULSES):
            for number, seconds in ((signal.SIGSTOP, STOPPED_S), (signal.SIGCONT, RUNNING_S)):
                for pid in pids:
                    send(pid, number)
                await lasting(seconds)

    async def _do_store(self, fault: Fault) -> None:
        mode: Mode = fault.how  # type: ignore[assignment]
        self.proxy.become(mode)
        await lasting(fault.amount)
        self.proxy.become("pass")

    async def _do_store_kill(self, _fault: Fault) -> None:
        """The store itself, behind the proxy."""
        folder = self.data / STORE
        for one in marked(f"{stack_id(folder)}/"):
            send(one.pid, signal.SIGKILL)
        await asyncio.to_thread(Stack(folder, [Seaweed(folder)]).up)

    async def _do_ray_kill(self, fault: Fault) -> None:
        """One of Ray's two, and what a guarded command does a little later: its driver dies too (the harness sees to
        that). Or everything at once."""
        if fault.how == EVERYTHING:
            await asyncio.to_thread(kill_all, [self.data, self.data / STORE])
            return
        pids = [name.pid for name in marked(f"{stack_id(self.data)}/ray") if program_of(name.pid) == fault.how]
        assert pids, f"no {fault.how} to kill"
        for pid in pids:
            send(pid, signal.SIGKILL)
        await lasting(ORPHANS_S)

    # -- the log -----------------------------------------------------------------------------------------------

    async def _do_duplicate(self, fault: Fault) -> None:
        """A record that is on an at-least-once topic already, once more: the very same bytes."""
        async with EventLog(self.cluster.deployment.kafka) as log:
            ends = {p: end for p, end in (await log.stable_ends(fault.how)).items() if end}
            if not ends:
                self._skip(fault, "nothing is there yet")
                return
            partition = sorted(ends)[int(fault.amount * len(ends))]
            recent = min(RECENT, ends[partition])
            offset = ends[partition] - 1 - int(fault.amount * recent)
            async for record in log.read(fault.how, partition, offset, offset + 1):
                ref = await log.append_raw(
                    fault.how, record.key_bytes, record.value, record.headers, partition=partition
                )
                self.duplicates.append(f"{record.ref} again at {ref}")

    async def _do_rebalance(self, fault: Fault) -> None:
        """A stranger joins the group, gets partitions, reads nothing, and leaves."""
        config = self.cluster.deployment.kafka
        stranger = AIOKafkaConsumer(
            config.name(topics.SESSIONS.name), group_id=config.name(fault.how), enable_auto_commit=False,
            **config.client_options(),
        )  # fmt: skip
        await stranger.start()
        try:
            await lasting(fault.amount)
        finally:
            await stranger.stop()

    def _skip(self, fault: Fault, reason: str) -> None:
        self.skipped.append(f"{fault}: {reason}")


def kill_all(folders: Sequence[Path]) -> None:
    """Kill whatever the stacks of these folders run, what they started included, until there is none."""
    prefixes = [f"{stack_id(folder)}/" for folder in folders]
    sessions: set[int] = set()
    while found := [*(name for prefix in prefixes for name in marked(prefix)), *in_sessions(sessions)]:
        sessions |= {session for name in found if (session := session_of(name)) is not None}
        for name in found:
            processes.send(name, signal.SIGKILL)


@contextlib.asynccontextmanager
async def rival(role: str, deployment: Any, store: dict[str, Any]) -> Any:
    """Another owner of a role, in a process of its own, killed at the end of the block."""
    given = {
        "role": role, "point": "", "nth": 0, "kafka": msgspec.to_builtins(deployment.kafka),
        "lane": msgspec.to_builtins(deployment.lane), "s3": store, "incarnation": deployment.incarnation,
        "warm_start": deployment.warm_start_dir,
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "support.crash_child"],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(given).encode())
    process.stdin.close()
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
