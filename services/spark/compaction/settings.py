"""Settings of `penstock compact`, and of the compactions of a batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.services.spark.settings import JobSettings
from penstock.shared.streams.settings import RETENTION_DAYS_MAX, RETENTION_HOURS_MIN
from penstock.shared.streams.topology_loading import NAME_PATTERN

RUN_RECORDS_MAX = 10_000_000  # takes two cores minutes and a few GB of Spark's scratch space


class MaintenanceSettings(JobSettings):
    """Settings of a compaction and of the table maintenance after it."""

    run_records_max: Annotated[int, Field(gt=0)] = Field(
        default=RUN_RECORDS_MAX, description="changelog records to read in one run"
    )
    delete_covered: bool = Field(
        default=False, description="delete changelog records up to the previous run's covered offset"
    )
    optimize_files_max: Annotated[int, Field(ge=0)] = Field(
        default=20,
        description="after more than this many appends, OPTIMIZE a table or rewrite a partition of `state`; 0: never",
    )
    retention_hours: Annotated[int, Field(ge=RETENTION_HOURS_MIN)] | None = Field(
        default=None,
        description="remove files that no version younger than this needs from the tables; default: never",
    )
    closed_retention_days: Annotated[int, Field(ge=1, le=RETENTION_DAYS_MAX)] | None = Field(
        default=None, description="delete closed windows that end so many days before the newest event; default: never"
    )
    vacuum_every: Annotated[int, Field(ge=1)] = Field(default=1, description="run VACUUM after this many compactions")
    after: Annotated[str, Field(pattern=NAME_PATTERN)] | None = Field(
        default=None, description="module:function that is called as function(spark, tables) after a run"
    )


class CompactSettings(MaintenanceSettings):
    """`penstock compact`: fold the changelog into Delta tables."""

    runs_max: Annotated[int, Field(ge=0)] = Field(
        default=0, description="stop after this many runs; 0: run until no records are left"
    )
