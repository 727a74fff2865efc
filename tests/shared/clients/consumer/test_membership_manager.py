"""The state machine of a group member: its next action, and its transitions for every response."""

from __future__ import annotations

import pytest

from penstock.shared.clients.consumer.assignors import ASSIGNORS, Assigned, RangeAssignor
from penstock.shared.clients.consumer.membership_manager import (
    Complete,
    ConsumerMembershipManager,
    Gather,
    Leave,
    Lose,
    Revoke,
    Step,
)
from penstock.shared.clients.group.member import (
    TRANSITIONS,
    GroupConfig,
    Join,
    JoinResponse,
    MemberState,
    Sync,
    SyncResponse,
    Wait,
)
from penstock.shared.clients.protocol.consumer_protocol import (
    Assignment,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerError,
    BrokerNotAvailable,
    ConfigError,
    FencedInstanceId,
    GroupMaxSizeReached,
    InconsistentGroupProtocol,
    PenstockError,
    SerializationError,
)
from penstock.shared.common.records import TopicPartition

LOADING, NOT_AVAILABLE, NOT_COORDINATOR, ILLEGAL_GENERATION, INCONSISTENT = 14, 15, 16, 22, 23
UNKNOWN_MEMBER, REBALANCING, UNAUTHORIZED, MEMBER_ID_REQUIRED, TOO_MANY, FENCED = 25, 27, 30, 79, 81, 82
A0, A1, A2, B0 = (TopicPartition(t, p) for t, p in (("a", 0), ("a", 1), ("a", 2), ("b", 0)))
EAGER, COOPERATIVE = "range", "cooperative-sticky"


class Member:
    """A state machine with scripted responses. `now` is the time in ms."""

    def __init__(
        self, assignor: str = EAGER, instance_id: str | None = None, topics: frozenset[str] = frozenset("a")
    ) -> None:
        self.manager = ConsumerMembershipManager(GroupConfig("g", "c", instance_id), ASSIGNORS[assignor])
        self.manager.subscribe(topics)
        self.now = 1_000

    def step(self, idle_ms: float = 0) -> Step:
        return self.manager.next_step(self.now, idle_ms)

    def join(self, generation: int = 1, leader: str = "other", **more: object) -> None:
        """Completes JoinGroup as a follower."""
        assert isinstance(self.step(), Join)
        name = self.manager.assignor.name
        self.manager.on_join(JoinResponse(0, generation, name, leader, "m", **more), self.now)  # type: ignore[arg-type]

    def sync(self, *partitions: TopicPartition) -> None:
        assert isinstance(self.step(), Sync)
        self.manager.on_sync(SyncResponse(0, encode_assignment(Assignment(partitions))), self.now)

    def complete(self) -> Complete:
        step = self.step()
        assert isinstance(step, Complete)
        self.manager.adopt()
        self.manager.on_completed()
        return step

    def stable(self, *partitions: TopicPartition, generation: int = 1) -> Member:
        """Brings the member to the stable state with these partitions."""
        self.join(generation)
        self.sync(*partitions)
        self.complete()
        assert self.manager.state is MemberState.STABLE
        return self

    def beat(self, code: int = 0) -> None:
        self.manager.on_heartbeat(self.manager.on_heartbeat_sent(self.now), code, self.now)


def sent(step: Step) -> Subscription:
    assert isinstance(step, Join)
    return decode_subscription(step.protocols[0][1])


def test_the_transition_table_covers_every_state() -> None:
    """Every state has a row, and every state is reachable: FAILED from any state, and the others by the table."""
    assert set(TRANSITIONS) == set(MemberState)
    assert set().union(*TRANSITIONS.values()) == set(MemberState) - {MemberState.FAILED}


