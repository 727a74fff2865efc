"""The aggregator's settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Base64Bytes, Field, field_validator, model_validator

from penstock.api.settings import GuardedSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake_place import require_place
from penstock.shared.common.points_in_time import TIME_MS_MAX, time_ms
from penstock.shared.common.settings import CommandSettings, HttpSettings, KafkaSettings, PositiveMs, Section
from penstock.shared.common.topic_names import APPLICATION_ID, APPLICATION_ID_MAX
from penstock.shared.streams.settings import (
    RETENTION_DAYS_MAX,
    RETENTION_HOURS_MIN,
    SPARK_MASTER,
    SparkConf,
    StreamsSettings,
)
from penstock.shared.streams.topology_loading import NAME_PATTERN

WORKERS_MAX = 64
"""Processes on one machine: each has a Python of its own and connections to every broker."""


class CompactionSettings(Section):
    """When and how the instance that owns partition 0 starts a compaction; without a lake none is started."""

    enabled: bool = True
    interval_ms: PositiveMs = Field(default=300_000, description="wall-clock time between two starts, on a grid")
    changelog_bytes: Annotated[int, Field(gt=0)] | None = Field(
        default=None,
        description="also start once so many bytes of the changelog are in no snapshot; unset: by time alone",
    )
    retry_backoff_ms: PositiveMs = Field(default=10_000, description="after a failed job; doubles up to the interval")
    timeout_ms: PositiveMs = Field(
        default=3_600_000, description="a job that runs longer is stopped and counts as failed"
    )
    run_records_max: Annotated[int, Field(gt=0)] = Field(
        default=10_000_000,
        description="changelog records that one job reads, the next one at once after it; after a job that was "
        "stopped by its timeout while it read half as many, after each that counts twice as many again",
    )
    spark_master: str = Field(
        default="local[*]", pattern=SPARK_MASTER, description="local[N], spark://host:port, yarn, k8s://…"
    )
    spark_memory: Annotated[str, Field(pattern=r"^\d+[mg]$")] = "1g"
    spark_conf: SparkConf = Field(default={}, description="passed on to Spark")
    delete_covered: bool = Field(
        default=True, description="delete changelog records that the snapshot before the current one covers"
    )
    after: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        default=None, description="module:function that is called as function(spark, tables) after a compaction"
    )
    optimize_files_max: Annotated[int, Field(ge=0)] = Field(
        default=20, description="rewrite a table's partition into one file once it has more files than this; 0: never"
    )
    retention_hours: Annotated[int, Field(ge=RETENTION_HOURS_MIN)] | None = Field(
        default=168,
        description="remove files that no table version younger than this needs; unset: never. A restore or a reader "
        "that takes longer finds its version gone",
    )
    closed_retention_days: Annotated[int, Field(ge=1, le=RETENTION_DAYS_MAX)] | None = Field(
        default=None, description="delete closed windows that end so many days before the newest event; unset: never"
    )
    vacuum_every: Annotated[int, Field(ge=1)] = Field(
        default=20, description="compactions from one such removal to the next, which lists every file"
    )
    backlog_interval_ms: PositiveMs = Field(
        default=15_000, description="how often the distance between changelog and lake is measured"
    )


class QueriesSettings(Section):
    """How the application's instances answer for each other."""

    all_instances: bool = Field(
        default=True, description="ask the other instances too, and be asked; false: each answers for itself alone"
    )
    application_server: str | None = Field(
        default=None,
        pattern=r"^https?://[^/\s]+(/[^\s]*[^/\s])?$",
        description="where the others reach this one; default: http.host and port (0.0.0.0: the machine's name)",
    )
    timeout_ms: PositiveMs = Field(default=1_500, description="how long another instance may take to answer")
    ssl_cafile: Path | None = Field(
        default=None, description="PEM file of the authorities that the others' certificates are checked by"
    )
    changelog_timeout_ms: PositiveMs = Field(
        default=10_000, description="how long one answer with closed windows may read the changelog"
    )


