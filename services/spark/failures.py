"""What Spark, Delta and the Kafka source raise, as errors of ours: one table, searched in the text of the failure."""

from __future__ import annotations

import re

from py4j.protocol import Py4JNetworkError

from penstock.services.spark.spark_session import SparkFailed, first_line, last_cause
from penstock.shared.common import errors
from penstock.shared.common.errors import ChangelogHole, ConfigError, PenstockError

_DATA_LOSS = ("KafkaDataLoss", "data may have been lost", "OffsetOutOfRangeException", "Some data may have been lost")
_OVERFLOW = "long overflow"
_TASK_FAILED = "Job aborted due to stage failure"
_NO_CONNECTOR = "No FileSystem for scheme"
_UNUSABLE = ("Mkdirs failed", "Permission denied", "AccessDenied", "No space left")
_OURS = re.compile(r"^(?:\w+\.)*errors\.(\w+): (.+)", re.MULTILINE)
"""How the last line of a traceback begins where an error of ours was raised in one of Spark's Python workers."""


def translated(error: Exception) -> PenstockError:
    """An error of ours for what Py4J or pyspark raised."""
    cause = getattr(error, "java_exception", None)
    text = f"{cause.toString() if cause is not None else ''}\n{error}"
    if found := _OURS.search(text):
        return _ours(*found.groups())
    if any(name in text for name in _DATA_LOSS):
        return ChangelogHole(f"records went missing while they were read: {first_line(error)}")
    if _OVERFLOW in text:
        return SparkFailed(
            "a record's timestamp is beyond what Spark's Kafka source can read (nanoseconds sent as milliseconds?): "
            "kafka-get-offsets.sh --topic <topic> --time 9223372036854776 says where the first is "
            f"({first_line(error)})"
        )
    if _NO_CONNECTOR in text:
        return ConfigError(
            f"lake: {last_cause(error)}: a folder and s3:// need nothing more, another storage its Hadoop connector "
            "(spark.conf spark.jars.packages=…)"
        )
    if any(name in text for name in _UNUSABLE):
        return SparkFailed(f"the lake, or Spark's scratch folder, cannot be used: {last_cause(error)}")
    if isinstance(error, Py4JNetworkError | ConnectionError):
        return SparkFailed("Spark's JVM is gone: it was killed, or its memory was too little (spark.driver_memory)")
    said = last_cause(error)
    # Of a task that failed the first text says where, and the last one why; of Python code that is a mere traceback.
    return SparkFailed(said if _TASK_FAILED in text and not said.startswith("Traceback") else first_line(error))


def _ours(name: str, said: str) -> PenstockError:
    """An error that a worker raised."""
    kind = getattr(errors, name, None)
    return kind(said) if kind is not None else SparkFailed(f"{name}: {said}")
