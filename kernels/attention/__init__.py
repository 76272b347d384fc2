"""Tiled attention: causal over packed sequences, and over a paged key/value cache."""
