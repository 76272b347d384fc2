"""Runs the deployment's notary and says how far it is. All guarantees are `streams.audit.notary`'s."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from odradek.actors.notary.access import notary_of
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.streams.audit.notary import Notary
from odradek.streams.errors import ProducerFenced, Retryable, Terminal
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

REOPEN_PAUSE_S = 5.0
"""Seconds before a lost transaction, broker or store is tried again. Too low: a store that is down is asked all the
time. Too high: records wait unanchored."""


class NotaryActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._notary: Notary | None = None
        self._fault = ""
        self._ending = False
        self._ended = asyncio.Event()
        self._loop = LoopThread(name)
        self._loop.main(self._run(), name)

    async def _run(self) -> None:
        # Without a blob store: what is hashed is what lies on the log, claim checks and all.
        async with EventLog(self._deployment.kafka) as event_log:
            while not self._fault and not self._ending:
                await self._notarise(event_log)
        self._ended.set()

    async def _notarise(self, event_log: EventLog) -> None:
        """One notary until it fails. Raises ProducerFenced: then the loop stands down."""
        try:
            self._notary = notary_of(self._deployment, event_log)
            await self._notary.run()
        except ProducerFenced:
            raise
        except Terminal as error:
            # The log is not what was anchored, or the key can't be used: building on is for a person to allow.
            log.exception("the notary stops")
            self._fault = f"{type(error).__name__}: {error}"
        except Retryable as error:
            log.warning("notary: %s; opening again", error)
            await asyncio.sleep(REOPEN_PAUSE_S)

    async def shut_down(self) -> None:
        """Anchor what is on the log now, then stop. The caller's deadline bounds it: what is left, the next start
        anchors first."""
        await self._loop.call(self._end())

    async def _end(self) -> None:
        self._ending = True
        if self._notary is not None and not self._fault and not self._loop.stood_down:
            self._notary.end()
            await self._ended.wait()

    async def state(self) -> dict[str, Any]:
        """Rounds on the log, how many of them the vault does not have yet, records that this process anchored, offsets
        that wait, whether rounds are locked, and why it stopped (empty: it did not)."""
        notary = self._notary
        return {
            "rounds": notary.round if notary is not None else -1,
            "not_kept": notary.not_kept if notary is not None else 0,
            "anchored": notary.records if notary is not None else 0,
            "waiting_records": notary.waiting if notary is not None else 0,
            "locked": notary.locked if notary is not None else False,
            "fault": self._fault or self._loop.stood_down,
        }