class SessionsSettings(CommandSettings):
    """`penstock sessions`: a key's windows in a span of time, open and closed."""

    kafka: KafkaSettings = KafkaSettings()
    application: str = Field(
        pattern=APPLICATION_ID, max_length=APPLICATION_ID_MAX, description="the aggregator's application id"
    )
    lake: str | None = Field(
        default=None,
        min_length=1,
        description="folder or URI of the Delta tables; unset: open windows alone",
    )
    lake_options: dict[str, str] = Field(
        default={}, description="object store options for the lake, as deltalake takes them"
    )
    store: str | None = Field(default=None, description="the store to ask; default: the only one")
    key: str | None = Field(default=None, description="the windows' key, as text; default: all keys")
    key_base64: Base64Bytes | None = Field(default=None, description="the windows' key, as bytes")
    key_from: str | None = Field(default=None, description="only keys from here on")
    key_to: str | None = Field(default=None, description="only keys up to here")
    status: Literal["open", "closed", "all"] = Field(default="all", description="only these; without a lake: open")
    rows_max: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=10_000, description="windows, those that begin first"
    )
    continuation: str | None = Field(default=None, description="what the page before ended with, where there was more")
    from_: str = Field(
        default="1970-01-01", alias="from", description="windows that end before it are left out: ISO 8601 (UTC), or ms"
    )
    to: str = Field(
        default=str(TIME_MS_MAX),
        description="windows that begin after it are left out: ISO 8601 (UTC), or ms; default: none",
    )
    json_line: bool = Field(default=False, description="print one JSON object a window; --json is the same")
    kafka_timeout_ms: PositiveMs = Field(default=30_000, description="how long reading the changelog's tail may take")

    @field_validator("lake")
    @classmethod
    def _is_place(cls, lake: str | None) -> str | None:
        return require_place(lake)

    @field_validator("from_", "to")
    @classmethod
    def _is_time(cls, text: str) -> str:
        try:
            time_ms(text)
        except ConfigError as e:
            raise ValueError(str(e)) from None
        return text

    @field_validator("key", "key_from", "key_to")
    @classmethod
    def _is_text(cls, text: str | None) -> str | None:
        try:
            (text or "").encode()
        except UnicodeEncodeError:
            raise ValueError("is no UTF-8: give such a key by --key-base64") from None
        return text

    @model_validator(mode="before")
    @classmethod
    def _without_lake(cls, given: Any) -> Any:
        return {"status": "open"} | given if isinstance(given, dict) and given.get("lake") is None else given

    @model_validator(mode="after")
    def _has_closed(self) -> Self:
        if self.lake is None and self.status != "open":
            raise ValueError(f"status={self.status}: closed windows are in the lake: set lake, or status=open")
        return self

    @model_validator(mode="after")
    def _has_span(self) -> Self:
        if time_ms(self.from_) > time_ms(self.to):
            raise ValueError(f"from={self.from_} must not be after to={self.to}")
        if self.key_from is not None and self.key_to is not None and raw_key(self.key_from) > raw_key(self.key_to):
            raise ValueError(f"key_from={self.key_from!r} must not be after key_to={self.key_to!r}")
        return self

    @property
    def timeout_name(self) -> str:
        """What `kafka_timeout_ms` is set by."""
        return "kafka_timeout_ms"

    @property
    def lake_name(self) -> str:
        """What `lake` is set by."""
        return "lake"

    @property
    def keys(self) -> KeyRange:
        """The keys that are asked for."""
        return KeyRange.of(self.key if self.key is not None else self.key_base64, self.key_from, self.key_to)


class AggregatorSettings(GuardedSettings):
    """Runs a topology: windows, punctuation, exactly-once state, periodic compaction."""

    http: HttpSettings = HttpSettings(port=8083)
    kafka_silence_max_ms: PositiveMs = Field(
        default=15_000, description="no answer from any broker for this long is unhealthy"
    )
    topology: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = Field(
        default="", validate_default=True, description="module:function that returns a penstock.shared.streams Topology"
    )
    topology_options: dict[str, str] = Field(default={}, description="keyword arguments for that function")
    workers: Annotated[int, Field(ge=1, le=WORKERS_MAX)] = Field(
        default=1,
        description="processes that share the partitions, each a member of the group, under one that looks after them",
    )
    streams: StreamsSettings = StreamsSettings()
    compaction: CompactionSettings = CompactionSettings()
    queries: QueriesSettings = QueriesSettings()
