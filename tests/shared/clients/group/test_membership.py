"""What every group member shares: its identity, heartbeats, retries, and a coordinator that moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer.assignors import ASSIGNORS
from penstock.shared.clients.consumer.membership_manager import ConsumerMembershipManager
from penstock.shared.clients.group.group_requests import GroupRequests
from penstock.shared.clients.group.member import GroupConfig, Join, JoinResponse, Member, MemberState
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import AuthenticationFailed, AuthorizationFailed, KafkaTimeout, PenstockError
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster

LOADING, NOT_COORDINATOR, ILLEGAL_GENERATION, UNKNOWN, REBALANCING, FORBIDDEN = 14, 16, 22, 25, 27, 30


@dataclass(slots=True)
class Any(Member):
    """A group member without a protocol."""

    sessions_over: int = field(default=0, init=False)

    def where(self) -> str:
        return "any"

    def fail(self, error: PenstockError) -> None:
        self.error = error

    def on_session_over(self) -> None:
        self.sessions_over += 1


def joining() -> Any:
    member = Any(GroupConfig("g", "c", session_timeout_ms=1_000, heartbeat_interval_ms=300))
    member._change_state(MemberState.JOINING)
    return member


def stable() -> Any:
    member = joining()
    assert member.is_joined(JoinResponse(0, 4, "p", "me", "me"), 0)
    for state in (MemberState.COMPLETING, MemberState.STABLE):
        member._change_state(state)
    member._rejoin = False
    return member


def test_a_join_sets_the_identity() -> None:
    """Generation, member id and leadership come from the response. A heartbeat is due one interval later."""
    member = joining()
    assert member.is_joined(JoinResponse(0, 4, "p", "me", "me"), 10)
    assert (member.state, member.generation, member.member_id, member.is_leader) == (MemberState.SYNCING, 4, "me", True)
    assert member.heartbeat_wait_ms(10) is None
    member._change_state(MemberState.COMPLETING)
    assert member.heartbeat_wait_ms(110) == 200


@pytest.mark.parametrize(
    ("code", "generation", "member_id", "elsewhere"),
    [
        (REBALANCING, 4, "me", False),
        (ILLEGAL_GENERATION, NO_GENERATION, "me", False),
        (UNKNOWN, NO_GENERATION, "", False),
        (NOT_COORDINATOR, 4, "me", True),
        (LOADING, 4, "me", False),
    ],
)
def test_heartbeat_responses(code: int, generation: int, member_id: str, elsewhere: bool) -> None:
    """Each error of a heartbeat resets exactly the state that it invalidates."""
    member = stable()
    member.on_heartbeat(member.on_heartbeat_sent(1), code, 2)
    assert (member.generation, member.member_id, member.forget_coordinator) == (generation, member_id, elsewhere)
    assert member._rejoin is (code in (REBALANCING, ILLEGAL_GENERATION, UNKNOWN))


def test_a_heartbeat_response_of_an_old_generation_is_ignored() -> None:
    """The response to a heartbeat of an old generation is ignored."""
    member = stable()
    sent_as = member.on_heartbeat_sent(1)
    member.generation = 5
    member.on_heartbeat(sent_as, UNKNOWN, 2)
    assert (member.generation, member.member_id) == (5, "me")


@pytest.mark.parametrize("is_outdated", [False, True])
async def test_an_error_of_an_outdated_heartbeat_is_ignored(is_outdated: bool) -> None:
    """An error that is not retriable fails the member, unless the member has begun to join meanwhile."""
    member = stable()
    error = AuthenticationFailed("rejected")

    async def request_coordinator(*_: object, **__: object) -> None:
        if is_outdated:
            member._change_state(MemberState.UNJOINED)
            member._change_state(MemberState.JOINING)
        raise error

    requests = GroupRequests(
        SimpleNamespace(request_coordinator=request_coordinator),  # type: ignore[arg-type]
        member,
        SYSTEM_CLOCK,
        protocol_type="any",
        rebalance_timeout_ms=1_000,
        on_heartbeat=lambda _ok: None,
    )
    await requests._send_heartbeat()
    assert member.error is (None if is_outdated else error)


def test_an_unresponsive_coordinator_is_looked_up_again() -> None:
    """Within the session timeout the same coordinator is retried soon. Then it is looked up again."""
    member = stable()
    member.on_heartbeat_lost(999)
    assert (member.sessions_over, member.forget_coordinator, member.heartbeat_wait_ms(999)) == (0, False, 100)
    member.on_heartbeat_lost(1_000)
    assert (member.sessions_over, member.forget_coordinator) == (1, True)


def test_retriable_errors_are_retried_and_others_raised() -> None:
    """The backoff doubles. A permanent error fails the member."""
    member, waits = joining(), []
    for _ in range(6):
        member.on_failure(KafkaTimeout("slow"), 0)
        waits.append(member._retry_at_ms)
        member._change_state(MemberState.JOINING)
    assert waits == [100, 200, 400, 800, 1_000, 1_000]
    assert not member.is_joined(JoinResponse(FORBIDDEN), 0)
    assert isinstance(member.error, AuthorizationFailed)


async def test_a_leave_finds_a_coordinator_that_has_moved() -> None:
    """If the coordinator has moved, it is looked up again, so that the other members need not wait for the session
    timeout."""
    async with FakeCluster() as cluster:
        config = GroupConfig("g", "c", retry_backoff_ms=1)
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, client_id="c"))
        await connection.open()
        member = ConsumerMembershipManager(config, ASSIGNORS["range"])
        requests = GroupRequests(
            connection, member, SYSTEM_CLOCK,
            protocol_type="any", rebalance_timeout_ms=1_000, on_heartbeat=lambda _ok: None,
        )  # fmt: skip
        try:
            named = await requests.join(Join("", (("p", b""),), "new"))
            joined = await requests.join(Join(named.member_id, (("p", b""),), "new"))
            assert (joined.code, joined.protocol, joined.leader) == (ErrorCode.NONE, "p", joined.member_id)
            with cluster.control(Api.LEAVE_GROUP, Fail(ErrorCode.NOT_COORDINATOR), times=1):
                await requests.leave(joined.member_id)
            back = await requests.join(Join(joined.member_id, (("p", b""),), "back"))
            assert back.code == ErrorCode.UNKNOWN_MEMBER_ID
        finally:
            await connection.close()
