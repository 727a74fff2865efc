"""The assignment of standbys, and the choice of an owner among instances with standbys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.consumer.assignors import ASSIGNORS, GroupMember
from penstock.shared.clients.protocol.consumer_protocol import Subscription, decode_generation
from penstock.shared.common.errors import InconsistentGroupProtocol
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.runtime.standby_assignor import (
    MARK,
    STRATEGIES,
    StreamsAssignor,
    append_standing_partitions,
    assign_standbys,
    standing_partitions_of,
)


def assignor(strategy: str = "cooperative-sticky", replicas: int = 1, *warm: int) -> StreamsAssignor:
    return STRATEGIES[strategy](replicas, lambda: warm)


def member(own: StreamsAssignor, owned: tuple[int, ...] = (), generation: int = 3) -> GroupMember:
    at = tuple(TopicPartition("t", p) for p in owned)
    return GroupMember(Subscription(("t",), own.user_data(at, generation), at, generation))


def test_standbys_follow_the_assignors_user_data() -> None:
    """The standbys follow the assignor's own user data: a member without standbys reads its generation as before, and
    sends none."""
    data = assignor("cooperative-sticky", 1, 4, 2).user_data((), 7)
    assert decode_generation(data) == 7
    assert standing_partitions_of(data) == {2, 4}
    assert standing_partitions_of(assignor("range", 1).user_data((), 7)) == frozenset()
    plain = ASSIGNORS["cooperative-sticky"].user_data((), 7)
    deep = b'{"x":' + b"[" * 0x10000
    invalid = (plain, None, b"", b"x{}\x00\x00\x00\x03" + MARK, deep + b"\x00\x01\x00\x05" + MARK)
    assert [standing_partitions_of(each) for each in invalid] == [None] * 5


def test_each_strategy_has_a_name_of_its_own() -> None:
    """A broker rejects a member that shares no strategy with its group, so no other consumer has these names."""
    for strategy in ("range", "cooperative-sticky"):
        made = assignor(strategy, 0)
        assert made.name == f"penstock-streams-{strategy}"
        assert made.name not in ASSIGNORS
        assert made.is_cooperative == ASSIGNORS[strategy].is_cooperative


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_without_replicas_assignments_have_empty_user_data(strategy: str) -> None:
    """Members send no standbys and are assigned none, but each assignment has user data: a broker then rejects
    consumers of KIP-848."""
    own = assignor(strategy, 0)
    members = {"a": member(own), "b": member(own)}
    standing = [standing_partitions_of(one.subscription.user_data) for one in members.values()]
    assigned = own.assign({"t": 1}, members)
    data_by_member = own.assignment_data({"t": 1}, members, assigned)
    assert standing == [None, None]
    assert {name: standing_partitions_of(data) for name, data in data_by_member.items()} == {
        "a": frozenset(),
        "b": frozenset(),
    }


def test_the_leader_tells_each_member() -> None:
    """Each partition is assigned to one member besides its owner. Members that report no standbys are assigned none."""
    own, others = assignor("range", 1), assignor("range", 1, 0)
    members = {"a": member(own), "b": member(others), "c": member(assignor("range", 0))}
    assigned = own.assign({"t": 3}, members)
    data_by_member = own.assignment_data({"t": 3}, members, assigned)
    assert {name: standing_partitions_of(data) for name, data in data_by_member.items()} == {
        "a": {1, 2},
        "b": {0},
        "c": frozenset(),
    }
    others.on_assignment(data_by_member["b"])
    assert others.standbys == {0}


def test_an_assignment_that_no_instance_made_is_refused() -> None:
    """An assignment without user data, as a KIP-848 group makes it, is rejected."""
    for data in (None, b""):
        with pytest.raises(InconsistentGroupProtocol, match="penstock-streams-range"):
            assignor("range", 1).on_assignment(data)


def test_a_member_with_a_standby_becomes_the_owner() -> None:
    """Among the members with the fewest partitions, one with a standby of an unowned partition becomes its owner."""
    order = {"a": (assignor(), (0,)), "b": (assignor("cooperative-sticky", 1, 3), (1,)), "c": (assignor(), (2,))}
    members = {name: member(own, owned) for name, (own, owned) in order.items()}
    assigned = order["a"][0].assign({"t": 4}, members)
    assert {name: [p for _, p in given] for name, given in assigned.items()} == {"a": [0], "b": [1, 3], "c": [2]}


def test_a_partition_between_owners_keeps_its_standbys() -> None:
    """Under the cooperative assignor a partition has no owner for one round. Its standbys stay, and no new one is
    assigned."""
    assert assign_standbys({0: None, 1: "a"}, ["a", "b", "c"], {"c": {0}}, 1) == {"a": [], "b": [1], "c": [0]}


partitions = st.integers(1, 12)
assignments = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.just([f"m{i}" for i in range(n)]),
        st.lists(st.integers(0, n - 1), min_size=1, max_size=12),
        st.dictionaries(st.sampled_from([f"m{i}" for i in range(n)]), st.sets(st.integers(0, 12))),
        st.integers(1, 3),
    )
)


@given(assignments)
def test_as_many_as_there_can_be_and_never_the_owner(
    plan: tuple[list[str], list[int], dict[str, set[int]], int],
) -> None:
    """Each partition has the configured number of standbys on other members, or as many as there are members."""
    order, own, warm, replicas = plan
    owners: dict[int, str | None] = {p: order[i] for p, i in enumerate(own)}
    standbys = assign_standbys(owners, order, warm, replicas)
    for partition, owner in owners.items():
        standing = [name for name, given in standbys.items() if partition in given]
        assert owner not in standing
        assert len(standing) == min(replicas, len(order) - 1)
    assert all(len(given) == len(set(given)) for given in standbys.values())


@given(partitions, st.integers(2, 4))
def test_standbys_are_even_and_stay(count: int, members: int) -> None:
    """With evenly assigned owners, no member has many more standbys than another, and assigned standbys stay."""
    order = [f"m{i}" for i in range(members)]
    owners: dict[int, str | None] = {p: order[p % members] for p in range(count)}
    standbys = assign_standbys(owners, order, {}, 1)
    sizes = [len(given) for given in standbys.values()]
    assert max(sizes) - min(sizes) <= 2
    assert assign_standbys(owners, order, {name: set(given) for name, given in standbys.items()}, 1) == standbys


def test_encoded_standbys_round_trip() -> None:
    """Encoded standbys are decoded unchanged, also without user data before them."""
    assert standing_partitions_of(append_standing_partitions(None, [3])) == {3}
