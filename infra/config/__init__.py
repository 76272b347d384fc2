"""One typed configuration: file, then environment, then flags; unknown keys refused; every value knows its origin.

`load` makes it, `tree.Config` is it. Add a field in `tree.py` (with its docstring) and it exists everywhere.
"""
