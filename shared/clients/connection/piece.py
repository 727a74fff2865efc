"""A fetched piece of a partition's log: whole record batches, turned into columns as they are asked for.

The headers of the batches say at once where the piece ends, so that the next one can be asked for while this one waits;
what is in a batch is looked at when its records are wanted: checksum first, then decompression, then records. Control
batches are left out, and of what was fetched under `read_committed` those of aborted transactions. A batch that cannot
be read ends the piece: what comes before it is given, then CorruptRecord is raised with topic, partition and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from aiokafka.errors import UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch

from penstock.shared.clients.connection.fetch import NO_EPOCH
from penstock.shared.common.errors import ConfigError, CorruptRecord, PenstockError
from penstock.shared.common.records import NO_TIMESTAMP, Columns, HeaderColumn, Int64Array

DECODED_RECORDS = 4_096
"""So many records are decoded at a time, at least, and handed out in slices: a short poll does not wait for the whole
piece, and few slices are cut short by a batch's end."""

LENGTH_END = EPOCH_AT = 12
MAGIC_AT = 16
ATTRIBUTES_AT = 21
COUNT_AT = 57
HEADER_SIZE = 61
LEGACY_HEADER_SIZE = 26
TRANSACTIONAL, CONTROL = 0x10, 0x20
ABORT = 0

_offset_length = struct.Struct(">qi")
_attributes_delta = struct.Struct(">hi")
_count = _epoch = struct.Struct(">i")
_control = struct.Struct(">hh")


class _Batch:
    """Where a batch lies in the piece, and the offset after it."""

    __slots__ = ("base_offset", "is_contiguous", "is_control", "magic", "next_offset", "start", "stop")

    def __init__(self, data: bytes | memoryview, start: int, stop: int, base_offset: int) -> None:
        self.start, self.stop, self.base_offset = start, stop, base_offset
        self.magic = data[start + MAGIC_AT]
        self.is_control = self.is_contiguous = False
        self.next_offset = base_offset + 1
        if self.magic >= 2:
            attributes, last_offset_delta = _attributes_delta.unpack_from(data, start + ATTRIBUTES_AT)
            self.is_control = bool(attributes & CONTROL)
            self.next_offset += last_offset_delta
            # Fewer records than offsets: a cleaner took some.
            self.is_contiguous = _count.unpack_from(data, start + COUNT_AT)[0] == last_offset_delta + 1


