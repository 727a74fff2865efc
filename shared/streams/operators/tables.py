"""Tables: the last value of each key, and joins of streams with them.

A table is read from a compacted topic and has one row for each key. A record without a value deletes its row. The join
of a stream with a table looks up each record's key in the table's current state. Of the records of the two topics, the
one with the lower timestamp is processed first (`partition_group`). Every instance holds all partitions of a global
table, so a join can look up any key in it.

Source of the semantics: KTableSource, KStreamKTableJoin and KStreamGlobalKTableJoin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.streams.aggregations.aggregation import Aggregation, Column, ColumnValue
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.key_value_store import KeyValueStore
from penstock.shared.streams.state.persistent_stores import PersistentKeyValueStore
from penstock.shared.streams.windows.size_limits import check_key

Joiner = Callable[[Any, Any], Any]
"""Returns the result's value from the stream's value and the other side's; a left join without a match has None."""


class RowValue(Aggregation[Any]):
    """A row's value in the changelog: as it is if `value_type` is bytes, else as JSON that is decoded as `value_type`.

    With `dict` or Any, a row can have any JSON.
    """

    function = "value"
    state_columns = (Column("json", "binary"),)
    result_type = "json"

    def __init__(self, value_type: Any) -> None:
        self._is_bytes = value_type is bytes
        self._decode = msgspec.json.Decoder(Any if value_type is dict else value_type).decode

    def initial(self) -> Any:
        return None

    def add(self, state: Any, value: Any) -> Any:
        return value

    def merge(self, earlier: Any, later: Any) -> Any:
        return earlier if later is None else later

    def to_columns(self, state: Any) -> tuple[ColumnValue, ...]:
        if not self._is_bytes:
            return (msgspec.json.encode(state),)
        if not isinstance(state, bytes):
            raise DataError(f"a row of bytes cannot have a value of the type {type(state).__name__}")
        return (state,)

    def from_columns(self, columns: Sequence[Any]) -> Any:
        return columns[0] if self._is_bytes else self._decode(columns[0])

    def result(self, state: Any) -> Any:
        return state


class TableProcessor(Processor):
    """Keeps the last value of each key, and forwards each record that has a key."""

    def __init__(self, store_name: str) -> None:
        self.store_name = store_name
        self._store: KeyValueStore | PersistentKeyValueStore

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._store = context.store(self.store_name)

    def process(self, record: Record) -> None:
        if record.key is None:
            self.context.count_skipped("null key")
            return
        check_key(record.key, self.store_name, self.context.key_bytes_max)
        self._store.put(record.key, record.value)
        self.context.forward(record)


class TableLookup(Protocol):
    """The lookup of a join: a table's store, or a global table."""

    def get(self, key: Any) -> Any:
        """Return the row's value, or None."""
        ...


class TableJoin(Processor):
    """Joins each record with the row of its key, or of the key that `key_of` returns.

    A record without a value is skipped and counted, or forwarded with `keeps_deletions`. With `left`, a record without
    a key or without a row is joined with None. Otherwise a record without a key is skipped and counted, and a record
    without a row is dropped.
    """

    sees_time = False

    def __init__(
        self,
        store_name: str,
        joiner: Joiner,
        *,
        left: bool,
        key_of: Callable[[Record], Any] | None = None,
        keeps_deletions: bool = False,
    ) -> None:
        self._store_name = store_name
        self._joiner = joiner
        self._left = left
        self._key_of = key_of
        self._keeps_deletions = keeps_deletions
        self._lookup: TableLookup

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self._lookup = context.store(self._store_name)

    def process(self, record: Record) -> None:
        # As KStreamKTableJoinProcessor: a record without a value is skipped in any case. A left join keeps one without
        # a key since KIP-962.
        if record.value is None:
            # A retraction deletes what an earlier result under its window key became.
            if self._keeps_deletions:
                self.context.forward(record)
            else:
                self.context.count_skipped("null value")
            return
        key = record.key if self._key_of is None else self._key_of(record)
        if key is None and not self._left:
            self.context.count_skipped("null key")
            return
        row = None if key is None else self._lookup.get(key)
        if row is not None or self._left:
            self.context.forward(record._replace(value=self._joiner(record.value, row)))
