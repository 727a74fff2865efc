"""A store's changes as the changelog entries of one commit, in the order that readers rely on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.streams.aggregations import Aggregation
from shared.streams.changelog_format import StateCodec, encode_deleted, encode_final, encode_live
from shared.streams.processor import StateRefused
from shared.streams.state.store import Changes, LiveRow
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
