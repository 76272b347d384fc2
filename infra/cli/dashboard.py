"""`odradek dashboard`: the last run's traces and curves in MLflow, loaded from the log."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import Context, command_options

if TYPE_CHECKING:
    from odradek.infra.dashboard.mlflow import TraceSender
    from odradek.infra.observe.fold import RunFold


class Loaded(msgspec.Struct, frozen=True):
    """What the dashboard holds."""

    address: str
    traces: str
    curves: str
    """Empty where only traces were sent."""
    sessions: int
    spans: int
    points: int


@click.command
@command_options
@click.option("--sessions", default=200, show_default=True, help="Newest sessions to load as traces; 0 for all.")
@click.option("--port", type=click.IntRange(1, 65535), help="Loopback port [a free one].")
@click.option("--environment", type=click.Path(path_type=Path), help="MLflow's own environment [.venv-dashboard].")
@click.option("--load-only", is_flag=True, help="Load, say what was loaded, and stop the server again.")
@click.option("--otlp", metavar="URL", help="Send the traces to this collector (Phoenix, Jaeger, Tempo) instead.")
def command(
    context: Context, sessions: int, port: int | None, environment: Path | None, load_only: bool, otlp: str | None
) -> None:
    """Open traces and curves of what is on the log in MLflow, on loopback, until Ctrl-C.

    Everything is rebuilt from the log, whether or not a collector was configured when it ran. MLflow is installed into
    an environment of its own on first use. Its store is a copy: it is made anew each time and nothing reads it back.
    With --otlp nothing is installed or started: the traces go to a collector that runs already, by OTLP/HTTP.
    """
    from odradek.infra.cli.log import broker

    if otlp is None:
        _tell_of_mlflow(context, environment)
    broker(context.config)  # without a log there is nothing to install for
    if otlp is not None:
        _to_collector(context, otlp, sessions)
    else:
        _in_mlflow(context, sessions, port, environment, load_only)


def _tell_of_mlflow(context: Context, folder: Path | None) -> None:
    """Whoever has to start a broker first should know what comes after it: MLflow needs a package index, and room."""
    from odradek.infra.dashboard import environment as mlflow_environment

    folder = folder or mlflow_environment.default_folder()
    if not mlflow_environment.installed(folder):
        context.say(
            f"MLflow is not in {folder} yet: once the log answers it is installed there from the package index "
            f"(about 620 MB); --otlp URL does without"
        )


def _to_collector(context: Context, address: str, sessions: int) -> None:
    from odradek.infra.dashboard.mlflow import TraceSender

    sender = TraceSender(address)
    count, _ = asyncio.run(_send_traces(context, sender, sessions))
    loaded = Loaded(address, address, "", count, sender.spans, 0)
    context.result(loaded, f"traces of {count} sessions ({sender.spans} spans) sent to {address}")


def _in_mlflow(context: Context, sessions: int, port: int | None, environment: Path | None, load_only: bool) -> None:
    from odradek.infra.config.services import data_dir
    from odradek.infra.dashboard import environment as mlflow_environment
    from odradek.infra.dashboard.mlflow import MlflowClient
    from odradek.infra.dashboard.server import serving
    from odradek.infra.observe.curves import curves

    program = mlflow_environment.ensure(environment or mlflow_environment.default_folder(), context.say)
    with serving(program, data_dir(context.config), context.say, port) as address:
        client = MlflowClient(address, "odradek")
        count, fold = asyncio.run(_send_traces(context, client.traces, sessions))
        points = curves(fold)
        lanes = {name: str(msgspec.to_builtins(lane)) for name, lane in fold.lanes.items()}
        page = client.run_url(client.log_run("the log", points, lanes))
        loaded = Loaded(address, client.traces_url, page, count, client.traces.spans, len(points))
        context.result(
            loaded,
            f"traces of {count} sessions ({loaded.spans} spans): {loaded.traces}\n"
            f"curves ({loaded.points} points): {loaded.curves}",
        )
        if not load_only:
            if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
                click.launch(loaded.traces)
            context.say("serving until Ctrl-C")
            threading.Event().wait()


async def _send_traces(context: Context, sender: TraceSender, sessions: int) -> tuple[int, RunFold]:
    """Rebuild and send; returns how many sessions, and what the log folded to."""
    from odradek.actors.telemetry.spans import SpanMaker
    from odradek.actors.tools.redact import redact
    from odradek.infra.cli.log import opened_log
    from odradek.infra.observe.follow import RunFollower, SessionFollower
    from odradek.infra.observe.traces import later_spans, newest_sessions, session_traces

    maker = SpanMaker.of("odradek", redact)
    async with opened_log(context) as event_log:
        context.say("reading the log …")
        fold = await RunFollower(event_log).refresh()
        book = await SessionFollower(event_log).refresh()
        wanted = newest_sessions(book, sessions)
        said = time.monotonic()
        async for spans in session_traces(event_log, book, wanted, maker):
            await asyncio.to_thread(sender.send, spans)
            if time.monotonic() - said > 2:
                said = time.monotonic()
                context.say(f"{sender.spans} spans loaded …")
    sender.send(later_spans(fold, wanted, maker))
    sender.flush()
    return len(wanted), fold
