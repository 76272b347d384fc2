"""Removing a subject's objects from buckets that keep old versions, or hold objects under lock."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from odradek.infra.stack.s3 import S3Access, s3_client
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.config import KafkaConfig
from odradek.streams.errors import SubjectErased
from odradek.streams.log import EventLog
from odradek.streams.privacy.erasure import Erasure
from odradek.streams.privacy.keys import KeyFiles
from odradek.streams.privacy.ring import KeyRing

pytestmark = pytest.mark.contract


@pytest.fixture
def client(s3_access: S3Access) -> Any:
    return s3_client(s3_access)


def store_of(access: S3Access, bucket: str) -> S3Store:
    assert access.endpoint is not None and access.keys is not None
    return S3Store(S3Config(
        bucket=bucket, endpoint=access.endpoint, access_key=access.keys.access_key, secret_key=access.keys.secret_key,
    ))  # fmt: skip


@pytest.fixture
async def versioned(s3_access: S3Access, client: Any) -> AsyncIterator[S3Store]:
    bucket = f"t-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket)
    client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    store = store_of(s3_access, bucket)
    yield store
    store.close()


@pytest.fixture
async def locked(s3_access: S3Access, client: Any) -> AsyncIterator[S3Store]:
    bucket = f"t-{uuid.uuid4().hex[:12]}"
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    store = store_of(s3_access, bucket)
    yield store
    store.close()


def kept_for_a_day(client: Any, store: S3Store, key: str, data: bytes) -> None:
    client.put_object(
        Bucket=store.config.bucket, Key=key, Body=data, ObjectLockMode="COMPLIANCE",
        ObjectLockRetainUntilDate=datetime.now(UTC) + timedelta(days=1),
    )  # fmt: skip


async def test_older_versions_and_delete_markers_go_too(versioned: S3Store, client: Any) -> None:
    for data in (b"first", b"second"):
        await versioned.put("blobs/ann/x", data)
    await versioned.put("blobs/ann/y", b"x")
    await versioned.put("blobs/anna/z", b"z")
    client.delete_object(Bucket=versioned.config.bucket, Key="blobs/ann/y")
    removal = await versioned.remove("blobs/ann/")
    assert (removal.removed, removal.kept) == (4, []), "two versions, one more, and the marker in front of it"
    left = client.list_object_versions(Bucket=versioned.config.bucket, Prefix="blobs/")
    assert [one["Key"] for one in left.get("Versions", ())] == ["blobs/anna/z"] and not left.get("DeleteMarkers")
    assert (await versioned.remove("blobs/ann/")).removed == 0


async def test_what_a_lock_keeps_is_named_and_is_ciphertext_without_a_key(
    locked: S3Store, client: Any, tmp_path: Path
) -> None:
    """The store refuses: the report says which, and that nobody can read it; plain content it would call readable."""
    ring = KeyRing(KeyFiles(tmp_path / "keys"))
    blobs = BlobStore(locked, keys=ring, cache_bytes=0)
    box = (await ring.obtain("ann")).encrypt(b"said", b"place")
    await asyncio.to_thread(kept_for_a_day, client, locked, "blobs/ann/kept", box)
    await blobs.put(b"free", subject="ann")
    free = await blobs.put(b"of ben", subject="ben")
    await ring.destroy("ann", "asked")
    erasure = Erasure(EventLog(KafkaConfig("127.0.0.1:9"), keys=ring), blobs)
    report = await erasure._objects("ann")
    assert report.done and report.state == "unreadable", report
    assert "1 removed" in report.detail and "blobs/ann/kept@" in report.detail and "without a key" in report.detail
    assert await blobs.get(free) == b"of ben"

    await asyncio.to_thread(kept_for_a_day, client, locked, "blobs/ann/older", b"in plain, before there were keys")
    report = await erasure._objects("ann")
    assert not report.done and report.state == "readable" and "blobs/ann/older" in report.detail


async def test_a_removed_object_is_told_from_a_missing_one(versioned: S3Store, tmp_path: Path) -> None:
    ring = KeyRing(KeyFiles(tmp_path / "keys"))
    blobs = BlobStore(versioned, keys=ring)
    ref = await blobs.put(b"said", subject="ann")
    await ring.destroy("ann", "asked")
    await blobs.remove("ann")
    with pytest.raises(SubjectErased):
        await blobs.get(ref)
