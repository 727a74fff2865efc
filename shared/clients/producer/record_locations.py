"""The batches that the records of a bulk went to, at the lowest cost per record: one reference to a batch.

A run is a sequence of appends without an await, so nothing else appends in between. A record's index in its batch
follows from the index at which the run began in that batch, and from the number of earlier records of the run in it.
Indices are computed only when one record's fate is requested.

A slice of columns stores even less: one span for each batch. A span is spread over its records when one is requested.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from penstock.shared.clients.producer.producer_batch import Batch
from penstock.shared.common.records import Int64Array

Span = tuple[Batch | Exception, int, Int64Array]
"""A batch, the index of the span's first record in it, and the rows of a slice, ascending, that were appended in turn.

Rows that failed have their error in place of the batch, and the index -1.
"""

Run = dict[Batch, int]
"""The batches that a run of appends filled, each with the index of the run's first record in it."""


class RecordLocations:
    """`of` has for each record, in order, its batch, or the error that kept it out of a batch.

    During a run the appending code adds to `of`. It also adds to the run each batch that does not have it as its `run`
    yet.
    """

    __slots__ = ("_indices", "_of", "_runs", "_sliced", "_slices")

    def __init__(self) -> None:
        self._of: list[Batch | Exception] = []
        self._slices: list[tuple[int, list[Span]]] = []
        """The records after those in `_of`: their number, and their spans."""
        self._sliced = 0
        self._runs: list[tuple[int, Run]] = []
        self._indices: list[int] | None = None

    def __repr__(self) -> str:
        return f"<RecordLocations of {len(self)} records in {len(self._runs) + len(self._slices)} runs>"

    def __len__(self) -> int:
        return len(self._of) + self._sliced

    @property
    def of(self) -> list[Batch | Exception]:
        """The batch or error of each record."""
        # Spread the slices over their records: each slice becomes a run.
        for count, spans in self._slices:
            batches = np.empty(count, object)
            for batch_or_error, _, rows in spans:
                batches[rows] = batch_or_error
            self._runs.append(
                (
                    len(self._of),
                    {batch_or_error: index for batch_or_error, index, _ in spans if isinstance(batch_or_error, Batch)},
                )
            )
            self._of += batches.tolist()
        self._slices = []
        self._sliced = 0
        return self._of

    def add_slice(self, count: int, spans: list[Span]) -> None:
        """Add the next `count` records. The spans contain each record once, and each batch once."""
        self._slices.append((count, spans))
        self._sliced += count

    def begin(self) -> Run:
        """Begin a run: nothing else is appended to any batch until `end`."""
        run: Run = {}
        self._runs.append((len(self.of), run))
        return run

    def end(self) -> None:
        """End the run."""
        start, run = self._runs[-1]
        for batch in run:
            batch.run = None
        # A run that appended nothing has no record to belong to.
        if start == len(self.of):
            self._runs.pop()

    def add(self, batch_or_error: Batch | Exception, index: int) -> None:
        """Add the next record, which was appended outside a run."""
        self._runs.append((len(self.of), {batch_or_error: index} if isinstance(batch_or_error, Batch) else {}))
        self.of.append(batch_or_error)

    def batches(self) -> list[Batch]:
        """Return every batch that has one of the records, once."""
        spans = chain.from_iterable(spans for _, spans in self._slices)
        sliced = (batch for batch, _, _ in spans if isinstance(batch, Batch))
        return list(dict.fromkeys(chain(chain.from_iterable(run for _, run in self._runs), sliced)))

    def last(self) -> tuple[Batch | Exception, int]:
        """Return the last record's batch and its index there; its error and -1 if it has no batch."""
        # Read the last span as it is: spreading the slices would make an entry for every record.
        if self._slices:
            count, spans = self._slices[-1]
            batch_or_error, index, rows = next(span for span in spans if span[2][-1] == count - 1)
            return batch_or_error, index + len(rows) - 1 if isinstance(batch_or_error, Batch) else -1
        start, run = self._runs[-1]
        last = self._of[-1]
        return last, run[last] + self._of[start:].count(last) - 1 if isinstance(last, Batch) else -1

    def indices(self) -> list[int]:
        """Return the index of each record in its batch, -1 for a record without a batch."""
        if self._indices is None:
            of = self.of
            ends = [*(start for start, _ in self._runs), len(of)][1:]
            runs = zip(self._runs, ends, strict=True)
            self._indices = [index for (start, run), end in runs for index in _record_indices(of[start:end], run)]
        return self._indices


def _record_indices(batches: Iterable[Batch | Exception], run: Run) -> Iterable[int]:
    following = dict(run)
    for batch_or_error in batches:
        if isinstance(batch_or_error, Batch):
            index = following[batch_or_error]
            following[batch_or_error] = index + 1
            yield index
        else:
            yield -1
