"""The producer's life cycle: close, abort, metadata age, metrics and logs."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.producer.producer import REJECTIONS_A_TURN
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    BufferExhausted,
    ConfigError,
    DeliveryTimeout,
    IllegalState,
    InvalidTxnState,
    KafkaTimeout,
    RecordTooLarge,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import ProducerRecord, RecordColumns
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Drop, ErrorCode, Fail, FakeCluster, Request
from tests.shared.clients.producer.clusters import producing

PATIENCE_SECONDS = 30
GONE = "cancelled"


async def test_a_second_close_waits_for_the_first() -> None:
    """Both calls return when everything is sent and closed."""
    async with producing() as (cluster, producer):
        gate = asyncio.Event()

        async def hold(_: Request) -> None:
            await gate.wait()

        cluster.control(Api.PRODUCE, hold)
        delivery = await producer.send("t", b"v")
        first = asyncio.ensure_future(producer.close())
        await asyncio.sleep(0)
        second = asyncio.ensure_future(producer.close())
        done, _ = await asyncio.wait([first, second], timeout=0.05)
        assert not done
        gate.set()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.wait([first, second], return_when=asyncio.ALL_COMPLETED)
        assert (await delivery).offset == 0
        await producer.close()


async def test_a_second_close_may_shorten_the_timeout() -> None:
    """A shorter timeout ends the first close early. A longer one has no effect."""
    async with producing() as (cluster, producer):
        cluster.control(Api.PRODUCE, Drop())
        delivery = await producer.send("t", b"v")
        first = asyncio.ensure_future(producer.close(timeout_ms=60_000))
        await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await asyncio.gather(producer.close(timeout_ms=50_000), producer.close(timeout_ms=10), first)
        with pytest.raises(IllegalState):
            await delivery


async def test_a_record_in_flight_at_the_end_of_close_may_be_written() -> None:
    """Its error has `maybe_written`. The error of a record that no request has contained does not have it."""
    async with producing(max_in_flight_requests_per_connection=1) as (cluster, producer):
        out = asyncio.Event()

        async def hold(_: Request) -> None:
            out.set()
            await asyncio.Event().wait()

        cluster.control(Api.PRODUCE, hold)
        in_flight = await producer.send("t", b"v")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await out.wait()
        queued = await producer.send("t", b"v")
        await producer.close(timeout_ms=0)
        for delivery, maybe_written in ((in_flight, True), (queued, False)):
            error = delivery.exception()
            assert isinstance(error, IllegalState)
            assert error.maybe_written is maybe_written


async def test_an_abort_waits_at_most_max_block_ms() -> None:
    """Without a response the abort ends after max_block_ms, and may be called again."""
    async with producing(transactional_id="x", max_block_ms=100) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        out, gate = asyncio.Event(), asyncio.Event()

        async def hold(_: Request) -> None:
            out.set()
            await gate.wait()

        cluster.control(Api.PRODUCE, hold)
        await producer.send("t", b"v")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await out.wait()
            with pytest.raises(KafkaTimeout, match=r"1 produce.*100 ms"):
                await producer.abort_transaction()
            gate.set()
            await producer.abort_transaction()
        assert cluster.records("t") == []


@pytest.mark.parametrize("max_block_ms", [60_000, 1_000])
async def test_an_abort_does_not_wait_for_a_connect(max_block_ms: int) -> None:
    """Records queued for an unreachable node are dropped, and the transaction ends at once."""
    async with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("t", partitions=2, replication_factor=1)
        coordinator = cluster.coordinator("x")
        away = 3 - coordinator
        partition = next(number for number in (0, 1) if cluster.leader("t", number) == away)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers.split(",")[coordinator - 1])
        settings = ProducerSettings(linger_ms=0, transactional_id="x", max_block_ms=max_block_ms)
        async with Producer(kafka, settings) as producer, asyncio.timeout(PATIENCE_SECONDS):
            await producer.init_transactions()
            await producer.partitions_for("t")
            cluster.pause_node(away)
            await cluster.close_connections(away)
            await producer.begin_transaction()
            delivery = await producer.send("t", b"v", partition=partition)
            while not producer._sender._nodes[away].connecting:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)
            await producer.abort_transaction()
            assert producer._sender._nodes[away].connecting, "still"
            with pytest.raises(TransactionAborted):
                await delivery
            cluster.resume_node(away)
            async with producer.transaction():
                await producer.send("t", b"next", partition=partition)
        assert [record.value for record in cluster.records("t")] == [b"next"]


@pytest.mark.parametrize("how", ["cancelled in a block", "cancelled", "running", "repeated"])
async def test_a_close_waits_for_the_commit_of_another_task(how: str) -> None:
    """If the commit is cancelled during its flush, the transaction is aborted, even if another task repeats the commit.
    Otherwise it is committed."""
    settings: dict[str, Any] = {"max_in_flight_requests_per_connection": 1, "batch_size": 1}
    async with producing(transactional_id="x", **settings) as (cluster, producer):
        await producer.init_transactions()
        out, gate = asyncio.Event(), asyncio.Event()
        sent = [b"1", b"2", b"3"]

        async def hold(_: Request) -> None:
            out.set()
            await gate.wait()

        async def work() -> None:
            if how in ("cancelled in a block", "repeated"):
                async with producer.transaction():
                    await producer.send_many([ProducerRecord("t", value) for value in sent])
            else:
                await producer.begin_transaction()
                await producer.send_many([ProducerRecord("t", value) for value in sent])
                await producer.commit_transaction()

        cluster.control(Api.PRODUCE, hold)
        working = asyncio.create_task(work())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await out.wait()
            with capture_logs() as logged:
                gate.set()
                if how != "running":
                    working.cancel()
                if how == "repeated":
                    with pytest.raises(IllegalState, match="another call"):
                        await producer.commit_transaction()
                await producer.close()
            (outcome,) = await asyncio.gather(working, return_exceptions=True)
        assert [record.value for record in cluster.records("t")] == (sent if how == "running" else [])
        assert isinstance(outcome, asyncio.CancelledError) == (how != "running")
        warned = [one["event"] for one in logged if one["log_level"] == "warning"]
        assert warned == ["open transaction aborted on close"] * (how == "cancelled")


@pytest.mark.parametrize("how", ["delivery", "deliveries", "waiter", "send"])
async def test_a_cancelled_record_aborts_its_transaction(how: str) -> None:
    """However a record is cancelled, its transaction cannot be committed without it."""
    async with producing(transactional_id="x", linger_ms=60_000) as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        kept = await producer.send("t", b"kept")
        taken = await producer.send("t", b"taken")
        if how == "delivery":
            assert taken.cancel()
        elif how == "deliveries":
            many = await producer.send_many([ProducerRecord("t", b"%d" % i) for i in range(3)])
            assert many.cancel() == 3
        elif how == "waiter":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(taken, 0.01)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(producer.send("missing", b"v"), 0.01)
        with pytest.raises(TransactionAborted, match=GONE):
            await producer.send("t", b"more")
        with pytest.raises(TransactionAborted):
            await kept
        with pytest.raises(TransactionAborted, match=GONE):
            await producer.commit_transaction()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send("t", b"next")
        assert [record.value for record in cluster.records("t")] == [b"next"]


async def test_a_shielded_wait_cancels_no_record() -> None:
    """Behind a shield only the wait ends, and the transaction keeps every record."""
    async with producing(transactional_id="x", linger_ms=60_000) as (cluster, producer):
        await producer.init_transactions()
        async with producer.transaction():
            delivery = await producer.send("t", b"v")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(delivery), 0.01)
        assert (await delivery).offset == 0
        assert [record.value for record in cluster.records("t")] == [b"v"]


async def test_metadata_is_never_older_than_it_may_be() -> None:
    """After metadata_max_age_ms a new partition is known without any call. Before that it is not."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        requests: list[Request] = []
        cluster.control(Api.METADATA, lambda request: requests.append(request))
        servers = cluster.bootstrap_servers
        async with (
            Producer(KafkaSettings(bootstrap_servers=servers, metadata_max_age_ms=50, client_id="young")) as young,
            Producer(KafkaSettings(bootstrap_servers=servers, client_id="old")) as old,
        ):
            assert await young.partitions_for("t") == await old.partitions_for("t") == [0]
            known = sum(request.client_id == "old" for request in requests)
            cluster.delete_topic("t")
            cluster.create_topic("t", partitions=2)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await young.partitions_for("t") != [0, 1]:
                    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
            assert await old.partitions_for("t") == [0]
            assert sum(request.client_id == "old" for request in requests) == known


