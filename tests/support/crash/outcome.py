"""What a run is asked for and what it finds, as plain data: it goes from each life of the deployment to the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from support.crash.checks import Violation
from support.crash.load import Load
from support.crash.plan import Fault


@dataclass(frozen=True)
class Settings:
    """What to do. The same settings give the same plan of faults."""

    faults: int
    seed: int
    data: Path
    kinds: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    short: bool = False
    """CI's matrix instead of a plan."""
    first_step_s: float = 300.0
    """Seconds for the first training step, before any fault."""


@dataclass(frozen=True)
class Round:
    """One round of faults and how long it took, in seconds: until the last fault was over, then until the job was seen
    to go on."""

    faults: int
    hurt: float
    going_on: float


@dataclass
class Outcome:
    """What happened, so far. `checked`: the run is over, and `violations` are all there are."""

    checked: bool = False
    rounds: list[Round] = field(default_factory=list)
    injected: list[Fault] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Faults that found nothing to hit, with the reason."""
    duplicates: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass
class Carried:
    """What one life leaves to the next."""

    load: Load
    outcome: Outcome = field(default_factory=Outcome)
    known: set[str] = field(default_factory=set)
    """Sandbox drivers seen, whose control groups must be gone at the end."""
    round: int = 0
    """The next round of the plan; the one before it may still have to be seen to go on."""
    hurt_since: float | None = None
    """When the round that ended the life before began, by the host's monotonic clock; None: none did."""
