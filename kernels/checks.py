"""What every path of every kernel must satisfy: one set of checks for CPU, CUDA and the interpreted Triton kernels.

`python -m odradek.kernels.checks --path cpu|cuda|interpreter --dtype float32|bfloat16` runs them all, prints one line a
check and exits with 1 at the first difference, with its first few elements. Shapes are awkward on purpose (primes, one
row, one more than a tile); gradients are compared with float64 autograd through the reference. Each check takes a
path's kernels, a dtype and a seeded generator. Inputs are drawn on the CPU in the dtype under test, so that the
reference sees the very values that the kernel sees.
"""

import argparse
import math
import sys
from collections.abc import Callable
from itertools import pairwise

import torch

from odradek.kernels.attention import ref as attention_ref
from odradek.kernels.attention.units import TILE
from odradek.kernels.checking import (
    GRADIENT_SLACK,
    TOLERANCES,
    Kernels,
    MismatchError,
    Tolerance,
    api_kernels,
    compare,
    interpreted_kernels,
    same_bits,
)
from odradek.kernels.logprob import ref as logprob_ref
from odradek.kernels.moe import ref as moe_ref
from odradek.kernels.norm import ref as norm_ref
from odradek.kernels.rows import ref as rows_ref

Check = Callable[[Kernels, torch.dtype, torch.Generator], None]

LENGTHS = ((1,), (64,), (65, 1, 63), (131, 7))
"""Sequence lengths of the attention checks: around a tile border, and several in one pack."""

HEADS = ((4, 2, 32), (3, 1, 17), (2, 2, 8))
"""(query heads, key heads, width): grouped, one key head with an odd width, ungrouped and narrow."""


