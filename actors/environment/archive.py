"""A workspace as one tar: packed by whoever publishes it by reference, unpacked by whoever makes it.

The same tree gives the same bytes: sorted, no times, no owners. Anybody may publish a tar, so `unpack` takes nothing on
trust: plain files and folders only, paths that stay inside and name no repository history, a bounded size; nothing is
ever written to this host's file system.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.tasks.paths import paths_fault
from odradek.sandbox_images.tree import FileSpec

MAX_ENTRIES = 100_000
"""Files and folders of one tar. More is a mistake, or a way to hold the host's memory."""


def pack(tree: Mapping[str, FileSpec]) -> bytes:
    """The tar of files and links by path."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, file in sorted(tree.items()):
            info = tarfile.TarInfo(path)
            info.mode = file.mode
            if file.target:
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, file.target, 0o777
                archive.addfile(info)
            else:
                info.size = len(file.content)
                archive.addfile(info, io.BytesIO(file.content))
    return out.getvalue()


def unpack(data: bytes) -> dict[str, FileSpec]:
    """The files of a tar. Raises SandboxSpecError, naming what is wrong with it."""
    files: dict[str, FileSpec] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for count, info in enumerate(archive, 1):
                if count > MAX_ENTRIES:
                    raise SandboxSpecError(f"the workspace's tar has more than {MAX_ENTRIES} entries")
                if info.isdir():
                    continue
                path = info.name.removeprefix("./")
                if not info.isreg() or info.issparse():
                    raise SandboxSpecError(f"the workspace's tar: {path[:80]!r} is a link or a special file")
                content = archive.extractfile(info)
                assert content is not None
                files[path] = FileSpec(content.read(), 0o755 if info.mode & 0o100 else 0o644)
    except (tarfile.TarError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise SandboxSpecError(f"the workspace's tar can't be read: {type(error).__name__}: {error}") from error
    if fault := paths_fault(files):
        raise SandboxSpecError(f"the workspace's tar: {fault}")
    return files
