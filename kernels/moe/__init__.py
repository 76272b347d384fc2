"""The expert layer: routing, permutation, grouped matmul."""
