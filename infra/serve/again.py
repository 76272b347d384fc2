"""A session that the log has, taken up again: resumed where it stands, or forked at one of its turns.

Everything comes from the log and its objects, whatever host asks: what the session was opened with, the files it began
with, what each call changed. Nobody's folder is read or written; the diff is shown. A fork is a session of its own,
outside every group, so that it is never trained with its parent's.
"""

from __future__ import annotations

import io
import tarfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from odradek.actors.controller.identity import sampling_seed
from odradek.actors.controller.placement import host_of
from odradek.actors.policy.template import XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.runtime.deployment import Deployment, actor_handle
from odradek.actors.runtime.store import blobs_of, log_of
from odradek.actors.session.errors import ForkPointError
from odradek.actors.session.fork import inherited
from odradek.actors.session.ports import WorkspaceStart, start_of
from odradek.actors.session.runner import SessionSpec
from odradek.actors.session.state import SessionFold
from odradek.infra.observe.lookup import read_session
from odradek.infra.serve.changes import as_diff, compare
from odradek.infra.serve.errors import SessionRefused
from odradek.infra.serve.job import told
from odradek.infra.serve.screen import Screen
from odradek.infra.serve.select import BY_PRODUCTS
from odradek.infra.serve.session import KafkaFeed, RayHost, Served, Serving
from odradek.infra.serve.snapshot import FILE_MODE, Node, Tree
from odradek.infra.serve.view import View
from odradek.streams import topics
from odradek.streams.blobs import BlobStore
from odradek.streams.errors import StreamError
from odradek.streams.events.meta import Meta, RecordRef
from odradek.streams.events.sessions import EndReason, MessageReceived, SessionOpened
from odradek.streams.events.tasks import TaskPublished
from odradek.streams.log import EventLog
from odradek.streams.ownership import SessionRecord

OVER: frozenset[EndReason] = frozenset({"done", "no_call"})
"""Ends by the agent's own decision: without a new request it has nothing to go on with."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A session as the log has it."""

    ref: RecordRef
    """Its session.opened."""
    opened: SessionOpened
    meta: Meta
    records: list[SessionRecord]


@dataclass(frozen=True, slots=True)
class Fork:
    """Where to branch off, and how to go on."""

    at: int
    """The turn to sample anew; as many as there are: after all of them."""
    message: str = ""
    version: int | None = None
    """Sample wholly under this weight version; None follows the current one."""


@dataclass(frozen=True, slots=True)
class Again:
    """What came of it."""

    session_id: str
    end: str
    """An end reason; empty where it was only handed over."""
    turns: int = 0
    diff: str = ""
    weight_versions: Sequence[int] = ()


def logged(session_id: str, records: list[SessionRecord]) -> Logged:
    """Raises SessionRefused for a session whose opening is not on the log, or cannot be read any more."""
    for offset, _, meta, body in records:
        if isinstance(body, SessionOpened):
            if meta.cipher is not None:
                raise SessionRefused(f"session {session_id} cannot be read: its subject was erased, or has no key here")
            place = RecordRef(topics.SESSIONS.name, topics.SESSIONS.partition_of(session_id), offset)
            return Logged(place, body, meta, records)
    raise SessionRefused(f"session {session_id}: its opening is not on the log")


async def spec_of_logged(one: Logged, event_log: EventLog, blobs: BlobStore) -> SessionSpec:
    """The session as its first owner was given it. Raises SessionRefused, naming what is missing."""
    opened = one.opened
    if opened.task is not None:
        start, message = await _of_task(one, opened.task, event_log)
    else:
        start = WorkspaceStart(opened.image, await _files(one, blobs), list(opened.setup))
        message = _asked(one)
    return SessionSpec(
        opened=opened,
        message=message,
        start=start,
        origin=one.meta.origin,
        tenant=one.meta.tenant,
        subject=one.meta.subject,
        correlation=one.meta.correlation,
        history_floor=one.ref.offset,
    )


async def _of_task(one: Logged, task: RecordRef, event_log: EventLog) -> tuple[WorkspaceStart, str]:
    try:
        body = (await event_log.read_ref(task)).event.body
    except StreamError as error:
        raise SessionRefused(f"session {one.opened.session_id}: its task cannot be read: {error}") from error
    if not isinstance(body, TaskPublished):
        raise SessionRefused(f"session {one.opened.session_id}: {task} holds no task")
    return start_of(body), body.instruction


def _asked(one: Logged) -> str:
    for *_, body in one.records:
        if isinstance(body, MessageReceived):
            return body.text
    raise SessionRefused(f"session {one.opened.session_id}: what it was asked is not on the log")


async def _files(one: Logged, blobs: BlobStore) -> dict[str, bytes]:
    """Links and executable bits are made by the logged set-up commands."""
    ref = one.opened.files_ref
    if ref is None:
        return dict(one.opened.files)
    try:
        data = await blobs.get(ref)
    except StreamError as error:
        raise SessionRefused(f"session {one.opened.session_id}: its starting files are gone: {error}") from error
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = ((info.name, archive.extractfile(info)) for info in archive if info.isfile())
        return {name: content.read() for name, content in found if content is not None}


