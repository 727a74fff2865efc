"""A compaction's Spark task: converts ranges of changelog partitions to data files.

A task reads its ranges one after the other with Penstock's own consumer, decodes them with the changelog's reader, and
writes the rows as Parquet files below the tables' folders. Files of `state` are for one partition each; files of
`closed` and `late` have the rows of several of the task's partitions. The task returns the list of files to the driver,
whose commits make them part of the tables.

`state` receives only the newest change of each window in the range. If the window is no longer live, that is a
tombstone.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.services.spark.compaction.delta_writer import DataFile, DeltaFiles, write_files
from penstock.services.spark.errors import TaskFailure
from penstock.services.spark.table_columns import (
    CLOSED,
    DAY_MS,
    INDEXED,
    LATE,
    PROGRESS,
    STATE,
    TIMESTAMP_MS_MAX,
    lake_result_columns,
    lake_state_column,
    lake_time_column,
)
from penstock.shared.clients.consumer import Consumer
from penstock.shared.common.arrow_arrays import binary_array, codes_of
from penstock.shared.common.errors import (
    ChangelogHole,
    CorruptRecord,
    KafkaTimeout,
    OffsetOutOfRange,
    PenstockError,
    RetriableError,
)
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog import format as fmt
from penstock.shared.streams.changelog.changelog_reader import (
    ChangelogReader,
    ConfirmedChanges,
    ConfirmedCommit,
    CorruptEntry,
)
from penstock.shared.streams.changelog.format import FINAL, LIVE, REMEDY, Progress, decode_progress
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import WINDOWED, StoreSchema, check_schema
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer
from penstock.shared.streams.windows.window_columns import newest_of_each_window

# Beyond this many new changelog records, an idle partition gets a progress row. A restore would read the records
# without effect.
IDLE_RECORDS_MAX = 1_000
RANGE_BYTES_MAX = 256 * 1024 * 1024
"""Beyond this many bytes of committed entries in memory, a range ends after its last commit. Beyond this many bytes of
rows of `closed` and `late`, a task writes them before it reads its next range."""
POLL_MS = 500
POLL_RECORDS = 50_000
CONVERSION_ERRORS = (CorruptRecord, pa.ArrowInvalid)
"""The errors with which entries cannot be converted to rows."""


class ChangelogRange(NamedTuple):
    """The range of one partition to read: from `first` up to `end` (exclusive), or less if its entries are large.

    If no commit ends before `end`, the range is extended until a commit ends in it, at most to `latest`.
    """

    partition: int
    first: int
    end: int
    latest: int
    start: dict[str, Any] | None
    """The progress row whose covered offset is `first`. The reader begins with its epoch and progress."""
    newest: dict[str, Any] | None
    """The partition's newest progress row. `state` already has the changes below the row's covered offset."""
    positions: dict[str, int]
    """By table, the last changelog offset up to which the table is complete."""

    @property
    def lagging(self) -> list[str]:
        """The tables for which the task reads the range again: they lack rows of the partition that they once had."""
        return lagging_tables(self.newest, self.positions)

    @property
    def covered(self) -> int:
        """The first changelog offset whose changes of live rows the task must add to `state`."""
        return self.first if self.newest is None else int(self.newest["changelog_offset"])


def lagging_tables(progress_row: Mapping[str, Any] | None, positions: Mapping[str, int]) -> list[str]:
    """Return the tables that lack rows of a partition which they once had, as after an older copy was put back.

    A table lags if its position is lower than the last changelog offset that `progress_row`, a progress row of the
    partition, has for it.
    """
    # By table, the last changelog offset.
    appended = {} if progress_row is None else json.loads(progress_row["appended"])
    return sorted(table for table, last in appended.items() if table not in positions or positions[table] < last)


class CompactionTaskOptions(NamedTuple):
    """Options of all tasks of a compaction: the changelog, and the folder of the tables."""

    kafka: KafkaSettings
    topic: str
    topic_id: str
    idle_ms_max: int
    folder: str
    storage_options: Mapping[str, str]
    retention_days: int | None = None

    def write(self, table: str, batches: Sequence[pa.RecordBatch], partition: int | None = None) -> list[DataFile]:
        """Write rows of a table, such as `closed/visits`, to files. Rows of `state` all belong to `partition`."""
        if not batches:
            return []
        kind = table.partition("/")[0]
        files = DeltaFiles(f"{self.folder}/{table}", self.storage_options, INDEXED[kind])
        return list(write_files(files, kind, batches, partition))


class PartitionResult(msgspec.Struct, frozen=True):
    """The result of a task for one partition: the offset after its last commit, and the files of `state`."""

    partition: int
    covered_offset: int
    entries: int
    deleted: int
    """The number of tombstones in `files`."""
    foreign_records: int
    read_to: int
    """The offset up to which the range was read."""
    files: list[DataFile]
    """Empty if the partition has nothing to write."""
    stores: tuple[StoreSchema, ...]
    """The stores of the last commit."""


class CompactionTaskResult(msgspec.Struct, frozen=True):
    """The result of a task: the results of its partitions, and by table the files of `closed` and `late`."""

    partitions: list[PartitionResult]
    files: dict[str, list[DataFile]]
    failure: TaskFailure | None = None


def compact_changelog_ranges(options: CompactionTaskOptions) -> Callable[[bytes], Iterator[bytes]]:
    """Return the function of a compaction's task, from a list of ranges to a CompactionTaskResult, both as msgpack."""

    def compact_ranges_of_task(ranges: bytes) -> Iterator[bytes]:
        try:
            found = asyncio.run(compact_ranges(options, msgspec.msgpack.decode(ranges, type=list[ChangelogRange])))
        # Spark attempts a task again if it raises.
        except RetriableError:
            raise
        # Each attempt would raise the same error. So the error is returned, and the driver raises it before any
        # commit.
        except PenstockError as e:
            found = CompactionTaskResult([], {}, TaskFailure.of(e))
        yield msgspec.msgpack.encode(found)

    return compact_ranges_of_task


