"""The fault harness of `make crash`: a real stack under a tiny job, faults by seed, guarantees checked from the log."""
