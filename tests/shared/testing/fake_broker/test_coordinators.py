"""Groups, and transactions with their timeouts and epochs, beyond the tests of the contract suite."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.group import BrokerGroup, BrokerGroupState
from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.protocol import Api, ErrorCode
from penstock.shared.testing.fake_broker.timers import Timers
from penstock.shared.testing.fake_broker.transaction_coordinator import END, EPOCH_MAX, PREPARED, TransactionState
from tests.shared.testing.fake_broker.test_cluster import produce, send_request, state_of
from tests.shared.testing.fake_broker.test_partition_logs import built

CLIENT = ("client", "/127.0.0.1")
VERSION = 3
"""A version without required member ids, in which one join suffices."""


def joining(member_id: str = "", *, session_ms: int = 1_000, rebalance_ms: int = 5_000, **more: Any) -> Message:
    return Message(
        **{
            "member_id": member_id,
            "group_instance_id": None,
            "session_timeout_ms": session_ms,
            "rebalance_timeout_ms": rebalance_ms,
            "protocol_type": "consumer",
            "protocols": [Message(name="range", metadata=b"m")],
            **more,
        }
    )


def identity(member: Message, **more: Any) -> Message:
    return Message(
        **{
            "member_id": member.member_id,
            "generation_id": member.generation_id,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [],
            **more,
        }
    )


def done(response: Message | DelayedResponse) -> Message:
    assert isinstance(response, DelayedResponse)
    assert response.is_done
    return response.value  # type: ignore[no-any-return]


def stable(group: BrokerGroup, now_ms: int = 0) -> Message:
    """The only member of a group, in a stable generation."""
    member = done(group.join(VERSION, CLIENT, joining(), now_ms))
    group.sync(VERSION, identity(member), now_ms)
    assert group.state is BrokerGroupState.STABLE
    return member


def test_a_member_that_does_not_rejoin_is_removed() -> None:
    """A rebalance waits for the longest timeout of a member, and continues without those that did not join."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    old = stable(group)
    new = group.join(VERSION, CLIENT, joining(rebalance_ms=3_000), 100)
    assert isinstance(new, DelayedResponse)
    for now in range(200, 5_100, 300):
        assert group.heartbeat(identity(old), now) is ErrorCode.REBALANCE_IN_PROGRESS
        timers.run(now)
    assert not new.is_done
    timers.run(5_100)
    assert done(new).generation_id == 2
    assert list(group.members) == [new.value.member_id] == [group.leader]


def test_a_joining_member_needs_no_heartbeat() -> None:
    """A member whose join is not answered yet is not removed."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    old = stable(group)
    new = group.join(VERSION, CLIENT, joining(session_ms=200), 0)
    for now in range(0, 3_000, 100):
        group.heartbeat(identity(old), now)
        timers.run(now)
    assert isinstance(new, DelayedResponse)
    assert not new.is_done
    assert len(group.members) == 2


def test_a_member_that_does_not_sync_is_removed() -> None:
    """A member that does not request its assignment within the rebalance timeout is removed."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    done(group.join(VERSION, CLIENT, joining(session_ms=60_000, rebalance_ms=500), 0))
    assert group.state is BrokerGroupState.COMPLETING
    timers.run(500)
    assert (group.state, group.members) == (BrokerGroupState.EMPTY, {})


def test_a_follower_that_does_not_sync_is_removed() -> None:
    """A follower that sends no sync within the rebalance timeout is removed, also after the leader's sync."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    leader = stable(group)
    second = group.join(VERSION, CLIENT, joining(session_ms=60_000), 0)
    group.join(VERSION, CLIENT, joining(leader.member_id, session_ms=60_000), 0)
    group.sync(VERSION, identity(Message(member_id=leader.member_id, generation_id=2)), 0)
    timers.run(4_999)
    assert (group.state, done(second).member_id in group.members) == (BrokerGroupState.STABLE, True)
    timers.run(5_000)
    assert (group.state, list(group.members)) == (BrokerGroupState.PREPARING, [leader.member_id])


def test_a_waiting_follower_needs_no_heartbeat() -> None:
    """A follower whose sync waits for the leader's outlives its session. After the rebalance timeout, the leader is
    removed."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    leader = stable(group)
    second = group.join(VERSION, CLIENT, joining(), 0)
    group.join(VERSION, CLIENT, joining(leader.member_id), 0)
    waiting = group.sync(VERSION, identity(done(second)), 0)
    for now in range(0, 5_000, 500):
        group.heartbeat(identity(Message(member_id=leader.member_id, generation_id=2)), now)
        timers.run(now)
    assert (group.state, len(group.members)) == (BrokerGroupState.COMPLETING, 2)
    timers.run(5_000)
    assert done(waiting).error_code is ErrorCode.REBALANCE_IN_PROGRESS
    assert list(group.members) == [second.value.member_id]


