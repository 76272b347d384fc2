"""The deployment's telemetry as an actor: what `TelemetryService` does, for as long as the deployment is up.

The page's address outlives a restart of the actor and a `down` and `up`: without a configured port the last one is
taken again while it is free, so that a scraper's configuration stays true. Owns the note of that port, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.observe.actors import ray_ask
from odradek.infra.observe.pending import as_json
from odradek.infra.stack import ports
from odradek.infra.stack.state import write_private
from odradek.infra.telemetry.service import TelemetryService

_PORT = "metrics"
WAITS_SAID = 50
"""The oldest waits that `state` names. More would make each answer long; the page counts all of them."""


class TelemetryActor:
    """Ray actor class."""

    def __init__(self, deployment: Deployment, names: Sequence[str]) -> None:
        """`names` are the actors to ask. Raises MetricsPortTaken."""
        logging.basicConfig(level=deployment.log_level)
        self._service = TelemetryService(deployment, names, ray_ask(deployment.namespace))
        self._address = self._service.start(deployment.metrics_port or port_of(Path(deployment.data_dir)))

    async def state(self) -> dict[str, Any]:
        """Where the page is, and what waits longest."""
        return {"address": self._address, "waits": as_json(self._service.waits[:WAITS_SAID])}

    async def shut_down(self) -> None:
        """Send what waits and close the page."""
        await asyncio.to_thread(self._service.stop)


def port_of(data: Path) -> int:
    """A free port, the last time's if it is free; remembered in the data folder."""
    note = data / "telemetry" / "ports.json"
    try:
        before = msgspec.json.decode(note.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        before = {}
    chosen = ports.choose((_PORT,), before)
    note.parent.mkdir(parents=True, exist_ok=True)
    write_private(note, msgspec.json.encode(chosen))
    return chosen[_PORT]
