"""States that are Python objects, one for each row of a table, changed by the steps that a kernel writes.

A step begins a row, adds a record to it, merges two rows, or copies, forwards, closes or drops one. For each
aggregation, Python executes all steps of a batch in order. Records that are added to a row without another step of
this row in between are added in one call.

>>> from penstock.shared.streams.aggregations.collect import CollectList
>>> states = ObjectStates(CollectList("page").bind(dict))
>>> inputs = states.take([{"page": page} for page in "abc"])
>>> steps = [(k.NEW, 0, -1), (k.ADD, 0, 0), (k.NEW, 1, -1), (k.ADD, 1, 2), (k.ADD, 0, 1), (k.CLOSE, 0, 0)]
>>> states.resize(2); done = states.execute(steps, inputs, times=[10, 20, 15])
>>> done.closed, states.rows
([(('a', 'b'), 2)], [None, (('c',), 1)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import INT64_MAX, INT64_MIN, Int64Array
from penstock.shared.streams.aggregations.aggregation import (
    EMPTY_TEXT,
    JSON_SCALARS,
    Aggregation,
    CountDistinct,
)
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.quantiles import Quantiles
from penstock.shared.streams.windows import kernels as k

ChangelogColumn = NDArray[Any] | list[bytes]
"""One column of a state as in the changelog: numbers, or bytes."""

ESCAPED_BYTES_MAX = 6
"""The maximum bytes of an ASCII character in JSON."""
AROUND_TEXT_BYTES = 5
"""The maximum bytes that a text takes in JSON besides its characters, with a comma; a missing text takes null."""
NUMBER_TEXT_BYTES_MAX = 26
"""The maximum bytes of an int64, a float64, a bool or null in JSON with a comma."""
HLL_BYTES_MAX = 4 * 1024
"""The limit of a `CountDistinct` sketch, whose measured maximum is 2,088 bytes."""
KLL_BYTES_MAX = 16 * 1024
"""The limit of a `Quantiles` sketch with its quantiles. With three quantiles it measured 5,324 bytes after 40 million
values; each further quantile adds at most 26 bytes."""

SINGLY_MAX = 4
"""Up to this many numbers are added to a sketch one by one, because an array costs as much as five of them."""

Step = Sequence[int]
"""An operation, its row, and its record, row or output."""

_NUMBERS = frozenset((int, float, bool, type(None)))
_TEXTS = frozenset((str, type(None)))


class Done(NamedTuple):
    """The states of closed windows in order, and of windows that are forwarded as updates, by index."""

    closed: list[Any]
    updated: dict[int, Any]


class ObjectStates:
    """The states of one aggregation; `rows` has the state of each row, None for a row that is not in use.

    `bytes_max` is the size that no state exceeds in the changelog; None if states grow with their records.
    """

    def __init__(self, aggregation: Aggregation[Any]) -> None:
        self.aggregation = aggregation
        self.calls_users = type(aggregation) not in _KINDS
        self._take, self._feed, self.bytes_max = _KINDS.get(
            type(aggregation), (_collect_values, _feed_value_by_value, None)
        )
        self.rows: list[Any] = []

    def __repr__(self) -> str:
        return f"<ObjectStates of {self.aggregation.function}, {len(self.rows)} rows>"

    def resize(self, count: int) -> None:
        """Make room for `count` rows."""
        self.rows += [None] * (count - len(self.rows))

    def take(self, values: Sequence[Any]) -> list[Any]:
        """Return what records add to states. Raises an error if a built-in aggregation would reject one of them."""
        return self._take(self.aggregation, values)

    def take_one(self, value: Any) -> list[Any]:
        """As `take`, for one record. If a built-in aggregation would reject the record, raise the cause.

        The cause is a DataError for a wrong value of a field, or the error that the value's own class raised.
        """
        try:
            return self._take(self.aggregation, (value,))
        except Exception:
            # `add` names the field and the value in its error.
            self.aggregation.add(self.aggregation.initial(), value)
            raise

    def growth(self, inputs: Sequence[Any]) -> Int64Array:
        """Return the maximum bytes that each record adds to a state in the changelog; raises encoding errors."""
        kinds = set(map(type, inputs))
        if kinds <= _TEXTS:
            texts = [text or "" for text in inputs]
            if "".join(texts).isascii():
                return np.fromiter(map(len, texts), np.int64, len(texts)) * ESCAPED_BYTES_MAX + AROUND_TEXT_BYTES
        elif kinds <= _NUMBERS and all(INT64_MIN <= g <= INT64_MAX for g in inputs if type(g) is int):
            return np.full(len(inputs), NUMBER_TEXT_BYTES_MAX, np.int64)
        return np.fromiter((len(msgspec.json.encode(g)) + 1 for g in inputs), np.int64, len(inputs))

    def encoded_bytes(self, row: int) -> int:
        """Return the bytes of a row's binary state columns in the changelog."""
        return sum(len(c) for c in self.aggregation.to_columns(self.rows[row]) if isinstance(c, bytes))

    def execute(
        self,
        steps: Iterable[Step],
        inputs: Sequence[Any],
        times: Sequence[int],
        undo: list[tuple[int, Any]] | None = None,
    ) -> Done:
        """Execute a kernel's steps in order; `inputs` is what a batch's records add, `times` are their timestamps.

        With `undo`, the previous states of changed rows are appended to this list, and no previous state is changed in
        place.
        """
        rows = self.rows
        aggregation = self.aggregation
        feed = self._feed
        done = Done([], {})
        waiting: dict[int, list[int]] = {}

        def feed_waiting_inputs(row: int) -> None:
            if (indexes := waiting.pop(row, None)) is not None:
                state = rows[row]
                if undo is not None:
                    undo.append((row, state))
                    # The previous state must survive, so `feed` gets a copy that it may change in place.
                    state = aggregation.copy(state)
                rows[row] = feed(aggregation, state, [inputs[i] for i in indexes], [times[i] for i in indexes])

        for op, row, other in steps:
            if op == k.ADD:
                # Consecutive records of a row are added in one call, until another step needs the row.
                waiting.setdefault(row, []).append(other)
                continue
            feed_waiting_inputs(row)
            if undo is not None:
                undo.append((row, rows[row]))
            if op == k.NEW:
                rows[row] = aggregation.initial()
            elif op == k.MERGE:
                feed_waiting_inputs(other)
                rows[row] = aggregation.merge(rows[row], rows[other])
                if undo is not None:
                    undo.append((other, rows[other]))
                rows[other] = None
            elif op == k.COPY:
                feed_waiting_inputs(other)
                rows[row] = aggregation.copy(rows[other])
            elif op == k.UPDATE:
                # Later records of the batch may change the state, but this update must have the state as of now.
                done.updated[other] = aggregation.copy(rows[row])
            elif op == k.CLOSE:
                done.closed.append(rows[row])
                rows[row] = None
            elif op == k.RETAIN:
                # The row's state is copied into later windows, and the result must not change with it.
                done.closed.append(aggregation.copy(rows[row]))
            else:
                rows[row] = None
        for row in list(waiting):
            feed_waiting_inputs(row)
        return done

    def to_changelog(self, column: NDArray[Any]) -> list[ChangelogColumn]:
        """Return the states as changelog columns, one for each of the aggregation's `state_columns`.

        Raises the JSON encoder's error if a state of the user's code cannot be written as JSON.
        """
        kinds = [one.type for one in self.aggregation.state_columns]
        many = list(zip(*map(self.aggregation.to_columns, column.tolist()), strict=True)) or [()] * len(kinds)
        return [list(own) if kind == "binary" else np.array(own, kind) for kind, own in zip(kinds, many, strict=True)]

    def from_changelog(self, columns: Sequence[Any]) -> NDArray[Any]:
        """Return the states that these `state_columns` contain. Raises ValueError if a state cannot be decoded."""
        plain = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
        return object_column(map(self.aggregation.from_columns, zip(*plain, strict=True)), len(columns[0]))


