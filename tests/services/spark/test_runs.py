"""Which run is next, by the tables' logs alone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import Row

from penstock.services.spark import runs
from penstock.services.spark.runs import (
    CLOSED,
    CORRECTED,
    LATE_RUN,
    OF_A_BACKFILL,
    RUN,
    TOPIC_ID,
    TablesDisagree,
    Version,
    is_down_to,
    next_run,
    put_back,
    require_same_changelog,
)

COVERED = {0: 30}


def log(*entries: Any) -> list[Version]:
    """A table's versions, oldest first as they are given: notes, or the version that a RESTORE went back to."""
    versions = [
        Version(number, {}, entry) if isinstance(entry, int) else Version(number, entry)
        for number, entry in enumerate(entries)
    ]
    return versions[::-1]


def append(run: int) -> Mapping[str, Any]:
    return {RUN: run, "to_offsets": {"0": run * 10}}


def merge(run: int, **closed: int) -> Mapping[str, Any]:
    return {RUN: run, CLOSED: closed}


STATE = log({}, merge(1, s=1), merge(2, s=1), merge(3, s=3))
APPENDS = log(append(1), append(3))


def test_the_next_run_has_the_next_number() -> None:
    """With tables of one time nothing is compared and nothing is said."""
    found = next_run(COVERED, 3, STATE, {"s": APPENDS})
    assert found == runs.Next(4, None, frozenset(), {"s": 3})
    assert put_back(3, found) is None
    assert next_run({}, 0, [], {}).run == 1


def test_a_crashed_run_is_gone_on_with() -> None:
    """It has a number that no MERGE had; only a store that it had appended to is compared."""
    crashed = {"s": log(append(1), append(3), append(4)), "t": APPENDS}
    found = next_run(COVERED, 3, STATE, crashed)
    assert found == runs.Next(4, append(4), frozenset("s"), {"s": 4, "t": 3})
    assert put_back(3, found) is None


def test_an_earlier_copy_of_state_goes_on_with_the_newest_append() -> None:
    """Its log knows nothing of the runs since, and Delta takes none of their numbers again."""
    found = next_run({0: 10}, 1, STATE[-2:], {"s": APPENDS})
    assert found == runs.Next(3, append(3), frozenset("s"), {"s": 3})
    assert put_back(1, found) == "`state` is of run 1, and closed/s is of run 3: an earlier `state` was put back"
    assert put_back(0, next_run({}, 0, [], {"s": APPENDS})) == "`state` is gone, and closed/s is of run 3"


def test_an_append_that_the_log_has_forgotten() -> None:
    """Delta takes its number no more: the next run has the one after it, and compares what is there."""
    upkeep = [Version(number, {}) for number in range(203, 103, -1)]
    found = next_run({0: 10}, 1, STATE[-2:], {"s": upkeep}, taken=3)
    assert found == runs.Next(4, None, frozenset("s"), {"s": 0})
    assert next_run(COVERED, 3, STATE, {"s": upkeep}, taken=3).run == 4


def of_changelog(topic_id: str | None, **more: Any) -> list[Version]:
    return log(dict(append(1)) | ({} if topic_id is None else {TOPIC_ID: topic_id}) | more)


@pytest.mark.parametrize(
    ("closed", "is_covered", "refused"),
    [
        (of_changelog("new"), False, ""),
        (of_changelog("old"), False, r"closed/s is of another changelog \(id old\).* has id new: move /lake/a/closed"),
        (of_changelog("old"), True, "closed/s is of another changelog"),
        (of_changelog(None), True, ""),
        (of_changelog(None), False, "closed/s does not say of which changelog it is.* move /lake/a/closed"),
        (log({}), False, "closed/s does not say"),
        (of_changelog("old", **{OF_A_BACKFILL: {}}), False, ""),
        (of_changelog("old") + of_changelog("new"), False, "of another"),
    ],
)
def test_windows_of_another_changelog_are_refused(closed: list[Version], is_covered: bool, refused: str) -> None:
    """By the newest append; one that does not say whose it is counts as this one's where `state` is this one's.
    Windows of a backfill are of no changelog."""
    with pytest.raises(TablesDisagree, match=refused) if refused else nullcontext():
        require_same_changelog({"s": closed}, "new", is_covered=is_covered, folder="/lake/a")


def test_a_restored_state_has_a_number_that_its_log_does_not_know() -> None:
    """RESTORE keeps the log: each number up to the newest was taken."""
    restored = log({}, merge(1, s=1), merge(2, s=1), merge(3, s=3), 1)
    assert next_run({0: 10}, 1, restored, {"s": APPENDS}) == runs.Next(4, None, frozenset("s"), {"s": 3})
    both = next_run({0: 10}, 1, restored, {"s": log(append(1), append(3), 0)})
    assert both == runs.Next(4, None, frozenset(), {"s": 1})
    # A copy of `state` beside a `closed` that RESTORE took back: what that appended then counts no more.
    assert next_run({0: 10}, 1, STATE[-2:], {"s": log(append(1), append(3), 0)}).run == 4


def test_a_table_without_notes_is_compared() -> None:
    """A copy of rows says nothing of how they came; what is in it is looked up."""
    found = next_run(COVERED, 3, STATE, {"s": log({})})
    assert found == runs.Next(4, None, frozenset("s"), {"s": 0})
    assert put_back(3, found) is None


