"""Serving one production session: hand it to its host, follow it on the log, see it to its end.

The session runs in the session actor like any other; this side only reads sessions.v1 and asks the host now and then
whether it still has the session. A host that restarted, or lost it, is handed it again and folds the log. Once its
subject is erased no host can go on with it, and it is followed no further.

Waits: for the session's end, at most the budget's wall clock plus `SLACK_S`; for each of the host's answers
`HOST_TIMEOUT_S`. Cancelled (Ctrl-C), it asks the host to cancel and waits `CANCEL_S` for the session's last event.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from odradek.actors.environment.delta import Delta
from odradek.actors.environment.logged import from_logged
from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session.clients import RAY_FAULTS, TOPIC
from odradek.actors.session.runner import SessionSpec
from odradek.actors.session.state import SessionFold, SessionState
from odradek.infra.serve.changes import fold
from odradek.infra.serve.errors import ServeError, SessionFault, SubjectRefused, refusing_erased
from odradek.infra.serve.snapshot import Node, Tree
from odradek.streams import topics
from odradek.streams.blobs import BlobStore
from odradek.streams.errors import DecodeError
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import (
    CancelRequested,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    ToolCompleted,
)
from odradek.streams.log import EventLog
from odradek.streams.privacy.ring import KeyRing

HOST_TIMEOUT_S = 20.0
"""Seconds for one answer of a session host. Too low counts a busy host as gone; too high delays the next try."""

START_S = 120.0
"""Seconds to hand the session over at first, a restarting host included."""

LOOK_S = 2.0
"""Seconds between questions to the host. Too low asks for nothing; too high notices a restart late."""

LOST_S = 20.0
"""Seconds without an event after which a session that its host does not have is handed over again."""

REOPENS = 5
"""Times a session is handed over again before it counts as failed: its host drops it each time."""

SLACK_S = 300.0
"""Seconds beyond the session's own wall clock: it looks at its clock between steps only, and faults are retried."""

CANCEL_S = 10.0
"""Seconds to wait for a cancelled session's last event. A turn under way ends first; past it the host cancels alone."""

LoggedEvent = tuple[int, str, Meta, SessionEvent]
"""Offset, event id, meta and body of a record of the session."""

Tell = Callable[[SessionEvent, Delta | None], None]


class HostUnavailable(ServeError):
    """The session's host does not answer now; a restarted one will."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a host says of itself and of one session."""

    boot_id: str
    active: bool


class SessionHost(Protocol):
    """The session's host; every method raises HostUnavailable when it does not answer."""

    async def open(self, spec: SessionSpec) -> None:
        """Run the session; nothing if it runs already."""

    async def post(self, session_id: str, body: CancelRequested) -> bool:
        """Give it an input; False if it does not run there."""

    async def standing(self, session_id: str) -> Standing:
        """Cheap."""


class Feed(Protocol):
    """The session's records."""

    def batches(self, start: int) -> AsyncIterator[Sequence[LoggedEvent]]:
        """From an offset on, for ever; a quiet moment is an empty batch."""


class RayHost:
    """A session actor."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name = handle, name

    async def open(self, spec: SessionSpec) -> None:
        """See `SessionHost`."""
        await self._ask(self._handle.open, [spec])

    async def post(self, session_id: str, body: CancelRequested) -> bool:
        """See `SessionHost`."""
        return bool(await self._ask(self._handle.post, session_id, body))

    async def standing(self, session_id: str) -> Standing:
        """See `SessionHost`."""
        status = await self._ask(self._handle.status)
        return Standing(status.boot_id, session_id in status.active)

    async def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(HOST_TIMEOUT_S):
                return await method.remote(*arguments)
        except (*RAY_FAULTS, TimeoutError) as error:
            raise HostUnavailable(f"{self._name} does not answer: {type(error).__name__}") from error


class KafkaFeed:
    """The session's records on sessions.v1. One that can't be decoded is passed over, as the session's fold does."""

    def __init__(self, event_log: EventLog, session_id: str) -> None:
        self._log = event_log
        self._key = session_id.encode()
        self._partition = topics.SESSIONS.partition_of(session_id)

    async def batches(self, start: int) -> AsyncIterator[Sequence[LoggedEvent]]:
        """See `Feed`."""
        tail = self._log.tail_batches(TOPIC, {self._partition: start})
        async with contextlib.aclosing(tail) as polls:
            async for records in polls:
                batch = []
                for record in records:
                    if record.key_bytes != self._key:
                        continue
                    with contextlib.suppress(DecodeError):
                        event = record.event
                        batch.append((record.ref.offset, event.id, event.meta, event.body))
                yield batch


@dataclass(frozen=True, slots=True)
class Served:
    """A session that has ended."""

    state: SessionState
    end: SessionCompleted | SessionFailed
    final: dict[str, Node]
    """The workspace at its end, directories included."""

    @property
    def versions(self) -> list[int]:
        """Weight versions that sampled it."""
        return sorted({span.version for turn in self.state.turns for span in turn.event.spans})


