"""A worker's membership in its group: decides its next step, and handles every response.

Nothing here waits or sends. `next_step` returns the next step. The caller executes it, reports the outcome (`on_join`,
`on_led`, `on_sync`, …) and requests the next one. Heartbeats are sent in parallel. The class is a subclass of `Member`,
as for every group (`penstock.shared.clients.group`). It differs from a consumer in two ways: the messages between
members, and that a worker keeps its work (`held`) through a rebalance.

Unless the worker leaves the group, `held` is given up in three cases:

1. A new assignment revokes some of it.
2. The worker joins under the protocol `eager`, and gives up everything first.
3. The group has probably removed the worker, so everything is lost. No heartbeat was answered for a session timeout, or
   the worker did not join in time.

The caller must also check case 3 while it executes a step, and between steps (`has_lost_work`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.shared.clients.group.member import (
    BEATING,
    UNKNOWN_MEMBER,
    Join,
    JoinResponse,
    Member,
    MemberState,
    Sync,
    SyncResponse,
    Wait,
)
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.errors import PenstockError, SerializationError
from penstock.shared.connect.group.assignor import AssignmentPlan, IncrementalAssignor, assign_eagerly
from penstock.shared.connect.group.connect_protocol import (
    CONFIG_MISMATCH,
    EAGER,
    NOTHING,
    PROTOCOL_NAMES,
    ConnectorsAndTasks,
    ExtendedAssignment,
    WorkerState,
    decode_assignment,
    decode_state,
    encode_assignment,
    encode_state,
)


@dataclass(frozen=True, slots=True)
class Stable:
    """No step is needed: the worker is an active member."""


@dataclass(frozen=True, slots=True)
class GiveUpWork:
    """A step: stop this work, then report it with the member's `on_given_up`. If `lost`, others may already have it."""

    work: ConnectorsAndTasks
    lost: bool


@dataclass(frozen=True, slots=True)
class Lead:
    """Read the configs up to this offset, if that is possible in time, and call `on_led`: this worker assigns."""

    config_offset: int


@dataclass(frozen=True, slots=True)
class CompleteRebalance:
    """Call `on_completed`, then apply this assignment, whose `work` is all work of the worker."""

    assignment: ExtendedAssignment
    generation: int


Step = Wait | Stable | GiveUpWork | Join | Lead | Sync | CompleteRebalance


