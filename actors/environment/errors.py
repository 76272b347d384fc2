"""Errors of the environment room.

One base class; what a caller may do next is a type, not a flag:

* `SandboxInfraError`: ours, not the command's. Retry, or rebuild the workspace in a fresh sandbox. Never a reward.
* `SandboxSpecError`: the demand can't be met by this driver on this host, or a call is malformed. Retrying is useless.
* `SandboxNotFoundError`: no such sandbox, job or snapshot (destroyed, expired, or never made).
* `SandboxPathError`: a path that leaves the workspace, or a file that is not there or of the wrong kind. The message is
  fit to show to the model.

A command that fails, is killed or runs out of time is a result (`ExecResult`), never an exception.
Errors cross processes whole: they are rebuilt from their message alone.
"""


class SandboxError(Exception):
    """Base of every error of this room."""


class SandboxInfraError(SandboxError):
    """The host, the driver or the sandbox's own machinery failed; retryable."""


class SandboxGoneError(SandboxInfraError):
    """The sandbox ended while a call was running (lifetime over, killed, host lost); rebuild it from the log."""


class SandboxAdmissionError(SandboxInfraError):
    """The driver holds as many sandboxes, or as much disk, as it admits; retry after some are destroyed."""


class SandboxSpecError(SandboxError):
    """A demand that this driver can't enforce on this host, or a malformed call; terminal."""


class SandboxNotFoundError(SandboxError):
    """No such sandbox, job or snapshot; terminal for this id."""


class SandboxSucceededError(SandboxError):
    """The session has a newer owner; terminal for this one, which has nothing left to do."""


class SandboxPathError(SandboxError):
    """A path outside the workspace, absent, or of the wrong kind; terminal for this call."""
