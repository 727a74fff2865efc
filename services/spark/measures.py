"""What the audit compares beside windows' bounds: counts, sums, least and greatest values, sketches of distinct texts.

A measure is one column of an aggregation's state. It can be computed from source records by Spark's own functions,
merged from the state of several windows, and compared. Two sketches are the same if their union says no more than
either. A user's own aggregates cannot be made anew this way and are left out, and so is what JSON does not have as the
aggregation takes it (`AggregationSchema.verbatim`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.sql import SQL_TYPES, quoted
from penstock.shared.streams.aggregations import DISTINCT_LG_K, EMPTY_TEXT
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema

RELATIVE_ERROR = 1e-9  # what two orders of adding the same floats may differ by, of the sum of their magnitudes
FIELDS, TEXTS = "fields", "texts"


class Measure(NamedTuple):
    """One number or sketch: `name` is its column, `label` what a person calls it.

    `of_records` aggregates it from source records, `of_state` reads it from a window's state, `merge` aggregates it
    from several windows. `magnitude` names the measure of a float sum's magnitudes; that one itself is not `shown`.
    """

    name: str
    label: str
    of_records: SparkColumn
    of_state: SparkColumn
    merge: Any
    is_float: bool = False
    is_sketch: bool = False
    magnitude: str | None = None
    shown: bool = True


def measures(store: StoreSchema) -> list[Measure]:
    """All measures of a store that can be checked."""
    return [m for i, aggregation in enumerate(store.aggregations) for m in _of(aggregation, f"m{i}")]


def unchecked(store: StoreSchema) -> list[str]:
    """The aggregations of which nothing can be checked."""
    return [a.name for a in store.aggregations if not _of(a, "m")]


def field_types(store: StoreSchema) -> str:
    """The source values' number fields that are needed, as a SQL schema for from_json; empty where none is.

    As texts, so that a boolean is there too (see `number_of`).
    """
    wanted = dict.fromkeys(a.field for a in store.aggregations if a.field and a.verbatim and a.function in _NUMBERS)
    return ", ".join(f"{quoted(name)} STRING" for name in wanted)


def number_of(field: str, type_: str) -> SparkColumn:
    """A record's value of that field as the engine adds it: a boolean is 1 or 0.

    A text that reads like one, or like a number, makes a dead letter and is none of the records here.
    """
    text = F.col(f"{FIELDS}.{quoted(field)}")
    flag = F.when(text == "true", 1).when(text == "false", 0)
    return F.coalesce(flag.cast(SQL_TYPES[type_]), text.try_cast(SQL_TYPES[type_]))


def text_types(store: StoreSchema) -> str:
    """The same for the fields whose distinct values are counted: variants, which know text from numbers."""
    wanted = dict.fromkeys(a.field for a in store.aggregations if a.field and a.verbatim and a.function == _DISTINCT)
    return ", ".join(f"{quoted(name)} VARIANT" for name in wanted)


def holds_other_than_text(field: str) -> SparkColumn:
    """Whether a record's value of that field is neither text nor null: how Python hashes it is not known to Spark."""
    kind = F.expr(f"schema_of_variant({TEXTS}.{quoted(field)})")
    return F.coalesce(~kind.isin("STRING", "VOID"), F.lit(False))


def parsed(records: DataFrame, store: StoreSchema, is_wanted: SparkColumn) -> DataFrame:
    """Records with the structs `fields` and `texts`, what measures need of the JSON of those wanted, and no value."""
    value = F.when(is_wanted, F.col("value").cast("string"))
    types = {FIELDS: field_types(store), TEXTS: text_types(store)}
    found = {name: F.from_json(value, of) if of else F.lit(None).cast("string") for name, of in types.items()}
    return records.withColumns(found).drop("value")


_NUMBERS = ("sum", "mean", "min", "max")
_DISTINCT = "count_distinct"


def _of(aggregation: AggregationSchema, name: str) -> list[Measure]:
    label = aggregation.name

    def state(column: str) -> SparkColumn:
        return F.col(f"state.{quoted(f'{label}_{column}')}")

    if aggregation.function == "count":
        return [Measure(name, label, F.count(F.lit(1)), state("n"), F.sum)]
    if aggregation.function == "latest":
        return [Measure(name, label, F.max("timestamp_ms"), state("ms"), F.max)]
    if aggregation.field is None or not aggregation.verbatim:
        return []
    if aggregation.function == _DISTINCT:
        text = F.expr(f"try_variant_get({TEXTS}.{quoted(aggregation.field)}, '$', 'string')")
        of_records = F.hll_sketch_agg(F.when(text == "", EMPTY_TEXT).otherwise(text), F.lit(DISTINCT_LG_K))
        return [Measure(name, f"{label} (distinct)", of_records, state("hll"), F.hll_union_agg, is_sketch=True)]
    if aggregation.function not in _NUMBERS:
        return []
    column, type_ = aggregation.state[0]
    value = number_of(aggregation.field, type_)
    own = F.when(state("n") > 0, state(column))
    function = {"sum": F.sum, "mean": F.sum, "min": F.min, "max": F.max}[aggregation.function]
    number = Measure(name, f"{label} ({column})", function(value), own, function, is_float=type_ == "float64")
    count = Measure(f"{name}_n", f"{label} (values)", F.count(value), state("n"), F.sum)
    if function is not F.sum or not number.is_float:
        return [number, count]
    magnitude = Measure(f"{name}_magnitude", label, F.sum(F.abs(value)), F.abs(own), F.sum, shown=False)
    return [number._replace(magnitude=magnitude.name), magnitude, count]


def contradictions(all_measures: list[Measure]) -> SparkColumn:
    """What differs between the columns `<name>` (expected) and `found_<name>`, as text; empty where nothing does."""
    said = []
    for measure in all_measures:
        if not measure.shown:
            continue
        a, b = F.col(measure.name), F.col(f"found_{measure.name}")
        if measure.is_sketch:
            said.append(_sketches_differ(measure.label, a, b))
            continue
        differs = ~a.eqNullSafe(b)
        if measure.is_float:
            # A sum's error is measured against the magnitudes added: values of both signs may cancel.
            against = F.col(measure.magnitude) if measure.magnitude else F.greatest(F.abs(a), F.abs(b))
            differs &= ~F.coalesce(F.abs(a - b) <= against * RELATIVE_ERROR, F.lit(False))
        text = F.concat(F.lit(f"{measure.label}: expected "), _shown(a), F.lit(", found "), _shown(b))
        said.append(F.when(differs, text))
    return F.concat_ws("; ", *said) if said else F.lit("")


def _sketches_differ(label: str, a: SparkColumn, b: SparkColumn) -> SparkColumn:
    # A union's estimate depends on its registers alone, not on the order in which they were filled.
    ours, theirs, both = (F.hll_sketch_estimate(F.hll_union(x, y)) for x, y in ((a, a), (b, b), (a, b)))
    differs = ~F.coalesce((both == ours) & (both == theirs), a.isNull() & b.isNull())
    text = F.concat(F.lit(f"{label}: expected "), _shown(ours), F.lit(", found "), _shown(theirs))
    return F.when(differs, F.concat(text, F.lit(", together "), _shown(both)))


def _shown(value: SparkColumn) -> SparkColumn:
    return F.coalesce(value.cast("string"), F.lit("none"))