@pytest.mark.parametrize(
    ("closed", "said"),
    [
        ({"s": APPENDS[-1:]}, "closed/s is of run 1, and run 3 appended to it"),
        ({"s": log(append(1), append(3), 0)}, "closed/s is of run 1, and run 3 appended to it"),
        ({}, "closed/s is gone, and run 3 appended to it"),
    ],
)
def test_an_earlier_closed_is_refused(closed: dict[str, list[Version]], said: str) -> None:
    """By its run and that of `state`, unless its loss is accepted."""
    with pytest.raises(TablesDisagree, match=f"`state` is of run 3, but {said}.*--accept-lost-windows"):
        next_run(COVERED, 3, STATE, closed)
    accepted = next_run(COVERED, 3, STATE, closed, accept_lost=True)
    assert (accepted.run, said in str(accepted.lost)) == (4, True)
    told = [Version(9, merge(4, **accepted.appended)), *STATE]
    assert next_run(COVERED, 4, told, closed, accept_lost=True).lost is None
    copied = log({})  # rows of `state` without their log
    assert next_run(COVERED, 3, copied, closed).run == 4


def test_a_closed_that_lacks_corrections_is_refused() -> None:
    """One from before a run of corrections that `state` covers; not one of which the log cannot say, nor once more
    after their loss was accepted."""
    first = [append(1), {LATE_RUN: 1}]
    whole = log(*first, append(2), {LATE_RUN: 2})
    state = log(
        {}, merge(1, s=1), {LATE_RUN: 1, CORRECTED: {"s": 1}}, merge(2, s=2), {LATE_RUN: 2, CORRECTED: {"s": 2}}
    )
    assert next_run(COVERED, 2, state, {"s": whole}).corrected == {"s": 2}
    lost = "up to corrections 2 of closed/s, which has those up to"
    for before, has in ((whole[1:], 1), (log(append(1), append(2)), 0), ([Version(4, {}, 2), *whole], 1)):
        with pytest.raises(TablesDisagree, match=f"{lost} {has}: .*--accept-lost-windows"):
            next_run(COVERED, 2, state, {"s": before})
    accepted = next_run(COVERED, 2, state, {"s": whole[1:]}, accept_lost=True)
    assert (accepted.run, accepted.corrected) == (3, {"s": 1})
    after = [Version(9, {**merge(3, s=2), CORRECTED: {"s": 1}}), *state]
    assert next_run(COVERED, 3, after, {"s": whole[1:]}).run == 4
    assert next_run(COVERED, 2, state, {"s": [Version(12, append(2))]}).corrected == {}  # retention has taken the rest
    assert next_run(COVERED, 2, state, {"s": log({})}).corrected == {}  # a copy of rows


def test_a_log_is_looked_at_as_far_back_as_to_a_run_that_is_covered() -> None:
    """The newest one of another topic says nothing of those before it; what a RESTORE took back is none."""
    corrected = log(append(1), {LATE_RUN: 4}, {LATE_RUN: 7})
    assert is_down_to(corrected, LATE_RUN, None)
    assert [is_down_to(corrected, LATE_RUN, run) for run in (3, 4, 7)] == [False, True, True]
    assert not is_down_to([Version(3, {}, 0), *corrected], LATE_RUN, None)


def row(version: int, text: str | None = None, restored: dict[str, str | None] | None = None) -> Row:
    """A row of Delta's history; times come as pyspark has them, local and without their zone."""
    operation, at = "WRITE" if restored is None else "RESTORE", datetime(2026, 1, 1, 12, version)
    more = {"operation": operation, "operationParameters": restored or {}, "timestamp": at}
    return Row(version=version, userMetadata=text, **more)


def test_what_delta_says_of_a_table() -> None:
    """Notes that are not ours are none; a RESTORE names its version, or a time."""
    history = [
        row(4, None, {"version": None, "timestamp": "2026-01-01 12:01:30.0"}),
        row(3, None, {"version": "0", "timestamp": None}),
        row(2, "somebody's own"),
        row(1, "[1]"),
        row(0, '{"penstock_run": 7}'),
    ]
    assert runs.versions(history) == [
        Version(4, {}, 1),
        Version(3, {}, 0),
        Version(2, {}),
        Version(1, {}),
        Version(0, {RUN: 7}),
    ]


def test_a_restore_by_time_is_known_by_its_files() -> None:
    """deltalake says the instant in ms, Spark the local time of where it ran; the files tell what it went back to."""
    at = datetime(2026, 1, 1, 12, 1, 30)
    utc = at.astimezone(UTC).isoformat()
    for said in ({"datetime": str(int(at.timestamp() * 1000))}, {"datetime": utc}, {"timestamp": utc}):
        history = [row(3, None, {"version": None, **said}), row(2), row(1), row(0)]
        assert runs.versions(history)[0].restored == 1
        assert runs.versions(history, lambda a, b: {a, b} == {0, 3})[0].restored == 0
    elsewhere = [row(3, None, {"timestamp": "2026-01-01 03:01:30.0"}), row(2), row(1), row(0)]
    assert runs.versions(elsewhere, lambda a, b: {a, b} == {2, 3})[0].restored == 2
    assert runs.versions([row(1, None, {"timestamp": "?"}), row(0)])[0].restored == 0
