"""Reading stores: which rows an answer has, and what it reflects."""

from __future__ import annotations

from typing import Any

import pytest

from shared.common.errors import ConfigError
from shared.streams.aggregations import Count, Sum
from shared.streams.dsl import StreamsBuilder
from shared.streams.grouped_stream import WindowedGroup
from shared.streams.queries import QUERY_ROWS_MAX, StoreQuery, read_store
from shared.streams.stream_join import JoinWindows
from shared.testing.topology_test_driver import TopologyTestDriver

KINDS = ("session", "tumbling", "sliding")


def windowed(kind: str, builder: StreamsBuilder, key: Any = "string") -> WindowedGroup:
    grouped = builder.stream("in", key=key).group_by_key()
    match kind:
        case "session":
            return grouped.session_window(10, 100)
        case "tumbling":
            return grouped.tumbling_window(10, 100)
    return grouped.sliding_window(10, 100)


def driver_of(kind: str, key: Any = "string") -> TopologyTestDriver:
    builder = StreamsBuilder()
    windowed(kind, builder, key).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for name, at in (("ann", 3), ("bob", 5), ("cat", 27), ("bob", 40)):
        driver.pipe("in", key=name.encode(), value=b'{"x":%d}' % at, timestamp=at)
    return driver


def rows(driver: TopologyTestDriver, **wanted: Any) -> list[tuple[str, int, int, int]]:
    answer = read_store({0: driver.task}, "s", StoreQuery(**wanted))
    assert not answer.is_cut
    return sorted((row["key"], row["start"], row["end"], row["sum"]) for row in answer.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_all_live_windows(kind: str) -> None:
    """Without bounds an answer has every live window with its results by name, and the position that it reflects."""
    driver = driver_of(kind)
    answer = read_store({0: driver.task}, "s", StoreQuery())
    assert (answer.kind, answer.position, len(answer.rows)) == (kind, {0: {"in": 4}}, 4)
    assert {tuple(row) for row in answer.rows} == {("partition", "key", "start", "end", "n", "sum")}


def test_by_key_and_range_of_keys() -> None:
    """One key's windows, or those of a range of keys, both ends inclusive; a key that is not there has none."""
    driver = driver_of("session")
    assert rows(driver, key="bob") == [("bob", 5, 5, 5), ("bob", 40, 40, 40)]
    assert rows(driver, key="dan") == []
    assert {row[0] for row in rows(driver, key_from="b", key_to="cat")} == {"bob", "cat"}
    assert {row[0] for row in rows(driver, key_from="bob")} == {"bob", "cat"}
    assert {row[0] for row in rows(driver, key_to="bo")} == {"ann"}
    assert rows(driver, key="ann", key_from="b") == []


@pytest.mark.parametrize(("kind", "last"), [("session", 3), ("tumbling", 9)])
def test_by_time(kind: str, last: int) -> None:
    """A window counts that overlaps the time: up to the last moment that it holds, from its first."""
    driver = driver_of(kind)
    assert {row[0] for row in rows(driver, from_ms=last, to_ms=last)} >= {"ann"}
    assert {row[0] for row in rows(driver, from_ms=last + 1, to_ms=19)} == ({"bob"} if kind == "session" else set())
    assert {row[0] for row in rows(driver, from_ms=28)} == ({"bob"} if kind == "session" else {"bob", "cat"})
    assert rows(driver, to_ms=-1) == []


def test_a_sliding_window_that_was_closed_is_not_there() -> None:
    """What is kept for its operator's use is no live window."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().sliding_window(10)
    windows.aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for at in (20, 31):
        driver.pipe("in", key=b"k", value=b'{"x":1}', timestamp=at)
    assert len(driver.task.stores["s"]) == 2
    assert rows(driver) == [("k", 21, 31, 1)]


def test_an_answer_is_bounded() -> None:
    """No more rows than asked for, and the answer says that there were more."""
    driver = driver_of("session")
    answer = read_store({0: driver.task, 1: driver.task}, "s", StoreQuery(rows_max=5))
    assert ([row["partition"] for row in answer.rows], answer.is_cut) == ([0, 0, 0, 0, 1], True)
    assert not read_store({0: driver.task}, "s", StoreQuery(rows_max=4)).is_cut
    for wrong in (0, QUERY_ROWS_MAX + 1):
        with pytest.raises(ConfigError, match="rows_max"):
            read_store({0: driver.task}, "s", StoreQuery(rows_max=wrong))


def test_bytes_as_keys() -> None:
    """Of a store whose keys are bytes, the text that was asked for is taken as UTF-8."""
    answer = read_store({0: driver_of("tumbling", "bytes").task}, "s", StoreQuery(key="ann"))
    assert [row["key"] for row in answer.rows] == [b"ann"]


def test_tables_and_what_cannot_be_read() -> None:
    """A table's rows have values; what a join remembers and what is not there are refused by name."""
    builder = StreamsBuilder()
    stream, table = builder.stream("in"), builder.table("users")
    stream.join(table, lambda a, b: b).to("out")
    stream.join(builder.stream("other"), lambda a, b: b, JoinWindows.of(5), name="j").to("out2")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("users", key=b"ann", value=b'{"city":"Oslo"}')
    answer = read_store({0: driver.task}, "users", StoreQuery(from_ms=5))
    assert answer.rows == [{"partition": 0, "key": "ann", "value": {"city": "Oslo"}}]
    with pytest.raises(ConfigError, match="what a join remembers"):
        read_store({0: driver.task}, "j-left", StoreQuery())
    with pytest.raises(ConfigError, match="no task that runs here has a store 'x'"):
        read_store({0: driver.task}, "x", StoreQuery())
    with pytest.raises(ConfigError, match="no task that runs here"):
        read_store({}, "users", StoreQuery())
