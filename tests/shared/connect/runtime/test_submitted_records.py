"""Submitted records, and the source offsets that may be stored."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.runtime.offset_backing_store import offset_key, parse_offset_key
from penstock.shared.connect.runtime.submitted_records import PartitionOffset, SubmittedRecords, source_partition_key

A, B, C = {"file": "a"}, {"file": "b"}, {"file": "c"}


def offsets(committable: dict[bytes, PartitionOffset]) -> list[tuple[str, int]]:
    return sorted((o.partition["file"], o.offset["at"]) for o in committable.values())


def test_nothing_submitted_is_nothing_to_store() -> None:
    """Without records there are no offsets to store."""
    submitted = SubmittedRecords()
    assert all(submitted.committable() == {} for _ in range(3))
    assert submitted.queues == {}


def test_unacknowledged_records_are_not_stored() -> None:
    """Pending records are counted, and their offsets are not stored."""
    submitted = SubmittedRecords()
    for at in range(3):
        for partition in (A, B, C):
            submitted.submit(partition, {"at": at})
    submitted.submit(C, {"at": 9})
    for _ in range(2):
        found = submitted.committable()
        assert (offsets(found), submitted.pending) == ([], 10)


def test_an_acknowledged_record_is_stored_once() -> None:
    """An acknowledged record's offset is returned once, and the record is removed."""
    submitted = SubmittedRecords()
    record = submitted.submit(A, {"at": 1})
    assert offsets(submitted.committable()) == []
    record.ack()
    found = submitted.committable()
    assert offsets(found) == [("a", 1)]
    assert submitted.pending == 0
    assert submitted.queues == {}
    assert submitted.committable() == {}


def test_partitions_do_not_wait_for_each_other() -> None:
    """An unacknowledged record blocks only its own source partition."""
    submitted = SubmittedRecords()
    a1, a2 = submitted.submit(A, {"at": 1}), submitted.submit(A, {"at": 2})
    b1, b2 = submitted.submit(B, {"at": 1}), submitted.submit(B, {"at": 2})
    a2.ack()
    assert offsets(submitted.committable()) == []
    b1.ack()
    found = submitted.committable()
    assert offsets(found) == [("b", 1)]
    assert submitted.pending == 2
    assert offsets(submitted.committable()) == []
    a1.ack()
    b2.ack()
    assert offsets(submitted.committable()) == [("a", 2), ("b", 2)]
    assert submitted.queues == {}


def test_a_dropped_record_is_removed() -> None:
    """A dropped record blocks nothing, and a later acknowledgement of it is ignored."""
    submitted = SubmittedRecords()
    dropped, last = submitted.submit(A, {"at": 1}), submitted.submit(B, {"at": 1})
    dropped.drop()
    dropped.drop()
    dropped.ack()
    found = submitted.committable()
    assert (offsets(found), submitted.pending, list(submitted.queues)) == ([], 1, [source_partition_key(B)])
    last.ack()
    assert offsets(submitted.committable()) == [("b", 1)]


def test_an_equal_record_is_not_dropped_instead() -> None:
    """Of two records with equal offsets only the dropped one is removed."""
    submitted = SubmittedRecords()
    one, two, last = (submitted.submit(A, {"at": at}) for at in (1, 1, 2))
    two.drop()
    last.ack()
    assert offsets(submitted.committable()) == []
    one.ack()
    assert offsets(submitted.committable()) == [("a", 2)]


def test_the_repr_has_pending_and_acknowledged_records() -> None:
    """Pending and acknowledged records are visible in the reprs, also after some were dropped."""
    submitted = SubmittedRecords()
    one = submitted.submit(A, {"at": 1})
    dropped = [submitted.submit(partition, {"at": at}) for at in (1, 2) for partition in (B, C)]
    assert repr(submitted) == "<SubmittedRecords 5 pending of 3 partitions>"
    for record in dropped:
        record.drop()
    assert repr(one) == "<SubmittedRecord {'at': 1} pending>"
    one.ack()
    assert repr(one) == "<SubmittedRecord {'at': 1} acked>"


