"""The inference actor: one engine behind async calls. A plain object; a cluster uses `ray.remote(InferenceActor)`.

Calls in: session actors (`sample`, `cancel`, `forget`), the weights reader (`on_weights`), the controller (`state`).
The engine runs in its own thread (`loop.py`), one torch thread; this class only waits for futures and fetches weights.

Promises:
- `sample` always ends: by result, by typed error, or `REPLY_GRACE` seconds after the request's deadline.
- Asking again while a request runs (a retry after a lost reply) joins it; a newer epoch supersedes it.
- Weights are fetched and checked beside the engine and swapped between two steps; a version that can't be fetched or
  checked leaves the served one in place, and `state` says why. Of versions announced during a load only the newest is
  loaded next.
- A request pinned to a version that is not held fetches it; it then stays beside the current one, at most
  `PINNED_KEPT` such versions at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
import torch
from torch import Tensor

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.errors import (
    DeadlineExceededError,
    DuplicateRequestError,
    VersionNotHeldError,
    WeightsRefusedError,
)
from odradek.actors.inference.loop import EngineLoop
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import EngineStats, SampleRequest, SampleResult
from odradek.actors.inference.weights import HeldWeights, Loader, build
from odradek.actors.policy.config import ModelConfig
from odradek.kernels.numerics import numerics_id

REPLY_GRACE: Final = 5.0
"""Seconds past its deadline that a caller waits for the engine's own answer (a step may be in progress). Too low: the
engine's more exact error is lost; too high: a caller of a stuck engine waits for nothing."""

CALL_TIMEOUT: Final = 30.0
"""Seconds for commands between two steps (cancel, install, stats). A step takes well under one."""

PINNED_KEPT: Final = 4
"""Versions fetched for pinned requests that are kept. Too low: two evaluations running together fetch each other's
version away; each costs a copy of the weights."""


