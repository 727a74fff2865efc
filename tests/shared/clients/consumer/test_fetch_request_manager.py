"""Reading from a cluster with faults: every record is returned once and in order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, MutableMapping
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import AuthorizationFailed, BrokerNotAvailable, CorruptRecord, PenstockError
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import (
    Action,
    Api,
    Close,
    Drop,
    ErrorCode,
    Fail,
    FakeCluster,
    Message,
    Request,
    Respond,
)

TOPIC = "t"
T0, T1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
EARLIEST = ConsumerSettings(auto_offset_reset="earliest", fetch_max_wait_ms=50)


def settings_of(cluster: FakeCluster, request_timeout_ms: int = 5_000) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=request_timeout_ms, retry_backoff_ms=10
    )


async def fill(cluster: FakeCluster, count: int, partitions: int = 2) -> None:
    """Writes the given number of records to each partition, ten a batch."""
    cluster.create_topic(TOPIC, partitions=partitions)
    async with Producer(settings_of(cluster)) as producer:
        for start in range(0, count, 10):
            batch = [
                ProducerRecord(TOPIC, b"%d" % i, partition=p, timestamp=1_000 + i)
                for p in range(partitions)
                for i in range(start, min(start + 10, count))
            ]
            assert await (await producer.send_many(batch)).first_error() is None


async def read(consumer: Consumer, count: int, limit: int | None = None) -> dict[TopicPartition, list[int]]:
    """Polls until the given number of records has arrived."""
    found: dict[TopicPartition, list[int]] = {}
    async with asyncio.timeout(20):
        while sum(map(len, found.values())) < count:
            for tp, columns in (await consumer.poll(100, limit)).items():
                assert columns.values == [b"%d" % offset for offset in columns.offsets.tolist()]
                found.setdefault(tp, []).extend(columns.offsets.tolist())
    return found


async def read_on(consumer: Consumer, found: dict[TopicPartition, list[int]]) -> None:
    """Polls until a poll raises."""
    async with asyncio.timeout(20):
        while True:
            for tp, columns in (await consumer.poll(100)).items():
                found.setdefault(tp, []).extend(columns.offsets.tolist())


async def write(cluster: FakeCluster, value: bytes) -> None:
    async with Producer(settings_of(cluster)) as producer:
        assert await (await producer.send_many([ProducerRecord(TOPIC, value, partition=0)])).first_error() is None


FAULTS = {
    "not leader": Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER),
    "unknown topic": Fail(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
    "no leader": Fail(ErrorCode.LEADER_NOT_AVAILABLE),
    "unknown error": Fail(ErrorCode.UNKNOWN_SERVER_ERROR),
    "one partition": Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER, [T0]),
    "closed": Close(),
    "closed afterwards": Close(handled=True),
    "lost": Drop(),
    "response lost": Drop(handled=True),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=list(FAULTS))
async def test_transient_faults_lose_no_record(fault: Action) -> None:
    """An error, a closed connection or a missing response delays records and has no other effect."""
    async with FakeCluster(nodes=2) as cluster:
        await fill(cluster, 50)
        faults = itertools.cycle([None, fault])

        def fail_every_other(request: Request) -> Action | None:
            return next(faults) if T0 in request.partitions() and control.acted < 3 else None

        control = cluster.control(Api.FETCH, fail_every_other)
        async with Consumer(settings_of(cluster, 500), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            found = await read(consumer, 60, limit=7)
            async with asyncio.timeout(20):
                while control.acted < 3:
                    for tp, columns in (await consumer.poll(50, 7)).items():
                        found[tp] += columns.offsets.tolist()
            for tp, offsets in (await read(consumer, 100 - sum(map(len, found.values())))).items():
                found[tp] += offsets
        assert found == {T0: list(range(50)), T1: list(range(50))}


async def test_leaders_move() -> None:
    """A partition is read from its new leader, while others continue."""
    async with FakeCluster(nodes=3) as cluster:
        await fill(cluster, 100)

        def move(request: Request) -> None:
            if T0 in request.partitions() and moved.acted < 1 and request.node == cluster.leader(*T0):
                cluster.move_leader(T0, request.node % 3 + 1)

        moved = cluster.control(Api.FETCH, move)
        async with Consumer(settings_of(cluster), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            found = await read(consumer, 50, limit=9)
            cluster.move_leader(T1, cluster.leader(*T1) % 3 + 1)
            moved.remove()
            for tp, offsets in (await read(consumer, 200 - sum(map(len, found.values())))).items():
                found.setdefault(tp, []).extend(offsets)
        assert found == {T0: list(range(100)), T1: list(range(100))}


async def test_a_node_stops() -> None:
    """After a node stops, its partitions are read from their next leaders."""
    async with FakeCluster(nodes=2) as cluster:
        await fill(cluster, 40)
        async with Consumer(settings_of(cluster, 1_000), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            found = await read(consumer, 10, limit=5)
            await cluster.stop_node(cluster.leader(*T0))
            async with Producer(settings_of(cluster)) as producer:
                assert (
                    await (await producer.send_many([ProducerRecord(TOPIC, b"40", partition=0)])).first_error() is None
                )
            for tp, offsets in (await read(consumer, 81 - sum(map(len, found.values())))).items():
                found.setdefault(tp, []).extend(offsets)
        assert found == {T0: list(range(41)), T1: list(range(40))}


async def test_a_corrupt_batch() -> None:
    """The error names the corrupt batch's coordinates. Earlier records and other partitions are returned, later records
    only after a seek."""
    async with FakeCluster() as cluster:
        await fill(cluster, 30)

        def corrupt(request: Request) -> Action | None:
            rows = {row.partition: row for topic in request.body.topics for row in topic.partitions}
            if 0 not in rows or rows[0].fetch_offset > 10:
                return None
            records = bytearray(log_of(cluster, T0))
            records[len(records) // 3 + 100] ^= 0xFF  # within the second of three batches
            response = Message(
                partition=0, error_code=0, high_watermark=30, last_stable_offset=30, records=bytes(records)
            )
            return Respond(Message(topics=[Message(name=TOPIC, partitions=[response])]))

        control = cluster.control(Api.FETCH, corrupt)
        async with Consumer(settings_of(cluster), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            found: dict[TopicPartition, list[int]] = {}
            with pytest.raises(CorruptRecord, match=r"t-0.*offset 10.*checksum"):
                await read_on(consumer, found)
            assert found[T0] == list(range(10))
            assert await consumer.position(T0) == 10
            control.remove()
            consumer.pause(T0)
            if left := 30 - len(found.get(T1, [])):
                assert (await read(consumer, left)).keys() == {T1}
            consumer.resume(T0)
            with pytest.raises(CorruptRecord, match="t-0 at offset 10"):
                await consumer.poll(100)
            consumer.seek(T0, 20)
            assert (await read(consumer, 10)) == {T0: list(range(20, 30))}


def log_of(cluster: FakeCluster, tp: TopicPartition) -> bytes:
    found: bytes = (
        cluster._state.led(cluster.leader(*tp), tp).log.fetch(0, 1 << 20, committed=False, at_least_one=True).data
    )
    return found


async def test_an_authorization_error_is_raised_by_poll() -> None:
    """An authorization error is raised by `poll` and names the partition."""
    async with FakeCluster() as cluster:
        await fill(cluster, 10)
        cluster.control(Api.FETCH, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED, [T0]))
        async with Consumer(settings_of(cluster), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            with pytest.raises(AuthorizationFailed, match="t-0: TOPIC_AUTHORIZATION_FAILED"):
                await read_on(consumer, {})


@pytest.mark.parametrize(
    ("policy", "first"), [("earliest", 0), ("by_duration:PT100000000H", 0), ("by_duration:1ms", 20)]
)
async def test_out_of_range(policy: str, first: int) -> None:
    """The reset policy sets the position. A duration that is shorter than the age of every record leads to the end."""
    async with FakeCluster() as cluster:
        await fill(cluster, 20, partitions=1)
        settings = EARLIEST.model_copy(update={"auto_offset_reset": policy})
        async with Consumer(settings_of(cluster), settings) as consumer:
            consumer.assign([T0])
            consumer.seek(T0, 99)
            async with asyncio.timeout(10):
                while await consumer.position(T0) != (first + 1 if first < 20 else 20):
                    if columns := (await consumer.poll(20, 1)).get(T0):
                        assert columns.offsets.tolist() == [first]


async def test_prefetched_while_others_are_paused() -> None:
    """A paused partition keeps its buffer and is not fetched. The other one is read meanwhile."""
    async with FakeCluster() as cluster:
        await fill(cluster, 30)
        fetched: list[frozenset[TopicPartition]] = []
        cluster.control(Api.FETCH, lambda request: fetched.append(frozenset(request.partitions())))
        async with Consumer(settings_of(cluster), EARLIEST) as consumer:
            consumer.assign([T0, T1])
            first = await read(consumer, 1, limit=1)
            paused = next(iter(first))
            other = T1 if paused == T0 else T0
            consumer.pause(paused)
            assert (await read(consumer, 30 - len(first.get(other, [])))).keys() == {other}
            del fetched[:]
            await consumer.poll(120)
            assert fetched
            assert all(paused not in partitions for partitions in fetched[1:])
            await cluster.close_connections()
            cluster.control(Api.FETCH, Close())
            consumer.resume(paused)
            columns = (await consumer.poll(0))[paused]
            assert columns.offsets.tolist() == list(range(1, 30))


@pytest.mark.parametrize("count", [0, 5])
async def test_a_wait_for_data_ends_before_the_request_times_out(count: int) -> None:
    """Fewer bytes than `fetch_min_bytes` arrive, and the end of an empty partition is known, if `fetch_max_wait_ms` is
    longer than `request_timeout_ms`."""
    settings = EARLIEST.model_copy(update={"fetch_min_bytes": 1_000_000, "fetch_max_wait_ms": 60_000})
    async with FakeCluster() as cluster:
        await fill(cluster, count, partitions=1)
        async with asyncio.timeout(5), Consumer(settings_of(cluster, request_timeout_ms=1_000), settings) as consumer:
            consumer.assign([T0])
            await read(consumer, count)
            while not consumer.is_at_end(T0):
                await consumer.poll(20)


async def test_no_broker_at_all() -> None:
    """A consumer cannot start without a cluster. If the cluster disappears, it returns nothing and keeps retrying."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5)
        consumer = Consumer(settings_of(cluster, 500), EARLIEST)
        await consumer.start()
        consumer.assign([T0])
        assert len((await read(consumer, 5))[T0]) == 5
        await cluster.stop_node(1)
        assert await consumer.poll(300) == {}
        await cluster.start_node(1)
        await write(cluster, b"5")
        assert (await read(consumer, 1)) == {T0: [5]}
        gone = settings_of(cluster, 300)
        await consumer.close()
    with pytest.raises(BrokerNotAvailable):
        await Consumer(gone, EARLIEST).start()
    with pytest.raises(PenstockError):
        await consumer.poll(0)


