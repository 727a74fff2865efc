"""What rules a range of the changelog has, by the reader's rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from penstock.services.spark.changelog import read_window
from penstock.services.spark.kafka import READ_SCHEMA
from penstock.shared.streams.changelog import format as log


def test_rules_are_those_of_commits_that_count(spark: Any, new_simulation: Callable[[str, int], Any]) -> None:
    """Each turn of what commits say is one, going back too; what an owner writes that is one no more is none."""
    (task,) = new_simulation("log", 1).tasks
    new = task.store
    old = msgspec.structs.replace(new, gap_ms=7)
    rows = []
    for partition in range(2):
        entries = [log.encode_takeover(2, log.Takeover("log", "test", 0))]
        for number, (epoch, store) in enumerate([(2, old), (2, old), (1, new), (2, new), (2, new), (2, old)]):
            idle = log.IdleTime(100 * number) if number else msgspec.UNSET
            done = log.Progress("log", "exactly_once", {"in": 10 * number}, 0, {}, {}, (store,), 0, idle=idle)
            entries.append(log.encode_progress(epoch, number, done))
        rows += [(partition, offset, 0, None, entry) for offset, entry in enumerate(entries[: 7 - 3 * partition])]
    window = read_window(spark, "log", spark.createDataFrame(rows, READ_SCHEMA), {})
    assert {place: (rule.sources, rule.stores, rule.moved_ms) for place, rule in window.rules.items()} == {
        (0, 1): ({}, (old,), 0),
        (0, 4): ({"in": 10}, (new,), 100),
        (0, 6): ({"in": 40}, (old,), 400),
        (1, 1): ({}, (old,), 0),
    }
    assert {p: newest.covered_offset for p, newest in window.newest.items()} == {0: 7, 1: 3}
