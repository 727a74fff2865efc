"""The Postgres source: reads tables or a query repeatedly, or the changes of published tables from Postgres's log.

`incrementing` finds new rows by a column that grows. It misses a row that is committed after a row with a higher value
was read. `timestamp` finds new and changed rows. `timestamp+incrementing` finds both, and distinguishes rows with the
same time. In these last two modes a row is read only when its time is `timestamp.delay.interval.ms` old, since a
transaction that began earlier may still commit a row with an earlier time. Times without a zone are UTC.

`bulk` reads all rows each time. If the task does not read for `bulk.idle.ms`, no transaction stays open. `logical`
reads the inserts, updates and deletes of a publication's tables from Postgres's log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.shared.common.errors import ConfigError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.connect.config_def import HIGH, LOW, MEDIUM, NO_DEFAULT, ConfigDef, Type, at_least, one_of
from penstock.shared.connect.connector import ExactlyOnceSupport, Props, SourceConnector
from penstock.shared.connect.connectors.poll_wait import PollWait
from penstock.shared.connect.connectors.postgres.bulk_read import BulkRead
from penstock.shared.connect.connectors.postgres.columns import (
    TEXT_STYLES,
    Column,
    columns_of_query,
    decode_date,
    decode_timestamp,
    encode_timestamp,
    parse_time,
    schema_of,
    value_of,
    with_texts,
)
from penstock.shared.connect.connectors.postgres.database import (
    Codec,
    connect,
    connection_config,
    set_codecs,
    translated,
)
from penstock.shared.connect.connectors.postgres.logical import SLOT_NAME, LogicalReader, position_of
from penstock.shared.connect.connectors.postgres.table_reader import NOW, TableReader, check_offset
from penstock.shared.connect.connectors.retries import Retries
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.schema import Schema
from penstock.shared.connect.task import SourceTask

log = get_logger(__name__)

MODES = ("bulk", "incrementing", "timestamp", "timestamp+incrementing", "logical")


def source_settings() -> ConfigDef:
    """Return the definitions of the Postgres source's settings."""
    return (
        connection_config()
        .define("mode", Type.STRING, NO_DEFAULT, HIGH, f"How new rows are found: {', '.join(MODES)}.", one_of(*MODES),
                group="Mode", order=1)
        .define("incrementing.column.name", Type.STRING, "", MEDIUM, "Strictly increasing column.",
                group="Mode", order=2)
        .define("timestamp.column.name", Type.LIST, "", MEDIUM,
                "Column with the time of the last change. Of several columns, the first that is not null counts.",
                group="Mode", order=3)
        .define("timestamp.initial", Type.LONG, None, LOW,
                "Initial timestamp, in ms since the epoch. -1: the time of the task's first read. Default: all rows.",
                group="Mode", order=4)
        .define("timestamp.delay.interval.ms", Type.LONG, 0, HIGH,
                "Minimum age of a row's timestamp before the row is read.",
                at_least(0), group="Mode", order=5)
        .define("table.whitelist", Type.LIST, "", MEDIUM, "Tables to read. Each is a source partition.",
                group="Data", order=1)
        .define("query", Type.STRING, "", MEDIUM,
                "Query to read instead of tables. The connector uses it as a subquery.",
                group="Data", order=2)
        .define("topic.prefix", Type.STRING, NO_DEFAULT, HIGH,
                "Prefix of the topic before the table name. With a query: the topic.",
                group="Data", order=3)
        .define("key.columns", Type.LIST, "", MEDIUM,
                "Columns of the record key. Empty: no key. With mode=logical, empty means the columns of the replica "
                "identity, and no key under REPLICA IDENTITY FULL.",
                group="Data", order=4)
        .define("poll.interval.ms", Type.INT, 5_000, HIGH,
                "Interval between polls that find no new rows. mode=bulk: interval between reads of all tables.",
                at_least(1),
                group="Data", order=5)
        .define("batch.max.rows", Type.INT, 2_000, LOW,
                "Maximum number of rows of one poll. mode=timestamp also reads all rows with the last timestamp.",
                at_least(1), group="Data", order=6)
        .define("bulk.idle.ms", Type.INT, 10_000, LOW,
                "mode=bulk: time without a poll after which the transaction ends and Postgres stores the unread rows "
                "in temporary files. A paused task, for example, does not poll.", at_least(1),
                group="Data", order=7)
        .define("slot.name", Type.STRING, "", MEDIUM,
                "mode=logical: replication slot with the position of the source. It is kept when the connector ends.",
                group="Logical decoding", order=1)
        .define("publication.name", Type.STRING, "", MEDIUM,
                "mode=logical: publication with the tables to read. Empty: the name of the slot.",
                group="Logical decoding", order=2)
        .define("slot.autocreate", Type.BOOLEAN, True, MEDIUM,
                "mode=logical: whether a missing slot, and a missing publication of table.whitelist, is created. After "
                "the first stored offset, a missing slot is always an error.",
                group="Logical decoding", order=3)
        .define("tombstones.on.delete", Type.BOOLEAN, True, MEDIUM,
                "mode=logical: whether the record of a deleted row is a tombstone. false: its value is the old row.",
                group="Logical decoding", order=4)
        .define("numeric.scale", Type.INT, 9, LOW,
                "Number of digits after the decimal point in numeric columns. Further digits are rounded.", at_least(0),
                group="Data", order=8)
    )  # fmt: skip


