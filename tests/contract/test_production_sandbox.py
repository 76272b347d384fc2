"""Production is never starved of what sandboxes need (actors/environment/actor.py, actors/environment/ns/driver.py).

Real sandboxes. Each test fills one bounded thing with rollouts that do not end; then a person's session comes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.waiting import eventually

from odradek.actors.environment.actor import EnvironmentActor
from odradek.actors.environment.errors import SandboxAdmissionError, SandboxGoneError
from odradek.actors.environment.ns.driver import FILE_THREADS
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.session.ports import Call, WorkspaceStart
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured

pytestmark = pytest.mark.contract

ROLLOUT = WorkspaceStart("demo", {"a.txt": b"x"})
PERSON = replace(ROLLOUT, production=True)
DEADLINE_S = 60.0
"""Of a person's step. It takes milliseconds, or waits for rollouts that last until the test ends."""

Work = Coroutine[Any, Any, Any]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the actors of this file live one after the other: the image is built once."""
    return tmp_path_factory.mktemp("host")


@asynccontextmanager
async def environment(
    folder: Path, until: threading.Event | None = None, **limits: Any
) -> AsyncIterator[tuple[EnvironmentActor, Callable[[Work], None]]]:
    """The actor, and what starts a rollout's call that nobody waits for. It may wait `until` the test is over."""
    deployment = Deployment(
        kafka=KafkaConfig("127.0.0.1:1"),
        store=ObjectStoreAddress(endpoint="http://127.0.0.1:1", bucket="none"),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir=str(folder),
        tokenizer_file="",
        warm_start_dir="",
        **limits,
    )
    actor = EnvironmentActor(deployment, "environment-0")
    running: list[asyncio.Task[Any]] = []
    try:
        yield actor, lambda work: running.append(asyncio.create_task(work))
        assert not any(one.done() for one in running), "the rollouts held what they held all the time"
    finally:
        if until is not None:
            until.set()
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await actor.shut_down()


def command(line: str) -> list[Call]:
    return [Call("0.0", "run_terminal", {"command": line})]


async def works(actor: EnvironmentActor, session: str = "person") -> bool:
    """Whether the person's session gets its sandbox and goes on in it: a command, a read, a search."""
    async with asyncio.timeout(DEADLINE_S):
        await actor.open(session, 1, PERSON, [])
        (ran,) = await actor.run_calls(session, 1, command("echo y > b.txt"), 30.0)
        calls = [Call("1.0", "read_file", {"path": "b.txt"}), Call("1.1", "grep", {"pattern": "y"})]
        read, found = await actor.run_calls(session, 1, calls, 30.0)
    return not ran.is_error and ran.delta is not None and "y" in read.text and "b.txt" in found.text


async def test_a_persons_command_runs_while_rollouts_have_every_slot(host: Path) -> None:
    async with environment(host, max_commands=1) as (actor, started):
        for number in range(3):
            await actor.open(f"r{number}", 1, ROLLOUT, [])
            started(actor.run_calls(f"r{number}", 1, command("sleep 1000"), 900.0))
        await eventually(actor._running.locked, "a rollout to have the slot")
        assert await works(actor)


async def test_a_persons_sandbox_is_made_while_rollouts_wait_for_theirs(host: Path) -> None:
    async with environment(host, max_commands=1) as (actor, started):
        for number in range(3):
            started(actor.open(f"r{number}", 1, replace(ROLLOUT, setup=["sleep 100"]), []))
        await eventually(actor._opening.locked, "a rollout's sandbox to be in the making")
        assert await works(actor)


async def test_a_persons_files_are_read_while_rollouts_have_every_thread(host: Path) -> None:
    never = threading.Event()
    async with environment(host, until=never) as (actor, started):
        waiting = threading.Semaphore(0)

        def work() -> bool:
            waiting.release()
            return never.wait(DEADLINE_S)

        for _ in range(2 * FILE_THREADS):
            started(actor._loop.call(actor._driver.in_file_thread(work)))
        for _ in range(FILE_THREADS):
            await asyncio.to_thread(waiting.acquire)
        assert await works(actor)


async def test_a_person_takes_the_place_of_the_youngest_rollout_where_no_place_is_left(host: Path) -> None:
    async with environment(host, sandboxes={"max_sandboxes": 3}) as (actor, _):
        for name in ("old", "middle", "young"):
            await actor.open(name, 1, ROLLOUT, [])
        with pytest.raises(SandboxAdmissionError, match="3 sandboxes live"):
            await actor.open("late", 1, ROLLOUT, [])
        assert await works(actor, "person")
        with pytest.raises(SandboxGoneError, match="its place was needed for a sandbox of production"):
            await actor.run_calls("young", 1, command("true"), 30.0)
        for name in ("old", "middle"):
            (outcome,) = await actor.run_calls(name, 1, command("echo still here"), 30.0)
            assert "still here" in outcome.text
        first, second = await asyncio.gather(works(actor, "second"), works(actor, "third"))
        assert first and second
        with pytest.raises(SandboxAdmissionError):
            await actor.open("fourth", 1, PERSON, [])  # people do not push each other out
        with pytest.raises(SandboxAdmissionError):
            await actor.open("young", 1, ROLLOUT, [])  # and rollouts nobody
        assert await works(actor, "person")
        await actor.close("third", 1)
        await actor.open("young", 1, ROLLOUT, [])


async def test_a_person_for_whom_a_place_did_not_suffice_is_refused_and_leaves_nothing(host: Path) -> None:
    """Memory or disk may be short for other reasons; the next try takes the next rollout's."""
    async with environment(host) as (actor, _):
        for name in ("old", "young"):
            await actor.open(name, 1, ROLLOUT, [])
        plenty, driver = actor._driver._config, actor._driver
        driver._config = msgspec.structs.replace(plenty, min_free_memory_bytes=1 << 60)
        with pytest.raises(SandboxAdmissionError, match="bytes of memory available"):
            await actor.open("person", 1, PERSON, [])
        assert [one.spec.labels["owner"] for one in driver.live()] == ["old"]
        driver._config = plenty
        assert await works(actor)


async def test_people_who_come_at_once_each_find_a_place(host: Path) -> None:
    async with environment(host, sandboxes={"max_sandboxes": 6}) as (actor, _):
        await asyncio.gather(*(actor.open(f"r{number}", 1, ROLLOUT, []) for number in range(6)))
        assert all(await asyncio.gather(*(works(actor, f"person-{number}") for number in range(6))))
        assert (await actor._loop.call(actor._driver.metrics())).live == 6
