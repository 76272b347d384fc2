"""`odradek run` against one real deployment: services, actors, sandboxes and the shipped policy.

The policy may or may not mend the project: no test depends on it. What is asserted is what the product promises of any
session: where it is logged, as whose, and what happens to the folder.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serve_world import on_disk
from support.stored import stored_records
from support.waiting import eventually_blocking

from odradek.actors.runtime.store import blobs_of, log_of, object_store
from odradek.infra.cluster.deployment import deployment_of
from odradek.infra.config.load import load
from odradek.infra.config.services import endpoints
from odradek.infra.deadline import Deadline
from odradek.infra.demo.sample import write_sample
from odradek.infra.serve.snapshot import INLINE_BYTES
from odradek.infra.stack import processes
from odradek.infra.stack.state import stack_id
from odradek.infra.stack.testing import scratch
from odradek.streams import topics
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import SessionCompleted, SessionOpened, TurnSampled
from odradek.streams.events.subjects import ConsentGranted
from odradek.streams.events.tasks import FeedbackGiven
from odradek.streams.log import EventLog

pytestmark = [pytest.mark.contract, pytest.mark.slow, pytest.mark.timeout(900)]

COMMAND_S = 420.0
"""Seconds one command may take on a machine that does much else."""

Logged = tuple[Meta, Any]


class Deployed:
    """A running deployment, used through its command line and its log."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.environment = {**os.environ, "XDG_STATE_HOME": str(data / "state")}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "odradek.infra.cli.main", *arguments, "--data", str(self.data)]

    def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = self.command(*arguments)
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, timeout=COMMAND_S, check=False
        )

    def run(self, folder: Path, request: str, *options: str) -> dict[str, Any]:
        """`odradek run --json` to its end."""
        done = self.cli("run", str(folder), request, "--json", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def log(self) -> EventLog:
        """As an actor has it, with the keys of people."""
        config = load(data=self.data).config
        return log_of(deployment_of(config, endpoints(config)))

    def readable(self, text: str) -> list[str]:
        """Where a text lies as it is: in records as stored, objects as stored, files of the data folder."""
        config = load(data=self.data).config
        deployment = deployment_of(config, endpoints(config))

        async def look() -> list[str]:
            found = [place async for place, raw in stored_records(deployment.kafka) if text.encode() in raw]
            store = object_store(deployment)
            for key in await store.list(""):
                found += [f"object {key}"] if text.encode() in await store.get(key) else []
            store.close()
            return found

        files = [path for path in self.data.rglob("*") if path.is_file() and not path.is_symlink()]
        return asyncio.run(look()) + [f"file {path}" for path in files if text.encode() in _bytes(path)]

    def rewards(self, session: str) -> list[Any]:
        """What was said of a session on rewards.v1."""
        return [body for _, body in self.topic(topics.REWARDS.name) if body.session_id == session]

    def topic(self, name: str) -> list[Logged]:
        """Meta and body of every record of a topic."""

        async def read() -> list[Logged]:
            found = []
            async with self.log() as event_log:
                for partition, end in (await event_log.stable_ends(name)).items():
                    async for record in event_log.read(name, partition, 0, end):
                        found.append((record.event.meta, record.event.body))
            return found

        return asyncio.run(read())

    def session(self, session_id: str) -> list[Logged]:
        """The session's records."""

        async def read() -> list[Logged]:
            async with self.log() as event_log:
                records = event_log.read_key(topics.SESSIONS.name, session_id, start=0)
                return [(record.event.meta, record.event.body) async for record in records]

        return asyncio.run(read())

    def feedback(self, session_id: str) -> list[str]:
        bodies = [body for _, body in self.topic(topics.FEEDBACK.name) if isinstance(body, FeedbackGiven)]
        return [body.verdict for body in bodies if body.session_id == session_id]

    def pids(self, title: str) -> list[int]:
        """Processes of this deployment whose title begins so."""
        found = []
        for name in processes.marked(f"{stack_id(self.data)}/"):
            try:
                command = Path(f"/proc/{name.pid}/cmdline").read_bytes()
            except OSError:
                continue
            if command.startswith(title.encode()):
                found.append(name.pid)
        return found


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    with scratch() as data:
        deployment = Deployed(data)
        try:
            done = deployment.cli("up")
            assert done.returncode == 0, done.stderr
            yield deployment
        finally:
            deployment.cli("down")
        assert processes.marked(f"{stack_id(data)}/") == []


@pytest.fixture
def project(tmp_path: Path) -> tuple[Path, str]:
    """A sample project and its request."""
    folder = tmp_path / "project"
    request = write_sample(folder).request
    (folder / ".env").write_text("KEY=not to be seen\n")
    return folder, request


def test_an_accepted_diff_is_applied_exactly_and_the_session_is_production(
    deployed: Deployed, project: tuple[Path, str]
) -> None:
    folder, request = project
    before = on_disk(folder)
    answer = deployed.run(folder, request, "--yes", "--subject", "person-yes")
    after = on_disk(folder)
    assert sorted(path for path in {*before, *after} if before.get(path) != after.get(path)) == answer["changed"]
    assert (answer["changed"] == []) == (answer["diff"] == "")
    records = deployed.session(answer["session_id"])
    assert {(meta.origin, meta.subject) for meta, _ in records} == {("production", "person-yes")}
    opened = records[0][1]
    assert isinstance(opened, SessionOpened)
    assert set(opened.files) == set(before) - {".env"}
    assert all(b"not to be seen" not in content for content in opened.files.values())
    assert isinstance(next(body for _, body in records if isinstance(body, SessionCompleted)), SessionCompleted)
    assert deployed.feedback(answer["session_id"]) == ["accepted"]
    assert answer["training_allowed"] is False
    (reward,) = eventually_blocking(lambda: deployed.rewards(answer["session_id"]), "the answer's reward", COMMAND_S)
    assert (reward.grader, reward.group_id, reward.components["feedback"]) == ("feedback", "", 1.0)


def test_a_rejected_diff_leaves_the_folder_untouched(deployed: Deployed, project: tuple[Path, str]) -> None:
    folder, request = project
    before = _bytes_and_times(folder)
    answer = deployed.run(folder, request, "--no")
    assert _bytes_and_times(folder) == before
    assert (answer["verdict"], answer["changed"]) == ("rejected", [])
    assert deployed.feedback(answer["session_id"]) == ["rejected"]


def test_consent_is_off_unless_given_and_given_it_stands(deployed: Deployed, project: tuple[Path, str]) -> None:
    folder, request = project

    def granted() -> list[str]:
        return [b.subject for _, b in deployed.topic(topics.SUBJECTS.name) if isinstance(b, ConsentGranted)]

    options = ("--no", "--subject", "person-consent")
    assert deployed.run(folder, request, *options)["training_allowed"] is False
    assert "person-consent" not in granted()
    assert deployed.run(folder, request, *options, "--consent")["training_allowed"] is True
    assert granted().count("person-consent") == 1
    assert deployed.run(folder, request, *options)["training_allowed"] is True
    assert deployed.run(folder, request, *options, "--no-consent")["training_allowed"] is False


def test_a_large_folder_with_links_and_programs_is_the_sandboxs_own(
    deployed: Deployed, project: tuple[Path, str]
) -> None:
    """Too much for one event: the log names an object that was put before, and the sandbox has the whole tree."""
    folder, request = project
    (folder / "data.bin").write_bytes(os.urandom(INLINE_BYTES + 1))
    (folder / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / "latest").symlink_to("data.bin")
    answer = deployed.run(folder, request, "--no")
    opened = deployed.session(answer["session_id"])[0][1]
    assert opened.files == {}

    async def fetch() -> bytes:
        config = load(data=deployed.data).config
        return await blobs_of(deployment_of(config, endpoints(config))).get(opened.files_ref)

    with tarfile.open(fileobj=io.BytesIO(asyncio.run(fetch()))) as archive:
        found = {member.name: (member.mode, member.linkname) for member in archive.getmembers()}
    assert found["tool.sh"] == (0o755, "")
    assert found["latest"][1] == "data.bin"
    assert ".env" not in found
    assert answer["end"] != "failed"


def test_nothing_a_person_said_lies_readable_in_a_deployment_and_nothing_is_left_once_erased(
    deployed: Deployed, project: tuple[Path, str]
) -> None:
    """Guarantee 9, the whole job: every record, every object and every file on this host; then the person is erased."""
    folder, request = project
    marker = f"the-marker-{uuid.uuid4().hex}"
    (folder / "notes.txt").write_text(f"{marker}\n")
    (folder / "data.bin").write_bytes(marker.encode() + os.urandom(INLINE_BYTES + 1))
    answer = deployed.run(folder, f"{request} {marker}", "--no", "--consent", "--subject", "person-erased")
    session = answer["session_id"]
    assert marker in deployed.cli("session", "show", session).stdout, "readable to who has the key"
    assert deployed.readable(marker) == []

    erased = deployed.cli("subject", "erase", "person-erased", "--yes", "--json")
    assert erased.returncode == 0, erased.stdout + erased.stderr
    states = {one["store"]: one["state"] for one in json.loads(erased.stdout)["stores"]}
    assert (states["sessions.v1"], states["objects"], states["key"]) == ("unreadable", "deleted", "deleted")
    assert deployed.readable(marker) == []
    shown = deployed.cli("session", "show", session)
    assert shown.returncode == 0 and "[erased]" in shown.stdout and marker not in shown.stdout
    listed = json.loads(deployed.cli("session", "list", "--json").stdout)
    assert answer["end"] in {one["end"] for one in listed if one["session_id"] == session}
    again = deployed.cli("run", str(folder), request, "--subject", "person-erased", "--no")
    assert again.returncode == 2 and "was erased: nothing of theirs is recorded any more" in again.stderr


def test_an_interrupt_cancels_the_session_and_leaves_the_folder(deployed: Deployed, project: tuple[Path, str]) -> None:
    folder, request = project
    before = _bytes_and_times(folder)
    person, session_id = _start(deployed, folder, request)
    person.send_signal(signal.SIGINT)
    _, errors = person.communicate(timeout=COMMAND_S)
    assert person.returncode == 130
    assert errors.splitlines()[-1] == "odradek: interrupted"
    assert _bytes_and_times(folder) == before
    deadline = Deadline(COMMAND_S)
    while not any(isinstance(body, SessionCompleted) for _, body in deployed.session(session_id)):
        assert not deadline.expired, "the session did not end"
    assert deployed.feedback(session_id) == []


def test_a_killed_session_actor_is_resumed_under_the_persons_eyes(
    deployed: Deployed, project: tuple[Path, str]
) -> None:
    """kill -9 of every session actor once the session is open: it ends all the same, each step once."""
    folder, request = project
    person, session_id = _start(deployed, folder, request)
    killed = deployed.pids("ray::SessionActor")
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    output, errors = person.communicate(timeout=COMMAND_S)
    assert killed
    assert person.returncode == 0, output + errors
    bodies = [body for _, body in deployed.session(session_id)]
    assert sum(isinstance(body, SessionCompleted) for body in bodies) == 1
    assert deployed.feedback(session_id) == ["rejected"]


def test_a_killed_command_does_not_end_its_session_and_a_fork_goes_on_from_any_turn(
    deployed: Deployed, project: tuple[Path, str]
) -> None:
    """kill -9 of the person's command: `session resume` follows the session to its end from the log alone; a fork of it
    begins with what its parent's turn was sampled from, in no group, and leaves the parent as it was."""
    folder, request = project
    person, session_id = _start(deployed, folder, request)
    person.kill()
    person.communicate(timeout=COMMAND_S)
    resumed = json.loads(deployed.cli("session", "resume", session_id, "--json").stdout)
    parent = [body for _, body in deployed.session(session_id)]
    (end,) = [body for body in parent if isinstance(body, SessionCompleted)]
    assert (resumed["session_id"], resumed["end"]) == (session_id, end.reason)
    assert deployed.cli("session", "resume", session_id[:12]).stdout.startswith(f"session {session_id}: {end.reason}")

    done = deployed.cli("session", "fork", session_id, "--at", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    fork = deployed.session(json.loads(done.stdout)["session_id"])
    opened, first = fork[0][1], next(body for body in parent if isinstance(body, TurnSampled))
    assert opened.forked_from is not None and (opened.forked_at, opened.group_id) == (1, "")
    turns = [body for _, body in fork if isinstance(body, TurnSampled)]
    assert turns[0].completion == first.completion and turns[0].copied_from is not None
    assert all(turn.copied_from is None for turn in turns[1:])
    assert any(isinstance(body, SessionCompleted) for _, body in fork)
    assert [body for _, body in deployed.session(session_id)] == parent
    refused = deployed.cli("session", "fork", session_id, "--at", "99")
    assert refused.returncode == 2 and "not at 99" in refused.stderr


def test_status_knows_the_actors_and_a_second_up_starts_nothing(deployed: Deployed) -> None:
    rows = _rows(deployed)
    assert rows["actors"]["health"] == "running", rows
    again = json.loads(deployed.cli("up", "--json").stdout)
    assert (again["started"], again["actors_started"]) == ([], [])


def test_the_metrics_page_is_served_as_long_as_the_deployment_is_up(deployed: Deployed) -> None:
    """`odradek up` has returned long ago; a killed page comes back at the same address."""

    def page() -> str:
        try:
            return urllib.request.urlopen(address, timeout=10).read().decode()
        except OSError:
            return ""

    address = _rows(deployed)["metrics"]["address"]
    eventually_blocking(
        lambda: 'odradek_actor_up{actor="controller"} 1.0' in page(), "the actors to be seen", COMMAND_S
    )
    for pid in deployed.pids("ray::TelemetryActor"):
        os.kill(pid, signal.SIGKILL)
    eventually_blocking(lambda: "odradek_groups_open" in page(), "the page to come back", COMMAND_S)
    assert _rows(deployed)["metrics"]["address"] == address


def _rows(deployed: Deployed) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(deployed.cli("status", "--json").stdout)["services"]}


def _start(deployed: Deployed, folder: Path, request: str) -> tuple[subprocess.Popen[str], str]:
    """A run under way, and its session, once that is said."""
    person = subprocess.Popen(
        deployed.command("run", str(folder), request, "--no"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**deployed.environment, "PYTHONUNBUFFERED": "1"},
    )
    assert person.stdout is not None
    session_id = ""
    for line in person.stdout:
        if line.startswith("session "):
            session_id = line.split()[1].rstrip(";")
        if line.startswith("> "):
            return person, session_id
    raise AssertionError(f"the session did not open: {person.communicate()[1]}")


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it is gone meanwhile: services work on these files
        return b""


def _bytes_and_times(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    found = {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}
    return found | {"": (b"", folder.stat().st_mtime_ns)}
