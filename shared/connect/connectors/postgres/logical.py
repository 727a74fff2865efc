"""Logical decoding: reads a publication's changes through a replication slot, by SQL functions.

The slot is the position at which a new connection continues. Postgres keeps the log from there on. The slot moves only
after the records before the new position are stored in Kafka. The reader does not read from the slot, but from a
temporary copy. The copy moves with every read, so a connection decodes nothing twice. The copy is dropped when the
connection ends, and the next connection copies the slot again.

The changes of a transaction arrive together, and transactions arrive in commit order. So a position is the final LSN of
a transaction and the number of its changes that were read. Changes up to the stored position are skipped. If a change
makes two records, only the second one has the position after it, since a restart must not continue between them.

After a read has ended, the slot may move to its end as soon as all records of the read are stored:

>>> progress = SlotProgress(None)
>>> progress.read = (100, 2)
>>> progress.mark(150)
>>> progress.stored({"lsn": "0/64", "change": 1})
>>> progress.target
>>> progress.stored({"lsn": "0/64", "change": 2})
>>> progress.target
150
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.connectors.postgres import sql
from penstock.shared.connect.connectors.postgres.bulk_read import BulkRead
from penstock.shared.connect.connectors.postgres.columns import (
    TYPE_NAMES,
    TYPE_OIDS,
    schema_of,
    value_from,
    value_of,
)
from penstock.shared.connect.connectors.postgres.database import driver
from penstock.shared.connect.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Delete,
    Insert,
    Relation,
    Truncate,
    Type,
    Update,
    Values,
    decode_pgoutput,
    lsn_of,
    lsn_text,
)
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Header, Offset, Partition, SourceRecord
from penstock.shared.connect.schema import INT64, STRING, Schema

log = get_logger(__name__)

SLOT_NAME = re.compile("[a-z0-9_]{1,63}")
CHANGES_MAX = 50_000
"""After this number of changes, a read ends with the current transaction, which is always read to its end."""
MOVE_SLOT_S = 3_600
"""The time limit for Postgres to move the slot: it decodes the log up to the new position."""
Position = tuple[int, int]
"""A transaction's final LSN, and the number of its changes that were read."""
Row = dict[str, Any]
# Debezium's values of the header `__op`.
CREATED = "c"
UPDATED = "u"
DELETED = "d"


def position_of(offset: Offset | None) -> Position:
    """Return the position of a stored offset; (0, 0) if there is none. Raises ConnectError if it is invalid."""
    if offset is None:
        return (0, 0)
    try:
        return lsn_of(str(offset["lsn"])), int(offset.get("change", 0))
    except (KeyError, TypeError, ValueError, DataError):
        raise ConnectError(f'{dict(offset)} is not an offset: expected {{"lsn": "0/16B3748", "change": 3}}') from None


class SlotProgress:
    """A replication slot's progress: the position read, the position stored, and the LSN to which the slot may move."""

    def __init__(self, offset: Offset | None) -> None:
        self.read = position_of(offset)
        self._stored = self.read
        self._marks: deque[tuple[Position, int]] = deque()
        self.target: int | None = None
        """The LSN to which the slot may move. The caller clears it after the move."""

    def __repr__(self) -> str:
        return f"<SlotProgress {lsn_text(self.read[0])} {self.read[1]}, {len(self._marks)} marks>"

    @property
    def is_stored(self) -> bool:
        """Whether the position stored is the position read."""
        return self._stored >= self.read

    def mark(self, lsn: int) -> None:
        """Record that a read of the slot has ended: there is nothing more to read up to `lsn`."""
        # Reads without records only move the LSN of the last mark, so an idle source keeps one mark.
        if self._marks and self._marks[-1][0] == self.read:
            self._marks.pop()
        self._marks.append((self.read, lsn))
        self._pass_stored_marks()

    def stored(self, offset: Offset | None) -> None:
        """Record that the offset is stored."""
        self._stored = max(self._stored, position_of(offset))
        self._pass_stored_marks()

    def _pass_stored_marks(self) -> None:
        while self._marks and self._marks[0][0] <= self._stored:
            self.target = self._marks.popleft()[1]


@dataclass
class IncompleteRow:
    """A row of an update without its large values, which must be read from the table."""

    table: _CapturedTable
    """The table's definition in the log at the time of the update."""
    names: list[str]
    key: dict[str, str]
    value: Row

    def complete(self, texts: Mapping[str, str | None]) -> None:
        """Add large values that were read from the table."""
        for name, text in texts.items():
            self.value[name] = None if text is None else self.table.value(name, text)


