"""Transactions: the state table, and the effects of failed batches and of errors of the coordinator."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.shared.clients.producer import Producer
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import TRANSITIONS, SequenceLedger, Transaction, TxnState
from penstock.shared.clients.producer.transaction_requests import TransactionRequests
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerError,
    BrokerNotAvailable,
    DeliveryTimeout,
    FencedInstanceId,
    IllegalState,
    InvalidProducerIdMapping,
    InvalidRequest,
    InvalidTxnState,
    KafkaTimeout,
    NotEnoughReplicas,
    OutOfOrderSequence,
    PenstockError,
    ProducerFenced,
    RecordTooLarge,
    TransactionAborted,
)
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, Close, ErrorCode, Fail, FakeCluster, Message, Request, Respond
from tests.shared.clients.producer.clusters import producing, values
from tests.shared.clients.producer.harness import (
    ABORTABLE,
    CLUSTER_AUTHORIZATION,
    FENCED,
    INVALID_RECORD,
    INVALID_TXN_STATE,
    NOT_LEADER,
    OLD_EPOCH,
    OUT_OF_ORDER,
    TIMED_OUT,
    TOO_LARGE,
    TOPIC_AUTHORIZATION,
    UNKNOWN_PRODUCER,
    A,
    B,
    C,
    Harness,
)

TP = TopicPartition("t", 0)


def in_state(state: TxnState) -> Transaction:
    made = Transaction("tx")
    made.state = state
    if state is TxnState.FATAL_ERROR:
        made.error = ProducerFenced("fenced")
    return made


@pytest.mark.parametrize(("source", "target"), list(itertools.product(TxnState, TxnState)))
def test_the_table(source: TxnState, target: TxnState) -> None:
    """A transition is allowed exactly if the table has it."""
    transaction = in_state(source)
    if source is TxnState.FATAL_ERROR:
        with pytest.raises(ProducerFenced):
            transaction.move(target)
    elif target in TRANSITIONS[source] or target is TxnState.FATAL_ERROR:
        transaction.move(target)
        assert transaction.state is target
    else:
        with pytest.raises(IllegalState, match="tx"):
            transaction.move(target)


def test_errors() -> None:
    """An error makes an open transaction abortable. A fatal one ends the producer."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.fail(NotEnoughReplicas("t-0"))
    with pytest.raises(TransactionAborted, match="t-0"):
        transaction.check_open("send")
    transaction.fail(ProducerFenced("newer"))
    with pytest.raises(ProducerFenced, match="newer"):
        transaction.check_open("send")
    transaction.fail(NotEnoughReplicas("t-0"))
    assert transaction.state is TxnState.FATAL_ERROR


