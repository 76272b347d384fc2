"""Errors of the tools.

Every `ToolError` is the *call's* fault: its message, after `error: `, is what the model reads, so it says what was
found and what to do next. All of them are terminal: the same call on the same workspace fails again. Faults of the
machinery are never a `ToolError`; they are the environment's `SandboxInfraError`, and `run_call` lets them through,
because a failure of ours must not become an observation, and so never a reward.
"""


class ToolError(Exception):
    """A call that can't be carried out; the message is the text the model sees."""


class UnknownTool(ToolError):
    """The turn names a tool that does not exist."""


class BadArguments(ToolError):
    """An argument is unknown, missing or can't be read as its type."""


class PathRefused(ToolError):
    """The path, or a link on it, leads out of the workspace or to nothing."""


class NoSuchFile(ToolError):
    """Nothing stands at this path."""


class WrongKind(ToolError):
    """Something stands at this path, but not what the tool needs (file, directory, text)."""


class TooLarge(ToolError):
    """The file is larger than the tool reads; the message names another way."""


class NoMatch(ToolError):
    """edit_file's old text does not stand in the file exactly once."""


class PatternFailed(ToolError):
    """A search pattern needed more time than it may take."""


class NoSuchJob(ToolError):
    """No background job has this id (jobs do not survive a rebuild of the workspace)."""


class FileSystemRefused(ToolError):
    """The workspace's file system refused (permission, name too long, its quota)."""
