"""Errors of telemetry. All of them are infra's."""

from __future__ import annotations

from odradek.infra.errors import UsageError


class MetricsPortTaken(UsageError):
    """The configured port of the metrics page is not free."""
