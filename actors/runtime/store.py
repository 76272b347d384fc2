"""Log and object store of a deployment, with keys read in this process and held nowhere else.

What is somebody's is encrypted and opened here, below every actor: none of them knows of it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.streams.blobs import BlobStore, S3Config, S3Store
from odradek.streams.log import EventLog
from odradek.streams.privacy.ring import key_ring


class _Keys(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str


def log_of(deployment: Deployment) -> EventLog:
    """The log, not yet opened."""
    return EventLog(deployment.kafka, keys=key_ring(deployment.keys))


def blobs_of(deployment: Deployment) -> BlobStore:
    """Claim checks in the deployment's bucket."""
    return BlobStore(object_store(deployment), keys=key_ring(deployment.keys))


def object_store(deployment: Deployment) -> S3Store:
    """A client of the deployment's bucket."""
    return S3Store(s3_config(deployment.store))


def s3_config(address: ObjectStoreAddress) -> S3Config:
    """A bucket with its keys. Without a credentials file boto3's own chain finds them."""
    keys = _Keys("", "")
    if address.credentials_file:
        keys = msgspec.json.decode(Path(address.credentials_file).read_bytes(), type=_Keys)
    return S3Config(
        bucket=address.bucket,
        endpoint=address.endpoint,
        region=address.region,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
    )
