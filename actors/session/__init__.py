"""The agent loop: one state machine, folded from sessions.v1, for production, RL and evaluation alike."""