def forked(one: Logged, spec: SessionSpec, fork: Fork) -> SessionSpec:
    """A session of its own that samples the parent's turn anew, under its own seed. Raises SessionRefused."""
    try:
        inherited(one.ref, one.records, fork.at)
    except ForkPointError as error:
        raise SessionRefused(f"session {one.opened.session_id}: {error}") from error
    session_id = str(uuid.uuid4())
    opened = msgspec.structs.replace(
        one.opened,
        session_id=session_id,
        group_id="",
        lane="",
        attempt=0,
        pinned_version=fork.version,
        sampling=msgspec.structs.replace(one.opened.sampling, seed=sampling_seed(session_id)),
        forked_from=one.ref,
        forked_at=fork.at,
    )
    return SessionSpec(
        opened=opened,
        message=fork.message,
        start=spec.start,
        origin=spec.origin,
        tenant=spec.tenant,
        subject=spec.subject,
        correlation=session_id,
    )


class TakenUp:
    """Resumes and forks sessions of one deployment, shown on a screen."""

    def __init__(self, deployment: Deployment, event_log: EventLog, blobs: BlobStore, screen: Screen) -> None:
        self._deployment, self._log, self._blobs, self._screen = deployment, event_log, blobs, screen
        self._template = XmlTemplate(Tokenizer.from_file(Path(deployment.tokenizer_file)))

    async def resume(self, one: Logged, *, wait: bool) -> Again:
        """Hand it to its host again, and follow it to its end. One that has ended is only told so."""
        state = SessionFold(one.opened.session_id, self._checked(one)).apply_all(one.records)
        if state.end is not None:
            return Again(one.opened.session_id, getattr(state.end, "reason", "failed"), len(state.acts))
        spec = await spec_of_logged(one, self._log, self._blobs)
        return await self._follow(spec, floor=one.ref.offset, wait=wait)

    async def fork(self, one: Logged, fork: Fork, *, wait: bool) -> Again:
        """Open a fork and follow it to its end."""
        state = SessionFold(one.opened.session_id, self._checked(one)).apply_all(one.records)
        if fork.at == len(state.turns) and not fork.message and getattr(state.end, "reason", None) in OVER:
            raise SessionRefused(
                f"session {one.opened.session_id} says that it is finished: fork it at an earlier turn (0 to "
                f"{fork.at - 1}), or say what is to be done next with --message"
            )
        spec = forked(one, await spec_of_logged(one, self._log, self._blobs), fork)
        partition = topics.SESSIONS.partition_of(spec.session_id)
        return await self._follow(spec, floor=await self._log.stable_end(topics.SESSIONS.name, partition), wait=wait)

    def _checked(self, one: Logged) -> XmlTemplate:
        """Ids of another tokenizer stand for other text: nothing of this deployment could go on from them."""
        if one.opened.tokenizer not in ("", self._template.tokenizer.digest):
            raise SessionRefused(
                f"session {one.opened.session_id} was written with tokenizer {one.opened.tokenizer[:12]}, this "
                f"deployment's is {self._template.tokenizer.digest[:12]}: set policy.dir to the policy of that session"
            )
        return self._template

    async def _follow(self, spec: SessionSpec, *, floor: int, wait: bool) -> Again:
        tree: Tree = {path: Node("file", FILE_MODE, content) for path, content in spec.start.files.items()}
        view = View(self._template, tree)
        name = f"session-{host_of(spec.session_id, self._deployment.session_actors)}"
        serving = Serving(
            spec,
            copied=tree,
            floor=floor,
            host=RayHost(actor_handle(name, self._deployment.namespace), name),
            feed=KafkaFeed(self._log, spec.session_id),
            blobs=self._blobs,
            template=self._template,
            tell=told(view, self._screen),
            tick=self._screen.tick,
            keys=self._log.keys,
        )
        if not wait:
            await serving.hand_over()
            return Again(spec.session_id, "")
        self._screen.waits(view.waiting_for)
        try:
            return _outcome(spec.session_id, tree, await serving.run())
        finally:
            self._screen.done()


def _outcome(session_id: str, tree: Tree, served: Served) -> Again:
    changes = compare(tree, served.final, lambda paths: set(BY_PRODUCTS.match_files(paths)))
    end = getattr(served.end, "reason", "failed")
    return Again(session_id, end, len(served.state.acts), as_diff(changes.changes), served.versions)


async def take_up(deployment: Deployment, screen: Screen, wanted: str, fork: Fork | None, *, wait: bool) -> Again:
    """Resume the session with this id (or the beginning of one), or fork it."""
    async with log_of(deployment) as event_log:
        taker = TakenUp(deployment, event_log, blobs_of(deployment), screen)
        one = logged(*await read_session(event_log, wanted))
        if fork is None:
            return await taker.resume(one, wait=wait)
        return await taker.fork(one, fork, wait=wait)
