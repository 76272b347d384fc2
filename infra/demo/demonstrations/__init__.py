"""Scripted, imperfect demonstrations and copy drills: what the warm start is trained on."""
