"""The effects of coordinator errors: some abort the transaction, others are fatal for the producer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.shared.clients.producer import Producer
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import SequenceLedger, TransactionRequests
from penstock.shared.common.errors import (
    AuthorizationFailed,
    FencedInstanceId,
    InvalidProducerIdMapping,
    InvalidTxnState,
    PenstockError,
    ProducerFenced,
    TransactionAborted,
)
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Message, Request, Respond
from tests.shared.clients.producer.clusters import producing, values

TP = TopicPartition("t", 0)


class Granting:
    """A connection whose requests for a producer id return the next epoch of id 9."""

    client_id = "c"

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.where: set[str] = set()

    def any_node(self) -> int:
        return 1

    async def send(self, node: int, request: Any, where: str) -> Any:
        self.requests.append(request._fields[:4])
        self.where.add(where)
        return SimpleNamespace(error_code=0, producer_id=9, producer_epoch=len(self.requests))

    async def request_coordinator(self, kind: str, key: str, request: Any, where: str) -> Any:
        assert (kind, key) == ("transaction", "x")
        return await self.send(1, request, where)

    async def retrying(self, call: Callable[[], Awaitable[Any]], where: str, timeout_ms: int, *, soon: bool) -> Any:
        return await call()


@pytest.mark.parametrize(
    ("transactional_id", "timeout_ms", "state", "where"),
    [("x", 5_000, (9, 1, 0), "transactional id x"), (None, 2**31 - 1, (7, 0, 1), "producer id")],
)
async def test_a_new_identity_begins_new_numbers_between_transactions(
    transactional_id: str | None, timeout_ms: int, state: tuple[int, int, int], where: str
) -> None:
    """Without transactions, partitions with batches in flight keep the old producer id. All others start with the new
    one. Error messages name the transactional id, if there is one."""
    connection, ledger = Granting(), SequenceLedger()
    settings = ProducerSettings(transactional_id=transactional_id, transaction_timeout_ms=5_000)
    requests = TransactionRequests(connection, settings, ledger)  # type: ignore[arg-type]
    ledger.adopt(7, 0)
    ledger.assign(TP, 1)
    await requests.init_producer_id()
    assert ledger.assign(TP, 1) == state
    assert ledger.assign(TP._replace(partition=1), 1) == (9, 1, 0)
    await requests.init_producer_id(bump=True)
    assert connection.requests == [
        (transactional_id, timeout_ms, -1, -1),
        (transactional_id, timeout_ms, 9, 1),
    ]
    assert (ledger.producer_id, ledger.epoch) == (9, 2)
    assert connection.where == {where}


PATIENCE_SECONDS = 30


async def transact(producer: Producer, *, offsets: bool) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS), producer.transaction():
        delivery = await producer.send("t", b"v")
        if offsets:
            await producer.send_offsets_to_transaction({TP: OffsetAndMetadata(1)}, GroupMetadata("g"))
        await delivery


async def time_out(cluster: FakeCluster, producer: Producer) -> None:
    await producer.begin_transaction()
    await (await producer.send("t", b"early"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while cluster.end_offset("t") < 2:  # noqa: ASYNC110 - the marker has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("api", "code", "error"),
    [
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.TOPIC_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.FIND_COORDINATOR, ErrorCode.GROUP_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.ADD_OFFSETS_TO_TXN, ErrorCode.GROUP_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.GROUP_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.FENCED_INSTANCE_ID, FencedInstanceId),
    ],
)
async def test_coordinator_errors_that_only_abort(api: Api, code: ErrorCode, error: type[PenstockError]) -> None:
    """The error has its reason and is abortable. The next transaction succeeds."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        control = cluster.control(api, Fail(code), times=1)
        with pytest.raises((error, TransactionAborted), match=code.name) as caught:
            await transact(producer, offsets=api is not Api.ADD_PARTITIONS_TO_TXN)
        cause = caught.value.__cause__ if isinstance(caught.value, TransactionAborted) else caught.value
        assert cause is None or isinstance(cause, error)
        assert caught.value.abortable
        control.remove()
        await transact(producer, offsets=True)
        assert values(cluster) == [b"v"], "the first was aborted"
        assert cluster.committed("g")[TP].offset == 1


