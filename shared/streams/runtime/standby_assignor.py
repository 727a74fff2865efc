"""The assignment strategies of a streams application's group, and the assignment of standbys.

The strategies are `range` and `cooperative-sticky` under names of their own, as Kafka Streams has "stream". The names
keep other consumers out of the group:

- A classic consumer with the application's group id is rejected with INCONSISTENT_GROUP_PROTOCOL, because it shares no
  strategy with the members.
- A KIP-848 consumer names no strategy. It is rejected because the leader sends user data with every assignment, and a
  broker does not convert a group with such assignments to KIP-848.
- If the group is a KIP-848 group already, the broker assigns the partitions, without user data. Then `on_assignment`
  raises InconsistentGroupProtocol.

With standbys, each member reports to the leader the partitions that it has state of. The ordinary assignor chooses
owners. For partitions without an owner, the cooperative-sticky assignor prefers members that have state; the range
assignor has no choice. Standbys are then placed evenly on members other than the owner, first on members that have
state. Under the cooperative assignor, a partition that moves has no owner for one rebalance; its standbys stay.

Members and the leader append these partitions to the assignor's own user data. A member with `num_standby_replicas` = 0
appends none and gets no standbys.

>>> assign_standbys({0: "a", 1: "b", 2: "a"}, ["a", "b", "c"], {"c": {2}}, replicas=1)
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
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.records import TopicPartition

PREFIX = "penstock-streams-"
"""The prefix of the strategies' names; the rest is the setting's value."""
MARK = b"PSBY"
_SIZE = struct.Struct(">I")


class Standing(msgspec.Struct, frozen=True):
    """Partitions in user data: from a member, those that it has state of; from the leader, the member's standbys."""

    partitions: list[int] = []


def append_standing_partitions(data: bytes | None, partitions: Iterable[int]) -> bytes:
    """Return the user data of a `StreamsAssignor`: that of the ordinary assignor, with the partitions appended."""
    encoded = msgspec.json.encode(Standing(sorted(partitions)))
    return (data or b"") + encoded + _SIZE.pack(len(encoded)) + MARK


def standing_partitions_of(data: bytes | None) -> frozenset[int] | None:
    """Return the partitions appended to the user data of a `StreamsAssignor`; None if no valid list is appended.

    >>> standing_partitions_of(append_standing_partitions(b"own", [2, 1])), standing_partitions_of(b"own")
    (frozenset({1, 2}), None)
    """
    tail = len(MARK) + _SIZE.size
    if data is None or len(data) < tail or not data.endswith(MARK):
        return None
    (size,) = _SIZE.unpack_from(data, len(data) - tail)
    try:
        encoded = data[max(0, len(data) - tail - size) : len(data) - tail]
        return frozenset(decode_json(encoded, Standing).partitions)
    except InvalidJson:
        return None


def assign_standbys(
    owners: Mapping[int, str | None], order: Sequence[str], warm: Mapping[str, Collection[int]], replicas: int
) -> dict[str, list[int]]:
    """Return the standby partitions of each member, at most `replicas` for each partition and never at its owner.

    `owners` has the owner of each partition, None if it is moving between two owners. `order` are the members. `warm`
    has the partitions that each member has state of.
    """
    assigned: dict[str, list[int]] = {member: [] for member in order}
    # An even share, rounded up.
    most = -(-len(owners) * min(replicas, max(0, len(order) - 1)) // max(1, len(order)))
    standing: dict[int, set[str]] = {partition: set() for partition in owners}
    # 1. A member keeps the partitions that it has state of and does not own, up to an even share. A partition without
    # an owner is kept beyond that share, so that its next owner can be a member with state. This comes first for all
    # partitions. Otherwise a replica that is placed early could take the room of one that has state.
    # 2. The remaining replicas of partitions with an owner go to the members with the fewest standby partitions.
    for keep in (True, False):
        for partition, owner in sorted(owners.items()):
            for member in sorted(order, key=lambda m: (len(assigned[m]), order.index(m))):
                if len(standing[partition]) == replicas or (owner is None and not keep):
                    break
                may_stay = partition in warm.get(member, ()) and (len(assigned[member]) < most or owner is None)
                if member != owner and member not in standing[partition] and (may_stay or not keep):
                    assigned[member].append(partition)
                    standing[partition].add(member)
    return {member: sorted(partitions) for member, partitions in assigned.items()}


class StreamsAssignor(Assignor):
    """The common part of both strategies, which places standbys.

    `warm` returns the partitions that this instance has state of.
    """

    def __init__(self, replicas: int, warm: Callable[[], Iterable[int]]) -> None:
        self._replicas = replicas
        self._warm = warm
        self.standbys: frozenset[int] = frozenset()
        """This instance's standby partitions, as of the last assignment."""

    def user_data(self, assigned: Collection[TopicPartition], generation: int) -> bytes | None:
        own = super().user_data(assigned, generation)
        return append_standing_partitions(own, self._warm()) if self._replicas else own

    def assignment_data(
        self, partitions: Mapping[str, int], members: Mapping[str, GroupMember], assigned: Assigned
    ) -> Mapping[str, bytes]:
        """Return each member's standbys as user data. All members get user data, which keeps KIP-848 consumers out."""
        numbers = range(max(partitions.values(), default=0))
        owners: dict[int, str | None] = dict.fromkeys(numbers)
        owners |= {at.partition: member for member, own in assigned.items() for at in own}
        warm = warm_partitions(members)
        order = [member for member in in_order(members) if member in warm]
        standbys = assign_standbys(owners, order, warm, self._replicas)
        return {member: append_standing_partitions(None, standbys.get(member, ())) for member in members}

    def on_assignment(self, user_data: bytes | None) -> None:
        """Read this member's standbys from the assignment's user data.

        Raises InconsistentGroupProtocol if the user data lacks the list of standbys: then the broker (KIP-848) or
        another consumer made the assignment.
        """
        standbys = standing_partitions_of(user_data)
        if standbys is None:
            raise InconsistentGroupProtocol(f"the assignment was not made with {self.name}")
        self.standbys = standbys


class StreamsRange(StreamsAssignor, RangeAssignor):
    """`range`, which leaves no choice of owners."""

    name = f"{PREFIX}range"


class StreamsCooperativeSticky(StreamsAssignor, CooperativeStickyAssignor):
    """`cooperative-sticky`, which prefers members that have state as owners."""

    name = f"{PREFIX}cooperative-sticky"

    def preferred(self, members: Mapping[str, GroupMember]) -> Mapping[str, Collection[TopicPartition]]:
        warm = warm_partitions(members)
        return {
            member: frozenset(TopicPartition(t, p) for t in members[member].subscription.topics for p in own)
            for member, own in warm.items()
        }


def warm_partitions(members: Mapping[str, GroupMember]) -> dict[str, frozenset[int]]:
    """Return the partitions of which each member has state, for the members that support standbys."""
    standing = {member: standing_partitions_of(one.subscription.user_data) for member, one in members.items()}
    return {member: partitions for member, partitions in standing.items() if partitions is not None}


STRATEGIES: Mapping[str, type[StreamsAssignor]] = {
    "range": StreamsRange,
    "cooperative-sticky": StreamsCooperativeSticky,
}
"""The assignors by the value of `streams.partition_assignment_strategy`."""
