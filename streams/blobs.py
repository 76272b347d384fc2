"""Objects beside the log: content-addressed bytes in any S3, and the claim checks that events carry.

An object is put before the event that names it, at `blobs/SUBJECT/sha256`, with If-None-Match, so that it is written
once and never changed; each read is verified against the address. A subject's content is encrypted for them first and
addressed by its ciphertext: equal content of two subjects is two objects, so that erasing one cannot erase another's.
`ObjectStore` is the protocol for any store; the trainer and the checkpoint code use it directly for keys of their own.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import boto3
import botocore.exceptions
import msgspec
from botocore.config import Config

from odradek.streams import expect
from odradek.streams.errors import BlobCorrupt, BlobMissing, KeyUnavailable, StoreUnreachable, SubjectErased, Terminal
from odradek.streams.events.meta import BlobRef
from odradek.streams.priority import ReservedThreads
from odradek.streams.privacy import removal
from odradek.streams.privacy.names import SHARED, folder_of
from odradek.streams.privacy.removal import Removal
from odradek.streams.privacy.ring import KeyRing

R = TypeVar("R")

CONNECT_S = 5.0
"""Seconds to connect to the store. Too low: a busy store looks dead. Too high: a wrong address hangs."""
READ_S = 30.0
"""Seconds without a byte before a request counts as failed."""
ATTEMPTS = 3
"""Tries of one request within its deadline, by the client library, with backoff."""
THREADS = 8
"""Requests under way at one time in a process; production has as many again. Too low: a checkpoint's shards take turns.
Too high: sockets."""
DEADLINE_S = 120.0
"""Seconds for one object, tries included."""
CACHE_BYTES = 64 * 1024 * 1024
"""Bytes of verified objects kept in memory. Too low: a workspace rebuilt for each attempt fetches its files again."""


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

    async def remove(self, prefix: str) -> Removal:
        """Removes every object whose key begins with the prefix, older versions included."""


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

    async def remove(self, prefix: str) -> Removal:
        """See `ObjectStore`."""
        keys = await self.list(prefix)
        for key in keys:
            del self._objects[key]
        return Removal(removed=len(keys))


class S3Store:
    """An ObjectStore on S3, through boto3 in threads of its own."""

    def __init__(self, config: S3Config) -> None:
        self.config = config
        self._threads = ReservedThreads(THREADS, "s3")
        expect.install()
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=config.endpoint or None,
            region_name=config.region,
            aws_access_key_id=config.access_key or None,
            aws_secret_access_key=config.secret_key or None,
            config=Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                max_pool_connections=2 * THREADS,
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
        """See `ObjectStore`. 412 means that the object exists; 409 that another put of it is under way: try again.

        SeaweedFS keeps an empty object where a writer died between a put's headers and its first byte. Such a one is
        nobody's, so it is replaced, on condition that it is still that one: of several at once one wins."""
        return await self._run(key, lambda: self._put_if_absent(key, data))

    def _put_if_absent(self, key: str, data: bytes, **options: Any) -> bool:
        condition = {"IfNoneMatch": "*"}
        for _ in range(ATTEMPTS):
            try:
                self._client.put_object(Bucket=self.config.bucket, Key=key, Body=data, **condition, **options)
                return True
            except botocore.exceptions.ClientError as error:
                status = _status(error)
                if status == 412:
                    torn = self._torn(key) if data and "IfNoneMatch" in condition else ""
                    if not torn:
                        return False
                    condition = {"IfMatch": torn}
                elif status != 409:
                    raise
        raise StoreUnreachable(f"{key}: other writers kept interfering with a conditional put", key=key)

    def _torn(self, key: str) -> str:
        """The tag of an object without content; empty if it has some."""
        head = self._client.head_object(Bucket=self.config.bucket, Key=key)
        return str(head["ETag"]) if head["ContentLength"] == 0 else ""

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

    async def remove(self, prefix: str) -> Removal:
        """See `ObjectStore`."""
        bucket, removed, kept = self.config.bucket, 0, dict[str, str]()
        while page := await self._run(prefix, partial(removal.next_page, self._client, bucket, prefix, kept)):
            refused = await self._run(prefix, partial(removal.delete, self._client, bucket, page))
            kept.update(refused)
            removed += len(page) - len(refused)
        return Removal(removed=removed, kept=[f"{name}: {why}" for name, why in sorted(kept.items())])

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
        return BlobMissing(f"{where}: no such object; restore it from a copy of the bucket", key=key)
    if _status(error) >= 500 or _status(error) == 429:
        return StoreUnreachable(f"{where}: the store answers {_status(error)} {code}", key=key)
    return Terminal(f"{where}: refused with {_status(error)} {code}; check keys and permissions", key=key)