@pytest.mark.parametrize(
    ("api", "code", "error"),
    [
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.PRODUCER_FENCED, ProducerFenced),
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.INVALID_TXN_STATE, InvalidTxnState),
        (Api.ADD_OFFSETS_TO_TXN, ErrorCode.INVALID_PRODUCER_EPOCH, ProducerFenced),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.INVALID_PRODUCER_EPOCH, ProducerFenced),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, AuthorizationFailed),
        (Api.END_TXN, ErrorCode.PRODUCER_FENCED, ProducerFenced),
    ],
)
async def test_refusals_that_end_the_producer(api: Api, code: ErrorCode, error: type[PenstockError]) -> None:
    """Every later call raises the same error. A fencing error names both possible causes."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        cluster.control(api, Fail(code))
        with pytest.raises(error, match=code.name) as caught:
            await transact(producer, offsets=api in (Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT))
        assert not caught.value.abortable
        if error is ProducerFenced:
            assert "a newer producer" in str(caught.value)
            assert "transaction_timeout_ms=60000" in str(caught.value)
        with pytest.raises(error):
            await producer.begin_transaction()


async def test_the_error_names_the_rejected_partition() -> None:
    """The error names the rejected partition, also if it is the last in the response."""
    async with producing(partitions=2, transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        rows = [
            Message(partition=number, error_code=code)
            for number, code in ((0, 55), (1, ErrorCode.TOPIC_AUTHORIZATION_FAILED))
        ]
        response = Respond(Message(topics=[Message(name="t", partitions=rows)]))
        cluster.control(Api.ADD_PARTITIONS_TO_TXN, response, times=1)
        await producer.begin_transaction()
        for number in (0, 1):
            await producer.send("t", b"refused", partition=number)
        with pytest.raises(TransactionAborted, match="t-1: TOPIC_AUTHORIZATION_FAILED"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await transact(producer, offsets=False)


@pytest.mark.parametrize("api", [Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.END_TXN])
async def test_an_expired_id_is_fetched_anew(api: Api) -> None:
    """If the coordinator has forgotten the producer id, the transaction fails and the next one commits."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        ledger = producer._sender.completion.ledger
        before = ledger.epoch
        control = cluster.control(api, Fail(ErrorCode.INVALID_PRODUCER_ID_MAPPING), times=2)
        with pytest.raises((InvalidProducerIdMapping, TransactionAborted)):
            await transact(producer, offsets=True)
        control.remove()
        if api is Api.END_TXN:
            assert ledger.epoch > before
        await transact(producer, offsets=False)
        assert values(cluster) == [b"v"]


async def test_a_transaction_that_took_too_long() -> None:
    """A transaction that the coordinator timed out fails its records with an abortable error. After the abort the next
    transaction commits."""
    async with producing(transactional_id="x", transaction_timeout_ms=100) as (cluster, producer):
        await producer.init_transactions()
        await time_out(cluster, producer)
        late = await producer.send("t", b"late")
        with pytest.raises(ProducerFenced, match="transaction_timeout_ms=100") as caught:
            await late
        assert caught.value.abortable
        with pytest.raises(TransactionAborted, match="transaction_timeout_ms=100"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await transact(producer, offsets=True)
        assert values(cluster) == [b"v"]


async def test_an_abort_of_what_timed_out() -> None:
    """Aborting a transaction that has timed out succeeds, and the next transaction commits."""
    async with producing(transactional_id="x", transaction_timeout_ms=100) as (cluster, producer):
        await producer.init_transactions()
        await time_out(cluster, producer)
        await producer.abort_transaction()
        await transact(producer, offsets=False)
        assert values(cluster) == [b"v"]


async def test_an_abort_of_a_fenced_producer() -> None:
    """If a newer producer has the id, the request for the next epoch fails fatally."""
    async with producing(transactional_id="x") as (cluster, old), producing(transactional_id="x") as (_, __):
        await old.init_transactions()
        await old.begin_transaction()
        await (await old.send("t", b"old"))
        async with Producer(old._connection.settings, old._settings) as new:
            await new.init_transactions()
            with pytest.raises(ProducerFenced, match="a newer producer"):
                await old.abort_transaction()
            with pytest.raises(ProducerFenced):
                await old.begin_transaction()
            await transact(new, offsets=False)
        assert values(cluster) == [b"v"]


async def test_transactions_follow_each_other_soon() -> None:
    """While the previous transaction completes, the next one is retried within milliseconds."""
    async with FakeCluster(transaction_completion_ms=20) as cluster:
        cluster.create_topic("t")
        async with producing(transactional_id="x") as (_, template):
            settings = template._connection.settings.model_copy(
                update={"bootstrap_servers": cluster.bootstrap_servers, "retry_backoff_ms": 60_000}
            )
            requests = 0

            def count(_: Request) -> None:
                nonlocal requests
                requests += 1

            cluster.control(Api.ADD_PARTITIONS_TO_TXN, count)
            async with Producer(settings, template._settings) as producer:
                await producer.init_transactions()
                for _ in range(3):
                    await transact(producer, offsets=False)
            assert requests > 3, "the second and the third were refused at first"
            assert len(cluster.records("t", committed=False)) == 3
