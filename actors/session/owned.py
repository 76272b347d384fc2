"""One owner's hold on one session: takes it over, appends in its name, folds what it appended.

Guarantees (each has a test of its name):
- append it, fold up to it, then act: an owner's state has every record before its own session.resumed, those that an
  older owner wrote and inputs that came while it was taking over included;
- `confirm`: what it has said before is known to count, so that an effect which nobody can undo is had once;
- durable first, folded second: the state never runs ahead of the log;
- an event's id follows from its step, so that the same step of two owners counts once;
- of a session that is only handed over to be ended (`SessionSpec.cancelled`) nothing is sampled or run any more;
- a fork's history is its parent's up to the turn it branches off at, logged again before anything else happens; an
  owner that dies in the middle of that leaves the rest to the next one.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session.errors import SuperfluousOwner
from odradek.actors.session.fork import inherited
from odradek.actors.session.ports import Outgoing, SessionLog, WorkspaceStart
from odradek.actors.session.state import SessionFold, SessionState
from odradek.streams.events.meta import NO_SEQUENCE, Meta, Origin, RecordRef
from odradek.streams.events.sessions import (
    CancelRequested,
    MessageReceived,
    SessionEvent,
    SessionOpened,
    SessionResumed,
)
from odradek.streams.ownership import SessionRecord

log = logging.getLogger(__name__)

SESSION_NAMESPACE = uuid.UUID("5b0d7b1e-2a52-5f3c-9a53-9f0f2f6a8f11")
"""Namespace of deterministic event ids (RFC 9562, version 5)."""

Step = tuple[str, SessionEvent]
"""What an owner does next, by a name that the same step of any owner has, and the event that says so."""


def event_id(session_id: str, step: str) -> str:
    """Deterministic: the same step of the same session has the same id, whoever writes it."""
    return str(uuid.uuid5(SESSION_NAMESPACE, f"{session_id}:{step}"))


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """All an owner needs to run a session. `history_floor` None means that nothing of it is on the log yet."""

    opened: SessionOpened
    message: str
    """What is asked first; of a fork, what is asked at its end, or empty."""
    start: WorkspaceStart
    origin: Origin = "rl"
    tenant: str = "default"
    subject: str = ""
    correlation: str = ""
    traceparent: str = ""
    history_floor: int | None = None
    cancelled: str = ""
    """Why all that is wanted of the session is its end; empty where it is to be run."""

    @property
    def session_id(self) -> str:
        return self.opened.session_id


@dataclass(slots=True)
class Waiting:
    """What the session waits for now and since when (monotonic seconds)."""

    what: str = "start"
    since: float = field(default_factory=time.monotonic)


class OwnedSession:
    """See the module. Not an owner before `take` has returned."""

    def __init__(
        self,
        spec: SessionSpec,
        *,
        template: ChatTemplate,
        journal: SessionLog,
        observe: Callable[[str, SessionEvent], None] | None = None,
    ) -> None:
        self.spec = spec
        self.fold = SessionFold(spec.session_id, template)
        self.waiting_for = Waiting()
        self._journal = journal
        self._observe = observe
        self._confirmed = 0
        """No newer owner began before this offset."""

    @property
    def state(self) -> SessionState:
        return self.fold.state

    async def take(self, history: Sequence[SessionRecord]) -> None:
        """Open the session, or take it over. `history`: its records so far, in log order. A session that has ended
        is left alone."""
        self.fold.apply_all(history)
        if self.state.end is not None:
            return
        if self.state.opened is None:
            await self._append([(event_id(self.spec.session_id, "opened"), self._meta(), self.spec.opened)])
        else:
            await self._resume()
        self._confirmed = self.state.epoch + 1
        if self.state.end is None:
            await self._inherit()
            await self._ask()
        if self.spec.cancelled and self.state.end is None and self.state.cancel is None:
            await self.post(CancelRequested(request_id=f"closed:{self.spec.session_id}", reason=self.spec.cancelled))

    async def post(self, body: MessageReceived | CancelRequested) -> None:
        """An input from outside: appended without epoch, folded, and seen at the next decision."""
        key = body.message_id if isinstance(body, MessageReceived) else body.request_id
        await self._append([(event_id(self.spec.session_id, f"input:{key}"), self._meta(key=key), body)])

    async def append(self, steps: Iterable[Step]) -> None:
        """Owner events in order, all acknowledged."""
        first = self.state.rule.next_seq
        await self._append(
            [
                (event_id(self.spec.session_id, step), self._meta(seq=first + i), body)
                for i, (step, body) in enumerate(steps)
            ]
        )

    async def confirm(self) -> None:
        """Whether everything appended so far counts. Raises SuperfluousOwner if a newer owner began before it."""
        end = self.state.last_offset + 1
        for _, _, _, body in await self._journal.read(self.spec.session_id, self._confirmed, end):
            if isinstance(body, SessionOpened | SessionResumed):
                raise SuperfluousOwner(f"session {self.spec.session_id}: epoch {self.state.epoch} has been succeeded")
        self._confirmed = end

    # -- taking over -------------------------------------------------------------------------------------------

    async def _resume(self) -> None:
        resumed = SessionResumed(session_id=self.spec.session_id, reason="new owner")
        read_up_to = self.state.last_offset + 1
        meta = self._meta()
        self.waiting_for = Waiting("the log")
        (ref,) = await self._journal.append(self.spec.session_id, [Outgoing(str(uuid.uuid4()), meta, resumed)])
        for record in await self._journal.read(self.spec.session_id, read_up_to, ref.offset + 1):
            self.fold.apply(*record)
        if not self.state.rule.holds(ref.offset):
            raise SuperfluousOwner(f"{self.spec.session_id}: epoch {ref.offset} is not on the log that was read")
        self._tell(resumed)

    async def _ask(self) -> None:
        """The first message of a session, or the last of a fork's history; nothing if it is there already."""
        message_id = "fork" if self.opened.forked_from is not None else "0"
        if message_id in self.state.messages or (message_id == "fork" and not self.spec.message):
            return
        await self.post(MessageReceived(message_id=message_id, text=self.spec.message))

    async def _inherit(self) -> None:
        """Log the parent's history again, as far as that has not been done."""
        parent = self.opened.forked_from
        if parent is None or self.state.own_turns:
            return
        self.waiting_for = Waiting("the parent's history")
        records = await self._journal.session_at(parent)
        missing: list[tuple[str, Meta, SessionEvent]] = []
        seq = self.state.rule.next_seq
        for number, body in enumerate(inherited(parent, records, self.opened.forked_at)):
            identifier = event_id(self.spec.session_id, f"inherited.{number}")
            if self.state.rule.has_seen(identifier):
                continue
            if isinstance(body, MessageReceived):
                missing.append((identifier, self._meta(key=body.message_id), body))
            else:
                missing.append((identifier, self._meta(seq=seq), body))
                seq += 1
        if missing:
            await self._append(missing, told=False)

    # -- the log -----------------------------------------------------------------------------------------------

    @property
    def opened(self) -> SessionOpened:
        """What the session was opened with; of an owner that has it."""
        assert self.state.opened is not None
        return self.state.opened

    def _meta(self, *, seq: int = NO_SEQUENCE, key: str = "") -> Meta:
        return Meta(
            origin=self.spec.origin,
            tenant=self.spec.tenant,
            subject=self.spec.subject,
            correlation=self.spec.correlation,
            idempotency_key=key,
            time_ms=int(time.time() * 1000),
            seq=seq,
            epoch=NO_SEQUENCE if seq == NO_SEQUENCE else self.state.epoch,
        )

    async def _append(self, events: list[tuple[str, Meta, SessionEvent]], *, told: bool = True) -> list[RecordRef]:
        self.waiting_for = Waiting("the log")
        refs = await self._journal.append(self.spec.session_id, [Outgoing(*event) for event in events])
        for ref, (identifier, meta, body) in zip(refs, events, strict=True):
            self.fold.apply(ref.offset, identifier, meta, body)
            if told:
                self._tell(body)
        return refs

    def _tell(self, body: SessionEvent) -> None:
        if self._observe is not None:
            self._observe(self.spec.session_id, body)
