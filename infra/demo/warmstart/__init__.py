"""The demo policy's supervised warm start: how it is trained, how it is measured, and its weights."""
