"""What tests that plant a bug ask of the harness: the checks that found something, and the world of a real log."""

from __future__ import annotations

from odradek.streams.envelope import Record
from odradek.streams.log import EventLog
from support.crash.checks import violations
from support.crash.world import World, world_of

TOPICS = ("tasks.v1", "sessions.v1", "rewards.v1", "groups.v1", "batches.v1", "weights.v1")
Which = tuple[str, str]
"""A guarantee and its check."""


def caught(world: World) -> set[Which]:
    """Every check that found something."""
    return {(violation.guarantee, violation.check) for violation in violations(world)}


async def read(log: EventLog, *names: str, whose: str = "") -> World:
    """These topics, `TOPICS` by default; of a shared deployment only keys that have `whose` in them."""
    records: list[Record] = []
    for topic in names or TOPICS:
        for number, end in (await log.stable_ends(topic)).items():
            async for record in log.read(topic, number, 0, end):
                if whose in (record.key or ""):
                    records.append(record)
    return world_of(records, settled=False)
