"""Records, alone and in columns: the values that all packages exchange.

>>> first = ConsumerRecord("clicks", 0, 7, 1_000, b"ann", b"{}")
>>> columns = Columns.of([first, ConsumerRecord("clicks", 0, 9, 1_005, None, b"{}")])
>>> len(columns), columns.offsets.tolist(), columns.timestamps.tolist(), columns.keys
(2, [7, 9], [1000, 1005], [b'ann', None])
>>> columns.record(1).offset
9
>>> columns[1:].keys
[None]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast, overload

import msgspec
import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypeVar

from penstock.shared.common.packed_bytes import PackedBytes

Headers = tuple[tuple[str, bytes | None], ...]
AnyHeaders = Mapping[str, bytes | None] | Sequence[tuple[str, bytes | None]]
"""The accepted forms of the headers of a record to send: pairs, or a dict if no name occurs twice."""
Int64Array = NDArray[np.int64]
INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1

K = TypeVar("K", covariant=True, default=bytes | None)
V = TypeVar("V", covariant=True, default=bytes | None)

NO_TIMESTAMP = -1
"""Kafka's value for a record without a timestamp."""
OFFSET_METADATA_MAX_BYTES = 4_096
"""The most bytes of metadata that a broker stores with an offset: the default of `offset.metadata.max.bytes`."""


def header_pairs(headers: AnyHeaders) -> Headers:
    """Convert a record's headers to a tuple of pairs if they are a dict.

    Any other value is returned unchanged, also an invalid one. The check of the record comes later.

    >>> header_pairs({"trace": b"1"}), header_pairs((("trace", b"1"), ("trace", None)))
    ((('trace', b'1'),), (('trace', b'1'), ('trace', None)))
    """
    return tuple(headers.items()) if isinstance(headers, Mapping) else cast(Headers, headers)


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class OffsetAndMetadata(NamedTuple):
    """A position to commit: the offset of the NEXT record to read, and a free text of at most 4,096 bytes.

    `leader_epoch` is the epoch of the last record before the position, or a later epoch; -1 if unknown. It lets a
    consumer that continues there detect a truncated log. Equality ignores it.

    >>> OffsetAndMetadata(3, "", 7) == OffsetAndMetadata(3), OffsetAndMetadata(3, "", 7)
    (True, OffsetAndMetadata(offset=3, metadata='', leader_epoch=7))
    """

    offset: int
    metadata: str = ""
    leader_epoch: int = -1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetAndMetadata) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self[:2])

    def __repr__(self) -> str:
        epoch = f", leader_epoch={self.leader_epoch}" if self.leader_epoch >= 0 else ""
        return f"OffsetAndMetadata(offset={self.offset}, metadata={self.metadata!r}{epoch})"


@dataclass(frozen=True, slots=True)
class GroupMetadata:
    """A member's identity within its group's current generation (Kafka's ConsumerGroupMetadata)."""

    group_id: str
    generation_id: int = -1
    member_id: str = ""
    group_instance_id: str | None = None


class ProducerRecord(msgspec.Struct, Generic[K, V], frozen=True, gc=False):
    """A record to send. `timestamp` is in ms since the epoch; None means now."""

    topic: str
    value: V
    key: K = None  # type: ignore[assignment]
    headers: Headers = ()
    partition: int | None = None
    timestamp: int | None = None

    if TYPE_CHECKING:
        # Callers may pass headers in several forms. Interceptors and all later code read pairs.

        def __init__(
            self,
            topic: str,
            value: V,
            key: K = None,  # type: ignore[assignment]
            headers: AnyHeaders = (),
            partition: int | None = None,
            timestamp: int | None = None,
        ) -> None: ...

    def with_header_pairs(self) -> ProducerRecord[K, V]:
        """The record, with its headers as pairs if they are a dict, and () if they are None. Otherwise the record
        itself."""
        pairs = header_pairs(self.headers or ())
        return self if pairs is self.headers else msgspec.structs.replace(self, headers=pairs)


