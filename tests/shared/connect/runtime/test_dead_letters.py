"""Dead letters, compared with those of a real Kafka Connect, and the raw records that are kept for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import structlog.testing

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.converters.json import JsonConverter
from penstock.shared.connect.converters.plain import StringConverter
from penstock.shared.connect.errors import ConnectError, MoreNeeded, ToleranceExceeded
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.runtime.error_handling import ErrorSettings, Failure, Stage
from penstock.shared.connect.runtime.error_reporting import (
    TRACE_BYTES_MAX,
    ErrorReporters,
    RawRecords,
    dead_letter,
    kafka_error_name,
    log_fields,
)
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.schema import Schema
from penstock.shared.connect.task import Offsets
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail
from tests.shared.connect.harness import STRING, TP, RecordingSink, RecordingSinkTask, running, source_record
from tests.shared.connect.recordings import recorded_dead_letters

HOIST = "org.apache.kafka.connect.transforms.HoistField$Key"
ID = ConnectorTaskId("dlq", 0)

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


async def test_dead_letters_equal_the_recording() -> None:
    """The same records give the same dead letters: key, value, and all headers except the trace's frames."""
    json_converter = "org.apache.kafka.connect.json.JsonConverter"
    settings = {
        "key_converter": json_converter,
        "key_converter_schemas_enable": "false",
        "value_converter": json_converter,
        "value_converter_schemas_enable": "false",
        "errors_tolerance": "all",
        "errors_deadletterqueue_topic_name": "dlq",
        "errors_deadletterqueue_topic_replication_factor": "1",
        "errors_deadletterqueue_context_headers_enable": "true",
    }
    async with running() as run:
        run.cluster.create_topic("dlq-in")
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("dlq-in", b'{"ok":true}', key=b'{"id":0}')
            for dead_letter in recorded_dead_letters():
                originals = [
                    (name, value.encode()) for name, value in dead_letter["headers"] if not name.startswith("__")
                ]
                key, value = dead_letter["key"].encode(), dead_letter["value"].encode()
                await producer.send("dlq-in", value, key=key, headers=tuple(originals))
        await run.run(RecordingSink, topics="dlq-in", **settings)
        await run.until(lambda: RecordingSinkTask.made and len(RecordingSinkTask.made[0].values) == 1)
        await run.until(lambda: len(run.cluster.records("dlq")) == 2)
        for found, dead_letter in zip(run.cluster.records("dlq"), recorded_dead_letters(), strict=True):
            assert (found.key, found.value) == (dead_letter["key"].encode(), dead_letter["value"].encode())
            expected = [
                [name, "c" if name.endswith("connector.name") else value] for name, value in dead_letter["headers"]
            ]
            headers = [[name, (value or b"").decode()] for name, value in found.headers]
            assert headers[:-1] == expected[:-1]
            assert headers[-1][0] == expected[-1][0]
            assert headers[-1][1].startswith(expected[-1][1].partition("\n")[0])


async def test_an_error_that_is_not_tolerated_fails_the_task_after_its_report() -> None:
    """An error that is not tolerated is reported and fails the task with ToleranceExceeded."""
    async with running() as run:
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"not json")
        id = await run.run(
            RecordingSink,
            topics="t",
            value_converter="org.apache.kafka.connect.json.JsonConverter",
            errors_deadletterqueue_topic_name="dlq",
            errors_deadletterqueue_topic_replication_factor="1",
        )
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "ToleranceExceeded" in run.listener.traces[0]


class AwaitingSinkTask(RecordingSinkTask):
    """Reports each record, and waits for the report."""

    async def put(self, records: list[SinkRecord]) -> None:
        reporter = self.context.errant_record_reporter
        assert reporter is not None
        for record in records:
            await reporter.report(record, ValueError("refused"))


class AwaitingSink(RecordingSink):
    """Its task waits for its reports."""

    task_class = AwaitingSinkTask


async def test_the_record_that_fails_a_task_is_a_dead_letter() -> None:
    """Its dead letter is stored before the report fails the task, so the task's end does not drop it."""
    async with running() as run:
        run.cluster.create_topic("dlq")
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"bad")
        id = await run.run(AwaitingSink, topics="t", errors_deadletterqueue_topic_name="dlq")
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "ToleranceExceeded" in run.listener.traces[0]
        assert [record.value for record in run.cluster.records("dlq")] == [b"bad"]


