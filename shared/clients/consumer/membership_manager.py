"""A consumer's membership in its group (Java: `ConsumerMembershipManager`): decides the next step and handles every
response.

Nothing here waits or sends. `next_step` returns the next step. The caller executes it, reports the outcome (`on_join`,
`on_sync`, ...) and calls `next_step` again. A step that calls the listener may have to wait for a poll. Until the
outcome of that step is reported, `next_step` returns the same step, or a later one if the state has changed. Heartbeats
are sent in parallel. The states, their transitions and the code that all kinds of members share are in
`penstock.shared.clients.group`.

The ownership of partitions (`owned`) ends in one of two ways:

1. They are revoked while the member's generation is valid. An eager member revokes all before it joins. A cooperative
   member revokes those that its new assignment lacks, and then joins again (KIP-429). Before it joins, it revokes those
   of topics that it no longer subscribes to.
2. They are lost, because the group has removed the member, or the member has left for lack of polls or has failed.
   Another member may own them already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.clients.consumer.assignors import Assignor, GroupMember
from penstock.shared.clients.group.member import Join, JoinResponse, Member, MemberState, Sync, SyncResponse, Wait
from penstock.shared.clients.group.member_identity import describe_member
from penstock.shared.clients.protocol.consumer_protocol import (
    Assignment,
    Subscription,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.errors import (
    FatalError,
    IllegalState,
    InconsistentGroupProtocol,
    PenstockError,
    SerializationError,
)
from penstock.shared.common.records import GroupMetadata, TopicPartition


@dataclass(frozen=True, slots=True)
class Revoke:
    """Have the listener revoke partitions that the member still owns; then call `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lose:
    """Tell the listener that partitions are lost; then call `on_revoked`."""

    partitions: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Gather:
    """Look up the partition counts of these topics for the leader; then call `on_gathered` or `on_failure`."""

    topics: frozenset[str]


@dataclass(frozen=True, slots=True)
class Complete:
    """Put the assignment in force (`adopt`), call the listener, then `on_completed`."""

    assigned: frozenset[TopicPartition]
    added: frozenset[TopicPartition]


@dataclass(frozen=True, slots=True)
class Leave:
    """Polls are missing: send LeaveGroup with this member id; it is empty for a static member, which sends none."""

    member_id: str


Step = Wait | Revoke | Lose | Join | Gather | Sync | Complete | Leave


@dataclass(slots=True)
class ConsumerMembershipManager(Member):
    """One consumer's membership in its group. All times are in ms, of one monotonic clock."""

    assignor: Assignor
    owned: frozenset[TopicPartition] = frozenset()
    topics: frozenset[str] = frozenset()
    group_topics: frozenset[str] = frozenset()
    """The topics that at least one member has subscribed to; only the leader knows them."""
    _joined_topics: frozenset[str] = frozenset()
    _members: tuple[tuple[str, str | None, bytes], ...] = ()
    _assignments: dict[str, bytes] | None = None
    _target: frozenset[TopicPartition] = frozenset()
    _counts: Mapping[str, int] | None = None
    _watches: bool = False
    _back: frozenset[TopicPartition] = frozenset()
    """The partitions that are being revoked while PREPARING."""
    identity: tuple[int, str] = (NO_GENERATION, "")
    """The generation and member id under which `owned` was assigned, or under which a cooperative member keeps it.
    They stay after a loss until the next assignment, so that the group rejects the commits made under them."""
    _sticky: tuple[frozenset[TopicPartition], int] = (frozenset(), NO_GENERATION)

    def __repr__(self) -> str:
        return f"<ConsumerMembershipManager {self.state}, {self.where()}, owns {len(self.owned)}>"

    def where(self) -> str:
        """Return how error messages name this member: client, group, generation, member id and instance id."""
        return describe_member(self.config.client_id, self.group_metadata)

    @property
    def owner_metadata(self) -> GroupMetadata:
        """The identity under which the member commits; see `identity`."""
        return GroupMetadata(self.config.group_id, *self.identity, self.config.instance_id)

    @property
    def is_owner(self) -> bool:
        """Whether partitions are owned in a valid generation of the group, also during a rebalance."""
        return self.generation != NO_GENERATION and bool(self.owned)

    @property
    def is_forgotten(self) -> bool:
        """Whether owned partitions are lost (case 2 of the module), and the listener has not handled the loss yet."""
        return self.generation == NO_GENERATION and bool(self.owned)

    # --- calls of the consumer ---

    def subscribe(self, topics: frozenset[str]) -> None:
        """Set the topics. If they differ from those of the last join, the member joins the group again."""
        if topics != self.topics:
            self.topics = topics
            if self.state is MemberState.STABLE and topics != self._joined_topics:
                self.rejoin("other topics")

    def polled(self) -> None:
        """Note a poll: a member that left because polls were missing joins again."""
        if self.state is MemberState.LEFT:
            self._change_state(MemberState.UNJOINED)

    def take_error(self) -> PenstockError | None:
        """Return the error that keeps the member out of the group, or None.

        A fatal error (fenced) is returned by every call. Any other error is returned once, and the member then joins
        again.
        """
        error = self.error
        if error is not None and not isinstance(error, FatalError):
            self.error = None
            self._rejoin = True
            self._change_state(MemberState.UNJOINED)
        return error

    def metadata(self, counts: Mapping[str, int]) -> None:
        """Compare `counts` with the partition counts of the group's topics at the last assignment. If they differ,
        request a rebalance. Only the leader does so, and a static member that came back, which may be the leader."""
        if not self._watches or self.state is not MemberState.STABLE:
            return
        known = {topic: counts[topic] for topic in self.group_topics or self._joined_topics if topic in counts}
        if self._counts is None:
            # A static member that came back made no assignment, so these counts are the first to compare with.
            self._counts = known
        elif changed := sorted(
            topic for topic in {*known, *self._counts} if known.get(topic) != self._counts.get(topic)
        ):
            self._counts = known
            self.rejoin(f"partitions changed of {', '.join(changed)}")

    # --- the next step ---

    def next_step(self, now_ms: int, idle_ms: float) -> Step:
        """Return the next step; `idle_ms` is the time since the last poll."""
        match self.state:
            case MemberState.FAILED | MemberState.LEFT:
                return self._lose_if_forgotten()
            case MemberState.SYNCING:
                return self._next_sync_step()
            case MemberState.JOINING:
                return Wait(None)
            case MemberState.PREPARING if self.generation == NO_GENERATION:
                self._change_state(MemberState.UNJOINED)
                return self._lose_if_forgotten()
            case MemberState.PREPARING:
                return self.leave_if_idle(idle_ms) or Revoke(self._back)
            case MemberState.COMPLETING:
                return self.leave_if_idle(idle_ms) or self._complete_rebalance()
        return self._next_step_between_rebalances(now_ms, idle_ms)

    def leave_if_idle(self, idle_ms: float) -> Leave | None:
        """Return the step that leaves the group if the last poll is older than `max_poll_interval_ms`, else None.

        Also returns None for a consumer that is not a member, and while JoinGroup or SyncGroup is in flight.
        """
        if idle_ms < self.config.max_poll_interval_ms or self.generation == NO_GENERATION:
            return None
        if self.state in (MemberState.JOINING, MemberState.SYNCING):
            return None
        self._change_state(MemberState.LEFT)
        return Leave(self.leave())

    def _stop_joining(self) -> Step:
        self._change_state(MemberState.LEFT)
        # The group may have reserved a membership for the join (KIP-394).
        member_id = self.leave()
        return Leave(member_id) if member_id else Wait(0)

    def _next_step_between_rebalances(self, now_ms: int, idle_ms: float) -> Step:
        """In UNJOINED or STABLE: wait, leave, or prepare to join."""
        # Once it is in the group, it joins without topics too: the other members wait for it.
        if not self.topics and not self.owned and not self.member_id:
            return Wait(None)
        idle_left = self.config.max_poll_interval_ms - idle_ms
        if idle_left <= 0:
            return self.leave_if_idle(idle_ms) or self._stop_joining()
        if self.state is MemberState.STABLE:
            if not self._rejoin:
                return Wait(idle_left)
            self._change_state(MemberState.UNJOINED)
        if now_ms < self._retry_at_ms:
            return Wait(min(idle_left, self._retry_at_ms - now_ms))
        return self._prepare_to_join()

    def _prepare_to_join(self) -> Step:
        if self.generation == NO_GENERATION and self.owned:
            return self._lose_if_forgotten()
        if self.assignor.is_cooperative:
            back = frozenset(tp for tp in self.owned if tp.topic not in self.topics)
        else:
            back = self.owned
        if back:
            self._change_state(MemberState.PREPARING)
            self._back = back
            return Revoke(back)
        self._change_state(MemberState.JOINING)
        self._rejoin = False
        self._joined_topics = self.topics
        return Join(self.member_id, ((self.assignor.name, self._encode_subscription()),), self._reason)

    def _encode_subscription(self) -> bytes:
        cooperative = self.assignor.is_cooperative
        owned, generation = (self.owned, self.generation) if cooperative else self._sticky
        return encode_subscription(
            Subscription(
                tuple(self.topics),
                self.assignor.user_data(owned, generation),
                tuple(self.owned),
                self.generation,
            )
        )

    def _next_sync_step(self) -> Step:
        if self.is_leader and self._assignments is None:
            return Gather(self.group_topics)
        return Sync(self.generation, self.member_id, self._assignments or {})

    def _complete_rebalance(self) -> Step:
        if self.generation == NO_GENERATION:
            # The member was removed meanwhile, and other members may have the assignment.
            self._change_state(MemberState.UNJOINED)
            return self._lose_if_forgotten()
        if back := self.owned - self._target:
            return Revoke(back)
        return Complete(self._target, self._target - self.owned)

    def _lose_if_forgotten(self) -> Step:
        assert self.generation == NO_GENERATION
        return Lose(self.owned) if self.owned else Wait(0 if self.state is MemberState.UNJOINED else None)

    def leave(self) -> str:
        """Forget the membership. Returns the member id for LeaveGroup, or "" if there is none or the member is static:
        the group keeps a static member until its session times out."""
        member_id = self.member_id if self.config.instance_id is None else ""
        self._forget_generation(member=True)
        return member_id

    # --- outcomes of the steps ---

    def on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Note that the listener has handled the revocation or the loss."""
        self.owned -= partitions
        if self.state is MemberState.PREPARING:
            self._change_state(MemberState.UNJOINED)
        elif self.state is MemberState.COMPLETING:
            self.rejoin("gave partitions back")

    def on_completed(self) -> None:
        """Note that the listener has handled the assignment."""
        if self.state is not MemberState.COMPLETING:
            # The member has failed meanwhile.
            return
        self._change_state(MemberState.STABLE)
        if self.topics != self._joined_topics:
            self.rejoin("other topics")

    def adopt(self) -> None:
        """Put the assignment in force; called before the listener."""
        self.owned = self._target
        self.identity = self.generation, self.member_id
        self._sticky = (self.owned, self.generation)

    def on_join(self, response: JoinResponse, now_ms: int) -> None:
        """Apply the coordinator's response to Join."""
        if not response.code and response.protocol != self.assignor.name:
            self.fail(IllegalState(f"JoinGroup of {self.where()}: the group uses {response.protocol!r}"))
            return
        came_back = self.config.instance_id is not None and not self.member_id
        if not self.is_joined(response, now_ms):
            return
        if self.owned:
            # A cooperative member keeps its partitions under the new generation.
            self.identity = self.generation, self.member_id
        # A static leader that came back is not made leader again, so that there is no rebalance (KIP-345). It must
        # watch the topics all the same. If it does not lead, its rejoin costs at most one more rebalance.
        self._watches = self.is_leader or came_back
        self._members = response.members
        self._assignments = None
        self._counts = None
        self.group_topics = frozenset()
        if self.is_leader:
            self._read_members()

    def _read_members(self) -> None:
        topics: set[str] = set()
        for member_id, _, data in self._members:
            try:
                topics |= set(decode_subscription(data).topics)
            except SerializationError as e:
                self.fail(SerializationError(f"JoinGroup of {self.where()}: member {member_id}: {e}"))
                return
        self.group_topics = frozenset(topics)

    def on_gathered(self, counts: Mapping[str, int]) -> None:
        """Assign the partitions of the group's topics as the leader; `counts` has the topics that exist."""
        self._counts = dict(counts)
        members = {name: GroupMember(decode_subscription(data), instance) for name, instance, data in self._members}
        try:
            assigned = self.assignor.assign(counts, members)
            user_data = self.assignor.assignment_data(counts, members, assigned)
        except SerializationError as e:
            self.fail(SerializationError(f"assignment of {self.where()}: {e}"))
            return
        self._assignments = {
            name: encode_assignment(Assignment(tuple(tps), user_data.get(name))) for name, tps in assigned.items()
        }

    def on_sync(self, response: SyncResponse, now_ms: int) -> None:
        """Apply the coordinator's response to Sync."""
        if response.code:
            self._handle_rejected_request("SyncGroup", response.code, now_ms)
            return
        try:
            assignment = decode_assignment(response.assignment)
            self.assignor.on_assignment(assignment.user_data)
        except SerializationError as e:
            self.fail(SerializationError(f"SyncGroup of {self.where()}: {e}"))
            return
        except InconsistentGroupProtocol as e:
            self.fail(InconsistentGroupProtocol(f"SyncGroup of {self.where()}: {e}"), member=False)
            return
        target = frozenset(assignment.partitions)
        self._failures = 0
        self._note_heartbeat_response(now_ms)
        if not {tp.topic for tp in target} <= self.topics:
            # The subscribed topics changed during the rebalance.
            self.rejoin("assigned what is not subscribed to any more")
            self._change_state(MemberState.UNJOINED)
            return
        self._target = target
        self._change_state(MemberState.COMPLETING)

    def on_session_over(self) -> None:
        """Do nothing: the member continues, and the group's response shows whether it is still a member."""

    def fail(self, error: PenstockError, *, member: bool = True) -> None:
        """Stop taking part in the group because of an error, until `take_error` has returned it; for good after a
        FatalError.

        `member` means that the member id is forgotten too. With `member=False` it is kept for `leave`, because the
        group still has the member.
        """
        self.error = error
        self._forget_generation(member=member)
        self.state = MemberState.FAILED

    def _forget_generation(self, *, member: bool) -> None:
        Member._forget_generation(self, member=member)
        self._watches = False
