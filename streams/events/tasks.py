"""tasks.v1 and feedback.v1: what any client may publish. These two also arrive as plain JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from odradek.streams.events.meta import BlobRef


class Budget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one attempt may use. Exhausting any of them ends the attempt, which is then graded as it stands."""

    max_turns: int = 6
    max_turn_tokens: int = 160
    max_context_tokens: int = 576
    wall_seconds: float = 300.0
    tool_seconds: float = 10.0


class HiddenCase(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the function under test and the value a right answer returns.

    JSON values only; compared by type and value.
    """

    id: str
    args: list[Any]
    want: Any


class HiddenTests(msgspec.Struct, frozen=True, kw_only=True):
    """Tests the agent never sees. They enter neither its image nor its workspace."""

    module: str
    function: str
    cases: list[HiddenCase]
    fail_to_pass: list[str]
    pass_to_pass: list[str] = []


class HiddenScript(msgspec.Struct, frozen=True, kw_only=True):
    """A Harbor-style verifier: files placed beside the workspace after the agent is gone, and the command that grades.

    The command writes a number to ``/logs/verifier/reward.txt`` (or ``reward.json``, an object of numbers); its exit
    code alone never passes.
    """

    files: dict[str, bytes]
    """By path under ``/tests``. Bytes are base64 in JSON."""
    command: str = '"$(command -v bash || command -v sh)" /tests/test.sh'
    """Without bash in the image the script runs under sh."""
    timeout_seconds: float = 120.0


class TaskPublished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="task.published.v1"):
    """A request for rollouts. The same idempotency key (or, without one, the same task id) twice is one task."""

    task_id: str
    instruction: str
    files: dict[str, str] = {}
    """The workspace at the start: relative path to text. Larger or binary trees come as `files_ref`."""
    files_ref: BlobRef | None = None
    """A tar of the starting workspace in the object store, at `blobs/shared/SHA256`: plain files and folders. It is put
    before the event, and checked against its digest by whoever makes the workspace. Instead of `files`."""
    tests: HiddenTests | None = None
    """Cases for one function; compared by a parent process that alone knows what is wanted."""
    script: HiddenScript | None = None
    """A verifier of the task's own, where `tests` does not fit. Exactly one of the two grades a task."""
    image: str = "demo"
    """Name or digest of a built sandbox image."""
    setup: list[str] = []
    """Commands run once in the fresh workspace, before the agent; part of the recorded start."""
    purpose: Literal["rl", "eval"] = "rl"
    attempts: int = 8
    priority: int = 0
    """Higher is admitted earlier among waiting tasks of the same purpose."""
    deadline_seconds: float = 900.0
    """From admission; members not finished by then are left out when the group is sealed."""
    policy: str = "demo"
    policy_version: int | None = None
    """Sample wholly under this version; None means the current one, following reloads."""
    temperature: float = 1.0
    """Of evaluations only (0 is greedy): RL samples the policy's own distribution."""
    idempotency_key: str = ""
    budget: Budget = Budget()
    labels: dict[str, str] = {}


class TaskCancelled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="task.cancelled.v1"):
    """The tasks of this id that were published before (by the same kind of client: in the same partition) end."""

    task_id: str
    reason: str = ""


class FeedbackGiven(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="feedback.given.v1"):
    """A person's answer to what a production session did."""

    session_id: str
    verdict: Literal["accepted", "rejected", "reverted", "followed_up"]
    comment: str = ""


TaskEvent = TaskPublished | TaskCancelled
FeedbackEvent = FeedbackGiven
