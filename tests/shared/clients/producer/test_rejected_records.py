"""Records that are rejected, or that wait before they are in a batch."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.interceptors import ProducerInterceptor
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.producer import producer as producer_module
from penstock.shared.clients.producer.delivery import Deliveries
from penstock.shared.clients.producer.producer import UntilClosed
from penstock.shared.clients.producer.record_validation import (
    check_callback,
    check_partition,
    check_timestamp,
    checked_headers,
    checked_size,
    serialized,
)
from penstock.shared.common.errors import (
    AuthorizationFailed,
    DataError,
    IllegalState,
    InvalidTimestamp,
    InvalidTopic,
    RecordTooLarge,
    SendCancelled,
    SerializationError,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import Headers, ProducerRecord, RecordColumns, RecordMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, ErrorCode, Fail, FakeCluster, Request
from tests.shared.clients.producer.clusters import producing, values

PATIENCE_SECONDS = 30

INVALID: dict[type[Exception], dict[str, Any]] = {
    RecordTooLarge: {"value": b"x" * 2_000_000},
    SerializationError: {"value": "text"},
    InvalidTimestamp: {"value": b"v", "timestamp": 1.5},
    DataError: {"value": b"v", "partition": -1},
    UnknownTopicOrPartition: {"value": b"v", "partition": 9},
}


async def bulk_in_a_transaction(producer: Producer, *records: Any) -> Deliveries:
    """Sends records in their own transaction."""
    async with producer.transaction():
        return await producer.send_many(records)


async def waits(tasks: list[asyncio.Future[Any]]) -> None:
    """Lets every task run several times."""
    for _ in range(20):
        await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
    assert not any(task.done() for task in tasks)


@pytest.mark.parametrize(("error", "odd"), INVALID.items())
async def test_a_rejected_send_aborts_the_transaction(error: type[Exception], odd: dict[str, Any]) -> None:
    """A caller that ignores the error cannot commit without the record. After the abort the producer continues."""
    async with producing(transactional_id="x", max_block_ms=2_000) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send("t", b"good")
        with pytest.raises(error):
            await producer.send("t", **odd)
        with pytest.raises(TransactionAborted):
            await producer.send("t", b"behind")
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send("t", b"next")
        assert values(cluster) == [b"next"]


@pytest.mark.parametrize(("error", "odd"), INVALID.items())
async def test_a_rejected_record_of_a_bulk_aborts_the_transaction(error: type[Exception], odd: dict[str, Any]) -> None:
    """The transaction is aborted, not committed without the record."""
    async with producing(transactional_id="x", max_block_ms=2_000) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        bulk = await producer.send_many(
            [ProducerRecord("t", b"a"), ProducerRecord("t", **odd), ProducerRecord("t", b"c")]
        )
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        results = await bulk
        assert isinstance(results[1], error)
        assert isinstance(results[2], TransactionAborted)
        async with producer.transaction():
            await producer.send("t", b"next")
        assert values(cluster) == [b"next"]


async def test_a_record_that_the_broker_rejects_fails_alone() -> None:
    """The other records of its batch are stored."""
    async with producing() as (cluster, producer):
        made = [ProducerRecord("t", b"%d" % i, timestamp=2**50 if i == 1 else None) for i in range(3)]
        results = await (await producer.send_many(made))
        assert [type(result) for result in results] == [RecordMetadata, InvalidTimestamp, RecordMetadata]
        assert values(cluster) == [b"0", b"2"]


async def test_every_rejected_record_of_a_bulk_has_its_own_error() -> None:
    """This holds even if an earlier record has failed the transaction. Valid records fail because they were not
    sent."""
    async with producing(transactional_id="x", max_block_ms=100, linger_ms=60_000) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        odd = {error: fields for error, fields in INVALID.items() if error is not UnknownTopicOrPartition}
        records = [ProducerRecord("t", b"a"), ProducerRecord("t", b"v", partition=9)]
        for fields in odd.values():
            records += [ProducerRecord("t", **fields), ProducerRecord("t", b"good")]
        records += [
            ProducerRecord("t", b"v", partition=9),
            ProducerRecord("no topic", b"v"),
            ProducerRecord("t", b"v", headers=[("name", 5)]),  # type: ignore[list-item]
        ]
        bulk = await producer.send_many(records)
        await producer.abort_transaction()
        expected = [TransactionAborted, UnknownTopicOrPartition]
        for error in odd:
            expected += [error, TransactionAborted]
        expected += [UnknownTopicOrPartition, InvalidTopic, SerializationError]
        assert [type(result) for result in await bulk] == expected
        assert producer.metrics()["record_error_total"] == len(records)
        assert values(cluster) == []


async def test_a_partitioner_that_raises_costs_the_transaction_and_not_the_producer() -> None:
    """An exception that is not Kafka's rejects the record too."""

    def partitioner(*_: Any) -> int | None:
        raise ZeroDivisionError

    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, ProducerSettings(transactional_id="x"), partitioner=partitioner) as producer:
            await producer.init_transactions()
            with pytest.raises(TransactionAborted, match="ZeroDivisionError"):
                await bulk_in_a_transaction(producer, ProducerRecord("t", b"v"))
            async with producer.transaction():
                await producer.send("t", b"next", partition=0)
        assert values(cluster) == [b"next"]


