"""The four assignors of the Java consumer, under their names. An assignor distributes partitions among the members of a
group.

The group's leader calls `assign` with the subscriptions of all members (`GroupMember`) and the number of partitions of
every topic. Each member calls `user_data`, and sends the result to the leader of the next rebalance. Under an eager
assignor a member revokes all its partitions before it joins. Under the cooperative one members keep the partitions of
the topics that they still subscribe to (KIP-429). A partition that must move from one member to another is at first
assigned to no member, unless both claim it. Its owner sees that its assignment lacks the partition, revokes it, and
joins again.

The sticky assignors share one algorithm. The result is balanced. It moves few partitions, but not always the
fewest possible:

1. At first each valid claim is kept. A claim is a partition of the member's last assignment. If several members claim a
   partition, the claim of the newest generation wins. If their generations are equal, no claim is valid.
2. Each unowned partition goes to the subscribed member with the fewest partitions.
3. Members with many partitions give some to members with few. If two members share no topic, a path leads through
   others: `a` gives a partition to `b`, and `b` gives one of another topic to `c`. Paths that move only initially
   unowned partitions are used first.

A path is used only if the first member has at least two partitions more than the last one. So each path reduces the sum
of the squared numbers of partitions. When no path is left, no assignment has a smaller sum. A cooperative group
therefore settles in two rounds. The second round assigns the partitions that the first one left out. It is as balanced,
and moves no partition that a member holds.

Members with an instance id come first, ordered by that id. The others follow by member id. So static members keep their
order through restarts.

>>> members = {name: GroupMember(Subscription(("t",))) for name in "ab"}
>>> ASSIGNORS["range"].assign({"t": 3}, members)["a"]
[TopicPartition(topic='t', partition=0), TopicPartition(topic='t', partition=1)]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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
        """Take the user data that the leader sent with this member's partitions.

        May raise SerializationError. May raise InconsistentGroupProtocol if the leader did not use this assignor.
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
    """Assigns partitions as evenly as possible, and moves few of them (KIP-54)."""

    name = "sticky"

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        if not assigned and generation == NO_GENERATION:
            return None
        return encode_sticky(sorted(assigned), generation)

    def assign(self, partitions: Mapping[str, int], members: Mapping[str, GroupMember]) -> Assigned:
        # Only the user data has claims: an eager member owns nothing when it joins.
        claims = {member_id: decode_sticky(one.subscription.user_data) for member_id, one in members.items()}
        return assign_sticky(partitions, _subscribers_by_topic(partitions, members), in_order(members), claims)


class CooperativeStickyAssignor(Assignor):
    """As `sticky`, in two rounds: moving partitions are revoked in the first and assigned in the second (KIP-429)."""

    name = "cooperative-sticky"
    is_cooperative = True

    def preferred(self, members: Mapping[str, GroupMember]) -> Mapping[str, Collection[TopicPartition]]:
        """Return the partitions that each member prefers.

        A preference decides which of the members with the fewest partitions gets an unowned partition.
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
    """Return the subscribed members of every existing topic that has any, in the order of `in_order`."""
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


Claims = Mapping[str, tuple[Sequence[TopicPartition], int]]
"""The partitions that each member claims from its last assignment, and that assignment's generation."""
Path = list[tuple[str, str, str]]
"""The steps (giver, topic, receiver) of a path, from its end to its start."""


# --- the sticky assignment ---


def assign_sticky(
    partitions: Mapping[str, int],
    subscribers: Mapping[str, Sequence[str]],
    order: Sequence[str],
    claims: Claims,
    preferred: Mapping[str, Collection[TopicPartition]] | None = None,
) -> dict[str, list[TopicPartition]]:
    """Return each member's partitions. `subscribers` are the members that subscribe to each topic; `order` breaks ties.

    1. A member keeps the partitions of which it alone has the newest claim.
    2. Any other partition goes to a subscriber with the fewest partitions. If several have the fewest, one that has the
       partition in `preferred` gets it.
    3. Partitions move as long as that improves the balance.
    """
    balance = _Balance(partitions, subscribers, order, claims)
    balance.place_unowned(preferred or {})
    for unowned_alone in (True, False):
        while balance.move(unowned_alone=unowned_alone):
            pass
    return {
        member_id: [
            TopicPartition(topic, p) for topic, held in sorted(balance.held[member_id].items()) for p in sorted(held)
        ]
        for member_id in order
    }


