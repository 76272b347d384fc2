"""Byte-level BPE tokenizer: text to ids without special tokens, ids back to the exact bytes.

Owns the reading of a Hugging Face `tokenizer.json`. Guarantees: (1) encoding never produces a special token, whatever
the text spells, so a file or a tool output cannot forge a turn; (2) any bytes round-trip exactly, and so does any text
(lone surrogates U+DC80..U+DCFF stand for raw bytes, as in Python's own `surrogateescape`; other lone surrogates are no
Unicode text and become U+FFFD); (3) decoding never raises. Pure after loading; safe to share between threads.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as HfTokenizer

from odradek.actors.policy.errors import PolicyError


class TokenizerError(PolicyError):
    """The tokenizer file cannot serve: what is missing, and in which file. Terminal."""


def byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE files (GPT-2's table): character to byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + at): byte for at, byte in enumerate(others)})
    return table


class Tokenizer:
    """`encode_text` / `encode_bytes` without specials; `special_id` for the template; `decode` / `decode_bytes`."""

    def __init__(self, data: str, origin: str = "<memory>") -> None:
        self._origin = origin
        self._data = data
        try:
            self._bpe = HfTokenizer.from_str(data)
            raw = json.loads(data)
        except Exception as error:  # the library raises nothing narrower
            raise TokenizerError(f"{origin} is no tokenizer file: {error}") from error
        if raw["model"]["type"] != "BPE" or raw.get("normalizer"):
            found = f"model {raw['model']['type']}, normalizer {(raw.get('normalizer') or {}).get('type')}"
            raise TokenizerError(f"{origin}: expected a byte-level BPE that normalises nothing, found {found}")
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        self.specials: dict[str, int] = {t["content"]: int(t["id"]) for t in raw["added_tokens"] if t["special"]}
        self._plain_added = {int(t["id"]): t["content"].encode() for t in raw["added_tokens"] if not t["special"]}
        self._special_names = {number: name for name, number in self.specials.items()}
        self.vocab_size: int = max(self._bpe.get_vocab(with_added_tokens=True).values()) + 1
        self._bytes = self._byte_table()

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """Raises `TokenizerError`."""
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except FileNotFoundError:
            raise TokenizerError(f"{path} is missing") from None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from error

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the tokenizer file's text: part of what identifies a policy."""
        return hashlib.sha256(self._data.encode()).hexdigest()

    def _byte_table(self) -> list[bytes]:
        alphabet = byte_alphabet()
        table = [b""] * self.vocab_size
        for piece, number in self._bpe.get_vocab(with_added_tokens=True).items():
            if number in self._special_names:
                continue
            if number in self._plain_added:
                table[number] = self._plain_added[number]
                continue
            try:
                table[number] = bytes(alphabet[char] for char in piece)
            except KeyError as error:
                raise TokenizerError(f"{self._origin}: token {piece!r} is not in the byte-level alphabet") from error
        missing = sorted(set(range(256)) - {piece[0] for piece in table if len(piece) == 1})
        if missing:
            raise TokenizerError(
                f"{self._origin}: no token for the bytes {missing[:8]}; train it with the byte alphabet"
            )
        self._byte_ids = {piece[0]: number for number, piece in enumerate(table) if len(piece) == 1}
        return table

    def special_id(self, name: str) -> int:
        """The id of a special token by its name, such as `<agent>`."""
        try:
            return self.specials[name]
        except KeyError:
            raise TokenizerError(
                f"{self._origin} has no special token {name!r}; it has {sorted(self.specials)}"
            ) from None

    def special_name(self, token_id: int) -> str | None:
        """The name of a special token, or None for any other id."""
        return self._special_names.get(token_id)

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text; never a special token."""
        if text.isascii():
            return list(self._bpe.encode(text, add_special_tokens=False).ids)
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            data = _replace_odd_surrogates(text).encode("utf-8", "surrogateescape")
        return self.encode_bytes(data)

    def encode_bytes(self, data: bytes) -> list[int]:
        """Ids of any bytes: maximal valid UTF-8 runs by BPE, other bytes one token each."""
        ids: list[int] = []
        while data:
            try:
                ids += self._bpe.encode(data.decode("utf-8"), add_special_tokens=False).ids
                return ids
            except UnicodeDecodeError as error:
                ids += self._bpe.encode(data[: error.start].decode("utf-8"), add_special_tokens=False).ids
                ids += [self._byte_ids[byte] for byte in data[error.start : error.end]]
                data = data[error.end :]
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of ordinary tokens; special and unknown ids add nothing."""
        table, size = self._bytes, self.vocab_size
        return b"".join(table[number] for number in ids if 0 <= number < size)

    def decode(self, ids: Sequence[int], show_specials: bool = False) -> str:
        """Text for people: invalid UTF-8 as U+FFFD; special tokens by name, or left out."""
        if not show_specials:
            return self.decode_bytes(ids).decode("utf-8", "replace")
        return b"".join(map(self._shown, ids)).decode("utf-8", "replace")

    def _shown(self, number: int) -> bytes:
        if number in self._special_names:
            return str(self._special_names[number]).encode()
        known: bytes = self._bytes[number] if 0 <= number < self.vocab_size else b"<unknown %d>" % number
        return known


_ODD_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


def _replace_odd_surrogates(text: str) -> str:
    return _ODD_SURROGATE.sub("\ufffd", text)