def object_column(values: Iterable[Any], count: int) -> NDArray[Any]:
    """Return states that are Python objects as a column; each is one element even if it is a sequence."""
    return np.fromiter(values, object, count)


# --- the part of a value that an aggregation takes, and how it gets into a state ---


def _collect_values(aggregation: Any, values: Sequence[Any]) -> list[Any]:
    return list(values)


def _feed_value_by_value(aggregation: Any, state: Any, inputs: Sequence[Any], times: Sequence[int]) -> Any:
    for value, at in zip(inputs, times, strict=True):
        state = aggregation.add_at(state, value, at)
    return state


def _take_plain_json(aggregation: Any, values: Sequence[Any]) -> list[Any]:
    inputs = list(map(aggregation._get, values))
    return inputs if JSON_SCALARS.issuperset(map(type, inputs)) else list(map(aggregation._plain_json, inputs))


def _feed_timed_values(aggregation: Any, state: Any, inputs: Sequence[Any], times: Sequence[int]) -> Any:
    for value, at in zip(inputs, times, strict=True):
        state = aggregation.merge(state, (at, value))
    return state


def _take_distinct(aggregation: Any, values: Sequence[Any]) -> list[Any]:
    inputs: list[Any] = list(map(aggregation._get, values))
    kinds = set(map(type, inputs))
    if str in kinds:
        # `encode` raises an error for text that cannot be encoded as UTF-8.
        "".join(g for g in inputs if type(g) is str).encode()
    integers = [g for g in inputs if type(g) is int] if int in kinds else [0]
    if not kinds <= _NUMBERS | _TEXTS or not INT64_MIN <= min(integers) <= max(integers) <= INT64_MAX:
        inputs = list(map(aggregation._distinct_item, values))
        scratch = aggregation.initial()
        for value in values:
            # `add` raises an error for integers that are too large for a sketch.
            aggregation.add(scratch, value)
    elif "" in inputs:
        inputs = [EMPTY_TEXT if g == "" else g for g in inputs]
    return inputs


