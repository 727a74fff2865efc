"""The record batches of one partition from a fetch response, decoded into columns on demand (Java: `CompletedFetch`).

The headers of the batches show at once where the completed fetch ends. So the next fetch can be sent before this one is
decoded. A batch is decoded when its records are requested: the checksum first, then decompression, then the records.
Control batches are left out; under `read_committed` the batches of aborted transactions are left out too. A batch that
cannot be read ends the completed fetch. The records before it are returned, then an error is raised with topic,
partition and offset.

With numba installed the records become positions in the received or decompressed bytes (`decoding_kernel`). Without
numba aiokafka's compiled reader makes lists of bytes. That reader also decodes the batches that the kernel does not:
old formats, and batches with anything unusual. So both ways accept and reject the same batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from aiokafka.errors import UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatch
from aiokafka.record.legacy_records import LegacyRecordBatch
from numpy.typing import NDArray

from penstock.shared.clients.protocol.fetch import NO_EPOCH
from penstock.shared.clients.protocol.record_batches import (
    ATTRIBUTES_AT,
    RECORDS_AT,
    crc32c,
    decompress,
    may_be_too_large,
)
from penstock.shared.common.errors import ConfigError, CorruptRecord, PenstockError
from penstock.shared.common.kernel_loading import IS_COMPILED
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import NO_TIMESTAMP, Columns, HeaderColumn, Headers, Int64Array

DECODED_RECORDS = 4_096
"""The minimum number of records decoded at a time; they are returned in slices. A short poll does not wait for the
whole completed fetch, and few slices are cut short by a batch's end."""

# Positions in the header of a batch. The first 17 bytes are the same in every version.
LENGTH_END = 12
MAGIC_AT = 16
LEGACY_HEADER_SIZE = 26

# Bits of the attributes.
COMPRESSION_CODEC = 0x07
LOG_APPEND_TIME = 0x08
TRANSACTIONAL = 0x10
CONTROL = 0x20

ABORT = 0
"""The type of a control record that ends an aborted transaction; 1 is a commit."""

_offset_length = struct.Struct(">qi")
_header = struct.Struct(">iBIhiqqqhii")
"""The fields from the leader epoch on."""
_control = struct.Struct(">hh")


class _FetchedBatch:
    """A batch of a completed fetch: its position there, and the fields of its header."""

    __slots__ = (
        "attributes",
        "base_offset",
        "count",
        "crc",
        "epoch",
        "first_timestamp",
        "magic",
        "max_timestamp",
        "next_offset",
        "producer_id",
        "start",
        "stop",
    )

    def __init__(self, data: bytes | memoryview, start: int, stop: int, base_offset: int) -> None:
        self.start = start
        self.stop = stop
        self.base_offset = base_offset
        self.magic = data[start + MAGIC_AT]
        self.attributes = 0
        # Versions 0 and 1: a compressed batch has the offset of its last record.
        self.next_offset = base_offset + 1
        self.epoch = NO_EPOCH
        if self.magic >= 2:
            header = _header.unpack_from(data, start + LENGTH_END)
            self.epoch, _, self.crc, self.attributes, last_offset_delta = header[:5]
            self.first_timestamp, self.max_timestamp, self.producer_id, _, _, self.count = header[5:]
            self.next_offset += last_offset_delta

    @property
    def is_control(self) -> bool:
        """Whether the fetched batch ends a transaction; such a batch has no records for the user."""
        return bool(self.attributes & CONTROL)

    @property
    def is_contiguous(self) -> bool:
        """Whether the fetched batch has a record at each of its offsets. False before magic 2."""
        return self.magic >= 2 and self.count == self.next_offset - self.base_offset

    @property
    def is_compressed(self) -> bool:
        """Whether the records of the fetched batch are compressed."""
        return bool(self.attributes & COMPRESSION_CODEC)


