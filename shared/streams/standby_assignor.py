"""Who stands by for which partitions: said by the group's leader along with who has them.

Each member tells the leader what it has state of already. Owners are chosen by the ordinary assignor; where that leaves
a choice (the cooperative-sticky one, for partitions that nobody has) a member with state is preferred. Standbys are
then placed on other members than the owner, on those that have state first, and evenly. Under the cooperative assignor
a partition that changes hands has no owner for a moment: its standbys stay.

What is said travels behind the assignor's own user data, where members that know nothing of it read past it; they are
given no standbys.

>>> place_standbys({0: "a", 1: "b", 2: "a"}, ["a", "b", "c"], {"c": {2}}, replicas=1)
{'a': [1], 'b': [0], 'c': [2]}
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from shared.clients.consumer.assignors import (
    Assigned,
    Assignor,
    CooperativeStickyAssignor,
    GroupMember,
    RangeAssignor,
    in_order,
)
from shared.common.errors import ConfigError
from shared.common.records import TopicPartition

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


class StandbyPart(Assignor):
    """What an assignor with standbys does beside assigning; `warm` says what this instance has state of."""

    def __init__(self, replicas: int, warm: Callable[[], Iterable[int]]) -> None:
        self._replicas, self._warm = replicas, warm
        self.standbys: frozenset[int] = frozenset()
        """What this instance is to stand by for, as of the last assignment."""

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        return with_standing(super().user_data(assigned, generation), self._warm())

    def told(
        self, partitions: Mapping[str, int], members: Mapping[str, GroupMember], assigned: Assigned
    ) -> Mapping[str, bytes]:
        numbers = range(max(partitions.values(), default=0))
        owners: dict[int, str | None] = dict.fromkeys(numbers)
        owners |= {at.partition: member for member, given in assigned.items() for at in given}
        warm = warm_of(members)
        order = [member for member in in_order(members) if member in warm]
        placed = place_standbys(owners, order, warm, self._replicas)
        return {member: with_standing(None, own) for member, own in placed.items()}

    def on_assignment(self, told: bytes | None) -> None:
        self.standbys = standing_of(told) or frozenset()


class RangeWithStandbys(StandbyPart, RangeAssignor):
    """`range`, which leaves no choice of owners, with standbys."""


class StickyWithStandbys(StandbyPart, CooperativeStickyAssignor):
    """`cooperative-sticky` with standbys, which are preferred as owners."""

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


def assignor_of(strategy: str, replicas: int, warm: Callable[[], Iterable[int]]) -> StandbyPart | None:
    """The assignor of that name with so many standbys of each partition; None where there are to be none."""
    if replicas == 0:
        return None
    kinds: dict[str, type[StandbyPart]] = {"range": RangeWithStandbys, "cooperative-sticky": StickyWithStandbys}
    if strategy not in kinds:
        raise ConfigError(f"streams.partition_assignment_strategy={strategy} places no standbys")
    return kinds[strategy](replicas, warm)
