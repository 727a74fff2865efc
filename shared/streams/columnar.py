"""Aggregations in bulk: the states of a store's aggregations as numeric columns, and how columns are reduced.

Count, Sum, Mean, Min and Max have states of fixed width that can be merged in any order, so a whole batch of records is
reduced at once: one array a state column, one ufunc a column. A number of which there is none yet (`n` is 0) stands in
a store as 0, as it does record by record, and as the ufunc's identity while columns are reduced.

>>> from shared.streams.aggregations import Count, Min
>>> columns = StateColumns.of([Count(), Min("ms").bind(dict)])
>>> taken = columns.take([{"ms": 4}, {"ms": None}, {"ms": 9.5}], np.array([10, 11, 12]))
>>> [c.tolist() for c in columns.reduce(taken, np.array([0, 1]))]
[[1, 2], [4.0, 9.5], [1, 1]]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.common.records import Int64Array
from shared.streams.aggregations import Aggregation, ColumnValue, Count, Max, Mean, Min, Sum
from shared.streams.latest import Latest

NumberArray = NDArray[Any]
"""int64 or float64."""

_NUMBERS: dict[type, np.ufunc] = {Sum: np.add, Mean: np.add, Min: np.minimum, Max: np.maximum}
_TAKEN = {"int64": frozenset((int, bool)), "float64": frozenset((int, float, bool))}
INT64_SAFE = 2.0**62
"""Sums of which the magnitudes add up to less than this, counted in float64, fit into 64 bits."""


class Unfit(Exception):
    """Among the values is one that an aggregation refuses; record by record it is found."""


class _Number:
    """One Sum, Mean, Min or Max: a number and how many values are in it."""

    def __init__(self, aggregation: Any) -> None:
        self.type: str = aggregation.type
        self.ufunc = _NUMBERS[type(aggregation)]
        self._get: Callable[[Any], Any] = aggregation._get
        if self.ufunc is np.add:
            self.identity: float | int = 0
        elif self.type == "int64":
            self.identity = np.iinfo(np.int64).max if self.ufunc is np.minimum else np.iinfo(np.int64).min
        else:
            self.identity = np.inf if self.ufunc is np.minimum else -np.inf

    def take(self, values: Sequence[Any], count: int) -> tuple[NumberArray, NumberArray]:
        try:
            got: list[Any] = list(map(self._get, values))
            types = set(map(type, got))
            if type(None) not in types:
                if types <= _TAKEN[self.type]:
                    return np.fromiter(got, self.type, count), np.ones(count, np.int64)
            elif types - {type(None)} <= _TAKEN[self.type]:
                n = np.fromiter((g is not None for g in got), np.int64, count)
                return np.fromiter((self.identity if g is None else g for g in got), self.type, count), n
        except (KeyError, TypeError, AttributeError, OverflowError) as e:
            raise Unfit from e
        raise Unfit


class StateColumns:
    """The state columns of several aggregations in their order; all int64 or float64."""

    def __init__(self, aggregations: Sequence[Aggregation[Any]]) -> None:
        self.aggregations = tuple(aggregations)
        self.types: tuple[str, ...] = tuple(c.type for a in aggregations for c in a.state_columns)
        self._numbers = [None if type(a) in (Count, Latest) else _Number(a) for a in aggregations]
        self._ufuncs: list[np.ufunc] = []
        self._empty: list[tuple[int, float | int]] = []  # columns whose identity is not 0; each one's `n` is the next
        self._slices: list[slice] = []
        for aggregation, number in zip(aggregations, self._numbers, strict=True):
            at = len(self._ufuncs)
            if number is not None:
                if number.identity != 0:
                    self._empty.append((at, number.identity))
                self._ufuncs.append(number.ufunc)
            self._ufuncs.append(np.maximum if type(aggregation) is Latest else np.add)
            self._slices.append(slice(at, len(self._ufuncs)))
        self.needs_values = any(number is not None for number in self._numbers)
        own = zip(self._numbers, self._slices, strict=True)
        self.sums = [at.start for n, at in own if n is not None and n.ufunc is np.add and n.type == "int64"]
        """The columns that are sums of int64; counts cannot grow so large."""

    @classmethod
    def of(cls, aggregations: Sequence[Aggregation[Any]]) -> StateColumns | None:
        """The columns; None where an aggregation has no such state."""
        known = all(type(a) in (Count, Latest) or type(a) in _NUMBERS for a in aggregations)
        return cls(aggregations) if known and aggregations else None

    # --- one state ---

    def values(self, states: Sequence[Any]) -> list[ColumnValue]:
        """The column values of one window's states."""
        return [v for a, s in zip(self.aggregations, states, strict=True) for v in a.to_columns(s)]

    def states(self, values: Sequence[Any]) -> list[Any]:
        """One window's states from its column values."""
        return [a.from_columns(values[s]) for a, s in zip(self.aggregations, self._slices, strict=True)]

    # --- many ---

    def take(self, values: Sequence[Any] | None, timestamps: Int64Array) -> list[NumberArray]:
        """The columns of records, each as a window of its own; Unfit where one would be refused.

        `values` may be None where no aggregation looks at them.
        """
        taken: list[NumberArray] = []
        count = len(timestamps)
        for aggregation, number in zip(self.aggregations, self._numbers, strict=True):
            if type(aggregation) is Latest:
                taken.append(timestamps)
            elif number is None:
                taken.append(np.ones(count, np.int64))
            else:
                assert values is not None
                taken += number.take(values, count)
        return taken

    def reduce(self, columns: Sequence[NumberArray], first: NDArray[np.int64]) -> list[NumberArray]:
        """Runs of rows as one row each; `first` are the indices at which runs begin."""
        return [u.reduceat(c, first) for u, c in zip(self._ufuncs, columns, strict=True)]

    def opened(self, columns: list[NumberArray]) -> list[NumberArray]:
        """Columns as a store has them, made ready to be reduced; those that change are copies."""
        for at, identity in self._empty:
            columns[at] = np.where(columns[at + 1] == 0, identity, columns[at])
        return columns

    def closed(self, columns: list[NumberArray]) -> list[NumberArray]:
        """Reduced columns as a store has them."""
        for at, _ in self._empty:
            columns[at] = np.where(columns[at + 1] == 0, 0, columns[at])
        return columns

    def magnitude(self, columns: Sequence[NumberArray]) -> float:
        """The largest that an int64 sum over any of these rows can be, signs aside."""
        return max((float(np.abs(columns[i].astype(np.float64)).sum()) for i in self.sums), default=0.0)

    def largest(self, columns: Sequence[NumberArray]) -> float:
        """The largest int64 sum in any of these rows, signs aside."""
        return max((float(np.abs(columns[i].astype(np.float64)).max(initial=0)) for i in self.sums), default=0.0)

    def results(self, columns: Sequence[NumberArray]) -> list[list[Any]]:
        """Each aggregation's results as plain values."""
        found: list[list[Any]] = []
        for aggregation, at in zip(self.aggregations, self._slices, strict=True):
            own = [column.tolist() for column in columns[at]]
            if len(own) == 1:
                found.append(own[0])
            elif type(aggregation) is Mean:
                found.append([number / n if n else None for number, n in zip(*own, strict=True)])
            elif 0 in own[1]:
                found.append([number if n else None for number, n in zip(*own, strict=True)])
            else:
                found.append(own[0])
        return found
