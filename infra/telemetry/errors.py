"""Errors of telemetry. All of them are infra's."""

from __future__ import annotations

from odradek.infra.errors import StackError


class MetricsPortTaken(StackError):
    """The configured port of the metrics page is not free."""
