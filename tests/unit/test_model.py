"""The policy network: parity with transformers, the two forwards agree, and what a forward must not depend on."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from odradek.actors.inference.batch import PagedBatch, parts_of
from odradek.actors.inference.pages import Holding
from odradek.actors.inference.scheduler import Sequence
from odradek.actors.inference.types import SampleRequest
from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.kv import PAGE_SIZE
from odradek.actors.policy.model import Policy, Routing
from odradek.kernels.logprob.api import row_logits, token_logprobs

SMALL = ModelConfig(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=2, head_dim=16)
MOE = msgspec.structs.replace(SMALL, num_experts=4, moe_intermediate_size=40, norm_topk_prob=True)
MOE_RAW = msgspec.structs.replace(MOE, norm_topk_prob=False, tie_word_embeddings=False)
UNTIED = msgspec.structs.replace(SMALL, tie_word_embeddings=False, rope_theta=1e6)
LLAMA = msgspec.structs.replace(SMALL, qk_norm=False)
SHAPES = pytest.mark.parametrize(
    "config", [SMALL, UNTIED, LLAMA, MOE, MOE_RAW], ids=["qwen3-tied", "qwen3", "llama", "moe", "moe-raw-weights"]
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def a_policy(config: ModelConfig, seed: int = 0) -> Policy:
    """Random weights, norms included: a norm of ones would hide a forgotten multiplication."""
    policy = Policy(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in policy.parameters():
            if p.dim() == 1:
                p.copy_(0.5 + torch.rand(p.shape, generator=generator))
    return policy


def sequences(*lengths: int, vocab: int = 97) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = torch.randint(vocab, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return tokens, positions, starts


def in_pages(tokens: Tensor, pages: list[int], slot: int = 0) -> Sequence:
    """A sequence as the engine has it, none of it computed."""
    request = SampleRequest(
        request_id="r", session_id="s", epoch=0, prompt_tokens=[], max_new_tokens=1, stop_ids=frozenset(), seed=0,
        deadline=0.0,
    )  # fmt: skip
    return Sequence(request, 0, 0, tokens.tolist(), Holding(pages), slot)


def sample_way(policy: Policy, tokens: Tensor, chunks: list[int], first_page: int = 0) -> Tensor:
    """Hidden state of each chunk's last token, one sequence fed through the engine's pages."""
    pages = -(-len(tokens) // PAGE_SIZE)
    batch = PagedBatch(policy.config, first_page + pages + 1, slots=1)
    sequence = in_pages(tokens, list(range(first_page, first_page + pages))[::-1])
    out = []
    for n in chunks:
        out.append(batch.forward(policy, [[(sequence, n)]])[0])
        sequence.held.computed += n
    return torch.stack(out)


@SHAPES
def test_final_checkpoint_opens_in_plain_transformers_with_the_same_logits(config: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = a_policy(config)
    policy.save_hf(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens, positions, starts = sequences(75)
    with torch.no_grad():
        ours = row_logits(policy.forward_packed(tokens, positions, starts), policy.head_weight)
        wanted = theirs(tokens[None]).logits[0]
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)


@SHAPES
def test_checkpoint_written_by_transformers_opens_here(config: ModelConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    a_policy(config).save_hf(tmp_path / "ours")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    again = Policy.load_hf(tmp_path / "theirs")
    assert again.config == config
    tokens, positions, starts = sequences(40)
    with torch.no_grad():
        ours = row_logits(again.forward_packed(tokens, positions, starts), again.head_weight)
        torch.testing.assert_close(ours, theirs(tokens[None]).logits[0], atol=2e-5, rtol=2e-5)


@SHAPES
@pytest.mark.parametrize("chunks", [[150], [150 - 7] + [1] * 7, [64, 1, 63, 22], [5] + [1] * 145], ids=str)
def test_sampler_and_trainer_hidden_states_are_equal_bit_for_bit(config: ModelConfig, chunks: list[int]) -> None:
    policy = a_policy(config)
    tokens, positions, starts = sequences(150)
    with torch.no_grad():
        trained = policy.forward_packed(tokens, positions, starts)
    sampled = sample_way(policy, tokens, chunks, first_page=3)
    assert torch.equal(trained[torch.tensor(chunks).cumsum(0) - 1], sampled)


def test_packed_sequences_do_not_see_each_other() -> None:
    policy = a_policy(SMALL)
    tokens, positions, starts = sequences(30, 70, 5)
    with torch.no_grad():
        together = policy.forward_packed(tokens, positions, starts)
        for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            whole = torch.tensor([0, b - a], dtype=torch.int32)
            alone = policy.forward_packed(tokens[a:b], positions[a:b], whole)
            assert torch.equal(together[a:b], alone)


def test_rows_of_unequal_new_tokens_equal_rows_alone() -> None:
    policy = a_policy(SMALL)
    lengths = [9, 70, 1, 12]
    tokens, _, _ = sequences(*lengths)
    rows = [
        in_pages(part, pages, slot)
        for slot, (part, pages) in enumerate(zip(tokens.split(lengths), [[0], [1, 2], [5], [7]], strict=True))
    ]
    parts = parts_of([(row, len(row.tokens)) for row in rows])
    together = PagedBatch(policy.config, 8, slots=4).forward(policy, parts)
    for hidden, (row, n) in zip(together, (row for part in parts for row in part), strict=True):
        assert torch.equal(hidden, sample_way(policy, torch.tensor(row.tokens), [n])[0])


def test_padding_of_a_row_writes_no_page() -> None:
    policy = a_policy(SMALL)
    batch = PagedBatch(policy.config, 4, slots=2)
    tokens = torch.ones(6, dtype=torch.long)
    batch.forward(policy, [[(in_pages(tokens, [0], 0), 6), (in_pages(tokens[:2], [2], 1), 2)]])
    written = batch._kv.k[0].abs().sum(dim=(2, 3)) > 0
    assert written[0].nonzero().flatten().tolist() == list(range(6))
    assert written[2].nonzero().flatten().tolist() == [0, 1]
    assert not written[1].any() and not written[3].any()


def test_every_parameter_receives_a_gradient() -> None:
    for config in (SMALL, UNTIED, MOE):
        policy = a_policy(config)
        tokens, positions, starts = sequences(40, 20)
        hidden = policy.forward_packed(tokens, positions, starts)
        token_logprobs(hidden, policy.head_weight, tokens.roll(1))[0].sum().backward()  # type: ignore[no-untyped-call]
        silent = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert silent == []


def test_routed_experts_are_reported_and_replayed() -> None:
    policy = a_policy(MOE)
    tokens, positions, starts = sequences(20)
    free = Routing()
    with torch.no_grad():
        hidden = policy.forward_packed(tokens, positions, starts, free)
        assert [tuple(e.shape) for e in free.chosen] == [(20, 2)] * 2
        assert torch.equal(hidden, policy.forward_packed(tokens, positions, starts, Routing(replay=free.chosen)))
        other = [(e + 1) % 4 for e in free.chosen]
        assert not torch.equal(hidden, policy.forward_packed(tokens, positions, starts, Routing(replay=other)))


def test_same_seed_same_weights_other_seed_other_weights() -> None:
    a, b, c = Policy(SMALL, 1), Policy(SMALL, 1), Policy(SMALL, 2)
    assert torch.equal(a.embed, b.embed)
    assert not torch.equal(a.embed, c.embed)
