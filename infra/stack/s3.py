"""How this machine reaches an S3 store, whoever runs it: keys, client, and an honest check.

Keys print as dots, so that no log or error shows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from odradek.infra.errors import StackError, Unreachable

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client

REQUEST_ATTEMPTS = 4
"""Tries of one request by the client library, with its own backoff."""

READ_TIMEOUT_S = 60.0
"""Seconds without a byte after which a request is given up."""


class S3Keys(msgspec.Struct, frozen=True):
    """A key pair."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return "S3Keys(•••)"

    @classmethod
    def read(cls, path: Path) -> S3Keys:
        """The pair in a JSON file `{"access_key": …, "secret_key": …}`."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise StackError(f"s3: credentials file {path} can't be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise StackError(f"s3: credentials file {path} needs access_key and secret_key ({error})") from error


class S3Access(msgspec.Struct, frozen=True):
    """Everything a client needs. `endpoint` None: the provider's own; `keys` None: the usual AWS chain."""

    endpoint: str | None
    bucket: str
    region: str
    keys: S3Keys | None

    @property
    def where(self) -> str:
        """Endpoint and bucket, for messages."""
        return f"bucket {self.bucket} at {self.endpoint or 'the default S3 endpoint'}"


def s3_client(
    access: S3Access, connect_s: float = 5.0, read_s: float = READ_TIMEOUT_S, attempts: int = REQUEST_ATTEMPTS
) -> S3Client:
    """A boto3 client of one's own (clients are thread-safe, so one for each process is enough)."""
    import boto3
    from botocore.config import Config

    from odradek.streams import expect

    expect.install()
    session = boto3.session.Session()
    settings = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": attempts, "mode": "standard"},
        s3={"addressing_style": "path"},
    )
    return session.client(
        "s3",
        endpoint_url=access.endpoint,
        region_name=access.region,
        aws_access_key_id=access.keys.access_key if access.keys else None,
        aws_secret_access_key=access.keys.secret_key if access.keys else None,
        config=settings,
    )


def check_s3(access: S3Access, timeout_s: float, bucket_must_exist: bool = True, holds: str = "") -> None:
    """One signed request, one attempt. No answer is `Unreachable`; a refusal is a `StackError` that says which.
    `holds`: an object of the bucket to read, for a store whose front answers before its disks do."""
    from botocore.exceptions import BotoCoreError, ClientError

    client = s3_client(access, connect_s=timeout_s, read_s=timeout_s, attempts=1)
    try:
        if holds:
            client.get_object(Bucket=access.bucket, Key=holds)["Body"].read()
        elif bucket_must_exist:
            client.head_bucket(Bucket=access.bucket)
        else:
            client.list_buckets()
    except ClientError as error:
        code = _code(error)
        if holds and code == "NoSuchKey":
            return  # somebody removed it: no reason to refuse the store
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status >= 500:
            raise Unreachable(f"s3: {access.where} answers {status} ({code})") from error
        hint = {403: "check the credentials", 404: "create the bucket first"}.get(status, "check the settings [s3]")
        raise StackError(f"s3: {access.where} refused ({status} {code}): {hint}") from error
    except BotoCoreError as error:
        reason = type(error).__name__
        raise Unreachable(f"s3: {access.where} gave no answer within {timeout_s:g} s ({reason})") from error
    finally:
        client.close()


def ensure_bucket(access: S3Access, holds: str) -> None:
    """Create the bucket unless it is there, with one object that `check_s3` can read."""
    from botocore.exceptions import ClientError

    client = s3_client(access)
    try:
        try:
            client.create_bucket(Bucket=access.bucket)
        except ClientError as error:
            if _code(error) not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise
        client.put_object(Bucket=access.bucket, Key=holds, Body=b"ready")
    except ClientError as error:
        raise StackError(f"s3: can't create {access.where}: {_code(error)}") from error
    finally:
        client.close()


def _code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "?")