def test_errors_that_change_the_state_are_logged() -> None:
    """The log has one line for each change of the state, and none for another error in the same state."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    with capture_logs() as logged:
        transaction.fail(NotEnoughReplicas("t-0"))
        transaction.fail(NotEnoughReplicas("t-1"))
        transaction.fail(ProducerFenced("newer"))
        transaction.fail(ProducerFenced("again"))
    with pytest.raises(ProducerFenced, match="newer"):
        transaction.check_fatal()
    assert [(one["event"], one["was"], one["state"], one["reason"]) for one in logged] == [
        ("transaction failed", "IN_TRANSACTION", "ABORTABLE_ERROR", "t-0"),
        ("transaction failed", "ABORTABLE_ERROR", "FATAL_ERROR", "newer"),
    ]


def test_an_error_without_a_transaction_has_no_effect() -> None:
    """An error without an open transaction changes no state and is not logged."""
    transaction = in_state(TxnState.READY)
    with capture_logs() as logged:
        transaction.fail(NotEnoughReplicas("t-0"))
    assert (transaction.state, logged) == (TxnState.READY, [])


def test_a_new_producer_has_no_transaction() -> None:
    """Nothing is open, and an abort would need neither a new epoch nor a repetition."""
    transaction = Transaction("tx")
    with pytest.raises(IllegalState, match="send needs an open transaction"):
        transaction.check_open("send")
    assert (transaction.is_empty, transaction.epoch_is_spent, transaction.abort_failed) == (True, False, False)
    assert repr(transaction) == "<Transaction tx: UNINITIALIZED, 0 partitions>"


@pytest.mark.parametrize("state", TxnState)
def test_a_commit_that_was_not_sent_leaves_the_transaction_open(state: TxnState) -> None:
    """Only a transaction that is being committed is opened again."""
    transaction = in_state(state)
    transaction.not_committed()
    assert transaction.state is (TxnState.IN_TRANSACTION if state is TxnState.COMMITTING else state)


def test_partitions_added_to_a_transaction() -> None:
    """A partition is muted until it is added. After the end no partition is."""
    transaction = in_state(TxnState.IN_TRANSACTION)
    transaction.want({TP})
    assert transaction.muted(TP)
    transaction.added.add(TP)
    transaction.want({TP, TopicPartition("t", 1)})
    assert not transaction.muted(TP)
    transaction.pending.discard(TP)
    transaction.want({TopicPartition("t", 2)})
    assert transaction.pending == {TopicPartition("t", 1), TopicPartition("t", 2)}
    transaction.move(TxnState.COMMITTING)
    transaction.ended()
    assert (transaction.state, transaction.added, transaction.pending) == (TxnState.READY, set(), set())


def test_the_first_request_of_each_transaction() -> None:
    """Each transaction starts without a request. The first one to add a partition or a group is known as such."""
    transaction = in_state(TxnState.READY)
    for number in (1, 2):
        transaction.begin()
        assert (transaction.number, transaction.is_empty) == (number, True)
        assert [transaction.adding() for _ in range(3)] == [True, False, False]
        assert not transaction.is_empty
        transaction.move(TxnState.COMMITTING)
        transaction.ended()
        assert transaction.is_empty


class Granting:
    """A connection whose requests for a producer id return the next epoch of id 9. With `failure` all fail."""

    client_id = "c"
    settings = KafkaSettings()

    def __init__(self, failure: BaseException | None = None) -> None:
        self.failure = failure
        self.requests: list[Any] = []
        self.where: set[str] = set()
        self.retries: set[tuple[int, bool]] = set()

    def any_node(self) -> int:
        return 1

    async def send(self, node: int, request: Any, where: str) -> Any:
        if self.failure is not None:
            raise self.failure
        self.requests.append(request._fields[:4])
        self.where.add(where)
        return SimpleNamespace(error_code=0, producer_id=9, producer_epoch=len(self.requests))

    async def request_coordinator(self, kind: str, key: str, request: Any, where: str) -> Any:
        assert (kind, key) == ("transaction", "x")
        return await self.send(1, request, where)

    async def retrying(
        self, call: Callable[[], Awaitable[Any]], where: str, timeout_ms: int, *, soon: bool = False
    ) -> Any:
        self.retries.add((timeout_ms, soon))
        return await call()


@pytest.mark.parametrize(
    ("transaction", "timeout_ms", "state", "where", "patience_ms"),
    [
        (Transaction("x"), 5_000, (9, 1, 0), "transactional id x", 7_000),
        (None, 2**31 - 1, (7, 0, 1), "producer id", KafkaSettings().request_timeout_ms),
    ],
)
async def test_a_new_identity_begins_new_numbers_between_transactions(
    transaction: Transaction | None, timeout_ms: int, state: tuple[int, int, int], where: str, patience_ms: int
) -> None:
    """Without transactions, partitions with batches in flight keep the old producer id. All others start with the new
    one. Error messages name the transactional id, if there is one."""
    connection, ledger = Granting(), SequenceLedger()
    transactional_id = transaction.transactional_id if transaction else None
    settings = ProducerSettings(transactional_id=transactional_id, transaction_timeout_ms=5_000, max_block_ms=7_000)
    requests = TransactionRequests(connection, settings, ledger, transaction)  # type: ignore[arg-type]
    ledger.adopt(7, 0)
    ledger.assign(TP, 1)
    await requests.init_producer_id()
    assert ledger.assign(TP, 1) == state
    assert ledger.assign(TP._replace(partition=1), 1) == (9, 1, 0)
    if transaction:
        transaction.epoch_is_spent = True
    await requests.init_producer_id(bump=True)
    assert connection.requests == [
        (transactional_id, timeout_ms, -1, -1),
        (transactional_id, timeout_ms, 9, 1),
    ]
    assert (ledger.producer_id, ledger.epoch) == (9, 2)
    assert (connection.where, connection.retries) == ({where}, {(patience_ms, False)})
    assert transaction is None or not transaction.epoch_is_spent


@pytest.mark.parametrize("failure", [KafkaTimeout(""), BrokerNotAvailable(""), asyncio.CancelledError()])
async def test_a_request_without_a_response_spends_the_epoch(failure: BaseException) -> None:
    """The coordinator may still carry it out, also if the call was cancelled."""
    transaction = Transaction("x")
    settings = ProducerSettings(transactional_id="x")
    requests = TransactionRequests(Granting(failure), settings, SequenceLedger(), transaction)  # type: ignore[arg-type]
    with pytest.raises(type(failure)):
        await requests.end(commit=True)
    assert transaction.epoch_is_spent


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


@pytest.mark.parametrize("before", [0, 1])
async def test_an_abort_of_a_transaction_that_did_not_begin(before: int) -> None:
    """The first request is rejected, so the coordinator has no transaction. The abort and the next one succeed."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        for _ in range(before):
            await transact(producer, offsets=False)
        cluster.control(Api.ADD_OFFSETS_TO_TXN, Fail(ErrorCode.GROUP_AUTHORIZATION_FAILED), times=1)
        await producer.begin_transaction()
        with pytest.raises(AuthorizationFailed, match="group g"):
            await producer.send_offsets_to_transaction({TP: OffsetAndMetadata(1)}, GroupMetadata("g"))
        await producer.abort_transaction()
        await transact(producer, offsets=True)
        assert cluster.committed("g")[TP].offset == 1