@cache
def compile_decoding() -> None:
    """Compile the kernels of `CompletedFetch`, or load them from the cache.

    Calls after the first one do nothing. Without numba, no call does anything.
    """
    if IS_COMPILED:
        from penstock.shared.clients.protocol import decoding_kernel
        from penstock.shared.common import byte_copies

        decoding_kernel.compile_kernels()
        byte_copies.compile_kernels()


class CompletedFetch:
    """The fetched batches of one partition from `position` on; `aborted` are (producer id, first offset) pairs, or None
    under `read_uncommitted`.

    `position` is the offset of the next record to return, `end_offset` that to fetch next. `epoch` is the highest
    leader epoch of the decoded batches, `end_epoch` that of the batch before `end_offset` (-1 if unknown). If `packed`
    is True, the columns may keep the whole buffer of fetched or decompressed bytes in memory.
    """

    __slots__ = (
        "_aborted",
        "_at",
        "_batches",
        "_begun",
        "_columns",
        "_data",
        "_decoded_to",
        "_gone",
        "_is_packed",
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
        *,
        packed: bool | None = None,
    ) -> None:
        self._where = (topic, partition)
        self._is_packed = IS_COMPILED if packed is None else packed
        self._data = data
        self.size = len(data)
        self.position = position
        self._decoded_to = position
        self.end_offset = position
        self.end_epoch = NO_EPOCH
        self.epoch = NO_EPOCH
        self._aborted = None if aborted is None else sorted(aborted, key=lambda one: one[1])
        self._begun = 0
        self._gone = frozenset[int]()
        self._batches: list[_FetchedBatch] = []
        self._torn: str | None = None
        self._columns: Columns | None = None
        self._at = 0
        self._cut()
        self._batches.reverse()

    def __repr__(self) -> str:
        topic, partition = self._where
        return f"<CompletedFetch {topic}-{partition}, {self.size} bytes from {self.position} to {self.end_offset}>"

    @property
    def is_done(self) -> bool:
        """Whether nothing is left: no record to return, no batch to decode, and no error to raise."""
        return self._columns is None and not self._batches and self._torn is None

    def read(self, max_records: int | None) -> Columns | None:
        """Return the next records, at most `max_records`, and advance the position. Returns None if there are no more.

        Raises CorruptRecord at a batch that cannot be read. Raises ConfigError if the decompressor of a batch is not
        installed.
        """
        columns = self._columns
        if columns is None:
            columns = self._decode(max_records)
            if columns is None:
                self.position = self._decoded_to
                return None
        count = len(columns)
        at = self._at
        end = count if max_records is None else min(count, at + max_records)
        part = columns if at == 0 and end == count else columns[at:end]
        if end < count:
            self._columns = columns
            self._at = end
            self.position = int(columns.offsets[end - 1]) + 1
        # After the last record the position skips what is invisible: control batches, and offsets that log compaction
        # has removed. Otherwise the lag would never become 0.
        else:
            self._columns = None
            self._at = 0
            self.position = self._decoded_to
        return part

    def _cut(self) -> None:
        """Find the batches by their headers."""
        data = self._data
        size = self.size
        at = 0
        while size - at >= LENGTH_END:
            base_offset, length = _offset_length.unpack_from(data, at)
            stop = at + LENGTH_END + length
            # 1. The length is impossible: the batches after it cannot be found.
            if length < LEGACY_HEADER_SIZE - LENGTH_END:
                self._torn = f"a batch has an impossible length of {length} bytes"
                return
            # 2. The broker cuts its log at the fetch's size, within a batch: the next fetch gets that batch.
            if stop > size:
                break
            if data[at + MAGIC_AT] >= 2 and stop - at < RECORDS_AT:
                self._torn = f"a batch has an impossible length of {length} bytes"
                return
            batch = _FetchedBatch(data, at, stop, base_offset)
            at = stop
            # 3. A batch that ends before the position has no record to return.
            if batch.next_offset > self.end_offset:
                self._batches.append(batch)
                self.end_offset = batch.next_offset
                self.end_epoch = batch.epoch
        # 4. The broker sends the first batch whole, however large it is (KIP-74). Without this error, a fetch without
        #    a whole batch would be repeated for ever.
        if size and not self._batches:
            self._torn = f"no whole batch in {size} bytes"

    def _decode(self, max_records: int | None) -> Columns | None:
        """Decode the next whole batches until they have enough records, or none is left.

        Enough is at least `max_records` and at least DECODED_RECORDS, or without `max_records` as many records as the
        fetch has bytes. Returns their records, or None if there are no more.
        """
        into = _PackedFetch(self._data, self.position) if self._is_packed else _ListFetch(self._data, self.position)
        # Without a limit, a bound that only highly compressed batches exceed: the next call returns the rest.
        wanted = self.size if max_records is None else max(max_records, DECODED_RECORDS)
        batches = self._batches
        # Each batch with the state of the aborted transactions before it.
        popped = list[tuple[_FetchedBatch, int, frozenset[int]]]()
        error: Exception | None = None
        # Control batches that follow are taken as well, so that the position lies after a transaction's marker.
        while batches and (into.count < wanted or batches[-1].is_control):
            batch = batches[-1]
            begun = self._begun
            gone = self._gone
            try:
                self._open(batch, into)
            # Bytes from outside can break a decompressor or a parser in any way.
            except Exception as e:
                error = e
                break
            popped.append((batches.pop(), begun, gone))
        columns, broken = into.columns(*self._where)
        # A kernel decodes late. Put back the batches from the broken one on, and the state before it.
        if broken is not None:
            at, error = broken
            batches += [batch for batch, _, _ in reversed(popped[at:])]
            _, self._begun, self._gone = popped[at]
            del popped[at:]
        if popped:
            self._decoded_to = popped[-1][0].next_offset
            self.epoch = max(self.epoch, *(batch.epoch for batch, _, _ in popped))
        # First return the records before an error. The next call finds the same error again.
        if columns is not None:
            return replace(columns, leader_epoch=self.epoch)
        if error is not None:
            raise self._translated(error) from error
        if self._torn is not None and not batches:
            topic, partition = self._where
            raise CorruptRecord(f"{topic}-{partition} at offset {self._decoded_to}: {self._torn}")
        return None

    def _translated(self, error: Exception) -> PenstockError:
        """Return Penstock's error for an error of the next batch, with topic, partition and offset."""
        topic, partition = self._where
        where = f"{topic}-{partition} at offset {self._decoded_to}"
        if isinstance(error, UnsupportedCodecError):
            return ConfigError(f"{where}: {error}")
        if isinstance(error, CorruptRecord):
            return CorruptRecord(f"{where}: {error}")
        return CorruptRecord(f"{where}: a batch cannot be read: {type(error).__name__}: {error}")

    def _open(self, batch: _FetchedBatch, into: _PackedFetch | _ListFetch) -> None:
        """Check a batch, and add its records unless they are invisible."""
        view = memoryview(self._data)[batch.start : batch.stop]
        # The checksum comes first (Java: `check.crcs`): a wrong byte must not reach a decompressor.
        if batch.magic < 2:
            if not LegacyRecordBatch(view, batch.magic).validate_crc():
                raise CorruptRecord("a batch fails its checksum")
        elif crc32c(view[ATTRIBUTES_AT:]) != batch.crc:
            raise CorruptRecord("a batch fails its checksum")
        # Control batches are never visible. Under `read_uncommitted` (no list of aborted transactions) they mean
        # nothing.
        if batch.is_control:
            if self._aborted is not None:
                self._end_transaction(batch, view)
            into.skip()
        elif self._is_aborted(batch):
            into.skip()
        else:
            into.add(batch)

    def _is_aborted(self, batch: _FetchedBatch) -> bool:
        # As Java's `CompletedFetch.fetchRecords`: a batch is aborted if its producer id has an aborted transaction that
        # began at or before it, and whose marker has not come yet.
        if self._aborted is None or not batch.attributes & TRANSACTIONAL:
            return False
        self._begin_transactions(batch.base_offset)
        return batch.producer_id in self._gone

    def _begin_transactions(self, offset: int) -> None:
        aborted = self._aborted or []
        while self._begun < len(aborted) and aborted[self._begun][1] <= offset:
            self._gone |= {aborted[self._begun][0]}
            self._begun += 1

    def _end_transaction(self, batch: _FetchedBatch, view: memoryview) -> None:
        self._begin_transactions(batch.base_offset)
        # Only an abort marker ends an aborted transaction. (An empty control batch is what compaction leaves of one.)
        marker: Any
        for marker in DefaultRecordBatch(view):
            if _control.unpack_from(marker.key)[1] == ABORT:
                self._gone -= {batch.producer_id}


