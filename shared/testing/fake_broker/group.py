"""One group of Kafka's classic protocol: its members, its generation, and its waiting requests.

    Empty --join--> PreparingRebalance --all have joined--> CompletingRebalance --the leader's sync--> Stable
    CompletingRebalance, Stable --join with changes, leave, session timeout--> PreparingRebalance
    CompletingRebalance, Stable --no sync of a member in time--> PreparingRebalance
    Stable --join of the leader--> PreparingRebalance
    PreparingRebalance --no member left--> Empty

In a rebalance, a join is answered when every member has joined, or when the slowest member's rebalance timeout has
passed. Dynamic members that have not joined by then are removed. Static members remain (KIP-345). A sync is answered
when the leader has sent the assignment. A member that sends no sync within the slowest member's rebalance timeout is
removed. A member that sends nothing for its session timeout is removed, unless it waits for the response to its join or
sync.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.handler_responses import DelayedResponse
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.timers import Timer, Timers

MEMBER_ID_REQUIRED_SINCE = 4
"""From this version of JoinGroup on, a new dynamic member first receives its id, and joins again with it (KIP-394)."""


SKIP_REPORTED_SINCE = 9
"""From this version of JoinGroup on, a static leader that returns gets `skip_assignment` (KIP-814). Before, the
response names its old member id as the leader, so that it assigns nothing."""
PROTOCOL_NAMED_SINCE = 5
"""From this version on, a member's sync names the group's protocol that the member knows (KIP-559)."""


class BrokerGroupState(StrEnum):
    """Group states, with Kafka's names."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass
class BrokerGroupMember:
    """One member, and the requests for which it waits."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: list[tuple[str, bytes]]
    seen_ms: int
    assignment: bytes = b""
    has_synced: bool = False
    joining: DelayedResponse | None = None
    syncing: DelayedResponse | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the response to its join or sync. Until then it cannot send a heartbeat."""
        return self.joining is not None or self.syncing is not None

    def metadata(self, protocol: str) -> bytes:
        return next((data for name, data in self.protocols if name == protocol), b"")

    def update(self, body: Message, protocols: list[tuple[str, bytes]], now_ms: int) -> None:
        """Apply a JoinGroup request of a known member."""
        self.protocols = protocols
        self.seen_ms = now_ms
        self.session_timeout_ms = body.session_timeout_ms
        self.rebalance_timeout_ms = _rebalance_timeout_of(body)


def _rebalance_timeout_of(body: Message) -> int:
    timeout_ms: int = body.rebalance_timeout_ms if body.rebalance_timeout_ms >= 0 else body.session_timeout_ms
    return timeout_ms


