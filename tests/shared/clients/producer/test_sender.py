"""The sender: its turns over a fake connection, and its requests against the fake cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from penstock.shared.clients.producer import Delivery, ProducerSettings
from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import RecordAccumulator
from penstock.shared.clients.producer.sender import Sender
from penstock.shared.clients.producer.transaction_manager import EPOCH_MAX
from penstock.shared.common.errors import (
    AuthorizationFailed,
    DeliveryTimeout,
    IllegalState,
    InvalidTxnState,
    ProducerFenced,
    SendCancelled,
    TransactionAborted,
)
from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker import (
    Api,
    Close,
    Delay,
    ErrorCode,
    Fail,
    Message,
    Request,
    Respond,
)
from penstock.shared.testing.manual_clock import ManualClock
from tests.shared.clients.producer.clusters import NO_LEADER, connection, know, producing, values

PATIENCE_SECONDS = 30
TP = TopicPartition("t", 0)


class Alone:
    """A sender that was never started, over a connection that knows node 1 but has no socket."""

    def __init__(self, **settings: object) -> None:
        given = {"enable_idempotence": False, "linger_ms": 10, **settings}
        self.settings = ProducerSettings.model_validate(given)
        self.accumulator = RecordAccumulator(self.settings)
        self.memory = BufferPool(self.settings.buffer_memory)
        self.connection = connection()
        self.clock = ManualClock()
        metrics = ProducerMetrics(None, "alone", self.clock.monotonic_ms, self.memory)
        self.sender = Sender(self.connection, self.accumulator, self.memory, self.settings, None, metrics, self.clock)

    def send(self) -> ProducerBatch:
        assert self.memory.try_acquire(100)
        batch = self.accumulator.open_batch(self.accumulator.queue(TP), 100, self.clock.monotonic_ms())
        batch.append(0, 0, None, b"v", [])
        batch.count = 1
        return batch


async def test_a_turn_returns_when_the_next_is_due() -> None:
    """The next turn is due after the linger, then at the expiry. All other events wake the sender."""
    alone = Alone(delivery_timeout_ms=40_000)
    know(alone.connection, {"t": {0: 1}})
    assert alone.sender.run_once(0) is None
    batch = alone.send()
    assert alone.sender.run_once(0) == 10
    assert alone.sender.run_once(10) == 40_000 - 10, "not connected: that wakes it"
    assert repr(alone.sender).startswith("<Sender <RecordAccumulator 1 batches queued, 0 out>, 0 requests")
    assert alone.sender.run_once(39_999) == 1
    assert alone.sender.run_once(40_000) is None
    assert isinstance(batch.error, DeliveryTimeout)
    await alone.sender.close()


async def test_metadata_of_a_partition_without_a_leader_is_refreshed() -> None:
    """The metadata is refreshed every retry_backoff_ms."""
    alone = Alone()
    know(alone.connection, {"t": {0: NO_LEADER}})
    alone.send()
    assert alone.connection._client._topics == set()
    assert alone.sender.run_once(10) == 100
    assert not alone.sender.completion.metadata_is_stale, "metadata was requested"
    assert alone.connection._client._topics == {"t"}, "of what has records waiting, metadata is asked for"
    assert alone.sender.run_once(50) == 100
    assert alone.sender.completion.metadata_is_stale, "too early to ask again"
    assert alone.sender.run_once(110) == 100
    assert not alone.sender.completion.metadata_is_stale
    await alone.sender.close()


async def test_a_broker_is_slow_while_due_batches_wait() -> None:
    """A broker is slow after partitioner_availability_timeout_ms, and never if that is 0."""
    for limit_ms, slow in ((50, True), (0, False)):
        alone = Alone(partitioner_availability_timeout_ms=limit_ms)
        know(alone.connection, {"t": {0: 1}})
        assert not alone.sender.is_slow(TP)
        alone.send()
        alone.clock.advance(10)
        alone.sender.run_once(10)
        assert not alone.sender.is_slow(TP)
        alone.clock.advance(51)
        assert alone.sender.is_slow(TP) is slow
        await alone.sender.close()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not what():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


async def outcome(delivery: Delivery) -> object:
    try:
        return (await delivery).offset
    except Exception as e:
        return type(e)


async def test_a_producer_id_is_requested_until_there_is_one() -> None:
    """A retriable error is retried. A permanent one fails queued records, and the next record requests again."""
    async with producing() as (cluster, producer):
        passing = cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), times=3)
        assert await outcome(await producer.send("t", b"0")) == 0
        assert passing.acted == 3
    async with producing() as (cluster, producer):
        cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.CLUSTER_AUTHORIZATION_FAILED), times=1)
        assert await outcome(await producer.send("t", b"0")) is AuthorizationFailed
        assert await outcome(await producer.send("t", b"1")) == 0


async def test_max_block_ms_does_not_bound_the_request_for_a_producer_id() -> None:
    """`send` does not wait for a producer id, so its limit does not apply, however short it is."""
    async with producing(max_block_ms=0) as (_, producer):
        await producer._connection.wait_for_topic("t", 5_000)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await outcome(await producer.send("t", b"0")) == 0


@pytest.mark.parametrize("transactional_id", [None, "tx"])
async def test_a_producer_id_is_requested_beside_pending_metadata(transactional_id: str | None) -> None:
    """With one request in flight at a time, a pending metadata request does not block the producer id."""
    given = {"max_in_flight_requests_per_connection": 1, "transactional_id": transactional_id}
    async with producing(**given) as (cluster, producer):
        slow = cluster.control(Api.METADATA, Delay(40), times=1)
        refreshing = producer._connection.refresh_metadata()
        if transactional_id is not None:
            await producer.init_transactions()
            await producer.begin_transaction()
        await (await producer.send("t", b"0"))
        if transactional_id is not None:
            await producer.commit_transaction()
        await refreshing
        assert slow.acted == 1
        assert values(cluster) == [b"0"]


async def test_partitions_are_added_while_their_node_throttles() -> None:
    """A node's throttle time does not delay adding a partition to a transaction."""
    async with producing(partitions=2, transactional_id="tx") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        row = Message(partition=0, error_code=0, base_offset=0)
        body = Message(topics=[Message(name="t", partitions=[row])], throttle_time_ms=400)
        cluster.control(Api.PRODUCE, Respond(body), times=1)
        added: list[float] = []
        cluster.control(Api.ADD_PARTITIONS_TO_TXN, lambda _: added.append(asyncio.get_running_loop().time()))
        await (await producer.send("t", b"0", partition=0))
        produced_at = asyncio.get_running_loop().time()
        await (await producer.send("t", b"1", partition=1))
        sent = asyncio.get_running_loop().time()
        await producer.commit_transaction()
        assert len(added) == 2
        assert added[1] - produced_at < 0.3 <= sent - produced_at
        assert [record.value for record in cluster.records("t", 1)] == [b"1"]


