"""Which gap a store had, as far as rules say."""

from __future__ import annotations

import msgspec

from penstock.services.spark.gaps import Gaps, gaps_of
from penstock.services.spark.rules import Rule
from penstock.shared.streams.changelog.format import StoreSchema

NEW = StoreSchema("s", "session", "string", 100, 50, "on_close", "in", "out", "late", "dlq", ())
OLD, OTHER = msgspec.structs.replace(NEW, gap_ms=500), msgspec.structs.replace(NEW, name="other", gap_ms=9)


def test_a_gap_begins_where_the_rules_with_another_had_come_to() -> None:
    """Rules of another grace or topic are none; what lies before the first that is known goes by that one."""
    graceless = msgspec.structs.replace(OLD, grace_ms=0)
    rules = {
        (0, 3): Rule({"in": 5}, "exactly_once", (OTHER, OLD)),
        (0, 7): Rule({"in": 9}, "exactly_once", (OTHER, graceless)),
        (0, 9): Rule({"in": 12}, "exactly_once", (OTHER, NEW)),
        (2, 4): Rule({}, "exactly_once", (OTHER,)),
    }
    found = gaps_of(rules, NEW)
    assert [gap.gap_ms for gap in found.by_partition[0]] == [500, 100]
    assert found.by_partition[0][0].source_offset < 0 > found.by_partition[0][0].covered_offset
    assert found.by_partition[0][1][:2] == (12, 10)
    assert found.longest_ms == 500
    assert Gaps(100, {}).longest_ms == 100
