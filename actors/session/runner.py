"""Drives one session: decide, act, append, fold; again until the session ends.

Guarantees (each has a test of its name):
- intent before acting, result after: a call's tool.requested is acknowledged before it runs, its tool.completed
  before the next thing happens;
- a call with a logged result is never run again; one without is run in a workspace rebuilt to the state before it;
- an external effect is never repeated silently: a call that has one and may have run is not made again, and its
  result says so;
- exactly one result a call, in call order, whatever the call did;
- nothing of an erased subject is written any more: their session ends, with a failure that holds no text;
- a fault of ours is retried within a deadline, then logged as session.failed; it is never a tool result or a reward.
  So is an error that nobody foresaw, at once: its next owner would meet it again, and the group would wait for nothing.

Waits: for the engine and the environment, each with the time-outs below; the owner is the session actor; the age of
a wait is visible in `SessionRunner.waiting_for`.

Guarantee 3 (tests/GUARANTEES.md): test_session_runner.py, test_session_owners.py, test_session_condense.py,
test_kill_each_actor.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from odradek.actors.policy.template import ChatTemplate
from odradek.actors.session import calls
from odradek.actors.session.decide import Complete, Condense, RunCalls, Sample, Wait, next_action
from odradek.actors.session.errors import (
    EngineUnavailable,
    EnvironmentLost,
    ForkPointError,
    SessionInfraFailure,
    SuperfluousOwner,
)
from odradek.actors.session.owned import OwnedSession, SessionSpec, Waiting
from odradek.actors.session.ports import Completion, EnginePort, EnvironmentPort, SessionLog
from odradek.actors.session.state import SessionState
from odradek.streams.codec import f32, i32
from odradek.streams.errors import Retryable, SubjectErased, UnknownEventType
from odradek.streams.events.sessions import (
    CancelRequested,
    Effect,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionFailed,
    TurnSampled,
)
from odradek.streams.ownership import SessionRecord

__all__ = ["SessionRunner", "SessionSpec"]

log = logging.getLogger(__name__)

SAMPLE_TIMEOUT_S = 60.0
"""Seconds one sampling request may take, queueing included. Too low fails healthy sessions under load; too high
leaves a session waiting on a dead engine."""

CAUSE_CHARACTERS = 2_000
"""Characters of a failure's cause on the log. Too few hide what happened; an error may quote what a task brought along,
and a record that is too large could not say anything."""


class SessionRunner:
    """One owner of one session. `run` returns when the session has ended or a newer owner exists."""

    def __init__(
        self,
        spec: SessionSpec,
        *,
        template: ChatTemplate,
        effects: Mapping[str, Effect],
        journal: SessionLog,
        engine: EnginePort,
        environment: EnvironmentPort,
        observe: Callable[[str, SessionEvent], None] | None = None,
    ) -> None:
        self._owned = OwnedSession(spec, template=template, journal=journal, observe=observe)
        self._template = template
        self._effects = effects
        self._engine = engine
        self._calls = calls.ToolCalls(self._owned, effects, environment)
        self._owner = False
        self._input = asyncio.Event()
        self._called_off = asyncio.Event()
        self._started = time.monotonic()

    @property
    def spec(self) -> SessionSpec:
        return self._owned.spec

    @property
    def state(self) -> SessionState:
        return self._owned.state

    @property
    def waiting_for(self) -> Waiting:
        return self._owned.waiting_for

    async def run(self, history: Sequence[SessionRecord] = ()) -> None:
        """Open or resume, then loop to the end. `history`: the session's records so far, in log order."""
        try:
            await self._owned.take(history)
            self._owner = True
            if self.state.withheld and self.state.end is None:
                raise SubjectErased(f"session {self.spec.session_id} cannot go on: its content cannot be read")
            await self._loop()
        except SuperfluousOwner as error:
            log.info("a newer owner exists, stopping: %s", error)
        except (SessionInfraFailure, EngineUnavailable, EnvironmentLost, ForkPointError) as error:
            said = type(error).__name__ if self.spec.subject else str(error)
            log.warning("session %s failed: %s", self.spec.session_id, said)
            await self._fail(str(error))
        except SubjectErased as error:
            log.warning("session %s ends: %s", self.spec.session_id, error)
            if self.state.opened is not None and self.state.end is None:
                await self._fail("")
        except (Retryable, UnknownEventType):
            raise  # the log does not answer, or holds what a newer release wrote: the session's next owner goes on
        except Exception as error:
            # Nobody foresaw it, and the next owner would meet it again: a fault of ours, said once, in the log's words.
            if self._owner and self.state.end is None:
                await self._fail(f"unexpected {type(error).__name__}: {error}")
            raise
        finally:
            await self._calls.close()

    async def post(self, body: MessageReceived | CancelRequested) -> None:
        """An input from outside: on the log, and seen at the next decision. A turn that is being sampled is not waited
        for where the session is called off; a tool is, because what it does is done."""
        await self._owned.post(body)
        self._input.set()
        if isinstance(body, CancelRequested):
            self._called_off.set()

    # -- the loop ----------------------------------------------------------------------------------------------

    async def _loop(self) -> None:
        while self.state.end is None:
            action = next_action(self.state, self._template, self._effects, out_of_time=self._out_of_time())
            match action:
                case Sample():
                    await self._sample(action)
                case RunCalls():
                    await self._calls.run(action.calls)
                case Condense():
                    await self._append_owner(f"segment.{action.event.segment}", [action.event])
                case Complete():
                    await self._append_owner("completed", [self._completion(action)])
                case Wait():
                    self._owned.waiting_for = Waiting("a message")
                    self._input.clear()
                    await asyncio.wait_for(self._input.wait(), self._owned.opened.budget.wall_seconds)

    def _out_of_time(self) -> bool:
        return time.monotonic() - self._started > self._owned.opened.budget.wall_seconds

    async def _sample(self, action: Sample) -> None:
        self._owned.waiting_for = Waiting(f"turn {action.turn}")
        opened = self._owned.opened
        deadline = time.monotonic() + calls.INFRA_DEADLINE_S
        while True:
            try:
                sampling = self._engine.sample(
                    session_id=self.spec.session_id,
                    epoch=self.state.epoch,
                    turn=action.turn,
                    tokens=action.context + action.prompt,
                    position_base=self.state.position_base,
                    max_new_tokens=action.max_new_tokens,
                    stop_ids=self._template.stop_ids,
                    temperature=opened.sampling.temperature,
                    seed=opened.sampling.seed,
                    priority=0 if self.spec.origin == "production" else 1,
                    pinned_version=opened.pinned_version,
                    timeout_s=SAMPLE_TIMEOUT_S,
                )
                completion = await self._unless_called_off(sampling)
                break
            except EngineUnavailable:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(calls.RETRY_PAUSE_S)
        if completion is None:
            return
        turn = TurnSampled(
            turn=action.turn,
            segment=self.state.segment,
            position=action.position,
            prompt=i32(action.prompt),
            completion=i32(completion.tokens),
            logprobs=f32(completion.logprobs),
            spans=completion.spans,
            numerics_id=completion.numerics_id,
            finish_reason=completion.finish_reason,  # type: ignore[arg-type]
            messages=action.messages,
            purpose=action.purpose,
            experts=self._experts(action, completion),
            cached_tokens=completion.cached_tokens,
            queue_ms=completion.queue_ms,
            prefill_ms=completion.prefill_ms,
            decode_ms=completion.decode_ms,
        )
        await self._append_owner(f"turn.{action.turn}", [turn])

    async def _unless_called_off(self, sampling: Coroutine[Any, Any, Completion]) -> Completion | None:
        """The turn; None where the session is called off before: then sampling is stopped."""
        tasks = asyncio.ensure_future(sampling), asyncio.ensure_future(self._called_off.wait())
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return await tasks[0] if tasks[0].done() else None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _experts(self, action: Sample, completion: Completion) -> bytes:
        """Those of the context's routed experts that no earlier turn of the segment has logged."""
        computed = action.position + len(action.prompt) + len(completion.tokens) - 1
        if not completion.tokens or len(completion.experts) % computed:
            return b""
        logged = 0 if len(self.state.turns) == self.state.segment_turns else action.position - 1
        return completion.experts[logged * (len(completion.experts) // computed) :]

    # -- ends --------------------------------------------------------------------------------------------------

    def _completion(self, action: Complete) -> SessionCompleted:
        return SessionCompleted(
            reason=action.reason,
            first_offset=self.state.first_offset,
            usage=self.state.usage(),
            group_id=self._owned.opened.group_id,
        )

    async def _fail(self, cause: str) -> None:
        """The session's end. Of an erased subject no text may be written, but that it has ended may."""
        try:
            await self._append_owner("failed", [self._failure(cause)])
        except SubjectErased:
            await self._append_owner("failed", [self._failure("")])

    def _failure(self, cause: str) -> SessionFailed:
        cause = cause[:CAUSE_CHARACTERS]
        return SessionFailed(cause=cause, first_offset=self.state.first_offset, group_id=self.spec.opened.group_id)

    async def _append_owner(self, step: str, bodies: Sequence[SessionEvent]) -> None:
        await self._owned.append((f"{step}.{i}", body) for i, body in enumerate(bodies))
