"""Closed windows of a changelog partition, page by page, without a broker."""

from __future__ import annotations

import random

import msgspec
import pytest

from penstock.services.aggregator.closed_scan import ClosedScan, Wanted
from penstock.services.aggregator.found_windows import Found
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.changelog.format import Progress, Takeover, encode_progress, encode_takeover
from tests.services.aggregator.closed_logs import STORE, Log, final, progress

EVER = (-(2**62), 2**62)
ALL = Wanted(STORE, KeyRange.of(), EVER)


def pages(log: Log, wanted: Wanted, rows_max: int, step: int = 7) -> list[list[Found]]:
    """All pages, each of them read from where the one before ended, in batches of some records."""
    found, place = list[list[Found]](), ChangelogPlace(0, 0)
    while True:
        scan = ClosedScan(wanted, place, rows_max)
        at = place.offset
        while at < len(log.entries) and not scan.is_full and not scan.is_past:
            scan.feed(log.columns(at, step))
            at += step
        found.append(scan.rows)
        assert len(scan.rows) <= rows_max
        if not scan.is_full:
            return found
        place = scan.place


def told(found: list[list[Found]]) -> list[tuple[str | bytes, int, int]]:
    assert {(one.status, one.results["n"]) for page in found for one in page} <= {("closed", 1)}
    return [(one.key, one.start_ms, one.end_ms) for page in found for one in page]


def some_log(seed: int) -> Log:
    chance = random.Random(seed)
    return Log.of([[(f"k{chance.randrange(5)}", t * 10 + i) for i in range(chance.randrange(9))] for t in range(40)])


@pytest.mark.parametrize("rows_max", [1, 2, 5, 8, 1_000])
def test_pages_have_each_window_once_in_the_order_of_closing(rows_max: int) -> None:
    """However long they are: a commit that is larger than a page goes on in the next one."""
    log = some_log(rows_max)
    found = pages(log, ALL, rows_max)
    assert told(found) == log.closed
    assert all(len(page) == rows_max for page in found[:-1])


def test_keys_and_times_narrow_it() -> None:
    """Only those keys, and only windows that overlap the time."""
    log = some_log(3)
    wanted = Wanted(STORE, KeyRange.of(low="k1", high="k3"), (105, 240))
    expected = [one for one in log.closed if "k1" <= one[0] <= "k3" and one[2] >= 105 and one[1] <= 240]
    assert told(pages(log, wanted, 2)) == expected
    assert expected


def test_torn_commits_and_zombies_are_in_no_page() -> None:
    """By the reader's rule, also where a page begins behind the takeover that overruled the zombie."""
    log = Log.of([[("a", 10), ("b", 11)]])
    log.entries.append(final("torn", 20, 1, 2))
    log.entries.append((None, encode_takeover(2, Takeover("app", "y", 0))))
    log.entries.extend([final("c", 30, 2, 1), progress(2, 1, 40)])
    log.entries.extend([final("zombie", 31, 1, 3), progress(1, 3, 40)])
    log.entries.extend([final("d", 50, 2, 2), progress(2, 2, 60)])
    for rows_max in (1, 2, 3, 9):
        assert [key for key, *_ in told(pages(log, ALL, rows_max))] == ["a", "b", "c", "d"]


def test_what_is_not_committed_is_read_again() -> None:
    """The place stays before a commit that has no end yet, whatever of it is asked for."""
    log = Log.of([[("a", 10)], [("b", 20)]])
    whole = 1 + 4  # a takeover, then a commit of a closed window, two live ones and the progress
    for wanted in (ALL, Wanted(STORE, KeyRange.of("a"), EVER)):
        scan = ClosedScan(wanted, ChangelogPlace(0, 0), 10)
        scan.feed(log.columns(0, whole + 1))
        assert scan.place == ChangelogPlace(0, whole, 1, 0)


def test_time_windows_end_where_no_more_can_begin() -> None:
    """A tumbling window's end is known from its start; a session may have grown all the while."""
    log = Log.of([[("k", t)] for t in range(10, 200, 10)])
    size = msgspec.structs.replace(STORE, kind="tumbling", gap_ms=0, size_ms=3)
    log = log._replace(entries=[_as(size, key, value) for key, value in log.entries])
    scan = ClosedScan(Wanted(size, KeyRange.of(), (0, 50)), ChangelogPlace(0, 0), 100)
    scan.feed(log.columns())
    assert scan.is_past
    assert [one.end_ms for one in scan.rows] == [10, 20, 30, 40, 50]
    assert scan.place.offset < len(log.entries) / 2
    scan = ClosedScan(Wanted(STORE, KeyRange.of(), (0, 50)), ChangelogPlace(0, 0), 100)
    scan.feed(log.columns())
    assert not scan.is_past


@pytest.mark.parametrize(("closed_ms", "is_past"), [(None, False), (9, False), (13, False), (14, True), (500, True)])
def test_time_windows_end_by_what_was_closed(closed_ms: int | None, is_past: bool) -> None:
    """A commit says by which close time windows were closed, whatever the grace is now: nothing opens again."""
    was = msgspec.structs.replace(STORE, kind="tumbling", gap_ms=0, grace_ms=0, size_ms=3)
    closed = {} if closed_ms is None else {"s": closed_ms}
    said = Progress("app", "exactly_once", {"in": 1}, 100, {"s": 100}, {}, (was,), 0, close_times_ms=closed)
    log = Log.of([])
    log.entries.append((None, encode_progress(1, 1, said)))
    for now in (was, msgspec.structs.replace(was, grace_ms=200)):
        scan = ClosedScan(Wanted(now, KeyRange.of(), (0, 10)), ChangelogPlace(0, 0), 100)
        scan.feed(log.columns())
        assert scan.is_past is is_past


def _as(store: object, key: bytes | None, value: bytes) -> tuple[bytes | None, bytes]:
    return key, value.replace(b'"kind":"session"', b'"kind":"tumbling"')


def test_a_record_that_cannot_be_read_is_named() -> None:
    """With topic, partition and offset, and the ways out."""
    log = Log.of([[("a", 10)]])
    log.entries.insert(3, (b"k", b"\x01Xnothing"))
    with pytest.raises(CorruptRecord, match=r"app-changelog-0 at offset 3: .*streams reset"):
        ClosedScan(ALL, ChangelogPlace(0, 0), 10).feed(log.columns())
