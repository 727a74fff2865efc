"""Settings of the consumer service.

>>> settings = ConsumerServiceSettings.load(
...     ["--topics", "clicks,visits", "--group-id", "alerts", "--handler", "alerts:handle"], environ={}
... )
>>> settings.topics, settings.dead_letter_topics
(('clicks', 'visits'), {'clicks': 'clicks-dlq', 'visits': 'visits-dlq'})
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import NoDecode

from penstock.services.consumer.handler_loop import HandlerLoopOptions
from penstock.services.consumer.retry_policy import RetryPolicy
from penstock.shared.clients.consumer import ConsumerSettings, ReadingSettings
from penstock.shared.clients.parallel_consumer.key_scheduler import BUFFERED_RECORDS_MAX, KeyScheduler
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.settings import (
    CommandSettings,
    HttpSettings,
    KafkaSettings,
    PositiveMs,
    Section,
    ServiceSettings,
)
from penstock.shared.common.topic_names import dead_letter_topic

PositiveCount = Annotated[int, Field(gt=0)]

COMMIT_INTERVAL_MS = 5_000
TRANSACTION_INTERVAL_MS = 100
TRANSACTION_TIMEOUT_MS = 10_000
"""The defaults of `commit_interval_ms`: at least once, and exactly once; then of `transaction_timeout_ms`.

The last two are Kafka Streams' for exactly-once.

Consumers with `read_committed` see output once its transaction is committed, so transactions are short. An open
transaction of a dead process hides later records until its timeout.
"""
UNCOMPRESSED_BYTES_MAX = 32 * 1024 * 1024
"""The producer's `max_request_size` is at least this, if `buffer_memory` allows it.

