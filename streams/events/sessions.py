"""sessions.v1: the whole life of a session, in order. A session's state, workspace included, is a fold of these.

Owner events (written by the session's actor) carry `Meta.epoch` and `Meta.seq`; inputs (`MessageReceived`,
`CancelRequested`) carry neither, only an idempotency key. `SessionOpened` and `SessionResumed` start an epoch: their
own offset is its number.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from odradek.streams.events.meta import BlobRef, RecordRef
from odradek.streams.events.tasks import Budget

FinishReason = Literal["stop", "length", "cancelled"]
EndReason = Literal["done", "no_call", "turns", "context", "turn_length", "wall_clock", "cancelled"]
Effect = Literal["pure", "workspace", "external"]
TurnPurpose = Literal["act", "summary"]
SummarySource = Literal["model", "digest"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RL samples the model's own distribution: temperature 1, no top-p, no top-k. Temperature 0 is greedy."""

    temperature: float = 1.0
    seed: int = 0
    """Of the session; the token at absolute position p is drawn from the counter (seed, p)."""


class WeightSpan(msgspec.Struct, frozen=True, array_like=True):
    """From `start` (index into the turn's completion tokens) on, tokens were sampled under `version`."""

    start: int
    version: int


class CondenseSettings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a session makes room when its context fills. On the log, so that every owner of it does the same."""

    source: SummarySource = "model"
    """Who writes the summary: the model in a turn of its own (a digest where that gives none), or the harness alone."""
    at: float = 0.8
    """Share of `Budget.max_context_tokens` above which the next prompt is not sent. The rest is the summary's room."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="session.opened.v1"):
    session_id: str
    policy: str
    group_id: str = ""
    lane: str = ""
    task: RecordRef | None = None
    attempt: int = 0
    image: str = "demo"
    files: dict[str, bytes] = {}
    """Starting workspace of a session without a task (production): relative path to bytes."""
    files_ref: BlobRef | None = None
    setup: list[str] = []
    template: str = "xml.v1"
    tokenizer: str = ""
    """sha256 of the tokenizer file: which text the token ids stand for."""
    sampling: SamplingParams = SamplingParams()
    pinned_version: int | None = None
    budget: Budget = Budget()
    condense: CondenseSettings | None = None
    """None: a full context ends the session."""
    forked_from: RecordRef | None = None
    """The opening of the session that this one branches off from; its history up to `forked_at` is repeated here."""
    forked_at: int = -1
    """The parent's turn in whose place this session samples its first one; -1 where it is no fork."""


class SessionResumed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="session.resumed.v1"):
    """A new owner took over. Its epoch is this record's offset."""

    session_id: str
    reason: str = ""


class EnvironmentOpened(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="environment.opened.v1"):
    sandbox_id: str
    driver: str
    image_digest: str
    rebuilt: bool = False
    """True when the workspace was rebuilt from the log; background processes did not survive that."""


class EnvironmentClosed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="environment.closed.v1"):
    sandbox_id: str


class MessageReceived(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="message.received.v1"):
    """Input: what the user (or the task) asks."""

    message_id: str
    text: str
    role: Literal["user", "system"] = "user"


class CancelRequested(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel.requested.v1"):
    request_id: str
    reason: str = ""


class TurnSampled(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="turn.sampled.v1"):
    """Token in, token out: the context of this turn is all earlier prompt and completion tokens plus `prompt`."""

    turn: int
    segment: int = 0
    position: int
    """Absolute position (in this segment) of the first token of `prompt`. Random numbers are counted over all
    segments: the lengths of the earlier ones are added to it."""
    prompt: bytes
    """int32 ids that are new in the context since the last turn (results, messages, generation marker)."""
    completion: bytes
    """int32 ids the model sampled, its stop token included."""
    logprobs: bytes
    """float32, one for each completion token, under the version that sampled it."""
    spans: list[WeightSpan]
    numerics_id: str
    finish_reason: FinishReason
    messages: list[str] = []
    """Ids of the received messages that `prompt` contains; a message that came later waits for the next turn."""
    purpose: TurnPurpose = "act"
    """`summary`: the model was asked to condense its context. Its tokens are trained like any; calls in it are none."""
    copied_from: RecordRef | None = None
    """Of a fork: the parent's record of this turn. Its tokens are context here; only the parent may train them."""
    experts: bytes = b""
    """Routed experts as int16 [tokens, layers, top_k], empty for a dense model. A segment's first turn has those of its
    first token on, a later turn those of the last token before its prompt on; each ends before its own last token,
    which was sampled and not computed yet. So the turns of a segment put together name the experts of all but its last
    token. After a reload within a turn: of the last computation."""
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class ToolRequested(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tool.requested.v1"):
    """Intent, logged before acting."""

    call_id: str
    turn: int
    index: int
    name: str
    arguments: dict[str, str]
    effect: Effect


class FileChange(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    path: str
    kind: Literal["file", "symlink", "dir", "delete"]
    mode: int = 0o644
    content: bytes = b""
    """File content or link target, when small."""
    ref: BlobRef | None = None
    """Claim check of a large file's content."""


class WorkspaceDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one call changed. workspace = image + start files + deltas in order."""

    changes: list[FileChange] = []
    skipped: list[str] = []
    """What could not be carried (sockets, FIFOs, names that are not UTF-8), with the reason; a rebuilt workspace lacks
    it. Each is named once, by the call after which it was there."""


class ToolCompleted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tool.completed.v1"):
    """Result, logged after acting and in call order. A call with a logged result is never run again."""

    call_id: str
    turn: int
    index: int
    text: str
    """Exactly what the model is shown."""
    is_error: bool = False
    delta: WorkspaceDelta | None = None
    duration_ms: float = 0.0
    redactions: int = 0
    uncertain: bool = False
    """A call with an external effect was interrupted: nobody knows whether it took place, so it was not made again."""


class ContextSummarized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="context.summarized.v1"):
    """The context was condensed; a new segment starts with `prompt`, which nothing in it trains."""

    segment: int
    prompt: bytes
    """int32 ids: what was asked, the summary, and the calls and results of the turns after the cut, as they stood."""
    cut_after_turn: int
    """The last turn that the summary stands for. A turn is cut off or kept together with the results of its calls."""
    source: SummarySource = "model"
    """`model`: the ids that the turn before sampled. `digest`: the harness's extract of calls and results."""
    reason: str = ""
    """Why it is a digest: setting, no_room, empty or too_long."""


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    turns: int = 0
    calls: int = 0
    failed_calls: int = 0
    parallel_turns: int = 0
    """Turns that asked for more than one call."""
    sampled_tokens: int = 0
    context_tokens: int = 0
    segments: int = 1
    """Contexts it had: 1 more than it was condensed."""


class SessionCompleted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="session.completed.v1"):
    reason: EndReason
    first_offset: int
    """Offset of session.opened, in this record's partition: where a reader starts."""
    usage: Usage
    group_id: str = ""


class SessionFailed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="session.failed.v1"):
    """An infrastructure fault of ours ended the session. Never scored."""

    cause: str
    first_offset: int
    group_id: str = ""


SessionEvent = (
    SessionOpened
    | SessionResumed
    | EnvironmentOpened
    | EnvironmentClosed
    | MessageReceived
    | CancelRequested
    | TurnSampled
    | ToolRequested
    | ToolCompleted
    | ContextSummarized
    | SessionCompleted
    | SessionFailed
)
