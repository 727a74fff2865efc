"""Appends to a Delta table with the versions of applications: each record is appended once, and no value changes."""

from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.shared.common.errors import DataError, RetriableError, WriterFenced
from penstock.shared.common.lake import append_once as of_append
from penstock.shared.common.lake.append_once import append_once, table_versions
from penstock.shared.common.lake.delta_tables import open_table


def rows_of(uri: str) -> list[Any]:
    return sorted(DeltaTable(uri).to_pyarrow_table().column("n").to_pylist())


@pytest.mark.parametrize("is_new", [True, False])
def test_a_commit_between_check_and_append_fences_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    """The append is rejected, also if the other commit made the table. The next attempt finds the other version."""
    uri = str(tmp_path)
    if not is_new:
        append_once(uri, pa.table({"n": [0]}), {"other": (None, 1)}, {})
    loaded = open_table(uri, {})
    append_once(uri, pa.table({"n": [1, 2]}), {"a": (None, 2)}, {})
    late = (uri, pa.table({"n": [1]}), {"a": (None, 1)}, {})
    with monkeypatch.context() as patched:
        patched.setattr(of_append, "open_table", lambda *_: loaded)
        with pytest.raises(RetriableError):
            append_once(*late)
    with pytest.raises(WriterFenced):
        append_once(*late)
    assert rows_of(uri) == ([1, 2] if is_new else [0, 1, 2])
    assert table_versions(uri, ["a"], {}) == {"a": 2}


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        (pa.float32(), pa.array([0.1])),
        (pa.float32(), pa.array([1.5, 1e300])),
        (pa.int64(), pa.array([1.5])),
        (pa.decimal128(4, 1), pa.array([0.25])),
        (pa.float64(), pa.array([Decimal("0.12345678901234567891")])),
        (pa.decimal128(4, 1), pa.array([1000])),
        (pa.decimal128(4, 1), pa.array([math.nan])),
        (pa.int8(), pa.array([300])),
        (pa.list_(pa.float32()), pa.array([None, [], [1.5, 0.1]])),
        (pa.struct([("x", pa.list_(pa.int64()))]), pa.array([None, {"x": [1.5]}])),
        (pa.map_(pa.string(), pa.float32()), pa.array([[("x", 1e300)]], pa.map_(pa.string(), pa.float64()))),
    ],
)
def test_a_number_that_would_change_is_an_error(tmp_path: Path, kept: Any, numbers: Any) -> None:
    """The error names the column, and nothing is appended."""
    append_once(str(tmp_path), pa.table({"n": pa.nulls(1, kept)}), {"a": (None, 1)}, {})
    with pytest.raises(DataError, match="column n is "):
        append_once(str(tmp_path), pa.table({"n": numbers}), {"a": (1, 2)}, {})
    assert rows_of(str(tmp_path)) == [None]


def test_numbers_that_fit_are_converted(tmp_path: Path) -> None:
    """Nulls, NaN and infinity have the same value in each type of fractions."""
    append_once(str(tmp_path), pa.table({"n": pa.array([0.5], pa.float32())}), {"a": (None, 1)}, {})
    append_once(str(tmp_path), pa.table({"n": [1.25, None, math.nan, math.inf]}), {"a": (1, 2)}, {})
    append_once(str(tmp_path), pa.table({"n": [3]}), {"a": (2, 3)}, {})
    found = DeltaTable(str(tmp_path)).to_pyarrow_table().column("n").to_pylist()
    assert sorted(str(n) for n in found) == ["0.5", "1.25", "3.0", "None", "inf", "nan"]


