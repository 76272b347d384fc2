"""Accepted changes into a person's folder: all of them or none, only over what was copied, never through a link.

Guarantees (each has a test of its name):
- nothing is written unless every target still is what was copied; otherwise every conflicting path is named;
- a crash at any point is completed or undone by `recover`, which the next `odradek run` of the folder calls;
- no component of a path is followed as a link, whatever appears meanwhile; kept files keep owner and mode;
- what was not copied is never replaced: where a new file would land on one, that is a conflict.

How: everything new is written and synced into a staging folder inside the target, the steps into a journal (outside);
then each step is a link or a rename. A replaced or removed file is first kept in the staging folder, and what was kept
is compared once more. So every state between two steps can be told from the digests alone, and either direction be
finished. An editor that writes into a file in the instant between the comparison and the rename is noticed by the
second look and undoes everything; one that renames a file of its own into place in that same instant is not.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from odradek.infra.serve.changes import Change
from odradek.infra.serve.errors import ApplyConflict, ApplyFailed, ServeError, ThroughLink
from odradek.infra.serve.folder import Folder, Found
from odradek.infra.serve.journal import Journal, Step, journal_of
from odradek.infra.serve.steps import FaultPoint, Run, state_found, state_of

STAGING_PREFIX = ".odradek-apply-"
"""Name of the staging folder; it exists only while changes are applied."""

Recovered = Literal["nothing", "completed", "undone"]


def apply(root: Path, changes: Sequence[Change], fault: FaultPoint = lambda _name: None) -> None:
    """Bring the changes into the folder. Raises ApplyConflict (nothing was written) or ApplyFailed (all was undone)."""
    if not changes:
        return
    with journal_of(root) as file, Folder(root) as folder:
        if file.read() is not None:
            raise ServeError(f"{root}: changes accepted earlier were interrupted; run odradek run there to finish them")
        steps = _plan(folder, changes)
        staging = STAGING_PREFIX + secrets.token_hex(4)
        journal = Journal(root=str(root.resolve()), staging=staging, phase="staging", steps=steps)
        file.write(journal)
        fault("journal staging")
        run = Run(folder, journal, fault)
        try:
            run.stage([change for change in changes if change.after is not None])
            fault("staged")
            run.journal = msgspec.structs.replace(journal, phase="ready")
            file.write(run.journal)
            fault("journal ready")
            run.forward()
        except (OSError, ServeError) as error:
            run.back()
            run.close(file, "staging")
            if isinstance(error, ServeError):
                raise
            raise ApplyFailed(f"{root}: {error.strerror or error}; nothing was changed") from error
        run.close(file, "done")


def recover(root: Path, fault: FaultPoint = lambda _name: None) -> Recovered:
    """Finish what an interrupted `apply` of this folder began: complete it, or undo it where that is not possible."""
    with journal_of(root) as file, Folder(root) as folder:
        journal = file.read()
        if journal is None:
            return "nothing"
        run = Run(folder, journal, fault)
        if journal.phase == "ready":
            try:
                run.forward()
                run.close(file, "done")
                return "completed"
            except (OSError, ServeError):
                run.back()
        run.close(file, "done" if journal.phase == "done" else "staging")
        return "completed" if journal.phase == "done" else "undone"


# -- planning ---------------------------------------------------------------------------------------------------------


def _plan(folder: Folder, changes: Sequence[Change]) -> list[Step]:
    """The steps in order: removals, emptied directories, new directories, contents. Raises ApplyConflict."""
    removed = {c.path for c in changes if c.before is not None and c.before.kind != "dir" and _goes(c)}
    found = {c.path: None if _is_below(c.path, removed) else _look(folder, c.path) for c in changes}
    conflicts = [text for change in changes if (text := _conflict(folder, change, found[change.path], removed))]
    if conflicts:
        raise ApplyConflict(conflicts)
    steps = [step for slot, c in enumerate(changes) for step in _steps(c, slot, found[c.path])]
    order = {"remove": 0, "prune": 1, "mkdir": 2, "put": 3}
    return sorted(steps, key=lambda s: (order[s.action], -s.path.count("/") if s.action == "prune" else 0, s.path))


def _steps(change: Change, slot: int, found: Found | str | None) -> Iterator[Step]:
    path, before, after = change.path, change.before, change.after
    there = found if isinstance(found, Found) else None
    if before is not None and before.kind != "dir" and _goes(change):
        yield Step(action="remove", path=path, slot=slot, before=state_of(before))
    elif before is not None and before.kind == "dir" and there is not None:
        yield Step(action="prune", path=path, mode=there.mode)
    if after is None:
        return
    if after.kind == "dir":
        if there is None or there.kind != "dir":
            yield Step(action="mkdir", path=path, mode=after.mode)
    elif before is not None and before.kind == after.kind:
        mode = there.mode if there is not None and before.mode == after.mode else after.mode
        yield Step(action="put", path=path, slot=slot, before=state_of(before), after=state_of(after), mode=mode)
    else:
        yield Step(action="put", path=path, slot=slot, after=state_of(after), mode=after.mode)


def _goes(change: Change) -> bool:
    """Whether what stood at the path is taken away before (or without) anything new is put there."""
    return change.after is None or (change.before is not None and change.before.kind != change.after.kind)


def _is_below(path: str, removed: set[str]) -> bool:
    """Whether a file or link that will be gone stands where the path's directory will be."""
    parts = path.split("/")
    return any("/".join(parts[:length]) in removed for length in range(1, len(parts)))


def _look(folder: Folder, path: str) -> Found | str | None:
    """What stands there; a text where it can't be said."""
    try:
        return folder.look(path)
    except ThroughLink as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"


def _conflict(folder: Folder, change: Change, found: Found | str | None, removed: set[str]) -> str:
    """Why the change can't be applied to what stands there; empty if it can."""
    path, before = change.path, change.before
    if isinstance(found, str):
        return found
    if found is not None and found.device != os.fstat(folder.fd).st_dev:
        return f"{path} is on another filesystem"
    if before is None:
        if found is None or (found.kind == "dir" and change.after is not None and change.after.kind == "dir"):
            return ""
        return f"{path} exists and was not copied"
    if before.kind == "dir":
        if found is not None and found.kind != "dir":
            return f"{path} is no directory any more"
        if found is not None and change.after is not None:
            kept = sorted(set(folder.files_below(path)) - removed)
            return f"{path} still holds {kept[0]}, which was not copied" if kept else ""
        return ""
    if found is None:
        return f"{path} is gone"
    return "" if state_found(found) == state_of(before) else f"{path} has changed"
