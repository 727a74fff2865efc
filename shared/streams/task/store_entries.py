"""Encodes a store's changes as the changelog entries of one commit, in the order that readers rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.changelog.entry_columns import EntryColumns, pack_values
from penstock.shared.streams.changelog.format import (
    DELETED,
    ENVELOPE,
    FINAL,
    FORMAT_VERSION,
    LENGTH,
    LIVE,
    encode_deleted,
    encode_live,
)
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.state_store import RowChanges, StateStore, StateStoreRow
from penstock.shared.streams.windows.object_states import ChangelogColumn
from penstock.shared.streams.windows.window_columns import WindowColumns
from penstock.shared.streams.windows.window_descriptions import describe_window
from penstock.shared.streams.windows.window_store import WindowStore


def encode_row_store(builder: StoreBuilder, number: int, changes: RowChanges, epoch: int, commit: int) -> EntryColumns:
    """Encode the changes of a table or a join: deletions, then live rows.

    Raises ProcessingFailed, which names the row, if a state cannot be encoded.
    """
    codec = StateCodec(builder.schema.state_columns())

    def encode_state(row: StateStoreRow) -> bytes:
        try:
            states = zip(builder.aggregations, row.states, strict=True)
            return codec.pack([value for a, s in states for value in a.to_columns(s)])
        except Exception as e:
            raise ProcessingFailed(_encoding_error(builder.schema.name, row.key, row.start, row.end, e)) from e

    deleted = [(_encode_key(key), encode_deleted(number, epoch, commit, start)) for key, start in changes.deleted]
    live = [
        (_encode_key(s.key), encode_live(number, epoch, commit, s.start, s.end, encode_state(s))) for s in changes.live
    ]
    return EntryColumns.of([*deleted, *live])


def _encode_key(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()


def encode_stores(
    builders: Mapping[str, StoreBuilder], stores: Mapping[str, StateStore], epoch: int, commit: int
) -> tuple[EntryColumns, int]:
    """Return the entries of all stores' changes, and the number of closed windows among them."""
    parts: list[EntryColumns] = []
    closed = 0
    for number, (name, store) in enumerate(stores.items()):
        if isinstance(store, WindowStore | PersistentWindowStore):
            own, finals = encode_window_store(store.windows, number, epoch, commit)
        else:
            tracks: Any = store
            own = encode_row_store(builders[name], number, tracks.changes(), epoch, commit)
            finals = 0
        parts.append(own)
        closed += finals
    return EntryColumns.joined(parts), closed


def encode_window_store(store: WindowStore, number: int, epoch: int, commit: int) -> tuple[EntryColumns, int]:
    """Encode a window store's changes, live windows last. Also return the number of closed windows among them."""
    finals = store.finals()
    live = store.live()
    keys, starts = store.deleted()

    def make_entries(
        operation: bytes, of: PackedBytes, bounds: Sequence[Int64Array], states: Sequence[ChangelogColumn]
    ) -> EntryColumns:
        head = ENVELOPE.pack(FORMAT_VERSION, operation, number, epoch, commit)
        return EntryColumns(of, _pack_window_values(head, bounds, states))

    # Finals and deletions come before live windows. A key's closed session and its next live one may have the same
    # start, and a final or a deletion after the live one would remove it.
    parts: list[EntryColumns] = []
    if len(finals):
        bounds = [finals.starts, finals.ends, finals.closed_at]
        parts.append(make_entries(FINAL, finals.keys, bounds, _encode_window_states(store, finals)))
    if len(keys):
        parts.append(make_entries(DELETED, keys, [starts], ()))
    if len(live):
        parts.append(make_entries(LIVE, live.keys, [live.starts, live.ends], _encode_window_states(store, live)))
    return EntryColumns.joined(parts), len(finals)


def _encode_window_states(store: WindowStore, windows: WindowColumns) -> Sequence[ChangelogColumn]:
    """Return the state columns of windows.

    Raises ProcessingFailed, which names the window, if a state cannot be encoded.
    """
    columns = store.columns
    try:
        return columns.to_changelog(windows.columns)
    except Exception:
        for raw, start, end, *cells in windows.tuples():
            try:
                for aggregation, state in zip(columns.aggregations, columns.states(cells), strict=True):
                    aggregation.to_columns(state)
            except Exception as e:
                raise ProcessingFailed(_encoding_error(store.name, store.key_of(raw), start, end, e)) from e
        raise


def _encoding_error(store: str, key: Any, start: int, end: int, error: Exception) -> str:
    return f"{describe_window(store, key, start, end)}: the state cannot be encoded: {type(error).__name__}: {error}"


def _pack_window_values(head: bytes, bounds: Sequence[Int64Array], states: Sequence[ChangelogColumn]) -> PackedBytes:
    """Encode the values of a window store's changelog entries, one for each changed window.

    An entry's value has `head`, then the fields of fixed size, then those of variable size, each after its length.
    """
    values = pack_values(head, [*bounds, *(column for column in states if isinstance(column, np.ndarray))])
    blobs = [column for column in states if not isinstance(column, np.ndarray)]
    if not blobs:
        return values
    sized = zip(*([LENGTH.pack(len(blob)) + blob for blob in column] for column in blobs), strict=True)
    return PackedBytes.of([b"".join((fixed, *own)) for fixed, own in zip(values.tolist(), sized, strict=True)])
