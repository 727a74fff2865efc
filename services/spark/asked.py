"""What a backfill was asked for, in words, so that one that crashed is gone on with by the same alone.

The first append carries them, and what was read. What does not change which windows there are is free to be another:
where Kafka, the lake and Spark are, how often a task commits, what is written to topics, and the upkeep. Options are
there as a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.services.spark.marks import Marks
from penstock.services.spark.settings import BackfillSettings
from penstock.shared.common.errors import FatalError
from penstock.shared.streams.settings import TaskSettings
from penstock.shared.streams.topology import Topology

DIGEST_CHARACTERS = 16
TEXTS = (
    *("topology", "start", "end", "files", "format", "topic", "key_column", "timestamp_column", "time_unit"),
    *("value_column", "order_column", "hand_over", *TaskSettings.model_fields),
)
DIGESTS = ("topology_options", "reader_options")


SOURCE = "source"
"""What is read, beside the settings that say where: the files as they were, the topics by their ids."""


class UnfinishedBackfill(FatalError):
    """A backfill was begun and not ended, and what is asked for now would mix with what it left."""


class StateGone(FatalError):
    """A backfill's `state` was lost, on which all rests that came after it."""


def asked(settings: BackfillSettings, topology: Topology) -> dict[str, str]:
    """The settings that make a backfill what it is, as text, and a digest of the topology's stores."""
    words = {name: str(getattr(settings, name)) for name in TEXTS}
    words |= {name: _digest(sorted(getattr(settings, name).items())) for name in DIGESTS}
    return words | {"stores": _digest(topology.schemas())}


def require_same(before: Mapping[str, str] | None, now: Mapping[str, str], tables: str) -> None:
    """Raise UnfinishedBackfill unless a backfill that crashed was asked for the same; None for what nobody knows."""
    way_out = f"run it again as it was, or delete {tables}, in which nothing counts yet, and begin anew"
    if before is None:
        raise UnfinishedBackfill(f"an earlier version began a backfill and did not end it: delete {tables}, begin anew")
    names = sorted((before.keys() | now) - {SOURCE})
    if wrong := [name for name in names if before.get(name) != now.get(name)]:
        said = ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in wrong)
        raise UnfinishedBackfill(f"a backfill was begun and not ended with other settings: {said}; {way_out}")


def require_same_source(before: str | None, now: str, tables: str) -> None:
    """Raise UnfinishedBackfill where a backfill that crashed read other files, or a topic that is gone."""
    if before != now:
        raise UnfinishedBackfill(
            f"a backfill was begun and not ended, and what it read has changed: it was {before}, and is {now}; "
            f"put it back, or delete {tables}, in which nothing counts yet, and begin anew"
        )


def require_no_backfill(
    pending: Mapping[str, Any] | None, latest: Mapping[int, int], tables: str, marks: Marks
) -> None:
    """Raise where a compaction found a backfill's append, or its changelog rests on one, and `state` covers neither.

    `latest` are the changelog's ends, `marks` what it says to rest on. Where more came after those, the backfill had
    ended: then StateGone is raised, else UnfinishedBackfill.
    """
    there = "" if marks.rests_on == tables else f" of {marks.rests_on}, which it names,"
    if marks.rests_on is not None and marks.begun:
        raise StateGone(
            f"the changelog goes on where a backfill ended, and `state`{there} is gone: no changelog has what the "
            f"backfill left there. The closed windows of {tables} count. Put `state` back from a copy, or begin anew "
            "(`penstock streams reset`, then `penstock backfill`)"
        )
    if marks.rests_on is not None:
        raise UnfinishedBackfill(
            f"a backfill was begun, and `state`{there} is not there: it has not ended (run `penstock backfill` again "
            "as it was), or its `state` was lost (put it back from a copy)"
        )
    if pending is None or "to_sources" not in pending:
        return
    if any(latest.values()):
        raise UnfinishedBackfill(
            f"{tables} has closed windows of a backfill and no `state`, and the aggregator has written since. If the "
            "backfill had ended, they count: put `state` back from a copy. If it had not, nothing of it counts: delete "
            f"{tables} and go on without that history. Or reset the application (`penstock streams reset`) and run the "
            "backfill again"
        )
    raise UnfinishedBackfill("a backfill was begun and not ended: run `penstock backfill` again as it was")


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:DIGEST_CHARACTERS]
