"""The serving actor: an `InferenceActor` that follows the log for what to serve and says on it what it serves.

Consumes weights.v1 (which versions exist, and where) and weights.current.v1 (which one to serve). Produces
replicas.v1: the loaded version and the health of this replica. Fetches weights from the object store by verified
manifest and shards only. A version is its manifest, not its number: what a restore gave up is never loaded, nor served
under the number that the new incarnation uses again (tests/contract/test_serving_restored.py). Waits: for the store and
the broker, within their deadlines; a version that can't be loaded leaves the served one in place and is reported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from odradek.actors.inference.actor import InferenceActor
from odradek.actors.inference.errors import VersionNotHeldError
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import SampleRequest, SampleResult
from odradek.actors.inference.weights import FetchedWeights
from odradek.actors.policy.directory import WEIGHT_BYTES, parameters_of, read_config
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.loop import LoopThread
from odradek.actors.runtime.store import object_store
from odradek.actors.trainer.checkpoint import fetch_weights
from odradek.streams import topics
from odradek.streams.envelope import Event, Record, event_id
from odradek.streams.errors import DecodeError
from odradek.streams.events.weights import CurrentWeights, ReplicaReported, VersionPublished
from odradek.streams.log import EventLog

log = logging.getLogger(__name__)

FETCH_S = 60.0
"""Seconds one version may take to be fetched, beside the time for its bytes. Too low fails on a slow store; too high
keeps old weights for long."""
FETCH_BYTES_S = 10e6
"""Bytes of weights a second, at the slowest: what adds to that for a large model."""
RETRY_S = 2.0
"""Seconds before the current version is tried again after a failed load."""
DETAIL = 500
"""Characters of the reason that go onto the log: keys and hashes are long."""
START_DEADLINE_S = 60.0


class ServingActor:
    """Ray actor class: one replica."""

    def __init__(self, deployment: Deployment, name: str) -> None:
        logging.basicConfig(level=deployment.log_level)
        self._deployment = deployment
        self._name = name
        self._published: dict[int, VersionPublished] = {}
        self._wanted: CurrentWeights | None = None
        self._serving = ""
        """Manifest of the version that is served."""
        self._refused = ""
        """Why the version that it is to serve is not; empty where it is, or nothing was tried yet."""
        self._live = False
        """Whether weights.v1 was read to its end: until then a version may turn out to be given up."""
        self._changed = asyncio.Event()
        self._loads = self._reports = 0
        self._boot_id = str(uuid.uuid4())
        self._loop = LoopThread(name)
        self._loop.begin(self._start(), START_DEADLINE_S)
        self._loop.main(self._follow(), name)

    async def _start(self) -> None:
        self._store = object_store(self._deployment)
        self._log = EventLog(self._deployment.kafka)
        await self._log.start()
        config = read_config(Path(self._deployment.warm_start_dir))
        context = min(config.max_position_embeddings, self._deployment.max_context)
        self._model = msgspec.structs.replace(config, max_position_embeddings=context)
        self._fetch_s = FETCH_S + parameters_of(config) * WEIGHT_BYTES / FETCH_BYTES_S
        self._running = asyncio.get_running_loop()
        self._engine = self._fresh_engine()

    def _fresh_engine(self) -> InferenceActor:
        return InferenceActor(
            self._model,
            self._fetch,
            replica=self._name,
            settings=msgspec.convert(self._deployment.engine, EngineSettings),
            on_crash=lambda _error: os._exit(70),
        )

    # -- Ray's methods -----------------------------------------------------------------------------------------

    async def sample(self, request: SampleRequest, timeout_s: float) -> SampleResult:
        """One turn, within so many seconds by this process's monotonic clock: two hosts' clocks need not agree, and
        either may be set while a turn is sampled. See `InferenceActor.sample`."""
        request = msgspec.structs.replace(request, deadline=time.monotonic() + timeout_s)
        return await self._loop.call(self._engine.sample(request))

    async def cancel(self, session_id: str, epoch: int) -> None:
        """Stop the session's requests up to this epoch."""
        await self._loop.call(self._engine.cancel(session_id, epoch))

    async def state(self) -> dict[str, Any]:
        """Version, load and counters, for `status` and `watch`."""
        return await self._loop.call(self._state())

    async def _state(self) -> dict[str, Any]:
        stats = await self._engine.stats()
        return {
            "version": stats.version,
            "running": stats.running,
            "waiting": stats.waiting,
            "sampled_tokens": stats.sampled_tokens,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "busy_s": stats.busy_seconds,
            "loads": self._loads,
            "fault": self._loop.stood_down,
            "refused": self._refused,
        }

    # -- weights -----------------------------------------------------------------------------------------------

    def _fetch(self, version: int, held: Mapping[int, Mapping[str, Tensor]]) -> FetchedWeights:
        """Called on the fetching thread; the store's client lives on the actor's loop."""
        return asyncio.run_coroutine_threadsafe(self._fetched(version, held), self._running).result(self._fetch_s)

    async def _fetched(self, version: int, held: Mapping[int, Mapping[str, Tensor]]) -> FetchedWeights:
        published = self._published.get(version)
        if published is None or not self._live:
            raise VersionNotHeldError(f"version {version} is not on {topics.WEIGHTS.name} yet")
        _, weights = await fetch_weights(self._store, published.manifest_key, published.manifest_sha256, held)
        return FetchedWeights(version, weights.state, weights.digest)

    async def _follow(self) -> None:
        starts = {topic: await self._log.beginning(topic, 0) for topic in (topics.WEIGHTS.name, CURRENT)}
        # What was published is known whole before anything is loaded: it may have been given up since.
        end = await self._log.stable_end(topics.WEIGHTS.name, 0)
        async for record in self._log.read(topics.WEIGHTS.name, 0, starts[topics.WEIGHTS.name], end):
            await self._apply(record)
        starts[topics.WEIGHTS.name] = max(end, starts[topics.WEIGHTS.name])
        self._live = True
        async with asyncio.TaskGroup() as group:
            for topic, start in starts.items():
                group.create_task(self._read(topic, start))
            group.create_task(self._load_wanted())

    async def _read(self, topic: str, start: int) -> None:
        async for record in self._log.tail(topic, {0: start}):
            await self._apply(record)

    async def _apply(self, record: Record) -> None:
        try:
            body = record.event.body
        except DecodeError as error:
            log.warning("%s: record set aside: %s", record.ref, error)
            return
        if isinstance(body, VersionPublished) and body.policy == self._deployment.policy:
            if body.restored:
                await self._give_up(body.version)
            self._published[body.version] = body
        elif isinstance(body, CurrentWeights) and body.policy == self._deployment.policy:
            self._wanted = body
        self._changed.set()

    async def _give_up(self, version: int) -> None:
        """A new incarnation begins at `version`. An engine holds weights by number, and these are used again: it is
        replaced. What runs in it fails as retryable, and is sampled anew."""
        self._published = {v: one for v, one in self._published.items() if v < version}
        if self._live:
            given_up, self._engine = self._engine, self._fresh_engine()
            self._serving = self._refused = ""
            await given_up.stop()

    async def _load_wanted(self) -> None:
        """Serve the newest wanted version whose publication has been read; try a failed one again."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = self._wanted
            if wanted is None or not self._is_published(wanted):
                continue
            if wanted.manifest_key == self._serving:
                if self._refused:
                    self._refused = ""
                    await self._report(wanted.version, healthy=True, detail="")
                continue
            engine = self._engine
            try:
                if await engine.on_weights(wanted.version) and engine is self._engine:
                    self._serving, self._refused = wanted.manifest_key, ""
                    self._loads += 1
                    await self._report(wanted.version, healthy=True, detail="")
            except Exception as error:
                refused = f"version {wanted.version} can't be loaded: {type(error).__name__}: {error}"
                if refused != self._refused:  # said once, tried again and again
                    self._refused = refused
                    log.warning("%s", refused, exc_info=error)
                    await self._report(wanted.version, healthy=False, detail=refused[:DETAIL])
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    def _is_published(self, wanted: CurrentWeights) -> bool:
        published = self._published.get(wanted.version)
        return published is not None and published.manifest_key == wanted.manifest_key

    async def _report(self, version: int, *, healthy: bool, detail: str) -> None:
        state = await self._engine.state()
        body = ReplicaReported(
            replica=self._name,
            policy=self._deployment.policy,
            version=version,
            healthy=healthy,
            load_ms=state.load_seconds * 1000,
            detail=detail,
        )
        self._reports += 1
        identifier = event_id("replica", self._name, self._boot_id, self._reports)
        await self._log.append(topics.REPLICAS.name, self._name, Event.of(body, id=identifier, source=self._name))


CURRENT = topics.WEIGHTS_CURRENT.name
