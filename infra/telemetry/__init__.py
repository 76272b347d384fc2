"""Metrics of a deployment, and the spans that no actor sends, from the log and the actors' own words."""
