"""What a run did, folded from the log alone: one fold for the demo, `watch`, `report` and the dashboard."""
