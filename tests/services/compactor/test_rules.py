"""Which rules there were, and from where on, by what commits say."""

from __future__ import annotations

import msgspec
from pyspark.sql import Row

from services.compactor.rules import Rule, Said, begun, of_earlier_releases, oldest, rows_of
from shared.streams.changelog_format import Progress, StoreSchema

NEW = StoreSchema("s", "session", "string", 100, 50, "on_close", "in", "out", "late", "dlq", ())
OLD = msgspec.structs.replace(NEW, gap_ms=500)


def said(first: int, last: int, store: StoreSchema, began: int, ended: int, guarantee: str = "exactly_once") -> Said:
    return Said(0, first, last, guarantee, (store,), {"in": began}, {"in": ended})


def progress(taken: int, store: StoreSchema) -> Progress:
    return Progress("app", "exactly_once", {"in": taken}, 0, {}, {}, (store,), 0)


def test_a_rule_begins_where_the_one_before_had_come_to() -> None:
    """The first at nothing; one that comes back begins anew, and so does another guarantee."""
    commits = [
        said(1, 5, OLD, 3, 10),
        said(7, 9, NEW, 12, 20),
        said(11, 11, NEW, 22, 22, "at_least_once"),
        said(13, 15, OLD, 25, 30),
    ]
    assert begun(commits, {}) == {
        (0, 1): Rule({}, "exactly_once", (OLD,)),
        (0, 7): Rule({"in": 10}, "exactly_once", (NEW,)),
        (0, 11): Rule({"in": 20}, "at_least_once", (NEW,)),
        (0, 13): Rule({"in": 22}, "exactly_once", (OLD,)),
    }


def test_ranges_find_the_rules_that_one_range_finds() -> None:
    """Wherever a run ends, the next one knows what the newest covered commit said."""
    old, new = said(1, 5, OLD, 3, 10), said(7, 9, NEW, 12, 20)
    whole = begun([old, new], {})
    assert begun([old], {}) | begun([new], {0: progress(10, OLD)}) == whole
    split = [old._replace(last=3, ended={"in": 7}), old._replace(first=4, began={"in": 8})]
    assert begun(split[:1], {}) | begun([split[1], new], {0: progress(7, OLD)}) == whole


def test_where_the_beginning_is_gone_a_rule_is_known_from_the_first_commit_on() -> None:
    """What came before that one may have been taken by another."""
    assert begun([said(11, 15, OLD, 3, 10)], {}, {0}) == {(0, 11): Rule({"in": 3}, "exactly_once", (OLD,))}


def test_what_an_earlier_release_covered_is_known_from_its_covered_commit_on() -> None:
    """Of partitions without any rule; what a backfill left is all that there was."""
    covered = {
        p: Row(changelog_offset=offset, progress=msgspec.json.encode(progress(10, OLD)).decode())
        for p, offset in enumerate((8, 0, 9))
    }
    assert of_earlier_releases(covered, {(2, 4): Rule({}, "exactly_once", (OLD,))}) == {
        (0, 7): Rule({"in": 10}, "exactly_once", (OLD,)),
        (1, -1): Rule({}, "exactly_once", (OLD,)),
    }


def test_the_oldest_rules_are_those_beyond_the_most_of_a_partition() -> None:
    """By their offsets, which are below zero for what a backfill left; each partition has as many as another."""
    places = [(0, 10), (0, 9), (0, -1), (1, 3), (1, -1), (2, 7)]
    assert oldest(places, 2) == {(0, -1)}
    assert oldest(places, 1) == {(0, -1), (0, 9), (1, -1)}
    assert oldest(places, 3) == oldest([], 1) == frozenset()


def test_rows_are_keyed_by_place_and_say_the_rule() -> None:
    """One to take out has the key alone."""
    rule = Rule({"in": 10}, "exactly_once", (NEW,))
    new, gone = rows_of({(3, -7): rule}, [(3, 5)], "id", 4)
    assert new[:8] == ("rule", 3, "", b"-7", 0, -7, None, None)
    assert msgspec.json.decode(new[8] or "", type=Rule) == rule
    assert new[9:] == ("id", 4, True)
    assert gone == ("rule", 3, "", b"5", 0, 5, None, None, None, "id", 4, False)
