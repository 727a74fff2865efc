"""The assignment strategies of a streams application's group, and who stands by for which partitions.

The strategies are `range` and `cooperative-sticky` under names of their own, as Kafka Streams has "stream". A broker
takes a member into a classic group only if it shares a strategy with all others. So it refuses every other consumer
that uses the application's group id (INCONSISTENT_GROUP_PROTOCOL). A consumer of KIP-848 names no strategy: it is
refused because the leader gives every member user data with its assignment, and a broker does not turn a group with
such assignments into one of KIP-848. In a group that is one already the broker assigns the partitions itself, without
user data: `on_assignment` raises InconsistentGroupProtocol.

With standbys each member tells the leader what it has state of already. Owners are chosen by the ordinary assignor;
where that leaves a choice (the cooperative-sticky one, for partitions that nobody has) a member with state is
preferred. Standbys are then placed on other members than the owner, on those that have state first, and evenly. Under
the cooperative assignor a partition that changes hands has no owner for a moment: its standbys stay.

Members and leader send these partitions behind the assignor's own user data. A member with `num_standby_replicas` = 0
sends none and gets no standbys.

>>> place_standbys({0: "a", 1: "b", 2: "a"}, ["a", "b", "c"], {"c": {2}}, replicas=1)
{'a': [1], 'b': [0], 'c': [2]}
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from penstock.shared.clients.consumer.assignors import (
    Assigned,
    Assignor,
    CooperativeStickyAssignor,
    GroupMember,
    RangeAssignor,
    in_order,
)
from penstock.shared.common.errors import InconsistentGroupProtocol
from penstock.shared.common.records import TopicPartition

PREFIX = "penstock-streams-"
"""What the names of the strategies begin with; the rest is the setting's value."""
MARK = b"PSBY"
_SIZE = struct.Struct(">I")


class Standing(msgspec.Struct, frozen=True):
    """Partitions: of a member, those it has state of; of the leader, those a member is to stand by for."""

    partitions: list[int] = []


def with_standing(data: bytes | None, partitions: Iterable[int]) -> bytes:
    """An assignor's user data, and behind it the partitions."""
    said = msgspec.json.encode(Standing(sorted(partitions)))
    return (data or b"") + said + _SIZE.pack(len(said)) + MARK


def standing_of(data: bytes | None) -> frozenset[int] | None:
    """The partitions behind user data; None where nothing is said, or nothing that can be read.

    >>> standing_of(with_standing(b"own", [2, 1])), standing_of(b"own")
    (frozenset({1, 2}), None)
    """
    tail = len(MARK) + _SIZE.size
    if data is None or len(data) < tail or not data.endswith(MARK):
        return None
    (size,) = _SIZE.unpack_from(data, len(data) - tail)
    try:
        said = data[max(0, len(data) - tail - size) : len(data) - tail]
        return frozenset(msgspec.json.decode(said, type=Standing).partitions)
    except msgspec.MsgspecError:
        return None


def place_standbys(
    owners: Mapping[int, str | None], order: Sequence[str], warm: Mapping[str, Collection[int]], replicas: int
) -> dict[str, list[int]]:
    """By member the partitions it stands by for; of a partition without an owner only who has state of it stays."""
    placed: dict[str, list[int]] = {member: [] for member in order}
    most = -(-len(owners) * min(replicas, max(0, len(order) - 1)) // max(1, len(order)))
    standing: dict[int, set[str]] = {partition: set() for partition in owners}
    for keep in (True, False):
        for partition, owner in sorted(owners.items()):
            for member in sorted(order, key=lambda m: (len(placed[m]), order.index(m))):
                if len(standing[partition]) == replicas or (owner is None and not keep):
                    break
                may_stay = partition in warm.get(member, ()) and (len(placed[member]) < most or owner is None)
                if member != owner and member not in standing[partition] and (may_stay or not keep):
                    placed[member].append(partition)
                    standing[partition].add(member)
    return {member: sorted(partitions) for member, partitions in placed.items()}


class StreamsAssignor(Assignor):
    """Standbys, which both strategies place alike. `warm` returns the partitions that this instance has state of."""

    def __init__(self, replicas: int, warm: Callable[[], Iterable[int]]) -> None:
        self._replicas, self._warm = replicas, warm
        self.standbys: frozenset[int] = frozenset()
        """What this instance is to stand by for, as of the last assignment."""

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        own = super().user_data(assigned, generation)
        return with_standing(own, self._warm()) if self._replicas else own

    def told(
        self, partitions: Mapping[str, int], members: Mapping[str, GroupMember], assigned: Assigned
    ) -> Mapping[str, bytes]:
        """The standbys of each member. Every member gets user data, since that keeps KIP-848 consumers out."""
        numbers = range(max(partitions.values(), default=0))
        owners: dict[int, str | None] = dict.fromkeys(numbers)
        owners |= {at.partition: member for member, given in assigned.items() for at in given}
        warm = warm_of(members)
        order = [member for member in in_order(members) if member in warm]
        placed = place_standbys(owners, order, warm, self._replicas)
        return {member: with_standing(None, placed.get(member, ())) for member in members}

    def on_assignment(self, told: bytes | None) -> None:
        """Take the standbys; InconsistentGroupProtocol where no instance of the application has made the assignment."""
        standbys = standing_of(told)
        if standbys is None:
            raise InconsistentGroupProtocol(f"the assignment was not made with {self.name}")
        self.standbys = standbys


class StreamsRange(StreamsAssignor, RangeAssignor):
    """`range`, which leaves no choice of owners."""

    name = f"{PREFIX}range"


class StreamsCooperativeSticky(StreamsAssignor, CooperativeStickyAssignor):
    """`cooperative-sticky`, which prefers standbys as owners."""

    name = f"{PREFIX}cooperative-sticky"

    def preferred(self, members: Mapping[str, GroupMember]) -> Mapping[str, Collection[TopicPartition]]:
        warm = warm_of(members)
        return {
            member: frozenset(TopicPartition(t, p) for t in members[member].subscription.topics for p in own)
            for member, own in warm.items()
        }


def warm_of(members: Mapping[str, GroupMember]) -> dict[str, frozenset[int]]:
    """What each member that knows of standbys has state of."""
    said = {member: standing_of(one.subscription.user_data) for member, one in members.items()}
    return {member: partitions for member, partitions in said.items() if partitions is not None}


STRATEGIES: Mapping[str, type[StreamsAssignor]] = {
    "range": StreamsRange,
    "cooperative-sticky": StreamsCooperativeSticky,
}
"""By the value of `streams.partition_assignment_strategy`."""
