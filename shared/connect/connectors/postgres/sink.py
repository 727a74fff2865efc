"""The Postgres sink: insert, upsert, update and delete, in transactions of at most `batch.size` rows.

Rows are sent by COPY. With `insert` they go directly into the table. Upserts, updates and deletes go into a temporary
table, and one statement applies them to the table. With `exactly.once=true` the offsets are in a table of the database,
and change in the same transaction as the rows. From this table, a task detects that another task has written to its
partition, and fails. A topic that was deleted and created again is detected only by a lower offset (`sink_offsets`
describes both).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from penstock.shared.common.errors import ConfigError, DataError, RetriableError
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.config_def import HIGH, LOW, MEDIUM, ConfigDef, Type, at_least, one_of
from penstock.shared.connect.connector import Props, SinkConnector
from penstock.shared.connect.connectors.postgres import sql
from penstock.shared.connect.connectors.postgres.columns import (
    INTEGER_BYTES,
    column_adapter,
    decode_date,
    decode_integer,
    decode_timestamp,
    encode_as_date,
    encode_as_timestamp,
    encode_integer,
)
from penstock.shared.connect.connectors.postgres.database import (
    Codec,
    change_schema,
    connect,
    connection_config,
    driver,
    is_data_error,
    set_codecs,
    transaction,
    translated,
)
from penstock.shared.connect.connectors.postgres.sink_offsets import OffsetTable
from penstock.shared.connect.connectors.postgres.sink_rows import RowBuilder, RowSettings, RowsToWrite, columns_of
from penstock.shared.connect.connectors.retries import Retries
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.task import SinkTask

STAGINGS_MAX = 256
"""The maximum number of temporary tables, one for each set of columns."""


def sink_settings() -> ConfigDef:
    """Return the definitions of the Postgres sink's settings."""
    return (
        connection_config()
        .define("insert.mode", Type.STRING, "insert", HIGH,
                "How rows are written: insert, upsert (by primary key) or update.",
                one_of("insert", "upsert", "update"), group="Writes", order=1)
        .define("batch.size", Type.INT, 3_000, MEDIUM, "Maximum number of rows of one transaction.", at_least(1),
                group="Writes", order=2)
        .define("delete.enabled", Type.BOOLEAN, False, MEDIUM, "Whether a tombstone deletes the row with its key.",
                group="Writes", order=3)
        .define("table.name.format", Type.STRING, "${topic}", MEDIUM,
                "Name of the table. ${topic} is replaced by the record's topic.",
                group="Data Mapping", order=1)
        .define("pk.mode", Type.STRING, "none", HIGH,
                "Source of the primary key: none, kafka (topic, partition, offset), record_key or record_value.",
                one_of("none", "kafka", "record_key", "record_value"), group="Data Mapping", order=2)
        .define("pk.fields", Type.LIST, "", MEDIUM,
                "Columns of the primary key. Empty: all fields of the key or value, or with pk.mode=kafka "
                "__connect_topic, __connect_partition and __connect_offset.",
                group="Data Mapping", order=3)
        .define("fields.whitelist", Type.LIST, "", MEDIUM, "Fields of the value to write. Empty: all.",
                group="Data Mapping", order=4)
        .define("auto.create", Type.BOOLEAN, False, MEDIUM, "Whether missing tables are created.",
                group="DDL", order=1)
        .define("auto.evolve", Type.BOOLEAN, False, MEDIUM, "Whether missing columns are added.",
                group="DDL", order=2)
        .define("exactly.once", Type.BOOLEAN, False, HIGH,
                "Whether offsets are stored in the database, in the transaction of the rows.",
                group="Writes", order=4)
        .define("offsets.table", Type.STRING, "penstock_connect_offsets", LOW, "Table of these offsets.",
                group="Writes", order=5)
    )  # fmt: skip


class StagedColumns(NamedTuple):
    """The columns of a temporary table, and the table in which its rows are upserted, updated or deleted."""

    table: str
    names: tuple[str, ...]
    types: tuple[str, ...]