async def test_a_new_producer_id_once_the_epochs_are_used_up() -> None:
    """Queued batches wait only for the new producer id."""
    async with producing() as (cluster, producer):
        await (await producer.send("t", b"0"))
        ledger = producer._sender.completion.ledger
        ledger.adopt(ledger.producer_id, EPOCH_MAX)
        await (await producer.send("t", b"1"))
        old = ledger.producer_id
        cluster.control(Api.PRODUCE, Fail(ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER), times=1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await outcome(await producer.send("t", b"2")) == 2
        assert ledger.producer_id != old
        assert values(cluster) == [b"0", b"1", b"2"]


async def test_a_node_that_is_down_costs_a_batch_no_attempt() -> None:
    """The batch is not sent, so it is not written, and its only attempt is left for when the node is back."""
    async with producing(retries=1) as (cluster, producer):
        await (await producer.send("t", b"0"))
        await cluster.stop_node(1)
        delivery = await producer.send("t", b"1")
        await until(lambda: producer._sender._nodes[1].attempts >= 3)
        assert (delivery._batch.attempts, delivery._batch.fate_unknown) == (0, False)
        assert producer._sender.is_away(TP)
        await cluster.start_node(1)
        assert await outcome(delivery) == 1
        assert not producer._sender.is_away(TP)


async def test_a_connection_that_closes_after_the_batch_was_written() -> None:
    """The batch is sent again, and is in the log once."""
    async with producing() as (cluster, producer):
        cluster.control(Api.PRODUCE, Close(handled=True), times=2)
        deliveries = [await producer.send("t", b"%d" % i) for i in range(3)]
        assert [await outcome(delivery) for delivery in deliveries] == [0, 1, 2]
        assert values(cluster) == [b"0", b"1", b"2"]


async def test_requests_in_flight_are_bounded() -> None:
    """A node takes max_in_flight_requests_per_connection requests, however many partitions wait."""
    async with producing(partitions=9, max_in_flight_requests_per_connection=3) as (cluster, producer):
        for partition in range(9):
            await (await producer.send("t", b"0", partition=partition))
        cluster.pause_node(1)
        deliveries = []
        for partition in range(9):
            deliveries.append(await producer.send("t", b"1", partition=partition))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert producer._sender._nodes[1].requests == 3
        cluster.resume_node(1)
        assert {await outcome(delivery) for delivery in deliveries} == {1}


async def test_another_leader() -> None:
    """A new leader from the response or from the metadata gets the batch once."""
    async with producing(nodes=2) as (cluster, producer):
        await (await producer.send("t", b"0"))
        for number in range(1, 5):
            there = cluster.leader("t")
            cluster.move_leader(TP, 3 - (there or 0))
            assert await outcome(await producer.send("t", b"%d" % number)) == number
        assert len(values(cluster)) == 5


async def test_a_throttle_time_is_respected() -> None:
    """After a response with a throttle time, the node gets no request until it has elapsed."""
    async with producing() as (cluster, producer):
        await (await producer.send("t", b"0"))
        row = Message(partition=0, error_code=0, base_offset=1)
        body = Message(topics=[Message(name="t", partitions=[row])], throttle_time_ms=60)
        cluster.control(Api.PRODUCE, Respond(body), times=1)
        await (await producer.send("t", b"told so"))
        loop = asyncio.get_running_loop()
        started = loop.time()
        await (await producer.send("t", b"1"))
        assert loop.time() - started >= 0.05
        assert values(cluster) == [b"0", b"1"]
        assert producer.metrics()["produce_throttle_time_max"] == 60


async def test_acks_0_is_done_when_it_is_written_to_the_socket() -> None:
    """With acks=0 no response is awaited, and the offset is unknown."""
    async with producing(acks=0) as (cluster, producer):
        assert await outcome(await producer.send("t", b"0")) == -1
        await until(lambda: values(cluster) == [b"0"])


async def test_close_waits_for_what_is_buffered() -> None:
    """Without a timeout `close` waits for all buffered records. New sends are rejected."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        delivery = await producer.send("t", b"0")
        await producer.close()
        assert await outcome(delivery) == 0
        assert values(cluster) == [b"0"]
        with pytest.raises(IllegalState):
            await producer.send("t", b"1")


async def test_close_with_a_timeout() -> None:
    """At the timeout, `close` fails queued and in-flight records with IllegalState and releases all memory."""
    async with producing(partitions=2) as (cluster, producer):
        await (await producer.send("t", b"0", partition=0))
        cluster.pause_node(1)
        flying = await producer.send("t", b"1", partition=0)
        await until(lambda: producer._sender._nodes[1].requests == 1)
        queued = await producer.send("t", b"2", partition=0)
        await producer.close(timeout_ms=20)
        assert [await outcome(delivery) for delivery in (flying, queued)] == [IllegalState, IllegalState]
        assert producer._memory.available == producer._memory.size
        cluster.resume_node(1)


async def test_close_while_there_is_no_producer_id() -> None:
    """A missing producer id delays `close` at most until its timeout."""
    async with producing() as (cluster, producer):
        cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        delivery = await producer.send("t", b"0")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await producer.close(timeout_ms=20)
        assert await outcome(delivery) is IllegalState


async def test_a_cancelled_flush_has_no_further_effect() -> None:
    """After a cancelled flush, batches linger again."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        delivery = await producer.send("t", b"0")
        cluster.pause_node(1)
        flush = asyncio.ensure_future(producer.flush())
        await asyncio.sleep(0)
        assert producer._accumulator.flushes == 1
        flush.cancel()
        with pytest.raises(asyncio.CancelledError):
            await flush
        assert producer._accumulator.flushes == 0
        cluster.resume_node(1)
        await producer.flush()
        assert delivery.done()


async def test_cancelled_before_and_after_it_was_sent() -> None:
    """Before it is sent, the record is dropped. Afterwards it is written anyway."""
    async with producing(linger_ms=60_000) as (cluster, producer):
        gone, kept = await producer.send("t", b"gone"), await producer.send("t", b"kept")
        assert gone.cancel()
        await producer.flush()
        assert await outcome(gone) is SendCancelled
        assert await outcome(kept) == 0
        cluster.control(Api.PRODUCE, Delay(30), times=1)
        flying = await producer.send("t", b"flying")
        flush = asyncio.ensure_future(producer.flush())
        await until(lambda: producer._sender._nodes[1].requests == 1)
        assert not flying.cancel()
        await flush
        assert values(cluster) == [b"kept", b"flying"]


async def test_an_open_transaction_is_aborted_on_close() -> None:
    """`close` aborts an open transaction, so read_committed consumers see none of its records."""
    for records in (0, 1):
        async with producing(transactional_id="tx") as (cluster, producer):
            await producer.init_transactions()
            await producer.begin_transaction()
            for _ in range(records):
                await (await producer.send("t", b"0"))
            await producer.close()
            assert values(cluster) == []
            assert len(cluster.records("t", committed=False)) >= records


async def test_close_with_a_timeout_in_a_transaction() -> None:
    """If an abort does not finish by the timeout, `close` leaves the transaction to time out at the coordinator."""
    async with producing(transactional_id="tx") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        delivery = await producer.send("t", b"0")
        await until(lambda: TP in producer._transaction.added if producer._transaction else False)
        cluster.pause_node(1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await producer.close(timeout_ms=20)
        assert delivery.done()
        cluster.resume_node(1)
        assert values(cluster) == []


async def test_close_of_a_fenced_producer() -> None:
    """A fenced producer has nothing to abort and closes at once."""
    async with producing(transactional_id="tx") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        cluster.control(Api.PRODUCE, Fail(ErrorCode.PRODUCER_FENCED), times=1)
        assert await outcome(await producer.send("t", b"0")) is ProducerFenced
        async with asyncio.timeout(PATIENCE_SECONDS):
            await producer.close()
        with pytest.raises(IllegalState):
            await producer.send("t", b"1")


async def test_a_transaction_after_an_invalid_state() -> None:
    """INVALID_TXN_STATE makes the transaction abortable. After the abort the next one succeeds in a new epoch."""
    async with producing(transactional_id="tx") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        await (await producer.send("t", b"0"))
        cluster.control(Api.PRODUCE, Fail(ErrorCode.INVALID_TXN_STATE), times=1)
        assert await outcome(await producer.send("t", b"1")) is InvalidTxnState
        with pytest.raises(TransactionAborted):
            await producer.send("t", b"2")
        epoch = producer._sender.completion.ledger.epoch
        await producer.abort_transaction()
        assert producer._sender.completion.ledger.epoch > epoch
        async with producer.transaction():
            await producer.send("t", b"3")
        assert values(cluster) == [b"3"]


async def test_records_in_flight_are_waited_for_before_the_commit() -> None:
    """The commit is requested after every record has its response."""
    async with producing(transactional_id="tx", linger_ms=60_000) as (cluster, producer):
        order: list[str] = []

        def note(request: Request) -> None:
            order.append(request.api.name)

        for api in (Api.PRODUCE, Api.END_TXN):
            cluster.control(api, note)
        await producer.init_transactions()
        async with producer.transaction():
            deliveries = [await producer.send("t", b"%d" % i) for i in range(3)]
        assert order == ["PRODUCE", "END_TXN"]
        assert [await outcome(delivery) for delivery in deliveries] == [0, 1, 2]
        assert values(cluster) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("code", [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.DUPLICATE_SEQUENCE_NUMBER])
async def test_an_append_that_the_leader_denies(code: ErrorCode) -> None:
    """If a leader appends and then responds that it is not the leader, each record is in the log once."""
    async with producing() as (cluster, producer):
        cluster.control(Api.PRODUCE, Fail(code, handled=True), times=2)
        deliveries = [await producer.send("t", b"%d" % i) for i in range(3)]
        assert [(await delivery).offset for delivery in deliveries] == [0, 1, 2]
        assert [record.value for record in cluster.records("t")] == [b"0", b"1", b"2"]


async def test_an_unexpected_error_while_connecting() -> None:
    """The node is tried again after its backoff, as after any other failure."""
    alone = Alone()
    know(alone.connection, {"t": {0: 1}})
    tried: list[int] = []

    async def broken(node: int) -> bool:
        tried.append(node)
        raise RuntimeError("nobody expected this")

    alone.connection.connect = broken  # type: ignore[method-assign]
    alone.sender.start(lambda error: None)
    alone.send()
    for now_ms in (10, 20, 5_000):
        alone.clock.advance(now_ms - alone.clock.monotonic_ms())
        alone.sender.run_once(now_ms)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert tried == [1, 1], "not within the backoff"
    await alone.sender.close()


async def test_the_backoff_of_a_node_grows_and_is_spread() -> None:
    """The backoff doubles from reconnect_backoff_ms to reconnect_backoff_max_ms, with 20 % jitter. A successful
    connection resets it."""
    alone, reached = Alone(), False
    know(alone.connection, {"t": {0: 1}})

    async def connect(_: int) -> bool:
        return reached

    alone.connection.connect = connect  # type: ignore[method-assign]
    alone.sender.start(lambda error: None)
    alone.send()
    node = alone.sender._nodes[1]

    async def try_again() -> int:
        alone.clock.advance(max(10, node.usable_at_ms) - alone.clock.monotonic_ms())
        alone.sender.run_once(alone.clock.monotonic_ms())
        assert node.connecting
        await until(lambda: not node.connecting)
        return node.usable_at_ms - alone.clock.monotonic_ms()

    waits = [await try_again() for _ in range(60)]
    for wait, backoff_ms in zip(waits, [50, 100, 200, 400, 800] + [1_000] * 55, strict=True):
        assert 0.8 * backoff_ms <= wait <= min(1.2 * backoff_ms, 1_000)
    assert min(waits[5:]) < 0.9 * 1_000
    assert alone.sender.is_away(TP)
    reached = True
    await try_again()
    assert not alone.sender.is_away(TP)
    reached = False
    assert 40 <= await try_again() <= 60
    # Another request, such as one for metadata, connects to the node.
    await try_again()
    assert alone.sender.is_away(TP)
    alone.connection.connected = lambda node: True  # type: ignore[method-assign]
    assert not alone.sender.is_away(TP)
    assert alone.sender._is_node_usable(1, node.usable_at_ms)
    alone.connection.connected = lambda node: False  # type: ignore[method-assign]
    assert 40 <= await try_again() <= 60
    await alone.sender.close()


async def test_a_full_buffer_sends_what_lingers() -> None:
    """A send without memory waits neither for the linger of other batches nor for its own timeout."""
    given = {"linger_ms": 60_000, "batch_size": 1_000, "buffer_memory": 2_000, "delivery_timeout_ms": 100_000}
    async with producing(partitions=3, **given) as (cluster, producer):
        async with asyncio.timeout(PATIENCE_SECONDS):
            first = await producer.send("t", b"0", partition=0)
            await producer.send("t", b"1", partition=1)
            assert not first.done()
            await producer.send("t", b"2", partition=2)
        assert first.done()
        assert [len(cluster.records("t", partition)) for partition in range(2)] == [1, 1]


async def test_an_unexpected_error_while_a_partition_is_added() -> None:
    """An unexpected error while adding a partition fails the transaction and its records with that error. After an
    abort the producer works."""
    async with producing(transactional_id="x") as (_, producer):
        await producer.init_transactions()
        await producer.begin_transaction()

        async def broken(partitions: object, *, first: bool) -> None:
            raise RuntimeError("nobody expected this")

        producer._sender.transaction_requests.add_partitions = broken  # type: ignore[method-assign]
        delivery = await producer.send("t", b"v")
        async with asyncio.timeout(PATIENCE_SECONDS):
            with pytest.raises(TransactionAborted, match="nobody expected this"):
                await delivery
        await producer.abort_transaction()
