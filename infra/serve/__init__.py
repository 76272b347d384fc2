"""Serving a person: copy a folder into a session, show what happens, bring the accepted changes back."""
