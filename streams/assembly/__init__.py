"""Sealed groups -> advantages -> a batch of references; and back to the arrays that are trained (`materialise`)."""
