"""The policy network: a Qwen3 / Qwen3-MoE (or plain Llama) decoder on our kernels.

Guarantees:
- the arithmetic is that of transformers' `Qwen3ForCausalLM` and `Qwen3MoeForCausalLM` (QK-norm before rope, rope by
  rotated halves, SwiGLU, RMSNorm), and `save_hf` / `load_hf` exchange checkpoints with it (tests compare logits);
- training (`forward_packed`) and sampling (`inference/batch.py`) run the same trunk on the same kernels and differ in
  the attention call only, whose tiles are the same: under one `numerics_id` a token's hidden state has the same bits in
  both, whatever the batch, the chunking of the prompt or the pages it lies in.
It never samples, never schedules and holds no cache: pages come in with the call.

Dimensions: T packed tokens, S sessions, B rows, Q new tokens a row, M pages a row, N flat rows, H hidden, V vocabulary,
D head dimension. The projections are fused in memory (`qkv`, `w13`); `hf.py` splits them to Hugging Face names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from odradek.actors.policy.config import ModelConfig
from odradek.actors.policy.prefixes import shared_rows
from odradek.kernels.attention.api import attend_causal
from odradek.kernels.moe.api import expert_layer
from odradek.kernels.norm.api import rms_norm
from odradek.kernels.rows.api import linear

EMBEDDING_STD: Final = 0.113
"""Initial spread of embedding rows. They enter the residual stream unscaled, as in Hugging Face, so it is also the
stream's first scale: at the usual 0.02 the first layers see almost nothing and training starts late; near 1 the tied
head starts with huge logits."""

FINAL_NORM_INIT: Final = 0.177
"""Initial weight of the last RMSNorm: EMBEDDING_STD * sqrt(128) * 0.177 = 0.23 is the spread of the first logits.
1.0 would start from a confident wrong model."""

RESIDUAL_INIT: Final = 0.5
"""Scale of projections back into the residual stream relative to 1/sqrt(fan-in)."""

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, heads, D], k [N, kv heads, D], v) -> [N, heads, D]."""


@dataclass(frozen=True)
class Routing:
    """Which experts each token went to, `[N, top_k]` int32 a sparse layer.

    `chosen` is filled by the forward; `replay`, when not empty, holds the choice to follow instead of the router's own
    (router replay: the trainer repeats the sampler's choice, the mixing weights stay differentiable).
    """

    chosen: list[Tensor] = field(default_factory=list)
    replay: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Ops:
    """The row-wise operations of the trunk; `KERNELS` everywhere that log-probs must agree."""

    linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    expert_layer: Callable[[Tensor, Tensor, Tensor, Tensor, int, bool, Tensor | None], tuple[Tensor, Tensor]]


KERNELS: Final = Ops(linear, rms_norm, expert_layer)


