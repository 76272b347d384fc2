"""`odradek report`: one HTML page about a run, from the log alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import click

from odradek.infra.cli.context import Context, command_options
from odradek.infra.cli.figures import GROUPS


@click.command(epilog=GROUPS)
@command_options
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("odradek-report.html"), show_default=True,
    help="File to write; replaced if it exists.",
)  # fmt: skip
@click.option("--lane", help="Only this lane, and evaluations of the policy it trains [every lane, counted together].")
def command(context: Context, out: Path, lane: str | None) -> None:
    """Write one self-contained HTML page about everything on the log, and say of each lane what became of it.

    Solve rate and reward against weight version and against compute, held-out rates with intervals, how the agent
    works, utilisation over time, what was trained on and what was not and why, events by type. Needs the broker only.
    Of a batch's step: clipped is clip_fraction and sampler gap is gap_mean (odradek batch explain --help).
    """
    from odradek.infra.cli.log import opened_log, run
    from odradek.infra.errors import UsageError
    from odradek.infra.observe.follow import RunFollower, SessionFollower
    from odradek.infra.observe.lanes import LaneFolds, LaneLine, lane_line, lane_text
    from odradek.infra.observe.report import render

    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: {out.parent} is not a folder")

    async def job(_tell: Callable[[str], None]) -> tuple[str, int, list[LaneLine]]:
        async with opened_log(context) as event_log:
            lanes = LaneFolds()
            fold = await RunFollower(event_log, lanes).refresh()
            if lane is not None and lane not in lanes.folds:
                raise UsageError(f"--lane {lane}: there is {', '.join(sorted(lanes.folds)) or 'no lane'} on the log")
            shown = fold if lane is None else lanes.folds[lane]
            sessions = SessionFollower(event_log, lambda opened: lane is None or opened.group_id in shown.groups)
            book = await sessions.refresh()
            records = sum(len(c.stamps) for c in (*shown.clocks.values(), *book.clocks.values()))
            lines = [lane_line(name, lanes.folds[name]) for name in sorted(lanes.folds) if lane in (None, name)]
            return render(shown, book, int(time.time() * 1000), lane), records, lines

    page, records, lines = run(context, "reading the log", job)
    out.write_text(page, encoding="utf-8")
    size = len(page.encode())
    context.result(
        {"file": str(out), "bytes": size, "records": records, "lanes": lines},
        "\n".join([f"{out}: {size // 1024} KiB, from {records} records", *map(lane_text, lines)]),
    )