class PostgresSinkTask(SinkTask):
    """Writes one task's records."""

    # `stop` is called after a failed `start`, too.
    _connection: Any = None

    async def start(self, props: Mapping[str, str]) -> None:
        values = sink_settings().parse(props)
        self._values = values
        self._settings = RowSettings.of(values)
        self._builder = RowBuilder(self._settings)
        self._tables: dict[str, sql.SqlTable] = {}
        self._stagings: dict[StagedColumns, str] = {}
        self._numbers = itertools.count()
        self._retries = Retries(values["max.retries"])
        self._done: dict[TopicPartition, int] = {}
        """The written offset of each partition in the current delivery. Records below it are not written again."""
        self._reported: set[tuple[TopicPartition, int]] = set()
        """The reported records of the current delivery, so that a repeated batch does not report them again."""
        self._offsets = OffsetTable(values["offsets.table"], props["name"]) if values["exactly.once"] else None
        connection = await self._connect_if_needed()
        # A task outside of a worker has no name, and no offsets without exactly.once.
        if self._offsets is None and "name" in props:
            # Otherwise the offsets of an earlier time with exactly.once=true would apply when it is true again, and the
            # records since then would be written twice.
            try:
                await OffsetTable(values["offsets.table"], props["name"]).forget(connection)
            except Exception as e:
                raise translated(e, writes=True) from e

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        self._forget_partitions(partitions)
        if self._offsets is None:
            return
        try:
            found = await self._offsets.open(await self._connect_if_needed(), partitions)
        except Exception as e:
            raise translated(e, writes=True) from e
        for tp, offset in found.items():
            self.context.offset(tp, offset)

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        self._forget_partitions(partitions)
        if self._offsets is not None:
            self._offsets.close(partitions)

    def _forget_partitions(self, partitions: frozenset[TopicPartition]) -> None:
        self._done = {tp: offset for tp, offset in self._done.items() if tp not in partitions}
        self._reported = {(tp, offset) for tp, offset in self._reported if tp not in partitions}

    async def put(self, records: list[SinkRecord]) -> None:
        size = self._values["batch.size"]
        for at in range(0, len(records), size):
            await self._put_batch(records[at : at + size])
        self._done.clear()
        self._reported.clear()
        if self._offsets is not None:
            self._offsets.settled()

    def _is_written_record(self, record: SinkRecord) -> bool:
        return record.kafka_offset < self._done.get(record.original_tp, 0)

    def _note_written_offsets(self, records: list[SinkRecord]) -> None:
        # The last offset of each partition remains, since a batch has them in order.
        self._done |= {record.original_tp: record.kafka_offset + 1 for record in records}
        self._retries.succeeded()

    async def _put_batch(self, records: list[SinkRecord]) -> None:
        """Write a batch. Each record that cannot be a row is reported and left out.

        Raises ConnectError if the error of a record is not tolerated. Raises RetriableError or ConnectError for any
        other error.
        """
        # The first attempt has the whole batch. After an errant record, the next attempt has as many records as were in
        # front of it, and each success doubles this number. So the rest of the batch is not tried as a whole for each
        # errant record.
        at = 0
        size = len(records)
        while at < len(records):
            part = records[at : at + size]
            error = await self._try_to_write_rows(part)
            if error is not None and await self._have_columns_changed(part):
                error = await self._try_to_write_rows(part)
            if error is None:
                at = at + len(part)
                size = 2 * size
                continue
            # A missing table then gets the columns of all other records: the search begins with the first record alone.
            if isinstance(error, DataError) and len(rows := await self._report_unconvertible_records(part)) < len(part):
                records = [*records[:at], *rows, *records[at + len(part) :]]
                size = max(1, len(rows))
                continue
            errant, error = await self._first_errant(part, error)
            size = max(1, errant)
            if error is not None:
                # Reported before the records in front of it are written. If the report fails the task, these records
                # are therefore not written twice.
                await self._report_errant_record(part[errant], error)
                # If these records fail now, the database has changed meanwhile: the next turn searches again.
                if await self._try_to_write_rows(part[:errant]) is not None:
                    continue
                self._note_written_offsets([part[errant]])
            at += errant + 1

    async def _have_columns_changed(self, records: list[SinkRecord]) -> bool:
        """Read the columns of the records' known tables again. Returns whether one has other columns or types now.

        Raises RetriableError or ConnectError if the database fails.
        """
        tables = {self._settings.table(record.topic) for record in records} & self._tables.keys()
        before = {name: self._tables.pop(name) for name in tables}
        try:
            connection = await self._connect_if_needed()
            for name in tables:
                if (found := await self._describe_table(connection, name)) is not None:
                    self._tables[name] = found
        except Exception as e:
            raise await self._failure_to_raise(e) from e
        return any(self._tables.get(name) != table for name, table in before.items())

    async def _try_to_write_rows(self, records: list[SinkRecord], *, keep: bool = True) -> Exception | None:
        """Write the records. Without `keep` their rows are rolled back. Returns the error if a record cannot be a row,
        else None.

        Raises RetriableError or ConnectError for any other error.
        """
        try:
            await self._write_in_transactions(records, keep=keep)
        except Exception as e:
            # Two kinds of errors: of a record, which is found and reported, or of the database, which ends the batch.
            if isinstance(e, DataError) or is_data_error(e):
                return e
            raise await self._failure_to_raise(e) from e
        return None

    async def _first_errant(self, records: list[SinkRecord], error: Exception) -> tuple[int, Exception | None]:
        """Return the index of the first record that cannot be a row, and its error. No row is written then.

        Writing the records together must have failed with `error`. If another session has removed its cause meanwhile,
        returns None as the error: the records up to and with this index are written.
        """
        # 1. Doubling lengths from the start find a failing prefix. An early error then costs few attempts.
        # 2. A binary search between the last succeeding and the first failing length finds the record.
        # 3. If the succeeding attempt came last, the failing one is repeated: its error may be over.
        # The first `fine` records succeed together; after the first loop, the first `failing` records fail.
        fine = 0
        failing = 1
        found: Exception | None = error
        while failing < len(records):
            found = await self._try_to_write_rows(records[:failing], keep=False)
            if found is not None:
                error = found
                break
            fine = failing
            failing = min(2 * failing, len(records))
        while failing - fine > 1:
            middle = (fine + failing) // 2
            found = await self._try_to_write_rows(records[:middle], keep=False)
            if found is None:
                fine = middle
            else:
                failing = middle
                error = found
        if found is not None:
            return failing - 1, error
        return failing - 1, await self._try_to_write_rows(records[:failing])

    async def _report_unconvertible_records(self, records: list[SinkRecord]) -> list[SinkRecord]:
        """Report the records that cannot be converted to rows, and return the others. Needs no database."""
        convertible = []
        for record in records:
            try:
                if not self._is_written_record(record):
                    self._builder.build([record])
            except DataError as e:
                await self._report_errant_record(record, e)
            else:
                convertible.append(record)
        return convertible

    async def _report_errant_record(self, record: SinkRecord, error: Exception) -> None:
        """Report a record's error once. Raises ConnectError if there is no reporter, or errors are not tolerated."""
        reported = (record.original_tp, record.kafka_offset)
        if reported in self._reported:
            return
        reporter = self.context.errant_record_reporter
        message = f"{record.coordinates} cannot be written: {type(error).__name__}: {error}"
        if reporter is None:
            raise ConnectError(message) from error
        named = DataError(message)
        named.__cause__ = error
        await reporter.report(record, named)
        self._reported.add(reported)

    async def _failure_to_raise(self, error: Exception) -> Exception:
        """Return the error to raise: RetriableError for a temporary error while retries are left, else ConnectError."""
        ours = translated(error, writes=True)
        # A changed table may be the cause, so the tables are described again.
        self._tables.clear()
        if self._connection is not None and (isinstance(ours, RetriableError) or self._connection.is_closed()):
            connection = self._connection
            self._connection = None
            if not connection.is_closed():
                connection.terminate()
        if not isinstance(ours, RetriableError):
            return ours
        self.context.timeout(self._values["retry.backoff.ms"])
        return self._retries.failed(str(ours))

    async def _connect_if_needed(self) -> Any:
        if self._connection is None or self._connection.is_closed():
            self._stagings.clear()
            self._tables.clear()
            connection = await connect(self._values)
            times = [
                Codec("date", "tuple", encode_as_date, decode_date),
                Codec("timestamp", "tuple", encode_as_timestamp, decode_timestamp),
                Codec("timestamptz", "tuple", encode_as_timestamp, decode_timestamp),
            ]
            integers = [
                Codec(kind, "binary", partial(encode_integer, size), decode_integer)
                for kind, size in INTEGER_BYTES.items()
            ]
            await set_codecs(connection, [*times, *integers])
            self._connection = connection
        return self._connection

    async def _write_in_transactions(self, records: list[SinkRecord], *, keep: bool) -> None:
        """Write the records and their offsets in one transaction, or in several if the records have too many sets of
        columns.

        Without `keep` each transaction is rolled back. Records are skipped if an earlier transaction of the batch has
        written them. They are also skipped if they were written before a temporary error and are delivered again.
        """
        if self._done:
            records = [record for record in records if not self._is_written_record(record)]
        if not records:
            return
        connection = await self._connect_if_needed()
        groups = self._builder.build(records)
        # Each set of columns needs a temporary table. A batch with too many sets is written in halves.
        if len({(group.table, group.names) for group in groups if self._uses_staging_table(group)}) > STAGINGS_MAX:
            half = len(records) // 2
            await self._write_in_transactions(records[:half], keep=keep)
            await self._write_in_transactions(records[half:], keep=keep)
            return
        for table in dict.fromkeys(group.table for group in groups):
            await self._ensure_sink_table(connection, table, [group for group in groups if group.table == table])
        groups = self._fit_groups_to_tables(groups)
        # A rollback would drop temporary tables that were created in the transaction.
        await self._have_stagings(connection, groups)
        async with transaction(connection, keep=keep):
            if self._offsets is not None:
                groups = self._fit_groups_to_tables(
                    self._builder.build(await self._offsets.advance(connection, records))
                )
            for group in groups:
                await self._write_rows(connection, group)
            if not keep:
                # A rollback does not check deferred constraints, as a commit does.
                await connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if keep:
            if self._offsets is not None:
                self._offsets.committed(records)
            self._note_written_offsets(records)

    def _uses_staging_table(self, group: RowsToWrite) -> bool:
        return self._settings.mode != "insert" or group.deletes

    def _fit_groups_to_tables(self, groups: list[RowsToWrite]) -> list[RowsToWrite]:
        """Return the groups without the columns that their table lacks, which have only nulls, without nulls of
        generated columns, and without deletes from missing tables."""
        return [
            fitted
            for group in groups
            if (table := self._tables.get(group.table)) is not None
            for fitted in group.with_columns(table.columns).without_nulls_of(table.generated)
        ]

    async def _write_rows(self, connection: Any, group: RowsToWrite) -> None:
        table = self._tables[group.table]
        names = group.names
        if not self._uses_staging_table(group):
            await _copy_rows_to_table(connection, table.name, table, names, group.rows)
            return
        key_table = sql.SqlTable(table.name, table.columns, group.key)
        staged = self._stagings[self._staged_columns(group)]
        await _copy_rows_to_table(connection, staged, table, names, group.rows)
        if group.deletes:
            statement = sql.delete_from(key_table, staged)
        elif self._settings.mode == "upsert":
            statement = sql.upsert_from(key_table, staged, names)
        else:
            statement = sql.update_from(key_table, staged, names)
        await connection.execute(statement)
        await connection.execute(f"TRUNCATE {sql.quoted(staged)}")

    def _staged_columns(self, group: RowsToWrite) -> StagedColumns:
        columns = self._tables[group.table].columns
        return StagedColumns(group.table, group.names, tuple(columns[name] for name in group.names))

    async def _have_stagings(self, connection: Any, groups: list[RowsToWrite]) -> None:
        """Create a temporary table for each set of columns; drop those of other batches if there would be too many."""
        needed = {self._staged_columns(group) for group in groups if self._uses_staging_table(group)}
        if len(self._stagings.keys() | needed) > STAGINGS_MAX:
            for key in self._stagings.keys() - needed:
                await connection.execute(f"DROP TABLE {sql.quoted(self._stagings.pop(key))}")
        for columns in sorted(needed - self._stagings.keys()):
            name = f"penstock_staged_{next(self._numbers)}"
            await connection.execute(sql.staging(name, self._tables[columns.table], columns.names))
            self._stagings[columns] = name

    async def _ensure_sink_table(self, connection: Any, name: str, groups: list[RowsToWrite]) -> None:
        """Read the table's columns unless all needed ones are known. Create the table or add missing columns if needed.

        Raises ConnectError if the settings do not allow it. A delete creates no table and adds no column. Raises
        DataError if the table lacks a column of a delete.
        """
        wanted = columns_of(groups)
        table = self._tables.get(name)
        if table is not None and wanted.keys() <= table.columns.keys():
            return
        table = await self._describe_table(connection, name)
        writes = [group for group in groups if not group.deletes]
        if table is None:
            if not writes:
                return
            if not self._values["auto.create"]:
                raise ConnectError(f"table {name} does not exist, and auto.create is false")
            if not (fields := columns_of(writes)):
                raise DataError(f"table {name} cannot be created: all values of the records are null")
            await change_schema(connection, sql.create_table(name, fields, writes[0].key))
            # Another task may have created the table at the same time, with other columns.
            table = await self._describe_changed_table(connection, name)
        if missing := {one: kind for one, (kind, _) in columns_of(writes).items() if one not in table.columns}:
            # A name that Postgres does not allow is an error of the record, not of the table.
            sql.quoted_columns(missing)
            if not self._values["auto.evolve"]:
                first = next(group.first for group in writes if missing.keys() & columns_of([group]).keys())
                raise ConnectError(
                    f"table {name} has no column {', '.join(missing)}, and auto.evolve is false "
                    f"(records from {first} on)"
                )
            await change_schema(connection, sql.add_columns(name, missing))
            table = await self._describe_changed_table(connection, name)
        self._tables[name] = table
        if unknown := wanted.keys() - table.columns.keys():
            raise DataError(f"table {name} has no column {', '.join(sorted(unknown))}, which a tombstone's key names")

    async def _describe_changed_table(self, connection: Any, name: str) -> sql.SqlTable:
        if (found := await self._describe_table(connection, name)) is None:
            raise RetriableError(f"table {name} was dropped while it was changed")
        return found

    async def _describe_table(self, connection: Any, name: str) -> sql.SqlTable | None:
        rows = await connection.fetch(sql.columns_of_table("to_regclass($1)"), sql.quoted(name))
        if not rows:
            return None
        generated = frozenset(row["name"] for row in rows if row["generated"])
        return sql.SqlTable(name, {row["name"]: row["type"] for row in rows}, generated=generated)

    async def stop(self) -> None:
        if self._connection is not None and not self._connection.is_closed():
            await self._connection.close(timeout=5)


