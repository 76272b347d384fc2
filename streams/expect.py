"""Mends one defect of botocore for every client of this process: a put whose `100 Continue` is cut off never ended.

botocore 1.44 looks for the end of an interim answer line by line and takes the end of the connection for one more line:
the thread spins for ever, on a whole core, and none of its time-outs applies. With `install` that connection counts as
broken, which botocore retries. Idempotent; called where clients are made.
"""

from __future__ import annotations

from typing import BinaryIO

from botocore.awsrequest import AWSConnection


def install() -> None:
    """From now on, for clients made before as well."""
    AWSConnection._consume_headers = _consume_headers  # type: ignore[attr-defined]


def _consume_headers(_self: object, answer: BinaryIO) -> None:
    """RFC 9110 15.2: an interim answer ends with an empty line."""
    for line in iter(answer.readline, b"\r\n"):
        if not line:
            raise ConnectionResetError("the connection ended within a 100 Continue")
