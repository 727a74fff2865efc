"""Converts records to rows: table, columns and key. Consecutive writes of one table with the same columns and the same
primary key columns form a group, and so do deletes.

The type of a column comes from its schema, or else from the first value in the group that is not null. A column without
a schema that has only nulls has no type. It is not created, and is left out of the rows if the table lacks it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.connectors.postgres.columns import column_type
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import Schema

KAFKA_COLUMNS = ("__connect_topic", "__connect_partition", "__connect_offset")
KAFKA_TYPES = ("text", "integer", "bigint")


@dataclass(frozen=True)
class RowSettings:
    """The Postgres sink's settings of the conversion of records to rows."""

    table_format: str = "${topic}"
    mode: str = "insert"
    pk_mode: str = "none"
    pk_fields: tuple[str, ...] = ()
    whitelist: frozenset[str] = frozenset()
    deletes: bool = False

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RowSettings:
        """Return the settings of the conversion to rows. Raises ConfigError if they contradict each other."""
        settings = cls(
            values["table.name.format"],
            values["insert.mode"],
            values["pk.mode"],
            tuple(values["pk.fields"]),
            frozenset(values["fields.whitelist"]),
            values["delete.enabled"],
        )
        if settings.mode in ("upsert", "update") and settings.pk_mode == "none":
            raise ConfigError(f"insert.mode={settings.mode} needs a primary key: pk.mode must not be none")
        if settings.deletes and settings.pk_mode != "record_key":
            raise ConfigError("delete.enabled=true needs pk.mode=record_key: a tombstone has nothing but its key")
        if settings.pk_mode == "kafka" and settings.pk_fields and len(settings.pk_fields) != 3:
            raise ConfigError(f"pk.mode=kafka needs three pk.fields or none, got {len(settings.pk_fields)}")
        return settings

    def table(self, topic: str) -> str:
        """Return the table for the records of a topic."""
        return self.table_format.replace("${topic}", topic)


@dataclass
class RowsToWrite:
    """Consecutive rows of one table that the Postgres sink writes or deletes. All have the same columns and the same
    primary key columns.

    For deletes the columns are those of the key.
    """

    table: str
    names: tuple[str, ...]
    key: tuple[str, ...]
    types: dict[str, tuple[str | None, bool]]
    """Each column's type, None if there were only nulls, and whether it is NOT NULL."""
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    deletes: bool = False
    first: str = ""
    """The coordinates of the first record."""

    def with_columns(self, names: Collection[str]) -> RowsToWrite:
        """Return the same rows to write, with only these columns of the table."""
        if all(name in names for name in self.names):
            return self
        at = [i for i, name in enumerate(self.names) if name in names]
        kept = tuple(self.names[i] for i in at)
        rows = [tuple(row[i] for i in at) for row in self.rows]
        return replace(self, names=kept, types={name: self.types[name] for name in kept}, rows=rows)

    def without_nulls_of(self, generated: Collection[str]) -> list[RowsToWrite]:
        """Return the same rows to write, in order, as groups without these columns where they are null."""
        at = [i for i, name in enumerate(self.names) if name in generated]
        if not at:
            return [self]
        runs = itertools.groupby(self.rows, lambda row: {self.names[i] for i in at if row[i] is None})
        return [
            replace(self, rows=list(rows)).with_columns([name for name in self.names if name not in nulls])
            for nulls, rows in runs
        ]


class _Row(NamedTuple):
    """One record as a row. For a delete the columns are those of the key."""

    columns: tuple[str, ...]
    key: tuple[str, ...]
    values: tuple[Any, ...]
    is_delete: bool


