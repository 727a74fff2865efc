"""A worker's membership of its group: joining, leading and giving up work; encoded worker states and assignments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.group.member import GroupConfig, Join, JoinResponse, MemberState, Sync, SyncResponse, Wait
from penstock.shared.common.errors import AuthorizationFailed, KafkaTimeout, SerializationError
from penstock.shared.connect.group.assignor import IncrementalAssignor
from penstock.shared.connect.group.connect_protocol import (
    COMPATIBLE,
    CONFIG_MISMATCH,
    EAGER,
    NOTHING,
    SESSIONED,
    ConnectorsAndTasks,
    ExtendedAssignment,
    WorkerState,
    decode_assignment,
    decode_state,
    encode_assignment,
    encode_state,
)
from penstock.shared.connect.group.worker_member import CompleteRebalance, GiveUpWork, Lead, Stable, WorkerMember
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.testing.fake_broker import ErrorCode

ALL = ConnectorsAndTasks({"c"}, {ConnectorTaskId("c", 0), ConnectorTaskId("c", 1)})
SESSION_MS = 10_000

NAMES = st.text(min_size=1, max_size=5)
WORKS = st.builds(
    ConnectorsAndTasks,
    st.frozensets(NAMES, max_size=3),
    st.frozensets(st.builds(ConnectorTaskId, NAMES, st.integers(0, 9))),
)


def group() -> WorkerMember:
    config = GroupConfig("g", "client", session_timeout_ms=SESSION_MS)
    return WorkerMember(config, "http://me:1/", (SESSIONED, COMPATIBLE, EAGER), IncrementalAssignor(1_000))


def join(worker: WorkerMember, *, now_ms: int = 0, leader: str = "me", protocol: str = "sessioned") -> None:
    """Join the group; as the leader, with a member `you` that holds no work."""
    step = worker.next_step(now_ms)
    assert isinstance(step, Join)
    state = encode_state(WorkerState("http://you:1/", 3), SESSIONED)
    members = (("me", None, dict(step.protocols)[protocol]), ("you", None, state)) if leader == "me" else ()
    generation = worker.generation + 1 if worker.generation >= 0 else 1
    worker.on_join(JoinResponse(0, generation, protocol, leader, "me", members), now_ms)


def complete(
    worker: WorkerMember, assignment: ExtendedAssignment, *, now_ms: int = 0, version: int = SESSIONED
) -> list[GiveUpWork]:
    """Sync with an assignment, and return the work that had to be given up."""
    assert isinstance(worker.next_step(now_ms), Sync)
    worker.on_sync(SyncResponse(0, encode_assignment(assignment, version)), now_ms)
    given_up = []
    while not isinstance(step := worker.next_step(now_ms), CompleteRebalance):
        assert isinstance(step, GiveUpWork)
        given_up.append(step)
        worker.on_given_up(step.work)
    worker.on_completed(step.assignment)
    return given_up


def settled(held: ConnectorsAndTasks = ALL) -> WorkerMember:
    worker = group()
    join(worker, leader="you")
    complete(worker, ExtendedAssignment("you", "http://you:1/", 3, held))
    assert isinstance(worker.next_step(0), Stable)
    return worker


def test_a_worker_offers_all_protocols_newest_first() -> None:
    """A worker offers all protocols, newest first; all but the oldest contain the held work."""
    worker = settled()
    worker.rejoin("test")
    step = worker.next_step(0)
    assert isinstance(step, Join)
    assert [name for name, _ in step.protocols] == ["sessioned", "compatible", "default"]
    assert [decode_state(data).held for _, data in step.protocols] == [ALL, ALL, NOTHING]


def test_the_leader_assigns_what_is_configured() -> None:
    """The leader reads the configs up to the members' highest offset and assigns all work."""
    worker = group()
    worker.config_offset = 1
    join(worker)
    assert worker.next_step(0) == Lead(3)
    worker.on_led(ALL, 3, 0)
    step = worker.next_step(0)
    assert isinstance(step, Sync)
    found = {member: decode_assignment(data) for member, data in step.assignments.items()}
    assert found["me"].work | found["you"].work == ALL
    assert {a.leader_url for a in found.values()} == {"http://me:1/"}
    assert worker.urls == {"me": "http://me:1/", "you": "http://you:1/"}
    assert worker.owners is not None
    assert worker.owners["me"] == found["me"].work


