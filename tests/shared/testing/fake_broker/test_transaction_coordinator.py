"""Timeouts and epochs of transactions, beyond the tests of the contract suite."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.protocol import Api, ErrorCode
from penstock.shared.testing.fake_broker.transaction_coordinator import END, EPOCH_MAX, PREPARED, TransactionState
from tests.shared.testing.fake_broker.test_broker_batches import built
from tests.shared.testing.fake_broker.test_cluster_state import cluster, produce, send_request


@pytest.fixture
def state() -> ClusterState:
    one = cluster(1)
    one.create_topic("t", 1, 1, {})
    return one


def begun(state: ClusterState, timeout_ms: int = 1_000, now_ms: int = 0) -> dict[str, Any]:
    """A producer with a batch in an open transaction."""
    given = send_request(state, Api.INIT_PRODUCER_ID, transactional_id="x", transaction_timeout_ms=timeout_ms)
    identity = {
        "transactional_id": "x",
        "producer_id": given.producer_id,
        "producer_epoch": given.producer_epoch,
    }
    send_request(
        state, Api.ADD_PARTITIONS_TO_TXN, now_ms=now_ms, topics=[Message(name="t", partitions=[0])], **identity
    )
    data = built(b"v", producer=(given.producer_id, given.producer_epoch, 0), transactional=True)
    assert produce(state, 1, data, transactional_id="x").topics[0].partitions[0].error_code == ErrorCode.NONE
    return identity


def test_a_transaction_times_out(state: ClusterState) -> None:
    """A transaction is aborted after its timeout, and its producer is fenced."""
    identity = begun(state, now_ms=500)
    log = state.topics["t"].partitions[0].log
    state.timers.run(1_499)
    assert log.last_stable_offset == 0
    state.timers.run(1_500)
    assert log.last_stable_offset == log.end_offset == 2
    assert state.transactions.known["x"].state is TransactionState.COMPLETE_ABORT
    assert send_request(state, Api.END_TXN, committed=True, **identity).error_code == ErrorCode.PRODUCER_FENCED
    data = built(b"w", producer=(identity["producer_id"], identity["producer_epoch"], 1), transactional=True)
    row = produce(state, 1, data, transactional_id="x").topics[0].partitions[0]
    assert row.error_code == ErrorCode.INVALID_PRODUCER_EPOCH


def test_a_transaction_that_ended_does_not_time_out(state: ClusterState) -> None:
    """The timer of an ended transaction is cancelled, and the next one has the full time."""
    identity = begun(state)
    assert send_request(state, Api.END_TXN, now_ms=900, committed=True, **identity).error_code == ErrorCode.NONE
    assert state.timers.next_ms is None
    topics = [Message(name="t", partitions=[0])]
    send_request(state, Api.ADD_PARTITIONS_TO_TXN, now_ms=950, topics=topics, **identity)
    assert state.timers.next_ms == 1_950


def test_a_new_producer_aborts_an_open_transaction(state: ClusterState) -> None:
    """While a transaction is open the next producer must retry, and then the transaction is aborted."""
    identity = begun(state)
    body = {"transactional_id": "x", "transaction_timeout_ms": 1_000}
    assert send_request(state, Api.INIT_PRODUCER_ID, **body).error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    given = send_request(state, Api.INIT_PRODUCER_ID, **body)
    assert (given.error_code, given.producer_id) == (ErrorCode.NONE, identity["producer_id"])
    assert given.producer_epoch > identity["producer_epoch"] + 1


def test_old_versions_have_the_old_error(state: ClusterState) -> None:
    """In versions before PRODUCER_FENCED a fenced producer gets INVALID_PRODUCER_EPOCH."""
    identity = {**begun(state), "producer_epoch": 9}
    codes = [
        send_request(state, Api.END_TXN, version=version, committed=True, **identity).error_code for version in (1, 2)
    ]
    assert codes == [ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED]


def test_after_the_last_epoch_there_is_a_new_producer_id(state: ClusterState) -> None:
    """The last epoch is followed by a new producer id with epoch zero."""
    known = begun(state)
    send_request(state, Api.END_TXN, committed=True, **known)
    state.transactions.known["x"].producer_epoch = EPOCH_MAX - 1
    given = send_request(state, Api.INIT_PRODUCER_ID, transactional_id="x", transaction_timeout_ms=1_000)
    assert given.producer_id != known["producer_id"]
    assert given.producer_epoch == 0
    topics = [Message(name="t", partitions=[0])]
    identity = {"transactional_id": "x", "producer_id": given.producer_id, "producer_epoch": 0}
    response = send_request(state, Api.ADD_PARTITIONS_TO_TXN, topics=topics, **identity)
    assert response.topics[0].partitions[0].error_code == ErrorCode.NONE
    assert state.transactions.verify(given.producer_id, 0, TopicPartition("t", 0)) is ErrorCode.NONE


def test_the_table_of_ends() -> None:
    """An open transaction can end both ways, and a prepared end only in its own."""
    for (state, committed), target in END.items():
        end = TransactionState.COMPLETE_COMMIT if committed else TransactionState.COMPLETE_ABORT
        assert PREPARED.get(target, target) is end
        assert state in (TransactionState.ONGOING, target)
    assert len(END) == 4


@pytest.mark.parametrize("committed", [True, False])
def test_requests_during_an_end_must_be_retried(committed: bool) -> None:
    """While the markers are written, requests for the transactional id must be retried."""
    state = ClusterState(transaction_completion_ms=50)
    state.nodes[1] = Node(1, "localhost", 1)
    state.create_topic("t", 1, 1, {})
    identity = begun(state)
    assert send_request(state, Api.END_TXN, committed=committed, **identity).error_code == ErrorCode.NONE
    log = state.topics["t"].partitions[0].log
    topics = [Message(name="t", partitions=[0])]

    def codes() -> list[int]:
        added = send_request(state, Api.ADD_PARTITIONS_TO_TXN, now_ms=40, topics=topics, **identity)
        return [
            added.topics[0].partitions[0].error_code,
            send_request(state, Api.ADD_OFFSETS_TO_TXN, now_ms=40, group_id="g", **identity).error_code,
            send_request(state, Api.END_TXN, now_ms=40, committed=committed, **identity).error_code,
            send_request(state, Api.INIT_PRODUCER_ID, transactional_id="x", transaction_timeout_ms=1_000).error_code,
        ]

    assert codes() == [ErrorCode.CONCURRENT_TRANSACTIONS] * 4
    other = send_request(state, Api.END_TXN, now_ms=40, committed=not committed, **identity)
    assert other.error_code == ErrorCode.INVALID_TXN_STATE
    assert (log.last_stable_offset, log.end_offset) == (0, 1)
    state.timers.run(49)
    assert log.end_offset == 1
    state.timers.run(50)
    assert (log.last_stable_offset, log.end_offset) == (2, 2)
    assert len(log.readable(committed=True)) == committed
    assert codes() == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.NONE, ErrorCode.CONCURRENT_TRANSACTIONS]


def test_a_producer_without_transactions_gets_an_id_of_its_own(state: ClusterState) -> None:
    """Each idempotent producer has its own id with epoch zero, and an empty transactional id is an error."""
    given = [
        send_request(state, Api.INIT_PRODUCER_ID, transactional_id=None, transaction_timeout_ms=0) for _ in range(2)
    ]
    assert given[0].producer_id != given[1].producer_id
    assert [one.producer_epoch for one in given] == [0, 0]
    response = send_request(state, Api.INIT_PRODUCER_ID, transactional_id="", transaction_timeout_ms=1_000)
    assert response.error_code == ErrorCode.INVALID_REQUEST