class PostgresSourceTask(SourceTask):
    """Reads one task's tables, or its query. With mode=logical: the changes of its publication's tables."""

    # `stop` is called after a failed `start`, too.
    _connection: Any = None
    _bulk: BulkRead | None = None

    async def start(self, props: Mapping[str, str]) -> None:
        values = source_settings().parse(props)
        self._values = values
        self._retries = Retries(values["max.retries"])
        tables = values["table.whitelist"] or ([""] if values["query"] else [])
        reader = self.context.offset_storage_reader
        self._readers = []
        self._logical: LogicalReader | None = None
        if values["mode"] == "logical":
            self._slot = LogicalReader.partition_of(values["slot.name"])
            self._logical = LogicalReader(values, await reader.offset(self._slot))
            tables = []
        for table in tables:
            stored = await reader.offset(TableReader.partition_of(table, values["query"]))
            # The offset of another mode would skip rows, or read the table again. A bulk read ignores an offset.
            if stored and values["mode"] != "bulk":
                check_offset(values["mode"], stored)
            self._readers.append(TableReader(values, table, values["query"], stored))
        self._turn = 0
        self._idle = 0
        self._wait = PollWait()

    async def poll(self) -> list[SourceRecord] | None:
        if not await self._wait.passed():
            return None
        if self._logical is not None:
            return await self._poll_logical(self._logical)
        if not self._readers:
            self._wait.left_ms = self._values["poll.interval.ms"]
            return None
        reader = self._readers[self._turn]
        try:
            records, is_whole = await self._read_rows(reader)
        except Exception as e:
            raise await self._failure_to_raise(e) from e
        self._retries.succeeded()
        if is_whole:
            self._turn = (self._turn + 1) % len(self._readers)
            is_idle = self._values["mode"] == "bulk" or not records
            self._idle = self._idle + 1 if is_idle else 0
        # All tables were read in turn and none had new rows.
        if self._idle >= len(self._readers):
            self._idle = 0
            self._wait.left_ms = self._values["poll.interval.ms"]
        return records

    async def _poll_logical(self, logical: LogicalReader) -> list[SourceRecord]:
        try:
            # Under exactly-once, no commit follows without records, and the last one may not have read the offset.
            if logical.is_failing:
                await self.commit()
            records = await logical.read(await self._connect_if_needed())
        except Exception as e:
            raise await self._failure_to_raise(e) from e
        if logical.is_idle:
            self._wait.left_ms = self._values["poll.interval.ms"]
        self._retries.succeeded()
        return records

    async def commit(self) -> None:
        """With mode=logical, read the stored offset: the replication slot may move up to it.

        The slot moves before the task's next read of it, or when the task stops.
        """
        if self._logical is not None:
            self._logical.stored(await self.context.offset_storage_reader.offset(self._slot))

    async def _connect_if_needed(self) -> Any:
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._values)
            await self._connection.execute(TEXT_STYLES)
            # The driver's own decoders fail for 24:00:00, and outside the years 1 to 9999. No query has a date or a
            # time of day as a parameter, so `str` is never called.
            codecs = [
                Codec("time", "text", str, parse_time),
                Codec("date", "tuple", str, decode_date),
                Codec("timestamp", "tuple", encode_timestamp, decode_timestamp),
                Codec("timestamptz", "tuple", encode_timestamp, decode_timestamp),
            ]
            await set_codecs(self._connection, codecs)
        return self._connection

    async def _read_rows(self, reader: TableReader) -> tuple[list[SourceRecord], bool]:
        """Return the next records of one table or query, and whether the next table has its turn."""
        await self._connect_if_needed()
        if self._values["mode"] == "bulk":
            most = self._values["batch.max.rows"]
            if self._bulk is None:
                idle_ms = self._values["bulk.idle.ms"]
                statement = reader.statement()[0]
                statement = with_texts(statement, columns_of_query(await self._connection.prepare(statement)))
                self._bulk = await BulkRead.begun(self._connection, statement, most, idle_ms)
            rows = await self._bulk.rows()
            columns = self._bulk.columns
            if is_whole := len(rows) < most:
                bulk = self._bulk
                self._bulk = None
                await bulk.end()
        else:
            if reader.timestamp is None and self._values["timestamp.initial"] == NOW:
                reader.timestamp = await self._connection.fetchval("SELECT now()")
            statement, arguments = reader.statement()
            async with self._connection.transaction(readonly=True):
                prepared = await self._connection.prepare(statement)
                texts = with_texts(statement, columns_of_query(prepared))
                if texts != statement:
                    prepared = await self._connection.prepare(texts)
                rows = await prepared.fetch(*arguments)
                columns = columns_of_query(prepared)
            is_whole = True
        return self._source_records_of_rows(reader, rows, columns), is_whole

    def _source_records_of_rows(
        self, reader: TableReader, rows: Sequence[Any], columns: Sequence[Column]
    ) -> list[SourceRecord]:
        scale = self._values["numeric.scale"]
        schema = schema_of(reader.table or "query", columns, scale)
        key_schema, names = self._key_schema(schema)
        topic = self._values["topic.prefix"] + reader.table
        values = [{f.name: value_of(row[f.name], f.schema, scale) for f in schema.fields} for row in rows]
        return [
            SourceRecord(
                topic, None, key_schema, {name: value[name] for name in names} if names else None, schema, value,
                source_partition=reader.partition, source_offset=offset,
            )
            for value, offset in zip(values, reader.read(rows), strict=True)
        ]  # fmt: skip

    def _key_schema(self, schema: Schema) -> tuple[Schema | None, list[str]]:
        names = self._values["key.columns"]
        fields = [schema.field(name) for name in names]
        if None in fields:
            raise ConnectError(f"key.columns: not all of {', '.join(names)} are columns")
        return (Schema.struct(None, *(f for f in fields if f is not None)) if names else None), names

    async def _failure_to_raise(self, error: Exception) -> Exception:
        ours = translated(error, writes=self._logical is not None)
        self._wait.left_ms = self._values["retry.backoff.ms"]
        await self._abandon_bulk_read()
        if self._connection is not None:
            connection = self._connection
            self._connection = None
            if not connection.is_closed():
                connection.terminate()
        return self._retries.failed(str(ours)) if isinstance(ours, RetriableError) else ours

    async def _abandon_bulk_read(self) -> None:
        bulk = self._bulk
        self._bulk = None
        if bulk is not None:
            await bulk.abandon()

    async def stop(self) -> None:
        await self._abandon_bulk_read()
        if self._connection is not None and not self._connection.is_closed():
            await self._move_slot(self._connection)
            await self._connection.close(timeout=5)

    async def _move_slot(self, connection: Any) -> None:
        if self._logical is not None:
            try:
                await self._logical.move_slot(connection)
            except Exception as e:
                # The next task moves the slot.
                log.warning("the replication slot could not be moved", slot=self._slot["slot"], reason=str(e))


