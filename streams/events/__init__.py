"""The event types, one file a family. Everything an actor knows, it can fold from these.

Every body is a frozen, tagged msgspec struct. The tag (``type``) is the CloudEvents ``ce_type`` and carries the
schema version. Fields are only ever added, and only with defaults; a changed meaning is a new version and an
upcaster. Arrays of numbers are packed little-endian bytes (`i32`, `f32` in `odradek.streams.codec`), never lists:
hashes and golden files cover those bytes.
"""
