"""A session's world in memory: a journal with offsets, a scripted model, an environment over a temporary folder."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from odradek.actors.policy.template import Call as TemplateCall
from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.session.errors import EngineUnavailable, EnvironmentLost
from odradek.actors.session.ports import (
    Call,
    CallOutcome,
    Completion,
    EnvironmentInfo,
    Outgoing,
    WorkspaceStart,
)
from odradek.actors.session.runner import SessionRunner, SessionSpec
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import (
    Effect,
    FileChange,
    SessionEvent,
    SessionOpened,
    ToolCompleted,
    WeightSpan,
    WorkspaceDelta,
)
from odradek.streams.events.tasks import Budget
from odradek.streams.ownership import SessionRecord
from support.waiting import lasting

TOKENIZER = Path(__file__).parents[2] / "infra" / "demo" / "warmstart" / "assets" / "tokenizer.json"
EFFECTS: dict[str, Effect] = {
    "read_file": "pure",
    "grep": "pure",
    "list_dir": "pure",
    "edit_file": "workspace",
    "write_file": "workspace",
    "run_terminal": "workspace",
}


@functools.cache
def template() -> XmlTemplate:
    return XmlTemplate(Tokenizer.from_file(TOKENIZER))


@dataclass
class MemoryJournal:
    """`SessionLog` in memory. `offsets` are shared with whatever else is appended."""

    records: list[tuple[str, int, str, Meta, SessionEvent]] = field(default_factory=list)
    fail_after: int | None = None

    async def append(self, session_id: str, events: Sequence[Outgoing]) -> list[RecordRef]:
        refs = []
        for event in events:
            if self.fail_after is not None and len(self.records) >= self.fail_after:
                raise Killed
            self.records.append((session_id, len(self.records), event.event_id, event.meta, event.body))
            refs.append(RecordRef("sessions.v1", 0, len(self.records) - 1))
        return refs

    async def read(self, session_id: str, start: int, end: int | None = None) -> list[SessionRecord]:
        return [row for row in self.history(session_id) if start <= row[0] and (end is None or row[0] < end)]

    async def session_at(self, opened: RecordRef) -> list[SessionRecord]:
        return await self.read(self.records[opened.offset][0], opened.offset)

    def history(self, session_id: str) -> list[tuple[int, str, Meta, SessionEvent]]:
        return [(offset, eid, meta, body) for s, offset, eid, meta, body in self.records if s == session_id]

    def bodies(self) -> list[SessionEvent]:
        return [record[4] for record in self.records]

    def results(self) -> list[ToolCompleted]:
        return [body for body in self.bodies() if isinstance(body, ToolCompleted)]


class Killed(BaseException):
    """The actor's process died here."""


@dataclass
class ScriptedModel:
    """`EnginePort` that says the given turns; asked again for a turn it says the same, as a real one does."""

    turns: list[list[int]]
    fail: int = 0
    asked: list[tuple[int, list[int]]] = field(default_factory=list)

    async def sample(self, *, turn: int, tokens: list[int], **_: object) -> Completion:
        self.asked.append((turn, tokens))
        if self.fail > 0:
            self.fail -= 1
            raise EngineUnavailable("restarting")
        completion = self.turns[turn] if turn < len(self.turns) else self.turns[-1]
        return Completion(completion, [-0.5] * len(completion), [WeightSpan(0, 3)], "test", "stop")


@dataclass
class FolderEnvironment:
    """`EnvironmentPort` over a dict of files: edits and reads really happen and are counted."""

    files: dict[str, str] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    opened: int = 0
    lose_next: int = 0
    kill_in_call: bool = False
    delay: bool = False
    """Let other tasks run before the results come back."""
    hook: Callable[[Call], None] | None = None

    async def open(
        self, session_id: str, epoch: int, start: WorkspaceStart, deltas: Sequence[WorkspaceDelta]
    ) -> EnvironmentInfo:
        self.opened += 1
        self.files = {path: data.decode() for path, data in start.files.items()}
        for delta in deltas:
            for change in delta.changes:
                self.files[change.path] = change.content.decode()
        return EnvironmentInfo(f"sandbox-{self.opened}", "memory", "none")

    async def run_calls(
        self, session_id: str, epoch: int, calls: Sequence[Call], tool_seconds: float
    ) -> list[CallOutcome]:
        outcomes = [self._one(call) for call in calls]
        if self.delay:
            await lasting(0.01)
        return outcomes

    def _one(self, call: Call) -> CallOutcome:
        if self.lose_next > 0:
            self.lose_next -= 1
            raise EnvironmentLost("host gone")
        if self.hook is not None:
            self.hook(call)
        self.runs.append(call.call_id)
        if call.name == "read_file":
            path = call.arguments["path"]
            found = self.files.get(path)
            return CallOutcome(found if found is not None else f"error: no such file {path}", found is None)
        if call.name == "edit_file":
            path, old, new = (call.arguments[k] for k in ("path", "old", "new"))
            self.files[path] = self.files[path].replace(old, new)
            if self.kill_in_call:
                raise Killed
            return CallOutcome("ok", False, WorkspaceDelta(changes=[_file(path, self.files[path])]))
        return CallOutcome(f"error: unknown tool {call.name}", True)

    async def close(self, session_id: str, epoch: int) -> None:
        return


def _file(path: str, text: str) -> FileChange:
    return FileChange(path=path, kind="file", content=text.encode())


def turn(template: XmlTemplate, *calls: tuple[str, dict[str, str]], done: bool = False) -> list[int]:
    """Completion ids of a turn with these calls."""
    return template.turn([TemplateCall(name, arguments) for name, arguments in calls], done=done)


def spec(files: dict[str, str] | None = None, *, floor: int | None = None, **budget: int) -> SessionSpec:
    return SessionSpec(
        opened=SessionOpened(session_id="s", policy="demo", group_id="g", budget=Budget(**budget)),  # type: ignore[arg-type]
        message="fix test_total",
        start=WorkspaceStart("demo", {path: text.encode() for path, text in (files or {}).items()}),
        history_floor=floor,
    )


def runner(
    journal: MemoryJournal, model: ScriptedModel, environment: FolderEnvironment, given: SessionSpec
) -> SessionRunner:
    return SessionRunner(
        given,
        template=template(),
        effects=EFFECTS,
        journal=journal,
        engine=model,
        environment=environment,
    )
