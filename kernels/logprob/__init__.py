"""Log-probability and entropy of tokens from hidden states."""
