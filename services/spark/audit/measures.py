"""The measures that the audit compares beside windows' bounds, such as counts, sums and distinct-count sketches.

A measure is usually one column of an aggregation's state. Spark's own functions compute the measure from source
records, and merge it from the states of several windows. Two sketches count as equal if their union estimates the same
number as each of them. A user's own aggregates cannot be recomputed this way and are left out. Aggregations whose
input differs from the value in the JSON are also left out (`AggregationSchema.verbatim`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.spark_sql import SQL_TYPES, quoted, result_expressions
from penstock.shared.common.arrow_arrays import ARROW_TYPES
from penstock.shared.common.errors import SerializationError
from penstock.shared.common.records import INT64_MAX, INT64_MIN
from penstock.shared.common.serialization import json_deserializer
from penstock.shared.streams.aggregations.aggregation import DISTINCT_LG_K, EMPTY_TEXT
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

# Sums of the same floats may differ by this share of the sum of the floats' magnitudes, since their order varies.
RELATIVE_ERROR = 1e-9
FIELDS = "fields"
TEXT = "text"
OTHER = "other"
# The report shows at most this many characters of a result.
SHOWN_MAX = 100
_TYPES = {**SQL_TYPES, TEXT: "STRING", OTHER: "BOOLEAN"}
_ARROW_TYPES = {**ARROW_TYPES, TEXT: pa.string(), OTHER: pa.bool_()}


class Measure(NamedTuple):
    """One number or sketch that the audit compares: how to aggregate it from records, and how to read it from window
    states.
    """

    name: str
    """The measure's column."""
    label: str
    """The measure's name in reports."""
    of_records: SparkColumn
    """Aggregates the measure from source records."""
    of_state: SparkColumn
    """Reads the measure from a window's state."""
    merge: Any
    """Aggregates the measure from several windows."""
    is_float: bool = False
    is_sketch: bool = False
    magnitude: str | None = None
    """For a sum of floats, the name of the measure that sums their absolute values, by which rounding errors are
    judged.
    """
    shown: bool = True
    """False for a measure that is only another one's `magnitude`."""


def measures(store: StoreSchema) -> list[Measure]:
    """Return all measures of a store that can be checked."""
    return [
        m for i, aggregation in enumerate(store.aggregations) for m in _measures_of_aggregation(aggregation, f"m{i}")
    ]


def unchecked(store: StoreSchema) -> list[str]:
    """Return the names of the aggregations without a measure."""
    return [a.name for a in store.aggregations if not _measures_of_aggregation(a, "m")]


class MeasuredField(NamedTuple):
    """A field of the source values that a measure needs.

    `type` is int64, float64, TEXT or OTHER. With OTHER, the field is true if the value is neither text nor missing.
    """

    name: str
    type: str

    @property
    def column(self) -> str:
        """The field's name in the struct `fields`."""
        return f"{self.name} {self.type}"

    def of(self, value: Any) -> Any:
        """Return the field's value as `type`, or None if it is missing or not of that type.

        As in the aggregator, a boolean counts as the number 1 or 0. For OTHER, the result is never None.

        >>> MeasuredField("n", "int64").of(True), MeasuredField("n", "float64").of(2)
        (1, 2.0)
        >>> MeasuredField("n", "int64").of("2") is None
        True
        """
        if self.type == TEXT:
            return value if isinstance(value, str) else None
        if self.type == OTHER:
            return not (value is None or isinstance(value, str))
        if self.type == "int64":
            return int(value) if isinstance(value, int) and INT64_MIN <= value <= INT64_MAX else None
        if not isinstance(value, int | float):
            return None
        try:
            return float(value)
        except OverflowError:
            return None