T = TypeVar("T")
States = Mapping[int, Mapping[str, Tensor]]


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica record says: the version served, whether the loop lives, how the last load went."""

    replica: str
    version: int | None
    versions: list[int]
    healthy: bool
    numerics_id: str
    load_seconds: float
    """Of the last successful load: fetch, check and swap."""
    detail: str
    """Why the last load failed, or why the loop died; empty when all is well."""


@dataclass(slots=True)
class _InFlight:
    request: SampleRequest
    future: Future[SampleResult]
    waiters: int = 0


class InferenceActor:
    """See the module. `on_crash` is called from the engine's thread when it has died: end the process there, so that
    the cluster starts a fresh one."""

    def __init__(
        self,
        config: ModelConfig,
        loader: Loader,
        *,
        replica: str = "inference-0",
        settings: EngineSettings | None = None,
        on_crash: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._config = config
        self._loader = loader
        self._replica = replica
        self._numerics = ""
        self._in_flight: dict[tuple[str, int], _InFlight] = {}
        self._loading = asyncio.Lock()
        self._wanted = 0
        """Number of the newest announcement; older ones waiting for their turn are superseded."""
        self._fetched_pins: OrderedDict[int, None] = OrderedDict()
        self._last_load_seconds = 0.0
        self._detail = ""

        def make_engine() -> Engine:
            # One thread: more change the bits and, on a shared host, spin. The id is read after it is set.
            torch.set_num_threads(1)
            self._numerics = numerics_id()
            return Engine(config, self._numerics, settings)

        self._loop = EngineLoop(make_engine, replica, on_crash)

    # -- sampling ---------------------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest) -> SampleResult:
        """Sample one turn; raises a type of `errors.py`."""
        try:
            return await self._sample(request)
        except VersionNotHeldError:
            if request.pinned_version is None:
                raise
            await self._load_pinned(request.pinned_version, request.deadline)
            return await self._sample(request)

    async def _sample(self, request: SampleRequest) -> SampleResult:
        key = (request.request_id, request.epoch)
        entry = self._in_flight.get(key)
        if entry is None:
            entry = self._in_flight[key] = _InFlight(request, self._loop.submit(request))
        elif msgspec.structs.replace(request, deadline=entry.request.deadline) != entry.request:
            raise DuplicateRequestError(f"request {request.request_id} is being sampled with other arguments")
        entry.waiters += 1
        try:
            # Shielded: one waiter that gives up must not take the result from another.
            answer = asyncio.shield(asyncio.wrap_future(entry.future))
            return await asyncio.wait_for(answer, max(0.0, request.deadline - time.monotonic()) + REPLY_GRACE)
        except TimeoutError:
            raise DeadlineExceededError(
                f"request {request.request_id}: no answer {REPLY_GRACE:.0f} s after its deadline; is the engine stuck?"
            ) from None
        finally:
            entry.waiters -= 1
            if not entry.waiters:
                self._in_flight.pop(key, None)
                if not entry.future.done():
                    self._loop.call(lambda engine: engine.withdraw(request.request_id))

    async def cancel(self, session_id: str, epoch: int) -> None:
        """Stop the session's requests up to `epoch` and refuse older owners; raises `StaleEpochError` if one of them
        is calling."""
        await self._command(lambda engine: engine.cancel(session_id, epoch))

    async def forget(self, session_id: str) -> None:
        """The session has ended; its cache may go."""
        await self._command(lambda engine: engine.forget(session_id))

    # -- weights ----------------------------------------------------------------------------------------------------

    async def on_weights(self, version: int, loader: Loader | None = None) -> bool:
        """Serve `version` from now on (a new one, a pin or a roll-back). True: it is served; False: a newer
        announcement came before this one was started. Raises what was wrong; the served version then stays."""
        self._wanted += 1
        mine = self._wanted
        async with self._loading:
            if mine != self._wanted:
                return False
            await self._load(version, loader or self._loader, current=True)
            return True

    async def load(self, version: int, loader: Loader | None = None) -> None:
        """Hold `version` beside the current one, for pinned requests, until `unload`."""
        async with self._loading:
            await self._load(version, loader or self._loader, current=False)

    async def unload(self, version: int) -> None:
        """Drop a version that `load` brought, once no running request needs it."""
        self._fetched_pins.pop(version, None)
        await self._command(lambda engine: engine.unpin(version))

    async def _load(self, version: int, loader: Loader, current: bool) -> None:
        begun = time.monotonic()
        try:
            states: States = await self._command(lambda engine: engine.weights.states)
            if version in states:
                await self._command(lambda engine: engine.install(engine.weights.get(version), current=current))
            else:
                weights = await asyncio.to_thread(self._fetch, version, loader, states)
                await self._command(lambda engine: engine.install(weights, current=current))
        except Exception as e:
            self._detail = f"weights {version} not loaded: {type(e).__name__}: {e}"
            raise
        self._detail = ""
        self._last_load_seconds = time.monotonic() - begun

    def _fetch(self, version: int, loader: Loader, states: States) -> HeldWeights:
        fetched = loader(version, states)
        if fetched.version != version:
            raise WeightsRefusedError(f"asked for weights {version}, the loader brought {fetched.version}")
        return build(self._config, version, fetched.state, fetched.digest)

    async def _load_pinned(self, version: int, deadline: float) -> None:
        try:
            await asyncio.wait_for(self.load(version), max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            raise DeadlineExceededError(f"weights {version} did not arrive before the request's deadline") from None
        self._fetched_pins[version] = None
        self._fetched_pins.move_to_end(version)
        while len(self._fetched_pins) > PINNED_KEPT:
            await self.unload(next(iter(self._fetched_pins)))

    # -- seeing it --------------------------------------------------------------------------------------------------

    async def stats(self) -> EngineStats:
        return await self._command(lambda engine: engine.stats())

    async def state(self) -> ReplicaState:
        """Answers even when the loop has died; that is when it matters."""
        try:
            stats = await self.stats()
            version, versions, detail = stats.version, stats.versions, self._detail
        except Exception as e:
            version, versions, detail = None, [], str(e)
        return ReplicaState(
            replica=self._replica,
            version=version,
            versions=versions,
            healthy=self._loop.healthy,
            numerics_id=self._numerics,
            load_seconds=self._last_load_seconds,
            detail=detail,
        )

    async def stop(self) -> None:
        """Fail what is in flight as retryable and end the thread."""
        await asyncio.to_thread(self._loop.stop, CALL_TIMEOUT)

    async def _command(self, command: Callable[[Engine], T]) -> T:
        return await asyncio.wait_for(asyncio.wrap_future(self._loop.call(command)), CALL_TIMEOUT)
