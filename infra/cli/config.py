"""`odradek config show`: every effective value with its origin, secrets masked."""

from __future__ import annotations

import click

from odradek.infra.cli.context import Context, command_options
from odradek.infra.config.load import Setting


@click.group
def command() -> None:
    """Show the effective configuration."""


@command.command
@click.option("--explain", is_flag=True, help="Also print what each setting means.")
@command_options
def show(context: Context, explain: bool) -> None:
    """Every setting with its value and where that came from.

    Later wins: default, odradek.toml, environment (ODRADEK_SECTION__KEY), --set.
    """
    settings = context.loaded.settings()
    context.result(settings, "\n".join(line for setting in settings for line in _lines(setting, explain)))


def _lines(setting: Setting, explain: bool) -> list[str]:
    value = "none" if setting.value is None else str(setting.value)
    lines = [f"{setting.key:<30} {value:<24} {setting.origin}"]
    return [*lines, f"    {setting.meaning}"] if explain else lines
