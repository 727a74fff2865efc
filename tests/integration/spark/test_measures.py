"""Numbers of source records, as Spark reads them for the audit."""

from __future__ import annotations

from typing import Any

import msgspec
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.measures import FIELDS, field_types, measures, parsed
from penstock.shared.streams.aggregations import Max, Mean, Min, Sum
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema

VALUES = (b"true", b"false", b"2.5", b"null", b"-7", b"0.1", b"1e2", b"123456789012345678")
OF_X = {"sum": Sum("x"), "mean": Mean("x"), "least": Min("x"), "most": Max("x")}


def test_numbers_are_those_that_the_engine_adds(spark: Any) -> None:
    """Booleans count as 1 and 0 and null not at all, among numbers of any form."""
    schemas = tuple(AggregationSchema.of(name, aggregation) for name, aggregation in OF_X.items())
    store = StoreSchema("s", "session", "string", 10, 5, "on_close", "in", None, None, None, schemas)
    records = [b'{"x":%s}' % value for value in VALUES] + [b"{}"]
    rows = spark.createDataFrame([(record,) for record in records], "value binary")
    read = rows.select(parsed("value", field_types(store)).alias(FIELDS))
    numbers = {m.name: m for m in measures(store) if m.shown}
    found = read.agg(*(m.of_records.cast("double").alias(name) for name, m in numbers.items()), F.count("*")).first()
    wanted = []
    for aggregation in OF_X.values():
        state = aggregation.initial()
        for record in records[:-1]:
            state = aggregation.add(state, msgspec.json.decode(record))
        wanted += aggregation.to_columns(state)
    assert list(found)[:-1] == wanted
