"""The job under fire: a client that keeps tasks waiting and remembers every acknowledgement it was given.

Publishes as any client does, over the log's own producer; an append that fails is repeated until it is acknowledged,
as its error says one should, and only the acknowledged one is remembered.
"""

from __future__ import annotations

import contextlib
import random
import uuid
from dataclasses import dataclass, field
from typing import Any

from odradek.infra.demo.family.sets import make_task
from odradek.infra.demo.publish import published
from odradek.streams import topics
from odradek.streams.envelope import Event, event_id
from odradek.streams.errors import Retryable
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.tasks import FeedbackGiven, TaskCancelled, TaskPublished
from odradek.streams.log import EventLog
from support.waiting import eventually

ATTEMPTS = 4
WAITING = 6
"""Tasks published and not yet opened that are kept ahead of the controller."""
EVAL_ONE_IN, AGAIN_ONE_IN = 8, 6
"""One task in so many is an evaluation; one in so many is published twice under the same id."""
RETRY_S = 0.5
PATIENCE_S = 600.0
"""Seconds without an acknowledgement after which the client gives up: a broker is never away for so long."""


@dataclass
class Load:
    """`top_up` keeps up with demand; `acknowledged` is what the durability check asks for. Goes with its memory from
    one life of the deployment to the next, where it is given another `log`."""

    seed: int
    acknowledged: list[tuple[RecordRef, str]] = field(default_factory=list)
    tasks: dict[RecordRef, TaskPublished] = field(default_factory=dict)
    """By the coordinates of the first acknowledged publication."""
    words: dict[str, bytes] = field(default_factory=lambda: {f"person-{n}": uuid.uuid4().hex.encode() for n in "ab"})
    """What people say, each something of their own: it must not be readable once they are erased."""

    def __post_init__(self) -> None:
        self.log: EventLog | None = None
        self._random = random.Random(f"load {self.seed}")
        self._index = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"log": None}

    async def top_up(self, waiting: int) -> None:
        """Publish what is missing to `WAITING`, and a person's feedback now and then."""
        for _ in range(max(0, WAITING - waiting)):
            task = self._next()
            self.tasks[await self._append(topics.TASKS.name, task.task_id, task)] = task
            if self._random.randrange(AGAIN_ONE_IN) == 0:
                await self._append(topics.TASKS.name, task.task_id, task)
        subject = sorted(self.words)[self._index % len(self.words)]
        feedback = FeedbackGiven(
            session_id=f"nobody-{self._index}", verdict="accepted", comment=self.words[subject].decode()
        )
        await self._append(
            topics.FEEDBACK.name, feedback.session_id, feedback, Meta(origin="production", subject=subject)
        )

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

    async def _append(self, topic: str, key: str, body: Any, meta: Meta | None = None) -> RecordRef:
        identifier = event_id("load", self.seed, type(body).__name__, key)
        event = Event.of(body, id=identifier, source="crash-load", meta=meta)
        log = self.log
        assert log is not None

        async def acknowledged() -> RecordRef | None:
            with contextlib.suppress(Retryable):
                return await log.append(topic, key, event)
            return None

        ref = await eventually(acknowledged, f"an acknowledgement of {event.id}", PATIENCE_S, every=RETRY_S)
        assert ref is not None
        self.acknowledged.append((ref, event.id))
        return ref
