"""Producer calls that are rejected or cancelled, against an in-process broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.shared.clients.interceptors import ProducerInterceptor
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    IllegalState,
    InvalidTimestamp,
    InvalidTopic,
    PenstockError,
    SendCancelled,
    SerializationError,
    TransactionAborted,
)
from penstock.shared.common.records import ProducerRecord, RecordMetadata, TopicPartition
from penstock.shared.common.serialization import json_serializer, long_serializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, ErrorCode, Fail, FakeCluster
from tests.shared.clients.producer.clusters import values


@asynccontextmanager
async def producing(
    cluster: FakeCluster, *, interceptors: tuple[ProducerInterceptor, ...] = (), **settings: Any
) -> AsyncIterator[Producer]:
    """A producer for the topic `t` with one partition."""
    cluster.create_topic("t", partitions=1)
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=1_000)
    given = ProducerSettings(linger_ms=0, delivery_timeout_ms=5_000, **settings)
    async with Producer(kafka, given, interceptors=interceptors) as producer:
        yield producer


@pytest.mark.parametrize("timestamp", [-1, 2**63, 1.5, "now"])
async def test_an_invalid_timestamp_leaves_nothing_behind(timestamp: Any) -> None:
    """An invalid timestamp is rejected before anything is enqueued. The partition's next record is sent."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        with pytest.raises(InvalidTimestamp):
            await producer.send("t", b"odd", timestamp=timestamp)
        async with asyncio.timeout(5):
            await (await producer.send("t", b"good"))
        assert values(cluster) == [b"good"]
        assert producer.metrics()["buffer_available_bytes"] == ProducerSettings().buffer_memory


@pytest.mark.parametrize(
    "odd", [{"headers": [("a", "text")]}, {"headers": {"a": "text"}}, {"key": 5}, {"value": "text"}]
)
async def test_an_invalid_record_leaves_nothing_behind(odd: dict[str, Any]) -> None:
    """A SerializationError states the reason, in a bulk as the record's result. The other records are sent."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        with pytest.raises(SerializationError):
            await producer.send("t", **{"value": b"odd", **odd})
        bulk = [ProducerRecord("t", b"1"), ProducerRecord("t", **{"value": b"odd", **odd}), ProducerRecord("t", b"2")]
        async with asyncio.timeout(5):
            first, second, third = await (await producer.send_many(bulk))
        assert isinstance(second, SerializationError)
        assert isinstance(first, RecordMetadata)
        assert isinstance(third, RecordMetadata)
        assert values(cluster) == [b"1", b"2"]
        assert producer.metrics()["buffer_available_bytes"] == ProducerSettings().buffer_memory


@pytest.mark.parametrize("interceptors", [(), (ProducerInterceptor(),)])
@pytest.mark.parametrize("warm", [False, True])
async def test_an_invalid_callback_leaves_nothing_behind(
    warm: bool, interceptors: tuple[ProducerInterceptor, ...]
) -> None:
    """A callback that is not callable is rejected, also with an open batch, and nothing is enqueued."""

    async def waiting(*_: object) -> None: ...

    async with FakeCluster() as cluster, producing(cluster, interceptors=interceptors) as producer:
        if warm:
            await (await producer.send("t", b"good"))
        before = await producer.send("t", b"good")
        for odd in (waiting, 5):
            with pytest.raises(TypeError, match="on_delivery"):
                await producer.send("t", b"odd", on_delivery=odd)  # type: ignore[arg-type]
        await before
        assert set(values(cluster)) == {b"good"}
        assert producer.metrics()["record_error_total"] == 2


async def test_a_transaction_with_dropped_records_cannot_be_committed() -> None:
    """A transaction with dropped records cannot be committed."""
    async with FakeCluster() as cluster, producing(cluster, transactional_id="x") as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        cluster.control(Api.PRODUCE, Drop(handled=True), times=1)
        delivery = await producer.send("t", b"lost response")
        await asyncio.sleep(0)
        while not producer.abort_pending():
            await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
        with pytest.raises((SendCancelled, TransactionAborted)):
            await delivery
        with pytest.raises(TransactionAborted):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send("t", b"after")
        assert values(cluster) == [b"after"]


async def test_a_commit_cancelled_before_its_request_is_aborted() -> None:
    """The transaction is aborted, and the producer can begin the next one."""
    async with FakeCluster() as cluster, producing(cluster, transactional_id="x") as producer:
        await producer.init_transactions()
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        control = cluster.control(Api.PRODUCE, hold)
        committing = asyncio.Event()

        async def work() -> None:
            async with producer.transaction():
                await producer.send("t", b"cancelled")
                committing.set()

        task = asyncio.ensure_future(work())
        await committing.wait()
        await asyncio.sleep(0)
        task.cancel()
        gate.set()
        control.remove()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        async with producer.transaction():
            await producer.send("t", b"next")
        assert values(cluster) == [b"next"]


async def test_a_bulk_that_is_cancelled_is_cancelled_records() -> None:
    """Unsent records of a cancelled bulk are not sent, because no caller would get their results."""
    async with FakeCluster() as cluster, producing(cluster, buffer_memory=2_000, batch_size=1_000) as producer:
        gate = asyncio.Event()

        async def hold(_: Any) -> None:
            await gate.wait()

        control = cluster.control(Api.PRODUCE, hold)
        first = await producer.send("t", b"first")
        records = [ProducerRecord("t", b"x" * 300) for _ in range(50)]
        bulk = asyncio.ensure_future(producer.send_many(records))
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


async def test_a_partitioner_that_raises_is_that_records_result() -> None:
    """Its error is the record's result. The other records of the bulk are sent."""

    def partitioner(topic: str, key: bytes | None, value: bytes | None, partitions: Any) -> int | None:
        if value == b"bad":
            raise ValueError("no partition for it")
        return None

    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, partitioner=partitioner) as producer:
            bulk = [ProducerRecord("t", value) for value in (b"a", b"bad", b"c")]
            results = await (await producer.send_many(bulk))
        assert [type(result) for result in results] == [RecordMetadata, ValueError, RecordMetadata]


