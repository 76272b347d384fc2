"""The dashboard's parts that are ours: curves, what is asked of MLflow's interfaces, its environment."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.folded import folded
from support.run_log import small_run

from odradek.actors.telemetry.spans import SpanMaker
from odradek.infra.dashboard.environment import LOCK, STAMP, ensure
from odradek.infra.dashboard.errors import DashboardError
from odradek.infra.dashboard.mlflow import SPANS_A_REQUEST, MlflowClient, TraceSender
from odradek.infra.observe.curves import CurvePoint, curves
from odradek.infra.observe.traces import later_spans, newest_sessions


@pytest.fixture
def mlflow() -> Iterator[tuple[str, list[tuple[str, dict[str, Any], str]]]]:
    """The few paths of MLflow's interfaces that are used, remembering what came."""
    came: list[tuple[str, dict[str, Any], str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            spans = self.path == "/v1/traces"
            came.append(
                (self.path, {} if spans else json.loads(body), self.headers.get("x-mlflow-experiment-id") or "")
            )
            answer = json.dumps({"experiment_id": "7", "run": {"info": {"run_id": "r1"}}}).encode()
            refused = b'"refuse"' in body
            self.send_response(400 if refused else 200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", came
    server.shutdown()
    server.server_close()


def test_curves_are_by_version_and_every_step_says_its_numbers_at_the_version_it_made() -> None:
    fold, _ = folded(small_run())
    found = {(point.name, point.step): point.value for point in curves(fold)}
    assert found["rollouts/solve_rate", 0] == fold.by_version[0].solve_rate
    assert found["held_out_solve_rate/new_combinations", 3] == fold.evaluations[3, "new_combinations"].solve_rate
    assert found["held_out_sessions/new_combinations", 3] == 4
    assert found["training/entropy", 1] == fold.steps[0].metrics["entropy"]
    assert ("rollouts/solve_rate", 3) not in found  # no RL rollout was sampled under it


def test_a_run_is_an_experiment_with_parameters_and_all_points(mlflow: Any) -> None:
    address, came = mlflow
    client = MlflowClient(address, "odradek")
    points = [CurvePoint("a", step, step / 10, 1000 + step) for step in range(2500)]
    assert client.log_run("the log", points, {"lane": "x" * 9000}) == "r1"
    paths = [path.removeprefix("/api/2.0/mlflow/") for path, _, _ in came]
    assert paths == [
        "experiments/create", "runs/create", "runs/log-batch", "runs/log-batch", "runs/log-batch", "runs/log-batch",
        "runs/update",
    ]  # fmt: skip
    sent = [metric for path, body, _ in came for metric in body.get("metrics", [])]
    assert [(m["step"], m["value"]) for m in sent] == [(point.step, point.value) for point in points]
    assert came[-1][1] == {"run_id": "r1", "status": "FINISHED", "end_time": 3499}
    assert client.run_url("r1") == f"{address}/#/experiments/7/runs/r1/model-metrics"


def test_spans_go_to_the_experiment_in_bounded_requests(mlflow: Any) -> None:
    address, came = mlflow
    fold, book = folded(small_run())
    spans = later_spans(fold, newest_sessions(book, 0), SpanMaker.of("test"))
    assert len(spans) == 72 + 3 + 3
    client = MlflowClient(address, "odradek")
    client.traces.send(spans * 10)
    client.traces.flush()
    requests = [header for path, _, header in came if path == "/v1/traces"]
    assert client.traces.spans == 780
    assert requests == ["7"] * -(-780 // SPANS_A_REQUEST)


def test_a_refusal_names_the_path_and_the_code(mlflow: Any) -> None:
    with pytest.raises(DashboardError, match=r"MLflow refused experiments/create: 400"):
        MlflowClient(mlflow[0], "refuse")


def test_a_collector_that_is_none_is_one_clear_line() -> None:
    fold, book = folded(small_run(versions=1))
    sender = TraceSender("http://127.0.0.1:9", timeout_s=0.5)
    sender.send(later_spans(fold, newest_sessions(book, 1), SpanMaker.of("test"))[:1])
    with pytest.raises(DashboardError, match=r"http://127\.0\.0\.1:9 did not take 1 spans"):
        sender.flush()


def test_a_server_that_is_gone_is_one_clear_line() -> None:
    with pytest.raises(DashboardError, match=r"MLflow at http://127\.0\.0\.1:9 did not answer experiments/create"):
        MlflowClient("http://127.0.0.1:9", "odradek")


def test_half_of_the_loaded_sessions_are_evaluations_and_the_newest_come_first() -> None:
    _, book = folded(small_run())
    chosen = newest_sessions(book, 10)
    assert len(chosen) == 10
    assert sum(book.sessions[session].origin == "eval" for session in chosen) == 5
    opened = [note for note in book.sessions.values() if note.origin == "rl"]
    newest = max(opened, key=lambda note: book.time(note, note.opened_at))
    assert newest.session_id in chosen
    assert newest_sessions(book, 0) == set(book.sessions)


def test_the_lock_has_a_hash_for_each_package_and_no_address() -> None:
    text = LOCK.read_text()
    pinned = [line for line in text.splitlines() if "==" in line and not line.lstrip().startswith("#")]
    assert len(pinned) > 50 and all(line.endswith("\\") for line in pinned)
    assert "://" not in text


def test_a_lock_that_can_not_be_installed_is_one_line_and_leaves_no_stamp(tmp_path: Path) -> None:
    said: list[str] = []
    broken = tmp_path / "broken.lock"
    broken.write_text("mlflow==3.17.2\n")  # no hash
    with pytest.raises(DashboardError, match="MLflow can't be installed") as error:
        ensure(tmp_path / "env", said.append, broken)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "env" / STAMP).exists()
    assert said and "once" in said[0]


def test_an_environment_of_the_same_lock_is_taken_as_it_is(tmp_path: Path) -> None:
    import hashlib

    folder = tmp_path / "env"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "mlflow").write_text("")
    lock = tmp_path / "some.lock"
    lock.write_text("")
    (folder / STAMP).write_text(hashlib.sha256(b"").hexdigest())
    assert ensure(folder, lambda _text: pytest.fail("nothing is to be installed"), lock) == folder / "bin" / "mlflow"
