"""Valid names of stores and aggregations with a lake."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, LATE_COLUMNS, STATE_COLUMNS
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.dsl.builder import RESERVED_RESULTS, StreamsBuilder
from penstock.shared.streams.lake_names import require_lake_names


def stores(*names: str, result: str = "n") -> tuple[StoreSchema, ...]:
    """Return the schemas of session stores with these names, each with one aggregation."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    for name in names:
        stream.group_by_key().session_window(10).aggregate(name, **{result: Count()}).on_close().to("out")
    return builder.build().schemas()


@pytest.mark.parametrize("name", STATE_COLUMNS)
def test_a_store_that_hides_a_column_of_state_is_refused(name: str) -> None:
    """A store named like a column of `state`, in any case, is rejected. The error names the store and the column."""
    message = f"'{name.title()}': .*table state .*'{name}'"
    with pytest.raises(ConfigError, match=message):
        require_lake_names(stores(name.title()))


@pytest.mark.parametrize(
    ("table", "name"),
    [
        *(("closed", name) for name in sorted({*CLOSED_COLUMNS} - RESERVED_RESULTS)),
        *(("late", name) for name in sorted({*LATE_COLUMNS} - {*CLOSED_COLUMNS})),
    ],
)
def test_an_aggregation_that_hides_a_column_of_closed_or_late_is_refused(table: str, name: str) -> None:
    """An aggregation named like a column of `closed` or `late` is rejected, even if the DSL accepts the name."""
    message = f"'visits': .*{table}/visits .*'{name}'"
    with pytest.raises(ConfigError, match=message):
        require_lake_names(stores("visits", result=name))


@pytest.mark.parametrize("name", ["a b", "a=b", "a/b", "a,b", "a;b"])
def test_a_store_that_is_no_columns_name_is_refused(name: str) -> None:
    """An invalid name of a column or folder is rejected. The error lists the invalid characters."""
    with pytest.raises(ConfigError, match=r"store '.*'.*table state"):
        require_lake_names(stores(name))


def test_names_that_differ_in_case_alone_are_refused() -> None:
    """Store names that differ only in case are rejected, because Delta has one column for both."""
    with pytest.raises(ConfigError, match=r"'Banks'.*'banks'"):
        require_lake_names(stores("banks", "Banks"))


def test_names_that_delta_accepts_are_valid() -> None:
    """Columns of the other table are valid names, and so is every character that Delta accepts."""
    require_lake_names(stores("day", "clicks-session", "a.b", result="run"))