def _adapt_rows_to_columns(
    rows: list[tuple[Any, ...]], names: tuple[str, ...], table: sql.SqlTable
) -> list[tuple[Any, ...]]:
    adapters = [
        (at, adapt) for at, name in enumerate(names) if (adapt := column_adapter(table.columns[name])) is not None
    ]
    if not adapters:
        return rows
    columns = list(zip(*rows, strict=True))
    for at, adapt in adapters:
        columns[at] = tuple(map(adapt, columns[at]))
    return list(zip(*columns, strict=True))


async def _copy_rows_to_table(
    connection: Any, target: str, table: sql.SqlTable, names: tuple[str, ...], rows: list[tuple[Any, ...]]
) -> None:
    """Copy rows of `table` to the target, which is this table or a temporary one.

    Raises DataError if the rows have no columns, and ConnectError if the driver cannot write the type of a column.
    """
    if not names:
        raise DataError(f"the record has no column of table {table.name}")
    # COPY takes no database, with which the name may begin.
    schema, name = [None, *target.split(".")][-2:]
    adapted = _adapt_rows_to_columns(rows, names, table)
    try:
        await connection.copy_records_to_table(name, records=adapted, columns=names, schema_name=schema)
    except driver().InternalClientError as e:
        if "no binary format encoder" not in str(e):
            raise
        raise ConnectError(
            f"table {table.name} has a column that asyncpg cannot write: {e}; change the type of the column, or leave "
            "the column out (fields.whitelist)"
        ) from e


class PostgresSinkConnector(SinkConnector):
    """Writes records as rows of Postgres tables."""

    task_class = PostgresSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return sink_settings()

    def validate(self, props: Props) -> list[Any]:
        found = super().validate(props)
        values = {value.name: value for value in found}
        if not any(value.errors for value in found):
            try:
                RowSettings.of({name: value.value for name, value in values.items()})
            except ConfigError as e:
                values["pk.mode"].errors.append(str(e))
        return found

    async def alter_offsets(self, props: Props, offsets: Mapping[TopicPartition, int | None]) -> bool:
        values = sink_settings().parse(props)
        if values["exactly.once"]:
            connection = await connect(values)
            try:
                await OffsetTable(values["offsets.table"], props["name"]).alter(connection, offsets)
            finally:
                await connection.close()
        return True
