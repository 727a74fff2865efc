"""The aggregator's settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from penstock.api.settings import GuardedSettings
from penstock.services.compaction_settings import (
    CHANGELOG_RECORDS_MAX,
    OPTIMIZE_FILES_MAX,
    AfterCompaction,
    ChangelogRecordsMax,
    ClosedRetentionDays,
    DeleteCovered,
    KafkaTimeoutMs,
    OptimizeFilesMax,
    RetentionHours,
    SparkSettings,
    VacuumEvery,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange, key_of_base64, raw_key
from penstock.shared.common.lake.location import require_location
from penstock.shared.common.settings import (
    CommandSettings,
    HttpSettings,
    KafkaSettings,
    NonEmptyPath,
    PositiveMs,
    Section,
)
from penstock.shared.common.time_text import TIME_MS_MAX, time_ms
from penstock.shared.common.topic_names import APPLICATION_ID, APPLICATION_ID_MAX
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.topology_loading import NAME_PATTERN

WORKERS_MAX = 64
"""The most workers on one machine. Each is a Python process with its own connections to every broker."""


class CompactionSettings(Section):
    """When and how the instance that owns partition 0 starts compactions. Without a lake there are no compactions."""

    enabled: bool = True
    interval_ms: PositiveMs = Field(default=300_000, description="wall-clock time between two starts, on a fixed grid")
    changelog_bytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="also start once so many bytes of the changelog are in no snapshot; unset: only by time",
    )
    retry_backoff_ms: PositiveMs = Field(
        default=10_000, description="pause after a failed job, unless a job is requested; doubles up to the interval"
    )
    timeout_ms: PositiveMs = Field(
        default=3_600_000, description="a job that runs longer is stopped and counts as failed"
    )
    changelog_records_max: ChangelogRecordsMax = Field(
        default=CHANGELOG_RECORDS_MAX,
        description="most changelog records that one compaction reads; the next one follows at once. Halved after a "
        "job that began to read and failed before its commit, doubled again after each success",
    )
    kafka_timeout_ms: KafkaTimeoutMs = 60_000
    spark: SparkSettings = SparkSettings()
    delete_covered: DeleteCovered = True
    after: AfterCompaction = None
    optimize_files_max: OptimizeFilesMax = OPTIMIZE_FILES_MAX
    retention_hours: RetentionHours = 168
    closed_retention_days: ClosedRetentionDays = None
    vacuum_every: VacuumEvery = 20
    backlog_interval_ms: PositiveMs = Field(
        default=15_000, description="how often the distance between changelog and lake is measured"
    )


class QueriesSettings(Section):
    """How the application's instances answer queries for each other."""

    all_instances: bool = Field(
        default=True, description="answer for all instances, and let them query this one; false: only for this instance"
    )
    application_server: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/[^\s]*[^/\s])?$",
        description="URL of this instance for the others; default: http.host and port (0.0.0.0: the machine's name)",
    )
    timeout_ms: PositiveMs = Field(default=1_500, description="how long another instance may take to answer")
    ssl_cafile: NonEmptyPath | None = Field(
        default=None, description="PEM file of the authorities that verify the other instances' certificates"
    )
    changelog_timeout_ms: PositiveMs = Field(
        default=10_000, description="how long a query with closed windows may read the changelog"
    )


