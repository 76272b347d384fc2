"""How much a tool may read, say and take: one frozen record, given to every call.

The numbers are part of what the policy learns to live with, so production and RL must use the same ones; that is why
they are data handed in (and logged with the session's configuration), not globals.
"""

import msgspec

KIB = 1024
MIB = 1024 * KIB


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Caps of one session's tools; every one leaves a marker that says how to get the rest."""

    output_bytes: int = 32 * KIB
    """UTF-8 bytes of one result. Too low: the agent pages for ever. Too high: one result eats the context."""
    read_lines: int = 2_000
    """Lines read_file shows at once. Too low: many calls for one file. Too high: only output_bytes still bounds it."""
    line_chars: int = 400
    """Characters of one line in a grep hit or a quoted line. Too low: hits lose their meaning. Too high: one line of
    a minified bundle crowds out the other hits."""
    hits: int = 200
    """Lines grep, glob and list_dir return at most. Same trade as output_bytes, in lines."""
    file_bytes: int = 16 * MIB
    """Largest file a tool opens. Too low: real sources are refused. Too high: one call holds that much memory."""
    scan_bytes: int = 64 * MIB
    """Bytes grep and semantic_search read in one call. Too low: large trees are searched in part (and said so)."""
    scan_files: int = 20_000
    """Entries a walk of the tree visits. Too low: large trees are listed in part. Too high: a call takes seconds."""
    pattern_seconds: float = 2.0
    """CPU seconds one search pattern may take. Too low: honest patterns on large trees fail; too high: a
    backtracking pattern blocks the searches behind it that long."""
    command_seconds: float = 60.0
    """run_terminal's default time-out. Too low: test suites are cut. Too high: a hanging command holds its session."""
    command_seconds_max: float = 600.0
    """Longest time-out a call may ask for; above it the call is refused, not shortened in silence."""
    display_bytes: int = 64 * KIB
    """Size of what a person is shown beside the result (diff, command output)."""