It limits the uncompressed dead letter. The broker applies the limit of the topic to the compressed one.
"""
GIVE_UP_RESERVE_MS = 5_000
"""The part of a revocation's or shutdown's timeout that is reserved for cancellations and the last commit."""
PRODUCER_DEFAULTS = ProducerSettings(compression_type="zstd", transaction_timeout_ms=TRANSACTION_TIMEOUT_MS)


def _split_names(value: Any) -> Any:
    """Return the names in a setting of the consumer service, from a list or from one comma-separated text."""
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, list | tuple):
        return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())
    return parts


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_names)]


class RetrySettings(Section):
    """The wait before a failed record is handled again, and the exceptions that are retried."""

    backoff_ms: int = Field(default=100, ge=0, description="delay before the second attempt; it grows by multiplier")
    backoff_max_ms: int = Field(default=30_000, ge=0)
    multiplier: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    jitter: float = Field(default=0.2, ge=0, lt=1, description="fraction by which a delay varies in both directions")
    retriable: Names = Field(
        default=("Exception",), description="exception classes that are retried, by name or module.name"
    )
    not_retriable: Names = Field(
        default=("penstock.errors.DataError",), description="exception classes that are not retried"
    )


class ConsumerServiceSettings(ServiceSettings):
    """Calls a handler for every record of some topics: in parallel by key, with retries and dead letters."""

    http: HttpSettings = HttpSettings(port=8082)
    topics: Names = Field(description="topics to handle, comma-separated", min_length=1)
    group_id: str = Field(min_length=1)
    handler: str = Field(
        min_length=1, description="module:function, an async function of a ConsumerRecord or a Sequence of them"
    )
    value: str = Field(
        default="bytes", min_length=1, description="format of values: bytes, json or module:Struct (a msgspec struct)"
    )
    ordering: Literal["key", "partition", "unordered"] = "key"
    max_concurrency: PositiveCount = Field(default=64, description="maximum number of handler calls in flight")
    batch_records_max: PositiveCount = Field(
        default=500, description="maximum number of records of one call of a batch handler"
    )
    buffered_records_max: PositiveCount = Field(
        default=BUFFERED_RECORDS_MAX, description="number of unfinished records at which a partition is paused"
    )
    max_attempts: PositiveCount = 5
    handler_timeout_ms: PositiveMs = Field(
        default=60_000, description="time limit of a handler call; a longer call is cancelled and fails"
    )
    dead_letter_topic: str = Field(
        default=dead_letter_topic("{topic}"),
        min_length=1,
        description="name of dead-letter topics; {topic} is replaced by the record's topic",
    )
    create_dead_letter_topics: bool = Field(default=True, description="create missing dead-letter topics at start-up")
    processing_guarantee: Literal["at_least_once", "exactly_once"] = Field(
        default="at_least_once",
        description="exactly_once: each commit is a transaction of returned records, dead letters and offsets; "
        "a handler's other effects may still be repeated after a crash",
    )
    commit_interval_ms: PositiveMs | None = Field(
        default=None, description="interval between commits of finished records; default: 5000, with exactly_once 100"
    )
    lag_interval_ms: PositiveMs = 5_000
    stuck_after_ms: PositiveMs = Field(
        default=60_000,
        description="unhealthy after so long without a finished record in a partition with lag, or in a rebalance",
    )
    kafka_silence_max_ms: PositiveMs = Field(
        default=15_000, description="unhealthy after so long without a response from any broker"
    )
    retry: RetrySettings = RetrySettings()
    consumer: ReadingSettings = Field(
        default=ReadingSettings(), description="with exactly_once, isolation_level is read_committed"
    )
    producer: ProducerSettings = Field(
        default=PRODUCER_DEFAULTS,
        description="producer of dead letters and returned records; max_request_size is at least 32 MiB (at most "
        "buffer_memory): the topics' max.message.bytes limits the records",
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        loops = sorted(set(self.dead_letter_topics.values()) & set(self.topics))
        if loops:
            raise ValueError(
                f"dead_letter_topic: {', '.join(loops)} is also one of topics: dead letters would be handled again"
            )
        if self.producer.acks != "all":
            raise ValueError(
                "producer.acks: a dead letter needs the acknowledgement of all replicas; remove this setting"
            )
        if self.producer.transactional_id is not None and not self.is_exactly_once:
            raise ValueError("producer.transactional_id: needs processing_guarantee=exactly_once")
        reading = self.consumer
        if (
            self.is_exactly_once
            and reading.isolation_level == "read_uncommitted"
            and "isolation_level" in reading.model_fields_set
        ):
            raise ValueError("consumer.isolation_level: is read_committed with exactly_once; remove this setting")
        if self.is_exactly_once and not self.producer.enable_idempotence:
            raise ValueError("producer.enable_idempotence: must be true with exactly_once; remove this setting")
        if self.retry.backoff_max_ms < self.retry.backoff_ms:
            raise ValueError("retry.backoff_max_ms: must not be below retry.backoff_ms")
        if self.shutdown_timeout_ms <= GIVE_UP_RESERVE_MS:
            raise ValueError(
                f"shutdown_timeout_ms: must be above {GIVE_UP_RESERVE_MS}, "
                "the reserve for cancellations and the last commit"
            )
        if self.drain_timeout_ms <= 0:
            raise ValueError(
                f"consumer.listener_timeout_ms and consumer.max_poll_interval_ms: must be above {GIVE_UP_RESERVE_MS}, "
                "the reserve for cancellations and the last commit"
            )
        return self

    @property
    def dead_letter_topics(self) -> dict[str, str]:
        """The dead-letter topic of each topic."""
        return {topic: self.dead_letter_topic.replace("{topic}", topic) for topic in self.topics}

    @property
    def drain_timeout_ms(self) -> int:
        """How long a revocation waits for handlers.

        It is the shorter of `listener_timeout_ms` and `max_poll_interval_ms`, minus GIVE_UP_RESERVE_MS.
        """
        return min(self.consumer.listener_timeout_ms, self.consumer.max_poll_interval_ms) - GIVE_UP_RESERVE_MS

    @property
    def is_exactly_once(self) -> bool:
        return self.processing_guarantee == "exactly_once"

    def consumer_settings(self) -> ConsumerSettings:
        """Return the settings of the Kafka consumer, which does not commit automatically: the runner commits.

        Under exactly-once the consumer reads committed records only.
        """
        given = self.consumer.model_dump()
        if self.is_exactly_once:
            given["isolation_level"] = "read_committed"
        return ConsumerSettings(**given, group_id=self.group_id, commit_strategy="none")

    def producer_settings(self, record_bytes_max: int) -> ProducerSettings:
        """Return the producer's settings. `record_bytes_max` is the size of the largest dead letter.

        `max_request_size` is raised to fit uncompressed dead letters, at most to `buffer_memory`. The default
        compression is zstd. Under exactly-once there is a transactional id, which survives a restart if it is
        configured or the member is static.
        """
        # The producer's limit applies before compression, the topic's limit after it. So if a record fits into its
        # topic only when compressed, its dead letter fits too.
        size = max(self.producer.max_request_size, record_bytes_max, UNCOMPRESSED_BYTES_MAX)
        changes: dict[str, object] = {"max_request_size": min(size, self.producer.buffer_memory)}
        # A program may pass a ProducerSettings without the defaults of this service.
        for name in PRODUCER_DEFAULTS.model_fields_set - self.producer.model_fields_set:
            changes[name] = getattr(PRODUCER_DEFAULTS, name)
        if self.is_exactly_once:
            # If the id is the same after a crash, the member's next process at once ends the transaction that the
            # crashed one left open. Otherwise that transaction ends after `transaction_timeout_ms`.
            own = self.consumer.group_instance_id or uuid.uuid4().hex[:12]
            changes["transactional_id"] = self.producer.transactional_id or f"{self.group_id}-{own}"
        return self.producer.model_copy(update=changes)

    def retry_policy(self) -> RetryPolicy:
        """Return the retry policy of the handler."""
        return RetryPolicy(
            max_attempts=self.max_attempts,
            handler_timeout_ms=self.handler_timeout_ms,
            **self.retry.model_dump(),
        )

    def scheduler(self, *, batch: bool) -> KeyScheduler:
        """Return a scheduler of the consumed records."""
        return KeyScheduler(
            self.ordering, self.max_concurrency, self.batch_records_max if batch else 1, self.buffered_records_max
        )

    def handler_loop_options(self) -> HandlerLoopOptions:
        """Return the options of the handler loop."""
        return HandlerLoopOptions(
            commit_interval_ms=self.commit_interval_ms
            or (TRANSACTION_INTERVAL_MS if self.is_exactly_once else COMMIT_INTERVAL_MS),
            drain_timeout_ms=self.drain_timeout_ms,
            lag_interval_ms=self.lag_interval_ms,
            stuck_after_ms=self.stuck_after_ms,
        )


class DlqSettings(CommandSettings):
    """The settings of `penstock dlq`."""

    kafka: KafkaSettings = KafkaSettings()