async def test_a_cancelled_call_with_offsets_fails_the_transaction() -> None:
    """A commit would lack the offsets, so the transaction must be aborted. The producer can then go on."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        await producer.begin_transaction()
        sent = producer.send_offsets_to_transaction({TP: OffsetAndMetadata(1)}, GroupMetadata("g"))
        cancelled = asyncio.ensure_future(sent)
        cluster.control(Api.ADD_OFFSETS_TO_TXN, lambda _: Close() if cancelled.cancel() else None, times=1)
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        with pytest.raises(TransactionAborted, match="cancelled"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await transact(producer, offsets=True)
        assert cluster.committed("g")[TP].offset == 1


async def test_offsets_are_checked_before_a_request() -> None:
    """An offset may be a number, as in a consumer's commit. An invalid one leaves the transaction as it was."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        async with producer.transaction():
            with pytest.raises(ValueError, match="t-0"):
                await producer.send_offsets_to_transaction({TP: -1}, GroupMetadata("g"))
            await producer.send_offsets_to_transaction({TP: 3}, GroupMetadata("g"))
        assert cluster.committed("g")[TP] == OffsetAndMetadata(3)


@pytest.mark.parametrize("is_handled", [False, True])
@pytest.mark.parametrize("api", [Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.TXN_OFFSET_COMMIT, Api.END_TXN])
async def test_a_request_that_arrives_late_cannot_touch_the_next_transaction(api: Api, is_handled: bool) -> None:
    """After a request without a response, the next transaction has the next epoch. Brokers then reject the request."""
    epochs: list[int] = []
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        cluster.control(Api.END_TXN, lambda request: epochs.append(request.body.producer_epoch))
        cluster.control(api, Close(handled=is_handled), times=1)
        for _ in range(3):
            await transact(producer, offsets=True)
        assert values(cluster) == [b"v"] * 3
    first, *_, second, third = epochs
    assert (second, third) == (first + 1, first + 1)


