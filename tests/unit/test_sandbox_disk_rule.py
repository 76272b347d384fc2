"""Which sandbox goes when the host's disk fills (actors/environment/ns/disk.py)."""

from __future__ import annotations

from odradek.actors.environment.ns.admission import NsConfig
from odradek.actors.environment.ns.disk import to_evict

MB = 1 << 20
CONFIG = NsConfig(min_free_disk_bytes=512 * MB, max_disk_bytes=4096 * MB)


def test_a_sandbox_above_its_part_goes_whatever_is_free() -> None:
    assert list(to_evict(CONFIG, 10**12, {"a": 5000 * MB, "b": 4096 * MB, "c": 9000 * MB})) == ["a", "c"]


def test_on_a_full_disk_the_largest_goes_and_only_it() -> None:
    going = to_evict(CONFIG, 100 * MB, {"a": 300 * MB, "b": 900 * MB})
    assert list(going) == ["b"] and "900 MB, the most that could go" in going["b"]


def test_on_a_full_disk_a_person_keeps_what_they_have_while_a_rollout_is_large() -> None:
    held = {"person": 900 * MB, "rollout": 300 * MB, "small": 1 * MB}
    assert list(to_evict(CONFIG, 100 * MB, held, "person".__eq__)) == ["rollout"]
    assert list(to_evict(CONFIG, 100 * MB, {"person": 900 * MB, "small": 1 * MB}, "person".__eq__)) == ["person"]


def test_small_sandboxes_never_pay_for_a_disk_that_others_fill() -> None:
    assert to_evict(CONFIG, 0, {"a": 1 * MB, "b": 20 * MB}) == {}
    assert to_evict(CONFIG, 0, {}) == {}


def test_nothing_goes_while_there_is_space() -> None:
    assert to_evict(CONFIG, 512 * MB, {"a": 4096 * MB}) == {}
