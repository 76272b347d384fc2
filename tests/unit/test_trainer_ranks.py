"""The step over two gloo ranks equals the step over one. Run as a script, this file is one of the ranks."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odradek.actors.trainer.objective import PRESETS
from odradek.actors.trainer.optim import AdamW, OptimiserSettings
from odradek.actors.trainer.step import StepReport, StepSettings, train_step
from odradek.actors.trainer.testing import random_batch, tiny_policy, weights

RANK_DEADLINE_S = 120
"""A rank imports torch (seconds on a busy machine); beyond this it hangs."""


def run_step(
    trained: list[int], preset: str, group: dist.ProcessGroup | None = None
) -> tuple[StepReport, dict[str, torch.Tensor]]:
    policy = tiny_policy()
    settings = StepSettings(objective=PRESETS[preset], optimiser=OptimiserSettings(), minibatches=2, micro_tokens=30)
    report = train_step(
        policy,
        AdamW(policy),
        random_batch(trained),
        settings,
        torch.Generator().manual_seed(3),
        step=1,
        group=group,
    )
    return report, weights(policy)


def be_rank(rank: int, world: int, folder: Path, cases: list[tuple[list[int], str]]) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=RANK_DEADLINE_S),
    )
    results = [run_step(trained, preset, dist.group.WORLD) for trained, preset in cases]
    torch.save([(report.metrics(), state) for report, state in results], folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


CASES = [([3, 5, 40], "dr_grpo"), ([3, 5, 40], "dapo"), ([3, 5, 40], "gspo"), ([7], "grpo"), ([0, 0], "dr_grpo")]
"""The third and fourth leave a rank without a sequence in some minibatch; the last trains nothing anywhere."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[dict[str, float], dict[str, torch.Tensor]]]]:
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [subprocess.Popen([sys.executable, __file__, str(rank), str(folder)]) for rank in range(2)]
    try:
        codes = [process.wait(timeout=RANK_DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda i: f"{CASES[i][1]}-{CASES[i][0]}")
def test_case_mlx_lm_1413_two_ranks_train_the_same_step_as_one(
    case: int, two_ranks: list[list[tuple[dict[str, float], dict[str, torch.Tensor]]]]
) -> None:
    report, alone = run_step(*CASES[case])
    for metrics, state in (two_ranks[0][case], two_ranks[1][case]):
        assert metrics["trained_tokens"] == report.trained_tokens
        assert metrics == pytest.approx(report.metrics(), rel=1e-4, abs=1e-6)
        for name in alone:
            torch.testing.assert_close(state[name], alone[name], rtol=1e-4, atol=1e-5)
    for name in alone:
        assert torch.equal(two_ranks[0][case][1][name], two_ranks[1][case][1][name])


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), 2, Path(sys.argv[2]), CASES)
