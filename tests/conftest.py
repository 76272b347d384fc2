"""Fixtures for the whole tree: real services, started once a session on first use."""

import signal

from odradek.infra.stack.testing import (
    kafka_bootstrap,
    ray_address,
    s3_access,
    s3_config,
    s3_endpoint,
    s3_prefix,
    topic_prefix,
)

__all__ = ["kafka_bootstrap", "ray_address", "s3_access", "s3_config", "s3_endpoint", "s3_prefix", "topic_prefix"]

# A shell that runs tests in the background ignores SIGINT for them, and every command they start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
