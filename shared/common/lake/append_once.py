"""Idempotent appends to a Delta table: each commit records the offsets up to which the table has the records.

An offset is stored as the version of a Delta transaction identifier (`appId`, here called application) in the table's
log. A writer knows the version that its last append left. If an append finds another version, another writer has taken
over, and the append changes nothing.

A column keeps its first type. A number, also within a struct, list or map, is converted to the column's number type if
its value stays the same. Nulls, empty lists and empty structs have no type of their own: they get the column's, and are
left out if there is no such column. A struct also has the fields of the column that it lacks: they are null. A time of
day becomes a string, since Delta has no type for it. The unit and time zone of a timestamp are left to Delta. Any other
difference in type is an error: Delta's own cast would, for example, truncate 1.5 to 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import DeltaError, SchemaMismatchError

from penstock.shared.common.errors import DataError, RetriableError, WriterFenced
from penstock.shared.common.lake.delta_tables import one_line, open_table

NO_VERSION = -1
"""Stands for no version, since a table cannot delete a version that it has."""
_MISFITS = ("Schema error", "Invalid data found")


def table_versions(uri: str, applications: list[str], options: Mapping[str, str]) -> dict[str, int]:
    """The version of each of `applications` that has one; empty without a table. Raises RetriableError."""
    return _versions_of(open_table(uri, options), applications)


def has_table(uri: str, options: Mapping[str, str]) -> bool:
    """Return whether there is a table. Raises RetriableError."""
    return open_table(uri, options) is not None


def _versions_of(table: DeltaTable | None, applications: list[str]) -> dict[str, int]:
    found = {} if table is None else {name: table.transaction_version(name) for name in applications}
    return {name: version for name, version in found.items() if version is not None and version != NO_VERSION}


def set_table_versions(uri: str, versions: Mapping[str, int | None], options: Mapping[str, str]) -> None:
    """Set the versions of applications from which their next `append_once` continues; None removes a version.

    Does nothing if there is no table. Raises RetriableError if the storage fails or a concurrent commit conflicts.
    """
    table = open_table(uri, options)
    if table is not None:
        transactions = [Transaction(name, NO_VERSION if at is None else at) for name, at in versions.items()]
        _append_to_table(uri, table, _table_schema(table).empty_table(), transactions, options, None)


def _table_schema(table: DeltaTable) -> Any:
    return pa.schema(table.schema().to_arrow())


def append_once(
    uri: str,
    data: Any,
    versions: Mapping[str, tuple[int | None, int]],
    options: Mapping[str, str],
    partition_by: list[str] | None = None,
) -> None:
    """Append an Arrow table and set the versions of applications, in one commit. A missing table is created, with the
    partition columns `partition_by`.

    `versions` has, by application, the version that the table must have (None: no version) and the new version. New
    columns are added to the table. Raises WriterFenced if the table has another version, DataError if the data does not
    fit the table or no value has a type, RetriableError if the storage fails or a concurrent commit conflicts.
    """
    # One load of the table for the check and the append: Delta then rejects the append if another commit has set one of
    # the versions since.
    table = open_table(uri, options)
    known = _versions_of(table, list(versions))
    for application, (before, _) in versions.items():
        if known.get(application) != before:
            raise WriterFenced(f"{uri}: {application} is at {known.get(application)}, and was left at {before}")
    transactions = [Transaction(name, after) for name, (_, after) in versions.items()]
    data = fitted(data, pa.schema([]) if table is None else _table_schema(table))
    _append_to_table(uri, table, data, transactions, options, partition_by)


def _append_to_table(
    uri: str,
    table: DeltaTable | None,
    data: Any,
    transactions: list[Transaction],
    options: Mapping[str, str],
    partition_by: list[str] | None,
) -> None:
    """Append to the table, or create it. Fails if it was created since it was found to be missing."""
    try:
        write_deltalake(
            uri if table is None else table,
            data,
            mode="error" if table is None else "append",
            schema_mode=None if table is None else "merge",
            # An existing table keeps its partition columns. Delta rejects an append with others.
            partition_by=partition_by if table is None else None,
            storage_options=dict(options),
            commit_properties=CommitProperties(app_transactions=transactions),
        )
    except Exception as e:
        # 1. The data do not fit the table. deltalake has a class only for some of these errors. Its phrases for the
        #    others mean a type that Delta lacks, names that differ only in their case, or a violated CHECK constraint.
        if isinstance(e, SchemaMismatchError) or any(phrase in str(e) for phrase in _MISFITS):
            raise DataError(f"{uri}: {one_line(e)}") from e
        # 2. The storage failed, or another commit conflicts.
        if isinstance(e, DeltaError | OSError):
            raise RetriableError(f"{uri}: {one_line(e)}") from e
        raise


def fitted(data: Any, schema: Any) -> Any:
    """The Arrow table to append, with numbers cast to the number types of the Delta table's schema.

    Nulls, empty lists and empty structs get the schema's type, or are left out. DataError names a column whose type or
    value does not fit the schema. Raises DataError also if no column is left.

    >>> fitted(pa.table({"n": [1.0], "new": ["x"]}), pa.schema([("n", pa.int64())])).schema.types
    [DataType(int64), DataType(string)]
    >>> fitted(pa.table({"n": [None], "list": [[]]}), pa.schema([("n", pa.int64())])).schema.types
    [DataType(int64)]
    """
    columns = {}
    for field in data.schema:
        kept = schema.field(field.name).type if field.name in schema.names else None
        known = _known_type(field.type, kept)
        if known is None:
            continue
        if kept is not None and not _are_types_alike(known, kept):
            raise DataError(f"column {field.name} is {kept}, and cannot have {field.type}")
        columns[field.name] = _cast(data.column(field.name), field.name, known)
    if not columns:
        raise DataError("the records have no values that are not null or empty")
    return pa.table(columns)


def _cast(column: Any, name: str, known: Any) -> Any:
    """Return the column in the type `known`. DataError names the column if that fails or would change a number."""
    try:
        found = _cast_numbers(column, known)
        for before, after in _leaves(column, found):
            _require_same_numbers(before, after, f"column {name} is {known}")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise DataError(f"column {name} is {known}: {e}") from None
    return found


def _cast_numbers(values: Any, kind: Any) -> Any:
    """Return the values in the type `kind`. Fractions may be rounded. Raises Arrow's error if the cast fails."""
    return values.cast(_with_texts(values.type, kind)).cast(kind)


