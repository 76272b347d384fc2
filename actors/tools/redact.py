"""Secrets out of tool output, before the model, the log, a trace or a person's screen sees it.

What was seen is what is logged: the mark `[redacted:KIND]` stands in the model's prompt, in the event and on the
console alike. Three rules find a secret: its shape (`secret_shapes.py`); a private key block; and a name that promises
one, before a value that could be one (`DB_PASSWORD=…`, `"api_key": "…"`), or any variable of an environment listing
whose value looks random. Look-alike words are kept: git hashes, UUIDs, checksums, long identifiers, paths, code.

Promises: redacting twice changes nothing more; no line is added or removed, so line numbers stay true; a mark replaces
a secret whole, also where a cut goes through it. It is a net, not a wall: a secret that looks like a word is missed.
"""

import base64
import binascii
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator

from odradek.actors.tools.secret_shapes import find_shapes

MARK = re.compile(r"\[redacted:([A-Z_]+)\]")
"""What stands in place of a secret."""

RANDOM_CHARS = 20
"""Shortest value that counts as random without a telling name. Lower: identifiers are hidden. Higher: keys slip by."""

RANDOM_BITS = 3.7
"""Entropy (bits a character) from which such a value counts as random; English words lie near 3, base64 above 4."""

_SECRET_NAMES = frozenset(
    [
        *("secret", "secrets", "token", "credential", "credentials", "pat", "apikey", "secretkey", "accesskey"),
        *("authkey", "privatekey", "signingkey", "encryptionkey", "masterkey", "accesstoken", "authtoken"),
    ]
)
_PASSWORD_NAMES = frozenset(("password", "passwd", "pwd", "passphrase", "passcode", "pass", "pgpassword"))
_KEY_OWNERS = frozenset(
    [
        *("api", "access", "secret", "private", "auth", "signing", "encryption", "master", "account", "service"),
        *("storage", "client", "db"),
    ]
)
_NAME_ENDINGS = frozenset(("base", "prod", "production", "dev", "test", "staging", "live", "value", "old", "new"))
_NAME_HINTS = ("pass", "pwd", "secret", "token", "key", "credential", "_pat")  # one stands in every telling name

_NAMED = re.compile(
    r"(?<![A-Za-z0-9_.-])(?P<name>-{0,2}[A-Za-z_][A-Za-z0-9_.-]{0,80})(?P<close>[\"']?\]?)"
    r"(?P<sep>[ \t]*(?::=|=>|=|:)[ \t]*)"
    r"(?:(?P<quote>[\"'`])(?P<quoted>[^\"'`\r\n]{6,512})(?P=quote)|(?P<bare>[^\s\"'`,;()\[\]{}<>]{4,4096}))"
)
_ENVIRONMENT = re.compile(r"[A-Z](?<![A-Za-z0-9_(,.$\[{][A-Z])[A-Z0-9_]*=[\"']?([^\s\"'\[,;][^\s\"',;]{19,})")
_BEFORE_LISTED = " \t\n+->:;\"'"  # a diff's sign, grep's colon, a quote: what may stand before a listed NAME=value
_KEY_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_KEY_LINE_END = re.compile(r"[A-Za-z0-9+/=]{4,}$")
_KEY_HEADER = re.compile(r"[A-Za-z-]{1,40}: |$")
KEY_LINES = 200
"""Longest body in lines, where only one of BEGIN and END is shown; a 16 k bit RSA key has 195."""

_BARE_REFERENCE = ("$", "/", "~", "|", "*", "%", "&")  # a variable, a path, a pattern: not a value
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")  # module.attribute: code

Span = tuple[int, int, str]


def redact(text: str, start: int = 0, end: int | None = None) -> str:
    """`text[start:end]` with every secret replaced; one that lies across such a border is replaced whole.

    >>> redact("export DB_PASSWORD=tr0ub4dor&3")
    'export DB_PASSWORD=[redacted:PASSWORD]'
    """
    before, shown = None, _once(text, start, len(text) if end is None else min(end, len(text)))
    while shown != before and "[redacted:" in shown:  # a mark beside a secret may bring out its border
        before, shown = shown, _once(shown, 0, len(shown))
    return shown