@pytest.mark.parametrize(
    ("api", "code", "what"),
    [
        (Api.OFFSET_FETCH, ErrorCode.UNSTABLE_OFFSET_COMMIT, "committed offsets"),
        (Api.LIST_OFFSETS, ErrorCode.NOT_LEADER_OR_FOLLOWER, "offsets of t"),
        (Api.FETCH, ErrorCode.UNKNOWN_SERVER_ERROR, "records of t"),
        (Api.FETCH, ErrorCode.KAFKA_STORAGE_ERROR, "records of t"),
    ],
)
async def test_a_failure_that_is_repeated_is_logged(api: Api, code: ErrorCode, what: str) -> None:
    """The log has the reason why a consumer reads nothing, not once for each attempt, and the end of the failure."""
    settings = EARLIEST.model_copy(update={"group_id": "g", "commit_timeout_ms": 200})
    async with FakeCluster() as cluster:
        await fill(cluster, 5, partitions=1)
        control = cluster.control(api, Fail(code))
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster, request_timeout_ms=200), settings) as consumer:
                consumer.assign([T0])
                while control.acted < 7:
                    assert await consumer.poll(20) == {}
                control.remove()
                await read(consumer, 5)
    lines = [line for line in logged if line.get("what") == what]
    assert [(line["log_level"], code.name in line.get("reason", "")) for line in lines] == [
        ("warning", True),
        ("info", False),
    ]