def fields(store: StoreSchema) -> list[MeasuredField]:
    """Return the distinct fields, with their types, that the measures of a store need."""
    found = [
        MeasuredField(a.field, a.state[0][1])
        for a in store.aggregations
        if a.field and a.verbatim and a.function in _NUMBERS
    ]
    for name in _distinct_fields(store):
        found += [MeasuredField(name, TEXT), MeasuredField(name, OTHER)]
    return list(dict.fromkeys(found))


def texts_alone(records: DataFrame, store: StoreSchema) -> StoreSchema:
    """Return the store with `verbatim` False for the distinct counts of fields that hold values other than text.

    The audit does not compare distinct counts with `verbatim` False. Spark cannot hash values other than text as the
    aggregator does in Python.
    """
    if not (names := _distinct_fields(store)):
        return store
    holds_other = (F.max(F.col(f"{FIELDS}.{quoted(MeasuredField(name, OTHER).column)}")).alias(name) for name in names)
    found = records.agg(*holds_other).first()
    others = {name for name in names if found is not None and found[name]}
    return msgspec.structs.replace(
        store,
        aggregations=tuple(
            msgspec.structs.replace(a, verbatim=False) if a.function == _DISTINCT and a.field in others else a
            for a in store.aggregations
        ),
    )


def parsed(records: DataFrame, store: StoreSchema, is_wanted: SparkColumn) -> DataFrame:
    """Return `records` with the struct `fields` in place of the value.

    `fields` has the fields that measures need, parsed from the value's JSON. Where `is_wanted` is false, they are those
    of a missing value. If no measure needs a field, `fields` is null.
    """
    if not (wanted := fields(store)):
        return records.withColumn(FIELDS, F.lit(None).cast("string")).drop("value")
    struct = ", ".join(f"{quoted(one.column)}: {_TYPES[one.type]}" for one in wanted)
    others = ", ".join(f"{column} {type_}" for column, type_ in records.drop("value").dtypes)
    read = records.withColumn("value", F.when(is_wanted, F.col("value")))
    # Python parses the JSON. With Spark's `from_json` instead, the JVM needed twice the CPU time.
    return read.mapInArrow(_value_parser(wanted), f"{others}, {FIELDS} STRUCT<{struct}>")


