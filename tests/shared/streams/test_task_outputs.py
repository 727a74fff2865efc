"""What a commit writes, and what each part of it came from."""

from __future__ import annotations

import numpy as np

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.changelog_entries import Entries
from penstock.shared.streams.processor import RecordMetadata
from penstock.shared.streams.task_outputs import Origins, ResultColumns, TaskCommit, TaskOutputs
from penstock.shared.streams.windowed_aggregate import WindowKey

WINDOWS = [WindowKey("a", 0, 1), WindowKey("b", 2, 3)]


def columns() -> ResultColumns:
    origins = Origins("in", 3, np.array([70, 80]))
    keys, values = PackedBytes.of([b"a", b"b"]), PackedBytes.of([b"1", b"2"])
    return ResultColumns("out", keys, values, np.array([1, 3]), WINDOWS, origins)


def test_outputs_as_records_in_order() -> None:
    """Single records and results in columns come out in the order in which they were added."""
    outputs = TaskOutputs()
    first, last = ProducerRecord("late", b"x"), ProducerRecord("out", b"9")
    for output in (first, columns(), last):
        outputs.add(output)
    commit = TaskCommit(outputs, Entries.of([]), {}, 1, 1)
    middle = [ProducerRecord("out", b"1", b"a", timestamp=1), ProducerRecord("out", b"2", b"b", timestamp=3)]
    assert commit.outputs == [first, *middle, last]
    assert len(outputs) == 3
    outputs.take_back(1)
    assert outputs.items == [first]
    assert len(outputs.origins) == len(outputs.windows) == 1


def test_the_source_of_an_output_is_found() -> None:
    """Of a record that was refused it is known which source record and window it came from, if any."""
    outputs, single = TaskOutputs(), ProducerRecord("late", b"x")
    outputs.add(single, RecordMetadata("in", 3, 7), None)
    outputs.add(columns())
    commit = TaskCommit(outputs, Entries.of([]), {}, 1, 1)
    assert commit.source_of(single) == (RecordMetadata("in", 3, 7), None)
    result = outputs.items[1]
    assert isinstance(result, ResultColumns)
    assert commit.source_of(result.record(1)) == (RecordMetadata("in", 3, 80), WINDOWS[1])
    assert commit.source_of(ProducerRecord("out", b"else", b"other")) == (None, None)
    result.origins = ()
    assert commit.source_of(result.record(0)) == (None, WINDOWS[0])