def test_a_rebalance_without_a_join_goes_on() -> None:
    """If only static members are left and none of them joins, the rebalance has its full time again."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    static = joining(group_instance_id="one", session_ms=60_000, rebalance_ms=500)
    first = done(group.join(VERSION, CLIENT, static, 0))
    group.sync(VERSION, identity(first), 0)
    group.join(VERSION, CLIENT, joining(rebalance_ms=500), 0)
    group.leave(list(group.members)[1], None, 0)
    timers.run(500)
    assert (group.state, group.generation, list(group.members)) == (BrokerGroupState.PREPARING, 1, [first.member_id])
    new = group.join(VERSION, CLIENT, joining(rebalance_ms=500), 600)
    timers.run(1_000)
    assert (done(new).generation_id, list(group.members)) == (2, [first.member_id, group.leader])


def test_a_restarted_static_member_has_its_new_rebalance_timeout() -> None:
    """A rebalance waits as long as a static member asked for when it returned to the stable group."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    static = {"group_instance_id": "one", "session_ms": 60_000}
    first = done(group.join(VERSION, CLIENT, joining(**static, rebalance_ms=5_000), 0))
    group.sync(VERSION, identity(first), 0)
    assert isinstance(group.join(VERSION, CLIENT, joining(**static, rebalance_ms=500), 0), Message)
    new = group.join(VERSION, CLIENT, joining(rebalance_ms=500), 0)
    timers.run(499)
    assert group.state is BrokerGroupState.PREPARING
    timers.run(500)
    assert done(new).generation_id == 2


def test_a_first_member_waits_for_others() -> None:
    """With an initial delay an empty group waits for further members and answers all in one generation."""
    timers = Timers()
    group = BrokerGroup("g", timers, initial_delay_ms=100)
    responses = [group.join(VERSION, CLIENT, joining(), now) for now in (0, 50)]
    timers.run(99)
    assert not any(isinstance(response, DelayedResponse) and response.is_done for response in responses)
    timers.run(100)
    assert [done(response).generation_id for response in responses] == [1, 1]


def test_a_follower_that_rejoins_stays() -> None:
    """A follower that joins again without a change is answered with the current generation."""
    group = BrokerGroup("g", Timers())
    leader = stable(group)
    second = group.join(VERSION, CLIENT, joining(), 0)
    group.join(VERSION, CLIENT, joining(leader.member_id), 0)
    follower = done(second)
    group.sync(VERSION, identity(follower), 0)
    group.sync(VERSION, identity(Message(member_id=leader.member_id, generation_id=2)), 0)
    again = group.join(VERSION, CLIENT, joining(follower.member_id), 0)
    assert isinstance(again, Message)
    assert (again.generation_id, group.state) == (2, BrokerGroupState.STABLE)
    assert isinstance(group.join(VERSION, CLIENT, joining(leader.member_id), 0), DelayedResponse)
    assert group.state is BrokerGroupState.PREPARING


def test_a_rebalance_ends_waiting_syncs() -> None:
    """A member that waits for its assignment while another joins must join again."""
    group = BrokerGroup("g", Timers())
    leader = stable(group)
    second = group.join(VERSION, CLIENT, joining(), 0)
    group.join(VERSION, CLIENT, joining(leader.member_id), 0)
    waiting = group.sync(VERSION, identity(done(second)), 0)
    assert isinstance(waiting, DelayedResponse)
    group.join(VERSION, CLIENT, joining(), 0)
    assert done(waiting).error_code is ErrorCode.REBALANCE_IN_PROGRESS


def test_most_votes_win() -> None:
    """The protocol is the common one that most members prefer."""
    group = BrokerGroup("g", Timers(), initial_delay_ms=10)
    likes = (["a", "b", "c"], ["b", "a"], ["b", "a"])
    for names in likes:
        group.join(VERSION, CLIENT, joining(protocols=[Message(name=n, metadata=n.encode()) for n in names]), 0)
    group.timers.run(10)
    assert group.protocol == "b"


def test_an_unused_member_id_expires() -> None:
    """A group waits for a member that was given an id only until its session ends."""
    timers = Timers()
    group = BrokerGroup("g", timers)
    leader = stable(group)
    rejected = group.join(4, CLIENT, joining(), 0)
    assert isinstance(rejected, Message)
    assert rejected.error_code is ErrorCode.MEMBER_ID_REQUIRED
    again = group.join(VERSION, CLIENT, joining(leader.member_id), 0)
    assert isinstance(again, DelayedResponse)
    assert not again.is_done
    timers.run(1_000)
    assert done(again).generation_id == 2


@pytest.fixture
def state() -> ClusterState:
    one = state_of(1)
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


def test_a_repeated_request_aborts_an_open_transaction(state: ClusterState) -> None:
    """A producer that asks again with its former epoch does not leave the transaction of its new epoch open."""
    identity = begun(state)
    send_request(state, Api.END_TXN, committed=True, **identity)
    body = {**identity, "transaction_timeout_ms": 1_000}
    given = send_request(state, Api.INIT_PRODUCER_ID, **body)
    identity["producer_epoch"] = given.producer_epoch
    topics = [Message(name="t", partitions=[0])]
    send_request(state, Api.ADD_PARTITIONS_TO_TXN, topics=topics, **identity)
    assert send_request(state, Api.INIT_PRODUCER_ID, **body).error_code == ErrorCode.CONCURRENT_TRANSACTIONS
    assert state.transactions.known["x"].state is TransactionState.COMPLETE_ABORT


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
