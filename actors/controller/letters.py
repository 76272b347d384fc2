"""The controller's dead letters: records of its inputs that it could not read, and what a person then let go.

Promises (test_controller_letters.py):
- a record is set aside once, however often a restarted controller reads it, and stops nothing;
- of a type that this build does not know that holds on the open task topics alone: on the others a newer release wrote
  it, and a controller that decided without it could undo what that one decided. It raises, and the controller stands
  down (test_newer_release.py);
- a released task is taken as the record that it was: its coordinates, so its group's and members' ids, and its tenant.
  Released twice, or taken again after a restart, it still leads to one group or one refusal;
- it counts as delivered once that decision is on the log, so that a controller killed between the two takes it again;
- what this build still can't read is refused again, with the reason;
- a released record of another topic is not taken a second time: those are followed from their beginning (rewards.v1
  from the oldest open group on), so that a build that can read it did so, in its order, when it started. A pin taken
  late would undo those that came after it.
Later records of a key are not held back: nothing the controller reads depends on the order of a key.
"""

from __future__ import annotations

import time

from odradek.actors.controller.core import Controller
from odradek.streams import topics
from odradek.streams.consumers import RELEASE_CHECK_S
from odradek.streams.dlq import DeadLetter, DeadLetters, Why
from odradek.streams.envelope import Record
from odradek.streams.errors import UndecodableRecord, UnknownEventType
from odradek.streams.events.dlq import DeadLetterDelivered, DeadLetterRefused
from odradek.streams.events.tasks import TaskEvent
from odradek.streams.log import EventLog


class Letters:
    """Of one controller."""

    def __init__(self, log: EventLog, core: Controller, consumer: str) -> None:
        self._letters = DeadLetters(log, consumer)
        self._core = core
        self._consumer = consumer
        self._taken: set[int] = set()
        self._next_look = 0.0

    async def set_aside(self, record: Record, error: UndecodableRecord) -> None:
        """To the dead letters, unless it is there; raises what is not for them."""
        if isinstance(error, UnknownEventType) and not topics.declared(record.ref.topic).open:
            raise error
        await self._letters.catch_up()
        if (self._consumer, record.ref) not in self._letters.fold.origins:
            await self._letters.put(self._consumer, record, Why.DECODE, str(error), 0)

    async def take_released(self) -> None:
        """Once a turn, before the controller decides; looks every `RELEASE_CHECK_S`."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + RELEASE_CHECK_S
        await self._letters.catch_up()
        for letter in list(self._letters.fold.due(self._consumer)):
            try:
                body = letter.record().event.body
            except UndecodableRecord as error:
                refused = DeadLetterRefused(consumer=self._consumer, letter=letter.offset, error=str(error))
                await self._letters.decide(refused, "refused", letter.offset, self._letters.fold.position)
                continue
            if topics.declared(letter.origin.topic) is topics.TASKS and not self._decided(letter, body):
                continue
            delivered = DeadLetterDelivered(consumer=self._consumer, letter=letter.offset)
            await self._letters.decide(delivered, "delivered", letter.offset)
            self._taken.discard(letter.offset)

    def _decided(self, letter: DeadLetter, body: TaskEvent) -> bool:
        """Whether what follows from the task is on the log; takes it where it was not taken yet."""
        if letter.offset not in self._taken:
            self._taken.add(letter.offset)
            self._core.on_task(letter.origin, body, again=True)
            return False  # whatever comes of it is written in the turn that begins
        return not self._core.intake.undecided(letter.origin)