async def test_unknown_partitions_of_a_bulk_are_waited_for_once() -> None:
    """For any number of unknown partitions, the valid record after them waits max_block_ms once."""
    async with producing(max_block_ms=200) as (_, producer):
        numbers = [9, 9, 10, 11, 9, 12, 13, 14, 15, None]
        started = asyncio.get_running_loop().time()
        bulk = await producer.send_many([ProducerRecord("t", b"v", partition=number) for number in numbers])
        assert asyncio.get_running_loop().time() - started < 3 * 0.2
        *unknown, good = await bulk
        assert isinstance(good, RecordMetadata)
        messages = [f"topic t, partition {number}: the topic has 1 partitions" for number in numbers[:-1]]
        assert [str(error) for error in unknown] == messages


@pytest.mark.parametrize(
    "records",
    [[ProducerRecord("secret", b"v")] * 20, RecordColumns("secret", [None] * 20, [b"v"] * 20)],
    ids=["records", "columns"],
)
async def test_an_unauthorized_topic_of_a_bulk_is_asked_for_once(records: Iterable[ProducerRecord]) -> None:
    """The later records of the topic share the first record's error, without a metadata request of their own."""
    async with producing() as (cluster, producer):
        requests: list[Request] = []

        def deny(request: Request) -> Fail:
            requests.append(request)
            return Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)

        cluster.control(Api.METADATA, deny)
        results = await (await producer.send_many(records))
        assert [type(error) for error in results] == [AuthorizationFailed] * 20
        assert len(requests) == 1


@pytest.mark.parametrize("number", [99, -1])
async def test_an_invalid_choice_of_a_partitioner_is_reported(number: int) -> None:
    """The error names the chosen partition. An impossible number is rejected without a wait."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        settings = ProducerSettings(max_block_ms=50 if number == 99 else 60_000)
        async with Producer(kafka, settings, partitioner=lambda *_: number) as producer, asyncio.timeout(5):
            with pytest.raises(UnknownTopicOrPartition if number == 99 else DataError, match=f"partition {number}"):
                await producer.send("t", b"v")


@pytest.mark.parametrize("partition", [-1, "0", 1.0])
async def test_an_invalid_partition_number_is_rejected_at_once(partition: Any) -> None:
    """An invalid partition number is not waited for, and columns do not request it either."""
    async with producing() as (_, producer), asyncio.timeout(5):
        with pytest.raises(DataError, match=f"partition {partition!r}"):
            await producer.send("t", b"v", partition=partition)
        (error,) = await (await producer.send_many(RecordColumns("t", [None], [b"v"], None, partition)))
        assert isinstance(error, DataError)


async def test_close_ends_waiting_sends() -> None:
    """Waiting sends fail with a clear error at once, before batches in flight are flushed."""
    async with producing(max_block_ms=60_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Drop())
        stuck = await producer.send("t", b"stuck")
        waiting: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(call)
            for call in (
                producer.send("nope", b"v"),
                producer.send("t", b"v", partition=7),
                producer.partitions_for("nope"),
                producer.send_many([ProducerRecord("nope", b"v")]),
                producer.send_many([ProducerRecord("t", b"v", partition=8)]),
            )
        ]
        await waits(waiting)
        closing = asyncio.ensure_future(producer.close())
        async with asyncio.timeout(PATIENCE_SECONDS):
            errors = await asyncio.gather(*waiting, return_exceptions=True)
            assert not closing.done()
            await producer.close(timeout_ms=0)
        assert {type(error) for error in errors} == {IllegalState}
        assert [str(error) for error in errors] == [
            "the producer was closed while a send waited for metadata",
            "the producer was closed while a send waited for partition 7 of topic t",
            "the producer was closed while partitions_for waited for metadata",
            "the producer was closed while a send waited for metadata",
            "the producer was closed while a send waited for partition 8 of topic t",
        ]
        with pytest.raises(IllegalState):
            await stuck


async def error_of_closing(producer: Producer, records: Iterable[ProducerRecord]) -> IllegalState:
    """The error of a `send_many` that waits, and that a close ends."""
    bulk = asyncio.ensure_future(producer.send_many(records))
    await waits([bulk])
    closing = asyncio.ensure_future(producer.close())
    (error,) = await asyncio.gather(bulk, return_exceptions=True)
    await producer.close(timeout_ms=0)
    await closing
    assert isinstance(error, IllegalState)
    return error


@pytest.mark.parametrize(("topics", "maybe_written"), [(("t", "nope"), True), (("nope", "t"), False)])
async def test_a_bulk_that_close_ends_may_be_written_in_part(topics: tuple[str, str], maybe_written: bool) -> None:
    """The bulk's error has `maybe_written` only if a request contained one of its records."""
    async with producing(max_block_ms=60_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Drop())
        error = await error_of_closing(producer, [ProducerRecord(topic, b"v") for topic in topics])
    assert error.maybe_written is maybe_written


