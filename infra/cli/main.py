"""`odradek`: the command line's root.

Commands are named here and loaded from one file each when they are called, so that `odradek --help` imports neither
torch nor ray. To add one: write `infra/cli/NAME.py` with a click command (or group) called `command`, and name it in
`COMMANDS`. Names whose module is not there yet are not listed in the help and answer that they are not in this build.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import signal
import sys
from typing import Any

import click

from odradek.infra.cli.context import EXIT_CODES, EXIT_OK, report_failure
from odradek.infra.cli.output import open_standard_streams

COMMANDS = {
    "up": "Start Kafka, S3 and Ray (what has no address yet), and the actors.",
    "status": "How every service stands, asked of the service itself.",
    "down": "Stop the actors and the embedded services. Data stays.",
    "demo": "Watch a coding agent get better, end to end, on this machine.",
    "task": "Publish, check or cancel tasks.",
    "watch": "A live view of what is going on.",
    "run": "Let the agent work on a folder of yours, then accept or reject its diff.",
    "session": "List sessions, or read one.",
    "train": "Run the loop without the demo's evaluation.",
    "policy": "Make a policy directory out of a Hugging Face checkpoint, or look at one.",
    "weights": "List, explain, save, pin or roll back weight versions.",
    "batch": "List or explain batches; find the batches and versions that saw a session or task.",
    "eval": "Evaluate a version on a task set.",
    "replay": "Rebuild, verify, export or score again from the log.",
    "restore": "Begin anew where log and object store are of different moments.",
    "report": "Write one HTML page about a run, from the log alone.",
    "dashboard": "Open traces and curves of what is on the log in MLflow.",
    "dlq": "List, show, release or drop records that a consumer could not handle.",
    "audit": "Verify or prove what the log says, or sample a session again.",
    "subject": "A subject's consent to training, and the erasure of what they said.",
    "config": "Show the effective configuration.",
}
"""Every command with its one line of help. Its module is `odradek.infra.cli.NAME`."""


class LazyGroup(click.Group):
    """A group that imports a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Those that this build has, in the order of `COMMANDS`."""
        return [name for name in COMMANDS if _exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load one; a name that is planned but absent says so."""
        if cmd_name not in COMMANDS:
            return None
        if not _exists(cmd_name):
            raise click.UsageError(f"'{cmd_name}' is not in this build of odradek")
        command: click.Command = importlib.import_module(_module(cmd_name)).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])


def _module(name: str) -> str:
    return f"odradek.infra.cli.{name}"


def _exists(name: str) -> bool:
    return importlib.util.find_spec(_module(name)) is not None


@click.group(cls=LazyGroup, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="odradek")
def root() -> None:
    """Odradek trains the coding agent you ship, on the log it already writes."""


def run(arguments: list[str]) -> int:
    """Run one command line; returns the exit code. No exception leaves it."""
    as_json = "--json" in arguments
    logging.getLogger().addHandler(logging.NullHandler())  # else libraries' warnings join our one line of error
    try:
        result: Any = root.main(arguments, prog_name="odradek", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            click.echo(error.format_message())
            return EXIT_OK
        return report_failure(error, as_json)
    return result if isinstance(result, int) else EXIT_OK


def main() -> None:
    """Entry point of the `odradek` program. A polite end or a closed terminal cleans up as Ctrl-C does."""
    open_standard_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
