"""A member of any kind of group, by Kafka's classic protocol: its states, its steps, and how it handles every response.

UNJOINED --partitions to revoke--> PREPARING --revoked--> UNJOINED
UNJOINED --nothing to revoke--> JOINING --generation--> SYNCING --assignment--> COMPLETING
COMPLETING --listener called--> STABLE --rebalance due--> UNJOINED
JOINING --member id to join with--> UNJOINED
JOINING, SYNCING --retriable error, or an invalid member or generation--> UNJOINED
PREPARING, COMPLETING --removed from the group--> UNJOINED
any --other error--> FAILED --error raised to the user--> UNJOINED
UNJOINED, PREPARING, COMPLETING, STABLE --no poll for max_poll_interval_ms--> LEFT --poll--> UNJOINED

PREPARING, LEFT and FAILED are states of consumers only: a Connect worker goes to UNJOINED instead of FAILED. After a
FatalError a consumer stays FAILED.

Nothing here waits or sends. A subclass's `next_step` returns the next step. `Member` handles what all members share:
it forgets an invalid generation, retries joins and syncs after retriable errors with a doubling backoff, and requests a
new lookup of a coordinator that has moved. Every other error goes to `fail`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.shared.clients.protocol.errors import CODE_OF, NO_ERROR, codes_of, error_for_code, name_of
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.backoff import RETRY_BACKOFF_MAX_MS, ExponentialBackoff
from penstock.shared.common.errors import PenstockError, RetriableError
from penstock.shared.common.records import GroupMetadata

COORDINATOR_MOVED = codes_of("COORDINATOR_NOT_AVAILABLE", "NOT_COORDINATOR")
COORDINATOR_LOADING = CODE_OF["COORDINATOR_LOAD_IN_PROGRESS"]
ILLEGAL_GENERATION = CODE_OF["ILLEGAL_GENERATION"]
UNKNOWN_MEMBER = CODE_OF["UNKNOWN_MEMBER_ID"]
REBALANCE_IN_PROGRESS = CODE_OF["REBALANCE_IN_PROGRESS"]
MEMBER_ID_REQUIRED = CODE_OF["MEMBER_ID_REQUIRED"]


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for `ms` (None: until something changes)."""

    ms: float | None