async def test_the_table_of_metrics() -> None:
    """Every documented metric exists and matches the sent records."""
    async with producing(partitions=2) as (_, producer):
        await (await producer.send_many([ProducerRecord("t", b"%d" % i, b"%d" % i) for i in range(100)]))
        figures = producer.metrics()
    assert figures["record_send_total"] == 100
    assert figures["record_send_rate"] == pytest.approx(100, rel=0.9)
    assert 70 < figures["batch_size_avg"] <= figures["batch_size_max"] < 16_384
    assert 0 <= figures["request_latency_avg"] <= figures["request_latency_max"]
    assert 0 <= figures["record_queue_time_avg"] <= figures["record_queue_time_max"]
    assert figures["buffer_available_bytes"] == ProducerSettings().buffer_memory
    assert (figures["record_retry_total"], figures["record_error_total"], figures["requests_in_flight"]) == (0, 0, 0)


async def test_changes_of_state_are_logged() -> None:
    """Start, close, producer id and epoch, and a failed transaction are logged with the client."""
    with capture_logs() as logged:
        async with producing(transactional_id="x") as (cluster, producer):
            await producer.init_transactions()
            async with producer.transaction():
                await producer.send("t", b"v")
            await producer.begin_transaction()
            cluster.control(Api.PRODUCE, Fail(ErrorCode.INVALID_TXN_STATE), times=1)
            with pytest.raises(InvalidTxnState):
                await (await producer.send("t", b"refused"))
            await producer.abort_transaction()
    events = [(one["event"], one.get("state")) for one in logged if one["event"] != "records given up"]
    assert events == [
        ("producer open", None),
        ("producer id", None),
        ("transaction failed", "ABORTABLE_ERROR"),
        ("producer id", None),
        ("producer closed", None),
    ]
    ids = [one for one in logged if one["event"] == "producer id"]
    assert [one["epoch"] for one in ids] == [0, 1]
    assert {one["transactional_id"] for one in logged if "transaction" in one["event"]} == {"x"}
    assert len({one["client_id"] for one in logged if "client_id" in one}) == 1


