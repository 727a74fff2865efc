"""The sticky assignment: balanced first, then as few changes of hands as that allows.

First every valid claim is honoured (what a member was assigned last; where several claim a partition the one of the
newest generation, and nobody where that is a tie). Then what is left goes to the member with the fewest. Then the one
with the most gives to the one with the fewest, along a path where it must be: `a` hands a partition to `b` and `b` one
of another topic to `c`. Such a path is taken where its ends differ by two or more, so each makes the sum of the squared
loads smaller, and when there is none left no assignment has a smaller one. Paths over what nobody owned come first.

Hence a cooperative group settles in two rounds: what the first leaves out has, without touching anything that is held,
a place in the second that is as balanced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from penstock.shared.common.records import TopicPartition

Claims = Mapping[str, tuple[Sequence[TopicPartition], int]]
"""What each member says it was assigned, and in which generation."""
Path = list[tuple[str, str, str]]
"""Who gives a partition of which topic to whom, from the end to the start."""


def assign_sticky(
    partitions: Mapping[str, int],
    subscribers: Mapping[str, Sequence[str]],
    order: Sequence[str],
    claims: Claims,
    preferred: Mapping[str, Collection[TopicPartition]] | None = None,
) -> dict[str, list[TopicPartition]]:
    """Each member's partitions; `subscribers` are each topic's, `order` breaks ties.

    What nobody has goes to whom it is `preferred` to be with, among those with the fewest.
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
        self._place = {member_id: place for place, member_id in enumerate(order)}
        self._claims: dict[str, dict[str, set[int]]] = {member_id: defaultdict(set) for member_id in order}
        for member_id, (claimed, _) in claims.items():
            for topic, partition in claimed:
                self._claims[member_id][topic].add(partition)
        self._load = dict.fromkeys(order, 0)
        self.held: dict[str, dict[str, set[int]]] = {member_id: defaultdict(set) for member_id in order}
        self._owners = self._valid(claims)
        self._unowned = {
            topic: {p for p in range(partitions[topic]) if TopicPartition(topic, p) not in self._owners}
            for topic in subscribers
        }
        for (topic, partition), member_id in self._owners.items():
            self._give(topic, partition, member_id)

    def _valid(self, claims: Claims) -> dict[TopicPartition, str]:
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
        """Give what nobody has to whoever has the fewest, topics with few subscribers first."""
        for topic in sorted(self._subscribers, key=lambda topic: (len(self._subscribers[topic]), topic)):
            for partition in sorted(self._unowned[topic]):
                at = TopicPartition(topic, partition)
                ranks = {
                    member_id: (self._load[member_id], at not in preferred.get(member_id, ()), self._place[member_id])
                    for member_id in self._subscribers[topic]
                }
                self._give(topic, partition, min(ranks, key=ranks.__getitem__))

    def move(self, *, unowned_alone: bool) -> bool:
        """Let one partition, or one along each step of a path, change hands where that makes it more even."""
        for giver in sorted(self._load, key=lambda member_id: (-self._load[member_id], self._place[member_id])):
            path = self._path(giver, unowned_alone=unowned_alone)
            for source, topic, target in path:
                partition = self._choose(source, topic, target)
                self.held[source][topic].remove(partition)
                self._load[source] -= 1
                self._give(topic, partition, target)
            if path:
                return True
        return False

    def _path(self, giver: str, *, unowned_alone: bool) -> Path:
        """The shortest way to whoever has the fewest, and at least two fewer than the giver; none without."""
        came: dict[str, tuple[str, str]] = {}
        topics: set[str] = set()
        reached = [giver]
        fewest, end = min(self._load.values()), giver
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

    def _choose(self, source: str, topic: str, target: str) -> int:
        """What would change hands anyhow, else what the target claims, else any: the last."""
        held = self.held[source][topic]
        return max(held & self._unowned[topic] or held & self._claims[target][topic] or held)

    def _give(self, topic: str, partition: int, member_id: str) -> None:
        self.held[member_id][topic].add(partition)
        self._load[member_id] += 1
