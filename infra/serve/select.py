"""Which files of a person's folder are copied: tracked and unignored ones, never secrets.

In a git work tree git itself says what is tracked or unignored; elsewhere the folder's `.gitignore` files do, read with
git's rules. Then the names of `SECRET_NAMES` are left out wherever they stand, tracked or not, and so is what can't be
copied (sockets, nested repositories, names that are not text). Of what is left, `secret_inside` tells by content which
files hold a private key. Everything left out for such a reason is returned with it, to be said on screen; what is
merely ignored is not listed.

Git runs without its hooks for file watching and without touching its index: looking must neither run a program that
the folder names nor change a byte in it.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pathspec import GitIgnoreSpec

from odradek.actors.tools.redact import redact
from odradek.actors.tools.text import decode
from odradek.infra.serve.errors import FolderRefused

SECRET_NAMES = (
    ".env*",
    "*.env",
    "*.pem",
    "*.key",
    "*.p12",
    "*.pfx",
    "*.jks",
    "*.keystore",
    "*.kdbx",
    "*.ppk",
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "credentials*",
    "creds*",
    "service-account*",
    "service_account*",
    "client_secret*",
    "kubeconfig*",
    "*.kubeconfig",
    ".netrc",
    "_netrc",
    ".npmrc",
    ".pypirc",
    ".pgpass",
    ".my.cnf",
    ".htpasswd",
    ".git-credentials",
    ".dockercfg",
    ".aws",
    ".ssh",
    ".gnupg",
    ".kube",
    ".docker",
    ".azure",
)
"""Names (of a file or of any directory above it) that are never copied, whatever their case. A name too many hides a
file from the agent, and is said; a name too few sends a key to the log for ever. `.env.example` is one of them: people
leave true values in it. A source file of such a name (`credentials.py`) is judged by what is in it instead."""

SOURCE_SUFFIXES = (
    *(".py", ".pyi", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs", ".java", ".kt", ".scala", ".rb", ".php", ".c", ".h"),
    *(".cc", ".cpp", ".hpp", ".cs", ".swift", ".sh", ".sql", ".html", ".css", ".vue", ".md", ".rst"),
)
"""Endings of code and prose."""

LOOKED_AT_BYTES = 64 * 1024
"""Of each file, bytes that are looked at for a secret. Too low misses a key behind a long head; a key stands first."""

BY_PRODUCTS = GitIgnoreSpec.from_lines(
    ["__pycache__/", "*.pyc", ".pytest_cache/", ".mypy_cache/", ".ruff_cache/", ".hypothesis/", ".coverage"]
)
"""What running tests leaves behind: neither copied nor brought back, even where nobody ignores it."""

GIT_SECONDS = 30.0
"""Seconds git may take to list a work tree. Too low refuses a large repository on a slow disk."""

GIT_OPTIONS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.quotePath=false")
"""`core.fsmonitor` of a repository's own configuration names a program that git would run."""

KEY_MARK = "[redacted:PRIVATE_KEY]"
"""What the redactor writes over a private key."""

Ignored = Callable[[Sequence[str]], set[str]]


@dataclass(frozen=True, slots=True)
class Selection:
    """Paths to copy, sorted, and what was left out: path to reason."""

    paths: list[str]
    left_out: dict[str, str]
    ignored: Ignored
    """Which of some paths that were not copied would have been ignored: changes there are by-products, not work."""


def is_secret(path: str) -> bool:
    """Whether a name on the path is one of `SECRET_NAMES`, and not only that of a source file."""
    *folders, name = path.lower().split("/")
    return any(map(_is_telling, folders)) or (_is_telling(name) and not _is_source(name))


def secret_inside(path: str, content: bytes) -> str:
    """Why a file is left out for what is in it; empty if it is not. A private key is one in any file; another secret
    only in a source file with a telling name."""
    name = path.lower().rpartition("/")[2]
    head = content[:LOOKED_AT_BYTES]
    key, telling = b"PRIVATE KEY" in head, _is_telling(name) and _is_source(name)
    if not key and not telling:
        return ""
    text = decode(head)
    shown = redact(text)
    if shown.count(KEY_MARK) > text.count(KEY_MARK):
        return "holds a private key"
    return "may hold a secret" if telling and shown != text else ""


def _is_telling(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in SECRET_NAMES)


def _is_source(name: str) -> bool:
    return name.endswith(SOURCE_SUFFIXES) and not name.startswith(".")


def select(root: Path) -> Selection:
    """What to copy from `root`."""
    if not root.is_dir():
        raise FolderRefused(f"{root}: not a directory")
    listed = _git_listing(root)
    if listed is not None:
        names, ignored = listed
    else:
        rules = IgnoreRules(root)
        names, ignored = rules.walk(), rules.ignored
    paths, left_out = [], {}
    for raw in names:
        path = raw.rstrip("/")
        if _is_git(path) or BY_PRODUCTS.match_file(path):
            continue
        reason = _reason(root, path, raw)
        if reason == "":
            paths.append(path)
        elif reason is not None:
            left_out[show(path)] = reason
    return Selection(sorted(set(paths)), left_out, lambda asked: set(BY_PRODUCTS.match_files(asked)) | ignored(asked))