async def test_an_abort_by_the_program_warns_of_no_record() -> None:
    """It drops the records of every partition, as requested. Records that `abort_pending` drops are a warning."""
    for level in ("debug", "warning"):
        async with producing(transactional_id="x", linger_ms=60_000) as (_, producer):
            await producer.init_transactions()
            await producer.begin_transaction()
            await producer.send("t", b"v")
            with capture_logs() as logged:
                if level == "warning":
                    producer.abort_pending()
                await producer.abort_transaction()
        assert [one["log_level"] for one in logged if one["event"] == "records given up"] == [level]


async def test_a_close_warns_once_of_an_open_transaction() -> None:
    """The program did not request the abort. A transaction without records loses nothing."""
    for records in (0, 2):
        with capture_logs() as logged:
            async with producing(transactional_id="x", linger_ms=60_000) as (_, producer):
                await producer.init_transactions()
                await producer.begin_transaction()
                for _ in range(records):
                    await producer.send("t", b"v")
        warned = [one for one in logged if one["log_level"] == "warning"]
        assert [one["unacknowledged_records"] for one in warned] == [records] * (records > 0)


async def test_max_block_ms_covers_metadata_and_memory() -> None:
    """max_block_ms limits the waits for metadata and memory together."""
    async with producing(max_block_ms=1_000, buffer_memory=1_000, batch_size=1_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS))
        await producer.send("t", b"the buffer is full")
        loop = asyncio.get_running_loop()
        loop.call_later(0.6, cluster.create_topic, "late")
        started = loop.time()
        with pytest.raises(BufferExhausted):
            await producer.send("late", b"v")
        assert 0.9 < loop.time() - started < 1.5
        assert await producer.partitions_for("late") == [0]
        await producer.close(timeout_ms=0)


