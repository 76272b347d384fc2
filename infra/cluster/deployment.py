"""From the configuration and where services are, the one frozen record that every actor gets."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from odradek.actors.controller.core import RL_LANE
from odradek.actors.runtime.deployment import Deployment, ObjectStoreAddress
from odradek.infra.config.services import Endpoints, data_dir, key_store
from odradek.infra.config.tree import Config
from odradek.streams.events.groups import LaneConfigured

MEBIBYTE = 1024 * 1024
ASSETS = Path(__file__).resolve().parents[1] / "demo" / "warmstart" / "assets"
"""The shipped tokenizer and warm start."""


def deployment_of(config: Config, endpoints: Endpoints) -> Deployment:
    """The same configuration on the same host gives the same record."""
    return Deployment(
        kafka=endpoints.kafka,
        store=ObjectStoreAddress(
            endpoint=endpoints.s3_endpoint,
            bucket=endpoints.s3_bucket,
            region=endpoints.s3_region,
            credentials_file=endpoints.s3_credentials_file,
        ),
        lane=lane_of(config),
        keys=key_store(config),
        data_dir=str(data_dir(config)),
        policy=config.lane.policy,
        tokenizer_file=str(ASSETS / "tokenizer.json"),
        warm_start_dir=str(ASSETS),
        namespace=f"odradek-{config.kafka.prefix}" if config.kafka.prefix else "odradek",
        incarnation=config.kafka.prefix or "default",
        session_actors=config.session.actors,
        inference_actors=config.inference.replicas,
        reward_actors=config.reward.actors,
        max_sessions=config.session.max_in_flight,
        max_commands=config.sandbox.max_commands or 2 * (os.cpu_count() or 1),
        engine={"max_running": config.inference.max_running, "kv_on_reload": config.inference.kv_on_reload},
        sandboxes={
            "max_sandboxes": config.sandbox.max_live,
            "min_free_disk_bytes": config.sandbox.min_free_disk_mb * MEBIBYTE,
            "min_free_memory_bytes": config.sandbox.min_free_memory_mb * MEBIBYTE,
        },
        projections=config.projections.enabled,
        otlp_endpoint=config.telemetry.otlp_endpoint or "",
        metrics_port=config.telemetry.prometheus_port or 0,
        log_level=config.telemetry.log_level,
    )


def lane_of(config: Config) -> LaneConfigured:
    """What `lane.configured` will say."""
    lane = config.lane
    return LaneConfigured(
        lane=RL_LANE,
        policy=lane.policy,
        groups_per_batch=lane.groups_per_batch,
        attempts=lane.attempts,
        max_staleness=lane.max_staleness,
        advantage=lane.advantage,
        spread_component=lane.spread_component,
        token_budget=lane.token_budget,
        training=_training(config),
    )


def _training(config: Config) -> dict[str, Any]:
    """`StepSettings` as JSON values; the embedding's scale belongs to how the shipped policy was initialised."""
    trainer = config.trainer
    hidden = 128
    return {
        "minibatches": trainer.minibatches,
        "micro_tokens": trainer.micro_tokens,
        "objective": {
            "anchor": config.lane.anchor,
            "clip_low": trainer.clip_low,
            "clip_high": trainer.clip_high,
            "kl_coefficient": trainer.kl_coefficient,
        },
        "optimiser": {"learning_rate": trainer.learning_rate, "embedding_lr_scale": math.sqrt(hidden) / 2},
    }
