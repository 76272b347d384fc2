"""Where subject keys lie: one random 256-bit key a subject, in a store of its own, and the mark that none may follow.

Guarantees:
- a key is durable before anything is encrypted under it, and of several processes that ask at once all get the same;
- destroying first leaves a durable mark, then removes the key: whatever is killed when, a subject that was destroyed
  never has a key again (a late writer gets `SubjectErased`), and doing it twice is doing it once;
- nobody but the store's owner can read it (folder 0700, files 0600), and no error or log line holds key bytes.

`KeyStore` is the protocol; `KeyFiles` keeps a folder. What a file holds is up to its `Wrapping`: the key itself, or the
key as encrypted by a KMS (`kms.py`). Hosts that write or read subjects' content must share the folder. A copy of it is
a copy of the keys: a backup that outlives an erasure undoes it, so back it up apart, or wrap the keys.

Guarantee 9 (tests/GUARANTEES.md): test_privacy_keys.py, test_privacy_content.py, test_privacy_sandbox.py.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Protocol

import msgspec

from odradek.streams.errors import KeyUnavailable, SubjectErased
from odradek.streams.privacy.names import folder_of

KEY_BYTES = 32
"""AES-256."""

MARKS_REMEMBERED = 10_000
"""Names of marks that are not made anew. Too few: their making costs more than looking. Too many: memory."""


class KeyStore(Protocol):
    """Blocking calls; `KeyRing` makes them in a thread. Errors: `SubjectErased`, `KeyUnavailable`."""

    def find(self, subject: str) -> bytes | None:
        """The subject's key; None where this store has none. Raises SubjectErased once it was destroyed."""

    def obtain(self, subject: str) -> bytes:
        """The subject's key, made now if it has none. Raises SubjectErased once it was destroyed."""

    def destroy(self, subject: str, reason: str) -> bool:
        """Marks the subject for ever and removes its key; False if that had been done before."""

    def destroyed(self, subject: str) -> bool:
        """Whether the mark is there. Cheap: asked before each use of a key."""


class Wrapping(Protocol):
    """What stands in a key file."""

    def fresh(self, subject: str) -> tuple[bytes, bytes]:
        """A new key, and the bytes to store for it."""

    def unwrap(self, subject: str, stored: bytes) -> bytes:
        """The key of stored bytes; raises KeyUnavailable."""


class Unwrapped:
    """The key itself: whoever reads the folder has the keys."""

    def fresh(self, subject: str) -> tuple[bytes, bytes]:
        """See `Wrapping`."""
        key = secrets.token_bytes(KEY_BYTES)
        return key, key

    def unwrap(self, subject: str, stored: bytes) -> bytes:
        """See `Wrapping`."""
        if len(stored) != KEY_BYTES:
            raise KeyUnavailable(
                f"the key of subject {subject!r} has {len(stored)} bytes, expected {KEY_BYTES}: is it wrapped by a KMS "
                f"(privacy.kms_key)?",
                subject=subject,
            )
        return stored


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    """What a mark says, for people."""

    subject: str
    reason: str
    time_ms: int


class KeyFiles:
    """A folder: `NAME.key` while there is a key, `NAME.erased` for ever after."""

    def __init__(self, folder: Path, wrapping: Wrapping | None = None) -> None:
        self.folder = folder
        self._wrapping = wrapping or Unwrapped()
        self._marks: dict[str, str] = {}

    def find(self, subject: str) -> bytes | None:
        """See `KeyStore`."""
        self._check(subject)
        try:
            stored = self._path(subject, "key").read_bytes()
        except FileNotFoundError:
            self._check(subject)  # it may have been destroyed just now
            return None
        except OSError as error:
            raise self._unavailable(subject, error) from error
        return self._wrapping.unwrap(subject, stored)

    def obtain(self, subject: str) -> bytes:
        """See `KeyStore`."""
        if (key := self.find(subject)) is not None:
            return key
        key, stored = self._wrapping.fresh(subject)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            won = _create(self._path(subject, "key"), stored)
        except OSError as error:
            self._check(subject)
            raise self._unavailable(subject, error) from error
        if self.destroyed(subject):  # between our look and our write: nothing was encrypted under this key
            self._path(subject, "key").unlink(missing_ok=True)
            self._check(subject)
        if won:
            return key
        other = self.find(subject)
        assert other is not None, "a key file only goes away after its mark has come"
        return other

    def destroy(self, subject: str, reason: str) -> bool:
        """See `KeyStore`. The file is overwritten before it is removed; what a disk keeps of it is the disk's."""
        told = msgspec.json.encode(_Mark(subject=subject, reason=reason, time_ms=int(time.time() * 1000)))
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            first = _create(self._path(subject, "erased"), told)
            key = self._path(subject, "key")
            for path in (key, *self.folder.glob(f"{key.name}.*.new")):  # a process died between making and naming it
                _overwrite(path)
                path.unlink(missing_ok=True)
            _sync_folder(self.folder)
        except OSError as error:
            raise self._unavailable(subject, error) from error
        return first

    def destroyed(self, subject: str) -> bool:
        """See `KeyStore`."""
        mark = self._marks.get(subject)
        if mark is None:
            if len(self._marks) >= MARKS_REMEMBERED:
                self._marks.clear()
            mark = self._marks[subject] = str(self._path(subject, "erased"))
        return os.path.exists(mark)  # noqa: PTH110 - before each use of a key: a Path costs ten times as much

    def _path(self, subject: str, kind: str) -> Path:
        return self.folder / f"{folder_of(subject)}.{kind}"

    def _check(self, subject: str) -> None:
        if self.destroyed(subject):
            raise SubjectErased(
                f"subject {subject!r} was erased: its key is destroyed, nothing of it can be read or written any more",
                subject=subject,
            )

    def _unavailable(self, subject: str, error: OSError) -> KeyUnavailable:
        return KeyUnavailable(
            f"the key store at {self.folder} does not give the key of subject {subject!r}: {error.strerror}; check "
            f"privacy.keys and who may read it",
            subject=subject,
        )


def _create(path: Path, data: bytes) -> bool:
    """Makes the file whole and durable, or leaves the one that is there; True if it was made."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
    finally:
        temporary.unlink(missing_ok=True)
        _sync_folder(path.parent)
    return True


def _overwrite(path: Path) -> None:
    try:
        with path.open("r+b") as file:
            file.write(bytes(os.fstat(file.fileno()).st_size))
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        return


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
