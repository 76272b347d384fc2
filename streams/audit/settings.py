"""How the notary works: plain frozen settings that the caller fills."""

from __future__ import annotations

from typing import Literal

import msgspec

INTERVAL_RECORDS = 1000
"""Records of a partition that make an anchor due. Too low: a signature and a transaction for little. Too high: a proof
needs more siblings, and more records wait unanchored; an anchor grows by 12 bytes a record."""

INTERVAL_S = 60.0
"""Seconds after which a record is anchored however little there is. Too low: a round with its object on S3 for each
few records. Too high: what is younger than this can still be changed unseen."""

LOCK_DAYS = 365
"""Days that a round can't be deleted. After that only the bucket's permissions protect it."""


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The notary's settings."""

    enabled: bool = True
    """Whether a deployment runs a notary."""
    name: str = "default"
    """What anchors and the vault call the deployment. Another name is another chain, from the log's first record on."""
    interval_records: int = INTERVAL_RECORDS
    interval_s: float = INTERVAL_S
    key_file: str = ""
    """PEM file of the private key; made there at the first start if it does not exist."""
    bucket: str = ""
    """Where rounds are kept."""
    lock_mode: Literal["governance", "compliance"] = "governance"
    """governance: who has the permission to bypass it may delete; compliance: nobody, not the account's owner."""
    lock_days: int = LOCK_DAYS
