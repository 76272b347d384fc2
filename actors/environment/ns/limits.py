"""From a spec's limits to what the kernel is told, or to the reason why it can't be.

Each limit names the weakest enforcement that its author accepts. `plan` takes the strongest that this host has; where
only a weaker one exists than was demanded, the spec is refused. Only `pids` is held by rlimit unless a cgroup is
demanded: the count is as exact there, and entering a cgroup takes longer than making a sandbox.
"""

import math
import os
from typing import NamedTuple

from odradek.actors.environment.errors import SandboxSpecError
from odradek.actors.environment.ns.cgroup import Controller
from odradek.actors.environment.protocol import Enforcement, Limits, SandboxSpec

MAX_LIFETIME_S = 7 * 24 * 3600.0
"""Seconds a sandbox may be asked to live. Too low: long sessions are rebuilt for nothing; too high: leaks stay."""

MIN_ADDRESS_SPACE = 64 << 20
"""Bytes of address space below which not even the process that starts commands can run."""

_CONTROLLER: dict[str, Controller] = {"memory_bytes": "memory", "pids": "pids", "cpus": "cpu"}


class Plan(NamedTuple):
    """Amounts by the way they are held. `processors`: those to be pinned to, empty for all."""

    cgroup: dict[Controller, float]
    rlimits: dict[str, int]
    processors: list[int]


def levels(has_cgroup: bool) -> dict[str, tuple[Enforcement, ...]]:
    """For each limit the enforcement that this host offers."""
    both: tuple[Enforcement, ...] = ("cgroup", "rlimit") if has_cgroup else ("rlimit",)
    return {"cpus": both, "memory_bytes": both, "pids": both, "disk_bytes": ("rlimit",)}


def plan(limits: Limits, has_cgroup: bool, turn: int = 0) -> Plan:
    """How to hold `limits` here. `turn` spreads sandboxes that are pinned to few processors over all."""
    offered = levels(has_cgroup)
    result = Plan({}, {}, [])
    for name in limits.__struct_fields__:
        limit = getattr(limits, name)
        if limit is None:
            continue
        if limit.amount <= 0 or not math.isfinite(limit.amount):
            raise SandboxSpecError(f"limit {name}: {limit.amount} is not a positive amount")
        if limit.weakest not in offered[name] and limit.weakest == "cgroup":
            raise SandboxSpecError(
                f"limit {name} demands 'cgroup', this host offers {list(offered[name])}: "
                "accept 'rlimit', or run where a cgroup with the memory, pids and cpu controllers is writable"
            )
        if "cgroup" in offered[name] and (name != "pids" or limit.weakest == "cgroup"):
            result.cgroup[_CONTROLLER[name]] = limit.amount
        elif name == "cpus":
            usable = sorted(os.sched_getaffinity(0))
            if limit.amount < len(usable):
                start = turn % len(usable)
                result.processors.extend((usable[start:] + usable[:start])[: math.ceil(limit.amount)])
        elif name == "memory_bytes" and limit.amount < MIN_ADDRESS_SPACE:
            raise SandboxSpecError(f"limit {name}: {limit.amount:g} by rlimit; at least {MIN_ADDRESS_SPACE} is needed")
        else:
            result.rlimits[name] = int(limit.amount)
    return result


def check_spec(spec: SandboxSpec) -> None:
    """Refuse what no driver could make sense of."""
    if not 0 < spec.lifetime_s <= MAX_LIFETIME_S:
        raise SandboxSpecError(f"lifetime of {spec.lifetime_s} s: expected more than 0 and at most {MAX_LIFETIME_S:g}")
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            raise SandboxSpecError(f"environment variable {name!r}: a name has no '=', and nothing has a zero byte")
