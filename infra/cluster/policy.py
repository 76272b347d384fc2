"""Which policy a deployment trains: its directory, checked before anything starts, and what follows from its shape.

Promises: a directory that can't be served is refused in one line while nothing runs yet (`checked`); one that is not
what the log's policy of that name began with is refused before an actor starts (`check_history`). Sizes that depend on
the model come from its `config.json` (`sizes`), so that nothing else holds a number of the shipped one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from odradek.actors.inference.settings import EngineSettings, context_of
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.directory import (
    TOKENIZER_FILE,
    WEIGHT_BYTES,
    PolicyDirectory,
    inspect,
    parameters_of,
    read_config,
)
from odradek.actors.policy.errors import PolicyError
from odradek.actors.policy.tokenizer import Tokenizer
from odradek.actors.runtime.deployment import Deployment
from odradek.actors.runtime.store import object_store
from odradek.infra.config.tree import Config
from odradek.infra.errors import UsageError
from odradek.streams.errors import BlobMissing
from odradek.streams.log import EventLog
from odradek.streams.replay.lineage import versions_of

ASSETS: Final = Path(__file__).resolve().parents[1] / "demo" / "warmstart" / "assets"
"""The shipped policy."""

MEBIBYTE: Final = 1024 * 1024

TRAINING_BYTES: Final = 2 * 1024 * MEBIBYTE
"""Memory for what one forward and backward keeps, where trainer.micro_tokens is none. Too low cuts a batch into more
passes than needed; too high takes the memory that engine and sandboxes need."""

MOST_MICRO_TOKENS: Final = 8192
"""Above this a pass gains nothing more."""

SLOWEST_BYTES_S: Final = 0.4e9
"""Bytes of weights that a sampled token reads in a second, at the least (seen: 1.6 s a token of 538 MB among eight busy
processes, a tenth of that alone). Lower waits longer for an engine that hangs; higher gives up a slow one."""

LEAST_MICRO_TOKENS: Final = 256
"""Sequences are never split: below this, passes hold one sequence each anyway."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What follows from the model's shape and the settings."""

    context: int
    """Tokens of one session that the engine can hold."""
    micro_tokens: int
    embedding_lr_scale: float
    token_seconds: float
    """What a sampled token may take."""


class _Made(msgspec.Struct, frozen=True):
    """What is read here of a version's manifest (`trainer.manifest`, whose imports bring torch)."""

    model: dict[str, Any]
    weights_digest: str


def policy_dir(config: Config) -> Path:
    """The configured directory, or the shipped one."""
    return Path(config.policy.dir).expanduser().absolute() if config.policy.dir else ASSETS


def checked(config: Config) -> PolicyDirectory:
    """The policy directory, whole and fit to be served; raises `UsageError` in one line."""
    directory = policy_dir(config)
    try:
        found = inspect(directory)
    except PolicyError as error:
        raise UsageError(
            f"policy.dir can't be used: {error}; `odradek policy import` makes a policy directory of a Hugging Face one"
        ) from error
    most = found.config.max_position_embeddings
    if (config.policy.max_context or 0) > most:
        raise UsageError(f"policy.max_context is {config.policy.max_context}, the model in {directory} has {most}")
    return found


def sizes(config: Config) -> Sizes:
    """Never raises for an unusable directory, because `status` and `down` must work beside one: then the sizes are
    those of the default shape, and `checked` has kept anything from starting with them."""
    try:
        model = read_config(policy_dir(config))
    except PolicyError:
        model = ModelConfig()
    trainer = config.trainer
    fitting = max(LEAST_MICRO_TOKENS, min(MOST_MICRO_TOKENS, TRAINING_BYTES // model.training_bytes_per_token))
    model = msgspec.structs.replace(
        model, max_position_embeddings=min(model.max_position_embeddings, config.policy.max_context or 2**31)
    )
    return Sizes(
        context=context_of(model, msgspec.convert(engine_settings(config), EngineSettings)),
        micro_tokens=trainer.micro_tokens or fitting,
        embedding_lr_scale=trainer.embedding_lr_scale or model.embedding_lr_scale,
        token_seconds=parameters_of(model) * WEIGHT_BYTES / SLOWEST_BYTES_S,
    )


def engine_settings(config: Config) -> dict[str, object]:
    """`EngineSettings` as JSON values."""
    inference = config.inference
    return {
        "max_running": inference.max_running,
        "kv_memory_bytes": inference.kv_memory_mb * MEBIBYTE,
        "kv_on_reload": inference.kv_on_reload,
    }


def tokenizer_digest(config: Config) -> str:
    """How sessions name the tokenizer; empty where there is none that could be used."""
    try:
        return Tokenizer.from_file(policy_dir(config) / TOKENIZER_FILE).digest
    except PolicyError:
        return ""


async def check_history(config: Config, deployment: Deployment) -> None:
    """Refuse to go on with another model than the one that the log's versions of this policy are of.

    The shape is compared with the newest version's; of a configured directory also the weights, with version 0's.
    """
    async with EventLog(deployment.kafka) as event_log:
        published = (await versions_of(event_log, config.lane.policy)).published
    if not published:
        return
    store = object_store(deployment)
    directory = policy_dir(config)
    newest, first = max(published), published.get(0)
    try:
        made = msgspec.json.decode(await store.get(published[newest].manifest_key), type=_Made)
        same = ModelConfig.from_hf(made.model) == read_config(directory)
        if same and config.policy.dir and first is not None and not first.parent_key:
            made = msgspec.json.decode(await store.get(first.manifest_key), type=_Made)
            same = made.weights_digest == weights_digest(directory)
    except (BlobMissing, msgspec.DecodeError):
        return  # the actor that needs the manifest says what to do
    if not same:
        raise UsageError(
            f"{directory} is not what policy {config.lane.policy!r} on this log was made from: give the policy.dir "
            f"that it began with, train this one under another name (--set lane.policy=NAME), or use another log "
            f"(--data DIR)"
        )


def weights_digest(directory: Path) -> str:
    """The digest that version 0 has when it is made from this directory."""
    from odradek.actors.inference.weights import state_digest
    from odradek.actors.policy.hf import load_hf, to_hf_state

    return state_digest(to_hf_state(load_hf(directory)))