@pytest.mark.parametrize(
    ("kept", "numbers", "expected"),
    [
        (pa.float64(), pa.array([Decimal("19.99")], pa.decimal128(38, 2)), 19.99),
        (pa.float64(), pa.array([Decimal("0.1")], pa.decimal128(38, 18)), 0.1),
        (pa.float32(), pa.array([Decimal("0.50")]), 0.5),
        (pa.decimal128(10, 2), pa.array([19.99]), Decimal("19.99")),
        (pa.decimal128(10, 2), pa.array([19.99], pa.float32()), Decimal("19.99")),
        (pa.decimal128(10, 2), pa.array([5]), Decimal("5.00")),
        (pa.int64(), pa.array([Decimal("5.00")]), 5),
    ],
)
def test_a_decimal_keeps_its_digits(tmp_path: Path, kept: Any, numbers: Any, expected: Any) -> None:
    """19.99 is 19.99 in a column of doubles and in one of decimals, also within structs, lists and maps."""

    def table_of(column: Any) -> Any:
        entry = pa.MapArray.from_arrays([0, 1], ["x"], column)
        within = pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 1], column), entry], ["l", "m"])
        return pa.table({"n": column, "s": within})

    append_once(str(tmp_path), table_of(pa.nulls(1, kept)), {"a": (None, 1)}, {})
    append_once(str(tmp_path), table_of(numbers), {"a": (1, 2)}, {})
    found = DeltaTable(str(tmp_path)).to_pyarrow_table()
    assert found.schema.field("n").type == kept
    assert {"n": expected, "s": {"l": [expected], "m": [("x", expected)]}} in found.to_pylist()


def test_numbers_within_values_are_converted(tmp_path: Path) -> None:
    """JSON writers often write 52.0 as 52. So a flush may have only whole numbers where the table has fractions."""
    counts = pa.map_(pa.string(), pa.float64())
    first = {"pos": [{"lat": 52.5, "to": [{"n": 1}]}], "l": [[0.5]], "m": pa.array([[("x", 0.5)]], counts)}
    then = {
        "pos": [{"lat": 52, "to": [{"n": 2.0, "new": "x", "none": None}]}, None],
        "l": [[1, None], []],
        "m": pa.array([[("x", 1), ("y", None)], None], pa.map_(pa.string(), pa.int64())),
    }
    append_once(str(tmp_path), pa.table(first), {"a": (None, 1)}, {})
    append_once(str(tmp_path), pa.table(then), {"a": (1, 2)}, {})
    found = DeltaTable(str(tmp_path)).to_pyarrow_table()
    (row,) = (row for row in found.to_pylist() if row["l"] == [1.0, None])
    assert row["pos"] == {"lat": 52.0, "to": [{"n": 2, "new": "x"}]}
    assert row["m"] == [("x", 1.0), ("y", None)]
    assert [type(value) for value in (row["pos"]["lat"], row["l"][0], row["pos"]["to"][0]["n"])] == [float, float, int]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (pa.array([[{"a": 1}]]), pa.array([[{"b": 2}]])),
        (pa.array([{"x": [{"a": 1, "c": 0}]}]), pa.array([{"x": [{"b": 2, "c": 0}]}])),
        *[
            (
                pa.array(
                    [[("k", {"a": 1, "b": 3})]], pa.map_(pa.string(), pa.struct({"a": pa.int64(), "b": pa.int64()}))
                ),
                pa.array([[("k", {"b": 2})]], pa.map_(pa.string(), pa.struct({name: pa.int64() for name in names}))),
            )
            for names in ("b", "ba")
        ],
    ],
)
def test_structs_within_lists_and_maps_may_lack_fields(tmp_path: Path, first: Any, then: Any) -> None:
    """A producer of an older schema version lacks fields that the table has. No value is lost."""
    append_once(str(tmp_path), pa.table({"n": first}), {"a": (None, 1)}, {})
    append_once(str(tmp_path), pa.table({"n": then}), {"a": (1, 2)}, {})
    (row,) = (
        text for row in DeltaTable(str(tmp_path)).to_pyarrow_table().to_pylist() if "'b': 2" in (text := str(row))
    )
    assert "'a': None" in row


def test_a_row_that_violates_a_constraint_is_an_error_of_the_data(tmp_path: Path) -> None:
    """A retry would raise the same error, so it is no error of the storage. Nothing is appended."""
    append_once(str(tmp_path), pa.table({"n": [1]}), {"a": (None, 1)}, {})
    DeltaTable(str(tmp_path)).alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(DataError):
        append_once(str(tmp_path), pa.table({"n": [2, -1]}), {"a": (1, 3)}, {})
    assert rows_of(str(tmp_path)) == [1]
