"""Objects beside the log: content-addressed bytes in any S3, and the claim checks that events carry.

An object is put before the event that names it, at `blobs/SUBJECT/sha256`, with If-None-Match, so that it is written
once and never changed; each read is verified against the address. Equal content of two subjects is two objects, so that
erasing one subject cannot erase another's. `ObjectStore` is the protocol for any store; the trainer and the checkpoint
code use it directly for keys of their own.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar, runtime_checkable

import boto3
import botocore.exceptions
import msgspec
from botocore.config import Config

from odradek.streams.errors import BlobCorrupt, BlobMissing, StoreUnreachable, Terminal
from odradek.streams.events.meta import BlobRef

R = TypeVar("R")

CONNECT_S = 5.0
"""Seconds to connect to the store. Too low: a busy store looks dead. Too high: a wrong address hangs."""
READ_S = 30.0
"""Seconds without a byte before a request counts as failed."""
ATTEMPTS = 3
"""Tries of one request within its deadline, by the client library, with backoff."""
THREADS = 8
"""Requests under way at one time in a process. Too low: a checkpoint's shards take turns. Too high: sockets."""
DEADLINE_S = 120.0
"""Seconds for one object, tries included."""
CACHE_BYTES = 64 * 1024 * 1024
"""Bytes of verified objects kept in memory. Too low: a workspace rebuilt for each attempt fetches its files again."""
SHARED = "shared"
"""Stands for the subject of content that is nobody's."""


@runtime_checkable
class ObjectStore(Protocol):
    """Keys to bytes. Errors: `BlobMissing`, `StoreUnreachable` (retry later), `Terminal` (refused)."""

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """Writes the object unless the key exists; True if this call wrote it. Of several at once, one wins."""

    async def put(self, key: str, data: bytes) -> None:
        """Writes or replaces the object."""

    async def get(self, key: str) -> bytes:
        """The object's bytes."""

    async def exists(self, key: str) -> bool:
        """Whether the key has an object."""

    async def list(self, prefix: str) -> list[str]:
        """Keys that begin with the prefix, sorted."""


class S3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bucket of one S3. Empty endpoint and keys leave both to boto3's own chain (environment, instance role)."""

    bucket: str
    endpoint: str = ""
    region: str = "us-east-1"
    access_key: str = ""
    secret_key: str = ""

    def __repr__(self) -> str:  # keys must never reach a log line
        return f"S3Config({self.bucket!r} at {self.endpoint or 'the default endpoint'})"


class MemoryStore:
    """An ObjectStore in this process; for tests and for trying things."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore`."""
        if key in self._objects:
            return False
        self._objects[key] = bytes(data)
        return True

    async def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        self._objects[key] = bytes(data)

    async def get(self, key: str) -> bytes:
        """See `ObjectStore`."""
        if key not in self._objects:
            raise BlobMissing(f"no object {key} in memory", key=key)
        return self._objects[key]

    async def exists(self, key: str) -> bool:
        """See `ObjectStore`."""
        return key in self._objects

    async def list(self, prefix: str) -> list[str]:
        """See `ObjectStore`."""
        return sorted(key for key in self._objects if key.startswith(prefix))


