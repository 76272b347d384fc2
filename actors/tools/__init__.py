"""The ten tools a session's agent may call, and the workspace they act on."""