class SessionsSettings(CommandSettings):
    """`penstock sessions`: windows by key and time, open and closed."""

    FLAGS_ONLY = frozenset({"key", "key_base64", "key_from", "key_to", "status", "from", "to", "continuation"})

    kafka: KafkaSettings = KafkaSettings()
    application: str = Field(
        pattern=APPLICATION_ID, max_length=APPLICATION_ID_MAX, description="the aggregator's application id"
    )
    lake: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URI of the Delta tables; unset: only open windows",
    )
    lake_options: dict[str, str] = Field(
        default={}, description="object store options for the lake, as deltalake takes them"
    )
    store: str | None = Field(default=None, description="the store to read; default: the only one that has windows")
    key: str | None = Field(default=None, description="only this key, as text; default: all keys")
    key_base64: Annotated[bytes, BeforeValidator(key_of_base64)] | None = Field(
        default=None, description="only this key, as base64 (or URL-safe base64) of its bytes"
    )
    key_from: str | None = Field(default=None, description="only this key and later ones")
    key_to: str | None = Field(default=None, description="only this key and earlier ones")
    status: Literal["open", "closed", "all"] = Field(
        default="all", description="only windows with this status; without a lake: open"
    )
    rows_max: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=10_000, description="most windows to print; the earliest starts come first"
    )
    continuation: str | None = Field(default=None, description="continuation of the previous page")
    from_: str = Field(
        default="1970-01-01",
        alias="from",
        description="leave out windows that end before this time: ISO 8601 (UTC) or ms",
    )
    to: str = Field(
        default=str(TIME_MS_MAX),
        description="leave out windows that begin after this time: ISO 8601 (UTC) or ms; default: no limit",
    )
    json_line: bool = Field(default=False, description="print one JSON object for each window; --json is the same")
    kafka_timeout_ms: PositiveMs = Field(default=30_000, description="how long reading the changelog's tail may take")

    @field_validator("lake")
    @classmethod
    def _require_lake_location(cls, lake: str | None) -> str | None:
        return require_location(lake)

    @field_validator("from_", "to")
    @classmethod
    def _require_iso_time_or_ms(cls, text: str) -> str:
        try:
            time_ms(text)
        except ConfigError as e:
            raise ValueError(str(e)) from None
        return text

    @field_validator("key", "key_from", "key_to")
    @classmethod
    def _require_utf8_key(cls, text: str | None) -> str | None:
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ValueError("is not UTF-8: pass such a key with --key-base64") from None
        return text

    @model_validator(mode="before")
    @classmethod
    def _default_to_open_windows(cls, given: Any) -> Any:
        return {"status": "open"} | given if isinstance(given, dict) and given.get("lake") is None else given

    @model_validator(mode="after")
    def _require_lake_for_closed_windows(self) -> Self:
        if self.lake is None and self.status != "open":
            raise ValueError(f"status={self.status}: closed windows are in the lake: set lake, or status=open")
        return self

    @model_validator(mode="after")
    def _require_one_form_of_key(self) -> Self:
        if self.key is not None and self.key_base64 is not None:
            raise ValueError("key and key_base64 cannot be combined; use one of them")
        return self

    @model_validator(mode="after")
    def _require_ordered_bounds(self) -> Self:
        if time_ms(self.from_) > time_ms(self.to):
            raise ValueError(f"from={self.from_} must not be after to={self.to}")
        if self.key_from is not None and self.key_to is not None and raw_key(self.key_from) > raw_key(self.key_to):
            raise ValueError(f"key_from={self.key_from!r} must not be after key_to={self.key_to!r}")
        return self

    @property
    def keys(self) -> KeyRange:
        """The queried keys."""
        return KeyRange.of(self.key if self.key is not None else self.key_base64, self.key_from, self.key_to)


class AggregatorSettings(GuardedSettings):
    """Runs a topology: windows, punctuation, exactly-once state, periodic compaction."""

    http: HttpSettings = HttpSettings(port=8083)
    kafka_silence_max_ms: PositiveMs = Field(
        default=15_000, description="unhealthy after this long without a response from any broker"
    )
    topology: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        default="", validate_default=True, description="module:function that returns a penstock.streams.Topology"
    )
    topology_options: dict[str, str] = Field(default={}, description="keyword arguments for that function")
    workers: Annotated[int, Field(ge=1, le=WORKERS_MAX)] = Field(
        default=1,
        description="worker processes that share the partitions, each a member of the group; restarted by a supervisor",
    )
    streams: StreamsSettings = StreamsSettings()
    compaction: CompactionSettings = CompactionSettings()
    queries: QueriesSettings = QueriesSettings()


class ResetSettings(CommandSettings):
    """The settings of `penstock streams`: the aggregator's sections `kafka` and `streams`."""

    kafka: KafkaSettings = KafkaSettings()
    streams: StreamsSettings = StreamsSettings()
