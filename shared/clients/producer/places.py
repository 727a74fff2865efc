"""Where the records of a bulk went, at the least cost a record: its batch alone.

A record's index in its batch follows from where the bulk's run of appends began in that batch, and from how many
records of the run before it went there: nobody else appends during a run, which awaits nothing. Indices are worked out
only when somebody asks for one record's fate.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from penstock.shared.clients.producer.batch import Batch

Run = dict[Batch, int]
"""The batches that a run of appends filled, each with the index of the run's first record in it."""


class Places:
    """`of` has, for each record in order, its batch or the error that kept it from getting into one.

    During a run whoever appends adds to `of`, and to the run each batch that does not name it as its `run` yet.
    """

    __slots__ = ("_indices", "_runs", "of")

    def __init__(self) -> None:
        self.of: list[Batch | Exception] = []
        self._runs: list[tuple[int, Run]] = []
        self._indices: list[int] | None = None

    def __repr__(self) -> str:
        return f"<Places of {len(self.of)} records in {len(self._runs)} runs>"

    def __len__(self) -> int:
        return len(self.of)

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
        return list(dict.fromkeys(chain.from_iterable(run for _, run in self._runs)))

    def last_index(self) -> int:
        """The index of the last record in its batch, -1 where it is in none."""
        start, run = self._runs[-1]
        last = self.of[-1]
        return run[last] + self.of[start:].count(last) - 1 if isinstance(last, Batch) else -1

    def indices(self) -> list[int]:
        """The index of each record in its batch, -1 for one that is in none."""
        if self._indices is None:
            ends = [*(start for start, _ in self._runs), len(self.of)][1:]
            runs = zip(self._runs, ends, strict=True)
            self._indices = [index for (start, run), end in runs for index in _indices(self.of[start:end], run)]
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
