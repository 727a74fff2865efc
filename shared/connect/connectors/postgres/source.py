"""The Postgres source: reads tables or a query as they grow, by an incrementing column, a timestamp, or both.

`incrementing` finds new rows, `timestamp` new and changed ones, `timestamp+incrementing` both, and rows with the same
time apart. A row is only read once its time is `timestamp.delay.interval.ms` old, since a transaction that began
earlier may still commit one that lies before. Times without a zone are UTC. `bulk` reads everything each time, through
a cursor that holds up nothing while nobody reads from it.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from typing import Any

from shared.connect.config_def import NO_DEFAULT, ConfigDef, Type, at_least, one_of
from shared.connect.connector import ExactlyOnceSupport, Props, SourceConnector
from shared.connect.connectors.postgres.bulk import BulkRead
from shared.connect.connectors.postgres.reader import TableReader, aware
from shared.connect.connectors.postgres.settings import HIGH, LOW, MEDIUM, connect, connection_config, translated
from shared.connect.errors import ConfigError, ConnectError, RetriableError
from shared.connect.record import SourceRecord
from shared.connect.schema import (
    Field,
    Schema,
    SchemaType,
    date_schema,
    decimal_schema,
    time_schema,
    timestamp_schema,
)
from shared.connect.task import SourceTask

MODES = ("bulk", "incrementing", "timestamp", "timestamp+incrementing")
DIGITS = Context(prec=150_000)
"""As many as Postgres's numeric can have; Python's own 28 would refuse longer ones."""
_TYPES = {
    "int2": SchemaType.INT16,
    "int4": SchemaType.INT32,
    "int8": SchemaType.INT64,
    "float4": SchemaType.FLOAT32,
    "float8": SchemaType.FLOAT64,
    "bool": SchemaType.BOOLEAN,
    "bytea": SchemaType.BYTES,
}


def source_settings() -> ConfigDef:
    """The source's settings, named as the JDBC source's are."""
    return (
        connection_config()
        .define("mode", Type.STRING, NO_DEFAULT, HIGH, f"What is new: {', '.join(MODES)}.", one_of(*MODES),
                group="Mode", order=1)
        .define("incrementing.column.name", Type.STRING, "", MEDIUM, "The column that only rises.",
                group="Mode", order=2)
        .define("timestamp.column.name", Type.LIST, "", MEDIUM,
                "The column of the last change; of several the first that is not null.", group="Mode", order=3)
        .define("timestamp.initial", Type.LONG, None, LOW, "From when on, in ms since the epoch; not given: all.",
                group="Mode", order=4)
        .define("timestamp.delay.interval.ms", Type.LONG, 0, HIGH, "How old a row's time must be to be read.",
                at_least(0), group="Mode", order=5)
        .define("table.whitelist", Type.LIST, "", MEDIUM, "The tables to read, a part of the source each.",
                group="Data", order=1)
        .define("query", Type.STRING, "", MEDIUM, "A query to read instead of tables; it must not end in WHERE.",
                group="Data", order=2)
        .define("topic.prefix", Type.STRING, NO_DEFAULT, HIGH, "Before the table's name; of a query, the topic.",
                group="Data", order=3)
        .define("key.columns", Type.LIST, "", MEDIUM, "The columns that make the record's key; empty: no key.",
                group="Data", order=4)
        .define("poll.interval.ms", Type.INT, 5_000, HIGH, "How long to wait where nothing is new.", at_least(1),
                group="Data", order=5)
        .define("batch.max.rows", Type.INT, 2_000, LOW,
                "The most rows of one poll; by time alone, its last moment is whole.", at_least(1),
                group="Data", order=6)
        .define("bulk.idle.ms", Type.INT, 10_000, LOW,
                "mode=bulk: after how long without a poll (paused, or Kafka takes no records) Postgres sets the rest "
                "of a reading aside in its temporary files, and no transaction stays open.", at_least(1),
                group="Data", order=7)
        .define("numeric.scale", Type.INT, 9, LOW, "Digits after the point of numeric columns.", at_least(0),
                group="Data", order=8)
    )  # fmt: skip


def schema_of(name: str, attributes: Sequence[Any], scale: int) -> Schema:
    """A row's schema from its columns' types; what Connect has no type for is text."""
    fields = []
    for attribute in attributes:
        kind = attribute.type.name
        if kind == "numeric":
            schema = decimal_schema(scale, optional=True)
        elif kind == "date":
            schema = date_schema(optional=True)
        elif kind == "time":
            schema = time_schema(optional=True)
        elif kind in ("timestamp", "timestamptz"):
            schema = timestamp_schema(optional=True)
        else:
            schema = Schema(_TYPES.get(kind, SchemaType.STRING), optional=True)
        fields.append(Field(attribute.name, schema))
    return Schema.struct(name, *fields)


def value_of(schema: Schema, value: Any, scale: int) -> Any:
    """A column's value as its schema has it."""
    if value is None:
        return None
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None  # Connect's Decimal knows no infinity
        return value.quantize(Decimal(1).scaleb(-scale), context=DIGITS)
    if isinstance(value, dt.datetime):
        return aware(value)
    return str(value) if schema.type is SchemaType.STRING and not isinstance(value, str) else value


