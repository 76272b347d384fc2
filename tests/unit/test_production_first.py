"""Production is never starved by rollouts: what both share within one process (streams/priority.py), in the controller
(actors/controller/core.py), in the engine (actors/inference/scheduler.py), in Ray's queues (infra/cluster/actors.py).

Each test fills the thing with rollouts that do not end, and then a person comes. Sandboxes: test_production_sandbox.py;
the log and the object store: test_production_log.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from unit.test_controller_core import World, task
from unit.test_engine import PROMPT, make, req

from odradek.actors.controller.admission import Backlog
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import Priority
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.tools.helper import call_helper
from odradek.infra.cluster.actors import calls_at_once
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.priority import Apart, ReservedThreads, serving

FILL = 40
"""Rollouts that hold or wait for something: more than it has places."""


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What rollouts wait for; it comes when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_person_finds_a_thread_however_many_rollouts_wait_for_one(never: threading.Event) -> None:
    threads = ReservedThreads(2, "test")
    rollouts = [threads.submit(never.wait) for _ in range(FILL)]
    with serving(True):
        assert threads.submit(lambda: "done").result(30) == "done"
    assert not any(one.done() for one in rollouts)
    never.set()
    threads.shutdown()
    assert all(one.done() for one in rollouts), "both pools are ended"


async def test_what_is_done_for_a_person_is_marked_in_every_task_it_starts() -> None:
    apart = Apart(object)

    async def mine() -> object:
        return apart.mine()

    outside = await mine()
    with serving(True):
        inside, started = apart.mine(), asyncio.create_task(mine())
        with serving(False):
            assert apart.mine() is outside
    assert inside is not outside and await started is inside
    assert await asyncio.create_task(mine()) is outside


async def test_an_actors_own_threads_are_reserved_too(never: threading.Event) -> None:
    """What a library or `asyncio.to_thread` hands to the loop's pool."""
    loop = LoopThread("test")

    async def filled() -> str:
        rollouts = [asyncio.create_task(asyncio.to_thread(never.wait)) for _ in range(4 * FILL)]
        await asyncio.sleep(0)
        with serving(True):
            name = await asyncio.to_thread(lambda: threading.current_thread().name)
        assert not any(one.done() for one in rollouts)
        never.set()
        await asyncio.gather(*rollouts)
        return name

    assert "production" in await asyncio.wait_for(loop.call(filled()), 60)
    loop.stop()


async def test_a_persons_search_does_not_wait_for_those_of_rollouts() -> None:
    """Each of these patterns would take the helper for its whole allowance."""
    endless = ("(a|aa)+$", ["a" * 100 + "!"], 1)
    rollouts = [asyncio.create_task(call_helper("search", endless, 5.0)) for _ in range(4)]
    await asyncio.sleep(0)  # they are in the queue
    with serving(True):
        (answer,), _ = await call_helper("search", ("b", ["a\nb\nb"], 1), 5.0)
    waiting = [one for one in rollouts if not one.done()]
    assert answer and waiting, "it overtook them"
    for one in rollouts:
        one.cancel()
    await asyncio.gather(*rollouts, return_exceptions=True)


def test_rollouts_get_the_slots_that_people_leave() -> None:
    """And none that they do not: people's sessions are counted and never asked for."""
    world = World()
    world.core.backlog = Backlog(groups_per_batch=100, max_staleness=100)
    world.opened()
    for number in range(FILL):
        world.publish(task(f"t{number}", attempts=2))
    rollouts, seen = 0, []
    for people in (95, 99, 104, 110, 90):
        world.tick(slots=world.core.room(104, people + rollouts))
        rollouts = 2 * len(world.core.groups)
        seen.append(rollouts)
    assert seen == [8, 8, 8, 8, 14]


def test_ray_queues_no_call_of_a_person_behind_those_of_rollouts() -> None:
    base = Deployment(
        kafka=KafkaConfig("127.0.0.1:1"),
        store=ObjectStoreAddress(endpoint="", bucket="none"),
        lane=LaneConfigured(lane="main-0", policy="demo", groups_per_batch=2, attempts=2, max_staleness=2),
        data_dir="",
        tokenizer_file="",
        warm_start_dir="",
    )
    for sessions in (1, 104, 50_000):
        assert calls_at_once(msgspec.structs.replace(base, max_sessions=sessions)) >= 2 * sessions + 1000


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_running": 2}, id="seats"),
        pytest.param({"num_pages": 10, "max_running": 64}, id="pages"),
        pytest.param({"prefill_budget": 64, "chunk_tokens": 64}, id="prefill"),
    ],
)
def test_a_person_is_sampled_for_before_any_rollout_ends(settings: dict[str, Any]) -> None:
    engine = make(EngineSettings(**settings))
    for number in range(FILL):
        engine.add(req(f"rollout-{number}", [number, *PROMPT[:100]], n=60))
    engine.step()
    engine.add(req("person", PROMPT[:90], n=5, priority=Priority.PRODUCTION))
    finished: list[str] = []
    while not finished:
        finished += [result.request_id for result in engine.step().finished]
    assert finished == ["person"]
