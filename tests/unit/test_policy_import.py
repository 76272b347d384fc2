"""Importing Hugging Face checkpoints: their tokens stay, our markers come, and plain transformers opens the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli import Cli
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, normalizers, pre_tokenizers, trainers

from odradek.actors.policy import importer
from odradek.actors.policy.directory import EMBED, HEAD, inspect
from odradek.actors.policy.errors import CheckpointLoadError, PolicyError, UnsupportedModelError
from odradek.actors.policy.hf import load_hf
from odradek.actors.policy.importer import SAMPLE, import_hf
from odradek.actors.policy.template import SPECIALS, XmlTemplate
from odradek.actors.policy.tokenizer import Tokenizer, TokenizerError

FOREIGN_SPECIALS = ["<|endoftext|>", "<pad>"]
ROWS = 320
"""More than the tokenizer's tokens: checkpoints round up."""
NORM = "model.norm.weight"


def foreign_tokenizer(path: Path) -> HfTokenizer:
    """As others make them: composes accents, adds a space, knows few bytes, has a special token of a name of ours."""
    made = HfTokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=FOREIGN_SPECIALS, show_progress=False)
    made.train_from_iterator([SAMPLE, "<call:read_file> agent task </call> end result done arg path"] * 4, trainer)
    made.enable_truncation(8)
    made.save(str(path))
    return made


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "theirs"
    torch.manual_seed(1)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=ROWS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        tie_word_embeddings=request.param == "tied",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="20KB" if request.param == "untied" else "1GB")
    assert (len(list(folder.glob("model-*"))) > 1) is (request.param == "untied")
    foreign_tokenizer(folder / "tokenizer.json")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def test_import_adds_the_markers_and_keeps_the_rest_bit_for_bit(source: Path, tmp_path: Path) -> None:
    made = import_hf(source, tmp_path / "ours")
    assert made.made == inspect(tmp_path / "ours")
    before, after = weights(source), weights(tmp_path / "ours")
    assert set(before) == set(after)
    old = HfTokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
    for name, tensor in before.items():
        kept = old if name in (EMBED, HEAD) else len(tensor)
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name][:kept], tensor[:kept])
    tokenizer = Tokenizer.from_file(tmp_path / "ours" / "tokenizer.json")
    assert made.markers == len(SPECIALS) - 1, "<pad> was there"
    assert tokenizer.special_id("<pad>") == 1
    assert {old + made.byte_tokens + at for at in range(made.markers)} == {
        tokenizer.special_id(name) for name in SPECIALS if name != "<pad>"
    }


def test_a_markers_row_is_the_mean_of_the_tokens_that_spell_it(source: Path, tmp_path: Path) -> None:
    import_hf(source, tmp_path / "ours")
    before, after = weights(source), weights(tmp_path / "ours")
    tokenizer = Tokenizer.from_file(tmp_path / "ours" / "tokenizer.json")
    for marker in ("<call:read_file>", "<end>"):
        spelled = tokenizer.encode_text(marker)
        assert len(spelled) > 1 and not {tokenizer.special_name(number) for number in spelled} - {None}
        for name in {EMBED, HEAD} & set(before):
            expected = before[name][spelled].float().mean(0).to(torch.bfloat16)
            assert torch.equal(after[name][tokenizer.special_id(marker)], expected)


def test_nothing_is_random(source: Path, tmp_path: Path) -> None:
    import_hf(source, tmp_path / "a")
    import_hf(source, tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_any_text_round_trips_and_none_forges_a_marker(source: Path, tmp_path: Path) -> None:
    import_hf(source, tmp_path / "ours")
    tokenizer = Tokenizer.from_file(tmp_path / "ours" / "tokenizer.json")
    for text in ("e\u0301 \u2126", " x", "  \t\r\n", "\U0001f600\udcff\x00", "".join(SPECIALS), "<|endoftext|>" * 9):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode_bytes(ids) == text.encode("utf-8", "surrogateescape")
        assert not {tokenizer.special_name(number) for number in ids} - {None}


def test_plain_transformers_opens_the_result_and_gives_our_logits(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = import_hf(source, tmp_path / "ours")
    assert made.compared.transformers and made.compared.largest_difference < 1e-3 * made.compared.largest_logit
    theirs = AutoTokenizer.from_pretrained(tmp_path / "ours")
    ours = XmlTemplate(Tokenizer.from_file(tmp_path / "ours" / "tokenizer.json"))
    assert theirs("<task>fix it<agent>")["input_ids"] == ours.open("fix it")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.config.eos_token_id == theirs.eos_token_id == ours.tokenizer.special_id("<end>")


def test_another_arithmetic_is_noticed_and_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(directory: Path) -> Any:
        policy = load_hf(directory)
        with torch.no_grad():
            policy.blocks[0].o.mul_(1.5)  # type: ignore[union-attr, operator]
        return policy

    monkeypatch.setattr(importer, "load_hf", wrong)
    with pytest.raises(PolicyError, match=r"our logits differ from those of transformers"):
        import_hf(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def edited(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        raw = json.loads((folder / file).read_text())
        change(raw)
        (folder / file).write_text(json.dumps(raw))

    return edit


def without_norm(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        if state.pop(NORM, None) is not None:
            save_file(state, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "kind", "named"),
    [
        (edited("config.json", lambda r: r.update(mlp_bias=True)), UnsupportedModelError, r"config\.json.*mlp_bias"),
        (edited("tokenizer.json", lambda r: r["model"].update(type="Unigram")), TokenizerError, "byte-level BPE"),
        (edited("tokenizer.json", lambda r: r.update(pre_tokenizer=None)), TokenizerError, "not byte-level"),
        (
            edited("tokenizer.json", lambda r: r["model"]["vocab"].update({"<end>": 90})),
            TokenizerError,
            r"'<end>' is an ordinary token",
        ),
        (edited("config.json", lambda r: r.update(vocab_size=64)), TokenizerError, r"the embedding 64 rows"),
        (without_norm, CheckpointLoadError, NORM),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name_and_leaves_nothing(
    spoil: Callable[[Path], None], kind: type[PolicyError], named: str, source: Path, tmp_path: Path
) -> None:
    spoil(source)
    with pytest.raises(kind, match=named):
        import_hf(source, tmp_path / "ours")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_directory_that_exists_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    with pytest.raises(CheckpointLoadError, match="exists"):
        import_hf(source, tmp_path / "ours")
    assert not list((tmp_path / "ours").iterdir())


def test_commands_import_and_show(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli = Cli(capsys)
    made = cli("policy", "import", source, "--out", tmp_path / "ours", "--json")
    assert made.code == 0, made.err
    assert made.json["made"]["config"]["vocab_size"] >= ROWS
    shown = cli("policy", "show", tmp_path / "ours", "--json")
    assert shown.code == 0, shown.err
    assert shown.json["policy"] == made.json["made"]
    assert (shown.json["context"], shown.json["policy"]["dtype"]) == (96, "bfloat16")
    assert len(shown.json["digest"]) == 64 and len(shown.json["numerics_id"]) == 16
    refused = cli("policy", "show", source)
    assert refused.code == 2 and "odradek policy import" in refused.err