def _reason(root: Path, path: str, raw: str) -> str | None:
    """Why a path is not copied; empty if it is, None if it is not there."""
    if not _is_text(path):
        return "its name is not text"
    if is_secret(path):
        return "may hold a secret"
    full = root / path
    if not os.path.lexists(full):
        return None  # tracked, and deleted in the work tree
    if full.is_symlink() or full.is_file():
        return ""
    if full.is_dir():
        return "a repository of its own" if raw.endswith("/") or (full / ".git").exists() else None
    return "not a file"


def _is_git(path: str) -> bool:
    return any(part.lower() == ".git" for part in path.split("/"))


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def show(path: str) -> str:
    """A path for a person, whatever bytes it has."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


# -- git --------------------------------------------------------------------------------------------------------------


def _git_listing(root: Path) -> tuple[list[str], Ignored] | None:
    """Tracked and unignored paths below `root` by git; None where git has no say (no work tree, or an ignored one)."""
    if not any((folder / ".git").exists() for folder in (root, *root.parents)) or shutil.which("git") is None:
        return None
    if _git(root, "rev-parse", "--is-inside-work-tree") != "true\n":
        return None
    if _git(root, "check-ignore", "--quiet", "--", ".", codes=(0, 1, 128)) is not None:
        return None  # somebody else's repository ignores this whole folder
    output = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if output is None:
        raise FolderRefused(f"{root}: git can't list its files; run git status there")
    return [name for name in output.split("\0") if name], lambda paths: _git_ignored(root, paths)


def _git_ignored(root: Path, paths: Sequence[str]) -> set[str]:
    if not paths:
        return set()
    asked = "".join(f"{path}\0" for path in paths)
    output = _git(root, "check-ignore", "-z", "--no-index", "--stdin", codes=(0, 1), given=asked)
    return set((output or "").split("\0")) - {""}


def _git(root: Path, *arguments: str, codes: Iterable[int] = (0, 128), given: str = "") -> str | None:
    """Output of git at `root`, or None if it did not succeed; `FolderRefused` for an exit code not in `codes`."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment |= {"GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", *GIT_OPTIONS, "-C", str(root), *arguments]
    try:
        done = subprocess.run(
            command, input=os.fsencode(given), capture_output=True, env=environment, timeout=GIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise FolderRefused(f"{root}: git {arguments[0]} did not answer within {GIT_SECONDS:g} s") from error
    if done.returncode not in codes or b"dubious ownership" in done.stderr:
        reason = (done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"])[0]
        raise FolderRefused(f"{root}: git {arguments[0]} failed: {reason}")
    return os.fsdecode(done.stdout) if done.returncode == 0 else None


# -- without git ------------------------------------------------------------------------------------------------------


class IgnoreRules:
    """The `.gitignore` files of a folder, read with git's rules: the deepest file that says something decides, and
    nothing below an ignored directory is looked at."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs: dict[str, GitIgnoreSpec | None] = {}

    def walk(self) -> list[str]:
        """Every unignored path that is not a directory."""
        return list(self._below(""))

    def ignored(self, paths: Sequence[str]) -> set[str]:
        """Those that are ignored, or have an ignored directory above them."""
        return {path for path in paths if self._ignored(path.rstrip("/").split("/"), path.endswith("/"))}

    def _ignored(self, parts: list[str], is_dir: bool) -> bool:
        return any(self._match("/".join(parts[:n]), is_dir or n < len(parts)) for n in range(1, len(parts) + 1))

    def _below(self, directory: str) -> Iterator[str]:
        with os.scandir(self._root / directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{directory}/{entry.name}" if directory else entry.name
            is_dir = entry.is_dir(follow_symlinks=False)
            if entry.name.lower() == ".git" or self._match(path, is_dir):
                continue
            if not is_dir:
                yield path
            elif (self._root / path / ".git").exists():
                yield f"{path}/"
            else:
                yield from self._below(path)

    def _match(self, path: str, is_dir: bool) -> bool:
        parts = path.split("/")
        for depth in range(len(parts) - 1, -1, -1):
            spec = self._spec("/".join(parts[:depth]))
            if spec is None:
                continue
            verdict = spec.check_file("/".join(parts[depth:]) + ("/" if is_dir else "")).include
            if verdict is not None:
                return bool(verdict)
        return False

    def _spec(self, directory: str) -> GitIgnoreSpec | None:
        if directory not in self._specs:
            file = self._root / directory / ".gitignore"
            usable = file.is_file() and not file.is_symlink()
            lines = file.read_text("utf-8", "replace").splitlines() if usable else None
            self._specs[directory] = GitIgnoreSpec.from_lines(lines) if lines is not None else None
        return self._specs[directory]
