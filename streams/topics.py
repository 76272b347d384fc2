"""The table of topics: every stream of the product is declared here and nowhere else.

A row says who writes the topic, what its key is and how long it is kept; `admin.py` creates the rows and reports
drift. Partition counts are fixed for a major version of a topic, because a key's partition follows from them.

`writers` is a promise that only the broker's ACLs keep: a deployment that other people's clients reach must grant WRITE
on the two open topics to anybody and on every other topic to its row's writers alone, and the transactional ids
`controller`, `assembler.LANE` and `trainer.LANE` to their roles. What readers hold by themselves, on every topic:
undecodable bytes, types that do not belong there and zombies (fenced producers, older epochs) change nothing; and on
the open topics no content stops anybody. What they cannot tell from the real thing, and the ACL must prevent:
- groups.v1: the first seal of a group that names its members counts, whoever wrote it (`sealing.py` refuses the rest);
- batches.v1: a forged batch is the assembler's position and, where its leaves match the log, the trainer's next step
  (where they do not, the trainer stops and `replay rebuild --verify` names the leaf);
- rewards.v1: the first verdict of a member wins, whoever wrote it;
- sessions.v1: a forged `session.resumed` takes a session over (the real owner's later records are ignored), and an
  owner event with the current epoch and the next sequence number counts;
- weights.v1: a pin or a roll-back is obeyed.
The embedded broker listens on loopback only and has no ACLs: whoever has an account on that machine may write there.
"""

import re
import zlib
from enum import StrEnum

import msgspec
from aiokafka.partitioner import murmur2

from odradek.streams.errors import UnknownTopic


class Cleanup(StrEnum):
    """What the broker may remove."""

    KEEP = "keep"
    """Nothing, for ever: retention.ms and retention.bytes of -1."""
    COMPACT = "compact"
    """All but the newest record of a key."""


class KeyKind(StrEnum):
    """What a topic's key is; it decides whose order is promised."""

    FREE = "free"
    SESSION = "session id"
    LANE = "lane"
    POLICY = "policy"
    REPLICA = "replica"
    SUBJECT = "subject"
    PARTITION = "topic/partition"
    ORIGINAL = "original key"


class Topic(msgspec.Struct, frozen=True):
    """One declared topic."""

    name: str
    key: KeyKind
    cleanup: Cleanup
    partitions: int
    compression: str | None
    writers: tuple[str, ...]
    holds: str
    open: bool = False
    """Foreign clients write it: JSON is accepted and nothing relies on the partition of a key."""
    per_tenant: bool = False
    """Other tenants write NAME.TENANT, a topic of their own."""

    def partition_of(self, key: str) -> int:
        """The partition that this product's writers put a key in (Java's murmur2; a lane's number for lanes)."""
        if self.open:
            raise UnknownTopic(
                f"{self.name} is open to foreign clients, which hash keys in their own ways: read all of its "
                f"partitions instead of asking for the one of key {key!r}",
                topic=self.name,
            )
        if self.partitions == 1:
            return 0
        if self.key is KeyKind.LANE:
            return _lane_number(self, key)
        return partition_for(key.encode(), self.partitions)

    def for_tenant(self, tenant: str) -> str:
        """The bare name of a tenant's own copy of this topic; the tenant is the topic's, never the message's word."""
        if not self.per_tenant or not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,62}", tenant):
            raise UnknownTopic(
                f"no topic of {self.name} for tenant {tenant!r}: a tenant is 1-63 of a-z 0-9 and '-', and only "
                f"open topics have tenants",
                topic=self.name,
                tenant=tenant,
            )
        return f"{self.name}.{tenant}"


def partition_for(key: bytes, partitions: int) -> int:
    """Java's default partitioner, which aiokafka's agrees with."""
    return int((murmur2(key) & 0x7FFFFFFF) % partitions)


def _lane_number(topic: Topic, lane: str) -> int:
    """A lane is one partition: names ending in a number choose it; any other name is lane 0's only if it is alone."""
    match = re.search(r"(\d+)$", lane)
    number = int(match.group(1)) if match else 0
    if number >= topic.partitions:
        raise UnknownTopic(
            f"lane {lane!r} has no partition in {topic.name}: expected a name without a number (lane 0) or one ending "
            f"in 0..{topic.partitions - 1}",
            topic=topic.name,
            lane=lane,
        )
    return number