class S3Store:
    """An ObjectStore on S3, through boto3 in threads of its own."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="s3")
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=config.endpoint or None,
            region_name=config.region,
            aws_access_key_id=config.access_key or None,
            aws_secret_access_key=config.secret_key or None,
            config=Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                max_pool_connections=THREADS,
                retries={"max_attempts": ATTEMPTS, "mode": "standard"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"},
            ),
        )

    def close(self) -> None:
        """Ends the threads; requests under way finish."""
        self._threads.shutdown(wait=False)
        self._client.close()

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `ObjectStore`. 412 means that the object exists; 409 that another put of it is under way: try again."""
        return await self._run(key, lambda: self._put_if_absent(key, data))

    def _put_if_absent(self, key: str, data: bytes) -> bool:
        for _ in range(ATTEMPTS):
            try:
                self._client.put_object(Bucket=self.config.bucket, Key=key, Body=data, IfNoneMatch="*")
                return True
            except botocore.exceptions.ClientError as error:
                status = _status(error)
                if status == 412:
                    return False
                if status != 409:
                    raise
        raise StoreUnreachable(f"{key}: other writers kept interfering with a conditional put", key=key)

    async def put(self, key: str, data: bytes) -> None:
        """See `ObjectStore`."""
        await self._run(key, lambda: self._client.put_object(Bucket=self.config.bucket, Key=key, Body=data))

    async def get(self, key: str) -> bytes:
        """See `ObjectStore`."""

        def fetch() -> bytes:
            body: bytes = self._client.get_object(Bucket=self.config.bucket, Key=key)["Body"].read()
            return body

        return await self._run(key, fetch)

    async def exists(self, key: str) -> bool:
        """See `ObjectStore`."""
        try:
            await self._run(key, lambda: self._client.head_object(Bucket=self.config.bucket, Key=key))
        except BlobMissing:
            return False
        return True

    async def list(self, prefix: str) -> list[str]:
        """See `ObjectStore`."""

        def pages() -> list[str]:
            found: list[str] = []
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.config.bucket, Prefix=prefix
            ):
                found += [item["Key"] for item in page.get("Contents", ())]
            return sorted(found)

        return await self._run(prefix, pages)

    async def _run(self, key: str, call: Callable[[], R]) -> R:
        where = f"s3://{self.config.bucket}/{key} at {self.config.endpoint or 'the default endpoint'}"
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await asyncio.get_running_loop().run_in_executor(self._threads, call)
        except botocore.exceptions.ClientError as error:
            raise _refused(error, where, key) from error
        except (
            TimeoutError,
            botocore.exceptions.HTTPClientError,
            botocore.exceptions.ConnectionError,
            botocore.exceptions.IncompleteReadError,
            botocore.exceptions.ResponseStreamingError,
        ) as error:
            raise StoreUnreachable(f"{where}: no answer ({type(error).__name__}); is the store up?", key=key) from None
        except botocore.exceptions.BotoCoreError as error:
            raise Terminal(f"{where}: {type(error).__name__}; check endpoint, bucket and keys", key=key) from error


def _status(error: botocore.exceptions.ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _refused(error: botocore.exceptions.ClientError, where: str, key: str) -> Exception:
    code = str(error.response.get("Error", {}).get("Code", "?"))
    if code == "NoSuchBucket":
        return Terminal(f"{where}: the bucket does not exist; create it (`odradek up` does) or fix its name", key=key)
    if _status(error) == 404:
        return BlobMissing(f"{where}: no such object", key=key)
    if _status(error) >= 500 or _status(error) == 429:
        return StoreUnreachable(f"{where}: the store answers {_status(error)} {code}", key=key)
    return Terminal(f"{where}: refused with {_status(error)} {code}; check keys and permissions", key=key)


class BlobStore:
    """Claim checks over an ObjectStore: `put` before the event, `get` after it, both verified."""

    def __init__(self, store: ObjectStore, *, prefix: str = "", cache_bytes: int = CACHE_BYTES) -> None:
        self.store = store
        self._prefix = prefix
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cache_limit = cache_bytes
        self._cached = 0

    async def put(self, data: bytes, *, subject: str = "") -> BlobRef:
        """Stores bytes under their own hash, once, and returns the claim check. An object that already exists is read
        and verified, so that a reference never points at damage."""
        digest = hashlib.sha256(data).hexdigest()
        ref = BlobRef(key=f"{self._prefix}blobs/{subject or SHARED}/{digest}", sha256=digest, size=len(data))
        if ref.key in self._cache:
            return ref
        if not await self.store.put_if_absent(ref.key, data):
            _verified(ref, await self.store.get(ref.key))
        self._remember(ref.key, data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes of a claim check; `BlobMissing` or `BlobCorrupt` where they are not what was stored."""
        if (data := self._cache.get(ref.key)) is not None:
            self._cache.move_to_end(ref.key)
            return data
        data = _verified(ref, await self.store.get(ref.key))
        self._remember(ref.key, data)
        return data

    def _remember(self, key: str, data: bytes) -> None:
        if len(data) > self._cache_limit // 4:
            return  # one large object would push out everything else
        self._cached += len(data) - len(self._cache.pop(key, b""))
        self._cache[key] = data
        while self._cached > self._cache_limit:
            _, dropped = self._cache.popitem(last=False)
            self._cached -= len(dropped)


def _verified(ref: BlobRef, data: bytes) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise BlobCorrupt(
            f"object {ref.key}: expected {ref.size} bytes with sha256 {ref.sha256[:16]}…, found {len(data)} bytes with "
            f"{found[:16]}…; restore it from a copy",
            key=ref.key,
        )
    return data
