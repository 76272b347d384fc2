"""What reaches a collector: everything that was given, in a form and size that it takes, and no secret."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from odradek.actors.telemetry.attributes import MASK, MAX_KEY, MAX_KEYS, MAX_SPAN, MAX_TEXT, clean
from odradek.actors.tools.redact import redact


def test_a_dict_is_text_and_none_is_left_out() -> None:
    found = clean({"call": {"path": "a.py", "lines": [1, 2]}, "nothing": None, "mixed": [1, "a"]})
    assert found == {"call": '{"path": "a.py", "lines": [1, 2]}', "mixed": '[1, "a"]'}


def test_scalars_and_lists_of_numbers_stay_what_they_are() -> None:
    given_values = {"a": 1, "b": 2.5, "c": True, "d": "x", "e": [1, 2], "f": float("nan"), "g": b"\x00\xff"}
    assert clean(given_values) == {"a": 1, "b": 2.5, "c": True, "d": "x", "e": [1, 2], "f": "nan", "g": "2 bytes"}


def test_a_giant_value_is_cut_and_its_size_is_told() -> None:
    found = clean({"result": "x" * 6_000_000, "small": "y"})
    assert found == {"result": "x" * MAX_TEXT, "result.original_size": 6_000_000, "small": "y"}


def test_a_value_that_fits_exactly_is_not_cut() -> None:
    assert clean({"result": "x" * MAX_TEXT}) == {"result": "x" * MAX_TEXT}


def test_secrets_never_leave() -> None:
    key = "sk-proj-" + "a1B2c3D4e5F6g7H8" * 3
    found = clean(
        {"password": "hunter22hunter", "env": {"API_KEY": key, "PATH": "/bin"}, "text": f"OPENAI_API_KEY={key}"}, redact
    )
    assert found["password"] == MASK
    assert found["env"] == '{"API_KEY": "[redacted]", "PATH": "/bin"}'
    assert key not in str(found)


def test_counts_of_tokens_are_no_secrets() -> None:
    assert clean({"gen_ai.usage.input_tokens": 12, "sampled_tokens": 3}) == {
        "gen_ai.usage.input_tokens": 12,
        "sampled_tokens": 3,
    }


def test_text_that_is_no_unicode_is_made_so() -> None:
    """One lone surrogate would be refused with the whole batch."""
    assert clean({"a\udcff": "b\udcff"}) == {"a?": "b?"}
    assert clean({"cut": "é" * MAX_TEXT})["cut"] == "é" * (MAX_TEXT // 2)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=40),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=50),
            lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
        ),
        max_size=80,
    ),
    st.integers(1, 3_000),
)
def test_no_attributes_exceed_the_bound_of_a_span(values: dict[str, object], repeat: int) -> None:
    """Whatever is handed in, also as much of it as one likes."""
    stretched = {key: value * repeat if isinstance(value, str) else value for key, value in values.items()}
    found = clean(stretched)
    size = sum(len(key.encode()) + len(value.encode()) for key, value in found.items() if isinstance(value, str))
    assert size <= MAX_SPAN + MAX_KEYS * MAX_KEY
    assert all(isinstance(value, str | bool | int | float | list) for value in found.values())
    assert len(found) <= 2 * MAX_KEYS
