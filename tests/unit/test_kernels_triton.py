"""The Triton kernels without a GPU: they compile for Hopper and Blackwell, and the interpreter's shim is needed.

What the kernels compute is checked in `test_kernels_checks.py` (interpreter). Nothing here is about speed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from odradek.kernels.aot import ARCHITECTURES, DTYPES, TABLE, cases, table

SECONDS = 240
"""Deadline of one interpreter run: twelve checks take some fifteen seconds on a quiet core."""

SPILLING = {f"attention.attend.d{width}.fp32.sm_{a}" for width in (64, 128) for a in ARCHITECTURES}
"""Known to spill: wide float32 heads, whose exact products run on the plain units."""

MATMUL_FREE = ("norm.", "moe.combine")
"""Kernels that multiply no matrices."""


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, object]]:
    rows = table()["kernels"]
    assert isinstance(rows, dict)
    return rows


@pytest.fixture(scope="module")
def committed() -> dict[str, object]:
    found = json.loads(TABLE.read_text())
    assert isinstance(found, dict)
    return found


def test_every_kernel_compiles_for_both_architectures(compiled: dict[str, dict[str, object]]) -> None:
    expected = {f"{case.name}.sm_{architecture}" for case in cases() for architecture in ARCHITECTURES}
    assert set(compiled) == expected
    assert len(expected) == 9 * len(DTYPES) * len(ARCHITECTURES)


def test_committed_table_names_exactly_these_kernels_with_the_same_matmul(
    compiled: dict[str, dict[str, object]], committed: dict[str, object]
) -> None:
    rows = committed["kernels"]
    assert isinstance(rows, dict)
    assert {name: row["matmul"] for name, row in rows.items()} == {
        name: row["matmul"] for name, row in compiled.items()
    }


def test_committed_table_is_what_this_triton_compiles(
    compiled: dict[str, dict[str, object]], committed: dict[str, object]
) -> None:
    if committed["triton"] != triton.__version__:
        pytest.skip(f"table is of triton {committed['triton']}, this is {triton.__version__}")
    assert committed["kernels"] == compiled


def test_bf16_matmuls_use_the_tensor_unit_of_their_generation(compiled: dict[str, dict[str, object]]) -> None:
    unit = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
    for name, row in compiled.items():
        if ".bf16." in name and not name.startswith(MATMUL_FREE):
            assert row["matmul"] == unit[int(name.rpartition("_")[2])], name


def test_no_kernel_spills_but_the_known_ones(compiled: dict[str, dict[str, object]]) -> None:
    assert {name for name, row in compiled.items() if row["spilled_bytes"]} == SPILLING


PLAIN_DOT = """
import sys, torch, triton, triton.language as tl
@triton.jit
def product(a, b, out):
    r = tl.arange(0, 16)
    at = r[:, None] * 16 + r[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)).to(tl.bfloat16))
if sys.argv[1] == "mended":
    from odradek.kernels.interpreting import mend_interpreter
    mend_interpreter()
g = torch.Generator().manual_seed(0)
a, b = (torch.randn(16, 16, generator=g).bfloat16() for _ in range(2))
out = torch.zeros(16, 16, dtype=torch.bfloat16)
product[(1,)](a, b, out)
print(torch.equal(out, (a.float() @ b.float()).bfloat16()))
"""


@pytest.mark.parametrize("mended", [True, False])
def test_the_interpreter_is_right_about_bf16_only_when_mended(mended: bool, tmp_path: Path) -> None:
    """When the unmended run becomes right, a newer triton has mended itself: drop `interpreting.py`."""
    script = tmp_path / "dot.py"
    script.write_text(PLAIN_DOT)
    command = [sys.executable, "-W", "ignore", str(script), "mended" if mended else "plain"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.strip() == str(mended)
