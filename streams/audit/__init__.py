"""Tamper evidence: the notary's chain and signed roots, their verification, and proofs of single events."""
