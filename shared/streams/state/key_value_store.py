"""Rows of a table in memory, with the changes for the next commit.

`put` and `get` copy the values, so only `put` and `delete` change a row.

>>> store = KeyValueStore("users")
>>> store.put("ann", {"city": "Oslo"}); store.get("ann"), store.get("bob"), len(store)
({'city': 'Oslo'}, None, 1)
>>> store.delete("ann"); store.get("ann"), store.changes().deleted
(None, [])
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic

from typing_extensions import TypeVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.key_range import key_in_store_type
from penstock.shared.streams.state.row_store import RowStore
from penstock.shared.streams.user_code import user_copy

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)


def key_of_store(store: str, key: Any, text_keys: bool) -> Any:
    """Return a text or its UTF-8 bytes as the type of key of the store or global table `store`.

    Other bytes are returned unchanged. Raises DataError for a key that is neither text nor bytes.
    """
    if not isinstance(key, str | bytes):
        raise DataError(f"store {store!r}: a key must be text or bytes, got {type(key).__name__}")
    return key_in_store_type(key, text_keys)


class TableRow:
    """One row: its key, and its value as the only state of a window that is always open."""

    __slots__ = ("key", "persisted", "states")
    start = 0
    end = 0

    def __init__(self, key: Any, value: Any, persisted: bool = False) -> None:
        self.key = key
        self.states = [value]
        self.persisted = persisted

    def __repr__(self) -> str:
        return f"TableRow({self.key!r}: {self.states[0]!r})"


class KeyValueStore(RowStore[TableRow], Generic[K, V]):
    """A table's rows by key; a user's processor may read and write them.

    Keys are text, or bytes without `text_keys`. As in the changelog, a text and its UTF-8 bytes are the same key.
    `get`, `put` and `delete` raise DataError for a key that is neither text nor bytes.
    """

    def __init__(self, name: str, *, text_keys: bool = True) -> None:
        super().__init__(name)
        self._text_keys = text_keys
        self._rows: dict[Any, TableRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"KeyValueStore({self.name!r}, {len(self._rows)} rows, {len(self._dirty)} dirty)"

    def get(self, key: K) -> V | None:
        """Return the row's value, or None."""
        row = self._rows.get(self.own_key(key))
        return None if row is None else user_copy(row.states[0])

    def put(self, key: K, value: V | None) -> None:
        """Set a row; the value None deletes it.

        Raises DataError for bytes that are no text in a store of text keys, and for a value that does not equal what a
        restore would make of it. Raises RecordTooLarge for a row that is too large for the changelog, and the
        encoder's error for a key or value that cannot be encoded.
        """
        own = self.own_key(key)
        if self._text_keys and isinstance(own, bytes):
            raise DataError(f"store {self.name!r}: the key {own!r} is no text in UTF-8")
        if value is None:
            self.delete(key)
            return
        (value,) = self.check(own, [value])
        former = self._rows.get(own)
        # A new row, also for an existing key: iterators over the store keep the old one.
        row = TableRow(own, value, persisted=former is not None and former.persisted)
        self._rows[own] = row
        self._mark_row_dirty(row)

    def delete(self, key: K) -> None:
        """Remove a row; a missing row is no error."""
        key = self.own_key(key)
        if (row := self._rows.pop(key, None)) is not None:
            self._mark_row_removed(row)

    def own_key(self, key: Any) -> Any:
        """Return a text or its UTF-8 bytes as the store's type of key; other bytes are returned unchanged.

        Raises DataError for a key that is neither text nor bytes.
        """
        return key_of_store(self.name, key, self._text_keys)

    def items(self) -> Iterator[tuple[K, V]]:
        """Yield all keys and values as they are now; the store may change meanwhile."""
        return ((row.key, user_copy(row.states[0])) for row in self.rows())

    def rows(self) -> Iterator[TableRow]:
        """Yield all rows as they are now; the store may change meanwhile."""
        return iter(list(self._rows.values()))

    def rows_of(self, key: K) -> list[TableRow]:
        """Return the key's row in a list, or an empty list."""
        row = self._rows.get(self.own_key(key))
        return [] if row is None else [row]

    def keys(self) -> Iterator[K]:
        """Return an iterator over the keys that exist now; later changes of the store do not affect it."""
        return iter(list(self._rows))

    def evict(self, key: Any) -> int:
        """Drop a key's row from memory, because it is kept elsewhere; return the number of rows dropped."""
        return 0 if self._rows.pop(key, None) is None else 1

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one row."""
        self._rows[key] = TableRow(key, states[0], persisted=True)

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal."""
        self._rows.pop(key, None)
