"""States that are no mere numbers, in columns of a store: of Python objects, beside those of numbers.

`First` and `Last` are a column of moments and one of values. The other aggregations here have one column, of states as
`add` makes them. A batch costs them one call a run and not one a record: what a run brings is a `Run` until it is known
which stored window it belongs to, and is then put into that window's state, which changes in place where `add` does. So
a state is in one place only: in a row, in what is kept of a row that was closed, or in a `Session` that came of either.

Two runs of one key, the second begun by what came third of all:

>>> from penstock.shared.streams.aggregations import CountDistinct
>>> from penstock.shared.streams.collecting import CollectList, Last
>>> last, values = Last("page").bind(dict), [{"page": page} for page in "bca"]
>>> kind = object_columns(last)
>>> taken = kind.take(values, np.array([20, 80, 10]))
>>> [c.tolist() for c in kind.reduce([c[[2, 0, 1]] for c in taken], np.array([0, 2]), np.array([2, 0, 1]))]
[[20, 80], ['b', 'c']]
>>> kind = object_columns(CollectList("page").bind(dict))
>>> (taken,) = kind.take(values, np.array([20, 80, 10]))
>>> kind.closed(kind.reduce([taken[[2, 0, 1]]], np.array([0, 2]), np.array([2, 0, 1])))[0].tolist()
[(('b', 'a'), 2), (('c',), 1)]
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations import INT64_MAX, INT64_MIN, Aggregation, CountDistinct
from penstock.shared.streams.collecting import CollectList, CollectSet, First, Last
from penstock.shared.streams.quantiles import Quantiles

AnyArray = NDArray[Any]
"""int64, float64 or objects."""
ChangelogColumn = AnyArray | list[bytes]
"""One column of a state as the changelog has it: numbers, or bytes."""

NO_MOMENT = -1
SINGLY_MAX = 4
"""So few numbers are put into a sketch one by one: to hand it an array costs as much as five of them."""

_encode = msgspec.json.Encoder().encode
_encode_in_order = msgspec.json.Encoder(order="deterministic").encode
_NUMBERS = frozenset((int, float, bool, type(None)))
_TEXTS = frozenset((str, type(None)))


class Run(NamedTuple):
    """What some records bring that no state has yet; `arrived` are their places, in order, where that matters."""

    values: Sequence[Any] | AnyArray
    arrived: Sequence[int]


class ObjectColumns(ABC):
    """One aggregation's columns: of records (`take`), of runs (`reduce`), of windows as a store has them (`closed`)."""

    types: tuple[str, ...] = ("object",)
    in_order = False
    """Whether it matters in which order records came."""

    def __init__(self, aggregation: Any) -> None:
        self._aggregation = aggregation
        self._get: Callable[[Any], Any] = aggregation._get

    @abstractmethod
    def take(self, values: Sequence[Any], timestamps: Int64Array) -> list[AnyArray]:
        """The columns of records; raises something where one of them would be refused."""

    @abstractmethod
    def reduce(self, taken: Sequence[AnyArray], first: Int64Array, arrived: Int64Array) -> list[AnyArray]:
        """Runs of records as one row each: in order of time, equal ones as they arrived, or all as they arrived."""

    @abstractmethod
    def merge(self, columns: Sequence[AnyArray], first: Int64Array, stored: NDArray[np.bool_]) -> list[AnyArray]:
        """Groups of rows as one each: stored windows in order of start, and runs that came after all of them.

        Runs that hold records of one moment stand in the order of their arrival.
        """

    def closed(self, columns: Sequence[AnyArray]) -> list[AnyArray]:
        """Runs and windows as a store has them."""
        return list(columns)

    # --- states as a store has them ---

    def cells(self, state: Any) -> Sequence[Any]:
        """One state as a row's cells."""
        return (state,)

    def state(self, cells: Sequence[Any]) -> Any:
        """One state from a row's cells."""
        return cells[0]

    def results(self, columns: Sequence[AnyArray]) -> list[Any]:
        """Each window's result."""
        return list(map(self._aggregation.result, columns[0].tolist()))

    def to_changelog(self, columns: Sequence[AnyArray]) -> list[ChangelogColumn]:
        """The aggregation's `state_columns`. Raises what encoding a state raises."""
        rows = zip(*map(self._aggregation.to_columns, columns[0].tolist()), strict=True)
        made: list[list[Any]] = list(map(list, rows)) or [[] for _ in self._aggregation.state_columns]
        kinds = [column.type for column in self._aggregation.state_columns]
        return [own if kind == "binary" else np.array(own, kind) for kind, own in zip(kinds, made, strict=True)]

    def from_changelog(self, columns: Sequence[Any]) -> list[AnyArray]:
        """From `state_columns`. Raises ValueError or what reading a state raises."""
        return [objects(map(self._aggregation.from_columns, zip(*map(_plain, columns), strict=True)), len(columns[0]))]


