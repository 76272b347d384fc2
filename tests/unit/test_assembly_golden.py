"""Assembly version 1 gives for ever the bytes it gave: batches on a log are rebuilt by the code that trained them."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import assembly_golden as golden

from odradek.streams import codec

TESTS = Path(__file__).parents[1]
CASES = golden.stored()
RENEW = "run in tests/: python -m support.assembly_golden"


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_v1_gives_the_very_bytes_it_gave(case: golden.Case) -> None:
    """Guarantee 5. A rule that must change belongs into v2."""
    assert golden.differences(case) == [], RENEW


def test_every_case_is_stored_and_its_inputs_are_never_edited() -> None:
    stored = [{name: value for name, value in case.items() if name != "outputs"} for case in CASES]
    assert json.loads(json.dumps(golden.cases())) == stored, RENEW


def test_the_golden_cases_cover_every_reason_method_and_kind_of_leaf() -> None:
    reasons = {reason for case in CASES for reason in case["outputs"]["dropped"].values()}
    assert reasons == {"flat", "undecodable", "origin", "consent", "infrastructure"}
    assert {case["config"].get("advantage", "dr_grpo") for case in CASES} == {"dr_grpo", "grpo", "rloo"}
    assert all(case["outputs"]["leaves"] == ["rebuilt"] and case["outputs"]["reassembled"] for case in CASES)
    members = [m for case in CASES for m in _batch(case).members]
    assert any(m.masked_stale_tokens for m in members) and any(m.truncated for m in members)
    assert any(m.subject for m in members) and any(m.newest_version > m.oldest_version for m in members)


def _batch(case: golden.Case):  # type: ignore[no-untyped-def]
    _, batch = codec.decode(base64.b64decode(case["outputs"]["batch"]), "batch.assembled.v1")
    return batch


@pytest.mark.parametrize("seed", ["0", "4711"])
def test_another_process_gives_the_same_bytes(seed: str) -> None:
    """Nothing depends on the order of a set or of hashes."""
    program = (
        "import json; from support import assembly_golden as g;"
        "print(json.dumps([g.differences(case) for case in g.stored()]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(done.stdout) == [[] for _ in CASES]


def test_renewing_refuses_to_change_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "v1.json"
    monkeypatch.setattr(golden, "FILE", file)
    assert golden.main([]) == 0 and golden.stored() == CASES, "from nothing it makes the very file"
    rows = golden.stored()
    rows[0]["outputs"]["merkle_root"] = "0" * 64
    file.write_text(json.dumps(rows))
    assert golden.main([]) == 1 and golden.stored() == rows
    assert golden.main(["--overwrite"]) == 0 and golden.stored() == CASES
