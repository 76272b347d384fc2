"""Which faults a run gets: a pure function of the seed, the number and the names of what runs.

A plan is a list of rounds; the faults of one round are injected together. `Fault.to_json` and the seed are all that a
report needs to repeat it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from odradek.streams.faults import POINTS
from support.crash.proxy import MODES

RAY_KILL = "ray kill"
"""Of Ray's own processes, which takes every actor and the driver with it."""

WEIGHTS = {
    "kill": 30,
    "kill at point": 16,
    "kill helper": 6,
    "kill sandbox": 6,
    "pause": 12,
    "zombie": 6,
    "broker kill": 3,
    "broker pause": 3,
    "broker slow": 3,
    "store": 12,
    "store kill": 3,
    "duplicate": 12,
    "rebalance": 6,
    "clock": 6,
    RAY_KILL: 2,
}
"""How often each kind is drawn. Kills of processes lead; a broker restart costs ten seconds of everybody's time, and
one of Ray forty."""

PAUSES_S = (1.0, 3.0, 8.0, 14.0, 24.0)
"""Seconds of SIGSTOP. Below 10 s nobody misses the process; above, its transaction is timed out and its partitions are
given away before it comes back."""
STORE_S = (2.0, 5.0, 10.0)
CLOCKS_S = (-3600.0, -30.0, 45.0, 3600.0, 0.0, 0.0)
"""Wall-clock jumps; 0 puts the clock right again."""
ZOMBIES = ("assembler", "trainer", "controller")
"""Roles with a transactional id: a rival takes over while they stand still, then they come back."""
EVERYTHING = "everything"
RAY_DEATHS = ("raylet", "gcs_server", EVERYTHING)
"""Which of Ray's processes is killed; or all of the deployment at once, services, actors and sandboxes: a host that
loses its power and keeps its disk."""
MATRIX_AT_ONCE = 6
UNDER_THE_JOB = ("session", "environment", "reward")
"""Roles whose fault points are reached by a whole job only."""
AT_ONCE = (2, 3, 4, 4, 5, 6)
"""Faults of one round. Each round ends with the job going on, which costs the same for one fault as for six; more at
once, and hardly anything runs that could be hurt in between."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `target`: an actor's name, or empty; `how`: mode, point or topic; `amount`: seconds or a count."""

    kind: str
    target: str = ""
    how: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        told = [self.kind, self.target, self.how, f"{self.amount:g}" if self.amount else ""]
        return " ".join(part for part in told if part)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(seed: int, faults: int, actors: Sequence[str], kinds: Sequence[str] = ()) -> list[list[Fault]]:
    """`faults` faults in rounds. `actors`: every actor's name; `kinds`: only these (all by default). The first faults
    go through the kinds once, so that a short run has seen most of them."""
    rng = random.Random(f"odradek crash {seed}")
    wanted = [kind for kind in WEIGHTS if not kinds or kind in kinds]
    first = rng.sample(wanted, len(wanted))
    drawn = [*first[:faults], *rng.choices(wanted, [WEIGHTS[kind] for kind in wanted], k=max(0, faults - len(first)))]
    made = [_fault(kind, rng, sorted(actors)) for kind in drawn]
    return _in_rounds(made, lambda: rng.choice(AT_ONCE))


def matrix(seed: int, actors: Sequence[str]) -> list[list[Fault]]:
    """The short run of CI: every kind of fault once, brief ones, and every point that only a whole job reaches, in an
    order and at targets by seed."""
    rng = random.Random(f"odradek matrix {seed}")
    made = [_brief(_fault(kind, rng, sorted(actors))) for kind in WEIGHTS if kind != "kill at point"]
    for point in POINTS:
        if point.startswith(UNDER_THE_JOB):
            target = rng.choice([name for name in sorted(actors) if name.startswith(point.partition(".")[0])])
            made.append(Fault("kill at point", target, point, 1))
    rng.shuffle(made)
    return _in_rounds(made, lambda: MATRIX_AT_ONCE)


def _in_rounds(faults: list[Fault], size: Callable[[], int]) -> list[list[Fault]]:
    """In this order; the death of Ray is a round by itself, because nobody is there to hurt beside it."""
    rounds: list[list[Fault]] = []
    left = 0
    for fault in faults:
        if fault.kind == RAY_KILL:
            rounds.append([fault])
            left = 0
        elif left:
            rounds[-1].append(fault)
            left -= 1
        else:
            rounds.append([fault])
            left = size() - 1
    return rounds


def _brief(fault: Fault) -> Fault:
    return replace(fault, amount=min(fault.amount, 3.0)) if fault.kind != "duplicate" else fault


def _fault(kind: str, rng: random.Random, actors: Sequence[str]) -> Fault:
    sandboxed = [name for name in actors if name.startswith(("environment", "reward"))]
    match kind:
        case "kill at point":
            roles = {name for point in POINTS for name in actors if name.startswith(point.partition(".")[0])}
            target = rng.choice(sorted(roles))
            point = rng.choice([p for p in POINTS if target.startswith(p.partition(".")[0])])
            return Fault(kind, target, point, rng.randint(1, 2))
        case "kill helper":
            helped = [*sandboxed, *(name for name in actors if name == "projections")]
            return Fault(kind, rng.choice(helped))
        case "kill sandbox":
            return Fault(kind, rng.choice(sandboxed))
        case "pause":
            return Fault(kind, rng.choice(actors), "", rng.choice(PAUSES_S))
        case "zombie":
            return Fault(kind, rng.choice(ZOMBIES))
        case "broker pause":
            return Fault(kind, "", "", rng.choice(PAUSES_S))
        case "broker slow":
            return Fault(kind, "", "", 6.0)
        case "store":
            return Fault(kind, "", rng.choice(MODES[1:]), rng.choice(STORE_S))
        case "duplicate":
            return Fault(kind, "", rng.choice(["tasks.v1", "sessions.v1", "sessions.v1", "rewards.v1"]), rng.random())
        case "rebalance":
            return Fault(kind, "", "reward", rng.choice((2.0, 6.0)))
        case "ray kill":
            return Fault(kind, "", rng.choice(RAY_DEATHS))
        case "clock":
            return Fault(kind, rng.choice([n for n in actors if n != "projections"]), "", rng.choice(CLOCKS_S))
        case "kill":
            return Fault(kind, rng.choice(actors))
        case _:
            return Fault(kind)
