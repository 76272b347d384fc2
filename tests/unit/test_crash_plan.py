"""What the fault harness is made of, without a stack: plans by seed, the failing proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.crash.plan import WEIGHTS, Fault, plan
from support.crash.proxy import FaultyProxy, Mode

from odradek.streams.faults import POINTS

ACTORS = ["assembler", "controller", "environment-0", "inference-0", "projections", "reward-0", "session-0", "trainer"]


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
    done, _ = await asyncio.wait({waiting}, timeout=1)
    assert not done and store.asked == []
    store.proxy.become("pass")
    assert await waiting == b""