Broken = tuple[int, Exception] | None
"""The index of the first batch that cannot be read (skipped ones count too), and its error."""


class _ListFetch:
    """Records as lists of bytes, by aiokafka's compiled reader."""

    def __init__(self, data: bytes | memoryview, start: int) -> None:
        self._data = data
        self._start = start
        self.keys: list[bytes | None] = []
        self.values: list[bytes | None] = []
        self._stamps: list[int] = []
        self._offsets: list[Int64Array] = []
        self._headers: list[Sequence[tuple[str, bytes | None]]] = []
        self._any_headers = False

    @property
    def count(self) -> int:
        return len(self.keys)

    def skip(self) -> None:
        """Skip a batch without visible records."""

    def add(self, batch: _FetchedBatch) -> None:
        """Add the records of a batch that are at or above the requested offset. If the batch cannot be read, none is
        added, and the error is raised."""
        view = memoryview(self._data)[batch.start : batch.stop]
        codec = batch.attributes & COMPRESSION_CODEC
        # aiokafka's reader has no limit of its own.
        if batch.magic >= 2 and may_be_too_large(codec, len(view)):
            decompress(codec, view[RECORDS_AT:])
        source: Any = DefaultRecordBatch(view) if batch.magic >= 2 else LegacyRecordBatch(view, batch.magic)
        before = len(self.keys)
        try:
            # The common case needs no offset of each record.
            if batch.is_contiguous and batch.base_offset >= self._start:
                self._add_all(source)
                if len(self.keys) - before != batch.count:
                    raise CorruptRecord(f"a batch has {len(self.keys) - before} records, its header says otherwise")
                self._offsets.append(np.arange(batch.base_offset, batch.next_offset, dtype=np.int64))
            # The broker sends whole batches: the first may begin before the requested offset.
            else:
                records = [record for record in source if record.offset >= self._start]
                self._add_all(records)
                # Version 0 has no timestamps.
                if not batch.magic:
                    self._stamps[before:] = [NO_TIMESTAMP] * len(records)
                self._offsets.append(np.array([record.offset for record in records], np.int64))
        except BaseException as e:
            del self.keys[before:], self.values[before:], self._stamps[before:], self._headers[before:]
            if not isinstance(e, UnicodeDecodeError):
                raise
            # aiokafka's reader rejects a header name that is not UTF-8. The kernel takes any bytes, as Java does.
            parts: list[_Part] = []
            if not _PackedFetch(self._data, self._start).decode([batch], parts):
                raise
            self._add_all(Columns("", 0, *parts[0]).records())
            self._offsets.append(parts[0].offsets)

    def _add_all(self, records: Iterable[Any]) -> None:
        keys = self.keys
        values = self.values
        stamps = self._stamps
        # Do not collect them in a list first: Python's garbage collector would visit every object that stays alive.
        for record in records:
            keys.append(record.key)
            values.append(record.value)
            stamps.append(record.timestamp)
            if (own := record.headers) or self._any_headers:
                if not self._any_headers:
                    self._any_headers = True
                    self._headers += [()] * (len(keys) - 1)
                self._headers.append(own)

    def columns(self, topic: str, partition: int) -> tuple[Columns | None, Broken]:
        """Return all records, or None if there are none. The second value, the first broken batch, is always None:
        `add` raises for it."""
        if not self.keys:
            return None, None
        stamps = np.array(self._stamps, np.int64)
        offsets = self._offsets[0] if len(self._offsets) == 1 else np.concatenate(self._offsets)
        headers = HeaderColumn(self._headers) if self._any_headers else None
        return Columns(topic, partition, self.keys, self.values, stamps, offsets, headers), None


