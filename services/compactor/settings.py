"""What the Spark jobs are told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from shared.common.settings import CommandSettings, KafkaSettings, PositiveMs, Section
from shared.common.topic_names import changelog_topic

DELTA_NAME = r"^[^\s,;{}()=/\\]+$"  # what a folder and a Delta column can both be called


class SparkSettings(Section):
    """Where Spark runs, and with what."""

    master: str = Field("local[*]", min_length=1, description="local[N], spark://host:port, yarn, k8s://…")
    driver_memory: str = Field(
        "1g", pattern=r"^\d+[kmgKMG]$", description="the driver's heap, and with local[…] all of Spark's"
    )
    shuffle_partitions: Annotated[int, Field(ge=1)] = 4
    conf: dict[str, str] = Field(default={}, description="passed on as it is, such as spark.hadoop.fs.s3a.endpoint=…")


class JobSettings(CommandSettings):
    """What both jobs need."""

    kafka: KafkaSettings = KafkaSettings()
    application: str = Field(pattern=DELTA_NAME, description="the aggregator's application id")
    lake: str = Field(min_length=1, description="folder or URI that holds the Delta tables of all applications")
    changelog: str | None = Field(None, description="changelog topic; default: <application>-changelog")
    skip_changelog_records: str = Field(
        "",
        pattern=r"^(\d+:\d+(,\d+:\d+)*)?$",
        description="partition:offset, comma-separated: corrupt changelog records to leave out",
    )
    spark: SparkSettings = SparkSettings()
    kafka_timeout_ms: PositiveMs = Field(
        60_000, description="how long Kafka may take to answer about topics and offsets"
    )

    @property
    def changelog_topic(self) -> str:
        return self.changelog or changelog_topic(self.application)

    @property
    def tables(self) -> str:
        """The folder of this application's tables as Spark calls it: absolute on a local disk, `s3a` for S3."""
        root = self.lake if "://" in self.lake else str(Path(self.lake).expanduser().resolve())
        scheme, there, rest = root.partition("://")
        # Hadoop's client for S3 goes by another scheme than everybody else's.
        root = f"s3a://{rest}" if there and scheme.lower() == "s3" else root
        return f"{root.rstrip('/')}/{self.application}"


class CompactSettings(JobSettings):
    """`penstock compact`: fold the changelog into Delta tables."""

    delete_covered: bool = Field(
        False, description="afterwards delete changelog records that the snapshot before this one covers"
    )
    optimize_files_max: Annotated[int, Field(ge=0)] = Field(
        20, description="rewrite a partition of a table into one file once it has more files than this; 0: never"
    )
    retention_hours: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="remove files that no version younger than this needs from `state` and `closed`; default: never",
    )
    vacuum_every: Annotated[int, Field(ge=1)] = Field(
        1, description="compactions from one such removal to the next, which lists every file"
    )


class AuditSettings(JobSettings):
    """`penstock audit`: compare the stream's windows with Spark's own over the source topic."""

    store: str | None = Field(None, description="the store to audit; default: the only one")
    source: str | None = Field(None, description="source topic, where it is not what the changelog says")
    results: str | None = Field(None, description="topic of closed windows, where it is not what the changelog says")
    late: str | None = Field(None, description="late topic, where it is not what the changelog says")
    dead_letters: str | None = Field(None, description="dead-letter topic, where it is not what the changelog says")
    gap_ms: PositiveMs | None = Field(None, description="inactivity gap, where it is not what the changelog says")
    grace_ms: Annotated[int, Field(ge=0)] | None = Field(
        None, description="grace, where it is not what the changelog says"
    )
    expect_records: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the source must hold exactly so many records"
    )
    allow_unprocessed: bool = Field(False, description="records that no commit covers yet are no difference")
    differences_max: Annotated[int, Field(ge=0)] = Field(20, description="how many differences of each kind are listed")
    json_line: bool = Field(False, description="print one JSON object as the last line; --json is the same")
