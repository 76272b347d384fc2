"""Serving a session over the real session runner: to its end, through a restarted host, and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.support.serve_world import file, nothing_ignored, on_disk, tree_of, write_tree
from tests.support.session_world import (
    FolderEnvironment,
    Killed,
    MemoryJournal,
    ScriptedModel,
    runner,
    template,
    turn,
)

from odradek.actors.session.runner import SessionRunner, SessionSpec
from odradek.infra.serve import session as serving_module
from odradek.infra.serve.apply import apply
from odradek.infra.serve.changes import compare
from odradek.infra.serve.errors import SessionFault, SubjectRefused
from odradek.infra.serve.request import local_subject, message_of, production_budget, spec_of
from odradek.infra.serve.session import HostUnavailable, LoggedEvent, Served, Serving, Standing, Tell
from odradek.infra.serve.snapshot import Tree
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.sessions import (
    CancelRequested,
    MessageReceived,
    SessionCompleted,
    SessionEvent,
    SessionOpened,
    SessionResumed,
)
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing

COPIED = tree_of({"total.py": "return a - b\n", "test.py": "assert\n"})
SESSION = "7b1c5a5e-0000-4000-8000-000000000001"


def _spec(tree: Tree = COPIED, request: str = "fix test_total") -> SessionSpec:
    return spec_of(
        session_id=SESSION,
        policy="demo",
        tokenizer="t",
        budget=production_budget(640),
        request=request,
        tree=tree,
        files_ref=None,
        subject="user-1",
    )


def _mending() -> list[list[int]]:
    t = template()
    return [
        turn(t, ("read_file", {"path": "total.py"})),
        turn(t, ("edit_file", {"path": "total.py", "old": "a - b", "new": "a + b"})),
        turn(t, done=True),
    ]


@dataclass
class Host:
    """A session host in this process: real runners over an in-memory world. `dies_after`: records until its process is
    killed; it comes back with another boot id."""

    model: ScriptedModel
    environment: FolderEnvironment = field(default_factory=FolderEnvironment)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    silent: int = 0
    boots: int = 1
    opened: list[SessionSpec] = field(default_factory=list)
    running: dict[str, SessionRunner] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    forget: bool = False
    """Take sessions and lose them."""

    async def open(self, spec: SessionSpec) -> None:
        self._answer()
        self.opened.append(spec)
        if self.forget or spec.session_id in self.running:
            return
        self.running[spec.session_id] = runner(self.journal, self.model, self.environment, spec)
        self.tasks.append(asyncio.create_task(self._run(spec)))

    async def _run(self, spec: SessionSpec) -> None:
        history = [] if spec.history_floor is None else self.journal.history(spec.session_id)
        try:
            await self.running[spec.session_id].run(history)
        except Killed:
            self.journal.fail_after = None
            self.boots += 1
        finally:
            self.running.pop(spec.session_id, None)

    async def post(self, session_id: str, body: CancelRequested) -> bool:
        self._answer()
        if session_id not in self.running:
            return False
        await self.running[session_id].post(body)
        return True

    async def standing(self, session_id: str) -> Standing:
        self._answer()
        return Standing(str(self.boots), session_id in self.running)

    def _answer(self) -> None:
        if self.silent > 0:
            self.silent -= 1
            raise HostUnavailable("session-0 does not answer")


@dataclass
class MemoryFeed:
    """The journal's records of the session, one at a time."""

    journal: MemoryJournal

    async def batches(self, start: int) -> AsyncIterator[Sequence[LoggedEvent]]:
        position = start
        while True:
            found = [r for r in self.journal.history(SESSION) if r[0] >= position][:1]
            position = found[-1][0] + 1 if found else position
            yield found
            await asyncio.sleep(0.001)


