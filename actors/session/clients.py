"""The session's ports over Ray and Kafka.

Maps what can go wrong there to the room's own errors: a dead or restarting actor is retryable, a time-out is too.
Calls are never retried here: the runner decides, because a tool must not run twice unseen.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import ray.exceptions

from odradek.actors.environment.errors import SandboxError, SandboxSpecError, SandboxSucceededError
from odradek.actors.inference.errors import (
    ContextTooLongError,
    DeadlineExceededError,
    InferenceError,
    InvalidRequestError,
    StaleEpochError,
)
from odradek.actors.inference.types import Priority, SampleRequest, SampleResult
from odradek.actors.session.errors import EngineUnavailable, EnvironmentLost, SessionInfraFailure, SuperfluousOwner
from odradek.actors.session.ports import Call, CallOutcome, Completion, EnvironmentInfo, Outgoing, WorkspaceStart
from odradek.streams import topics
from odradek.streams.envelope import Event
from odradek.streams.errors import DecodeError, Retryable, UnknownEventType
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import SessionOpened, WeightSpan, WorkspaceDelta
from odradek.streams.faults import reach
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord

log = logging.getLogger(__name__)

RAY_FAULTS = (ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError, ray.exceptions.RaySystemError)
ANSWER_GRACE_S = 7.0
"""Seconds past a request's deadline that the engine's own, more exact error is waited for."""
AVOIDED_S = 15.0
"""Seconds that sessions of an inference actor which failed ask another one. Too few: they wait for it again and again;
too many: it idles, with what it had cached of them."""
PROMPT_TOKENS = 16
"""Tokens of a prompt that take as long as one sampled token: they are computed together."""
OPEN_TIMEOUT_S = 60.0
"""Seconds to make a sandbox and rebuild a workspace. Too low fails on a loaded host; too high hides a stuck one."""
CALL_GRACE_S = 60.0
"""Seconds beyond a tool's own limit before its environment counts as lost. It covers waiting for a slot to run a
command in: too low takes a busy host for a dead one and rebuilds workspaces under load; too high leaves a session
waiting on a host that hangs."""
CLOSE_TIMEOUT_S = 20.0
"""Seconds to wait for a sandbox's end; past it the host's own reaper takes it."""
APPEND_RETRY_S = 60.0
"""Seconds to retry an append that the broker did not acknowledge. Too low ends sessions at a broker restart."""
APPEND_PAUSE_S = 0.5
TOPIC = "sessions.v1"


def said(error: BaseException, late: str = "") -> str:
    """An error in one line, as its actor raised it: Ray's own text is a coloured traceback, cause last. `late` is what
    a deadline of our own means, which has no words."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    return late if late and isinstance(cause, TimeoutError) and not str(cause) else f"{type(cause).__name__}: {cause}"


class KafkaJournal:
    """`SessionLog` on sessions.v1. An append that may or may not have landed is repeated: ids are deterministic."""

    def __init__(self, event_log: EventLog, source: str, trace: Callable[[str], str | None] | None = None) -> None:
        self._log = event_log
        self._source = source
        self._trace = trace or (lambda _session: None)

    async def append(self, session_id: str, events: Sequence[Outgoing]) -> list[RecordRef]:
        """In order, all acknowledged; raises the log's error after `APPEND_RETRY_S`."""
        traceparent = self._trace(session_id)
        items = [
            (session_id, Event.of(e.body, id=e.event_id, source=self._source, meta=e.meta, traceparent=traceparent))
            for e in events
        ]
        deadline = time.monotonic() + APPEND_RETRY_S
        while True:
            try:
                await reach("session.before_append")
                refs = await self._log.append_many(TOPIC, items)
                await reach("session.after_append")
                return refs
            except Retryable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(APPEND_PAUSE_S)

    async def read(self, session_id: str, start: int, end: int | None = None) -> list[SessionRecord]:
        """See `SessionLog`. A record that can't be decoded is left out: it is for the dead letters. One of a type that
        this build does not know raises: a newer release's owner wrote it, and nobody goes on without it."""
        found, unknown = await self._scan({session_id: start}, end)
        if session_id in unknown:
            raise unknown[session_id]
        return found[session_id]

    async def read_many(self, starts: Mapping[str, int], end: int | None = None) -> dict[str, list[SessionRecord]]:
        """By session its records from its start on; without those that this build does not know a record of. Each
        partition is read once, from the lowest start in it, however many sessions a restarted host takes up again."""
        found, unknown = await self._scan(starts, end)
        for session, error in unknown.items():
            log.error("session %s is left alone: %s", session, error)
        return {session: records for session, records in found.items() if session not in unknown}

    async def _scan(
        self, starts: Mapping[str, int], end: int | None
    ) -> tuple[dict[str, list[SessionRecord]], dict[str, UnknownEventType]]:
        found: dict[str, list[SessionRecord]] = {session: [] for session in starts}
        unknown: dict[str, UnknownEventType] = {}
        lowest: dict[int, int] = {}
        for session, start in starts.items():
            partition = topics.SESSIONS.partition_of(session)
            lowest[partition] = min(start, lowest.get(partition, start))

        async def scan(partition: int, start: int) -> None:
            async with aclosing(self._log.read(TOPIC, partition, start, end)) as records:
                async for record in records:
                    session = record.key or ""
                    if session not in starts or record.ref.offset < starts[session]:
                        continue
                    try:
                        event = record.event
                    except DecodeError as error:
                        log.warning("session %s: record skipped: %s", session, error)
                        continue
                    except UnknownEventType as error:
                        unknown.setdefault(session, error)
                        continue
                    found[session].append((record.ref.offset, event.id, event.meta, event.body))

        await asyncio.gather(*(scan(partition, start) for partition, start in lowest.items()))
        return found, unknown

    async def session_at(self, opened: RecordRef) -> list[SessionRecord]:
        """See `SessionLog`."""
        body = (await self._log.read_ref(opened)).event.body
        if not isinstance(body, SessionOpened):
            raise SessionInfraFailure(f"{opened} opens no session, it holds {type(body).__name__}")
        return await self.read(body.session_id, opened.offset)


