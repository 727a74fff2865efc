"""Columns that grow."""

from __future__ import annotations

from penstock.shared.streams.state.growing import CAPACITY_MIN, GrowingColumns


def test_values_outlive_growing() -> None:
    """What a row holds is there after the columns have grown, through the array and through the view."""
    columns = GrowingColumns({"a": "int64", "b": "float64"})
    for i in range(3 * CAPACITY_MIN):
        row = columns.allocate()
        columns.views["a"][row], columns.views["b"][row] = i, i / 2
    assert columns.arrays["a"][: columns.used].tolist() == list(range(3 * CAPACITY_MIN))
    assert columns.views["b"][5] == 2.5
    assert columns.bytes == columns.capacity * 16


def test_objects_are_kept_as_they_are() -> None:
    """A cell is one object, whatever it is; where nothing was put yet there is None."""
    columns = GrowingColumns({"a": "object"})
    made = [[1, 2], (3,), {"x": [4]}, None]
    for cell in made * CAPACITY_MIN:
        row = columns.allocate()
        columns.views["a"][row] = cell
    assert columns.arrays["a"][: columns.used].tolist() == made * CAPACITY_MIN
    assert columns.views["a"][0] is made[0]
    assert columns.arrays["a"][columns.capacity - 1] is None


def test_rows_given_back_are_taken_again() -> None:
    """A row is nobody else's until it was given back, one by one and by the batch."""
    columns = GrowingColumns({"a": "int32"})
    first = columns.allocate_many(10).tolist()
    assert len(set(first)) == 10
    columns.free(first[3])
    columns.free_many(columns.allocate_many(0))
    assert columns.allocate() == first[3]
    columns.free(first[0])
    more = columns.allocate_many(CAPACITY_MIN).tolist()
    assert first[0] in more
    assert len(set(more) | set(first)) == CAPACITY_MIN + 9