@dataclass(frozen=True, slots=True)
class RecordColumns(Sequence[ProducerRecord]):
    """Records to send to one topic, as parallel columns. Objects are made only for records that are accessed.

    If `timestamps` (ms) is None, all records get the time of sending. If `partition` is None, the producer chooses one
    for each. If `headers` is None, no record has any. PackedBytes as keys and values, an int64 array as `timestamps`,
    and PackedHeaders are sent without one Python object per record.

    All columns have the same length; otherwise ValueError is raised. A record without a key has None in `keys`.

    >>> RecordColumns("clicks", [b"ann", None], [b"1", b"2"], partition=3)[1]
    ProducerRecord(topic='clicks', value=b'2', key=None, headers=(), partition=3, timestamp=None)
    """

    topic: str
    keys: Sequence[bytes | None]
    values: Sequence[bytes | None]
    timestamps: Sequence[int] | Int64Array | None = None
    partition: int | None = None
    headers: Sequence[AnyHeaders] | None = None

    def __post_init__(self) -> None:
        columns = {"keys": self.keys, "values": self.values, "timestamps": self.timestamps, "headers": self.headers}
        lengths = {name: len(column) for name, column in columns.items() if column is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"topic {self.topic}: the columns have different lengths: {lengths}")

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> ProducerRecord: ...

    @overload
    def __getitem__(self, index: slice) -> RecordColumns: ...

    def __getitem__(self, index: int | slice) -> ProducerRecord | RecordColumns:
        times = self.timestamps
        headers = self.headers
        if isinstance(index, slice):
            some = None if times is None else times[index]
            own = None if headers is None else headers[index]
            return RecordColumns(self.topic, self.keys[index], self.values[index], some, self.partition, own)
        at = None if times is None else times.item(index) if isinstance(times, np.ndarray) else times[index]
        of_it = () if headers is None else headers[index]
        return ProducerRecord(self.topic, self.values[index], self.keys[index], of_it, self.partition, at)


class RecordMetadata(msgspec.Struct, frozen=True, gc=False):
    """Where a record was stored. `timestamp` is in ms.

    `offset` is -1 if the broker did not return one, as under acks=0. A size is in bytes; for a key or value that is
    None it is -1.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    serialized_key_size: int = -1
    serialized_value_size: int = -1


OnDelivery = Callable[[RecordMetadata | None, Exception | None], object]
"""Called once with a sent record's metadata and None, or with None and its error (Java: `Callback`)."""


class ConsumerRecord(msgspec.Struct, Generic[K, V], frozen=True, gc=False):
    """A record as read from a partition; `timestamp` is ms since the epoch."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: K
    value: V
    headers: Headers = ()

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def coordinates_of(record: ConsumerRecord) -> str:
    """Return a record's coordinates as text: `topic-partition@offset`."""
    return f"{record.topic}-{record.partition}@{record.offset}"


