"""The metrics page: Prometheus families from a run's folds and the actors' own words.

`NAMES` is the whole list, with what each counts; a test holds that a page has these and no others. Pure but for
`MetricsServer`, which answers scrapes on loopback from the newest picture: a scrape reads nothing itself, so that
nobody's scrape interval is a load on the broker. Totals that come from sessions.v1 count from where the serving process
began to follow; all others count the whole log.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from odradek.infra.observe.actors import ActorView
from odradek.infra.observe.fold import RunFold
from odradek.infra.observe.frame import Frame, frame
from odradek.infra.observe.pending import Pending, pending
from odradek.infra.observe.sessions import SessionBook
from odradek.infra.observe.waits import AGE, TABLE
from odradek.infra.telemetry.errors import MetricsPortTaken

LOOPBACK = "127.0.0.1"

Kind = Literal["gauge", "counter"]
Sample = tuple[Sequence[str], float]

NAMES: dict[str, tuple[Kind, tuple[str, ...], str]] = {
    "odradek_sessions_in_flight": ("gauge", ("origin",), "Sessions opened and not ended; closed groups' left out"),
    "odradek_sessions_ended": ("counter", ("origin", "end"), "Sessions that ended, by how"),
    "odradek_turns": ("counter", (), "Turns sampled"),
    "odradek_sampled_tokens": ("counter", ("version",), "Tokens sampled, by the turn's newest weight version"),
    "odradek_tool_calls": ("counter", ("tool", "error"), "Tool calls with a logged result"),
    "odradek_rollouts": ("gauge", ("version",), "Graded RL sessions, by the oldest version that sampled a token"),
    "odradek_solve_rate": ("gauge", ("version",), "Share of those that passed all hidden tests"),
    "odradek_reward_mean": ("gauge", ("version",), "Mean total reward of those"),
    "odradek_held_out_sessions": ("gauge", ("version", "set"), "Graded evaluation sessions"),
    "odradek_held_out_solve_rate": ("gauge", ("version", "set"), "Share of those that passed all hidden tests"),
    "odradek_rewards": ("counter", ("verdict",), "Verdicts of the graders: assigned or ungraded"),
    "odradek_groups_open": ("gauge", (), "Groups opened and neither sealed nor discarded"),
    "odradek_groups_sealed": ("counter", (), "Groups sealed, evaluations included"),
    "odradek_groups_discarded": ("counter", ("reason",), "Groups given up by the controller"),
    "odradek_groups_left_out": ("counter", ("reason",), "Sealed groups that assembly did not train on"),
    "odradek_batches": ("counter", (), "Batches assembled"),
    "odradek_steps": ("counter", (), "Training steps committed"),
    "odradek_trained_members": ("counter", ("versions_behind",), "Members of batches, by staleness when trained"),
    "odradek_expected_staleness": ("gauge", (), "Versions behind that the controller expects of new groups"),
    "odradek_weight_version": ("gauge", ("state",), "Newest version published; version made current"),
    "odradek_replica_version": ("gauge", ("replica",), "Version that an inference actor last said it serves"),
    "odradek_consumer_lag": ("gauge", ("consumer", "unit"), "What a consumer has not handled yet"),
    "odradek_oldest_wait_seconds": ("gauge", ("host", "session", "what"), "The longest wait of a session on a host"),
    AGE: ("gauge", ("wait", "owner"), "Age of the oldest wait of a kind, as the log shows it"),
    "odradek_waits_late": ("gauge", ("wait",), "Waits of a kind that are past their deadline"),
    "odradek_actor_up": ("gauge", ("actor",), "1 if the actor answered the newest look"),
    "odradek_actor_busy_seconds": ("counter", ("actor",), "Seconds of work since the actor began; parallel adds up"),
    "odradek_actor_work_rate": ("gauge", ("actor",), "Seconds of work per second between the two newest looks"),
    "odradek_actor_queue": ("gauge", ("actor", "queue"), "What an actor holds: running, waiting, live, active, tasks"),
    "odradek_log_records": ("counter", ("type",), "Decodable records, by event type"),
    "odradek_suspect_stamps": ("gauge", (), "Records with a clock that their neighbours on the log contradict"),
    "odradek_picture_time_seconds": ("gauge", (), "When the numbers on this page were taken, seconds since 1970"),
}
"""Name, kind, labels and meaning. Counters appear on the page with `_total` at the end, as Prometheus has it."""

QUEUES = {
    "running": "running",
    "waiting": "waiting",
    "live": "live",
    "active": "active",
    "waiting_tasks": "waiting tasks",
    "open_groups": "open groups",
}
"""Parts of an actor's state that are queues, and their label."""


def collect(fold: RunFold, book: SessionBook, views: Sequence[ActorView], now_ms: int) -> list[Metric]:
    """The page of this moment."""
    picture = frame(fold, book, views, now_ms)
    samples: dict[str, Iterable[Sample]] = {
        **_sessions(picture, book),
        **_learning(picture, fold),
        **_groups(fold),
        **_waits(pending(fold, book, now_ms)),
        **_actors(picture),
        "odradek_log_records": [((kind,), count) for kind, count in sorted((fold.events + book.events).items())],
        "odradek_suspect_stamps": [((), picture.suspect_stamps)],
        "odradek_picture_time_seconds": [((), now_ms / 1000)],
    }
    return [_family(name, samples[name]) for name in NAMES]


def _family(name: str, samples: Iterable[Sample]) -> Metric:
    kind, labels, meaning = NAMES[name]
    make = GaugeMetricFamily if kind == "gauge" else CounterMetricFamily
    family = make(name, meaning, labels=list(labels))
    for values, number in samples:
        family.add_metric(list(values), float(number))
    return family


