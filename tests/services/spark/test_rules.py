"""Which rules there were, and from where on, by what commits say."""

from __future__ import annotations

import msgspec
from msgspec import UNSET
from pyspark.sql import Row

from penstock.services.spark.rules import Rule, Said, begun, of_earlier_releases, oldest, rows_of
from penstock.shared.streams.changelog.format import IdleTime, Progress, StoreSchema

NEW = StoreSchema("s", "session", "string", 100, 50, "on_close", "in", "out", "late", "dlq", ())
OLD = msgspec.structs.replace(NEW, gap_ms=500)


def said(
    first: int,
    last: int,
    store: StoreSchema,
    began: int,
    ended: int,
    guarantee: str = "exactly_once",
    moved_ms: int = 0,
) -> Said:
    return Said(0, first, last, guarantee, (store,), {"in": began}, {"in": ended}, moved_ms)


def progress(taken: int, store: StoreSchema, moved_ms: int = 0) -> Progress:
    idle = IdleTime(moved_ms) if moved_ms else UNSET
    return Progress("app", "exactly_once", {"in": taken}, 0, {}, {}, (store,), 0, idle=idle)


def test_a_rule_begins_where_the_one_before_had_come_to() -> None:
    """The first at nothing; one that comes back begins anew, and so does another guarantee. So it is with the time that
    was moved on."""
    commits = [
        said(1, 5, OLD, 3, 10, moved_ms=7),
        said(7, 9, NEW, 12, 20, moved_ms=9),
        said(11, 11, NEW, 22, 22, "at_least_once", moved_ms=9),
        said(13, 15, OLD, 25, 30, moved_ms=12),
    ]
    assert begun(commits, {}) == {
        (0, 1): Rule({}, "exactly_once", (OLD,), 0),
        (0, 7): Rule({"in": 10}, "exactly_once", (NEW,), 7),
        (0, 11): Rule({"in": 20}, "at_least_once", (NEW,), 9),
        (0, 13): Rule({"in": 22}, "exactly_once", (OLD,), 9),
    }


def test_ranges_find_the_rules_that_one_range_finds() -> None:
    """Wherever a run ends, the next one knows what the newest covered commit said."""
    old, new = said(1, 5, OLD, 3, 10, moved_ms=7), said(7, 9, NEW, 12, 20)
    whole = begun([old, new], {})
    assert begun([old], {}) | begun([new], {0: progress(10, OLD, 7)}) == whole
    split = [old._replace(last=3, ended={"in": 7}), old._replace(first=4, began={"in": 8})]
    assert begun(split[:1], {}) | begun([split[1], new], {0: progress(7, OLD, 3)}) == whole


def test_where_the_beginning_is_gone_a_rule_is_known_from_the_first_commit_on() -> None:
    """What came before that one may have been taken by another."""
    commits = [said(11, 15, OLD, 3, 10, moved_ms=7), said(17, 17, NEW, 10, 10, moved_ms=7)]
    assert begun(commits, {}, {0}) == {
        (0, 11): Rule({"in": 3}, "exactly_once", (OLD,)),
        (0, 17): Rule({"in": 10}, "exactly_once", (NEW,), 7),
    }


def test_what_an_earlier_release_covered_is_known_from_its_covered_commit_on() -> None:
    """Of partitions without any rule; what a backfill left is all that there was."""
    covered = {
        p: Row(changelog_offset=offset, progress=msgspec.json.encode(progress(10, OLD)).decode())
        for p, offset in enumerate((8, 0, 9))
    }
    assert of_earlier_releases(covered, {(2, 4): Rule({}, "exactly_once", (OLD,))}) == {
        (0, 7): Rule({"in": 10}, "exactly_once", (OLD,)),
        (1, -1): Rule({}, "exactly_once", (OLD,), 0),
    }


def test_the_oldest_rules_are_those_beyond_the_most_of_a_partition() -> None:
    """By their offsets, which are below zero for what a backfill left; each partition has as many as another."""
    places = [(0, 10), (0, 9), (0, -1), (1, 3), (1, -1), (2, 7)]
    assert oldest(places, 2) == {(0, -1)}
    assert oldest(places, 1) == {(0, -1), (0, 9), (1, -1)}
    assert oldest(places, 3) == oldest([], 1) == frozenset()


def test_rows_are_keyed_by_place_and_say_the_rule() -> None:
    """One to take out has the key alone; an earlier release's does not say what was moved on."""
    rule = Rule({"in": 10}, "exactly_once", (NEW,), 7)
    new, gone = rows_of({(3, -7): rule}, [(3, 5)], "id", 4)
    assert new[:8] == ("rule", 3, "", b"-7", 0, -7, None, None)
    assert msgspec.json.decode(new[8] or "", type=Rule) == rule
    earlier = (new[8] or "").replace(',"moved_ms":7', "")
    assert msgspec.json.decode(earlier, type=Rule) == msgspec.structs.replace(rule, moved_ms=None)
    assert new[9:] == ("id", 4, True)
    assert gone == ("rule", 3, "", b"5", 0, 5, None, None, None, "id", 4, False)
