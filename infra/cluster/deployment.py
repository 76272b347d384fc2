"""From the configuration and where services are, the one frozen record that every actor gets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from odradek.actors.policy.directory import TOKENIZER_FILE
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.infra.cluster.policy import MEBIBYTE, Sizes, engine_settings, policy_dir, sizes, tokenizer_digest
from odradek.infra.config.services import Endpoints, data_dir, key_store
from odradek.infra.config.tree import Config
from odradek.streams.audit.settings import AuditSettings
from odradek.streams.events.groups import LaneConfigured
from odradek.streams.events.sessions import CondenseSettings

NAMESPACE = "odradek"
"""Of a deployment's actors on Ray; with a prefix, that too."""
KEY_FILE = "audit/notary.key"
"""Where the notary's private key lies in the data folder, unless a setting names another place."""


def deployment_of(config: Config, endpoints: Endpoints) -> Deployment:
    """The same configuration on the same host gives the same record."""
    directory, policy_sizes = policy_dir(config), sizes(config)
    return Deployment(
        kafka=endpoints.kafka,
        tenants=config.kafka.tenant_names,
        dead_letter_keys=config.dlq.later,
        store=store_of(endpoints),
        lane=lane_of(config, policy_sizes),
        keys=key_store(config),
        data_dir=str(data_dir(config)),
        policy=config.lane.policy,
        tokenizer_file=str(directory / TOKENIZER_FILE),
        tokenizer=tokenizer_digest(config),
        warm_start_dir=str(directory),
        max_context=policy_sizes.context,
        token_seconds=policy_sizes.token_seconds,
        namespace=f"{NAMESPACE}-{config.kafka.prefix}" if config.kafka.prefix else NAMESPACE,
        incarnation=config.kafka.prefix or "default",
        keep_versions=config.trainer.keep_versions,
        keep_every=config.trainer.keep_every,
        session_actors=config.session.actors,
        inference_actors=config.inference.replicas,
        reward_actors=config.reward.actors,
        max_sessions=config.session.max_in_flight,
        max_commands=config.sandbox.max_commands or 2 * (os.cpu_count() or 1),
        condense=_condense(config),
        engine=engine_settings(config),
        sandboxes={
            "max_sandboxes": config.sandbox.max_live,
            "min_free_disk_bytes": config.sandbox.min_free_disk_mb * MEBIBYTE,
            "min_free_memory_bytes": config.sandbox.min_free_memory_mb * MEBIBYTE,
        },
        projections=config.projections.enabled,
        audit=audit_of(config),
        otlp_endpoint=config.telemetry.otlp_endpoint or "",
        metrics_port=config.telemetry.prometheus_port or 0,
        log_level=config.telemetry.log_level,
    )


def store_of(endpoints: Endpoints) -> ObjectStoreAddress:
    """Where objects lie."""
    return ObjectStoreAddress(
        endpoint=endpoints.s3_endpoint,
        bucket=endpoints.s3_bucket,
        region=endpoints.s3_region,
        credentials_file=endpoints.s3_credentials_file,
    )


def audit_of(config: Config) -> AuditSettings:
    """The notary's settings, with what follows from other sections."""
    section = config.audit
    return AuditSettings(
        enabled=section.enabled,
        name=section.name or config.kafka.prefix or "default",
        interval_records=section.interval_records,
        interval_s=section.interval_s,
        key_file=str(Path(section.key_file).expanduser() if section.key_file else data_dir(config) / KEY_FILE),
        bucket=section.bucket or f"{config.s3.bucket}-audit",
        lock_mode=section.lock_mode,
        lock_days=section.lock_days,
    )


def lane_of(config: Config, policy_sizes: Sizes) -> LaneConfigured:
    """What `lane.configured` will say."""
    lane = config.lane
    return LaneConfigured(
        lane=lane.name,
        policy=lane.policy,
        groups_per_batch=lane.groups_per_batch,
        attempts=lane.attempts,
        max_staleness=lane.max_staleness,
        advantage=lane.advantage,
        spread_component=lane.spread_component,
        token_budget=lane.token_budget,
        training=_training(config, policy_sizes),
    )


def _condense(config: Config) -> CondenseSettings | None:
    session = config.session
    return None if session.condense == "off" else CondenseSettings(source=session.condense, at=session.condense_at)


def _training(config: Config, policy_sizes: Sizes) -> dict[str, Any]:
    """`StepSettings` as JSON values."""
    trainer = config.trainer
    return {
        "minibatches": trainer.minibatches,
        "micro_tokens": policy_sizes.micro_tokens,
        "router_replay": trainer.router_replay,
        "objective": {
            "anchor": config.lane.anchor,
            "clip_low": trainer.clip_low,
            "surrogate": trainer.surrogate,
            "aggregation": trainer.aggregation,
            "clip_high": trainer.clip_high,
            "kl_coefficient": trainer.kl_coefficient,
        },
        "optimiser": {"learning_rate": trainer.learning_rate, "embedding_lr_scale": policy_sizes.embedding_lr_scale},
    }
