"""One process of a role, started again whenever it ends, as Ray does; and what it says of itself."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from support.lane_world import LaneWorld
from support.waiting import eventually

TESTS = Path(__file__).parents[1]
DEADLINE_S = 200.0


@dataclass
class Holder:
    """One process of a role, under a supervisor."""

    starts: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    async def supervise(self, given: dict[str, Any]) -> None:
        """Start it, follow what it says of itself, start it again when it ends."""
        while True:
            process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "support.crash_child"],
                env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            self.starts += 1
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps(given).encode())
                process.stdin.close()
                async for line in process.stdout:
                    self.state = json.loads(line)
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()


@asynccontextmanager
async def holder(role: str, lane: LaneWorld, **more: Any) -> AsyncIterator[Holder]:
    kafka, configured = msgspec.to_builtins(lane.log.config), msgspec.to_builtins(lane.configuration())
    made = Holder()
    given = {"role": role, "point": "", "nth": 0, "kafka": kafka, "lane": configured, **more}
    task = asyncio.create_task(made.supervise(given))
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(done: Callable[[], Awaitable[bool]]) -> None:
    await eventually(done, "what another process is to do", DEADLINE_S)


async def told(of: Holder, **wanted: Any) -> None:
    async def so() -> bool:
        return all(of.state.get(name) == value for name, value in wanted.items())

    await until(so)