async def test_a_dead_letter_topic_that_exists_is_not_created() -> None:
    """A sink needs no right to create topics if its dead-letter topic exists."""
    async with running() as run:
        run.cluster.create_topic("dlq")
        with run.cluster.control(Api.CREATE_TOPICS, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)):
            id = await run.run(RecordingSink, topics="t", errors_deadletterqueue_topic_name="dlq")
            await run.until(lambda: run.listener.of(id))
        assert run.listener.of(id) == ["startup"]


async def test_records_are_delivered_after_the_dead_letters_in_front_of_them_are_stored() -> None:
    """A task gets no record while a dead letter in front of it is not stored: it may store the record's offset itself,
    so that the failed record would be lost.
    """
    async with running() as run:
        run.cluster.create_topic("dlq")
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"not json")
            await producer.send("t", b"1")
        with run.cluster.control(Api.PRODUCE, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)):
            id = await run.run(
                RecordingSink,
                topics="t",
                value_converter="org.apache.kafka.connect.json.JsonConverter",
                value_converter_schemas_enable="false",
                errors_tolerance="all",
                errors_deadletterqueue_topic_name="dlq",
            )
            await run.until(lambda: "failure" in run.listener.of(id))
        assert "dead letters could not be written" in run.listener.traces[0]
        assert RecordingSinkTask.made[0].values == []


@pytest.mark.parametrize("when", ["put", "pre_commit"])
async def test_a_record_reported_late_is_not_committed(when: str) -> None:
    """A record that is reported in `put` or while flushing fails the task before its offset is committed, if errors are
    not tolerated. The sink need not wait for its report.
    """

    def report(made: RecordingSinkTask, records: list[SinkRecord]) -> None:
        reporter = made.context.errant_record_reporter
        assert reporter is not None
        for record in records:
            reporter.report(record, ValueError("refused"))

    def prepare(made: RecordingSinkTask) -> None:
        if when == "put":
            made.on_put = report
        else:
            made.committable = lambda offsets: report(made, made.records[:1]) or offsets  # type: ignore[func-returns-value]

    async with running() as run:
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"bad")
        RecordingSinkTask.prepare = staticmethod(prepare)
        try:
            id = await run.run(RecordingSink, topics="t", errors_log_enable="true", offset_flush_interval_ms="50")
            await run.until(lambda: "failure" in run.listener.of(id))
        finally:
            RecordingSinkTask.prepare = staticmethod(lambda _task: None)
        assert "ValueError: refused" in run.listener.traces[0]
        assert run.cluster.committed("connect-c").get(TP, OffsetAndMetadata(0)).offset == 0


class Fetching(StringConverter):
    """A string converter that must fetch a schema before it writes, as those of a schema registry."""

    def __init__(self) -> None:
        super().__init__()
        self.has_schema = False

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        async def fetch() -> None:
            self.has_schema = True

        if not self.has_schema:
            raise MoreNeeded("the id of a schema", fetch)
        return super().from_connect_data(topic, schema, value)


