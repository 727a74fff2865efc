"""Submitted records: which source offsets may be stored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.runtime.submitted_records import Committable, SubmittedRecords, key_of

A, B, C = {"file": "a"}, {"file": "b"}, {"file": "c"}


def offsets(committable: Committable) -> list[tuple[str, int]]:
    return sorted((o.partition["file"], o.offset["at"]) for o in committable.offsets.values())


def test_nothing_submitted_is_nothing_to_store() -> None:
    """Without records there is never anything to store, however often one asks."""
    submitted = SubmittedRecords()
    assert all(submitted.committable().is_empty for _ in range(3))
    assert submitted.queues == {}


def test_what_is_not_acknowledged_is_not_stored() -> None:
    """Records under way are counted, with the longest queue, and nothing of them may be stored."""
    submitted = SubmittedRecords()
    for at in range(3):
        for partition in (A, B, C):
            submitted.submit(partition, {"at": at})
    submitted.submit(C, {"at": 9})
    for _ in range(2):
        found = submitted.committable()
        assert (found.acked, found.pending, found.deques, found.largest_deque) == (0, 10, 3, 4)
        assert found.largest_partition == C
        assert found.has_pending
        assert offsets(found) == []


def test_an_acknowledged_record_is_stored_once() -> None:
    """Its offset may be stored, and is not given again; nothing of it is kept."""
    submitted = SubmittedRecords()
    record = submitted.submit(A, {"at": 1})
    assert offsets(submitted.committable()) == []
    record.ack()
    found = submitted.committable()
    assert offsets(found) == [("a", 1)]
    assert (found.acked, found.pending) == (1, 0)
    assert submitted.queues == {}
    assert submitted.committable().is_empty


def test_partitions_do_not_wait_for_each_other() -> None:
    """A record that is not acknowledged holds up its own source partition alone."""
    submitted = SubmittedRecords()
    a1, a2 = submitted.submit(A, {"at": 1}), submitted.submit(A, {"at": 2})
    b1, b2 = submitted.submit(B, {"at": 1}), submitted.submit(B, {"at": 2})
    a2.ack()
    assert offsets(submitted.committable()) == []
    b1.ack()
    found = submitted.committable()
    assert offsets(found) == [("b", 1)]
    assert (found.acked, found.pending, found.deques) == (1, 3, 2)
    assert offsets(submitted.committable()) == []
    a1.ack()
    b2.ack()
    assert offsets(submitted.committable()) == [("a", 2), ("b", 2)]
    assert submitted.queues == {}


def test_a_dropped_record_is_as_if_it_had_never_been() -> None:
    """It can be dropped once, holds nothing up, and an acknowledgement of it means nothing."""
    submitted = SubmittedRecords()
    dropped, last = submitted.submit(A, {"at": 1}), submitted.submit(B, {"at": 1})
    assert dropped.drop()
    assert not dropped.drop()
    dropped.ack()
    found = submitted.committable()
    assert (found.acked, found.pending, list(submitted.queues)) == (0, 1, [key_of(B)])
    last.ack()
    assert offsets(submitted.committable()) == [("b", 1)]


def test_an_equal_record_is_not_dropped_instead() -> None:
    """Of two records with the same offset the one that was dropped is gone, and the other one is waited for."""
    submitted = SubmittedRecords()
    one, two, last = (submitted.submit(A, {"at": at}) for at in (1, 1, 2))
    two.drop()
    last.ack()
    assert offsets(submitted.committable()) == []
    one.ack()
    assert offsets(submitted.committable()) == [("a", 2)]


def test_queues_are_counted_by_their_length() -> None:
    """The first of the longest queues is named, and dropping its last record shortens it."""
    submitted = SubmittedRecords()
    submitted.submit(A, {"at": 1})
    dropped = [submitted.submit(partition, {"at": at}) for at in (1, 2) for partition in (B, C)]
    assert repr(submitted) == "<SubmittedRecords 5 pending of 3 partitions>"
    found = submitted.committable()
    assert (found.largest_deque, found.largest_partition) == (2, B)
    for record in dropped:
        record.drop()
    found = submitted.committable()
    assert (found.pending, found.deques, found.largest_deque, found.largest_partition) == (1, 1, 1, A)
    assert repr(found) == "<Committable 0 offsets, 0 acked, 1 pending>"


def test_a_result_is_empty_only_without_offsets_and_pending_records() -> None:
    """A caller skips an empty one, so that it must not hold anything to store or to wait for."""
    submitted = SubmittedRecords()
    one, other = submitted.submit(A, {"at": 1}), submitted.submit(B, {"at": 1})
    assert (repr(one), submitted.committable().is_empty) == ("<SubmittedRecord {'at': 1} pending>", False)
    one.ack()
    other.ack()
    found = submitted.committable()
    assert repr(one) == "<SubmittedRecord {'at': 1} acked>"
    assert (found.is_empty, found.has_pending) == (False, False)
    found.acked = 0
    assert not found.is_empty


def test_the_newer_result_says_what_is_pending() -> None:
    """The offsets and the acknowledged records add up; the queues are those of now."""
    submitted = SubmittedRecords()
    submitted.submit(A, {"at": 1}).ack()
    gone = submitted.submit(B, {"at": 1})
    first = submitted.committable()
    gone.drop()
    submitted.submit(A, {"at": 2})
    submitted.submit(A, {"at": 3})
    submitted.submit(C, {"at": 1}).ack()
    both = first.updated_with(submitted.committable())
    assert (both.acked, both.pending, both.deques) == (2, 2, 1)
    assert (both.largest_deque, both.largest_partition) == (2, A)


def test_equal_partitions_share_a_queue() -> None:
    """Also if they are other objects, and after a record of another partition."""
    submitted = SubmittedRecords()
    for partition in (A, dict(A), B, A):
        submitted.submit(partition, {"at": 1})
    assert [len(queue) for queue in submitted.queues.values()] == [3, 1]


def test_a_record_in_the_middle_can_be_dropped() -> None:
    """What comes after a dropped record does not wait for it."""
    submitted = SubmittedRecords()
    one, two, three = (submitted.submit(A, {"at": at}) for at in (1, 2, 3))
    two.drop()
    one.ack()
    three.ack()
    assert offsets(submitted.committable()) == [("a", 3)]


def test_pending_counts_each_record_once() -> None:
    """However often it is acknowledged or dropped."""
    submitted = SubmittedRecords()
    one, two = submitted.submit(A, {"at": 1}), submitted.submit(B, {"at": 1})
    assert submitted.pending == 2
    one.ack()
    one.ack()
    assert submitted.pending == 1
    two.drop()
    two.drop()
    assert submitted.pending == 0


def test_what_could_not_be_stored_is_stored_with_the_next() -> None:
    """Two results together give the newest offset of each partition."""
    submitted = SubmittedRecords()
    submitted.submit(A, {"at": 1}).ack()
    submitted.submit(B, {"at": 1}).ack()
    first = submitted.committable()
    submitted.submit(A, {"at": 2}).ack()
    both = first.updated_with(submitted.committable())
    assert offsets(both) == [("a", 2), ("b", 1)]
    assert both.acked == 3


def test_partitions_are_equal_whatever_their_names_order() -> None:
    """Two mappings with the same content are one source partition, also where values cannot be hashed."""
    assert key_of({"x": 1, "y": 2}) == key_of({"y": 2, "x": 1})
    assert key_of({"x": [1], "y": {"z": 2}}) == key_of({"y": {"z": 2}, "x": [1]})
    submitted = SubmittedRecords()
    submitted.submit({}, {}).ack()
    assert len(submitted.committable().offsets) == 1


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=30), st.randoms())
def test_no_offset_passes_a_record_that_is_under_way(plan: list[tuple[str, bool]], order: object) -> None:
    """In whatever order records are acknowledged, an offset is given only when all before it are."""
    submitted, records = SubmittedRecords(), []
    for at, (file, acked) in enumerate(plan):
        records.append((submitted.submit({"file": file}, {"at": at}), file, at, acked))
    shuffled = records[:]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for record, _, _, acked in shuffled:
        if acked:
            record.ack()
        for given_offset in submitted.committable().offsets.values():
            file, upto = given_offset.partition["file"], given_offset.offset["at"]
            assert all(one.acked for one, of, at, _ in records if of == file and at <= upto)