def test_a_leader_that_is_behind_assigns_nothing() -> None:
    """A leader that is behind assigns no work and makes all members rejoin, without revoking anything."""
    worker = settled()
    worker.rejoin("test")
    join(worker)
    worker.on_led(ALL, 2, 0)
    step = worker.next_step(0)
    assert isinstance(step, Sync)
    mine = decode_assignment(step.assignments["me"])
    assert mine.failed
    assert complete(worker, mine) == []
    assert worker.held == ALL
    assert worker.needs_to_join


def test_work_is_kept_and_added_to() -> None:
    """An assignment contains new work only, and held work is kept."""
    worker = settled(ConnectorsAndTasks({"c"}))
    worker.rejoin("test")
    join(worker, leader="you")
    assert complete(worker, ExtendedAssignment("you", "u", 4, ALL - ConnectorsAndTasks({"c"}))) == []
    assert worker.held == ALL
    assert worker.assignment is not None
    assert worker.assignment.work == ALL


def test_revoked_work_is_stopped_before_the_worker_rejoins() -> None:
    """Revoked work is stopped first, and then the worker rejoins."""
    worker = settled()
    worker.rejoin("test")
    join(worker, leader="you")
    back = ConnectorsAndTasks((), {ConnectorTaskId("c", 1)})
    assert complete(worker, ExtendedAssignment("you", "u", 3, NOTHING, back)) == [GiveUpWork(back, lost=False)]
    assert worker.held == ALL - back
    assert isinstance(worker.next_step(0), Join)


def test_eager_stops_all_work_before_joining() -> None:
    """Under the eager protocol all work is stopped before joining, and the assignment contains all work."""
    worker = group()
    join(worker, leader="you", protocol="default")
    complete(worker, ExtendedAssignment("you", "u", 3, ALL), version=EAGER)
    worker.rejoin("test")
    assert worker.next_step(0) == GiveUpWork(ALL, lost=False)
    worker.on_given_up(ALL)
    join(worker, leader="you", protocol="default")
    complete(worker, ExtendedAssignment("you", "u", 3, ConnectorsAndTasks({"c"})), version=EAGER)
    assert worker.held == ConnectorsAndTasks({"c"})


def test_after_a_long_silence_everything_is_lost() -> None:
    """After a session timeout without a heartbeat a worker gives up all work as lost before it joins."""
    worker = settled()
    worker.on_heartbeat_lost(SESSION_MS)
    assert worker.forget_coordinator
    assert worker.next_step(SESSION_MS) == GiveUpWork(ALL, lost=True)
    worker.on_given_up(ALL)
    assert isinstance(worker.next_step(SESSION_MS), Join)


def test_work_stopped_as_lost_is_taken_back_after_a_late_response() -> None:
    """If the response to a heartbeat arrives after the work was stopped as lost, the worker joins without that work.

    Otherwise it would stay a member that runs nothing until the next rebalance.
    """
    worker = settled()
    sent_as = worker.on_heartbeat_sent(3_000)
    assert worker.has_lost_work(SESSION_MS)
    worker.on_given_up(ALL, lost=True)
    worker.on_heartbeat(sent_as, 0, SESSION_MS + 1)
    assert worker.needs_to_join
    step = worker.next_step(SESSION_MS + 1)
    assert isinstance(step, Join)
    assert decode_state(step.protocols[0][1]).held == NOTHING


