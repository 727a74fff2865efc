"""Who may go on with a backfill that crashed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.spark.asked import (
    SOURCE,
    StateGone,
    UnfinishedBackfill,
    asked,
    require_no_backfill,
    require_same,
    require_same_source,
)
from penstock.services.spark.marks import Marks
from penstock.services.spark.settings import BackfillSettings
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.topology import Topology


def topology(gap_ms: int = 10) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(gap_ms).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def words(build: Topology | None = None, **given: Any) -> dict[str, str]:
    settings = BackfillSettings(application="app", lake="lake", topology="a:b", **given)
    return asked(settings, build or topology())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"start": "0:400"}, "start was earliest and is 0:400"),
        ({"end": "0:400"}, "end was latest and is 0:400"),
        ({"files": "other.json"}, "files was None and is other.json"),
        ({"topology": "a:c"}, "topology was a:b and is a:c"),
        ({"max_future_ms": 7}, "max_future_ms was 86400000 and is 7"),
        ({"topology_options": {"topic": "x"}}, "topology_options was"),
        ({"build": topology(11)}, "stores was"),
    ],
)
def test_another_history_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    """A backfill that crashed is not gone on with from another start, from other files or for another topology."""
    now = words(**given) if "topology" not in given else {**words(), "topology": given["topology"]}
    with pytest.raises(UnfinishedBackfill, match=f"not ended with other settings: {said}.*; run it again .* delete t,"):
        require_same(words(), now, "t")


def test_the_same_history_is_gone_on_with() -> None:
    """Where things are, how often tasks commit and what is written to topics may be another."""
    require_same(words(), words(outputs="none", commit_records=7, kafka_timeout_ms=9), "t")
    with pytest.raises(UnfinishedBackfill, match="an earlier version began a backfill"):
        require_same(None, words(), "t")


def test_another_source_is_refused_though_it_has_the_same_name() -> None:
    """Files that were written anew and a topic that was made again are no history to go on with."""
    require_same({**words(), SOURCE: "2 files"}, words(), "t")
    require_same_source("2 files", "2 files", "t")
    said = "what it read has changed: it was 2 files, and is 3 files; put it back, or delete t,"
    with pytest.raises(UnfinishedBackfill, match=said):
        require_same_source("2 files", "3 files", "t")


def test_a_compaction_leaves_a_backfill_alone_that_was_not_ended() -> None:
    """What a backfill appended is not a compaction's to go on with: it says what to do, by what the changelog holds."""
    note = {"to_offsets": {"0": 0}, "to_sources": {"in": {"0": 400}}}
    with pytest.raises(UnfinishedBackfill, match="begun and not ended: run `penstock backfill` again"):
        require_no_backfill(note, {0: 0, 1: 0}, "t", Marks())
    either = "If the backfill had ended, they count: put `state` back.* If it had not, nothing of it counts: delete t "
    with pytest.raises(UnfinishedBackfill, match=either):
        require_no_backfill(note, {0: 0, 1: 9}, "t", Marks(None, (1,)))
    require_no_backfill({"to_offsets": {"0": 7}}, {0: 9}, "t", Marks(None, (0,)))
    require_no_backfill(None, {0: 9}, "t", Marks())


NOTES = (None, {"to_sources": {"in": {"0": 400}}}, {"to_offsets": {"0": 7}})


@pytest.mark.parametrize("note", NOTES)
def test_the_state_of_a_backfill_that_was_ended_is_missed(note: Any) -> None:
    """Its closed windows count, since an aggregator went on: nobody is told to delete them, and nothing goes on."""
    with pytest.raises(StateGone, match=r"The closed windows of t count\. Put `state` back") as found:
        require_no_backfill(note, {0: 2}, "t", Marks("t", (0,)))
    assert "delete" not in str(found.value)
    with pytest.raises(StateGone, match="`state` of another, which it names, is gone"):
        require_no_backfill(note, {0: 2}, "t", Marks("another", (0,)))


@pytest.mark.parametrize("note", NOTES)
def test_a_backfill_that_left_its_mark_alone_is_to_be_ended(note: Any) -> None:
    """Nobody went on from it: whether it was killed or its state was lost, running it again mends it."""
    with pytest.raises(UnfinishedBackfill, match=r"it has not ended .run `penstock backfill` again as it was"):
        require_no_backfill(note, {0: 1}, "t", Marks("t"))
    with pytest.raises(UnfinishedBackfill, match="`state` of another, which it names, is not there"):
        require_no_backfill(note, {0: 1}, "t", Marks("another"))
