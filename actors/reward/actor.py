"""The reward actor: every session that ends gets one verdict on rewards.v1.

Consumes sessions.v1 as a consumer group and acts on session.completed and session.failed only; reads back that one
session, grades it in a sandbox of its own, appends reward.assigned or reward.ungraded. At least once: a verdict's id
follows from session and grader version, so a repeated one is the same event, and the first counts.
A session with a record that nobody can decode, or whose end can't be handled, is `ungraded` at once, before that record
becomes a dead letter: it is discarded for training, for ever, and its group goes on with a fresh attempt; `torn.py`
brings the session to its end.
Waits: for the log and the sandbox host, within their deadlines; a grader that can't run is `ungraded` with its cause.
Production sessions have no hidden tests: people's answers are their reward (`feedback.py`, a consumer beside this one).
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from odradek.actors.environment.start import SandboxFactory, end_with, ns_driver
from odradek.actors.reward.efficiency import Conduct, conduct_of
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.reward.feedback import GROUP as FEEDBACK_GROUP
from odradek.actors.reward.feedback import FeedbackRewards
from odradek.actors.reward.grader import GRADE_DEADLINE_S, GRADER, VERSION, Grade, grade
from odradek.actors.reward.opening import opening
from odradek.actors.reward.torn import TornSessions
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import blobs_of, log_of
from odradek.actors.telemetry.tracing import Tracing
from odradek.sandbox_images.store import ImageStore
from odradek.streams import topics
from odradek.streams.assembly.reader import Extent, read_sessions
from odradek.streams.consumers import HANDLER_S, GroupConsumer, Later
from odradek.streams.dlq import Why
from odradek.streams.envelope import Event, Record, event_id
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.rewards import RewardAssigned, RewardUngraded
from odradek.streams.events.sessions import SessionCompleted, SessionFailed
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.faults import reach

log = logging.getLogger(__name__)

GROUP = "reward"
TASKS_KEPT = 500
"""Task bodies kept in memory, so that the members of a group fetch theirs once."""
START_DEADLINE_S = 120.0
CAUSE_CHARACTERS = 2_000
"""Characters of the cause on the log. An error may quote what a task brought along; a verdict is a small record."""


class RewardActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._name = name
        self._tasks: dict[RecordRef, TaskPublished] = {}
        self._slots = asyncio.Semaphore(deployment.max_commands)
        self._graded = 0
        self._busy_ms = 0.0
        self._tracing = Tracing.of(deployment.otlp_endpoint, name)
        self._loop = LoopThread(name)
        self._loop.begin(self._start(), START_DEADLINE_S)
        self._loop.main(end_with(self._driver), name)
        self._loop.main(self._consumer.run(), name)
        self._loop.main(self._answers.run(), name)
        self._loop.main(TornSessions(self._log, deployment, GROUP).run(), name)

    async def _start(self) -> None:
        root = Path(self._deployment.data_dir)
        images = ImageStore(root / "images")
        self._driver = ns_driver(self._deployment, self._name, images)
        await self._driver.start()
        self._factory = SandboxFactory(self._driver, images, blobs_of(self._deployment))
        self._log = log_of(self._deployment)
        await self._log.start()
        self._consumer = GroupConsumer(
            self._log,
            GROUP,
            [topics.SESSIONS.name],
            self._on_record,
            instance=f"{GROUP}.{self._name}",
            handler_s=GRADE_DEADLINE_S + HANDLER_S,
            later=Later(self._deployment.dead_letter_keys),
            on_dead=self._on_dead,
        )
        self._feedback = FeedbackRewards(self._log, self._name)
        self._answers = GroupConsumer(
            self._log,
            FEEDBACK_GROUP,
            [topics.FEEDBACK.name, *map(topics.FEEDBACK.for_tenant, self._deployment.tenants)],
            self._feedback.on_record,
            instance=f"{FEEDBACK_GROUP}.{self._name}",
            later=Later(self._deployment.dead_letter_keys),
        )

    async def state(self) -> dict[str, Any]:
        """Counters for `status` and `watch`."""
        return {
            "graded": self._graded,
            "feedback": self._feedback.given,
            "busy_s": self._busy_ms / 1000,
            "paused": len(self._consumer.paused) + len(self._answers.paused),
            "fault": "; ".join(filter(None, (self._consumer.fault, self._answers.fault))),
        }

    async def shut_down(self) -> None:
        """End every grading sandbox."""
        await self._loop.call(self._driver.close())

    # -- one session -------------------------------------------------------------------------------------------

    async def _on_record(self, record: Record) -> None:
        event = record.event
        if not isinstance(event.body, SessionCompleted | SessionFailed) or event.meta.origin == "production":
            return
        if event.body.first_offset < 0 or not event.body.group_id:
            log.warning("session %s ended without a beginning or a group: no verdict", record.key)
            return
        session, began_ns = record.key or "", time.time_ns()
        extent = Extent(session, record.ref.partition, event.body.first_offset, record.ref.offset)
        records = await read_sessions(self._log, [extent])
        verdict: RewardAssigned | RewardUngraded
        if session not in records:
            verdict = self._ungraded(extent, event.body.group_id, "a record of the session can't be decoded", True)
        else:
            conduct = conduct_of(records[session])
            if conduct.end is None:
                log.info("session %s: the end at %s is a former owner's", session, record.ref)
                return
            verdict = await self._verdict(extent, event.body.group_id, conduct)
        await self._append(session, event.meta, event.id, verdict, event.traceparent)
        self._tracing.grading(event.traceparent, verdict, began_ns)

    async def _on_dead(self, record: Record, why: Why, error: str) -> None:
        """Tell the session's group, which would wait for its deadline. Whose record it is only its key says."""
        session = record.key_bytes or b""
        found = await opening(self._log, session, record.ref.partition, record.ref.offset) if session else None
        if found is None:
            log.warning("%s is of no session within reach: nobody waits for it", record.ref)
            return
        began, event = found
        if event.meta.origin == "production" or not event.body.group_id:
            return
        extent = Extent(record.key or "", record.ref.partition, began.offset, record.ref.offset)
        cause = f"a record of the session is a dead letter ({why}) at {record.ref}: {error}"
        verdict = self._ungraded(extent, event.body.group_id, cause, True)
        await self._append(extent.session_id, event.meta, event.id, verdict, event.traceparent)

    async def _verdict(self, extent: Extent, group: str, conduct: Conduct) -> RewardAssigned | RewardUngraded:
        try:
            async with self._slots:
                result = await grade(await self._task(conduct), conduct, self._factory)
        except GraderCouldNotRun as error:
            log.warning("session %s is ungraded: %s", extent.session_id, error.cause)
            return self._ungraded(extent, group, error.cause, error.retryable)
        self._graded += 1
        self._busy_ms += result.milliseconds
        return _assigned(extent, group, conduct, result)

    async def _task(self, conduct: Conduct) -> TaskPublished:
        ref = conduct.opened.task if conduct.opened is not None else None
        if ref is None:
            raise GraderCouldNotRun("the session has no task to grade against", retryable=False)
        if ref not in self._tasks:
            body = (await self._log.read_ref(ref)).event.body
            if not isinstance(body, TaskPublished):
                raise GraderCouldNotRun(f"{ref} holds no task", retryable=False)
            if len(self._tasks) >= TASKS_KEPT:
                self._tasks.pop(next(iter(self._tasks)))
            self._tasks[ref] = body
        return self._tasks[ref]

    @staticmethod
    def _ungraded(extent: Extent, group: str, cause: str, retryable: bool) -> RewardUngraded:
        return RewardUngraded(
            session_id=extent.session_id,
            group_id=group,
            partition=extent.partition,
            first_offset=extent.first,
            last_offset=extent.last,
            grader=GRADER,
            grader_version=VERSION,
            cause=cause[:CAUSE_CHARACTERS],
            retryable=retryable,
        )

    async def _append(
        self, session: str, meta: Meta, cause: str, verdict: RewardAssigned | RewardUngraded, traceparent: str | None
    ) -> None:
        event = Event.of(
            verdict,
            id=event_id("reward", session, GRADER, VERSION),
            source=self._name,
            meta=Meta(
                origin=meta.origin,
                tenant=meta.tenant,
                subject=meta.subject,
                causation=cause,
                correlation=meta.correlation,
                time_ms=meta.time_ms,
            ),
            traceparent=traceparent,
        )
        await reach("reward.before_append")
        await self._log.append(topics.REWARDS.name, session, event)
        await reach("reward.after_append")


def _assigned(extent: Extent, group: str, conduct: Conduct, result: Grade) -> RewardAssigned:
    return RewardAssigned(
        session_id=extent.session_id,
        group_id=group,
        partition=extent.partition,
        first_offset=extent.first,
        last_offset=extent.last,
        grader=GRADER,
        grader_version=VERSION,
        components=dict(result.components),
        total=result.total,
        tests_passed=result.passed,
        tests_failed=result.failed,
        notes=result.notes,
        sampled_tokens=conduct.sampled_tokens,
        oldest_version=min(conduct.versions, default=0),
        newest_version=max(conduct.versions, default=0),
        reads_before_edit=conduct.reads_before_edit,
        parallel_turns=conduct.parallel_turns,
        turns=conduct.turns,
        grading_ms=result.milliseconds,
    )
