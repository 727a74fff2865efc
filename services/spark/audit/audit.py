"""`penstock audit`: compares a store's windows with Spark's own windows over the source topic.

The audit checks two properties:

1. Conservation. Every source record either has no key and was skipped, or is a dead letter, or is in each of its
   windows that it did not miss. If it missed any, it is in the late records for exactly those windows. With sliding
   windows, a record without a value was also skipped, and the late records only have the records that missed all of
   their windows, with one of these windows.
2. Recomputation. The windows and the late records are those that Kafka Streams' rules for windows yield.

The windows come from the lake and the records from Kafka. The audit does not use the code with which the aggregator
computes windows. See `session_checks` for sessions, `window_checks` for the other kinds of windows, `common_checks` for
the checks of both, and `report` for the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from penstock.services.spark.audit.audit_inputs import read_inputs
from penstock.services.spark.audit.report import AuditReport, summarize
from penstock.services.spark.audit.session_checks import compare_sessions
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.audit.window_checks import compare_windows
from penstock.services.spark.errors import translated


def run_audit(spark: SparkSession, settings: AuditSettings, log: Callable[[str], Any]) -> AuditReport:
    """Run an audit: read the inputs, compare them, and return the report.

    Raises ConfigError if the lake or store does not exist, NotAuditable, or an error of Kafka or Spark.
    """
    started = time.monotonic()
    try:
        read = read_inputs(spark, settings, log)
        is_session = read.inputs.store.kind == "session"
        compared = compare_sessions(read.inputs) if is_session else compare_windows(read.inputs)
        report = summarize(compared, read, settings)
    except (Py4JError, PySparkException, ConnectionError) as e:
        raise translated(e) from e
    finally:
        # The JVM may have ended. Then its error must reach the caller.
        with suppress(Py4JError, ConnectionError):
            spark.catalog.clearCache()
    return msgspec.structs.replace(report, seconds=round(time.monotonic() - started, 3))