async def test_an_abort_of_a_transaction_whose_begin_had_no_response() -> None:
    """The coordinator began the transaction, but its response was lost. The abort ends the transaction there."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        cluster.control(Api.ADD_PARTITIONS_TO_TXN, Close(handled=True), times=1)
        cluster.control(Api.ADD_PARTITIONS_TO_TXN, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED), times=1)
        await producer.begin_transaction()
        await producer.send("t", b"v")
        with pytest.raises(TransactionAborted, match="TOPIC_AUTHORIZATION_FAILED"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        assert cluster.end_offset("t") == 1, "the marker of the abort"
        await transact(producer, offsets=False)
        assert values(cluster) == [b"v"]


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
async def test_coordinator_errors_that_end_the_producer(api: Api, code: ErrorCode, error: type[PenstockError]) -> None:
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


async def test_a_producer_that_may_not_use_its_transactional_id() -> None:
    """Each call of `init_transactions` raises the error."""
    async with producing(transactional_id="x") as (cluster, producer):
        cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
        for _ in range(2):
            with pytest.raises(AuthorizationFailed, match="TRANSACTIONAL_ID"):
                await producer.init_transactions()


async def test_a_topic_whose_metadata_is_forbidden() -> None:
    """`send` raises an abortable error. The transaction is aborted, and the next one succeeds."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        await producer.partitions_for("t")
        host, port = cluster.bootstrap_servers.split(":")
        response = Message(
            brokers=[Message(node_id=cluster.nodes[0], host=host, port=int(port))],
            controller_id=cluster.nodes[0],
            topics=[Message(name="secret", error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)],
        )
        control = cluster.control(Api.METADATA, lambda _: Respond(response))
        with pytest.raises(AuthorizationFailed, match="topic secret") as caught:
            async with producer.transaction():
                await producer.send("secret", b"v")
        control.remove()
        assert caught.value.abortable
        await transact(producer, offsets=False)
        assert values(cluster) == [b"v"]


@pytest.mark.parametrize("api", [Api.INIT_PRODUCER_ID, Api.END_TXN])
async def test_a_coordinator_that_has_moved_is_looked_up_again(api: Api) -> None:
    """The request is repeated at the coordinator that the second look-up finds."""
    async with producing(transactional_id="x") as (cluster, producer):
        lookups: list[Request] = []
        cluster.control(Api.FIND_COORDINATOR, lambda request: lookups.append(request))
        cluster.control(api, Fail(ErrorCode.NOT_COORDINATOR), times=1)
        await producer.init_transactions()
        await transact(producer, offsets=False)
        assert len(lookups) == 2
        assert values(cluster) == [b"v"]