def test_a_member_that_follows() -> None:
    """A follower joins, syncs, calls the listener and is stable, and then waits for changes."""
    member = Member()
    member.join(generation=4)
    assert member.step() == Sync(4, "m", {})
    member.sync(A0, A1)
    assert member.complete() == Complete(frozenset({A0, A1}), frozenset({A0, A1}))
    assert (member.manager.owned, member.manager.generation) == (frozenset({A0, A1}), 4)
    assert member.step(idle_ms=1_000) == Wait(299_000)
    assert (
        repr(member.manager) == "<ConsumerMembershipManager stable, client c, group g, generation 4, member m, owns 2>"
    )


def test_a_member_that_leads() -> None:
    """The leader fetches the partitions of all members' topics and assigns them."""
    member = Member(topics=frozenset("a"))
    others = (
        ("m", None, encode_subscription(Subscription(("a",)))),
        ("n", None, encode_subscription(Subscription(("a", "b")))),
    )
    member.join(leader="m", members=others)
    assert member.step() == Gather(frozenset("ab"))
    member.manager.on_gathered({"a": 3, "b": 1})
    step = member.step()
    assert isinstance(step, Sync)
    assert {name: set(decode_assignment(data).partitions) for name, data in step.assignments.items()} == {
        "m": {A0, A1},
        "n": {A2, B0},
    }


class Telling(RangeAssignor):
    """An assignor that sends each member its name, and records what it receives."""

    heard: bytes | None = None

    def assignment_data(self, partitions: object, members: object, assigned: Assigned) -> dict[str, bytes]:
        return {name: name.encode() for name in assigned}

    def on_assignment(self, data: bytes | None) -> None:
        self.heard = data


def test_assignor_user_data_reaches_each_member() -> None:
    """The assignor's user data is sent with each member's assignment and passed to that member's assignor."""
    member = Member()
    member.manager.assignor = Telling()
    member.join(leader="m", members=(("m", None, encode_subscription(Subscription(("a",)))),))
    member.step()
    member.manager.on_gathered({"a": 1})
    step = member.step()
    assert isinstance(step, Sync)
    assert decode_assignment(step.assignments["m"]) == Assignment((A0,), b"m")
    member.manager.on_sync(SyncResponse(0, step.assignments["m"]), member.now)
    assert (member.manager.assignor.heard, member.manager.assignor.name) == (b"m", "range")


def test_nothing_is_joined_without_topics() -> None:
    """A member without a subscription does not join the group."""
    member = Member(topics=frozenset())
    assert member.step() == Wait(None)
    member.manager.subscribe(frozenset("a"))
    assert isinstance(member.step(), Join)


@pytest.mark.parametrize("assignor", [EAGER, COOPERATIVE])
def test_a_member_whose_topics_are_gone_takes_part_in_rebalances(assignor: str) -> None:
    """A member without topics joins with an empty subscription, so that the others do not wait for it."""
    member = Member(assignor).stable(A0)
    member.manager.subscribe(frozenset())
    assert member.step() == Revoke(frozenset({A0}))
    member.manager.on_revoked(frozenset({A0}))
    assert sent(member.step()).topics == ()
    member.manager.on_join(JoinResponse(0, 2, assignor, "other", "m"), member.now)
    member.sync()
    member.complete()
    assert member.step() == Wait(300_000)
    member.beat(REBALANCING)
    assert sent(member.step()).topics == ()


def test_member_id_required() -> None:
    """The first join only gets a member id. The second one uses it at once."""
    member = Member()
    assert isinstance(first := member.step(), Join)
    assert first.member_id == ""
    member.manager.on_join(JoinResponse(MEMBER_ID_REQUIRED, member_id="m-1"), member.now)
    assert isinstance(second := member.step(), Join)
    assert second.member_id == "m-1"


def test_a_member_id_is_not_the_first_failure() -> None:
    """The response that only assigns a member id is no failure: the first error after it is retried at once, and only
    the second one with backoff."""
    member = Member()
    member.step()
    member.manager.on_join(JoinResponse(MEMBER_ID_REQUIRED, member_id="m"), member.now)
    member.join()
    member.step()
    member.manager.on_sync(SyncResponse(REBALANCING), member.now)
    member.join(2)
    member.step()
    member.manager.on_sync(SyncResponse(REBALANCING), member.now)
    assert member.step() == Wait(200)


