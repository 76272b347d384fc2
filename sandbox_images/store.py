"""Local store of layers and images by digest.

    ROOT/layers/DIGEST/tree/…        the files, as an overlay's lower directory
    ROOT/layers/DIGEST/manifest      the tree's entries (msgpack): what `diff` compares with, read without walking
    ROOT/images/DIGEST               an image: its layers, lowest first, and its environment (JSON)
    ROOT/built/KEY                   digest of the image that a recipe built (see `builder.py`)

A layer appears by one rename, complete or not at all; two processes that make the same layer both succeed. Layers are
never changed afterwards. Run as root, the store gives all files to `SANDBOX_UID`, because a sandbox knows one user only
and must be able to change what it sees; otherwise they are the caller's.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from odradek.sandbox_images.errors import ImageCorruptError, ImageNotFoundError
from odradek.sandbox_images.tree import FileSpec, TreeEntry, plan_tree, scan_tree, tree_digest

SANDBOX_UID = 65017
"""User that sandboxes run as when the driver runs as root. Of the range that Debian reserves (65000-65533), so that no
account has it; below 65536, so that it exists inside containers with the usual id map."""

WORKSPACE_PREFIX = "workspace"
"""Where task files lie in a layer."""


class Image(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An image: layers, lowest first, and the environment in which every command starts."""

    layers: tuple[str, ...]
    env: dict[str, str] = {}
    name: str = ""


def store_owner() -> int:
    """The user who owns layers and runs sandboxes on this host, seen from the calling process."""
    return SANDBOX_UID if os.geteuid() == 0 else os.geteuid()


class ImageStore:
    """Layers and images under one directory. Safe to use from several processes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("layers", "images", "built", "tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
            (root / name).chmod(0o755)  # the sandbox user must reach the layers whatever the umask
        self._manifests: dict[str, list[TreeEntry]] = {}

    @property
    def layers_dir(self) -> Path:
        """Holds `DIGEST/tree` for each layer; may be entered by the sandbox user."""
        return self.root / "layers"

    def has_layer(self, digest: str) -> bool:
        return self._layer(digest).is_dir()

    def layer_path(self, digest: str) -> Path:
        """The layer's files; `ImageNotFoundError` when they are not here."""
        path = self._layer(digest) / "tree"
        if not path.is_dir():
            raise ImageNotFoundError(f"layer {digest}: not in the store {self.root}; build or pull it first")
        return path

    def manifest(self, digest: str) -> list[TreeEntry]:
        """Entries of a layer, sorted by path; kept in memory after the first call."""
        known = self._manifests.get(digest)
        if known is None:
            self.layer_path(digest)
            raw = (self._layer(digest) / "manifest").read_bytes()
            known = self._manifests[digest] = msgspec.msgpack.decode(raw, type=list[TreeEntry])
        return known

    def layer_from_files(self, files: Mapping[str, bytes | FileSpec], prefix: str = WORKSPACE_PREFIX) -> str:
        """Digest of a layer with these files, paths relative to `prefix`; written only if it is not there yet."""
        entries, specs = plan_tree(files, prefix)
        digest = tree_digest(entries)
        if not self.has_layer(digest):
            self._commit(lambda tree: _write(tree, entries, specs), entries)
        return digest

    def layer_from_tree(self, fill: Callable[[Path], None]) -> str:
        """Digest of the layer that `fill` writes into the empty directory it is given."""
        return self._commit(fill, None)

    def put_image(self, image: Image) -> str:
        """Store an image; its digest. Its layers must be there."""
        for layer in image.layers:
            self.layer_path(layer)
        raw = msgspec.json.encode(image, order="deterministic")
        digest = hashlib.sha256(raw).hexdigest()
        _replace(self.root / "images" / digest, raw)
        return digest

    def image(self, digest: str) -> Image:
        return msgspec.json.decode(self.image_bytes(digest), type=Image)

    def image_bytes(self, digest: str) -> bytes:
        """An image's stored form, checked against its digest."""
        try:
            raw = (self.root / "images" / digest).read_bytes()
        except FileNotFoundError:
            raise ImageNotFoundError(f"image {digest}: not in the store {self.root}; build or pull it first") from None
        if hashlib.sha256(raw).hexdigest() != digest:
            raise ImageCorruptError(f"image {digest}: stored bytes have another digest; remove it and build again")
        return raw

    def built(self, key: str) -> str | None:
        """Digest of the image built under this key, if it is still complete here."""
        with contextlib.suppress(FileNotFoundError, ImageNotFoundError):
            digest = (self.root / "built" / key).read_text()
            for layer in self.image(digest).layers:
                self.layer_path(layer)
            return digest
        return None

    def remember_built(self, key: str, digest: str) -> None:
        _replace(self.root / "built" / key, digest.encode())

    def _layer(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ImageNotFoundError(f"layer {digest!r}: not a SHA-256 in hex")
        return self.root / "layers" / digest

    def _commit(self, fill: Callable[[Path], None], entries: list[TreeEntry] | None) -> str:
        work = Path(tempfile.mkdtemp(dir=self.root / "tmp"))
        try:
            tree = work / "tree"
            tree.mkdir()
            fill(tree)
            found = scan_tree(tree) if entries is None else entries
            digest = tree_digest(found)
            (work / "manifest").write_bytes(msgspec.msgpack.encode(found))
            _give_to_sandbox(tree)
            work.chmod(0o755)
            try:
                work.rename(self._layer(digest))
            except OSError:
                if not self.has_layer(digest):  # another process made the same layer first: theirs is as good
                    raise
            return digest
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _write(tree: Path, entries: list[TreeEntry], specs: Mapping[str, FileSpec]) -> None:
    for entry in entries:  # sorted, so parents come first
        path = tree / entry.path
        if entry.kind == "dir":
            path.mkdir()
        elif entry.kind == "symlink":
            path.symlink_to(entry.target)
        else:
            path.write_bytes(specs[entry.path].content)
            path.chmod(entry.mode)
    for entry in reversed(entries):  # children first: a directory may forbid writing
        if entry.kind == "dir":
            (tree / entry.path).chmod(entry.mode)


def _give_to_sandbox(tree: Path) -> None:
    """As root, make the sandbox user the owner; chown clears set-id bits, which an image has no use for."""
    if os.geteuid() != 0:
        return
    os.chown(tree, SANDBOX_UID, SANDBOX_UID)
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            os.chown(Path(directory) / name, SANDBOX_UID, SANDBOX_UID, follow_symlinks=False)


def _replace(path: Path, raw: bytes) -> None:
    """Write a small file so that a reader sees all of it or none."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(raw)
    Path(file.name).chmod(0o644)
    Path(file.name).rename(path)
