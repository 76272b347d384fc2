"""Hosts the Faust worker of `odradek.streams.projections`."""
