"""The sampler is a pure function of (row, temperature, seed, position)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from odradek.actors.inference.sampler import philox4x32, sample, uniforms


def _u64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = philox4x32(tuple(_u64(c) for c in counter), tuple(_u64(k) for k in key))  # type: ignore[arg-type]
    assert tuple(int(w[0]) for w in words) == expected


def test_uniforms_are_below_one_and_fill_the_interval() -> None:
    u = uniforms(np.full(20_000, 7, np.uint64), np.arange(20_000, dtype=np.uint64))
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    # Chi-square with 19 degrees of freedom; the numbers are fixed, so this can't be flaky.
    assert ((counts - 1000) ** 2 / 1000).sum() < 36.2


def test_a_row_gives_the_same_token_alone_and_in_any_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(37, 131)).astype(np.float32) * 3
    temperature, seed = rng.choice([0.0, 0.5, 1.0, 2.0], 37), rng.integers(0, 2**63, 37).astype(np.uint64)
    position = rng.integers(0, 10_000, 37).astype(np.uint64)
    together, _ = sample(logits, temperature, seed, position)
    alone = [
        int(sample(logits[i : i + 1], temperature[i : i + 1], seed[i : i + 1], position[i : i + 1])[0][0])
        for i in range(37)
    ]
    assert together.tolist() == alone


def test_frequencies_follow_the_softmax_at_each_temperature() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.15, 0.1], np.float32))
    n = 20_000
    for temperature in (0.5, 1.0):
        p = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        tokens, fit = sample(
            np.tile(logits, (n, 1)), np.full(n, temperature), np.full(n, 3, np.uint64), np.arange(n, dtype=np.uint64)
        )
        assert fit.all()
        counts = np.bincount(tokens, minlength=4)
        assert (np.abs(counts - n * p) < 4 * np.sqrt(n * p * (1 - p))).all(), (counts, n * p)


def test_temperature_zero_takes_the_first_most_probable_token() -> None:
    logits = np.array([[0, 2, 2, 1]], np.float32)
    assert sample(logits, np.zeros(1), _u64(1), _u64(1))[0].tolist() == [1]


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    """Masked tokens at both ends, where rounding of u * total would land."""
    row = np.array([-math.inf, 0.0, -math.inf, 0.0, -math.inf, -math.inf], np.float32)
    n = 5_000
    tokens, fit = sample(np.tile(row, (n, 1)), np.ones(n), np.full(n, 5, np.uint64), np.arange(n, dtype=np.uint64))
    assert fit.all() and set(tokens.tolist()) == {1, 3}


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
def test_a_row_that_is_not_finite_is_reported_unfit(bad: list[float]) -> None:
    _, fit = sample(np.array([bad, [0.0, 1.0]], np.float32), np.ones(2), _u64(1, 1), _u64(1, 1))
    assert fit.tolist() == [False, True]
