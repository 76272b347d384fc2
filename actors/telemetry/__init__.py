"""Traces of what actors do: ids from the log, spans from its events. Imports only opentelemetry and streams."""
