"""The tool calls of one owner, and the sandbox they run in: made when the first call needs it, made again when it is
lost, rebuilt from the log's deltas.

Promises, each under the name it has in `runner.py`: intent before acting and result after; a call without a logged
result runs in a workspace rebuilt to the state before it; an external effect is never repeated silently; one result a
call, in call order. Waits: for the environment, `INFRA_DEADLINE_S` at one place beside the port's own time-outs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

from odradek.actors.session.errors import EnvironmentLost, SuperfluousOwner
from odradek.actors.session.owned import OwnedSession, Step, Waiting
from odradek.actors.session.ports import Call, CallOutcome, EnvironmentPort
from odradek.actors.session.state import CallState
from odradek.streams.events.sessions import Effect, EnvironmentClosed, EnvironmentOpened, ToolCompleted, ToolRequested

INFRA_DEADLINE_S = 120.0
"""Seconds a session keeps retrying a fault of ours at one place. Must exceed an actor's restart (about 10 s)."""
RETRY_PAUSE_S = 0.5
"""Seconds between retries."""

UNCERTAIN = (
    "error: this call was interrupted, and nobody knows whether it took effect outside the workspace. It was not made "
    "again: find out first."
)
"""Result of a call with an external effect that may have run."""


class ToolCalls:
    """See the module."""

    def __init__(self, owned: OwnedSession, effects: Mapping[str, Effect], environment: EnvironmentPort) -> None:
        self._owned = owned
        self._effects = effects
        self._environment = environment
        self._environment_ready = False

    async def run(self, calls: list[CallState]) -> None:
        self._owned.waiting_for = Waiting("tools " + ", ".join(call.name for call in calls))
        uncertain = {call.call_id for call in calls if call.requested and call.external}
        requests: list[Step] = [
            (f"request.{call.call_id}", self._request(call)) for call in calls if not call.requested
        ]
        if requests:
            await self._owned.append(requests)
        if any(call.external for call in calls):
            await self._owned.confirm()
        outcomes = await self._outcomes(calls, uncertain)
        await self._owned.append(
            [(f"result.{c.call_id}", self._result(c, o)) for c, o in zip(calls, outcomes, strict=True)]
        )

    def _request(self, call: CallState) -> ToolRequested:
        return ToolRequested(
            call_id=call.call_id,
            turn=call.turn,
            index=call.index,
            name=call.name,
            arguments=dict(call.arguments),
            effect=self._effects.get(call.name, "pure"),
        )

    @staticmethod
    def _result(call: CallState, outcome: CallOutcome) -> ToolCompleted:
        return ToolCompleted(
            call_id=call.call_id,
            turn=call.turn,
            index=call.index,
            text=outcome.text,
            is_error=outcome.is_error,
            delta=outcome.delta,
            duration_ms=outcome.duration_ms,
            redactions=outcome.redactions,
            uncertain=outcome.uncertain,
        )

    async def _outcomes(self, calls: list[CallState], uncertain: set[str]) -> list[CallOutcome]:
        """One outcome a call; a call that could not be parsed has its error as result and never reaches a tool, nor
        does one that may have had its external effect already."""
        results = {call.call_id: CallOutcome(f"error: {call.parse_error}", True) for call in calls if call.parse_error}
        results |= {call_id: CallOutcome(UNCERTAIN, True, uncertain=True) for call_id in uncertain}
        runnable = [call for call in calls if call.call_id not in results]
        if runnable:
            asked = [Call(call.call_id, call.name, dict(call.arguments)) for call in runnable]
            once = any(call.external for call in runnable)
            for call, outcome in zip(runnable, await self._in_environment(asked, once=once), strict=True):
                results[call.call_id] = outcome
        return [results[call.call_id] for call in calls]

    async def _in_environment(self, calls: list[Call], *, once: bool) -> list[CallOutcome]:
        """`once`: what was asked of the environment and not answered is not asked again."""
        deadline = time.monotonic() + INFRA_DEADLINE_S
        limit = self._owned.opened.budget.tool_seconds
        spec, epoch = self._owned.spec, self._owned.state.epoch
        while True:
            asked = False
            try:
                if not self._environment_ready:
                    await self._open_environment()
                asked = True
                return await self._environment.run_calls(spec.session_id, epoch, calls, limit)
            except EnvironmentLost:
                self._environment_ready = False
                if asked and once:
                    return [CallOutcome(UNCERTAIN, True, uncertain=True) for _ in calls]
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)

    async def _open_environment(self) -> None:
        spec, state = self._owned.spec, self._owned.state
        rebuilt = state.environments > 0
        info = await self._environment.open(
            spec.session_id,
            state.epoch,
            replace(spec.start, subject=spec.subject, production=spec.origin == "production"),
            list(state.deltas),
        )
        self._environment_ready = True
        opened = EnvironmentOpened(
            sandbox_id=info.sandbox_id, driver=info.driver, image_digest=info.image_digest, rebuilt=rebuilt
        )
        await self._owned.append([(f"environment.{info.sandbox_id}.0", opened)])

    async def close(self) -> None:
        """End this owner's sandbox, and one that a former owner left to a session that needed none any more."""
        state = self._owned.state
        inherited = state.end is not None and state.environment is not None
        if not self._environment_ready and not inherited:
            return
        self._environment_ready = False
        try:
            await self._environment.close(self._owned.spec.session_id, state.epoch)
        except SuperfluousOwner:
            return  # a newer owner's: nothing of this one is left
        if state.environment is not None:
            sandbox_id = state.environment.sandbox_id
            await self._owned.append([(f"closed.{sandbox_id}.0", EnvironmentClosed(sandbox_id=sandbox_id))])
