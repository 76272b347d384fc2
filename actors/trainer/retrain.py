"""Assembles and trains one lane whose groups are all on the log, in this process, until nothing is left to do.

The same assembler and the same trainer as in a deployment: a killed run goes on where it was, and a deployment's actors
of the same lane would be fenced. Consumes groups.v1 of the lane up to its last seal; waits for assembler and trainer,
each within their own deadlines, and ends with the error of the first that fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from odradek.actors.trainer.checkpoint import Checkpoints
from odradek.actors.trainer.loop import TrainerLoop
from odradek.streams import topics
from odradek.streams.assembly.assembler import Assembler
from odradek.streams.events.batches import BatchAssembled
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.log import EventLog
from odradek.streams.replay.rebuild import batches_of

LOOK_S = 0.2
"""Seconds between looks at how far the two are. Too low: requests; too high: the command ends late."""

Say = Callable[[str], None]


async def retrain(
    event_log: EventLog,
    checkpoints: Checkpoints,
    lane: LaneConfigured,
    warm_start: Path,
    last_seal: int,
    say: Say = lambda _text: None,
) -> list[BatchAssembled]:
    """Every batch that the lane's groups make, trained. The groups after the last full batch stay for the next."""
    assembler = Assembler(event_log, lane.lane)
    trainer = TrainerLoop(event_log, checkpoints, lane, warm_start)
    output = (topics.BATCHES.name, topics.BATCHES.partition_of(lane.lane))
    running = [asyncio.create_task(assembler.run()), asyncio.create_task(trainer.run())]
    try:
        while True:
            done, _ = await asyncio.wait(running, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if assembler.position <= last_seal:
                continue
            await event_log.wait_stable(*output, await event_log.high_water(*output))
            batches = [batch async for _, batch in batches_of(event_log, lane.lane)]
            wanted = batches[-1].ordinal + 1 if batches else lane.parent.version if lane.parent is not None else 0
            say(f"lane {lane.lane}: version {trainer.version} of {wanted}")
            if trainer.version >= wanted:
                return batches
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
