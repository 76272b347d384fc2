"""What the notary and the audit commands need of a deployment: the vault, and the key where this host has it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.store import s3_config
from odradek.streams.audit.keys import load_key, load_or_make_key
from odradek.streams.audit.notary import Notary
from odradek.streams.audit.vault import Vault
from odradek.streams.log import EventLog


def vault_of(deployment: Deployment) -> Vault:
    """A client of the deployment's vault, not yet opened."""
    config = msgspec.structs.replace(s3_config(deployment), bucket=deployment.audit.bucket)
    return Vault(config, deployment.audit)


def notary_of(deployment: Deployment, event_log: EventLog) -> Notary:
    """The deployment's notary; makes this host's key if it has none."""
    key = load_or_make_key(Path(deployment.audit.key_file))
    return Notary(event_log, vault_of(deployment), key, deployment.audit)


def own_keys(deployment: Deployment) -> set[str]:
    """The public key of this host's notary, if there is one here."""
    path = Path(deployment.audit.key_file)
    return {load_key(path).public} if path.exists() else set()