class Block(nn.Module):
    """Weights of one decoder layer."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.attn_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = nn.Parameter(torch.empty(q + 2 * kv, c.hidden_size))
        if c.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(c.head_dim))
            self.k_norm = nn.Parameter(torch.ones(c.head_dim))
        self.o = nn.Parameter(torch.empty(c.hidden_size, q))
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden_size))
        if c.num_experts:
            e, f = c.num_experts, c.moe_intermediate_size
            self.router = nn.Parameter(torch.empty(e, c.hidden_size))
            self.w13 = nn.Parameter(torch.empty(e, 2 * f, c.hidden_size))
            self.w2 = nn.Parameter(torch.empty(e, c.hidden_size, f))
        else:
            self.w13 = nn.Parameter(torch.empty(2 * c.intermediate_size, c.hidden_size))
            self.w2 = nn.Parameter(torch.empty(c.hidden_size, c.intermediate_size))


class Policy(nn.Module):
    """Decoder weights and its two forward passes; parameters are initialised from `seed`, or left for a loader to fill
    where it is None."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_hidden_layers)])
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        cos, sin = _rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if seed is not None:
            self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if name == "embed":
                p.normal_(0, EMBEDDING_STD, generator=generator)
            elif name == "final_norm":
                p.fill_(FINAL_NORM_INIT if self.config.tie_word_embeddings else 1.0)
            elif p.dim() > 1:
                scale = RESIDUAL_INIT if name.endswith((".o", ".w2")) else 1.0
                p.normal_(0, scale / math.sqrt(p.shape[-1]), generator=generator)

    @property
    def head_weight(self) -> Tensor:
        """`[V, H]`, the embedding itself when tied."""
        return self.embed if self.config.tie_word_embeddings else self.lm_head

    def forward_packed(
        self,
        tokens: Tensor,
        positions: Tensor,
        seq_starts: Tensor,
        routing: Routing | None = None,
    ) -> Tensor:
        """Hidden states `[T, H]` of packed sequences; differentiable.

        `seq_starts` `[S+1]` int32 begins with 0 and ends with T; token i attends to its own sequence up to i. A prefix
        that sequences share is computed once (`prefixes`), except under router replay: samplers of different versions
        may have routed it differently. `routing` names experts of tokens, `[T, top_k]`.
        """
        rows = shared_rows(tokens, positions, seq_starts)
        if not rows.any or (routing is not None and routing.replay):
            return self.trunk(tokens, positions, lambda _, q, k, v: attend_causal(q, k, v, seq_starts), routing=routing)

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.index_select(0, rows.of_token) for x in (q, k, v))
            return attend_causal(q, k, v, seq_starts).index_select(0, rows.first)

        of_rows = Routing()
        hidden = self.trunk(tokens[rows.first], positions[rows.first], attend, routing=of_rows)
        if routing is not None:
            routing.chosen.extend(ids[rows.of_token] for ids in of_rows.chosen)
        return hidden.index_select(0, rows.of_token)

    def trunk(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        ops: Ops = KERNELS,
        routing: Routing | None = None,
    ) -> Tensor:
        """The decoder over flat rows `[N]`, the attention supplied by the caller."""
        c = self.config
        x = F.embedding(tokens, self.embed)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        split = [c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads]
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            qkv = ops.linear(ops.rms_norm(x, block.attn_norm, c.rms_norm_eps), block.qkv)
            q, k, v = qkv.view(-1, sum(split), c.head_dim).split_with_sizes(split, dim=1)
            if c.qk_norm:
                q = ops.rms_norm(q, block.q_norm, c.rms_norm_eps)
                k = ops.rms_norm(k, block.k_norm, c.rms_norm_eps)
            mixed = attend(layer, _rotate(q, cos, sin), _rotate(k, cos, sin), v.contiguous())
            x = x + ops.linear(mixed.reshape(x.shape[0], -1), block.o)
            x = x + self._feed_forward(layer, block, ops.rms_norm(x, block.mlp_norm, c.rms_norm_eps), ops, routing)
        return ops.rms_norm(x, self.final_norm, c.rms_norm_eps)

    def _feed_forward(self, layer: int, block: Block, x: Tensor, ops: Ops, routing: Routing | None) -> Tensor:
        c = self.config
        if not c.num_experts:
            gate, up = ops.linear(x, block.w13).chunk(2, dim=-1)
            return ops.linear(F.silu(gate) * up, block.w2)
        replay = routing.replay[layer] if routing is not None and routing.replay else None
        top_k = c.num_experts_per_tok
        y, ids = ops.expert_layer(x, block.router, block.w13, block.w2, top_k, c.norm_topk_prob, replay)
        if routing is not None:
            routing.chosen.append(ids)
        return y

    def save_hf(self, directory: str | Path) -> None:
        """Write `config.json` and `model.safetensors` for transformers, vLLM and `load_hf`."""
        from odradek.actors.policy.hf import save_hf

        save_hf(self, Path(directory))

    @classmethod
    def load_hf(cls, directory: str | Path) -> Policy:
        """Open a Hugging Face directory; every tensor is checked, anything amiss raises `CheckpointLoadError`."""
        from odradek.actors.policy.hf import load_hf

        return load_hf(Path(directory))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope by rotated halves: component i of the first half turns with component i of the second."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _rope_tables(c: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin `[max positions, D/2]`, computed in float32 in the order transformers uses."""
    inverse = 1.0 / (c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.int64).float() / c.head_dim))
    angles = torch.arange(c.max_position_embeddings).float()[:, None] * inverse
    return angles.cos(), angles.sin()