def test_eager_revokes_everything_before_it_joins() -> None:
    """A rebalance revokes all partitions in the old generation, and the member joins without owned partitions."""
    member = Member().stable(A0, A1, generation=3)
    member.beat(REBALANCING)
    assert member.step() == Revoke(frozenset({A0, A1}))
    assert member.manager.generation == 3
    assert member.step() == Revoke(frozenset({A0, A1})), "it waits for a poll"
    assert member.step(idle_ms=300_000) == Leave("m"), "but not for ever"
    member = Member().stable(A0, A1, generation=3)
    member.beat(REBALANCING)
    member.step()
    assert member.manager.heartbeat_wait_ms(member.now) is not None, "the listener may take longer than the session"
    member.manager.on_revoked(frozenset({A0, A1}))
    assert sent(member.step()).owned == ()
    assert member.manager.heartbeat_wait_ms(member.now) is None


def test_cooperative_revokes_after_the_assignment() -> None:
    """A cooperative member joins with its owned partitions, revokes the missing ones, and then joins again."""
    member = Member(COOPERATIVE).stable(A0, A1, generation=3)
    member.beat(REBALANCING)
    subscription = sent(member.step())
    assert (subscription.owned, subscription.generation) == ((A0, A1), 3)
    member.manager.on_join(JoinResponse(0, 4, COOPERATIVE, "other", "m"), member.now)
    member.sync(A1, A2)
    assert member.step() == Revoke(frozenset({A0}))
    assert member.manager.generation == 4, "its last commit is under the new generation"
    member.manager.on_revoked(frozenset({A0}))
    assert member.complete() == Complete(frozenset({A1, A2}), frozenset({A2}))
    subscription = sent(member.step())
    assert (subscription.owned, subscription.generation) == ((A1, A2), 4)


def test_cooperative_without_a_change_does_not_join_again() -> None:
    """If nothing is revoked, one round is enough."""
    member = Member(COOPERATIVE).stable(A0)
    member.manager.rejoin("requested")
    member.stable(A0, A1, generation=2)
    assert isinstance(member.step(), Wait)


def test_cooperative_revokes_unsubscribed_topics_first() -> None:
    """After a subscription change, partitions of unsubscribed topics are revoked before the join."""
    member = Member(COOPERATIVE, topics=frozenset("ab")).stable(A0, B0)
    member.manager.subscribe(frozenset("a"))
    assert member.step() == Revoke(frozenset({B0}))
    member.manager.on_revoked(frozenset({B0}))
    assert sent(member.step()).owned == (A0,)


@pytest.mark.parametrize("assignor", [EAGER, COOPERATIVE])
@pytest.mark.parametrize(("code", "member_id"), [(UNKNOWN_MEMBER, ""), (ILLEGAL_GENERATION, "m")])
def test_unknown_member_or_generation(assignor: str, code: int, member_id: str) -> None:
    """A member whose id or generation the group does not know loses its partitions and joins as a new member."""
    member = Member(assignor).stable(A0, A1)
    member.beat(code)
    assert member.step() == Lose(frozenset({A0, A1}))
    member.manager.on_revoked(frozenset({A0, A1}))
    assert isinstance(step := member.step(), Join)
    assert step.member_id == member_id
    assert (sent(step).owned, sent(step).generation) == ((), -1)


@pytest.mark.parametrize("code", [UNKNOWN_MEMBER, ILLEGAL_GENERATION])
def test_unknown_member_while_joining(code: int) -> None:
    """A cooperative member whose join or sync fails with an unknown member id loses its partitions."""
    for api in ("join", "sync"):
        member = Member(COOPERATIVE).stable(A0)
        member.manager.rejoin("requested")
        if api == "join":
            member.step()
            member.manager.on_join(JoinResponse(code), member.now)
        else:
            member.join(2)
            member.manager.on_sync(SyncResponse(code), member.now)
        assert member.step() == Lose(frozenset({A0})), api