class ByTimeColumns(ObjectColumns):
    """First and Last: the moment of the value, -1 where there is none, and the value."""

    types = ("int64", "object")

    def __init__(self, aggregation: First | Last) -> None:
        super().__init__(aggregation)
        self._is_first = type(aggregation) is First

    def take(self, values: Sequence[Any], timestamps: Int64Array) -> list[AnyArray]:
        got = list(map(self._get, values))
        column = objects(got, len(got))
        if type(None) in set(map(type, got)):
            timestamps = np.where(np.fromiter((g is None for g in got), np.bool_, len(got)), NO_MOMENT, timestamps)
        return [timestamps, column]

    def reduce(self, taken: Sequence[AnyArray], first: Int64Array, arrived: Int64Array) -> list[AnyArray]:
        return self._chosen(taken, first, np.arange(len(taken[0])))

    def merge(self, columns: Sequence[AnyArray], first: Int64Array, stored: NDArray[np.bool_]) -> list[AnyArray]:
        count = len(stored)
        return self._chosen(columns, first, np.arange(count) + np.where(stored, 0, count))

    def _chosen(self, columns: Sequence[AnyArray], first: Int64Array, came: Int64Array) -> list[AnyArray]:
        """Of each group the row with the earliest moment, or the latest; of equal ones that which came so."""
        at, values = columns
        sizes = np.diff(np.append(first, len(at)))
        lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
        if self._is_first:
            at = np.where(at == NO_MOMENT, highest, at)
            is_it = at == np.repeat(np.minimum.reduceat(at, first), sizes)
            chosen = np.minimum.reduceat(np.where(is_it, came, highest), first) % len(at)
        else:
            is_it = at == np.repeat(np.maximum.reduceat(at, first), sizes)
            chosen = np.maximum.reduceat(np.where(is_it, came, lowest), first) % len(at)
        return [columns[0][chosen], values[chosen]]

    def cells(self, state: Any) -> Sequence[Any]:
        return tuple(state)

    def state(self, cells: Sequence[Any]) -> Any:
        return (cells[0], cells[1])

    def results(self, columns: Sequence[AnyArray]) -> list[Any]:
        return list(columns[1].tolist())

    def to_changelog(self, columns: Sequence[AnyArray]) -> list[ChangelogColumn]:
        return [columns[0], [b"" if value is None else _encode(value) for value in columns[1].tolist()]]

    def from_changelog(self, columns: Sequence[Any]) -> list[AnyArray]:
        states = map(self._aggregation.from_columns, zip(*map(_plain, columns), strict=True))
        return [np.array(columns[0], np.int64), objects((value for _, value in states), len(columns[0]))]


class FedColumns(ObjectColumns):
    """Aggregations with a state of their own kind, into which the values of a run are put at once."""

    def reduce(self, taken: Sequence[AnyArray], first: Int64Array, arrived: Int64Array) -> list[AnyArray]:
        places: list[int] = []
        if self.in_order:
            order = _by_arrival(first, arrived)
            taken, places = [taken[0][order]], arrived[order].tolist()
        values = taken[0].tolist() if taken[0].dtype == object else taken[0]
        bounds = zip(first.tolist(), [*first[1:].tolist(), len(values)], strict=True)
        runs = (Run(values[a:b], places[a:b]) for a, b in bounds)
        return [objects(runs, len(first))]

    def merge(self, columns: Sequence[AnyArray], first: Int64Array, stored: NDArray[np.bool_]) -> list[AnyArray]:
        cells, starts = columns[0].tolist(), first.tolist()
        merged = (
            cells[a] if b - a == 1 else self._merged(cells[a:b])
            for a, b in zip(starts, [*starts[1:], len(cells)], strict=True)
        )
        return [objects(merged, len(first))]

    def closed(self, columns: Sequence[AnyArray]) -> list[AnyArray]:
        initial, fed = self._aggregation.initial, self.fed
        cells = columns[0].tolist()
        return [objects((fed(initial(), c.values) if type(c) is Run else c for c in cells), len(cells))]

    @abstractmethod
    def fed(self, state: Any, values: Any) -> Any:
        """The state with a run's values; `state` may be changed."""

    def _merged(self, group: list[Any]) -> Any:
        """Stored states and runs as one: the only stored one goes on itself."""
        states = [cell for cell in group if type(cell) is not Run]
        runs = [cell for cell in group if type(cell) is Run]
        run = self._joined(runs) if len(runs) > 1 else runs[0]
        return self.fed(functools.reduce(self._aggregation.merge, states), run.values) if states else run

    def _joined(self, runs: list[Run]) -> Run:
        if isinstance(runs[0].values, np.ndarray):
            return Run(np.concatenate([run.values for run in runs]), ())
        values = [value for run in runs for value in run.values]
        if not self.in_order:
            return Run(values, ())
        places = [place for run in runs for place in run.arrived]
        order = np.argsort(places).tolist()
        return Run([values[i] for i in order], [places[i] for i in order])


