"""The trainer actor: a host for `TrainerLoop`. All guarantees are the loop's."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import log_of, object_store
from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.errors import TrainerError
from odradek.actors.trainer.loop import TrainerLoop
from odradek.actors.trainer.manifest import Place
from odradek.actors.trainer.pruning import Keep
from odradek.streams.errors import ProducerFenced, Retryable, Terminal

log = logging.getLogger(__name__)

REOPEN_PAUSE_S = 1.0
"""Seconds before a lost transaction, store or broker is tried again, from the last committed step."""


class TrainerActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._trainer: TrainerLoop | None = None
        self._fault = ""
        self._loop = LoopThread(name)
        self._loop.main(self._run(), name)

    async def _run(self) -> None:
        deployment = self._deployment
        event_log = log_of(deployment)
        await event_log.start()
        place = Place(deployment.incarnation, deployment.policy, deployment.lane.lane)
        checkpoints = Checkpoints(object_store(deployment), place)
        while True:
            self._trainer = TrainerLoop(
                event_log,
                checkpoints,
                deployment.lane,
                Path(deployment.warm_start_dir),
                Keep(newest=deployment.keep_versions, every=deployment.keep_every),
            )
            try:
                await self._trainer.run()
            except ProducerFenced:
                raise  # the loop stands down
            except (TrainerError, Terminal) as error:
                # Trying again would fail again: stop the line and say why, rather than restart for ever.
                log.exception("the trainer of lane %s stops", deployment.lane.lane)
                self._fault = f"{type(error).__name__}: {error}"
                return
            except Retryable as error:
                log.warning("trainer: %s; opening again", error)
                await asyncio.sleep(REOPEN_PAUSE_S)

    async def state(self) -> dict[str, Any]:
        """Version in hand, position on batches.v1, seconds spent computing, and why it stopped (empty: it did not)."""
        trainer = self._trainer
        if trainer is None:
            return {"version": -1, "position": -1, "busy_s": 0.0, "fault": self._why_stopped()}
        return {
            "version": trainer.version,
            "position": trainer.position,
            "busy_s": trainer.busy_s,
            "fault": self._why_stopped(),
        }

    def _why_stopped(self) -> str:
        return self._fault or self._loop.stood_down