@pytest.mark.parametrize("is_held_up", [False, True])
async def test_close_ends_a_wait_for_memory(is_held_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for the wait of a partition without progress too. All memory is released."""
    async with producing(max_block_ms=60_000, buffer_memory=20_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Drop())
        await producer.send("t", b"-" * 10_000)
        monkeypatch.setattr(producer._held_up, "must_wait", lambda *_: is_held_up)
        error = await error_of_closing(producer, [ProducerRecord("t", b"-" * 10_000)])
        assert str(error) == "the producer was closed while a send waited for buffer memory"
        assert (producer._memory.available, producer._held_up.waiting) == (20_000, 0)


async def test_columns_that_wait_for_memory_are_not_written() -> None:
    """If a close ends the wait, the error says that none of them may be written."""
    async with producing(max_block_ms=60_000, buffer_memory=40_000) as (cluster, producer):
        loading = await producer.send_many(RecordColumns("t", [None], [b"v"]))  # the first columns wait for a compiler
        assert await loading.first_error() is None
        cluster.control(Api.PRODUCE, Drop())
        await producer.send_many([ProducerRecord("t", b"-" * 10_000)] * 2)  # the buffer has room for two batches
        error = await error_of_closing(producer, RecordColumns("t", [None] * 2, [b"-" * 10_000] * 2))
    assert error.maybe_written is False


async def test_a_wait_keeps_its_callers_timeout() -> None:
    """A timeout of the caller stays a timeout. A finished wait is not ended again."""
    until_closed = UntilClosed()

    async def for_ever(what: str) -> None:
        async with until_closed(what):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(for_ever("x"), 0.001)
    async with until_closed("x"):
        assert repr(until_closed) == "<UntilClosed 1 waiting>"
    assert repr(until_closed) == "<UntilClosed 0 waiting>"
    until_closed.end()
    waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(for_ever(name)) for name in ("x", "y")]
    await waits(waiting)
    until_closed.end()
    until_closed.end()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert [str(error) for error in ended] == [f"the producer was closed while {name}" for name in ("x", "y")]


async def test_a_fractional_timestamp_is_rejected_in_an_open_batch() -> None:
    """A fractional timestamp is rejected with an open batch as without one."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        await producer.send("t", b"opens")
        with pytest.raises(InvalidTimestamp):
            await producer.send("t", b"odd", timestamp=1.5)  # type: ignore[arg-type]
        await producer.flush()
        assert values(cluster) == [b"opens"]


async def sent_each_way(producer: Producer, fields: dict[str, Any]) -> list[RecordMetadata | Exception]:
    """The results of a record that is sent in each of four ways, each time with an open batch."""
    columns = [fields["key"]], [fields["value"]], None
    results: list[RecordMetadata | Exception] = []
    for partition in (None, 0):
        for bulk in ([ProducerRecord("t", **fields)], RecordColumns("t", *columns, partition)):
            await producer.send("t", b"opens", key=b"kk")
            deliveries = await producer.send_many(bulk)
            await producer.flush()
            results += await deliveries
    await producer.send("t", b"opens", key=b"kk")
    sending = asyncio.ensure_future(producer.send("t", **fields))
    await asyncio.wait([sending])
    await producer.flush()
    return [*results, sending.exception() or await (await sending)]


@pytest.mark.parametrize("odd", [np.int64(5), np.arange(2), array("q", [5])])
async def test_other_types_are_rejected_in_an_open_batch(odd: Any) -> None:
    """A key or value that is not bytes is rejected with an open batch as without one, also if it has a buffer."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        for fields in ({"key": b"kk", "value": odd}, {"key": odd, "value": b"vv"}):
            results = await sent_each_way(producer, fields)
            assert {type(result) for result in results} == {SerializationError}
        assert set(values(cluster)) == {b"opens"}


@pytest.mark.parametrize(
    "view", [memoryview(b"kakb")[::2], memoryview(bytearray(b"kk")), memoryview(b"kk"), memoryview(b"kk").cast("H")]
)
async def test_every_memoryview_is_accepted_in_an_open_batch(view: memoryview) -> None:
    """A view that is not contiguous, is writable, or has items of several bytes is sent with an open batch as without
    one. The metadata has its size in bytes."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        for fields in ({"key": b"kk", "value": view}, {"key": view, "value": b"vv"}):
            for result in await sent_each_way(producer, fields):
                assert isinstance(result, RecordMetadata), result
                assert (result.serialized_key_size, result.serialized_value_size) == (2, 2)
        assert {(record.key, record.value) for record in cluster.records("t")} == {
            (b"kk", b"opens"),
            (b"kk", b"kk"),
            (b"kk", b"vv"),
        }


async def test_rejected_records_count_as_errors() -> None:
    """Each counts once by topic and in total, whether raised or returned. A bulk logs one line."""
    registry = CollectorRegistry()
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, ProducerSettings(max_block_ms=50), registry=registry) as producer:
            for error, odd in INVALID.items():
                with pytest.raises(error):
                    await producer.send("t", **odd)
            assert producer.metrics()["record_error_total"] == len(INVALID)
            with capture_logs() as logged:
                await producer.send_many([ProducerRecord("t", **odd) for odd in INVALID.values()] * 2)
            assert producer.metrics()["record_error_total"] == 3 * len(INVALID)
            assert registry.get_sample_value("penstock_producer_record_error_total", {"topic": "t"}) == 15
    warnings = [(one["event"], one["records"]) for one in logged if one["log_level"] == "warning"]
    assert warnings == [("records rejected", 10)]


