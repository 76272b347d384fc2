"""Fixtures for the whole tree: real services, started once a session on first use, and stopped however it ends."""

from hypothesis import settings

from odradek.infra.stack.testing import (
    kafka_bootstrap,
    ray_address,
    s3_access,
    s3_config,
    s3_endpoint,
    s3_prefix,
    stop_as_on_interrupt,
    topic_prefix,
)

__all__ = ["kafka_bootstrap", "ray_address", "s3_access", "s3_config", "s3_endpoint", "s3_prefix", "topic_prefix"]

stop_as_on_interrupt()
settings.register_profile("busy", deadline=None)  # how long an example takes is this machine's business
settings.load_profile("busy")
