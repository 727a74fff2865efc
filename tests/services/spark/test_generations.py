"""What later commits may know more than earlier ones."""

from __future__ import annotations

import msgspec
import pytest

from penstock.services.spark.generations import newest_of, require_successor
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.aggregations import Count, Max, Mean
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema

N, MEAN = AggregationSchema.of("n", Count()), AggregationSchema.of("mean", Mean("delay"))
MOST = AggregationSchema.of("most", Max("delay"))
STORE = StoreSchema("s", "session", "string", 1, 1, "on_close", "in", None, None, None, (N, MEAN))


def changed(**more: object) -> StoreSchema:
    return msgspec.structs.replace(STORE, **more)


@pytest.mark.parametrize(
    "later",
    [
        (STORE,),
        (STORE, changed(name="more")),
        (changed(aggregations=(N, MEAN, MOST)),),
        (changed(aggregations=(MOST, N, MEAN)),),
        (changed(gap_ms=7, grace_ms=9),),
    ],
)
def test_what_may_be_added(later: tuple[StoreSchema, ...]) -> None:
    """A store behind the old ones, and an aggregation anywhere beside the old ones, is no contradiction."""
    require_successor((STORE,), later)
    assert newest_of([(STORE,), later, ()]) in (later, (STORE,))


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ((), "was 's' and is 'none'"),
        ((changed(name="other"),), "was 's' and is 'other'"),
        ((changed(key="bytes"),), "store 's': key was 'string', is now 'bytes'"),
        ((changed(aggregations=(N,)),), "store 's': the aggregations changed: mean.*Run the topology as it was"),
        ((changed(aggregations=(N, msgspec.structs.replace(MOST, name="mean"))),), "changed: mean"),
        ((changed(aggregations=(MEAN, N)),), "changed: their order"),
    ],
)
def test_what_may_not_change(later: tuple[StoreSchema, ...], said: str) -> None:
    """What is gone, or is another under its name, is refused by name."""
    with pytest.raises(SchemaMismatch, match=said):
        require_successor((STORE,), later)


def test_the_newest_know_most() -> None:
    """More stores count before more aggregations; of nothing, nothing is the newest."""
    grown = (changed(aggregations=(N, MEAN, MOST)),)
    assert newest_of([(STORE,), grown]) == grown
    assert newest_of([grown, (STORE, STORE)]) == (STORE, STORE)
    assert newest_of([]) == ()
