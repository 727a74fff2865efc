"""Restores a task's state from the confirmed changes of a changelog, and from a snapshot before it.

A store may have got a further aggregation after a window was written. In such a window that aggregation begins empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial, reduce
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from penstock.shared.common.arrow_arrays import ARROW_TYPES, packed
from penstock.shared.common.errors import CorruptRecord, SchemaMismatch
from penstock.shared.common.json_decoding import JSON_ERRORS
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations.aggregation import Aggregation, ColumnType
from penstock.shared.streams.changelog.changelog_reader import Change, ConfirmedChanges, apply_one_by_one
from penstock.shared.streams.changelog.format import DELETED, FINAL, LIVE, Progress
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import TYPES_GROW, StoreSchema, check_restorable
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.windows.key_index import are_ascii
from penstock.shared.streams.windows.window_store import WindowStore


def restore_progress(task: StreamTask, progress: Progress) -> None:
    """Check the stored schema, and restore times, offsets and the grids of schedules; call it before `initialize`."""
    check_restorable(progress.stores, task.schemas)
    task.sources = dict(progress.sources)
    task.source_ids = dict(progress.source_ids)
    task.idle_ms = progress.idle_ms
    task.input = progress.input
    task.schedules.restore(progress.grids_ms)
    task.times.restore(progress)


def restore_changes(task: StreamTask, confirmed: ConfirmedChanges) -> None:
    """Apply confirmed changes, except late records, to a task's stores.

    Raises CorruptEntry for a key or state that cannot be decoded, and SchemaMismatch for a state that does not fit the
    type of its store's rows. The states of stores on disk are usually not decoded here, but when they are read
    (`restore_change`).
    """
    confirmed = confirmed.of_windows()
    for number in np.unique(confirmed.numbers).tolist():
        written = confirmed.stores[number]
        own = confirmed.at(np.flatnonzero(confirmed.numbers == number)) if len(confirmed.stores) > 1 else confirmed
        store = task.stores[written.name]
        schema = task.topology.stores[written.name].schema
        known = {column.name for column in written.state_columns()}
        # Columns can be replayed as they are if they have all of the store's aggregations. Otherwise
        # `_widen_restored_states` adds those that were appended later.
        if isinstance(store, WindowStore) and all(column.name in known for column in schema.state_columns()):
            try:
                _replay_changes(store, schema, own, written)
                continue
            except (CorruptRecord, *JSON_ERRORS):
                # Nothing has changed. Applied one by one, the invalid entry is found.
                pass
        apply_one_by_one(partial(restore_change, task))(own)
        # As `replay` does. A restore and a standby do not commit, so they would keep the key of each closed window.
        if isinstance(store, WindowStore):
            store.table.release_keys()


def _replay_changes(store: WindowStore, schema: StoreSchema, changes: ConfirmedChanges, written: StoreSchema) -> None:
    if schema.key == "string" and not are_ascii(changes.keys):
        for key in changes.keys.tolist():
            key.decode()
    codec = _restored_states_codec(written)
    names = [column.name for column in written.state_columns()]
    is_live = changes.operations == LIVE[0]

    def read_states(indexes: Int64Array) -> list[Any]:
        # A state that a later one replaces must be valid too.
        all_live = codec.unpacked_columns(changes.states.at(is_live))
        own = np.flatnonzero(is_live).searchsorted(indexes)
        columns = dict(zip(names, all_live, strict=True))
        return [_select_restored_states(columns[column.name], own) for column in schema.state_columns()]

    store.replay(changes.keys, changes.starts, changes.ends, is_live, read_states)


def _select_restored_states(column: Any, indexes: Int64Array) -> Any:
    """Return a state column of the restored windows at these indexes."""
    return column[indexes] if isinstance(column, np.ndarray) else [column[index] for index in indexes.tolist()]


def restore_change(task: StreamTask, change: Change) -> None:
    """Apply one confirmed change of a changelog to a task's store.

    Raises CorruptRecord if its key or state cannot be decoded, and SchemaMismatch if its state does not fit the type of
    the store's rows. If the store is on disk and has got no further aggregation, the state is not decoded here, but
    when it is read.
    """
    written = change.written_as
    own = task.topology.stores[change.store].schema
    try:
        key = _decode_restored_key(task, change.store, change.key)
        # The disk has the changelog's own bytes. An invalid state raises StateStoreFailed when it is read.
        if task.local is not None and _has_same_states(written, own):
            state = change.state if change.operation == LIVE else None
            task.local.restore_raw(change.store, change.key, change.start, change.end, state)
        elif change.operation == LIVE:
            columns = _widen_restored_states(task, written, _restored_states_codec(written).unpack(change.state))
            restore_window(task, change.store, key, change.start, change.end, columns)
        else:
            assert change.operation in (DELETED, FINAL)
            task.stores[change.store].unload(key, change.start)
    except msgspec.ValidationError as e:
        raise SchemaMismatch(f"store {change.store!r}: {e}. {TYPES_GROW}") from e
    except JSON_ERRORS as e:
        raise CorruptRecord(f"an entry of store {change.store!r} cannot be read: {e}") from e


def restore_window(
    task: StreamTask, store: str, key: str | bytes, start: int, end: int, columns: Sequence[Any]
) -> None:
    """Restore one live window of a task from column values. Those of an aggregation without a state are None."""
    states = []
    at = 0
    for aggregation in task.topology.stores[store].aggregations:
        own = columns[at : at + len(aggregation.state_columns)]
        states.append(aggregation.initial() if None in own else aggregation.from_columns(own))
        at += len(own)
    task.stores[store].load(key, start, end, states)


def restore_windows(task: StreamTask, written: StoreSchema, batch: pa.RecordBatch) -> None:
    """Apply the changes of windows in `batch` to a task's store, in order.

    The columns are key, start_ms, end_ms, live, and the state columns of `written`, the store's schema when the changes
    were written. A row replaces the window with the same key and start, or removes it if it is not live.

    Raises CorruptRecord if a key or a state cannot be decoded, and SchemaMismatch if a state does not fit the type of
    the store's rows.
    """
    store = task.stores[written.name]
    own = task.topology.stores[written.name].schema
    try:
        if isinstance(store, WindowStore):
            _replay_rows(task, store, own, batch)
            return
        keys, starts, ends, is_live, *states = (column.to_pylist() for column in batch.columns)
        rows = zip(*states, strict=True) if states else iter([()] * batch.num_rows)
        for raw, start, end, live, values in zip(keys, starts, ends, is_live, rows, strict=True):
            key = _decode_restored_key(task, written.name, raw)
            if live:
                restore_window(task, written.name, key, start, end, _widen_restored_states(task, written, values))
            else:
                store.unload(key, start)
    except msgspec.ValidationError as e:
        raise SchemaMismatch(f"store {written.name!r}: {e}. {TYPES_GROW}") from e
    except JSON_ERRORS as e:
        raise CorruptRecord(f"a row of store {written.name!r} cannot be read: {e}") from e


def _replay_rows(task: StreamTask, store: WindowStore, schema: StoreSchema, batch: pa.RecordBatch) -> None:
    # A store has no null keys.
    keys = packed(batch.column("key").fill_null(b""))
    if schema.key == "string" and not are_ascii(keys):
        for key in keys.tolist():
            key.decode()
    aggregations = task.topology.stores[schema.name].aggregations

    def read_row_states(indexes: Int64Array) -> list[Any]:
        live = batch if len(indexes) == batch.num_rows else batch.take(pa.array(indexes))
        return [_snapshot_column_values(column) for column in _state_columns_of(live, schema, aggregations)]

    is_live = batch.column("live").to_numpy(zero_copy_only=False)
    starts = batch.column("start_ms").to_numpy()
    ends = batch.column("end_ms").fill_null(0).to_numpy()
    store.replay(keys, starts, ends, is_live, read_row_states)


def _state_columns_of(
    batch: pa.RecordBatch, schema: StoreSchema, aggregations: Sequence[Aggregation[Any]]
) -> Iterator[pa.Array]:
    """Yield the state columns of `schema`; for an aggregation without state in `batch`, its initial state."""
    all_columns = iter(schema.state_columns())
    for aggregation in aggregations:
        own = [next(all_columns) for _ in aggregation.state_columns]
        columns = [_column_or_nulls(batch, *column) for column in own]
        if any(column.null_count for column in columns):
            # The import takes a tenth of a second, which other restores and each start of a worker save.
            import pyarrow.compute as pc

            is_null = reduce(pc.or_, [column.is_null() for column in columns])
            initial = aggregation.to_columns(aggregation.initial())
            for i, value in enumerate(initial):
                columns[i] = pc.if_else(is_null, pa.scalar(value, ARROW_TYPES[own[i].type]), columns[i])
        yield from columns


def _column_or_nulls(batch: pa.RecordBatch, name: str, type_: ColumnType) -> pa.Array:
    return batch.column(name) if name in batch.schema.names else pa.nulls(batch.num_rows, ARROW_TYPES[type_])


def _has_same_states(written: StoreSchema, own: StoreSchema) -> bool:
    """Return whether states written with a schema that `check_restorable` has accepted have the columns of `own`."""
    # The accepted schema may lack aggregations, and the others are the same.
    return len(written.aggregations) == len(own.aggregations)


def _widen_restored_states(task: StreamTask, written: StoreSchema, values: Sequence[Any]) -> Sequence[Any]:
    """Widen a restored state to the columns of the task's store; columns that `written` lacks are None."""
    own = task.topology.stores[written.name].schema
    if _has_same_states(written, own):
        return values
    known = dict(zip((column.name for column in written.state_columns()), values, strict=True))
    return [known.get(column.name) for column in own.state_columns()]


def _snapshot_column_values(column: pa.Array) -> Any:
    """Return a column of a snapshot as a store restores it: a list of bytes, or an array."""
    return column.to_pylist() if pa.types.is_binary(column.type) else column.to_numpy()


@lru_cache
def _restored_states_codec(written: StoreSchema) -> StateCodec:
    """Return the codec of states that were written with this schema."""
    return StateCodec(written.state_columns())


def _decode_restored_key(task: StreamTask, store: str, key: bytes) -> str | bytes:
    """Return a changelog key as the store's key."""
    return key.decode() if task.topology.stores[store].schema.key == "string" else key
