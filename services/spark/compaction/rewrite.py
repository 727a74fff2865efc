"""Rewrites partitions of `state`, in Spark's tasks: only live rows are left, each once, and progress rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.services.spark.compaction.delta_writer import FILE_ROWS, DataFile, DeltaFiles, sortable_chunks
from penstock.services.spark.table_columns import INDEXED, PROGRESS, STATE
from penstock.shared.common.arrow_arrays import codes_of
from penstock.shared.common.row_positions import key_hash
from penstock.shared.streams.windows.window_columns import newest_of_each_window

# A partition with more rows is rewritten in several passes, to bound the memory.
PASS_ROWS = 5_000_000
# So is a partition whose compressed files have more bytes.
PASS_BYTES = 128 * 1024 * 1024
# Multiplication by this odd number spreads the windows evenly over the passes.
SPREAD = -7046029254386353131


class RewriteInput(NamedTuple):
    """A partition to rewrite: its files, their rows and bytes, and the progress rows to keep, the newest first."""

    partition: int
    paths: list[str]
    rows: int
    size: int
    progress: list[dict[str, Any]]


def rewrite(folder: str, options: Mapping[str, str]) -> Callable[[bytes], Iterator[bytes]]:
    """Return the function of a task that rewrites.

    It takes a list of `RewriteInput` and yields a list of DataFile for each of them, all as msgpack.
    """

    def rewrite_partitions(inputs: bytes) -> Iterator[bytes]:
        for one in msgspec.msgpack.decode(inputs, type=list[RewriteInput]):
            yield msgspec.msgpack.encode(list(_write_rewritten_files(DeltaFiles(folder, options, INDEXED[STATE]), one)))

    return rewrite_partitions


def _write_rewritten_files(files: DeltaFiles, one: RewriteInput) -> Iterator[DataFile]:
    # A pass holds its rows in memory. More passes read the same files more often, but bound the memory.
    passes = max(one.rows // PASS_ROWS, one.size // PASS_BYTES) + 1
    total = 0
    for nth in range(passes):
        parts = [_select_window_rows_of_pass(files.read(path), nth, passes) for path in one.paths]
        live = rows_to_keep(pa.concat_tables(parts, promote_options="permissive"))
        total += len(live)
        live = live.append_column("partition", pa.repeat(one.partition, len(live)).cast(pa.int32()))
        for part in sortable_chunks(live.to_batches()):
            # A restore reads the rows by ranges of offsets, and skips files and row groups without such rows.
            ordered = pa.Table.from_batches(part).sort_by("changelog_offset")
            for at in range(0, len(ordered), FILE_ROWS):
                yield files.write(ordered.slice(at, FILE_ROWS).to_batches(), one.partition)
    # The counters start again: the next rewrite is due relative to the rows that are left now.
    newest = one.progress[0] | {"rewritten_rows": total, "added_rows": 0, "added_files": 0}
    progress = pa.RecordBatch.from_pylist([newest, *one.progress[1:]], PROGRESS)
    yield files.write([progress], one.partition)


def _select_window_rows_of_pass(rows: pa.Table, nth: int, passes: int) -> pa.Table:
    """Return the window rows that the pass `nth` of `passes` rewrites. All rows of one window are in the same pass."""
    windows = rows.filter(pc.equal(rows.column("row"), "window"))
    # A file with progress rows alone has no columns of windows.
    if passes == 1 or not len(windows):
        return windows
    # Split by key and start, since one key may have most windows, and all rows of a store without windows start at 0.
    # Starts are often multiples of the window's size, so their lower bits do not spread: multiply first and use the
    # higher bits.
    hashes = np.fromiter(map(key_hash, windows.column("key").to_pylist()), np.int64, len(windows))
    starts = windows.column("start_ms").to_numpy().astype(np.int64)
    return windows.filter(pa.array(((hashes + starts) * np.int64(SPREAD) >> 33) % passes == nth))


def rows_to_keep(rows: pa.Table) -> pa.Table:
    """Return the rows that a rewrite of `state` keeps: the newest row of each window, if that row is live."""
    if not len(rows):
        return rows
    keys = codes_of(rows.column("key").cast(pa.large_binary()))
    stores = codes_of(rows.column("store"))
    # `newest_of_each_window` takes the last row of a window, so the newest must come last.
    order = np.argsort(rows.column("changelog_offset").to_numpy(), kind="stable")
    windows = keys * (int(stores.max()) + 1) + stores
    newest = order[newest_of_each_window(windows[order], rows.column("start_ms").to_numpy()[order])]
    is_kept = np.zeros(len(rows), np.bool_)
    is_kept[newest] = True
    # A tombstone is needed only as long as older rows of its window exist. All of them are in this rewrite.
    is_kept &= rows.column("live").to_numpy()
    # Arrow cannot take rows from a column of more than 2 GiB, but can filter it.
    return rows.filter(pa.array(is_kept))
