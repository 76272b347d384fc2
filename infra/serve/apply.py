"""Accepted changes into a person's folder: all of them or none, only over what was copied, never through a link.

Guarantees (each has a test of its name):
- nothing is written unless every target still is what was copied; otherwise every conflicting path is named;
- a crash at any point is completed or undone by `recover`, which the next `odradek run` of the folder calls;
- no component of a path is followed as a link, whatever appears meanwhile; kept files keep owner and mode;
- what was not copied is never replaced: where a new file would land on one, that is a conflict.

How: everything new is written and synced into a staging folder inside the target, the steps into a journal (outside);
then each step is a link or a rename. A replaced or removed file is first kept in the staging folder, and what was kept
is compared once more. So every state between two steps can be told from the digests alone, and either direction be
finished. An editor that writes in the instant between the comparison and the rename is noticed by the second look and
undoes everything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from odradek.infra.serve.changes import Change
from odradek.infra.serve.errors import ApplyConflict, ApplyFailed, ServeError, ThroughLink
from odradek.infra.serve.folder import DIRECTORY_FLAGS, Folder, Found, look_at
from odradek.infra.serve.journal import Journal, JournalFile, Step, journal_of
from odradek.infra.serve.snapshot import Node

STAGING_PREFIX = ".odradek-apply-"
"""Name of the staging folder; it exists only while changes are applied."""

FaultPoint = Callable[[str], None]
"""Called with a name before and after each thing that becomes durable; tests end the process there."""

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""How a filesystem says that it has no hard links (FAT, some shared folders)."""

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
        run = _Run(folder, journal, fault)
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
        run = _Run(folder, journal, fault)
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
        yield Step(action="remove", path=path, slot=slot, before=_state(before))
    elif before is not None and before.kind == "dir" and there is not None:
        yield Step(action="prune", path=path, mode=there.mode)
    if after is None:
        return
    if after.kind == "dir":
        if there is None or there.kind != "dir":
            yield Step(action="mkdir", path=path, mode=after.mode)
    elif before is not None and before.kind == after.kind:
        mode = there.mode if there is not None and before.mode == after.mode else after.mode
        yield Step(action="put", path=path, slot=slot, before=_state(before), after=_state(after), mode=mode)
    else:
        yield Step(action="put", path=path, slot=slot, after=_state(after), mode=after.mode)


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
    return "" if _as_state(found) == _state(before) else f"{path} has changed"


def _state(node: Node) -> str:
    return f"{node.kind}:{node.digest}"


def _as_state(found: Found | None) -> str:
    return "" if found is None else f"{found.kind}:{found.digest}"


# -- doing ------------------------------------------------------------------------------------------------------------


