"""DESIGN §1.7 at its root: on CPU in float32 on one thread, what a row becomes does not depend on what is beside it.

Every comparison here is bit for bit. The shapes named are those of the demo's policy; the random ones are there so that
the law does not rest on a few lucky sizes.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odradek.kernels.attention.api import TILE, attend_causal, attend_paged, plan_paged
from odradek.kernels.logprob.api import row_logits, token_logprobs
from odradek.kernels.moe.api import expert_layer
from odradek.kernels.norm.api import rms_norm
from odradek.kernels.rows.api import linear

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
"""No deadline: no test of ours asserts a time."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("inputs, outputs", [(128, 256), (128, 768), (384, 128), (128, 1024)])
def test_linear_rows_agree_for_every_count_from_1_to_300(inputs: int, outputs: int) -> None:
    x, w = randn(0, 1100, inputs), randn(1, outputs, inputs)
    whole = linear(x, w)
    different = [
        n for n in range(1, 301) if not torch.equal(linear(x[(o := n * 37 % 800) : o + n], w), whole[o : o + n])
    ]
    assert different == []


def test_linear_rows_agree_between_one_row_and_a_training_batch() -> None:
    x, w = randn(0, 6007, 128), randn(1, 1024, 128)
    whole = linear(x, w)
    for n, start in ((1, 6006), (96, 5000), (1023, 3), (6000, 7)):
        assert torch.equal(linear(x[start : start + n], w), whole[start : start + n])


@COMMON
@given(st.integers(1, 400), st.integers(1, 300), st.integers(2, 700), st.data())
def test_linear_rows_agree_for_random_shapes(inputs: int, outputs: int, rows: int, data: st.DataObject) -> None:
    x, w = randn(inputs, rows, inputs), randn(outputs, outputs, inputs)
    start = data.draw(st.integers(0, rows - 1))
    n = data.draw(st.integers(1, rows - start))
    assert torch.equal(linear(x[start : start + n], w), linear(x, w)[start : start + n])


@COMMON
@given(st.permutations(range(40)))
def test_linear_row_is_the_same_among_other_rows(order: list[int]) -> None:
    """Neither its place nor its neighbours count: not even a NaN beside it."""
    x, w = randn(0, 40, 128), randn(1, 96, 128)
    whole = linear(x, w)
    x[order[0]] = torch.nan
    shuffled = linear(x[order], w)
    assert torch.equal(shuffled[1:], whole[order[1:]])


@COMMON
@given(st.integers(1, 300), st.integers(1, 200), st.data())
def test_norm_rows_agree(rows: int, width: int, data: st.DataObject) -> None:
    x, w = randn(width, rows, width), randn(1, width)
    start = data.draw(st.integers(0, rows - 1))
    n = data.draw(st.integers(1, rows - start))
    assert torch.equal(rms_norm(x[start : start + n], w, 1e-6), rms_norm(x, w, 1e-6)[start : start + n])


def test_norm_of_heads_is_norm_of_rows() -> None:
    x, w = randn(0, 7, 4, 32), randn(1, 32)
    assert torch.equal(rms_norm(x, w, 1e-6).flatten(0, 1), rms_norm(x.flatten(0, 1), w, 1e-6))


@COMMON
@given(st.integers(1, 600), st.integers(2, 1100), st.sampled_from([1.0, 0.7, 1.3]), st.data())
def test_logprob_rows_agree_and_the_sampler_has_the_trainers_bits(
    rows: int, vocabulary: int, temperature: float, data: st.DataObject
) -> None:
    hidden, weight = randn(rows, rows, 24), randn(vocabulary, vocabulary, 24)
    targets = torch.arange(rows) * 7 % vocabulary
    logprob, entropy = token_logprobs(hidden, weight, targets, temperature)
    start = data.draw(st.integers(0, rows - 1))
    n = data.draw(st.integers(1, rows - start))
    part = slice(start, start + n)
    some_logprob, some_entropy = token_logprobs(hidden[part], weight, targets[part], temperature)
    assert torch.equal(some_logprob, logprob[part]) and torch.equal(some_entropy, entropy[part])
    sampled = torch.log_softmax(row_logits(hidden[part], weight, temperature), -1)
    assert torch.equal(sampled.gather(1, targets[part, None])[:, 0], logprob[part])


