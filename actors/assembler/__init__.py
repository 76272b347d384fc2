"""The assembler as an actor: a host for `odradek.streams.assembly.assembler`."""
