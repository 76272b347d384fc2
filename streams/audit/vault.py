"""Where rounds are kept out of the log's reach: a bucket of their own, each object written once under object lock.

An object here is what its key first held. In a bucket with object lock every overwrite is a newer version and every
deletion a marker in front of the old one, and the old one stays for its retention; so reading takes the oldest version,
whatever was done to the key since. A bucket without object lock is used as it is: then the anchors say `locked: false`,
and whoever may write to log and bucket alike can take both back to an earlier state unseen.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import botocore.exceptions

from odradek.streams.audit.settings import AuditSettings
from odradek.streams.blobs import S3Config, S3Store
from odradek.streams.errors import BlobMissing, Terminal

log = logging.getLogger(__name__)

NO_LOCK = frozenset({"ObjectLockConfigurationNotFoundError", "NotImplemented", "MethodNotAllowed", "InvalidRequest"})
"""How stores say that a bucket has no object lock, or that they know none."""


class Vault(S3Store):
    """The rounds and public keys of one deployment's notary."""

    def __init__(self, config: S3Config, settings: AuditSettings) -> None:
        super().__init__(config)
        self._whole = f"audit/{settings.name}/"
        self._settings = settings
        self.chain = settings.name
        """Whose rounds are read and written: the deployment's own chain, or one that a restore began (`chains`)."""
        self.locked = False
        """Whether the bucket puts objects under lock; known after `open`."""
        self._versions: dict[str, str] | None = None

    @property
    def _stem(self) -> str:
        return f"audit/{self.chain}/"

    async def open(self, *, create: bool = False) -> bool:
        """Looks at the bucket, and makes it (with object lock where the store knows that) if it is to. False: there is
        no bucket."""
        found = await self._run(self._stem, lambda: self._open(create))
        if found and not self.locked:
            log.warning("bucket %s has no object lock: anchors say locked: false", self.config.bucket)
        return found

    def _open(self, create: bool) -> bool:
        bucket = self.config.bucket
        try:
            self._client.head_bucket(Bucket=bucket)
        except botocore.exceptions.ClientError as error:
            if _code(error) not in ("404", "NoSuchBucket"):
                raise
            if not create:
                return False
            self._create()
        try:
            answer = self._client.get_object_lock_configuration(Bucket=bucket)
            self.locked = answer["ObjectLockConfiguration"].get("ObjectLockEnabled") == "Enabled"
        except botocore.exceptions.ClientError as error:
            if _code(error) not in NO_LOCK:
                raise
        return True

    def _create(self) -> None:
        bucket, region = self.config.bucket, self.config.region
        where: dict[str, Any] = {}
        if not self.config.endpoint and region != "us-east-1":
            where["CreateBucketConfiguration"] = {"LocationConstraint": region}
        try:
            self._client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True, **where)
        except botocore.exceptions.ClientError as error:
            if _code(error) in ("AccessDenied", "403"):
                raise Terminal(
                    f"there is no bucket {bucket} for the notary's rounds, and these credentials can't create it: "
                    f"create it with object lock, name another one in audit.bucket, or set audit.enabled=false"
                ) from error
            if _code(error) not in NO_LOCK:
                raise
            self._client.create_bucket(Bucket=bucket, **where)

    # -- write -------------------------------------------------------------------------------------------------

    async def keep_round(self, number: int, data: bytes) -> None:
        """Writes a round once. Raises Terminal if another round of this number is there already."""
        await self._keep(self._round_key(number), data)

    async def keep_key(self, public: str) -> None:
        """Writes the public key once."""
        await self._keep(f"{self._stem}keys/{public}", public.encode())

    async def _keep(self, key: str, data: bytes) -> None:
        options: dict[str, Any] = {}
        if self.locked:
            options = {
                "ObjectLockMode": self._settings.lock_mode.upper(),
                "ObjectLockRetainUntilDate": datetime.now(UTC) + timedelta(days=self._settings.lock_days),
                "ChecksumAlgorithm": "SHA256",  # S3 refuses a retention without a checksum
            }
        if await self._run(key, lambda: self._put_if_absent(key, data, **options)):
            return
        self._versions = None
        if await self.first(key) != data:
            raise Terminal(
                f"s3://{self.config.bucket}/{key} holds another history than {key.rsplit('/', 1)[1]} of this log: has "
                f"the log been replaced or rolled back? `odradek audit verify` tells; `odradek restore` begins a new "
                f"chain where you know of that"
            )

    # -- read --------------------------------------------------------------------------------------------------

    async def rounds(self) -> list[int]:
        """Numbers of the rounds that are here, ascending."""
        stem = f"{self._stem}rounds/"
        tails = [key.removeprefix(stem) for key in await self._listed() if key.startswith(stem)]
        return sorted(int(tail) for tail in tails if tail.isdecimal())

    async def round(self, number: int) -> bytes:
        """The object of a round as it was first written."""
        return await self.first(self._round_key(number))

    async def keys(self) -> list[str]:
        """The public keys that this deployment's notaries had, under whichever chain."""
        return sorted({key.rpartition("/")[2] for key in await self._listed() if "/keys/" in key})

    async def chain_numbers(self) -> list[int]:
        """Numbers of the chains that restores began and that wrote anything."""
        tails = {key.removeprefix(self._whole).partition("/")[0] for key in await self._listed()}
        return sorted(int(tail[1:]) for tail in tails if tail[:1] == "r" and tail[1:].isdecimal())

    async def first(self, key: str) -> bytes:
        """The oldest version of an object. Raises BlobMissing."""
        version = (await self._listed()).get(key)
        if version is None:
            raise BlobMissing(f"no object s3://{self.config.bucket}/{key}", key=key)
        option = {"VersionId": version} if version else {}

        def fetch() -> bytes:
            body: bytes = self._client.get_object(Bucket=self.config.bucket, Key=key, **option)["Body"].read()
            return body

        return await self._run(key, fetch)

    async def _listed(self) -> dict[str, str]:
        """By key the id of its oldest version (empty in a bucket without versions), deleted ones included."""
        if self._versions is None:
            self._versions = await self._run(self._whole, self._list_versions)
            self._versions |= dict.fromkeys(set(await self.list(self._whole)) - set(self._versions), "")
        return self._versions

    def _list_versions(self) -> dict[str, str]:
        found: dict[str, str] = {}
        if self.locked:
            pages = self._client.get_paginator("list_object_versions")
            for page in pages.paginate(Bucket=self.config.bucket, Prefix=self._whole):
                for item in page.get("Versions", ()):  # newest first within a key
                    found[item["Key"]] = item["VersionId"]
        return found

    def _round_key(self, number: int) -> str:
        return f"{self._stem}rounds/{number:012d}"


def _code(error: botocore.exceptions.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", "?"))