@pytest.mark.parametrize(("kept", "converter"), [(True, STRING), (False, STRING), (False, f"{__name__}.Fetching")])
async def test_a_record_reported_while_flushing_is_as_it_was_read(
    kept: bool, converter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record reported while flushing is written with its original key, value and headers.

    If the raw record is no longer kept, it is converted back, after the converter has fetched its schema.
    """

    def prepare(made: RecordingSinkTask) -> None:
        def committable(offsets: Offsets) -> Offsets:
            reporter = made.context.errant_record_reporter
            assert reporter is not None
            while made.records:
                reporter.report(made.records.pop(), ValueError("refused"))
            return offsets

        made.committable = committable

    monkeypatch.setattr(RecordingSinkTask, "prepare", staticmethod(prepare))
    if not kept:
        monkeypatch.setattr(RawRecords, "find", lambda *_: None)
    async with running() as run:
        run.cluster.create_topic("dlq")
        async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
            await producer.send("t", b"v", key=b"k", headers=(("h", b"1"),))
        await run.run(
            RecordingSink,
            topics="t",
            value_converter=converter,
            errors_tolerance="all",
            errors_deadletterqueue_topic_name="dlq",
            errors_deadletterqueue_topic_replication_factor="1",
            **({"transforms": "k", "transforms_k_type": HOIST, "transforms_k_field": "f"} if kept else {}),
        )
        await run.until(lambda: run.cluster.records("dlq"))
        (found,) = run.cluster.records("dlq")
        assert (found.key, found.value, found.headers) == (b"k", b"v", (("h", b"1"),))
        await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(1))


async def test_errors_of_records_and_commits_have_no_secrets() -> None:
    """Secrets are masked in an error that is reported for a record, in the log and in the dead letter, and in the error
    of a commit.
    """
    url = "postgresql://ann:s3cret@db/shop"

    def prepare(made: RecordingSinkTask) -> None:
        made.raising["pre_commit"] = [ValueError(f"cannot flush to {url}")]
        made.on_put = lambda task, records: task.context.errant_record_reporter.report(  # type: ignore[union-attr]
            records[0], ValueError(f"cannot write to {url}")
        )

    RecordingSinkTask.prepare = staticmethod(prepare)
    try:
        with structlog.testing.capture_logs() as logged:
            async with running() as run:
                run.cluster.create_topic("dlq")
                async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
                    await producer.send("t", b"bad")
                await run.run(
                    RecordingSink,
                    topics="t",
                    connection_url=url,
                    errors_tolerance="all",
                    errors_log_enable="true",
                    errors_deadletterqueue_topic_name="dlq",
                    errors_deadletterqueue_topic_replication_factor="1",
                    errors_deadletterqueue_context_headers_enable="true",
                )
                await run.until(lambda: run.cluster.committed("connect-c").get(TP) == OffsetAndMetadata(1))
                (*_, message, trace) = [(value or b"").decode() for _, value in run.cluster.records("dlq")[0].headers]
    finally:
        RecordingSinkTask.prepare = staticmethod(lambda _task: None)
    shown = url.replace("s3cret", "[hidden]")
    assert message == f"cannot write to {shown}"
    assert trace.startswith(f"ValueError: cannot write to {shown}")
    assert "s3cret" not in trace
    errors = {line["event"]: line["error"] for line in logged if "error" in line}
    assert errors == {
        "record failed": f"ValueError: cannot write to {shown}",
        "offset commit failed, reading again": f"ValueError: cannot flush to {shown}",
        "offset commit failed": f"ValueError: cannot flush to {shown}",
    }


async def test_each_flush_waits_for_all_dead_letters() -> None:
    """A flush waits for each dead letter that is not stored, also for those that another flush waits for. A cancelled
    flush cancels no dead letter, and all flushes raise the error of one that fails.
    """
    metrics = TaskMetrics("sink")
    reporters = ErrorReporters(ID, ErrorSettings(), metrics)
    stored: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    reporters.await_before_commit(stored)
    flushes = [asyncio.create_task(reporters.flush()) for _ in range(3)]
    await asyncio.sleep(0)
    flushes[0].cancel()
    done, _ = await asyncio.wait(flushes, timeout=0.01)
    assert done == {flushes[0]}
    assert not stored.cancelled()
    stored.set_exception(DataError("too large"))
    for flush in flushes[1:]:
        with pytest.raises(ConnectError, match="1 dead letters"):
            await flush
    assert metrics.values(0)["deadletterqueue_produce_failures"] == 1


@pytest.mark.parametrize("is_write_first", [True, False])
async def test_only_dead_letters_count_as_failed_writes(is_write_first: bool) -> None:
    """An error that the task reported is no failed write of a dead letter. `flush` raises the first error."""
    metrics = TaskMetrics("sink")
    reporters = ErrorReporters(ID, ErrorSettings(), metrics)
    errors = [DataError("too large"), ToleranceExceeded("not tolerated")]
    for error in errors if is_write_first else reversed(errors):
        failed: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        failed.set_exception(error)
        reporters.await_before_commit(failed)
    with pytest.raises(ConnectError, match="1 dead letters" if is_write_first else "not tolerated"):
        await reporters.flush()
    assert metrics.values(0)["deadletterqueue_produce_failures"] == 1


def test_a_long_trace_is_truncated() -> None:
    """A long trace is truncated, so that the dead letter can be written."""
    record = ConsumerRecord("t", 1, 2, -1, None, b"x", (("h", None),))
    failure = Failure(Stage.TASK_PUT, JsonConverter, DataError("é" * TRACE_BYTES_MAX))
    found = dead_letter("d", record, failure, ID, headers=True)
    assert all(len(value or b"") <= TRACE_BYTES_MAX for _, value in found.headers)
    assert (found.headers[0], found.timestamp, len(found.headers)) == (("h", None), None, 11)
    assert dead_letter("d", record, failure, ID, headers=False).headers == (("h", None),)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (DataError("x"), "org.apache.kafka.connect.errors.DataException"),
        (RetriableError("x"), "org.apache.kafka.connect.errors.RetriableException"),
        (ValueError("x"), "ValueError"),
        (json.JSONDecodeError("x", "", 0), "json.decoder.JSONDecodeError"),
    ],
)
def test_error_names(error: Exception, name: str) -> None:
    """Connect's errors have Kafka Connect's class names, and other errors their own."""
    assert kafka_error_name(error) == name


def test_log_fields_name_the_record_only_if_enabled() -> None:
    """Log fields contain the record's coordinates only with `errors.log.include.messages`, and never its content."""
    record = ConsumerRecord("t", 1, 2, 3, b"secret", b"secret")
    failure = Failure(Stage.KEY_CONVERTER, JsonConverter, DataError("bad"), 2)
    assert "topic" not in log_fields(record, failure, ID, messages=False)
    fields = log_fields(record, failure, ID, messages=True)
    assert (fields["topic"], fields["offset"], fields["attempt"]) == ("t", 2, 2)
    assert "secret" not in str(fields)
    source = log_fields(source_record("secret", 5), failure, ID, messages=True)
    assert source["source_offset"] == {"position": 5}
    assert "secret" not in str(source)


def columns(tp: TopicPartition, *offsets: int) -> Columns:
    """Records of two bytes each, without a key."""
    return Columns.of(
        [ConsumerRecord(tp.topic, tp.partition, at, 7, None, b"%02d" % at, (("h", b"x"),)) for at in offsets]
    )


def found_offsets(raw: RawRecords, tp: TopicPartition, *offsets: int) -> list[int]:
    return [at for at in offsets if (record := raw.find(tp, at)) and record.value == b"%02d" % at]


def test_a_record_is_found_until_its_offset_is_committed() -> None:
    """A record is found completely until its offset is committed or its partition is revoked,
    also if offsets have gaps.
    """
    raw = RawRecords()
    raw.add({A: columns(A, 1, 3), B: columns(B, 5)})
    raw.add({A: columns(A, 6, 7)})
    assert raw.find(TopicPartition("t", 0), 3) == ConsumerRecord("t", 0, 3, 7, None, b"03", (("h", b"x"),))
    assert found_offsets(raw, A, *range(10)) == [1, 3, 6, 7]
    raw.committed({A: OffsetAndMetadata(4), B: OffsetAndMetadata(5), TopicPartition("u", 0): OffsetAndMetadata(1)})
    assert (found_offsets(raw, A, *range(10)), found_offsets(raw, B, 5)) == ([6, 7], [5])
    raw.forget([B, TopicPartition("u", 0)])
    assert found_offsets(raw, B, 5) == []
    assert repr(raw) == "<RawRecords of 1 partitions, 4 bytes>"


def test_the_oldest_batches_are_evicted() -> None:
    """Above the limit the oldest batches of any partition are evicted, but never the batch that is being delivered."""
    raw = RawRecords(bytes_max=6)
    raw.add({A: columns(A, 1)})
    raw.add({B: columns(B, 1)})
    raw.add({B: columns(B, 2, 3)})
    assert (found_offsets(raw, A, 1), found_offsets(raw, B, 1, 2, 3)) == ([], [1, 2, 3])
    raw.add({A: columns(A, *range(2, 9))})
    assert (found_offsets(raw, A, *range(9)), found_offsets(raw, B, 1, 2, 3)) == ([*range(2, 9)], [])


def test_records_read_again_replace_the_old_ones() -> None:
    """After a failed flush records that are read again replace the old ones."""
    raw = RawRecords()
    raw.add({A: columns(A, 1, 2)})
    raw.add({A: columns(A, 3, 4)})
    raw.add({A: columns(A, 1, 2, 3)})
    assert found_offsets(raw, A, *range(6)) == [1, 2, 3]
    assert "6 bytes" in repr(raw)
