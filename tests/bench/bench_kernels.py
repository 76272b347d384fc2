"""What the row-stable kernels cost against plain torch, on the same inputs in the same run.

    .venv/bin/python tests/bench/bench_kernels.py [--runs 30] [--device cpu]

Shapes are those of the demo's policy: 96 decode rows, packs of some 6,000 tokens in sequences of about 250, heads 4/2
of 32, hidden 128, vocabulary 1024.
The baselines are correct and have no promise on bits: `F.linear`, SDPA a sequence, all
logits at once. Each line is the median and the 10th and 90th percentile of the thread's own CPU time, which a busy
machine disturbs less than the clock, in milliseconds; on CUDA it is wall time with a synchronise. Results are compared
before they are timed. Numbers mean something only with the machine named in the first line.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F

from odradek.kernels.attention.api import TILE, attend_causal, attend_paged, plan_paged
from odradek.kernels.checking import TOLERANCES, compare
from odradek.kernels.logprob.api import token_logprobs
from odradek.kernels.moe.api import expert_layer
from odradek.kernels.norm.api import rms_norm
from odradek.kernels.numerics import numerics_id
from odradek.kernels.rows.api import linear

HIDDEN, VOCABULARY, Q_HEADS, KV_HEADS, WIDTH = 128, 1024, 4, 2, 32
DECODE_ROWS, SEQUENCES, LENGTH = 96, 24, 250
EXPERTS, EXPERT_WIDTH, TOP_K = 8, 96, 2


@dataclass(frozen=True)
class Workload:
    """Two ways to the same numbers; `plain` is None where plain torch has no counterpart."""

    name: str
    ours: Callable[[], object]
    plain: Callable[[], object] | None


def linears(device: str) -> Iterator[Workload]:
    for inputs, outputs in ((128, 256), (128, 768), (384, 128), (128, 1024)):
        for rows in (1, 96, 6000):
            x, w = torch.randn(rows, inputs, device=device), torch.randn(outputs, inputs, device=device)
            compare("linear", linear(x, w), F.linear(x, w).double(), TOLERANCES[torch.bfloat16])
            yield Workload(f"linear {rows}x{inputs}->{outputs}", partial(linear, x, w), partial(F.linear, x, w))


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    parts = []
    for start, end in pairwise(bounds):
        a, b, c = (t[start:end].transpose(0, 1)[None] for t in (q, k, v))
        parts.append(F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


def causal(device: str) -> Iterator[Workload]:
    lengths = torch.randint(LENGTH - 100, LENGTH + 100, (SEQUENCES,)).tolist()
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    bounds, tokens = starts.tolist(), sum(lengths)
    q, k, v = (torch.randn(tokens, h, WIDTH, device=device, requires_grad=True) for h in (Q_HEADS, KV_HEADS, KV_HEADS))
    up = torch.randn_like(q)
    compare("causal", attend_causal(q, k, v, starts), _sdpa(q, k, v, bounds).double(), TOLERANCES[torch.float32])

    def forward(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        def run() -> torch.Tensor:
            with torch.no_grad():
                return attend()

        return run

    def both(attend: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (q, k, v), up)

    def ours() -> torch.Tensor:
        return attend_causal(q, k, v, starts)

    def plain() -> torch.Tensor:
        return _sdpa(q, k, v, bounds)

    yield Workload(f"causal {tokens} tokens forward", forward(ours), forward(plain))
    yield Workload(f"causal {tokens} tokens both ways", both(ours), both(plain))


def decode(device: str) -> Iterator[Workload]:
    pages = DECODE_ROWS * 10
    k_pages, v_pages = (torch.randn(pages, TILE, KV_HEADS, WIDTH, device=device) for _ in range(2))
    table = torch.randperm(pages, device=device).view(DECODE_ROWS, 10).int()
    q = torch.randn(DECODE_ROWS, 1, Q_HEADS, WIDTH, device=device)
    counts = torch.ones(DECODE_ROWS, dtype=torch.int32, device=device)
    for mean in (128, 250, 400):
        positions = torch.randint(mean // 2, min(mean * 3 // 2, 640), (DECODE_ROWS, 1), device=device).int()
        plan = plan_paged(table, positions, counts)

        def ours(positions: torch.Tensor = positions, plan: object = plan) -> torch.Tensor:
            return attend_paged(q, k_pages, v_pages, table, positions, counts, plan)  # type: ignore[arg-type]

        def plain(positions: torch.Tensor = positions) -> torch.Tensor:
            longest = int(positions.max()) + 1
            here = table[:, : -(-longest // TILE)].long()
            k, v = (p[here].flatten(1, 2)[:, :longest].transpose(1, 2) for p in (k_pages, v_pages))
            seen = torch.arange(longest, device=device) <= positions
            args = (q.transpose(1, 2), k, v, seen[:, None, None])
            return F.scaled_dot_product_attention(*args, enable_gqa=True).transpose(1, 2)

        compare("decode", ours(), plain().double(), TOLERANCES[torch.float32])
        yield Workload(f"decode {DECODE_ROWS} rows, about {mean} tokens each", ours, plain)
        yield Workload(f"decode plan, about {mean} tokens each", partial(plan_paged, table, positions, counts), None)


def heads_and_layers(device: str) -> Iterator[Workload]:
    n = SEQUENCES * LENGTH
    hidden = torch.randn(n, HIDDEN, device=device, requires_grad=True)
    weight = (torch.randn(VOCABULARY, HIDDEN, device=device) / 11).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (n,), device=device)
    gain = torch.ones(HIDDEN, device=device)

    def plain_logprob() -> tuple[torch.Tensor, torch.Tensor]:
        logp = torch.log_softmax(F.linear(hidden, weight), -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    def both(function: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function()[0].sum(), (hidden, weight))

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprobs(hidden, weight, targets)

    compare("logprob", ours()[0], plain_logprob()[0].double(), TOLERANCES[torch.float32])
    yield Workload(f"logprob {n} tokens both ways", both(ours), both(plain_logprob))
    yield Workload(
        f"norm {n}x{HIDDEN}",
        lambda: rms_norm(hidden.detach(), gain, 1e-6),
        lambda: F.rms_norm(hidden.detach(), (HIDDEN,), gain, 1e-6),
    )
    experts = (
        torch.randn(EXPERTS, HIDDEN, device=device) / 11,
        torch.randn(EXPERTS, 2 * EXPERT_WIDTH, HIDDEN, device=device) / 11,
        torch.randn(EXPERTS, HIDDEN, EXPERT_WIDTH, device=device) / 10,
    )
    for rows in (DECODE_ROWS, n):
        x = hidden.detach()[:rows]
        yield Workload(f"expert layer {rows} rows", partial(expert_layer, x, *experts, TOP_K, True), None)


def milliseconds(run: Callable[[], object], runs: int, device: str) -> tuple[float, float, float]:
    """(10th, 50th, 90th percentile)."""
    seen: list[float] = []
    for _ in range(runs + 3):
        if device == "cuda":
            torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            torch.cuda.synchronize()
            seen.append((time.perf_counter() - start) * 1e3)
        else:
            start = time.thread_time()
            run()
            seen.append((time.thread_time() - start) * 1e3)
    tenths = statistics.quantiles(seen[3:], n=10, method="inclusive")
    return tenths[0], tenths[4], tenths[8]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = (
        torch.cuda.get_device_name()
        if chosen.device == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    )
    today = datetime.now(UTC).date()
    print(f"{today} · {machine} · torch {torch.__version__} · numerics {numerics_id(device=chosen.device)}")
    for group in (linears, causal, decode, heads_and_layers):
        for work in group(chosen.device):
            low, middle, high = milliseconds(work.ours, chosen.runs, chosen.device)
            line = f"{work.name:44} {middle:8.3f} ms ({low:.3f} to {high:.3f})"
            if work.plain is not None:
                plain = milliseconds(work.plain, chosen.runs, chosen.device)[1]
                line += f"   plain {plain:8.3f} ms   ratio {middle / plain:5.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
