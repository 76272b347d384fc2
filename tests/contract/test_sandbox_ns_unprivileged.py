"""Driver `ns` under the same contract as an ordinary user, when the tests themselves run as root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.geteuid() != 0, reason="test_sandbox_ns.py already runs as an ordinary user")
def test_contract_holds_for_an_ordinary_user(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "tests/support/as_nobody.py"), str(tmp_path)),
            *(sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path}/tests"),
            "tests/contract/test_sandbox_ns.py",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
