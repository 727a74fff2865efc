"""One group, without sockets and clocks, beyond the tests of the contract suite."""

from __future__ import annotations

from typing import Any

from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.group import BrokerGroup, BrokerGroupState
from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.timers import Timers

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
