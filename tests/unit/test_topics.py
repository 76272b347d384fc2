"""The table of topics."""

from __future__ import annotations

import pytest

from odradek.streams import topics
from odradek.streams.admin import declared_settings
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import UnknownTopic

CONFIG = KafkaConfig(bootstrap="x:1", prefix="p", min_insync=2)


@pytest.mark.parametrize("row", topics.ALL, ids=lambda row: row.name)
def test_nothing_kept_is_ever_removed_by_the_broker(row: topics.Topic) -> None:
    settings = declared_settings(row, CONFIG)
    if row.cleanup is topics.Cleanup.KEEP:
        assert (settings["retention.ms"], settings["retention.bytes"]) == ("-1", "-1")
        assert settings["cleanup.policy"] == "delete"
    else:
        assert settings["cleanup.policy"] == "compact"
    assert settings["min.insync.replicas"] == "2"


def test_only_what_the_design_names_is_compacted() -> None:
    compacted = {row.name for row in topics.ALL if row.cleanup is topics.Cleanup.COMPACT}
    assert compacted == {"weights.current.v1", "replicas.v1"}


def test_the_partition_of_an_open_topics_key_is_nobodys_to_know() -> None:
    with pytest.raises(UnknownTopic, match="read all of its partitions"):
        topics.TASKS.partition_of("key")


@pytest.mark.parametrize(("lane", "number"), [("main", 0), ("lane-0", 0), ("lane-3", 3), ("math2", 2)])
def test_a_lane_is_one_partition(lane: str, number: int) -> None:
    assert topics.GROUPS.partition_of(lane) == topics.BATCHES.partition_of(lane) == number


def test_a_lane_without_a_partition_is_refused() -> None:
    with pytest.raises(UnknownTopic, match=r"lane-4.*0\.\.3"):
        topics.GROUPS.partition_of("lane-4")


def test_keys_are_placed_as_javas_clients_place_them() -> None:
    # Reference values of org.apache.kafka.common.utils.Utils.murmur2, from Kafka's own UtilsTest.
    expected = {b"21": -973932308, b"foobar": -790332482, b"a-little-bit-long-string": -985981536}
    for key, murmur in expected.items():
        assert topics.partition_for(key, 1000) == (murmur & 0x7FFFFFFF) % 1000


def test_a_tenant_has_topics_of_its_own_for_open_topics_only() -> None:
    assert topics.TASKS.for_tenant("acme") == "tasks.v1.acme"
    assert topics.declared("tasks.v1.acme") is topics.TASKS
    assert topics.tenant_of("tasks.v1.acme") == "acme"
    assert topics.tenant_of("tasks.v1") is None
    for wrong in ("", "A", "a.b", "-a", "a" * 64):
        with pytest.raises(UnknownTopic):
            topics.TASKS.for_tenant(wrong)
    with pytest.raises(UnknownTopic):
        topics.SESSIONS.for_tenant("acme")
    with pytest.raises(UnknownTopic, match=r"made-up\.v1"):
        topics.declared("made-up.v1")


@pytest.mark.parametrize(("prefix", "full"), [("", "tasks.v1"), ("p", "p.tasks.v1"), ("p.", "p.tasks.v1")])
def test_a_deployment_prefix_goes_on_and_comes_off(prefix: str, full: str) -> None:
    config = KafkaConfig(bootstrap="x:1", prefix=prefix)
    assert config.name("tasks.v1") == full
    assert config.bare(full) == "tasks.v1"
