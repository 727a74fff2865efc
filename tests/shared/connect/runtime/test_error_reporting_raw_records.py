"""Raw records that are kept until they are committed, within a limit."""

from __future__ import annotations

from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition
from penstock.shared.connect.runtime.error_reporting import RawRecords

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def columns(tp: TopicPartition, *offsets: int) -> Columns:
    """Records of two bytes each, without a key."""
    return Columns.of(
        [ConsumerRecord(tp.topic, tp.partition, at, 7, None, b"%02d" % at, (("h", b"x"),)) for at in offsets]
    )


def found(raw: RawRecords, tp: TopicPartition, *offsets: int) -> list[int]:
    return [at for at in offsets if (record := raw.find(tp.topic, tp.partition, at)) and record.value == b"%02d" % at]


def test_a_record_is_found_until_its_offset_is_committed() -> None:
    """A record is found completely until its offset is committed or its partition is revoked,
    also if offsets have gaps.
    """
    raw = RawRecords()
    raw.add({A: columns(A, 1, 3), B: columns(B, 5)})
    raw.add({A: columns(A, 6, 7)})
    assert raw.find("t", 0, 3) == ConsumerRecord("t", 0, 3, 7, None, b"03", (("h", b"x"),))
    assert found(raw, A, *range(10)) == [1, 3, 6, 7]
    raw.committed({A: OffsetAndMetadata(4), B: OffsetAndMetadata(5), TopicPartition("u", 0): OffsetAndMetadata(1)})
    assert (found(raw, A, *range(10)), found(raw, B, 5)) == ([6, 7], [5])
    raw.forget([B, TopicPartition("u", 0)])
    assert found(raw, B, 5) == []
    assert repr(raw) == "<RawRecords of 1 partitions, 4 bytes>"


def test_the_oldest_batches_are_evicted() -> None:
    """Above the limit the oldest batches of any partition are evicted, but never the batch that is being delivered."""
    raw = RawRecords(bytes_max=6)
    raw.add({A: columns(A, 1)})
    raw.add({B: columns(B, 1)})
    raw.add({B: columns(B, 2, 3)})
    assert (found(raw, A, 1), found(raw, B, 1, 2, 3)) == ([], [1, 2, 3])
    raw.add({A: columns(A, *range(2, 9))})
    assert (found(raw, A, *range(9)), found(raw, B, 1, 2, 3)) == ([*range(2, 9)], [])


def test_records_read_again_replace_the_old_ones() -> None:
    """After a failed flush records that are read again replace the old ones."""
    raw = RawRecords()
    raw.add({A: columns(A, 1, 2)})
    raw.add({A: columns(A, 3, 4)})
    raw.add({A: columns(A, 1, 2, 3)})
    assert found(raw, A, *range(6)) == [1, 2, 3]
    assert "6 bytes" in repr(raw)