def _feed_distinct_sketch(aggregation: Any, state: Any, inputs: Sequence[Any], times: Sequence[int]) -> Any:
    if len(inputs) > 1 and set(map(type, inputs)) <= _TEXTS:
        inputs = list(dict.fromkeys(inputs))
    for value in inputs:
        if value is not None:
            state.update(value)
    return state


def _take_quantiles(aggregation: Any, values: Sequence[Any]) -> list[Any]:
    inputs = list(map(aggregation._get, values))
    if not set(map(type, inputs)) <= _NUMBERS:
        inputs = list(map(aggregation._quantile_input, values))
    # NaN stands for None, because a sketch skips NaN.
    return list(np.array([np.nan if g is None else g for g in inputs], np.float64).tolist())


def _feed_quantile_sketch(aggregation: Any, state: Any, inputs: Sequence[Any], times: Sequence[int]) -> Any:
    if len(inputs) > SINGLY_MAX:
        state.update(np.array(inputs, np.float64))
    else:
        for value in inputs:
            state.update(value)
    return state


def _take_encodable(aggregation: Any, values: Sequence[Any]) -> list[Any]:
    inputs = _take_plain_json(aggregation, values)
    aggregation._json(inputs)
    return inputs


def _feed_collected_values(aggregation: Any, state: Any, inputs: Sequence[Any], times: Sequence[int]) -> Any:
    collected = tuple(value for value in inputs if value is not None)
    return aggregation.merge(state, (collected, len(collected)))


_Take = Callable[[Any, Sequence[Any]], list[Any]]
_Feed = Callable[[Any, Any, Sequence[Any], Sequence[int]], Any]

_KINDS: dict[type, tuple[_Take, _Feed, int | None]] = {
    First: (_take_plain_json, _feed_timed_values, None),
    Last: (_take_plain_json, _feed_timed_values, None),
    CountDistinct: (_take_distinct, _feed_distinct_sketch, HLL_BYTES_MAX),
    Quantiles: (_take_quantiles, _feed_quantile_sketch, KLL_BYTES_MAX),
    CollectList: (_take_plain_json, _feed_collected_values, None),
    CollectSet: (_take_encodable, _feed_collected_values, None),
}
"""Aggregations that can be checked before a kernel sees their records; the last item is the maximum size of a state,
None if it grows."""
