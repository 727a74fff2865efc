"""The common code of transforms of a record's key or value: the choice of the part, structs and plain maps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from penstock.shared.common.errors import DataError
from penstock.shared.connect.config_def import MEDIUM, ConfigDef, Type
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.schema import Field, Schema, SchemaType
from penstock.shared.connect.transform import Transformation

PACKAGE = "org.apache.kafka.connect.transforms."
SCHEMAS_CACHED_MAX = 16
REPLACE_NULL = "replace.null.with.default"


def with_replace_null(definition: ConfigDef) -> ConfigDef:
    """Add the setting `replace.null.with.default`, which many transforms have."""
    documentation = "Whether a null is replaced by the default value of its field."
    return definition.define(REPLACE_NULL, Type.BOOLEAN, True, MEDIUM, documentation)


class OnPart(Transformation):
    """A transform of the key or of the value."""

    is_key: ClassVar[bool] = False

    def configure(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.replace_null = bool(values.get(REPLACE_NULL, True))
        self._schemas: dict[int, tuple[Schema, Schema]] = {}
        self.configured()

    def configured(self) -> None:
        """Called when the settings are in `values`."""

    def apply(self, record: ConnectRecord) -> ConnectRecord | None:
        schema, value = (record.key_schema, record.key) if self.is_key else (record.value_schema, record.value)
        return self.transform(record, schema, value)

    @abstractmethod
    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord | None:
        """Return the record with its key or value transformed; use `new` to create it."""

    def new(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        """Return a copy of the record with a new key or value: the part that this transform changes."""
        return record.with_key(schema, value) if self.is_key else record.with_value(schema, value)

    def updated(self, schema: Schema, update: Callable[[Schema], Schema]) -> Schema:
        """Return `update(schema)`. The results for recent schema objects are cached."""
        known = self._schemas.get(id(schema))
        if known is not None and known[0] is schema:
            return known[1]
        if len(self._schemas) >= SCHEMAS_CACHED_MAX:
            self._schemas.clear()
        made = update(schema)
        self._schemas[id(schema)] = (schema, made)
        return made

    def field_value(self, field: Field, value: Mapping[str, Any]) -> Any:
        """Return a field's value, or its default if it is null and `replace_null` is set."""
        found = value.get(field.name)
        return field.schema.default if found is None and self.replace_null and field.schema.has_default else found


def require_map(value: Any, purpose: str) -> Mapping[str, Any]:
    """Return a value without a schema as a map. Raises DataError if it is not one."""
    if not isinstance(value, Mapping):
        raise DataError(
            f"Only Map objects supported in absence of schema for [{purpose}], found: {type(value).__name__}"
        )
    return value


def require_struct(schema: Schema, value: Any, purpose: str) -> Mapping[str, Any]:
    """Return a value with a schema as a struct. Raises DataError if it is not one."""
    if schema.type is not SchemaType.STRUCT or not isinstance(value, Mapping):
        raise DataError(f"Only Struct objects supported for [{purpose}], found: {type(value).__name__}")
    return value


def with_fields(schema: Schema, fields: list[Field]) -> Schema:
    """Return a struct's schema with other fields, and without its default, which would not fit them."""
    return replace(schema, fields=tuple(fields), default=Schema(SchemaType.STRUCT).default)


def key_and_value(base: type[OnPart], name: str) -> tuple[type[Any], type[Any]]:
    """Return the classes `<Name>Key` and `<Name>Value` of a transform, for Kafka's `<Name>$Key` and `<Name>$Value`."""
    return tuple(  # type: ignore[return-value]
        type(
            name + part,
            (base,),
            {
                "__module__": base.__module__,
                "__doc__": f"{(base.__doc__ or '').rstrip('.')}: of the {part.lower()}.",
                "kafka_class": f"{PACKAGE}{name}${part}",
                "is_key": part == "Key",
            },
        )
        for part in ("Key", "Value")
    )
