"""Which late topics the rows of `state` know."""

from __future__ import annotations

from typing import Any

from pyspark.sql import Row

from penstock.services.spark.late_coverage import Covered, covered_topics, settled_run


def row(topic_id: str, partition: int, offset: int, run: int, progress: str | None) -> Any:
    return Row(topic_id=topic_id, partition=partition, changelog_offset=offset, run=run, progress=progress)


def test_topics_are_told_apart_by_their_ids() -> None:
    """By their newest runs; what one is called its newest row says."""
    rows = [
        row("b", 0, 9, 4, '{"topic":"late"}'),
        row("a", 0, 3, 2, None),
        row("a", 1, 5, 3, '{"topic":"late"}'),
        row("c", 0, 1, 1, '{"topic":"other","is_gone":true}'),
    ]
    assert covered_topics(rows) == [
        Covered("c", "other", True, {0: 1}, 1),
        Covered("a", "late", False, {0: 3, 1: 5}, 3),
        Covered("b", "late", False, {0: 9}, 4),
    ]


def test_rows_of_earlier_releases_are_of_one_topic() -> None:
    """What those had of an earlier topic and not yet overwritten does not say how far it was read."""
    rows = [row("old", 1, 7, 1, None), row("new", 0, 2, 2, None), row("named", 0, 1, 3, '{"topic":"late"}')]
    assert covered_topics(rows) == [
        Covered("new", None, False, {0: 2}, 2),
        Covered("named", "late", False, {0: 1}, 3),
    ]
    assert covered_topics([]) == []


def test_corrections_are_settled_up_to_the_newest_covered_run_of_the_topic_of_now() -> None:
    """An application that went back to a topic looks behind the newer runs of others; without a name, any may be it."""
    a, b = Covered("1", "a", False, {0: 3}, 5), Covered("2", "b", False, {0: 9}, 200)
    assert [settled_run([a, b], late) for late in ("b", "a", "new", None)] == [200, 5, 0, 200]
    assert settled_run([a, b._replace(topic=None)], "a") == 200
    assert settled_run([], "a") == 0