def test_a_short_silence_changes_nothing() -> None:
    """A heartbeat without a response is sent again after the retry backoff."""
    worker = settled()
    sent_as = worker.on_heartbeat_sent(3_000)
    worker.on_heartbeat_lost(3_000)
    assert not worker.needs_to_join
    assert worker.heartbeat_wait_ms(3_000) == worker.config.retry_backoff_ms
    worker.on_heartbeat(sent_as, 0, 3_100)
    assert worker.heartbeat_wait_ms(3_100) == worker.config.heartbeat_interval_ms


@pytest.mark.parametrize(
    "code", [ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.REBALANCE_IN_PROGRESS]
)
def test_a_heartbeat_error_makes_the_worker_join(code: int) -> None:
    """After a heartbeat error (rebalance, unknown member, old generation) the worker joins with its held work."""
    worker = settled()
    worker.on_heartbeat(worker.on_heartbeat_sent(0), code, 0)
    step = worker.next_step(0)
    assert isinstance(step, Join)
    assert decode_state(step.protocols[0][1]).held == ALL
    assert step.member_id == ("" if code == ErrorCode.UNKNOWN_MEMBER_ID else "me")


def test_a_worker_that_misses_a_rebalance_loses_its_work() -> None:
    """A worker that does not rejoin during a rebalance is unknown afterwards, and gives up its work as lost."""
    worker = settled()
    worker.on_heartbeat(worker.on_heartbeat_sent(0), ErrorCode.REBALANCE_IN_PROGRESS, 0)
    assert not worker.has_lost_work(0)
    worker.on_heartbeat(worker.on_heartbeat_sent(1), ErrorCode.UNKNOWN_MEMBER_ID, 1)
    assert worker.has_lost_work(1)
    assert worker.next_step(1) == GiveUpWork(ALL, lost=True)
    worker.on_given_up(ALL)
    step = worker.next_step(1)
    assert isinstance(step, Join)
    assert decode_state(step.protocols[0][1]).held == NOTHING
    assert not worker.is_given_up(1)


def test_a_worker_without_work_that_misses_a_rebalance_keeps_its_next_work() -> None:
    """A worker without work that does not rejoin in time joins again, and keeps the work that it then gets."""
    worker = settled(NOTHING)
    worker.on_heartbeat(worker.on_heartbeat_sent(0), ErrorCode.REBALANCE_IN_PROGRESS, 0)
    worker.on_heartbeat(worker.on_heartbeat_sent(1), ErrorCode.UNKNOWN_MEMBER_ID, 1)
    join(worker, now_ms=1, leader="you")
    assert complete(worker, ExtendedAssignment("you", "http://you:1/", 3, ALL), now_ms=1) == []
    assert not worker.is_given_up(1)
    assert not worker.has_lost_work(1)


def test_work_is_lost_only_with_the_session() -> None:
    """Work is lost after the session timeout, but not while the worker waits for the group's response."""
    worker = settled()
    assert not worker.has_lost_work(SESSION_MS - 1)
    assert worker.has_lost_work(SESSION_MS)
    worker.rejoin("test")
    assert isinstance(worker.next_step(0), Join)
    assert not worker.has_lost_work(SESSION_MS)


def test_heartbeat_responses_of_an_earlier_generation_are_ignored() -> None:
    """A heartbeat's response for an earlier generation is ignored."""
    worker = settled()
    worker.on_heartbeat((99, "me"), ErrorCode.UNKNOWN_MEMBER_ID, 0)
    assert not worker.needs_to_join


def test_the_worker_joins_with_the_assigned_member_id() -> None:
    """The coordinator assigns a member id, and the worker joins again with it at once."""
    worker = group()
    worker.next_step(0)
    worker.on_join(JoinResponse(ErrorCode.MEMBER_ID_REQUIRED, member_id="given"), 0)
    step = worker.next_step(0)
    assert isinstance(step, Join)
    assert step.member_id == "given"


