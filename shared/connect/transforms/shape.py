"""Transforms of a key's or value's shape: ExtractField, HoistField, Flatten, ReplaceField, ValueToKey."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.config_def import HIGH, MEDIUM, NO_DEFAULT, ConfigDef, Type, non_empty, one_of
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.schema import Field, Schema, SchemaType
from penstock.shared.connect.transforms.parts import (
    PACKAGE,
    OnPart,
    key_and_value,
    require_map,
    require_struct,
    with_fields,
    with_replace_null,
)

# A name in backticks ends at the first backtick that has no backslash before it, and a dot or the text's end after it.
QUOTED_NAME = re.compile(r"`(.*?)(?<!\\)`(?:\.|\Z)", re.DOTALL)
ESCAPED_BACKTICK = re.compile(r"\\`(?=\.)")
"""In backticks, a backslash before a backtick and a dot is an escape and is removed. Any other backslash is kept."""


def field_path(text: str, version: str) -> tuple[str, ...]:
    """Return the names that lead to a field of a struct or map, as Kafka's SingleFieldPath does (KIP-821).

    Under V1 the whole text is one name. Under V2 dots separate the names, and a name in backticks may contain dots.
    Raises ConfigError if the second backtick of a name is missing.

    >>> field_path("a.`b.c`", "V2"), field_path("a.b", "V1")
    (('a', 'b.c'), ('a.b',))
    >>> field_path(r"`a\\`.b`.c`d.", "V2")
    ('a`.b', 'c`d', '')
    """
    if version.upper() == "V1":
        return (text,)
    names: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == "`":
            quoted = QUOTED_NAME.match(text, at)
            if quoted is None:
                raise ConfigError(
                    f"Incomplete backtick pair in path {text!r}: end the name at {at} by a backtick that has no "
                    "backslash before it; enclose a name that itself begins with a backtick in another pair"
                )
            names.append(ESCAPED_BACKTICK.sub("`", quoted[1]))
            at = quoted.end()
        else:
            name = text[at:].partition(".")[0]
            names.append(name)
            at += len(name) + 1
    if text.endswith("."):
        names.append("")
    return tuple(names)


class _ExtractField(OnPart):
    """Replaces a struct or map by one of its fields."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("field", Type.STRING, NO_DEFAULT, MEDIUM, "Field to extract.", non_empty)
            .define("field.syntax.version", Type.STRING, "V1", HIGH,
                    "V1: the field is a name. V2: the field is a path of names separated by dots.",
                    one_of("V1", "V2", ignore_case=True))
        )  # fmt: skip
        return with_replace_null(definition)

    def configured(self) -> None:
        self._path = field_path(self.values["field"], self.values["field.syntax.version"])

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        for name in self._path:
            if schema is None:
                value = None if value is None else require_map(value, "field extraction").get(name)
                continue
            field = schema.field(name)
            if field is None:
                raise DataError(f"Unknown field: {name}")
            if value is not None:
                value = self.field_value(field, require_struct(schema, value, "field extraction"))
            schema = field.schema
        return self.new(record, schema, value)


class _HoistField(OnPart):
    """Puts the whole key or value into a field of a new struct or map."""

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define("field", Type.STRING, NO_DEFAULT, MEDIUM, "Field that holds the whole key or value.")

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        name = self.values["field"]
        if schema is None:
            return self.new(record, None, {name: value})
        hoisted = self.updated(schema, lambda old: Schema(SchemaType.STRUCT, fields=(Field(name, old),)))
        return self.new(record, hoisted, {name: value})


