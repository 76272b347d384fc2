"""Loads a run into an MLflow server: traces by OTLP, curves by its REST interface. Any collector takes the traces.

Both are public, versioned interfaces, so that MLflow itself need not be importable here. Ids of traces and spans are
those of the log: loading twice gives the same traces.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from odradek.actors.telemetry.exporter import otlp_exporter
from odradek.infra.dashboard.errors import DashboardError
from odradek.infra.dashboard.server import DIRECT
from odradek.infra.observe.curves import CurvePoint

REQUEST_S = 60.0
"""Seconds one request may take: SQLite writes a batch of spans in about one, on a busy machine in many."""
SPANS_A_REQUEST = 200
"""Spans sent together. Too few: a transaction for each. Too many: the request is larger than the server takes."""
METRICS_A_REQUEST = 1000
"""The server's own limit."""


class TraceSender:
    """Sends finished spans to an OTLP collector, each request acknowledged: nothing is dropped."""

    def __init__(self, address: str, headers: dict[str, str] | None = None, timeout_s: float = REQUEST_S) -> None:
        self.address = address
        self._exporter = otlp_exporter(address, headers, timeout_s)
        self._waiting: list[ReadableSpan] = []
        self.spans = 0

    def send(self, spans: Iterable[ReadableSpan]) -> None:
        """Queue spans; full requests go out."""
        self._waiting += spans
        while len(self._waiting) >= SPANS_A_REQUEST:
            self._export(self._waiting[:SPANS_A_REQUEST])
            del self._waiting[:SPANS_A_REQUEST]

    def flush(self) -> None:
        """Send what waits."""
        if self._waiting:
            self._export(self._waiting)
            self._waiting.clear()

    def _export(self, spans: Sequence[ReadableSpan]) -> None:
        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise DashboardError(
                f"dashboard: {self.address} did not take {len(spans)} spans: is it an OTLP/HTTP collector? See its log"
            )
        self.spans += len(spans)


class MlflowClient:
    """One experiment on one server."""

    def __init__(self, address: str, experiment: str) -> None:
        self._address = address
        self.experiment_id: str = self._post("experiments/create", {"name": experiment})["experiment_id"]
        self.traces = TraceSender(address, {"x-mlflow-experiment-id": self.experiment_id})

    @property
    def traces_url(self) -> str:
        """The page of the traces."""
        return f"{self._address}/#/experiments/{self.experiment_id}/traces"

    def run_url(self, run_id: str) -> str:
        """The page of a run's curves."""
        return f"{self._address}/#/experiments/{self.experiment_id}/runs/{run_id}/model-metrics"

    def log_run(self, name: str, points: Sequence[CurvePoint], parameters: dict[str, str]) -> str:
        """A finished run with these curves; returns its id."""
        begin = min((point.time_ms for point in points), default=0)
        end = max((point.time_ms for point in points), default=0)
        created = self._post(
            "runs/create", {"experiment_id": self.experiment_id, "run_name": name, "start_time": begin}
        )
        run_id: str = created["run"]["info"]["run_id"]
        params = [{"key": key, "value": value[:500]} for key, value in parameters.items()]
        self._post("runs/log-batch", {"run_id": run_id, "params": params})
        for first in range(0, len(points), METRICS_A_REQUEST):
            metrics = [
                {"key": point.name, "value": point.value, "timestamp": point.time_ms, "step": point.step}
                for point in points[first : first + METRICS_A_REQUEST]
            ]
            self._post("runs/log-batch", {"run_id": run_id, "metrics": metrics})
        self._post("runs/update", {"run_id": run_id, "status": "FINISHED", "end_time": end})
        return run_id

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self._address}/api/2.0/mlflow/{path}",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with DIRECT.open(request, timeout=REQUEST_S) as answer:
                found: dict[str, Any] = json.loads(answer.read() or b"{}")
                return found
        except urllib.error.HTTPError as error:
            told = error.read()[:300].decode("utf-8", "replace")
            raise DashboardError(f"dashboard: MLflow refused {path}: {error.code} {told}") from error
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise DashboardError(f"dashboard: MLflow at {self._address} did not answer {path}: {error}") from error
