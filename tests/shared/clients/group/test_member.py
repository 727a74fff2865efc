"""What every member of a group makes of answers and of silence."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from penstock.shared.clients.group.member import Member
from penstock.shared.clients.group.member_states import GroupConfig, MemberState
from penstock.shared.clients.group.steps import NO_GENERATION, JoinAnswer
from penstock.shared.common.errors import AuthorizationFailed, KafkaTimeout, PenstockError

LOADING, NOT_COORDINATOR, ILLEGAL_GENERATION, UNKNOWN, REBALANCING, FORBIDDEN = 14, 16, 22, 25, 27, 30


@dataclass(slots=True)
class Any(Member):
    """A member of a group for nothing."""

    sessions_over: int = field(default=0, init=False)

    def where(self) -> str:
        return "any"

    def fail(self, error: PenstockError) -> None:
        self.error = error

    def on_session_over(self) -> None:
        self.sessions_over += 1


def joining() -> Any:
    member = Any(GroupConfig("g", "c", session_timeout_ms=1_000, heartbeat_interval_ms=300))
    member._to(MemberState.JOINING)
    return member


def stable() -> Any:
    member = joining()
    assert member.is_joined(JoinAnswer(0, 4, "p", "me", "me"), 0)
    for state in (MemberState.COMPLETING, MemberState.STABLE):
        member._to(state)
    member._rejoin = False
    return member


def test_who_is_joined_knows_who_it_is() -> None:
    """Generation, member id and the lead come from the answer; heartbeats are due an interval later."""
    member = joining()
    assert member.is_joined(JoinAnswer(0, 4, "p", "me", "me"), 10)
    assert (member.state, member.generation, member.member_id, member.is_leader) == (MemberState.SYNCING, 4, "me", True)
    assert member.heartbeat_wait_ms(10) is None
    member._to(MemberState.COMPLETING)
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
def test_heartbeat_answers(code: int, generation: int, member_id: str, elsewhere: bool) -> None:
    """Each answer forgets just what it says is over."""
    member = stable()
    member.on_heartbeat(member.on_heartbeat_sent(1), code, 2)
    assert (member.generation, member.member_id, member.forget_coordinator) == (generation, member_id, elsewhere)
    assert member._rejoin is (code in (REBALANCING, ILLEGAL_GENERATION, UNKNOWN))


def test_a_heartbeat_of_before_says_nothing() -> None:
    """The answer to one that was sent under another generation is none for this one."""
    member = stable()
    sent_as = member.on_heartbeat_sent(1)
    member.generation = 5
    member.on_heartbeat(sent_as, UNKNOWN, 2)
    assert (member.generation, member.member_id) == (5, "me")


def test_silence_is_over_with_the_session() -> None:
    """Up to a session timeout the same coordinator is asked again soon; then it is looked up anew."""
    member = stable()
    member.on_heartbeat_lost(999)
    assert (member.sessions_over, member.forget_coordinator, member.heartbeat_wait_ms(999)) == (0, False, 100)
    member.on_heartbeat_lost(1_000)
    assert (member.sessions_over, member.forget_coordinator) == (1, True)


def test_what_may_pass_is_tried_again_and_the_rest_is_told() -> None:
    """Waits double; a refusal for good fails the member."""
    member, waits = joining(), []
    for _ in range(6):
        member.on_failure(KafkaTimeout("slow"), 0)
        waits.append(member._retry_at_ms)
        member._to(MemberState.JOINING)
    assert waits == [100, 200, 400, 800, 1_000, 1_000]
    assert not member.is_joined(JoinAnswer(FORBIDDEN), 0)
    assert isinstance(member.error, AuthorizationFailed)
