"""The settings that every actor of one deployment shares, as plain frozen data that travels by pickle.

Filled by `odradek.infra` from the configuration tree; nothing here reads a file or the environment. Credentials of
the object store are not held: each process takes them from `s3_credentials_file`, so that no log of Ray's or of ours
can print them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from odradek.streams.audit.settings import AuditSettings
from odradek.streams.config import KafkaConfig, KeyStoreAddress
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.sessions import CondenseSettings


class ObjectStoreAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where objects lie. An empty endpoint means the provider's own."""

    endpoint: str
    bucket: str
    region: str = "us-east-1"
    credentials_file: str = ""
    """JSON with access_key and secret_key; empty leaves it to boto3's own chain."""


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """One deployment: addresses, names and sizes."""

    kafka: KafkaConfig
    store: ObjectStoreAddress
    keys: KeyStoreAddress = KeyStoreAddress()
    """Where subjects' keys lie; without a folder nobody's content is encrypted."""
    lane: LaneConfigured
    data_dir: str
    """Local scratch of the host's actors: sandbox state, image cache, logs. Nothing that matters lives only here."""
    policy: str = "demo"
    tokenizer_file: str
    tokenizer: str = ""
    """Digest of that file; sessions name it, so that a reader knows which tokenizer their tokens are of."""
    warm_start_dir: str
    """The policy directory: version 0, and the shape of every later one. On a cluster it lies on every host."""
    token_seconds: float = 0.0
    """What one sampled token may take of a model of this size on a busy host: what a request is given beside its
    timeout, so that a slow model is not taken for a dead engine."""
    max_context: int = 2**31 - 1
    """Tokens that one session can have, by the model's positions and the engine's memory. A task that asks for more
    gets this."""
    tenants: tuple[str, ...] = ()
    """Whose own open topics (`tasks.v1.TENANT`, `feedback.v1.TENANT`) are created and followed."""
    dead_letter_keys: str = "wait"
    """`streams.consumers.Later` of the group consumers: what happens to later records of a key with dead letters."""
    namespace: str = "odradek"
    incarnation: str = "0"
    keep_versions: int = 50
    """Newest weight versions that are kept; 0 keeps all."""
    keep_every: int = 50
    """Each version that this divides is kept too; 0 for none."""
    session_actors: int = 2
    inference_actors: int = 1
    reward_actors: int = 1
    max_sessions: int = 104
    """Sessions in flight at once. Too low leaves the engine's batch empty; too high makes rollouts stale."""
    max_commands: int = 4
    """Commands, and sandboxes being made, that run at once on a host. Too low leaves cores idle while commands wait
    for something; too high lets a hundred of them fight for the cores and the caches, and starves the engine."""
    condense: CondenseSettings | None = None
    """How sessions make room when their context fills; None ends them."""
    engine: dict[str, Any] = {}
    """`EngineSettings` as JSON values; empty takes its defaults."""
    sandboxes: dict[str, int] = {}
    """`NsConfig` of each host's driver; empty takes its defaults."""
    projections: bool = True
    """Whether a Faust worker keeps live tables."""
    audit: AuditSettings = AuditSettings(enabled=False)
    """The notary's."""
    otlp_endpoint: str = ""
    """Base address of an OTLP/HTTP collector; empty exports nothing."""
    metrics_port: int = 0
    """Loopback port of the metrics page; 0 takes a free one."""
    log_level: str = "INFO"


def actor_handle(name: str, namespace: str) -> Any:
    """The handle of a named actor; handles stay good over restarts of the actor.

    Raises ValueError if no actor has that name.
    """
    import ray  # here, so that commands which only read settings do without its start

    return ray.get_actor(name, namespace=namespace)
