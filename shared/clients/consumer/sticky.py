"""The sticky assignment: balanced first, then with as few moved partitions as the balance allows.

1. Every valid claim is kept. A claim is a partition of the member's last assignment. If several members claim a
   partition, the newest generation wins; in a tie none does.
2. Each unowned partition goes to the subscribed member with the fewest.
3. The member with the most gives one to the member with the fewest, if needed along a path: `a` gives a partition to
   `b`, and `b` gives one of another topic to `c`. Paths over initially unowned partitions come first.

A path is used if the loads of its ends differ by two or more, so each one reduces the sum of the squared loads. When no
path is left, no assignment has a smaller sum.

So a cooperative group settles in two rounds. The partitions left out of the first round are placed in the second. That
round is as balanced, and moves no partition that is held.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from penstock.shared.common.records import TopicPartition

Claims = Mapping[str, tuple[Sequence[TopicPartition], int]]
"""The partitions that each member claims from its last assignment, and that assignment's generation."""
Path = list[tuple[str, str, str]]
"""The steps (giver, topic, receiver) of a path, from its end to its start."""


def assign_sticky(
    partitions: Mapping[str, int],
    subscribers: Mapping[str, Sequence[str]],
    order: Sequence[str],
    claims: Claims,
    preferred: Mapping[str, Collection[TopicPartition]] | None = None,
) -> dict[str, list[TopicPartition]]:
    """Return each member's partitions. `subscribers` are the members of each topic; `order` breaks ties.

    An unowned partition goes to a member with the fewest, and among those to one that it is `preferred` by.
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
        """Move one partition along each step of a path, if that improves the balance. Returns whether it did."""
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
        """Return the shortest path to a member with the fewest partitions, and at least two fewer than the giver.

        The path is empty if there is none.
        """
        came: dict[str, tuple[str, str]] = {}
        topics: set[str] = set()
        reached = [giver]
        fewest = min(self._load.values())
        end = giver
        for source in reached:
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
                break
        path: Path = []
        if self._load[giver] - self._load[end] >= 2:
            while end != giver:
                source, topic = came[end]
                path.append((source, topic, end))
                end = source
        return path

    def _choose_partition_to_move(self, source: str, topic: str, target: str) -> int:
        """Return an initially unowned partition, else one that the target claims, else any: the last."""
        held = self.held[source][topic]
        return max(held & self._unowned[topic] or held & self._claims[target][topic] or held)

    def _assign_partition(self, topic: str, partition: int, member_id: str) -> None:
        self.held[member_id][topic].add(partition)
        self._load[member_id] += 1
