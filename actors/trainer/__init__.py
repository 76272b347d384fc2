"""Trainer: objective, optimiser step, checkpoint, manifest, delta. Pure parts; the Kafka shell is `actor.py`."""
