"""What the notary and the audit commands need of a deployment: the vault, and the key where this host has it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.actors.runtime.store import s3_config
from odradek.streams.audit.keys import SigningKey, load_key, load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.audit.vault import Vault
from odradek.streams.log import EventLog


def vault_of(address: ObjectStoreAddress, settings: AuditSettings) -> Vault:
    """A client of the vault, not yet opened: in the same store as everything else, in a bucket of its own."""
    return Vault(msgspec.structs.replace(s3_config(address), bucket=settings.bucket), settings)


def notary_of(deployment: Deployment, event_log: EventLog) -> Notary:
    """The deployment's notary; makes this host's key if it has none."""
    key = load_or_make_key(Path(deployment.audit.key_file))
    return Notary(event_log, vault_of(deployment.store, deployment.audit), key, deployment.audit)


def own_key(settings: AuditSettings) -> SigningKey | None:
    """The key of this host's notary, if there is one here."""
    path = Path(settings.key_file)
    return load_key(path) if path.exists() else None


def own_keys(settings: AuditSettings) -> set[str]:
    """Its public half."""
    key = own_key(settings)
    return {key.public} if key is not None else set()
