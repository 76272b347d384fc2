"""`audit resample`: what an engine really sampled comes out bit for bit, over turns, reloads and segments; all else is
told by its first token."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest
from support.sampled_session import Sampled

from odradek.actors.trainer.resample import logged_turns, resampled_text
from odradek.actors.trainer.testing import TINY
from odradek.streams.codec import f32, i32, read_f32
from odradek.streams.errors import Terminal
from odradek.streams.events.sessions import (
    TurnSampled,
    WeightSpan,
)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_a_session_comes_out_bit_for_bit_over_turns_reloads_and_segments(temperature: float) -> None:
    session = Sampled(temperature)
    session.turn([5, 6, 7], 9)
    assert len(session.turn([8, 9], 12, reload_after=5).weight_spans) == 2
    session.condense([3, 4, 5])
    session.turn([6], 8)
    found = session.again()
    assert [one.verdict for one in found.turns] == ["equal"] * 3
    assert [one.versions for one in found.turns] == [[1], [1, 2], [2]]
    assert (found.first, found.compared) == (None, 29)
    assert resampled_text(found).endswith("session s: equal, 29 tokens and their log-probs bit for bit")


def test_one_bit_of_a_logged_logprob_is_located_with_both_values_bits() -> None:
    session = Sampled()
    session.turn([5, 6, 7], 9)
    result = session.turn([8], 9)

    def one_bit(turn: TurnSampled) -> TurnSampled:
        raw = bytearray(turn.logprobs)
        raw[4 * 4] ^= 1
        return msgspec.structs.replace(turn, logprobs=bytes(raw))

    found = session.again(one_bit, turn=1)
    assert [one.verdict for one in found.turns] == ["equal", "different"]
    first = found.first
    assert first is not None
    assert (first.turn, first.index, first.version, first.what) == (1, 4, 1, "logprob")
    assert first.recomputed == result.logprobs[4] != first.logged
    assert first.recomputed_bits == struct.pack(">f", result.logprobs[4]).hex()
    assert int(first.recomputed_bits, 16) ^ int(first.logged_bits, 16) == 1
    assert "first at turn 1, token 4 (version 1): logprob logged" in resampled_text(found)


def test_a_token_that_another_draw_would_have_given_is_located() -> None:
    """Its log-prob is the right one of that token: only the sampler tells that nobody drew it."""
    session = Sampled()
    result = session.turn([5, 6, 7], 9)
    other = (result.tokens[8] + 1) % TINY.vocab_size
    tokens = [*result.tokens[:8], other]
    altered = session.again(lambda turn: msgspec.structs.replace(turn, completion=i32(tokens))).first
    assert altered is not None and (altered.index, altered.what) == (8, "logprob")

    def honest(turn: TurnSampled) -> TurnSampled:
        logprobs = [*read_f32(turn.logprobs)[:8], altered.recomputed]
        return msgspec.structs.replace(turn, completion=i32(tokens), logprobs=f32(logprobs))

    first = session.again(honest).first
    assert first is not None
    assert (first.index, first.what, first.logged, first.recomputed) == (8, "token", other, result.tokens[8])


def test_another_version_than_the_one_that_sampled_is_found() -> None:
    session = Sampled()
    session.turn([5, 6, 7], 9)
    found = session.again(lambda turn: msgspec.structs.replace(turn, spans=[WeightSpan(0, 2)]))
    assert found.first is not None and (found.first.index, found.first.version) == (0, 2)


@pytest.mark.parametrize(("theirs", "verdict"), [("another host", "other numerics"), ("mixed", "mixed")])
def test_of_other_numerics_nothing_is_claimed_and_the_gap_is_told(theirs: str, verdict: str) -> None:
    session = Sampled()
    session.turn([5, 6, 7], 9)

    def other(turn: TurnSampled) -> TurnSampled:
        logprobs = np.array(read_f32(turn.logprobs), np.float32) - np.float32(0.25)
        return msgspec.structs.replace(turn, numerics_id=theirs, logprobs=f32(logprobs.tolist()))

    found = session.again(other)
    assert (found.first, found.compared) == (None, 0)
    assert found.turns[0].verdict == verdict
    assert found.turns[0].largest_gap == pytest.approx(0.25, abs=1e-5)
    assert "nothing to claim" in resampled_text(found)


def test_what_is_no_session_is_named() -> None:
    session = Sampled()
    session.turn([5, 6, 7], 2)
    with pytest.raises(Terminal, match="the session's opening is not on the log"):
        logged_turns(session.records[1:])
    offset, name, meta, body = session.records[1]
    assert isinstance(body, TurnSampled)
    for broken in (msgspec.structs.replace(body, prompt=b""), msgspec.structs.replace(body, spans=[])):
        with pytest.raises(Terminal, match="turn 0 at offset 1 names no version or context"):
            logged_turns([session.records[0], (offset, name, meta, broken)])
