"""Stores whose rows are on disk; each keeps the keys in use in an in-memory store.

When a task uses a key, all its rows are fetched into the in-memory store. That store makes the changes of a commit and
closes due windows. Only succeeded commits are written to disk, so a changed key stays in memory until its commit has
succeeded. Afterwards it may be evicted, when the stores of an instance exceed their memory; the least recently used key
of a store goes first. Due windows are found by the index on disk, and fetched before they are closed. So results are
the same as those of in-memory stores. All rows of the keys of one batch, and the windows that the batch closes, must
fit in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from penstock.shared.common.key_range import key_in_store_type, raw_key
from penstock.shared.streams.state.join_store import JoinRow, JoinStore
from penstock.shared.streams.state.key_value_store import KeyValueStore, TableRow
from penstock.shared.streams.state.row_codec import RowCodec
from penstock.shared.streams.state.row_store import Check
from penstock.shared.streams.state_store import NEVER, RowChanges, StateStoreRow
from penstock.shared.streams.user_code import user_copy
from penstock.shared.streams.windows.aggregate_store import AggregateRows, AggregateStore
from penstock.shared.streams.windows.window_store import LiveWindow, WindowStore

if TYPE_CHECKING:
    # Only for types, because RocksDB is an optional dependency.
    from penstock.shared.streams.state.rocksdb import RocksDb, StoredRow

CACHED_ROW_BYTES = 400
"""The estimated bytes of a row in memory besides its states."""


RestoreRow = Callable[[bytes, int, int, bytes | None], None]
"""Restores a row from a key, start, end and state; without a state, removes it."""


class DueIndex:
    """The end up to which an index was searched, and the least end that may come after it.

    `take_due` is that of RocksDb, for one store.
    """

    def __init__(self, take_due: Callable[[int, int], tuple[set[bytes], int]]) -> None:
        self._take_due = take_due
        self.to_ms = NEVER
        self.upcoming_ms = NEVER

    def take(self, limit: int) -> Iterable[bytes]:
        """Return the keys of a persistent store's rows that end before `limit` and were not returned before."""
        since = self.to_ms
        self.to_ms = max(self.to_ms, limit)
        # Everything before the limit was returned before, or no row ends before it. Most batches end here, without a
        # read of the disk.
        if limit <= max(since, self.upcoming_ms):
            return ()
        keys, self.upcoming_ms = self._take_due(since, limit)
        return keys

    def came(self, end: int) -> None:
        """Note that a row with this end is in the index now."""
        self.upcoming_ms = min(self.upcoming_ms, end)