class DistinctColumns(FedColumns):
    """CountDistinct: what is counted, None aside."""

    def take(self, values: Sequence[Any], timestamps: Int64Array) -> list[AnyArray]:
        got: list[Any] = list(map(self._get, values))
        kinds = set(map(type, got))
        if str in kinds:
            "".join(g for g in got if type(g) is str).encode()  # what is no UTF-8 raises
        integers = [g for g in got if type(g) is int] if int in kinds else [0]
        if not kinds <= _NUMBERS | _TEXTS or not INT64_MIN <= min(integers) <= max(integers) <= INT64_MAX:
            got = list(map(self._aggregation._item, values))
            scratch = self._aggregation.initial()
            for value in values:
                self._aggregation.add(scratch, value)  # of large integers it refuses some
        return [objects(got, len(got))]

    def fed(self, state: Any, values: Any) -> Any:
        if len(values) > 1 and set(map(type, values)) <= _TEXTS:
            values = dict.fromkeys(values)
        for value in values:
            if value is not None:
                state.update(value)
        return state


class QuantilesColumns(FedColumns):
    """Quantiles: numbers; None is one that is none, which a sketch passes over."""

    def take(self, values: Sequence[Any], timestamps: Int64Array) -> list[AnyArray]:
        got: list[Any] = list(map(self._get, values))
        kinds = set(map(type, got))
        if not kinds <= _NUMBERS:
            got = list(map(self._aggregation._number, values))
        if type(None) in kinds:
            got = [np.nan if g is None else g for g in got]
        return [np.fromiter(got, np.float64, len(got))]

    def fed(self, state: Any, values: Any) -> Any:
        if len(values) > SINGLY_MAX:
            state.update(values)
        else:
            for value in values.tolist():
                state.update(value)
        return state


class CollectColumns(FedColumns):
    """CollectList and CollectSet: values in the order in which they came."""

    in_order = True

    def take(self, values: Sequence[Any], timestamps: Int64Array) -> list[AnyArray]:
        got = list(map(self._get, values))
        if type(self._aggregation) is CollectSet:
            _encode_in_order(got)
        return [objects(got, len(got))]

    def fed(self, state: Any, values: Any) -> Any:
        come = tuple(value for value in values if value is not None)
        return self._aggregation.merge(state, (come, len(come)))


_KINDS: dict[type, type[ObjectColumns]] = {
    First: ByTimeColumns,
    Last: ByTimeColumns,
    CountDistinct: DistinctColumns,
    Quantiles: QuantilesColumns,
    CollectList: CollectColumns,
    CollectSet: CollectColumns,
}


def object_columns(aggregation: Aggregation[Any]) -> ObjectColumns | None:
    """The columns of an aggregation; None where it has none: a user's own functions are called for each record."""
    kind = _KINDS.get(type(aggregation))
    return None if kind is None else kind(aggregation)


def objects(values: Iterable[Any], count: int) -> AnyArray:
    """So many values as a column of objects, each in one place even if it is a sequence."""
    return np.fromiter(values, object, count)


def _by_arrival(first: Int64Array, arrived: Int64Array) -> Int64Array:
    """Which order puts the records of each run into that of their arrival."""
    rises = arrived[1:] > arrived[:-1]
    rises[first[1:] - 1] = True
    if rises.all():
        return np.arange(len(arrived))
    is_first = np.zeros(len(arrived), np.int64)
    is_first[first[1:]] = 1
    return np.lexsort((arrived, np.cumsum(is_first)))


def _plain(column: Any) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column
