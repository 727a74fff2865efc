"""Which gap a store's sessions had when: late records are corrections by that of the commits that took them.

A topology may change its gap at any time, and says by it what happens from then on. The rules of `state` say from which
source offset and which changelog offset on there was another (see `rules`); what lies before the first that is known
goes by that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.rules import Rules
from penstock.shared.streams.changelog.format import StoreSchema

_EVER = -(2**62)


class Gap(NamedTuple):
    """A gap, and the offsets from which on it was in force: those of source records, and covered ones of the log."""

    source_offset: int
    covered_offset: int
    gap_ms: int


class Gaps(NamedTuple):
    """By partition the gaps in their order; `newest_ms` is what goes for partitions of which nothing is known."""

    newest_ms: int
    by_partition: Mapping[int, list[Gap]]

    @property
    def longest_ms(self) -> int:
        """Of all that are known."""
        return max([self.newest_ms, *(gap.gap_ms for own in self.by_partition.values() for gap in own)])

    def of_record(self, source_offset: SparkColumn) -> SparkColumn:
        """That of the commit which took the source record of the column `partition` at this offset."""
        return self._found(source_offset, 0)

    def of_run(self, covered_offset: SparkColumn) -> SparkColumn:
        """That of the newest commit before a covered offset of the changelog."""
        return self._found(covered_offset, 1)

    def _found(self, offset: SparkColumn, place: int) -> SparkColumn:
        newest = F.lit(self.newest_ms).cast("bigint")
        if all(gap.gap_ms == self.newest_ms for own in self.by_partition.values() for gap in own):
            return newest
        partitions = range(max(self.by_partition) + 1)
        told = [[[gap[place], gap.gap_ms] for gap in self.by_partition.get(p, [])] for p in partitions]
        own = F.get(F.from_json(F.lit(json.dumps(told)), "array<array<array<bigint>>>"), F.col("partition"))
        begun = F.filter(own, lambda gap: F.get(gap, F.lit(0)) <= offset)
        return F.coalesce(F.get(F.get(begun, F.size(begun) - 1), F.lit(1)), newest)


def gaps_of(known: Rules, store: StoreSchema) -> Gaps:
    """The gaps of a store by what is known of rules.

    >>> from msgspec.structs import replace
    >>> from penstock.services.spark.rules import Rule
    >>> new = StoreSchema("s", "session", "string", 100, 50, "on_close", "in", "out", "late", "dlq", ())
    >>> old = replace(new, gap_ms=20)
    >>> rules = {(0, 3): Rule({}, "", (old,)), (0, 9): Rule({"in": 7}, "", (new,)), (0, 12): Rule({}, "", (new,))}
    >>> gaps_of(rules, new).by_partition[0][1:]
    [Gap(source_offset=7, covered_offset=10, gap_ms=100)]
    """
    found: dict[int, list[Gap]] = {}
    for (partition, offset), rule in sorted(known.items(), key=lambda one: one[0]):
        then = next((s for s in rule.stores if s.name == store.name), None)
        own = found.setdefault(partition, [])
        if then is None or (own and own[-1].gap_ms == then.gap_ms):
            continue
        # A run that covers the rule's own commit has an offset behind it.
        at = (rule.sources.get(store.source or "", 0), offset + 1) if own else (_EVER, _EVER)
        own.append(Gap(*at, then.gap_ms))
    return Gaps(store.gap_ms, found)
