"""Sessions of git commits, which are far out of order, compared with a plain reference.

Commits are processed in the order in which they were made. Event time is the author's time, which may be years earlier,
and is 2056 for one of them. A normal run generates such commits. For the soak, `PENSTOCK_TEST_COMMITS` names a file of
real ones (gzip, tab-separated: commit time and author time in seconds, author, repository, parents).
"""

from __future__ import annotations

import gzip
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

FILE = os.environ.get("PENSTOCK_TEST_COMMITS")
GAP_MS, GRACE_MS = 2 * 3_600_000, 24 * 3_600_000
MAX_FUTURE_MS = 24 * 3_600_000
HOUR_MS, DAY_MS, YEAR_MS = 3_600_000, 24 * 3_600_000, 365 * 24 * 3_600_000
FIRST_MS, FAR_AHEAD_MS = 1_400_000_000_000, 2_720_000_000_000  # 2014 and 2056
BATCH_RECORDS, CRASH_AFTER = 2_000, 100  # batches: a restore reads the whole changelog before it
GENERATED, GENERATED_BATCH_RECORDS, GENERATED_CRASH_AFTER = 6_000, 150, 12

Commit = tuple[int, int, str, int]
"""Commit time and author time (ms), author, number of parents."""
Session = tuple[str, int, int, int, int]
"""Author, start, end, commits, parents."""


class Value(msgspec.Struct):
    """The value of a commit's record."""

    parents: int


def generated(seed: int = 1) -> Iterator[Commit]:
    """Commits of twenty authors, a third of them late by hours, days or years, and one ahead of its time."""
    random_ = random.Random(seed)
    now = FIRST_MS
    for number in range(GENERATED):
        now += random_.choice((60_000, 600_000, HOUR_MS))
        late = random_.choices((0, 3 * HOUR_MS, 20 * DAY_MS, 6 * YEAR_MS), (69, 16, 13, 2))[0]
        at = FAR_AHEAD_MS if number == GENERATED // 2 else now - random_.randint(0, late)
        author = f"author-{min(int(random_.expovariate(0.3)), 19)}"
        yield now, at, author, random_.choice((0, 1, 1, 1, 2))


def commits() -> Iterator[Commit]:
    """The file's."""
    assert FILE is not None
    with gzip.open(Path(FILE), "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            committed, authored, author, _, parents, *_ = line.split("\t")
            yield int(committed) * 1_000, int(authored) * 1_000, author, int(parents)


def batches(of: Iterable[Commit], records: int) -> Iterator[list[Commit]]:
    rest = iter(of)
    while batch := list(islice(rest, records)):
        yield batch


def reference(work: Iterable[list[Commit]], max_future_ms: int | None) -> tuple[list[Session], int, int]:
    """All sessions, late records and rejected records, by the rule of session windows on plain lists."""
    open_: dict[str, list[list[int]]] = defaultdict(list)
    sessions: list[Session] = []
    time, late, rejected = -1, 0, 0
    for batch in work:
        now = batch[-1][0]
        for _, at, author, parents in batch:
            if max_future_ms is not None and at > now + max_future_ms:
                rejected += 1
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
    return sorted(sessions), late, rejected


def streamed(
    work: Iterable[list[Commit]], max_future_ms: int | None, crash_after: int
) -> tuple[list[Session], int, int]:
    """Return the same for a task that processes batches, with one crash in between."""
    builder = StreamsBuilder()
    windows = builder.stream("commits", Value).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", n=Count(), parents=Sum("parents")).on_close().to("sessions")
    driver = TopologyTestDriver(builder.build(), commit_each=False, max_future_ms=max_future_ms, errors=ErrorHandlers())
    sessions: list[Session] = []
    late = rejected = 0
    for number, batch in enumerate(work):
        driver.clock.advance(batch[-1][0] - driver.clock.now_ms())
        driver.pipe_columns("commits", [(a.encode(), b'{"parents":%d}' % p, at) for _, at, a, p in batch])
        driver.commit()
        if number == crash_after:
            driver.crash()
            driver.piped.clear()  # all of it is committed: the new owner has nothing to do again
            driver.restore()
        for record in driver.read("sessions"):
            r = msgspec.json.decode(record.value or b"")
            sessions.append((r["key"], r["start"], r["end"], r["n"], r["parents"]))
        late, rejected = late + len(driver.read("commits-late")), rejected + len(driver.read("commits-dlq"))
    sessions += [
        (row.key, row.start, row.end, row.states[0], row.states[1][0]) for row in driver.task.stores["s"].rows()
    ]
    return sorted(sessions), late, rejected


@pytest.mark.parametrize("max_future_ms", [None, MAX_FUTURE_MS])
def test_sessions_of_commits(max_future_ms: int | None) -> None:
    """Sessions, sums and late records equal the reference's, also after a crash.

    One commit has a time thirty years ahead. Without a limit it closes every session, and all later records are late.
    With `max_future_ms` it is a dead letter and has no other effect.
    """
    work = list(batches(generated(), GENERATED_BATCH_RECORDS))
    expected, late, rejected = reference(work, max_future_ms)
    assert streamed(work, max_future_ms, GENERATED_CRASH_AFTER) == (expected, late, rejected)
    if max_future_ms is None:
        assert (late > GENERATED // 2, rejected) == (True, 0)
    else:
        assert (GENERATED // 10 < late < GENERATED // 3, rejected) == (True, 1)
        assert all(end < FAR_AHEAD_MS for _, _, end, *_ in expected)


@pytest.mark.soak
@pytest.mark.skipif(FILE is None, reason="PENSTOCK_TEST_COMMITS names no file")
@pytest.mark.parametrize("max_future_ms", [None, MAX_FUTURE_MS])
def test_sessions_of_real_commits(max_future_ms: int | None) -> None:
    """The same of a file of real commits."""
    expected, late, rejected = reference(batches(commits(), BATCH_RECORDS), max_future_ms)
    assert streamed(batches(commits(), BATCH_RECORDS), max_future_ms, CRASH_AFTER) == (expected, late, rejected)
    if max_future_ms is not None:
        assert rejected >= 1