@pytest.mark.parametrize("cause", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.TRANSACTION_ABORTABLE])
async def test_the_error_names_the_rejected_partition(cause: ErrorCode) -> None:
    """The error names the rejected partition, also if it is the last in the response."""
    async with producing(partitions=2, transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        rows = [Message(partition=number, error_code=code) for number, code in ((0, 55), (1, cause))]
        response = Respond(Message(topics=[Message(name="t", partitions=rows)]))
        cluster.control(Api.ADD_PARTITIONS_TO_TXN, response, times=1)
        await producer.begin_transaction()
        for number in (0, 1):
            await producer.send("t", b"refused", partition=number)
        with pytest.raises(TransactionAborted, match=f"t-1: {cause.name}"):
            await producer.commit_transaction()
        await producer.abort_transaction()
        await transact(producer, offsets=False)


async def test_a_commit_with_an_unknown_outcome_may_be_repeated() -> None:
    """The transaction is not aborted. The commit may be requested again, and the records are there once."""
    async with producing(transactional_id="x") as (cluster, producer):
        await producer.init_transactions()
        cluster.control(Api.END_TXN, Fail(-1, handled=True), times=1)
        with pytest.raises(BrokerError):
            async with producer.transaction():
                await producer.send("t", b"v")
        with pytest.raises(IllegalState):
            await producer.begin_transaction()
        await producer.commit_transaction()
        assert values(cluster) == [b"v"]
        await transact(producer, offsets=False)


@pytest.mark.parametrize("api", [Api.ADD_PARTITIONS_TO_TXN, Api.ADD_OFFSETS_TO_TXN, Api.END_TXN])
async def test_a_forgotten_producer_id_fails_one_transaction(api: Api) -> None:
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


def open_transaction(**settings: object) -> tuple[Harness, Transaction]:
    core = Harness(transactional_id="tx", batch_size=100, **settings)
    core.warm_up(A, B)
    assert core.transaction is not None
    return core, core.transaction


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (OUT_OF_ORDER, OutOfOrderSequence),
        (UNKNOWN_PRODUCER, OutOfOrderSequence),
        (INVALID_TXN_STATE, InvalidTxnState),
        (OLD_EPOCH, ProducerFenced),
        (TOPIC_AUTHORIZATION, AuthorizationFailed),
    ],
)
def test_errors_that_abort_the_transaction_only(code: int, error: type[Exception]) -> None:
    """The transaction must be aborted with a new epoch. The record gets the error, and queued records are dropped."""
    core, transaction = open_transaction()
    record, queued = core.send(A), core.send(B)
    core.leaders[B] = None
    core.respond(core.turn_one(), code)
    assert type(record.fate) is error
    assert isinstance(queued.fate, TransactionAborted)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert transaction.epoch_is_spent
    assert core.all_memory_is_back
    with pytest.raises(TransactionAborted):
        transaction.check_open("send")
    core.turn()
    assert core.ledger.epoch == 0, "the coordinator grants the next one"


@pytest.mark.parametrize("code", [TOO_LARGE, TIMED_OUT, INVALID_TXN_STATE])
def test_an_epoch_stays_spent(code: int) -> None:
    """Whatever becomes of the transaction's later batches, the abort requests the next epoch."""
    core, transaction = open_transaction()
    core.send(A)
    core.send(B)
    one, two = core.turn()
    core.respond(one, OUT_OF_ORDER)
    core.respond(two, code)
    assert transaction.epoch_is_spent


def test_batches_of_a_commit_are_retried() -> None:
    """While the transaction is being committed, a temporary error does not fail it."""
    core, transaction = open_transaction()
    record = core.send()
    transaction.move(TxnState.COMMITTING)
    core.respond(core.turn_one(), NOT_LEADER)
    assert core.after_backoff() == [record.batch]
    core.respond(record.batch, offset=1)
    assert record.offset == 1
    assert transaction.state is TxnState.COMMITTING


@pytest.mark.parametrize(
    ("code", "error"),
    [(FENCED, ProducerFenced), (CLUSTER_AUTHORIZATION, AuthorizationFailed)],
)
def test_rejections_that_end_the_producer(code: int, error: type[Exception]) -> None:
    """After fencing or a denied authorization every later call raises the error. Fencing may be due to the timeout."""
    core, transaction = open_transaction()
    record, queued = core.send(A), core.send(B)
    core.leaders[B] = None
    core.respond(core.turn_one(), code)
    assert type(record.fate) is type(queued.fate) is error
    assert ("transaction_timeout_ms=60000" in str(record.fate)) is (code == FENCED)
    assert transaction.state is TxnState.FATAL_ERROR
    with pytest.raises(error):
        transaction.check_open("send")


def test_an_abortable_error_of_the_broker() -> None:
    """TRANSACTION_ABORTABLE makes the transaction abortable."""
    core, transaction = open_transaction()
    record = core.send()
    core.respond(core.turn_one(), ABORTABLE)
    assert isinstance(record.fate, TransactionAborted)
    assert record.fate.abortable
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_a_sequence_gap_after_a_rejected_batch_is_not_fatal() -> None:
    """A batch after a rejected one fails for the sequence gap. The abort resolves it, and the sequence number is
    reused."""
    core, transaction = open_transaction()
    core.send(value=b"x" * 60)
    core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, TOO_LARGE)
    assert isinstance(one.error, RecordTooLarge)
    core.respond(two, OUT_OF_ORDER)
    assert isinstance(two.error, OutOfOrderSequence)
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_out_of_order_behind_a_pending_batch_is_tried_again() -> None:
    """The batch waits for the one before it, and the transaction continues."""
    core, transaction = open_transaction()
    core.send(value=b"x" * 60)
    core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, NOT_LEADER)
    core.respond(two, OUT_OF_ORDER)
    for batch in (one, two):
        assert core.after_backoff() == [batch]
        core.respond(batch)
    assert transaction.state is TxnState.IN_TRANSACTION


