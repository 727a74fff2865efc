"""Which advances of time matter to an audit, and whether they are all there."""

from __future__ import annotations

import msgspec

from penstock.services.spark.advances import has_time_of_its_own, missing, moved_on_ms
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.changelog.format import IdleTime, Progress
from penstock.shared.streams.dsl import StreamsBuilder


def test_stores_whose_time_an_advance_moves() -> None:
    """Windows right behind their source; not those behind other windows, a filter or a topic, and no table."""
    builder = StreamsBuilder()
    events = builder.stream("in")
    first = events.group_by_key().session_window(10).aggregate("first", n=Count()).on_close()
    windows = first.key_by(lambda record: "all", name="all").group_by_key().tumbling_window(10)
    windows.aggregate("behind", n=Count()).on_close().to("out")
    some = events.filter(lambda record: True).group_by_key()
    some.tumbling_window(10).aggregate("filtered", n=Count()).on_close().to("few")
    schemas = builder.build().schemas()
    assert [store.name for store in schemas if has_time_of_its_own(store)] == ["first"]
    assert not has_time_of_its_own(msgspec.structs.replace(schemas[0], kind="table"))


def test_advances_that_are_not_known_are_missed() -> None:
    """A partition whose time was moved on needs rows that add up to it; where it never was, none."""
    plain = Progress("app", "exactly_once", {"in": 5}, 10, {"s": 10}, {}, (), 0)
    idle = msgspec.structs.replace(plain, idle=IdleTime(7))
    moved_on = moved_on_ms({2: idle, 0: plain, 1: idle})
    assert moved_on == {1: 7, 2: 7}
    assert missing(moved_on, {1: 7, 2: 6}) == {2: 1}
    assert missing(moved_on, {1: 9}) == {2: 7}
