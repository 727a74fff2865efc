"""Errors of the Spark jobs.

`translated` maps an error of Spark, Delta or Spark's Kafka source to an error of Penstock, by known names and phrases
in the error's text. A TaskFailure is an error in a task's result. A task returns it, instead of raising, for an error
that a retry would raise again. So Spark does not retry the task.
"""

from __future__ import annotations

import re

import msgspec
from py4j.protocol import Py4JNetworkError

from penstock.shared.common import errors
from penstock.shared.common.errors import ChangelogHole, ConfigError, FatalError, PenstockError

_DATA_LOSS = ("KafkaDataLoss", "data may have been lost", "OffsetOutOfRangeException")
_TASK_FAILED = "Job aborted due to stage failure"
_NO_CONNECTOR = "No FileSystem for scheme"
_UNUSABLE = ("Mkdirs failed", "Permission denied", "AccessDenied", "No space left")
_PENSTOCK_ERROR = re.compile(r"^(?:\w+\.)*errors\.(\w+): (.+)", re.MULTILINE)
"""The last line of a traceback from a Python worker that raised an error of Penstock."""
_PYTHON_ERROR = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")
"""A traceback from a Python worker, with its last line as the group."""
# Some chains of causes are rings, so at most this many causes of an error are read.
CAUSES_MAX = 20
_CLASS_NAMES = re.compile(r"^(?:(?:[\w$]+\.)+[\w$]+(?:: |$))+")


class SparkFailed(FatalError):
    """Spark could not be started, or a Spark job failed for a reason without an error class of its own."""


class TaskFailure(msgspec.Struct, frozen=True):
    """The error of a Spark task: the names of its classes, its own first, and its message."""

    names: tuple[str, ...]
    message: str

    @classmethod
    def of(cls, error: PenstockError) -> TaskFailure:
        """Return an error that was raised in a Spark task as a TaskFailure."""
        return cls(tuple(one.__name__ for one in type(error).__mro__), str(error))

    def to_error(self, prefix: str = "") -> PenstockError:
        """Return the task's error.

        Of the original error's classes that `penstock.shared.common.errors` defines, the most derived one is used.
        """
        kinds = (getattr(errors, name, None) for name in self.names)
        kind: type[PenstockError] = next(kind for kind in kinds if kind is not None)
        return kind(f"{prefix}{self.message}")


def translated(error: Exception) -> PenstockError:
    """Return the error of Penstock for an error that Py4J or pyspark raised."""
    cause = getattr(error, "java_exception", None)
    text = f"{cause.toString() if cause is not None else ''}\n{error}"
    if found := _PENSTOCK_ERROR.search(text):
        return _worker_error(*found.groups())
    if any(name in text for name in _DATA_LOSS):
        return ChangelogHole(f"records went missing while they were read: {first_line(error)}")
    if _NO_CONNECTOR in text:
        return ConfigError(
            f"lake: {last_cause(error)}. Folders and s3:// need no connector; for other storage add its Hadoop "
            "connector (spark.conf spark.jars.packages=…)"
        )
    # The first message of a failed task names the failed task, the last one the reason. For Python code it is a
    # traceback: the last line has the reason. If there are several, the last one is that of the raised error.
    python_errors = _PYTHON_ERROR.findall(text)
    cause_text = python_errors[-1] if python_errors else last_cause(error)
    if any(name in text for name in _UNUSABLE):
        return SparkFailed(f"the lake, or Spark's scratch folder, cannot be used: {cause_text}")
    if isinstance(error, Py4JNetworkError | ConnectionError):
        return SparkFailed("Spark's JVM ended: it was killed or ran out of memory (spark.driver_memory)")
    is_cause = python_errors or _TASK_FAILED in text
    return SparkFailed(cause_text if is_cause else first_line(error))


def _worker_error(name: str, message: str) -> PenstockError:
    """Return the error that a Python worker raised, from the class name and message in its traceback.

    Return SparkFailed if `penstock.shared.common.errors` lacks the class.
    """
    kind = getattr(errors, name, None)
    return kind(message) if kind is not None else SparkFailed(f"{name}: {message}")


def first_line(error: BaseException) -> str:
    """Return the first line of a Spark error's message, without the stack traces that follow it."""
    cause = getattr(error, "java_exception", None)
    return _first_line(str(cause.toString()) if cause is not None else str(error)) or type(error).__name__


def causes(error: BaseException) -> list[str]:
    """Return one line for a Java error's message and one for each cause, the error's own first, at most CAUSES_MAX."""
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    texts = list[str]()
    while cause is not None and len(texts) < CAUSES_MAX:
        texts.append(_first_line(str(cause.toString())))
        cause = cause.getCause()
    return texts or [_first_line(str(error)) or type(error).__name__]


def last_cause(error: BaseException) -> str:
    """Return the message of the innermost cause that has one, without the names of Java classes before it."""
    messages = [_CLASS_NAMES.sub("", text) for text in causes(error)]
    return next((text for text in reversed(messages) if text), causes(error)[0])


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