@COMMON
@given(st.integers(1, 200), st.integers(1, 9), st.booleans(), st.data())
def test_expert_rows_agree_and_so_do_their_choices(rows: int, experts: int, norm: bool, data: st.DataObject) -> None:
    x = randn(rows, rows, 32)
    weights = randn(1, experts, 32), randn(2, experts, 2 * 24, 32), randn(3, experts, 32, 24)
    top_k = data.draw(st.integers(1, experts))
    whole, chosen = expert_layer(x, *weights, top_k, norm)
    start = data.draw(st.integers(0, rows - 1))
    n = data.draw(st.integers(1, rows - start))
    part, ids = expert_layer(x[start : start + n], *weights, top_k, norm)
    assert torch.equal(part, whole[start : start + n]) and torch.equal(ids, chosen[start : start + n])
    replayed, _ = expert_layer(x, *weights, top_k, norm, chosen)
    assert torch.equal(replayed, whole)


@dataclass
class Cache:
    """A paged cache over packed sequences, filled from shuffled pages."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor


@dataclass
class Pack:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: list[int]

    def causal(self) -> torch.Tensor:
        return attend_causal(self.q, self.k, self.v, torch.tensor(self.starts, dtype=torch.int32))

    def cache(self, seed: int) -> Cache:
        lengths = [b - a for a, b in pairwise(self.starts)]
        pages = [-(-n // TILE) for n in lengths]
        free = torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(seed)).tolist()
        shape = (len(free), TILE, *self.k.shape[1:])
        k_pages, v_pages = randn(seed, *shape), randn(seed + 1, *shape)
        table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for s, start in enumerate(self.starts[:-1]):
            for m in range(pages[s]):
                table[s, m] = page = free.pop()
                first, n = start + m * TILE, min(TILE, lengths[s] - m * TILE)
                k_pages[page, :n], v_pages[page, :n] = self.k[first : first + n], self.v[first : first + n]
        return Cache(k_pages, v_pages, table)


def pack(seed: int, lengths: list[int], heads: tuple[int, int, int]) -> Pack:
    tokens, (q_heads, kv_heads, width) = sum(lengths), heads
    q, k, v = (randn(seed + i, tokens, h, width) for i, h in enumerate((q_heads, kv_heads, kv_heads)))
    return Pack(q, k, v, [0, *accumulate(lengths)])


lengths = st.lists(st.integers(1, 330), min_size=1, max_size=7)
shapes = st.sampled_from([(4, 2, 32), (4, 2, 32), (1, 1, 8), (3, 1, 17), (8, 2, 64), (2, 2, 24)])


@COMMON
@given(lengths, shapes, st.integers(0, 1000), st.data())
def test_decode_prefill_and_causal_forward_have_the_same_bits(
    lengths: list[int], heads: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    """Any mix of requests, any chunk of each: the same token of the same sequence is the same bits."""
    packed = pack(seed, lengths, heads)
    whole, cache = packed.causal(), packed.cache(seed)
    members = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9))
    width = data.draw(st.sampled_from([1, 1, 2, 5, 16, 17, 64, 65, 200]))
    positions = torch.zeros(len(members), width, dtype=torch.int32)
    counts = torch.zeros(len(members), dtype=torch.int32)
    rows = torch.zeros(len(members), width, dtype=torch.int64)
    for b, s in enumerate(members):
        counts[b] = count = data.draw(st.integers(0, min(width, lengths[s])))
        first = data.draw(st.integers(0, lengths[s] - count))
        positions[b, :count] = torch.arange(first, first + count)
        rows[b, :count] = packed.starts[s] + positions[b, :count]
    arguments = (cache.k_pages, cache.v_pages, cache.table[members], positions, counts)
    plan = plan_paged(*arguments[2:]) if data.draw(st.booleans()) else None
    found = attend_paged(packed.q[rows], *arguments, plan)
    real = torch.arange(width) < counts[:, None]
    assert torch.equal(found[real], whole[rows[real]])
    assert not found[~real].any()


@COMMON
@given(st.lists(st.integers(0, 4), min_size=3, max_size=20), shapes, st.integers(0, 1000), st.data())
def test_sharing_pages_of_a_prefix_changes_no_bit(
    prefixes: list[int], heads: tuple[int, int, int], seed: int, data: st.DataObject
) -> None:
    """Decode reads a page once for all requests that share it; each gets the bits it gets alone, with pages of its own.

    Requests of one prefix share its pages as the prefix cache would; some share a later page too, behind one that is
    their own, which no prefix cache does and which must not disturb the order of the tiles.
    """
    pages = 40
    shape = (pages, TILE, heads[1], heads[2])
    k_pages, v_pages = randn(seed, *shape), randn(seed + 1, *shape)
    table = torch.tensor([[5 * p, 5 * p + 1, 30 + b % 7, 5 * p + 2, 25] for b, p in enumerate(prefixes)]).int()
    positions = torch.tensor([[data.draw(st.integers(0, 5 * TILE - 1))] for _ in prefixes]).int()
    q, one = randn(seed + 2, len(prefixes), 1, heads[0], heads[2]), torch.ones(1, dtype=torch.int32)
    together = attend_paged(q, k_pages, v_pages, table, positions, one.expand(len(prefixes)))
    for b in range(len(prefixes)):
        own = k_pages[table[b].long()], v_pages[table[b].long()]
        alone = attend_paged(q[b : b + 1], *own, torch.arange(5)[None].int(), positions[b : b + 1], one)
        assert torch.equal(alone[0], together[b])


@COMMON
@given(lengths, shapes, st.integers(0, 1000))
def test_a_packed_sequence_has_the_bits_of_the_sequence_alone(
    lengths: list[int], heads: tuple[int, int, int], seed: int
) -> None:
    packed = pack(seed, lengths, heads)
    whole = packed.causal()
    for start, end in pairwise(packed.starts):
        q, k, v = (t[start:end] for t in (packed.q, packed.k, packed.v))
        alone = attend_causal(q, k, v, torch.tensor([0, end - start], dtype=torch.int32))
        assert torch.equal(alone, whole[start:end])


@COMMON
@given(st.integers(1, 130), st.integers(1, 90), st.integers(1, 90), st.integers(0, 1000), st.data())
def test_changing_a_token_of_branch_a_leaves_branch_b_unchanged(
    prefix: int, a: int, b: int, seed: int, data: st.DataObject
) -> None:
    """alex-hh/profam #495: one prefix with branches A and B in one pack; B, its gradients too, must not see A."""
    packed = pack(seed, [prefix + a, prefix + b], (4, 2, 32))
    for t in (packed.q, packed.k, packed.v):
        t[prefix + a : 2 * prefix + a] = t[:prefix]
    starts = torch.tensor(packed.starts, dtype=torch.int32)
    changed = prefix + data.draw(st.integers(0, a - 1))

    def branch_b() -> tuple[torch.Tensor, ...]:
        q, k, v = (t.clone().requires_grad_() for t in (packed.q, packed.k, packed.v))
        out = attend_causal(q, k, v, starts)[prefix + a :]
        return out, *(grad[prefix + a :] for grad in torch.autograd.grad(out.square().sum(), (q, k, v)))

    before = branch_b()
    whole = packed.causal()
    for t in (packed.q, packed.k, packed.v):
        t[changed] += 1.0
    assert all(torch.equal(x, y) for x, y in zip(branch_b(), before, strict=True))
    assert not torch.equal(packed.causal()[changed], whole[changed])


def test_garbage_past_a_sequence_in_its_last_page_has_no_weight() -> None:
    packed = pack(5, [70], (4, 2, 32))
    cache = packed.cache(5)
    one = (torch.tensor([[69]], dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    before = attend_paged(packed.q[None, 69:], cache.k_pages, cache.v_pages, cache.table, *one)
    page = int(cache.table[0, 1])
    cache.k_pages[page, 6:], cache.v_pages[page, 6:] = 1e30, -1e30
    assert torch.equal(attend_paged(packed.q[None, 69:], cache.k_pages, cache.v_pages, cache.table, *one), before)
