"""Consent: who may be trained on, as the log says. Keys and erasure come with the audit room."""
