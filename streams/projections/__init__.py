"""Live tables over the log (groups, rewards, curriculum, utilisation): rebuildable, without side effects.

`tables.py` says what a row is and how an event changes it (pure), `views.py` merges rows at read (pure), `fold.py` is
the plain fold that every table is tested against, `app.py` is the Faust worker and
`python -m odradek.streams.projections` runs it.
"""
