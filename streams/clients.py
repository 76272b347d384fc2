"""Kafka clients with our settings, and their errors in our words. The only file that names aiokafka's exceptions.

Every producer is idempotent and waits for all in-sync replicas; every consumer is read_committed, never resets its
position by itself and never commits by itself.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka import errors as kafka

from odradek.streams import errors
from odradek.streams.config import KafkaConfig

logger = logging.getLogger(__name__)

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Bytes of the largest record. Content above codec.INLINE_LIMIT belongs in blobs; this bounds what cannot be split."""

BATCH_BYTES = 256 * 1024
"""Bytes gathered for one partition while a request is under way. Too low: many small requests when 64 sessions write.
Too high: memory per partition."""

FETCH_BYTES = 4 * 1024 * 1024
"""Bytes fetched ahead of a reader for each partition. Too low: a round trip for every few turns. Too high: memory."""

FETCH_WAIT_MS = 250
"""Milliseconds a broker holds a fetch open for new data. Too low: idle readers poll. Too high: `stop` takes longer."""


STOP_S = 5.0
"""Seconds a client may take to close; a dead broker must not hold up a process that is leaving."""

STOP_AGAIN_S = 1.0
"""Seconds after which a client that is closing is asked a second time."""


def producer(config: KafkaConfig, *, compression: str | None = None, **options: Any) -> AIOKafkaProducer:
    """An idempotent producer, not yet started."""
    return AIOKafkaProducer(
        **config.client_options(),
        enable_idempotence=True,
        acks="all",
        compression_type=compression,
        max_batch_size=BATCH_BYTES,
        max_request_size=MAX_RECORD_BYTES + 64 * 1024,
        **options,
    )


def consumer(config: KafkaConfig, *, committed: bool = True, reset: str = "none", **options: Any) -> AIOKafkaConsumer:
    """A consumer without auto-commit, not yet started; `committed=False` only to look at raw high-water marks."""
    defaults: dict[str, Any] = {
        "enable_auto_commit": False,
        "auto_offset_reset": reset,
        "isolation_level": "read_committed" if committed else "read_uncommitted",
        "fetch_max_wait_ms": FETCH_WAIT_MS,
        "max_partition_fetch_bytes": FETCH_BYTES,
    }
    return AIOKafkaConsumer(**config.client_options(), **(defaults | options))


async def start(config: KafkaConfig, client: AIOKafkaProducer | AIOKafkaConsumer | Any) -> None:
    """Connects within the deadline or says in one line which address did not answer."""
    try:
        async with asyncio.timeout(config.connect_timeout_s):
            await client.start()
    except (TimeoutError, kafka.KafkaConnectionError, OSError) as error:
        await stop(client)
        raise unreachable(config, error) from None
    except kafka.KafkaError as error:
        await stop(client)
        raise translated(config, error, "connecting") from error
    except BaseException:
        await stop(client)
        raise


async def know(consumer: AIOKafkaConsumer, topic: str) -> None:
    """Has the client learn who leads a topic's partitions. It would find out by itself, after an error and a pause of
    0.1 s for each topic: a restarted actor that looks at ten of them would spend a second in those pauses."""
    await consumer._client.add_topic(topic)
    await consumer._client._maybe_wait_metadata()


async def stop(client: AIOKafkaProducer | AIOKafkaConsumer | Any) -> None:
    """Closes a client; one that cannot say goodbye within the deadline is cut off."""
    closing = asyncio.ensure_future((getattr(client, "stop", None) or client.close)())
    done, _ = await asyncio.wait({closing}, timeout=STOP_AGAIN_S)
    if not done:
        # A fetcher that is just dropping an old assignment swallows the first cancellation; the second one reaches it.
        fetcher = getattr(client, "_fetcher", None)
        if fetcher is not None:
            fetcher._fetch_task.cancel()
        done, _ = await asyncio.wait({closing}, timeout=STOP_S)
    if not done:
        closing.cancel()
        client._closed = True
    elif not closing.cancelled() and (error := closing.exception()) is not None:
        logger.debug("closing a Kafka client: %s", type(error).__name__)


def unreachable(config: KafkaConfig, error: BaseException) -> errors.BrokerUnreachable:
    """No answer from the cluster."""
    detail = f" ({type(error).__name__})" if not isinstance(error, TimeoutError) else ""
    return errors.BrokerUnreachable(
        f"no Kafka broker answers at {config.bootstrap} within {config.connect_timeout_s:g} s{detail}: is the stack up "
        f"(`odradek status`), and is the address right?",
        bootstrap=config.bootstrap,
    )


def translated(config: KafkaConfig, error: BaseException, doing: str, topic: str = "") -> errors.StreamError:
    """A client library's error in this room's types; `doing` says what was attempted."""
    at = f" topic {topic}" if topic else ""
    facts = {"bootstrap": config.bootstrap, "topic": topic, "error": type(error).__name__}
    if isinstance(error, errors.StreamError):
        return error
    if isinstance(error, kafka.ProducerFenced | kafka.InvalidProducerEpoch):
        return errors.ProducerFenced(f"{doing}{at}: a newer holder of the transactional id has taken over", **facts)
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return errors.UnknownTopic(
            f"{doing}{at}: not on the broker at {config.bootstrap}; run the admin step (`odradek up` does it)", **facts
        )
    if isinstance(error, kafka.MessageSizeTooLargeError):
        return errors.EventTooLarge(f"{doing}{at}: {error}; put large parts in the blob store", **facts)
    if isinstance(error, TimeoutError | kafka.KafkaTimeoutError | kafka.RequestTimedOutError):
        return errors.DeadlineExceeded(f"{doing}{at}: no answer from {config.bootstrap} within the deadline", **facts)
    if isinstance(error, kafka.KafkaConnectionError | kafka.NodeNotReadyError | OSError):
        return unreachable(config, error)
    detail = f"{doing}{at} at {config.bootstrap}: {type(error).__name__}: {error}"
    retriable = getattr(error, "retriable", False)
    return errors.Retryable(detail, **facts) if retriable else errors.Terminal(detail, **facts)


@asynccontextmanager
async def guarded(config: KafkaConfig, doing: str, topic: str, deadline_s: float) -> AsyncIterator[None]:
    """A deadline around calls to the cluster, with every error in our words."""
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except (kafka.KafkaError, TimeoutError, OSError) as error:
        raise translated(config, error, doing, topic) from error


def partition(config: KafkaConfig, bare: str, number: int) -> TopicPartition:
    """The client library's name of a partition."""
    return TopicPartition(config.name(bare), number)
