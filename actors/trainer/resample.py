"""`odradek audit resample`: whether the weights that a session names gave what it logged, from log and checkpoints.

Each sampled token is computed again under the version that it names: its log-prob by the forward that trains, and the
token itself by the sampler (a function of weights, context, seed and position). Equality is claimed only where the
turn's `numerics_id` is this process's: then every bit must be the same, or the session was not sampled by what it
names. Otherwise the gap is measured and nothing is claimed; the same for `mixed` turns (DESIGN §7).
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec
import numpy as np
import torch

from odradek.actors.inference.sampler import sample
from odradek.actors.inference.types import MIXED_NUMERICS
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.hf import load_hf_state
from odradek.actors.policy.model import Policy
from odradek.actors.trainer.checkpoint import fetch_weights
from odradek.actors.trainer.errors import CheckpointError
from odradek.kernels.logprob.api import row_logits, token_logprobs
from odradek.kernels.numerics import numerics_id
from odradek.streams import topics
from odradek.streams.blobs import ObjectStore
from odradek.streams.codec import read_f32, read_i32
from odradek.streams.errors import Terminal
from odradek.streams.events.sessions import ContextSummarized, SamplingParams, SessionOpened, TurnSampled
from odradek.streams.events.weights import VersionPublished
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord, accepted
from odradek.streams.replay.lineage import eras

ROWS: Final = 64
"""Rows of logits held at one time while tokens are drawn again. More takes memory; the bits do not depend on it."""

Verdict = Literal["equal", "different", "other numerics", "mixed"]


@dataclass(frozen=True, slots=True)
class LoggedTurn:
    """One turn as it was logged."""

    event: TurnSampled
    segment: Segment
    start: int
    end: int
    """Its sampled tokens in the segment's context."""

    def versions(self) -> list[int]:
        """Of each sampled token, the version that it names."""
        ends = [*(span.start for span in self.event.spans[1:]), self.end - self.start]
        spans = zip(self.event.spans, ends, strict=True) if self.event.spans else ()
        return [span.version for span, end in spans for _ in range(end - span.start)]


@dataclass(slots=True)
class Segment:
    """One context, from its first token to its last."""

    base: int
    """Tokens of earlier segments: the session position of the first one."""
    context: list[int] = field(default_factory=list)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing that does not come out as logged."""

    turn: int
    index: int
    """Of the token within the turn's completion."""
    version: int
    what: Literal["logprob", "token"]
    logged: float
    recomputed: float
    logged_bits: str
    recomputed_bits: str


class TurnVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """One turn."""

    turn: int
    tokens: int
    versions: list[int]
    numerics_id: str
    verdict: Verdict
    largest_gap: float
    """Largest |logged - recomputed| of its log-probs."""


class Resampled(msgspec.Struct, frozen=True, kw_only=True):
    """One session."""

    session_id: str
    policy: str
    numerics_id: str
    """This process's."""
    turns: list[TurnVerdict]
    first: Difference | None

    @property
    def compared(self) -> int:
        """Tokens for which equality was claimed and checked."""
        return sum(turn.tokens for turn in self.turns if turn.verdict in ("equal", "different"))


def logged_turns(records: Iterable[SessionRecord]) -> tuple[SessionOpened, list[LoggedTurn]]:
    """The session's opening and its turns. Raises Terminal if its records do not make a session."""
    opened: SessionOpened | None = None
    turns: list[LoggedTurn] = []
    segment = Segment(0)
    for offset, _, _, body in accepted(records):
        match body:
            case SessionOpened() if opened is None:
                opened = body
            case ContextSummarized():
                segment = Segment(segment.base + len(segment.context), read_i32(body.prompt))
            case TurnSampled():
                segment.context += read_i32(body.prompt)
                start = len(segment.context)
                segment.context += read_i32(body.completion)
                if body.copied_from is not None:
                    continue  # of a fork: sampled in its parent, under the parent's seed
                turns.append(LoggedTurn(body, segment, start, len(segment.context)))
                if not start or len(turns[-1].versions()) != len(read_f32(body.logprobs)):
                    raise Terminal(f"turn {body.turn} at offset {offset} names no version or context for its tokens")
            case _:
                pass
    if opened is None:
        raise Terminal("the session's opening is not on the log: nothing says under which policy it was sampled")
    return opened, turns


def again(policy: Policy, segment: Segment, sampling: SamplingParams) -> tuple[list[float], list[int]]:
    """Log-prob of every token of a segment under `policy`, and the token that is drawn in its place; the first token,
    which nothing predicts, has neither."""
    tokens = torch.tensor(segment.context)
    count = len(tokens)
    with torch.inference_mode():
        starts = torch.tensor([0, count], dtype=torch.int32)
        rows_N_H = policy.forward_packed(tokens, torch.arange(count), starts)[:-1]
        logprob_N, _ = token_logprobs(rows_N_H, policy.head_weight, tokens[1:])
        drawn: list[int] = []
        for first in range(0, count - 1, ROWS):
            logits_R_V = row_logits(rows_N_H[first : first + ROWS], policy.head_weight)
            position_R = np.arange(len(logits_R_V), dtype=np.uint64) + np.uint64(segment.base + first + 1)
            temperature_R = np.full(len(logits_R_V), sampling.temperature)
            seed_R = np.full(len(logits_R_V), sampling.seed, np.uint64)
            drawn += sample(logits_R_V.numpy(), temperature_R, seed_R, position_R)[0].tolist()
    return [0.0, *logprob_N.tolist()], [-1, *drawn]