class PostgresSourceTask(SourceTask):
    """Reads one task's tables."""

    async def start(self, props: Mapping[str, str]) -> None:
        self._values = values = source_settings().parse(props)
        self._connection: Any = None
        self._retries_left = values["max.retries"]
        tables = values["table.whitelist"] or ([""] if values["query"] else [])
        reader = self.context.offset_storage_reader
        self._readers = []
        for table in tables:
            part = TableReader(values, table, values["query"], None)
            self._readers.append(TableReader(values, table, values["query"], await reader.offset(part.partition)))
        self._turn = 0
        self._idle = 0
        self._bulk: BulkRead | None = None

    async def poll(self) -> list[SourceRecord] | None:
        if not self._readers:
            await asyncio.sleep(self._values["poll.interval.ms"] / 1000)
            return None
        if self._idle >= len(self._readers):
            await asyncio.sleep(self._values["poll.interval.ms"] / 1000)
            self._idle = 0
        reader = self._readers[self._turn]
        try:
            records, is_whole = await self._read(reader)
        except Exception as e:
            raise await self._failure(e) from e
        self._retries_left = self._values["max.retries"]
        if is_whole:
            self._turn = (self._turn + 1) % len(self._readers)
            is_idle = self._values["mode"] == "bulk" or not records
            self._idle = self._idle + 1 if is_idle else 0
        return records

    async def _read(self, reader: TableReader) -> tuple[list[SourceRecord], bool]:
        """The next rows of one part, and whether another part has its turn."""
        if self._connection is None or self._connection.is_closed():
            self._connection = await connect(self._values)
        if self._values["mode"] == "bulk":
            most = self._values["batch.max.rows"]
            if self._bulk is None:
                idle_ms = self._values["bulk.idle.ms"]
                self._bulk = await BulkRead.begun(self._connection, reader.statement()[0], most, idle_ms)
            rows, attributes = await self._bulk.rows(), self._bulk.attributes
            if is_whole := len(rows) < most:
                bulk, self._bulk = self._bulk, None
                await bulk.end()
        else:
            statement, arguments = reader.statement()
            async with self._connection.transaction(readonly=True):
                prepared = await self._connection.prepare(statement)
                rows, attributes = await prepared.fetch(*arguments), prepared.get_attributes()
            is_whole = True
        return self._records(reader, rows, attributes), is_whole

    def _records(self, reader: TableReader, rows: Sequence[Any], attributes: Sequence[Any]) -> list[SourceRecord]:
        scale = self._values["numeric.scale"]
        schema = schema_of(reader.table or "query", attributes, scale)
        key_schema, names = self._key_schema(schema)
        topic = self._values["topic.prefix"] + reader.table
        values = [{f.name: value_of(f.schema, row[f.name], scale) for f in schema.fields} for row in rows]
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

    async def _failure(self, error: Exception) -> Exception:
        ours = translated(error)
        await self._abandon_bulk()
        if self._connection is not None:
            connection, self._connection = self._connection, None
            if not connection.is_closed():
                connection.terminate()
        if isinstance(ours, RetriableError) and self._retries_left <= 0:
            return ConnectError(f"still failing after {self._values['max.retries']} retries: {ours}")
        self._retries_left -= 1
        return ours

    async def _abandon_bulk(self) -> None:
        bulk, self._bulk = self._bulk, None
        if bulk is not None:
            await bulk.abandon()

    async def stop(self) -> None:
        if getattr(self, "_bulk", None) is not None:
            await self._abandon_bulk()
        connection = getattr(self, "_connection", None)
        if connection is not None and not connection.is_closed():
            await connection.close(timeout=5)


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
            values["incrementing.column.name"].errors.append(f"mode={mode} needs the column that rises")
        if "timestamp" in mode and not values["timestamp.column.name"].value:
            values["timestamp.column.name"].errors.append(f"mode={mode} needs the column of the last change")
        if bool(values["query"].value) == bool(values["table.whitelist"].value):
            values["table.whitelist"].errors.append("either table.whitelist or query must be given")
        return found

    async def start(self, props: Props) -> None:
        self._props = dict(props)
        if not (props.get("query") or props.get("table.whitelist")):
            raise ConfigError("either table.whitelist or query must be given")

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        if self._props.get("query"):
            return [self._props]
        tables = [table.strip() for table in self._props["table.whitelist"].split(",") if table.strip()]
        count = min(max_tasks, len(tables))
        return [{**self._props, "table.whitelist": ",".join(tables[at::count])} for at in range(count)]

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport:
        is_bulk = props.get("mode") == "bulk"
        return ExactlyOnceSupport.UNSUPPORTED if is_bulk else ExactlyOnceSupport.SUPPORTED

    async def alter_offsets(self, props: Props, offsets: Any) -> bool:
        for partition, _ in offsets:
            if set(partition) not in ({"protocol", "table"}, {"protocol", "query"}):
                raise ConnectError(
                    'a partition is {"protocol": "1", "table": …} or {"protocol": "1", "query": "query"}'
                )
        return True
