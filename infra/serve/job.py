"""One `odradek run`, without the terminal's options: copy, serve, show; then answer and apply.

Two halves with the person's decision between them. `serve` changes nothing in the folder; `settle` logs the answer,
then applies what was accepted. The answer comes first: a folder is never changed by an answer that the log does not
have. If applying fails after that, the log says that the person accepted and the folder is as it was.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from odradek.actors.controller.placement import host_of
from odradek.actors.environment.delta import Delta
from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.runtime.deployment import Deployment, actor_handle
from odradek.actors.runtime.store import blobs_of, log_of
from odradek.actors.tools.text import show_name
from odradek.infra.serve.answers import Verdict, consent_stands, give_feedback, set_consent
from odradek.infra.serve.apply import apply
from odradek.infra.serve.changes import Changes, as_diff, compare
from odradek.infra.serve.errors import FolderRefused, SubjectRefused
from odradek.infra.serve.request import production_budget, spec_of
from odradek.infra.serve.screen import Screen
from odradek.infra.serve.select import Selection, select
from odradek.infra.serve.session import KafkaFeed, RayHost, Served, Serving
from odradek.infra.serve.snapshot import INLINE_BYTES, Snapshot, as_tar, take
from odradek.infra.serve.view import Line, View
from odradek.streams import topics
from odradek.streams.events.sessions import SessionEvent


@dataclass(frozen=True, slots=True)
class Request:
    """What the person asked for."""

    folder: Path
    text: str
    subject: str
    consent: bool | None
    """Grant, withdraw, or leave as it stands."""
    temperature: float | None
    """None: 1 where training is allowed, since a policy learns from its own distribution; else 0, its best guess."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The folder as it was copied."""

    snapshot: Snapshot
    selection: Selection


@dataclass(frozen=True, slots=True)
class Finished:
    """A session that has ended, and what it would change."""

    session_id: str
    served: Served
    changes: Changes
    trainable: bool
    """Whether the subject's consent to train stands."""

    @property
    def diff(self) -> str:
        """What accepting it would do."""
        return as_diff(self.changes.changes)


def copy(folder: Path) -> Copied:
    """Read the folder. Raises FolderRefused."""
    selection = select(folder)
    snapshot = take(folder, selection)
    if not snapshot.tree:
        raise FolderRefused(f"{folder}: nothing to copy: it is empty, or everything in it is ignored or left out")
    return Copied(snapshot, selection)


def about(copied: Copied) -> list[Line]:
    """What was copied and, by name and reason, what was left out."""
    tree = copied.snapshot.tree
    lines = [Line("note", f"copied {len(tree)} files, {copied.snapshot.size / 1e6:.2f} MB")]
    for path, reason in sorted(copied.snapshot.left_out.items()):
        lines.append(Line("note", f"left out {show_name(path)}: {reason}"))
    return lines


async def serve(deployment: Deployment, request: Request, copied: Copied, screen: Screen) -> Finished:
    """A production session on the copy, shown as it happens, to its end."""
    blobs = blobs_of(deployment)
    tokenizer = await asyncio.to_thread(Tokenizer.from_file, Path(deployment.tokenizer_file))
    template = XmlTemplate(tokenizer)
    session_id = str(uuid.uuid4())
    tree = copied.snapshot.tree
    async with log_of(deployment) as event_log:
        if event_log.keys is not None and event_log.keys.erased(request.subject):
            raise SubjectRefused.erased(request.subject)
        if request.consent is not None:
            await set_consent(event_log, session_id, request.subject, request.consent)
        trainable = await consent_stands(event_log, request.subject)
        screen.show(_opening(session_id, request.subject, trainable))
        files_ref = None
        if copied.snapshot.size > INLINE_BYTES:
            files_ref = await blobs.put(await asyncio.to_thread(as_tar, tree), subject=request.subject)
        spec = spec_of(
            session_id=session_id,
            policy=deployment.policy,
            tokenizer=tokenizer.digest,
            budget=production_budget(deployment.max_context),
            condense=deployment.condense,
            request=request.text,
            tree=tree,
            files_ref=files_ref,
            subject=request.subject,
            temperature=request.temperature if request.temperature is not None else float(trainable),
        )
        view = View(template, tree)
        name = f"session-{host_of(session_id, deployment.session_actors)}"
        serving = Serving(
            spec,
            copied=tree,
            floor=await event_log.stable_end(topics.SESSIONS.name, topics.SESSIONS.partition_of(session_id)),
            host=RayHost(actor_handle(name, deployment.namespace), name),
            feed=KafkaFeed(event_log, session_id),
            blobs=blobs,
            template=template,
            tell=told(view, screen),
            tick=screen.tick,
            keys=event_log.keys,
        )
        screen.waits(view.waiting_for)
        try:
            served = await serving.run()
        finally:
            screen.done()
    changes = compare(tree, served.final, copied.selection.ignored)
    return Finished(session_id, served, changes, trainable)


def told(view: View, screen: Screen) -> Callable[[SessionEvent, Delta | None], None]:
    """Shows each event, and what is waited for after it."""

    def tell(body: SessionEvent, delta: Delta | None) -> None:
        before = view.waiting_for
        screen.show(view.tell(body, delta))
        if view.waiting_for != before:
            screen.waits(view.waiting_for)

    return tell


def _opening(session_id: str, subject: str, trainable: bool) -> list[Line]:
    training = (
        "training on it is allowed: your consent stands (--no-consent withdraws it)"
        if trainable
        else "training on it is not allowed (--consent would)"
    )
    return [Line("note", f"session {session_id} of subject {subject}; {training}")]


async def answer(deployment: Deployment, request: Request, finished: Finished, verdict: Verdict) -> None:
    """Log what the person said."""
    async with log_of(deployment) as event_log:
        await give_feedback(event_log, finished.session_id, request.subject, verdict)


def settle(folder: Path, finished: Finished, verdict: Verdict) -> int:
    """Apply what was accepted; returns how many paths changed."""
    if verdict == "rejected":
        return 0
    apply(folder, finished.changes.changes)
    return len(finished.changes.changes)