@dataclass(frozen=True, slots=True)
class Join:
    """Send JoinGroup with these protocols, (name, the member's metadata); then call `on_join` or `on_failure`."""

    member_id: str
    protocols: tuple[tuple[str, bytes], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Send SyncGroup with the leader's assignments; then call `on_sync` or `on_failure`."""

    generation: int
    member_id: str
    assignments: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class JoinResponse:
    """The response to JoinGroup. `members` are (member id, instance id, metadata); only the leader receives them."""

    code: int
    generation: int = NO_GENERATION
    protocol: str = ""
    leader: str = ""
    member_id: str = ""
    members: tuple[tuple[str, str | None, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SyncResponse:
    """The response to SyncGroup."""

    code: int
    assignment: bytes = b""


class MemberState(StrEnum):
    """The states of a member."""

    UNJOINED = "unjoined"
    PREPARING = "preparing"
    JOINING = "joining"
    SYNCING = "syncing"
    COMPLETING = "completing"
    STABLE = "stable"
    LEFT = "left"
    FAILED = "failed"


_S = MemberState
TRANSITIONS: Mapping[MemberState, frozenset[MemberState]] = {
    _S.UNJOINED: frozenset({_S.PREPARING, _S.JOINING, _S.LEFT}),
    _S.PREPARING: frozenset({_S.UNJOINED, _S.LEFT}),
    _S.JOINING: frozenset({_S.SYNCING, _S.UNJOINED}),
    _S.SYNCING: frozenset({_S.COMPLETING, _S.UNJOINED}),
    _S.COMPLETING: frozenset({_S.STABLE, _S.UNJOINED, _S.LEFT}),
    _S.STABLE: frozenset({_S.UNJOINED, _S.LEFT}),
    _S.LEFT: frozenset({_S.UNJOINED}),
    _S.FAILED: frozenset({_S.UNJOINED}),
}
"""The next states of each state. FAILED is not among them, since `fail` leads to it from any state."""
BEATING = frozenset({_S.PREPARING, _S.COMPLETING, _S.STABLE})
"""The states in which the coordinator expects heartbeats. A member that joins or syncs waits for a response instead."""


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """The member's identity and its time limits; times in ms."""

    group_id: str
    client_id: str
    instance_id: str | None = None
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    retry_backoff_ms: int = 100


@dataclass(slots=True)
class Member(ABC):
    """One member of a group. All times are of one monotonic clock."""

    config: GroupConfig
    state: MemberState = field(default=MemberState.UNJOINED, init=False)
    generation: int = field(default=NO_GENERATION, init=False)
    member_id: str = field(default="", init=False)
    is_leader: bool = field(default=False, init=False)
    error: PenstockError | None = field(default=None, init=False)
    """The error that keeps the member out of the group until it is raised; after a FatalError a consumer stays out."""
    forget_coordinator: bool = field(default=False, init=False)
    """The coordinator may have moved: look it up before the next request. The code that does so resets this."""
    _rejoin: bool = field(default=True, init=False)
    _reason: str = field(default="new", init=False)
    _failures: int = field(default=0, init=False)
    _retry_at_ms: int = field(default=0, init=False)
    _heard_ms: int = field(default=0, init=False)
    _beat_at_ms: int = field(default=0, init=False)

    @property
    def group_metadata(self) -> GroupMetadata:
        """The member's identity within its current generation. A consumer commits under `owner_metadata` instead."""
        return GroupMetadata(self.config.group_id, self.generation, self.member_id, self.config.instance_id)

    @abstractmethod
    def where(self) -> str:
        """Return how error messages name this member."""

    @abstractmethod
    def fail(self, error: PenstockError) -> None:
        """Stop taking part in the group until the error was raised.

        After a FatalError, a consumer stays out for good.
        """

    @abstractmethod
    def on_session_over(self) -> None:
        """Called after a session timeout without an answered heartbeat: a live coordinator has removed the member."""

    def rejoin(self, reason: str) -> None:
        """Request a new assignment by the group."""
        # The first reason is the one to log: it caused the others.
        if not self._rejoin:
            self._rejoin = True
            self._reason = reason

    # --- responses ---

    def is_joined(self, response: JoinResponse, now_ms: int) -> bool:
        """Apply the coordinator's response to JoinGroup. Returns whether the member has joined.

        If not, the member must send JoinGroup again, or the response's error was passed to `fail`.
        """
        # The first join only requests a member id (KIP-394). This is no failure, so the second follows without backoff.
        if response.code == MEMBER_ID_REQUIRED:
            self.member_id = response.member_id
            self._rejoin = True
            self._change_state(MemberState.UNJOINED)
        elif response.code:
            self._handle_rejected_request("JoinGroup", response.code, now_ms)
        else:
            self.generation = response.generation
            self.member_id = response.member_id
            self.is_leader = response.leader == response.member_id
            self._note_heartbeat_response(now_ms)
            self._change_state(MemberState.SYNCING)
            return True
        return False

    def on_failure(self, error: PenstockError, now_ms: int) -> None:
        """Handle a failed step: after a retriable error join again, with a backoff; otherwise `fail`."""
        if isinstance(error, RetriableError):
            self._schedule_rejoin(now_ms)
        else:
            self.fail(error)

    # --- heartbeats ---

    def heartbeat_wait_ms(self, now_ms: int) -> int | None:
        """Return the ms until the next heartbeat, 0 if it is due. Returns None while no heartbeats are needed."""
        if self.state not in BEATING or self.generation == NO_GENERATION:
            return None
        return max(0, self._beat_at_ms - now_ms)

    def on_heartbeat_sent(self, now_ms: int) -> tuple[int, str]:
        """Schedule the next heartbeat. Returns the generation and member id for the heartbeat that is sent now."""
        self._beat_at_ms = now_ms + self.config.heartbeat_interval_ms
        return self.generation, self.member_id

    def on_heartbeat(self, sent_as: tuple[int, str], code: int, now_ms: int) -> None:
        """Apply the coordinator's response to a heartbeat."""
        if self._is_outdated(sent_as):
            return
        # There are four cases.
        # 1. The coordinator knows the member, and its session goes on during a rebalance too.
        if code in (NO_ERROR, REBALANCE_IN_PROGRESS):
            self._note_heartbeat_response(now_ms)
            if code == REBALANCE_IN_PROGRESS:
                self.rejoin("the group rebalances")
        # 2. No coordinator has answered for the group: to the session this is a missing response.
        elif code in COORDINATOR_MOVED or code == COORDINATOR_LOADING:
            self.on_heartbeat_lost(now_ms)
            self.forget_coordinator = self.forget_coordinator or code in COORDINATOR_MOVED
        # 3. The group has gone on without the member. With ILLEGAL_GENERATION it still knows the member id. A join with
        #    the id continues the membership; one without would leave the old membership to its session timeout.
        elif code in (ILLEGAL_GENERATION, UNKNOWN_MEMBER):
            self._forget_generation(member=code == UNKNOWN_MEMBER)
            self.rejoin(f"Heartbeat: {name_of(code)}")
        # 4. A retry does not help, for example FENCED_INSTANCE_ID (KIP-345) or GROUP_AUTHORIZATION_FAILED.
        else:
            self.fail(error_for_code(code, f"Heartbeat of {self.where()}"))

    def on_heartbeat_lost(self, now_ms: int) -> None:
        """Handle a heartbeat without a response: retry soon."""
        self._beat_at_ms = now_ms + self.config.retry_backoff_ms
        # A coordinator that lives has removed the member by now and assigned its partitions to others. Its broker may
        # be cut off from this client alone, so look it up again.
        if now_ms - self._heard_ms >= self.config.session_timeout_ms:
            self.forget_coordinator = True
            self.on_session_over()

    def on_heartbeat_failed(self, sent_as: tuple[int, str], error: PenstockError) -> None:
        """Handle a heartbeat's error that is not retriable."""
        if not self._is_outdated(sent_as):
            self.fail(error)

    # --- helpers ---

    def _is_outdated(self, sent_as: tuple[int, str]) -> bool:
        """Whether the member has left the generation of a heartbeat since it sent it, or needs no heartbeats now."""
        # The response is about a generation that the member leaves (Java: `HeartbeatResponseHandler`). Acting on it
        # would make the member join once more, or fail while its join succeeds.
        return sent_as != (self.generation, self.member_id) or self.state not in BEATING

    def _handle_rejected_request(self, api: str, code: int, now_ms: int) -> None:
        self._reason = f"{api}: {name_of(code)}"
        # 1. The normal course of a rebalance: another member has joined or left meanwhile. The first retry is at once,
        #    since the group waits for this member. Later ones back off.
        if code in (UNKNOWN_MEMBER, ILLEGAL_GENERATION):
            self._forget_generation(member=code == UNKNOWN_MEMBER)
            self._schedule_rejoin(now_ms, at_once=self._failures == 0)
        elif code == REBALANCE_IN_PROGRESS:
            self._schedule_rejoin(now_ms, at_once=self._failures == 0)
        # 2. The coordinator moves, and needs time to load the group.
        elif code in COORDINATOR_MOVED or code == COORDINATOR_LOADING:
            self.forget_coordinator = self.forget_coordinator or code in COORDINATOR_MOVED
            self._schedule_rejoin(now_ms)
        # 3. Any other error decides by its class.
        else:
            error = error_for_code(code, f"{api} of {self.where()}")
            if isinstance(error, RetriableError):
                self._schedule_rejoin(now_ms)
            else:
                self.fail(error)

    def _schedule_rejoin(self, now_ms: int, *, at_once: bool = False) -> None:
        self._change_state(MemberState.UNJOINED)
        self._rejoin = True
        self._failures += 1
        backoff = ExponentialBackoff(self.config.retry_backoff_ms, RETRY_BACKOFF_MAX_MS)
        self._retry_at_ms = now_ms if at_once else now_ms + int(backoff.wait_ms(self._failures))

    def _forget_generation(self, *, member: bool) -> None:
        self.generation = NO_GENERATION
        self.is_leader = False
        if member:
            self.member_id = ""

    def _note_heartbeat_response(self, now_ms: int) -> None:
        self._heard_ms = now_ms
        self._beat_at_ms = now_ms + self.config.heartbeat_interval_ms

    def _change_state(self, state: MemberState) -> None:
        if state is not self.state:
            assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
            self.state = state
