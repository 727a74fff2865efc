"""The settings of a task and of the stream worker, with their defaults, limits and checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator

from penstock.shared.common.lake.location import require_location
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import PositiveMs, Section, require_heartbeat_within_session
from penstock.shared.common.topic_names import APPLICATION_ID, APPLICATION_ID_MAX, changelog_topic, instances_topic
from penstock.shared.streams.error_handlers import ErrorHandlers, ExceptionHandler

log = get_logger(__name__)

DEAD_LETTER_OVERHEAD_MAX = 16 * 1024
"""The most bytes of a dead letter or a late record beyond those of the source record in it."""

BUFFERED_RECORDS_MAX = 1_000
"""Kafka Streams' default of `buffered.records.per.partition`."""

INPUT_BUFFER_MAX_BYTES = 512 * 1024 * 1024
"""Kafka Streams' default of `input.buffer.max.bytes`."""

MAX_FUTURE_MS = 86_400_000
"""A day, because producers' clocks are wrong by hours rather than days."""


class TaskSettings(BaseModel):
    """The settings of a task, in a live worker or a batch."""

    processing_guarantee: Literal["exactly_once", "at_least_once"] = Field(
        default="exactly_once", description="at_least_once: no transactions, unless the topology has repartition topics"
    )
    deserialization_exception_handler: ExceptionHandler = Field(
        default="dead_letter", description="if a record cannot be decoded: dead letter, leave it out, or stop"
    )
    processing_exception_handler: ExceptionHandler = Field(
        default="dead_letter", description="if a node or a punctuation raises: dead letter, leave it out, or stop"
    )
    production_exception_handler: ExceptionHandler = Field(
        default="dead_letter", description="if a result cannot be written: dead letter, leave it out, or stop"
    )
    max_future_ms: PositiveMs | None = Field(
        default=MAX_FUTURE_MS,
        description="a record whose time is further ahead of the wall clock is rejected; None as a flag: no limit",
    )
    max_request_size: Annotated[int, Field(gt=0)] = Field(
        default=1024 * 1024,
        description="bytes of a result or a changelog entry; the topic's max.message.bytes must fit",
    )
    key_bytes_max: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="maximum bytes that a key takes in a result, which has its JSON twice; "
        "unset: max_request_size - 16 KiB",
    )
    start_from_group_offsets: bool = Field(
        default=False,
        description="start with empty state at the group's offsets if the changelog has no progress",
    )
    on_missing_source_offsets: Literal["fail", "skip"] = Field(
        default="fail",
        description="if source records were deleted before they were read: stop, or count the gap and continue",
    )
    replication_factor: Annotated[int, Field(ge=-1)] = Field(
        default=-1, description="of topics it creates; -1: the broker's default"
    )

    @model_validator(mode="after")
    def _key_fits(self) -> Self:
        if self.key_bytes_max is not None and self.key_bytes_max >= self.max_request_size:
            raise ValueError(
                f"key_bytes_max={self.key_bytes_max} must be below max_request_size={self.max_request_size}"
            )
        return self

    @property
    def error_handlers(self) -> ErrorHandlers:
        """Return the handlers of all stages."""
        return ErrorHandlers(
            self.deserialization_exception_handler,
            self.processing_exception_handler,
            self.production_exception_handler,
        )


