"""Which sessions of a key late records make one: as the engine joins them, by records alone.

A late record joins what is within the gap of it, sessions and other late records; two closed sessions are never made
one without one that reaches both. A session that was corrected stands for the late records in it, of which `closed`
does not keep the times: of what the stream closed since then it joins what is within its reach, and nothing else.
With a gap of 10, a late record at 20 joins two sessions that the stream cut, and leaves those beside them:

>>> clusters([Window(0, 8), Window(12, 15), Window(20, 20, 10, is_late=True), Window(25, 30), Window(31, 40)])
[0, 1, 1, 1, 4]

Runs in Spark's Python workers, which need not have Penstock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

_ROW = (
    *(("partition", pa.int32()), ("key", pa.binary()), ("start_ms", pa.int64()), ("end_ms", pa.int64())),
    *(("is_late", pa.bool_()), ("cluster", pa.int32())),
)


class Window(NamedTuple):
    """A late record, or a session: `reach_ms` is how far from its bounds it joins others, None where it joins none.

    What is neither late nor `is_new` (closed since the newest correction) is joined by late records alone.
    """

    start_ms: int
    end_ms: int
    reach_ms: int | None = None
    is_late: bool = False
    is_new: bool = False


def clusters(windows: Sequence[Window]) -> list[int]:
    """Of each window the place of the first one that it is one session with; its own where that is none before it."""
    parents = list(range(len(windows)))

    def first(at: int) -> int:
        while parents[at] != at:
            parents[at] = at = parents[parents[at]]
        return at

    def join(one: int, other: int) -> None:
        one, other = first(one), first(other)
        parents[max(one, other)] = min(one, other)

    placed = list(enumerate(windows))
    _touch([(at, w) for at, w in placed if w.is_late], placed, join)
    corrected = [(at, w) for at, w in placed if w.reach_ms is not None and not w.is_late]
    _touch(corrected, [(at, w) for at, w in placed if w.is_new], join)
    return [first(at) for at in range(len(windows))]


def _touch(
    joining: Iterable[tuple[int, Window]], others: Iterable[tuple[int, Window]], join: Callable[[int, int], None]
) -> None:
    """Join each of `joining` with the others in its reach, in n log n steps.

    From left to right by where they begin. What begins joins all of the other kind that have not ended: those are one
    from then on, and of one the end that comes last is all that matters.
    """
    begin = [(w.start_ms - (w.reach_ms or 0), True, w.end_ms + (w.reach_ms or 0), at) for at, w in joining]
    begin += [(w.start_ms, False, w.end_ms, at) for at, w in others]
    open_: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for start, joins, end, at in sorted(begin):
        touched = [one for one in open_[not joins] if one[0] >= start]
        for _, other in touched:
            join(at, other)
        open_[not joins] = [max(touched)] if touched else []
        open_[joins].append((end, at))


def placed(batches: Iterator[Any]) -> Iterator[Any]:
    """For mapInArrow: keys (partition, key, windows: as `Window`) to one row a window that is late or not alone."""
    for batch in batches:
        rows: list[tuple[Any, ...]] = []
        columns = (batch.column(name).to_pylist() for name in ("partition", "key", "windows"))
        for partition, key, structs in zip(*columns, strict=True):
            windows = [Window(**window) for window in structs]
            found = clusters(windows)
            sizes = Counter(found)
            rows += [
                (partition, key, w.start_ms, w.end_ms, w.is_late, cluster)
                for w, cluster in zip(windows, found, strict=True)
                if w.is_late or sizes[cluster] > 1
            ]
        arrays = [pa.array([row[nth] for row in rows], type_) for nth, (_, type_) in enumerate(_ROW)]
        yield pa.record_batch(arrays, names=[name for name, _ in _ROW])
