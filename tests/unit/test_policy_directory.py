"""A policy directory is checked before anything starts: each fault is one line that names the file and the way out."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from odradek.actors.controller.actor import within
from odradek.actors.inference.engine import Engine
from odradek.actors.inference.settings import EngineSettings, context_of, pages_of
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.directory import EMBED, HEAD, SPARE_ROWS, inspect
from odradek.actors.policy.hf import load_hf, save_hf
from odradek.actors.policy.model import Policy
from odradek.infra.cluster.deployment import deployment_of
from odradek.infra.cluster.policy import ASSETS, MOST_MICRO_TOKENS, TRAINING_BYTES, checked, sizes
from odradek.infra.config.load import load
from odradek.infra.config.services import Endpoints
from odradek.infra.config.tree import Config
from odradek.infra.errors import UsageError
from odradek.infra.serve.request import production_budget
from odradek.streams.config import KafkaConfig
from odradek.streams.events.tasks import Budget

SHAPE = ModelConfig(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
SHARD_2 = "model-00002-of-00002.safetensors"
SMOL = ModelConfig(
    vocab_size=49_205,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    qk_norm=False,
)
"""SmolLM2-135M with our markers."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    save_hf(Policy(msgspec.structs.replace(SHAPE, tie_word_embeddings=False)), folder, max_shard_bytes=200_000)
    assert (folder / SHARD_2).exists()
    shutil.copyfile(ASSETS / "tokenizer.json", folder / "tokenizer.json")
    return folder


def configured(directory: Path, *flags: str) -> Config:
    return load(environment={}, flags=[f"policy.dir={directory}", *flags]).config


def edit(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def tied(directory: Path, head: bool) -> None:
    """Make it a tied model in one file, with another head beside the embedding or without one."""
    policy = Policy(SHAPE, seed=4)
    for file in directory.glob("model*"):
        file.unlink()
    save_hf(policy, directory)
    if head:
        state = load_file(directory / "model.safetensors")
        save_file({**state, HEAD: state[EMBED] + 1}, directory / "model.safetensors")


def quantised(directory: Path) -> None:
    tied(directory, head=False)
    state = load_file(directory / "model.safetensors")
    save_file({**state, EMBED: state[EMBED].to(torch.int8)}, directory / "model.safetensors")


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda d: (d / SHARD_2).unlink(), rf"{SHARD_2} is missing"),
    "shard cut": (lambda d: (d / SHARD_2).write_bytes((d / SHARD_2).read_bytes()[:-100]), rf"{SHARD_2} .* cut short"),
    "index names another folder": (
        lambda d: edit(d / "model.safetensors.index.json", lambda r: r["weight_map"].update({HEAD: "../x"})),
        r"\.\./x",
    ),
    "other head beside a tied embedding": (lambda d: tied(d, head=True), rf"{HEAD} differs from {EMBED}"),
    "quantised": (quantised, r"weights are stored as I8"),
    "unsupported key": (lambda d: edit(d / "config.json", lambda r: r.update(attention_bias=True)), r"attention_bias"),
    "key missing": (
        lambda d: edit(d / "config.json", lambda r: r.pop("hidden_size")),
        r"config\.json has no hidden_size",
    ),
    "key of another kind": (lambda d: edit(d / "config.json", lambda r: r.update(head_dim="x")), r"config\.json.*'x'"),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing"),
    "no directory": (shutil.rmtree, r"config\.json is missing"),
    "another shape": (lambda d: edit(d / "config.json", lambda r: r.update(hidden_size=64)), r"has shape .* expected"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
    "tokenizer is no JSON": (lambda d: (d / "tokenizer.json").write_text("{"), r"tokenizer\.json is no tokenizer file"),
    "tokenizer without our markers": (
        lambda d: edit(d / "tokenizer.json", lambda r: r.update(added_tokens=r["added_tokens"][:3])),
        r"tokenizer\.json has no special token '<end>'",
    ),
    "tokenizer that normalises": (
        lambda d: edit(d / "tokenizer.json", lambda r: r.update(normalizer={"type": "NFC"})),
        r"normalises nothing, found .* NFC",
    ),
    "tokenizer of a smaller model": (
        lambda d: edit(d / "config.json", lambda r: r.update(vocab_size=1000)) or shrink(d, 1000),
        r"1024 tokens, the embedding 1000 rows",
    ),
    "tokenizer of a larger model": (
        lambda d: (
            edit(d / "config.json", lambda r: r.update(vocab_size=1024 + SPARE_ROWS + 1))
            or shrink(d, 1024 + SPARE_ROWS + 1)
        ),
        r"not of one model",
    ),
}


