"""The part of the bench of compaction in which the changelog's partitions grow: the same sessions, spread over more.

As many live sessions and closed ones are compacted for the first time for each number of partitions, then a delta in as
many turns as it is told, of which the median counts, since what else a machine does comes and goes. Then all partitions
are restored from the snapshot, at once as an aggregator's instance does. Nothing is asked for of this part.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bench._changelogs import NUMBERS
from bench._compactions import Compactions


class Line(NamedTuple):
    """What was measured with so many partitions; times in seconds.

    `first` is the compaction of the first `records`, `delta` that of one delta, `restore` what `live` sessions take.
    """

    partitions: int
    records: int
    first: float
    delta: float
    live: int
    restore: float


async def measure(
    bench: Compactions, counts: Sequence[int], live: int, closed: int, delta: int, rounds: int
) -> list[Line]:
    """`live` sessions and `closed` ones over each number of partitions; a delta closes, changes and opens `delta`."""
    writers = [await bench.application(NUMBERS, partitions) for partitions in counts]
    records = [await writer.fill(live, closed) for writer in writers]
    first = [await bench.compact(writer) for writer in writers]
    turns = [[await bench.compact_delta(writer, delta) for writer in writers] for _ in range(rounds)]
    deltas = [statistics.median(of) for of in zip(*turns, strict=True)]
    restored = await bench.median_restores(writers)
    lines = []
    for partitions, many, initial, delta_of, found in zip(counts, records, first, deltas, restored, strict=True):
        assert found.snapshot_windows == live, found
        lines.append(Line(partitions, many, initial, delta_of, live, found.seconds))
        print(lines[-1], file=sys.stderr, flush=True)
    for writer in writers:
        await bench.forget(writer)
    return lines


def show(lines: Sequence[Line]) -> None:
    """Print the table, and what the most partitions cost over the fewest."""
    print(f"{lines[0].live:,} live sessions while the changelog's partitions grow")
    print(f"{'partitions':>10} {'records':>11} {'compact s':>10} {'records/s':>10} {'delta s':>8} ", end="")
    print(f"{'restore s':>9} {'sessions/s':>11}")
    for line in lines:
        print(
            f"{line.partitions:>10,} {line.records:>11,} {line.first:>10.1f} {line.records / line.first:>10,.0f} "
            f"{line.delta:>8.1f} {line.restore:>9.2f} {line.live / line.restore:>11,.0f}"
        )
    if len(lines) > 1:
        for what in ("first", "delta", "restore"):
            seconds = [getattr(line, what) for line in lines]
            worst = max(seconds[1:]) / seconds[0]
            print(f"{what} while partitions grow: the worst over {lines[0].partitions} is {worst:.2f}")
