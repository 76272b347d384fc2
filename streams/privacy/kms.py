"""Subject keys wrapped by a key of a KMS (AWS's, through boto3): the folder holds only what the KMS can open.

Each subject's key is a data key of `GenerateDataKey`; its encrypted form is what `KeyFiles` stores, bound to the
subject by the encryption context. Erasing removes that form, and with it the only way to the key: the KMS never stored
it. Whoever copies the folder also needs `kms:Decrypt` on the wrapping key.
"""

from __future__ import annotations

from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from odradek.streams.errors import KeyUnavailable, StoreUnreachable, StreamError

CONNECT_S = 5.0
"""Seconds to connect to the KMS. Too low: a busy one looks dead. Too high: a wrong address hangs."""
READ_S = 10.0
"""Seconds for an answer; a key is asked for once a process and subject."""
ATTEMPTS = 3


def kms_client(region: str, endpoint: str = "") -> Any:
    """A client with our time-outs; credentials come from boto3's own chain."""
    return boto3.client(
        "kms",
        region_name=region,
        endpoint_url=endpoint or None,
        config=Config(
            connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"max_attempts": ATTEMPTS, "mode": "standard"}
        ),
    )


class KmsWrapping:
    """A `Wrapping` by one KMS key."""

    def __init__(self, client: Any, key_id: str) -> None:
        self._client = client
        self._key_id = key_id

    def fresh(self, subject: str) -> tuple[bytes, bytes]:
        """See `Wrapping`."""
        try:
            made = self._client.generate_data_key(
                KeyId=self._key_id, KeySpec="AES_256", EncryptionContext=_context(subject)
            )
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._failed("made no key for", subject, error) from error
        return made["Plaintext"], made["CiphertextBlob"]

    def unwrap(self, subject: str, stored: bytes) -> bytes:
        """See `Wrapping`."""
        try:
            found = self._client.decrypt(KeyId=self._key_id, CiphertextBlob=stored, EncryptionContext=_context(subject))
        except (botocore.exceptions.ClientError, botocore.exceptions.BotoCoreError) as error:
            raise self._failed("did not open the key of", subject, error) from error
        key: bytes = found["Plaintext"]
        return key

    def _failed(self, what: str, subject: str, error: Exception) -> StreamError:
        if not isinstance(error, botocore.exceptions.ClientError):
            return StoreUnreachable(f"the KMS {what} subject {subject!r}: no answer ({type(error).__name__})")
        code = str(error.response.get("Error", {}).get("Code", "?"))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        said = f"KMS key {self._key_id} {what} subject {subject!r}: {status} {code}"
        if status >= 500 or status == 429 or code == "ThrottlingException":
            return StoreUnreachable(said)
        return KeyUnavailable(f"{said}; check privacy.kms_key, its policy and region", subject=subject)


def _context(subject: str) -> dict[str, str]:
    """What the KMS binds the key to, and writes into its own audit trail."""
    return {"odradek:subject": subject}
