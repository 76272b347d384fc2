"""The run in a tracing and experiment interface that others maintain: MLflow, loaded from the log."""