async def test_exhausted_buffers_are_counted() -> None:
    """Each record that fails with BufferExhausted is counted, also later records of a bulk."""
    async with producing(max_block_ms=50, buffer_memory=1_000, batch_size=1_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS))
        await producer.send("t", b"x" * 900)
        with pytest.raises(BufferExhausted):
            await producer.send("t", b"x" * 900)
        await producer.send_many([ProducerRecord("t", b"x" * 900)] * 3)
        figures = producer.metrics()
        assert (figures["buffer_exhausted_total"], figures["record_error_total"]) == (4, 4)
        assert figures["buffer_exhausted_rate"] > 0
        await producer.close(timeout_ms=0)


@pytest.mark.parametrize(
    ("cause", "error"),
    [
        ("buffer", BufferExhausted),
        ("columns", BufferExhausted),
        ("topic", UnknownTopicOrPartition),
        ("outage", BrokerNotAvailable),
    ],
)
async def test_the_rest_of_a_rejected_bulk_shares_one_error(cause: str, error: type[Exception]) -> None:
    """Records that are rejected one by one let the event loop run. The traceback of the error has no entry for each
    record."""
    count = 5_000
    seen = set()

    async def watch() -> None:
        while True:
            seen.add(producer.metrics()["record_error_total"])
            await asyncio.sleep(0)

    async with producing(max_block_ms=50, buffer_memory=1_000, batch_size=1_000) as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS))
        await producer.send("t", b"x" * 900)
        topic = "no-topic" if cause in ("topic", "outage") else "t"
        records: Any = [ProducerRecord(topic, b"x" * 900) for _ in range(count)]
        if cause == "columns":
            records = RecordColumns("t", [None] * count, [b"x" * 900] * count)
        if cause == "outage":
            cluster.pause_node(1)
        watching = asyncio.create_task(watch())
        results = await (await producer.send_many(records))
        watching.cancel()
        await producer.close(timeout_ms=0)
        assert topic == "t" or len(seen) >= count // REJECTIONS_A_TURN
        assert all(result is results[0] for result in results)
        assert isinstance(results[0], error)
        assert len(traceback.extract_tb(results[0].__traceback__)) < 20
        assert producer.metrics()["record_error_total"] == count + 1


async def test_begin_finishes_a_failed_abort() -> None:
    """While the coordinator is unavailable the block's error has a note. `begin` raises the reason, and succeeds once
    it is back."""
    async with producing(transactional_id="x", max_block_ms=300) as (cluster, producer):
        await producer.init_transactions()

        async def fail() -> None:
            async with producer.transaction():
                await (await producer.send("t", b"aborted"))
                raise RecordTooLarge("the block's own")

        control = cluster.control(Api.END_TXN, Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE))
        with capture_logs() as logged, pytest.raises(RecordTooLarge, match="the block's own") as raised:
            await fail()
        assert [one["transactional_id"] for one in logged if one["event"] == "abort failed"] == ["x"]
        assert "transactional id x: not done" in raised.value.__notes__[0]
        with pytest.raises(KafkaTimeout, match="transactional id x"):
            await producer.begin_transaction()
        control.remove()
        async with producer.transaction():
            await (await producer.send("t", b"next"))
        assert [record.value for record in cluster.records("t")] == [b"next"]


