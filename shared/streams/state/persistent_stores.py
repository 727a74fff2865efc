"""Stores whose rows are on disk: each keeps the keys in hand in memory, in the store that is there for that.

A key that is asked for is fetched with all its rows; from then on the store in memory has it, decides what a commit
writes, and closes what is due. Only what a commit of the task has made certain reaches the disk, so a key is kept in
memory until it has; after that it may be forgotten again, the longest unused first, once the stores of an instance
take more than their memory. Windows that are due are found through the index on disk and fetched before they are
closed, so that what happens is what happens in memory. One key's rows, and what one record closes, have to fit there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

from penstock.shared.streams.state.detached import detached
from penstock.shared.streams.state.join_store import JoinRow, JoinStore
from penstock.shared.streams.state.key_value_store import Check, KeyValueStore, Row
from penstock.shared.streams.state.row_codec import RowCodec
from penstock.shared.streams.state.store import Changes, LiveRow
from penstock.shared.streams.state.stored_rows import NEVER, DueIndex, Rows, Stored
from penstock.shared.streams.windows.aggregate_store import AggregateRows, AggregateStore
from penstock.shared.streams.windows.window_store import LiveWindow, WindowStore

ROW_BYTES = 400
"""What a row takes in memory beside its states, roughly."""


class CacheBudget:
    """The bytes that the stores of an instance may keep in memory, and have."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max, self.bytes_used = bytes_max, 0


class _Cache(Protocol):
    name: str
    touched: bool

    def __len__(self) -> int: ...
    def rows(self) -> Iterator[Any]: ...
    def rows_of(self, key: Any) -> Sequence[Any]: ...
    def committed(self) -> None: ...
    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None: ...
    def dirty_keys(self) -> set[Any]: ...
    def evict(self, key: Any) -> int: ...


CacheT = TypeVar("CacheT", bound=_Cache)


