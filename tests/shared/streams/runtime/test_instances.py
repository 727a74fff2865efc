"""The owner of each partition, from the records that instances write."""

from __future__ import annotations

from penstock.shared.streams.runtime.instances import (
    FORGET_MS,
    Claim,
    Instances,
    Registration,
    encode_registration,
    partition_owners,
)

A, B, C = "http://a", "http://b", "http://c"


def table(*entries: tuple[str, Registration | None]) -> Instances:
    """The topic's records in their order."""
    made = Instances()
    for offset, (url, registration) in enumerate(entries):
        made.apply(offset, url.encode(), None if registration is None else encode_registration(registration), 0)
    return made


def test_the_highest_epoch_owns_a_partition() -> None:
    """A zombie that repeats its old claim does not become the owner again."""
    made = table(
        (A, Registration("a", {0: 3})),
        (B, Registration("b", {0: 4})),
        (A, Registration("a", {0: 3})),
    )
    assert made.claims() == {0: Claim(B, 4)}
    assert partition_owners(made, A, Registration("a", {0: 3}, 1)).others == {B: [0]}
    assert partition_owners(made, B, Registration("b", {0: 4}, 1)).own == {0}


def test_a_partition_that_is_being_restored_is_missing_until_it_runs() -> None:
    """A claim to restore counts from when it was made: against an owner from before, not against one from after."""
    restoring = ((A, Registration("a", {0: 3}, 2)), (B, Registration("b", {}, 2, [0])))
    parts = partition_owners(table(*restoring, (A, Registration("a", {0: 3}, 2))), C, Registration("c", {1: 1}, 2))
    assert parts == (frozenset({1}), {}, {0: f"being restored by {B}"})
    done = table(*restoring, (C, Registration("c", {0: 5}, 2)))
    assert done.claims() == {0: Claim(C, 5)}
    assert partition_owners(table(), A, Registration("a", {}, 1, [0])).missing == {0: f"being restored by {A}"}


def test_an_instance_that_left_owns_no_partition() -> None:
    """An instance that has sent its tombstone is not listed, and its partitions are missing until another instance has
    them."""
    made = table((A, Registration("a", {0: 3}, 1)), (A, None))
    assert (made.urls(), partition_owners(made, B, Registration("b", {}, 1)).missing) == ([], {0: "no instance has it"})


def test_the_number_of_partitions_is_learned_from_others() -> None:
    """An instance that has not seen the topics yet learns from others how many partitions it lacks. Without others it
    knows none."""
    parts = partition_owners(table((B, Registration("b", {0: 1}, 3))), A, Registration("a"))
    assert (parts.others, sorted(parts.missing)) == ({B: [0]}, [1, 2])
    assert partition_owners(table(), A, Registration("a")) == (frozenset(), {}, {})


DEEP = b'{"x":' + b"[" * 100_000


def test_records_that_cannot_be_read_are_counted() -> None:
    """They do not change the known instances."""
    made = table((A, Registration("a", {0: 3}, 1)))
    for key, value in ((b"\xff", b"{}"), (A.encode(), b"{"), (A.encode(), b'{"instance": 3}'), (A.encode(), DEEP)):
        made.apply(9, key, value, 0)
    assert (made.invalid_records, made.claims()) == (4, {0: Claim(A, 3)})


def test_a_killed_instances_record_is_removed_once_others_have_its_partitions() -> None:
    """It is removed only after a delay, never while the instance owns a partition, and never by the instance itself."""
    made = table(
        (A, Registration("a", {0: 1}, 2)), (B, Registration("b", {0: 2}, 2)), (C, Registration("c", {1: 1}, 2))
    )
    assert made.expired(FORGET_MS - 1, []) == []
    assert made.expired(FORGET_MS, []) == [A]
    assert made.expired(FORGET_MS, [A]) == []
    assert "http://b" in repr(made)