class HeaderColumn(Sequence[Headers]):
    """The headers of many records, in lists as they were read.

    A record's headers become a tuple when they are accessed.

    >>> column = HeaderColumn([[("trace", b"1")], ()])
    >>> column[0], column[-1:], column == [(("trace", b"1"),), ()]
    ((('trace', b'1'),), HeaderColumn([()]), True)
    """

    __slots__ = ("_rows",)

    def __init__(self, rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Headers: ...

    @overload
    def __getitem__(self, index: slice) -> HeaderColumn: ...

    def __getitem__(self, index: int | slice) -> Headers | HeaderColumn:
        if isinstance(index, slice):
            return HeaderColumn(self._rows[index])
        return tuple(self._rows[index])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"HeaderColumn({list(self)})"


@dataclass(frozen=True, slots=True)
class Columns(Generic[K, V]):
    """Consecutive records of one partition, as parallel columns in offset order.

    `timestamps` (ms) and `offsets` are int64 arrays, the other columns sequences, all with one element for each record.
    `headers` may be None if no record has headers. Offsets ascend but may have gaps (compaction, transaction markers).

    Keys and values are bytes or None unless a deserializer returns other types. If there is no deserializer and numba
    is in use, a consumer's are `PackedBytes`: loop over them, since an access by index is slower.
    """

    topic: str
    partition: int
    keys: Sequence[K]
    values: Sequence[V]
    timestamps: Int64Array
    offsets: Int64Array
    headers: Sequence[Headers] | None = field(default=None)
    leader_epoch: int = -1
    """The epoch of the last record or a later one, -1 if it is unknown; see `OffsetAndMetadata`."""

    @classmethod
    def of(cls, records: Sequence[ConsumerRecord[K, V]]) -> Columns[K, V]:
        """Columns from records of one partition. Raises ValueError if there are no records, or several partitions."""
        if len({r.topic_partition for r in records}) != 1:
            raise ValueError("columns hold the records of exactly one partition")
        return cls(
            topic=records[0].topic,
            partition=records[0].partition,
            keys=[r.key for r in records],
            values=[r.value for r in records],
            timestamps=np.fromiter((r.timestamp for r in records), np.int64, len(records)),
            offsets=np.fromiter((r.offset for r in records), np.int64, len(records)),
            headers=[r.headers for r in records] if any(r.headers for r in records) else None,
        )

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[ConsumerRecord[K, V]]:
        return self.records()

    @overload
    def __getitem__(self, part: int) -> ConsumerRecord[K, V]: ...

    @overload
    def __getitem__(self, part: slice) -> Columns[K, V]: ...

    def __getitem__(self, part: int | slice) -> ConsumerRecord[K, V] | Columns[K, V]:
        """The record at an index, or columns of a slice."""
        if not isinstance(part, slice):
            return self.record(range(len(self))[part])
        return Columns(
            self.topic,
            self.partition,
            self.keys[part],
            self.values[part],
            self.timestamps[part],
            self.offsets[part],
            None if self.headers is None else self.headers[part],
            self.leader_epoch,
        )

    def sizes(self) -> Int64Array:
        """The size in bytes of each record's key, value and headers together. A header's name counts its characters.

        >>> Columns.of([ConsumerRecord("clicks", 0, 0, 0, b"ann", b"{}", (("trace", b"1"),))]).sizes().tolist()
        [11]
        """
        sizes = np.zeros(len(self), np.int64)
        columns: tuple[Sequence[Any], ...] = (self.keys, self.values)
        for column in columns:
            if isinstance(column, PackedBytes):
                sizes += column.sizes()
                continue
            try:
                sizes += np.fromiter(map(len, column), np.int64, len(self))
            except TypeError:
                # A None is rare, and this takes twice as long.
                sizes += np.fromiter((len(one or b"") for one in column), np.int64, len(self))
        if self.headers is not None:
            own = (sum(len(name) + len(value or b"") for name, value in headers) for headers in self.headers)
            sizes += np.fromiter(own, np.int64, len(self))
        return sizes

    def record(self, index: int) -> ConsumerRecord[K, V]:
        """The record at `index`, as an object."""
        return ConsumerRecord(
            self.topic,
            self.partition,
            self.offsets.item(index),
            self.timestamps.item(index),
            self.keys[index],
            self.values[index],
            () if self.headers is None else self.headers[index],
        )

    def records(self) -> Iterator[ConsumerRecord[K, V]]:
        """The records as objects, in offset order."""
        headers: Sequence[Headers] = [()] * len(self) if self.headers is None else self.headers
        # The iteration of a packed column makes all its objects at once.
        columns = zip(self.offsets.tolist(), self.timestamps.tolist(), self.keys, self.values, headers, strict=True)
        for offset, timestamp, key, value, own in columns:
            yield ConsumerRecord(self.topic, self.partition, offset, timestamp, key, value, own)
