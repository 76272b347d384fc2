"""Fixtures for the whole tree: real services, started once a session on first use."""

from odradek.infra.stack.testing import kafka_bootstrap, topic_prefix

__all__ = ["kafka_bootstrap", "topic_prefix"]
