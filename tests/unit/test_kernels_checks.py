"""Every kernel against its float64 reference, by the checks that all paths share (`odradek.kernels.checks`)."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from odradek.kernels.checking import MismatchError, Tolerance, api_kernels, compare
from odradek.kernels.checks import CHECKS, Check, moe_expert_layer, rows_linear, rows_linear_keeps_row_bits

SECONDS = 240
"""Deadline of one subprocess: twelve checks take some ten seconds on a quiet core."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run_checks(path: str, dtype: str, **environment: str) -> list[str]:
    """Names of the checks that passed in a process of their own."""
    command = [sys.executable, "-m", "odradek.kernels.checks", "--path", path, "--dtype", dtype]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [line.removeprefix("ok ") for line in done.stdout.splitlines() if line.startswith("ok ")]


def mismatch(check: Check, dtype: torch.dtype, seed: int) -> str:
    try:
        check(api_kernels("cpu"), dtype, torch.Generator().manual_seed(seed))
    except MismatchError as error:
        return str(error)
    return ""


ALL = [check.__name__ for check in CHECKS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("check", CHECKS, ids=ALL)
def test_cpu_path_satisfies(check: Check, dtype: torch.dtype) -> None:
    assert [mismatch(check, dtype, seed) for seed in (0, 1)] == ["", ""]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_triton_kernels_satisfy_the_same_checks_in_the_interpreter(dtype: str) -> None:
    assert run_checks("interpreter", dtype, TRITON_INTERPRET="1") == ALL


def test_cpu_path_satisfies_the_same_checks_with_avx2_only() -> None:
    """Half of our hosts have no AVX-512; both torch and BLAS are held to AVX2 here."""
    assert run_checks("cpu", "float32", ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2") == ALL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cuda_path_satisfies_the_same_checks(dtype: str) -> None:
    assert run_checks("cuda", dtype) == ALL


def test_checks_catch_a_linear_that_loses_the_last_input() -> None:
    broken = replace(
        api_kernels("cpu"), linear=lambda x, w: x[:, :-1] @ w[:, :-1].t() + 0 * (x[:, -1:] @ w[:, -1:].t())
    )
    with pytest.raises(MismatchError, match=r"rows\.linear \(1, 7, 1\): 1 of 1 elements differ.*first \(0, 0\): "):
        rows_linear(broken, torch.float32, torch.Generator().manual_seed(0))


def test_checks_catch_a_linear_whose_bits_depend_on_the_batch() -> None:
    """Ordinary matmul is right in value and still fails: so the check is not vacuous on this machine."""
    plain = replace(api_kernels("cpu"), linear=lambda x, w: x @ w.t())
    rows_linear(plain, torch.float32, torch.Generator().manual_seed(0))
    with pytest.raises(MismatchError, match=r"rows\.linear rows"):
        rows_linear_keeps_row_bits(plain, torch.float32, torch.Generator().manual_seed(0))


def test_checks_catch_an_expert_layer_that_forgets_to_renormalise() -> None:
    kernels = api_kernels("cpu")
    broken = replace(kernels, expert_layer=lambda *a: kernels.expert_layer(*a[:5], False, *a[6:]))
    with pytest.raises(MismatchError, match="moe"):
        moe_expert_layer(broken, torch.float32, torch.Generator().manual_seed(0))


def test_mismatch_prints_count_worst_and_first_elements() -> None:
    expected = torch.zeros(3, 4)
    found = expected.clone()
    found[1, 2], found[2, 3] = 0.5, float("nan")
    with pytest.raises(MismatchError) as caught:
        compare("sum", found, expected, Tolerance(0.0, 1e-3))
    message = str(caught.value)
    assert "2 of 12 elements differ, worst by inf" in message
    assert "(1, 2): 0.5 for 0; (2, 3): nan for 0" in message
