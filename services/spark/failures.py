"""What Spark, Delta and the Kafka source raise, as errors of ours: one table, searched in the text of the failure."""

from __future__ import annotations

import re

from py4j.protocol import Py4JNetworkError

from penstock.services.spark.bodies import CORRUPT
from penstock.services.spark.replay import FAILED
from penstock.services.spark.session import SparkFailed, first_line, last_cause
from penstock.shared.common.errors import ChangelogHole, ConfigError, CorruptRecord, FatalError, PenstockError


class CompactionConflict(PenstockError):
    """Another job compacted the same application at the same time, and its commit won; nothing of this one counts."""


class BackfillFailed(FatalError):
    """A record of history cannot be processed, or the topology cannot be run in Spark; the message says which."""


_CONFLICTS = (
    "ConcurrentAppendException",
    "ConcurrentDeleteReadException",
    "ConcurrentDeleteDeleteException",
    "ConcurrentTransactionException",
    "ConcurrentWriteException",
    "MetadataChangedException",
    "ProtocolChangedException",
    "DELTA_CONCURRENT_",
    "DELTA_METADATA_CHANGED",
    "DELTA_PROTOCOL_CHANGED",
    "DELTA_TABLE_ALREADY_EXISTS",
)
_DATA_LOSS = ("KafkaDataLoss", "data may have been lost", "OffsetOutOfRangeException", "Some data may have been lost")
_OVERFLOW = "long overflow"
_TASK_FAILED = "Job aborted due to stage failure"
_NO_CONNECTOR = "No FileSystem for scheme"
_UNUSABLE = ("DELTA_CANNOT_CREATE_LOG_PATH", "Mkdirs failed", "Permission denied", "AccessDenied", "No space left")
_CORRUPT = re.compile(rf"{CORRUPT}: (.+)")
_REPLAY = re.compile(rf"{FAILED}: (.+)")


def translated(error: Exception) -> PenstockError:
    """An error of ours for what Py4J or pyspark raised."""
    cause = getattr(error, "java_exception", None)
    text = f"{cause.toString() if cause is not None else ''}\n{error}"
    if found := _CORRUPT.search(text):
        return CorruptRecord(found.group(1).strip())
    if found := _REPLAY.search(text):
        return BackfillFailed(found.group(1).strip())
    if any(name in text for name in _CONFLICTS):
        return CompactionConflict(f"another job changed the tables at the same time: {first_line(error)}")
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