def test_an_old_epoch_behind_a_pending_batch_aborts() -> None:
    """A batch whose epoch is rejected is not retried in a transaction, although an earlier one is pending."""
    core, transaction = open_transaction()
    core.send(value=b"x" * 60)
    rejected = core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, NOT_LEADER)
    core.respond(two, OLD_EPOCH)
    assert isinstance(rejected.fate, ProducerFenced)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert core.after_backoff() == []


def test_several_batches_expire_at_once() -> None:
    """Each batch fails once: the first with DeliveryTimeout, the others of the transaction with TransactionAborted."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    core.down = {1}
    one, two = core.send(A), core.send(B)
    core.after(1_000)
    assert isinstance(one.fate, DeliveryTimeout)
    assert isinstance(two.fate, TransactionAborted)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert not transaction.epoch_is_spent, "nothing of it was sent"
    assert core.all_memory_is_back


def test_a_batch_in_flight_expires_behind_queued_ones() -> None:
    """The first batch ends the transaction, and with it the queued second one. The third, in flight, expires too."""
    core, _ = open_transaction(delivery_timeout_ms=1_000)
    core.leaders |= {A: None, B: None}
    one, two, three = core.send(A), core.send(B), core.send(C)
    assert core.turn() == [three.batch]
    core.after(1_000)
    assert [type(record.fate) for record in (one, two, three)] == [DeliveryTimeout, TransactionAborted, DeliveryTimeout]


def test_expired_in_flight() -> None:
    """The transaction is abortable. Since the outcome is unknown, the abort requests a new epoch."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    record = core.send()
    batch = core.turn_one()
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert not transaction.epoch_is_spent
    core.lose(batch)
    assert transaction.epoch_is_spent
    assert core.all_memory_is_back


def test_a_late_rejection_of_an_expired_batch() -> None:
    """A late error for an expired batch has no effect."""
    core, transaction = open_transaction(delivery_timeout_ms=1_000)
    record = core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.respond(batch, INVALID_TXN_STATE)
    assert isinstance(record.fate, DeliveryTimeout)
    assert transaction.state is TxnState.ABORTABLE_ERROR
    transaction.move(TxnState.ABORTING)


def test_one_partition_of_a_response_fails() -> None:
    """Successful batches of the response are acknowledged once, and their memory is released once."""
    core, transaction = open_transaction()
    core.send(A)
    good = core.send(B)
    one, two = core.turn()
    core.respond(one, TOO_LARGE)
    assert good.fate is None
    core.respond(two, offset=4)
    assert good.offset == 4
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert core.all_memory_is_back


def test_batches_of_an_aborting_transaction_are_not_retried() -> None:
    """Once a transaction must be aborted, failed batches are neither retried nor split."""
    core, transaction = open_transaction()
    core.send(A)
    records = [core.send(B) for _ in range(2)]
    one, two = core.turn()
    core.respond(one, INVALID_TXN_STATE)
    core.respond(two, TOO_LARGE)
    assert all(isinstance(record.fate, RecordTooLarge) for record in records)
    assert core.after_backoff() == []
    assert transaction.state is TxnState.ABORTABLE_ERROR