class _Balance:
    def __init__(
        self,
        partitions: Mapping[str, int],
        subscribers: Mapping[str, Sequence[str]],
        order: Sequence[str],
        claims: Claims,
    ) -> None:
        self._partitions = partitions
        self._subscribers = subscribers
        self._rank = {member_id: rank for rank, member_id in enumerate(order)}
        self._claims: dict[str, dict[str, set[int]]] = {member_id: defaultdict(set) for member_id in order}
        for member_id, (claimed, _) in claims.items():
            for topic, partition in claimed:
                self._claims[member_id][topic].add(partition)
        self._load = dict.fromkeys(order, 0)
        self.held: dict[str, dict[str, set[int]]] = {member_id: defaultdict(set) for member_id in order}
        self._owners = self._valid_claims(claims)
        self._unowned = {
            topic: {p for p in range(partitions[topic]) if TopicPartition(topic, p) not in self._owners}
            for topic in subscribers
        }
        for (topic, partition), member_id in self._owners.items():
            self._assign_partition(topic, partition, member_id)

    def _valid_claims(self, claims: Claims) -> dict[TopicPartition, str]:
        newest: dict[TopicPartition, tuple[int, str | None]] = {}
        for member_id, (claimed, generation) in claims.items():
            for tp in set(claimed):
                subscribed = member_id in self._subscribers.get(tp.topic, ())
                if not subscribed or not 0 <= tp.partition < self._partitions[tp.topic]:
                    continue
                known = newest.get(tp)
                if known is None or generation > known[0]:
                    newest[tp] = (generation, member_id)
                elif generation == known[0]:
                    newest[tp] = (generation, None)
        return {tp: member_id for tp, (_, member_id) in newest.items() if member_id is not None}

    def place_unowned(self, preferred: Mapping[str, Collection[TopicPartition]]) -> None:
        """Assign unowned partitions to the member with the fewest, topics with few subscribers first."""
        for topic in sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic)):
            for partition in sorted(self._unowned[topic]):
                at = TopicPartition(topic, partition)
                ranks = {
                    member_id: (self._load[member_id], at not in preferred.get(member_id, ()), self._rank[member_id])
                    for member_id in self._subscribers[topic]
                }
                self._assign_partition(topic, partition, min(ranks, key=ranks.__getitem__))

    def move(self, *, unowned_alone: bool) -> bool:
        """Move one partition along each step of a path that improves the balance. Returns whether there was such a
        path."""
        for giver in sorted(self._load, key=lambda member_id: (-self._load[member_id], self._rank[member_id])):
            path = self._find_shortest_path(giver, unowned_alone=unowned_alone)
            for source, topic, target in path:
                partition = self._choose_partition_to_move(source, topic, target)
                self.held[source][topic].remove(partition)
                self._load[source] -= 1
                self._assign_partition(topic, partition, target)
            if path:
                return True
        return False

    def _find_shortest_path(self, giver: str, *, unowned_alone: bool) -> Path:
        """Return the shortest path from `giver` to a member with the fewest partitions among those that it can reach.

        The path is empty unless that member has at least two partitions fewer than `giver`.

        1. The search is breadth-first. From each member reached, a partition of a topic that it holds may move to any
           subscriber of the topic. Each topic is followed once, from the member that is nearest to `giver`. If
           `unowned_alone` is True, only initially unowned partitions may move.
        2. The search ends early at a member with the fewest partitions of all.
        3. The path is read backwards from the member with the fewest.
        """
        came: dict[str, tuple[str, str]] = {}
        topics: set[str] = set()
        reached = [giver]
        fewest = min(self._load.values())
        end = giver
        for source in reached:
            # 1. `reached` grows during the search.
            for topic, held in self.held[source].items():
                if topic in topics or not held or (unowned_alone and not held & self._unowned[topic]):
                    continue
                topics.add(topic)
                for target in self._subscribers[topic]:
                    if target != giver and target not in came:
                        came[target] = (source, topic)
                        reached.append(target)
                        end = target if self._load[target] < self._load[end] else end
            if self._load[end] == fewest:
                # 2. No member has fewer partitions.
                break
        # 3. Read the path backwards.
        path: Path = []
        if self._load[giver] - self._load[end] >= 2:
            while end != giver:
                source, topic = came[end]
                path.append((source, topic, end))
                end = source
        return path

    def _choose_partition_to_move(self, source: str, topic: str, target: str) -> int:
        """Return the highest initially unowned partition, else the highest that the target claims, else the highest."""
        held = self.held[source][topic]
        return max(held & self._unowned[topic] or held & self._claims[target][topic] or held)

    def _assign_partition(self, topic: str, partition: int, member_id: str) -> None:
        self.held[member_id][topic].add(partition)
        self._load[member_id] += 1
