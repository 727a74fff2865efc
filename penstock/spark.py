"""The lake in PySpark: an application's windows as DataFrames. Needs the extra `penstock[spark]`.

    from penstock import spark

    with spark.session() as session:
        sessions = spark.corrected(session, "lake", "visits", "visits")
        sessions.groupBy("key").sum("clicks").show()

`session` starts Spark with Delta's connector; any other session that has it will do. See `docs/lake.md`.
"""

from penstock.shared.common.extras import needs as _needs
from penstock.shared.common.public_names import publish as _publish

with _needs("penstock.spark", "spark"):
    from penstock.services.compaction_settings import SparkSettings
    from penstock.services.spark.reading import closed, corrected, late, live, session

__all__ = [
    "SparkSettings",
    "closed",
    "corrected",
    "late",
    "live",
    "session",
]

_publish(__name__, globals(), __all__)