class _CapturedTable:
    """A captured table's columns and their schema: converts rows in the log to records' keys and values."""

    def __init__(self, relation: Relation, name: str, values: Mapping[str, Any]) -> None:
        self.relation = relation
        self.name = name
        self._scale = values["numeric.scale"]
        columns = [(column.name, TYPE_NAMES.get(column.type_oid, "text")) for column in relation.columns]
        self.schema = schema_of(name, columns, self._scale)
        # If the identity is the whole row, every column is in the key. The record then has no key.
        own = [] if relation.identity == "f" else [column.name for column in relation.columns if column.is_key]
        self.key_names = values["key.columns"] or own
        fields = [self.schema.field(key) for key in self.key_names]
        if None in fields:
            raise ConnectError(f"key.columns: not all of {', '.join(self.key_names)} are columns of {name}")
        self.key_schema = Schema.struct(None, *(f for f in fields if f is not None)) if fields else None

    def new_texts(self, update: Update) -> Values:
        """Return an update's new row, with the unchanged large values that the old row has.

        The old row has the columns of the replica identity: under REPLICA IDENTITY FULL, all columns.
        """
        if (old := update.old) is None:
            return update.new
        columns = zip(update.new, old, self.relation.columns, strict=True)
        return tuple(before if text is UNCHANGED and column.is_key else text for text, before, column in columns)

    def row(self, texts: Values) -> Row:
        """Return the values of a row in the log. Unchanged large values are left out."""
        found = {}
        for text, field, column in zip(texts, self.schema.fields, self.relation.columns, strict=True):
            if isinstance(text, str):
                found[field.name] = self.value(column.name, text)
            elif text is None:
                found[field.name] = None
        return found

    def value(self, name: str, text: str) -> Any:
        """Return a column's value, from its text in the log."""
        field = self.schema.field(name)
        assert field is not None
        oid = next(column.type_oid for column in self.relation.columns if column.name == name)
        return value_of(value_from(oid, text), field.schema, self._scale)

    def whole(self, row: Row) -> Row:
        """Return the changed row with null for every unknown column."""
        return {field.name: row.get(field.name) for field in self.schema.fields}

    def old_key(self, row: Row) -> Row | None:
        """Return the key of a row before its change. Raises ConnectError if the log does not contain it."""
        # Postgres logs only the columns of the replica identity of an old row.
        logged = {column.name for column in self.relation.columns if column.is_key}
        return self.key({name: value for name, value in row.items() if name in logged})

    def key(self, row: Row) -> Row | None:
        """Return the key of a row; None if its table has no key columns. Raises ConnectError if the row lacks one."""
        if unknown := [name for name in self.key_names if name not in row]:
            raise ConnectError(
                f"key.columns: the old {', '.join(unknown)} of a changed or deleted row of {self.name} is not in the "
                "log: ALTER TABLE … REPLICA IDENTITY FULL, for later changes; to lose no change, drop the replication "
                "slot, reset the connector's offsets, and read the tables again with mode=bulk"
            )
        return {name: row[name] for name in self.key_names} if self.key_schema is not None else None