def _once(text: str, start: int, end: int) -> str:
    pieces, at = [], start
    for first, stop, kind in _merged(text):
        if stop <= start:
            continue
        if first >= end:
            break
        pieces.append(text[at:first])
        pieces.append("\n".join(_mark_line(line, kind) for line in text[first:stop].split("\n")))
        at = stop
    pieces.append(text[at : max(at, end)])
    return "".join(pieces)


def _mark_line(line: str, kind: str) -> str:
    end = "\r" if line.endswith("\r") else ""
    return (f"[redacted:{kind}]" if line.strip() else line.rstrip("\r")) + end


def _merged(text: str) -> list[Span]:
    """Secrets in order without overlap; where two overlap their union is hidden under the first one's kind."""
    marks = [match.span() for match in MARK.finditer(text)] if "[redacted:" in text else []
    merged: list[Span] = []
    at = 0
    for start, stop, kind in sorted(_found(text), key=lambda span: (span[0], -span[1])):
        while at < len(marks) and marks[at][1] <= start:
            at += 1
        if at < len(marks) and marks[at][0] < stop:
            continue
        if merged and start < merged[-1][1]:
            before = merged[-1]
            merged[-1] = (before[0], max(before[1], stop), before[2])
        else:
            merged.append((start, stop, kind))
    return merged


def _found(text: str) -> Iterator[Span]:
    yield from find_shapes(text)
    if "PRIVATE KEY" in text:
        yield from _key_blocks(text)
    yield from _named_values(text)
    if "=" in text:
        for match in _ENVIRONMENT.finditer(text):
            if looks_random(match[1]):
                yield match.start(1), match.end(1), "HIGH_ENTROPY"


def _key_blocks(text: str) -> Iterator[Span]:
    """The lines between BEGIN and END, one span a line, so that lines that are marks already stay as they are.

    Where one of the two is not shown (`head`, `tail`, a page of the file), what looks like a body next to the other.
    """
    at, since_begin = 0, None
    body: list[tuple[int, int]] = []
    for line in text.split("\n"):
        start, at = at, at + len(line) + 1
        if (begin := _KEY_BEGIN.search(line)) is not None:
            since_begin, body = start + begin.end(), []
            start, line = since_begin, line[begin.end() :]
        if (end := _KEY_END.search(line)) is not None:
            body.append((start, start + end.start()))
            yield from _unmarked(text, body[-KEY_LINES:] if since_begin is None else body)
            since_begin, body = None, []
        elif since_begin is not None or _in_key(line):
            body.append((start, start + len(line)))
        else:
            body = []
    if since_begin is not None:
        shown = itertools.takewhile(lambda span: _in_key(text[slice(*span)]), body)
        yield from _unmarked(text, list(shown)[:KEY_LINES])


def _in_key(line: str) -> bool:
    """A line of such a block ends in base64 (a line number or a file name may stand before it), or is its header."""
    line = line.strip()
    return bool(_KEY_LINE_END.search(line[-80:]) or _KEY_HEADER.match(line))


def _unmarked(text: str, body: list[tuple[int, int]]) -> Iterator[Span]:
    for start, stop in body:
        line = text[start:stop]
        if line.strip() and not MARK.search(line):
            yield start, stop, "PRIVATE_KEY"


def _named_values(text: str) -> Iterator[Span]:
    for start, end in _lines_with_hint(text):
        for match in _NAMED.finditer(text, start, end):
            kind = _kind_of_name(match["name"])
            if kind is None:
                continue
            if match["quoted"] is not None:
                if _could_be_secret(match["quoted"], kind):
                    yield match.start("quoted"), match.end("quoted"), kind
            elif _hide_bare(text, match, kind):
                yield match.start("bare"), match.end("bare"), kind


def _lines_with_hint(text: str) -> list[tuple[int, int]]:
    """The lines on which a telling name may stand; plain searches, because most text has none."""
    lower = text.lower()
    if len(lower) != len(text):  # a letter whose small form is longer; positions would not fit
        lower = text
    lines: set[tuple[int, int]] = set()
    for hint in _NAME_HINTS:
        at = lower.find(hint)
        while at >= 0:
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            lines.add((text.rfind("\n", 0, at) + 1, end))
            at = lower.find(hint, end)
    return sorted(lines)


