"""A task's own verifier (Harbor style): files under /tests, a command, and the reward it writes.

The reward file's folder is made fresh after the agent is gone, in a sandbox that no agent process ever ran in: what a
session planted in its workspace can't be there, and a planted folder of the verifier's files is cleared away first.
What a verifier did not write as a finite number between 0 and 1 is "could not run", not zero.

Limit of the format: the code under test runs while the verifier does, as the same user. A verifier that imports it must
write its reward after that code has ended; `HiddenTests` has no such limit.
"""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass, field

from odradek.actors.environment.protocol import ExecRequest, Sandbox
from odradek.actors.reward.errors import GraderCouldNotRun
from odradek.actors.tasks.refusal import MAX_GRADING_SECONDS
from odradek.streams.events.tasks import HiddenScript

TESTS = "/tests"
REWARDS = "/logs/verifier"
STAGING = ".verifier-files"
"""Where the files are uploaded before they are moved out of the workspace."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reward` in [0, 1]."""

    reward: float
    notes: list[str] = field(default_factory=list)


async def run(script: HiddenScript, sandbox: Sandbox) -> Outcome:
    """Place the files, run the command, read the reward. Raises GraderCouldNotRun with the cause."""
    notes = await _planted(sandbox)
    notes += await _cleared(sandbox)
    await sandbox.upload({f"{STAGING}/{path}": data for path, data in script.files.items()})
    place = f"rm -rf {TESTS} {REWARDS} && mkdir -p {REWARDS} && mv {STAGING} {TESTS} && chmod -R u+rwX {TESTS}"
    placed = await sandbox.exec(ExecRequest(shell=place, timeout_s=30.0))
    if placed.exit_code != 0:
        raise GraderCouldNotRun(f"the verifier's files could not be placed: {placed.stderr[-200:]!r}")
    limit = min(script.timeout_seconds, MAX_GRADING_SECONDS)
    result = await sandbox.exec(ExecRequest(shell=script.command, timeout_s=limit))
    if result.timed_out:
        raise GraderCouldNotRun(f"the verifier ran past {limit:g} s", retryable=False)
    return Outcome(await _reward(sandbox, result.exit_code), notes)


async def _planted(sandbox: Sandbox) -> list[str]:
    """Reward files that the session itself left behind: noted, and never read."""
    found = await sandbox.exec(
        ExecRequest(shell="find . / -xdev -maxdepth 4 -name 'reward.txt' -o -name 'reward.json' 2>/dev/null | head -5")
    )
    names = [line for line in found.stdout.splitlines() if line.startswith(("./", REWARDS))]
    return [f"planted reward file ignored: {name}" for name in names]


async def _cleared(sandbox: Sandbox) -> list[str]:
    """Make sure that only the task's own files become the verifier's: what a session left at their place would be
    moved along with them."""
    found = await sandbox.exec(ExecRequest(shell=f"ls -d {STAGING} 2>/dev/null; rm -rf {STAGING}", timeout_s=30.0))
    return [f"planted {STAGING} removed"] if found.stdout.strip() else []


async def _reward(sandbox: Sandbox, exit_code: int) -> float:
    shown = await sandbox.exec(
        ExecRequest(
            shell=f"cat {shlex.quote(REWARDS)}/reward.txt 2>/dev/null || cat {shlex.quote(REWARDS)}/reward.json",
            timeout_s=10.0,
        )
    )
    return reward_of(shown.stdout if shown.exit_code == 0 else "", exit_code)


def reward_of(text: str, exit_code: int) -> float:
    """The reward that a verifier wrote; raises GraderCouldNotRun where it is none."""
    text = text.strip()
    if not text:
        raise GraderCouldNotRun(f"the verifier ended with {exit_code} and wrote no reward", retryable=False)
    value = _number(text)
    if value is None or not math.isfinite(value) or not 0.0 <= value <= 1.0:
        raise GraderCouldNotRun(f"the verifier's reward is {text[:60]!r}, expected 0 to 1", retryable=False)
    return value


def _number(text: str) -> float | None:
    """A plain number, or the `reward` of a JSON object."""
    try:
        parsed = json.loads(text)
        if isinstance(parsed, dict):
            parsed = parsed.get("reward")
        return float(parsed) if isinstance(parsed, int | float) and not isinstance(parsed, bool) else None
    except (ValueError, OverflowError, RecursionError):
        return None
