"""A commit writes its records in order, each with its own headers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Headers, ProducerRecord
from penstock.shared.streams.changelog.entry_columns import EntryColumns
from penstock.shared.streams.task.outputs import OutputColumns, TaskCommit, TaskOutputs


def columns() -> OutputColumns:
    keys, values = PackedBytes.of([b"a", b"b"]), PackedBytes.of([b"1", b"2"])
    return OutputColumns("out", keys, values, np.array([1, 3]))


def test_outputs_as_records_in_order() -> None:
    """Single records and columns are written in the order in which they were added."""
    outputs = TaskOutputs()
    first, last = ProducerRecord("late", b"x"), ProducerRecord("out", b"9")
    for output in (first, columns(), last):
        outputs.add(output)
    commit = TaskCommit(outputs, EntryColumns.of([]), {}, 1, 1)
    middle = [ProducerRecord("out", b"1", b"a", timestamp=1), ProducerRecord("out", b"2", b"b", timestamp=3)]
    assert commit.outputs == [first, *middle, last]
    assert len(outputs) == 3
    outputs.roll_back(1)
    assert outputs.items == [first]


def test_headers_stay_with_their_records() -> None:
    """Records of a column keep their own headers, also if they go to different partitions."""
    own: list[Headers] = [(("trace", b"a"),), ()]
    late = replace(columns(), headers=PackedHeaders.of(own))
    assert [late.record(i).headers for i in range(2)] == own
    assert [[record.headers for record in bulk] for bulk in late.bulks()] == [own]
    late.partitions = [4, 3]
    assert [[(record.partition, record.headers) for record in bulk] for bulk in late.bulks()] == [
        [(4, own[0])],
        [(3, own[1])],
    ]
