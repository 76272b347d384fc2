"""Taking a session of the log up again (infra/serve/again.py): as its first owner was given it, or refused."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from support.serve_world import tree_of
from support.session_world import FolderEnvironment, MemoryJournal, ScriptedModel, runner, template, turn

from odradek.infra.serve.again import Fork, Logged, forked, logged, spec_of_logged
from odradek.infra.serve.errors import SessionRefused
from odradek.infra.serve.request import production_budget, spec_of
from odradek.infra.serve.snapshot import Node, Tree, as_tar
from odradek.streams import topics
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.events.meta import BlobRef, RecordRef
from odradek.streams.events.sessions import MessageReceived, SessionOpened
from odradek.streams.log import EventLog

T = template()
TREE = {
    **tree_of({"a.py": "x = 1\n", "sub/b.py": "y\n"}),
    "tool": Node("file", 0o755, b"#!/bin/sh\n"),
    "link": Node("symlink", 0, b"a.py"),
}
SESSION = "7b1c5a5e-0000-4000-8000-000000000001"
NO_LOG: EventLog = None  # type: ignore[assignment]


def given(ref: BlobRef | None = None, tree: Tree = TREE):  # type: ignore[no-untyped-def]
    return spec_of(
        session_id=SESSION, policy="demo", tokenizer="t", budget=production_budget(640), request="fix it", tree=tree,
        files_ref=ref, subject="user-1",
    )  # fmt: skip


async def ran(spec) -> Logged:  # type: ignore[no-untyped-def]
    journal = MemoryJournal()
    model = ScriptedModel([turn(T, ("read_file", {"path": "a.py"})), turn(T, done=True)])
    await runner(journal, model, FolderEnvironment(), spec).run()
    return logged(SESSION, journal.history(SESSION))


def blobs() -> BlobStore:
    return BlobStore(MemoryStore())


async def test_a_session_is_taken_up_with_what_its_first_owner_was_given() -> None:
    spec = given()
    one = await ran(spec)
    again = await spec_of_logged(one, NO_LOG, blobs())
    assert again == replace(spec, history_floor=0), "files, set-up, request, subject: all from the log"
    assert one.ref == RecordRef("sessions.v1", topics.SESSIONS.partition_of(SESSION), 0)


async def test_a_large_folder_comes_back_from_its_object_with_links_and_programs_left_to_the_set_up() -> None:
    store = blobs()
    spec = given(await store.put(as_tar(TREE)))
    one = await ran(spec)
    assert one.opened.files == {}
    again = await spec_of_logged(one, NO_LOG, store)
    assert again.start == spec.start and again.start.setup


async def test_case_swe_agent_1461_the_recorded_start_up_runs_again_or_what_is_missing_is_named() -> None:
    """SWE-agent/SWE-agent PR 1461: replay ignored the recorded start-up commands."""
    one = await ran(given())
    with_setup = replace(one, opened=msgspec.structs.replace(one.opened, setup=["export A=1", "touch made"]))
    assert (await spec_of_logged(with_setup, NO_LOG, blobs())).start.setup == ["export A=1", "touch made"]
    lost = replace(
        one, opened=msgspec.structs.replace(one.opened, files_ref=BlobRef(key="blobs/x", sha256="0" * 64, size=1))
    )
    with pytest.raises(SessionRefused, match=r"its starting files are gone: .*blobs/x"):
        await spec_of_logged(lost, NO_LOG, blobs())
    unasked = replace(one, records=[row for row in one.records if not isinstance(row[3], MessageReceived)])
    with pytest.raises(SessionRefused, match="what it was asked is not on the log"):
        await spec_of_logged(unasked, NO_LOG, blobs())
    with pytest.raises(SessionRefused, match="its opening is not on the log"):
        logged(SESSION, [row for row in one.records if not isinstance(row[3], SessionOpened)])


async def test_a_fork_is_a_session_of_its_own_in_no_group_under_a_seed_of_its_own() -> None:
    spec = given()
    one = await ran(spec)
    grouped = replace(one, opened=msgspec.structs.replace(one.opened, group_id="g", lane="main-0", attempt=3))
    fork = forked(grouped, spec, Fork(1, "now b", version=4))
    assert fork.session_id != SESSION and fork.history_floor is None and fork.correlation == fork.session_id
    assert (fork.opened.group_id, fork.opened.lane, fork.opened.attempt) == ("", "", 0)
    assert (fork.opened.forked_from, fork.opened.forked_at, fork.opened.pinned_version) == (one.ref, 1, 4)
    assert fork.opened.sampling.seed != one.opened.sampling.seed
    assert (fork.message, fork.start, fork.subject, fork.origin) == ("now b", spec.start, "user-1", "production")
    with pytest.raises(SessionRefused, match="not at 3"):
        forked(one, spec, Fork(3))
