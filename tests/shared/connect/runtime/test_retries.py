"""Errors of a record that are retried, and those that are tolerated or fail the task.

A conversion that is retried forever is reported as stalled and can be paused and stopped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import structlog

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DataError, KafkaTimeout, RetriableError
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.converters.json import JsonConverter
from penstock.shared.connect.converters.plain import StringConverter
from penstock.shared.connect.errors import ToleranceExceeded
from penstock.shared.connect.runtime.connector_config import sink_config
from penstock.shared.connect.runtime.error_handling import (
    LOG_MS,
    ErrorSettings,
    Failure,
    Interrupted,
    RetryWaits,
    RetryWithToleranceOperator,
    Stage,
)
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.worker_task import TaskSpec
from tests.shared.connect.harness import (
    RecordingSink,
    RecordingSinkTask,
    RecordingSource,
    RecordingSourceTask,
    Running,
    running,
    source_record,
)

FOR_EVER = {"errors_retry_timeout": "-1", "errors_retry_delay_max_ms": "10"}


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
    assert metrics.values(0)["total_records_skipped"] == 4
    assert metrics.values(0)["total_record_errors"] == 0


def test_settings_come_from_the_connector() -> None:
    """Error settings have Kafka Connect's names and defaults."""
    base = {"name": "x", "connector.class": "y", "topics": "t"}
    assert ErrorSettings.of(sink_config().parse(base)) == ErrorSettings()
    assert not ErrorSettings().reports
    more = {"errors.tolerance": "ALL", "errors.deadletterqueue.topic.name": "d", "errors.retry.timeout": "-1"}
    found = ErrorSettings.of(sink_config().parse(base | more))
    assert (found.tolerate, found.dead_letter_topic, found.retry_timeout_ms, found.reports) == (True, "d", -1, True)


class Down(StringConverter):
    """A string converter that fails for strings that begin with `x` while `is_down` is set."""

    is_down: ClassVar[bool] = True

    def _check(self, value: object) -> None:
        if Down.is_down and value in ("x", b"x"):
            raise RetriableError("the registry does not answer")

    def from_connect_data(self, topic: str, schema: Any, value: Any) -> bytes | None:
        self._check(value)
        return super().from_connect_data(topic, schema, value)

    def to_connect_data(self, topic: str, data: bytes | None, headers: Any = ()) -> Any:
        self._check(data)
        return super().to_connect_data(topic, data, headers)

    def to_connect_values(self, topic: str, datas: Any) -> None:
        return None


CONVERTER = f"{Down.__module__}.{Down.__qualname__}"


@pytest.fixture(autouse=True)
def down() -> Iterator[None]:
    Down.is_down = True
    yield
    Down.is_down = False


def stalled_ms(run: Running) -> int:
    return run.worker.stalled_ms(ConnectorTaskId("c", 0))


async def test_a_sink_in_a_retried_conversion_can_pause_and_stop() -> None:
    """A sink in a retried conversion counts as stalled, logs the reason and takes part in rebalances.

    A pause and a stop end the retries, and the records are read again.
    """
    async with running() as run:
        run.cluster.create_topic("two", 2)
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            for partition in (0, 1):
                for value in (b"a", b"x", b"b"):
                    await producer.send("two", value, partition=partition)
        with structlog.testing.capture_logs() as logged:
            id = await run.run(RecordingSink, topics="two", value_converter=CONVERTER, **FOR_EVER)
            await run.until(lambda: stalled_ms(run) > 50)
        (line,) = [line for line in logged if line["event"] == "conversion will be retried"]
        assert (line["stage"], line["error"]) == ("VALUE_CONVERTER", "RetriableError: the registry does not answer")
        props = {"name": "c", "connector.class": f"{RecordingSink.__module__}.RecordingSink", "topics": "two"}
        second = ConnectorTaskId("c", 1)
        await run.worker.start_task(TaskSpec(second, props, props), TargetState.STARTED, run.listener)
        await run.until(lambda: RecordingSinkTask.made[-1].values == ["a", "x", "b"])
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: "paused" in run.listener.of(id))
        assert stalled_ms(run) == 0
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: stalled_ms(run) > 50)
        await run.worker.stop_tasks([id])
        assert run.listener.of(id) == ["startup", "paused", "running", "shutdown"]
        assert RecordingSinkTask.made[0].values == []
        await run.until(lambda: RecordingSinkTask.made[-1].values == ["a", "x", "b"] * 2)
        await run.until(lambda: len(run.cluster.committed("connect-c")) == 2)
        committed = run.cluster.committed("connect-c")
        await run.until(
            lambda: {run.cluster.committed("connect-c")[TopicPartition("two", p)].offset for p in (0, 1)} == {3}
        )
        assert committed.keys() == {TopicPartition("two", 0), TopicPartition("two", 1)}