def _hide_bare(text: str, match: re.Match[str], kind: str) -> bool:
    """An unquoted value. Where it is listed as in an environment (`NAME=value`, capitals, no blanks) the name is
    enough; elsewhere it may be code (`token = next_token`, `key: str`), so the value itself must look random."""
    value, start = match["bare"], match.start()
    if value.startswith(_BARE_REFERENCE):
        return False
    listing = match["sep"] == "=" and match["name"].isupper() and (not start or text[start - 1] in _BEFORE_LISTED)
    if listing:
        harmless = value.lower() in ("true", "false", "none", "null") or (kind != "PASSWORD" and value.isdigit())
        return not harmless and (kind == "PASSWORD" or len(value) >= 8)
    if _DOTTED_NAME.fullmatch(value):
        return False
    return looks_random(value) or (_letter_digit_turns(value) >= 4 and len(value) >= 12)


def _kind_of_name(name: str) -> str | None:
    """The kind of secret a name promises, or None.

    >>> _kind_of_name("DB_PASSWORD"), _kind_of_name("apiKey"), _kind_of_name("tokenizer"), _kind_of_name("key")
    ('PASSWORD', 'KEY', None, None)
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name) if not name.isupper() else name
    words = [word for word in re.split(r"[_.\-]+", spaced.lower()) if word]
    while len(words) > 1 and (words[-1] in _NAME_ENDINGS or words[-1].isdigit()):
        words.pop()
    if not words:
        return None
    last = words[-1]
    if last in _PASSWORD_NAMES and (last != "pass" or len(words) > 1):
        return "PASSWORD"
    if last == "key" and len(words) > 1 and (words[-2] in _KEY_OWNERS or name.isupper()):
        return "KEY"
    if last.endswith("key") and last in _SECRET_NAMES:
        return "KEY"
    if last in ("token", "pat") and (last != "pat" or len(words) > 1):
        return "TOKEN"
    return "SECRET" if last in _SECRET_NAMES else None


def _could_be_secret(value: str, kind: str) -> bool:
    """A quoted value under a telling name: hidden unless it is plainly a word, a path, a template or a sentence."""
    if any(c in value for c in " {}<>()") or value[0] in "$%/~." or "://" in value or "*" in value:
        return False
    if kind == "PASSWORD":
        return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return len(value) >= 8 and (looks_random(value) or _letter_digit_turns(value) >= 2)


def looks_random(value: str) -> bool:
    """Whether a value alone has the look of a generated key.

    >>> looks_random("q7Rk2ZpXw93LmTt8VbNc4HsD"), looks_random("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b")
    (True, False)
    """
    if len(value) < RANDOM_CHARS or not _KEY_CHARS.fullmatch(value) or _HASH.fullmatch(value) or _is_words(value):
        return False
    turns = _letter_digit_turns(value)
    mixed = any(c.islower() for c in value) and any(c.isupper() for c in value) and turns >= 1
    soup = len(value) < 3 * len(_WORD.findall(value))  # words of less than three letters on average
    return ((mixed and soup and _entropy(value) >= RANDOM_BITS) or turns >= 7) and not _decodes_to_text(value)


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_KEY_CHARS = re.compile(r"[A-Za-z0-9_\-+/=.~]+")
_HASH = re.compile(  # a digest (maybe named or cut), a UUID, a version, a date: public by nature
    r"(?:[a-z0-9]+[-:=])?(?:[0-9a-f]{7,128}|[0-9A-F]{7,128})"
    r"|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
    r"|sha(?:1|224|256|384|512)-[A-Za-z0-9+/=]+|v?\d+(?:[.\-+_][a-zA-Z0-9]+)*"
)


def _is_words(value: str) -> bool:
    """A path, host or dotted/dashed name: its parts are words or numbers, not soup."""
    parts = [part for part in re.split(r"[/._\-=+~]", value) if part]
    return len(parts) > 1 and all(len(part) < RANDOM_CHARS and _letter_digit_turns(part) <= 2 for part in parts)


def _letter_digit_turns(value: str) -> int:
    """How often a letter and a digit stand side by side: names have few, generated keys many."""
    return sum(1 for a, b in itertools.pairwise(value) if a.isalnum() and b.isalnum() and a.isdigit() != b.isdigit())


def _entropy(value: str) -> float:
    return -sum(n / len(value) * math.log2(n / len(value)) for n in Counter(value).values())


def _decodes_to_text(value: str) -> bool:
    """Base64 of readable text hides nothing; random bytes practically never decode to it."""
    try:
        raw = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        return False
    return all(32 <= byte < 127 or byte in (9, 10, 13) for byte in raw)
