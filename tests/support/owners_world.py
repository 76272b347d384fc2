"""Several owners of one session at once, each stopped before and after everything it does to the world.

A test says who goes on next, who dies where it stands, when a new owner begins and when an input comes. The environment
keeps epochs as the environment actor does and counts the effects that no rebuild undoes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from odradek.actors.session.errors import EnvironmentLost, SuperfluousOwner
from odradek.actors.session.ports import Call, CallOutcome, Completion, EnvironmentInfo, Outgoing, WorkspaceStart
from odradek.actors.session.runner import SessionRunner, SessionSpec
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import Effect, MessageReceived, WorkspaceDelta
from odradek.streams.ownership import SessionRecord
from support.session_world import EFFECTS, FolderEnvironment, Killed, MemoryJournal, ScriptedModel, template

DEPLOY = "run_terminal"
"""Stands for a tool with an external effect: the ten tools have none."""
EXTERNAL: dict[str, Effect] = {**EFFECTS, DEPLOY: "external"}
SETTLE = 50
"""Turns of the loop after which every owner stands still."""


@dataclass
class Shared:
    """What outlives owners."""

    turns: list[list[int]]
    spec: SessionSpec
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    effects: Counter[str] = field(default_factory=Counter)
    epoch: int = -1
    place: tuple[int, FolderEnvironment] | None = None
    """The newest owner's sandbox."""


class Owner:
    """One process that believes to own the session; also its three ports."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._model = ScriptedModel(shared.turns)
        self._gate: asyncio.Future[None] | None = None
        self.dead = False
        self.runner = SessionRunner(
            shared.spec, template=template(), effects=EXTERNAL, journal=self, engine=self, environment=self
        )
        history = shared.journal.history("s")
        self.task = asyncio.ensure_future(self._run(history))

    async def _run(self, history: list[SessionRecord]) -> None:
        with contextlib.suppress(Killed):
            await self.runner.run(history)

    def go_on(self) -> None:
        if self._gate is not None and not self._gate.done():
            self._gate.set_result(None)

    def die(self) -> None:
        self.dead = True
        if self._gate is not None and not self._gate.done():
            self._gate.set_exception(Killed())

    async def _step(self) -> None:
        if self.dead:
            raise Killed
        self._gate = asyncio.get_running_loop().create_future()
        await self._gate

    # -- the log -----------------------------------------------------------------------------------------------

    async def append(self, session_id: str, events: Sequence[Outgoing]) -> list[RecordRef]:
        await self._step()
        refs = []
        for event in events:  # others' records may come in between
            refs += await self._shared.journal.append(session_id, [event])
            await self._step()
        return refs

    async def read(self, session_id: str, start: int, end: int | None = None) -> list[SessionRecord]:
        await self._step()
        return await self._shared.journal.read(session_id, start, end)

    async def session_at(self, opened: RecordRef) -> list[SessionRecord]:
        return await self._shared.journal.session_at(opened)

    # -- model and environment ---------------------------------------------------------------------------------

    async def sample(self, *, turn: int, tokens: list[int], **_: object) -> Completion:
        await self._step()
        return await self._model.sample(turn=turn, tokens=tokens)

    def _newest(self, epoch: int) -> None:
        if epoch < self._shared.epoch:
            raise SuperfluousOwner(f"epoch {epoch} has been succeeded by {self._shared.epoch}")
        self._shared.epoch = epoch

    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        await self._step()
        self._newest(epoch)
        sandbox = FolderEnvironment()
        await sandbox.open(session_id, epoch, start, deltas)
        self._shared.place = (epoch, sandbox)
        return EnvironmentInfo(f"sandbox-of-{epoch}-{len(deltas)}", "memory", "none")

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        await self._step()
        self._newest(epoch)
        if self._shared.place is None or self._shared.place[0] != epoch:
            raise EnvironmentLost("no sandbox of that epoch")
        outcomes = []
        for call in calls:
            if call.name == DEPLOY:
                self._shared.effects[call.call_id] += 1
                outcomes.append(CallOutcome("deployed", False))
            else:
                outcomes += await self._shared.place[1].run_calls(session_id, epoch, [call], tool_seconds)
        await self._step()
        return outcomes

    async def close(self, session_id: str, epoch: int) -> None:
        if self.dead:
            raise Killed
        self._newest(epoch)
        self._shared.place = None


@dataclass
class Owners:
    """All of them, in the order in which they began."""

    shared: Shared
    all: list[Owner] = field(default_factory=list)
    posts: list[asyncio.Future[None]] = field(default_factory=list)

    @property
    def alive(self) -> list[Owner]:
        return [owner for owner in self.all if not owner.task.done() and not owner.dead]

    async def settle(self) -> None:
        for _ in range(SETTLE):
            await asyncio.sleep(0)

    async def begin(self) -> Owner:
        self.all.append(Owner(self.shared))
        await self.settle()
        return self.all[-1]

    async def go_on(self, owner: Owner) -> None:
        owner.go_on()
        await self.settle()

    async def die(self, owner: Owner) -> None:
        owner.die()
        await self.settle()

    async def post(self, message: MessageReceived) -> None:
        """An input as any owner's process would append it: it counts whoever does."""
        from odradek.actors.session.owned import event_id
        from odradek.streams.events.meta import Meta

        event = Outgoing(event_id("s", f"input:{message.message_id}"), Meta(), message)
        await self.shared.journal.append("s", [event])

    async def finish(self, owner: Owner) -> None:
        while not owner.task.done():
            await self.go_on(owner)
        await owner.task

    async def end(self) -> None:
        """Everybody dies; one more owner goes on undisturbed to the end."""
        for owner in self.alive:
            await self.die(owner)
        await self.finish(await self.begin())
