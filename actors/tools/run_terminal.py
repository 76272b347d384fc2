"""run_terminal: run a shell command, wait for it or leave it in the background; poll and stop background jobs by id.

stdout and stderr come as one text in the order written; stdin is at end-of-file. An exit code other than 0 is a result
like any other, in a last line of its own; so is a time-out, after which no process of the command is left.
"""

from typing import Annotated

import msgspec

from odradek.actors.tools.capture import Capture, RedactedStream
from odradek.actors.tools.errors import BadArguments
from odradek.actors.tools.limits import Limits
from odradek.actors.tools.spec import Answer, Context, Display, ToolSpec
from odradek.actors.tools.workspace import JobStatus

COMMAND_BYTES = 100_000
"""Longest command; the kernel refuses one argument above 131,072 bytes, and a script belongs in a file."""


class RunTerminal(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of run_terminal: a command, or the id of a background job."""

    command: Annotated[str, msgspec.Meta(description="Shell command, run in the workspace")] | None = None
    timeout: Annotated[float, msgspec.Meta(gt=0, description="Seconds until it is ended")] | None = None
    background: Annotated[bool, msgspec.Meta(description="Return at once with a job id")] = False
    job: Annotated[str, msgspec.Meta(description="Id of a background job to poll")] | None = None
    stop: Annotated[bool, msgspec.Meta(description="End that job")] = False


async def run(context: Context, arguments: RunTerminal) -> Answer:
    """The output, with a last line that says how the command or the job stands."""
    if (arguments.command is None) == (arguments.job is None):
        raise BadArguments("run_terminal needs either command, or job to poll or stop a background job")
    if arguments.job is not None:
        return await _job(context, arguments.job.strip(), arguments.stop)
    assert arguments.command is not None
    command, timeout = arguments.command, _checked(arguments, context.limits)
    if arguments.background:
        job = await context.workspace.start_job(command)
        return Answer(f"[job {job} started; poll it with job={job}, end it with job={job} and stop=true]")
    return await _foreground(context, command, timeout)


def _checked(arguments: RunTerminal, limits: Limits) -> float:
    command, timeout = arguments.command or "", arguments.timeout or limits.command_seconds
    if "\0" in command or any(0xD800 <= ord(c) <= 0xDFFF for c in command):
        raise BadArguments("run_terminal: the command has a character no command can have (NUL or half of a character)")
    if len(command.encode()) > COMMAND_BYTES:
        raise BadArguments(f"run_terminal: the command is longer than {COMMAND_BYTES} bytes; write a script file")
    if not timeout <= limits.command_seconds_max:
        raise BadArguments(
            f"run_terminal: timeout is at most {limits.command_seconds_max:g} seconds; use background=true for longer"
        )
    if arguments.stop:
        raise BadArguments("run_terminal: stop goes with job, not with command")
    return timeout


async def _foreground(context: Context, command: str, timeout: float) -> Answer:
    capture = Capture(context.limits.output_bytes)
    stream = RedactedStream(context.on_output) if context.on_output is not None else None

    def on_output(text: str) -> None:
        capture.feed(text)
        if stream is not None:
            stream.feed(text)

    try:
        ended = await context.workspace.exec(command, timeout, on_output)
    finally:
        if stream is not None:
            stream.close()
    last = f"[timed out after {timeout:g}s]" if ended.timed_out else f"[exit {ended.code}]"
    text = _with_last_line(capture.text(), "" if ended.code == 0 and not ended.timed_out and capture.chars else last)
    return Answer(text, Display("command", command, text))


async def _job(context: Context, job: str, stop: bool) -> Answer:
    status: JobStatus = await (context.workspace.stop_job(job) if stop else context.workspace.poll_job(job))
    capture = Capture(context.limits.output_bytes)
    capture.feed(status.output)
    if status.running:
        last = f"[job {job} is running]"
    else:
        last = f"[job {job} ended: exit {status.code}]" if status.code is not None else f"[job {job} was stopped]"
    return Answer(_with_last_line(capture.text(), last))


def _with_last_line(output: str, last: str) -> str:
    output = output.removesuffix("\n")
    return f"{output}\n{last}" if output and last else output or last


TOOL = ToolSpec(
    name="run_terminal",
    description="Run a shell command in the workspace, or poll or stop a background job.",
    arguments=RunTerminal,
    effect="workspace",
    leaves_delta=True,
    run=run,
)
