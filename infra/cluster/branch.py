"""The deployment's lane as the log has it: a branch goes on as the branch it is, and a new one begins where asked for.

A branch is a policy and a lane of its own. Its configuration on the log names the parent version that its weights come
from and where its tasks begin; nothing of the parent's lane, policy or checkpoints is ever written.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from odradek.actors.runtime.deployment import Deployment
from odradek.infra.errors import UsageError
from odradek.streams import topics
from odradek.streams.errors import Terminal
from odradek.streams.events.groups import LaneConfigured, ParentVersion
from odradek.streams.log import EventLog
from odradek.streams.replay.branch import branch_point, check_branch
from odradek.streams.replay.reseal import configuration_of


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a new branch begins."""

    policy: str
    """The parent's."""
    at: str
    """A version, or a place on the log (`branch_point`)."""


async def on_its_branch(deployment: Deployment, branch: Branch | None = None) -> Deployment:
    """The deployment with its lane's parent. Raises UsageError where `branch` can't begin or is another one."""
    async with EventLog(deployment.kafka) as event_log:
        try:
            known = await configuration_of(event_log, deployment.lane.lane)
            parent, low = (known.parent, _low(known)) if known is not None else (None, {})
            if branch is not None:
                wanted = await branch_point(event_log, branch.policy, branch.at)
                check_branch(deployment.lane.lane, deployment.policy, wanted)
                if known is not None and parent != wanted:
                    raise UsageError(_other(known, wanted))
                if known is None:
                    own = [topics.TASKS.for_tenant(tenant) for tenant in deployment.tenants]
                    ends = {name: await event_log.stable_ends(name) for name in (topics.TASKS.name, *own)}
                    parent, low = (
                        wanted,
                        {name: [end for _, end in sorted(found.items())] for name, found in ends.items()},
                    )
        except Terminal as error:
            raise UsageError(str(error)) from None
    tasks_low = low.pop(topics.TASKS.name, [])
    lane = msgspec.structs.replace(deployment.lane, parent=parent, tasks_low=tasks_low, tenants_low=low)
    return msgspec.structs.replace(deployment, lane=lane)


def _low(lane: LaneConfigured) -> dict[str, list[int]]:
    """By task topic where the lane's tasks begin."""
    return {topics.TASKS.name: lane.tasks_low, **lane.tenants_low}


def _other(known: LaneConfigured, wanted: ParentVersion) -> str:
    began = known.parent.manifest_key if known.parent is not None else "the warm start"
    return (
        f"lane {known.lane} is on the log already and began with {began}, not with {wanted.manifest_key}: leave --from "
        f"out to go on with it, or take another --policy and --lane"
    )