class SlotReader:
    """Converts the messages of one replication slot to records, in order."""

    def __init__(self, values: Mapping[str, Any], partition: Partition, progress: SlotProgress) -> None:
        self._values = values
        self._partition = partition
        self._progress = progress
        self._wanted = {name if "." in name else f"public.{name}": name for name in values["table.whitelist"]}
        self._tables: dict[int, _CapturedTable | None] = {}
        self._base_types: dict[int, int] = {}
        """By OID of a type: the OID of its base type if that is in `TYPE_NAMES`, otherwise its own."""
        self._begun = Begin(0, 0)
        self._change = 0
        self.incomplete: list[IncompleteRow] = []

    def __repr__(self) -> str:
        return f"<SlotReader of {dict(self._partition)}, {self._progress!r}>"

    def records(self, data: bytes) -> list[SourceRecord]:
        """Return the records for one message of the slot: none unless it is a new change of a captured table.

        A change makes one record, or two if an update changes the key. Rows of updates that lack large values are added
        to `self.incomplete`. Raises ConnectError with the offset after the change if it cannot become a record.
        """
        message = decode_pgoutput(data)
        if isinstance(message, Begin):
            self._begun = message
            self._change = 0
        elif isinstance(message, Type):
            # A type in a schema, such as an enum, may have the name of one of Postgres's types.
            base = None if message.namespace else TYPE_OIDS.get(message.name)
            self._base_types[message.oid] = base or message.oid
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
                try:
                    made = list(self._changes_of_message(table, message))
                except ConnectError as e:
                    after = {"partition": self._partition, "offset": self._offset(self._change)}
                    raise ConnectError(
                        f"{e}; to skip this change, stop the connector, alter its offsets with "
                        f"{json.dumps({'offsets': [after]})}, and resume it"
                    ) from None
                self._progress.read = position
                return self._source_records(table, made)
        return []

    def _captured_table(self, relation: Relation) -> _CapturedTable | None:
        columns = [
            column._replace(type_oid=self._base_types.get(column.type_oid, column.type_oid))
            for column in relation.columns
        ]
        relation = relation._replace(columns=tuple(columns))
        qualified = f"{relation.namespace}.{relation.name}"
        if self._wanted and qualified not in self._wanted:
            return None
        plain = relation.name if relation.namespace == "public" else qualified
        return _CapturedTable(relation, self._wanted.get(qualified, plain), self._values)

    def _changes_of_message(
        self, table: _CapturedTable, message: Insert | Update | Delete
    ) -> Iterator[tuple[str, Row | None, Row | None]]:
        """Return the operation, key and value of each record of a change: two if an update changes the key."""
        if isinstance(message, Insert):
            row = table.row(message.new)
            yield CREATED, table.key(row), row
        elif isinstance(message, Delete):
            yield self._delete_change(table, table.row(message.old))
        else:
            texts = table.new_texts(message)
            row = table.row(texts)
            # Without an old row, the update has changed no column of the replica identity.
            old = row if message.old is None else table.row(message.old)
            # A changed key needs a delete of the old key. Otherwise the old row would stay in the topic for ever.
            if table.old_key(old) != table.key(row):
                yield self._delete_change(table, old)
            value = table.whole(row)
            # Large values that are neither in the message nor in an old row are read from the table afterwards.
            missing = [name for name in value if name not in row]
            if missing:
                self._note_incomplete_row(table, texts, missing, value)
            yield UPDATED, table.key(row), value

    def _delete_change(self, table: _CapturedTable, old: Row) -> tuple[str, Row | None, Row | None]:
        key = table.old_key(old)
        is_tombstone = self._values["tombstones.on.delete"] and key is not None
        return DELETED, key, None if is_tombstone else table.whole(old)

    def _note_incomplete_row(self, table: _CapturedTable, texts: Values, missing: Sequence[str], value: Row) -> None:
        columns = table.relation.columns
        key = {
            column.name: text
            for column, text in zip(columns, texts, strict=True)
            if column.is_key and isinstance(text, str)
        }
        self.incomplete.append(IncompleteRow(table, list(missing), key, value))

    def _offset(self, change: int) -> dict[str, Any]:
        return {"lsn": lsn_text(self._begun.final_lsn), "change": change}

    def _source_records(
        self, table: _CapturedTable, made: Sequence[tuple[str, Row | None, Row | None]]
    ) -> list[SourceRecord]:
        topic = self._values["topic.prefix"] + table.name
        records = []
        for at, (operation, key, value) in enumerate(made, start=1):
            # The first of two records has the offset before the change. A restart between the two reads both again.
            change = self._change if at == len(made) else self._change - 1
            headers = (
                Header("__op", operation, STRING),
                Header("__lsn", lsn_text(self._begun.final_lsn), STRING),
                Header("__source_ts_ms", self._begun.committed_ms, INT64),
            )
            records.append(
                SourceRecord(
                    topic, None, table.key_schema, key, None if value is None else table.schema, value,
                    source_partition=self._partition, source_offset=self._offset(change), headers=headers,
                )
            )  # fmt: skip
        return records