class _Run:
    """The steps of one journal, forward or back. Every method may be repeated."""

    def __init__(self, folder: Folder, journal: Journal, fault: FaultPoint) -> None:
        self._folder, self.journal, self._fault = folder, journal, fault

    def stage(self, changes: Iterable[Change]) -> None:
        """Write everything new into the staging folder, synced."""
        os.mkdir(self.journal.staging, 0o700, dir_fd=self._folder.fd)
        nodes = {change.path: change.after for change in changes}
        staging = self._staging()
        try:
            for step in self.journal.steps:
                node = nodes.get(step.path)
                if step.action == "put" and node is not None:
                    self._stage(staging, step, node)
            os.fsync(staging)
        finally:
            os.close(staging)

    def _stage(self, staging: int, step: Step, node: Node) -> None:
        name = f"new-{step.slot}"
        owner = self._folder.look(step.path) if step.before else None
        if node.kind == "symlink":
            os.symlink(node.content, os.fsencode(name), dir_fd=staging)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=staging), "wb") as file:
                file.write(node.content)
                file.flush()
                if owner is not None and (owner.uid, owner.gid) != (os.geteuid(), os.getegid()):
                    with contextlib.suppress(PermissionError):
                        os.fchown(file.fileno(), owner.uid, owner.gid)
                os.fchmod(file.fileno(), step.mode)
                os.fsync(file.fileno())

    def forward(self) -> None:
        """Every step that is not done yet. Raises ApplyConflict where the folder is neither before nor after it."""
        staging = self._staging()
        try:
            for step in self.journal.steps:
                self._fault(f"before {step.action} {step.path}")
                {"remove": self._remove, "prune": self._prune, "mkdir": self._mkdir, "put": self._put}[step.action](
                    step, staging
                )
                self._fault(f"after {step.action} {step.path}")
        finally:
            os.close(staging)

    def back(self) -> None:
        """Undo what has been done, last first. What somebody changed since is left as it is."""
        if self.journal.phase == "staging":
            return  # nothing of the folder has been touched
        try:
            staging = self._staging()
        except FileNotFoundError:
            return  # somebody removed it: nothing can be told or undone any more
        try:
            for step in reversed(self.journal.steps):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, ThroughLink):
                    self._undo(step, staging)
        finally:
            os.close(staging)

    def close(self, file: JournalFile, phase: Literal["staging", "done"]) -> None:
        """Nothing is left to do or undo: say so, then remove the staging folder, and at last the journal."""
        file.write(msgspec.structs.replace(self.journal, phase=phase))
        self._fault("journal closed")
        shutil.rmtree(self.journal.staging, ignore_errors=True, dir_fd=self._folder.fd)
        self._fault("staging removed")
        file.remove()
        self._fault("journal removed")

    def _staging(self) -> int:
        return os.open(self.journal.staging, DIRECTORY_FLAGS, dir_fd=self._folder.fd)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _remove(self, step: Step, staging: int) -> None:
        if look_at(staging, f"old-{step.slot}") is not None:
            return
        if _as_state(self._folder.look(step.path)) != step.before:
            raise ApplyConflict([f"{step.path} has changed"])
        with self._folder.parent(step.path) as (parent, name):
            os.rename(name, f"old-{step.slot}", src_dir_fd=parent, dst_dir_fd=staging)
            os.fsync(parent)
        if _as_state(look_at(staging, f"old-{step.slot}")) != step.before:
            raise ApplyConflict([f"{step.path} has changed"])

    def _prune(self, step: Step, _staging: int) -> None:
        """A directory that still holds something (what was never copied) stays."""
        try:
            with self._folder.parent(step.path) as (parent, name):
                os.rmdir(name, dir_fd=parent)
                os.fsync(parent)
        except (FileNotFoundError, NotADirectoryError):
            return  # gone already, and perhaps a file stands there now
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise

    def _mkdir(self, step: Step, _staging: int) -> None:
        found = self._folder.look(step.path)
        if found is not None and found.kind == "dir":
            return
        with self._folder.parent(step.path) as (parent, name):
            os.mkdir(name, step.mode, dir_fd=parent)
            os.fsync(parent)

    def _put(self, step: Step, staging: int) -> None:
        new, old = f"new-{step.slot}", f"old-{step.slot}"
        found = self._folder.look(step.path)
        if look_at(staging, new) is None and _as_state(found) == step.after:
            return
        if _as_state(found) != step.before:
            if _as_state(found) == step.after and not step.before:  # linked, and the staged name not removed yet
                os.unlink(new, dir_fd=staging)
                return
            raise ApplyConflict([f"{step.path} has changed" if found else f"{step.path} is gone"])
        with self._folder.parent(step.path) as (parent, name):
            if found is None:
                _place(staging, new, parent, name)
            else:
                if look_at(staging, old) is None:
                    _keep(parent, name, staging, old)
                    self._fault(f"kept {step.path}")
                os.rename(new, name, src_dir_fd=staging, dst_dir_fd=parent)
            os.fsync(parent)
        if found is not None and _as_state(look_at(staging, old)) != step.before:
            raise ApplyConflict([f"{step.path} has changed"])

    def _undo(self, step: Step, staging: int) -> None:
        old = f"old-{step.slot}"
        with self._folder.parent(step.path) as (parent, name):
            found = look_at(parent, name)
            if step.action == "mkdir":
                if found is not None and found.kind == "dir":
                    with contextlib.suppress(OSError):
                        os.rmdir(name, dir_fd=parent)
            elif step.action == "prune":
                if found is None:
                    os.mkdir(name, step.mode, dir_fd=parent)
                    os.chmod(name, step.mode, dir_fd=parent)
            elif step.action == "remove":
                if found is None and look_at(staging, old) is not None:
                    os.rename(old, name, src_dir_fd=staging, dst_dir_fd=parent)
            elif _as_state(found) == step.after:
                moved = look_at(staging, f"new-{step.slot}") is None
                if not step.before and (moved or _same_file(staging, step, parent, name)):
                    os.unlink(name, dir_fd=parent)
                elif step.before and moved and look_at(staging, old) is not None:
                    os.rename(old, name, src_dir_fd=staging, dst_dir_fd=parent)


def _same_file(staging: int, step: Step, parent: int, name: str) -> bool:
    """Whether the name in the folder is the staged file itself: linked, and the staged name not removed yet."""
    mine = os.stat(f"new-{step.slot}", dir_fd=staging, follow_symlinks=False)
    there = os.stat(name, dir_fd=parent, follow_symlinks=False)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _place(staging: int, new: str, parent: int, name: str) -> None:
    """Give the staged file its name, only if nothing has it; FileExistsError otherwise."""
    try:
        os.link(new, name, src_dir_fd=staging, dst_dir_fd=parent, follow_symlinks=False)
        os.unlink(new, dir_fd=staging)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if look_at(parent, name) is not None:
            raise FileExistsError(errno.EEXIST, "exists and was not copied", name) from None
        os.rename(new, name, src_dir_fd=staging, dst_dir_fd=parent)


def _keep(parent: int, name: str, staging: int, old: str) -> None:
    """A second name for what is about to be replaced; a copy where the filesystem has no hard links."""
    try:
        os.link(name, old, src_dir_fd=parent, dst_dir_fd=staging, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(name, dir_fd=parent), old, dir_fd=staging)
            return
        source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        target = os.open(old, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=staging)
        with os.fdopen(source, "rb") as reader, os.fdopen(target, "wb") as writer:
            shutil.copyfileobj(reader, writer)
            os.fchmod(target, stat.S_IMODE(info.st_mode))