async def test_a_begin_during_an_abort_is_rejected() -> None:
    """While another task aborts, `begin` raises an invalid-state error."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        await (await producer.send("t", b"v"))
        out, gate = asyncio.Event(), asyncio.Event()

        async def hold(_: Request) -> None:
            out.set()
            await gate.wait()

        cluster.control(Api.END_TXN, hold)
        aborting = asyncio.ensure_future(producer.abort_transaction())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await out.wait()
            with pytest.raises(IllegalState):
                await producer.begin_transaction()
            gate.set()
            await aborting
            await producer.begin_transaction()


async def test_the_gauge_of_free_memory_follows_what_expires_in_flight() -> None:
    """The memory of a batch that expired in flight is free after its response, and the gauge shows it."""
    registry = CollectorRegistry()
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=150, client_id="me")
        settings = ProducerSettings(linger_ms=0, delivery_timeout_ms=150)

        def free() -> float | None:
            return registry.get_sample_value("penstock_producer_buffer_available_bytes", {"client_id": "me"})

        async with Producer(kafka, settings, registry=registry) as producer:
            await (await producer.send("t", b"warm"))
            cluster.control(Api.PRODUCE, Drop())
            delivery = await producer.send("t", b"v")
            assert free() == settings.buffer_memory - settings.batch_size
            with pytest.raises(DeliveryTimeout):
                await delivery
            async with asyncio.timeout(PATIENCE_SECONDS):
                while producer.metrics()["buffer_available_bytes"] < settings.buffer_memory:
                    await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
            assert free() == settings.buffer_memory


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (({"bootstrap_servers": "host:9092"},), "a client needs KafkaSettings.*dict"),
        ((KafkaSettings(), {"linger_ms": 5}), "a client needs ProducerSettings.*dict"),
    ],
)
async def test_invalid_settings_are_rejected(given: Any, message: str) -> None:
    """A ConfigError names the expected type."""
    with pytest.raises(ConfigError, match=message):
        Producer(*given)
    with pytest.raises(ConfigError, match=message.replace("Producer", "Consumer")):
        Consumer(*given)
    with pytest.raises(ConfigError, match="client_id"):
        KafkaSettings(client_id="")


async def test_a_failed_start_leaves_no_series() -> None:
    """`async with` removes the client's series from the registry if no broker is reached."""
    registry = CollectorRegistry()
    kafka = KafkaSettings(bootstrap_servers="localhost:1", request_timeout_ms=20)
    with pytest.raises(BrokerNotAvailable):
        async with Producer(kafka, registry=registry):
            pass
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert not any("client_id" in sample.labels for sample in samples)


async def test_a_producer_that_is_not_closed_warns() -> None:
    """A ResourceWarning names it once it is garbage, since its buffered records are lost."""
    async with producing() as (_, producer):
        with pytest.warns(ResourceWarning, match="lost: <Producer open"):
            producer.__del__()
    with warnings.catch_warnings(action="error"):
        producer.__del__()
        with pytest.raises(ConfigError):
            Producer("nowhere")


async def test_transactions_without_idempotence_are_rejected() -> None:
    """A copy of settings is not validated: the broker would store its records outside of any transaction."""
    settings = ProducerSettings(enable_idempotence=False).model_copy(update={"transactional_id": "x"})
    with pytest.raises(ConfigError, match="enable_idempotence"):
        Producer("localhost:1", settings)


async def test_a_programming_error_is_not_in_the_message_of_records() -> None:
    """If a turn of the sender raises, records fail with an error that has it only as its cause."""
    async with producing() as (_, producer):
        await producer.send_and_wait("t", b"v")
        broken = TypeError("a secret")

        def turn(now_ms: int) -> float | None:
            raise broken

        producer._sender.run_once = turn  # type: ignore[method-assign]
        with capture_logs() as logged:
            delivery = await producer.send("t", b"v")
            with pytest.raises(IllegalState) as caught:
                await delivery
        assert "a secret" not in str(caught.value)
        assert caught.value.__cause__ is broken
        assert [one["exc_info"] for one in logged if "exc_info" in one] == [broken]


async def test_a_producer_whose_sender_has_ended_must_be_replaced() -> None:
    """The error of a later send says so, and not that the producer must be started."""
    async with producing() as (_, producer):

        def turn(now_ms: int) -> float | None:
            raise TypeError

        producer._sender.run_once = turn  # type: ignore[method-assign]
        with pytest.raises(IllegalState):
            await producer.send_and_wait("t", b"v")
        with pytest.raises(IllegalState, match=r"broken.*make a new one"):
            await producer.send("t", b"v")
