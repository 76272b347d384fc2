"""Every process of the product that writes or shows content has the keys; the others can't, by what they are given."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
WITHOUT_KEYS = {
    ("actors/controller/actor.py", "EventLog"): "decides from counts, verdicts and offsets",
    ("actors/inference/serving.py", "EventLog"): "follows weights",
    ("actors/notary/actor.py", "EventLog"): "chains records as they are stored",
    ("actors/trainer/checkpoint.py", "BlobStore"): "weights are nobody's",
    ("infra/cluster/branch.py", "EventLog"): "reads configurations and versions",
    ("infra/cluster/policy.py", "EventLog"): "reads versions",
    ("infra/cli/audit.py", "EventLog"): "checks records as they are stored",
    ("infra/telemetry/service.py", "EventLog"): "counts; what it shows leaves the deployment",
    ("infra/cli/task_check.py", "BlobStore"): "a store in memory, for a task of the person at the terminal",
}
"""Who opens log or objects without keys, and why that is right: it can show nobody's content."""


def opened_without_keys() -> set[tuple[str, str]]:
    found = set()
    for room in ("actors", "infra"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                    continue
                if node.func.id in ("EventLog", "BlobStore") and not any(one.arg == "keys" for one in node.keywords):
                    found.add((str(path.relative_to(ROOT)), node.func.id))
    return found


def test_whoever_opens_log_or_objects_without_keys_is_known_and_shows_no_content() -> None:
    """A new reader takes `log_of(deployment)` or `opened_log(context)`; one that goes without keys is named here."""
    assert opened_without_keys() - set(WITHOUT_KEYS) == set()
