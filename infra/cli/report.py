"""`odradek report`: one HTML page about a run, from the log alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from odradek.infra.cli.context import Context, command_options


@click.command
@command_options
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("odradek-report.html"), show_default=True,
    help="File to write; replaced if it exists.",
)  # fmt: skip
def command(context: Context, out: Path) -> None:
    """Write one self-contained HTML page about everything on the log.

    Solve rate and reward against weight version and against compute, held-out rates with intervals, how the agent
    works, utilisation over time, what was trained on and what was not and why, events by type. Needs the broker only.
    """
    from odradek.infra.cli.log import opened_log, run
    from odradek.infra.errors import UsageError
    from odradek.infra.observe.follow import RunFollower, SessionFollower
    from odradek.infra.observe.report import render

    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: {out.parent} is not a folder")

    async def job(_tell: Callable[[str], None]) -> tuple[str, int]:
        async with opened_log(context) as event_log:
            fold = await RunFollower(event_log).refresh()
            book = await SessionFollower(event_log).refresh()
            records = sum(len(c.stamps) for c in (*fold.clocks.values(), *book.clocks.values()))
            return render(fold, book, int(time.time() * 1000)), records

    page, records = run(context, "reading the log", job)
    out.write_text(page, encoding="utf-8")
    size = len(page.encode())
    context.result(
        {"file": str(out), "bytes": size, "records": records}, f"{out}: {size // 1024} KiB, from {records} records"
    )
