"""The retry operator: errors that are retried, tolerated, or fail the task."""

from __future__ import annotations

import random

import pytest

from penstock.shared.common.errors import DataError, KafkaTimeout, RetriableError
from penstock.shared.connect.converters.json import JsonConverter
from penstock.shared.connect.errors import ToleranceExceeded
from penstock.shared.connect.runtime.connector_config import sink_config
from penstock.shared.connect.runtime.error_handling import ErrorSettings, Failure, RetryWithToleranceOperator, Stage
from penstock.shared.connect.runtime.task_metrics import TaskMetrics


def operator(**settings: object) -> tuple[RetryWithToleranceOperator, TaskMetrics]:
    metrics = TaskMetrics("sink")
    return RetryWithToleranceOperator(ErrorSettings(**settings), metrics, random.Random(1)), metrics  # type: ignore[arg-type]


def failure(stage: Stage = Stage.VALUE_CONVERTER, error: Exception | None = None) -> Failure:
    return Failure(stage, JsonConverter, error or DataError("bad"))


def test_waits_double_up_to_their_limit() -> None:
    """Backoffs double from 300 ms; above the limit they are random below it."""
    made, metrics = operator(retry_timeout_ms=-1, retry_delay_max_ms=1_000)
    waits = [made.retry_after(RetriableError(), attempt, 0, 0) for attempt in range(1, 7)]
    assert waits[:2] == [300, 600]
    assert all(wait is not None and 0 <= wait < 1_000 for wait in waits[2:])
    assert made.retry_after(RetriableError(), 10_000, 0, 0) is not None
    assert metrics.values(0)["total_retries"] == 7


def test_no_backoff_exceeds_the_timeout() -> None:
    """The last backoff ends with the timeout, and after that nothing is retried."""
    made, _ = operator(retry_timeout_ms=1_000)
    assert made.retry_after(RetriableError(), 3, 0, 500) == 500
    assert made.retry_after(RetriableError(), 4, 0, 999) == 1
    assert made.retry_after(RetriableError(), 5, 0, 1_000) is None


def test_without_a_timeout_nothing_is_retried() -> None:
    """By default nothing is retried, and errors that are not retriable never are."""
    made, metrics = operator()
    assert made.retry_after(RetriableError(), 1, 0, 0) is None
    endless, _ = operator(retry_timeout_ms=-1)
    assert endless.retry_after(DataError("bad"), 1, 0, 0) is None
    assert endless.retry_after(KafkaTimeout("a client's"), 1, 0, 10**9) is not None
    assert metrics.values(0)["total_retries"] == 0


def test_an_error_that_is_not_tolerated_ends_the_task() -> None:
    """Under `errors.tolerance=none` the first error fails the task and is counted."""
    made, metrics = operator()
    with pytest.raises(ToleranceExceeded, match="VALUE_CONVERTER by JsonConverter: DataError: bad") as raised:
        made.failed(failure(), 5)
    assert isinstance(raised.value.__cause__, DataError)
    values = metrics.values(0)
    assert (values["total_record_errors"], values["total_record_failures"], values["last_error_timestamp"]) == (1, 1, 5)


def test_a_tolerated_error_skips_the_record() -> None:
    """Under `errors.tolerance=all` any error of a conversion or transform skips the record."""
    made, metrics = operator(tolerate=True)
    for stage in (Stage.KEY_CONVERTER, Stage.VALUE_CONVERTER, Stage.HEADER_CONVERTER, Stage.TRANSFORMATION):
        made.failed(failure(stage, ZeroDivisionError()), 1)
    assert metrics.values(0)["total_records_skipped"] == made.total_failures == 4
    assert metrics.values(0)["total_record_errors"] == 0


def test_in_other_stages_only_retriable_errors_are_tolerated() -> None:
    """In other stages, such as poll and send, only retriable errors are tolerated."""
    made, _ = operator(tolerate=True)
    made.failed(failure(Stage.KAFKA_PRODUCE, RetriableError("given up")), 1)
    with pytest.raises(ToleranceExceeded, match="Unhandled exception"):
        made.failed(failure(Stage.TASK_POLL, DataError("bad")), 1)


def test_settings_come_from_the_connector() -> None:
    """Error settings have Kafka Connect's names and defaults."""
    base = {"name": "x", "connector.class": "y", "topics": "t"}
    assert ErrorSettings.of(sink_config().parse(base)) == ErrorSettings()
    assert not ErrorSettings().reports
    more = {"errors.tolerance": "ALL", "errors.deadletterqueue.topic.name": "d", "errors.retry.timeout": "-1"}
    found = ErrorSettings.of(sink_config().parse(base | more))
    assert (found.tolerate, found.dead_letter_topic, found.retry_timeout_ms, found.reports) == (True, "d", -1, True)
