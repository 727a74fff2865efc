"""Names and types of the Delta tables."""

from __future__ import annotations

import msgspec
import pytest

from services.compactor import tables
from services.compactor.generations import layouts_of
from shared.common.errors import ConfigError
from shared.streams.aggregations import Count, CountDistinct, Mean
from shared.streams.changelog_format import AggregationSchema, StoreSchema

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


def named(store: str = "banks", aggregation: str = "n") -> StoreSchema:
    return msgspec.structs.replace(STORE, name=store, aggregations=(AggregationSchema.of(aggregation, Count()),))


def test_a_store_is_a_struct_of_its_state_columns() -> None:
    """The struct's fields are the body's columns, in order, with names that need no care."""
    (layout,) = layouts_of((STORE,))
    fields = "`n_n`: BIGINT, `mean_sum`: DOUBLE, `mean_n`: BIGINT, `places_hll`: BINARY"
    assert tables.struct_type(layout) == f"STRUCT<{fields}>"
    assert tables.quoted("a`b") == "`a``b`"


@pytest.mark.parametrize("store", ["row", "Key", "a b", "a=b", "", "a/b"])
def test_a_store_that_cannot_be_a_column_is_refused(store: str) -> None:
    """A store's name must be free beside the table's own columns and fit into a path."""
    with pytest.raises(ConfigError, match="store"):
        tables.require_names((named(store),))


def test_aggregations_must_not_hide_the_windows_own_columns() -> None:
    """An aggregation called as a column of `closed`, or as another one but for case, is refused by name."""
    with pytest.raises(ConfigError, match="closed_at"):
        tables.require_names((named(aggregation="closed_at"),))
    with pytest.raises(ConfigError, match="Banks"):
        tables.require_names((named(), named("Banks")))
    tables.require_names((STORE,))
