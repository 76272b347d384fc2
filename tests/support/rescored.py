"""What is wrong with a rescored lane, from the log alone: whose verdicts its seals name, and whom they leave out."""

from __future__ import annotations

from collections.abc import Collection

from odradek.streams import topics
from odradek.streams.events.groups import GroupSealed
from odradek.streams.events.meta import RecordRef
from odradek.streams.events.rewards import RewardRevised
from odradek.streams.log import EventLog
from odradek.streams.replay.reseal import seals_from


async def faults_of(log: EventLog, source: str, lane: str, unfit: Collection[str] = ()) -> list[str]:
    """Every group of the source is there, with the same members; each that had a verdict has the later grader's word on
    just that verdict, unless the run has said that the grader can't judge it (`unfit`)."""
    found, graders = [], set[tuple[str, str]]()
    again = {seal.rescored: seal for _, seal in await seals_from(log, lane, 0)}
    for offset, seal in await seals_from(log, source, 0):
        made = again.get(RecordRef(topics.GROUPS.name, topics.GROUPS.partition_of(source), offset))
        if made is None or _members(made) != _members(seal):
            found.append(f"group {seal.group_id} was left out, or has other members")
            continue
        for old, new in zip(seal.members, made.members, strict=True):
            if old.reward is None or old.session_id in unfit:
                continue
            if new.reward is None:
                found.append(f"session {old.session_id} was skipped")
                continue
            body = (await log.read_ref(new.reward)).event.body
            if isinstance(body, RewardRevised) and (body.session_id, body.revises) == (old.session_id, old.reward):
                graders.add((body.grader, body.grader_version))
            else:
                found.append(f"session {old.session_id} has a verdict that is not the later grader's on it")
    return found + ([f"verdicts of {len(graders)} graders"] if len(graders) > 1 else [])


def _members(seal: GroupSealed) -> list[str]:
    return [member.session_id for member in seal.members]