SESSION_PARTITIONS = 16
"""Partitions of the session log: the most session hosts and readers that can share it. Too few: one hot partition
limits writers. Too many: open files and memory on a one-node broker."""

LANES = 4
"""Lanes (independent training streams) a deployment can have; each is one partition of groups and batches."""

ZSTD = "zstd"

TASKS = Topic(
    "tasks.v1",
    KeyKind.FREE,
    Cleanup.KEEP,
    3,
    None,
    ("any client",),
    "task published / cancelled",
    open=True,
    per_tenant=True,
)
FEEDBACK = Topic(
    "feedback.v1",
    KeyKind.FREE,
    Cleanup.KEEP,
    3,
    None,
    ("any client",),
    "a user's feedback on a session",
    open=True,
    per_tenant=True,
)
SESSIONS = Topic(
    "sessions.v1",
    KeyKind.SESSION,
    Cleanup.KEEP,
    SESSION_PARTITIONS,
    ZSTD,
    ("session actors", "gateway"),
    "the whole life of a session, in order",
)
REWARDS = Topic(
    "rewards.v1",
    KeyKind.SESSION,
    Cleanup.KEEP,
    4,
    ZSTD,
    ("reward actors",),
    "reward assigned / revised / ungraded",
)
GROUPS = Topic(
    "groups.v1",
    KeyKind.LANE,
    Cleanup.KEEP,
    LANES,
    ZSTD,
    ("controller",),
    "group opened / sealed / discarded; lane configured",
)
BATCHES = Topic(
    "batches.v1",
    KeyKind.LANE,
    Cleanup.KEEP,
    LANES,
    ZSTD,
    ("assembler", "trainer"),
    "batch assembled (references); step completed",
)
WEIGHTS = Topic(
    "weights.v1",
    KeyKind.POLICY,
    Cleanup.KEEP,
    1,
    None,
    ("trainer", "cli"),
    "version published, pinned, canary share, rolled back",
)
WEIGHTS_CURRENT = Topic(
    "weights.current.v1",
    KeyKind.POLICY,
    Cleanup.COMPACT,
    1,
    None,
    ("controller",),
    "the fold of weights.v1: what to serve",
)
REPLICAS = Topic(
    "replicas.v1",
    KeyKind.REPLICA,
    Cleanup.COMPACT,
    1,
    None,
    ("inference actors",),
    "loaded version, health",
)
SUBJECTS = Topic(
    "subjects.v1",
    KeyKind.SUBJECT,
    Cleanup.KEEP,
    1,
    None,
    ("gateway", "cli"),
    "consent granted / withdrawn, erasure requested / done",
)
AUDIT_ANCHORS = Topic(
    "audit.anchors.v1",
    KeyKind.PARTITION,
    Cleanup.KEEP,
    1,
    None,
    ("notary", "cli"),
    "signed chain heads",
)
DLQ = Topic(
    "dlq.v1",
    KeyKind.ORIGINAL,
    Cleanup.KEEP,
    1,
    ZSTD,
    ("each consumer", "cli"),
    "what a consumer could not handle, with the original bytes, and what was done about it",
)

ALL: tuple[Topic, ...] = (
    TASKS,
    FEEDBACK,
    SESSIONS,
    REWARDS,
    GROUPS,
    BATCHES,
    WEIGHTS,
    WEIGHTS_CURRENT,
    REPLICAS,
    SUBJECTS,
    AUDIT_ANCHORS,
    DLQ,
)
BY_NAME: dict[str, Topic] = {topic.name: topic for topic in ALL}


def declared(bare: str) -> Topic:
    """The table's row for a bare name, a tenant's copy included."""
    if bare in BY_NAME:
        return BY_NAME[bare]
    for topic in ALL:
        if topic.per_tenant and bare.startswith(f"{topic.name}."):
            topic.for_tenant(bare.removeprefix(f"{topic.name}."))
            return topic
    raise UnknownTopic(f"topic {bare!r} is not declared: expected one of {', '.join(BY_NAME)}", topic=bare)


def tenant_of(bare: str) -> str | None:
    """Whose open topic this is; None for the deployment's own tenant."""
    topic = declared(bare)
    return None if bare == topic.name else bare.removeprefix(f"{topic.name}.")


def fingerprint() -> str:
    """A short digest of the table, for logs and `config show`."""
    return f"{zlib.crc32(msgspec.json.encode(ALL)):08x}"
