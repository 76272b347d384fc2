"""A person's request as a session: what the model is told, for whom, within which budget. Pure."""

from __future__ import annotations

import getpass
import hashlib
from pathlib import PurePosixPath

from odradek.actors.controller.identity import sampling_seed
from odradek.actors.session.runner import SessionSpec
from odradek.infra.serve.snapshot import Tree, start_of
from odradek.streams.events.meta import BlobRef
from odradek.streams.events.sessions import CondenseSettings, SamplingParams, SessionOpened
from odradek.streams.events.tasks import Budget

PRODUCTION_TURNS = 12
"""Twice the turns of a training attempt."""
PRODUCTION_SECONDS = 600.0
"""Wall clock of a session: longer keeps a person waiting, shorter cuts off work on a busy machine."""
TURN_SHARE = 4
"""A turn may take this part of the policy's context. Too large a part leaves no room for results."""
SPARE_SHARE = 10
"""This part of the context is left unused."""

NAMED_FILES = 8
"""Most modules that a request names for the model. More crowd a small context; it can list the rest itself."""


def production_budget(context: int) -> Budget:
    """What a person's session may use with a policy of that many tokens of context."""
    return Budget(
        max_turns=PRODUCTION_TURNS,
        max_turn_tokens=context // TURN_SHARE,
        max_context_tokens=context - context // SPARE_SHARE,
        wall_seconds=PRODUCTION_SECONDS,
    )


def local_subject(name: str | None = None) -> str:
    """Whose data this is when nobody says: the local user, under a name that does not show it on the log."""
    user = getpass.getuser() if name is None else name
    return "user-" + hashlib.sha256(f"odradek local user {user}".encode()).hexdigest()[:16]


def message_of(request: str, tree: Tree) -> str:
    """What the model is told: the request, and below it the folder's Python modules, if they are few and the request
    names none. Training tasks name theirs in this form."""
    request = request.strip()
    modules = [path for path in sorted(tree) if path.endswith(".py") and not _is_test(path)]
    if not 0 < len(modules) <= NAMED_FILES or any(path in request for path in tree):
        return request
    return f"{request}\n{' '.join(modules)}"


def _is_test(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return any(part.startswith("test") or part == "conftest.py" for part in parts)


def spec_of(
    *,
    session_id: str,
    policy: str,
    tokenizer: str,
    request: str,
    tree: Tree,
    files_ref: BlobRef | None,
    subject: str,
    image: str = "demo",
    temperature: float = 1.0,
    budget: Budget,
    condense: CondenseSettings | None = None,
    tenant: str = "default",
) -> SessionSpec:
    """A production session. With `files_ref` the event names the object that holds the files, else it carries them."""
    start = start_of(tree, image)
    return SessionSpec(
        opened=SessionOpened(
            session_id=session_id,
            policy=policy,
            image=image,
            files=start.files if files_ref is None else {},
            files_ref=files_ref,
            setup=start.setup,
            tokenizer=tokenizer,
            sampling=SamplingParams(temperature=temperature, seed=sampling_seed(session_id)),
            budget=budget,
            condense=condense,
        ),
        message=message_of(request, tree),
        start=start,
        origin="production",
        tenant=tenant,
        subject=subject,
        correlation=session_id,
    )
