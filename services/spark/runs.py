"""Which run is next, by what the tables' own logs say of earlier ones.

A run has the number above that of the state it starts from, and Delta takes each number once a table. So three things
must be seen before a run begins:

- A run that crashed between its appends and its MERGE: `closed` has its number and `state` has not. It is gone on
  with, under its number and up to where it meant to go.
- An earlier `state` was put back (a copy, or Delta's RESTORE), or it is gone: `closed` has windows that `state` does
  not cover. What the changelog still has since then is folded into `state` once more, under a number that no table
  knows, or that of the newest append if no MERGE had it. Windows that `closed` has are not appended again.
- An earlier `closed` was put back: it lacks windows that `state` covers, or corrections of late records that it covers,
  and no run would bring them. That is refused.

RESTORE takes back what is in a table, never its log: with runs 1 to 3 and version 1 restored, run 1 alone stands.

>>> log = [Version(4, {}, 1), Version(3, {RUN: 3}), Version(2, {RUN: 2}), Version(1, {RUN: 1})]
>>> [version.number for version in standing(log)], newest(log), newest(standing(log))
([4, 1], 3, 1)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from pyspark.sql import Row

from penstock.shared.common.errors import FatalError

RUN, LATE_RUN = "penstock_run", "penstock_late_run"  # what a run and a run of corrections call their numbers in notes
CLOSED = "closed"  # in a MERGE's note: by store the newest run that has appended to it
CORRECTED = "corrected"  # in a note of `state`: by store the newest run of corrections that is in its table
LATE_TOPIC, LATE_TOPIC_ID = "late_topic", "late_topic_id"  # in an append's note: which topic's corrections it has
TOPIC_ID = "topic_id"  # in an append's note: the id of the changelog topic whose windows it appended
OF_A_BACKFILL = "to_sources"  # in the note of a backfill's append: its windows are of no changelog
RESTORE = "RESTORE"  # as Delta's history calls it
_LOST_WAY_OUT = "Put back a newer one, or a `state` no newer than it; --accept-lost-windows goes on without them"


class TablesDisagree(FatalError):
    """The tables are not of one time, so that windows would be missing; the message says which, and what to do."""


class Version(NamedTuple):
    """A version of a table: what its commit said of itself, and to which version it went back, if it did."""

    number: int
    note: Mapping[str, Any]
    restored: int | None = None


class Next(NamedTuple):
    """The next run: its number, and of one that appended and did not merge what it said, None where there is none.

    `ahead` are stores whose table may have windows that `state` does not cover; `appended` is by store the newest run
    that is in its table, `corrected` the newest run of corrections. `lost` says what `closed` lacks of what `state`
    covers, where that was accepted.
    """

    run: int
    adopted: Mapping[str, Any] | None = None
    ahead: frozenset[str] = frozenset()
    appended: Mapping[str, int] = {}
    corrected: Mapping[str, int] = {}
    lost: str | None = None


def versions(history: Iterable[Row], are_same: Callable[[int, int], bool] = lambda a, b: False) -> list[Version]:
    """Delta's history as far as it matters here, newest first.

    `are_same` says whether two versions have the same files: that is what tells to which version a RESTORE by time
    went back, since whoever did it may have had another clock and another time zone.
    """
    rows = [(int(row.version), row) for row in history]
    found = []
    for number, row in rows:
        restored = None
        if row.operation == RESTORE:
            restored = _restored(row.operationParameters, number, rows, are_same)
        found.append(Version(number, note_of(row.userMetadata), restored))
    return found


def standing(log: Iterable[Version]) -> list[Version]:
    """The versions whose changes are in the table: a RESTORE takes back all between it and what it went back to."""
    kept: list[Version] = []
    limit: int | None = None
    for version in log:
        if limit is None or version.number <= limit:
            kept.append(version)
            limit = limit if version.restored is None else version.restored
    return kept


def newest(log: Iterable[Version], name: str = RUN) -> int:
    """The highest number of a run, 0 where there is none."""
    return max((int(version.note.get(name, 0)) for version in log), default=0)


def newest_note(log: Iterable[Version], name: str = RUN) -> Mapping[str, Any]:
    """What the newest run said of itself; nothing where there was none."""
    return next((version.note for version in log if name in version.note), {})


def is_down_to(log: Iterable[Version], name: str, run: int | None) -> bool:
    """Whether a log goes back to a run of that name, of no higher number than `run` if that is told."""
    runs = (int(version.note[name]) for version in standing(log) if name in version.note)
    return any(run is None or number <= run for number in runs)


def next_run(
    covered: Mapping[int, int],
    covered_run: int,
    state: Sequence[Version],
    closed: Mapping[str, Sequence[Version]],
    *,
    accept_lost: bool = False,
    taken: int = 0,
) -> Next:
    """What to do next, with `covered` changelog offsets by partition that `state` has from `covered_run`.

    `state` and `closed`, by store, are the tables' versions, newest first; those of a table that is not there are none.
    `taken` is the highest number that Delta knows of an append whose note its log has forgotten.
    Raises TablesDisagree where `closed` lacks what `state` covers, unless such a loss is accepted.
    """
    there = {store: standing(log) for store, log in closed.items()}
    appended = {store: newest(log) for store, log in there.items()}
    covering = standing(state)
    lost = _lost_appends(newest_note(covering), covered_run, appended) or _lost_corrections(covering, there)
    if lost is not None and not accept_lost:
        raise TablesDisagree(f"{lost}. {_LOST_WAY_OUT}")
    last = max(covered_run, newest(state))
    known = max((newest(log) for log in closed.values()), default=0)
    known = max(known, taken)
    ahead = frozenset(store for store, log in there.items() if _is_ahead(newest_note(log), covered))
    corrected = {store: run for store, log in there.items() if (run := newest(log, LATE_RUN))}
    if known <= last:
        return Next(last + 1, None, ahead, appended, corrected, lost)
    for log in there.values():
        if (note := newest_note(log)).get(RUN) == known:
            return Next(known, note, ahead, appended, corrected, lost)
    return Next(known + 1, None, ahead, appended, corrected, lost)


def require_same_changelog(
    closed: Mapping[str, Sequence[Version]], topic_id: str, *, is_covered: bool, folder: str
) -> None:
    """Raise TablesDisagree where closed windows are of another changelog than the one with this id.

    A changelog that was made again counts its offsets anew: what is new would be taken for what is there. `is_covered`
    says that `state` is there, and of this changelog; without it a table that does not say whose it is (an earlier
    release's) is refused too, since all that this changelog closed can be appended once more.
    """
    for store, log in sorted(closed.items()):
        note = newest_note(standing(log))
        known = note.get(TOPIC_ID)
        if OF_A_BACKFILL in note or known == topic_id or (known is None and is_covered):
            continue
        said = "does not say of which changelog it is" if known is None else f"is of another changelog (id {known})"
        raise TablesDisagree(
            f"closed/{store} {said}, and the changelog that is to be compacted has id {topic_id}: move {folder}/closed "
            "to another place, or remove it, and what this changelog has closed is appended to a new one"
        )


def put_back(covered_run: int, next_: Next) -> str | None:
    """What is to be said where `state` is older than `closed` by more than a run that crashed; None where it is not."""
    newer = {store: run for store, run in sorted(next_.appended.items()) if run > covered_run}
    if not newer or (next_.adopted is not None and next_.run == covered_run + 1):
        return None
    which = ", ".join(f"closed/{store} is of run {run}" for store, run in newer.items())
    if not covered_run:
        return f"`state` is gone, and {which}"
    return f"`state` is of run {covered_run}, and {which}: an earlier `state` was put back"


def _is_ahead(note: Mapping[str, Any], covered: Mapping[int, int]) -> bool:
    """Whether an append went beyond what is covered; one that nobody knows of may have done so."""
    if not note:
        return True
    return any(int(to) > covered.get(int(partition), 0) for partition, to in note.get("to_offsets", {}).items())


def _lost_appends(merged: Mapping[str, Any], covered_run: int, appended: Mapping[str, int]) -> str | None:
    """Which tables lack windows that `state` covers; None where none does."""
    if merged.get(RUN) != covered_run:  # a copy of the rows without the log that says how they came
        return None
    behind = {s: run for s, run in merged.get(CLOSED, {}).items() if appended.get(s, 0) < run and appended.get(s) != 0}
    if not behind:
        return None
    which = ", ".join(
        f"closed/{s} is {f'of run {appended[s]}' if s in appended else 'gone'}, and run {run} appended to it"
        for s, run in sorted(behind.items())
    )
    said = "an earlier copy was put back, and windows that `state` covers are missing"
    return f"`state` is of run {covered_run}, but {which}: {said}"


def _lost_corrections(state: Sequence[Version], closed: Mapping[str, Sequence[Version]]) -> str | None:
    """Which table lacks corrections that `state` covers, by the versions that stand; None where none does.

    A log forgets its oldest versions (Delta's log retention), and a copy of rows has none: who says nothing of any
    correction is believed to lack them if the log is whole and of runs of ours.
    """
    for store, log in sorted(closed.items()):
        covered = newest_note(state, CORRECTED).get(CORRECTED, {}).get(store, 0)
        found = newest(log, LATE_RUN)
        is_whole = newest(log) > 0 and min(version.number for version in log) == 0
        if found < covered and (found or is_whole):
            return (
                f"`state` covers late records up to corrections {covered} of closed/{store}, which has those up to "
                f"{found}: an earlier copy was put back, and no run would make the others again"
            )
    return None


def note_of(text: str | None) -> Mapping[str, Any]:
    """What a commit said of itself, as far as it is a note of ours."""
    try:
        said = json.loads(text or "null")
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _restored(
    parameters: Mapping[str, str | None],
    restore: int,
    rows: Sequence[tuple[int, Row]],
    are_same: Callable[[int, int], bool],
) -> int:
    """The version that a RESTORE named, by its number or a time: of the latter the nearest one with the same files."""
    if (number := parameters.get("version")) not in (None, ""):
        return int(str(number))
    at_ms = _instant_ms(parameters)
    nearest = max((n for n, row in rows if n < restore and _committed_ms(row) <= at_ms), default=0)
    before = sorted((n for n, _ in rows if n < restore), key=lambda n: (abs(n - nearest), n))
    return next((n for n in before if are_same(n, restore)), nearest)


def _instant_ms(parameters: Mapping[str, str | None]) -> float:
    """The time that a RESTORE named: as deltalake says it (`datetime`, ms), or Spark (`timestamp`, local time)."""
    text = str(parameters.get("datetime") or parameters.get("timestamp"))
    if text.lstrip("-").isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text).timestamp() * 1000
    except ValueError:
        return -1  # as if all were lost: the files, or else the operator, know better


def _committed_ms(row: Row) -> float:
    return float(row.timestamp.timestamp()) * 1000