class Piece:
    """What was fetched of one partition from `position` on; `aborted` are (producer id, first offset) pairs.

    `end_offset` is where to fetch on, `end_epoch` the leader epoch of the batch before it (-1 where it has none),
    `position` the offset of the next record to be handed out, `epoch` the leader epoch of the last batch looked at.
    """

    __slots__ = (
        "_aborted",
        "_at",
        "_batches",
        "_columns",
        "_data",
        "_decoded_to",
        "_gone",
        "_torn",
        "_where",
        "end_epoch",
        "end_offset",
        "epoch",
        "position",
        "size",
    )

    def __init__(
        self,
        topic: str,
        partition: int,
        position: int,
        data: bytes | memoryview,
        aborted: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        self._where = (topic, partition)
        self._data = data
        self.size = len(data)
        self.position = self._decoded_to = self.end_offset = position
        self.end_epoch = self.epoch = NO_EPOCH
        self._aborted = None if aborted is None else sorted(aborted, key=lambda one: one[1], reverse=True)
        self._gone: set[int] = set()
        self._batches: list[_Batch] = []
        self._torn: str | None = None
        self._columns: Columns | None = None
        self._at = 0
        self._cut()
        self._batches.reverse()

    def __repr__(self) -> str:
        topic, partition = self._where
        return f"<Piece {topic}-{partition}, {self.size} bytes from {self.position} to {self.end_offset}>"

    @property
    def is_done(self) -> bool:
        """Whether all of it was handed out."""
        return self._columns is None and not self._batches and self._torn is None

    def read(self, max_records: int | None) -> Columns | None:
        """The next records, `max_records` at most; None where there are no more. The position moves past them.

        Raises CorruptRecord in place of a batch that cannot be read, ConfigError where no decompressor is installed.
        """
        columns = self._columns
        if columns is None:
            columns = self._decode(max_records)
            if columns is None:
                self.position = self._decoded_to
                return None
        count, at = len(columns), self._at
        end = count if max_records is None else min(count, at + max_records)
        part = columns if at == 0 and end == count else columns[at:end]
        if end < count:
            self._columns, self._at = columns, end
            self.position = int(columns.offsets[end - 1]) + 1
        else:
            self._columns, self._at = None, 0
            self.position = self._decoded_to
        return part

    def _cut(self) -> None:
        """Find the batches by their headers; a last one that is cut off is left for the next fetch."""
        data, at, size = self._data, 0, self.size
        while size - at >= LENGTH_END:
            base_offset, length = _offset_length.unpack_from(data, at)
            stop = at + LENGTH_END + length
            if length < LEGACY_HEADER_SIZE - LENGTH_END:
                self._torn = f"a batch of {length} bytes"
                return
            if stop > size:
                break
            if data[at + MAGIC_AT] >= 2 and stop - at < HEADER_SIZE:
                self._torn = f"a batch of {length} bytes"
                return
            batch = _Batch(data, at, stop, base_offset)
            at = stop
            if batch.next_offset > self.end_offset:  # or it ends before what was asked for
                self._batches.append(batch)
                self.end_offset = batch.next_offset
                self.end_epoch = self._epoch_of(batch)
        if size and not self._batches:
            self._torn = f"no whole batch in {size} bytes"

    def _epoch_of(self, batch: _Batch) -> int:
        return int(_epoch.unpack_from(self._data, batch.start + EPOCH_AT)[0]) if batch.magic >= 2 else NO_EPOCH

    def _decode(self, max_records: int | None) -> Columns | None:
        """The records of the next batches, as many as are wanted; None where nothing is left."""
        into = _Lists(self.position)
        wanted = self.size if max_records is None else max(max_records, DECODED_RECORDS)
        batches = self._batches
        while batches and (len(into.keys) < wanted or batches[-1].is_control):
            batch = batches[-1]
            try:
                self._read_batch(batch, into)
            except PenstockError:
                if into.keys:
                    break  # first what is before it
                raise
            self._decoded_to = batch.next_offset
            self.epoch = max(self.epoch, self._epoch_of(batch))
            batches.pop()
        if not into.keys:
            if self._torn is not None:
                topic, partition = self._where
                raise CorruptRecord(f"{topic}-{partition} at offset {self._decoded_to}: {self._torn}")
            return None
        return into.columns(*self._where, self.epoch)

    def _read_batch(self, batch: _Batch, into: _Lists) -> None:
        topic, partition = self._where
        view = memoryview(self._data)[batch.start : batch.stop]
        try:
            source: Any = DefaultRecordBatch(view) if batch.magic >= 2 else LegacyRecordBatch(view, batch.magic)
            if not source.validate_crc():
                raise CorruptRecord("a batch fails its checksum")
            if not batch.is_control and not self._is_aborted(batch, source):
                into.add(batch, source)
            elif batch.is_control and self._aborted is not None:
                self._end_transaction(batch, source)
        except UnsupportedCodecError as e:
            raise ConfigError(f"{topic}-{partition} at offset {self._decoded_to}: {e}") from e
        except Exception as e:  # bytes from outside can break a decompressor or a parser in any way
            reason = str(e) if isinstance(e, CorruptRecord) else f"a batch cannot be read: {type(e).__name__}: {e}"
            raise CorruptRecord(f"{topic}-{partition} at offset {self._decoded_to}: {reason}") from e

    def _is_aborted(self, batch: _Batch, source: Any) -> bool:
        if self._aborted is None or batch.magic < 2 or not source.is_transactional:
            return False
        self._begin_transactions(batch.base_offset)
        return source.producer_id in self._gone

    def _begin_transactions(self, offset: int) -> None:
        while self._aborted and self._aborted[-1][1] <= offset:
            self._gone.add(self._aborted.pop()[0])

    def _end_transaction(self, batch: _Batch, source: Any) -> None:
        self._begin_transactions(batch.base_offset)
        for marker in source:
            if _control.unpack_from(marker.key)[1] == ABORT:
                self._gone.discard(source.producer_id)


class _Lists:
    """Columns in the making."""

    __slots__ = ("_any_headers", "_headers", "_offsets", "_stamps", "_start", "keys", "values")

    def __init__(self, start: int) -> None:
        self._start = start
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self._stamps: list[int] = []
        self._offsets: list[Int64Array] = []
        self._headers: list[Sequence[tuple[str, bytes | None]]] = []
        self._any_headers = False

    def add(self, batch: _Batch, source: Any) -> None:
        """The records of a batch, from the start on; nothing where one of them cannot be read."""
        before = len(self.keys)
        try:
            if batch.is_contiguous and batch.base_offset >= self._start:
                self._add_all(source)
                if len(self.keys) - before != batch.next_offset - batch.base_offset:
                    raise CorruptRecord(f"a batch has {len(self.keys) - before} records, its header says otherwise")
                self._offsets.append(np.arange(batch.base_offset, batch.next_offset, dtype=np.int64))
            else:
                records = [record for record in source if record.offset >= self._start]
                self._add_all(records)
                if not batch.magic:
                    self._stamps[before:] = [NO_TIMESTAMP] * len(records)
                self._offsets.append(np.array([record.offset for record in records], np.int64))
        except BaseException:
            del self.keys[before:], self.values[before:], self._stamps[before:], self._headers[before:]
            raise

    def _add_all(self, records: Iterable[Any]) -> None:
        keys, values, stamps = self.keys, self.values, self._stamps
        # Not into a list first: objects that live on make Python's garbage collector look at all of them.
        for record in records:
            keys.append(record.key)
            values.append(record.value)
            stamps.append(record.timestamp)
            if (own := record.headers) or self._any_headers:
                if not self._any_headers:
                    self._any_headers = True
                    self._headers += [()] * (len(keys) - 1)
                self._headers.append(own)

    def columns(self, topic: str, partition: int, epoch: int) -> Columns:
        stamps = np.array(self._stamps, np.int64)
        offsets = self._offsets[0] if len(self._offsets) == 1 else np.concatenate(self._offsets)
        headers = HeaderColumn(self._headers) if self._any_headers else None
        return Columns(topic, partition, self.keys, self.values, stamps, offsets, headers, epoch)