async def test_a_bulk_item_that_is_not_a_record() -> None:
    """A TypeError names the item. Earlier records are cancelled, because no caller gets their results."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        await producer.send("t", b"opens")
        for odd in (("t", b"v"), None, "t"):
            with pytest.raises(TypeError, match=f"record 2.*{type(odd).__name__}"):
                await producer.send_many([ProducerRecord("t", b"a"), ProducerRecord("t", b"b"), odd])  # type: ignore[list-item]
        await producer.flush()
        assert values(cluster) == [b"opens"]
    async with producing(transactional_id="x", max_block_ms=2_000) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        with pytest.raises(TypeError):
            await producer.send_many([ProducerRecord("t", b"a"), ("t", b"v")])  # type: ignore[list-item]
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        assert values(cluster) == []


@pytest.mark.parametrize("error", [asyncio.CancelledError, ZeroDivisionError])
async def test_a_bulk_that_ends_before_its_first_record_costs_the_transaction(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `send_many` is cancelled or raises, the transaction cannot be committed without the records."""

    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(producer_module, "loaded", fail)
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        await asyncio.wait([sending := asyncio.ensure_future(producer.send_many(RecordColumns("t", [None], [b"v"])))])
        with pytest.raises(error):
            await sending
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        assert values(cluster) == []


class Outcomes(ProducerInterceptor):
    """Records its calls."""

    def __init__(self) -> None:
        self.sent: list[Headers] = []
        self.fates: list[tuple[Exception | None, Headers]] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        self.sent.append(record.headers)
        return record

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        self.fates.append((error, headers))


async def test_a_send_cancelled_while_waiting_is_acknowledged() -> None:
    """Interceptors get the cancellation once, with the record's headers, and it counts as an error."""
    interceptor, headers = Outcomes(), (("id", b"7"),)
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, interceptors=[interceptor]) as producer:
            sending = asyncio.ensure_future(producer.send("nope", b"v", headers=headers))
            await waits([sending])
            assert (interceptor.sent, interceptor.fates) == ([headers], [])
            sending.cancel()
            await asyncio.wait([sending])
            assert sending.cancelled()
            assert [(type(error), of) for error, of in interceptor.fates] == [(SendCancelled, headers)]
            assert producer.metrics()["record_error_total"] == 1


