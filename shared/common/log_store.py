"""What keeps two Spark jobs on one lake apart, where the storage does not: Delta's log store.

A commit of Delta's is a file that must not be there yet. A file system and most object stores refuse the second of two
that write it at once; Delta's own way to S3 does not.
"""

from __future__ import annotations

from collections.abc import Mapping

LOG_STORE = "spark.delta.logStore.s3a.impl"  # Delta's setting for what decides between two commits
S3_SCHEMES = ("s3://", "s3a://")


def unarbitrated(lake: str, conf: Mapping[str, str], setting: str) -> str | None:
    """What is to be said where nothing keeps two jobs of one application apart; None where something does.

    `conf` is Spark's configuration, `setting` what it is set by.

    >>> unarbitrated("s3://lake/visits", {LOG_STORE: "io.delta.storage.S3DynamoDBLogStore"}, "spark.conf")
    """
    if not lake.lower().startswith(S3_SCHEMES) or LOG_STORE in conf:
        return None
    return (
        f"{lake}: on S3 Delta does not keep two jobs at once apart without a log store, and they may spoil the tables: "
        f"set {setting} {LOG_STORE}, or make sure that there is never more than one (docs/lake.md, Two jobs at once)"
    )
