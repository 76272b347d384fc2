"""Object stores and claim checks, against a real S3 and in memory."""

from __future__ import annotations

import asyncio
import pickle
import socket
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


def die_before_the_first_byte(store: S3Store, key: str) -> None:
    """A put whose writer ends after the headers, as a killed one does."""
    url = store._client.generate_presigned_url("put_object", Params={"Bucket": store.config.bucket, "Key": key})
    host, _, path = url.removeprefix("http://").partition("/")
    with socket.create_connection((host.partition(":")[0], int(host.partition(":")[2]))) as writer:
        writer.sendall(f"PUT /{path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1000\r\n\r\n".encode())
        writer.shutdown(socket.SHUT_WR)
        writer.recv(1000)


@pytest.mark.contract
async def test_what_a_killed_writer_left_does_not_stand_in_the_way(s3: S3Store, key: str) -> None:
    """A trainer killed while it uploads must not leave a shard or a manifest that nobody can write again."""
    die_before_the_first_byte(s3, key)
    assert await s3.get(key) == b"", "the store keeps an empty object"
    won = await asyncio.gather(*(s3.put_if_absent(key, b"%d" % number) for number in range(8)))
    assert sum(won) == 1, "and of those who replace it one wins"
    assert await s3.get(key) == b"%d" % won.index(True)
    assert await s3.put_if_absent(key, b"later") is False

    blob = await BlobStore(s3, prefix=f"{key}/").put(b"whole")
    die_before_the_first_byte(s3, torn := f"{key}/again/blobs/shared/{blob.sha256}")
    assert (await BlobStore(s3, prefix=f"{key}/again/").put(b"whole")).key == torn
    assert await s3.get(torn) == b"whole"


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
