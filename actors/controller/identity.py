"""Deterministic ids: the same task record gives the same group and the same members, whoever computes them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable

import msgspec

from odradek.streams.events.meta import RecordRef
from odradek.streams.events.tasks import TaskPublished

GROUP_NAMESPACE = uuid.UUID("c7f8d7b4-6f0e-5d0c-8f53-1d0c4a1f9f02")
"""Namespace of group ids (RFC 9562, version 5)."""


def group_id(task: RecordRef) -> str:
    return str(uuid.uuid5(GROUP_NAMESPACE, str(task)))


def session_id(group: str, attempt: int, replacement: int = 0) -> str:
    """Member `attempt` of a group; `replacement` counts the fresh attempts after faults of ours."""
    return str(uuid.uuid5(uuid.UUID(group), f"{attempt}.{replacement}"))


def sampling_seed(session: str) -> int:
    """63-bit seed of a session's sampler, a function of its id alone."""
    return int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "little") >> 1


def task_digest(task: TaskPublished) -> str:
    """sha256 over what the agent is given and how it is judged; names, priorities and budgets don't count.

    Fields are length-prefixed, so that no two different tasks share the hashed bytes.
    """
    sha = hashlib.sha256()
    for part in _parts(task):
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()


def _parts(task: TaskPublished) -> Iterable[bytes]:
    yield task.instruction.encode()
    yield task.image.encode()
    for command in task.setup:
        yield command.encode()
    for path in sorted(task.files):
        yield path.encode()
        yield task.files[path].encode()
    yield task.files_ref.sha256.encode() if task.files_ref is not None else b""
    yield msgspec.json.encode(task.tests, order="deterministic") if task.tests is not None else b""
    yield msgspec.json.encode(task.script, order="deterministic") if task.script is not None else b""