def _value_parser(wanted: list[MeasuredField]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def parse_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            objects = [_fields_of_value(value) for value in batch.column("value").to_pylist()]
            columns = [pa.array([one.of(of.get(one.name)) for of in objects], _ARROW_TYPES[one.type]) for one in wanted]
            struct = pa.StructArray.from_arrays(columns, [one.column for one in wanted])
            rest = batch.drop_columns("value")
            yield pa.RecordBatch.from_arrays([*rest.columns, struct], [*rest.schema.names, FIELDS])

    return parse_batches


def _fields_of_value(value: bytes | None) -> dict[str, Any]:
    """Return all fields of a source record's JSON value.

    Returns an empty dict if the value is not a JSON object, as may be the case for a dead letter.
    """
    try:
        found = json_deserializer("", value)
    except SerializationError:
        return {}
    return found if isinstance(found, dict) else {}


def _distinct_fields(store: StoreSchema) -> list[str]:
    found = (a.field for a in store.aggregations if a.field and a.verbatim and a.function == _DISTINCT)
    return list(dict.fromkeys(found))


_NUMBERS = ("sum", "mean", "min", "max")
_DISTINCT = "count_distinct"


def _measures_of_aggregation(aggregation: AggregationSchema, name: str) -> list[Measure]:
    label = aggregation.name

    def state_column(column: str) -> SparkColumn:
        return F.col(f"state.{quoted(f'{label}_{column}')}")

    if aggregation.function == "count":
        return [Measure(name, label, F.count(F.lit(1)), state_column("n"), F.sum)]
    if aggregation.function == "latest":
        return [Measure(name, label, F.max("timestamp_ms"), state_column("ms"), F.max)]
    if aggregation.field is None or not aggregation.verbatim:
        return []
    if aggregation.function == _DISTINCT:
        text = _field_column(aggregation.field, TEXT)
        of_records = F.hll_sketch_agg(F.when(text == "", EMPTY_TEXT).otherwise(text), F.lit(DISTINCT_LG_K))
        return [Measure(name, f"{label} (distinct)", of_records, state_column("hll"), F.hll_union_agg, is_sketch=True)]
    if aggregation.function not in _NUMBERS:
        return []
    column, type_ = aggregation.state[0]
    value = _field_column(aggregation.field, type_)
    own = F.when(state_column("n") > 0, state_column(column))
    function = {"sum": F.sum, "mean": F.sum, "min": F.min, "max": F.max}[aggregation.function]
    number = Measure(name, f"{label} ({column})", function(value), own, function, is_float=type_ == "float64")
    count = Measure(f"{name}_n", f"{label} (values)", F.count(value), state_column("n"), F.sum)
    if function is not F.sum or not number.is_float:
        return [number, count]
    magnitude = Measure(f"{name}_magnitude", label, F.sum(F.abs(value)), F.abs(own), F.sum, shown=False)
    return [number._replace(magnitude=magnitude.name), magnitude, count]


def _field_column(name: str, type_: str) -> SparkColumn:
    return F.col(f"{FIELDS}.{quoted(MeasuredField(name, type_).column)}")


def unequal_measures(all_measures: list[Measure]) -> SparkColumn:
    """Return as text the measures whose columns `<name>` (expected) and `found_<name>` differ; empty if none do."""
    differences = []
    for measure in all_measures:
        if not measure.shown:
            continue
        a = F.col(measure.name)
        b = F.col(f"found_{measure.name}")
        if measure.is_sketch:
            differences.append(_sketches_differ(measure.label, a, b))
            continue
        differs = ~a.eqNullSafe(b)
        if measure.is_float:
            # A sum's error is relative to the sum of the magnitudes, because values of both signs may cancel.
            against = F.col(measure.magnitude) if measure.magnitude else F.greatest(F.abs(a), F.abs(b))
            differs &= ~F.coalesce(F.abs(a - b) <= against * RELATIVE_ERROR, F.lit(False))
        text = F.concat(F.lit(f"{measure.label}: expected "), _column_as_text(a), F.lit(", found "), _column_as_text(b))
        differences.append(F.when(differs, text))
    return F.concat_ws("; ", *differences) if differences else F.lit("")


def unequal_results(store: StoreSchema) -> SparkColumn:
    """Return as text the result columns of a row of `closed` that differ from the results of its `state`; empty if none
    do.
    """
    differences = []
    for name, of_state in result_expressions(store).items():
        found = F.col(quoted(name))
        shown = [F.substring(_column_as_text(value), 1, SHOWN_MAX) for value in (of_state, found)]
        text = F.concat(F.lit(f"{name}: the state has "), shown[0], F.lit(", the column "), shown[1])
        differences.append(F.when(~of_state.eqNullSafe(found), text))
    return F.concat_ws("; ", *differences) if differences else F.lit("")


def _sketches_differ(label: str, a: SparkColumn, b: SparkColumn) -> SparkColumn:
    # A union's estimate depends on its registers alone, not on the order in which they were filled.
    ours, theirs, both = (F.hll_sketch_estimate(F.hll_union(x, y)) for x, y in ((a, a), (b, b), (a, b)))
    # Most sketches are equal byte for byte. This check saves the union, which costs more than all other measures.
    is_same = a.eqNullSafe(b)
    differs = ~F.when(is_same, True).otherwise(F.coalesce((both == ours) & (both == theirs), F.lit(False)))
    text = F.concat(F.lit(f"{label}: expected "), _column_as_text(ours), F.lit(", found "), _column_as_text(theirs))
    return F.when(differs, F.concat(text, F.lit(", together "), _column_as_text(both)))


def _column_as_text(value: SparkColumn) -> SparkColumn:
    return F.coalesce(value.cast("string"), F.lit("none"))