async def test_closed_while_a_send_waits_for_metadata() -> None:
    """The waiting send and every later call raise IllegalState."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        waiting = asyncio.ensure_future(producer.send("not-there", b"v"))
        await asyncio.sleep(0)
        await producer.close()
        with pytest.raises(IllegalState):
            await waiting
        with pytest.raises(IllegalState):
            await producer.send("t", b"v")


async def test_abort_pending_belongs_to_the_producers_event_loop() -> None:
    """In another thread it drops nothing."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        with pytest.raises(IllegalState):
            await asyncio.to_thread(producer.abort_pending)


async def test_send_and_wait_returns_the_metadata() -> None:
    """It returns the record's metadata, or raises its error."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        assert (await producer.send_and_wait("t", b"1", key=b"k", timestamp=7)).offset == 0
        assert (await producer.send_and_wait(ProducerRecord("t", b"2"))).offset == 1
        assert values(cluster) == [b"1", b"2"]
        cluster.control(Api.PRODUCE, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
        with pytest.raises(AuthorizationFailed):
            await producer.send_and_wait("t", b"3")


async def test_send_accepts_a_complete_record() -> None:
    """A record has key, headers, partition and timestamp, and need not be hashable. The callback is a separate
    argument."""
    delivered: list[RecordMetadata | None] = []
    async with FakeCluster() as cluster, producing(cluster) as producer:
        first = await producer.send(ProducerRecord("t", b"1"))
        whole = ProducerRecord("t", bytearray(b"2"), b"k", (("h", b"1"),), 0, 7)
        second = await producer.send(whole, on_delivery=lambda metadata, _: delivered.append(metadata))
        await first
        assert delivered == [await second]
        (_, stored) = cluster.records("t")
        assert (stored.key, stored.value, stored.headers, stored.timestamp) == (b"k", b"2", (("h", b"1"),), 7)


async def test_headers_are_pairs_or_a_dict() -> None:
    """Headers are accepted in `send`, in records and in bulks. Interceptors always get pairs, also for None, the
    default of other clients."""
    seen: list[object] = []

    class Watch(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            seen.append(record.headers)
            return record

        def on_acknowledgement(self, metadata: object, error: object, headers: object) -> None:
            seen.append(headers)

    for interceptors in ((), (Watch(), Watch())):
        async with FakeCluster() as cluster, producing(cluster, interceptors=interceptors) as producer:
            await producer.send("t", b"1", headers={"a": b"1", "b": None})
            await producer.send(ProducerRecord("t", b"2", headers={"a": b"1", "b": None}))
            await (await producer.send_many([ProducerRecord("t", b"3", headers={"a": b"1", "b": None})]))
            await producer.send_and_wait("t", b"4", headers={})
            await producer.send_and_wait("t", b"5", headers=None)  # type: ignore[call-overload]
            headers = [record.headers for record in cluster.records("t")]
            assert headers == [(("a", b"1"), ("b", None))] * 3 + [()] * 2
    assert len(seen) == 20
    assert set(seen) == {(("a", b"1"), ("b", None)), ()}


async def test_a_bulk_of_serialized_records() -> None:
    """`send_many` takes what the serializers and the interceptors take. The metadata has the serialized sizes, and the
    timestamp that an interceptor has set."""

    class Stamp(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return replace(record, timestamp=42)

    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        serializers: Any = {"key_serializer": long_serializer, "value_serializer": json_serializer}
        async with Producer(cluster.bootstrap_servers, interceptors=[Stamp()], **serializers) as producer:
            records = [ProducerRecord("t", value, 6) for value in (5, 1.5, True, None, {"a": 1})]
            results = await (await producer.send_many(records))
        assert [result.timestamp for result in results if isinstance(result, RecordMetadata)] == [42] * len(records)
        sizes = [(r.serialized_key_size, r.serialized_value_size) for r in results if isinstance(r, RecordMetadata)]
        assert sizes == [(8, -1 if value is None else len(value)) for value in values(cluster)]


class Broken(Exception):
    """An exception of a user's serializer."""


