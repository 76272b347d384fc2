"""Errors of the log room: one base, and whether to retry is a type, never a flag.

Every message says what failed, where (broker, topic, partition, offset, key), what was expected and found, and
what to do next. Errors survive pickling whole, because Ray carries them between processes; they never hold an
event's content, only its coordinates.
"""

from typing import Any, Self


class StreamError(Exception):
    """Base of all errors of this room. `coordinates` are the named facts that the message was built from."""

    def __init__(self, message: str, **coordinates: Any) -> None:
        super().__init__(message)
        self.coordinates = coordinates

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.coordinates)

    @classmethod
    def at(cls, what: str, topic: str, partition: int, offset: int, **coordinates: Any) -> Self:
        """An error about one record, with its coordinates in the one format that logs and people read."""
        return cls(
            f"{what} at {topic}/{partition}@{offset}", topic=topic, partition=partition, offset=offset, **coordinates
        )


def _rebuild(kind: type[StreamError], message: str, coordinates: dict[str, Any]) -> StreamError:
    return kind(message, **coordinates)


class Retryable(StreamError):
    """Trying again later may succeed."""


class Terminal(StreamError):
    """Trying the same again cannot succeed; something has to change first."""


class BrokerUnreachable(Retryable):
    """No broker answered at the configured address within the deadline."""


class DeadlineExceeded(Retryable):
    """A wait ran out of its deadline; what was waited for is named."""


class AppendUncertain(Retryable):
    """The broker did not acknowledge an append in time: the event may or may not be on the log.

    Appending the same event again is safe, because its id is deterministic and a fold keeps the first record of an id.
    """


class TransactionLost(Retryable):
    """A transaction ran longer than its time-out or lost its broker; nothing of it is visible. Rejoin and redo."""


class ProducerFenced(Terminal):
    """A newer holder of the same transactional id has taken over; this one must stop and never write again."""


class UndecodableRecord(Terminal):
    """This build can't read a record, whatever the reason. Which of the two it is decides what to do about it."""


class DecodeError(UndecodableRecord):
    """A record's bytes do not fit the schema of the type it claims."""


class UnknownEventType(UndecodableRecord):
    """The type is not one this build knows: not poison, but a reason to upgrade the reader first.

    On a closed topic a newer release wrote it, so whoever folds the topic stands still there and says so: an older
    process that went on would decide without what it can't read (test_newer_release.py). Only what merely shows the log
    goes over it. On a topic open to any client it is that client's mistake, and a dead letter."""


class OffsetGap(Terminal):
    """Offsets that should be readable are gone (retention, deletion or a restored broker)."""


class NoPosition(Terminal):
    """A consumer has no committed position and none was given; it never guesses one."""


class TopicDrift(Terminal):
    """A topic exists in another shape than declared."""


class UnknownTopic(Terminal):
    """A topic that the table does not declare, or that the admin step has not created."""


class EventTooLarge(Terminal):
    """An encoded event is above the limit for a record; its large parts belong in the blob store."""


class BlobMissing(Terminal):
    """An object that an event refers to is not in the store."""


class BlobCorrupt(Terminal):
    """An object's bytes do not hash to its address."""


class StoreUnreachable(Retryable):
    """The object store did not answer within the deadline."""


class SubjectErased(Terminal):
    """The subject's key was destroyed: nothing of theirs can be read or written any more."""


class KeyUnavailable(Terminal):
    """The key store does not give a subject's key, though the subject was not erased."""


class SchemaBreak(Terminal):
    """A change of an event type that older readers or older records would not survive."""
