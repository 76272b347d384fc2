"""The AsyncAPI 3.0 document of the log, from the table of topics and the event structs."""

from typing import Any

from odradek.streams import codec, topics
from odradek.streams.schemas.catalog import CATALOG
from odradek.streams.topics import Cleanup, Topic

HEADERS: dict[str, Any] = {
    "type": "object",
    "required": ["ce_type"],
    "properties": {
        "ce_specversion": {"type": "string", "enum": ["1.0"]},
        "ce_id": {"type": "string", "description": "Deterministic; the first record of an id wins."},
        "ce_type": {"type": "string"},
        "ce_source": {"type": "string"},
        "ce_dataschema": {"type": "string"},
        "content-type": {"type": "string", "enum": [codec.MSGPACK, codec.JSON]},
        "traceparent": {"type": "string", "description": "W3C trace context."},
    },
}


def document() -> dict[str, Any]:
    """The whole document; schemas are referred to by file."""
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Odradek",
            "version": "1",
            "description": "The log: every topic, who writes it, and the events it carries. Values are msgpack of the "
            "schemas named here; open topics accept the same as JSON. Topic names carry the deployment's prefix.",
        },
        "defaultContentType": codec.MSGPACK,
        "channels": {row.name: _channel(row) for row in topics.ALL},
        "operations": {
            f"write.{row.name}": {
                "action": "receive" if row.open else "send",
                "channel": {"$ref": f"#/channels/{row.name}"},
                "summary": f"Written by: {', '.join(row.writers)}.",
            }
            for row in topics.ALL
        },
        "components": {
            "messages": {tag: _message(tag) for tag in codec.registry()},
            "schemas": {"Headers": HEADERS},
        },
    }


def _channel(row: Topic) -> dict[str, Any]:
    retention = {"retention.ms": -1, "retention.bytes": -1} if row.cleanup is Cleanup.KEEP else {}
    cleanup = "delete" if row.cleanup is Cleanup.KEEP else "compact"
    tags = [str(kind.__struct_config__.tag) for kind in CATALOG[row]]
    return {
        "address": row.name,
        "description": f"{row.holds[0].upper()}{row.holds[1:]}. Key: {row.key.value}."
        + (" Other tenants write to a topic of their own, this name with .TENANT behind." if row.per_tenant else ""),
        "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in tags},
        "bindings": {
            "kafka": {
                "topic": row.name,
                "partitions": row.partitions,
                "topicConfiguration": {"cleanup.policy": [cleanup], **retention},
                "bindingVersion": "0.5.0",
            }
        },
    }


def _message(tag: str) -> dict[str, Any]:
    kind = codec.registry()[tag]
    on_open = any(row.open and kind in kinds for row, kinds in CATALOG.items())
    return {
        "name": tag,
        "contentType": codec.JSON if on_open else codec.MSGPACK,
        "headers": {"$ref": "#/components/schemas/Headers"},
        "payload": {
            "schemaFormat": "application/schema+json;version=draft-2020-12",
            "schema": {"$ref": f"./events/{tag}.json"},
        },
    }
