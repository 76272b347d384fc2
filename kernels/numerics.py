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
from functools import cache
from pathlib import Path

import torch

ID_LENGTH = 16
"""Hex digits of an id: 64 bits, enough for the few builds and hosts of a deployment and short enough for a log line."""

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