class _Flatten(OnPart):
    """Flattens nested structs, or nested maps without a schema, to one level, with names joined by a delimiter."""

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define(
            "delimiter", Type.STRING, ".", MEDIUM, "Delimiter between the names of nested fields."
        )

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if value is None:
            return record
        flat: dict[str, Any] = {}
        if schema is None:
            self._flatten_map(require_map(value, "flattening"), "", flat)
            return self.new(record, None, flat)
        given = require_struct(schema, value, "flattening")
        self._flatten_struct(schema, given, "", flat)
        return self.new(record, self.updated(schema, self._flat_schema), flat)

    def _flattened_field_name(self, prefix: str, name: str) -> str:
        return prefix + self.values["delimiter"] + name if prefix else name

    def _flatten_map(self, value: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
        for key, item in value.items():
            name = self._flattened_field_name(prefix, str(key))
            if isinstance(item, Mapping):
                self._flatten_map(item, name, flat)
            else:
                flat[name] = item

    def _flatten_struct(self, schema: Schema, value: Mapping[str, Any], prefix: str, flat: dict[str, Any]) -> None:
        for field in schema.fields:
            name = self._flattened_field_name(prefix, field.name)
            if field.schema.type is SchemaType.STRUCT:
                self._flatten_struct(field.schema, value.get(field.name) or {}, name, flat)
            else:
                flat[name] = self.field_value(field, value)

    def _flat_schema(self, schema: Schema) -> Schema:
        fields: list[Field] = []
        self._flat_fields(schema, "", optional=schema.optional, into=fields)
        return with_fields(schema, fields)

    def _flat_fields(self, schema: Schema, prefix: str, *, optional: bool, into: list[Field]) -> None:
        for field in schema.fields:
            name = self._flattened_field_name(prefix, field.name)
            if field.schema.type is SchemaType.STRUCT:
                self._flat_fields(field.schema, name, optional=optional or field.schema.optional, into=into)
            else:
                into.append(Field(name, field.schema.as_optional() if optional else field.schema))


class _ReplaceField(OnPart):
    """Excludes fields or keeps only some, and renames them."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("exclude", Type.LIST, "", MEDIUM, "Fields to exclude. This takes precedence over include.")
            .define("include", Type.LIST, "", MEDIUM, "Fields to include. Empty: all.")
            .define("renames", Type.LIST, "", MEDIUM, "Fields to rename, as old1:new1,old2:new2.", _validate_renames)
        )
        return with_replace_null(definition)

    def configured(self) -> None:
        self._include = set(self.values["include"])
        self._exclude = set(self.values["exclude"])
        self._renames = dict(item.split(":") for item in self.values["renames"])

    def _keeps_field(self, name: str) -> bool:
        return name not in self._exclude and (not self._include or name in self._include)

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if value is None:
            return record
        named = self._renames.get
        if schema is None:
            given = require_map(value, "field replacement")
            return self.new(record, None, {named(k, k): v for k, v in given.items() if self._keeps_field(k)})
        given = require_struct(schema, value, "field replacement")
        kept = [field for field in schema.fields if self._keeps_field(field.name)]
        found = {named(field.name, field.name): self.field_value(field, given) for field in kept}
        return self.new(record, self.updated(schema, self._schema_of_kept_fields), found)

    def _schema_of_kept_fields(self, schema: Schema) -> Schema:
        named = self._renames.get
        return with_fields(
            schema, [Field(named(f.name, f.name), f.schema) for f in schema.fields if self._keeps_field(f.name)]
        )


def _validate_renames(name: str, value: list[str]) -> None:
    for item in value:
        if len(item.split(":")) != 2:
            raise ConfigError(f"Invalid rename mapping: {item}")


class ValueToKey(OnPart):
    """Makes the key from fields of the value."""

    kafka_class = PACKAGE + "ValueToKey"

    @classmethod
    def config(cls) -> ConfigDef:
        return with_replace_null(
            ConfigDef().define("fields", Type.LIST, NO_DEFAULT, HIGH, "Fields of the key.", non_empty)
        )

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        purpose = "copying fields from value to key"
        if schema is None:
            given = require_map(value, purpose)
            return record.with_key(None, {name: given.get(name) for name in self.values["fields"]})
        given = require_struct(schema, value, purpose)
        key_schema = self.updated(schema, self._schema_of_key)
        return record.with_key(key_schema, {field.name: self.field_value(field, given) for field in key_schema.fields})

    def _schema_of_key(self, schema: Schema) -> Schema:
        return Schema(SchemaType.STRUCT, fields=tuple(_require_field(schema, name) for name in self.values["fields"]))


def _require_field(schema: Schema, name: str) -> Field:
    found = schema.field(name)
    if found is None:
        raise DataError(f"Field does not exist: {name}")
    return found


ExtractFieldKey, ExtractFieldValue = key_and_value(_ExtractField, "ExtractField")
HoistFieldKey, HoistFieldValue = key_and_value(_HoistField, "HoistField")
FlattenKey, FlattenValue = key_and_value(_Flatten, "Flatten")
ReplaceFieldKey, ReplaceFieldValue = key_and_value(_ReplaceField, "ReplaceField")
