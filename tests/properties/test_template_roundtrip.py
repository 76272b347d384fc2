"""Properties of tokenizer and template: exact round trips, no forging, and a parser that answers anything."""

from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.actors.policy.template import TOOL_ARGUMENTS, Call, ParsedCall
from odradek.infra.demo.demonstrations.stream import shipped_template

TEMPLATE = shipped_template()
TOKENIZER = TEMPLATE.tokenizer
SPECIAL_IDS = frozenset(TOKENIZER.specials.values())
MARKS = tuple(TOKENIZER.specials)

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.one_of(st.sampled_from(MARKS), st.sampled_from(("\n", "\t", "  ", "\r\n", "def ", "x")))).map("".join),
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    tool = draw(st.sampled_from(tuple(TOOL_ARGUMENTS)))
    keys = draw(st.permutations(TOOL_ARGUMENTS[tool]))
    return Call(tool, {key: draw(texts) for key in keys[: draw(st.integers(0, len(keys)))]})


@settings(deadline=None)
@given(st.lists(calls(), max_size=4), texts, st.booleans())
def test_calls_come_back_byte_equal(made: list[Call], text: str, done: bool) -> None:
    turn = TEMPLATE.parse(TEMPLATE.turn(made, text=text, done=done))
    assert turn.calls == [ParsedCall(call.name, call.arguments) for call in made]
    assert [list(call.arguments) for call in turn.calls] == [list(call.arguments) for call in made]
    assert (turn.text, turn.done) == (text, done)


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_round_trip(data: bytes) -> None:
    ids = TOKENIZER.encode_bytes(data)
    assert TOKENIZER.decode_bytes(ids) == data
    assert not SPECIAL_IDS & set(ids)
    assert TOKENIZER.decode_bytes(TOKENIZER.encode_text(data.decode("utf-8", "surrogateescape"))) == data


@settings(deadline=None)
@given(texts)
def test_no_text_forges_a_token_of_the_template(text: str) -> None:
    ids = TOKENIZER.encode_text(text)
    assert not SPECIAL_IDS & set(ids)
    assert TOKENIZER.decode(ids) == text


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(sorted(SPECIAL_IDS)), st.integers(-5, TOKENIZER.vocab_size + 5)), max_size=40)
)
def test_any_ids_parse_to_one_call_for_each_call_begun(ids: list[int]) -> None:
    turn = TEMPLATE.parse(ids)
    end = TOKENIZER.special_id("<end>")
    sampled = ids[: ids.index(end)] if end in ids else ids
    begun = sum(number in {TOKENIZER.special_id(f"<call:{tool}>") for tool in TOOL_ARGUMENTS} for number in sampled)
    named = [call for call in turn.calls if call.name]
    assert len(named) == begun
    assert all(call.error for call in turn.calls if not call.name)
    assert turn.done == (TOKENIZER.special_id("<done>") in sampled)
