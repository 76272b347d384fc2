"""Which event types a topic carries. Pure data; `asyncapi.py` and the tests read it."""

from typing import Any, get_args

import msgspec

from odradek.streams import codec, topics
from odradek.streams.events import audit, batches, dlq, groups, rewards, sessions, subjects, tasks, weights
from odradek.streams.topics import Topic


def _members(union: Any) -> tuple[type[msgspec.Struct], ...]:
    return get_args(union) or (union,)


CATALOG: dict[Topic, tuple[type[msgspec.Struct], ...]] = {
    topics.TASKS: _members(tasks.TaskEvent),
    topics.FEEDBACK: _members(tasks.FeedbackEvent),
    topics.SESSIONS: _members(sessions.SessionEvent),
    topics.REWARDS: _members(rewards.RewardEvent),
    topics.GROUPS: _members(groups.GroupEvent),
    topics.BATCHES: _members(batches.BatchEvent),
    topics.WEIGHTS: _members(weights.WeightsEvent),
    topics.WEIGHTS_CURRENT: _members(weights.CurrentEvent),
    topics.REPLICAS: _members(weights.ReplicaEvent),
    topics.SUBJECTS: _members(subjects.SubjectEvent),
    topics.AUDIT_ANCHORS: _members(audit.AnchorEvent),
    topics.DLQ: _members(dlq.DeadLetterEvent),
}


def event_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """JSON Schema of a record's value for one event type. The body's own `type` may be left out: `ce_type` says it."""
    tag = str(kind.__struct_config__.tag)
    schema = msgspec.json.schema(codec.Wire[kind])  # type: ignore[valid-type]
    definitions: dict[str, Any] = schema["$defs"]
    body = definitions[kind.__name__]
    body["required"] = [name for name in body["required"] if name != "type"]
    wire = definitions.pop(f"Wire_{kind.__name__}_")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"odradek:schemas/{tag}",
        "title": tag,
        "description": body.get("description", ""),
        **{name: wire[name] for name in ("type", "properties", "required")},
        "$defs": dict(sorted(definitions.items())),
    }
