"""Makes records from a table's changes in the format of `pgoutput`, and tracks what was read and stored.

A transaction's changes arrive together, and transactions arrive in commit order. So a position is a transaction's final
LSN and the number of its changes that were read. Changes up to the stored position are skipped. If a change makes two
records, its position belongs to the second, since a restart must not continue between them.

The slot may move to the end of a read once everything read before is stored:

>>> progress = SlotProgress(None)
>>> progress.read = (100, 2)
>>> progress.mark(150)
>>> progress.stored({"lsn": "0/64", "change": 1}), progress.stored({"lsn": "0/64", "change": 2})
(None, 150)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.log import get_logger
from penstock.shared.connect.connectors.postgres.columns import (
    TYPE_NAMES,
    Attribute,
    TypeName,
    schema_of,
    value_from,
    value_of,
)
from penstock.shared.connect.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Delete,
    Insert,
    Relation,
    Truncate,
    Update,
    Values,
    decode,
    lsn_of,
    lsn_text,
)
from penstock.shared.connect.errors import ConnectError, DataError
from penstock.shared.connect.record import Header, Offset, Partition, SourceRecord
from penstock.shared.connect.schema import INT64, STRING, Schema

log = get_logger(__name__)

Position = tuple[int, int]
"""A transaction's final LSN, and the number of its changes that were read."""
Row = dict[str, Any]
CREATED, UPDATED, DELETED = "c", "u", "d"
"""The header `__op`, with Debezium's values."""


def position_of(offset: Offset | None) -> Position:
    """The position of an offset; (0, 0) if there is none. Raises ConnectError if the offset is invalid."""
    if offset is None:
        return (0, 0)
    try:
        return lsn_of(str(offset["lsn"])), int(offset.get("change", 0))
    except (KeyError, TypeError, ValueError, DataError):
        raise ConnectError(f'{dict(offset)} is not an offset: expected {{"lsn": "0/16B3748", "change": 3}}') from None


class SlotProgress:
    """The position up to which a slot was read, the stored position, and the LSN to which the slot may move."""

    def __init__(self, offset: Offset | None) -> None:
        self.read = self._stored = position_of(offset)
        self._marks: deque[tuple[Position, int]] = deque()

    def __repr__(self) -> str:
        return f"<SlotProgress {lsn_text(self.read[0])} {self.read[1]}, {len(self._marks)} marks>"

    def mark(self, lsn: int) -> None:
        """A read has ended: there is nothing more to read up to `lsn`."""
        # Reads without records only move the LSN of the last mark, so an idle source keeps one mark.
        if self._marks and self._marks[-1][0] == self.read:
            self._marks.pop()
        self._marks.append((self.read, lsn))

    def stored(self, offset: Offset | None) -> int | None:
        """The offset is stored. Returns the LSN to which the slot may move, None if it stays."""
        self._stored = max(self._stored, position_of(offset))
        return self.settled()

    def settled(self) -> int | None:
        """The LSN to which the slot may move; it is returned once."""
        found = None
        while self._marks and self._marks[0][0] <= self._stored:
            found = self._marks.popleft()[1]
        return found


@dataclass
class Incomplete:
    """A row of an update message without its large values, which must be read from the table."""

    relation: Relation
    names: list[str]
    key: dict[str, tuple[int, str]]
    value: Row


class _Table:
    """A table's columns and their schema."""

    def __init__(self, relation: Relation, name: str, values: Mapping[str, Any]) -> None:
        self.relation = relation
        self.name = name
        self._scale = values["numeric.scale"]
        attributes = [
            Attribute(column.name, TypeName(TYPE_NAMES.get(column.type_oid, "text"))) for column in relation.columns
        ]
        self.schema = schema_of(name, attributes, self._scale)
        # If the identity is the whole row, every column is in the key. The record then has no key.
        own = [] if relation.identity == "f" else [column.name for column in relation.columns if column.is_key]
        self.key_names = values["key.columns"] or own
        fields = [self.schema.field(key) for key in self.key_names]
        if None in fields:
            raise ConnectError(f"key.columns: not all of {', '.join(self.key_names)} are columns of {name}")
        self.key_schema = Schema.struct(None, *(f for f in fields if f is not None)) if fields else None

    def row(self, texts: Values, instead: Values | None = None) -> Row:
        """A row's values. `instead` replaces unchanged large values. Values missing in both are left out."""
        found = {}
        for at, (field, column) in enumerate(zip(self.schema.fields, self.relation.columns, strict=True)):
            text = texts[at]
            if text is UNCHANGED and instead is not None:
                text = instead[at]
            if isinstance(text, str):
                found[field.name] = self.value(column.name, text)
            elif text is None:
                found[field.name] = None
        return found

    def value(self, name: str, text: str) -> Any:
        """A column's value, from its text."""
        field = self.schema.field(name)
        assert field is not None
        oid = next(column.type_oid for column in self.relation.columns if column.name == name)
        try:
            return value_of(field.schema, value_from(oid, text), self._scale)
        except ConnectError as e:
            raise ConnectError(f"{self.name}.{name}: {e}") from None

    def whole(self, row: Row) -> Row:
        """The row with null for every unknown column."""
        return {field.name: row.get(field.name) for field in self.schema.fields}

    def old_key(self, row: Row) -> Row | None:
        """The key of a row before its change. Raises ConnectError if it is unknown."""
        # Postgres logs only the columns of the replica identity of an old row.
        logged = {column.name for column in self.relation.columns if column.is_key}
        if unknown := set(self.key_names) - logged:
            raise ConnectError(
                f"key.columns: the old {', '.join(sorted(unknown))} of a changed or deleted row of {self.name} is not "
                "in the log: ALTER TABLE … REPLICA IDENTITY FULL, and reset the connector's offsets"
            )
        return self.key(row)

    def key(self, row: Row) -> Row | None:
        return {name: row.get(name) for name in self.key_names} if self.key_schema is not None else None


