"""The sandbox protocol: what a session, a tool and a grader may ask of any driver.

A driver makes sandboxes from an image and layers; a sandbox has one workspace (`/workspace`), runs commands, and lets
the host read and write the workspace without starting a process. The contract, tested for every driver by
`tests/contract/sandbox_contract.py`:

* A field that a driver can't enforce is refused (`SandboxSpecError`), never ignored. For limits the spec states the
  weakest enforcement it accepts.
* A command's failure, time-out or kill is an `ExecResult`. Exceptions are ours (`SandboxInfraError`) or the caller's.
* `exec` ends when the command's process ends and its output is drained, not at EOF of the pipe; stdin is always empty.
* A time-out kills every descendant of the command; what it wrote so far is returned.
* Host-side paths never leave the workspace: links are followed only inside it.
* A sandbox dies with its driver's process and at its lifetime, whichever comes first, without help from the client.
* Every call has a deadline. Calls with an effect take an idempotency key: the same key again gives the same answer.

Paths are relative to the workspace; an absolute path below `/workspace` means the same.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from odradek.actors.environment.delta import Delta

WORKSPACE = "/workspace"
"""Where the workspace is mounted inside every sandbox."""

DEFAULT_DEADLINE_S = 30.0
"""Seconds a driver call may take before it is an infrastructure failure. Too low: a loaded host loses good sandboxes;
too high: a stuck host is noticed late."""

DEFAULT_EXEC_TIMEOUT_S = 120.0
"""Seconds a command may run unless the call says otherwise. Too low: test suites are cut; too high: a loop holds a slot
for long."""

DEFAULT_OUTPUT_BYTES = 64 * 1024
"""Bytes of each stream that a result keeps (half from the beginning, half from the end). Too low: errors are cut out;
too high: one chatty command fills the context."""

DEFAULT_LIFETIME_S = 3600.0
"""Seconds after which a sandbox is killed by its host, whatever its client does, unless renewed."""

Enforcement = Literal["cgroup", "rlimit"]
"""How a limit is held. `cgroup`: for the sandbox as a whole. `rlimit`: the weaker per-process or per-file form."""

Network = Literal["none", "host"]


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An amount and the weakest enforcement that the caller accepts for it."""

    amount: float
    weakest: Enforcement = "rlimit"


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Resource limits; None means unlimited. What `rlimit` means is said for each."""

    cpus: Limit | None = None
    """Processors' worth of time. By rlimit: pinned to that many processors, rounded up."""
    memory_bytes: Limit | None = None
    """Bytes of memory. By rlimit: address space of each process."""
    pids: Limit | None = Limit(256)
    """Processes and threads at once. By rlimit: exact as well, counted for the sandbox, the driver's
    own few processes in it included."""
    disk_bytes: Limit | None = None
    """Bytes written. By rlimit: size of each file."""


class SandboxSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to make: an image by digest, layers over it (lowest first), and the terms under which it runs."""

    image: str
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Added to the image's environment for every command; nothing of the host's environment is passed on."""
    limits: Limits = Limits()
    network: Network = "none"
    lifetime_s: float = DEFAULT_LIFETIME_S
    labels: Mapping[str, str] = {}
    """Free names for `list` (session id, task id); written to the record before the sandbox is made."""
    production: bool = False
    """A person waits for it: where no place is left it takes that of a sandbox that nobody waits for."""


class ExecRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command: `argv`, or a `shell` line run by `/bin/sh -c`. Exactly one of the two."""

    argv: tuple[str, ...] = ()
    shell: str = ""
    cwd: str = ""
    """Relative to the workspace."""
    env: Mapping[str, str] = {}
    timeout_s: float = DEFAULT_EXEC_TIMEOUT_S
    max_output_bytes: int = DEFAULT_OUTPUT_BYTES
    """Kept for each stream; what is left out in the middle is marked in the text and `truncated` is set."""
    merge_output: bool = False
    """Both streams through one pipe, in the order written, as `stdout`."""
    key: str = ""
    """Idempotency key within this sandbox; the same key again returns the first call's result."""
    epoch: int = 0
    """Owner's epoch; below the epoch of the last `take_over` the call is refused."""


class ExecResult(msgspec.Struct, frozen=True):
    """How a command ended. `exit_code` is as a shell reports it (128 + signal when killed), `signal` is 0 otherwise."""

    exit_code: int
    stdout: str
    stderr: str = ""
    signal: int = 0
    timed_out: bool = False
    truncated: bool = False
    duration_s: float = 0.0


class OutputChunk(msgspec.Struct, frozen=True):
    """Text as it arrives; never split inside a character."""

    stream: Literal["stdout", "stderr"]
    text: str


class JobStatus(msgspec.Struct, frozen=True):
    """A background command at the moment of the poll; `output` is what came since the poll before."""

    job_id: str
    running: bool
    output: str
    exit_code: int | None = None
    signal: int = 0
    truncated: bool = False


class FileStat(msgspec.Struct, frozen=True):
    """`path` is relative to the workspace; `kind` of what is there, a link itself unless followed."""

    path: str
    kind: Literal["file", "symlink", "dir", "other"]
    size: int
    mode: int
    mtime_ns: int
    target: str = ""


