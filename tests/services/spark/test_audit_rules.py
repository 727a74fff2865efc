"""Which records an audit finds to be taken by another rule than the newest."""

from __future__ import annotations

import msgspec

from penstock.services.spark.audit_rules import (
    Era,
    Shorter,
    added_since,
    between,
    changed,
    eras,
    published_otherwise,
    refusal,
    refusal_of_late,
    shorter_before,
    unknown_before,
)
from penstock.services.spark.rules import Rule
from penstock.shared.streams.changelog.format import AggregationSchema, Progress, StoreSchema

NEW = StoreSchema("s", "session", "string", 100, 50, "on_close", "in", "out", "late", "dlq", ())
OLD = msgspec.structs.replace(NEW, grace_ms=500, late=None)


def progress(taken: int, *stores: StoreSchema) -> Progress:
    return Progress("app", "exactly_once", {"in": taken}, 0, {}, {}, stores, 0)


def rule(begins: int, *stores: StoreSchema, moved_ms: int | None = None) -> Rule:
    return Rule({"in": begins}, "exactly_once", stores, moved_ms)


def test_an_era_is_what_commits_of_one_rule_took() -> None:
    """Each begins where the one before ended; one that took nothing is none, and one may have had no such store."""
    said = {
        (0, 1): rule(0, OLD),
        (0, 10): rule(10, NEW),
        (0, 15): rule(20, OLD),
        (0, 20): rule(20, NEW),
        (1, 4): rule(0),
        (1, 5): rule(5, NEW),
        (2, 9): rule(3, NEW),
    }
    newest = {0: progress(30, NEW), 1: progress(9, NEW), 2: progress(4, NEW)}
    found = eras(said, newest, NEW)
    assert [(e.partition, e.start, e.end, e.store) for e in found] == [
        (0, 0, 10, OLD),
        (0, 10, 20, NEW),
        (0, 20, 30, NEW),
        (1, 0, 5, None),
        (1, 5, 9, NEW),
        (2, 0, 4, NEW),
    ]
    what, since = changed(found, NEW, ())
    assert what == [
        "grace was 500 ms and is 50 ms",
        "late topic was none and is late",
        "store 's' was not there",
    ]
    assert since == {0: 10, 1: 5}
    assert changed(between(found, {0: 10, 1: 5, 2: 0}, {0: 30, 1: 9, 2: 4}), NEW, ()) == ([], {})
    assert changed(between(found, {0: 9, 1: 5, 2: 0}, {0: 30, 1: 9, 2: 4}), NEW, ())[1] == {0: 10}


def test_what_the_user_names_is_not_looked_for() -> None:
    """With its rule given, what came before a change is audited by it."""
    found = [Era(0, 0, 10, OLD, "exactly_once")]
    assert changed(found, NEW, {"grace_ms": 500})[0] == ["late topic was none and is late"]
    assert changed(found, NEW, {"grace_ms", "late"}) == ([], {})


def test_results_that_went_elsewhere_are_seen() -> None:
    """Another topic or other moments; a topic that is named is the user's."""
    for more in ({"results": "old"}, {"emit": "on_update"}):
        found = [Era(0, 0, 10, msgspec.structs.replace(NEW, **more), "exactly_once")]
        assert published_otherwise(found, NEW, ())
        assert published_otherwise(found, NEW, ("results",)) == ("emit" in more)
    assert not published_otherwise([Era(0, 0, 10, OLD, "exactly_once"), Era(0, 0, 1, None, "")], NEW, ())


def test_before_the_first_rule_nobody_knows() -> None:
    """Where that began behind records that are compared: there the changelog is asked, up to where it began."""
    known = {(0, 3): rule(7, NEW), (0, 8): rule(8, OLD), (1, 4): Rule({}, "exactly_once", (NEW,)), (2, 5): rule(9, NEW)}
    assert unknown_before(known, "in", {}) == {0: (7, 3), 2: (9, 5)}
    assert unknown_before(known, "in", {0: 7, 2: 8}) == {2: (9, 5)}


