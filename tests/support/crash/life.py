"""One life of a deployment under fire: a stack, a tiny job, faults by seed; at the end of the plan rest, and what the
guarantees say of all of it.

Owns no truth: progress, rest and verdicts are read from the log and the host. What the next life must know is
`Carried`, told after every round. Waits: for progress after each round of faults (`PROGRESS_S`) and for rest at the end
(`SETTLE_S`); a wait that runs out ends the run and is itself a violation, with what stood still.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

from odradek.actors.notary.access import own_keys, vault_of
from odradek.actors.projections.actor import SNAPSHOT
from odradek.actors.runtime.store import blobs_of, log_of
from odradek.infra.cluster import actors
from odradek.infra.cluster.session import Running, deployment_up
from odradek.infra.config.load import load
from odradek.infra.config.tree import Config
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.follow import RunFollower
from odradek.infra.stack.seaweed import Seaweed
from odradek.infra.stack.stack import Stack
from odradek.streams import topics
from odradek.streams.audit.verify import verify as audit
from odradek.streams.envelope import Record
from odradek.streams.errors import StreamError
from odradek.streams.events.sessions import SessionCompleted, SessionFailed, SessionOpened
from odradek.streams.privacy.erasure import Erasure
from odradek.streams.projections.fold import fold as fold_tables
from odradek.streams.projections.views import Snapshot, snapshot
from odradek.streams.replay.rebuild import rebuild_all
from support.crash.checks import violations
from support.crash.cluster import Cluster
from support.crash.host import held, instances, left_behind
from support.crash.inject import STORE, Injector
from support.crash.load import ATTEMPTS
from support.crash.outcome import Carried, Round, Settings
from support.crash.plan import RAY_KILL, Fault, matrix, plan
from support.crash.proxy import FaultyProxy
from support.crash.tokens import sampled
from support.crash.world import Answer, World, world_of
from support.waiting import lasting, within

PROGRESS_S = 300.0
"""Seconds for the job to go on after a round of faults. The longest honest wait: a dead session host's members are
handed over, an engine starts, a session gives up on it (120 s) and is replaced."""
SETTLE_S = 600.0
"""Seconds for everything under way to end. A group's own deadline is 180 s, a session's wall clock 300 s."""
STEP_EVERY = 3
"""Rounds after which a training step must have been taken as well."""
SESSION_RECORDS = 12
"""Records on sessions.v1 that count as going on."""
LOOK_S = 0.5
QUIET_S = 3.0
"""Seconds without a change before the run counts as at rest."""

FLAGS = (
    "lane.groups_per_batch=2",
    f"lane.attempts={ATTEMPTS}",
    "trainer.minibatches=1",
    "session.max_in_flight=24",
    "session.actors=2",
    "inference.replicas=2",
    "reward.actors=2",
    "kafka.prefix=crash",
    "audit.interval_s=10",
)

DIED_WITH_RAY = 75
"""Exit code of a life whose Ray was killed."""

Tell = Callable[[str | Carried], None]
T = TypeVar("T")


def live(settings: Settings, carried: Carried, tell: Tell) -> None:
    """Come up, hurt it from the plan's next round on, and either die with Ray (this process ends at once) or let it
    rest, stop everything and look: then the outcome is `checked`."""
    with services(settings.data) as (proxy, store):
        config = config_of(settings, store)
        with deployment_up(config, tell) as running:
            world = asyncio.run(Life(settings, running, proxy, store, carried, tell).run())
    world.left = [*world.left, *left_behind(settings.data, carried.known)]
    carried.outcome.violations = violations(world)
    carried.outcome.checked = True
    tell(carried)


def config_of(settings: Settings, store: dict[str, Any]) -> Config:
    """The deployment's configuration, with its store behind the proxy."""
    flags = [*FLAGS, *settings.flags, f"s3.endpoint={store['endpoint']}", f"s3.bucket={store['bucket']}"]
    flags.append(f"s3.credentials_file={store_of(settings.data).keys_file}")
    return load(flags=flags, data=settings.data, environment={}).config


def store_of(data: Path) -> Seaweed:
    """The object store lies beside the deployment's stack, so that a proxy can stand between them."""
    return Seaweed(data / STORE)


@contextlib.contextmanager
def services(data: Path) -> Iterator[tuple[FaultyProxy, dict[str, Any]]]:
    """A store and the proxy in front of it; yields plain S3 settings that lead through the proxy."""
    data.mkdir(parents=True, exist_ok=True)
    seaweed = store_of(data)
    stack = Stack(data / STORE, [seaweed])
    stack.up()
    try:
        access = seaweed.access(stack.address("s3"))
        assert access.keys is not None
        with FaultyProxy(int(stack.address("s3").rpartition(":")[2])) as proxy:
            yield proxy, {
                "endpoint": f"http://127.0.0.1:{proxy.port}", "bucket": access.bucket, "region": access.region,
                "access_key": access.keys.access_key, "secret_key": access.keys.secret_key,
            }  # fmt: skip
    finally:
        stack.down()


