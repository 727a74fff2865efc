"""Errors of the Spark jobs.

`translated` finds the error of Penstock for what Spark, Delta and the Kafka source raise: one table, searched in the
text of the error. A TaskFailure carries an error that would be raised again out of a task as its result, so that Spark
does not retry the task.
"""

from __future__ import annotations

import re

import msgspec
from py4j.protocol import Py4JNetworkError

from penstock.shared.common import errors
from penstock.shared.common.errors import ChangelogHole, ConfigError, FatalError, OffsetOutOfRange, PenstockError

_DATA_LOSS = ("KafkaDataLoss", "data may have been lost", "OffsetOutOfRangeException", "Some data may have been lost")
_OVERFLOW = "long overflow"
_TASK_FAILED = "Job aborted due to stage failure"
_NO_CONNECTOR = "No FileSystem for scheme"
_UNUSABLE = ("Mkdirs failed", "Permission denied", "AccessDenied", "No space left")
_PENSTOCK_ERROR = re.compile(r"^(?:\w+\.)*errors\.(\w+): (.+)", re.MULTILINE)
"""The last line of a traceback from a Python worker that raised an error of Penstock."""
CAUSES_MAX = 20  # of one error: some chains are rings
_CLASS_NAMES = re.compile(r"^(?:(?:[\w$]+\.)+[\w$]+(?:: |$))+")


class SparkFailed(FatalError):
    """Spark could not be started, or a job of it failed for a reason that has no name of its own."""


class TaskFailure(msgspec.Struct, frozen=True):
    """A task's error: the names of its classes, its own first, and its message."""

    names: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, error: PenstockError) -> TaskFailure:
        """Changelog records that are deleted while they are read are a hole in the changelog."""
        kind = ChangelogHole if isinstance(error, OffsetOutOfRange) else type(error)
        return cls(tuple(one.__name__ for one in kind.__mro__), str(error))

    def to_error(self, prefix: str = "") -> PenstockError:
        """The error again, of its first class in `errors`; each of them takes a text."""
        kinds = (getattr(errors, name, None) for name in self.names)
        kind: type[PenstockError] = next(kind for kind in kinds if kind is not None)
        return kind(f"{prefix}{self.message}")


def translated(error: Exception) -> PenstockError:
    """The error of Penstock for an error that Py4J or pyspark raised."""
    cause = getattr(error, "java_exception", None)
    text = f"{cause.toString() if cause is not None else ''}\n{error}"
    if found := _PENSTOCK_ERROR.search(text):
        return _worker_error(*found.groups())
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
    cause_text = last_cause(error)
    # The first text of a failed task says where it failed, the last one why; for Python code that is only a traceback.
    is_cause = _TASK_FAILED in text and not cause_text.startswith("Traceback")
    return SparkFailed(cause_text if is_cause else first_line(error))


def _worker_error(name: str, message: str) -> PenstockError:
    """An error that a Python worker raised."""
    kind = getattr(errors, name, None)
    return kind(message) if kind is not None else SparkFailed(f"{name}: {message}")


def first_line(error: BaseException) -> str:
    """The message of an error of Spark, without the stack traces that it carries."""
    cause = getattr(error, "java_exception", None)
    return _line(str(cause.toString()) if cause is not None else str(error)) or type(error).__name__


def causes(error: BaseException) -> list[str]:
    """The messages of a Java error and of its causes, its own first: a line each."""
    cause, texts = getattr(error, "java_exception", None) or getattr(error, "_origin", None), list[str]()
    while cause is not None and len(texts) < CAUSES_MAX:
        texts.append(_line(str(cause.toString())))
        cause = cause.getCause()
    return texts or [_line(str(error)) or type(error).__name__]


def last_cause(error: BaseException) -> str:
    """The message of the innermost cause that has one, without the names of Java classes."""
    messages = [_CLASS_NAMES.sub("", text) for text in causes(error)]
    return next((text for text in reversed(messages) if text), causes(error)[0])


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