class _Part(NamedTuple):
    """Records in one buffer."""

    keys: PackedBytes
    values: PackedBytes
    timestamps: Int64Array
    offsets: Int64Array
    headers: Sequence[Headers] | None


class _PackedFetch:
    """The records of a completed fetch as positions in buffers.

    One call of the kernel decodes consecutive batches that are all compressed or all uncompressed. aiokafka's reader
    decodes the batches that the kernel does not.
    """

    def __init__(self, data: bytes | memoryview, start: int) -> None:
        self._data = data
        self._start = start
        self._array: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self._array.flags.writeable = False
        self._batches: list[_FetchedBatch | None] = []
        self.count = 0

    def skip(self) -> None:
        """Skip a batch without visible records."""
        self._batches.append(None)

    def add(self, batch: _FetchedBatch) -> None:
        """Add the next batch of the completed fetch; it is decoded later."""
        self._batches.append(batch)
        # Versions 0 and 1 have no number of records in the header.
        self.count += max(batch.count, 0) if batch.magic >= 2 else 1

    def columns(self, topic: str, partition: int) -> tuple[Columns | None, Broken]:
        """Return the records before the first batch that cannot be read, or None if there are none.

        The second value is that batch's index and error, or None if all batches can be read.
        """
        parts: list[_Part] = []
        broken: Broken = None
        own = [(where, batch) for where, batch in enumerate(self._batches) if batch is not None]
        at = 0
        limit = len(own)
        while at < len(own) and broken is None:
            run = self._run(own[at : at + limit])
            done = self.decode(run, parts)
            at += done
            # Otherwise each batch for aiokafka's reader would cause all batches after it to be decompressed again.
            limit = max(2 * done, 1)
            # The kernel leaves this batch to aiokafka's reader.
            if done < max(len(run), 1):
                where, batch = own[at]
                lists = _ListFetch(self._data, self._start)
                try:
                    lists.add(batch)
                # Bytes from outside can break a decompressor or a parser in any way.
                except Exception as e:
                    broken = where, e
                    break
                parts.append(_packed(lists))
                at += 1
        parts = [part for part in parts if len(part.keys)]
        if not parts:
            return None, broken
        part = parts[0] if len(parts) == 1 else _joined(parts)
        return Columns(topic, partition, *part), broken

    def _run(self, own: Sequence[tuple[int, _FetchedBatch]]) -> list[_FetchedBatch]:
        """Return the next batches that the kernel can take together: all compressed, or all uncompressed."""
        run: list[_FetchedBatch] = []
        for _, batch in own:
            if batch.magic < 2 or batch.count < 0 or batch.is_compressed != (run[0] if run else batch).is_compressed:
                break
            run.append(batch)
        return run

    def decode(self, run: Sequence[_FetchedBatch], parts: list[_Part]) -> int:
        """Add the records of these batches, up to the first batch that the kernel does not decode.

        Returns the number of batches added.
        """
        # Imported late: it loads numba.
        from penstock.shared.clients.protocol import decoding_kernel as d
        from penstock.shared.clients.protocol.packed_headers import PackedHeaders

        if not run:
            return 0
        data = self._array
        bounds = [(batch.start + RECORDS_AT, batch.stop) for batch in run]
        if run[0].is_compressed:
            data, bounds = _decompress_fetched(self._data, run)
        plan = [_plan_row(d, b, *where) for b, where in zip(run, bounds, strict=False)]
        plan = plan[: next((i for i, row in enumerate(plan) if row is None), len(plan))]
        if not plan:
            return 0
        rows = np.array(plan, np.int64)
        decoded = np.empty((d.COLUMNS, int(rows[:, d.COUNT].sum())), np.int64)
        done: int = d.decode_batches(data, rows, decoded)
        decoded = decoded[:, : int(rows[:done, d.COUNT].sum())]
        # The first batch may begin before the requested offset.
        if done and run[0].base_offset < self._start:
            decoded = np.ascontiguousarray(decoded[:, decoded[d.OFFSET] >= self._start])
        headers = PackedBytes(data, decoded[d.HEADERS_AT], decoded[d.HEADERS_LENGTH])
        parts.append(
            _Part(
                PackedBytes(data, decoded[d.KEY_AT], decoded[d.KEY_LENGTH]),
                PackedBytes(data, decoded[d.VALUE_AT], decoded[d.VALUE_LENGTH]),
                decoded[d.TIMESTAMP],
                decoded[d.OFFSET],
                PackedHeaders(headers) if headers.lengths.any() else None,
            )
        )
        return done