class PersistentStore(ABC, Generic[CacheT]):
    """What the stores have in common: keys come from disk and are forgotten again."""

    is_indexed = True
    """Whether rows have an end by which they are found."""

    def __init__(self, cache: CacheT, rows: Rows, codec: RowCodec, budget: CacheBudget) -> None:
        self.name = cache.name
        self._cache, self._rows, self._codec, self._budget = cache, rows, codec, budget
        self._loaded: OrderedDict[Any, int] = OrderedDict()
        self._both = 0
        """Rows on disk of keys that are in memory, too."""
        self._due = DueIndex()

    def __len__(self) -> int:
        return self._rows.count - self._both + len(self._cache)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} rows, {len(self._loaded)} keys in memory)"

    @property
    def due_ms(self) -> int:
        """What ends before this is in memory, or gone."""
        return self._due.to_ms

    @property
    def touched(self) -> bool:
        """Set by every change, for the store's owner to see and take back."""
        return self._cache.touched

    @touched.setter
    def touched(self, touched: bool) -> None:
        self._cache.touched = touched

    def rows(self) -> Iterator[LiveRow]:
        """All live rows as they are now, in no order."""
        return chain(*self.walk())

    def walk(self, after: tuple[bytes, int] | None = None) -> tuple[list[LiveRow], Iterator[LiveRow]]:
        """The rows in memory, in no order; and all others that are on disk, or those after a key and start, by hash of
        the key, key and start."""
        return list(self._cache.rows()), self._others(self._rows.all(after), frozenset(self._loaded))

    def rows_of(self, key: Any) -> Iterable[Any]:
        """The key's live rows in order of start."""
        self._fetch(key)
        return self._cache.rows_of(key)

    def committed(self) -> None:
        """The changes are prepared: they stay in memory until they are known to hold."""
        self._cache.committed()

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live row; one with the same key and start is replaced."""
        self._rows.restore(self._codec.key_bytes(key), start, end, self._codec.pack(states))

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a row that is not there is no error."""
        self._rows.restore(self._codec.key_bytes(key), start, 0, None)

    # --- what is on disk ---

    def kept(self, rows: Mapping[tuple[bytes, int], Stored | None], more: int) -> None:
        """These rows, by key and start, are on disk now as the commit had them, so many more than there were.

        What there is no room for is forgotten.
        """
        self._both += more
        for (raw, _), row in rows.items():
            key = self._codec.key_of(raw)
            if row is not None:
                self._in_index(row.end)
            if key in self._loaded:
                width = ROW_BYTES + (len(row.state) if row is not None else 0)
                self._account(key, ROW_BYTES + len(self._cache.rows_of(key)) * width)
        self._evict()

    def forget(self) -> None:
        """Give the memory back; the store is used no more."""
        self._budget.bytes_used -= sum(self._loaded.values())
        self._loaded.clear()

    def _account(self, key: Any, size: int) -> None:
        self._budget.bytes_used += size - self._loaded.get(key, 0)
        self._loaded[key] = size

    def _evict(self) -> None:
        if self._budget.bytes_used <= self._budget.bytes_max:
            return
        pinned = self._cache.dirty_keys()
        for key in list(self._loaded):
            if self._budget.bytes_used <= self._budget.bytes_max:
                return
            if key not in pinned and self._may_leave(key):
                self._budget.bytes_used -= self._loaded.pop(key)
                self._both -= self._cache.evict(key)

    def _may_leave(self, key: Any) -> bool:
        """Whether the index would find all that is due of a key."""
        return all(row.end >= self.due_ms for row in self._cache.rows_of(key)) or not self.is_indexed

    def _fetch(self, key: Any) -> None:
        """Have a key's rows in memory."""
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return
        self._have(key, self._rows.of(self._codec.key_bytes(key)))

    def fetch_ahead(self, keys: Iterable[bytes | None]) -> None:
        """Have the rows of these keys in memory, before they are asked for one by one; what is no key is left out."""
        wanted = {}
        for raw in {*keys} - {None}:
            try:
                key = self._codec.key_of(raw or b"")
            except UnicodeDecodeError:
                continue
            if key not in self._loaded:
                wanted[raw or b""] = key
        for raw, found in self._rows.of_many(wanted):
            self._have(wanted[raw], found)

    def _have(self, key: Any, found: Sequence[tuple[int, Stored]]) -> None:
        """These are the rows of a key that was not in memory."""
        size = ROW_BYTES
        for start, row in found:
            self._cache.load(key, start, row.end, self._codec.unpack(row.state))
            size += ROW_BYTES + len(row.state)
        self._both += len(found)
        self._account(key, size)

    def _fetch_due(self, limit: int) -> None:
        """Have all rows in memory that end before `limit`."""
        for key in self._due.take(self._rows, limit):
            self._fetch(self._codec.key_of(key))

    def _in_index(self, end: int) -> None:
        self._due.came(end)

    def _others(self, kept: Iterator[tuple[bytes, int, Stored]], loaded: frozenset[Any]) -> Iterator[LiveRow]:
        for raw, start, row in kept:
            key = self._codec.key_of(raw)
            if key not in loaded:
                yield self._row(key, start, row.end, self._codec.unpack(row.state))

    @abstractmethod
    def _row(self, key: Any, start: int, end: int, states: list[Any]) -> LiveRow:
        """A row that is on disk."""


class PersistentWindowStore(PersistentStore[WindowStore]):
    """Live windows on disk: before the kernel runs, those of its keys and all that time closes come to memory."""

    def __init__(self, cache: WindowStore, rows: Rows, codec: RowCodec, budget: CacheBudget) -> None:
        super().__init__(cache, rows, codec, budget)
        self.windows = cache
        cache.fetch = self._prepare
        self._expired = DueIndex()

    def _prepare(self, keys: Iterable[bytes], time_ms: int) -> None:
        rule, now = self.windows.rule, self.windows.close_time_ms
        if now is not None:  # what ends before this is closed
            self._due.to_ms = max(self._due.to_ms, now + rule.last_ms)
        self.fetch_ahead(keys)
        limit = max(NEVER if now is None else now, time_ms - rule.waits_ms) + rule.last_ms
        self._fetch_due(limit)
        for key in self._expired.take(self._rows, limit - rule.kept_ms) if rule.keeps else ():
            self._fetch(self._codec.key_of(key))

    def _may_leave(self, key: Any) -> bool:
        """Whether the index would find all that is due of a key: what it has found already stays until that is done.

        A window that is closed and kept is due when it expires, every other one when it closes.
        """
        rows = self._cache.rows_of(key)
        return all(row.end >= (self._expired.to_ms if row.closed else self.due_ms) for row in rows)

    def _in_index(self, end: int) -> None:
        super()._in_index(end)
        self._expired.came(end)

    def _row(self, key: Any, start: int, end: int, states: list[Any]) -> LiveRow:
        closed, rule = self.windows.close_time_ms, self.windows.rule
        return LiveWindow(key, start, end, states, rule.keeps and closed is not None and end < closed)


