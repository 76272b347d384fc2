"""Committed JSON Schemas of every event type, their history, and an AsyncAPI document; all generated from the structs.

`python -m odradek.streams.schemas.generate` renews them and refuses a change that older readers or older records would
not survive.
"""