def shrink(directory: Path, rows: int) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    save_hf(Policy(msgspec.structs.replace(SHAPE, vocab_size=rows)), directory)


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_directory_is_refused_in_one_line_that_names_import(fault: str, directory: Path) -> None:
    checked(configured(directory))
    plant, named = FAULTS[fault]
    plant(directory)
    with pytest.raises(UsageError, match=named) as refused:
        checked(configured(directory))
    message = str(refused.value)
    assert message.startswith("policy.dir can't be used: ") and "\n" not in message
    assert str(directory) in message and "odradek policy import" in message


def test_tied_model_without_a_head_is_whole_and_equals_the_tied_reference(directory: Path) -> None:
    tied(directory, head=False)
    assert checked(configured(directory)).parameters == sum(p.numel() for p in Policy(SHAPE).parameters())
    again = load_hf(directory)
    assert torch.equal(again.head_weight, Policy(SHAPE, seed=4).embed)


@pytest.mark.parametrize("command", [["up"], ["demo"]])
def test_nothing_starts_with_a_wrong_directory(command: list[str], directory: Path, tmp_path: Path) -> None:
    (directory / SHARD_2).unlink()
    data = tmp_path / "data"
    odradek = [sys.executable, "-m", "odradek.infra.cli.main"]
    done = subprocess.run(
        [*odradek, *command, "--data", str(data), "--set", f"policy.dir={directory}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert SHARD_2 in done.stderr and "odradek policy import" in done.stderr
    assert not (data / "kafka").exists() and not (data / "s3").exists()


def test_more_context_than_the_model_has_is_refused(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"policy\.max_context is 641, the model in .* has 640"):
        checked(configured(directory, "policy.max_context=641"))


def test_checking_imports_no_torch(directory: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from odradek.actors.policy.directory import inspect;"
        "inspect(Path(sys.argv[1])); import odradek.infra.cluster.deployment; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# -- what follows from the shape ---------------------------------------------------------------------------------------


def endpoints() -> Endpoints:
    return Endpoints(KafkaConfig(bootstrap="none:1"), "", "b", "r", "", "none:1")


def test_the_shipped_policy_gives_the_numbers_that_were_benchmarked() -> None:
    deployment = deployment_of(load(environment={}).config, endpoints())
    assert deployment.max_context == 640
    assert deployment.lane.training["micro_tokens"] == 8192
    assert deployment.lane.training["optimiser"]["embedding_lr_scale"] == 128**0.5 / 2
    assert deployment.tokenizer == inspect(ASSETS).tokenizer
    budget = production_budget(deployment.max_context)
    assert (budget.max_turn_tokens, budget.max_context_tokens) == (160, 576)


def test_a_foreign_policy_is_the_deployments(directory: Path) -> None:
    edit(directory / "config.json", lambda raw: raw.pop("embedding_lr_scale"))
    deployment = deployment_of(configured(directory, "policy.max_context=300"), endpoints())
    assert (deployment.warm_start_dir, deployment.max_context) == (str(directory), 300)
    assert deployment.lane.training["optimiser"]["embedding_lr_scale"] == 1.0
    scaled = deployment_of(configured(directory, "trainer.embedding_lr_scale=3"), endpoints())
    assert scaled.lane.training["optimiser"]["embedding_lr_scale"] == 3.0


def test_commands_work_beside_an_unusable_directory(tmp_path: Path) -> None:
    deployment = deployment_of(configured(tmp_path / "gone"), endpoints())
    assert deployment.warm_start_dir == str(tmp_path / "gone")


def test_memory_of_keys_and_values_and_of_training_stays_bounded_for_a_larger_model() -> None:
    settings = EngineSettings()
    page = 2 * 30 * 64 * 3 * 64 * 4
    assert pages_of(SMOL, settings) * page <= settings.kv_memory_bytes < (pages_of(SMOL, settings) + 1) * page
    assert context_of(SMOL, settings) == 8192
    small = msgspec.structs.replace(settings, kv_memory_bytes=11 * page)
    assert context_of(SMOL, small) == 640
    assert TRAINING_BYTES // SMOL.training_bytes_per_token < MOST_MICRO_TOKENS < TRAINING_BYTES // 200_000


def test_engine_holds_what_the_deployment_says() -> None:
    settings = EngineSettings(max_running=2, kv_memory_bytes=4 * 64 * 2 * 2 * 2 * 8 * 4)
    engine = Engine(SHAPE, "test", settings)
    assert engine.stats().pages_total == pages_of(SHAPE, settings) - 1 == 3
    assert context_of(SHAPE, settings) == 192


def test_training_memory_is_estimated_from_the_shape(directory: Path) -> None:
    assert sizes(configured(ASSETS)).micro_tokens == MOST_MICRO_TOKENS
    assert 256 <= TRAINING_BYTES // SMOL.training_bytes_per_token <= 2048


def test_a_task_gets_no_more_context_than_there_is() -> None:
    assert within(Budget(max_context_tokens=9000), 640).max_context_tokens == 640
    assert within(Budget(max_context_tokens=300), 640) == Budget(max_context_tokens=300)