def _bits(value: float) -> str:
    return struct.pack(">f", value).hex()


def judged(
    turn: LoggedTurn, logprobs: Sequence[float], drawn: Sequence[int], own: str
) -> tuple[TurnVerdict, Difference | None]:
    """What a turn's recomputed values (each under the token's own version) say of it."""
    logged, versions = read_f32(turn.event.logprobs), turn.versions()
    tokens = turn.segment.context[turn.start : turn.end]
    first: Difference | None = None
    for index, (was, now) in enumerate(zip(logged, logprobs, strict=True)):
        place = {"turn": turn.event.turn, "index": index, "version": versions[index]}
        if _bits(was) != _bits(now):
            first = Difference(
                **place, what="logprob", logged=was, recomputed=now, logged_bits=_bits(was), recomputed_bits=_bits(now)
            )
        elif tokens[index] != drawn[index]:
            first = Difference(
                **place,
                what="token",
                logged=tokens[index],
                recomputed=drawn[index],
                logged_bits=f"{tokens[index]:08x}",
                recomputed_bits=f"{drawn[index]:08x}",
            )
        if first is not None:
            break
    theirs = turn.event.numerics_id
    verdict: Verdict = "equal" if first is None else "different"
    if theirs != own:
        verdict = "mixed" if theirs == MIXED_NUMERICS else "other numerics"
    of = TurnVerdict(
        turn=turn.event.turn,
        tokens=len(tokens),
        versions=sorted(set(versions)),
        numerics_id=theirs,
        verdict=verdict,
        largest_gap=max((abs(was - now) for was, now in zip(logged, logprobs, strict=True)), default=0.0),
    )
    return of, first if verdict == "different" else None


async def resample(event_log: EventLog, store: ObjectStore, session_id: str, records: list[SessionRecord]) -> Resampled:
    """Computes a session again. Raises Terminal or CheckpointError naming the version whose weights are not there."""
    if any(meta.cipher is not None for _, _, meta, _ in records):
        raise Terminal(
            f"session {session_id} cannot be computed again: its content cannot be read here, because its subject was "
            f"erased or their key is not in this key store (privacy.keys)"
        )
    opened, turns = logged_turns(records)
    named = sorted({version for turn in turns for version in turn.versions()})
    # Of several histories the session may be older than a restore, which used its versions' numbers again.
    histories = [era for era in await eras(event_log, opened.policy) if all(version in era for version in named)]
    if not histories:
        raise CheckpointError(f"versions {named} of {opened.policy} are not all on {topics.WEIGHTS.name}")
    best: tuple[tuple[int, int], Resampled] | None = None
    for published in histories:
        policies = await _policies(store, [published[version] for version in named])
        found = await asyncio.to_thread(resampled, session_id, opened, turns, policies)
        if found.first is None:
            return found
        agrees_up_to = (found.first.turn, found.first.index)
        best = (agrees_up_to, found) if best is None or agrees_up_to > best[0] else best
    assert best is not None
    return best[1]


async def _policies(store: ObjectStore, versions: Iterable[VersionPublished]) -> dict[int, Policy]:
    policies: dict[int, Policy] = {}
    for at in versions:
        manifest, weights = await fetch_weights(store, at.manifest_key, at.manifest_sha256)
        policies[at.version] = Policy(ModelConfig.from_hf(manifest.model))
        load_hf_state(policies[at.version], weights.state, manifest.name)
    return policies


def resampled(
    session_id: str, opened: SessionOpened, turns: Sequence[LoggedTurn], policies: Mapping[int, Policy]
) -> Resampled:
    """Every turn computed again under the policies that its tokens name. Sets the process to one thread."""
    torch.set_num_threads(1)  # as engines compute; more would change the bits, and the id with them
    own = numerics_id()
    verdicts: list[TurnVerdict] = []
    first: Difference | None = None
    done: dict[tuple[int, int], tuple[list[float], list[int]]] = {}
    for turn in turns:
        values: list[tuple[float, int]] = []
        for at, version in enumerate(turn.versions(), turn.start):
            if (turn.segment.base, version) not in done:
                done[turn.segment.base, version] = again(policies[version], turn.segment, opened.sampling)
            logprobs, drawn = done[turn.segment.base, version]
            values.append((logprobs[at], drawn[at]))
        verdict, difference = judged(turn, [one for one, _ in values], [one for _, one in values], own)
        verdicts.append(verdict)
        first = first or difference
    return Resampled(session_id=session_id, policy=opened.policy, numerics_id=own, turns=verdicts, first=first)


def resampled_text(found: Resampled) -> str:
    """A line a turn, and the verdict."""
    lines = []
    for turn in found.turns:
        versions = ",".join(map(str, turn.versions))
        gap = "" if turn.verdict == "equal" else f", largest gap {turn.largest_gap:.3g}"
        lines.append(f"  turn {turn.turn}: {turn.tokens} tokens under version {versions}: {turn.verdict}{gap}")
    if (first := found.first) is not None:
        lines.append(
            f"session {found.session_id}: DIFFERENT: first at turn {first.turn}, token {first.index} (version "
            f"{first.version}): {first.what} logged {first.logged:.9g} ({first.logged_bits}), recomputed "
            f"{first.recomputed:.9g} ({first.recomputed_bits})"
        )
    elif found.compared:
        lines.append(f"session {found.session_id}: equal, {found.compared} tokens and their log-probs bit for bit")
    else:
        lines.append(f"session {found.session_id}: nothing to claim: no turn was sampled under {found.numerics_id}")
    return "\n".join(lines)
