"""Errors of the controller room."""

from __future__ import annotations


class ControllerError(Exception):
    """Base of the room's errors."""


class TaskRefused(ControllerError):
    """Terminal for the task: it can't be rolled out. The message says what to change."""