def test_unknown_member_during_a_revocation() -> None:
    """If the group forgets a cooperative member during a revocation, its kept partitions are lost too."""
    member = Member(COOPERATIVE).stable(A0, A1)
    member.manager.rejoin("requested")
    member.join(2)
    member.sync(A1, A2)
    assert member.step() == Revoke(frozenset({A0}))
    member.beat(UNKNOWN_MEMBER)
    member.manager.on_revoked(frozenset({A0}))
    assert member.step() == Lose(frozenset({A1}))
    member.manager.on_revoked(frozenset({A1}))
    assert isinstance(member.step(), Join)


def test_unknown_member_during_on_assigned() -> None:
    """If an assignment is lost during the listener's call for it, the loss is reported directly afterwards."""
    member = Member()
    member.join()
    member.sync(A0)
    member.step()
    member.manager.adopt()
    member.beat(UNKNOWN_MEMBER)
    member.manager.on_completed()
    assert member.step() == Lose(frozenset({A0}))


def test_a_rebalance_before_the_assignment_came() -> None:
    """After REBALANCE_IN_PROGRESS in a sync the member joins again at once, with its id and owned partitions."""
    member = Member(COOPERATIVE).stable(A0)
    member.manager.rejoin("requested")
    member.join(2)
    member.manager.on_sync(SyncResponse(REBALANCING), member.now)
    assert isinstance(step := member.step(), Join)
    assert (step.member_id, sent(step).owned) == ("m", (A0,))


@pytest.mark.parametrize("code", [NOT_AVAILABLE, NOT_COORDINATOR, LOADING])
def test_join_and_sync_are_retried_on_coordinator_errors(code: int) -> None:
    """Join and sync are retried with backoff at the new coordinator. No partition is lost."""
    member = Member(COOPERATIVE).stable(A0)
    member.manager.rejoin("requested")
    member.step()
    member.manager.on_join(JoinResponse(code), member.now)
    assert member.manager.forget_coordinator == (code != LOADING)
    assert member.step() == Wait(100)
    member.now += 100
    member.join(2)
    member.manager.on_sync(SyncResponse(code), member.now)
    assert member.step() == Wait(200), "failures in a row wait longer"
    member.now += 200
    assert sent(member.step()).owned == (A0,)


def test_back_off_has_an_end() -> None:
    """The backoff is at most one second. A success resets it."""
    member = Member()
    for _ in range(20):
        member.step()
        member.manager.on_failure(BrokerNotAvailable("away"), member.now)
        waited = member.step()
        assert isinstance(waited, Wait)
        assert waited.ms is not None
        member.now += int(waited.ms)
    assert waited == Wait(1_000)
    member.stable(A0)
    member.manager.rejoin("requested")
    member.step()
    member.manager.on_revoked(frozenset({A0}))
    member.step()
    member.manager.on_failure(BrokerNotAvailable("away"), member.now)
    assert member.step() == Wait(100)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (UNAUTHORIZED, AuthorizationFailed),
        (INCONSISTENT, InconsistentGroupProtocol),
        (TOO_MANY, GroupMaxSizeReached),
        (FENCED, FencedInstanceId),
        (26, ConfigError),
        (-1, BrokerError),
    ],
)
def test_permanent_errors_are_reported(code: int, kind: type[PenstockError]) -> None:
    """Other errors are reported with client, group, generation and member. Fatal ones are permanent."""
    member = Member(instance_id="i")
    member.step()
    member.manager.on_join(JoinResponse(code), member.now)
    assert member.step() == Wait(None)
    error = member.manager.take_error()
    assert isinstance(error, kind)
    assert str(error).startswith("JoinGroup of client c, group g, generation -1, member , instance i: ")
    if kind in (FencedInstanceId, AuthorizationFailed):
        assert member.manager.take_error() is error
        assert member.step() == Wait(None)
    else:
        assert member.manager.take_error() is None
        assert isinstance(member.step(), Join)


