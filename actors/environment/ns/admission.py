"""How much one driver admits: refused before anything is made, retryable once others have ended."""

import os

import msgspec
import psutil

from odradek.actors.environment.errors import SandboxAdmissionError


class NsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a driver keeps free for others."""

    max_sandboxes: int = 1000
    """Live at once. Each holds about 2 MB in two processes of ours (measured: 1.9 MB at 200)."""
    min_free_disk_bytes: int = 512 * 1024 * 1024
    """Below this no sandbox is made. Too low: commands fail for want of space, which looks like the agent's fault."""
    max_disk_bytes: int = 4 * 1024 * 1024 * 1024
    """Bytes that one sandbox's files may take; above, it is ended. Too low: builds of real projects end; too high: a
    few sandboxes fill the disk that the log needs too."""
    min_free_memory_bytes: int = 256 * 1024 * 1024
    """Below this no sandbox is made. Too low: the kernel kills at random."""


def admit(config: NsConfig, live: int, state_fd: int) -> None:
    """Raise `SandboxAdmissionError` unless one more sandbox fits."""
    if live >= config.max_sandboxes:
        raise SandboxAdmissionError(f"{live} sandboxes live, {config.max_sandboxes} admitted")
    disk = os.statvfs(state_fd)
    free = disk.f_bavail * disk.f_frsize
    if free < config.min_free_disk_bytes:
        raise SandboxAdmissionError(f"{free} bytes free for sandboxes, {config.min_free_disk_bytes} are kept")
    memory = psutil.virtual_memory().available
    if memory < config.min_free_memory_bytes:
        raise SandboxAdmissionError(f"{memory} bytes of memory available, {config.min_free_memory_bytes} are kept")
