"""A session whose subject is erased: it ends, it says nothing more, and what is left of it still folds and is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support.session_world import FolderEnvironment, MemoryJournal, ScriptedModel, runner, spec, template, turn

from odradek.actors.session.errors import SessionInfraFailure
from odradek.actors.session.ports import CallOutcome, Outgoing
from odradek.actors.session.state import SessionFold
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.observe.transcript import as_text, transcript
from odradek.streams.consumers import _cause
from odradek.streams.envelope import SUBJECT_HEADER, Record
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.sessions import EnvironmentClosed, SessionFailed, SessionOpened
from odradek.streams.ownership import SessionRecord
from odradek.streams.privacy import content
from odradek.streams.privacy.content import ERASED
from odradek.streams.privacy.keys import KeyFiles

FILES = {"total.py": "return max(xs)"}
EDIT = ("edit_file", {"path": "total.py", "old": "max", "new": "sum"})
READ = ("read_file", {"path": "total.py"})
SECRET = "fix test_total"


@dataclass
class KeyedJournal(MemoryJournal):
    """Refuses what EventLog refuses: content of a subject that was erased."""

    keys: KeyFiles = field(kw_only=True)

    async def append(self, session_id: str, events: Sequence[Outgoing]) -> list[RecordRef]:
        for event in events:
            if event.meta.subject and content.split(event.body) is not None:
                self.keys.obtain(event.meta.subject)
        return await super().append(session_id, events)


@pytest.fixture
def journal(tmp_path: Path) -> KeyedJournal:
    return KeyedJournal(keys=KeyFiles(tmp_path / "keys"))


def persons(**changes: object):  # type: ignore[no-untyped-def]
    return replace(spec(FILES), origin="production", subject="ann", **changes)


def as_erased(records: Sequence[SessionRecord]) -> list[SessionRecord]:
    """The records as a reader sees them once the subject was erased."""
    found: list[SessionRecord] = []
    for offset, identifier, meta, body in records:
        parts = content.split(body)
        if parts is None:
            found.append((offset, identifier, meta, body))
        else:
            bare, _, lengths = parts
            shown = content.withheld(bare, lengths, ERASED)
            found.append((offset, identifier, content.without(meta, b"box", lengths), shown))
    return found


async def finished(journal: KeyedJournal) -> None:
    text = template()
    model = ScriptedModel([turn(text, READ, READ), turn(text, EDIT), turn(text, done=True)])
    await runner(journal, model, FolderEnvironment(), persons()).run()


async def test_nothing_of_an_erased_subject_is_written_any_more_and_their_session_ends(journal: KeyedJournal) -> None:
    """Guarantees 9 and 12: the subject is erased while a tool runs; the result is the first thing that is refused."""
    text = template()
    environment = FolderEnvironment(hook=lambda _call: _erase(journal))
    model = ScriptedModel([turn(text, EDIT), turn(text, done=True)])
    await runner(journal, model, environment, persons()).run()
    kinds = [type(body).__name__ for body in journal.bodies()]
    assert kinds[-2:] == ["SessionFailed", "EnvironmentClosed"] and "ToolCompleted" not in kinds
    (end,) = [body for body in journal.bodies() if isinstance(body, SessionFailed)]
    assert end.cause == "", "the failure holds no text"


def _erase(journal: KeyedJournal) -> None:
    journal.keys.destroy("ann", "asked")


async def test_a_fault_of_ours_in_an_erased_subjects_session_still_ends_it(journal: KeyedJournal) -> None:
    class Broken(FolderEnvironment):
        async def run_calls(self, *_: object) -> list[CallOutcome]:  # type: ignore[override]
            _erase(journal)
            raise SessionInfraFailure(f"session s: it says {SECRET}")

    await runner(journal, ScriptedModel([turn(template(), READ)]), Broken(), persons()).run()
    ends = [body for body in journal.bodies() if isinstance(body, SessionFailed)]
    assert [end.cause for end in ends] == [""]


async def test_a_session_that_cannot_be_read_any_more_is_ended_by_its_next_owner(journal: KeyedJournal) -> None:
    """The host died, the subject was erased, another host takes over."""
    text = template()
    journal.fail_after = 5
    with pytest.raises(BaseException):  # noqa: B017 - the journal's kill is no Exception
        await runner(journal, ScriptedModel([turn(text, EDIT)]), FolderEnvironment(), persons()).run()
    journal.fail_after = None
    _erase(journal)
    model, environment = ScriptedModel([turn(text, EDIT)]), FolderEnvironment()
    await runner(journal, model, environment, persons(history_floor=0)).run(as_erased(journal.history("s")))
    end, closed = journal.bodies()[-2:]
    assert isinstance(end, SessionFailed) and end.cause == ""
    assert isinstance(closed, EnvironmentClosed), "the sandbox that the dead host left is ended"
    assert model.asked == [] and environment.opened == 0, "nothing was sampled, nothing was run"


async def test_an_erased_session_folds_to_the_same_counts(journal: KeyedJournal) -> None:
    await finished(journal)
    history = journal.history("s")
    whole, erased = (SessionFold("s", template()).apply_all(one) for one in (history, as_erased(history)))
    assert erased.withheld and not whole.withheld
    assert erased.usage() == whole.usage() and erased.usage().calls == 3
    assert (erased.epoch, erased.rule.next_seq, erased.end) == (whole.epoch, whole.rule.next_seq, whole.end)


async def test_an_erased_session_is_listed_with_its_counts_and_shown_without_its_text(journal: KeyedJournal) -> None:
    await finished(journal)
    history = as_erased(journal.history("s"))
    book = SessionBook()
    for offset, identifier, meta, body in history:
        book.apply(RecordRef("sessions.v1", 0, offset), "s", identifier, meta, body, 1_000)
    note = book.sessions["s"]
    assert (note.end, len(note.turns), len(note.calls), note.versions) == ("done", 3, 3, [3])
    assert note.sampled_tokens == sum(len(one) for one in _completions())
    found = transcript("s", 0, history, {}, template())
    assert found is not None
    shown = as_text(found)
    assert "[withheld]" in shown and ERASED in shown
    for text in (SECRET, "max", "sum", "total.py", "edit_file"):
        assert text not in shown
    assert all(entry.mean_logprob is None for entry in found.entries)


def _completions() -> list[list[int]]:
    text = template()
    return [turn(text, READ, READ), turn(text, EDIT), turn(text, done=True)]


async def test_a_session_of_nobody_is_not_touched_by_any_of_this(journal: KeyedJournal) -> None:
    text = template()
    environment = FolderEnvironment(hook=lambda _call: _erase(journal))
    model = ScriptedModel([turn(text, EDIT), turn(text, done=True)])
    await runner(journal, model, environment, spec(FILES)).run()
    assert [type(body).__name__ for body in journal.bodies()][-2:] == ["SessionCompleted", "EnvironmentClosed"]
    assert isinstance(journal.bodies()[0], SessionOpened) and isinstance(journal.bodies()[-1], EnvironmentClosed)


def test_a_consumers_error_about_somebodys_record_is_named_without_its_text() -> None:
    """It goes into the dead letter's headers and into logs, and may quote what it handled."""
    ref = RecordRef("sessions.v1", 0, 0)
    error = ValueError(f"cannot handle {SECRET}")
    theirs = Record(ref, b"k", b"", ((SUBJECT_HEADER, b"ann"),), 0)
    assert SECRET not in _cause(theirs, error) and "ValueError" in _cause(theirs, error)
    assert SECRET in _cause(Record(ref, b"k", b"", (), 0), error)


async def test_a_session_that_begins_after_the_erasure_ends_before_anything_is_said(journal: KeyedJournal) -> None:
    _erase(journal)
    model = ScriptedModel([])
    await runner(journal, model, FolderEnvironment(), persons()).run()
    assert [type(body).__name__ for body in journal.bodies()] == ["SessionOpened", "SessionFailed"]
    assert model.asked == []
