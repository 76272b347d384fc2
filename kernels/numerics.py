"""Who computed these numbers: a short id that is equal only where bits are promised to be equal.

The id covers what was seen to change the bits of the same calculation: the torch build with its BLAS, the CPU
instruction set (torch's own and the one BLAS may be held to), the thread count, the tile sizes, the dtype, and the
sources of the kernels themselves. Two processes with equal ids give equal log-probs for equal tokens and weights;
unequal ids promise nothing. The id says nothing about the weights.

Guarantee 7 (tests/GUARANTEES.md): test_engine_same_numbers.py, test_kernels_bits.py.
"""

import hashlib
import os
import re
import time
from functools import cache
from pathlib import Path

import torch

ID_LENGTH = 16
"""Hex digits of an id: 64 bits, enough for the few builds and hosts of a deployment and short enough for a log line."""

BF16_GAIN = 1.3
"""How many times faster bf16 must be than fp32 before it is used. Lower trades precision for noise of the probe, higher
ignores hosts where it helps. Units with bf16 gave 2.3, hosts without gave 0.01 (seen)."""

PROBE_SIZE = 384
"""Rows, columns and depth of the probed matmul: about 113 MFLOP, milliseconds on any host in fp32. Smaller measures the
call, not the unit."""

PROBE_RUNS = 5
"""Timed runs a dtype, of which the best counts; the first may include code generation."""

PROBE_GIVE_UP = 0.25
"""Seconds after which a dtype's probe stops early: on hosts without the unit one bf16 run takes that long."""

_BLAS_VARIABLES = ("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")


@cache
def source_digest() -> str:
    """SHA-256 over the names and contents of all kernel sources; references and tools are not in the bits."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for path in sorted(p for p in root.glob("*/*.py") if p.name != "ref.py"):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def numerics_facts(dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, str]:
    """Everything that goes into the id, readable: log it once at start so that two ids can be compared by eye."""
    from odradek.kernels.attention import units
    from odradek.kernels.rows import cpu as rows_cpu

    facts = {
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "sources": source_digest(),
    }
    if device == "cpu":
        build = re.findall(r"^\s*- (Intel.*|OpenMP.*|OpenBLAS.*)$", torch.__config__.show(), re.MULTILINE)
        facts |= {
            "build": "; ".join(build),
            "build_digest": hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:ID_LENGTH],
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "tiles": f"rows={rows_cpu.ROW_TILE} inner={rows_cpu.INNER_TILE} keys={units.TILE} queries={units.ROW_TILE}",
            **{name: os.environ[name] for name in _BLAS_VARIABLES if name in os.environ},
        }
    else:
        import triton

        facts |= {
            "triton": str(triton.__version__),
            "cuda": str(torch.version.cuda),
            "gpu": "{}.{}".format(*torch.cuda.get_device_capability(device)),
        }
    return facts


def numerics_id(dtype: torch.dtype = torch.float32, device: str = "cpu") -> str:
    """A short hash of `numerics_facts`. Call it after the thread count is set: it is read anew each time."""
    text = "\n".join(f"{name}={value}" for name, value in sorted(numerics_facts(dtype, device).items()))
    return hashlib.sha256(text.encode()).hexdigest()[:ID_LENGTH]


def _matmul_seconds(dtype: torch.dtype) -> float:
    left = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype)
    best, begun = float("inf"), time.perf_counter()
    for _ in range(PROBE_RUNS):
        start = time.perf_counter()
        torch.mm(left, left)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - begun > PROBE_GIVE_UP:
            break
    return best


@cache
def probe_cpu_dtype() -> torch.dtype:
    """The dtype this host computes in: bf16 where a matmul is `BF16_GAIN` times faster than in fp32, else fp32.

    Measured once a process. A process that must match another one takes the other's dtype instead of probing again.
    """
    gain = _matmul_seconds(torch.float32) / _matmul_seconds(torch.bfloat16)
    return torch.bfloat16 if gain >= BF16_GAIN else torch.float32
