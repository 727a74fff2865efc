"""Settings of `penstock compact`, and of the compactions of a batch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.services.compaction_settings import (
    CHANGELOG_RECORDS_MAX,
    OPTIMIZE_FILES_MAX,
    AfterCompaction,
    ChangelogRecordsMax,
    ClosedRetentionDays,
    DeleteCovered,
    OptimizeFilesMax,
    RetentionHours,
    VacuumEvery,
)
from penstock.services.spark.settings import JobSettings


class MaintenanceSettings(JobSettings):
    """Settings of a compaction and of the table maintenance after it."""

    changelog_records_max: ChangelogRecordsMax = CHANGELOG_RECORDS_MAX
    delete_covered: DeleteCovered = False
    optimize_files_max: OptimizeFilesMax = OPTIMIZE_FILES_MAX
    retention_hours: RetentionHours = None
    closed_retention_days: ClosedRetentionDays = None
    vacuum_every: VacuumEvery = 1
    after: AfterCompaction = None


class CompactSettings(MaintenanceSettings):
    """`penstock compact`: compact the changelog into Delta tables."""

    compactions_max: Annotated[int, Field(ge=0)] = Field(
        default=0, description="stop after this many compactions; 0: continue until no records are left"
    )
