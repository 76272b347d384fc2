"""The object store of a deployment, with keys read in this process and held nowhere else."""

from __future__ import annotations

from pathlib import Path

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.streams.blobs import S3Config, S3Store


class _Keys(msgspec.Struct, frozen=True):
    access_key: str
    secret_key: str


def object_store(deployment: Deployment) -> S3Store:
    """A client of the deployment's bucket. Without a credentials file boto3's own chain finds the keys."""
    address = deployment.store
    keys = _Keys("", "")
    if address.credentials_file:
        keys = msgspec.json.decode(Path(address.credentials_file).read_bytes(), type=_Keys)
    return S3Store(
        S3Config(
            bucket=address.bucket,
            endpoint=address.endpoint,
            region=address.region,
            access_key=keys.access_key,
            secret_key=keys.secret_key,
        )
    )
