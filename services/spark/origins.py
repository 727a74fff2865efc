"""Where an application's history began, if not with its sources' first records: what a backfill leaves in `state`.

Rows with `row = 'origin'`, one a partition, all of which say the same, as JSON in `progress`. An application that no
backfill began has none.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from pyspark.sql import DataFrame

from penstock.shared.common.errors import FatalError
from penstock.shared.streams.changelog.format import StoreSchema

Offsets = dict[str, dict[int, int]]
"""By topic and partition."""


class NotAuditable(FatalError):
    """Spark cannot know what came to the window; the message says why. Nothing was compared."""


class Origin(msgspec.Struct, frozen=True):
    """What a backfill took: the first offsets of its sources, none where it took files.

    Below the offsets `late` a late topic has what the backfill wrote there itself: the tables cover that. `asked` is
    what it was asked for (see `asked`), `ends` are the offsets at which it handed over, and `unwritten` how many late
    records and dead letters it had for each topic and was not to write; earlier releases did not say.
    """

    from_files: bool
    starts: Offsets = {}
    late: Offsets = {}
    asked: dict[str, str] = {}
    ends: Offsets = {}
    unwritten: dict[str, int] = {}


def origin_of(state: DataFrame | None) -> Origin | None:
    """What the table says; None where no backfill began the application, or there is no table yet."""
    row = None if state is None else state.filter("row = 'origin'").select("progress").first()
    return None if row is None else msgspec.json.decode(row.progress, type=Origin)


def first_offsets(
    origin: Origin | None, source: str, earliest: Mapping[int, int], committed: Mapping[int, int]
) -> dict[int, int]:
    """By partition the first record of a source that the application took, which must still be there.

    Raises NotAuditable where it was a file's, or is gone.
    """
    if origin is not None and origin.from_files:
        raise NotAuditable(
            f"the application began with a backfill from files: what its first windows hold is not in {source}. "
            "Nothing was compared"
        )
    starts = {p: 0 if origin is None else origin.starts.get(source, {}).get(p, 0) for p in earliest}
    if gone := [p for p, first in sorted(earliest.items()) if first > starts[p] and committed.get(p, 0) > starts[p]]:
        which = ", ".join(f"{source}-{p} (offsets {starts[p]} to {earliest[p] - 1})" for p in gone)
        raise NotAuditable(
            f"the beginning of {which} is gone, by retention or because records were deleted: which windows began with "
            "it is not known. Nothing was compared. If the application took no record of that, --began-at says where "
            "it began (earliest, or partition:offset); --start audits what lies from a time on"
        )
    return starts


def unwritten_below(
    origin: Origin | None, store: StoreSchema, first: Mapping[int, int]
) -> tuple[dict[str, int], dict[int, int]]:
    """What a backfill refused and did not write, by topic, and up to where that may be among records from `first` on.

    Both are empty where nothing of that is read.
    """
    gone = (
        {} if origin is None else {t: n for t, n in origin.unwritten.items() if t in (store.late, store.dead_letters)}
    )
    ends = {} if origin is None else origin.ends.get(store.source or "", {})
    below = {p: end for p, end in sorted(ends.items()) if first.get(p, end) < end}
    return (gone, below) if gone and below else ({}, {})


def require_written(gone: Mapping[str, int], newest_ms: int | None) -> None:
    """Raise NotAuditable where a backfill left out what it refused (see `unwritten_below`).

    `newest_ms` is the highest time of the records that it took.
    """
    if not gone:
        return
    which = ", ".join(f"{topic}: {n}" for topic, n in sorted(gone.items()))
    # A partition is read from its first record of the ms before the part's.
    beyond = "" if newest_ms is None else f" --start {newest_ms + 2} audits what came after what the backfill took."
    raise NotAuditable(
        f"the backfill that began the application wrote no late records and no dead letters (--outputs none), and had "
        f"some ({which}): which records its windows hold is not known. Nothing was compared.{beyond}"
    )
