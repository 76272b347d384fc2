"""What a tool may do to a workspace: files by path, commands by text. The environment implements it over a sandbox.

Rules every implementation keeps, and `tests/unit/test_tools_workspace.py` checks on each:
* A path is relative to the workspace root; an absolute path below the workspace's own mount point means the same file.
* No path leaves the workspace, by `..`, an absolute path or a link anywhere on it: `PathRefused`, nothing touched.
* A link to an inside file or directory works, for reading and writing, and stays a link. Writing through a link to
  nothing is refused, because whoever made the link chooses what the write would create.
* Only regular files are read and written; a pipe, socket or device is `WrongKind`, so no read ever blocks.
* A write is all or nothing, makes missing parent directories and keeps the mode of a file that exists.
* A command starts from an empty environment with stdin at end-of-file, in its own process group, and ends when its
  process has exited and its output is drained, even if a background child still holds the pipe.
* What the call did wrong is a `ToolError`; anything else is a `SandboxError` of the environment.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

Kind = Literal["file", "directory", "link", "other"]

OnOutput = Callable[[str], None]
"""Called with each piece of a command's stdout and stderr, in the order they were written. No piece ends inside a
character; bytes that are no UTF-8 arrive as `\\xNN`."""


class Entry(msgspec.Struct, frozen=True):
    """One name in a directory; a link is reported as a link, never as its target."""

    name: str
    kind: Kind
    size: int


class FileStat(msgspec.Struct, frozen=True):
    """What stands at a path once links are followed."""

    kind: Kind
    size: int
    mode: int


class Exit(msgspec.Struct, frozen=True):
    """How a command ended; `code` is None when it was stopped by the time-out (a signal's code is 128 + number)."""

    code: int | None
    timed_out: bool = False


class JobStatus(msgspec.Struct, frozen=True):
    """A background job: its output since the last poll, and its exit code once it ended."""

    output: str
    running: bool
    code: int | None
    truncated: bool = False
    """The job wrote more between two polls than is kept; `output` then lacks the middle."""


class Workspace(Protocol):
    """The files and the shell of one session."""

    @property
    def mount(self) -> str:
        """The absolute path under which the workspace's own processes see its root."""
        ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """The whole file; `TooLarge` if it has more than `max_bytes`."""
        ...

    async def write(self, path: str, content: bytes, mode: int | None = None) -> None:
        """Put `content` at `path`; `mode` None keeps the old mode, or gives a new file 0o644."""
        ...

    async def stat(self, path: str) -> FileStat | None:
        """None if nothing stands there; links are followed, so a link that leaves is `PathRefused`."""
        ...

    async def list(self, path: str) -> list[Entry]:
        """The directory's entries sorted by name."""
        ...

    async def exec(self, command: str, timeout_s: float, on_output: OnOutput) -> Exit:
        """Run a shell command; on time-out its whole process tree is ended."""
        ...

    async def start_job(self, command: str) -> str:
        """Start a background command and return its id."""
        ...

    async def poll_job(self, job: str) -> JobStatus: ...

    async def stop_job(self, job: str) -> JobStatus:
        """End the job's process tree and return what it still wrote."""
        ...