def test_equal_partitions_share_a_queue() -> None:
    """Equal partitions share a queue, also if they are different objects."""
    submitted = SubmittedRecords()
    for partition in (A, dict(A), B, A):
        submitted.submit(partition, {"at": 1})
    assert [len(queue) for queue in submitted.queues.values()] == [3, 1]


def test_a_record_in_the_middle_can_be_dropped() -> None:
    """Records after a dropped one do not wait for it."""
    submitted = SubmittedRecords()
    one, two, three = (submitted.submit(A, {"at": at}) for at in (1, 2, 3))
    two.drop()
    one.ack()
    three.ack()
    assert offsets(submitted.committable()) == [("a", 3)]


def test_pending_counts_each_record_once() -> None:
    """The pending count is correct if records are acknowledged or dropped repeatedly."""
    submitted = SubmittedRecords()
    one, two = submitted.submit(A, {"at": 1}), submitted.submit(B, {"at": 1})
    assert submitted.pending == 2
    one.ack()
    one.ack()
    assert submitted.pending == 1
    two.drop()
    two.drop()
    assert submitted.pending == 0


def test_partitions_are_equal_in_any_order() -> None:
    """Partitions with the same content are equal in any order, also if values cannot be hashed."""
    assert source_partition_key({"x": 1, "y": 2}) == source_partition_key({"y": 2, "x": 1})
    assert source_partition_key({"x": [1], "y": {"z": 2}}) == source_partition_key({"y": {"z": 2}, "x": [1]})
    submitted = SubmittedRecords()
    submitted.submit({}, {}).ack()
    assert len(submitted.committable()) == 1


def test_partitions_with_different_json_are_different() -> None:
    """Values that are equal in Python, but not in JSON, name different partitions."""
    assert len({source_partition_key({"id": value}) for value in (1, True, 1.0, "1")}) == 4
    assert source_partition_key({"id": [1]}) != source_partition_key({"id": [True]})


@pytest.mark.parametrize("partition", [{1: "a"}, {"x": {"z": 2, "y": [{"b": 1, "a": 2}]}, 3: 4}])
def test_a_partition_has_the_same_json_in_the_offset_store(partition: Any) -> None:
    """The key in the offset store has the partition's JSON, in which numbers as names are text."""
    reordered = dict(reversed(partition.items()))
    assert offset_key("c", partition) == b'["c",' + source_partition_key(reordered) + b"]"
    assert offset_key("c", {"x": {"a": 1, "b": 2}}) == offset_key("c", {"x": {"b": 2, "a": 1}})
    assert parse_offset_key(offset_key("c", {1: "a"})) == ("c", {"1": "a"})  # type: ignore[dict-item]


@pytest.mark.parametrize("partition", [{"id": object()}, {"id": "\ud800"}, {(1, 2): 3}, None])
def test_a_partition_has_a_json_form(partition: Any) -> None:
    """A partition without a JSON form is a ConnectError, which no tolerance of record errors covers."""
    with pytest.raises(ConnectError, match="source partition"):
        SubmittedRecords().submit(partition, {})
    with pytest.raises(ConnectError, match="source partition"):
        offset_key("c", partition)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=30), st.randoms())
def test_no_offset_passes_a_pending_record(plan: list[tuple[str, bool]], order: object) -> None:
    """In any order of acknowledgements an offset is returned only when all records before it are acknowledged."""
    submitted, records = SubmittedRecords(), []
    for at, (file, acked) in enumerate(plan):
        records.append((submitted.submit({"file": file}, {"at": at}), file, at, acked))
    shuffled = records[:]
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    for record, _, _, acked in shuffled:
        if acked:
            record.ack()
        for given_offset in submitted.committable().values():
            file, upto = given_offset.partition["file"], given_offset.offset["at"]
            assert all(one.acked for one, of, at, _ in records if of == file and at <= upto)