class PersistentAggregateStore(PersistentWindowStore, AggregateRows):
    """Rows of an aggregation without windows, on disk: those of a batch's keys come to memory, and nothing is due."""

    is_indexed = False

    def __init__(self, cache: AggregateStore, rows: Rows, codec: RowCodec, budget: CacheBudget) -> None:
        super().__init__(cache, rows, codec, budget)
        self.names, self.columns = cache.names, cache.columns

    def _prepare(self, keys: Iterable[bytes], time_ms: int) -> None:
        self.fetch_ahead(keys)

    def _own(self, key: Any) -> Any:
        return self._codec.own_key(key)


class PersistentJoinStore(PersistentStore[JoinStore]):
    """What a join remembers, on disk; used as `JoinStore` is."""

    @property
    def check(self) -> Check | None:
        """As of `JoinStore`."""
        return self._cache.check

    @check.setter
    def check(self, check: Check | None) -> None:
        self._cache.check = check

    def fetch(self, key: Any, start: int) -> JoinRow | None:
        """The key's window that starts there, None where there is none."""
        self._fetch(key)
        return self._cache.fetch(key, start)

    def fetch_range(self, key: Any, earliest: int, latest: int) -> Sequence[JoinRow]:
        """The key's windows that start from `earliest` to `latest`, both inclusive, in order of start."""
        self._fetch(key)
        return self._cache.fetch_range(key, earliest, latest)

    def put(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Set a window's states; one that is not there yet is added."""
        self._fetch(key)
        self._cache.put(key, start, end, states)

    def remove(self, key: Any, start: int) -> None:
        """Take a window out, without a final; one that is not there is no error."""
        self._fetch(key)
        self._cache.remove(key, start)

    def take_before(self, limit: int) -> list[JoinRow]:
        """Take out and return all windows that end before `limit`, in order of (start, key)."""
        self._fetch_due(limit)
        return self._cache.take_before(limit)

    def changes(self) -> Changes:
        """All changes since the last `committed()`."""
        return self._cache.changes()

    def _row(self, key: Any, start: int, end: int, states: list[Any]) -> LiveRow:
        return JoinRow(key, start, end, states, persisted=True)


class PersistentKeyValueStore(PersistentStore[KeyValueStore]):
    """A table's rows on disk; used as `KeyValueStore` is."""

    is_indexed = False

    @property
    def check(self) -> Check | None:
        """As of `KeyValueStore`."""
        return self._cache.check

    @check.setter
    def check(self, check: Check | None) -> None:
        self._cache.check = check

    def get(self, key: Any) -> Any:
        """The row's value, None where there is none."""
        key = self._own(key)
        if not isinstance(key, str | bytes):
            return None
        self._fetch(key)
        return self._cache.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Set a row; None deletes it. DataError for a key that is neither text nor bytes."""
        key = self._own(key)
        if isinstance(key, str | bytes):
            self._fetch(key)
        self._cache.put(key, value)

    def delete(self, key: Any) -> None:
        """Take a row out; one that is not there is no error."""
        key = self._own(key)
        if isinstance(key, str | bytes):
            self._fetch(key)
        self._cache.delete(key)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All keys and values as they are now."""
        return ((row.key, detached(row.states[0])) for row in self.rows())

    def changes(self) -> Changes:
        """All changes since the last `committed()`."""
        return self._cache.changes()

    def _own(self, key: Any) -> Any:
        """A key as the store has keys: on disk text and its bytes are the same."""
        return self._codec.own_key(key)

    def _row(self, key: Any, start: int, end: int, states: list[Any]) -> LiveRow:
        return Row(key, states[0], persisted=True)
