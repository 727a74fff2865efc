"""Names and types of the Delta tables."""

from __future__ import annotations

import pytest

from penstock.services.spark import tables
from penstock.services.spark.generations import layouts_of
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.aggregations import Count, CountDistinct, Mean
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema

STORE = StoreSchema(
    name="banks",
    kind="session",
    key="string",
    gap_ms=1,
    grace_ms=0,
    emit="on_close",
    source="s",
    results=None,
    late=None,
    dead_letters=None,
    aggregations=(
        AggregationSchema.of("n", Count()),
        AggregationSchema.of("mean", Mean("delay")),
        AggregationSchema.of("places", CountDistinct("place")),
    ),
)


class Foreign:
    """A table of somebody else's, as far as it is looked at."""

    columns = ("row", "n", "epoch")


def test_a_table_of_somebody_elses_is_refused() -> None:
    """By the columns that it lacks, not by what Spark says of a query that nobody has written."""
    with pytest.raises(SchemaMismatch, match=r"has no column changelog_offset, commit, partition, .*the aggregator's"):
        tables.progress_of(Foreign())  # type: ignore[arg-type]


def test_a_store_is_a_struct_of_its_state_columns() -> None:
    """The struct's fields are the body's columns, in order, with names that need no care."""
    (layout,) = layouts_of((STORE,))
    fields = "`n_n`: BIGINT, `mean_sum`: DOUBLE, `mean_n`: BIGINT, `places_hll`: BINARY"
    assert tables.struct_type(layout) == f"STRUCT<{fields}>"
    assert tables.quoted("a`b") == "`a``b`"
