"""Rows of a table in memory, with the changes for the next commit.

`put` and `get` copy the values, so only `put` and `delete` change a row.

>>> store = KeyValueStore("users")
>>> store.put("ann", {"city": "Oslo"}); store.get("ann"), store.get("bob"), len(store)
({'city': 'Oslo'}, None, 1)
>>> store.delete("ann"); store.get("ann"), store.changes().deleted
(None, [])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic

from typing_extensions import TypeVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.key_range import key_in_store_type
from penstock.shared.streams.state_store import RowChanges
from penstock.shared.streams.user_code import user_copy

Check = Callable[[str | bytes, list[Any]], None]
"""Raises if the changelog cannot hold a row of this key and these states."""

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)


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


class KeyValueStore(Generic[K, V]):
    """A table's rows by key; a user's processor may read and write them.

    Keys are text, or bytes without `text_keys`. As in the changelog, a text and its UTF-8 bytes are the same key. Every
    call raises DataError for a key that is neither text nor bytes.
    """

    def __init__(self, name: str, *, text_keys: bool = True) -> None:
        self.name = name
        self._text_keys = text_keys
        self.touched = False
        self.check: Check | None = None
        self._rows: dict[Any, TableRow] = {}
        self._dirty: dict[Any, TableRow | None] = {}

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

        Raises DataError for bytes that are no text in a store of text keys, and for a value that cannot be restored as
        the store's type of values. Raises RecordTooLarge for a row that is too large for the changelog, and the
        encoder's error for a key or value that cannot be encoded.
        """
        own = self.own_key(key)
        if self._text_keys and isinstance(own, bytes):
            raise DataError(f"store {self.name!r}: the key {own!r} is no text in UTF-8")
        if value is None:
            self.delete(key)
            return
        if self.check is not None:
            self.check(own, [value])
        value = user_copy(value)
        row = self._rows.get(own)
        # A row that was deleted since the last commit is still in the changelog.
        is_persisted = own in self._dirty if row is None else row.persisted
        # A new row, also for an existing key: iterators over the store keep the old one.
        row = TableRow(own, value, persisted=is_persisted)
        self._rows[own] = row
        self._dirty[own] = row
        self.touched = True

    def delete(self, key: K) -> None:
        """Remove a row; a missing row is no error."""
        key = self.own_key(key)
        row = self._rows.pop(key, None)
        if row is None:
            return
        self.touched = True
        if row.persisted:
            self._dirty[key] = None
        else:
            # The changelog has never had the row, so it needs no tombstone.
            self._dirty.pop(key, None)

    def own_key(self, key: Any) -> Any:
        """Return a text or its UTF-8 bytes as the store's type of key; other bytes are returned unchanged.

        Raises DataError for a key that is neither text nor bytes.
        """
        if not isinstance(key, str | bytes):
            raise DataError(f"store {self.name!r}: a key must be text or bytes, got {type(key).__name__}")
        return key_in_store_type(key, self._text_keys)

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

    def changes(self) -> RowChanges:
        """Return all changes since the last `committed()`."""
        deleted = [(key, 0) for key, row in self._dirty.items() if row is None]
        return RowChanges(deleted, [row for row in self._dirty.values() if row is not None])

    def committed(self) -> None:
        """Drop the changes, which are in the changelog or will be; after a failed commit the store is restored."""
        for row in self._dirty.values():
            if row is not None:
                row.persisted = True
        self._dirty.clear()

    def dirty_keys(self) -> set[Any]:
        """Return the keys whose rows differ from the last commit."""
        return set(self._dirty)

    def evict(self, key: Any) -> int:
        """Drop a key's row from memory, because it is kept elsewhere; return the number of rows dropped."""
        return 0 if self._rows.pop(key, None) is None else 1

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one row."""
        self._rows[key] = TableRow(key, states[0], persisted=True)

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal."""
        self._rows.pop(key, None)