def _draw(generator: torch.Generator, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def _on(kernels: Kernels, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(kernels.device) for t in tensors]


def _leaves(kernels: Kernels, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Differentiable copies: on the kernels' device, and in float64 for the reference."""
    return (
        [t.to(kernels.device).requires_grad_() for t in tensors],
        [t.double().requires_grad_() for t in tensors],
    )


def _gradients(
    name: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    found: tuple[list[torch.Tensor], list[torch.Tensor]],
    expected: tuple[list[torch.Tensor], list[torch.Tensor]],
) -> None:
    """Compare d(outputs · random)/d(leaves); each side is (outputs, leaves)."""
    ups = [_draw(generator, torch.float32, *out.shape) for out in expected[0]]
    found_grads = torch.autograd.grad(
        found[0], found[1], [up.to(out.dtype).to(out.device) for up, out in zip(ups, found[0], strict=True)]
    )
    expected_grads = torch.autograd.grad(
        expected[0], expected[1], [up.to(out.dtype).double() for up, out in zip(ups, found[0], strict=True)]
    )
    base = TOLERANCES[dtype]
    for place, (a, b) in enumerate(zip(found_grads, expected_grads, strict=True)):
        scale = max(1.0, float(b.abs().max()))
        compare(
            f"{name} gradient {place}",
            a,
            b,
            Tolerance(base.relative * GRADIENT_SLACK, base.absolute * GRADIENT_SLACK * scale),
        )


def rows_linear(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for n, k, o in ((1, 7, 1), (3, 41, 71), (67, 131, 61), (130, 128, 96)):
        x, w = _draw(generator, dtype, n, k), _draw(generator, dtype, o, k, scale=1 / math.sqrt(k))
        (x1, w1), (x2, w2) = _leaves(kernels, x, w)
        found, expected = kernels.linear(x1, w1), rows_ref.linear(x2, w2)
        compare(f"rows.linear {n, k, o}", found, expected, TOLERANCES[dtype])
        _gradients(f"rows.linear {n, k, o}", dtype, generator, ([found], [x1, w1]), ([expected], [x2, w2]))


def rows_linear_keeps_row_bits(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """The bits of a row do not depend on how many rows there are nor on where it stands."""
    x, w = _on(kernels, _draw(generator, dtype, 150, 131), _draw(generator, dtype, 61, 131))
    whole = kernels.linear(x, w)
    for start, n in ((0, 1), (7, 1), (149, 1), (3, 2), (11, 17), (64, 64), (1, 149)):
        same_bits(f"rows.linear rows {start}+{n}", kernels.linear(x[start : start + n], w), whole[start : start + n])


def norm_rms_norm(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for shape in ((1, 1), (5, 41), (67, 128), (3, 2, 31)):
        x, w = _draw(generator, dtype, *shape), _draw(generator, dtype, shape[-1])
        (x1, w1), (x2, w2) = _leaves(kernels, x, w)
        found, expected = kernels.rms_norm(x1, w1, 1e-5), norm_ref.rms_norm(x2, w2, 1e-5)
        compare(f"norm.rms_norm {shape}", found, expected, TOLERANCES[dtype])
        _gradients(f"norm.rms_norm {shape}", dtype, generator, ([found], [x1, w1]), ([expected], [x2, w2]))


def logprob_token_logprobs(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for n, h, v, temperature in ((1, 13, 17, 1.0), (67, 41, 131, 0.7), (16, 32, 64, 1.0)):
        x, w = _draw(generator, dtype, n, h), _draw(generator, dtype, v, h, scale=1 / math.sqrt(h))
        targets = torch.randint(0, v, (n,), generator=generator)
        (x1, w1), (x2, w2) = _leaves(kernels, x, w)
        found = kernels.token_logprobs(x1, w1, targets.to(kernels.device), temperature)
        expected = logprob_ref.token_logprobs(x2, w2, targets, temperature)
        name = f"logprob.token_logprobs {n, h, v, temperature}"
        compare(f"{name} logprob", found[0], expected[0], TOLERANCES[dtype])
        compare(f"{name} entropy", found[1], expected[1], TOLERANCES[dtype])
        _gradients(name, dtype, generator, (list(found), [x1, w1]), (list(expected), [x2, w2]))


def logprob_row_logits_agree(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """The sampler's logits lead to the trainer's log-probs: the same bits on CPU, within float32 rounding elsewhere."""
    x, w = _on(kernels, _draw(generator, dtype, 67, 41), _draw(generator, dtype, 131, 41, scale=0.2))
    targets = torch.randint(0, 131, (67,), generator=generator).to(kernels.device)
    for temperature in (1.0, 0.7):
        logprob, _ = kernels.token_logprobs(x, w, targets, temperature)
        logits = kernels.row_logits(x[5:9], w, temperature)
        sampled = torch.log_softmax(logits, -1).gather(1, targets[5:9, None])[:, 0]
        compare("logprob.row_logits", sampled, logprob[5:9], TOLERANCES[torch.float32])


def _experts(
    generator: torch.Generator, dtype: torch.dtype, n: int, h: int, e: int, f: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _draw(generator, dtype, n, h),
        _draw(generator, dtype, e, h, scale=1 / math.sqrt(h)),
        _draw(generator, dtype, e, 2 * f, h, scale=1 / math.sqrt(h)),
        _draw(generator, dtype, e, h, f, scale=1 / math.sqrt(f)),
    )


def moe_expert_layer(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for n, h, e, f, k, norm in ((1, 13, 3, 5, 2, True), (67, 41, 5, 29, 2, True), (9, 16, 23, 8, 1, False)):
        tensors = _experts(generator, dtype, n, h, e, f)
        mine, theirs = _leaves(kernels, *tensors)
        y, ids = kernels.expert_layer(*mine, k, norm)
        x, router, w13, w2 = theirs
        expected = moe_ref.expert_layer(x, router, w13, w2, k, norm, ids.cpu())
        name = f"moe.expert_layer {n, h, e, f, k, norm}"
        compare(name, y, expected, TOLERANCES[dtype])
        _gradients(name, dtype, generator, ([y], mine), ([expected], theirs))


def moe_replays_experts(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """A given choice is used and returned; its own choice given back changes no bit."""
    x, router, w13, w2 = _experts(generator, dtype, 19, 41, 5, 29)
    tensors = _on(kernels, x, router, w13, w2)
    y, ids = kernels.expert_layer(*tensors, 2, True)
    again, same = kernels.expert_layer(*tensors, 2, True, ids)
    same_bits("moe replay of its own choice", again, y)
    same_bits("moe replay returns the choice", same, ids)
    other = (ids + 1) % 5
    replayed, returned = kernels.expert_layer(*tensors, 2, True, other)
    expected = moe_ref.expert_layer(x, router, w13, w2, 2, True, other.cpu())
    compare("moe replay of another choice", replayed, expected, TOLERANCES[dtype])
    same_bits("moe replay returns another choice", returned, other)


def moe_breaks_ties_by_index(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Equal router scores go to the lower expert index."""
    x, _, w13, w2 = _experts(generator, dtype, 6, 16, 7, 8)
    router = torch.zeros(7, 16, dtype=dtype)
    _, ids = kernels.expert_layer(*_on(kernels, x, router, w13, w2), 3, True)
    same_bits("moe ties", ids, torch.arange(3, dtype=torch.int32).expand(6, -1))


def _packed(
    generator: torch.Generator, dtype: torch.dtype, lengths: tuple[int, ...], heads: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, (q_heads, kv_heads, width) = sum(lengths), heads
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    q = _draw(generator, dtype, tokens, q_heads, width)
    k, v = (_draw(generator, dtype, tokens, kv_heads, width) for _ in range(2))
    return q, k, v, starts


def attention_causal(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for lengths in LENGTHS:
        for heads in HEADS:
            *tensors, starts = _packed(generator, dtype, lengths, heads)
            mine, theirs = _leaves(kernels, *tensors)
            found = kernels.attend_causal(*mine, starts)
            q, k, v = theirs
            expected = attention_ref.attend_causal(q, k, v, starts)
            name = f"attention.attend_causal {lengths} {heads}"
            compare(name, found, expected, TOLERANCES[dtype])
            _gradients(name, dtype, generator, ([found], mine), ([expected], theirs))


def paged_cache(
    k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(k_pages, v_pages, block_table)` of packed sequences, in shuffled pages, with noise in what is unused."""
    bounds = starts.tolist()
    lengths = [b - a for a, b in pairwise(bounds)]
    pages = [-(-n // TILE) for n in lengths]
    shape = (sum(pages) + 3, TILE, *k.shape[1:])
    k_pages, v_pages = (torch.randn(shape, generator=generator).to(k.dtype) for _ in range(2))
    free = torch.randperm(shape[0], generator=generator).tolist()
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32)
    for s, start in enumerate(bounds[:-1]):
        for m in range(pages[s]):
            table[s, m] = page = free.pop()
            first = start + m * TILE
            n = min(TILE, bounds[s + 1] - first)
            k_pages[page, :n], v_pages[page, :n] = k[first : first + n], v[first : first + n]
    return k_pages, v_pages, table


def _cuts(
    generator: torch.Generator, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`(rows of the pack [B, Q], positions, q_len)`: of each sequence up to `width` adjacent tokens ending anywhere."""
    rows, positions, counts = [], [], []
    bounds = starts.tolist()
    for start, end in pairwise(bounds):
        last = int(torch.randint(start, end, (1,), generator=generator))
        first = max(start, last + 1 - width)
        row = torch.arange(width).clamp(max=last - first) + first
        rows.append(row)
        positions.append(row - start)
        counts.append(last + 1 - first)
    return torch.stack(rows), torch.stack(positions).int(), torch.tensor(counts, dtype=torch.int32)


def attention_paged(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    for heads in HEADS:
        q, k, v, starts = _packed(generator, dtype, (131, 7, 64, 65), heads)
        k_pages, v_pages, table = paged_cache(k, v, starts, generator)
        for width in (1, 5, 17, 67):
            rows, positions, counts = _cuts(generator, starts, width)
            counts[1] = 0
            arguments = (q[rows], k_pages, v_pages, table, positions, counts)
            found = kernels.attend_paged(*_on(kernels, *arguments))
            expected = attention_ref.attend_paged(*arguments)
            compare(f"attention.attend_paged {heads} {width}", found, expected, TOLERANCES[dtype])


def attention_decode_prefill_causal_same_bits(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """The same token of the same sequence gets the same bits from training, chunked prefill and decode."""
    for heads in HEADS:
        q, k, v, starts = _packed(generator, dtype, (131, 7, 64, 65), heads)
        whole = kernels.attend_causal(*_on(kernels, q, k, v), starts)
        k_pages, v_pages, table = paged_cache(k, v, starts, generator)
        for width in (1, 3, 16, 17, 67):
            rows, positions, counts = _cuts(generator, starts, width)
            found = kernels.attend_paged(*_on(kernels, q[rows], k_pages, v_pages, table, positions, counts))
            real = (torch.arange(width) < counts[:, None]).to(kernels.device)
            same_bits(f"attention {heads} chunk of {width}", found[real], whole[rows.to(kernels.device)][real])


def attention_branches_do_not_meet(kernels: Kernels, dtype: torch.dtype, generator: torch.Generator) -> None:
    """One prefix with branches A and B in one pack: a token of A changed leaves every bit of B (profam #495)."""
    prefix, branch, heads = 37, 29, (4, 2, 32)
    q, k, v, starts = _packed(generator, dtype, (prefix + branch, prefix + branch), heads)
    for t in (q, k, v):
        t[prefix + branch : 2 * prefix + branch] = t[:prefix]
    before = kernels.attend_causal(*_on(kernels, q, k, v), starts)
    for t in (q, k, v):
        t[prefix + 3] += 1.0
    after = kernels.attend_causal(*_on(kernels, q, k, v), starts)
    same_bits("branch B", after[prefix + branch :], before[prefix + branch :])
    same_bits("prefix of A", after[: prefix + 3], before[: prefix + 3])
    if torch.equal(after[prefix + 3 : prefix + branch], before[prefix + 3 : prefix + branch]):
        raise MismatchError("branch A did not change: the check would pass for any kernel")


CHECKS: tuple[Check, ...] = (
    rows_linear,
    rows_linear_keeps_row_bits,
    norm_rms_norm,
    logprob_token_logprobs,
    logprob_row_logits_agree,
    moe_expert_layer,
    moe_replays_experts,
    moe_breaks_ties_by_index,
    attention_causal,
    attention_paged,
    attention_decode_prefill_causal_same_bits,
    attention_branches_do_not_meet,
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check one path of all kernels against the float64 references.")
    parser.add_argument("--path", choices=("cpu", "cuda", "interpreter"), required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    kernels = interpreted_kernels() if chosen.path == "interpreter" else api_kernels(chosen.path)
    for check in CHECKS:
        try:
            check(kernels, getattr(torch, chosen.dtype), torch.Generator().manual_seed(0))
        except MismatchError as error:
            print(f"MISMATCH {check.__name__}: {error}", file=sys.stderr)
            return 1
        print(f"ok {check.__name__}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