class BlobStore:
    """Claim checks over an ObjectStore: `put` before the event, `get` after it, both verified. Its cache holds objects
    as they are stored: a subject's as ciphertext."""

    def __init__(
        self, store: ObjectStore, *, prefix: str = "", cache_bytes: int = CACHE_BYTES, keys: KeyRing | None = None
    ) -> None:
        self.store = store
        self.keys = keys
        """Encrypts what is somebody's; without it objects are put as they are."""
        self._prefix = prefix
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cache_limit = cache_bytes
        self._cached = 0

    async def put(self, data: bytes, *, subject: str = "") -> BlobRef:
        """Stores bytes under their own hash, once, and returns the claim check. An object that already exists is read
        and verified, so that a reference never points at damage. Raises SubjectErased."""
        if subject and self.keys is not None:
            key = await self.keys.obtain(subject)
            return await self.put_encrypted(key.encrypt(data, _place(subject)), subject)
        return await self._put(data, self._folder(subject), "")

    async def put_encrypted(self, box: bytes, subject: str) -> BlobRef:
        """The same for bytes that are encrypted for the subject already."""
        return await self._put(box, self._folder(subject), subject)

    def _folder(self, subject: str) -> str:
        return f"{self._prefix}blobs/{folder_of(subject) if subject else SHARED}/"

    async def _put(self, data: bytes, folder: str, subject: str) -> BlobRef:
        digest = hashlib.sha256(data).hexdigest()
        ref = BlobRef(key=f"{folder}{digest}", sha256=digest, size=len(data), subject=subject)
        if ref.key in self._cache:
            return ref
        if not await self.store.put_if_absent(ref.key, data):
            _verified(ref, await self.store.get(ref.key))
        self._remember(ref.key, data)
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        """The bytes of a claim check; `BlobMissing` or `BlobCorrupt` where they are not what was stored, and where
        nobody, or not this process, can open them `SubjectErased` or `KeyUnavailable`."""
        if not ref.subject:
            return await self.get_encrypted(ref)
        key = await self.keys.find(ref.subject) if self.keys is not None else None
        if key is not None:
            return key.decrypt(await self.get_encrypted(ref), _place(ref.subject))
        if self.keys is not None and self.keys.erased(ref.subject):
            raise SubjectErased(f"object {ref.key}: subject {ref.subject!r} was erased", subject=ref.subject)
        raise KeyUnavailable(f"object {ref.key}: no key of subject {ref.subject!r} here", subject=ref.subject)

    async def get_encrypted(self, ref: BlobRef) -> bytes:
        """The object as it is stored."""
        if (data := self._cache.get(ref.key)) is not None:
            self._cache.move_to_end(ref.key)
            return data
        data = _verified(ref, await self.store.get(ref.key))
        self._remember(ref.key, data)
        return data

    async def remove(self, subject: str) -> Removal:
        """Removes all objects of a subject, from the store and from here."""
        folder = self._folder(subject)
        for key in [key for key in self._cache if key.startswith(folder)]:
            self._cached -= len(self._cache.pop(key))
        return await self.store.remove(folder)

    async def of_subject(self, subject: str) -> list[str]:
        """Keys of the objects of a subject that the store has."""
        return await self.store.list(self._folder(subject))

    def _remember(self, key: str, data: bytes) -> None:
        if len(data) > self._cache_limit // 4:
            return  # one large object would push out everything else
        self._cached += len(data) - len(self._cache.pop(key, b""))
        self._cache[key] = data
        while self._cached > self._cache_limit:
            _, dropped = self._cache.popitem(last=False)
            self._cached -= len(dropped)


def _place(subject: str) -> bytes:
    """What an object's encryption is bound to; its address is its hash."""
    return msgspec.msgpack.encode(("blob", subject))


def _verified(ref: BlobRef, data: bytes) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != ref.sha256:
        raise BlobCorrupt(
            f"object {ref.key}: expected {ref.size} bytes with sha256 {ref.sha256[:16]}…, found {len(data)} bytes with "
            f"{found[:16]}…; restore it from a copy",
            key=ref.key,
        )
    return data
