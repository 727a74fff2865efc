"""Rows of a table in memory, with the changes for the next commit.

`put` and `get` copy the values, so only `put` and `delete` change a row.

>>> store = KeyValueStore("users")
>>> store.put("ann", {"city": "Oslo"}); store.get("ann"), store.get("bob"), len(store)
({'city': 'Oslo'}, None, 1)
>>> store.delete("ann"); store.get("ann"), store.changes().deleted
(None, [])
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Generic

from typing_extensions import TypeVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.key_range import key_in_store_type, raw_key
from penstock.shared.common.row_positions import key_hash
from penstock.shared.streams.state.row_store import RowStore
from penstock.shared.streams.user_code import user_copy

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)

BLOCK_KEYS = 256
"""A block of keys is split into two each time it has grown by this number. Removing a key searches one block."""


def key_of_store(store: str, key: Any, text_keys: bool) -> Any:
    """Return a text or its UTF-8 bytes as the type of key of the store or global table `store`.

    Other bytes are returned unchanged. Raises DataError for a key that is neither text nor bytes.
    """
    if not isinstance(key, str | bytes):
        raise DataError(f"store {store!r}: a key must be text or bytes, got {type(key).__name__}")
    return key_in_store_type(key, text_keys)


class KeysByHash:
    """Keys in blocks of neighbouring `key_hash`es, so that those of a range of hashes are found without the others.

    >>> keys = KeysByHash()
    >>> for number in range(1_000): keys.add(f"k{number}")
    >>> keys.remove("k7"); len(keys.between(0, 2**32 - 1)), keys.between(key_hash(b"k8"), key_hash(b"k8"))
    (999, ['k8'])
    """

    def __init__(self) -> None:
        self._firsts = [0]
        """The lowest hash that a key of each block may have."""
        self._blocks: list[list[Any]] = [[]]

    def add(self, key: Any) -> None:
        """Add a key, which must be new."""
        at = self._block_of(key)
        block = self._blocks[at]
        block.append(key)
        # Keys of one hash stay together. So a split is not tried at every key.
        if len(block) % BLOCK_KEYS == 0:
            hashes = [key_hash(raw_key(each)) for each in block]
            middle = sorted(hashes)[len(hashes) // 2]
            if middle > self._firsts[at]:
                self._firsts.insert(at + 1, middle)
                hashed = list(zip(hashes, block, strict=True))
                lower = [each for hash_, each in hashed if hash_ < middle]
                self._blocks[at : at + 1] = [lower, [each for hash_, each in hashed if hash_ >= middle]]

    def remove(self, key: Any) -> None:
        """Remove a key, which must be there."""
        self._blocks[self._block_of(key)].remove(key)

    def between(self, low: int, high: int) -> list[Any]:
        """Return the keys whose `key_hash` is from `low` to `high`, in no order."""
        blocks = self._blocks[bisect_right(self._firsts, low) - 1 : bisect_right(self._firsts, high)]
        return [key for block in blocks for key in block if low <= key_hash(raw_key(key)) <= high]

    def _block_of(self, key: Any) -> int:
        return bisect_right(self._firsts, key_hash(raw_key(key))) - 1


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
        self._keys = KeysByHash()

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
        self._set_row(row)
        self._mark_row_dirty(row)

    def delete(self, key: K) -> None:
        """Remove a row; a missing row is no error."""
        key = self.own_key(key)
        if (row := self._pop_row(key)) is not None:
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

    def keys_between(self, low: int, high: int) -> list[Any]:
        """Return the keys whose `key_hash` is from `low` to `high`, in no order."""
        return self._keys.between(low, high)

    def evict(self, key: Any) -> int:
        """Drop a key's row from memory, because it is kept elsewhere; return the number of rows dropped."""
        return 0 if self._pop_row(key) is None else 1

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one row."""
        self._set_row(TableRow(key, states[0], persisted=True))

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal."""
        self._pop_row(key)

    def _set_row(self, row: TableRow) -> None:
        if row.key not in self._rows:
            self._keys.add(row.key)
        self._rows[row.key] = row

    def _pop_row(self, key: Any) -> TableRow | None:
        if (row := self._rows.pop(key, None)) is not None:
            self._keys.remove(key)
        return row