def test_an_assignment_that_the_assignor_rejects() -> None:
    """The member drops out with an error, but keeps its id, since it is in the group until it leaves."""

    class Own(RangeAssignor):
        def on_assignment(self, data: bytes | None) -> None:
            raise InconsistentGroupProtocol("not ours")

    member = Member()
    member.manager.assignor = Own()
    member.join()
    member.sync(A0)
    error = member.manager.take_error()
    assert isinstance(error, InconsistentGroupProtocol)
    assert str(error).startswith("SyncGroup of client c, group g, generation 1, member m: not ours")
    assert (member.manager.owned, member.manager.leave()) == (frozenset(), "m")


def test_fenced_while_stable() -> None:
    """If a heartbeat returns FENCED_INSTANCE_ID, the partitions are lost and the error is permanent."""
    member = Member(COOPERATIVE, instance_id="i").stable(A0, generation=7)
    member.beat(FENCED)
    assert member.step() == Lose(frozenset({A0}))
    member.manager.on_revoked(frozenset({A0}))
    assert member.step() == Wait(None)
    assert "Heartbeat of client c, group g, generation 7, member m, instance i: FENCED" in str(
        member.manager.take_error()
    )


def test_fenced_during_a_listener_call() -> None:
    """A member that fails during a listener's call does not become stable."""
    member = Member(instance_id="i")
    member.join()
    member.sync(A0)
    member.step()
    member.manager.adopt()
    member.beat(FENCED)
    member.manager.on_completed()
    assert member.step() == Lose(frozenset({A0}))


def test_heartbeats_have_their_interval() -> None:
    """A heartbeat is due one interval after the last response. None is due outside a generation."""
    member = Member()
    assert member.manager.heartbeat_wait_ms(member.now) is None
    member.stable(A0)
    assert member.manager.heartbeat_wait_ms(member.now) == 3_000
    member.now += 3_500
    assert member.manager.heartbeat_wait_ms(member.now) == 0
    member.beat()
    assert member.manager.heartbeat_wait_ms(member.now) == 3_000


@pytest.mark.parametrize("code", [NOT_AVAILABLE, NOT_COORDINATOR, LOADING])
def test_heartbeats_of_a_coordinator_that_moves(code: int) -> None:
    """If the coordinator moves or loads, the heartbeat is retried soon. The member keeps its partitions."""
    member = Member().stable(A0)
    member.beat(code)
    assert member.manager.forget_coordinator == (code != LOADING)
    assert member.manager.heartbeat_wait_ms(member.now) == 100
    assert isinstance(member.step(), Wait)


def test_an_unresponsive_coordinator() -> None:
    """After a session timeout without a response the coordinator is looked up again."""
    member = Member().stable(A0)
    member.now += 44_999
    member.manager.on_heartbeat_lost(member.now)
    assert not member.manager.forget_coordinator
    member.now += 1
    member.manager.on_heartbeat_lost(member.now)
    assert member.manager.forget_coordinator


def test_a_heartbeat_response_of_an_old_generation() -> None:
    """A heartbeat response of an old generation is ignored."""
    member = Member(COOPERATIVE).stable(A0)
    sent_as = member.manager.on_heartbeat_sent(member.now)
    member.manager.rejoin("requested")
    member.step()
    member.manager.on_heartbeat(sent_as, UNKNOWN_MEMBER, member.now)
    member.manager.on_join(JoinResponse(0, 2, COOPERATIVE, "other", "m"), member.now)
    member.manager.on_heartbeat(sent_as, ILLEGAL_GENERATION, member.now)
    member.sync(A0)
    member.complete()
    assert member.manager.owned == frozenset({A0})
    assert isinstance(member.step(), Wait)