class CacheBudget:
    """The bytes that the stores of an instance may keep in memory, and the bytes in use."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0


CacheT = TypeVar("CacheT", bound=JoinStore | KeyValueStore | WindowStore)


class PersistentStore(ABC, Generic[CacheT]):
    """The common part of the stores: fetches keys from disk and evicts them.

    The rows on disk are those of the `number`th store of its topology.
    """

    def __init__(
        self, cache: CacheT, db: RocksDb, number: int, restore: RestoreRow, codec: RowCodec, budget: CacheBudget
    ) -> None:
        self.name = cache.name
        self._cache = cache
        self._db = db
        self._number = number
        self._restore = restore
        self._codec = codec
        self._budget = budget
        self._loaded: OrderedDict[Any, int] = OrderedDict()
        self._rows_in_both = 0
        """The number of rows on disk whose keys are also in memory."""
        self._due = DueIndex(partial(db.take_due, number))

    def __len__(self) -> int:
        return self._db.count(self._number) - self._rows_in_both + len(self._cache)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self)} rows, {len(self._loaded)} keys in memory)"

    @property
    def due_ms(self) -> int:
        """The lowest end that the next search of the index on disk for due rows covers."""
        return self._due.to_ms

    @property
    def touched(self) -> bool:
        """Set by every change; the store's owner reads and resets it."""
        return self._cache.touched

    @touched.setter
    def touched(self, touched: bool) -> None:
        self._cache.touched = touched

    def rows(self) -> Iterator[StateStoreRow]:
        """Yield all live rows, in no order.

        A table's rows may be added, changed or removed during the iteration.
        """
        in_memory = self.keys_in_memory()
        return chain(
            self._cache.rows(), self._decode_rows(self._db.rows(self._number), lambda key: key not in in_memory)
        )

    def keys_in_memory(self) -> frozenset[Any]:
        """Return the keys that are in memory now. They may have newer rows there than on disk."""
        return frozenset(self._loaded)

    def read_disk(
        self,
        low: int,
        high: int,
        after: tuple[bytes, int] | None,
        limit: int,
        is_wanted: Callable[[Any], bool],
    ) -> tuple[list[StateStoreRow], tuple[bytes, int] | None]:
        """Read at most `limit` rows on disk, in the order of key hash, key and start.

        The hashes of their keys are from `low` to `high`. With `after`, only rows after this key and start are read.
        Return those rows whose keys are wanted and not in memory, and the last row's key and start if `limit` rows were
        read, else None.
        """
        found = self._db.rows_between(self._number, low, high, after, limit)
        rows = list(self._decode_rows(found, lambda key: key not in self._loaded and is_wanted(key)))
        return rows, found[-1][:2] if len(found) == limit else None

    def rows_of(self, key: Any) -> Sequence[Any]:
        """Return the key's live rows in order of start. A key that is not in memory stays on disk.

        Queries use this. If they fetched keys into memory, a task that does not commit could not evict them.
        """
        if key in self._loaded:
            return self._cache.rows_of(key)
        return self._decode_rows_of(key, self._db.rows_of(self._number, raw_key(key)))

    def committed(self) -> None:
        """Mark the changes as prepared; they stay in memory until the commit is confirmed."""
        self._cache.committed()

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live row; it replaces one with the same key and start."""
        # A restore goes to the disk. Memory holds only keys that are used.
        self._restore(raw_key(key), start, end, self._codec.pack(states))

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a missing row is no error."""
        self._restore(raw_key(key), start, 0, None)

    # --- rows on disk ---

    def confirm_written(self, rows: Mapping[tuple[bytes, int], StoredRow | None], more: int) -> None:
        """Account for the rows of a commit, by key and start, which were written to disk.

        `more` is the change of the number of rows on disk. Evicts keys if the memory is exceeded.
        """
        self._rows_in_both += more
        widths: dict[Any, int] = {}
        for (raw, _), row in rows.items():
            key = self._codec.key_of(raw)
            # The index has the row's end from now on, so a search up to it must read the disk again.
            if row is not None:
                self._note_end_in_due_index(row.end)
            if key in self._loaded:
                widths[key] = CACHED_ROW_BYTES + (len(row.state) if row is not None else 0)
        # Once for each key, because its rows are counted: a record of a hopping window may change hundreds of them.
        for key, width in widths.items():
            self._account_memory(key, CACHED_ROW_BYTES + len(self._cache.rows_of(key)) * width)
        self._evict_keys()

    def forget(self) -> None:
        """Release the memory; the store is not used any more."""
        self._budget.bytes_used -= sum(self._loaded.values())
        self._loaded.clear()

    def _account_memory(self, key: Any, size: int) -> None:
        self._budget.bytes_used += size - self._loaded.get(key, 0)
        self._loaded[key] = size

    def _evict_keys(self) -> None:
        if self._budget.bytes_used <= self._budget.bytes_max:
            return
        # These rows are only in memory: no confirmed commit has written them.
        pinned = self._cache.dirty_keys()
        for key in list(self._loaded):
            if self._budget.bytes_used <= self._budget.bytes_max:
                return
            if key not in pinned and self._may_leave(key):
                self._budget.bytes_used -= self._loaded.pop(key)
                self._rows_in_both -= self._cache.evict(key)

    def _may_leave(self, key: Any) -> bool:
        """Return whether a key may be evicted: later searches of the index on disk find all its due rows."""
        return all(row.end >= self.due_ms for row in self._cache.rows_of(key))

    def _fetch_key_rows(self, key: Any) -> None:
        """Fetch a key's rows into memory."""
        if key in self._loaded:
            self._loaded.move_to_end(key)
            return
        self._load_key_rows(key, self._db.rows_of(self._number, raw_key(key)))

    def fetch_ahead(self, keys: Iterable[bytes | None]) -> None:
        """Fetch the rows of these keys before they are used one by one; invalid keys are skipped."""
        wanted = {}
        for raw in {*keys} - {None}:
            try:
                key = self._codec.key_of(raw or b"")
            except UnicodeDecodeError:
                continue
            if key in self._loaded:
                self._loaded.move_to_end(key)
            else:
                wanted[raw or b""] = key
        for raw, found in self._db.rows_of_many(self._number, wanted):
            self._load_key_rows(wanted[raw], found)

    def _load_key_rows(self, key: Any, found: Sequence[tuple[int, StoredRow]]) -> None:
        """Load the rows of a key that was not in memory."""
        size = CACHED_ROW_BYTES
        for start, row in found:
            self._cache.load(key, start, row.end, self._codec.unpack(row.state))
            size += CACHED_ROW_BYTES + len(row.state)
        self._rows_in_both += len(found)
        self._account_memory(key, size)

    def _fetch_due(self, limit: int) -> None:
        """Fetch the keys of rows that end before `limit`, except those that an earlier search found."""
        for key in self._due.take(limit):
            self._fetch_key_rows(self._codec.key_of(key))

    def _note_end_in_due_index(self, end: int) -> None:
        self._due.came(end)

    def _decode_rows_of(self, key: Any, found: Sequence[tuple[int, StoredRow]]) -> list[Any]:
        return [self._row_from_disk(key, start, row.end, self._codec.unpack(row.state)) for start, row in found]

    def _decode_rows(
        self, found: Iterable[tuple[bytes, int, StoredRow]], is_wanted: Callable[[Any], bool]
    ) -> Iterator[StateStoreRow]:
        for raw, start, row in found:
            if is_wanted(key := self._codec.key_of(raw)):
                yield self._row_from_disk(key, start, row.end, self._codec.unpack(row.state))

    @abstractmethod
    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> StateStoreRow:
        """Return a row of the disk."""


