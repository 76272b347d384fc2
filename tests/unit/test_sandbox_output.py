"""Bounded output and decoding: whole characters, exact counts, a visible cut."""

import re

from hypothesis import given
from hypothesis import strategies as st

from odradek.actors.environment.ns.output import BoundedOutput, TextDecoder

PIECES = st.lists(st.binary(max_size=40), max_size=20)


@given(text=st.text(max_size=200), sizes=st.lists(st.integers(1, 7), min_size=1))
def test_any_split_of_valid_text_decodes_to_it(text: str, sizes: list[int]) -> None:
    data, decoder, found, at = text.encode(), TextDecoder(), "", 0
    for number in range(len(data)):
        size = sizes[number % len(sizes)]
        found += decoder.feed(data[at : at + size])
        at += size
    assert found + decoder.feed(b"", last=True) == text


@given(pieces=PIECES)
def test_invalid_bytes_never_raise_and_are_not_lost(pieces: list[bytes]) -> None:
    decoder = TextDecoder()
    shown = "".join(decoder.feed(piece) for piece in pieces) + decoder.feed(b"", last=True)
    assert shown == b"".join(pieces).decode("utf-8", "backslashreplace")


@given(pieces=PIECES, limit=st.integers(2, 200))
def test_kept_output_is_the_beginning_and_the_end(pieces: list[bytes], limit: int) -> None:
    output, data = BoundedOutput(limit), b"".join(pieces)
    for piece in pieces:
        output.feed(piece)
    assert output.total == len(data)
    assert output.truncated is (len(data) > limit)
    if not output.truncated:
        assert output.text() == data.decode("utf-8", "backslashreplace")


@given(text=st.text(alphabet="aø漢🙂", min_size=200, max_size=400), limit=st.integers(8, 64))
def test_the_cut_falls_between_characters_and_is_counted(text: str, limit: int) -> None:
    output = BoundedOutput(limit)
    output.feed(text.encode())
    match = re.fullmatch(r"(.*)\n\[\.\.\. (\d+) bytes omitted \.\.\.\]\n(.*)", output.text(), re.DOTALL)
    assert match is not None
    head, omitted, tail = match.groups()
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head.encode()) + int(omitted) + len(tail.encode()) == len(text.encode())
