"""Runs one lane's assembler and says how far it is. All guarantees are `streams.assembly.assembler`'s."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import log_of
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.errors import ProducerFenced, Retryable, Terminal

log = logging.getLogger(__name__)

REOPEN_PAUSE_S = 1.0
"""Seconds before a lost transaction or broker is tried again."""


class AssemblerActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._assembler: Assembler | None = None
        self._fault = ""
        self._loop = LoopThread(name)
        self._loop.main(self._run(), name)

    async def _run(self) -> None:
        event_log = log_of(self._deployment)
        await event_log.start()
        while True:
            self._assembler = Assembler(event_log, self._deployment.lane.lane)
            try:
                await self._assembler.run()
            except ProducerFenced:
                raise  # the loop stands down
            except Terminal as error:
                # Trying again would fail again: stop the line and say why, rather than restart for ever.
                log.exception("the assembler of lane %s stops", self._deployment.lane.lane)
                self._fault = f"{type(error).__name__}: {error}"
                return
            except Retryable as error:
                log.warning("assembler: %s; opening again", error)
                await asyncio.sleep(REOPEN_PAUSE_S)

    async def state(self) -> dict[str, Any]:
        """Position on groups.v1, records there that count for nothing, and why it stopped (empty: it did not)."""
        assembler = self._assembler
        return {
            "position": assembler.position if assembler is not None else -1,
            "ignored": assembler.ignored if assembler is not None else 0,
            "fault": self._fault or self._loop.stood_down,
        }