def _sessions(picture: Frame, book: SessionBook) -> dict[str, Iterable[Sample]]:
    return {
        "odradek_sessions_in_flight": [((origin,), count) for origin, count in picture.in_flight.items()],
        "odradek_sessions_ended": [((origin, end), count) for (origin, end), count in sorted(book.ended.items())],
        "odradek_turns": [((), book.turns)],
        "odradek_sampled_tokens": [((str(version),), count) for version, count in sorted(book.sampled.items())],
        "odradek_tool_calls": [
            ((tool, str(error).lower()), count) for (tool, error), count in sorted(book.calls.items())
        ],
    }


def _learning(picture: Frame, fold: RunFold) -> dict[str, Iterable[Sample]]:
    trained = [row for row in picture.versions if row.training.count]
    held_out = [(str(row.version), name, rate) for row in picture.versions for name, rate in row.held_out.items()]
    published = max(fold.published, default=None)
    versions = [("published", published), ("current", fold.current)]
    return {
        "odradek_rollouts": [((str(row.version),), row.training.count) for row in trained],
        "odradek_solve_rate": [((str(row.version),), row.training.rate) for row in trained],
        "odradek_reward_mean": [((str(row.version),), row.reward) for row in trained],
        "odradek_held_out_sessions": [((version, name), rate.count) for version, name, rate in held_out],
        "odradek_held_out_solve_rate": [((version, name), rate.rate) for version, name, rate in held_out],
        "odradek_rewards": [
            (("assigned",), len(fold.verdicts)),
            (("ungraded",), sum(fold.ungraded.values())),
        ],
        "odradek_weight_version": [((state,), version) for state, version in versions if version is not None],
        "odradek_replica_version": [((name,), report.version) for name, report in sorted(fold.replicas.items())],
    }


def _groups(fold: RunFold) -> dict[str, Iterable[Sample]]:
    return {
        "odradek_groups_open": [((), len(fold.open_groups))],
        "odradek_groups_sealed": [((), fold.sealed)],
        "odradek_groups_discarded": [((reason,), count) for reason, count in sorted(fold.discarded.items())],
        "odradek_groups_left_out": [((reason,), count) for reason, count in sorted(fold.dropped.items())],
        "odradek_batches": [((), len(fold.batches))],
        "odradek_steps": [((), len(fold.steps))],
        "odradek_trained_members": [((str(behind),), count) for behind, count in sorted(fold.staleness.items())],
    }


def _waits(waits: Sequence[Pending]) -> dict[str, Iterable[Sample]]:
    """Every kind that the log can show, at 0 where none waits: an alert needs the line."""
    kinds = [wait for wait in TABLE if wait.metric == AGE]
    ages = {one.wait: one.age_s for one in reversed(waits)}
    late = Counter(one.wait for one in waits if one.late)
    return {
        AGE: [((kind.name, kind.owner), ages.get(kind.name, 0.0)) for kind in kinds],
        "odradek_waits_late": [((kind.name,), late[kind.name]) for kind in kinds],
    }


def _actors(picture: Frame) -> dict[str, Iterable[Sample]]:
    up = [view for view in picture.actors if view.up]
    waits = [_wait(view) for view in up if view.state.get("oldest_wait_for") and view.name.startswith("session-")]
    return {
        "odradek_consumer_lag": [((lag.consumer, lag.what), lag.count) for lag in picture.lags],
        "odradek_expected_staleness": [
            ((), view.state["expected_staleness"]) for view in up if "expected_staleness" in view.state
        ],
        "odradek_oldest_wait_seconds": waits,
        "odradek_actor_up": [((view.name,), float(view.up)) for view in picture.actors],
        "odradek_actor_busy_seconds": [((view.name,), view.state["busy_s"]) for view in up if "busy_s" in view.state],
        "odradek_actor_work_rate": [((view.name,), view.work_rate) for view in up if view.work_rate is not None],
        "odradek_actor_queue": [
            ((view.name, label), _size(view.state[part]))
            for view in up
            for part, label in QUEUES.items()
            if part in view.state
        ],
    }


def _wait(view: ActorView) -> Sample:
    session, _, what = str(view.state["oldest_wait_for"]).partition(": ")
    return (view.name, session, what), float(view.state["oldest_wait_s"])


def _size(value: Any) -> float:
    return float(len(value)) if isinstance(value, list | tuple | Mapping) else float(value)


class _Page(Collector):
    """What the registry asks at a scrape."""

    def __init__(self, newest: Callable[[], Sequence[Metric]]) -> None:
        self._newest = newest

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._newest()


class MetricsServer:
    """Serves `/metrics` on loopback from whatever `newest` returns. Start once, stop once."""

    def __init__(self, newest: Callable[[], Sequence[Metric]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Page(newest))
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def start(self, port: int | None = None) -> str:
        """Listen on this port, or a free one; returns the page's address. Raises MetricsPortTaken."""
        try:
            self._server, self._thread = start_http_server(port or 0, LOOPBACK, self._registry)
        except OSError as error:
            raise MetricsPortTaken(
                f"metrics: {LOOPBACK}:{port} can't be listened on ({error.strerror}): choose another "
                f"telemetry.prometheus_port, or leave it out for a free one"
            ) from error
        return f"http://{LOOPBACK}:{self._server.server_port}/metrics"

    def stop(self) -> None:
        """Close the port; a second time does nothing."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
        if self._thread is not None:
            self._thread.join(5)
