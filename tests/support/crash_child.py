"""One stage in a process of its own, which dies by SIGKILL at a named fault point: `python -m support.crash_child`.

Reads one JSON object: role, point (empty: none), nth, and what the role needs. Without a point it runs until killed.
Roles that are actors tell their state on standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from odradek.streams import faults
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.log import EventLog
from support.waiting import lasting

TELL_S = 0.1
"""Seconds between two looks at an actor's state."""


async def assembler(kafka: KafkaConfig, lane: LaneConfigured, _given: dict[str, Any]) -> None:
    from odradek.streams.assembly.assembler import Assembler

    async with EventLog(kafka) as log:
        await Assembler(log, lane.lane).run()


async def trainer(kafka: KafkaConfig, lane: LaneConfigured, given: dict[str, Any]) -> None:
    from odradek.actors.trainer.checkpoint import Checkpoints
    from odradek.actors.trainer.loop import TrainerLoop
    from odradek.actors.trainer.manifest import Place
    from odradek.streams.blobs import S3Config, S3Store

    checkpoints = Checkpoints(S3Store(S3Config(**given["s3"])), Place(given["incarnation"], lane.policy, lane.lane))
    async with EventLog(kafka) as log:
        await TrainerLoop(log, checkpoints, lane, Path(given["warm_start"])).run()


async def controller(kafka: KafkaConfig, lane: LaneConfigured, given: dict[str, Any]) -> None:
    """The real controller. Its only session host does not answer, so it places nothing and decides from the log; or,
    given a file as `down`, it is a real one that is gone while that file is there, and whose engine never answers."""
    from odradek.actors.controller import actor
    from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
    from support.session_world import TOKENIZER

    deployment = Deployment(
        kafka=kafka,
        lane=lane,
        store=ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none"),
        data_dir="",
        tokenizer_file=str(TOKENIZER),
        warm_start_dir="",
        session_actors=1,
        tenants=tuple(given.get("tenants", ())),
    )
    host = SessionHost(deployment, Path(given["down"]) if "down" in given else None)
    actor.actor_handle = lambda _name, _namespace: host  # type: ignore[attr-defined]
    await telling(actor.ControllerActor(deployment))


class Handle:
    """What callers have of an actor."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=partial(self.ask, name))

    async def ask(self, _name: str, *_arguments: Any) -> Any:
        """Never answers."""
        await asyncio.Event().wait()


class SessionHost(Handle):
    """The real session actor behind its handle. Without a `down`, or while it exists, its process is gone, with
    whatever ran in it."""

    def __init__(self, deployment: Any, down: Path | None) -> None:
        self._deployment, self._down = deployment, down
        self._actor: Any = None

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Of the process that there is, or of a new one."""
        import ray.exceptions

        from odradek.actors.session import actor

        if self._down is None or self._down.exists():
            if self._actor is not None:
                gone, self._actor = self._actor, None
                await asyncio.to_thread(gone._loop.stop)
            raise ray.exceptions.RayActorError
        if self._actor is None:
            actor.actor_handle = lambda _name, _namespace: Handle()  # type: ignore[attr-defined]
            self._actor = await asyncio.to_thread(actor.SessionActor, self._deployment, "session-0")
        return await getattr(self._actor, name)(*arguments)


async def assembler_actor(kafka: KafkaConfig, lane: LaneConfigured, _given: dict[str, Any]) -> None:
    """The actor round the assembler's loop."""
    from odradek.actors.assembler.actor import AssemblerActor
    from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress

    store = ObjectStoreAddress(endpoint="", bucket="none")
    deployment = Deployment(kafka=kafka, lane=lane, store=store, data_dir="", tokenizer_file="", warm_start_dir="")
    await telling(AssemblerActor(deployment, "assembler"))


async def reward(_kafka: KafkaConfig, _lane: LaneConfigured, given: dict[str, Any]) -> None:
    from odradek.actors.reward.actor import RewardActor
    from odradek.actors.runtime.deployment import Deployment

    await telling(await asyncio.to_thread(RewardActor, msgspec.convert(given["deployment"], Deployment), "reward-0"))


async def notary(kafka: KafkaConfig, _lane: LaneConfigured, given: dict[str, Any]) -> None:
    from odradek.streams.audit.keys import load_or_make_key
    from odradek.streams.audit.notary import Notary
    from odradek.streams.audit.settings import AuditSettings
    from odradek.streams.audit.vault import Vault
    from odradek.streams.blobs import S3Config

    settings = msgspec.convert(given["audit"], AuditSettings)
    async with EventLog(kafka) as log:
        key = load_or_make_key(Path(settings.key_file))
        await Notary(log, Vault(S3Config(**given["s3"]), settings), key, settings).run()


async def telling(actor: Any) -> None:
    """Say the actor's state, a line of JSON whenever it has changed, until killed."""
    before: dict[str, Any] = {}
    while True:
        state = await actor.state()
        if state != before:
            print(json.dumps(state), flush=True)
            before = state
        await lasting(TELL_S)


def main() -> None:
    given = json.load(sys.stdin)
    left = given["nth"]

    async def die() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    kafka = msgspec.convert(given["kafka"], KafkaConfig)
    lane = msgspec.convert(given["lane"], LaneConfigured)
    roles = {
        "assembler": assembler,
        "assembler_actor": assembler_actor,
        "trainer": trainer,
        "controller": controller,
        "reward": reward,
        "notary": notary,
    }
    run = roles[given["role"]](kafka, lane, given)
    if not given["point"]:
        asyncio.run(run)
    with faults.armed(given["point"], die):
        asyncio.run(run)


if __name__ == "__main__":
    main()