class PersistentWindowStore(PersistentStore[WindowStore]):
    """Live windows on disk; those of a batch's keys, and all that time closes, are fetched before the kernel runs."""

    def __init__(
        self, cache: WindowStore, db: RocksDb, number: int, restore: RestoreRow, codec: RowCodec, budget: CacheBudget
    ) -> None:
        super().__init__(cache, db, number, restore, codec, budget)
        self.windows = cache
        cache.fetch = self._fetch_batch_rows
        self._expired = DueIndex(partial(db.take_due, number))

    def keys_between(self, low: int, high: int) -> list[Any]:
        """As `WindowStore.keys_between`, but only for the keys in memory."""
        return self._cache.keys_between(low, high)

    def rows_after(self, key: Any, after: int | None, limit: int) -> Sequence[Any]:
        """As `WindowStore.rows_after`. A key that is not in memory stays on disk."""
        if key in self._loaded:
            return self._cache.rows_after(key, after, limit)
        return self._decode_rows_of(key, self._db.rows_of(self._number, raw_key(key), after, limit))

    def latest_rows(self, key: Any, end_max: int, limit: int) -> Sequence[Any]:
        """As `WindowStore.latest_rows`. A key that is not in memory stays on disk."""
        if key in self._loaded:
            return self._cache.latest_rows(key, end_max, limit)
        start_max = max(0, end_max - self.windows.rule.size_ms)
        return self._decode_rows_of(key, self._db.latest_rows_of(self._number, raw_key(key), start_max, end_max, limit))

    def _fetch_batch_rows(self, keys: Iterable[bytes], time_ms: int) -> None:
        rule = self.windows.rule
        now = self.windows.close_time_ms
        # Windows that end before this are closed already. The index need not be searched before it, except for
        # sessions: a restore leaves the index entry of a session that grew where it was.
        if now is not None and rule.kind != "session":
            self._due.to_ms = max(self._due.to_ms, now + rule.last_ms)
        self.fetch_ahead(keys)
        # After a restart under a shorter grace, a record closes windows even if it does not advance the stream time.
        reached = max(time_ms, self.windows.stream_time_ms)
        limit = max(NEVER if now is None else now, reached - rule.waits_ms) + rule.last_ms
        self._fetch_due(limit)
        # Retained windows (of sliding rules) are removed later than they close, so they are searched for a second time.
        for key in self._expired.take(limit - rule.retained_ms) if rule.retains else ():
            self._fetch_key_rows(self._codec.key_of(key))

    def _may_leave(self, key: Any) -> bool:
        """Return whether a key may be evicted: later searches of the index on disk find all its due windows."""
        rows = self._cache.rows_of(key)
        # A search covers only ends that no earlier search has covered. So a window that was found stays in memory until
        # it is processed. Open windows are searched for when they close. Closed windows that are still in the store (of
        # sliding rules) are searched for again when they expire.
        return all(row.end >= (self._expired.to_ms if row.closed else self.due_ms) for row in rows)

    def _note_end_in_due_index(self, end: int) -> None:
        super()._note_end_in_due_index(end)
        self._expired.came(end)

    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> StateStoreRow:
        closed = self.windows.close_time_ms
        rule = self.windows.rule
        return LiveWindow(key, start, end, states, rule.retains and closed is not None and end < closed)


