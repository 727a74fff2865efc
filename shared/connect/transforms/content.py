"""Transforms of fields' content, InsertField and MaskField, and of a schema's name and version: SetSchemaMetadata."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from decimal import Decimal
from typing import Any

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.time_text import EPOCH
from penstock.shared.connect.config_def import HIGH, MEDIUM, NO_DEFAULT, ConfigDef, Type, invalid, non_empty
from penstock.shared.connect.record import ConnectRecord, SinkRecord
from penstock.shared.connect.schema import (
    EPOCH_DAY,
    INT32,
    INT64,
    STRING,
    Field,
    Schema,
    SchemaType,
    timestamp_from_ms,
    timestamp_schema,
)
from penstock.shared.connect.transforms.parts import (
    OnPart,
    key_and_value,
    require_map,
    require_struct,
    with_replace_null,
)

INSERTABLE = ("topic", "partition", "offset", "timestamp", "static")
SCHEMAS = {"topic": STRING, "partition": INT32, "offset": INT64, "timestamp": timestamp_schema(), "static": STRING}


class _InsertField(OnPart):
    """Adds the record's topic, partition, offset or timestamp, or a fixed text, as fields."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = ConfigDef()
        for what in INSERTABLE:
            documentation = f"Field for the {what}. Suffix `!`: a required field. Suffix `?` or none: an optional one."
            definition.define(f"{what}.field", Type.STRING, None, MEDIUM, documentation)
        definition.define("static.value", Type.STRING, None, MEDIUM, "Value of static.field.")
        return with_replace_null(definition)

    def configured(self) -> None:
        self._fields: list[tuple[str, str, bool]] = []
        for what in INSERTABLE:
            if spec := self.values[f"{what}.field"]:
                self._fields.append((what, spec.rstrip("!?"), not spec.endswith("!")))
        if not self._fields:
            raise ConfigError("No field insertion configured")
        if self.values["static.field"] and self.values["static.value"] is None:
            raise ConfigError(str(invalid("static.value", None, "No value specified for static field")))

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if value is None:
            return record
        found = {name: self._value_to_insert(record, what, plain=schema is None) for what, name, _ in self._fields}
        if schema is None:
            given = dict(require_map(value, "field insertion"))
            return self.new(record, None, given | {name: item for name, item in found.items() if item is not None})
        given = dict(require_struct(schema, value, "field insertion"))
        kept = {field.name: self.field_value(field, given) for field in schema.fields}
        return self.new(record, self.updated(schema, self._add_inserted_fields), kept | found)

    def _add_inserted_fields(self, schema: Schema) -> Schema:
        added = [Field(name, replace(SCHEMAS[what], optional=opt)) for what, name, opt in self._fields]
        names = {field.name for field in added}
        return replace(schema, fields=(*(f for f in schema.fields if f.name not in names), *added))

    def _value_to_insert(self, record: ConnectRecord, what: str, *, plain: bool) -> Any:
        if what == "static":
            return self.values["static.value"]
        if what == "offset":
            if not isinstance(record, SinkRecord):
                raise DataError("Offset insertion is only supported for sink connectors")
            return record.kafka_offset
        if what == "timestamp":
            at = record.timestamp
            return at if plain or at is None else timestamp_from_ms(at)
        return record.kafka_partition if what == "partition" else record.topic


class _MaskField(OnPart):
    """Replaces fields by their type's empty value, or by a replacement."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("fields", Type.LIST, NO_DEFAULT, HIGH, "Fields to mask.", non_empty)
            .define("replacement", Type.STRING, None, MEDIUM, "Replacement for strings and numbers.", non_empty)
        )
        return with_replace_null(definition)

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if value is None:
            return record
        names = self.values["fields"]
        if schema is None:
            given = dict(require_map(value, "mask fields"))
            masked = {name: self._mask_value(given[name]) for name in names if name in given}
            return self.new(record, None, given | masked)
        given = dict(require_struct(schema, value, "mask fields"))
        found = {field.name: self.field_value(field, given) for field in schema.fields}
        return self.new(record, schema, found | {n: self._mask_value(found[n]) for n in names if n in found})

    def _mask_value(self, value: Any) -> Any:
        if value is None:
            return None
        if (replacement := self.values["replacement"]) is not None:
            return _replacement_of_type(replacement, value)
        for kind, empty in _EMPTY:
            if isinstance(value, kind):
                return empty() if callable(empty) else empty
        raise DataError(f"Cannot mask value of type: {type(value).__name__}")


_EMPTY: tuple[tuple[type, Any], ...] = (
    (bool, False),
    (int, 0),
    (float, 0.0),
    (str, ""),
    (Decimal, Decimal(0)),
    (dt.datetime, EPOCH),
    (dt.date, EPOCH_DAY),
    (dt.time, dt.time()),
    (list, list),
    (dict, dict),
    (bytes, b""),
)


def _replacement_of_type(replacement: str, value: Any) -> Any:
    kind = type(value)
    if kind not in (int, float, str, Decimal):
        raise DataError(f"Cannot mask value of type {kind.__name__} with custom replacement.")
    try:
        return kind(replacement)
    except (ValueError, ArithmeticError):
        raise DataError(f"Unable to convert {replacement} to {kind.__name__}") from None


class _SetSchemaMetadata(OnPart):
    """Sets the schema's name or version."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("schema.name", Type.STRING, None, HIGH, "New name of the schema.")
            .define("schema.version", Type.INT, None, HIGH, "New version of the schema.")
        )
        return with_replace_null(definition)

    def configured(self) -> None:
        if self.values["schema.name"] is None and self.values["schema.version"] is None:
            raise ConfigError("Neither schema name nor version configured")

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if schema is None:
            if value is None:
                return record
            raise DataError("Schema required for [updating schema metadata]")
        if value is not None and schema.type is SchemaType.STRUCT:
            given = require_struct(schema, value, "updating schema metadata")
            value = {field.name: self.field_value(field, given) for field in schema.fields}
        return self.new(record, self.updated(schema, self._rename_schema), value)

    def _rename_schema(self, schema: Schema) -> Schema:
        name = self.values["schema.name"]
        version = self.values["schema.version"]
        renamed = schema if name is None else replace(schema, name=name)
        return renamed if version is None else replace(renamed, version=version)


InsertFieldKey, InsertFieldValue = key_and_value(_InsertField, "InsertField")
MaskFieldKey, MaskFieldValue = key_and_value(_MaskField, "MaskField")
SetSchemaMetadataKey, SetSchemaMetadataValue = key_and_value(_SetSchemaMetadata, "SetSchemaMetadata")
