"""Where the records of a bulk went, at the least cost a record: its batch alone.

A record's index in its batch follows from where the bulk's run of appends began in that batch, and from how many
records of the run before it went there: nobody else appends during a run, which awaits nothing. Indices are worked out
only when somebody asks for one record's fate.

A slice of columns has less: one span for each batch. It is spread over its records when somebody asks for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from penstock.shared.clients.producer.batch import Batch
from penstock.shared.common.records import Int64Array

Span = tuple[Batch | Exception, int, Int64Array]
"""Rows of a slice, ascending, that went into one batch one after the other, the first at this index; or their error."""

Run = dict[Batch, int]
"""The batches that a run of appends filled, each with the index of the run's first record in it."""


class Places:
    """`of` has, for each record in order, its batch or the error that kept it from getting into one.

    During a run whoever appends adds to `of`, and to the run each batch that does not name it as its `run` yet.
    """

    __slots__ = ("_indices", "_of", "_runs", "_sliced", "_slices")

    def __init__(self) -> None:
        self._of: list[Batch | Exception] = []
        self._slices: list[tuple[int, list[Span]]] = []
        """Behind what `_of` has: how many records, and where they went."""
        self._sliced = 0
        self._runs: list[tuple[int, Run]] = []
        self._indices: list[int] | None = None

    def __repr__(self) -> str:
        return f"<Places of {len(self)} records in {len(self._runs) + len(self._slices)} runs>"

    def __len__(self) -> int:
        return len(self._of) + self._sliced

    @property
    def of(self) -> list[Batch | Exception]:
        """Batch or error of each record."""
        for count, spans in self._slices:
            places = np.empty(count, object)
            for place, _, rows in spans:
                places[rows] = place
            self._runs.append((len(self._of), {place: index for place, index, _ in spans if isinstance(place, Batch)}))
            self._of += places.tolist()
        self._slices, self._sliced = [], 0
        return self._of

    def add_slice(self, count: int, spans: list[Span]) -> None:
        """The next `count` records; the spans have each of them once, and each batch once."""
        self._slices.append((count, spans))
        self._sliced += count

    def begin(self) -> Run:
        """A run begins: nothing else is appended to any batch until `end`."""
        run: Run = {}
        self._runs.append((len(self.of), run))
        return run

    def end(self) -> None:
        """The run is over."""
        start, run = self._runs[-1]
        for batch in run:
            batch.run = None
        if start == len(self.of):
            self._runs.pop()

    def add(self, place: Batch | Exception, index: int) -> None:
        """The next record, by itself."""
        self._runs.append((len(self.of), {place: index} if isinstance(place, Batch) else {}))
        self.of.append(place)

    def batches(self) -> list[Batch]:
        """Every batch that has one of the records, once."""
        spans = chain.from_iterable(spans for _, spans in self._slices)
        sliced = (place for place, _, _ in spans if isinstance(place, Batch))
        return list(dict.fromkeys(chain(chain.from_iterable(run for _, run in self._runs), sliced)))

    def last(self) -> tuple[Batch | Exception, int]:
        """The last record's batch and its index there; its error and -1 where it is in none."""
        if self._slices:
            count, spans = self._slices[-1]
            place, index, rows = next(span for span in spans if span[2][-1] == count - 1)
            return place, index + len(rows) - 1 if isinstance(place, Batch) else -1
        start, run = self._runs[-1]
        last = self._of[-1]
        return last, run[last] + self._of[start:].count(last) - 1 if isinstance(last, Batch) else -1

    def indices(self) -> list[int]:
        """The index of each record in its batch, -1 for one that is in none."""
        if self._indices is None:
            of = self.of
            ends = [*(start for start, _ in self._runs), len(of)][1:]
            runs = zip(self._runs, ends, strict=True)
            self._indices = [index for (start, run), end in runs for index in _indices(of[start:end], run)]
        return self._indices


def _indices(places: Iterable[Batch | Exception], run: Run) -> Iterable[int]:
    following = dict(run)
    for place in places:
        if isinstance(place, Batch):
            index = following[place]
            following[place] = index + 1
            yield index
        else:
            yield -1
