"""`send_many` with columns, through kernels and aiokafka's builder, under one contract.

Many record objects of one topic become columns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.shared.clients.interceptors import ProducerInterceptor
from penstock.shared.clients.producer import Producer, ProducerSettings, bulk_append, column_slices
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common import kernel_loading
from penstock.shared.common.errors import (
    BufferExhausted,
    IllegalState,
    InvalidTimestamp,
    RecordTooLarge,
    SendCancelled,
    SerializationError,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import HeaderColumn, Headers, ProducerRecord, RecordColumns, RecordMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.shared.clients.producer.clusters import producing as producing_one

PARTITIONS = 3

FORMS = [pytest.param(lambda columns: columns, id="columns"), pytest.param(list, id="objects")]
"""The forms in which `send_many` takes the records of columns."""


@pytest.fixture(params=["kernels", "aiokafka"], autouse=True)
def encoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the record encoder. A slice of seven records tests the slice boundaries, and two records are many."""
    name: str = request.param
    if name == "aiokafka":
        monkeypatch.setattr(kernel_loading, "IS_COMPILED", False)
    monkeypatch.setattr(column_slices, "SLICE_RECORDS", 7)
    monkeypatch.setattr(bulk_append, "COLUMNS_MIN", 2)
    return name


@asynccontextmanager
async def producing(partitions: int = PARTITIONS, **settings: object) -> AsyncIterator[tuple[FakeCluster, Producer]]:
    """A producer that has the topic's metadata."""
    async with producing_one(1, partitions, **settings) as (cluster, producer):
        await producer.partitions_for("t")
        yield cluster, producer


def stored(cluster: FakeCluster) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Return each record by partition and offset."""
    return {(r.partition, r.offset): (r.key, r.value, r.timestamp, tuple(r.headers)) for r in cluster.records("t")}


def values(cluster: FakeCluster, partition: int | None = None) -> list[bytes | None]:
    return [record.value for record in cluster.records("t", partition)]


def some(count: int, seed: int = 1) -> tuple[list[bytes | None], list[bytes | None], list[int], list[Headers]]:
    """Keys, values, timestamps and headers with nulls, empty values and decreasing timestamps."""
    rng = random.Random(seed)
    keys = [rng.choice([None, b"", b"k%d" % rng.randrange(9)]) for _ in range(count)]
    return (
        keys,
        [rng.choice([None, b"v%d" % i, b"x" * rng.randrange(90)]) for i in range(count)],
        [1_000 + rng.randrange(50) for _ in range(count)],
        [rng.choice([(), (("näme", None), ("", b"%d" % i)), (("n", b"x" * 70),)]) for i in range(count)],
    )


@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("form", ["lists", "lists with headers", "arrays", "objects"])
async def test_each_record_is_at_the_offset_of_its_result(form: str, compression: str) -> None:
    """Through many slices and batches: key, value and time are stored, each key's records in order in its partition."""
    keys, of_values, times, headers = some(200)
    columns = RecordColumns("t", keys, of_values, times)
    if form in {"lists with headers", "objects"}:
        columns = replace(columns, headers=headers)
    else:
        headers = [()] * 200
    if form == "arrays":
        columns = RecordColumns("t", PackedBytes.of(keys), PackedBytes.of(of_values), np.array(times, np.int64))
    async with producing(batch_size=300, compression_type=compression) as (cluster, producer):
        deliveries = await producer.send_many(list(columns) if form == "objects" else columns)
        results = await deliveries
        at = [(r.partition, r.offset) for r in results if isinstance(r, RecordMetadata)]
        found = stored(cluster)
        assert [found[index] for index in at] == list(zip(keys, of_values, times, headers, strict=True))
        assert len(set(at)) == len(found) == 200
        for key, (partition, _) in zip(keys, at, strict=True):
            assert key is None or partition == for_key(key, PARTITIONS)
        for number in range(PARTITIONS):
            offsets = [offset for partition, offset in at if partition == number]
            assert offsets == sorted(offsets)
        sizes = [(r.serialized_key_size, r.serialized_value_size) for r in results if isinstance(r, RecordMetadata)]
        assert sizes == [tuple(-1 if s is None else len(s) for s in pair) for pair in zip(keys, of_values, strict=True)]
        assert deliveries.last() == results[-1]
        assert await deliveries.first_error() is None
        assert deliveries.done()
        assert producer.metrics()["record_send_total"] == 200
        assert (producer._slices is None) == (not kernel_loading.IS_COMPILED)


