"""Compiling every Triton kernel for Hopper (sm_90) and Blackwell (sm_100) on a machine without a GPU.

`python -m odradek.kernels.aot` writes `aot_table.json`: for each kernel, dtype and architecture the registers a thread,
shared memory, spilled bytes and which matmul instruction the compiler chose. `--check` compares instead of writing. A
change in the table is a change to look at in review: a spill, or a matmul that silently fell back from the tensor unit.
The table says that kernels compile and what they take; it says nothing about speed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odradek.kernels.errors import KernelError

TABLE = Path(__file__).resolve().parent / "aot_table.json"

ARCHITECTURES = (90, 100)
"""Compute capabilities, times ten: Hopper and Blackwell data-centre parts."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""Triton's name of each dtype that the kernels take, and torch's."""

HEAD_WIDTHS = (32, 64, 128)
"""Heads of our small policy and of public checkpoints; the attention kernel is compiled for each."""

EVEN_SIZES = frozenset({"K", "H", "F", "O_", "V", "D"})
"""Sizes compiled as multiples of 16, like every pointer: so a launch specialises them for real models, and without it
no load is wide enough to be kept in flight."""

GROUP = 2
"""Query heads a key head in the compiled attention kernel."""

TOP_K = 2
"""Experts a token in the compiled expert kernels."""

CUOBJDUMP_SECONDS = 60
"""Deadline for reading one cubin; it takes milliseconds."""

MATMULS = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
"""PTX matmuls, newest first. A kernel in float32 has none: its exact products run on the plain units."""


@dataclass(frozen=True, slots=True)
class Case:
    """One compilation: a kernel with its argument types, compile-time arguments and launch options."""

    name: str
    function: Any
    types: dict[str, str]
    constants: dict[str, int]
    options: dict[str, Any]


def _types(function: Any, element: str, constants: dict[str, int], fixed: dict[str, str]) -> dict[str, str]:
    """Argument types: pointers to the element type, int32 sizes, unless `fixed` says otherwise."""
    return {
        name: "constexpr" if name in constants else fixed.get(name, f"*{element}" if name.endswith("_ptr") else "i32")
        for name in function.arg_names
    }


def cases() -> Iterator[Case]:
    """Every kernel in every dtype, with the very constants that the launchers use."""
    from odradek.kernels.attention import gpu as attention
    from odradek.kernels.logprob import gpu as logprob
    from odradek.kernels.moe import gpu as moe
    from odradek.kernels.norm import gpu as norm
    from odradek.kernels.rows import gpu as rows

    slots = {"order_ptr": "*i64"} | {f"block_{part}_ptr": "*i32" for part in ("expert", "start", "end")}
    blocks = {f"{part}_ptr": "*i32" for part in ("positions", "block_row", "block_count", "block_table", "tile_rows")}
    blocks |= {"lse_ptr": "*fp32", "scale": "fp32"}
    scores = {"targets_ptr": "*i64", "logprob_ptr": "*fp32", "entropy_ptr": "*fp32", "temperature": "fp32"}
    top_k, mix = {"TOP_K": TOP_K}, {"weights_ptr": "*fp32"}

    kernels: list[tuple[str, Any, dict[str, int], dict[str, Any], dict[str, str]]] = [
        ("rows.linear", rows.linear_kernel, rows.BLOCKS, rows.OPTIONS, {}),
        (
            "norm.rms_norm",
            norm.rms_norm_kernel,
            {"BLOCK_H": 128},
            norm.OPTIONS,
            {"eps": "fp32", "inverse_ptr": "*fp32"},
        ),
        ("logprob.token_logprobs", logprob.token_logprobs_kernel, logprob.BLOCKS, logprob.OPTIONS, scores),
        ("moe.gate_up", moe.gate_up_kernel, moe.BLOCKS | top_k, moe.OPTIONS, slots),
        ("moe.down", moe.down_kernel, moe.BLOCKS, moe.OPTIONS, slots),
        ("moe.combine", moe.combine_kernel, moe.COMBINE_BLOCK | top_k, moe.COMBINE_OPTIONS, mix),
    ]
    for width in HEAD_WIDTHS:
        constants = attention.constants(GROUP, width)
        kernels.append((f"attention.attend.d{width}", attention.attend_kernel, constants, attention.OPTIONS, blocks))
    for name, function, constants, options, fixed in kernels:
        for element in DTYPES:
            yield Case(f"{name}.{element}", function, _types(function, element, constants, fixed), constants, options)


def _usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local bytes a thread, read from the compiled code by the `cuobjdump` that triton brings."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CUOBJDUMP_SECONDS, check=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout))
    if len(found) != 3:
        raise KernelError(f"cuobjdump: expected REG, STACK and LOCAL, found {sorted(found)}; its format has changed")
    return {"registers": int(found["REG"]), "spilled_bytes": int(found["STACK"]) + int(found["LOCAL"])}


def compile_case(case: Case, architecture: int) -> dict[str, object]:
    """Compile one case for one architecture and report what it takes."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(case.function.arg_names)
        if name.endswith("_ptr") or name in EVEN_SIZES
    }
    source = ASTSource(fn=case.function, signature=case.types, constexprs=case.constants, attrs=even)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=case.options)
    ptx = compiled.asm["ptx"]
    return _usage(compiled.asm["cubin"]) | {
        "shared_bytes": int(compiled.metadata.shared),
        "matmul": next((name for name in MATMULS if name in ptx), "none"),
    }


def table() -> dict[str, object]:
    """Compile everything; about a second a case."""
    import triton

    rows = {
        f"{case.name}.sm_{architecture}": compile_case(case, architecture)
        for case in cases()
        for architecture in ARCHITECTURES
    }
    return {"triton": str(triton.__version__), "kernels": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="compare with the committed table, write nothing")
    check: bool = parser.parse_args().check
    text = json.dumps(table(), indent=1, sort_keys=True) + "\n"
    if not check:
        TABLE.write_text(text)
        print(f"wrote {TABLE.name}")
        return 0
    if text == TABLE.read_text():
        print(f"{TABLE.name} is up to date")
        return 0
    print(
        f"{TABLE.name} differs from what compiles now; run without --check and look at the difference", file=sys.stderr
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
