"""`odradek policy`: make a policy directory out of a Hugging Face checkpoint, and look at one. Needs no service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from odradek.infra.cli.context import EXIT_CODES, Context, command_options

if TYPE_CHECKING:
    from odradek.actors.policy.directory import PolicyDirectory
    from odradek.actors.policy.importer import Imported


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What `show` prints."""

    policy: PolicyDirectory
    context: int
    """Tokens of one session under the settings in force."""
    micro_tokens: int
    digest: str
    """Of the weights as version 0 publishes them."""
    numerics_id: str
    """Under which this machine would compute."""
    computed: str
    """The dtype that engine and trainer compute in."""


@click.group(epilog=EXIT_CODES)
def command() -> None:
    """Make a policy directory (policy.dir) out of a Hugging Face checkpoint, or look at one."""


@command.command("import")
@click.argument("source", metavar="HF_DIR", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory to make.")
@click.option("--compare/--no-compare", default=True, show_default=True, help="Compare with transformers' logits.")
@command_options
def import_(context: Context, source: Path, out: Path, compare: bool) -> None:
    """Make OUT, a policy directory, out of a Llama, Qwen3 or Qwen3-MoE checkpoint with a byte-level BPE tokenizer.

    Adds the markers of our chat template to the tokenizer and a row for each to the embedding. Tokens that are there
    keep their ids and rows. The result is opened with plain transformers, where that is installed, and with our
    decoder, and their logits are compared. Then: odradek up --set policy.dir=OUT
    """
    context.say(f"reading {source}")
    from odradek.actors.policy.importer import import_hf

    _one_thread()
    made = import_hf(source, out, compare)
    context.result(made, _told(made))


@command.command
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@command_options
def show(context: Context, directory: Path | None) -> None:
    """Check DIRECTORY [policy.dir, or the shipped policy] and print shape, size, tokenizer, digest and numerics id."""
    context.say(f"reading {directory or context.config.policy.dir or 'the shipped policy'} …")
    from odradek.infra.cluster.policy import checked, sizes, weights_digest

    config = context.config
    if directory is not None:
        config = msgspec.structs.replace(config, policy=msgspec.structs.replace(config.policy, dir=str(directory)))
    found = checked(config)
    context.say(f"computing the digest of {found.weight_bytes / 1e6:.1f} MB of weights …")
    from odradek.kernels.numerics import numerics_id

    _one_thread()
    follows = sizes(config)
    shown = Shown(
        policy=found,
        context=follows.context,
        micro_tokens=follows.micro_tokens,
        digest=weights_digest(Path(found.directory)),
        numerics_id=numerics_id(),
        computed="float32",
    )
    context.result(shown, _lines(shown))


def _one_thread() -> None:
    """As engine and trainer compute; the thread count is part of the numerics id."""
    import torch

    torch.set_num_threads(1)


def _lines(shown: Shown) -> str:
    found, c = shown.policy, shown.policy.config
    experts = f", {c.num_experts} experts of {c.moe_intermediate_size}, {c.num_experts_per_tok} a token"
    return "\n".join(
        (
            f"{found.directory}",
            f"  {c.model_type}: {c.num_hidden_layers} layers of {c.hidden_size}, {c.num_attention_heads} query and "
            f"{c.num_key_value_heads} key/value heads of {c.head_dim}{experts if c.num_experts else ''}",
            f"  {found.parameters:,} parameters, {found.weight_bytes / 1e6:.1f} MB as {found.dtype}; computed in "
            f"{shown.computed}",
            f"  {found.tokens} tokens, tokenizer {found.tokenizer[:16]}; embedding of {c.vocab_size}"
            f"{', tied' if c.tie_word_embeddings else ''}",
            f"  context {shown.context} of {c.max_position_embeddings} positions, training passes of "
            f"{shown.micro_tokens} tokens",
            f"  weights {shown.digest}",
            f"  numerics {shown.numerics_id}",
        )
    )


def _told(made: Imported) -> str:
    compared = made.compared
    proof = (
        f"logits of {compared.tokens} tokens differ from transformers {compared.transformers} by at most "
        f"{compared.largest_difference:.2g} (largest {compared.largest_logit:.3g})"
        if compared.transformers
        else "not compared with transformers (not installed, or --no-compare)"
    )
    found = made.made
    return (
        f"{found.directory}: {found.config.model_type}, {found.parameters:,} parameters as {found.dtype}, "
        f"{found.tokens} tokens with {made.markers} markers and {made.byte_tokens} bytes that were added; {proof}"
    )
