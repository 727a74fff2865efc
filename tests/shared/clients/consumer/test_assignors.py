"""Partition assignors: examples from Kafka's documentation, and properties that hold for any group."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.consumer.assignors import ASSIGNORS, Assignor, GroupMember
from penstock.shared.clients.protocol.consumer_protocol import Subscription
from penstock.shared.common.records import TopicPartition
from tests.property_tests import examples

Held = Mapping[str, frozenset[TopicPartition]]
COOPERATIVE, STICKY = ASSIGNORS["cooperative-sticky"], ASSIGNORS["sticky"]


def tps(text: str) -> list[TopicPartition]:
    """`a0 a1 b0` as partitions."""
    return [TopicPartition(word[0], int(word[1:])) for word in text.split()]


def group(
    assignor: Assignor,
    topics: Mapping[str, tuple[str, ...]],
    held: Mapping[str, list[TopicPartition]] | None = None,
    generation: int = 1,
    instances: Mapping[str, str] | None = None,
) -> dict[str, GroupMember]:
    """Members with their topics and owned partitions, encoded as the assignor encodes them."""
    members = {}
    for name, wanted in topics.items():
        owned = (held or {}).get(name, [])
        own = generation if owned else -1
        sent = tuple(owned) if assignor.is_cooperative else ()
        subscription = Subscription(wanted, assignor.user_data(owned, own), sent, own)
        members[name] = GroupMember(subscription, (instances or {}).get(name))
    return members


def test_range() -> None:
    """Each topic is divided into ranges, and the first members get the remainder."""
    members = group(ASSIGNORS["range"], {"x": ("a", "b"), "y": ("a", "b"), "z": ("b",)})
    assert ASSIGNORS["range"].assign({"a": 3, "b": 4}, members) == {
        "x": tps("a0 a1 b0 b1"),
        "y": tps("a2 b2"),
        "z": tps("b3"),
    }


def test_round_robin() -> None:
    """Partitions are assigned in turn. A member that is not subscribed to the topic is skipped."""
    members = group(ASSIGNORS["roundrobin"], {"c0": ("a",), "c1": ("a", "b"), "c2": ("a", "b", "c")})
    assert ASSIGNORS["roundrobin"].assign({"a": 1, "b": 2, "c": 3}, members) == {
        "c0": tps("a0"),
        "c1": tps("b0"),
        "c2": tps("b1 c0 c1 c2"),
    }


@pytest.mark.parametrize("name", ["range", "roundrobin"])
def test_static_members_come_first_by_instance(name: str) -> None:
    """Members are ordered by instance id, so a static member with a new member id gets the same partitions again."""
    assignor, topics = ASSIGNORS[name], {"x": ("a",), "y": ("a",), "z": ("a",)}
    assigned = assignor.assign({"a": 3}, group(assignor, topics, instances={"z": "i1", "y": "i2"}))
    assert (assigned["z"], assigned["y"], assigned["x"]) == (tps("a0"), tps("a1"), tps("a2"))


def test_sticky_as_documented() -> None:
    """The second example of Kafka's StickyAssignor: the result is more balanced than round robin, and three partitions
    stay."""
    topics = {"c0": ("a",), "c1": ("a", "b"), "c2": ("a", "b", "c")}
    first = STICKY.assign({"a": 1, "b": 2, "c": 3}, group(STICKY, topics))
    assert first == {"c0": tps("a0"), "c1": tps("b0 b1"), "c2": tps("c0 c1 c2")}
    del topics["c0"]
    held = {name: first[name] for name in topics}
    assert STICKY.assign({"a": 1, "b": 2, "c": 3}, group(STICKY, topics, held)) == {
        "c1": tps("a0 b0 b1"),
        "c2": tps("c0 c1 c2"),
    }


def test_sticky_moves_only_the_partitions_of_a_leaver() -> None:
    """The first example of Kafka's StickyAssignor: when a member leaves, no partition moves between the remaining
    members."""
    topics = {"c0": tuple("abcd"), "c2": tuple("abcd")}
    held = {"c0": tps("a0 b1 d0"), "c2": tps("b0 c1")}
    after = STICKY.assign(dict.fromkeys("abcd", 2), group(STICKY, topics, held))
    assert {name: len(given) for name, given in after.items()} == {"c0": 4, "c2": 4}
    assert all(set(held[name]) <= set(after[name]) for name in held)


def test_the_newest_claim_counts() -> None:
    """If two members claim a partition, the claim of the newer generation wins."""
    members = group(STICKY, {"x": ("a",)}, {"x": tps("a0 a1")}, generation=2)
    members |= group(STICKY, {"y": ("a",)}, {"y": tps("a0 a1 a2 a3")}, generation=3)
    assert set(STICKY.assign({"a": 8}, members)["y"]) == set(tps("a0 a1 a2 a3"))


def test_a_tie_of_claims() -> None:
    """If two claims have the same generation, neither counts, not even for partitions that both could keep."""
    members = group(STICKY, {"x": ("a",), "y": ("a",)}, {"x": tps("a2 a3"), "y": tps("a2 a3")})
    assert STICKY.assign({"a": 4}, members) == {"x": tps("a0 a2"), "y": tps("a1 a3")}


def test_cooperative_takes_two_rounds() -> None:
    """A partition that moves is not assigned until its owner has revoked it."""
    topics, held = {"x": ("a",), "y": ("a",)}, {"x": tps("a0 a1 a2 a3")}
    first = COOPERATIVE.assign({"a": 4}, group(COOPERATIVE, topics, held))
    assert (len(first["x"]), first["y"]) == (2, [])
    second = COOPERATIVE.assign({"a": 4}, group(COOPERATIVE, topics, first))
    assert second["x"] == first["x"]
    assert {*second["x"], *second["y"]} == set(tps("a0 a1 a2 a3"))


def test_an_owned_partition_of_an_unsubscribed_topic() -> None:
    """An owned partition of an unsubscribed topic is not reassigned before its owner has revoked it."""
    members = group(COOPERATIVE, {"x": ("b",), "y": ("a",)}, {"x": tps("a0")})
    assert COOPERATIVE.assign({"a": 2, "b": 1}, members) == {"x": tps("b0"), "y": tps("a1")}


def test_a_topic_that_does_not_exist() -> None:
    """No partitions are assigned for topics that do not exist."""
    for assignor in ASSIGNORS.values():
        assert assignor.assign({}, group(assignor, {"x": ("a",), "y": ("a",)})) == {"x": [], "y": []}


# --- what holds for any group ---

topics_of = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True).map(tuple)
counts_of = st.fixed_dictionaries(dict.fromkeys("abcd", st.integers(0, 7)))
groups = st.dictionaries(st.sampled_from([f"m{i}" for i in range(6)]), topics_of, min_size=1)


def check_once(
    assigned: Mapping[str, list[TopicPartition]], topics: Mapping[str, tuple[str, ...]], counts: Mapping[str, int]
) -> None:
    given_out = [tp for given in assigned.values() for tp in given]
    wanted = {t for ts in topics.values() for t in ts}
    assert sorted(given_out) == sorted(TopicPartition(t, p) for t in wanted for p in range(counts[t]))
    assert all(tp.topic in topics[name] for name, given in assigned.items() for tp in given)


def check_balanced(assigned: Mapping[str, list[TopicPartition]], topics: Mapping[str, tuple[str, ...]]) -> None:
    for name, own in assigned.items():
        for other, more in assigned.items():
            if len(more) - len(own) >= 2:
                assert not {tp.topic for tp in more} & set(topics[name]), (name, other)


@given(topics=groups, counts=counts_of)
@pytest.mark.parametrize("name", ASSIGNORS)
def test_every_partition_once(name: str, topics: dict[str, tuple[str, ...]], counts: dict[str, int]) -> None:
    """Every partition of a subscribed topic is assigned to exactly one member that is subscribed to it."""
    assignor = ASSIGNORS[name]
    assigned = assignor.assign(counts, group(assignor, topics))
    check_once(assigned, topics, counts)
    if "sticky" in name:
        check_balanced(assigned, topics)


@settings(max_examples=examples(200))
@given(before=groups, after=groups, counts=counts_of, grown=counts_of)
def test_sticky_stays(
    before: dict[str, tuple[str, ...]], after: dict[str, tuple[str, ...]], counts: dict[str, int], grown: dict[str, int]
) -> None:
    """The assignment is balanced after any change of members, topics and partitions. Without a change no partition
    moves."""
    held = STICKY.assign(counts, group(STICKY, before))
    assert STICKY.assign(counts, group(STICKY, before, held)) == held
    more = {topic: counts[topic] + grown[topic] for topic in counts}
    assigned = STICKY.assign(more, group(STICKY, after, held))
    check_once(assigned, after, more)
    check_balanced(assigned, after)


@given(
    held=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    fresh=st.integers(0, 9),
)
def test_with_equal_subscriptions_no_more_moves_than_needed(held: list[int], fresh: int) -> None:
    """With equal subscriptions, members keep as many partitions as a balanced assignment allows."""
    names, claims, at = [f"m{i}" for i in range(len(held))], {}, 0
    for name, load in zip(names, held, strict=True):
        claims[name] = [TopicPartition("a", p) for p in range(at, at + load)]
        at += load
    total = at + fresh
    assigned = STICKY.assign({"a": total}, group(STICKY, dict.fromkeys(names, ("a",)), claims))
    low, extra = divmod(total, len(names))
    # The best: everybody keeps the lower share; of those that had more, as many keep one more as the shares allow.
    best = sum(min(load, low) for load in held) + min(extra, sum(load > low for load in held))
    assert sum(len(set(claims[name]) & set(assigned[name])) for name in names) == best


@settings(max_examples=examples(200))
@given(data=st.data(), counts=counts_of)
def test_cooperative_never_hands_over_what_is_still_owned(data: st.DataObject, counts: dict[str, int]) -> None:
    """Through any joins and leaves, no partition has two owners. A stable group converges to a balanced assignment."""
    held: dict[str, list[TopicPartition]] = {}
    for generation in range(1, 4):
        topics = data.draw(groups)
        held = {name: [tp for tp in held.get(name, []) if tp.topic in topics[name]] for name in topics}
        for is_last in (False, True):
            assigned = COOPERATIVE.assign(counts, group(COOPERATIVE, topics, held, generation))
            holding = {name: {*held[name], *assigned[name]} for name in topics}  # before anything is given back
            everything = [tp for one in holding.values() for tp in one]
            assert len(everything) == len(set(everything))
            gave_back = any(set(held[name]) - set(assigned[name]) for name in topics)
            held = assigned
            assert not (gave_back and is_last), "two rounds settle it"
        check_once(held, topics, counts)
        check_balanced(held, topics)
