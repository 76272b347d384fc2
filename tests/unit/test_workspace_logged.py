"""The workspace delta on the log: what a sandbox says is what any host gets back, byte for byte."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.actors.environment.delta import Delta, DeltaEntry
from odradek.actors.environment.errors import SandboxInfraError
from odradek.actors.environment.logged import INLINE_BYTES, SKIPPED_NAMED, from_logged, to_logged
from odradek.streams import codec
from odradek.streams.blobs import BlobStore, MemoryStore
from odradek.streams.errors import BlobCorrupt, BlobMissing
from odradek.streams.events.meta import Meta
from odradek.streams.events.sessions import ToolCompleted, WorkspaceDelta


def file(path: str, content: bytes, mode: int = 0o644) -> DeltaEntry:
    digest = hashlib.sha256(content).hexdigest()
    return DeltaEntry(path=path, kind="file", mode=mode, size=len(content), digest=digest, content=content)


names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
paths = st.lists(names, min_size=1, max_size=3).map("/".join)
modes = st.integers(0, 0o7777)
small = st.binary(max_size=40)
sizes = st.sampled_from([0, 1, INLINE_BYTES - 1, INLINE_BYTES, INLINE_BYTES + 1])
contents = small | st.builds(lambda size, seed: bytes([seed]) * size, sizes, st.integers(0, 255))
entries = (
    st.builds(file, paths, contents, modes)
    | st.builds(lambda path, target: DeltaEntry(path=path, kind="symlink", target=target), paths, paths)
    | st.builds(lambda path, mode: DeltaEntry(path=path, kind="dir", mode=mode), paths, modes)
    | st.builds(lambda path: DeltaEntry(path=path, kind="delete"), paths)
)
deltas = st.lists(entries, max_size=5).map(lambda found: Delta(entries=tuple(found)))


async def there_and_back(delta: Delta, store: MemoryStore) -> tuple[WorkspaceDelta, Delta]:
    """Through the event's bytes, read by another process that has only the store."""
    logged = await to_logged(delta, BlobStore(store), "ada")
    event = ToolCompleted(call_id="0.0", turn=0, index=0, text="", delta=logged)
    _, body = codec.decode(codec.encode(event, Meta()), "tool.completed.v1")
    (back,) = await from_logged([body.delta], BlobStore(store, cache_bytes=0))
    return logged, back


@settings(deadline=None)
@given(deltas)
def test_paths_kinds_modes_targets_and_bytes_come_back_exactly(delta: Delta) -> None:
    _, back = asyncio.run(there_and_back(delta, MemoryStore()))
    assert back == delta


@settings(deadline=None)
@given(contents)
def test_a_large_content_is_a_claim_check_and_a_small_one_travels_inside(content: bytes) -> None:
    store = MemoryStore()
    logged, _ = asyncio.run(there_and_back(Delta(entries=(file("f", content),)), store))
    (change,) = logged.changes
    objects = asyncio.run(store.list("blobs/ada/"))
    if len(content) > INLINE_BYTES:
        assert change.ref is not None and change.content == b"" and objects == [change.ref.key]
    else:
        assert change.ref is None and change.content == content and objects == []


async def test_the_content_is_durable_before_the_event_can_exist() -> None:
    """`to_logged` returns only after the store has the bytes; a store that fails gives no event to append."""

    class Refuses(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes) -> bool:
            raise OSError("disk full")

    big = Delta(entries=(file("f", b"x" * (INLINE_BYTES + 1)),))
    with pytest.raises(OSError, match="disk full"):
        await to_logged(big, BlobStore(Refuses()), "")


async def test_a_lost_or_changed_object_is_an_error_that_names_it() -> None:
    store = MemoryStore()
    logged, _ = await there_and_back(Delta(entries=(file("f", b"x" * (INLINE_BYTES + 1)),)), store)
    ref = logged.changes[0].ref
    assert ref is not None
    await store.put(ref.key, b"y" * (INLINE_BYTES + 1))
    with pytest.raises(BlobCorrupt, match=ref.key):
        await from_logged([logged], BlobStore(store, cache_bytes=0))
    store._objects.clear()
    with pytest.raises(BlobMissing, match=ref.key):
        await from_logged([logged], BlobStore(store, cache_bytes=0))


async def test_what_cannot_be_carried_is_named_on_the_log_within_bounds() -> None:
    """A loss is visible: a rebuilt workspace lacks it."""
    names = tuple(f"'fifo{i}': a FIFO" for i in range(SKIPPED_NAMED + 3))
    few, back = await there_and_back(Delta(skipped=names[:2]), MemoryStore())
    assert few.skipped == list(names[:2]) and back.skipped == names[:2]
    many, _ = await there_and_back(Delta(skipped=names), MemoryStore())
    assert many.skipped == [*names[:SKIPPED_NAMED], "and 3 more"]


async def test_a_digest_without_its_content_is_refused_and_never_logged_as_an_empty_file() -> None:
    bare = Delta(entries=(DeltaEntry(path="f", kind="file", mode=0o644, size=3, digest="ab" * 32),))
    with pytest.raises(SandboxInfraError, match="'f'"):
        await to_logged(bare, BlobStore(MemoryStore()), "")
