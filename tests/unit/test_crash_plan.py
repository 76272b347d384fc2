"""What the fault harness is made of, without a stack: plans by seed, the report, the failing proxy."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.crash.outcome import Outcome, Round, Settings
from support.crash.plan import AT_ONCE, RAY_DEATHS, RAY_KILL, WEIGHTS, Fault, matrix, plan
from support.crash.proxy import FaultyProxy, Mode
from support.crash.report import as_json, write
from support.crash.run import run

from odradek.streams.faults import POINTS

ACTORS = ["assembler", "controller", "environment-0", "inference-0", "projections", "reward-0", "session-0", "trainer"]


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), faults=st.integers(0, 300))
def test_the_same_seed_gives_the_same_faults_and_as_many_as_asked(seed: int, faults: int) -> None:
    rounds = plan(seed, faults, ACTORS)
    assert rounds == plan(seed, faults, list(reversed(ACTORS)))
    assert sum(map(len, rounds)) == faults
    assert all(not fault.target or fault.target in ACTORS for one in rounds for fault in one)


def test_a_short_run_sees_every_kind_of_fault_and_a_long_one_every_point_and_actor() -> None:
    short = Counter(fault.kind for one in plan(3, len(WEIGHTS), ACTORS) for fault in one)
    assert short == Counter(dict.fromkeys(WEIGHTS, 1))
    long: list[Fault] = [fault for one in plan(3, 1000, ACTORS) for fault in one]
    assert {fault.target for fault in long if fault.kind == "kill"} == set(ACTORS)
    roles = {point for point in POINTS if any(name.startswith(point.partition(".")[0]) for name in ACTORS)}
    assert {fault.how for fault in long if fault.kind == "kill at point"} == roles


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_a_thousand_faults_take_so_few_rounds_that_they_fit_into_two_hours(seed: int) -> None:
    """A round costs about 25 s of a quiet machine whatever is in it: its longest fault, then the job going on."""
    rounds = plan(seed, 1000, ACTORS)
    assert len(rounds) <= 310 and all(len(one) <= max(AT_ONCE) for one in rounds)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_nothing_else_is_hurt_beside_the_death_of_ray(seed: int) -> None:
    for rounds in (plan(seed, 300, ACTORS), matrix(seed, ACTORS)):
        deaths = [one for one in rounds if any(fault.kind == RAY_KILL for fault in one)]
        assert deaths and all(len(one) == 1 for one in deaths)
        assert {fault.how for one in deaths for fault in one} <= set(RAY_DEATHS)


def test_a_life_that_fails_ends_the_run_and_says_how(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    told: list[Outcome] = []
    with pytest.raises(RuntimeError, match="FileExistsError"):
        run(Settings(1, 1, tmp_path / "data"), lambda _text: None, told.append)
    assert told and not any(outcome.checked for outcome in told)


def test_the_report_of_a_run_that_was_killed_half_way_says_how_far_it_was(tmp_path: Path) -> None:
    faults = [fault for one in plan(5, 12, ACTORS) for fault in one]
    outcome = Outcome(injected=faults[:7], rounds=[Round(3, 10.0, 4.0), Round(4, 20.0, 1.0)])
    write(as_json(Settings(12, 5, tmp_path), outcome, "under way"), tmp_path / "r.md")
    page, told = (tmp_path / "r.md").read_text(), json.loads((tmp_path / "r.json").read_text())
    assert "# 7 faults, seed 5: under way" in page and "7 of 12 faults; no guarantee was checked" in page
    assert "2 rounds, 5.0 s a fault" in page and "| holds |" not in page and "| not checked |" in page
    assert told["plan"] == [fault.to_json() for fault in faults[:7]]
    assert told["machine"] and told["date"] and told["versions"]["kafka"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.md"]


BODY = b"x" * 200_000
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n" + BODY


@dataclass
class Store:
    """A server behind a proxy, and what it was asked."""

    proxy: FaultyProxy
    asked: list[bytes]

    async def get(self, mode: Mode) -> bytes:
        """What a client gets, to the end of the connection."""
        self.proxy.become(mode)
        async with asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)
            try:
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                return await reader.read()
            except OSError:
                return b""
            finally:
                writer.close()


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(ANSWER)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    with FaultyProxy(server.sockets[0].getsockname()[1]) as proxy:
        yield Store(proxy, asked)
    server.close()


async def test_the_proxy_fails_as_it_is_told_and_passes_again(store: Store) -> None:
    assert await store.get("pass") == ANSWER
    assert await store.get("refuse") == b""
    assert (await store.get("error")).startswith(b"HTTP/1.1 503 ") and len(store.asked) == 1, "the store was not asked"
    assert await store.get("late") == b"" and len(store.asked) == 2, "the store did it and the client does not know"
    assert 0 < len(await store.get("cut")) < len(ANSWER)
    assert await store.get("slow") == ANSWER
    assert await store.get("pass") == ANSWER


async def test_a_stalled_store_says_nothing_until_the_mode_ends(store: Store) -> None:
    waiting = asyncio.create_task(store.get("stall"))
    await asyncio.wait({waiting}, timeout=0.5)
    gc.collect()
    done, _ = await asyncio.wait({waiting}, timeout=0.5)
    assert not done and store.asked == []
    store.proxy.become("pass")
    assert await waiting == b""
