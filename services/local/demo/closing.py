"""The demo's last two Spark jobs in one process: `penstock compact`, then `penstock audit`.

A job over few events is a JVM that loads and compiles Spark; the second job in the same process finds that done. The
two have nothing else in common: each makes its own Spark session, and the audit reads everything from Kafka and the
lake anew.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec

from penstock.services.spark.main import AUDIT_FAILED, CONFLICT, audit_main, compact_main

ATTEMPTS_MAX = 3  # at a compaction: a job that outlived the aggregator which had started it may win the first


def main(arguments: list[str]) -> int:
    """`APPLICATION LAKE RECORDS SPARK_CONF`: the audit's exit status, or AUDIT_FAILED where the compaction failed."""
    application, lake, records, spark_conf = arguments
    common = ["--application", application, "--lake", lake, "--spark.conf", spark_conf]
    status = CONFLICT
    for _ in range(ATTEMPTS_MAX):
        status = compact_main([*common, "--delete-covered"])
        if status != CONFLICT:
            break
    if status:
        return AUDIT_FAILED
    return audit_main([*common, "--expect-records", records, "--json"])


def arguments_for(application: str, lake: str, records: int, spark_conf: Mapping[str, str]) -> list[str]:
    """What `main` takes, as words of a command line."""
    return [application, lake, str(records), msgspec.json.encode(spark_conf).decode()]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