@pytest.mark.parametrize("partition", [0, 2])
async def test_an_explicit_partition(partition: int) -> None:
    """All records go to it in order, with the time of the bulk if they have none."""
    async with producing(batch_size=300) as (cluster, producer):
        columns = RecordColumns("t", PackedBytes.of([b"a"] * 50), [b"%d" % i for i in range(50)], None, partition)
        results = await (await producer.send_many(columns))
        assert values(cluster, partition) == [b"%d" % i for i in range(50)]
        times = {record.timestamp for record in cluster.records("t")}
        assert {result.timestamp for result in results if isinstance(result, RecordMetadata)} == times
        assert len(times) == 1


async def test_records_without_a_key_fill_batches() -> None:
    """Records without a key fill a batch of one partition, then continue with another."""
    async with producing(batch_size=1_000, linger_ms=50) as (cluster, producer):
        columns = RecordColumns("t", [None] * 60, [b"x" * 90] * 60)
        for _ in range(5):
            assert await (await producer.send_many(columns)).first_error() is None
        assert len(values(cluster)) == 300
        assert producer.metrics()["batch_size_avg"] > 600
        assert len({record.partition for record in cluster.records("t")}) > 1


async def test_order_with_single_records() -> None:
    """Single records sent before and after columns keep their order."""
    async with producing(1, linger_ms=20) as (cluster, producer):
        for i in range(5):
            await producer.send("t", b"%d alone" % i, key=b"k")
            await producer.send_many(RecordColumns("t", [b"k"] * 9, [b"%d in columns" % i] * 9))
            await producer.send_many([ProducerRecord("t", b"%d in objects" % i)])
        await producer.flush()
        expected = [[b"%d alone" % i, *[b"%d in columns" % i] * 9, b"%d in objects" % i] for i in range(5)]
        assert values(cluster) == [value for group in expected for value in group]