async def compact_ranges(options: CompactionTaskOptions, ranges: Sequence[ChangelogRange]) -> CompactionTaskResult:
    """Read ranges and write their files.

    Raises ChangelogHole, CorruptRecord, SchemaMismatch, LakeUnavailable, or an error of Kafka such as KafkaTimeout.
    """
    results = []
    files = defaultdict[str, list[DataFile]](list)
    # Rows of `closed` and `late` wait for the task's other ranges: a file for several of them keeps the tables' files
    # few.
    appended = defaultdict[str, list[pa.RecordBatch]](list)

    def write_appended() -> None:
        for table in list(appended):
            files[table] += options.write(table, appended.pop(table))

    for of in ranges:
        results.append(await _compact_range(options, of, appended))
        if sum(batch.nbytes for batches in appended.values() for batch in batches) > RANGE_BYTES_MAX:
            write_appended()
    write_appended()
    return CompactionTaskResult(results, files)


async def _compact_range(
    options: CompactionTaskOptions, of: ChangelogRange, appended: dict[str, list[pa.RecordBatch]]
) -> PartitionResult:
    """Read a range, write its rows of `state`, and add its other rows to `appended`."""
    # Each range has its own consumer: a consumer that changes its partition waits for its last fetch from the node.
    async with changelog_consumer(options.kafka) as consumer:
        try:
            compaction = await read_range(consumer, options, of)
        except OffsetOutOfRange as e:
            raise ChangelogHole(f"changelog records were deleted while they were read: {e}") from e
    rows = compaction.rows(options)
    # Files of `state` belong to one partition each.
    result = compaction.result(options.write(STATE, rows.pop(STATE, []), of.partition))
    for table, batches in rows.items():
        appended[table] += batches
    return result


