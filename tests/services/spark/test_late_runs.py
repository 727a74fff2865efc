"""Which corrections there are, by a table's log, by Delta's number and by rows."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import Row

from penstock.services.spark.late_runs import (
    TO_OFFSETS,
    Note,
    is_known,
    is_told,
    next_late_run,
    notes,
    notes_of_rows,
    pending,
    refusal,
)
from penstock.services.spark.runs import LATE_RUN, LATE_TOPIC, LATE_TOPIC_ID, Version
from tests.services.spark.test_runs import append, log, merge


def said(run: int | None, first: int | None, topic: str | None, partition: str | None = None, end: Any = None) -> Row:
    topic_id = topic and f"id of {topic}"
    return Row(run=run, first_run=first, topic=topic, topic_id=topic_id, partition=partition, end=end)


def note(run: int, topic: str, **ends: int) -> Note:
    return {LATE_RUN: run, LATE_TOPIC: topic, LATE_TOPIC_ID: f"id of {topic}", TO_OFFSETS: ends}


EARLIER = said(None, None, None)


def test_corrections_have_numbers_of_their_own() -> None:
    """What an append did that no MERGE covers counts, unless a RESTORE took it back: then its number is spent."""
    late = log(append(1), {LATE_RUN: 1}, {LATE_RUN: 2})
    assert (next_late_run(1, late, 2), pending({"a": 1}, notes(late))) == (2, [{LATE_RUN: 2}])
    assert (next_late_run(2, late, 2), pending({"a": 1, "b": 2}, notes(late))) == (3, [])
    restored = [Version(3, {}, 1), *late]
    assert (next_late_run(1, restored, 2), pending({"a": 1}, notes(restored))) == (3, [])


def test_of_each_late_topic_what_is_not_covered_is_pending() -> None:
    """An earlier `state` may lack the corrections of several topics; of each the newest says how far it was read."""
    a1, b2, a3, c4 = ({LATE_RUN: run, LATE_TOPIC_ID: topic} for topic, run in (("a", 1), ("b", 2), ("a", 3), ("c", 4)))
    corrected = log(append(1), a1, b2, a3, merge(1), c4)
    assert pending({}, notes(corrected)) == [b2, a3, c4]
    assert pending({"a": 1, "b": 0}, notes(corrected)) == [b2, a3, c4]
    assert pending({"a": 1, "c": 4}, notes(corrected)) == [b2, a3]
    assert pending({"a": 5, "b": 2}, notes(corrected)) == [c4]
    unnamed = {LATE_RUN: 5}
    assert pending({"a": 3, "b": 2}, notes(log(a1, b2, a3, c4, unnamed))) == [c4, unnamed]
    assert pending({"a": 6, "b": 2}, notes(log(a1, b2, a3, c4, unnamed))) == [c4]


def test_a_number_that_delta_has_is_not_taken_again() -> None:
    """Whatever the log has forgotten; another job's append since is in the log, and wins."""
    forgotten = [Version(9, append(4))]
    assert [next_late_run(1, forgotten, taken) for taken in (-1, 1, 3)] == [2, 2, 4]
    assert next_late_run(1, [Version(10, {LATE_RUN: 4}), *forgotten], 3) == 4


@pytest.mark.parametrize(
    ("corrected", "settled", "taken", "told"),
    [
        ([], 0, -1, True),
        (log(append(1), {}), 0, -1, True),
        (log({LATE_RUN: 1}, append(1)), 0, 1, True),
        (log({}), 0, -1, False),
        (log({}), 3, -1, False),
        (log({}, {LATE_RUN: 7}), 6, 7, False),
        (log({}, {LATE_RUN: 7}), 7, 7, True),
        ([Version(9, append(1))], 3, 3, True),
        ([Version(9, append(1))], 3, 4, False),
        ([Version(9, append(1))], 0, -1, False),
        ([Version(9, {LATE_RUN: 4})], 3, 4, False),
        ([Version(9, {LATE_RUN: 4})], 4, 4, True),
    ],
)
def test_a_log_tells_all_or_the_rows_are_asked(corrected: list[Version], settled: int, taken: int, told: bool) -> None:
    """It tells all down to a run that is covered, or to a run's own beginning; Delta's number may say there is no more.
    A copy of rows begins with nobody's commit, and has no number."""
    assert is_told(corrected, settled, taken) is told


def test_rows_say_what_the_notes_said() -> None:
    """Of each late topic its newest run, and for each partition the end of the last run that took something of it."""
    rows = [said(2, 1, "a", "0", 5), said(4, 3, "a", "1", 9), said(3, 3, "b"), said(1, 1, "b", "0", 2)]
    assert notes_of_rows(rows) == [note(4, "a", **{"0": 5, "1": 9}), note(3, "b", **{"0": 2})]
    assert pending({"id of a": 3, "id of b": 3}, notes_of_rows([*rows, EARLIER])) == [note(4, "a", **{"0": 5, "1": 9})]


@pytest.mark.parametrize(
    ("rows", "found", "covered_run", "known"),
    [
        ([], [], 0, True),
        ([said(4, 3, "a")], [], 0, True),
        ([EARLIER], [], 0, False),
        ([EARLIER], [], 5, False),
        ([EARLIER, said(4, 3, "a")], [], 2, True),
        ([EARLIER, said(4, 3, "a")], [], 1, False),
        ([EARLIER, said(4, 3, "a")], [note(2, "a")], 1, True),
        ([EARLIER], [note(2, "a")], 0, False),
    ],
)
def test_what_an_earlier_release_took_is_known_if_all_of_it_is_covered(
    rows: list[Row], found: list[Note], covered_run: int, known: bool
) -> None:
    """Its rows do not say it: they are of before the first run of which it is known."""
    assert is_known(rows, found, covered_run) is known


def test_a_refusal_names_the_ways_out() -> None:
    """All corrections can be made anew, under a number that no note is behind."""
    told = refusal("/lake/a/closed/s", 7, can_be_made_anew=True)
    assert told.startswith("/lake/a/closed/s has corrections that `state` may not cover: an earlier `state` was put")
    assert "DELETE FROM delta.`/lake/a/closed/s` WHERE revision > 0, then UPDATE delta.`/lake/a/state` SET" in told
    assert told.endswith("changelog_offset = 0, run = 7 WHERE row = 'late' AND store = 's'")
    assert refusal("/lake/a/closed/s", None, can_be_made_anew=True).endswith("/closed/s` WHERE revision > 0")
    assert "DELETE" not in refusal("/lake/a/closed/s", None, can_be_made_anew=False)