class ResumingSinkTask(RecordingSinkTask):
    """Resumes the partitions that it opens."""

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        self.context.resume(*partitions)
        await super().open(partitions)


class ResumingSink(RecordingSink):
    task_class = ResumingSinkTask


async def test_resuming_partitions_during_a_retried_conversion_loses_no_record() -> None:
    """Polls during a retried conversion only keep the group membership: partitions that the
    task resumes are read after the conversion.
    """
    async with running() as run:
        run.cluster.create_topic("two", 2)
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            for partition in (0, 1):
                for value in (b"a", b"x", b"b"):
                    await producer.send("two", value, partition=partition)
        await run.run(ResumingSink, topics="two", value_converter=CONVERTER, **FOR_EVER)
        await run.until(lambda: stalled_ms(run) > 50)
        first = RecordingSinkTask.made[-1]
        props = {"name": "c", "connector.class": f"{RecordingSink.__module__}.RecordingSink", "topics": "two"}
        await run.worker.start_task(TaskSpec(ConnectorTaskId("c", 1), props, props), TargetState.STARTED, run.listener)
        second = RecordingSinkTask.made[-1]
        assert second is not first
        await run.until(lambda: second.values == ["a", "x", "b"])
        since_ms = stalled_ms(run)
        await run.until(lambda: stalled_ms(run) > since_ms + 300)  # polls continue meanwhile
        Down.is_down = False
        await run.until(lambda: first.values == ["a", "x", "b"])


async def test_a_source_in_a_retried_conversion_can_pause_and_stop() -> None:
    """Records sent before a retried conversion are sent once, and their offsets are stored.

    The others are sent when the conversion succeeds.
    """
    async with running(offset_flush_interval_ms="600000") as run:
        id = await run.run(RecordingSource, value_converter=CONVERTER, **FOR_EVER)
        await run.until(lambda: RecordingSourceTask.made)
        RecordingSourceTask.made[-1].batches.put_nowait([source_record(v, at) for at, v in enumerate(("a", "x", "b"))])
        await run.until(lambda: stalled_ms(run) > 50)
        await run.worker.set_target_state("c", TargetState.PAUSED)
        await run.until(lambda: "paused" in run.listener.of(id))
        await run.worker.set_target_state("c", TargetState.STARTED)
        await run.until(lambda: stalled_ms(run) > 50)
        assert [record.value for record in run.cluster.records("t")] == [b"a"]
        Down.is_down = False
        await run.until(lambda: len(run.cluster.records("t")) == 3)
        assert [record.value for record in run.cluster.records("t")] == [b"a", b"x", b"b"]
        Down.is_down = True
        RecordingSourceTask.made[-1].batches.put_nowait([source_record("x", 3)])
        await run.until(lambda: stalled_ms(run) > 50)
        await run.worker.stop_tasks([id])
        assert run.listener.of(id)[-1] == "shutdown"
        assert run.store.data == {b'["c",{"file":"a"}]': b'{"position":2}'}


async def test_retries_are_logged_at_a_limited_rate() -> None:
    """A retried conversion is logged at once and then every ten seconds."""
    waits = RetryWaits("c-0")
    with structlog.testing.capture_logs() as logged:
        for begun in (0, 100_000):
            waits.begin(begun)
            for after in range(0, 2 * LOG_MS + 1, 500):
                waits.failed("VALUE_CONVERTER", RetriableError("down"), begun + after)
            waits.end()
    assert [line["for_ms"] for line in logged] == [0, LOG_MS, 2 * LOG_MS] * 2


async def test_an_interrupted_wait_cancels_its_future() -> None:
    """An interrupted wait cancels its future; a completed future returns its result."""
    waits, never = RetryWaits("c-0"), asyncio.get_running_loop().create_future()
    done = asyncio.get_running_loop().create_future()
    done.set_result(7)
    assert await waits.wait_for(done) == 7
    waits.is_over = lambda: True
    with pytest.raises(Interrupted):
        await waits.wait_for(never)
    assert never.cancelled()