class LogicalReader:
    """Reads a publication's changes from its replication slot."""

    def __init__(self, values: Mapping[str, Any], stored: Offset | None) -> None:
        self._values = values
        self._slot = values["slot.name"]
        self._publication = values["publication.name"] or self._slot
        self._was_read = stored is not None
        self._progress = SlotProgress(stored)
        self._changes = SlotReader(values, self.partition_of(self._slot), self._progress)
        self._connection: Any = None
        self._copy = ""
        self._reading: BulkRead | None = None
        self._has_records = False
        self._row_count = 0
        self._deferred_failure: ConnectError | None = None
        """Why the task fails once the changes before that are read: a table is no longer in the publication."""
        self._failure: ConnectError | None = None
        """Why no change after the position read can be read."""
        self.is_idle = False

    def __repr__(self) -> str:
        return f"<LogicalReader of {self._slot}, {self._progress!r}>"

    @property
    def is_failing(self) -> bool:
        """Whether `read` returns no more records, but raises an error once the records before are stored.

        Either the next change cannot become a record, or a table is not in the publication and the changes before that
        are read. Other errors do not count: `read` raises them at once.
        """
        return self._failure is not None

    @staticmethod
    def partition_of(slot: str) -> dict[str, str]:
        """Return the source partition of a replication slot."""
        return {"protocol": "1", "slot": slot}

    async def read(self, connection: Any) -> list[SourceRecord]:
        """Return the next records. Several calls may return the records of one read of the slot.

        Sets `is_idle`: whether the caller should wait for `poll.interval.ms` before the next call. If a change cannot
        become a record, or a table has left the publication, a call raises ConnectError once the records before that
        are stored.
        """
        if self._failure is not None:
            # The change may be skipped by its offset, and the table removed from table.whitelist. So the records before
            # that must be stored.
            if self._progress.is_stored:
                raise self._failure
            self.is_idle = True
            return []
        if connection is not self._connection:
            self._reading = None
            await self._prepare_replication(connection)
            self._connection = connection
        if self._reading is None:
            # DROP TABLE takes a table out of the publication. After a rename, another table may have its name. This
            # read has the changes before that.
            self._deferred_failure = await self._publication_error(connection)
            await self.move_slot(connection)
            self._reading = await self._begin_bulk_read(connection)
            self._has_records = False
            self._row_count = 0
        before = self._progress.read
        try:
            records = await self._read_changes(connection, self._reading)
        except BaseException:
            # The records were not returned, so they are read again.
            self._progress.read = before
            raise
        self.is_idle = self._reading is None and not self._has_records
        return records

    async def _read_changes(self, connection: Any, reading: BulkRead) -> list[SourceRecord]:
        rows = await reading.rows()
        self._changes.incomplete.clear()
        records: list[SourceRecord] = []
        failure: ConnectError | None = None
        try:
            for row in rows:
                records += self._changes.records(row["data"])
        except ConnectError as e:
            failure = e
        for incomplete in self._changes.incomplete:
            await self._complete_large_values(connection, incomplete)
        self._failure = failure
        if failure is not None:
            # The read does not end, so the slot stays before the change.
            return records
        self._has_records = self._has_records or bool(records)
        self._row_count += len(rows)
        if len(rows) < self._values["batch.max.rows"]:
            self._reading = None
            await self._end_bulk_read(connection, reading)
            # Otherwise the next read has more changes.
            if self._row_count < CHANGES_MAX:
                self._failure = self._deferred_failure
        return records

    async def move_slot(self, connection: Any) -> None:
        """Move the slot to the position up to which everything is stored, if that is ahead of the slot."""
        if (target := self._progress.target) is not None:
            # A slot that was moved further by hand stays there.
            await connection.execute(
                "SELECT pg_replication_slot_advance(slot_name, $2::text::pg_lsn) FROM pg_replication_slots "
                "WHERE slot_name = $1 AND confirmed_flush_lsn < $2::text::pg_lsn",
                self._slot, lsn_text(target), timeout=MOVE_SLOT_S,
            )  # fmt: skip
            # A commit may have set a later position meanwhile.
            if self._progress.target == target:
                self._progress.target = None

    def stored(self, offset: Offset | None) -> None:
        """Record that this offset is stored: the slot may move."""
        self._progress.stored(offset)

    async def _begin_bulk_read(self, connection: Any) -> BulkRead:
        names = '"' + self._publication.replace('"', '""') + '"'
        statement = (
            f"SELECT data FROM pg_logical_slot_get_binary_changes('{self._copy}', NULL, {CHANGES_MAX}, "
            f"'proto_version', '1', 'publication_names', {_quote_sql_literal(names)})"
        )
        begun = await BulkRead.begun(connection, statement, self._values["batch.max.rows"], 1)
        # The cursor is held at once, so that a paused task leaves no transaction open.
        await begun.hold()
        return begun

    async def _end_bulk_read(self, connection: Any, reading: BulkRead) -> None:
        await reading.end()
        # The copy's position includes changes without records, so the slot moves past them as well.
        at = await connection.fetchval(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1", self._copy
        )
        self._progress.mark(lsn_of(at))

    async def _complete_large_values(self, connection: Any, row: IncompleteRow) -> None:
        """Read the current large values that an update did not contain.

        They stay null if the update has no key, if the row or the column no longer exists, or if the column's type in
        records has changed.
        """
        # The log describes the table as it was at the update. The table may have changed since then.
        columns = await connection.fetch(
            f"SELECT $1::oid::regclass::text AS table, c.* FROM ({sql.columns_of_table('$1')}) c",
            row.table.relation.oid,
        )
        types = {column["name"]: column["type"] for column in columns}
        kinds = {column["name"]: TYPE_NAMES.get(column["type_oid"]) for column in columns}
        logged = {column.name: TYPE_NAMES.get(column.type_oid) for column in row.table.relation.columns}
        names = [name for name in row.names if name in types and kinds[name] == logged[name]]
        if not names or not row.key or not row.key.keys() <= types.keys():
            return
        wanted = ", ".join(f"{sql.quoted_column(name)}::text" for name in names)
        wheres = [f"{sql.quoted_column(name)} = ${at}::text::{types[name]}" for at, name in enumerate(row.key, start=1)]
        found = await connection.fetchrow(
            f"SELECT {wanted} FROM {columns[0]['table']} WHERE {' AND '.join(wheres)}", *row.key.values()
        )
        if found is not None:
            row.complete(dict(zip(names, found, strict=True)))

    # --- the publication and the slot ---

    async def _prepare_replication(self, connection: Any) -> None:
        level = await connection.fetchval("SHOW wal_level")
        if level != "logical":
            raise ConnectError(
                f"mode=logical needs wal_level=logical, and this Postgres has wal_level={level}: run ALTER SYSTEM SET "
                "wal_level = 'logical', and start Postgres again"
            )
        await self._check_log(connection)
        await self._ensure_publication(connection)
        await self._ensure_replication_slot(connection)
        self._copy = f"penstock_{uuid.uuid4().hex[:16]}"
        await self._create_replication_object(
            connection,
            f"SELECT pg_copy_logical_replication_slot('{self._slot}', '{self._copy}', true)",
            "a temporary copy of the slot cannot be created",
        )

    async def _check_log(self, connection: Any) -> None:
        """Raise ConnectError if the position is beyond the end of the log: new changes up to there would be skipped."""
        end = await connection.fetchval(
            "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END::text"
        )
        lsn = self._progress.read[0]
        if lsn > lsn_of(end):
            raise ConnectError(
                f"the offset {lsn_text(lsn)} is beyond the end of the log, {end}, so it is of another log: another "
                "server has taken over, or the database was restored; reset the connector's offsets, and read the "
                "tables again"
            )

    async def _ensure_publication(self, connection: Any) -> None:
        name = self._publication
        tables = self._values["table.whitelist"]
        if await connection.fetchval("SELECT 1 FROM pg_publication WHERE pubname = $1", name) is None:
            create = self._create_publication
            if not self._values["slot.autocreate"] or not tables:
                raise ConnectError(f"there is no publication {name}; create it: {create}")
            for table in tables:
                await self._check_identity(connection, table)
            # With publish_via_partition_root, the changes of a partition name the partitioned table.
            options = "publish = 'insert, update, delete', publish_via_partition_root = true"
            await self._create_replication_object(
                connection, f"{create} WITH ({options})", "the publication cannot be created"
            )
            log.info("created a publication", publication=name, tables=tables)

    @property
    def _create_publication(self) -> str:
        tables = ", ".join(sql.quoted(table) for table in self._values["table.whitelist"])
        return f"CREATE PUBLICATION {sql.quoted_column(self._publication)} FOR TABLE {tables or '…'}"

    async def _publication_error(self, connection: Any) -> ConnectError | None:
        """Return an error if a table to read is not in the publication. Raises ConnectError if the publication is
        gone: then Postgres returns no changes."""
        name = self._publication
        rows = await connection.fetch(
            "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = $1", name
        )
        there = {f"{row['schemaname']}.{row['tablename']}" for row in rows}
        for table in self._values["table.whitelist"]:
            named = table if "." in table else f"public.{table}"
            if named not in there:
                found = await connection.fetchrow(
                    "SELECT c.oid IS NULL AS is_dropped, c.relkind = 'p' AND NOT p.pubviaroot AS has_partitions_only "
                    "FROM pg_publication p LEFT JOIN pg_class c ON c.oid = to_regclass($1) WHERE p.pubname = $2",
                    sql.quoted(named), name,
                )  # fmt: skip
                if found is None:
                    raise ConnectError(f"there is no publication {name}; create it: {self._create_publication}")
                if found["is_dropped"]:
                    return ConnectError(f"there is no table {table}: create it, or remove it from table.whitelist")
                change = (
                    "SET (publish_via_partition_root = true)"
                    if found["has_partitions_only"]
                    else f"ADD TABLE {sql.quoted(table)}"
                )
                return ConnectError(
                    f"the publication {name} has no table {table}: ALTER PUBLICATION {sql.quoted_column(name)} "
                    f"{change}; changes before that are not read: to lose none, read the table with mode=bulk too"
                )
        return None

    async def _check_identity(self, connection: Any, table: str) -> None:
        """Check that a table to publish has a replica identity; without it Postgres rejects updates and deletes."""
        named = table if "." in table else f"public.{table}"
        found = await connection.fetchrow(
            "SELECT relreplident = 'd' AS by_key, relreplident = 'n' AS nothing, EXISTS (SELECT 1 FROM pg_index "
            "WHERE indrelid = c.oid AND indisprimary) AS has_key FROM pg_class c WHERE c.oid = to_regclass($1)",
            sql.quoted(named),
        )
        if found is None:
            raise ConnectError(f"there is no table {table}")
        if found["nothing"] or (found["by_key"] and not found["has_key"]):
            raise ConnectError(
                f"{table} has no primary key: once it is published, Postgres rejects updates and deletes of its rows; "
                f"ALTER TABLE {sql.quoted(table)} REPLICA IDENTITY FULL, or create the publication yourself"
            )

    async def _ensure_replication_slot(self, connection: Any) -> None:
        found = await connection.fetchrow(
            "SELECT plugin, database, wal_status, current_database() AS here FROM pg_replication_slots "
            "WHERE slot_name = $1", self._slot,
        )  # fmt: skip
        if found is None:
            await self._make_replication_slot(connection)
        elif found["plugin"] != "pgoutput" or found["database"] != found["here"]:
            raise ConnectError(
                f"the replication slot {self._slot} is of plugin {found['plugin']} in database {found['database']}: "
                "choose another slot (slot.name)"
            )
        elif found["wal_status"] == "lost":
            raise ConnectError(
                f"the replication slot {self._slot} has lost changes, since the log grew beyond "
                f"max_slot_wal_keep_size: drop it with SELECT pg_drop_replication_slot('{self._slot}'), reset the "
                "connector's offsets, and read the tables again"
            )
        self._was_read = True

    async def _make_replication_slot(self, connection: Any) -> None:
        # A new slot begins at the current end of the log, so the changes since the stored offset would be lost. Without
        # a stored offset, a restarted task does not know that there was a slot before. It makes a new one, unless
        # slot.autocreate=false.
        if self._was_read:
            raise ConnectError(
                f"the replication slot {self._slot} is gone, and with it the changes since it was last read: reset the "
                "connector's offsets, and read the tables again"
            )
        create = f"SELECT pg_create_logical_replication_slot('{self._slot}', 'pgoutput')"
        if not self._values["slot.autocreate"]:
            raise ConnectError(f"there is no replication slot {self._slot}; create it: {create}")
        if (error := await self._publication_error(connection)) is not None:
            # A new slot has no changes to read before the error. Without a reader it would keep the log.
            raise error
        await self._create_replication_object(connection, create, "the replication slot cannot be created")
        log.info("created a replication slot", slot=self._slot)

    async def _create_replication_object(self, connection: Any, statement: str, message: str) -> None:
        """Execute a statement that creates a replication object.

        Raises ConnectError with the statement if a privilege is missing or a limit is reached.
        """
        pg = driver().exceptions
        try:
            await connection.execute(statement)
        except (pg.InsufficientPrivilegeError, pg.ConfigurationLimitExceededError, pg.FeatureNotSupportedError) as e:
            raise ConnectError(
                f"{message}: {e}; run it as a user with the privilege, or raise the limit: {statement}"
            ) from e


def _quote_sql_literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