class RayEngine:
    """`EnginePort` over inference actors; a session stays with one of them as long as it answers (prefix reuse). One
    that died or did not answer is passed over for `AVOIDED_S`, if another one is there; one that was too busy is not:
    its load would only move on."""

    def __init__(self, handles: Sequence[Any], token_seconds: float = 0.0) -> None:
        """`token_seconds`: what a sampled token may take of a large model, beside the timeout given."""
        self._handles = list(handles)
        self._token_seconds = token_seconds
        self._failed: dict[int, float] = {}
        """By replica when it failed last, by the monotonic clock."""

    def _replica(self, session_id: str) -> int:
        """The session's own, or the next one that has not failed lately; its own where all have."""
        own = zlib.crc32(session_id.encode()) % len(self._handles)
        since = time.monotonic() - AVOIDED_S
        order = ((own + step) % len(self._handles) for step in range(len(self._handles)))
        return next((one for one in order if self._failed.get(one, -math.inf) < since), own)

    async def sample(
        self,
        *,
        session_id: str,
        epoch: int,
        turn: int,
        tokens: list[int],
        position_base: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        temperature: float,
        seed: int,
        priority: int,
        pinned_version: int | None,
        timeout_s: float,
    ) -> Completion:
        """See `EnginePort`."""
        timeout_s += self._token_seconds * (max_new_tokens + len(tokens) / PROMPT_TOKENS)
        request = SampleRequest(
            request_id=f"{session_id}/{turn}/{epoch}",
            session_id=session_id,
            epoch=epoch,
            prompt_tokens=tokens,
            position_base=position_base,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            temperature=temperature,
            seed=seed,
            priority=Priority(priority),
            pinned_version=pinned_version,
        )
        replica = self._replica(session_id)
        try:
            async with asyncio.timeout(timeout_s + ANSWER_GRACE_S):
                result: SampleResult = await self._handles[replica].sample.remote(request, timeout_s)
        except asyncio.CancelledError:
            self._handles[replica].cancel.remote(session_id, epoch)  # nobody waits: the engine need not go on
            raise
        except StaleEpochError as error:
            raise SuperfluousOwner(f"session {session_id}: {said(error)}") from error
        except (InvalidRequestError, ContextTooLongError) as error:  # asked again it would be refused again
            raise SessionInfraFailure(f"session {session_id} turn {turn}: {said(error)}") from error
        except (*RAY_FAULTS, InferenceError, TimeoutError) as error:
            if not isinstance(error, DeadlineExceededError):
                self._failed[replica] = time.monotonic()
            late = f"no answer from its inference actor within {timeout_s + ANSWER_GRACE_S:g} s"
            raise EngineUnavailable(f"session {session_id} turn {turn}: {said(error, late)}") from error
        self._failed.pop(replica, None)
        return Completion(
            tokens=result.tokens,
            logprobs=result.logprobs,
            spans=[WeightSpan(start, version) for start, version in result.weight_spans],
            numerics_id=result.numerics_id,
            finish_reason=result.finish_reason,
            experts=result.experts,
            cached_tokens=result.cached_tokens,
            queue_ms=result.queue_seconds * 1000,
            prefill_ms=result.prefill_seconds * 1000,
            decode_ms=result.decode_seconds * 1000,
        )


class RayEnvironment:
    """`EnvironmentPort` over the environment actor."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        """See `EnvironmentPort`."""
        info: EnvironmentInfo = await self._ask(
            session_id, "its sandbox", OPEN_TIMEOUT_S, self._handle.open, session_id, epoch, start, list(deltas)
        )
        return info

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        """See `EnvironmentPort`."""
        outcomes: list[CallOutcome] = await self._ask(
            session_id,
            f"the result of {', '.join(call.name for call in calls)}",
            tool_seconds + CALL_GRACE_S,
            self._handle.run_calls,
            session_id,
            epoch,
            list(calls),
            tool_seconds,
        )
        return outcomes

    async def close(self, session_id: str, epoch: int) -> None:
        """See `EnvironmentPort`. A lost environment has nothing left to close."""
        try:
            await self._ask(session_id, "the sandbox's end", CLOSE_TIMEOUT_S, self._handle.close, session_id, epoch)
        except EnvironmentLost:
            return

    async def _ask(self, session_id: str, what: str, timeout_s: float, method: Any, *arguments: Any) -> Any:
        """`what` is waited for: a wait that ends without it says so."""
        try:
            async with asyncio.timeout(timeout_s):
                return await method.remote(*arguments)
        except SandboxSucceededError as error:
            raise SuperfluousOwner(f"session {session_id}: {said(error)}") from error
        except SandboxSpecError as error:
            # The task's or our configuration's fault: another try would end the same way.
            raise SessionInfraFailure(f"session {session_id}: {said(error)}") from error
        except (*RAY_FAULTS, SandboxError, Retryable, TimeoutError) as error:
            late = f"the environment actor did not give {what} within {timeout_s:g} s"
            raise EnvironmentLost(f"session {session_id}: {said(error, late)}") from error
        except ray.exceptions.RayTaskError as error:
            # The actor lives and its code failed: nobody foresaw it, and asking again would end the same way.
            raise SessionInfraFailure(f"session {session_id}: unexpected {said(error)}") from error