class StreamsSettings(Section, TaskSettings):
    """Settings of the stream worker; they have Kafka Streams' names, with underscores, if it has the setting."""

    application_id: Annotated[str, Field(pattern=APPLICATION_ID, max_length=APPLICATION_ID_MAX)] = Field(
        default="penstock", description="names the consumer group, the changelog and the transactional ids"
    )
    commit_interval_ms: PositiveMs = 100
    poll_ms: PositiveMs = Field(default=100, description="how long one turn waits for records")
    max_poll_records: Annotated[int, Field(gt=0)] = Field(
        default=50_000, description="maximum number of records that one poll returns; a turn polls once"
    )
    max_task_idle_ms: Annotated[int, Field(ge=-1)] = Field(
        default=0,
        description="how long a task waits for new records of a topic that it has read to the end; -1: it never waits",
    )
    buffered_records_per_partition: Annotated[int, Field(gt=0)] = Field(
        default=BUFFERED_RECORDS_MAX,
        description="a partition with more fetched records is paused; from 1000 on, the limit is at least the length "
        "of a run",
    )
    input_buffer_max_bytes: Annotated[int, Field(gt=0)] = Field(
        default=INPUT_BUFFER_MAX_BYTES,
        description="bytes of fetched records in all tasks; above it, only partitions without any are fetched",
    )
    repartition_purge_interval_ms: PositiveMs = Field(
        default=30_000, description="how often records that were read are deleted from repartition topics"
    )
    group_instance_id: str | None = Field(
        default=None, description="static membership: an instance that restarts gets its partitions back at once"
    )
    partition_assignment_strategy: Literal["range", "cooperative-sticky"] = Field(
        default="range",
        description="cooperative-sticky: tasks that are kept process records during a rebalance; for one source topic",
    )
    session_timeout_ms: PositiveMs = Field(
        default=45_000, description="the group removes an instance without heartbeats after this"
    )
    heartbeat_interval_ms: PositiveMs = 3_000
    max_poll_interval_ms: PositiveMs = Field(
        default=300_000, description="an instance whose turn takes longer leaves the group: its partitions go to others"
    )
    transaction_timeout_ms: PositiveMs = Field(
        default=10_000, description="the broker aborts an owner's transaction after this"
    )
    topic_wait_ms: PositiveMs = Field(default=60_000, description="how long start-up waits for the source topics")
    restore_attempts_max: Annotated[int, Field(gt=0)] = Field(
        default=5,
        description="consecutive retries of a task's failed commit or restore before the worker fails",
    )
    idle_timeout_ms: PositiveMs | None = Field(
        default=None,
        description="a task whose topics are idle for this long advances its time by as much; unset: never",
    )
    default_dsl_store: Literal["in_memory", "rocksDB"] = Field(
        default="in_memory",
        description="where stores are kept; rocksDB: on disk, for state larger than memory (extra rocksdb)",
    )
    state_dir: str = Field(
        default=".penstock/state",
        min_length=1,
        description="the folder of rocksDB's stores; each instance needs its own",
    )
    state_cleanup_delay_ms: PositiveMs = Field(
        default=600_000,
        description="state on disk of a partition that is neither owned nor a standby is kept this long",
    )
    num_standby_replicas: Annotated[int, Field(ge=0)] = Field(
        default=0, description="standby instances of each partition, which keep its state to take it over at once"
    )
    statestore_cache_max_bytes: Annotated[int, Field(ge=0)] = Field(
        default=64 * 1024 * 1024, description="bytes of rows on disk that all tasks keep in memory, approximately"
    )
    rocksdb_memory_max_bytes: Annotated[int, Field(ge=4 * 1024 * 1024)] = Field(
        default=128 * 1024 * 1024, description="RocksDB's block cache and write buffers, of all tasks together"
    )
    lake: str | None = Field(
        default=None, min_length=1, description="URI or path of the Delta tables that compaction keeps; unset: none"
    )
    lake_options: dict[str, str] = Field(
        default={}, description="object store options for the lake, as deltalake takes them"
    )

    @field_validator("lake")
    @classmethod
    def _check_lake(cls, lake: str | None) -> str | None:
        return require_location(lake)

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Self:
        require_heartbeat_within_session(self.heartbeat_interval_ms, self.session_timeout_ms)
        return self

    def for_topology(self, internal_topics: Sequence[str]) -> StreamsSettings:
        """Return the settings for a worker whose topology has these internal topics.

        An application with internal topics always commits in transactions. If at_least_once is configured, it is
        changed to exactly_once, and the change is logged.

        >>> configured = StreamsSettings(processing_guarantee="at_least_once")
        >>> [configured.for_topology(topics).processing_guarantee for topics in ([], ["app-by-user-repartition"])]
        ['at_least_once', 'exactly_once']
        """
        # Without transactions, a record that is written twice to an internal topic would count twice. The owner epoch
        # protects the changelog only.
        if not internal_topics or self.processing_guarantee == "exactly_once":
            return self
        log.info(
            "commits are transactions although at_least_once is configured: a record written twice to a topic of the "
            "application's own would count twice",
            processing_guarantee="exactly_once",
            topics=list(internal_topics),
        )
        return self.model_copy(update={"processing_guarantee": "exactly_once"})

    @property
    def blocking_ms_max(self) -> int:
        """How long one step may block the heartbeats: after that, the group may remove the instance."""
        # The last heartbeat may be one interval old when the step begins.
        return self.session_timeout_ms - self.heartbeat_interval_ms

    @property
    def changelog_topic(self) -> str:
        """The only changelog topic of the application."""
        return changelog_topic(self.application_id)

    @property
    def instances_topic(self) -> str:
        """The topic in which the application's instances register their partitions."""
        return instances_topic(self.application_id)

    def transactional_id(self, partition: int) -> str:
        """Return a partition's transactional id. Each partition has its own, so that a new owner fences the old one."""
        return f"{self.application_id}-{partition}"
