"""Shape of the policy, and its Hugging Face `config.json`.

Owns: which decoder shapes we run (Qwen3 dense, Qwen3-MoE, Llama without scaling tricks) and the mapping to and from
`config.json`, so that transformers and vLLM open what we write and we open what they write. A key that would change
the arithmetic and that we do not implement (rope scaling, sliding windows, biases, mixed dense and sparse layers) is
refused by name: a checkpoint that loads is computed exactly as its author meant it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from odradek.actors.policy.errors import UnsupportedModelError

_ARCHITECTURES: Final = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "llama": "LlamaForCausalLM",
}


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Qwen3-shaped decoder; the defaults are the demo policy (0.92 M parameters)."""

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    """Width of the feed-forward of a dense model; unused when `num_experts` is set."""
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 640
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tie_word_embeddings: bool = True
    qk_norm: bool = True
    """RMSNorm on each query and key head before rope (Qwen3); False is the Llama shape."""
    num_experts: int = 0
    """0 is a dense model. The defaults below then cost a token what the dense feed-forward of 384 costs it."""
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 192
    norm_topk_prob: bool = True
    embedding_lr_scale: float = 1.0
    """Factor on the embedding's learning rate (`trainer.optim` says why). It belongs to how the embedding was
    initialised, so it travels with the weights, under this key of `config.json`; a foreign checkpoint has 1."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedModelError(
                f"{self.num_attention_heads} query heads do not divide into {self.num_key_value_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise UnsupportedModelError(f"rope needs an even head_dim, found {self.head_dim}")
        if self.num_experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise UnsupportedModelError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, expected 1 to num_experts = {self.num_experts}"
            )
        if self.num_experts and not self.qk_norm:
            raise UnsupportedModelError("a mixture of experts without QK-norm is no shape that we can save")

    @property
    def training_bytes_per_token(self) -> int:
        """About what one token's forward keeps for the backward, float32: inputs and outputs of each layer's norms,
        projections, attention and feed-forward."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        wide = self.num_experts_per_tok * self.moe_intermediate_size if self.num_experts else self.intermediate_size
        return 4 * self.num_hidden_layers * (8 * self.hidden_size + 4 * heads * self.head_dim + 5 * wide)

    @property
    def model_type(self) -> str:
        if not self.qk_norm:
            return "llama"
        return "qwen3_moe" if self.num_experts else "qwen3"

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` of this shape, complete for transformers 4 and 5 and for vLLM."""
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,  # transformers 4, vLLM
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},  # transformers 5
            "tie_word_embeddings": self.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "torch_dtype": "float32",
            "embedding_lr_scale": self.embedding_lr_scale,
        }
        if self.num_experts:
            out |= {
                "num_experts": self.num_experts,
                "num_local_experts": self.num_experts,  # the name in transformers 5
                "num_experts_per_tok": self.num_experts_per_tok,
                "moe_intermediate_size": self.moe_intermediate_size,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "output_router_logits": False,
            }
        return out

    @classmethod
    def from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        """Read a `config.json`; raises `UnsupportedModelError` naming the first key that we do not compute, or that is
        missing or of the wrong kind."""
        try:
            return cls._from_hf(raw)
        except KeyError as error:
            raise UnsupportedModelError(f"config.json has no {error.args[0]}") from None
        except (AttributeError, TypeError, ValueError) as error:
            raise UnsupportedModelError(f"config.json: {error}") from None

    @classmethod
    def _from_hf(cls, raw: dict[str, Any]) -> ModelConfig:
        model_type = raw.get("model_type")
        if model_type not in _ARCHITECTURES:
            raise UnsupportedModelError(f"model_type is {model_type!r}, expected one of {sorted(_ARCHITECTURES)}")
        _refuse_unsupported(raw)
        heads = int(raw["num_attention_heads"])
        rope = raw.get("rope_parameters") or {}
        base = cls()
        moe = model_type == "qwen3_moe"
        return cls(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_hidden_layers=int(raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            rms_norm_eps=float(raw.get("rms_norm_eps", base.rms_norm_eps)),
            rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or base.rope_theta),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=model_type != "llama",
            num_experts=int(raw.get("num_experts") or raw["num_local_experts"]) if moe else 0,
            num_experts_per_tok=int(raw["num_experts_per_tok"]) if moe else base.num_experts_per_tok,
            moe_intermediate_size=int(raw["moe_intermediate_size"]) if moe else base.moe_intermediate_size,
            norm_topk_prob=bool(raw.get("norm_topk_prob", False)) if moe else base.norm_topk_prob,
            embedding_lr_scale=float(raw.get("embedding_lr_scale", 1.0)),
        )


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    wrong = {
        f"rope type {kind!r}": kind != "default",
        "quantization_config": bool(raw.get("quantization_config")),
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "mlp_only_layers": bool(raw.get("mlp_only_layers")),
        "decoder_sparse_step": raw.get("decoder_sparse_step", 1) != 1,
        f"hidden_act {raw.get('hidden_act')!r}": raw.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0,
    }
    for name, refused in wrong.items():
        if refused:
            raise UnsupportedModelError(f"config.json asks for {name}, which this decoder does not compute")
