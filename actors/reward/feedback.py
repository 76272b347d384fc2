"""People's answers to production sessions as rewards.

Consumes feedback.v1 and every tenant's feedback.v1.TENANT; produces reward.assigned for the first answer to a session
and reward.revised for each later one that says something else (accepted, then reverted). The component is `feedback`;
the total is the declared combination with the session's turns and errors. Promises:
- only a production session of the topic's own tenant gets a reward from feedback: nobody's answer touches what a grader
  said of a rollout, nor another tenant's session;
- an answer leads to one reward at most, also when a restart delivers it again behind a later one: each reward names the
  answer that caused it, and one that is named already is passed over;
- an answer that can't be used (malformed, of no session within reach, of one that has not ended) is a dead letter with
  the reason, and stops nobody's;
- a comment stays where it is: no reward repeats a person's words.
The reward says where the session lies, and the session's records carry its subject: whoever trains on it asks for that
subject's consent as of its own offsets, as for any production session (DESIGN section 8).
Waits: for the log, within its deadlines.
"""

from __future__ import annotations

import logging

from odradek.actors.reward import combine
from odradek.actors.reward.efficiency import Conduct, conduct_of
from odradek.actors.reward.errors import RewardError
from odradek.actors.reward.opening import ending
from odradek.streams import topics
from odradek.streams.assembly.reader import Extent, read_sessions
from odradek.streams.envelope import Event, Record, event_id
from odradek.streams.errors import DecodeError
from odradek.streams.events.meta import Meta
from odradek.streams.events.rewards import RewardAssigned, RewardRevised
from odradek.streams.events.sessions import SessionCompleted, SessionFailed
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog
from odradek.streams.priority import serving

log = logging.getLogger(__name__)

GROUP = "feedback"
GRADER = "feedback"
VERSION = f"1+{combine.VERSION}"


class FeedbackUnusable(RewardError):
    """Terminal for the answer: the message says what it does not fit."""


class FeedbackRewards:
    """The handler of one process. Answers to one session are handled one after the other if they are keyed by it, as
    ours are; of two that a foreign client wrote to two partitions at the same moment the first on rewards.v1 counts."""

    def __init__(self, event_log: EventLog, source: str) -> None:
        self._log = event_log
        self._source = source
        self.given = 0
        """Rewards written, for `status` and `watch`."""

    async def on_record(self, record: Record) -> None:
        """One answer, behind no grading of rollouts."""
        with serving(True):
            await self._on_answer(record)

    async def _on_answer(self, record: Record) -> None:
        event: Event[FeedbackGiven] = record.event
        answer = event.body
        extent, conduct = await self._session(answer.session_id, event.meta.tenant)
        components = {
            "feedback": combine.FEEDBACK[answer.verdict],
            "turns": float(conduct.turns),
            "errors": float(conduct.errors),
        }
        before, answered = await self._before(answer.session_id)
        if event.id in answered:
            return
        body: RewardAssigned | RewardRevised
        if before is None:
            body = _assigned(extent, conduct, components, answer.verdict)
        elif before == components:
            return
        else:
            body = RewardRevised(
                session_id=answer.session_id,
                group_id="",
                grader=GRADER,
                grader_version=VERSION,
                components=components,
                total=combine.total(components, "feedback"),
                reason=answer.verdict,
            )
        await self._append(event, conduct.meta, body, answer)
        self.given += 1

    async def _session(self, session: str, tenant: str) -> tuple[Extent, Conduct]:
        """The production session that an answer is about. Raises FeedbackUnusable."""
        end = await ending(self._log, session)
        if end is None:
            raise FeedbackUnusable(f"session {session[:80]!r} has not ended, or is not known: release this once it has")
        body = end.event.body
        assert isinstance(body, SessionCompleted | SessionFailed)
        extent = Extent(session, end.ref.partition, body.first_offset, end.ref.offset)
        records = (await read_sessions(self._log, [extent])).get(session)
        conduct = conduct_of(records) if records else Conduct()
        if conduct.end is None:
            raise FeedbackUnusable(f"session {session[:80]!r} has records that make no session")
        if conduct.meta.origin != "production":
            raise FeedbackUnusable(f"session {session[:80]!r} is {conduct.meta.origin}: its grader speaks for it")
        if conduct.meta.tenant != tenant:
            raise FeedbackUnusable(f"session {session[:80]!r} is not of tenant {tenant!r}, whose topic this is")
        return extent, conduct

    async def _before(self, session: str) -> tuple[dict[str, float] | None, set[str]]:
        """What the newest answer to the session was worth (None if there was none), and the ids of those that led to a
        reward."""
        found: dict[str, float] | None = None
        answered: set[str] = set()
        async for record in self._log.read_key(topics.REWARDS.name, session):
            try:
                event = record.event
            except DecodeError:
                continue
            if isinstance(event.body, RewardAssigned | RewardRevised) and event.body.grader == GRADER:
                found = event.body.components
                answered.add(event.meta.causation)
        return found, answered

    async def _append(
        self, event: Event[FeedbackGiven], meta: Meta, body: RewardAssigned | RewardRevised, answer: FeedbackGiven
    ) -> None:
        step = "assigned" if isinstance(body, RewardAssigned) else event.id
        verdict: Event[RewardAssigned | RewardRevised] = Event.of(
            body,
            id=event_id("reward", answer.session_id, GRADER, VERSION, step),
            source=self._source,
            meta=Meta(
                origin=meta.origin,
                tenant=meta.tenant,
                subject=meta.subject,
                causation=event.id,
                correlation=answer.session_id,
                time_ms=event.meta.time_ms,
            ),
            traceparent=event.traceparent,
        )
        await self._log.append(topics.REWARDS.name, answer.session_id, verdict)


def _assigned(extent: Extent, conduct: Conduct, components: dict[str, float], verdict: str) -> RewardAssigned:
    return RewardAssigned(
        session_id=extent.session_id,
        group_id="",
        partition=extent.partition,
        first_offset=extent.first,
        last_offset=extent.last,
        grader=GRADER,
        grader_version=VERSION,
        components=components,
        total=combine.total(components, "feedback"),
        notes=[f"feedback: {verdict}"],
        sampled_tokens=conduct.sampled_tokens,
        oldest_version=min(conduct.versions, default=0),
        newest_version=max(conduct.versions, default=0),
        reads_before_edit=conduct.reads_before_edit,
        parallel_turns=conduct.parallel_turns,
        turns=conduct.turns,
    )
