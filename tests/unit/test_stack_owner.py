"""One run has a data folder at a time: another is refused before it starts anything, and a dead one holds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from odradek.infra.errors import UsageError
from odradek.infra.stack.state import check_not_owned, owned

HOLDER = """
import sys, time
from pathlib import Path
from odradek.infra.stack.state import owned
with owned(Path(sys.argv[1]), "a run"):
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_second_run_on_the_same_folder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    check_not_owned(tmp_path)
    with owned(tmp_path, "a run"):
        wanted = rf"^a run \(process {os.getpid()}\) has {tmp_path} and stops"
        with pytest.raises(UsageError, match=wanted) as refused, owned(tmp_path, "a run"):
            pass
        assert "\n" not in str(refused.value) and "--data" in str(refused.value)
        with pytest.raises(UsageError, match="has "):
            check_not_owned(tmp_path)
        with owned(tmp_path / "other", "a run"):
            pass
    check_not_owned(tmp_path)
    with owned(tmp_path, "a run"):
        pass


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=rf"a run \(process {holder.pid}\)"):
            check_not_owned(tmp_path)
        holder.kill()
    check_not_owned(tmp_path)


@pytest.mark.parametrize("command", ["up", "demo", "train"])
def test_up_demo_and_train_start_nothing_on_a_folder_that_a_run_has(tmp_path: Path, command: str) -> None:
    """The run would stop the services under whoever joined it."""
    line = [sys.executable, "-m", "odradek.infra.cli.main", command, "--data", str(tmp_path)]
    with owned(tmp_path, "a run"):
        done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"odradek: a run (process {os.getpid()}) has {tmp_path} ")
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]