class Life:
    """The asynchronous part of one life."""

    def __init__(
        self,
        settings: Settings,
        running: Running,
        proxy: FaultyProxy,
        store: dict[str, Any],
        carried: Carried,
        tell: Tell,
    ) -> None:
        self._tell = tell
        self._settings = settings
        self._carried, self._outcome, self._load = carried, carried.outcome, carried.load
        self._cluster = Cluster(running)
        outcome = carried.outcome
        self._injector = Injector(self._cluster, settings.data, store, proxy, outcome.skipped, outcome.duplicates)
        self._lane = running.deployment.lane.lane
        self._waits: list[str] = []
        self._sessions_read: dict[int, int] = {}
        self._opened, self._ended = set[str](), set[str]()

    async def run(self) -> World:
        """Faults, rest, answers, the log. Does not return if the plan kills Ray."""
        async with log_of(self._cluster.deployment) as event_log:
            self._follower, self._log = RunFollower(event_log), event_log
            self._load.log = event_log
            publishing = asyncio.create_task(self._publish())
            try:
                await self._first_step()
                await self._rounds()
            finally:
                publishing.cancel()
                await asyncio.gather(publishing, return_exceptions=True)
            settled = not self._waits and await self._settle() and await self._erase(min(self._load.words))
            answers = await self._answers() if settled else []
            left = await self._still_held() if settled else []
            self._carried.known |= instances(self._settings.data)
            await asyncio.to_thread(actors.stop, self._cluster.deployment)
            return await self._world(settled, answers, left)

    # -- faults ------------------------------------------------------------------------------------------------

    async def _first_step(self) -> None:
        self._tell("waiting for the first training step")

        async def stepped() -> bool:
            return bool((await self._refresh()).steps)

        seconds = self._settings.first_step_s
        if not await within(stepped, seconds, LOOK_S):
            await self._stalled(f"waited {seconds:g} s for the first step")

    async def _rounds(self) -> None:
        """The plan from where it was left."""
        settings, names, carried = self._settings, self._cluster.names, self._carried
        rounds = (
            matrix(settings.seed, names)
            if settings.short
            else plan(settings.seed, settings.faults, names, settings.kinds)
        )
        if carried.hurt_since is not None:
            await self._over(rounds, carried.round - 1, time.monotonic() - carried.hurt_since)
            carried.hurt_since = None
        while carried.round < len(rounds) and not self._waits:
            number, began = carried.round, time.monotonic()
            carried.round += 1
            carried.known |= instances(settings.data)
            self._outcome.injected += rounds[number]
            if any(fault.kind == RAY_KILL for fault in rounds[number]):
                await self._die(rounds[number])
            try:
                await asyncio.gather(*(self._injector.inject(fault) for fault in rounds[number]))
            except TimeoutError:
                await self._stalled(f"round {number} ({_told(rounds[number])}): an actor did not come up again")
                return
            await self._over(rounds, number, time.monotonic() - began)

    async def _die(self, faults: list[Fault]) -> NoReturn:
        """The deployment's Ray is killed and this driver with it; what is left of the plan, and whether the job goes
        on, is for the next life. Told before as well: Ray may end a driver from within C++."""
        self._carried.hurt_since = time.monotonic()
        self._tell(self._carried)
        for fault in faults:
            await self._injector.inject(fault)
        self._tell(self._carried)
        os._exit(DIED_WITH_RAY)

    async def _over(self, rounds: list[list[Fault]], number: int, hurt: float) -> None:
        """A round's faults are over: the job goes on, or has stalled."""
        told, began = _told(rounds[number]), time.monotonic()
        await self._goes_on(number, told)
        this = Round(len(rounds[number]), hurt, time.monotonic() - began)
        self._outcome.rounds.append(this)
        self._tell(self._carried)
        fold = self._follower.fold
        self._tell(
            f"round {number + 1}/{len(rounds)}, {len(self._outcome.injected)} faults: {told} "
            f"({this.hurt:.0f} s, went on after {this.going_on:.0f} s; "
            f"{len(fold.steps)} steps, {len(fold.open_groups)} groups open)"
        )

    async def _goes_on(self, number: int, told: str) -> None:
        """New session records and a new score; now and then a new step. Sessions that only fail are no progress."""
        try:
            fold = await self._refresh()
            scores, steps = len(fold.gradings), len(fold.steps)
            records = await self._session_records()
        except TimeoutError:
            await self._stalled(f"round {number} ({told}): the log can't be read")
            return
        wanted_steps = steps + (number % STEP_EVERY == STEP_EVERY - 1)
        now = records

        async def gone_on() -> bool:
            nonlocal fold, now
            fold, now = await self._refresh(), await self._session_records()
            enough = now >= records + SESSION_RECORDS and len(fold.gradings) > scores
            return enough and len(fold.steps) >= wanted_steps

        if not await within(gone_on, PROGRESS_S, LOOK_S):
            await self._stalled(
                f"round {number} ({told}): within {PROGRESS_S:g} s {now - records} session records, "
                f"{len(fold.gradings) - scores} scores, {len(fold.steps) - steps} steps"
            )

    async def _stalled(self, what: str) -> None:
        states = {name: await self._cluster.state(name) for name in self._cluster.names if "session" not in name}
        pids = {name: self._cluster.pid(name) for name in self._cluster.names}
        evidence = {"states": states, "pids": pids}
        self._waits.append(what)
        (self._settings.data / "stalled.json").write_text(json.dumps(evidence, indent=1, default=str))
        self._tell(f"STALLED: {what}; {json.dumps(evidence, default=str)}")

    # -- the job -----------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Keep tasks waiting for as long as the run lasts."""
        while True:
            state = await self._cluster.state("controller")
            if state:
                await self._load.top_up(int(state["waiting_tasks"]))
            await lasting(LOOK_S)

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What the log answers; a broker that is away is waited for. Raises TimeoutError."""

        async def asked() -> tuple[T] | None:
            with contextlib.suppress(StreamError):
                return (await ask(),)
            return None

        async with asyncio.timeout(PROGRESS_S):
            found = await within(asked, math.inf, LOOK_S)
        assert found is not None, "without an answer there is a time-out"
        return found[0]

    async def _refresh(self) -> RunFold:
        """The fold of what is on the log now."""
        return await self._answer(self._follower.refresh)

    async def _session_records(self) -> int:
        return sum((await self._answer(lambda: self._log.stable_ends(topics.SESSIONS.name))).values())

    # -- rest --------------------------------------------------------------------------------------------------

    async def _settle(self) -> bool:
        """Nothing waits, nothing runs, everything assembled is trained: and it stays so for a while."""
        self._tell("letting what is under way end")
        fold = await self._refresh()
        decided = {group.task for group in fold.groups.values()}
        await self._load.cancel({ref for ref in self._load.tasks if ref not in decided})
        quiet_since, seen = time.monotonic(), (-1, "")

        async def at_rest() -> bool:
            nonlocal quiet_since, seen
            what = self._unfinished(await self._refresh(), await self._unended())
            now = (await self._session_records(), what)
            if now != seen:
                seen, quiet_since = now, time.monotonic()
            return not what and time.monotonic() - quiet_since > QUIET_S

        if await within(at_rest, SETTLE_S, LOOK_S * 2):
            return True
        await self._stalled(f"not at rest after {SETTLE_S:g} s: {seen[1]}")
        return False

    async def _erase(self, subject: str) -> bool:
        """One of the people is erased."""
        self._tell(f"erasing {subject}")
        report = await Erasure(self._log, blobs_of(self._cluster.deployment)).run(subject)
        if not report.done:
            await self._stalled(f"{subject} is not erased: {[store for store in report.stores if not store.done]}")
        return report.done

    def _unfinished(self, fold: RunFold, unended: list[str]) -> str:
        if fold.open_groups:
            return f"{len(fold.open_groups)} groups are open: {sorted(fold.open_groups)[:5]}"
        if fold.untrained:
            return f"{fold.untrained} batches are not trained"
        return f"{len(unended)} sessions have not ended: {unended[:5]}" if unended else ""

    async def _unended(self) -> list[str]:
        """Sessions that were opened and have no end yet, by their records' types alone. Reads what is new."""
        async for record in self._everything(topics.SESSIONS.name, self._sessions_read):
            kind = type_of(record)
            if kind == TAGS["opened"]:
                self._opened.add(record.key or "")
            elif kind in TAGS["ended"]:
                self._ended.add(record.key or "")
        return sorted(self._opened - self._ended)

    async def _everything(self, topic: str, read: dict[int, int] | None = None) -> AsyncIterator[Record]:
        """Every record of a topic from `read` on, which is brought up to date."""
        read = {} if read is None else read
        for number, end in sorted((await self._log.stable_ends(topic)).items()):
            start = read.get(number, await self._log.beginning(topic, number))
            async for record in self._log.read(topic, number, start, end):
                yield record
            read[number] = end

    # -- answers -----------------------------------------------------------------------------------------------

    async def _answers(self) -> list[Answer]:
        """What actors and projections say at rest, beside what the log says."""
        fold = await self._refresh()
        assembled = sum(batch.lane == self._lane for batch in fold.batches.values())
        engines = [name for name in self._cluster.names if name.startswith("inference")]
        wanted: dict[str, dict[str, Any]] = {
            "controller": {"open_groups": 0, "waiting_tasks": 0, "assembled": assembled, "trained": len(fold.steps)},
            "trainer": {"version": len(fold.steps), "fault": ""},
            "assembler": {"fault": ""},
            "notary": {"waiting_records": 0, "fault": ""},
            **{name: {"version": fold.current} for name in engines},
        }
        answers = []
        for name, facts in wanted.items():
            said = await self._agrees(name, facts)
            answers += [Answer(name, what, said.get(what), folded) for what, folded in facts.items()]
        return [*answers, await self._tables()]

    async def _agrees(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """The actor's state once it agrees, or as it is when patience ends: one that was just started reads on."""
        state: dict[str, Any] = {}

        async def agrees() -> bool:
            nonlocal state
            state = await self._cluster.state(name)
            return all(state.get(what) == folded for what, folded in facts.items())

        await within(agrees, PROGRESS_S / 3, LOOK_S)
        return state

    async def _tables(self) -> Answer:
        meant = msgspec.to_builtins(snapshot(await fold_tables(self._log)))
        said: Any = None

        def equal() -> bool:
            nonlocal said
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                path = self._settings.data / "projections" / SNAPSHOT
                said = msgspec.to_builtins(msgspec.json.decode(path.read_bytes(), type=Snapshot))
            return bool(said == meant)

        await within(equal, PROGRESS_S / 3, LOOK_S)
        differing = [part for part in meant if said is None or said.get(part) != meant[part]]
        return Answer("projections", "tables that differ from a plain fold", differing, [])

    async def _still_held(self) -> list[str]:
        """Sandboxes that live though every session has ended."""
        await within(lambda: not held(self._settings.data), PROGRESS_S / 3, LOOK_S)
        return [f"{box}: still there with every session ended" for box in held(self._settings.data)]

    # -- the end -----------------------------------------------------------------------------------------------

    async def _world(self, settled: bool, answers: list[Answer], left: list[str]) -> World:
        self._tell("reading the whole log and rebuilding every batch")
        records = [record for topic in topics.BY_NAME async for record in self._everything(topic)]
        report = await rebuild_all(self._log, self._lane)
        altered = await self._audited()
        world = world_of(
            records,
            acknowledged=self._load.acknowledged,
            rebuilt={batch.batch_id: batch.identical for batch in report.batches},
            answers=answers,
            left=left,
            altered=altered,
            words=self._load.words,
            waits=self._waits,
            settled=settled,
        )
        contexts = [token.given for token in sampled(world)]
        kinds = Counter(type(seen.body).__name__ for rows in world.log.values() for seen in rows)
        self._outcome.counts |= {
            "acknowledged": len(world.acknowledged), "records": len(records), "sessions": len(world.sessions),
            "resumed": kinds["SessionResumed"], "failed": kinds["SessionFailed"], "results": kinds["ToolCompleted"],
            "groups": kinds["GroupOpened"], "replaced": kinds["MemberReplaced"],
            "discarded": kinds["GroupDiscarded"], "batches": len(report.batches), "identical": report.identical,
            "steps": kinds["StepCompleted"], "erased": kinds["ErasureDone"], "tokens": len(contexts),
            "tokens sampled before": len(contexts) - len(set(contexts)),
        }  # fmt: skip
        return world

    async def _audited(self) -> list[str]:
        """What the log's own notary lets one see of it; nothing where the deployment has none."""
        deployment = self._cluster.deployment
        settings = deployment.audit
        if not settings.enabled:
            return []
        vault = vault_of(deployment.store, settings)
        try:
            opened = await vault.open()
            report = await audit(self._log, vault if opened else None, settings.name, own_keys(settings))
        finally:
            vault.close()
        self._outcome.counts["anchored"] = report.verified
        return [] if report.ok else [*map(str, report.findings)] or ["nothing is anchored"]


def _told(faults: list[Fault]) -> str:
    return "; ".join(map(str, faults))


TAGS: dict[str, Any] = {
    "opened": SessionOpened.__struct_config__.tag,
    "ended": {SessionCompleted.__struct_config__.tag, SessionFailed.__struct_config__.tag},
}


def type_of(record: Record) -> str:
    """A record's type by its header."""
    return next((value or b"" for name, value in record.headers if name == "ce_type"), b"").decode(errors="replace")
