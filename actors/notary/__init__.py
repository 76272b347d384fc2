"""Runs the notary: `streams.audit` has the rules."""
