"""The outputs of a task until a commit takes them: single records, and columns of whole batches.

A result with `on_update` has the whole window as its key, but the window's record key chooses the partition, as with
Kafka Streams' `WindowedStreamPartitioner`. So all results of one record key are in one partition, in order. Such
outputs have a `source_key`: the record key. `assign_partitions` sets their partitions when the numbers of partitions of
the topics are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Headers, Int64Array, ProducerRecord, RecordColumns
from penstock.shared.streams.changelog.entry_columns import EntryColumns


@dataclass(slots=True)
class OutputColumns:
    """Encoded outputs for one topic, in order: results of an aggregation, or late records. `timestamps` are in ms.

    If `source_keys` are given, they choose the `partitions` instead of the keys. `headers` is None if no output has
    headers.
    """

    topic: str
    keys: PackedBytes
    values: PackedBytes
    timestamps: Int64Array
    source_keys: PackedBytes | None = None
    partitions: list[int] | None = None
    headers: PackedHeaders | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def record(self, index: int) -> ProducerRecord:
        """Return one output as a record."""
        partition = None if self.partitions is None else self.partitions[index]
        timestamp = self.timestamps.item(index)
        headers = () if self.headers is None else self.headers[index]
        return ProducerRecord(self.topic, self.values[index], self.keys[index], headers, partition, timestamp)

    def bulks(self) -> list[RecordColumns]:
        """Return all outputs as bulks for the producer: one for each partition, or one for all without `partitions`."""
        if self.partitions is None:
            return [RecordColumns(self.topic, self.keys, self.values, self.timestamps, headers=self.headers)]
        partitions = np.array(self.partitions)
        bulks = []
        # Order matters within a partition only, and stays there.
        for partition in dict.fromkeys(self.partitions):
            own = np.flatnonzero(partitions == partition)
            columns = self.keys.at(own), self.values.at(own), self.timestamps[own]
            headers = None if self.headers is None else self.headers.at(own)
            bulks.append(RecordColumns(self.topic, *columns, partition, headers))
        return bulks


Output = ProducerRecord | OutputColumns
OutputBulk = list[ProducerRecord] | RecordColumns
"""Outputs as the producer takes them at once."""


@dataclass(slots=True)
class TaskOutputs:
    """Outputs in order, each with the key that chooses its partition if that is not its own key."""

    items: list[Output] = field(default_factory=list)
    source_keys: list[bytes | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def add(self, output: Output, source_key: bytes | None = None) -> None:
        """Append an output; outputs in columns have source keys of their own."""
        self.items.append(output)
        self.source_keys.append(source_key)

    def roll_back(self, length: int) -> None:
        """Drop all outputs after the first `length`."""
        del self.items[length:], self.source_keys[length:]

    def bulks(self) -> list[OutputBulk]:
        """Return the outputs in order, with consecutive single records as one bulk."""
        bulks: list[OutputBulk] = []
        for item in self.items:
            if isinstance(item, OutputColumns):
                bulks += item.bulks()
            elif bulks and isinstance(bulks[-1], list):
                bulks[-1].append(item)
            else:
                bulks.append([item])
        return bulks

    def topics_by_source_key(self) -> set[str]:
        """Return the topics of outputs whose source keys choose their partitions."""
        return {
            item.topic
            for item, source_key in zip(self.items, self.source_keys, strict=True)
            if source_key is not None or (isinstance(item, OutputColumns) and item.source_keys is not None)
        }

    def assign_partitions(self, partitions: Mapping[str, Sequence[int]]) -> None:
        """Set the partitions of outputs that have source keys; `partitions` are those of their topics, ascending."""
        for at, (item, source_key) in enumerate(zip(self.items, self.source_keys, strict=True)):
            if isinstance(item, OutputColumns):
                if item.source_keys is not None:
                    item.partitions = [output_partition(key, partitions[item.topic]) for key in item.source_keys]
            elif source_key is not None:
                partition = output_partition(source_key, partitions[item.topic])
                self.items[at] = msgspec.structs.replace(item, partition=partition)


def record_that_fits(
    topic: str,
    value: bytes | None,
    key: bytes | None,
    own_headers: Headers,
    more_headers: Headers,
    timestamp: int | None,
    record_bytes_max: int,
) -> ProducerRecord:
    """Return a late record or a dead letter of an output, without the parts that make it too large or invalid.

    The headers `own_headers` are left out if one of them is invalid. If the record is too large, the value is left out
    first, then the key and `own_headers`. The headers `more_headers`, which describe the output, remain.

    >>> own, more = (("own", b"1"),), (("more", b"2"),)
    >>> without_value = record_that_fits("t", b"x" * 900, b"k", own, more, 5, 500)
    >>> without_value.value, without_value.key, without_value.headers
    (None, b'k', (('own', b'1'), ('more', b'2')))
    >>> without_key = record_that_fits("t", b"x", b"k" * 900, own, more, 5, 500)
    >>> without_key.value, without_key.key, without_key.headers
    (None, None, (('more', b'2'),))
    """
    # A record that cannot be written would fail every commit.
    try:
        record_size(None, None, list(own_headers))
    except (AttributeError, TypeError, ValueError):
        # A processor has set them, and nothing has checked them before.
        own_headers = ()
    headers = own_headers + more_headers
    if record_size(key, value, list(headers)) > record_bytes_max:
        value = None
    if record_size(key, value, list(headers)) > record_bytes_max:
        key = None
        headers = more_headers
    return ProducerRecord(topic, value, key, headers, None, timestamp)


def output_partition(source_key: bytes | None, partitions: Sequence[int]) -> int:
    """Return which of a topic's partitions an output goes to: the one that a producer chooses for this key.

    >>> output_partition(b"21", range(7))
    3
    """
    assert source_key is not None, "a window has a key"
    return partitions[for_key(source_key, len(partitions))]


class TaskCommit(NamedTuple):
    """All that one commit writes: outputs (`produced`), and records for the task's changelog partition (`changelog`).

    `sources` are the next offsets to read by source topic, without topics that the topology no longer reads.
    """

    produced: TaskOutputs
    changelog: EntryColumns
    sources: dict[str, int]

    @property
    def outputs(self) -> list[ProducerRecord]:
        """Return all outputs as records."""
        records: list[ProducerRecord] = []
        for item in self.produced.items:
            records += map(item.record, range(len(item))) if isinstance(item, OutputColumns) else (item,)
        return records
