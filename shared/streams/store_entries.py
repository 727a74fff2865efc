"""A store's changes as the changelog entries of one commit, in the order that readers rely on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shared.streams.aggregations import Aggregation
from shared.streams.changelog_format import (
    ENVELOPE,
    FINAL,
    FORMAT_VERSION,
    LIVE,
    StateCodec,
    encode_deleted,
    encode_final,
    encode_live,
)
from shared.streams.processor import StateRefused
from shared.streams.state.column_store import ColumnStore
from shared.streams.state.session_changes import Windows
from shared.streams.state.store import Changes, LiveRow, StateStore
from shared.streams.topology import StoreBuilder
from shared.streams.window_limits import name_window

Entries = list[tuple[bytes | None, bytes]]
"""Keys and values."""


class StoreEntries:
    """Encodes the changes of the store that has this name and number."""

    def __init__(self, name: str, number: int, codec: StateCodec, aggregations: Sequence[Aggregation[Any]]) -> None:
        self._name, self._number, self._codec, self._aggregations = name, number, codec, aggregations

    def encode(self, changes: Changes, epoch: int, commit: int) -> Entries:
        """Finals and deletions, then live windows. StateRefused names the window whose state cannot be encoded."""
        number, state = self._number, self._state
        entries: Entries = [
            (_key(f.key), encode_final(number, epoch, commit, f.start, f.end, f.closed_at, state(f)))
            for f in changes.finals
        ]
        entries += [(_key(key), encode_deleted(number, epoch, commit, start)) for key, start in changes.deleted]
        entries += [(_key(s.key), encode_live(number, epoch, commit, s.start, s.end, state(s))) for s in changes.live]
        return entries

    def _state(self, window: LiveRow) -> bytes:
        try:
            states = zip(self._aggregations, window.states, strict=True)
            return self._codec.pack([value for a, s in states for value in a.to_columns(s)])
        except Exception as e:
            where = name_window(self._name, window.key, window.start, window.end)
            raise StateRefused(f"{where}: the state cannot be encoded: {type(e).__name__}: {e}") from e


def _key(key: str | bytes) -> bytes:
    return key if isinstance(key, bytes) else key.encode()


def encode_stores(
    builders: Mapping[str, StoreBuilder], stores: Mapping[str, StateStore], epoch: int, commit: int
) -> tuple[Entries, int]:
    """The entries of all stores' changes, and how many finals are among them."""
    entries: Entries = []
    closed = 0
    for number, (name, store) in enumerate(stores.items()):
        if isinstance(store, ColumnStore):
            own, finals = encode_columns(store, number, epoch, commit)
        else:
            changes, builder = store.changes(), builders[name]
            encoder = StoreEntries(name, number, StateCodec(builder.schema.state_columns()), builder.aggregations)
            own, finals = encoder.encode(changes, epoch, commit), len(changes.finals)
        entries += own
        closed += finals
    return entries, closed


def encode_columns(store: ColumnStore, number: int, epoch: int, commit: int) -> tuple[Entries, int]:
    """As `StoreEntries.encode`, from columns: the entries, and how many of them are finals."""
    finals = store.finals()
    keys, starts = store.deleted()
    entries: Entries = list(zip(finals.keys, _packed(FINAL, finals, number, epoch, commit), strict=True))
    entries += [(key, encode_deleted(number, epoch, commit, start)) for key, start in zip(keys, starts, strict=True)]
    live = store.live()
    entries += zip(live.keys, _packed(LIVE, live, number, epoch, commit), strict=True)
    return entries, len(finals)


def _packed(operation: bytes, windows: Windows, number: int, epoch: int, commit: int) -> list[bytes]:
    """One value a window: all are equally long, so they are made as one array and cut."""
    bounds = [windows.starts, windows.ends, *([windows.closed_at] if operation == FINAL else [])]
    columns = [*bounds, *windows.columns]
    head = ENVELOPE.pack(FORMAT_VERSION, operation, number, epoch, commit)
    fields = [(f"f{i}", column.dtype.newbyteorder(">")) for i, column in enumerate(columns)]
    packed = np.zeros(len(windows), np.dtype([("head", f"V{len(head)}"), *fields]))
    packed["head"] = np.void(head)
    for (name, _), column in zip(fields, columns, strict=True):
        packed[name] = column
    data, width = packed.tobytes(), packed.dtype.itemsize
    return [data[at : at + width] for at in range(0, len(data), width)]