@dataclass(slots=True)
class WorkerMember(Member):
    """One worker in its group. All times are of one monotonic clock."""

    url: str
    offered: tuple[int, ...]
    """The versions of the protocol that this worker offers, newest first."""
    assignor: IncrementalAssignor
    held: ConnectorsAndTasks = NOTHING
    assignment: ExtendedAssignment | None = None
    """The last assignment. Its `work` is all work of the worker."""
    version: int = EAGER
    owners: dict[str, ConnectorsAndTasks] | None = None
    """On the leader: each member's work after the last assignment."""
    urls: dict[str, str] | None = None
    """On the leader: each member's REST URL."""
    config_offset: int = -1
    """The offset up to which the worker has read the configs, which is that of the next record. The herder keeps it up
    to date."""
    _members: dict[str, WorkerState] | None = None
    _assignments: dict[str, bytes] | None = None
    _received: ExtendedAssignment | None = None
    _completed: int = NO_GENERATION
    _missed: bool = False
    """The group completed a rebalance without this member, which held work and did not join in time."""

    def __repr__(self) -> str:
        return f"<WorkerMember {self.state}, {self.where()}, holds {self.held}>"

    def where(self) -> str:
        """Return how error messages name this member: URL, group and generation."""
        return f"worker {self.url}, group {self.config.group_id}, generation {self.generation}"

    @property
    def needs_to_join(self) -> bool:
        """Return whether the worker must join: it is not a stable member, or a rebalance is due."""
        return self.state is not MemberState.STABLE or self._rejoin

    # --- next step ---

    def next_step(self, now_ms: int) -> Step:
        """Return the next step. Raises, once, the error with which `fail` was called."""
        if self.error is not None:
            error = self.error
            self.error = None
            raise error
        match self.state:
            case MemberState.SYNCING:
                return self._synchronize_group()
            case MemberState.COMPLETING:
                return self._complete_rebalance()
            case MemberState.STABLE if not self._rejoin:
                return Stable()
            case MemberState.STABLE:
                self._change_state(MemberState.UNJOINED)
        # Under `eager` all work stops before the worker joins (case 2). Otherwise it joins with its work, unless the
        # group has removed the worker and others may run that work (case 3).
        if self.held and (self.version == EAGER or self.is_given_up(now_ms)):
            return GiveUpWork(self.held, lost=self.version != EAGER)
        if now_ms < self._retry_at_ms:
            return Wait(self._retry_at_ms - now_ms)
        self._change_state(MemberState.JOINING)
        self._rejoin = False
        state = WorkerState(self.url, self.config_offset, self.held)
        protocols = tuple(
            (PROTOCOL_NAMES[version], encode_state(state, version, self.assignment)) for version in self.offered
        )
        return Join(self.member_id, protocols, self._reason)

    def is_given_up(self, now_ms: int) -> bool:
        """Return whether others may have the held work: the group has not answered for a session timeout, or the worker
        did not join in time."""
        silent_ms = now_ms - self._heard_ms
        return self._missed or (self._completed != NO_GENERATION and silent_ms >= self.config.session_timeout_ms)

    def has_lost_work(self, now_ms: int) -> bool:
        """Return whether other workers may have the held work (case 3 of the module).

        Always returns False in the states UNJOINED, JOINING and SYNCING. In UNJOINED, `next_step` calls `is_given_up`
        itself before the worker joins.
        """
        return bool(self.held) and self.state in BEATING and self.is_given_up(now_ms)

    def _synchronize_group(self) -> Step:
        if self._members is not None and self._assignments is None:
            return Lead(max(state.config_offset for state in self._members.values()))
        return Sync(self.generation, self.member_id, self._assignments or {})

    def _complete_rebalance(self) -> Step:
        received = self._received
        assert received is not None
        # The coordinator has removed this member meanwhile: the assignment is for a member that no longer exists.
        if self.generation == NO_GENERATION:
            self._schedule_rejoin(0, at_once=True)
            return Wait(0)
        # Revoked work stops before the assignment is applied (case 1), since the leader assigns it after that.
        if back := received.revoked & self.held:
            return GiveUpWork(back, lost=False)
        whole = received.work if self.version == EAGER else received.work | self.held
        return CompleteRebalance(replace(received, work=whole), self.generation)

    # --- outcomes ---

    def on_given_up(self, work: ConnectorsAndTasks, *, lost: bool = False) -> None:
        """Report that the work is stopped.

        `lost` is whether other workers may already have the work. If so, the worker always joins the group again: a
        late heartbeat response may show that it is still a member, which would then have no work.
        """
        self.held = self.held - work
        self._missed = self._missed and bool(self.held)
        if lost:
            self.rejoin("lost work was stopped")

    def on_completed(self, assignment: ExtendedAssignment) -> None:
        """Report that the rebalance is complete. The herder gets the assignment after this call."""
        if self.state is not MemberState.COMPLETING:
            # The member was removed from the group after this step was returned.
            return
        self.assignment = assignment
        self._completed = self.generation
        self.held = assignment.work
        self._change_state(MemberState.STABLE)
        if assignment.failed:
            self.rejoin("the leader had not read the configs far enough")
        elif assignment.revoked:
            # KIP-415 assigns revoked work in a second rebalance.
            self.rejoin("revoked work must be assigned to other workers")

    def on_join(self, response: JoinResponse, now_ms: int) -> None:
        """Take the coordinator's response to Join."""
        if self.is_joined(response, now_ms):
            self.version = next(v for v, name in PROTOCOL_NAMES.items() if name == response.protocol)
            self._members = None
            self._assignments = None
            self.owners = None
            self.urls = None
            if self.is_leader:
                self._read_members(response)

    def _read_members(self, response: JoinResponse) -> None:
        try:
            self._members = {member: decode_state(data) for member, _, data in response.members}
        except SerializationError as e:
            self.fail(SerializationError(f"JoinGroup of {self.where()}: {e}"))

    def on_led(self, configured: ConnectorsAndTasks, config_offset: int, now_ms: int) -> None:
        """On the leader: assign `configured`, the work in the configs up to `config_offset`. If a member has read
        further, assign nothing: all members join again.
        """
        members = self._members or {}
        newest = max(state.config_offset for state in members.values())
        common = ExtendedAssignment(self.member_id, self.url, max(newest, config_offset))
        # As ensureLeaderConfig in Kafka Connect: a leader that has not read the newest configs would revoke the work of
        # connectors that it does not know yet. It assigns nothing, and all members join again.
        if config_offset < newest:
            plan = AssignmentPlan({}, {}, {})
            common = replace(common, error=CONFIG_MISMATCH)
        elif self.version == EAGER:
            plan = AssignmentPlan(assigned := assign_eagerly(members, configured), {}, assigned)
        else:
            held = {member: state.held for member, state in members.items()}
            plan = self.assignor.assign(
                held, configured, now_ms=now_ms, generation=self.generation, completed=self._completed
            )
        self.owners = dict(plan.complete)
        self.urls = {member: state.url for member, state in members.items()}
        rows = {
            member: replace(
                common,
                work=plan.assigned.get(member, NOTHING),
                revoked=plan.revoked.get(member, NOTHING),
                delay_ms=plan.delay_ms,
            )
            for member in members
        }
        self._assignments = {member: encode_assignment(row, self.version) for member, row in rows.items()}

    def on_sync(self, response: SyncResponse, now_ms: int) -> None:
        """Take the coordinator's response to Sync."""
        if response.code:
            self._handle_rejected_request("SyncGroup", response.code, now_ms)
            return
        try:
            self._received = decode_assignment(response.assignment)
        except SerializationError as e:
            self.fail(SerializationError(f"SyncGroup of {self.where()}: {e}"))
            return
        self._failures = 0
        self._note_heartbeat_response(now_ms)
        self._change_state(MemberState.COMPLETING)

    def on_heartbeat(self, sent_as: tuple[int, str], code: int, now_ms: int) -> None:
        """Handle the response to a heartbeat, as every member does.

        If the response is UNKNOWN_MEMBER_ID, and the worker had to join again before this response, it has missed the
        rebalance: `is_given_up` then returns True, unless the worker holds no work.
        """
        rejoin_requested = self._rejoin
        generation = self.generation
        Member.on_heartbeat(self, sent_as, code, now_ms)
        if code == UNKNOWN_MEMBER and rejoin_requested and generation != self.generation:
            self._missed = bool(self.held)

    def on_session_over(self) -> None:
        """Request to join again, after a session timeout without an answered heartbeat. The held work is stopped before
        the worker joins."""
        self.rejoin("no heartbeat was answered for a session timeout")

    def leave(self) -> str:
        """Leave the group. Returns the member id for LeaveGroup, or "" if there is none."""
        member_id = self.member_id
        self._forget_generation(member=True)
        self.rejoin("left the group")
        self.state = MemberState.UNJOINED
        return member_id

    def fail(self, error: PenstockError) -> None:
        """Forget the membership in the group, and let `next_step` raise the error."""
        self.error = error
        self._forget_generation(member=True)
        self._rejoin = True
        self.state = MemberState.UNJOINED

    def _forget_generation(self, *, member: bool) -> None:
        Member._forget_generation(self, member=member)
        self.owners = None