class PartitionCompaction:
    """The entries of one partition's range, collected as they are read."""

    def __init__(self, topic: str, of: ChangelogRange) -> None:
        self.topic = topic
        self.range = of
        epoch = 0 if of.start is None else of.start["epoch"]
        progress = None if of.start is None else decode_progress(of.start["progress"].encode())
        self.reader = ChangelogReader(self._append_confirmed_entries, epoch=epoch, progress=progress)
        self.parts: list[ConfirmedChanges] = []
        self._bytes = 0
        self._last_buffers: tuple[NDArray[np.uint8], ...] = ()
        self.commit: ConfirmedCommit | None = None
        self.covered_offset = of.first
        self.deleted = 0
        # Those at `first`, not the newest: the range of a table that lags may end before the newest progress row.
        self.appended = {} if of.start is None else json.loads(of.start["appended"])
        self.read_to = of.first
        self.stores: tuple[StoreSchema, ...] | None = None if progress is None else progress.stores

    @property
    def is_full(self) -> bool:
        """Whether the range is to end here: a commit has ended, and its entries take more than RANGE_BYTES_MAX."""
        return self.commit is not None and self._bytes > RANGE_BYTES_MAX

    def feed(self, offsets: Int64Array, keys: Sequence[bytes | None], values: Sequence[bytes | None]) -> None:
        """Take the next records of the range.

        Raises CorruptRecord, which names the record, for an invalid changelog entry. Raises SchemaMismatch if a commit
        has stores that cannot follow those before it (see `check_schema`).
        """
        try:
            self.reader.feed(offsets, keys, values)
        except CorruptEntry as e:
            raise CorruptRecord(self.error_at(e.offset, f"{e.reason}. {REMEDY}")) from None

    def error_at(self, offset: int, reason: str) -> str:
        """Return an error message with the partition, the offset and the reason."""
        return f"{self.topic}-{self.range.partition} at offset {offset}: {reason}"

    def _append_confirmed_entries(self, confirmed: ConfirmedChanges) -> None:
        if len(confirmed):
            # The keys and states of a fetch may be in one buffer, and consecutive parts may be of one fetch.
            counted = list(self._last_buffers)
            self._last_buffers = (confirmed.keys.data, confirmed.states.data)
            for data in self._last_buffers:
                if not any(np.may_share_memory(data, other) for other in counted):
                    self._bytes += data.nbytes
                    counted.append(data)
            self.parts.append(confirmed)
        if confirmed.commits:
            self.commit = confirmed.commits[-1]
            # The table covers whole commits only. Records after the last commit's end may belong to a commit whose
            # progress record is not read yet; the next compaction reads them again.
            self.covered_offset = self.commit.offset + 1
            for one in confirmed.commits:
                # An upgrade within the range may append aggregations. Any other change would mix rows of different
                # stores in one table.
                if self.stores is not None:
                    check_schema(self.stores, one.progress.stores)
                self.stores = one.progress.stores

    def rows(self, options: CompactionTaskOptions) -> dict[str, list[pa.RecordBatch]]:
        """Return the new rows by table; empty if there is nothing to write.

        Raises CorruptRecord, which names the entry, if an entry cannot be decoded, or if a closed window is not within
        the years 1970 to 9999.
        """
        found = defaultdict[str, list[pa.RecordBatch]](list)
        if self.commit is None or not self._has_rows_to_write(self.commit):
            return found
        for table, rows in self._table_rows(options):
            found[table].append(rows)
        found[STATE].append(self._progress_row(options, self.commit, sum(map(len, found[STATE]))))
        return found

    def result(self, files: list[DataFile]) -> PartitionResult:
        """Return the partition's result with the written files of `state`."""
        return PartitionResult(
            partition=self.range.partition,
            covered_offset=self.covered_offset,
            entries=self.reader.entries_applied,
            deleted=self.deleted,
            foreign_records=self.reader.foreign_records,
            read_to=self.read_to,
            files=files,
            stores=self.stores or (),
        )

    def _has_rows_to_write(self, commit: ConfirmedCommit) -> bool:
        """Return whether a progress row must be written, with or without other rows.

        A range usually needs none if its commits have no entries and only advance the times of wall-clock punctuation.
        """
        newest = self.range.newest
        of = self.range
        # 1. There is something new: the first progress row, entries, or another epoch.
        if newest is None or self.reader.entries_applied or commit.epoch != newest["epoch"]:
            return True
        # 2. The range ends before the changelog does, or tables catch up with it. Without a progress row or new
        #    positions, the next compaction would read the same range again, and never get past it.
        if of.end < of.latest or self.covered_offset < of.covered:
            return True
        # 3. Commits without entries. They are written if they change more than the times of punctuation, or if a
        #    restore would otherwise read too many records without effect.
        before = decode_progress(newest["progress"].encode())
        return self.covered_offset - self.range.covered > IDLE_RECORDS_MAX or _lasting_progress(
            commit.progress
        ) != _lasting_progress(before)

    def _progress_row(self, options: CompactionTaskOptions, commit: ConfirmedCommit, rows: int) -> pa.RecordBatch:
        newest = self.range.newest
        row = {
            "row": "progress",
            "partition": self.range.partition,
            "changelog_offset": self.covered_offset,
            "epoch": commit.epoch,
            "progress": msgspec.json.encode(commit.progress).decode(),
            "topic_id": options.topic_id,
            "appended": json.dumps(self.appended),
            "rewritten_rows": rows if newest is None else newest["rewritten_rows"],
            "added_rows": 0 if newest is None else newest["added_rows"] + rows,
            "added_files": 0 if newest is None else newest["added_files"] + 1,
            "expired_ms": self._expiry_limit_ms(options, commit.progress.stream_time_ms),
        }
        return pa.RecordBatch.from_pylist([row], PROGRESS)

    def _expiry_limit_ms(self, options: CompactionTaskOptions, time_ms: int) -> int:
        """Return the limit in ms, -1 for none: closed windows that end before it are not kept. It never decreases."""
        expired = -1 if self.range.newest is None else int(self.range.newest["expired_ms"])
        # A time beyond the year 9999 comes from a wrong timestamp. It would let windows expire that are still wanted.
        if options.retention_days is None or time_ms > TIMESTAMP_MS_MAX:
            return expired
        # Windows that were deleted do not come back if the retention is extended. Readers need the highest limit so
        # far, to leave out late records of deleted windows.
        return max(expired, time_ms - options.retention_days * DAY_MS)

    def _table_rows(self, options: CompactionTaskOptions) -> Iterator[tuple[str, pa.RecordBatch]]:
        for part in self._newest_live_entries():
            yield STATE, self._make_record_batch(part, self._live_rows)
        for operation, kind, columns in ((FINAL, CLOSED, self._closed_rows), (fmt.LATE, LATE, self._late_rows)):
            for part in self.parts:
                for number, store in enumerate(part.stores):
                    table = f"{kind}/{store.name}"
                    is_own = (part.operations == operation[0]) & (part.numbers == number)
                    if store.kind not in WINDOWED or not is_own.any():
                        continue
                    # Include rows that the table already has. The progress row records the table's last row after
                    # this compaction, so that a table restored from an older copy is recognized.
                    last = int(part.offsets[is_own].max())
                    self.appended[table] = max(last, self.appended.get(table, last))
                    # An earlier compaction may have appended rows and ended before its commit of `state`. Appending
                    # them again would duplicate closed windows.
                    if table in self.range.positions:
                        is_own &= part.offsets > self.range.positions[table]
                    if is_own.any():
                        rows = self._make_record_batch(part.at(is_own), columns, number)
                        topic_id = pa.array([options.topic_id] * len(rows), pa.string())
                        yield table, rows.append_column("topic_id", topic_id)

    def _newest_live_entries(self) -> Iterator[ConfirmedChanges]:
        """Yield each window's newest entry from `covered` on, by store, in parts written with the same stores."""
        # For each store:
        # 1. Find the last entry of each key and start over all parts: older entries need no row.
        # 2. Go back to the parts, because each has the state columns of its own stores.
        # 3. Leave out entries below the covered offset. `state` has them, and they are read only for lagging tables.
        parts = [part.of_windows() for part in self.parts]
        for number in range(len(self.stores or ())):
            own = [part.at(part.numbers == number) for part in parts]
            own = [part for part in own if len(part)]
            if not own:
                continue
            # The keys of all parts may be more bytes than one `binary` array can hold.
            keys = pa.chunked_array([binary_array(part.keys).cast(pa.large_binary()) for part in own])
            newest = newest_of_each_window(codes_of(keys), np.concatenate([part.starts for part in own]))
            at = 0
            for part in own:
                indexes = newest[(newest >= at) & (newest < at + len(part))] - at
                at += len(part)
                found = part.at(indexes[part.offsets[indexes] >= self.range.covered])
                if len(found):
                    yield found

    def _make_record_batch(
        self,
        part: ConfirmedChanges,
        columns: Callable[[ConfirmedChanges, StoreSchema], dict[str, Any]],
        number: int | None = None,
    ) -> pa.RecordBatch:
        store = part.stores[int(part.numbers[0]) if number is None else number]
        try:
            found = columns(part, store)
        # An array conversion does not name the invalid row. So the rows are converted one by one to find it.
        except CONVERSION_ERRORS as e:
            raise CorruptRecord(self._describe_first_invalid_entry(part, store, columns, e)) from None
        found["partition"] = pa.array(np.full(len(part), self.range.partition, np.int32))
        found["changelog_offset"] = pa.array(part.offsets)
        return pa.record_batch(list(found.values()), names=list(found))

    def _describe_first_invalid_entry(
        self, part: ConfirmedChanges, store: StoreSchema, columns: Any, error: Exception
    ) -> str:
        for index in range(len(part)):
            try:
                columns(part.at(np.array([index])), store)
            except CONVERSION_ERRORS as e:
                return self.error_at(int(part.offsets[index]), f"{e}. {REMEDY}")
        return self.error_at(int(part.offsets[0]), str(error))

    def _live_rows(self, part: ConfirmedChanges, store: StoreSchema) -> dict[str, Any]:
        is_live = part.operations == LIVE[0]
        self.deleted += int(len(part) - is_live.sum())
        states = _states_of_entries(part, store, is_live)
        return {
            "row": pa.array(["window"] * len(part)),
            "store": pa.array([store.name] * len(part)),
            "key": binary_array(part.keys),
            "start_ms": pa.array(part.starts),
            "end_ms": pa.array(part.ends, mask=None if is_live.all() else ~is_live),
            store.name: states,
            "live": pa.array(is_live),
        }

    def _closed_rows(self, part: ConfirmedChanges, store: StoreSchema) -> dict[str, Any]:
        # Timestamps end with the year 9999. Fail at the first window beyond it, before the table has a wrong time.
        beyond = np.flatnonzero((part.starts < 0) | (part.starts > TIMESTAMP_MS_MAX) | (part.ends > TIMESTAMP_MS_MAX))
        if len(beyond):
            first = int(beyond[0])
            raise CorruptRecord(
                f"a closed window from {part.starts[first]} to {part.ends[first]} ms: timestamps end with the year "
                "9999. Were nanoseconds sent as milliseconds? Set max_future_ms to reject such records"
            )
        states = lake_state_column(StateCodec(store.state_columns()), part.states)
        return {
            **_key_column(part.keys, store),
            "window_start": lake_time_column(part.starts),
            "window_end": lake_time_column(part.ends),
            **lake_result_columns(store, states),
            "closed_at": lake_time_column(part.closed_at),
            "state": states,
        }

    def _late_rows(self, part: ConfirmedChanges, store: StoreSchema) -> dict[str, Any]:
        # A negative length means no state: an aggregation rejected the value. In late entries, `starts` has the
        # record's time, and `ends` its source offset, -1 if it is not from the source topic.
        states = _states_of_entries(part, store, part.states.lengths >= 0)
        missed = part.missed
        starts = np.frombuffer(binary_array(missed).buffers()[2] or b"", ">i8").astype(np.int64)
        ends = np.zeros(len(part) + 1, np.int32)
        np.cumsum(missed.lengths // fmt.START.size, out=ends[1:])
        return {
            **_key_column(part.keys, store),
            "event_time": lake_time_column(part.starts),
            "missed": pa.ListArray.from_arrays(pa.array(ends), lake_time_column(starts)),
            **lake_result_columns(store, states),
            "state": states,
            "source_offset": pa.array(part.ends, mask=part.ends < 0),
        }


async def read_range(consumer: Consumer, options: CompactionTaskOptions, of: ChangelogRange) -> PartitionCompaction:
    """Read a range from `first` to `end`, or further if transaction markers or aborted records take offsets in it.

    While no commit has ended, reading continues in steps of the range's length until it reaches `latest`. Reading stops
    before `end` if the entries are too large (see RANGE_BYTES_MAX).
    Raises KafkaTimeout if the position does not change for `idle_ms_max`, OffsetOutOfRange if records of the range
    were deleted before they were read, and the errors of `PartitionCompaction.feed`.
    """
    compaction = PartitionCompaction(options.topic, of)
    at = TopicPartition(options.topic, of.partition)
    consumer.assign([at])
    consumer.seek(at, of.first)
    loop = asyncio.get_running_loop()
    position = of.first
    moved = loop.time()
    # A range without a complete commit covers nothing, so the next compaction would read it again. Then continue
    # until a commit ends.
    while not compaction.is_full and (position < of.end or (position < of.latest and compaction.commit is None)):
        end = of.end if position < of.end else min(of.latest, position + of.end - of.first)
        for columns in (await consumer.poll(POLL_MS, min(POLL_RECORDS, end - position))).values():
            compaction.feed(columns.offsets, columns.keys, columns.values)
        before = position
        # Use the position, not the last record's offset: transaction markers and aborted records take offsets that no
        # poll returns.
        position = await consumer.position(at)
        if position > before:
            moved = loop.time()
        # The range ends at most at the last stable offset, so no open transaction precedes its end and records must
        # arrive.
        elif (loop.time() - moved) * 1000 > options.idle_ms_max:
            raise KafkaTimeout(
                f"{at}: no records for {options.idle_ms_max} ms: read up to offset {position} of {of.end}"
            )
    compaction.read_to = position
    return compaction


def _lasting_progress(progress: Progress) -> Progress:
    return msgspec.structs.replace(progress, grids_ms={}, wall_ms=0)


def _key_column(keys: PackedBytes, store: StoreSchema) -> dict[str, Any]:
    raw = binary_array(keys)
    return {"key": raw.cast(pa.string())} if store.key == "string" else {"key_bytes": raw}


def _states_of_entries(part: ConfirmedChanges, store: StoreSchema, has_one: NDArray[np.bool_]) -> pa.StructArray:
    """Return the states of changelog entries as an Arrow column; null for the entries without a state."""
    # `states` has no element for rows without a state. With `has_one` true, false, true, the rows take the elements
    # 0, null, 1.
    states = lake_state_column(StateCodec(store.state_columns()), part.states.at(has_one))
    return states if has_one.all() else states.take(pa.array(np.cumsum(has_one) - 1, mask=~has_one))