class RowBuilder:
    """Converts records to rows, in order."""

    def __init__(self, settings: RowSettings) -> None:
        self._settings = settings

    def build(self, records: list[SinkRecord]) -> list[RowsToWrite]:
        """Return groups of rows to write one after another. Raises DataError, which names the record, if a record
        cannot be a row."""
        groups: list[RowsToWrite] = []
        last: RowsToWrite | None = None
        untyped: list[str] = []
        for record in records:
            row = self._row_of_record(record)
            table = self._settings.table(record.topic)
            group = table, row.columns, row.key, row.is_delete
            if last is None or (last.table, last.names, last.key, last.deletes) != group:
                if foreign := [name for name in row.columns if not isinstance(name, str)]:
                    raise DataError(f"{record.coordinates}: the field name {foreign[0]!r} is not text")
                types = self._column_types(record, row.columns)
                last = RowsToWrite(table, row.columns, row.key, types, deletes=row.is_delete, first=record.coordinates)
                groups.append(last)
                untyped = [name for name, (kind, _) in last.types.items() if kind is None]
            elif untyped:
                last.types.update(self._column_types(record, untyped))
                untyped = [name for name in untyped if last.types[name][0] is None]
            last.rows.append(row.values)
        return groups

    def _row_of_record(self, record: SinkRecord) -> _Row:
        key = self._primary_key_of_record(record)
        if record.value is None:
            if not self._settings.deletes:
                raise DataError(f"{record.coordinates}: no value, and delete.enabled is false")
            return _Row(tuple(key), tuple(key), tuple(key.values()), is_delete=True)
        if not isinstance(record.value, Mapping):
            raise DataError(f"{record.coordinates}: the value is {type(record.value).__name__}, not a struct or map")
        fields: dict[str, Any] = dict(record.value)
        if whitelist := self._settings.whitelist:
            fields = {name: item for name, item in fields.items() if name in whitelist or name in key}
        names = tuple(key)
        if self._settings.pk_mode != "record_value":
            fields = {**key, **fields} if not key.keys() & fields.keys() else {**fields, **key}
        return _Row(tuple(fields), names, tuple(fields.values()), is_delete=False)

    def _primary_key_of_record(self, record: SinkRecord) -> dict[str, Any]:
        settings = self._settings
        match settings.pk_mode:
            case "none":
                return {}
            case "kafka":
                names = settings.pk_fields or KAFKA_COLUMNS
                return dict(zip(names, (*record.original_tp, record.kafka_offset), strict=True))
            case "record_value":
                return self._pick_key_columns(record, record.value or {}, "value")
        if record.key is None:
            raise DataError(f"{record.coordinates}: pk.mode=record_key, and the record has no key")
        if isinstance(record.key, Mapping):
            return self._pick_key_columns(record, record.key, "key")
        if len(settings.pk_fields) != 1:
            raise DataError(f"{record.coordinates}: the key is one value, so pk.fields must be one name")
        return {settings.pk_fields[0]: record.key}

    def _pick_key_columns(self, record: SinkRecord, given: Any, what: str) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            raise DataError(f"{record.coordinates}: the {what} is not a struct or map")
        names = self._settings.pk_fields or tuple(given)
        missing = [name for name in names if given.get(name) is None]
        if missing:
            raise DataError(
                f"{record.coordinates}: the {what} has no {', '.join(map(str, missing))}, of the primary key"
            )
        return {name: given[name] for name in names}

    def _column_types(self, record: SinkRecord, names: Iterable[str]) -> dict[str, tuple[str | None, bool]]:
        """Return each column's type, and whether the column is NOT NULL, from the schema of the record's field.

        Without a schema, the type comes from the field's value, and NOT NULL is false.

        With pk.mode=record_key, primary key columns come from the record's key. With pk.mode=kafka, their types are
        fixed. All other columns come from the record's value.
        """
        pk = self._settings.pk_fields or KAFKA_COLUMNS
        kafka = dict(zip(pk, KAFKA_TYPES, strict=False)) if self._settings.pk_mode == "kafka" else {}
        keys = self._primary_key_of_record(record) if self._settings.pk_mode == "record_key" else {}
        found = {}
        for name in names:
            if name not in keys:
                schema = _field_schema(record.value_schema, name)
                value = record.value.get(name) if isinstance(record.value, Mapping) else None
            else:
                is_struct = isinstance(record.key, Mapping)
                schema = _field_schema(record.key_schema, name) if is_struct else record.key_schema
                value = keys[name]
            kind = kafka.get(name) or column_type(schema, value)
            found[name] = (kind, schema is not None and not schema.optional)
        return found


def columns_of(groups: Iterable[RowsToWrite]) -> dict[str, tuple[str, bool]]:
    """Return the columns that a table needs for all these rows: each column's type, and whether it is NOT NULL.

    >>> columns_of([RowsToWrite("t", ("a",), (), {"a": ("bigint", True), "b": (None, False)}),
    ...             RowsToWrite("t", ("b",), (), {"b": ("text", True)})])
    {'a': ('bigint', False), 'b': ('text', False)}
    """
    groups = list(groups)
    found: dict[str, tuple[str, bool]] = {}
    for group in groups:
        for name, (kind, _) in group.types.items():
            if kind is not None and name not in found:
                found[name] = (kind, all(name in other.types and other.types[name][1] for other in groups))
    return found


def _field_schema(schema: Schema | None, name: str) -> Schema | None:
    found = None if schema is None else schema.field(name)
    return None if found is None else found.schema
