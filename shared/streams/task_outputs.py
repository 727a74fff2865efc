"""What a task has for other topics until a commit takes it: records one by one, and windows' results by the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.common.errors import DataError
from shared.common.records import Int64Array, ProducerRecord
from shared.streams.processor import RecordMetadata
from shared.streams.windowed_aggregate import WindowKey


@dataclass(slots=True)
class ResultColumns:
    """Encoded results of windows for one topic, in order; `timestamps` are ms.

    `windows` are the windows they are of, `origins` the source records that brought them about, where any did.
    """

    topic: str
    keys: list[bytes | None]
    values: list[bytes | None]
    timestamps: list[int]
    windows: Sequence[WindowKey]
    origins: Sequence[RecordMetadata] = ()

    def __len__(self) -> int:
        return len(self.keys)

    def record(self, index: int) -> ProducerRecord:
        """One result as a record."""
        return ProducerRecord(self.topic, self.values[index], self.keys[index], (), None, self.timestamps[index])


Output = ProducerRecord | ResultColumns


class OutputPlace(NamedTuple):
    """An output by what tells it from others: its source record, topic, key and the window whose result it is."""

    origin: RecordMetadata | None
    topic: str
    key: bytes | None
    window: WindowKey | None = None


Refusals = Mapping[OutputPlace, DataError]
"""Outputs that were refused when they were to be written, and why."""


@dataclass(frozen=True, slots=True)
class Origins(Sequence[RecordMetadata]):
    """Where records of one partition were read, made when asked for."""

    topic: str
    partition: int
    offsets: Int64Array

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of one place only
        return RecordMetadata(self.topic, self.partition, int(self.offsets[index]))


@dataclass(slots=True)
class TaskOutputs:
    """Outputs in order, each with its origin (the source record in hand, if any) and the window whose result it is."""

    items: list[Output] = field(default_factory=list)
    origins: list[RecordMetadata | None] = field(default_factory=list)
    windows: list[WindowKey | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items)

    def add(self, output: Output, origin: RecordMetadata | None = None, window: WindowKey | None = None) -> None:
        """Append one; of results in columns origins and windows are their own."""
        self.items.append(output)
        self.origins.append(origin)
        self.windows.append(window)

    def take_back(self, length: int) -> None:
        """Forget what came after there were `length`."""
        del self.items[length:], self.origins[length:], self.windows[length:]


class TaskCommit(NamedTuple):
    """What one commit writes: `outputs` to their topics, `changelog` (in order) to the task's changelog partition.

    `sources` are the next offsets to read by source topic, `commit` is its number within the owner's epoch.
    """

    produced: TaskOutputs
    changelog: list[tuple[bytes | None, bytes]]
    sources: dict[str, int]
    epoch: int
    commit: int

    @property
    def outputs(self) -> list[ProducerRecord]:
        """All outputs as records."""
        return list(self._records())

    def source_of(self, record: ProducerRecord) -> tuple[RecordMetadata | None, WindowKey | None]:
        """The source record that brought an output about, and the window whose result it is; None for neither."""
        produced = self.produced
        for item, origin, window in zip(produced.items, produced.origins, produced.windows, strict=True):
            if item is record:
                return origin, window
            if isinstance(item, ResultColumns) and item.topic == record.topic:
                for i, (key, value) in enumerate(zip(item.keys, item.values, strict=True)):
                    if key is record.key and value is record.value:
                        return (item.origins[i] if item.origins else None), item.windows[i]
        return None, None

    def _records(self) -> Iterator[ProducerRecord]:
        for item in self.produced.items:
            if isinstance(item, ResultColumns):
                yield from map(item.record, range(len(item)))
            else:
                yield item
