"""The job under fire: a client that keeps tasks waiting and remembers every acknowledgement it was given.

Publishes as any client does, over the log's own producer; an append that fails is repeated until it is acknowledged,
as its error says one should, and only the acknowledged one is remembered.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import Any

from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.publish import published
from odradek.streams import topics
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import Retryable
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import FeedbackGiven, TaskCancelled, TaskPublished
from odradek.streams.log import EventLog

ATTEMPTS = 4
WAITING = 6
"""Tasks published and not yet opened that are kept ahead of the controller."""
EVAL_ONE_IN, AGAIN_ONE_IN = 8, 6
"""One task in so many is an evaluation; one in so many is published twice under the same id."""
RETRY_S = 0.5


@dataclass
class Load:
    """`publish` keeps up with demand; `acknowledged` is what the durability check asks for."""

    log: EventLog
    seed: int
    acknowledged: list[tuple[RecordRef, str]] = field(default_factory=list)
    tasks: dict[RecordRef, TaskPublished] = field(default_factory=dict)
    """By the coordinates of the first acknowledged publication."""

    def __post_init__(self) -> None:
        self._random = random.Random(f"load {self.seed}")
        self._index = 0

    async def top_up(self, waiting: int) -> None:
        """Publish what is missing to `WAITING`, and a person's feedback now and then."""
        for _ in range(max(0, WAITING - waiting)):
            task = self._next()
            self.tasks[await self._append(topics.TASKS.name, task.task_id, task)] = task
            if self._random.randrange(AGAIN_ONE_IN) == 0:
                await self._append(topics.TASKS.name, task.task_id, task)
        feedback = FeedbackGiven(session_id=f"nobody-{self._index}", verdict="accepted")
        await self._append(topics.FEEDBACK.name, feedback.session_id, feedback)

    def _next(self) -> TaskPublished:
        self._index += 1
        if self._random.randrange(EVAL_ONE_IN) == 0:
            return published(
                make_task("new_combinations", self.seed, self._index), attempts=1, purpose="eval", temperature=1.0
            )
        return published(make_task("train", self.seed, self._index), attempts=ATTEMPTS)

    async def cancel(self, undecided: set[RecordRef]) -> None:
        """Call off tasks that nobody has opened yet."""
        for ref, task in self.tasks.items():
            if ref in undecided:
                await self._append(
                    topics.TASKS.name, task.task_id, TaskCancelled(task_id=task.task_id, reason="the run is over")
                )

    async def _append(self, topic: str, key: str, body: Any) -> RecordRef:
        event = Event.of(body, id=event_id("load", self.seed, type(body).__name__, key), source="crash-load")
        while True:
            try:
                ref = await self.log.append(topic, key, event)
            except Retryable:
                await asyncio.sleep(RETRY_S)
                continue
            self.acknowledged.append((ref, event.id))
            return ref
