"""`odradek watch`: what goes on, live, from the log and from the actors' own words."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import click

from odradek.infra.cli.context import Context, Number, command_options

FIRST_LOOK_S = 20.0
"""Seconds `--once` waits for the slowest actor, which ends the wait. Too low finds nobody on a machine that is busy."""


@click.command
@command_options
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--every", type=Number(0.1), default=2.0, show_default=True, help="Seconds between two pictures.")
@click.option("--no-actors", is_flag=True, help="Read the log only; don't join the Ray cluster.")
def command(context: Context, once: bool, every: float, no_actors: bool) -> None:
    """A live view of what goes on: sessions, tool calls, rewards, versions, lag, staleness, utilisation.

    Works from any terminal while a demo runs, and without it: the log is enough, the actors are asked if they are
    there. With --json it prints one picture as one document. Ctrl-C ends it; nothing else does.
    """
    context.say("looking for the deployment …")
    from odradek.infra.cli.log import opened_log

    watcher, absent = (None, "actors were not asked (--no-actors)") if no_actors else _join(context)

    async def job() -> None:
        async with opened_log(context) as event_log:
            await _watch(context, event_log, watcher, absent, once=once or context.as_json, every=every)

    try:
        asyncio.run(job())
    except KeyboardInterrupt:
        if once or context.as_json:
            raise
    finally:
        if watcher is not None:
            import ray

            ray.shutdown()


def _join(context: Context) -> tuple[Any, str]:
    """A watcher of the deployment's actors, or why there is none."""
    from odradek.infra.cluster.actors import expected
    from odradek.infra.cluster.deployment import deployment_of
    from odradek.infra.config.services import endpoints
    from odradek.infra.errors import InfraError
    from odradek.infra.observe.actors import ActorWatcher, ray_ask
    from odradek.infra.stack.ray_head import connect

    try:
        where = endpoints(context.config)
        deployment = deployment_of(context.config, where)
        context.say("joining Ray to ask the actors …")
        connect(where.ray, namespace=deployment.namespace)
    except InfraError as error:
        return None, f"actors were not asked: {error}"
    return ActorWatcher(expected(deployment), ray_ask(deployment.namespace)), ""


async def _watch(context: Context, event_log: Any, watcher: Any, absent: str, *, once: bool, every: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from odradek.infra.observe.follow import RunFollower, SessionFollower
    from odradek.infra.observe.frame import Frame, frame
    from odradek.infra.observe.screen import as_text, screen

    run, sessions = RunFollower(event_log), SessionFollower(event_log)
    context.say("reading the log …")
    await sessions.begin_recent(await run.refresh())

    async def look() -> Frame:
        views = await watcher.look() if watcher is not None else []
        return frame(await run.refresh(), await sessions.refresh(), views, int(time.time() * 1000))

    if once:
        if watcher is not None:  # a rate of work needs two looks, and a fresh connection to each actor takes its time
            context.say("asking the actors …")
            await watcher.look(FIRST_LOOK_S)
            await asyncio.sleep(1.0)
        found = await look()
        context.result(found, as_text(found, actors_absent=absent, width=Console().width))
        return
    if not Console().is_terminal:
        while True:  # into a file or a pipe: one picture after another
            found = await look()
            context.result(found, as_text(found, actors_absent=absent, width=Console().width))
            sessions.book.prune()
            await asyncio.sleep(every)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(await look(), actors_absent=absent), refresh=True)
            sessions.book.prune()
            await asyncio.sleep(every)
