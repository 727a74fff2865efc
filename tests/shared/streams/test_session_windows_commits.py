"""Sessions of real commits, truly out of order, against a plain reference.

`PENSTOCK_TEST_COMMITS` names a file of tab-separated commits (gzip): commit time and author time in seconds, author,
repository, number of parents. Without it these tests are skipped. Commits are taken in the order in which they were
made; event time is when they were authored.
"""

from __future__ import annotations

import gzip
import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from shared.streams.aggregations import Count, Sum
from shared.streams.dsl import StreamsBuilder
from shared.testing.topology_test_driver import TopologyTestDriver

FILE = os.environ.get("PENSTOCK_TEST_COMMITS")
GAP_MS, GRACE_MS = 2 * 3_600_000, 24 * 3_600_000
MAX_FUTURE_MS = 24 * 3_600_000
BATCH_RECORDS = 2_000
CRASH_AFTER = 100  # batches: a restore reads the whole changelog before it

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(FILE is None, reason="PENSTOCK_TEST_COMMITS names no file"),
]

Commit = tuple[int, int, str, int]
"""Commit time and author time (ms), author, number of parents."""
Session = tuple[str, int, int, int, int]
"""Author, start, end, commits, parents."""


class Value(msgspec.Struct):
    """What a commit's record holds."""

    parents: int


def commits() -> Iterator[Commit]:
    assert FILE is not None
    with gzip.open(Path(FILE), "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            committed, authored, author, _, parents, *_ = line.split("\t")
            yield int(committed) * 1_000, int(authored) * 1_000, author, int(parents)


def batches() -> Iterator[list[Commit]]:
    rest = commits()
    while batch := list(islice(rest, BATCH_RECORDS)):
        yield batch


def reference(max_future_ms: int | None) -> tuple[list[Session], int, int]:
    """All sessions, late records and refused ones, by the rule of session windows over plain lists."""
    open_: dict[str, list[list[int]]] = defaultdict(list)
    sessions: list[Session] = []
    time, late, refused = -1, 0, 0
    for batch in batches():
        now = batch[-1][0]
        for _, at, author, parents in batch:
            if max_future_ms is not None and at > now + max_future_ms:
                refused += 1
                continue
            time = max(time, at)
            close = time - GRACE_MS - GAP_MS
            start, end, number, total = at, at, 1, parents
            apart = []
            for own in open_[author]:
                if own[1] < close:
                    sessions.append((author, *own))  # type: ignore[arg-type]
                elif own[1] >= at - GAP_MS and own[0] <= at + GAP_MS:
                    start, end = min(start, own[0]), max(end, own[1])
                    number, total = number + own[2], total + own[3]
                else:
                    apart.append(own)
            if end < close:
                late += 1
            else:
                apart.append([start, end, number, total])
            open_[author] = apart
    sessions += [(author, *own) for author, rows in open_.items() for own in rows]  # type: ignore[misc]
    return sorted(sessions), late, refused


def streamed(max_future_ms: int | None) -> tuple[list[Session], int, int]:
    """The same of a task that takes them in batches, with one crash on the way."""
    builder = StreamsBuilder()
    windows = builder.stream("commits", Value).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", n=Count(), parents=Sum("parents")).on_close().to("sessions")
    driver = TopologyTestDriver(builder.build(), commit_each=False, max_future_ms=max_future_ms)
    sessions: list[Session] = []
    late = refused = 0
    for number, batch in enumerate(batches()):
        driver.clock.advance(batch[-1][0] - driver.clock.now_ms())
        driver.pipe_columns("commits", [(a.encode(), b'{"parents":%d}' % p, at) for _, at, a, p in batch])
        driver.commit()
        if number == CRASH_AFTER:
            driver.crash()
            driver.piped.clear()  # all of it is committed: the new owner has nothing to do again
            driver.restore()
        for record in driver.read("sessions"):
            r = msgspec.json.decode(record.value or b"")
            sessions.append((r["key"], r["start"], r["end"], r["n"], r["parents"]))
        late, refused = late + len(driver.read("commits-late")), refused + len(driver.read("commits-dlq"))
    sessions += [
        (row.key, row.start, row.end, row.states[0], row.states[1][0]) for row in driver.task.stores["s"].rows()
    ]
    return sorted(sessions), late, refused


@pytest.mark.parametrize("max_future_ms", [None, MAX_FUTURE_MS])
def test_sessions_of_commits(max_future_ms: int | None) -> None:
    """Sessions, sums and late records are the reference's.

    One commit is stamped thirty years ahead. As it is, it closes every session, and all that comes after it is late;
    with `max_future_ms` it is a dead letter, and nearly nothing is lost by it.
    """
    expected, late, refused = reference(max_future_ms)
    assert streamed(max_future_ms) == (expected, late, refused)
    if max_future_ms is not None:
        assert refused >= 1
