"""KeyRing: subject keys in use by one process, and what is done with them.

AES-256-GCM under a fresh random 96-bit nonce (NIST SP 800-38D), with the place of the content as associated data: a
ciphertext that is moved to another record, key, type or subject does not open. From the subject's key HKDF-SHA256
(RFC 5869) makes one key for content and one for the leaves of batches, so that neither says anything of the other.

A key stays in memory once it was read, but the store's mark is asked for before each use: after `destroy`, by whatever
process, the next use drops it. Boxes begin with a format byte and the key's id, so that a wrong key store is told
from a changed ciphertext.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from odradek.streams.config import KeyStoreAddress
from odradek.streams.errors import DecodeError, KeyUnavailable, SubjectErased
from odradek.streams.privacy.keys import KEY_BYTES, KeyFiles, KeyStore

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

log = logging.getLogger(__name__)

KEYS_REMEMBERED = 10_000
"""Subjects whose keys a process holds. Too low: the store is asked again and again. Too high: memory, 1 kB each."""

FORMAT = b"\x01"
ID_BYTES = 8
NONCE_BYTES = 12
HEAD_BYTES = len(FORMAT) + ID_BYTES + NONCE_BYTES
OVERHEAD = HEAD_BYTES + 16
"""Bytes that a box is longer than what lies in it."""


@dataclass(frozen=True)
class SubjectKey:
    """One subject's keys, derived on first use (the library takes a moment to load)."""

    subject: str
    _secret: bytes

    def __repr__(self) -> str:  # key bytes must never reach a log line
        return f"SubjectKey({self.subject!r})"

    def _derived(self, purpose: bytes, length: int = KEY_BYTES) -> bytes:
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return HKDF(SHA256(), length, salt=None, info=b"odradek/subject/1/" + purpose).derive(self._secret)

    @cached_property
    def id(self) -> bytes:
        """Tells keys apart; says nothing of the key."""
        return self._derived(b"id", ID_BYTES)

    @cached_property
    def leaf(self) -> bytes:
        """The HMAC key of the subject's leaves in batches."""
        return self._derived(b"leaf")

    @cached_property
    def _content(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(self._derived(b"content"))

    def encrypt(self, plain: bytes, place: bytes) -> bytes:
        """A box. `place` is needed to open it and is not in it."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return b"".join((FORMAT, self.id, nonce, self._content.encrypt(nonce, plain, place)))

    def decrypt(self, box: bytes, place: bytes) -> bytes:
        """What lies in a box. Raises KeyUnavailable if it is another key's, DecodeError if it is not what was stored
        there."""
        from cryptography.exceptions import InvalidTag

        if len(box) < OVERHEAD or box[:1] != FORMAT:
            raise DecodeError(f"{len(box)} bytes are no encrypted content of format {FORMAT[0]}")
        if box[1 : 1 + ID_BYTES] != self.id:
            raise KeyUnavailable(
                f"content of subject {self.subject!r} is encrypted under key {box[1 : 1 + ID_BYTES].hex()}; this key "
                f"store has {self.id.hex()}: is it the deployment's own (privacy.keys)?",
                subject=self.subject,
            )
        try:
            return self._content.decrypt(box[1 + ID_BYTES : HEAD_BYTES], box[HEAD_BYTES:], place)
        except InvalidTag:
            raise DecodeError(
                f"encrypted content of subject {self.subject!r} was changed, or belongs to another place"
            ) from None


def key_ring(address: KeyStoreAddress) -> KeyRing | None:
    """A ring of its own over that store; None where there is none."""
    if not address.folder:
        return None
    if not address.kms_key:
        return KeyRing(KeyFiles(Path(address.folder)))
    from odradek.streams.privacy.kms import KmsWrapping, kms_client

    return KeyRing(KeyFiles(Path(address.folder), KmsWrapping(kms_client(address.kms_region), address.kms_key)))


class KeyRing:
    """One process's keys. `obtain` and `find` read the store; the rest is memory."""

    def __init__(self, store: KeyStore) -> None:
        self.store = store
        self._keys: OrderedDict[str, SubjectKey] = OrderedDict()
        self._missing: set[str] = set()

    def erased(self, subject: str) -> bool:
        """Whether the subject's key was destroyed, by anybody."""
        return self.store.destroyed(subject)

    def held(self, subject: str) -> SubjectKey | None:
        """The key if this process has read it and it was not destroyed since."""
        key = self._keys.get(subject)
        if key is None:
            return None
        if self.store.destroyed(subject):
            del self._keys[subject]
            return None
        self._keys.move_to_end(subject)
        return key

    async def find(self, subject: str) -> SubjectKey | None:
        """The key, or None: it was destroyed, or this store never had it (said once in the log)."""
        if (key := self.held(subject)) is not None:
            return key
        try:
            secret = await asyncio.to_thread(self.store.find, subject)
        except SubjectErased:
            return None
        if secret is None:
            if subject not in self._missing:
                self._missing.add(subject)
                log.warning("no key of subject %r in this key store, and no mark that it was erased", subject)
            return None
        return self._remember(subject, secret)

    async def obtain(self, subject: str) -> SubjectKey:
        """The key, made if the subject has none yet. Raises SubjectErased."""
        if (key := self.held(subject)) is not None:
            return key
        return self._remember(subject, await asyncio.to_thread(self.store.obtain, subject))

    async def destroy(self, subject: str, reason: str) -> bool:
        """See `KeyStore`."""
        self._keys.pop(subject, None)
        return await asyncio.to_thread(self.store.destroy, subject, reason)

    def _remember(self, subject: str, secret: bytes) -> SubjectKey:
        self._missing.discard(subject)
        key = self._keys[subject] = SubjectKey(subject, secret)
        while len(self._keys) > KEYS_REMEMBERED:
            self._keys.popitem(last=False)
        return key