def test_retriable_errors_are_retried_with_rising_backoff() -> None:
    """A coordinator that is loading or does not answer is tried again after a rising backoff."""
    worker = group()
    worker.next_step(0)
    worker.on_join(JoinResponse(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), 0)
    first = worker.next_step(0)
    assert isinstance(first, Wait)
    worker.next_step(10_000)
    worker.on_failure(KafkaTimeout("x"), 10_000)
    second = worker.next_step(10_000)
    assert isinstance(second, Wait)
    assert second.ms > first.ms


def test_fatal_errors_are_raised() -> None:
    """An authorization error of the group is raised."""
    worker = group()
    worker.next_step(0)
    worker.on_join(JoinResponse(ErrorCode.GROUP_AUTHORIZATION_FAILED), 0)
    with pytest.raises(AuthorizationFailed):
        worker.next_step(0)


def test_leaving_resets_the_membership() -> None:
    """Leaving returns the member id and ends the heartbeats."""
    worker = settled()
    assert worker.leave() == "me"
    assert worker.heartbeat_wait_ms(0) is None
    assert worker.state is MemberState.UNJOINED


@given(WORKS, WORKS, st.integers(0, 2**31 - 1), st.sampled_from((COMPATIBLE, SESSIONED)))
def test_assignments_round_trip(
    work: ConnectorsAndTasks, revoked: ConnectorsAndTasks, delay_ms: int, version: int
) -> None:
    """An encoded assignment is decoded unchanged."""
    assignment = ExtendedAssignment("leader", "http://a:1/", 7, work, revoked, delay_ms, CONFIG_MISMATCH)
    found = decode_assignment(encode_assignment(assignment, version))
    assert found == assignment
    assert found.failed


@given(WORKS, st.sampled_from((COMPATIBLE, SESSIONED)))
def test_states_round_trip(held: ConnectorsAndTasks, version: int) -> None:
    """An encoded worker state is decoded unchanged."""
    found = decode_state(encode_state(WorkerState("http://a:1/", 7, held), version))
    assert (found.url, found.config_offset, found.held) == ("http://a:1/", 7, held)


def test_bytes_are_kafkas() -> None:
    """Assignments and states have Kafka Connect's encoding."""
    work = ConnectorsAndTasks({"c"}, {ConnectorTaskId("c", 1)})
    data = encode_assignment(ExtendedAssignment("L", "U", 3, work, NOTHING, 5), SESSIONED)
    assert data == (
        b"\x00\x02\x00\x00\x00\x01L\x00\x01U" + (3).to_bytes(8) + b"\x00\x00\x00\x01\x00\x01c\x00\x00\x00\x02"
        b"\xff\xff\xff\xff\x00\x00\x00\x01" + b"\x00\x00\x00\x00" + b"\x00\x00\x00\x05"
    )
    assert encode_state(WorkerState("U", 3), EAGER) == b"\x00\x00\x00\x01U" + (3).to_bytes(8)


def test_eager_has_fewer_fields() -> None:
    """Version 0 has neither held work nor revoked work nor a delay."""
    work = ConnectorsAndTasks({"c"})
    found = decode_assignment(encode_assignment(ExtendedAssignment("L", "U", 3, work, work, 5), EAGER))
    assert (found.work, found.revoked, found.delay_ms) == (work, NOTHING, 0)
    assert decode_state(encode_state(WorkerState("U", 3, work), EAGER)).held == NOTHING


def test_a_state_without_allocation_holds_nothing() -> None:
    """A Java worker without work sends no allocation, which is decoded as no work."""
    state = b"\x00\x02\x00\x01U" + (3).to_bytes(8)
    assert decode_state(state + b"\xff\xff\xff\xff").held == NOTHING
    assert decode_state(state).held == NOTHING


def test_truncated_bytes_are_an_error() -> None:
    """Truncated bytes and invalid lengths are SerializationErrors."""
    data = encode_assignment(ExtendedAssignment("L", "U", 3, ConnectorsAndTasks({"c"})), EAGER)
    for end in range(len(data)):
        with pytest.raises(SerializationError):
            decode_assignment(data[:end])
    with pytest.raises(SerializationError):
        decode_state(b"\xff\xff")
