"""Prefixes shared by packed sequences are computed once and change no bit.

Case: alex-hh/profam #495, huggingface/nanoVLM #201 (packed rows attend to each other; positions run over the border).
"""

import itertools

import pytest
import torch
from torch import Tensor

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.model import Policy, Routing
from odradek.actors.policy.prefixes import shared_rows
from odradek.kernels.logprob.api import token_logprobs

SMALL = ModelConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
EXPERTS = ModelConfig(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
)
SHAPES = pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])


def packed(*sequences: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions and starts of sequences packed one after another."""
    ends = torch.tensor([len(s) for s in sequences]).cumsum(0)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), ends]).int()
    tokens = torch.tensor([t for s in sequences for t in s])
    return tokens, torch.cat([torch.arange(len(s)) for s in sequences]), starts


def drawn(count: int, seed: int) -> list[int]:
    """`count` random token ids."""
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PREFIX, A, B = drawn(70, 1), drawn(31, 2), drawn(45, 3)


def logprobs(policy: Policy, *sequences: list[int]) -> list[Tensor]:
    """Log-probs of every token but the first, a sequence."""
    tokens, positions, starts = packed(*sequences)
    with torch.no_grad():
        hidden = policy.forward_packed(tokens, positions, starts)
    found, _ = token_logprobs(hidden[:-1], policy.head_weight, tokens[1:])
    bounds = starts.tolist()
    return [found[a : b - 1] for a, b in itertools.pairwise(bounds)]


def test_a_shared_prefix_is_one_row_and_branches_are_their_own() -> None:
    rows = shared_rows(*packed(PREFIX + A, PREFIX + B, PREFIX + A[:3]))
    assert len(rows.first) == len(PREFIX) + len(A) + len(B)
    assert rows.any
    tokens, positions, _ = packed(PREFIX + A, PREFIX + B, PREFIX + A[:3])
    assert torch.equal(tokens[rows.first][rows.of_token], tokens)
    assert torch.equal(positions[rows.first][rows.of_token], positions)


def test_equal_tokens_after_different_ones_or_at_other_positions_are_not_shared() -> None:
    assert not shared_rows(*packed([1, 5, 6], [2, 5, 6])).any
    tokens, _, starts = packed([5, 6], [5, 6])
    assert not shared_rows(tokens, torch.tensor([0, 1, 4, 5]), starts).any


@SHAPES
def test_hidden_states_of_shared_and_unshared_packing_are_equal_bit_for_bit(config: ModelConfig) -> None:
    policy = Policy(config, seed=3)
    together = logprobs(policy, PREFIX + A, PREFIX + B, PREFIX)
    for found, sequence in zip(together, (PREFIX + A, PREFIX + B, PREFIX), strict=True):
        (alone,) = logprobs(policy, sequence)
        assert torch.equal(found, alone)


def test_a_sequence_sees_no_token_of_another_one() -> None:
    policy = Policy(SMALL, seed=3)
    changed = [*A[:5], (A[5] + 1) % 97, *A[6:]]
    before, after = logprobs(policy, PREFIX + A, PREFIX + B), logprobs(policy, PREFIX + changed, PREFIX + B)
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


@SHAPES
def test_gradients_of_shared_rows_are_summed(config: ModelConfig) -> None:
    def gradients(*packs: tuple[list[int], ...]) -> dict[str, Tensor]:
        policy = Policy(config, seed=3)
        for sequences in packs:
            tokens, positions, starts = packed(*sequences)
            hidden = policy.forward_packed(tokens, positions, starts)
            at = torch.tensor([i for i in range(len(tokens)) if i not in set(starts.tolist())])
            token_logprobs(hidden[at - 1], policy.head_weight, tokens[at])[0].sum().backward()  # type: ignore[no-untyped-call]
        return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}

    together = gradients((PREFIX + A, PREFIX + B))
    apart = gradients((PREFIX + A,), (PREFIX + B,))
    assert together.keys() == apart.keys()
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], atol=2e-4, rtol=2e-4)


def test_routed_experts_are_reported_for_every_token() -> None:
    policy = Policy(EXPERTS, seed=3)
    tokens, positions, starts = packed(PREFIX + A, PREFIX + B)
    routing = Routing()
    with torch.no_grad():
        policy.forward_packed(tokens, positions, starts, routing)
    assert [tuple(ids.shape) for ids in routing.chosen] == [(len(tokens), 2)] * 2


def test_replay_is_followed_for_each_sequence_where_samplers_routed_a_prefix_differently() -> None:
    policy = Policy(EXPERTS, seed=3)
    tokens, positions, starts = packed(PREFIX + A, PREFIX + B)
    split, free = len(PREFIX + A), Routing()
    with torch.no_grad():
        policy.forward_packed(tokens, positions, starts, free)
        replay = [torch.cat([ids[:split], (ids[split:] + 1) % 4]) for ids in free.chosen]
        together = policy.forward_packed(tokens, positions, starts, Routing(replay=replay))
        for part in (slice(0, split), slice(split, len(tokens))):
            alone = torch.tensor([0, len(tokens[part])], dtype=torch.int32)
            routing = Routing(replay=[ids[part] for ids in replay])
            assert torch.equal(together[part], policy.forward_packed(tokens[part], positions[part], alone, routing))