def levels(logged: Iterable[MutableMapping[str, Any]], what: str) -> list[str]:
    return [line["log_level"] for line in logged if line.get("what") == what]


async def test_a_partition_without_a_leader_is_logged() -> None:
    """The log has the partition, also if it does not exist, and the end of the failure."""
    async with FakeCluster() as cluster:
        with capture_logs() as logged:
            async with asyncio.timeout(20), Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0])
                while not levels(logged, "partitions without a leader"):
                    assert await consumer.poll(20) == {}
                await fill(cluster, 5, partitions=1)
                await read(consumer, 5)
                consumer.assign([T1])
                while len(levels(logged, "partitions without a leader")) < 3:
                    assert await consumer.poll(20) == {}
                consumer.assign([T0])
                await read(consumer, 5)
    assert levels(logged, "partitions without a leader") == ["warning", "info", "warning"]
    assert "t-0" in next(line["reason"] for line in logged if "reason" in line)


async def test_a_fetch_that_fails_as_a_whole_is_logged_by_topic() -> None:
    """The log has the topic whose leader does not respond, and the end of the failure."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5)
        control = cluster.control(Api.FETCH, Close())
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0, T1])
                while control.acted < 4:
                    assert await consumer.poll(20) == {}
                control.remove()
                await read(consumer, 10)
    assert levels(logged, "records of t") == ["warning", "info"]


async def test_a_failed_fetch_from_a_node_that_is_no_longer_used_ends_in_the_log() -> None:
    """If another node leads the partitions after a node has failed, fetching them from there ends the failure."""
    async with FakeCluster(nodes=2) as cluster:
        await fill(cluster, 5, partitions=1)
        leader = cluster.leader("t")
        assert leader is not None
        control = cluster.control(Api.FETCH, Close(), node=leader)
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0])
                while control.acted < 3:
                    assert await consumer.poll(20) == {}
                cluster.move_leader(T0, 3 - leader)
                await read(consumer, 5)
    assert [line["log_level"] for line in logged if "what" in line] == ["warning", "info"]


async def test_a_single_fetch_that_fails_is_not_logged() -> None:
    """The next one succeeds, as after a leader that moved."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5, partitions=1)
        cluster.control(Api.FETCH, Close(), times=1)
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0])
                await read(consumer, 5)
    assert [line for line in logged if "what" in line] == []


