"""A member of a group, whatever the group is for: what it makes of the coordinator's answers and of silence.

Nothing here waits or sends. Whoever is a member says by its own `next_step` what is to be done; what is alike for all
ends here: a generation that counts no more is forgotten, what may pass is tried again after a wait that doubles, a
coordinator that has moved is looked up anew, and the rest is `fail`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from penstock.shared.clients.connection import error_for_code, name_of
from penstock.shared.clients.group.member_states import BEATING, TRANSITIONS, GroupConfig, MemberState
from penstock.shared.clients.group.steps import NO_GENERATION, JoinAnswer
from penstock.shared.common.errors import PenstockError, RetriableError

BACKOFF_MAX_MS = 1_000
COORDINATOR_MOVED = frozenset({15, 16})
COORDINATOR_LOADING = 14
ILLEGAL_GENERATION, UNKNOWN_MEMBER, REBALANCE_IN_PROGRESS, MEMBER_ID_REQUIRED = 22, 25, 27, 79


@dataclass(slots=True)
class Member(ABC):
    """One member; all times are of one monotonic clock."""

    config: GroupConfig
    state: MemberState = field(default=MemberState.UNJOINED, init=False)
    generation: int = field(default=NO_GENERATION, init=False)
    member_id: str = field(default="", init=False)
    is_leader: bool = field(default=False, init=False)
    error: PenstockError | None = field(default=None, init=False)
    """What keeps the member out of the group, until it is told."""
    forget_coordinator: bool = field(default=False, init=False)
    """The coordinator is elsewhere: look it up again before the next request. Whoever does resets this."""
    _rejoin: bool = field(default=True, init=False)
    _reason: str = field(default="new", init=False)
    _failures: int = field(default=0, init=False)
    _retry_at_ms: int = field(default=0, init=False)
    _heard_ms: int = field(default=0, init=False)
    _beat_at_ms: int = field(default=0, init=False)

    @abstractmethod
    def where(self) -> str:
        """What every message about this member starts with."""

    @abstractmethod
    def fail(self, error: PenstockError) -> None:
        """Out of the group, until the user has been told why."""

    @abstractmethod
    def on_session_over(self) -> None:
        """No heartbeat was answered for a session timeout: the group must have given the member up."""

    def rejoin(self, reason: str) -> None:
        """Have the group assign anew."""
        if not self._rejoin:
            self._rejoin, self._reason = True, reason

    # --- answers ---

    def is_joined(self, answer: JoinAnswer, now_ms: int) -> bool:
        """Note the coordinator's answer to Join; False where the member is to ask again, or is out."""
        if answer.code == MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
            self._again(now_ms, at_once=True)
        elif answer.code:
            self._refused("JoinGroup", answer.code, now_ms)
        else:
            self.generation, self.member_id = answer.generation, answer.member_id
            self.is_leader = answer.leader == answer.member_id
            self._heard(now_ms)
            self._to(MemberState.SYNCING)
            return True
        return False

    def on_failure(self, error: PenstockError, now_ms: int) -> None:
        """A step came to nothing."""
        if isinstance(error, RetriableError):
            self._again(now_ms)
        else:
            self.fail(error)

    # --- heartbeats ---

    def heartbeat_wait_ms(self, now_ms: int) -> int | None:
        """How long until a heartbeat is due, 0 when it is; None while there is none to send."""
        if self.state not in BEATING or self.generation == NO_GENERATION:
            return None
        return max(0, self._beat_at_ms - now_ms)

    def on_heartbeat_sent(self, now_ms: int) -> tuple[int, str]:
        """As whom it was sent; its answer is for that one."""
        self._beat_at_ms = now_ms + self.config.heartbeat_interval_ms
        return self.generation, self.member_id

    def on_heartbeat(self, sent_as: tuple[int, str], code: int, now_ms: int) -> None:
        """The coordinator's answer; one for who the member no longer is says nothing."""
        if sent_as != (self.generation, self.member_id) or self.state not in BEATING:
            return
        if code in (0, REBALANCE_IN_PROGRESS):
            self._heard(now_ms)
            if code:
                self.rejoin("the group rebalances")
        elif code in COORDINATOR_MOVED or code == COORDINATOR_LOADING:
            self.on_heartbeat_lost(now_ms)
            self.forget_coordinator = self.forget_coordinator or code in COORDINATOR_MOVED
        elif code in (ILLEGAL_GENERATION, UNKNOWN_MEMBER):
            self._forget(member=code == UNKNOWN_MEMBER)
            self.rejoin(f"Heartbeat: {name_of(code)}")
        else:
            self.fail(error_for_code(code, f"Heartbeat of {self.where()}"))

    def on_heartbeat_lost(self, now_ms: int) -> None:
        """It got no answer: try soon, and elsewhere once the session must be over."""
        self._beat_at_ms = now_ms + self.config.retry_backoff_ms
        if now_ms - self._heard_ms >= self.config.session_timeout_ms:
            self.forget_coordinator = True
            self.on_session_over()

    # --- what they have in common ---

    def _refused(self, api: str, code: int, now_ms: int) -> None:
        self._reason = f"{api}: {name_of(code)}"
        if code in (UNKNOWN_MEMBER, ILLEGAL_GENERATION):
            self._forget(member=code == UNKNOWN_MEMBER)
            self._again(now_ms, at_once=self._failures == 0)
        elif code == REBALANCE_IN_PROGRESS:
            self._again(now_ms, at_once=self._failures == 0)
        elif code in COORDINATOR_MOVED or code == COORDINATOR_LOADING:
            self.forget_coordinator = self.forget_coordinator or code in COORDINATOR_MOVED
            self._again(now_ms)
        else:
            error = error_for_code(code, f"{api} of {self.where()}")
            if isinstance(error, RetriableError):
                self._again(now_ms)
            else:
                self.fail(error)

    def _again(self, now_ms: int, *, at_once: bool = False) -> None:
        self._to(MemberState.UNJOINED)
        self._rejoin = True
        backoff_ms = min(self.config.retry_backoff_ms * 2 ** min(self._failures, 10), BACKOFF_MAX_MS)
        self._retry_at_ms = now_ms if at_once else now_ms + backoff_ms
        self._failures += 1

    def _forget(self, *, member: bool) -> None:
        self.generation, self.is_leader = NO_GENERATION, False
        if member:
            self.member_id = ""

    def _heard(self, now_ms: int) -> None:
        self._heard_ms = now_ms
        self._beat_at_ms = now_ms + self.config.heartbeat_interval_ms

    def _to(self, state: MemberState) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
            self.state = state