@pytest.mark.parametrize("bulk", [False, True])
@pytest.mark.parametrize("is_created", [False, True])
async def test_a_waiting_send_is_not_continued_in_the_next_transaction(is_created: bool, bulk: bool) -> None:
    """A call that still waits when its transaction ends sends nothing in the next one, and does not fail it."""
    async with producing(transactional_id="x", max_block_ms=60_000 if is_created else 200) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        records = [ProducerRecord("new", b"of the first"), ProducerRecord("t", b"of the first")]
        sending: asyncio.Future[Any] = asyncio.ensure_future(
            producer.send_many(records) if bulk else producer.send(records[0])
        )
        await waits([sending])
        await producer.abort_transaction()
        await producer.begin_transaction()
        await producer.send("t", b"of the second")
        if is_created:
            cluster.create_topic("new")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.wait([sending])
        assert type(sending.exception()) is (IllegalState if bulk or is_created else UnknownTopicOrPartition)
        await producer.commit_transaction()
        assert values(cluster) == [b"of the second"]
        assert not is_created or cluster.records("new") == []


@pytest.mark.parametrize("timestamp", [None, 0, 2**63 - 1])
def test_timestamps(timestamp: int | None) -> None:
    """None means now. Otherwise a timestamp is a non-negative 64-bit integer."""
    check_timestamp("t", timestamp)


@pytest.mark.parametrize("timestamp", [-1, 2**63, 1.0, "1", True])
def test_odd_timestamps(timestamp: object) -> None:
    """The error shows the value."""
    with pytest.raises(InvalidTimestamp, match=f"topic t: timestamp {timestamp!r}"):
        check_timestamp("t", timestamp)


@pytest.mark.parametrize("partition", [None, 0, 2**31 - 1])
def test_partitions(partition: int | None) -> None:
    """None lets the partitioner choose. Otherwise it is a valid partition number."""
    check_partition("t", partition)


@pytest.mark.parametrize("partition", [-1, 2**31, 1.0, "0"])
def test_invalid_partitions(partition: object) -> None:
    """The error has the value, and there is no wait for the partition."""
    with pytest.raises(DataError, match=f"topic t.*{partition!r}"):
        check_partition("t", partition)


def test_headers() -> None:
    """Any sequence of pairs is accepted. Names may repeat, and a value may be None or empty."""
    given = [("a", b"1"), ["a", bytearray(b"2")], ("", None), ("ä", memoryview(b""))]
    assert checked_headers("t", iter(given)) == [("a", b"1"), ("a", b"2"), ("", None), ("ä", b"")]


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        (5, "topic t: headers .*int"),
        ({"a": b"1"}, "topic t, header 0:.*pair"),
        ([("a", b"1"), ("b",)], "topic t, header 1:.*pair"),
        ([(b"a", b"1")], "topic t, header 0: .*name.*got bytes"),
        ([("a", "1")], "topic t, header 0 'a': .*got str"),
        ([("a", 1)], "topic t, header 0 'a': .*got int"),
        ([("\ud800", b"1")], "topic t, header 0: .*name.*UTF-8"),
    ],
)
def test_invalid_headers(headers: Any, named: str) -> None:
    """The error names the header and its value."""
    with pytest.raises(SerializationError, match=named):
        checked_headers("t", headers)


def test_serializer_results() -> None:
    """A serializer returns bytes or None."""
    assert serialized("t", "key", lambda _, data: data, None) is None
    assert serialized("t", "key", lambda _, data: data, b"k") == b"k"
    with pytest.raises(SerializationError, match=r"topic t.*key.*str"):
        serialized("t", "key", lambda _, data: data, "k")


@pytest.mark.parametrize("limit", ["max_request_size", "buffer_memory"])
def test_the_limit_is_named(limit: str) -> None:
    """A record's size includes its headers and the batch header. The smaller setting is the limit."""
    settings = ProducerSettings.model_validate({limit: 200})
    assert 100 < checked_size("t", b"k", b"v" * 50, [("h", b"x")], settings) <= 200
    with pytest.raises(RecordTooLarge, match=rf"topic t.*{limit}=200"):
        checked_size("t", b"k", b"v" * 50, [("h", b"x" * 100)], settings)


class Callbacks:
    def plain(self, *_: object) -> None: ...

    async def waiting(self, *_: object) -> None: ...


async def waiting(*_: object) -> None: ...


@pytest.mark.parametrize("callback", [None, print, len, Callbacks().plain, lambda *_: None, partial(print, "x")])
def test_callable_callbacks(callback: Any) -> None:
    """Functions, methods, builtins and partials are accepted."""
    check_callback(callback)


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (5, "a int"),
        ("print", "a str"),
        (waiting, "a coroutine function"),
        (Callbacks().waiting, "a coroutine function"),
        (partial(waiting, 1), "a coroutine function"),
    ],
)
def test_invalid_callbacks(callback: Any, what: str) -> None:
    """A coroutine function is rejected, because its coroutine would never be awaited."""
    with pytest.raises(TypeError, match=f"on_delivery.*{what}"):
        check_callback(callback)