async def test_the_failures_of_a_topic_s_partitions_are_logged_together() -> None:
    """There is one line for all of them. The failure ends when none of the partitions fails."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5)
        control = cluster.control(Api.FETCH, Fail(ErrorCode.UNKNOWN_SERVER_ERROR, [T0, T1]))
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0, T1])
                while control.acted < 4:
                    assert await consumer.poll(20) == {}
                control.remove()
                control = cluster.control(Api.FETCH, Fail(ErrorCode.UNKNOWN_SERVER_ERROR, [T0]))
                assert (await read(consumer, 5)).keys() == {T1}
                assert levels(logged, "records of t") == ["warning"]
                control.remove()
                await read(consumer, 5)
    assert levels(logged, "records of t") == ["warning", "info"]


async def test_a_failure_without_a_later_fetch_does_not_end_in_the_log() -> None:
    """Another error, or the loss of the partition, is no fetch that works again."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5)

        async def fail_repeatedly(consumer: Consumer) -> None:
            control = cluster.control(Api.FETCH, Fail(ErrorCode.UNKNOWN_SERVER_ERROR, [T0]))
            while control.acted < 3:
                assert await consumer.poll(20) == {}
            control.remove()

        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0])
                await fail_repeatedly(consumer)
                control = cluster.control(Api.FETCH, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED, [T0]))
                with pytest.raises(AuthorizationFailed):
                    await read_on(consumer, {})
                control.remove()
                assert levels(logged, "records of t") == ["warning"]
                consumer.assign([T1])
                await read(consumer, 5)
                consumer.assign([T0])
                await read(consumer, 5)
                assert levels(logged, "records of t") == ["warning"]


