"""Failures of Spark, of Delta and of a Spark task as errors of Penstock."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from py4j.protocol import Py4JNetworkError

from penstock.services.spark.errors import SparkFailed, TaskFailure, causes, last_cause, translated
from penstock.shared.common import errors
from penstock.shared.common.errors import (
    ChangelogHole,
    ConfigError,
    CorruptRecord,
    KafkaTimeout,
    OffsetOutOfRange,
    PenstockError,
)


@dataclass
class Throwable:
    """A Java exception as Py4J shows it."""

    text: str
    cause: Throwable | None = None

    def toString(self) -> str:  # noqa: N802 - Java's name
        return self.text

    def getCause(self) -> Throwable | None:  # noqa: N802 - Java's name
        return self.cause


class Raised(Exception):
    """The error that Py4J raises for it."""

    def __init__(self, *texts: str) -> None:
        super().__init__("an error occurred while calling o1.get\n: and all of Java's stack")
        self.java_exception = None
        for text in reversed(texts):
            self.java_exception = Throwable(text, self.java_exception)


def test_a_lost_jvm_is_named() -> None:
    """The error names the lost JVM, because Py4J's message about a broken connection does not help a user."""
    for error in (
        Py4JNetworkError("Answer from Java side is empty"),
        ConnectionRefusedError(111, "Connection refused"),
    ):
        assert "Spark's JVM ended" in str(translated(error))


ABORTED = "org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times"


def test_a_failed_tasks_message_is_the_last_cause() -> None:
    """The message is the last cause, not the task and stage."""
    assert str(translated(Raised(ABORTED, "java.lang.RuntimeException: x is not a Parquet file"))) == (
        "x is not a Parquet file"
    )


FRAMES = 'Traceback (most recent call last):\n  File "/w/worker.py", line 1, in main\n    process()\n    ~~~~~~~^^\n'
CHAINED = f"{FRAMES}KeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n{FRAMES}"
JAVA = "\n\n\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)"


@pytest.mark.parametrize(
    "error",
    [
        Raised(f"{ABORTED}: org.apache.spark.api.python.PythonException: {CHAINED}ValueError: bad{JAVA}"),
        RuntimeError(f"\n  An exception was thrown from the Python worker.\n{CHAINED}ValueError: bad\n{JAVA}"),
    ],
)
def test_a_failed_python_tasks_message_is_the_last_traceback_line(error: Exception) -> None:
    """The message is the last line of the last traceback."""
    assert str(translated(error)) == "ValueError: bad"


def test_a_folder_that_a_task_may_not_write_is_named() -> None:
    """Python's error has the folder's name, the head of the traceback lacks it."""
    denied = "PermissionError: [Errno 13] Permission denied: '/lake'"
    error = translated(Raised(f"{ABORTED}: org.apache.spark.api.python.PythonException: {FRAMES}{denied}{JAVA}"))
    assert str(error).endswith(f"cannot be used: {denied}")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "Traceback …\npenstock.shared.common.errors.CorruptRecord: log-3 at offset 7: 9 bytes",
            CorruptRecord,
            "log-3 at offset 7: 9 bytes",
        ),
        ("…\npenstock.shared.common.errors.KafkaTimeout: log-3: reading", KafkaTimeout, "log-3: reading"),
        ("Some data may have been lost because they are not available", ChangelogHole, "went missing"),
        ("\n  java.lang.OutOfMemoryError: heap\n at x", SparkFailed, "java.lang.OutOfMemoryError: heap"),
        ('No FileSystem for scheme "gs"', ConfigError, 'lake: No FileSystem for scheme "gs". Folders and s3:// need'),
        (
            "java.io.IOException: Mkdirs failed to create file:/x",
            SparkFailed,
            "the lake, or Spark's scratch folder, can",
        ),
    ],
)
def test_each_failure_is_recognized_by_its_text(text: str, kind: type[PenstockError], message: str) -> None:
    """A failure is recognized by its text anywhere in the message, and stack traces are left out."""
    error = translated(RuntimeError(text))
    assert type(error) is kind
    assert str(error).startswith(message) or message in str(error)
    assert "\n" not in str(error)


def test_causes_without_a_message_are_skipped() -> None:
    """A cause that is only a class name is skipped. An error without a cause is its own cause."""
    assert last_cause(Raised("a.b.C: why\n at x", "a.b.D")) == "why"
    assert last_cause(Raised("a.b.D")) == "a.b.D"
    assert causes(RuntimeError("\n one\ntwo")) == ["one"]


class Own(CorruptRecord):
    """A class whose name the driver does not know."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [(CorruptRecord("x"), CorruptRecord), (Own("x"), CorruptRecord), (OffsetOutOfRange("x"), OffsetOutOfRange)],
)
def test_an_error_comes_back(error: PenstockError, kind: type[PenstockError]) -> None:
    """It returns as its own class, or as its first base that `errors` has, with its partition."""
    again = TaskFailure.of(error).to_error("partition 3: ")
    assert type(again) is kind
    assert str(again) == f"partition 3: {error}"


@pytest.mark.parametrize("kind", [one for one in vars(errors).values() if isinstance(one, type)])
def test_every_error_takes_a_text(kind: type[PenstockError]) -> None:
    """Each error can therefore be returned from a task."""
    assert type(TaskFailure.of(kind("x")).to_error()) is kind
