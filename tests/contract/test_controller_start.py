"""What a controller does and doesn't do again when it starts, as a process of its own on a real broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.holder import holder, told
from support.lane_world import LaneWorld

from odradek.streams import topics
from odradek.streams.admin import ensure_topics
from odradek.streams.config import KafkaConfig
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.log import EventLog
from odradek.streams.replay.select import bodies
from odradek.streams.testing import fresh_config

__all__ = ["fresh_config"]
pytestmark = pytest.mark.contract


@pytest.fixture
async def lane(fresh_config: KafkaConfig) -> AsyncIterator[LaneWorld]:
    await ensure_topics(fresh_config)
    async with EventLog(fresh_config) as log:
        yield LaneWorld(log, lane="main-0")


async def test_the_lanes_configuration_is_written_when_it_is_another_one_only(lane: LaneWorld) -> None:
    for bound in (1, 1, 2, 1):
        lane.settings["max_staleness"] = bound
        async with holder("controller", lane) as controller:
            await told(controller, ready=True)
    written = [body async for body in bodies(lane.log, topics.GROUPS.name) if isinstance(body, LaneConfigured)]
    assert [body.max_staleness for body in written] == [1, 2, 1]