def _serving(host: Host, told: list[SessionEvent], tell: Tell | None = None, keys: KeyRing | None = None) -> Serving:
    return Serving(
        _spec(),
        copied=COPIED,
        floor=0,
        host=host,
        feed=MemoryFeed(host.journal),
        blobs=BlobStore(MemoryStore()),
        template=template(),
        tell=tell or (lambda body, _delta: told.append(body)),
        keys=keys,
    )


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions without their patience."""
    monkeypatch.setattr(serving_module, "LOOK_S", 0.0)
    monkeypatch.setattr(serving_module, "LOST_S", 0.05)


async def _served(host: Host, told: list[SessionEvent]) -> Served:
    return await asyncio.wait_for(_serving(host, told).run(), 30)


async def test_a_request_is_served_to_its_end_and_its_diff_applied(tmp_path: Path) -> None:
    host = Host(ScriptedModel(_mending()))
    told: list[SessionEvent] = []
    served = await _served(host, told)
    assert isinstance(served.end, SessionCompleted)
    assert served.end.reason == "done"
    assert served.versions == [3]
    assert [type(event).__name__ for event in told] == [
        "SessionOpened",
        "MessageReceived",
        "TurnSampled",
        "ToolRequested",
        "EnvironmentOpened",
        "ToolCompleted",
        "TurnSampled",
        "ToolRequested",
        "ToolCompleted",
        "TurnSampled",
        "SessionCompleted",
    ]
    write_tree(tmp_path, {**COPIED, "mine.txt": file("mine")})
    changes = compare(COPIED, served.final, nothing_ignored)
    assert on_disk(tmp_path) == {**COPIED, "mine.txt": file("mine")}, "nothing changes before the diff is accepted"
    apply(tmp_path, changes.changes)
    assert on_disk(tmp_path) == {**COPIED, "mine.txt": file("mine"), "total.py": file("return a + b\n")}


async def test_the_session_is_production_and_its_subjects(tmp_path: Path) -> None:
    host = Host(ScriptedModel(_mending()))
    await _served(host, [])
    metas = [record[3] for record in host.journal.records]
    assert {(meta.origin, meta.subject) for meta in metas} == {("production", "user-1")}
    opened = host.journal.bodies()[0]
    assert isinstance(opened, SessionOpened)
    assert opened.files == {"total.py": b"return a - b\n", "test.py": b"assert\n"}
    assert (opened.task, opened.group_id, opened.budget.max_turns, opened.budget.max_context_tokens) == (
        None,
        "",
        12,
        576,
    )


@pytest.mark.parametrize("records", range(1, 11))
async def test_a_host_killed_at_any_record_is_handed_the_session_again(records: int) -> None:
    """It folds the log and goes on; the person sees each step once."""
    host = Host(ScriptedModel(_mending()), journal=MemoryJournal(fail_after=records))
    told: list[SessionEvent] = []
    served = await _served(host, told)
    assert host.boots == 2, "the host must have been killed for this test to mean anything"
    assert host.opened[-1].history_floor == 0
    assert isinstance(served.end, SessionCompleted)
    assert served.final["total.py"] == file("return a + b\n")
    kinds = [type(event).__name__ for event in told]
    assert kinds.count("TurnSampled") == 3
    assert kinds.count("ToolCompleted") == 2
    assert any(isinstance(event, SessionResumed) for event in told)


async def test_a_host_that_is_restarting_is_waited_for() -> None:
    host = Host(ScriptedModel(_mending()), silent=1)
    served = await _served(host, [])
    assert isinstance(served.end, SessionCompleted)


async def test_a_host_that_drops_the_session_again_and_again_is_a_fault_of_ours() -> None:
    host = Host(ScriptedModel(_mending()), forget=True)
    with pytest.raises(SessionFault, match="drops it again and again"):
        await asyncio.wait_for(_serving(host, []).run(), 30)
    assert len(host.opened) == 1 + serving_module.REOPENS


@pytest.mark.parametrize("records", [0, 2, 6, 11])
async def test_a_run_whose_subject_is_erased_ends_with_that_reason(tmp_path: Path, records: int) -> None:
    """Before its host has opened it, under way, and between its end and the reading of what it changed."""
    keys = KeyRing(KeyFiles(tmp_path / "keys"))
    told: list[SessionEvent] = []

    def tell(body: SessionEvent, _delta: object) -> None:
        told.append(body)
        if len(told) == records:
            keys.store.destroy("user-1", "asked")

    class Opening(Host):
        async def open(self, spec: SessionSpec) -> None:
            await super().open(spec)
            if records == 0:
                keys.store.destroy("user-1", "asked")

    host = Opening(ScriptedModel(_mending()), forget=records == 0)
    with pytest.raises(SubjectRefused, match=r"subject 'user-1' was erased: .* nothing was changed") as refused:
        await asyncio.wait_for(_serving(host, told, tell, keys).run(), 30)
    assert refused.value.exit_code == 2
    assert len(host.opened) == 1, "it is not handed over again"
    for task in host.tasks:
        task.cancel()


async def test_interrupting_cancels_the_session() -> None:
    """Ctrl-C: the host is told, and the session's end is on the log."""
    t = template()
    endless = [turn(t, ("read_file", {"path": "total.py"}))]
    host = Host(ScriptedModel(endless), FolderEnvironment(delay=True))
    told: list[SessionEvent] = []
    under_way = asyncio.Event()

    def tell(body: SessionEvent, _delta: object) -> None:
        told.append(body)
        if len(told) == 6:
            under_way.set()

    task = asyncio.create_task(_serving(host, told, tell).run())
    await asyncio.wait_for(under_way.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    end = told[-1]
    assert isinstance(end, SessionCompleted)
    assert end.reason == "cancelled"
    assert any(isinstance(body, CancelRequested) for body in host.journal.bodies())


def test_the_message_names_the_modules_as_training_tasks_do() -> None:
    assert message_of("fix test_total", COPIED) == "fix test_total\ntotal.py"
    assert message_of("fix total.py ", COPIED) == "fix total.py"
    assert message_of("look", tree_of({"a.txt": ""})) == "look"
    assert message_of("look", tree_of({f"m{n}.py": "" for n in range(9)})) == "look"


def test_a_large_tree_is_named_by_its_object_and_still_reaches_the_environment() -> None:
    ref = BlobRef(key="k", sha256="s", size=1)
    spec = spec_of(
        session_id=SESSION,
        policy="demo",
        tokenizer="t",
        budget=production_budget(640),
        request="r",
        tree=COPIED,
        files_ref=ref,
        subject="user-1",
    )
    assert (spec.opened.files, spec.opened.files_ref) == ({}, ref)
    assert set(spec.start.files) == set(COPIED)


def test_the_local_subject_is_stable_and_does_not_show_the_name() -> None:
    assert local_subject("alice") == local_subject("alice")
    assert local_subject("alice") != local_subject("bob")
    assert "alice" not in local_subject("alice")


def test_a_message_is_an_input_of_the_session() -> None:
    assert _spec().message == "fix test_total\ntotal.py"
    assert MessageReceived(message_id="0", text=_spec().message).role == "user"