async def test_small_bulks_share_batches() -> None:
    """A small bulk continues in the batch of the previous one."""
    async with producing(1, linger_ms=60_000) as (cluster, producer):
        for i in range(30):
            await producer.send_many(RecordColumns("t", [b"k"] * 2, [b"%d" % i] * 2))
        await producer.flush()
        assert values(cluster) == [b"%d" % (i // 2) for i in range(60)]
        assert producer.metrics()["batch_total"] == 1


ODD: list[tuple[type[Exception], tuple[Any, Any, Any]]] = [
    (SerializationError, (b"k", "text", 5)),
    (SerializationError, ("text", b"v", 5)),
    (SerializationError, (b"k", [b"v"], 5)),
    (InvalidTimestamp, (b"k", b"v", -1)),
    (InvalidTimestamp, (b"k", b"v", 1.5)),
    (InvalidTimestamp, (b"k", b"v", True)),
    (InvalidTimestamp, (b"k", b"v", 2**63)),
    (RecordTooLarge, (b"k", b"x" * 3_000, 5)),
    (RecordTooLarge, (b"x" * 3_000, None, 5)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("error", "odd"), ODD)
async def test_an_invalid_record_has_its_own_result(error: type[Exception], odd: tuple[Any, ...], form: Any) -> None:
    """An invalid record fails alone. All others are sent in order."""
    for at in (0, 4, 11):
        rows: list[tuple[Any, Any, Any]] = [(b"k", b"%d" % i, 5) for i in range(12)]
        rows[at] = odd
        keys, of_values, times = (list(column) for column in zip(*rows, strict=True))
        async with producing(1, max_request_size=2_000) as (cluster, producer):
            deliveries = await producer.send_many(form(RecordColumns("t", keys, of_values, times)))
            results = await deliveries
            assert [type(result) for result in results] == [
                error if i == at else RecordMetadata for i in range(len(rows))
            ]
            assert values(cluster) == [b"%d" % i for i in range(12) if i != at]
            assert await deliveries.first_error() is results[at]
            assert producer.metrics()["record_error_total"] == 1


async def test_headers_of_consumed_columns_are_accepted() -> None:
    """Headers of consumed columns and every form of single records' headers are accepted."""
    own: list[Any] = [
        [("trace", b"a"), ("trace", None)],
        {"n": bytearray(b"1")},
        (),
        {},
        None,
        (["é", memoryview(b"x")],),
    ]
    expected: list[Headers] = [(("trace", b"a"), ("trace", None)), (("n", b"1"),), (), (), (), (("é", b"x"),)]
    async with producing(1) as (cluster, producer):
        for headers in (own, own[:4], PackedHeaders.of(expected), HeaderColumn(expected)):
            count = len(headers)
            columns = RecordColumns("t", [None] * count, [b"v"] * count, None, 0, headers)
            assert await (await producer.send_many(columns)).first_error() is None
        found = [tuple(record.headers) for record in cluster.records("t")]
        assert found == [*expected, *expected[:4], *expected, *expected]


WRONG_HEADERS: list[Any] = [5, "text", [("n", "text")], [("n",)], [(b"n", b"")], {"n": 5}, [("\ud800", b"")]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("wrong", [*WRONG_HEADERS, [("n", b"x" * 3_000)]])
async def test_wrong_headers_have_the_errors_of_single_records(wrong: Any, form: Any) -> None:
    """A record with invalid headers gets the error that `send` raises. All other records are sent in order."""
    async with producing(1, max_request_size=2_000) as (cluster, producer):
        columns = RecordColumns("t", [b"k"] * 12, [b"%d" % i for i in range(12)], headers=[()] * 9 + [wrong] + [()] * 2)
        results = await (await producer.send_many(form(columns)))
        with pytest.raises(type(results[9]) if isinstance(results[9], Exception) else AssertionError) as alone:
            await producer.send("t", b"9", key=b"k", headers=wrong)
        assert isinstance(alone.value, SerializationError | RecordTooLarge)
        assert str(alone.value) == str(results[9])
        assert values(cluster) == [b"%d" % i for i in range(12) if i != 9]


async def test_wrong_times_in_an_array() -> None:
    """Each invalid timestamp of an array fails its own record. In an array of floats, all are invalid."""
    async with producing(1) as (cluster, producer):
        for times in (np.array([5, -5, 5]), np.array([5.0, 5.5, 6.0])):
            results = await (await producer.send_many(RecordColumns("t", [None] * 3, [b"a", b"b", b"c"], times)))
            wrong = [isinstance(result, InvalidTimestamp) for result in results]
            assert wrong == ([False, True, False] if times.dtype == np.int64 else [True] * 3)
        assert values(cluster) == [b"a", b"c"]


async def test_an_unknown_partition_or_topic() -> None:
    """Every record gets the error after one wait."""
    async with producing(max_block_ms=100) as (_, producer):
        started = asyncio.get_running_loop().time()
        for topic, partition in (("t", 9), ("nope", None)):
            results = await (await producer.send_many(RecordColumns(topic, [b"k"] * 20, [b"v"] * 20, None, partition)))
            assert {type(result) for result in results} == {UnknownTopicOrPartition}
        assert asyncio.get_running_loop().time() - started < 5
        assert producer.metrics()["record_error_total"] == 40


@pytest.mark.parametrize("form", FORMS)
async def test_a_topic_that_is_not_known_yet(form: Any) -> None:
    """The first bulk waits for the topic and is sent in order."""
    async with producing_one(1, 1) as (cluster, producer):
        bulk = form(RecordColumns("t", [b"k"] * 20, [b"%d" % i for i in range(20)]))
        assert await (await producer.send_many(bulk)).first_error() is None
        assert values(cluster) == [b"%d" % i for i in range(20)]


async def test_a_full_buffer_ends_what_follows() -> None:
    """Accepted records are sent. The rest fails with BufferExhausted at once and is counted, and all memory is
    released."""
    async with producing(1, buffer_memory=2_000, batch_size=1_000, max_block_ms=50) as (cluster, producer):
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        control = cluster.control(Api.PRODUCE, hold)
        started = asyncio.get_running_loop().time()
        deliveries = await producer.send_many(RecordColumns("t", [b"k"] * 100, [b"x" * 300] * 100))
        assert asyncio.get_running_loop().time() - started < 5
        gate.set()
        control.remove()
        results = await deliveries
        taken = sum(isinstance(result, RecordMetadata) for result in results)
        assert 0 < taken < 10
        assert [type(result) for result in results] == [RecordMetadata] * taken + [BufferExhausted] * (100 - taken)
        assert isinstance(deliveries.last(), BufferExhausted)
        figures = producer.metrics()
        assert figures["buffer_exhausted_total"] == figures["record_error_total"] == 100 - taken
        assert figures["buffer_available_bytes"] == 2_000
        assert await (await producer.send_many(RecordColumns("t", [b"k"], [b"again"]))).first_error() is None
        assert len(values(cluster)) == taken + 1


async def test_a_bulk_larger_than_the_buffer_waits() -> None:
    """It is sent as memory is released."""
    async with producing(buffer_memory=4_000, batch_size=1_000) as (cluster, producer):
        keys = [b"k%d" % (i % 7) for i in range(200)]
        assert (
            await (
                await producer.send_many(RecordColumns("t", keys, [b"%d" % i + b"x" * 99 for i in range(200)]))
            ).first_error()
            is None
        )
        assert len(values(cluster)) == 200


async def test_a_cancelled_bulk_is_cancelled_records(encoder: str) -> None:
    """Unsent records are not sent, whether the bulk is cancelled during the wait for memory or later."""
    async with producing(1, buffer_memory=2_000, batch_size=1_000) as (cluster, producer):
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        control = cluster.control(Api.PRODUCE, hold)
        first = await producer.send("t", b"first")
        bulk = asyncio.ensure_future(producer.send_many(RecordColumns("t", [b"k"] * 50, [b"x" * 300] * 50)))
        while not producer.metrics()["buffer_waiting"]:
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
        bulk.cancel()
        await asyncio.gather(bulk, return_exceptions=True)
        gate.set()
        control.remove()
        await first
        await producer.flush()
        assert len(values(cluster)) < 5
        assert producer.metrics()["buffer_available_bytes"] == 2_000
        # A slice has 7 records, and 3 of them fit into a batch. Without the kernels one record waits.
        assert producer.metrics()["record_error_total"] == (4 if encoder == "kernels" else 1)
    async with producing(1, linger_ms=60_000) as (cluster, producer):
        deliveries = await producer.send_many(RecordColumns("t", [b"k"] * 20, [b"%d" % i for i in range(20)]))
        await producer.send("t", b"another's", key=b"k")
        assert deliveries.cancel() == 20
        await producer.flush()
        assert {type(result) for result in await deliveries} == {SendCancelled}
        assert values(cluster) == [b"another's"]


async def test_one_of_many_batches_fails() -> None:
    """Its records get its error, the others their metadata."""
    async with producing() as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(ErrorCode.INVALID_RECORD, partitions={("t", 1)}))
        keys = [b"k%d" % i for i in range(40)]
        deliveries = await producer.send_many(RecordColumns("t", keys, keys))
        results = await deliveries
        failed = [for_key(key, PARTITIONS) == 1 for key in keys]
        assert [not isinstance(result, RecordMetadata) for result in results] == failed
        assert any(failed)
        assert await deliveries.first_error() is results[failed.index(True)]


async def test_a_retry_and_a_split() -> None:
    """A rejected batch is retried, and one that is too large is split."""
    async with producing(1, batch_size=4_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS), times=1)
        cluster.control(Api.PRODUCE, Fail(ErrorCode.MESSAGE_TOO_LARGE), times=2)
        of_values = [b"%d" % i for i in range(60)]
        results = await (await producer.send_many(RecordColumns("t", [b"k"] * 60, of_values)))
        assert [result.offset for result in results if isinstance(result, RecordMetadata)] == list(range(60))
        assert values(cluster) == of_values
        assert producer.metrics()["batch_split_total"] > 0


async def test_in_transactions() -> None:
    """A commit shows all records of a bulk, an abort none. A rejected record prevents the commit."""
    async with producing(transactional_id="x", batch_size=300) as (cluster, producer):
        await producer.init_transactions()
        keys = [b"k%d" % i for i in range(50)]
        async with producer.transaction():
            await producer.send_many(RecordColumns("t", PackedBytes.of(keys), PackedBytes.of(keys)))
        assert sorted(str(value) for value in values(cluster)) == sorted(str(key) for key in keys)
        await producer.begin_transaction()
        await producer.send_many(RecordColumns("t", keys, [b"aborted"] * 50))
        await producer.abort_transaction()
        await producer.begin_transaction()
        wrong: list[Any] = [b"v"] * 10
        wrong[3] = "text"
        bulk = await producer.send_many(RecordColumns("t", keys[:10], wrong))
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert [type(result) for result in await bulk][3:] == [SerializationError, *[TransactionAborted] * 6]
        assert len(values(cluster)) == 50
        with pytest.raises(IllegalState):
            await producer.send_many(RecordColumns("t", keys, keys))


async def test_a_full_buffer_aborts_the_transaction() -> None:
    """A commit would omit the records that were not accepted."""
    async with producing(1, transactional_id="x", buffer_memory=2_000, batch_size=1_000, max_block_ms=1_000) as (
        cluster,
        producer,
    ):
        await producer.init_transactions()
        await producer.begin_transaction()
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        control = cluster.control(Api.PRODUCE, hold)
        bulk = await producer.send_many(RecordColumns("t", [b"k"] * 20, [b"x" * 300] * 20))
        gate.set()
        control.remove()
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert isinstance((await bulk)[-1], BufferExhausted)
        assert values(cluster) == []


async def test_closed_while_it_waits_for_memory() -> None:
    """The bulk raises IllegalState, and accepted records are still sent."""
    async with producing(1, buffer_memory=2_000, batch_size=1_000) as (cluster, producer):
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        cluster.control(Api.PRODUCE, hold)
        bulk = asyncio.ensure_future(producer.send_many(RecordColumns("t", [b"k"] * 50, [b"x" * 300] * 50)))
        while not producer.metrics()["buffer_waiting"]:
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
        closing = asyncio.ensure_future(producer.close())
        with pytest.raises(IllegalState):
            await bulk
        gate.set()
        await closing


class Upper(ProducerInterceptor):
    """Changes every value."""

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        return ProducerRecord(record.topic, record.value.upper(), record.key)


@pytest.mark.parametrize("form", FORMS)
async def test_user_hooks_are_called_for_each_record(form: Any) -> None:
    """Interceptors, serializers and partitioners are called for each record of columns."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t", 2)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        columns = RecordColumns("t", [b"k"] * 10, [b"v"] * 10)
        ways: list[dict[str, Any]] = [
            {"interceptors": [Upper()]},
            {"value_serializer": lambda _, value: value.upper()},
            {"partitioner": lambda *_: 1},
        ]
        for way in ways:
            async with Producer(kafka, ProducerSettings(linger_ms=0), **way) as producer:
                assert await (await producer.send_many(form(columns))).first_error() is None
        assert [record.value for record in cluster.records("t")].count(b"V") == 20
        assert len(cluster.records("t", 1)) >= 10


@pytest.mark.parametrize("empty", [[], RecordColumns("t", [], [])], ids=["records", "columns"])
async def test_a_bulk_without_records(empty: list[ProducerRecord] | RecordColumns) -> None:
    """It is done at once, and has no last record."""
    async with producing() as (_, producer):
        deliveries = await producer.send_many(empty)
        assert (len(deliveries), deliveries.done(), await deliveries) == (0, True, [])
        with pytest.raises(IndexError):
            deliveries.last()
