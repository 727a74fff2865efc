"""Converts records to Arrow tables for columnar sinks. Types come from the records' schema, or else from the values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from penstock.shared.common.errors import DataError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import DATE, DECIMAL, TIME, TIMESTAMP, Schema, SchemaType, scale_of

DECIMAL_DIGITS = 38
_TYPES = {
    SchemaType.INT8: pa.int8(),
    SchemaType.INT16: pa.int16(),
    SchemaType.INT32: pa.int32(),
    SchemaType.INT64: pa.int64(),
    SchemaType.FLOAT32: pa.float32(),
    SchemaType.FLOAT64: pa.float64(),
    SchemaType.BOOLEAN: pa.bool_(),
    SchemaType.STRING: pa.string(),
    SchemaType.BYTES: pa.binary(),
}
_LOGICAL = {DATE: pa.date32(), TIME: pa.time64("us"), TIMESTAMP: pa.timestamp("us", tz="UTC")}


class NothingInIt(DataError):
    """No column is left for a file: each has Arrow's null type, or only structs without fields."""


def arrow_type(schema: Schema) -> Any:
    """Return the Arrow type of a Connect schema."""
    if schema.name == DECIMAL:
        return pa.decimal128(DECIMAL_DIGITS, scale_of(schema))
    if schema.name in _LOGICAL:
        return _LOGICAL[schema.name]
    if schema.type is SchemaType.STRUCT:
        return pa.struct([pa.field(field.name, arrow_type(field.schema)) for field in schema.fields])
    if schema.type is SchemaType.ARRAY and schema.value_schema is not None:
        return pa.list_(arrow_type(schema.value_schema))
    if schema.type is SchemaType.MAP and schema.key_schema is not None and schema.value_schema is not None:
        return pa.map_(arrow_type(schema.key_schema), arrow_type(schema.value_schema))
    return _TYPES[schema.type]


def check_row(record: SinkRecord) -> None:
    """Raise DataError if the record's value cannot be a row.

    A row is a struct, or a map with strings as keys. An empty value is a row only if its schema has fields.
    """
    value = record.value
    if not isinstance(value, Mapping):
        problem = type(value).__name__
    elif record.value_schema is not None and record.value_schema.fields:
        # The schema names the columns, even if the value is empty.
        return
    elif not value:
        problem = "empty"
    elif not all(isinstance(name, str) for name in value):
        problem = "a map with keys that are no strings"
    else:
        return
    raise DataError(
        f"{record.coordinates}: the value is {problem}: a row needs a struct with fields, or a map with strings as keys"
    )


def table_of(records: list[SinkRecord], *, decimal256: bool = True) -> Any:
    """Return an Arrow table of records that `check_row` accepts, one row each.

    The columns are the fields of the records' struct schemas, or else the names in the values. If the schemas differ in
    the type of a number, the column has the wider type. For two scales of a decimal this is a decimal256, or a decimal
    with 38 digits if `decimal256` is False. A column without a schema has Arrow's null type if all its values are null.
    Raises DataError if the records do not fit one table.
    """
    rows: list[Mapping[str, Any]] = [record.value for record in records]
    schemas: list[Schema | None] = []
    for record in records:
        if record.value_schema not in schemas:
            schemas.append(record.value_schema)
    structs = [schema for schema in schemas if schema is not None and schema.fields]
    try:
        if len(structs) == len(schemas):
            fields = [
                pa.schema([pa.field(field.name, arrow_type(field.schema)) for field in schema.fields])
                for schema in structs
            ]
            unified = pa.unify_schemas(fields, promote_options="permissive")
            if not decimal256:
                unified = pa.schema([(field.name, _as_decimal128(field.type)) for field in unified])
            return pa.Table.from_pylist(rows, unified)
        # The type of all columns if the records share a map's schema. Otherwise the values of a column decide.
        schema = schemas[0] if len(schemas) == 1 else None
        kind = None if schema is None or schema.value_schema is None else arrow_type(schema.value_schema)
        names = list(dict.fromkeys(name for row in rows for name in row))
        return pa.table({name: pa.array([row.get(name) for row in rows], kind) for name in names})
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as e:
        raise DataError(f"the records do not form a table: {e}") from e


def _as_decimal128(kind: Any) -> Any:
    """Return the type with each decimal in it as a decimal128 of 38 digits: Delta has no decimal256."""
    if pa.types.is_decimal(kind):
        return pa.decimal128(DECIMAL_DIGITS, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_decimal128(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_as_decimal128(kind.value_type))
    if pa.types.is_map(kind):
        return pa.map_(_as_decimal128(kind.key_type), _as_decimal128(kind.item_type))
    return kind


def columns_of_file(table: Any) -> Any:
    """Return the table without columns of Arrow's null type, and without structs that have no fields: a Parquet file
    cannot have these structs. Raises NothingInIt if no column is left."""
    kinds = {field.name: _with_fields(field.type) for field in table.schema}
    kept = {name: kind for name, kind in kinds.items() if kind is not None and not pa.types.is_null(kind)}
    if not kept:
        raise NothingInIt("the records have no values that are not null or empty")
    return pa.table({name: table.column(name).cast(kind) for name, kind in kept.items()})


def _with_fields(kind: Any) -> Any:
    """Return a type without the structs in it that have no fields; None if nothing is left."""
    if pa.types.is_struct(kind):
        fields = [(field.name, _with_fields(field.type)) for field in kind]
        known = [(name, one) for name, one in fields if one is not None]
        return pa.struct(known) if known else None
    if pa.types.is_list(kind):
        item = _with_fields(kind.value_type)
        return None if item is None else pa.list_(item)
    if pa.types.is_map(kind):
        key = _with_fields(kind.key_type)
        item = _with_fields(kind.item_type)
        return None if key is None or item is None else pa.map_(key, item)
    return kind
