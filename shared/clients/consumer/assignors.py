"""The four assignors of the Java consumer, under their names. An assignor distributes partitions among members.

The group's leader runs one with the subscriptions of all members (`GroupMember`) and the partitions of every topic. All
members call `user_data`, which passes information to the next assignment. With an `eager` assignor every member has
revoked all its partitions before. With the `cooperative` one members keep theirs (KIP-429). A partition that must move
is assigned to no member in this round: its owner sees that it is missing, revokes it, and joins again.

Members with an instance id come first, ordered by it; the others follow by member id. So the order of the static
members survives restarts.

>>> members = {name: GroupMember(Subscription(("t",))) for name in "ab"}
>>> ASSIGNORS["range"].assign({"t": 3}, members)["a"]
[TopicPartition(topic='t', partition=0), TopicPartition(topic='t', partition=1)]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from penstock.shared.clients.consumer.sticky import assign_sticky
from penstock.shared.clients.protocol.consumer_protocol import (
    Subscription,
    decode_generation,
    decode_sticky,
    encode_generation,
    encode_sticky,
)
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.records import TopicPartition

Assigned = dict[str, list[TopicPartition]]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as the leader knows it."""

    subscription: Subscription
    instance_id: str | None = None


class Assignor:
    """Base class of the assignors."""

    name: ClassVar[str]
    is_cooperative: ClassVar[bool] = False

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        """Return the user data of a member's subscription, given its last assignment and the generation of that."""
        return None

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        """Return each member's partitions. `partitions` is the partition count of each topic that exists."""
        raise AssertionError("an assignor assigns")

    def assignment_data(
        self, partitions: Mapping[str, int], members: Mapping[str, GroupMember], assigned: Assigned
    ) -> Mapping[str, bytes]:
        """Return the user data that the leader sends to members with their partitions."""
        return {}

    def on_assignment(self, user_data: bytes | None) -> None:
        """Called with the user data that the leader sent with this member's partitions.

        May raise SerializationError, or InconsistentGroupProtocol if the leader did not use this assignor.
        """


class RangeAssignor(Assignor):
    """Assigns consecutive partitions, topic by topic; the first members get one more if there is a remainder."""

    name = "range"

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        assigned: Assigned = {member_id: [] for member_id in members}
        for topic, subscribers in _subscribers_by_topic(partitions, members).items():
            each, more = divmod(partitions[topic], len(subscribers))
            start = 0
            for rank, member_id in enumerate(subscribers):
                end = start + each + (rank < more)
                assigned[member_id] += [TopicPartition(topic, p) for p in range(start, end)]
                start = end
        return assigned


class RoundRobinAssignor(Assignor):
    """Assigns all partitions of all topics in order, to each subscribed member in turn."""

    name = "roundrobin"

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        assigned: Assigned = {member_id: [] for member_id in members}
        order = in_order(members)
        at = 0
        for topic in sorted(_subscribers_by_topic(partitions, members)):
            for partition in range(partitions[topic]):
                while topic not in members[order[at % len(order)]].subscription.topics:
                    at += 1
                assigned[order[at % len(order)]].append(TopicPartition(topic, partition))
                at += 1
        return assigned


class StickyAssignor(Assignor):
    """As balanced as possible, and with as few moved partitions as the balance allows (KIP-54)."""

    name = "sticky"

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        if not assigned and generation == NO_GENERATION:
            return None
        return encode_sticky(sorted(assigned), generation)

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        # Ignore the owned partitions in the subscription: an eager member has revoked all.
        claims = {member_id: decode_sticky(one.subscription.user_data) for member_id, one in members.items()}
        return assign_sticky(partitions, _subscribers_by_topic(partitions, members), in_order(members), claims)


class CooperativeStickyAssignor(Assignor):
    """As `sticky`, in two rounds: moving partitions are revoked in the first and assigned in the second (KIP-429)."""

    name = "cooperative-sticky"
    is_cooperative = True

    def preferred(self, members: Mapping[str, GroupMember]) -> Mapping[str, Collection[TopicPartition]]:
        """Return the partitions that each member prefers.

        They count for unowned partitions if the balance stays the same.
        """
        return {}

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        return encode_generation(generation)

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        claims = {
            member_id: (one.subscription.owned, _subscription_generation(one.subscription))
            for member_id, one in members.items()
        }
        subscribers = _subscribers_by_topic(partitions, members)
        order = in_order(members)
        assigned = assign_sticky(partitions, subscribers, order, claims, self.preferred(members))
        holders: dict[TopicPartition, set[str]] = {}
        for member_id, (owned, _) in claims.items():
            for tp in owned:
                holders.setdefault(tp, set()).add(member_id)
        # A partition that another member still holds is assigned in the next round (KIP-429).
        return {
            member_id: [tp for tp in given if tp not in holders or member_id in holders[tp]]
            for member_id, given in assigned.items()
        }


def in_order(members: Mapping[str, GroupMember]) -> list[str]:
    """Return the ids of the members, the static ones first."""
    return sorted(members, key=lambda member_id: _static_members_first(member_id, members[member_id].instance_id))


def _static_members_first(member_id: str, instance_id: str | None) -> tuple[bool, str]:
    return (instance_id is None, member_id if instance_id is None else instance_id)


def _subscribers_by_topic(partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> dict[str, list[str]]:
    """Return the subscribed members of every existing topic that has any, in order."""
    found: dict[str, list[str]] = {}
    for member_id in in_order(members):
        for topic in dict.fromkeys(members[member_id].subscription.topics):
            if topic in partitions:
                found.setdefault(topic, []).append(member_id)
    return found


def _subscription_generation(subscription: Subscription) -> int:
    if subscription.generation >= 0:
        return subscription.generation
    return decode_generation(subscription.user_data)


ASSIGNORS: Mapping[str, Assignor] = {
    assignor.name: assignor
    for assignor in (RangeAssignor(), RoundRobinAssignor(), StickyAssignor(), CooperativeStickyAssignor())
}
