"""Transforms of headers: DropHeaders, HeaderFrom, InsertHeader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.config_def import HIGH, NO_DEFAULT, ConfigDef, Type, non_empty, one_of
from penstock.shared.connect.converters.simple_header import parsed_text
from penstock.shared.connect.record import ConnectRecord, Header
from penstock.shared.connect.schema import Schema
from penstock.shared.connect.transform import Transformation
from penstock.shared.connect.transforms.parts import (
    PACKAGE,
    OnPart,
    key_and_value,
    require_map,
    require_struct,
    with_fields,
    with_replace_null,
)


class DropHeaders(Transformation):
    """Removes headers by name."""

    kafka_class = PACKAGE + "DropHeaders"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define("headers", Type.LIST, NO_DEFAULT, HIGH, "Names of the headers to drop.", non_empty)

    def configure(self, values: Mapping[str, Any]) -> None:
        self._names = set(values["headers"])

    def apply(self, record: ConnectRecord) -> ConnectRecord:
        return record.replaced(headers=tuple(h for h in record.headers if h.name not in self._names))


class InsertHeader(Transformation):
    """Adds a header to each record."""

    kafka_class = PACKAGE + "InsertHeader"

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("header", Type.STRING, NO_DEFAULT, HIGH, "Name of the header.", non_empty)
            .define("value.literal", Type.STRING, NO_DEFAULT, HIGH, "Value; its type is inferred.", non_empty)
        )

    def configure(self, values: Mapping[str, Any]) -> None:
        schema, value = parsed_text(values["value.literal"])
        self._header = Header(values["header"], value, schema)

    def apply(self, record: ConnectRecord) -> ConnectRecord:
        return record.replaced(headers=(*record.headers, self._header))


class _HeaderFrom(OnPart):
    """Copies or moves fields into headers."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("fields", Type.LIST, NO_DEFAULT, HIGH, "Fields to copy or move.", non_empty)
            .define(
                "headers", Type.LIST, NO_DEFAULT, HIGH, "Names of the headers, in the order of the fields.", non_empty
            )
            .define("operation", Type.STRING, NO_DEFAULT, HIGH, "Operation: copy or move.", one_of("copy", "move"))
        )
        return with_replace_null(definition)

    def configured(self) -> None:
        if len(self.values["fields"]) != len(self.values["headers"]):
            raise ConfigError("'fields' config must have the same number of elements as 'headers' config.")
        self._pairs = list(zip(self.values["fields"], self.values["headers"], strict=True))
        self._moves = self.values["operation"] == "move"

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        moved = {field for field, _ in self._pairs} if self._moves else set()
        if schema is None:
            given = require_map(value, "header from")
            headers = [Header(name, given.get(field)) for field, name in self._pairs]
            rest: Any = {key: item for key, item in given.items() if key not in moved}
        else:
            given = require_struct(schema, value, "header from")
            headers = []
            for field, name in self._pairs:
                found = schema.field(field)
                if found is None:
                    raise DataError(f"Unknown field: {field}")
                headers.append(Header(name, self.field_value(found, given), found.schema))
            rest = {f.name: self.field_value(f, given) for f in schema.fields if f.name not in moved}
            if moved:
                schema = self.updated(
                    schema, lambda old: with_fields(old, [f for f in old.fields if f.name not in moved])
                )
        return self.new(record, schema, rest).replaced(headers=(*record.headers, *headers))


HeaderFromKey, HeaderFromValue = key_and_value(_HeaderFrom, "HeaderFrom")
