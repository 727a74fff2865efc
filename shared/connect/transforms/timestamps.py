"""TimestampConverter: converts times between text, Unix numbers and the logical types.

In between, every time is a datetime in UTC. A Timestamp is truncated to ms.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import Any, ClassVar

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.time_text import EPOCH
from penstock.shared.connect.config_def import HIGH, LOW, MEDIUM, NO_DEFAULT, ConfigDef, Type, one_of
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.schema import (
    DATE,
    INT64,
    STRING,
    TIME,
    TIMESTAMP,
    Field,
    Schema,
    SchemaType,
    date_schema,
    time_schema,
    timestamp_from_ms,
    timestamp_schema,
    timestamp_to_ms,
)
from penstock.shared.connect.transforms.java_dates import DatePattern
from penstock.shared.connect.transforms.parts import (
    OnPart,
    key_and_value,
    require_map,
    require_struct,
    with_replace_null,
)

TARGETS = {
    "string": STRING,
    "unix": INT64,
    "Date": date_schema(),
    "Time": time_schema(),
    "Timestamp": timestamp_schema(),
}
NANOS_PER = {"seconds": 10**9, "milliseconds": 10**6, "microseconds": 10**3, "nanoseconds": 1}
NANOS_PER_MS = 10**6


class _TimestampConverter(OnPart):
    """Converts a time in one field, or the whole key or value."""

    clock: ClassVar[Clock] = SYSTEM_CLOCK
    """The clock that determines the century of two-digit years."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define("field", Type.STRING, "", HIGH,
                    "Field with the timestamp. Empty: the whole key or value is the timestamp.")
            .define("target.type", Type.STRING, NO_DEFAULT, HIGH,
                    "Type to convert to: string, unix, Date, Time or Timestamp.",
                    one_of(*TARGETS))
            .define("format", Type.STRING, "", MEDIUM,
                    "Format of strings, as a pattern of Java's SimpleDateFormat. A zone in a string must be Z, UTC, "
                    "GMT or an offset, not a name such as CET.")
            .define("unix.precision", Type.STRING, "milliseconds", LOW, "Unit of Unix times.",
                    one_of(*NANOS_PER))
        )  # fmt: skip
        return with_replace_null(definition)

    def configured(self) -> None:
        self._field = self.values["field"]
        self._target = self.values["target.type"]
        pattern = self.values["format"]
        if self._target == "string" and not pattern.strip():
            raise ConfigError("TimestampConverter requires format option to be specified when using string timestamps")
        self._pattern = DatePattern(pattern) if pattern.strip() else None
        self._nanos = NANOS_PER[self.values["unix.precision"]]

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if schema is None:
            if not self._field:
                return self.new(record, None, self._convert_timestamp(value, None))
            if value is None:
                return record
            given = dict(require_map(value, "converting timestamp formats"))
            return self.new(record, None, given | {self._field: self._convert_timestamp(given.get(self._field), None)})
        if not self._field:
            return self.new(record, self.updated(schema, self._target_schema), self._convert_timestamp(value, schema))
        if value is None:
            return self.new(record, self.updated(schema, self._schema_with_target_field), None)
        given = dict(require_struct(schema, value, "converting timestamp formats"))
        found = {field.name: self.field_value(field, given) for field in schema.fields}
        if (field := schema.field(self._field)) is not None:
            found[self._field] = self._convert_timestamp(found[self._field], field.schema)
        return self.new(record, self.updated(schema, self._schema_with_target_field), found)

    def _target_schema(self, schema: Schema) -> Schema:
        return replace(TARGETS[self._target], optional=schema.optional)

    def _schema_with_target_field(self, schema: Schema) -> Schema:
        fields = [Field(f.name, self._target_schema(f.schema)) if f.name == self._field else f for f in schema.fields]
        return replace(schema, fields=tuple(fields))

    def _convert_timestamp(self, value: Any, schema: Schema | None) -> Any:
        if value is None:
            return None
        at = self._read_timestamp(value, schema)
        match self._target:
            case "string":
                assert self._pattern is not None
                return self._pattern.format(at)
            case "unix":
                return _divided_as_in_java(timestamp_to_ms(at) * NANOS_PER_MS, self._nanos)
            case "Date":
                return at.date()
            case "Time":
                return at.time()
        return at

    def _read_timestamp(self, value: Any, schema: Schema | None) -> dt.datetime:
        if schema is not None and schema.name not in (DATE, TIME, TIMESTAMP):
            wanted: type = {SchemaType.STRING: str, SchemaType.INT64: int}.get(schema.type, type(None))
            if not isinstance(value, wanted):
                raise DataError(f"Schema {schema.type.name} does not correspond to a known timestamp type format")
        if isinstance(value, dt.datetime):
            utc = value.astimezone(dt.UTC) if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
            return utc.replace(microsecond=utc.microsecond // 1000 * 1000)
        if isinstance(value, dt.date):
            return dt.datetime.combine(value, dt.time(), dt.UTC)
        if isinstance(value, dt.time):
            return dt.datetime.combine(EPOCH.date(), value, dt.UTC)
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise DataError(f"TimestampConverter does not support {type(value).__name__} objects as timestamps")
        if isinstance(value, int):
            return timestamp_from_ms(_divided_as_in_java(value * self._nanos, NANOS_PER_MS))
        if self._pattern is None:
            raise DataError("TimestampConverter requires format option to be specified to read string timestamps")
        return self._pattern.parse(value, self.clock.now_ms())


def _divided_as_in_java(number: int, divisor: int) -> int:
    """Return the quotient, rounded towards zero."""
    return -(-number // divisor) if number < 0 else number // divisor


TimestampConverterKey, TimestampConverterValue = key_and_value(_TimestampConverter, "TimestampConverter")
