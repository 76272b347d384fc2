"""Graders: versioned, pure over (task, session, workspace). A fault of ours is `ungraded`, never a score."""
