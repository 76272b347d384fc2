"""Errors of the policy room: a checkpoint or a shape that cannot be served. All are terminal: a retry reads the same
bytes again."""

from __future__ import annotations


class PolicyError(Exception):
    """Base of every error of `odradek.actors.policy`."""


class UnsupportedModelError(PolicyError):
    """A shape or an arithmetic that this decoder does not compute; use another checkpoint."""


class CheckpointLoadError(PolicyError):
    """A checkpoint directory is incomplete, damaged or of another shape; the message names file and tensor."""
