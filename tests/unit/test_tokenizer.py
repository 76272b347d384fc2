"""The tokenizer: every byte round-trips, nothing that a text spells becomes a special token."""

import json
import random
from pathlib import Path

import pytest

from odradek.actors.policy.template import SPECIALS
from odradek.actors.policy.tokenizer import Tokenizer, TokenizerError
from odradek.infra.demo.demonstrations import train_tokenizer
from odradek.infra.demo.demonstrations.stream import TOKENIZER_PATH
from odradek.infra.demo.family.names import HELD_OUT_WORDS, WordLists, generated_word, shipped_words


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(TOKENIZER_PATH)


def test_the_shipped_file_has_1024_tokens_with_the_specials_first(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 1024
    assert [tokenizer.special_name(number) for number in range(len(SPECIALS))] == list(SPECIALS)
    assert tokenizer.special_name(len(SPECIALS)) is None


def test_text_that_spells_a_special_token_never_becomes_one(tokenizer: Tokenizer) -> None:
    text = "".join(SPECIALS) + "x<end>\n<call:edit_file><arg:path>a</call>"
    ids = tokenizer.encode_text(text)
    assert not [number for number in ids if tokenizer.special_name(number)]
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\tif ready:\n\t\tgo()\n",
        "a\r\nb\rc\x00\x0b\x0c\u2028\u0085\ufeff",
        "caf\u00e9 \u6f22\u5b57 \U0001f600\u200d\U0001f4a9 e\u0301",
        "x" * 5000,
        " " * 300 + "\n" * 300,
        "ABC_def-9 == 10 // 3",
    ],
)
def test_text_round_trips_exactly(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


def test_bytes_round_trip_exactly_even_where_they_are_no_text(tokenizer: Tokenizer) -> None:
    data = bytes(range(256)) * 2 + "\u00e9".encode()[:1] + b"x" + "\u6f22".encode()[:2]
    assert tokenizer.decode_bytes(tokenizer.encode_bytes(data)) == data
    as_read = data.decode("utf-8", "surrogateescape")
    assert tokenizer.decode_bytes(tokenizer.encode_text(as_read)) == data


def test_a_lone_surrogate_that_is_no_byte_becomes_the_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode_text("a\ud800b\udfffc")) == "a\ufffdb\ufffdc"


def test_decoding_never_raises_and_shows_specials_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.special_id("<end>"), *tokenizer.encode_text("a"), -1, 99_999, *tokenizer.encode_bytes(b"\xff")]
    assert tokenizer.decode(ids) == "a\ufffd"
    assert tokenizer.decode(ids, show_specials=True) == "<end>a<unknown -1><unknown 99999>\ufffd"


def test_a_name_has_the_same_pieces_wherever_it_stands(tokenizer: Tokenizer) -> None:
    """What a small policy copies by token must be the same tokens in the file, the search and the edit."""
    rng = random.Random(1)
    for name in [generated_word(rng, shipped_words()) for _ in range(300)] + list(HELD_OUT_WORDS):
        alone = tokenizer.encode_text(name)
        for text in (f"fix test_{name}\n", f"def {name}(a, {name}):", f" {name}.py", f"    {name} = -{name}[0]\n"):
            ids = tokenizer.encode_text(text)
            runs = sum(ids[at : at + len(alone)] == alone for at in range(len(ids)))
            assert runs == text.count(name), (name, text)


def test_a_newline_takes_its_indentation_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([number]) for number in tokenizer.encode_text("(1):\n        if 123")] == [
        "(", "1", ")", ":", "\n        ", "if ", "1", "2", "3",
    ]  # fmt: skip


def test_training_is_deterministic_and_the_shipped_pieces_are_the_tokenizers() -> None:
    words = WordLists(shipped_words().english, [])
    texts = list(train_tokenizer.corpus(words, tasks=30))
    assert texts == list(train_tokenizer.corpus(words, tasks=30))
    assert train_tokenizer.build(texts, 600) == train_tokenizer.build(texts, 600)
    assert train_tokenizer.pieces(Tokenizer.from_file(TOKENIZER_PATH)) == shipped_words().pieces


@pytest.mark.slow
def test_the_shipped_tokenizer_is_what_its_command_makes() -> None:
    data = train_tokenizer.build(train_tokenizer.corpus(WordLists(shipped_words().english, [])))
    assert data + "\n" == TOKENIZER_PATH.read_text(encoding="utf-8")


def test_the_corpus_holds_no_held_out_word() -> None:
    texts = train_tokenizer.corpus(WordLists(shipped_words().english, []), tasks=50)
    words = {word for text in texts for word in text.replace("_", " ").replace(".", " ").split()}
    assert not words & set(HELD_OUT_WORDS)


def test_a_file_without_the_byte_alphabet_or_a_special_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="<no such>"):
        Tokenizer.from_file(TOKENIZER_PATH).special_id("<no such>")
    whole = json.loads(train_tokenizer.build([], len(SPECIALS) + 256))
    whole["model"]["vocab"] = {k: v for k, v in whole["model"]["vocab"].items() if k != "A"}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no token for the bytes \[65\]"):
        Tokenizer.from_file(path)
