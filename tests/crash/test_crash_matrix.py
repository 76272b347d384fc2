"""The fault harness, short: every kind of fault once under a running job, then every guarantee from log and host.

`make crash N=1000` is the long run of the same code. Another order and other targets: ODRADEK_CRASH_SEED.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.crash.checks import CHECKS
from support.crash.outcome import Outcome, Settings
from support.crash.plan import UNDER_THE_JOB, WEIGHTS
from support.crash.run import run

from odradek.infra.stack.testing import scratch

pytestmark = [pytest.mark.contract, pytest.mark.timeout(1200)]

SEED = int(os.environ.get("ODRADEK_CRASH_SEED", "1"))


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    print(f"seed {SEED}: rerun with ODRADEK_CRASH_SEED={SEED}")
    with scratch() as data:
        yield run(Settings(faults=0, seed=SEED, data=Path(data), short=True))


def test_every_kind_of_fault_was_injected_and_the_job_went_on(outcome: Outcome) -> None:
    assert {fault.kind for fault in outcome.injected} == WEIGHTS.keys()
    points = {fault.how.partition(".")[0] for fault in outcome.injected if fault.kind == "kill at point"}
    assert points == set(UNDER_THE_JOB)
    assert outcome.counts["steps"] >= 1 and outcome.counts["resumed"] >= 1
    assert outcome.counts["identical"] == outcome.counts["batches"]


@pytest.mark.parametrize("guarantee", sorted({name for name, _ in CHECKS}))
def test_the_guarantee_holds_under_fire(outcome: Outcome, guarantee: str) -> None:
    assert [violation for violation in outcome.violations if violation.guarantee == guarantee] == []
