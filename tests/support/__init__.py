"""Worlds for tests: in-memory ports that keep the protocols' promises. Only the model is scripted."""
