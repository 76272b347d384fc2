"""Object stores and claim checks, against a real S3 and in memory."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator

import pytest

from odradek.streams import blobs
from odradek.streams.blobs import BlobStore, MemoryStore, S3Config, S3Store
from odradek.streams.errors import BlobCorrupt, StoreUnreachable, Terminal
from odradek.streams.testing import ObjectStoreContract, key

__all__ = ["key"]


class TestMemoryStore(ObjectStoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


@pytest.fixture
def s3(s3_config: dict[str, str]) -> Iterator[S3Store]:
    store = S3Store(S3Config(**s3_config))
    yield store
    store.close()


@pytest.mark.contract
class TestS3Store(ObjectStoreContract):
    @pytest.fixture
    def store(self, s3: S3Store) -> S3Store:
        return s3


class TestClaimChecks:
    async def test_equal_content_is_one_object(self) -> None:
        store = MemoryStore()
        first = await BlobStore(store).put(b"same")
        second = await BlobStore(store).put(b"same")
        assert first == second
        assert await store.list("") == [first.key]

    async def test_equal_content_of_two_subjects_is_two_objects(self) -> None:
        store = BlobStore(MemoryStore())
        ours, theirs = await store.put(b"same", subject="ann"), await store.put(b"same", subject="bob")
        assert ours.key != theirs.key
        assert ours.sha256 == theirs.sha256

    async def test_damage_is_found_on_read(self) -> None:
        store = MemoryStore()
        ref = await BlobStore(store).put(b"good")
        await store.put(ref.key, b"evil")
        with pytest.raises(BlobCorrupt, match=ref.key) as caught:
            await BlobStore(store).get(ref)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

    async def test_damage_is_found_when_the_object_already_exists(self) -> None:
        store = MemoryStore()
        ref = await BlobStore(store).put(b"good")
        await store.put(ref.key, b"evil")
        with pytest.raises(BlobCorrupt):
            await BlobStore(store).put(b"good")

    async def test_the_cache_answers_without_the_store_and_stays_bounded(self) -> None:
        store = MemoryStore()
        cached = BlobStore(store, cache_bytes=1000)
        refs = [await cached.put(bytes([number]) * 200) for number in range(10)]
        assert cached._cached <= 1000
        store._objects.clear()
        assert await cached.get(refs[-1]) == bytes([9]) * 200
        with pytest.raises(blobs.BlobMissing):
            await cached.get(refs[0])

    async def test_many_puts_of_the_same_content_at_once(self) -> None:
        store = BlobStore(MemoryStore())
        refs = await asyncio.gather(*(store.put(b"same") for _ in range(8)))
        assert len(set(refs)) == 1


class TestFaults:
    async def test_an_unreachable_store_is_one_clear_retryable_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blobs, "ATTEMPTS", 1)
        store = S3Store(S3Config(bucket="b", endpoint="http://127.0.0.1:9", access_key="k", secret_key="hush-hush"))
        with pytest.raises(StoreUnreachable, match=r"s3://b/some/key at http://127\.0\.0\.1:9") as caught:
            await store.get("some/key")
        assert "\n" not in str(caught.value)
        assert "hush-hush" not in f"{caught.value} {store.config}"
        store.close()

    @pytest.mark.contract
    async def test_a_missing_bucket_is_named(self, s3_config: dict[str, str]) -> None:
        store = S3Store(S3Config(**(s3_config | {"bucket": "no-such-bucket"})))
        with pytest.raises(Terminal, match="no-such-bucket"):
            await store.put("key", b"data")
        store.close()