class SlotReader:
    """Reads the messages of one slot, in order."""

    def __init__(self, values: Mapping[str, Any], partition: Partition, progress: SlotProgress) -> None:
        self._values = values
        self._partition = partition
        self._progress = progress
        self._wanted = {name if "." in name else f"public.{name}": name for name in values["table.whitelist"]}
        self._tables: dict[int, _Table | None] = {}
        self._begun = Begin(0, 0, 0)
        self._change = 0
        self.incomplete: list[Incomplete] = []

    def __repr__(self) -> str:
        return f"<SlotReader of {dict(self._partition)}, {self._progress!r}>"

    def records(self, data: bytes) -> list[SourceRecord]:
        """The records of a message: usually one for a change, else none. `incomplete` lists rows that lack values."""
        message = decode(data)
        if isinstance(message, Begin):
            self._begun = message
            self._change = 0
        elif isinstance(message, Relation):
            self._tables[message.oid] = self._captured_table(message)
        elif isinstance(message, Truncate):
            for table in (self._tables.get(oid) for oid in message.oids):
                if table is not None:
                    log.warning("a table was truncated: no records are produced", table=table.name)
        elif isinstance(message, Insert | Update | Delete):
            self._change += 1
            position = (self._begun.final_lsn, self._change)
            table = self._tables.get(message.oid)
            # After a reconnect, Postgres sends changes again from the slot's position on. Those at or before the
            # position already read made their records before.
            if table is not None and position > self._progress.read:
                self._progress.read = position
                return self._source_records(table, list(self._changes_of_message(table, message)))
        return []

    def _captured_table(self, relation: Relation) -> _Table | None:
        qualified = f"{relation.namespace}.{relation.name}"
        if self._wanted and qualified not in self._wanted:
            return None
        plain = relation.name if relation.namespace == "public" else qualified
        return _Table(relation, self._wanted.get(qualified, plain), self._values)

    def _changes_of_message(
        self, table: _Table, message: Insert | Update | Delete
    ) -> Iterator[tuple[str, Row | None, Row | None]]:
        """The operation, key and value of each record."""
        if isinstance(message, Insert):
            row = table.row(message.new)
            yield CREATED, table.key(row), row
        elif isinstance(message, Delete):
            yield self._delete_change(table, table.row(message.old))
        else:
            # Under REPLICA IDENTITY FULL the old row has the large values that the update did not change.
            before = message.old if message.is_whole else None
            row = table.row(message.new, before)
            if message.old is not None:
                old = table.row(message.old)
                # A changed key needs a delete of the old key. Otherwise the old row would stay in the topic for ever.
                if table.old_key(old) != table.key(row):
                    yield self._delete_change(table, old)
            value = table.whole(row)
            # Large values that are neither in the message nor in an old row are read from the table afterwards.
            missing = [name for name in value if name not in row]
            if missing:
                self._note_incomplete_row(table, message, missing, value)
            yield UPDATED, table.key(row), value

    def _delete_change(self, table: _Table, old: Row) -> tuple[str, Row | None, Row | None]:
        key = table.old_key(old)
        is_tombstone = self._values["tombstones.on.delete"] and key is not None
        return DELETED, key, None if is_tombstone else table.whole(old)

    def _note_incomplete_row(self, table: _Table, message: Update, missing: Sequence[str], value: Row) -> None:
        columns = table.relation.columns
        key = {
            column.name: (column.type_oid, text)
            for column, text in zip(columns, message.new, strict=True)
            if column.is_key and isinstance(text, str)
        }
        self.incomplete.append(Incomplete(table.relation, list(missing), key, value))

    def completed(self, row: Incomplete, texts: Mapping[str, str | None]) -> None:
        """Add values that were read from the table to the row."""
        table = self._tables[row.relation.oid]
        assert table is not None
        for name, text in texts.items():
            row.value[name] = None if text is None else table.value(name, text)

    def _source_records(self, table: _Table, made: Sequence[tuple[str, Row | None, Row | None]]) -> list[SourceRecord]:
        lsn = lsn_text(self._begun.final_lsn)
        topic = self._values["topic.prefix"] + table.name
        records = []
        for at, (operation, key, value) in enumerate(made, start=1):
            # The first of two records has the offset before the change. A restart between the two reads both again.
            change = self._change if at == len(made) else self._change - 1
            headers = (
                Header("__op", operation, STRING),
                Header("__lsn", lsn, STRING),
                Header("__source_ts_ms", self._begun.committed_ms, INT64),
            )
            records.append(
                SourceRecord(
                    topic, None, table.key_schema, key, None if value is None else table.schema, value,
                    source_partition=self._partition, source_offset={"lsn": lsn, "change": change}, headers=headers,
                )
            )  # fmt: skip
        return records
