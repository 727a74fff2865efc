"""The settings that the aggregator's compactions and the Spark jobs share: the limits and the help of each.

`AggregatorSettings.compaction` has them with defaults for a compaction every few minutes, and `penstock compact` and
`penstock batch` with defaults for a single one. The aggregator passes its own to each `penstock compact`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.shared.streams.settings import RETENTION_DAYS_MAX, RETENTION_HOURS_MIN
from penstock.shared.streams.topology_loading import NAME_PATTERN

RUN_RECORDS_MAX = 10_000_000  # takes two cores minutes and a few GB of Spark's scratch space
OPTIMIZE_FILES_MAX = 20

RunRecordsMax = Annotated[int, Field(gt=0, description="most changelog records of one run of a compaction")]
DeleteCovered = Annotated[
    bool, Field(description="delete changelog records that the snapshot before the current one covers")
]
AfterCompaction = Annotated[
    Annotated[str, Field(pattern=NAME_PATTERN)] | None,
    Field(description="module:function, called as function(spark, tables) after a compaction"),
]
OptimizeFilesMax = Annotated[
    int,
    Field(
        ge=0,
        description="after more than this many appends, OPTIMIZE a table or rewrite a partition of `state`; 0: never",
    ),
]
RetentionHours = Annotated[
    Annotated[int, Field(ge=RETENTION_HOURS_MIN)] | None,
    Field(
        description="remove files that no table version younger than this needs; unset: never. A restore or a reader "
        "that takes longer fails, since its version is gone"
    ),
]
ClosedRetentionDays = Annotated[
    Annotated[int, Field(ge=1, le=RETENTION_DAYS_MAX)] | None,
    Field(description="delete closed windows that end so many days before the newest event; unset: never"),
]
VacuumEvery = Annotated[
    int, Field(ge=1, description="compactions between two runs of VACUUM; each run lists every file")
]
