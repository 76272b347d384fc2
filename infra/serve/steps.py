"""The steps of one application, forward or back: each a link or a rename, each possible to repeat.

What has been done is told from the digests of what lies in the folder and in the staging folder alone, so a run that
was cut off anywhere can be taken up by another process in either direction. `apply` says when which is done.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from odradek.infra.serve.changes import Change
from odradek.infra.serve.errors import ApplyConflict, ThroughLink
from odradek.infra.serve.folder import DIRECTORY_FLAGS, Folder, Found, look_at
from odradek.infra.serve.journal import Journal, JournalFile, Step
from odradek.infra.serve.snapshot import Node

FaultPoint = Callable[[str], None]
"""Called with a name before and after each thing that becomes durable; tests end the process there."""

NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
"""How a filesystem says that it has no hard links (FAT, some shared folders)."""


def state_of(node: Node) -> str:
    """Kind and digest, as a step names them."""
    return f"{node.kind}:{node.digest}"


def state_found(found: Found | None) -> str:
    """The same of what stands somewhere; empty if nothing does."""
    return "" if found is None else f"{found.kind}:{found.digest}"


class Run:
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
        if state_found(self._folder.look(step.path)) != step.before:
            raise ApplyConflict([f"{step.path} has changed"])
        with self._folder.parent(step.path) as (parent, name):
            os.rename(name, f"old-{step.slot}", src_dir_fd=parent, dst_dir_fd=staging)
            os.fsync(parent)
        if state_found(look_at(staging, f"old-{step.slot}")) != step.before:
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
        if look_at(staging, new) is None and state_found(found) == step.after:
            return
        if state_found(found) != step.before:
            if state_found(found) == step.after and not step.before:  # linked, and the staged name not removed yet
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
        if found is not None and state_found(look_at(staging, old)) != step.before:
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
            elif state_found(found) == step.after:
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