class PersistentAggregateStore(PersistentWindowStore, AggregateRows):
    """Rows of an aggregation without windows, on disk; those of a batch's keys are fetched, and nothing is due."""

    def __init__(
        self, cache: AggregateStore, db: RocksDb, number: int, restore: RestoreRow, codec: RowCodec, budget: CacheBudget
    ) -> None:
        super().__init__(cache, db, number, restore, codec, budget)
        self.names = cache.names
        self.columns = cache.columns

    def _fetch_batch_rows(self, keys: Iterable[bytes], time_ms: int) -> None:
        self.fetch_ahead(keys)

    def get(self, key: Any) -> dict[str, Any] | None:
        """As `AggregateStore.get`; the key is in memory afterwards."""
        own = self._key_in_store_type(key)
        if isinstance(own, str | bytes):
            self._fetch_key_rows(own)
        return super().get(key)

    def _key_in_store_type(self, key: Any) -> Any:
        return key_in_store_type(key, self._codec.is_text)


RowCacheT = TypeVar("RowCacheT", bound=JoinStore | KeyValueStore)


class PersistentRowStore(PersistentStore[RowCacheT]):
    """The common part of the stores of rows, on disk; used as `RowStore`."""

    @property
    def check(self) -> Check:
        """As in `RowStore`."""
        return self._cache.check

    @check.setter
    def check(self, check: Check) -> None:
        self._cache.check = check

    def changes(self) -> RowChanges:
        """Return all changes since the last `committed()`."""
        return self._cache.changes()


class PersistentJoinStore(PersistentRowStore[JoinStore]):
    """The records of a join, on disk; used as `JoinStore`."""

    def fetch(self, key: Any, start: int) -> JoinRow | None:
        """Return the key's row that starts there, or None."""
        self._fetch_key_rows(key)
        return self._cache.fetch(key, start)

    def fetch_range(self, key: Any, earliest: int, latest: int) -> Sequence[JoinRow]:
        """Return the key's rows that start from `earliest` to `latest`, both inclusive, in order of start."""
        self._fetch_key_rows(key)
        return self._cache.fetch_range(key, earliest, latest)

    def put(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Set a row's states; add the row if it does not exist."""
        self._fetch_key_rows(key)
        self._cache.put(key, start, end, states)

    def take_before(self, limit: int) -> list[JoinRow]:
        """Remove and return all rows that end before `limit`, in order of (start, key)."""
        self._fetch_due(limit)
        return self._cache.take_before(limit)

    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> StateStoreRow:
        return JoinRow(key, start, end, states, persisted=True)


class PersistentKeyValueStore(PersistentRowStore[KeyValueStore]):
    """A table's rows on disk; used as `KeyValueStore`."""

    def get(self, key: Any) -> Any:
        """Return the row's value, or None."""
        key = self._cache.own_key(key)
        self._fetch_key_rows(key)
        return self._cache.get(key)

    def put(self, key: Any, value: Any) -> None:
        """Set a row; the value None deletes it.

        Raises what `KeyValueStore.put` raises, and StateStoreFailed if the key's row cannot be read from the disk.
        """
        key = self._cache.own_key(key)
        self._fetch_key_rows(key)
        self._cache.put(key, value)

    def delete(self, key: Any) -> None:
        """Remove a row; a missing row is no error."""
        key = self._cache.own_key(key)
        self._fetch_key_rows(key)
        self._cache.delete(key)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield all keys and values as they are now."""
        return ((row.key, user_copy(row.states[0])) for row in self.rows())

    def keys(self) -> Iterator[Any]:
        """Yield all keys as they are now."""
        return (row.key for row in self.rows())

    def keys_between(self, low: int, high: int) -> list[Any]:
        """As `KeyValueStore.keys_between`, but only for the keys in memory."""
        return self._cache.keys_between(low, high)

    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> StateStoreRow:
        return TableRow(key, states[0], persisted=True)
