"""Aggregations in bulk: the states of a store's aggregations as columns, and how columns are reduced.

Count, Sum, Mean, Min and Max have states of fixed width that can be merged in any order, so a whole batch of records is
reduced at once: one array a state column, one ufunc a column. A number of which there is none yet (`n` is 0) stands in
a store as 0, as it does record by record, and as the ufunc's identity while columns are reduced. Other aggregations
have columns of objects (`object_columns`); a user's own have none.

>>> from penstock.shared.streams.aggregations import Count, Min
>>> columns = StateColumns.of([Count(), Min("ms").bind(dict)])
>>> taken = columns.take([{"ms": 4}, {"ms": None}, {"ms": 9.5}], np.array([10, 20, 21]))
>>> [c.tolist() for c in columns.reduce(taken, np.array([0, 1]), np.arange(3))]
[[1, 2], [4.0, 9.5], [1, 1]]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations import Aggregation, Count, Max, Mean, Min, Sum
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.object_columns import ChangelogColumn, ObjectColumns, object_columns

FloatArray = NDArray[np.float64]
NumberArray = NDArray[Any]
"""int64, float64 or, of the aggregations that are no numbers, objects."""

_NUMBERS: dict[type, np.ufunc] = {Sum: np.add, Mean: np.add, Min: np.fmin, Max: np.maximum}
"""NaN counts as the greatest number: `fmin` passes it over, `maximum` does not."""
_PLAIN = frozenset((Count, Latest))
"""Aggregations that look at no value."""
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
            self.identity = np.iinfo(np.int64).max if self.ufunc is np.fmin else np.iinfo(np.int64).min
        else:
            self.identity = np.nan if self.ufunc is np.fmin else -np.inf

    def take(self, values: Sequence[Any], count: int) -> tuple[NumberArray, NumberArray]:
        try:
            got: list[Any] = list(map(self._get, values))
            types = set(map(type, got))
            if type(None) not in types:
                if types <= _TAKEN[self.type]:
                    return self._column(got, count), np.ones(count, np.int64)
            elif types - {type(None)} <= _TAKEN[self.type]:
                n = np.fromiter((g is not None for g in got), np.int64, count)
                return self._column((self.identity if g is None else g for g in got), count), n
        except (KeyError, TypeError, AttributeError, OverflowError) as e:
            raise Unfit from e
        raise Unfit

    def _column(self, numbers: Iterable[float | int], count: int) -> NumberArray:
        column = np.fromiter(numbers, self.type, count)
        column += 0  # there is one zero only: -0.0 becomes 0.0
        return column


class StateColumns:
    """The state columns of several aggregations in their order."""

    def __init__(self, aggregations: Sequence[Aggregation[Any]]) -> None:
        self.aggregations = tuple(aggregations)
        self._kinds = [None if type(a) in _PLAIN else object_columns(a) or _Number(a) for a in aggregations]
        self._ufuncs: list[np.ufunc] = []
        """One a column; those of objects are not used."""
        self._empty: list[tuple[int, float | int]] = []  # columns whose identity is not 0; each one's `n` is the next
        self._slices: list[slice] = []
        self._objects: list[tuple[slice, ObjectColumns]] = []
        types: list[str] = []
        self.sums: list[int] = []
        """The columns that are sums of int64; counts cannot grow so large."""
        for kind, aggregation in zip(self._kinds, aggregations, strict=True):
            at = len(types)
            if isinstance(kind, ObjectColumns):
                types += kind.types
                self._objects.append((slice(at, len(types)), kind))
            else:
                types += ["int64"] if kind is None else [kind.type, "int64"]
            if isinstance(kind, _Number):
                if kind.identity != 0:
                    self._empty.append((at, kind.identity))
                elif kind.type == "int64":
                    self.sums.append(at)
                self._ufuncs.append(kind.ufunc)
            last = np.maximum if type(aggregation) is Latest else np.add
            self._ufuncs += [last] * (len(types) - len(self._ufuncs))
            self._slices.append(slice(at, len(types)))
        self.types: tuple[str, ...] = tuple(types)
        """As a store has the columns: int64, float64 or object."""
        self.in_order = any(kind.in_order for _, kind in self._objects)
        """Whether it matters in which order records came to a window."""

    @classmethod
    def of(cls, aggregations: Sequence[Aggregation[Any]]) -> StateColumns | None:
        """The columns; None where an aggregation has no such state."""
        known = all(type(a) in _PLAIN or type(a) in _NUMBERS or object_columns(a) for a in aggregations)
        return cls(aggregations) if known and aggregations else None

    # --- one state ---

    def values(self, states: Sequence[Any]) -> list[Any]:
        """The cells of one window's states."""
        if not self._objects:
            return [v for a, s in zip(self.aggregations, states, strict=True) for v in a.to_columns(s)]
        own = zip(self._kinds, self.aggregations, states, strict=True)
        return [v for k, a, s in own for v in (k.cells(s) if isinstance(k, ObjectColumns) else a.to_columns(s))]

    def states(self, values: Sequence[Any]) -> list[Any]:
        """One window's states from its cells; those that change in place are the store's own."""
        if not self._objects:
            return [a.from_columns(values[s]) for a, s in zip(self.aggregations, self._slices, strict=True)]
        own = zip(self._kinds, self.aggregations, self._slices, strict=True)
        return [k.state(values[s]) if isinstance(k, ObjectColumns) else a.from_columns(values[s]) for k, a, s in own]

    # --- many ---

    def take(self, values: Sequence[Any] | None, timestamps: Int64Array) -> list[NumberArray]:
        """The columns of records, each as a window of its own; Unfit where one would be refused.

        `values` may be None where no aggregation looks at them.
        """
        count = len(timestamps)
        taken: list[NumberArray] = []
        for kind, aggregation in zip(self._kinds, self.aggregations, strict=True):
            if kind is None:
                taken.append(timestamps if type(aggregation) is Latest else np.ones(count, np.int64))
                continue
            assert values is not None
            if isinstance(kind, ObjectColumns):
                try:
                    taken += kind.take(values, timestamps)
                except Exception as e:  # a value's own methods may raise anything
                    raise Unfit from e
            else:
                taken += kind.take(values, count)
        return taken

    def reduce(self, columns: Sequence[NumberArray], first: Int64Array, arrived: Int64Array) -> list[NumberArray]:
        """Runs of records as one row each; `first` are the indices at which runs begin.

        In a run records stand in order of time, equal ones as they arrived, or all as they did; `arrived` are their
        places in that order.
        """
        reduced = self._added(columns, first)
        for at, kind in self._objects:
            reduced[at] = kind.reduce(columns[at], first, arrived)
        return reduced

    def merge(self, columns: Sequence[NumberArray], first: Int64Array, stored: NDArray[np.bool_]) -> list[NumberArray]:
        """Groups of runs and of windows that a store had (`stored`) as one row each.

        Windows stand in order of start, and runs that hold records of one moment in that of their arrival. States of
        the store that change in place do so.
        """
        merged = self._added(columns, first)
        for at, kind in self._objects:
            merged[at] = kind.merge(columns[at], first, stored)
        return merged

    def _added(self, columns: Sequence[NumberArray], first: Int64Array) -> list[NumberArray]:
        pairs = zip(self._ufuncs, columns, strict=True)
        with np.errstate(over="ignore", invalid="ignore"):  # as with numbers one by one: inf, and then NaN
            return [c if c.dtype == object else u.reduceat(c, first) for u, c in pairs]

    def opened(self, columns: list[NumberArray]) -> list[NumberArray]:
        """Columns as a store has them, made ready to be reduced; those that change are copies."""
        for at, identity in self._empty:
            columns[at] = np.where(columns[at + 1] == 0, identity, columns[at])
        return columns

    def closed(self, columns: list[NumberArray]) -> list[NumberArray]:
        """Reduced columns as a store has them."""
        for at, _ in self._empty:
            columns[at] = np.where(columns[at + 1] == 0, 0, columns[at])
        for own, kind in self._objects:
            columns[own] = kind.closed(columns[own])
        return columns

    def to_changelog(self, columns: Sequence[NumberArray]) -> Sequence[ChangelogColumn]:
        """The aggregations' `state_columns`; raises what encoding a state raises."""
        if not self._objects:
            return columns
        made: list[ChangelogColumn] = []
        for kind, at in zip(self._kinds, self._slices, strict=True):
            made += kind.to_changelog(columns[at]) if isinstance(kind, ObjectColumns) else columns[at]
        return made

    def from_changelog(self, columns: Sequence[Any]) -> list[NumberArray]:
        """Columns as a store has them from the aggregations' `state_columns`; raises what reading a state raises."""
        found: list[NumberArray] = []
        at = 0
        for kind, aggregation in zip(self._kinds, self.aggregations, strict=True):
            own = columns[at : at + len(aggregation.state_columns)]
            at += len(own)
            found += kind.from_changelog(own) if isinstance(kind, ObjectColumns) else own
        return found

    def magnitude(self, columns: Sequence[NumberArray]) -> float:
        """The largest that an int64 sum over any of these rows can be, signs aside."""
        return max((float(np.abs(columns[i].astype(np.float64)).sum()) for i in self.sums), default=0.0)

    def magnitudes(self, columns: Sequence[NumberArray], codes: Int64Array, keys: int) -> FloatArray:
        """As `magnitude`, of the rows of each key by its number, of which there are so many; `codes` are the rows'."""
        found = np.zeros(keys)
        for i in self.sums:
            by_key = np.bincount(codes, np.abs(columns[i].astype(np.float64)), minlength=keys)
            np.maximum(found, by_key, out=found)
        return found

    def largest(self, columns: Sequence[NumberArray], codes: Int64Array, keys: int) -> FloatArray:
        """The largest int64 sum in one row of each key, signs aside."""
        found = np.zeros(keys)
        for i in self.sums:
            np.maximum.at(found, codes, np.abs(columns[i].astype(np.float64)))
        return found

    def results(self, columns: Sequence[NumberArray]) -> list[list[Any]]:
        """Each aggregation's results as plain values."""
        found: list[list[Any]] = []
        for kind, aggregation, at in zip(self._kinds, self.aggregations, self._slices, strict=True):
            if isinstance(kind, ObjectColumns):
                found.append(kind.results(columns[at]))
                continue
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