@dataclass
class BrokerGroup:
    """One group."""

    group_id: str
    timers: Timers = field(repr=False)
    initial_delay_ms: int = 0
    state: BrokerGroupState = BrokerGroupState.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str = ""
    leader: str = ""
    members: dict[str, BrokerGroupMember] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    _deadline: Timer | None = field(default=None, repr=False)
    _is_delayed: bool = field(default=False, repr=False)

    def join(self, version: int, client: tuple[str, str], body: Message, now_ms: int) -> Message | DelayedResponse:
        """Handle JoinGroup. Returns a Message for an error, or if the current generation continues.

        Otherwise returns a DelayedResponse. It is completed when all members have joined, at the latest after the
        rebalance timeout. If the group was empty and `initial_delay_ms` is not 0, it is completed after that delay.

        1. A member whose protocols the group does not share is rejected.
        2. A member with an id must be known. The id of a static member must be the one that its instance has now
           (KIP-345).
        3. From version 4 on, a new dynamic member receives its id with an error, and joins again with it (KIP-394).
        4. A new instance of a static member replaces the old one. If a stable group keeps its protocol, the current
           generation continues, even if the member's metadata has changed (KIP-345). Otherwise the group rebalances.
        """
        protocols = [(one.name, one.metadata) for one in body.protocols]
        # 1.
        if self.members and (
            body.protocol_type != self.protocol_type or not self._shared_protocols(protocols, body.member_id)
        ):
            return self._error_response(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, body.member_id)
        if not protocols or not body.protocol_type:
            return self._error_response(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, body.member_id)
        static = self._static_member(body.group_instance_id)
        if body.member_id:
            # 2.
            if static is not None and static.member_id != body.member_id:
                return self._error_response(ErrorCode.FENCED_INSTANCE_ID, body.member_id)
            if body.member_id not in self.members and body.member_id not in self.pending:
                return self._error_response(ErrorCode.UNKNOWN_MEMBER_ID, body.member_id)
            member_id = body.member_id
        else:
            member_id = f"{body.group_instance_id or client[0]}-{uuid.uuid4()}"
            if body.group_instance_id is None and version >= MEMBER_ID_REQUIRED_SINCE:
                # 3.
                self._expect_rejoin(member_id, body.session_timeout_ms, now_ms)
                return self._error_response(ErrorCode.MEMBER_ID_REQUIRED, member_id)
            if static is not None:
                # 4.
                self._replace_static_member(static, member_id)
                member = self.members[member_id]
                if (
                    self.state is BrokerGroupState.STABLE
                    and self._elect_group_protocol(member, protocols) == self.protocol
                ):
                    member.update(body, protocols, now_ms)
                    return self._resume_static_member(version, member, static.member_id, now_ms)
        self.protocol_type = body.protocol_type
        return self._join_member(member_id, client, body, protocols, now_ms)

    def _join_member(
        self,
        member_id: str,
        client: tuple[str, str],
        body: Message,
        protocols: list[tuple[str, bytes]],
        now_ms: int,
    ) -> Message | DelayedResponse:
        self.pending.discard(member_id)
        member = self.members.get(member_id)
        if member is None:
            rebalance_ms = _rebalance_timeout_of(body)
            member = BrokerGroupMember(
                member_id, body.group_instance_id, *client, body.session_timeout_ms, rebalance_ms, protocols, now_ms
            )
            self.members[member_id] = member
            self._watch_session_timeout(member, now_ms)
            news = True
        else:
            # A restarted static member has a new id. The leader may be assigning to the old one.
            is_restarted = not body.member_id
            news = is_restarted or member.protocols != protocols
            if is_restarted:
                # The timer of the replaced instance does not apply to this member.
                self._watch_session_timeout(member, now_ms)
            member.update(body, protocols, now_ms)
        unchanged = self.state is BrokerGroupState.COMPLETING or (
            self.state is BrokerGroupState.STABLE and member_id != self.leader
        )
        if not news and unchanged:
            return self._join_response(member)
        member.joining = member.joining or DelayedResponse()
        response = member.joining
        self._prepare_rebalance(now_ms)
        return response

    def sync(self, version: int, body: Message, now_ms: int) -> Message | DelayedResponse:
        """The member's assignment, as soon as the leader has sent it."""
        if version >= PROTOCOL_NAMED_SINCE and None in (body.protocol_type, body.protocol_name):
            return Message(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        member = self._check_member(body)
        if isinstance(member, ErrorCode):
            return Message(error_code=member)
        named = (body.protocol_type or self.protocol_type, body.protocol_name or self.protocol)
        if named != (self.protocol_type, self.protocol):
            return Message(error_code=ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        member.seen_ms = now_ms
        if self.state is BrokerGroupState.PREPARING:
            return Message(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        member.has_synced = True
        if self.state is BrokerGroupState.STABLE:
            return self._sync_response(member)
        member.syncing = member.syncing or DelayedResponse()
        response = member.syncing
        if member.member_id == self.leader:
            given = {one.member_id: one.assignment for one in body.assignments}
            self.state = BrokerGroupState.STABLE
            for one in self.members.values():
                one.assignment = given.get(one.member_id, b"")
                one.seen_ms = now_ms
                syncing = one.syncing
                one.syncing = None
                if syncing is not None:
                    syncing.complete(self._sync_response(one))
        return response

    def heartbeat(self, body: Message, now_ms: int) -> ErrorCode:
        """Record that the member is alive. Returns REBALANCE_IN_PROGRESS while the group waits for joins."""
        member = self._check_member(body)
        if isinstance(member, ErrorCode):
            return member
        member.seen_ms = now_ms
        return ErrorCode.REBALANCE_IN_PROGRESS if self.state is BrokerGroupState.PREPARING else ErrorCode.NONE

    def leave(self, member_id: str, instance_id: str | None, now_ms: int) -> ErrorCode:
        """Remove the member; the others rebalance."""
        static = self._static_member(instance_id)
        if static is not None:
            if member_id and member_id != static.member_id:
                return ErrorCode.FENCED_INSTANCE_ID
            member_id = static.member_id
        if member_id in self.pending:
            self.pending.discard(member_id)
            self._complete_join_if_all_joined(now_ms)
            return ErrorCode.NONE
        if member_id not in self.members:
            return ErrorCode.UNKNOWN_MEMBER_ID
        self._remove_member(member_id, now_ms)
        return ErrorCode.NONE

    def commit_error(self, body: Message, now_ms: int, *, transactional: bool) -> ErrorCode:
        """The error of a commit: NONE for a member of this generation, or without a generation if the group is empty.

        A transactional commit may name no member. While the group waits for the leader's sync, a member's commit that
        is not transactional gets REBALANCE_IN_PROGRESS.
        """
        if body.generation_id < 0 and self.state is BrokerGroupState.EMPTY:
            return ErrorCode.NONE
        if body.generation_id >= 0 or body.member_id or body.group_instance_id is not None:
            member = self._check_member(body)
            if isinstance(member, ErrorCode):
                return member
            member.seen_ms = now_ms
        elif not transactional:
            return ErrorCode.UNKNOWN_MEMBER_ID
        is_between = self.state is BrokerGroupState.COMPLETING and not transactional
        return ErrorCode.REBALANCE_IN_PROGRESS if is_between else ErrorCode.NONE

    def _check_member(self, body: Message) -> BrokerGroupMember | ErrorCode:
        static = self._static_member(body.group_instance_id)
        if body.group_instance_id is not None and static is not None and static.member_id != body.member_id:
            return ErrorCode.FENCED_INSTANCE_ID
        member = self.members.get(body.member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return member if body.generation_id == self.generation else ErrorCode.ILLEGAL_GENERATION

    def _static_member(self, instance_id: str | None) -> BrokerGroupMember | None:
        if instance_id is None:
            return None
        return next((one for one in self.members.values() if one.instance_id == instance_id), None)

    def _replace_static_member(self, old: BrokerGroupMember, member_id: str) -> None:
        """A static member that restarted replaces its old member id. The old id is fenced."""
        for waiting in (old.joining, old.syncing):
            if waiting is not None:
                waiting.complete(self._error_response(ErrorCode.FENCED_INSTANCE_ID, old.member_id))
        new = replace(old, member_id=member_id, joining=None, syncing=None)
        self.members = {one.member_id: one for one in (new if one is old else one for one in self.members.values())}
        if self.leader == old.member_id:
            self.leader = member_id

    def _resume_static_member(self, version: int, member: BrokerGroupMember, old_id: str, now_ms: int) -> Message:
        """The response to a static member that returns while the group keeps its protocol and generation."""
        self._watch_session_timeout(member, now_ms)
        response = self._join_response(member)
        if self.leader == member.member_id:
            if version >= SKIP_REPORTED_SINCE:
                response.skip_assignment = True
            else:
                response.leader = old_id
                response.members = []
        return response

    def _expect_rejoin(self, member_id: str, within_ms: int, now_ms: int) -> None:
        self.pending.add(member_id)

        def expire_pending_member(at_ms: int) -> None:
            if member_id in self.pending:
                self.pending.discard(member_id)
                self._complete_join_if_all_joined(at_ms)

        self.timers.at(now_ms + within_ms, expire_pending_member)

    def _watch_session_timeout(self, member: BrokerGroupMember, now_ms: int) -> None:
        def expire_session(at_ms: int) -> None:
            if self.members.get(member.member_id) is not member:
                return
            if not member.is_waiting and at_ms >= member.seen_ms + member.session_timeout_ms:
                self._remove_member(member.member_id, at_ms)
                return
            since = at_ms if member.is_waiting else member.seen_ms
            self.timers.at(since + member.session_timeout_ms, expire_session)

        self.timers.at(now_ms + member.session_timeout_ms, expire_session)

    def _remove_member(self, member_id: str, now_ms: int) -> None:
        member = self.members.pop(member_id)
        for waiting in (member.joining, member.syncing):
            if waiting is not None:
                waiting.complete(self._error_response(ErrorCode.UNKNOWN_MEMBER_ID, member_id))
        if self.state is BrokerGroupState.PREPARING:
            self._complete_join_if_all_joined(now_ms)
        else:
            self._prepare_rebalance(now_ms)

    def _prepare_rebalance(self, now_ms: int) -> None:
        """Start a rebalance, or check whether the current one is complete."""
        if self.state is not BrokerGroupState.PREPARING:
            was_empty = self.state is BrokerGroupState.EMPTY
            self.state = BrokerGroupState.PREPARING
            for member in self.members.values():
                member.assignment = b""
                syncing = member.syncing
                member.syncing = None
                if syncing is not None:
                    member.seen_ms = now_ms
                    syncing.complete(Message(error_code=ErrorCode.REBALANCE_IN_PROGRESS))
            self._is_delayed = was_empty and self.initial_delay_ms > 0
            limit_ms = self.initial_delay_ms if self._is_delayed else self._rebalance_timeout_ms()
            self._set_deadline(now_ms + limit_ms, self._complete_join)
        self._complete_join_if_all_joined(now_ms)

    def _complete_join_if_all_joined(self, now_ms: int) -> None:
        everyone = all(one.joining is not None for one in self.members.values()) and not self.pending
        if self.state is BrokerGroupState.PREPARING and everyone and not self._is_delayed:
            self._complete_join(now_ms)

    def _complete_join(self, now_ms: int) -> None:
        self._cancel_deadline()
        self._is_delayed = False
        for member in [one for one in self.members.values() if one.joining is None and one.instance_id is None]:
            del self.members[member.member_id]
        joined = [one.member_id for one in self.members.values() if one.joining is not None]
        if self.members and not joined:
            # Only static members remain. The group waits until one joins or all their sessions end.
            self._set_deadline(now_ms + self._rebalance_timeout_ms(), self._complete_join)
            return
        self.generation += 1
        if not self.members:
            self.state = BrokerGroupState.EMPTY
            self.protocol = ""
            self.leader = ""
            return
        self.state = BrokerGroupState.COMPLETING
        anyone = next(iter(self.members.values()))
        self.protocol = self._elect_group_protocol(anyone, anyone.protocols)
        if self.leader not in joined:
            self.leader = joined[0]
        self._set_deadline(now_ms + self._rebalance_timeout_ms(), self._remove_members_without_sync)
        for member in list(self.members.values()):
            joining = member.joining
            member.joining = None
            member.seen_ms = now_ms
            member.has_synced = False
            if joining is not None:
                joining.complete(self._join_response(member))

    def _remove_members_without_sync(self, now_ms: int) -> None:
        """Remove the members that have not sent a sync in this generation."""
        removed = [one.member_id for one in self.members.values() if not one.has_synced]
        for member_id in removed:
            del self.members[member_id]
        if removed:
            self._prepare_rebalance(now_ms)

    def _rebalance_timeout_ms(self) -> int:
        """The longest of all members, at least 1 ms: a timer that sets itself again must not be due at once."""
        return max([1, *(one.rebalance_timeout_ms for one in self.members.values())])

    def _set_deadline(self, at_ms: int, call: Callable[[int], None]) -> None:
        self._cancel_deadline()
        self._deadline = self.timers.at(at_ms, call)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()

    def _shared_protocols(self, protocols: list[tuple[str, bytes]], member_id: str) -> set[str]:
        shared = {name for name, _ in protocols}
        for one in self.members.values():
            if one.member_id != member_id:
                shared &= {name for name, _ in one.protocols}
        return shared

    def _elect_group_protocol(self, member: BrokerGroupMember, protocols: list[tuple[str, bytes]]) -> str:
        """The protocol that all members support and most prefer, with one member's new list."""
        shared = self._shared_protocols(protocols, member.member_id)
        liked = [protocols if one is member else one.protocols for one in self.members.values()]
        votes = Counter(next(name for name, _ in names if name in shared) for names in liked)
        return votes.most_common(1)[0][0]

    def _join_response(self, member: BrokerGroupMember) -> Message:
        is_leader = member.member_id == self.leader
        rows = [
            Message(member_id=one.member_id, group_instance_id=one.instance_id, metadata=one.metadata(self.protocol))
            for one in self.members.values()
            if is_leader
        ]
        return Message(
            error_code=ErrorCode.NONE,
            generation_id=self.generation,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol,
            leader=self.leader,
            member_id=member.member_id,
            members=rows,
        )

    def _sync_response(self, member: BrokerGroupMember) -> Message:
        return Message(
            error_code=ErrorCode.NONE,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol,
            assignment=member.assignment,
        )

    def _error_response(self, code: ErrorCode, member_id: str) -> Message:
        return Message(error_code=code, member_id=member_id, protocol_name="")