def _with_texts(kind: Any, to: Any) -> Any:
    """Return the type `to`, with strings for the numbers that Arrow's cast from `kind` would change or reject.

    Arrow casts the decimal 19.99 to the double 19.990000000000002, and casts the integer 5 only to decimals with 19
    digits before the point. It reads their texts exactly.
    """
    types = pa.types
    if types.is_struct(kind) and types.is_struct(to):
        both = {field.name: field.type for field in kind}
        return pa.struct([f.with_type(_with_texts(both[f.name], f.type)) if f.name in both else f for f in to])
    if types.is_map(kind) and types.is_map(to):
        return pa.map_(_with_texts(kind.key_type, to.key_type), _with_texts(kind.item_type, to.item_type))
    if _is_list_type(kind) and _is_list_type(to):
        return pa.list_(_with_texts(kind.value_type, to.value_type))
    to_text = types.is_floating(to) if types.is_decimal(kind) else _is_number_type(kind) and types.is_decimal(to)
    return pa.string() if to_text else to


def _leaves(before: Any, after: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values within a column that are not structs, lists or maps, before and after its cast.

    Values whose type stays the same are left out, and so are nulls without a type.
    """
    if before.type == after.type or pa.types.is_null(before.type):
        return
    if pa.types.is_map(after.type):
        before, after = (
            column.cast(pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)])))
            for column in (before, after)
        )
    if pa.types.is_struct(after.type):
        for name in {field.name for field in before.type} & {field.name for field in after.type}:
            yield from _leaves(pc.struct_field(before, name), pc.struct_field(after, name))
    elif _is_list_type(after.type):
        yield from _leaves(pc.list_flatten(before), pc.list_flatten(after))
    else:
        yield before, after


def _require_same_numbers(before: Any, after: Any, where: str) -> None:
    """Raise DataError if a cast has changed numbers."""
    if not _is_number_type(before.type):
        return
    # Arrow's cast rejects integers that change, but rounds fractions.
    changed = pc.not_equal(_cast_numbers(after, before.type), before)
    if pa.types.is_floating(before.type):
        changed = pc.and_not(changed, pc.is_nan(before))
    if pc.any(changed).as_py():
        number = before.filter(changed)[0].as_py()
        raise DataError(f"{where}, and cannot have {number!r} of {before.type}")


def _known_type(kind: Any, kept: Any) -> Any:
    """Return the type `kind`, with the types of `kept` for numbers, for nulls, and for the contents of empty lists and
    structs. A time of day has the type of a string. A struct also has the fields of `kept` that it lacks.

    `kept` is the type in the table, or None if the table lacks the column. Nulls without a type in `kept` are left out.
    Returns None if nothing is left.
    """
    if pa.types.is_null(kind):
        return kept
    if pa.types.is_time(kind):
        return pa.string()
    if kept is not None and _is_number_type(kind) and _is_number_type(kept):
        return kept
    if kept is not None and pa.types.is_map(kind) and pa.types.is_map(kept):
        return pa.map_(_known_type(kind.key_type, kept.key_type), _known_type(kind.item_type, kept.item_type))
    if pa.types.is_struct(kind):
        # All fields of the table: Delta's cast adds none in a map, and none to a struct that shares none.
        others = {field.name: field.type for field in kept} if kept is not None and pa.types.is_struct(kept) else {}
        fields = [(field.name, _known_type(field.type, others.get(field.name))) for field in kind]
        known = {name: one for name, one in fields if one is not None}
        if known := others | known:
            return pa.struct(known.items())
        return None if kept is None else kind
    if _is_list_type(kind):
        item = _known_type(kind.value_type, kept.value_type if kept is not None and _is_list_type(kept) else None)
        if item is not None:
            return pa.list_(item)
        return kept if kept is None else kind
    return kind


def _is_number_type(kind: Any) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _are_types_alike(kind: Any, kept: Any) -> bool:
    """Whether a column to append has the type of the table's column, in any Arrow encoding of the type.

    Two structs are alike if the fields that both have are alike. Any two timestamps are alike.
    """
    types = pa.types
    if types.is_struct(kind) and types.is_struct(kept):
        both = {field.name for field in kind} & {field.name for field in kept}
        return all(_are_types_alike(kind.field(name).type, kept.field(name).type) for name in both)
    if types.is_map(kind) and types.is_map(kept):
        return _are_types_alike(kind.key_type, kept.key_type) and _are_types_alike(kind.item_type, kept.item_type)
    if _is_list_type(kind) and _is_list_type(kept):
        return _are_types_alike(kind.value_type, kept.value_type)
    for same in (_is_string_type, _is_binary_type, types.is_timestamp):
        if same(kind) and same(kept):
            return True
    return bool(kind == kept)


def _is_list_type(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_string_type(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_binary_type(kind: Any) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))