class SandboxInfo(msgspec.Struct, frozen=True):
    """One line of `list`."""

    sandbox_id: str
    labels: Mapping[str, str]
    age_s: float
    lifetime_left_s: float


class SandboxMetrics(msgspec.Struct, frozen=True):
    """What a sandbox uses now. None: not measurable on this host."""

    processes: int
    memory_bytes: int | None
    cpu_s: float | None
    disk_bytes: int


class DriverMetrics(msgspec.Struct, frozen=True):
    """Counters since start, and the live count."""

    live: int
    created: int
    destroyed: int
    expired: int
    execs: int
    reaped_at_start: int


class Capabilities(msgspec.Struct, frozen=True):
    """What this driver can do on this host; `enforcement` lists for each limit the levels it can hold."""

    driver: str
    enforcement: Mapping[str, tuple[Enforcement, ...]]
    networks: tuple[Network, ...]
    memory_fork: bool
    """Whether a fork carries running processes. Without it a fork has the files only."""
    unprivileged: bool


class PreflightCheck(msgspec.Struct, frozen=True):
    """One thing the driver needs of the host; `remedy` says what to change when it is missing."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


FetchContent = Callable[[str], Awaitable[bytes]]
"""Returns the bytes of a SHA-256 digest, for delta entries that carry no content."""


class Sandbox(Protocol):
    """One live sandbox."""

    @property
    def sandbox_id(self) -> str: ...
    @property
    def spec(self) -> SandboxSpec: ...

    async def exec(self, request: ExecRequest) -> ExecResult:
        """Run to the end. Cancelling the call kills the command and its descendants."""
        ...

    def exec_stream(self, request: ExecRequest) -> AsyncIterator[OutputChunk | ExecResult]:
        """Run, yielding output as it comes; the last item is the result."""
        ...

    async def start_job(self, request: ExecRequest) -> str:
        """Run in the background; returns the job's id. Its time-out counts as well."""
        ...

    async def poll_job(self, job_id: str) -> JobStatus: ...
    async def stop_job(self, job_id: str) -> JobStatus:
        """Kill the job's whole tree; a job that has ended is left as it is."""
        ...

    async def take_over(self, epoch: int) -> None:
        """Kill running calls of older epochs and refuse later ones."""
        ...

    async def read(self, path: str, *, offset: int = 0, limit: int | None = None) -> bytes: ...
    async def write(self, path: str, data: bytes, *, mode: int | None = None) -> FileStat:
        """Replace a file's content at once or not at all, making missing parents. An existing file keeps its mode."""
        ...

    async def stat(self, path: str, *, follow: bool = True) -> FileStat: ...
    async def list(self, path: str = "", *, recursive: bool = False) -> tuple[FileStat, ...]:
        """Entries of a directory sorted by path; links are not followed below `path`."""
        ...

    async def upload(self, files: Mapping[str, bytes]) -> None: ...
    async def download(self, path: str = "") -> Mapping[str, bytes]:
        """Every regular file at or below `path`, by path relative to the workspace."""
        ...

    async def diff(self, *, incremental: bool = False) -> Delta:
        """The workspace against what image and layers make it, also in a fork. `incremental`: against what the last
        incremental diff, `apply` or fork left, so that the deltas of all calls compose to the whole.
        """
        ...

    async def apply(self, delta: Delta, fetch: FetchContent | None = None) -> None:
        """Make the workspace what the delta says. The next incremental diff starts there."""
        ...

    async def snapshot(self) -> str:
        """Freeze the files; returns a snapshot id for `SandboxDriver.create_from` on this driver."""
        ...

    async def fork(self, *, key: str = "") -> "Sandbox":
        """A second sandbox with the same files and spec; running processes are not carried unless `memory_fork`."""
        ...

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def set_network(self, network: Network) -> None: ...
    async def renew(self, lifetime_s: float) -> None:
        """Set the time left to live, from now."""
        ...

    async def destroy(self) -> None:
        """End every process and remove every trace. Twice is once."""
        ...

    async def metrics(self) -> SandboxMetrics: ...


class SandboxDriver(Protocol):
    """Makes and finds sandboxes on one host."""

    async def capabilities(self) -> Capabilities: ...
    async def preflight(self) -> Sequence[PreflightCheck]:
        """Try everything the driver needs, before any work is queued."""
        ...

    async def create(self, spec: SandboxSpec, *, key: str = "", deadline_s: float = DEFAULT_DEADLINE_S) -> Sandbox:
        """Same `key` again: the same sandbox, as long as it lives."""
        ...

    async def create_from(
        self, snapshot_id: str, *, key: str = "", deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Sandbox: ...
    async def drop_snapshot(self, snapshot_id: str) -> None: ...
    async def get(self, sandbox_id: str) -> Sandbox: ...
    async def list(self) -> tuple[SandboxInfo, ...]: ...
    async def metrics(self) -> DriverMetrics: ...
    async def close(self) -> None:
        """Destroy all sandboxes; nothing of this driver is left on the host."""
        ...
