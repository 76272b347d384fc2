"""Replay: select, rebuild and verify batches, export training sets, from the log and its blobs alone."""