@pytest.mark.parametrize(("instance_id", "leaves"), [(None, True), ("i", False)])
def test_max_poll_interval_exceeded(instance_id: str | None, leaves: bool) -> None:
    """After max_poll_interval_ms without a poll the member loses its partitions and leaves, unless it is static. The
    next poll joins again."""
    member = Member(instance_id=instance_id).stable(A0)
    assert member.step(idle_ms=299_999) == Wait(1)
    assert member.step(idle_ms=300_000) == Leave("m" if leaves else "")
    assert member.manager.heartbeat_wait_ms(member.now) is None
    assert member.step(idle_ms=300_001) == Lose(frozenset({A0}))
    member.manager.on_revoked(frozenset({A0}))
    assert member.step(idle_ms=300_002) == Wait(None)
    member.manager.polled()
    assert isinstance(step := member.step(), Join)
    assert step.member_id == ""


def test_leaving_the_group() -> None:
    """A dynamic member sends LeaveGroup. A static one does not, and keeps its partitions for its restart."""
    assert Member().stable(A0).manager.leave() == "m"
    assert Member(instance_id="i").stable(A0).manager.leave() == ""


def test_a_pending_member_leaves() -> None:
    """A member that has an id but has not joined with it leaves too, so that the group does not wait for it."""
    member = Member()
    member.step()
    member.manager.on_join(JoinResponse(MEMBER_ID_REQUIRED, member_id="m-1"), member.now)
    assert member.manager.leave() == "m-1"


def test_changed_partitions_trigger_a_rebalance() -> None:
    """The leader triggers a rebalance when a topic of any member gets partitions, appears or is deleted."""
    member = Member()
    member.join(leader="m", members=(("m", None, encode_subscription(Subscription(("a", "b")))),))
    member.step()
    member.manager.on_gathered({"a": 1})
    member.sync(A0)
    member.complete()
    for same in ({"a": 1}, {"a": 1, "unrelated": 4}):
        member.manager.metadata(same)
        assert isinstance(member.step(), Wait)
    member.manager.metadata({"a": 1, "b": 1})
    assert isinstance(member.step(), Revoke)


def test_a_follower_ignores_changed_partitions() -> None:
    """A follower does not react to changed partitions."""
    member = Member().stable(A0)
    member.manager.metadata({"a": 1})
    member.manager.metadata({"a": 2})
    assert isinstance(member.step(), Wait)


def test_a_restarted_static_member_watches_its_topics() -> None:
    """A restarted static member may lead without notice from the coordinator. It watches its topics from their
    partitions at the restart."""
    member = Member(instance_id="i").stable(A0)
    member.manager.metadata({"a": 1})
    assert isinstance(member.step(), Wait)
    member.manager.metadata({"a": 2})
    assert isinstance(member.step(), Revoke)


def test_another_subscription_while_it_joins() -> None:
    """If the subscription changes during a join, the assignment is dropped and the member joins again."""
    member = Member()
    member.join()
    member.manager.subscribe(frozenset("b"))
    member.sync(A0)
    assert member.manager.owned == frozenset()
    assert sent(member.step()).topics == ("b",)

    member = Member()
    member.join()
    member.manager.subscribe(frozenset("ab"))
    member.sync(A0)
    member.complete()
    assert isinstance(member.step(), Revoke)


def test_undecodable_subscriptions_and_assignments() -> None:
    """A subscription or an assignment that cannot be decoded is an error that names the member."""
    member = Member()
    member.join(leader="m", members=(("n", None, b"\x00"),))
    assert isinstance(error := member.manager.take_error(), SerializationError)
    assert "member n: subscription" in str(error)
    member.join()
    member.step()
    member.manager.on_sync(SyncResponse(0, b"\x00"), member.now)
    assert isinstance(member.manager.take_error(), SerializationError)


def test_sticky_remembers_its_last_assignment() -> None:
    """The eager sticky assignor gets the member's last assignment and its generation."""
    member = Member("sticky").stable(A0, A2, generation=5)
    member.manager.rejoin("requested")
    member.step()
    member.manager.on_revoked(frozenset({A0, A2}))
    subscription = sent(member.step())
    assert subscription.owned == ()
    assert subscription.user_data == ASSIGNORS["sticky"].user_data([A0, A2], 5)
