"""What a file tree is, apart from who owns it and when it was written: paths, kinds, modes, contents.

A tree's digest is the SHA-256 of its sorted entries in one fixed byte form, so that the same files give the same digest
on any host. Only files, directories and symbolic links are part of a tree; anything else is refused.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal

import msgspec

from odradek.sandbox_images.errors import ImageError

DEFAULT_FILE_MODE = 0o644
DEFAULT_DIR_MODE = 0o755


class TreeEntry(msgspec.Struct, frozen=True, array_like=True):
    """One path of a tree. `digest`: SHA-256 (hex) of a file's content; `target`: what a link says."""

    path: str
    kind: Literal["file", "symlink", "dir"]
    mode: int
    digest: str = ""
    target: str = ""
    size: int = 0


class FileSpec(msgspec.Struct, frozen=True):
    """A file, a link (`target`) or an empty directory (`directory`) to put into a layer."""

    content: bytes = b""
    mode: int = DEFAULT_FILE_MODE
    target: str = ""
    directory: bool = False


def tree_digest(entries: Iterable[TreeEntry]) -> str:
    """Digest of a tree; independent of the order given."""
    total = hashlib.sha256(b"odradek.tree.v1\n")
    for entry in sorted(entries, key=lambda e: e.path):
        for field in (entry.path, entry.kind, f"{entry.mode:o}", entry.digest, entry.target):
            raw = os.fsencode(field)
            total.update(len(raw).to_bytes(4, "big") + raw)
    return total.hexdigest()


def scan_tree(root: Path) -> list[TreeEntry]:
    """The entries below `root` (not `root` itself), sorted by path. Links are not followed."""
    return sorted(_scan(root, ""), key=lambda e: e.path)


def _scan(directory: Path, prefix: str) -> Iterator[TreeEntry]:
    for item in os.scandir(directory):
        path = f"{prefix}{item.name}"
        info = item.stat(follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            yield TreeEntry(path, "symlink", 0, target=os.readlink(item.path))  # noqa: PTH115 - verbatim
        elif stat.S_ISDIR(info.st_mode):
            yield TreeEntry(path, "dir", stat.S_IMODE(info.st_mode))
            yield from _scan(Path(item.path), path + "/")
        elif stat.S_ISREG(info.st_mode):
            with Path(item.path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            yield TreeEntry(path, "file", stat.S_IMODE(info.st_mode), digest=digest, size=info.st_size)
        else:
            raise ImageError(f"{item.path}: neither file, directory nor link; an image can't hold it")


def plan_tree(files: Mapping[str, bytes | FileSpec], prefix: str) -> tuple[list[TreeEntry], dict[str, FileSpec]]:
    """Entries (with the parents they need) and contents of a tree given in memory, below `prefix`."""
    specs: dict[str, FileSpec] = {}
    for name, value in files.items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise ImageError(f"layer file {name!r}: not a plain relative path")
        specs["/".join((prefix, *parts)) if prefix else "/".join(parts)] = (
            value if isinstance(value, FileSpec) else FileSpec(content=value)
        )
    directories = {str(parent) for path in specs for parent in PurePosixPath(path).parents if str(parent) != "."}
    if prefix:
        directories.add(prefix)
    for path in directories & specs.keys():
        if not specs[path].directory:
            raise ImageError(f"layer file {path!r} is a file and the parent of another one")
    entries = [TreeEntry(path, "dir", DEFAULT_DIR_MODE) for path in directories - specs.keys()]
    entries.extend(_planned(path, spec) for path, spec in specs.items())
    return sorted(entries, key=lambda e: e.path), specs


def _planned(path: str, spec: FileSpec) -> TreeEntry:
    if spec.directory:
        return TreeEntry(path, "dir", spec.mode if spec.mode != DEFAULT_FILE_MODE else DEFAULT_DIR_MODE)
    if spec.target:
        return TreeEntry(path, "symlink", 0, target=spec.target)
    digest = hashlib.sha256(spec.content).hexdigest()
    return TreeEntry(path, "file", spec.mode, digest=digest, size=len(spec.content))
