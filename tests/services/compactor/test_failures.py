"""Failures of Spark and Delta in words of ours."""

from __future__ import annotations

import pytest

from services.compactor.failures import CompactionConflict, translated
from services.compactor.spark import SparkFailed
from shared.common.errors import ChangelogHole, CorruptRecord, PenstockError


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (
            "Traceback …\nValueError: corrupt changelog record: log-3 at offset 7: 9 bytes",
            CorruptRecord,
            "log-3 at offset 7: 9 bytes",
        ),
        ("[DELTA_CONCURRENT_APPEND] Files were added", CompactionConflict, "another job"),
        ("io.delta.exceptions.ConcurrentTransactionException: x", CompactionConflict, "another job"),
        ("Some data may have been lost because they are not available", ChangelogHole, "went missing"),
        ("java.lang.ArithmeticException: long overflow\n at x", SparkFailed, "a record's timestamp is beyond"),
        ("\n  java.lang.OutOfMemoryError: heap\n at x", SparkFailed, "java.lang.OutOfMemoryError: heap"),
    ],
)
def test_each_failure_says_what_is_true(text: str, kind: type[PenstockError], said: str) -> None:
    """A failure is known by its text wherever it stands in it, and stack traces are left out."""
    error = translated(RuntimeError(text))
    assert type(error) is kind
    assert str(error).startswith(said) or said in str(error)
    assert "\n" not in str(error)
