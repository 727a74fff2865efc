"""Who gets which partitions: the four assignors of the Java consumer, under their names.

The group's leader runs one with what every member has written (`GroupMember`) and the partitions of every topic; all
members run it for `user_data`, what the next assignment shall know of them. `eager` assignors need every member to have
given back everything before; under the `cooperative` one members keep what they have, so a partition that is to move is
given to nobody in this round: its owner sees that it is not assigned any more, gives it back, and joins again.

Members with an instance id come first, by it, then the others by member id: so the order of the static ones outlives
restarts.

>>> members = {name: GroupMember(Subscription(("t",))) for name in "ab"}
>>> ASSIGNORS["range"].assign({"t": 3}, members)["a"]
[TopicPartition(topic='t', partition=0), TopicPartition(topic='t', partition=1)]
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from penstock.shared.clients.consumer.group_protocol import (
    NO_GENERATION,
    Subscription,
    decode_generation,
    decode_sticky,
    encode_generation,
    encode_sticky,
)
from penstock.shared.clients.consumer.sticky import assign_sticky
from penstock.shared.common.records import TopicPartition

Assigned = dict[str, list[TopicPartition]]


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member as the leader sees it."""

    subscription: Subscription
    instance_id: str | None = None


class Assignor:
    """Base of the assignors."""

    name: ClassVar[str]
    is_cooperative: ClassVar[bool] = False

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        """What a member writes into its subscription, given its last assignment and that one's generation."""
        return None

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        """Each member's partitions; `partitions` says how many each topic has, without the topics that do not exist."""
        raise AssertionError("an assignor assigns")

    def told(
        self, partitions: Mapping[str, int], members: Mapping[str, GroupMember], assigned: Assigned
    ) -> Mapping[str, bytes]:
        """What the leader tells members beside their partitions."""
        return {}

    def on_assignment(self, told: bytes | None) -> None:
        """What the leader has told this member beside its partitions.

        May raise SerializationError, or InconsistentGroupProtocol where no leader with this strategy assigned.
        """


class RangeAssignor(Assignor):
    """Topic by topic, consecutive partitions; the first members get one more where it does not come out even."""

    name = "range"

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        assigned: Assigned = {member_id: [] for member_id in members}
        for topic, subscribers in _subscribers(partitions, members).items():
            each, more = divmod(partitions[topic], len(subscribers))
            start = 0
            for place, member_id in enumerate(subscribers):
                end = start + each + (place < more)
                assigned[member_id] += [TopicPartition(topic, p) for p in range(start, end)]
                start = end
        return assigned


class RoundRobinAssignor(Assignor):
    """All partitions of all topics in order, to one member after the other that has subscribed to the topic."""

    name = "roundrobin"

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        assigned: Assigned = {member_id: [] for member_id in members}
        order, at = in_order(members), 0
        for topic in sorted(_subscribers(partitions, members)):
            for partition in range(partitions[topic]):
                while topic not in members[order[at % len(order)]].subscription.topics:
                    at += 1
                assigned[order[at % len(order)]].append(TopicPartition(topic, partition))
                at += 1
        return assigned


class StickyAssignor(Assignor):
    """As even as can be, and with as few changes of hands as that allows."""

    name = "sticky"

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        if not assigned and generation == NO_GENERATION:
            return None
        return encode_sticky(sorted(assigned), generation)

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        # Owned partitions in the subscription say nothing: an eager member has given everything back.
        claims = {member_id: decode_sticky(one.subscription.user_data) for member_id, one in members.items()}
        return assign_sticky(partitions, _subscribers(partitions, members), in_order(members), claims)


class CooperativeStickyAssignor(Assignor):
    """As `sticky`, in two rounds: what has to change hands is given back in the first and assigned in the second."""

    name = "cooperative-sticky"
    is_cooperative = True

    def preferred(self, members: Mapping[str, GroupMember]) -> Mapping[str, Collection[TopicPartition]]:
        """The partitions that each member had better get than others, where nobody has them and it is as even."""
        return {}

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        return encode_generation(generation)

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        claims = {
            member_id: (one.subscription.owned, _generation(one.subscription)) for member_id, one in members.items()
        }
        subscribers, order = _subscribers(partitions, members), in_order(members)
        assigned = assign_sticky(partitions, subscribers, order, claims, self.preferred(members))
        holders: dict[TopicPartition, set[str]] = {}
        for member_id, (owned, _) in claims.items():
            for tp in owned:
                holders.setdefault(tp, set()).add(member_id)
        return {
            member_id: [tp for tp in given if tp not in holders or member_id in holders[tp]]
            for member_id, given in assigned.items()
        }


def in_order(members: Mapping[str, GroupMember]) -> list[str]:
    """The ids of the members, the static ones first."""
    return sorted(members, key=lambda member_id: _place(member_id, members[member_id].instance_id))


def _place(member_id: str, instance_id: str | None) -> tuple[bool, str]:
    return (instance_id is None, member_id if instance_id is None else instance_id)


def _subscribers(partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> dict[str, list[str]]:
    """The members of every topic that exists and that somebody has subscribed to, in order."""
    found: dict[str, list[str]] = {}
    for member_id in in_order(members):
        for topic in dict.fromkeys(members[member_id].subscription.topics):
            if topic in partitions:
                found.setdefault(topic, []).append(member_id)
    return found


def _generation(subscription: Subscription) -> int:
    if subscription.generation >= 0:
        return subscription.generation
    return decode_generation(subscription.user_data)


ASSIGNORS: Mapping[str, Assignor] = {
    assignor.name: assignor
    for assignor in (RangeAssignor(), RoundRobinAssignor(), StickyAssignor(), CooperativeStickyAssignor())
}