@pytest.mark.parametrize("way", ["send", "send_many"])
@pytest.mark.parametrize("of", ["key", "value"])
async def test_a_serializer_exception_is_a_serialization_error(way: str, of: str) -> None:
    """The error names the topic and has the exception as its cause. Penstock's own errors are not wrapped."""

    def serializer(topic: str, value: Any) -> bytes:
        if value == b"later":
            raise BrokerNotAvailable("registry")
        raise Broken("no such field")

    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        serializers: Any = {f"{of}_serializer": serializer}
        async with Producer(cluster.bootstrap_servers, **serializers) as producer:

            async def error_of(data: bytes) -> BaseException:
                record = ProducerRecord("t", data, data)
                if way == "send_many":
                    (error,) = await (await producer.send_many([record]))
                    assert isinstance(error, Exception)
                    return error
                with pytest.raises(PenstockError) as raised:
                    await producer.send(record)
                return raised.value

            error = await error_of(b"odd")
            assert isinstance(error, SerializationError)
            assert isinstance(error.__cause__, Broken)
            assert str(error) == f"topic t: the {of}'s serializer raised Broken('no such field')"
            assert isinstance(await error_of(b"later"), BrokerNotAvailable)


async def test_send_takes_a_record_or_its_parts() -> None:
    """Both together are rejected, and so is a topic without a value. A tombstone needs an explicit None."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        send: Any = producer.send
        for arguments, more in ((("t",), {}), ((ProducerRecord("t", b"1"), b"2"), {})):
            with pytest.raises(TypeError, match="ProducerRecord"):
                await send(*arguments, **more)
        for more in ({"key": b"k"}, {"headers": (("h", b"1"),)}, {"partition": 0}, {"timestamp": 7}):
            with pytest.raises(TypeError, match="ProducerRecord"):
                await send(ProducerRecord("t", b"1"), **more)
        await producer.send_and_wait("t", None)
        assert values(cluster) == [None]


async def test_deliveries_can_be_awaited_like_futures() -> None:
    """asyncio.wait, gather and as_completed accept deliveries, which have their records' results."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        sent = [await producer.send("t", b"%d" % number) for number in range(3)]
        done, pending = await asyncio.wait(sent, timeout=5)
        assert (done, pending) == (set(sent), set())
        assert [delivery.result().offset for delivery in sent] == [0, 1, 2]
        assert [metadata.offset for metadata in await asyncio.gather(*sent)] == [0, 1, 2]
        again = await producer.send("t", b"3")
        assert [(await each).offset for each in asyncio.as_completed([again])] == [3]


