"""subjects.v1: consent and erasure, by subject. Without a standing grant nothing of a subject is trained on."""

from __future__ import annotations

import msgspec


class ConsentGranted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="consent.granted.v1"):
    subject: str
    scope: str = "train"


class ConsentWithdrawn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="consent.withdrawn.v1"):
    subject: str
    scope: str = "train"
    reason: str = ""


class ErasureRequested(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="erasure.requested.v1"):
    subject: str
    request_id: str


class ErasureDone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="erasure.done.v1"):
    subject: str
    request_id: str
    stores: dict[str, str] = {}
    """By store what became of the subject's content there."""
    batches: list[str] = []
    """Ids of the batches that hold sessions of theirs."""
    versions: dict[str, list[int]] = {}
    """By policy the weight versions whose step trained on them; later versions descend from these. Nothing unlearns."""


SubjectEvent = ConsentGranted | ConsentWithdrawn | ErasureRequested | ErasureDone
