"""Root-mean-square norm."""
