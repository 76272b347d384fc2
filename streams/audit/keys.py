"""The notary's Ed25519 key: made once on the host, kept in a file that only its owner reads, named by its public half.

Whoever holds the file can sign as the notary. It is not on the log and not on S3; back it up apart from both.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from odradek.streams.errors import Terminal


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A key pair."""

    private: Ed25519PrivateKey = field(repr=False)

    @property
    def public(self) -> str:
        """The public key as 64 hex digits: what anchors and proofs call the key."""
        return self.private.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> bytes:
        """64 bytes; the same for the same data."""
        return self.private.sign(data)


def signed_by(public: str, signature: bytes, data: bytes) -> bool:
    """Whether the key of these hex digits made the signature; False for digits that are no key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def load_key(path: Path) -> SigningKey:
    """The key in a PEM file. Raises Terminal if others can read the file, or it is no such key."""
    try:
        if path.stat().st_mode & 0o077:
            raise Terminal(f"the notary's key {path} can be read by others: chmod 600 it, or make a new one")
        private = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise Terminal(f"the notary's key {path} can't be read: {error}") from None
    if not isinstance(private, Ed25519PrivateKey):
        raise Terminal(f"the notary's key {path} is a {type(private).__name__}, expected an Ed25519 private key in PEM")
    return SigningKey(private)


def load_or_make_key(path: Path) -> SigningKey:
    """The key of this host, made at the first call. Of several callers at once one makes it and all get that one."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        pem = Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    return load_key(path)
