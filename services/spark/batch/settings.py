"""Settings of `penstock batch`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from penstock.services.spark.compaction.settings import MaintenanceSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.location import hadoop_uri
from penstock.shared.common.settings import PositiveMs
from penstock.shared.common.time_text import TimeUnit, duration_ms, require_time
from penstock.shared.streams.settings import StreamsSettings, TaskSettings
from penstock.shared.streams.topology_loading import NAME_PATTERN

COMMIT_RECORDS = 1_000_000
COMMIT_BYTES = 256 * 1024 * 1024
LIVE_FROM_PATTERN = r"^(earliest|latest|\d+:\d+(,\d+:\d+)*|\d+|\d{4}-\d\d-\d\d.*)$"
# Any other `live_from` is a time.
EXPLICIT_OFFSETS = re.compile(r"earliest|latest|\d+:\d+(,\d+:\d+)*")
LIVE_FROM_FORMATS = (
    "earliest, latest, partition:offset (comma-separated), a time as ISO 8601 (UTC) or as ms since the epoch"
)
OF_FILES = ("key_column", "value_column", "live_from")


def require_live_from(text: str) -> str:
    """Return a batch's `live_from` unchanged. Raises ValueError for an invalid time."""
    return text if EXPLICIT_OFFSETS.fullmatch(text) else require_time(text)


LiveFrom = Annotated[str, Field(pattern=LIVE_FROM_PATTERN), AfterValidator(require_live_from)]


class BatchSettings(MaintenanceSettings, TaskSettings):
    """`penstock batch`: processes the available records with a topology, in Spark.

    The tasks have settings of the aggregator (`TaskSettings`).
    """

    topology: Annotated[str, Field(pattern=NAME_PATTERN)] = Field(
        description="module:function that returns a penstock.streams.Topology: the aggregator's own"
    )
    topology_options: dict[str, str] = Field(default={}, description="keyword arguments for that function")
    until: Annotated[str, AfterValidator(require_time)] | None = Field(
        default=None,
        description="read records before the first one of this time (ISO 8601, UTC, or ms); default: all there are",
    )
    every: str | None = Field(default=None, description="begin a batch at this interval, such as 5m, until SIGTERM")
    files: str | None = Field(
        default=None, min_length=1, description="read history from this folder, file or pattern, not from the topics"
    )
    format: Literal["parquet", "json", "csv"] = Field(default="parquet", description="of `files`; json: one a line")
    reader_options: dict[str, str] = Field(default={}, description="of Spark's reader of `files`, such as header=false")
    key_column: str | None = Field(
        default=None, description="of `files`: the record key; without it, records have none"
    )
    timestamp_column: str = Field(default="timestamp", min_length=1, description="of `files`: a time, a number or text")
    time_unit: TimeUnit = Field(
        default="ms", description="of `files`: what numbers in timestamp_column count since the epoch"
    )
    value_column: str | None = Field(
        default=None, description="of `files`: the value as bytes or text; default: the whole row as a JSON object"
    )
    live_from: LiveFrom | None = Field(
        default=None, description=f"with `files`: where in the topics the aggregator begins: {LIVE_FROM_FORMATS}"
    )
    commit_records: Annotated[int, Field(gt=0)] = Field(
        default=COMMIT_RECORDS, description="source records between two commits of a task, which bound its memory"
    )
    commit_bytes: Annotated[int, Field(gt=0)] = Field(
        default=COMMIT_BYTES, description="the same in bytes of their keys, values and headers"
    )
    transaction_timeout_ms: PositiveMs = Field(
        default=60_000, description="the broker aborts a commit that takes longer"
    )

    @field_validator("reader_options")
    @classmethod
    def _in_lower_case(cls, options: dict[str, str]) -> dict[str, str]:
        # Spark ignores the case of these names, and names from environment variables are in lower case.
        lower = {name.lower(): value for name, value in options.items()}
        if len(lower) < len(options):
            raise ValueError("an option is given twice: Spark ignores the case of its name")
        return lower

    @field_validator("every")
    @classmethod
    def _require_duration(cls, every: str | None) -> str | None:
        try:
            if every is not None and duration_ms(every) <= 0:
                raise ConfigError(f"{every!r} is not longer than 0")
        except ConfigError as e:
            raise ValueError(str(e)) from None
        return every

    @field_validator("processing_guarantee")
    @classmethod
    def _is_exactly_once(cls, guarantee: str) -> str:
        if guarantee != "exactly_once":
            raise ValueError(
                f"a batch needs exactly_once, even if the aggregator has {guarantee}: it commits in transactions"
            )
        return guarantee

    @model_validator(mode="after")
    def _check_file_settings(self) -> Self:
        if self.files is None:
            if configured := [name for name in OF_FILES if getattr(self, name) is not None]:
                raise ValueError(f"{', '.join(configured)}: only with files")
            return self
        if self.live_from is None:
            raise ValueError(
                f"files also need live_from, where the aggregator begins in the topics: {LIVE_FROM_FORMATS}"
            )
        if configured := [name for name in ("until", "every") if getattr(self, name) is not None]:
            raise ValueError(f"{', '.join(configured)}: not with files: they are read once, as the first batch")
        return self

    @property
    def files_read(self) -> str:
        """`files` for Spark: unchanged, but with the scheme `s3a` for S3."""
        assert self.files is not None
        return hadoop_uri(self.files)

    @property
    def spark_uris(self) -> tuple[str, ...]:
        return (self.tables,) if self.files is None else (self.tables, self.files_read)

    def streams(self) -> StreamsSettings:
        """Return the settings of the tasks and of the topics that they need."""
        return StreamsSettings(
            application_id=self.application,
            topic_wait_ms=self.kafka_timeout_ms,
            lake=self.lake,
            lake_options=self.lake_options,
            **self.model_dump(include={*TaskSettings.model_fields, "transaction_timeout_ms"}),
        )
