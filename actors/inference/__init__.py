"""Inference: a paged, continuously batched sampling engine and its actor shell."""