class PostgresSourceConnector(SourceConnector):
    """Reads Postgres tables into topics."""

    task_class = PostgresSourceTask

    @classmethod
    def config(cls) -> ConfigDef:
        return source_settings()

    def validate(self, props: Props) -> list[Any]:
        found = super().validate(props)
        values = {value.name: value for value in found}
        mode = str(values["mode"].value)
        if "incrementing" in mode and not values["incrementing.column.name"].value:
            values["incrementing.column.name"].errors.append(f"mode={mode} needs an increasing column")
        if "timestamp" in mode and not values["timestamp.column.name"].value:
            values["timestamp.column.name"].errors.append(f"mode={mode} needs the column of the last change")
        if mode == "logical":
            if not SLOT_NAME.fullmatch(str(values["slot.name"].value)):
                values["slot.name"].errors.append(
                    "mode=logical needs a replication slot's name (slot.name): small letters, digits and _, at most 63"
                )
            if values["query"].value:
                values["query"].errors.append("mode=logical reads tables: remove the query")
        elif bool(values["query"].value) == bool(values["table.whitelist"].value):
            values["table.whitelist"].errors.append("either table.whitelist or query must be given")
        return found

    async def start(self, props: Props) -> None:
        super().start(props)
        if errors := [error for value in self.validate(props) for error in value.errors]:
            raise ConfigError("; ".join(errors))

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        if self.props.get("query") or self.props.get("mode") == "logical":
            return [self.props]
        tables = [table.strip() for table in self.props["table.whitelist"].split(",") if table.strip()]
        count = min(max_tasks, len(tables))
        return [{**self.props, "table.whitelist": ",".join(tables[at::count])} for at in range(count)]

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport:
        # A bulk read begins from the start after a restart, so its records are written again.
        is_bulk = props.get("mode") == "bulk"
        return ExactlyOnceSupport.UNSUPPORTED if is_bulk else ExactlyOnceSupport.SUPPORTED

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        for partition, offset in offsets:
            if offset is None:
                # This deletes it: it may be of another connector that had this name before.
                continue
            if set(partition) not in ({"protocol", "table"}, {"protocol", "query"}, {"protocol", "slot"}):
                raise ConnectError(
                    'a partition is {"protocol": "1", "table": …}, {"protocol": "1", "query": "query"} or '
                    '{"protocol": "1", "slot": …}'
                )
            if "slot" in partition:
                position_of(offset)
            else:
                check_offset(props.get("mode", ""), offset)
        return True