class Serving:
    """One session, from handing it over to its end."""

    def __init__(
        self,
        spec: SessionSpec,
        *,
        copied: Tree,
        floor: int,
        host: SessionHost,
        feed: Feed,
        blobs: BlobStore,
        template: ChatTemplate,
        tell: Tell,
        tick: Callable[[], None] = lambda: None,
        keys: KeyRing | None = None,
    ) -> None:
        """`floor`: an offset of the session's partition at or before its first record. `tick` is called several times a
        second while nothing happens. `keys` know when the subject is erased."""
        self.spec = spec
        self._copied, self._floor, self._host, self._feed, self._blobs = copied, floor, host, feed, blobs
        self._tell, self._tick, self._keys = tell, tick, keys
        self._fold = SessionFold(spec.session_id, template)
        self._next = floor
        self._boot = ""
        self._reopened = 0
        self._last_event = self._last_look = time.monotonic()

    async def run(self) -> Served:
        """To the session's end. Raises SessionFault if it can't be seen there, SubjectRefused if its subject was erased
        meanwhile."""
        with refusing_erased(self.spec.subject):
            await self.hand_over()
            try:
                end = await self._follow(time.monotonic() + self.spec.opened.budget.wall_seconds + SLACK_S)
            except asyncio.CancelledError:
                await self._cancel()
                raise
            self._stop_if_erased()
            deltas = await from_logged(self._fold.state.deltas, self._blobs)
        return Served(self._fold.state, end, fold(self._copied, deltas))

    async def hand_over(self) -> None:
        """Give the session to its host, which runs it whether anybody follows or not."""
        deadline = time.monotonic() + START_S
        while True:
            self._stop_if_erased()
            try:
                self._boot = (await self._host.standing(self.spec.session_id)).boot_id
                await self._host.open(self.spec)
                return
            except HostUnavailable as error:
                if time.monotonic() > deadline:
                    raise SessionFault(f"{error}; odradek status says more") from error
                self._tick()
                await asyncio.sleep(1.0)

    async def _follow(self, deadline: float) -> SessionCompleted | SessionFailed:
        feed = self._feed.batches(self._next)
        try:
            async for batch in feed:
                for offset, identifier, meta, body in batch:
                    await self._apply(offset, identifier, meta, body)
                if self._fold.state.end is not None:
                    return self._fold.state.end
                self._tick()
                await self._look()
                if time.monotonic() > deadline:
                    raise SessionFault(
                        f"session {self.spec.session_id} did not end within its time; odradek session show says more"
                    )
        finally:
            if hasattr(feed, "aclose"):
                await feed.aclose()
        raise SessionFault(f"session {self.spec.session_id}: its records ended before it did")

    async def _apply(self, offset: int, identifier: str, meta: Meta, body: SessionEvent) -> None:
        self._next = offset + 1
        self._last_event = time.monotonic()
        if not self._fold.apply(offset, identifier, meta, body):
            return
        delta = None
        if isinstance(body, ToolCompleted) and body.delta is not None:
            (delta,) = await from_logged([body.delta], self._blobs)
        self._tell(body, delta)

    async def _look(self) -> None:
        """Hand the session over again if its host has restarted, or has lost it."""
        now = time.monotonic()
        if now - self._last_look < LOOK_S:
            return
        self._last_look = now
        self._stop_if_erased()
        try:
            standing = await self._host.standing(self.spec.session_id)
            lost = not standing.active and now - self._last_event > LOST_S
            if standing.boot_id == self._boot and not lost:
                return
            if self._reopened >= REOPENS:
                raise SessionFault(f"session {self.spec.session_id}: its host drops it again and again; see its log")
            self._boot = standing.boot_id
            self._reopened += 1
            self._last_event = now
            await self._host.open(with_history(self.spec, history_floor=self._floor))
        except HostUnavailable:
            return

    def _stop_if_erased(self) -> None:
        if self.spec.subject and self._keys is not None and self._keys.erased(self.spec.subject):
            raise SubjectRefused.erased(self.spec.subject)

    async def _cancel(self) -> None:
        """Tell the host, and wait a moment for the session's last event. The folder is untouched either way."""
        request = CancelRequested(request_id=f"person:{self.spec.session_id}", reason="interrupted by the person")
        with contextlib.suppress(ServeError, TimeoutError):
            async with asyncio.timeout(CANCEL_S):
                if await self._host.post(self.spec.session_id, request):
                    await self._follow(time.monotonic() + CANCEL_S)


def with_history(spec: SessionSpec, *, history_floor: int) -> SessionSpec:
    """The same session for a host that has to fold its history first."""
    return dataclasses.replace(spec, history_floor=history_floor)
