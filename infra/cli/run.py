"""`odradek run`: let the agent work on a copy of a folder, then accept or reject its diff."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from odradek.infra.cli.context import EXIT_CODES, Context, Number, command_options
from odradek.infra.errors import UsageError

if TYPE_CHECKING:
    from odradek.infra.serve.job import Finished

EPILOG = f"""{EXIT_CODES} For run: 0 also when the diff was rejected; 1 when it was accepted but the folder had changed
meanwhile (then nothing is changed); 2 when its subject is erased, before or meanwhile; 3 when the session failed on our
side."""


@click.command(epilog=EPILOG)
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("request", required=False)
@click.option("--yes/--no", "accept", default=None, help="Accept or reject without asking.")
@click.option("--consent/--no-consent", default=None, help="Allow training on your sessions, or withdraw that [off].")
@click.option("--subject", help="Whose session it is [a name made from the local user's].")
@click.option("--temperature", type=Number(0, 2), help="0 is greedy [0; 1 where training is allowed].")
@click.option(
    "--sample",
    is_flag=True,
    help="Write a small generated project to FOLDER, with a bug that the demo policy can mend.",
)
@command_options
def command(
    context: Context,
    folder: Path,
    request: str | None,
    accept: bool | None,
    consent: bool | None,
    subject: str | None,
    temperature: float | None,
    sample: bool,
) -> None:
    """Let the agent do REQUEST on a copy of FOLDER, watch it, and accept or reject its diff.

    Nothing in FOLDER changes before you accept, and then all of the diff is applied or nothing. Copied are tracked and
    unignored files, at most 200 MB, never .env or key files. Your answer is logged as feedback on the session. Needs a
    running deployment (odradek up).
    """
    if sample:
        _write_sample(context, folder)
        return
    if not request or not request.strip():
        raise click.UsageError("Missing argument 'REQUEST': what should the agent do?")
    if subject is not None and not subject.strip():
        raise click.UsageError("a subject has a name")  # nobody could erase them by it
    if accept is None and (context.as_json or not sys.stdin.isatty()):
        raise UsageError("there is no terminal to ask on: say --yes or --no")
    _run(context, folder, request, accept, consent, subject, temperature)


def _write_sample(context: Context, folder: Path) -> None:
    from odradek.infra.demo.sample import write_sample

    sample = write_sample(folder)
    context.result(
        {"folder": str(folder), "request": sample.request},
        f"wrote a generated project with one bug to {folder}\nnow run: odradek run {folder} '{sample.request}'",
    )


def _run(
    context: Context,
    folder: Path,
    text: str,
    accept: bool | None,
    consent: bool | None,
    subject: str | None,
    temperature: float | None,
) -> None:
    from odradek.infra.cluster.standing import attached
    from odradek.infra.config.services import endpoints
    from odradek.infra.serve import apply, job
    from odradek.infra.serve.answers import Verdict
    from odradek.infra.serve.errors import SessionFault, refusing_erased
    from odradek.infra.serve.request import local_subject
    from odradek.infra.serve.screen import Screen
    from odradek.infra.serve.view import Line, diff_lines
    from odradek.streams.events.sessions import SessionFailed

    screen = Screen(to_stderr=context.as_json)
    recovered = apply.recover(folder) if folder.is_dir() else "nothing"
    if recovered != "nothing":
        screen.show([Line("note", f"changes that you accepted earlier were interrupted: now {recovered}")])
    request = job.Request(folder, text, subject or local_subject(), consent, temperature)
    endpoints(context.config)  # a deployment that does not run is said before anything is read
    copied = job.copy(folder)
    screen.show(job.about(copied))
    context.say("joining the deployment")
    with attached(context.config) as deployment, refusing_erased(request.subject):
        finished = asyncio.run(job.serve(deployment, request, copied, screen))
        if isinstance(finished.served.end, SessionFailed):
            raise SessionFault(
                f"session {finished.session_id} failed on our side ({finished.served.end.cause}); {folder} is untouched"
            )
        screen.show([Line("head", "")])
        screen.show(diff_lines(finished.diff) or [Line("note", "nothing was changed")])
        screen.show(_set_aside(finished))
        verdict: Verdict = "accepted" if _accepted(accept, folder, finished) else "rejected"
        asyncio.run(job.answer(deployment, request, finished, verdict))
    changed = job.settle(folder, finished, verdict)
    context.result(_as_json(finished, verdict, changed), _as_text(folder, verdict, changed))


def _accepted(accept: bool | None, folder: Path, finished: Finished) -> bool:
    if accept is not None:
        return accept
    number = len(finished.changes.changes)
    what = "this change" if number == 1 else f"these {number} changes"
    question = f"Apply {what} to {folder}?" if number else "Is it right that nothing was changed?"
    return click.confirm(question, err=True)


def _set_aside(finished: Finished) -> list[Any]:
    from odradek.actors.tools.text import show_name
    from odradek.infra.serve.view import Line

    lines = [Line("error", f"not brought back (inside .git): {show_name(path)}") for path in finished.changes.refused]
    if finished.changes.by_products:
        lines.append(Line("note", f"not brought back: {len(finished.changes.by_products)} ignored by-products"))
    return lines


def _as_json(finished: Finished, verdict: str, changed: int) -> dict[str, Any]:
    return {
        "session_id": finished.session_id,
        "end": getattr(finished.served.end, "reason", "failed"),
        "verdict": verdict,
        "changed": [change.path for change in finished.changes.changes] if changed else [],
        "diff": finished.diff,
        "weight_versions": finished.served.versions,
        "training_allowed": finished.trainable,
    }


def _as_text(folder: Path, verdict: str, changed: int) -> str:
    if verdict == "rejected":
        return f"rejected; {folder} is untouched"
    return f"accepted; {changed} path{'s' * (changed != 1)} changed in {folder}" if changed else "accepted; no change"
