"""The settings that the aggregator's compactions and the Spark jobs share: their types, limits and help texts.

The defaults differ. `AggregatorSettings.compaction` has defaults for a compaction every few minutes, `penstock compact`
and `penstock batch` have defaults for a single compaction. The aggregator passes its settings to each `penstock
compact` that it runs.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from penstock.shared.common.settings import PositiveMs, Section
from penstock.shared.streams.topology_loading import NAME_PATTERN

# A compaction of this many records takes minutes on two cores, and a few GB of Spark's scratch space.
CHANGELOG_RECORDS_MAX = 10_000_000
OPTIMIZE_FILES_MAX = 20
RETENTION_HOURS_MIN = 24
"""The shortest time for which versions of the lake's tables stay readable: longer than a job, restore or query."""
RETENTION_DAYS_MAX = 100_000
"""The limit for closed windows: nearly three centuries. A current event time minus this is a valid date."""
SPARK_MASTER = r"^(local(-cluster)?(\[.+\])?|spark://[^,]+:\d+(,[^,]+:\d+)*|yarn|k8s://.+)$"
"""Valid Spark masters; Spark's own launcher prints a stack trace for anything else."""

# Spark's setting names are case-sensitive, so no other spelling is checked.
_TIME_ZONE = "spark.sql.session.timeZone"
_UTC = ("UTC", "Etc/UTC", "Z", "+00:00")

KafkaTimeoutMs = Annotated[PositiveMs, Field(description="how long Kafka may take to respond about topics and offsets")]
ChangelogRecordsMax = Annotated[int, Field(gt=0, description="most changelog records that one compaction reads")]
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
        description="after more than this many appends, OPTIMIZE a table or rewrite a partition of `state` "
        "(a large one later); 0: never",
    ),
]
RetentionHours = Annotated[
    Annotated[int, Field(ge=RETENTION_HOURS_MIN)] | None,
    Field(
        description="hours after which files that a table no longer needs are removed; unset: never. A restore or a "
        "reader that takes longer may fail, since files of its version are gone"
    ),
]
ClosedRetentionDays = Annotated[
    Annotated[int, Field(ge=1, le=RETENTION_DAYS_MAX)] | None,
    Field(description="delete closed windows that end so many days before the newest event; unset: never"),
]
VacuumEvery = Annotated[
    int, Field(ge=1, description="compactions between a VACUUM and the next one; each VACUUM lists every file")
]


def require_utc(conf: dict[str, str]) -> dict[str, str]:
    """Return the Spark settings `conf` of a job unchanged.

    Raises ValueError if `conf` sets the session's time zone to a zone other than UTC.
    """
    if conf.get(_TIME_ZONE, "UTC") not in _UTC:
        raise ValueError(
            f"{_TIME_ZONE}={conf[_TIME_ZONE]}: the jobs compare and write times in UTC. Leave it out, and set a zone "
            "where the tables are read"
        )
    return conf


class SparkSettings(Section):
    """Spark's master, memory and configuration."""

    master: str = Field(
        default="local[*]", pattern=SPARK_MASTER, description="local[N], spark://host:port, yarn, k8s://…"
    )
    driver_memory: str = Field(
        default="1g", pattern=r"^\d+[mgMG]$", description="the driver's heap, and with local[…] all of Spark's"
    )
    shuffle_partitions: Annotated[int, Field(ge=1)] = 4
    conf: Annotated[dict[str, str], AfterValidator(require_utc)] = Field(
        default={}, description="passed on as it is, such as spark.hadoop.fs.s3a.endpoint=…"
    )