def _plan_row(d: Any, batch: _FetchedBatch, start: int, stop: int) -> tuple[int, ...] | None:
    """Return the row of the kernel's plan for a fetched batch, with the columns that `decoding_kernel` names.

    Returns None if the batch is too short for the number of records in its header.
    """
    # The columns are allocated by the count of the header, which a wrong batch could make arbitrarily large.
    if batch.count * d.RECORD_BYTES_MIN > stop - start:
        return None
    append_time = batch.max_timestamp if batch.attributes & LOG_APPEND_TIME else d.NO_APPEND_TIME
    offsets = batch.next_offset - batch.base_offset
    return start, stop, batch.base_offset, batch.first_timestamp, append_time, batch.count, offsets


def _decompress_fetched(
    data: bytes | memoryview, run: Sequence[_FetchedBatch]
) -> tuple[NDArray[np.uint8], list[tuple[int, int]]]:
    """Decompress batches into one buffer. Returns the buffer, and the start and end of each batch's records in it.

    Stops at the first batch that cannot be decompressed.
    """
    view = memoryview(data)
    texts: list[bytes] = []
    bounds: list[tuple[int, int]] = []
    at = 0
    for batch in run:
        try:
            text = decompress(batch.attributes & COMPRESSION_CODEC, view[batch.start + RECORDS_AT : batch.stop])
        # aiokafka's reader will raise the error.
        except Exception:
            break
        texts.append(text)
        bounds.append((at, at + len(text)))
        at += len(text)
    return np.frombuffer(b"".join(texts), np.uint8), bounds


def _packed(lists: _ListFetch) -> _Part:
    columns, _ = lists.columns("", 0)
    if columns is None:
        return _Part(PackedBytes.of([]), PackedBytes.of([]), np.empty(0, np.int64), np.empty(0, np.int64), None)
    keys = PackedBytes.of(columns.keys)
    values = PackedBytes.of(columns.values)
    return _Part(keys, values, columns.timestamps, columns.offsets, columns.headers)


def _joined(parts: Sequence[_Part]) -> _Part:
    # Imported late: it loads numba.
    from penstock.shared.common.byte_copies import copied

    headers: Sequence[Headers] | None = None
    if any(part.headers is not None for part in parts):
        headers = HeaderColumn([own for part in parts for own in (part.headers or [()] * len(part.keys))])
    # Only the strings are joined: most parts share the buffer of fetched bytes, which would be joined once for each.
    return _Part(
        PackedBytes.joined([copied(part.keys) for part in parts]),
        PackedBytes.joined([copied(part.values) for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        np.concatenate([part.offsets for part in parts]),
        headers,
    )
