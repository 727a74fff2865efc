"""The states of a store's aggregations as columns: numbers in the cells of a table's rows, or Python objects.

The kernels compute Count, Latest, Sum, Mean, Min and Max in the cells. They also compute First and Last there, if their
field is typed `int` or `float`, also with `| None`. The states of all other aggregations are Python objects, one for
each row (`ObjectStates`). For these the kernels write steps, which Python executes. In `RecordNumbers`, the cell of a
missing number has no meaning.

>>> from penstock.shared.streams.aggregations.aggregation import Count, Min
>>> columns = StateColumns([Count(), Min("ms").bind(dict)])
>>> columns.program, columns.cells, columns.types
([(0, 0, -1), (5, 1, 0)], 3, ('int64', 'float64', 'int64'))
>>> values, objects = columns.take([{"ms": 4}, {"ms": None}], np.array([10, 20]))
>>> values.cells.view(np.float64).tolist(), values.has.tolist(), objects
([[4.0, 0.0]], [[1, 0]], [])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count, Max, Mean, Min, Sum
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.latest import Latest
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.object_states import ChangelogColumn, ObjectStates, object_column

Column = NDArray[Any]
"""An array of int64, float64 or objects."""

_NUMBERS: dict[type, tuple[int, int]] = {
    Sum: (k.SUM_INT, k.SUM_FLOAT),
    Mean: (k.SUM_INT, k.SUM_FLOAT),
    Min: (k.MIN_INT, k.MIN_FLOAT),
    Max: (k.MAX_INT, k.MAX_FLOAT),
}
_BY_TIME: dict[type, int] = {First: k.FIRST, Last: k.LAST}
_PLAIN: dict[type, int] = {Count: k.COUNT, Latest: k.LATEST}
"""Aggregations that read no value."""
FLOAT_INTEGERS_MAX = 2**53
"""Up to this number a float64 represents every integer."""
_ACCEPTED_TYPES = {"int64": frozenset((int, bool)), "float64": frozenset((int, float, bool))}


class ValueRejected(Exception):
    """One of the values may be invalid for an aggregation; processing record by record finds out."""


class RecordNumbers(NamedTuple):
    """The numbers that a batch's records add to states, in a row for each of `StateColumns.numbers`.

    `cells` has the numbers, one for each record, and `has` is 1 where a record has a number.
    """

    cells: Int64Array
    has: NDArray[np.uint8]


class StateColumns:
    """The state columns of several aggregations in order."""

    def __init__(self, aggregations: Sequence[Aggregation[Any]]) -> None:
        self.aggregations = tuple(aggregations)
        self.program: list[tuple[int, int, int]] = []
        """For each aggregation the kernels' operation, its first cell in a table's row, and its row in `RecordNumbers`
        (NONE: it takes no number from there)."""
        self.cells = 0
        """The number of cells that all aggregations need in a table's row."""
        self.objects: list[ObjectStates] = []
        self._slices: list[slice] = []
        self.numbers: list[Any] = []
        """The aggregations that read a number, in the order of the rows of values."""
        types: list[str] = []
        for aggregation in aggregations:
            at = len(types)
            kind = type(aggregation)
            if kind in _PLAIN:
                self.program.append((_PLAIN[kind], self.cells, k.NONE))
                types.append("int64")
                self.cells += 1
            elif kind in _NUMBERS:
                number: Any = aggregation
                op = _NUMBERS[kind][number.type != "int64"]
                self.program.append((op, self.cells, len(self.numbers)))
                types += [number.type, "int64"]
                self.numbers.append(number)
                self.cells += 2
            elif kind in _BY_TIME and (of_number := getattr(aggregation, "type", None)) is not None:
                self.program.append((_BY_TIME[kind], self.cells, len(self.numbers)))
                types += ["int64", of_number]
                self.numbers.append(aggregation)
                self.cells += 2
            else:
                self.program.append((k.OBJECT, self.cells, k.NONE))
                types.append("object")
                self.objects.append(ObjectStates(aggregation))
            self._slices.append(slice(at, len(types)))
        self.types = tuple(types)
        """The types of the columns: int64, float64 or object."""
        self.calls_users = any(states.calls_users for states in self.objects)
        """Whether user code may reject a record only after its windows are known."""

    # --- records ---

    def take(self, values: Sequence[Any], timestamps: Int64Array) -> tuple[RecordNumbers, list[list[Any]]]:
        """Return what records add to states: numbers for the kernels, and a list for each of `objects`.

        Raises ValueRejected if a built-in aggregation rejects a value, or if a number's type does not fit its column.
        """
        count = len(timestamps)
        numbers = self.no_values(count)
        for at, number in enumerate(self.numbers):
            self._take_numbers_of_field(number, values, numbers.cells[at], numbers.has[at])
        self.settle_zeros(numbers.cells)
        try:
            return numbers, [states.take(values) for states in self.objects]
        except Exception as e:
            # A value's own methods may raise any error.
            raise ValueRejected from e

    @staticmethod
    def _take_numbers_of_field(
        aggregation: Any, values: Sequence[Any], cells: Int64Array, has: NDArray[np.uint8]
    ) -> None:
        """Write the numbers in an aggregation's field to `cells`, and which records have one to `has`."""
        count = len(values)
        type_ = aggregation.type
        has[:] = 1
        get: Callable[[Any], Any] = aggregation._get
        column: NDArray[Any] = cells if type_ == "int64" else cells.view(np.float64)
        try:
            numbers: Iterable[Any] = list(map(get, values))
            types = set(map(type, numbers))
            if type(None) in types:
                types.remove(type(None))
                has[:] = np.fromiter((g is not None for g in numbers), np.bool_, count)
                numbers = (0 if g is None else g for g in numbers)
            if not types <= _ACCEPTED_TYPES[type_]:
                raise ValueRejected
            column[:] = np.fromiter(numbers, type_, count)
        except Exception as e:
            # A value's own methods may raise any error.
            raise ValueRejected from e

    def settle_zeros(self, cells: Int64Array) -> None:
        """Change -0.0 to 0.0 in the values of Sum, Mean, Min and Max, so that there is one zero."""
        for own, number in zip(cells, self.numbers, strict=True):
            if number.type == "float64" and type(number) not in _BY_TIME:
                # -0.0 + 0.0 is 0.0. Min and Max would otherwise depend on the order of the two zeros.
                own.view(np.float64)[:] += 0.0

    def no_values(self, count: int) -> RecordNumbers:
        """Return RecordNumbers for `count` records, of which none has a number yet.

        Aggregations without numbers, such as Count, still take such a record.
        """
        shape = (len(self.numbers), count)
        return RecordNumbers(np.zeros(shape, np.int64), np.zeros(shape, np.uint8))

    def take_one(self, value: Any, into: RecordNumbers) -> None:
        """Write the numbers that one record adds for the kernels to `into`. Raises DataError if one is rejected."""
        for at, number in enumerate(self.numbers):
            converted = number.number(value)
            into.has[at, 0] = converted is not None
            if converted is not None:
                into.cells[at, 0] = converted if number.type == "int64" else np.float64(converted).view(np.int64)

    def of_each(
        self, values: RecordNumbers, inputs: Sequence[Sequence[Any]], times: Int64Array
    ) -> tuple[Sequence[ChangelogColumn], NDArray[np.bool_]]:
        """Return the state columns that each record would have alone in a window, and a mask of valid ones.

        A record has no valid state if an aggregation raises, or if its state cannot be encoded.
        """
        try:
            return self.to_changelog(self._columns_of_each_record(values, inputs, times)), np.ones(len(times), np.bool_)
        except Exception:
            # A single record that raises has no state. If there are several records, try each alone.
            if len(times) == 1:
                types = [column.type for aggregation in self.aggregations for column in aggregation.state_columns]
                none: list[ChangelogColumn] = [[b""] if of == "binary" else np.zeros(1, of) for of in types]
                return none, np.zeros(1, np.bool_)
        parts = [
            self.of_each(RecordNumbers(values.cells[:, i : i + 1], values.has[:, i : i + 1]), own, times[i : i + 1])
            for i in range(len(times))
            for own in [[[one[i]] for one in inputs]]
        ]
        columns: list[ChangelogColumn] = []
        for many in zip(*(states for states, _ in parts), strict=True):
            is_number = isinstance(many[0], np.ndarray)
            columns.append(np.concatenate(many) if is_number else [blob for own in many for blob in own])
        return columns, np.concatenate([has for _, has in parts])

    def _columns_of_each_record(
        self, values: RecordNumbers, inputs: Sequence[Sequence[Any]], times: Int64Array
    ) -> list[Column]:
        count = len(times)
        cells = np.zeros((count, self.cells), np.int64)
        for op, at, row in self.program:
            if op == k.COUNT:
                cells[:, at] = 1
            elif op == k.LATEST:
                cells[:, at] = times
            elif op in (k.FIRST, k.LAST):
                has = values.has[row] != 0
                cells[:, at] = np.where(has, times, -1)
                cells[:, at + 1] = np.where(has, values.cells[row], 0)
            elif op != k.OBJECT:
                cells[:, at + 1] = values.has[row]
                cells[:, at] = np.where(values.has[row], values.cells[row], 0)
        states = []
        for own, own_inputs in zip(self.objects, inputs, strict=True):
            alone = ObjectStates(own.aggregation)
            alone.resize(count)
            steps = [(k.NEW, i, k.NONE) for i in range(count)] + [(k.ADD, i, i) for i in range(count)]
            alone.execute(steps, own_inputs, times.tolist())
            states.append(alone.rows[:count])
        return self.of_rows(cells, states)

    # --- windows ---

    def of_rows(self, cells: Int64Array, states: Sequence[Sequence[Any]]) -> list[Column]:
        """Return the columns of windows with these cells, and with these states for each of `objects`."""
        columns: list[Column] = []
        own = iter(states)
        for (op, at, _), kind in zip(self.program, self._slices, strict=True):
            if op == k.OBJECT:
                columns.append(object_column(next(own), len(cells)))
                continue
            for i in range(kind.stop - kind.start):
                column = np.ascontiguousarray(cells[:, at + i])
                columns.append(column if self.types[kind.start + i] == "int64" else column.view(np.float64))
        return columns

    def to_rows(self, columns: Sequence[Column]) -> tuple[Int64Array, list[list[Any]]]:
        """Return cells and states from columns; the inverse of `of_rows`."""
        cells = np.zeros((len(columns[0]), self.cells), np.int64)
        states: list[list[Any]] = []
        for (op, at, _), kind in zip(self.program, self._slices, strict=True):
            if op == k.OBJECT:
                states.append(columns[kind.start].tolist())
                continue
            for i, column in enumerate(columns[kind]):
                cells[:, at + i] = np.asarray(column, self.types[kind.start + i]).view(np.int64)
        return cells, states

    def states(self, values: Sequence[Any]) -> list[Any]:
        """Return one window's states from its column values; states that change in place are not copied."""
        own = zip(self.program, self.aggregations, self._slices, strict=True)
        return [values[s.start] if op == k.OBJECT else a.from_columns(values[s]) for (op, _, _), a, s in own]

    def values(self, states: Sequence[Any]) -> list[Any]:
        """Return one window's column values from its states."""
        own = zip(self.program, self.aggregations, states, strict=True)
        return [v for (op, _, _), a, s in own for v in ((s,) if op == k.OBJECT else a.to_columns(s))]

    def as_columns(self, rows: Sequence[Sequence[Any]]) -> list[Column]:
        """Return the columns of windows from the column values of each window."""
        many = list(zip(*rows, strict=True)) or [()] * len(self.types)
        return [
            object_column(column, len(rows)) if type_ == "object" else np.array(column, type_)
            for column, type_ in zip(many, self.types, strict=True)
        ]

    def results(self, columns: Sequence[Column]) -> list[list[Any]]:
        """Return each aggregation's results as plain values."""
        return [own.tolist() if isinstance(own, np.ndarray) else own for own in self.result_columns(columns)]

    def result_columns(self, columns: Sequence[Column]) -> list[Column | list[Any]]:
        """Return each aggregation's results: an array of numbers, or a list, which may also contain other values."""
        found: list[Column | list[Any]] = []
        for aggregation, at in zip(self.aggregations, self._slices, strict=True):
            first, *more = columns[at]
            if first.dtype == object:
                found.append(list(map(aggregation.result, first.tolist())))
                continue
            if not more:
                found.append(first)
                continue
            numbers, has = (more[0], first >= 0) if type(aggregation) in _BY_TIME else (first, more[0] > 0)
            if type(aggregation) is Mean:
                numbers = _divide_sums_by_counts(numbers, more[0])
            if has.all():
                found.append(numbers)
            else:
                plain = zip(numbers.tolist(), has.tolist(), strict=True)
                found.append([number if is_present else None for number, is_present in plain])
        return found

    def to_changelog(self, columns: Sequence[Column]) -> Sequence[ChangelogColumn]:
        """Convert columns of states to the aggregations' `state_columns` for the changelog.

        Raises the JSON encoder's error if a state cannot be written as JSON.
        """
        if not self.objects:
            return columns
        made: list[ChangelogColumn] = []
        own = iter(self.objects)
        for (op, _, _), at in zip(self.program, self._slices, strict=True):
            made += next(own).to_changelog(columns[at.start]) if op == k.OBJECT else columns[at]
        return made

    def from_changelog(self, columns: Sequence[Any]) -> list[Column]:
        """Convert `state_columns` of the changelog back into the columns that `to_changelog` takes.

        Raises ValueError if a state cannot be decoded.
        """
        found: list[Column] = []
        at = 0
        own = iter(self.objects)
        for (op, _, _), aggregation in zip(self.program, self.aggregations, strict=True):
            of = columns[at : at + len(aggregation.state_columns)]
            at += len(of)
            found += [next(own).from_changelog(of)] if op == k.OBJECT else of
        return found


def _divide_sums_by_counts(sums: Column, counts: Column) -> Column:
    """Return the means of Mean's state columns: each sum over its count, divided as Python does; 0 for no count."""
    counts = np.maximum(counts, 1)
    # numpy would round such a sum to a float before it divides.
    if sums.dtype == np.int64 and (np.abs(sums) > FLOAT_INTEGERS_MAX).any():
        return np.array([number / n for number, n in zip(sums.tolist(), counts.tolist(), strict=True)])
    return np.asarray(sums / counts)
