"""Metrics of a deployment, and the spans that no actor sends, from the log and the actors' own words."""

TELEMETRY = "telemetry"
"""Name of the actor that serves the metrics page."""
