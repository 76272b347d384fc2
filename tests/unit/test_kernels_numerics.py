"""`numerics_id`: equal where bits are promised equal, and different when anything that changes them does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from odradek.kernels import numerics
from odradek.kernels.attention import units
from odradek.kernels.numerics import numerics_facts, numerics_id, source_digest
from odradek.kernels.rows import cpu as rows_cpu

SECONDS = 120
"""Deadline of a fresh process that imports torch: some seconds on a quiet core."""


def id_of_new_process(**environment: str) -> str:
    command = [sys.executable, "-c", "from odradek.kernels.numerics import numerics_id; print(numerics_id())"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    return done.stdout.strip()


def test_two_processes_alike_have_one_id() -> None:
    one, two = (id_of_new_process(OMP_NUM_THREADS="1") for _ in range(2))
    assert one == two and len(one) == numerics.ID_LENGTH


@pytest.mark.parametrize("name, value", [("OMP_NUM_THREADS", "2"), ("ATEN_CPU_CAPABILITY", "avx2")])
def test_threads_and_instruction_set_change_the_id(name: str, value: str) -> None:
    if name == "ATEN_CPU_CAPABILITY" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        value = "default"
    plain = {"OMP_NUM_THREADS": "1"}
    assert id_of_new_process(**plain) != id_of_new_process(**(plain | {name: value}))


def test_dtype_and_each_tile_size_change_the_id(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {numerics_id(), numerics_id(torch.bfloat16)}
    for module, name in ((rows_cpu, "ROW_TILE"), (units, "TILE"), (units, "ROW_TILE")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, 128)
            seen.add(numerics_id())
    assert len(seen) == 5


def test_sources_of_paths_are_in_the_id_and_references_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    (folder / "rows").mkdir(parents=True)
    for name in ("cpu.py", "ref.py"):
        (folder / "rows" / name).write_text("one")
    monkeypatch.setattr(numerics, "__file__", str(folder / "numerics.py"))

    def digest() -> str:
        source_digest.cache_clear()
        return source_digest()

    try:
        first = digest()
        (folder / "rows" / "ref.py").write_text("two")
        assert digest() == first
        (folder / "rows" / "cpu.py").write_text("two")
        assert digest() != first
    finally:
        source_digest.cache_clear()


def test_facts_are_readable_and_name_no_path_of_this_machine() -> None:
    facts = numerics_facts()
    assert {"torch", "build", "cpu", "threads", "tiles", "dtype", "sources"} <= set(facts)
    here = (str(Path.home()), str(Path(torch.__file__).parent), str(Path.cwd()))
    assert not any(place in value for place in here for value in facts.values())