def test_records_that_were_taken_back_fail_an_open_transaction() -> None:
    """A commit would silently omit cancelled records. In an aborting transaction, or without one, they have no
    effect."""
    for state, expected in (
        (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR),
        (TxnState.COMMITTING, TxnState.ABORTABLE_ERROR),
        (TxnState.ABORTING, TxnState.ABORTING),
    ):
        core = Harness(transactional_id="tx", linger_ms=10)
        assert core.transaction is not None
        record, other = core.send(A), core.send(B)
        core.transaction.state = state
        assert record.cancel()
        record.batch.cancelled_records()
        assert core.transaction.state is expected
        assert isinstance(other.fate, TransactionAborted) is (expected is TxnState.ABORTABLE_ERROR)
    core = Harness(linger_ms=10)
    record, other = core.send(A), core.send(B)
    assert record.cancel()
    record.batch.cancelled_records()
    assert [batch.tp for batch in core.after(10)] == [B]
    assert other.fate is None


def test_a_split_in_a_transaction() -> None:
    """The parts belong to the transaction and share the sequence numbers of the batch."""
    core, transaction = open_transaction()
    records = [core.send(value=b"%d" % i) for i in range(2)]
    core.respond(core.turn_one(), TOO_LARGE)
    for number in (1, 2):
        batch = core.turn_one()
        assert batch.transactional
        assert core.state(batch) == (0, number)
        core.respond(batch, offset=number)
    assert [record.offset for record in records] == [1, 2]
    assert transaction.state is TxnState.IN_TRANSACTION
    assert core.after(20_000) == []


@pytest.mark.parametrize("is_aborting", [False, True])
def test_an_invalid_record_in_a_transaction(is_aborting: bool) -> None:
    """It has its own error. The valid records of its batch were not written because of it."""
    core, transaction = open_transaction()
    records = [core.send() for _ in range(4)]
    batch = core.turn_one()
    if is_aborting:
        core.completion.fail_transaction(RecordTooLarge("of another partition"))
    core.respond(batch, INVALID_RECORD, invalid=(0, 2))
    errors = [InvalidRequest, TransactionAborted, InvalidRequest, TransactionAborted]
    assert [type(record.fate) for record in records] == errors
    assert transaction.state is TxnState.ABORTABLE_ERROR
    assert core.after_backoff() == []
    assert core.all_memory_is_back


def test_a_rejected_number_is_used_again_after_the_abort() -> None:
    """No outcome is unknown, so the next transaction continues in the same epoch."""
    core, transaction = open_transaction()
    core.send()
    core.respond(core.turn_one(), TOO_LARGE)
    assert not transaction.epoch_is_spent
    transaction.move(TxnState.ABORTING)
    transaction.ended()
    transaction.begin()
    transaction.added.add(A)
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_a_flush_for_the_commit_overrides_linger() -> None:
    """During a commit batches do not linger. In the next transaction they do."""
    core, transaction = open_transaction(linger_ms=0)
    core = Harness(transactional_id="tx", linger_ms=50)
    assert core.transaction is not None
    transaction = core.transaction
    record = core.send()
    assert core.turn() == []
    transaction.move(TxnState.COMMITTING)
    core.accumulator.flushes += 1
    assert core.turn() == [record.batch]
    core.respond(record.batch)
    core.accumulator.flushes -= 1
    transaction.ended()
    transaction.begin()
    transaction.added.add(A)
    again = core.send()
    assert core.after(49) == []
    assert core.after(1) == [again.batch]


def test_aborted_without_an_error() -> None:
    """Unsent batches fail with the abort's error, without a warning. Batches in flight are waited for."""
    core, transaction = open_transaction()
    flying = core.send(A)
    core.turn()
    core.leaders[B] = None
    queued = core.send(B)
    transaction.move(TxnState.ABORTING)
    with capture_logs() as logged:
        core.completion.fail_all(TransactionAborted("aborted before the record was sent"), out=False)
    assert [(one["event"], one["log_level"]) for one in logged] == [("records given up", "debug")]
    assert isinstance(queued.fate, TransactionAborted)
    assert flying.fate is None
    core.respond(flying.batch, NOT_LEADER)
    assert flying.fate is not None
    assert transaction.state is TxnState.ABORTING
    transaction.ended()
