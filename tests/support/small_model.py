"""The shape of model that the engine's tests sample from: small, and with everything a large one has."""

from odradek.actors.policy.config import ModelConfig

CONFIG = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=320,
)
