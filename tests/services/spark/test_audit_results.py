"""When published results can be compared."""

from __future__ import annotations

import msgspec

from penstock.services.spark.audit_results import why_not
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.dsl import StreamsBuilder


def test_results_that_are_not_known_to_be_the_stores_are_not_compared() -> None:
    """None, updates, or those of another store too; a store with a topic of its own is compared."""
    builder = StreamsBuilder()
    grouped = builder.stream("in").group_by_key()
    for name, topic in (("a", "shared"), ("b", "shared"), ("c", "own")):
        grouped.tumbling_window(10).aggregate(name, n=Count()).on_close().to(topic)
    a, b, c = stores = builder.build().schemas()
    assert why_not(c, stores) is None
    for store, other in ((a, "b"), (b, "a")):
        assert str(why_not(store, stores)).startswith(f"shared has those of {other} too")
    assert why_not(msgspec.structs.replace(a, results="named"), stores) is None
    assert why_not(msgspec.structs.replace(c, emit="on_update"), stores) == "the topic has updates, not closed sessions"
    assert str(why_not(msgspec.structs.replace(c, results=None), stores)).startswith("no topic has them")