async def test_a_moved_leader_is_no_failure_to_log() -> None:
    """A single fetch from a broker that no longer leads the partition logs no warning."""
    async with FakeCluster() as cluster:
        await fill(cluster, 5, partitions=1)
        cluster.control(Api.FETCH, Fail(ErrorCode.NOT_LEADER_OR_FOLLOWER), times=1)
        with capture_logs() as logged:
            async with Consumer(settings_of(cluster), EARLIEST) as consumer:
                consumer.assign([T0])
                await read(consumer, 5)
    assert [line for line in logged if "what" in line] == []


async def test_fetches_are_measured() -> None:
    """The metrics have fetch requests by result, bytes, and the buffered size."""
    registry = CollectorRegistry()
    async with FakeCluster() as cluster:
        await fill(cluster, 20, partitions=1)
        cluster.control(Api.FETCH, Close(), times=1)
        async with Consumer(settings_of(cluster), EARLIEST, registry=registry) as consumer:
            consumer.assign([T0])
            await read(consumer, 20)
        size = len(log_of(cluster, T0))
    group = {"group": ""}
    assert registry.get_sample_value("penstock_consumer_fetched_bytes_total", group) == size
    assert registry.get_sample_value("penstock_consumer_fetches_total", group | {"result": "failed"}) == 1
    assert (registry.get_sample_value("penstock_consumer_fetches_total", group | {"result": "ok"}) or 0) >= 1
    assert registry.get_sample_value("penstock_consumer_buffered_bytes", group) is not None


async def test_the_buffered_size_follows_the_buffer() -> None:
    """The metric is 0 after a poll took the last records, after the partition is left, and after the close."""
    registry = CollectorRegistry()

    def buffered() -> float | None:
        return registry.get_sample_value("penstock_consumer_buffered_bytes", {"group": ""})

    async with FakeCluster() as cluster:
        await fill(cluster, 20)
        size = len(log_of(cluster, T0))
        async with Consumer(settings_of(cluster), EARLIEST, registry=registry) as consumer:
            consumer.assign([T0])
            await read(consumer, 1, limit=1)
            assert buffered() == size
            await read(consumer, 19)
            assert buffered() == 0
            await consumer.seek_to_beginning(T0)
            await read(consumer, 1, limit=1)
            assert buffered() == size
            consumer.assign([])
            assert buffered() == 0
            consumer.assign([T0])
            await read(consumer, 1, limit=1)
            assert buffered() == size
        assert buffered() == 0


async def test_the_lag_follows_the_position() -> None:
    """The metric of a partition's lag follows the position through polls, seeks and resets. It is removed when the
    partition is left, and when the consumer is closed."""
    registry = CollectorRegistry()

    def lag(tp: TopicPartition) -> float | None:
        labels = {"group": "", "topic": tp.topic, "partition": str(tp.partition)}
        return registry.get_sample_value("penstock_consumer_lag_records", labels)

    async with FakeCluster() as cluster:
        await fill(cluster, 20)
        async with Consumer(settings_of(cluster), EARLIEST, registry=registry) as consumer:
            consumer.assign([T0])
            await read(consumer, 1, limit=1)
            assert lag(T0) == 19
            await consumer.seek_to_end(T0)
            assert lag(T0) == 0
            consumer.seek(T0, 5)
            assert lag(T0) == 15
            consumer.assign([T1])
            assert lag(T0) is None
            await read(consumer, 1, limit=1)
            assert lag(T1) == 19
        assert lag(T1) is None
