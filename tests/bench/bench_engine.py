"""Engine tokens per CPU second against a plain `transformers` generate call, on the same weights in the same run.

    .venv/bin/python tests/bench/bench_engine.py [--rows 96] [--tokens 64] [--runs 3]

Three workloads, one torch thread, sampling at temperature 1 without a stop token:
- even: every row wants the same number of tokens, transformers' best case;
- ragged: rows want a quarter to the whole of it; a static batch runs until its longest row ends;
- turns: three turns a session with 30 result tokens between them; a plain loop computes the whole context each turn.
Only wanted tokens count, per second of CPU time (all work is on one thread), so that what else runs on the machine
disturbs little; runs alternate and the best of each counts. Prompts are new in each run, so that the engine's prefix
cache helps it in the third workload only, as in use.
Prints one line a workload and the engine's own cost a decode step (what is not model or head).
"""

from __future__ import annotations

import argparse
import platform
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from odradek.actors.inference.engine import Engine
from odradek.actors.inference.settings import EngineSettings
from odradek.actors.inference.types import SampleRequest
from odradek.actors.inference.weights import build
from odradek.actors.policy.hf import to_hf_state
from odradek.actors.policy.model import Policy
from odradek.kernels.numerics import numerics_id

ASSETS = Path(__file__).parents[2] / "infra/demo/warmstart/assets"
RESULT_TOKENS = 30
TURNS = 3

Workload = list[tuple[list[int], int]]
"""(prompt, tokens wanted)"""


def workload(rows: int, tokens: int, ragged: bool, vocab: int, seed: int = 0) -> Workload:
    r = random.Random(seed)
    return [
        (
            [r.randrange(16, vocab) for _ in range(r.randrange(60, 200))],
            r.randrange(tokens // 4, tokens + 1) if ragged else tokens,
        )
        for _ in range(rows)
    ]


class OurEngine:
    def __init__(self, policy: Policy, rows: int) -> None:
        self.engine = Engine(policy.config, numerics_id(), EngineSettings(max_running=rows))
        self.engine.install(build(policy.config, 1, to_hf_state(policy)))
        self.calls = 0

    def generate(self, work: Workload) -> list[list[int]]:
        """Contexts with their completions. Sessions keep their names over the turns of one run."""
        done: dict[int, list[int]] = {}
        for i, (prompt, wanted) in enumerate(work):
            self.engine.add(
                SampleRequest(
                    request_id=f"{self.calls}/{i}",
                    session_id=f"s{i}",
                    epoch=0,
                    prompt_tokens=prompt,
                    max_new_tokens=wanted,
                    stop_ids=frozenset(),
                    seed=i,
                    deadline=time.monotonic() + 600,
                )
            )
        while not self.engine.idle:
            for result in self.engine.step().finished:
                i = int(result.request_id.split("/")[1])
                done[i] = work[i][0] + result.tokens
        self.calls += 1
        return [done[i] for i in range(len(work))]


class PlainTransformers:
    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)

    @torch.inference_mode()
    def generate(self, work: Workload) -> list[list[int]]:
        longest, wanted = max(len(p) for p, _ in work), max(n for _, n in work)
        ids = torch.zeros(len(work), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, (prompt, _) in enumerate(work):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask[i, longest - len(prompt) :] = 1
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=wanted,
            min_new_tokens=wanted,
            pad_token_id=0,
        )
        return [p + row[longest : longest + n].tolist() for (p, n), row in zip(work, out, strict=True)]


def one_turn(side: OurEngine | PlainTransformers, work: Workload) -> int:
    side.generate(work)
    return sum(n for _, n in work)


def many_turns(side: OurEngine | PlainTransformers, work: Workload) -> int:
    for _ in range(TURNS):
        contexts = side.generate(work)
        work = [([*c, *c[:RESULT_TOKENS]], n) for c, (_, n) in zip(contexts, work, strict=True)]
    return TURNS * sum(n for _, n in work)


def rate(run: Callable[[], int]) -> float:
    begun = time.process_time()
    return run() / (time.process_time() - begun)


def own_cost(engine: Engine, rows: int, tokens: int) -> tuple[float, float]:
    """(milliseconds of a decode step, of which not in the model's forward and the head), medians."""
    policy = engine.weights.get(1).policy
    forward, inside = policy.trunk, 0.0

    def timed(*args: object, **kw: object) -> torch.Tensor:
        nonlocal inside
        begun = time.process_time()
        out: torch.Tensor = forward(*args, **kw)  # type: ignore[arg-type]
        inside += time.process_time() - begun
        return out

    policy.trunk = timed  # type: ignore[method-assign]
    for i, (prompt, _) in enumerate(workload(rows, tokens, False, policy.config.vocab_size, 1)):
        engine.add(
            SampleRequest(
                request_id=f"cost/{i}",
                session_id=f"cost/{i}",
                epoch=0,
                prompt_tokens=prompt,
                max_new_tokens=tokens,
                stop_ids=frozenset(),
                seed=i,
                deadline=time.monotonic() + 600,
            )
        )
    steps = []
    while not engine.idle:
        inside, begun = 0.0, time.process_time()
        out = engine.step()
        whole = time.process_time() - begun
        if out.computed_tokens == rows:
            steps.append((1e3 * whole, 1e3 * (whole - inside)))
    steps.sort()
    del policy.trunk
    return steps[len(steps) // 2][0], sorted(own for _, own in steps)[len(steps) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = Policy.load_hf(ASSETS)
    vocab = policy.config.vocab_size
    ours, plain = OurEngine(policy, args.rows), PlainTransformers()
    print(
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, 1 thread, "
        f"{sum(p.numel() for p in policy.parameters()) / 1e6:.2f} M parameters, {args.rows} rows"
    )
    kinds = (("even", False, one_turn), ("ragged", True, one_turn), ("turns", False, many_turns))
    for kind, (name, ragged, run) in enumerate(kinds):
        best = {"engine": 0.0, "transformers": 0.0}
        for number in range(args.runs):
            # New prompts each run: the engine would find the old ones' pages again, which is not what is compared.
            work = workload(args.rows, args.tokens, ragged, vocab, seed=100 * kind + number)
            if run is many_turns:
                work = [(p[:90], n // TURNS) for p, n in work]
            for i in range(args.rows):
                ours.engine.forget(f"s{i}")
            best["engine"] = max(best["engine"], rate(partial(run, ours, work)))
            best["transformers"] = max(best["transformers"], rate(partial(run, plain, work)))
        print(
            f"{name:7} tokens per CPU second: engine {best['engine']:.0f}, transformers {best['transformers']:.0f}, "
            f"ratio {best['engine'] / best['transformers']:.2f}"
        )
    step, own = own_cost(ours.engine, args.rows, args.tokens)
    print(f"decode step of {args.rows} rows: {step:.1f} ms, of which outside the trunk {own:.1f} ms")


if __name__ == "__main__":
    main()