def test_the_refusal_has_the_way_out() -> None:
    """A start behind all that came before the change, and whether there is something yet."""
    said = str(refusal(NEW, ["grace was 1 ms and is 2 ms"], {0: 5}, 1_000, 2_000))
    assert "grace was 1 ms and is 2 ms from in-0 offset 5 on" in said
    assert said.endswith("Nothing was compared. --start 1002 audits what came after it")
    for newest in (None, 1_001):
        said = str(refusal(NEW, [], {0: 5}, 1_000, newest))
        assert said.endswith("Once there are records of 1002 ms and later, --start 1002 audits what came after it")
    said = str(refusal(NEW, [], {0: 5}, 1_000, 2_000, closed_to_ms=1_500))
    assert said.endswith("--start 1500 audits what came after it"), "time had been moved on without a record"


def test_where_gap_and_grace_were_shorter() -> None:
    """Together shorter than those that are judged by, until the next rule began; how they share it does not matter."""
    shares = msgspec.structs.replace(NEW, gap_ms=50, grace_ms=100)
    short = msgspec.structs.replace(NEW, grace_ms=0)
    known = {
        (0, 1): rule(0, short),
        (0, 10): rule(10, OLD),
        (0, 15): rule(20, shares),
        (0, 20): rule(30, short),
        (0, 25): rule(40, NEW),
        (1, 5): rule(7, short),
        (2, 1): rule(0),
        (2, 5): rule(7, NEW),
    }
    assert shorter_before(known, NEW) == [Shorter(0, 10, 100), Shorter(0, 40, 100)]
    assert shorter_before(known, short) == []


def test_a_shorter_rule_closed_nothing_where_nothing_came() -> None:
    """Neither a record nor an advance; where an earlier release does not say whether time was moved on, it may have."""
    short = msgspec.structs.replace(NEW, grace_ms=0)
    for begun, after, expected in (
        ((5, 70), (5, 70), []),
        ((5, 70), (5, 71), [Shorter(0, 5, 100)]),
        ((5, 70), (6, 70), [Shorter(0, 6, 100)]),
        ((5, None), (5, None), [Shorter(0, 5, 100)]),
        ((5, None), (5, 70), [Shorter(0, 5, 100)]),
    ):
        known = {
            (0, 1): rule(0, NEW, moved_ms=0),
            (0, 8): rule(begun[0], short, moved_ms=begun[1]),
            (0, 9): rule(after[0], NEW, moved_ms=after[1]),
        }
        assert shorter_before(known, NEW) == expected


def test_records_of_closed_times_are_refused_with_a_start_behind_them() -> None:
    """The message says how many in which partitions."""
    said = str(refusal_of_late(NEW, {3: 1, 0: 2}, 1_500))
    assert "may be late by that: in-0 (2 records), in-3 (1 records). " in said
    assert said.endswith("Nothing was compared. --start 1500 audits what that has nothing to do with")


def test_an_aggregation_that_came_later() -> None:
    """By partition, from where on it is; one of another field is another, one that reads another way is not."""

    def store(*aggregations: tuple[str, str, str | None], verbatim: bool = True) -> StoreSchema:
        made = tuple(AggregationSchema(n, f, field, (), "int64", verbatim) for n, f, field in aggregations)
        return msgspec.structs.replace(NEW, aggregations=made)

    count, total, other = ("n", "count", None), ("total", "sum", "id"), ("total", "sum", "size")
    old, new = store(count, verbatim=False), store(count, total)
    found = [Era(0, 0, 10, old, "g"), Era(0, 10, 20, store(count, other), "g"), Era(0, 20, 30, new, "g")]
    assert added_since([*found, Era(1, 0, 5, old, "g"), Era(1, 5, 9, new, "g")], new) == {"total": {0: 20, 1: 5}}
    assert added_since([Era(0, 0, 10, None, "g")], new) == {"n": {0: 10}, "total": {0: 10}}
    assert added_since(found[2:], new) == {}