@pytest.mark.parametrize("topic", ["bad name!", "", ".", "..", "x" * 250, None])
async def test_an_invalid_topic_name_is_rejected(topic: Any) -> None:
    """An invalid topic name is rejected at once."""
    async with FakeCluster() as cluster, producing(cluster) as producer:
        async with asyncio.timeout(1):
            with pytest.raises(InvalidTopic):
                await producer.send(topic, b"v")
            (result,) = await (await producer.send_many([ProducerRecord(topic, b"v")]))
            assert isinstance(result, InvalidTopic)
            with pytest.raises(InvalidTopic):
                await producer.partitions_for(topic)


async def fail_two(cluster: FakeCluster) -> None:
    """Rejects two of four partitions repeatedly."""
    partitions = [TopicPartition("u", 0), TopicPartition("u", 1)]
    cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS, partitions=partitions))


async def stop_a_node(cluster: FakeCluster) -> None:
    """Stops the node of two of four partitions, which then have no leader."""
    await cluster.stop_node(cluster.leader("u", 0))


async def pause_a_node(cluster: FakeCluster) -> None:
    """Makes the node of two of four partitions accept requests without responding."""
    cluster.pause_node(cluster.leader("u", 0))


@pytest.mark.parametrize("fault", [fail_two, stop_a_node, pause_a_node])
async def test_stuck_partitions_do_not_block_others(fault: Callable[[FakeCluster], Awaitable[None]]) -> None:
    """Two of four partitions that fill their share leave half of the buffer to the others, which continue."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("u", partitions=4, replication_factor=1)
        bad = [p for p in range(4) if cluster.leader("u", p) == cluster.leader("u", 0)]
        bad = [0, 1] if fault is fail_two else bad
        good = [p for p in range(4) if p not in bad]
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        settings = ProducerSettings(linger_ms=0, batch_size=1_000, buffer_memory=40_000)
        producer = Producer(kafka, settings)
        await producer.start()
        for partition in range(4):
            await (await producer.send("u", b"first", partition=partition))
        await fault(cluster)

        async def flood(partition: int) -> None:
            while True:
                await producer.send("u", b"x" * 900, partition=partition)

        floods = [asyncio.ensure_future(flood(partition)) for partition in bad for _ in range(3)]
        try:
            async with asyncio.timeout(20):
                while producer.metrics()["buffer_waiting"] < len(floods):
                    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
                for number in range(200):
                    for partition in good:
                        delivery = await producer.send("u", b"%d" % number + b"x" * 900, partition=partition)
                await delivery
                await producer.close(timeout_ms=0)
        finally:
            for task in floods:
                task.cancel()
            ended = await asyncio.gather(*floods, return_exceptions=True)
        assert all(isinstance(error, IllegalState) for error in ended)
        for partition in good:
            values = [record.value for record in cluster.records("u", partition)][1:]
            assert [int((value or b"").partition(b"x")[0]) for value in values] == list(range(200))
