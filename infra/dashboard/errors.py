"""Errors of the dashboard. All of them are infra's."""

from __future__ import annotations

from odradek.infra.errors import StackError


class DashboardError(StackError):
    """The dashboard's own environment or server can't be used; the message says what to do."""
