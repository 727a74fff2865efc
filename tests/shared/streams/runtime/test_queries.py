"""Reading stores: the rows of a response, the position that it reflects, and the instance that owns each partition."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.shared.common.errors import AuthorizationFailed, ConfigError, DeliveryTimeout, PenstockError
from penstock.shared.common.row_positions import RowPosition, key_hash, row_order
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder, WindowedGroup
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.runtime.instances import (
    FORGET_MS,
    REGISTER_MS,
    RETRY_MS,
    Claim,
    InstanceRegistry,
    Instances,
    Registration,
    encode_registration,
    partition_owners,
)
from penstock.shared.streams.runtime.queries import (
    QUERY_ROWS_MAX,
    StoreQuery,
    StoreResponse,
    query_position,
    read_in_slices,
)
from penstock.shared.streams.state.persistent_stores import CACHED_ROW_BYTES
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.fake_broker import Api, Drop, FakeCluster
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests import virtual_time

KINDS = ("session", "tumbling", "sliding")


def windowed(kind: str, builder: StreamsBuilder, key: Any = "string") -> WindowedGroup:
    grouped = builder.stream("in", key=key).group_by_key()
    match kind:
        case "session":
            return grouped.session_window(10, 100)
        case "tumbling":
            return grouped.tumbling_window(10, 100)
        case "hopping":
            return grouped.hopping_window(10, 5, 100)
    return grouped.sliding_window(10, 100)


def driver_of(kind: str, key: Any = "string") -> TopologyTestDriver:
    builder = StreamsBuilder()
    windowed(kind, builder, key).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for name, at in (("ann", 3), ("bob", 5), ("cat", 27), ("bob", 40)):
        driver.pipe("in", key=name.encode(), value=b'{"x":%d}' % at, timestamp=at)
    return driver


def rest_of(reading: Generator[None, None, StoreResponse]) -> tuple[StoreResponse, int]:
    """Return the response, and the number of further slices before it."""
    slices = 0
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value, slices
        slices += 1


def slices_of(tasks: Mapping[int, StreamTask], store: str, query: StoreQuery) -> Generator[None, None, StoreResponse]:
    """Read a store of the tasks, of which there is at least one."""
    return read_in_slices(tasks, store, query, next(iter(tasks.values())).topology, {})


def read_store(tasks: Mapping[int, StreamTask], store: str, query: StoreQuery) -> StoreResponse:
    return rest_of(slices_of(tasks, store, query))[0]


def rows(driver: TopologyTestDriver, **wanted: Any) -> list[tuple[str, int, int, int]]:
    response = read_store({0: driver.task}, "s", StoreQuery(**wanted))
    assert response.last is None
    return sorted((row["key"], row["start"], row["end"], row["sum"]) for row in response.rows)


@pytest.mark.parametrize("kind", KINDS)
def test_all_open_windows(kind: str) -> None:
    """Without bounds a response has every open window with its results by name, and the position that it reflects."""
    driver = driver_of(kind)
    response = read_store({0: driver.task}, "s", StoreQuery())
    assert (response.kind, response.position, len(response.rows)) == (kind, {0: {"in": 4}}, 4)
    assert {tuple(row) for row in response.rows} == {("partition", "key", "start", "end", "n", "sum")}


def test_rows_of_an_aggregation_without_windows() -> None:
    """The rows have their results by name and no bounds. A time range does not filter them."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().aggregate("s", n=Count(), sum=Sum("x"))
    driver = TopologyTestDriver(builder.build())
    for name, x in (("ann", 1), ("bob", 5), ("ann", 2)):
        driver.pipe("in", key=name.encode(), value=b'{"x":%d}' % x, timestamp=1_000)
    response = read_store({0: driver.task}, "s", StoreQuery(key="ann", from_ms=5, to_ms=6))
    assert (response.kind, response.position) == ("aggregate", {0: {"in": 3}})
    assert response.rows == [{"partition": 0, "key": "ann", "n": 2, "sum": 3.0}]
    assert len(read_store({0: driver.task}, "s", StoreQuery()).rows) == 2


def test_by_key_and_range_of_keys() -> None:
    """A query selects the windows of one key or of an inclusive range of keys. An unknown key has no rows."""
    driver = driver_of("session")
    assert rows(driver, key="bob") == [("bob", 5, 5, 5), ("bob", 40, 40, 40)]
    assert rows(driver, key="dan") == []
    assert {row[0] for row in rows(driver, key_from="b", key_to="cat")} == {"bob", "cat"}
    assert {row[0] for row in rows(driver, key_from="bob")} == {"bob", "cat"}
    assert {row[0] for row in rows(driver, key_to="bo")} == {"ann"}
    assert rows(driver, key="ann", key_from="b") == []


@pytest.mark.parametrize(("kind", "end"), [("session", 3), ("tumbling", 10)])
def test_by_time(kind: str, end: int) -> None:
    """A time range selects the windows that end at its first millisecond or later, and begin at its last or earlier."""
    driver = driver_of(kind)
    assert {row[0] for row in rows(driver, from_ms=end, to_ms=end)} >= {"ann"}
    assert {row[0] for row in rows(driver, from_ms=end + 1, to_ms=19)} == ({"bob"} if kind == "session" else set())
    assert {row[0] for row in rows(driver, from_ms=28)} == ({"bob"} if kind == "session" else {"bob", "cat"})
    assert rows(driver, to_ms=-1) == []


def test_a_sliding_window_that_was_closed_is_not_there() -> None:
    """Rows that a sliding window keeps after their window has closed are not in a response."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().sliding_window(10)
    windows.aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for at in (20, 31):
        driver.pipe("in", key=b"k", value=b'{"x":1}', timestamp=at)
    assert len(driver.task.stores["s"]) == 2
    assert rows(driver) == [("k", 21, 31, 1)]


def test_a_response_is_bounded() -> None:
    """A response has at most `rows_max` rows. If there are more, it has the position to continue from."""
    driver = driver_of("session")
    tasks = {0: driver.task, 1: driver.task}
    response = read_store(tasks, "s", StoreQuery(rows_max=5))
    assert [row["partition"] for row in response.rows] == [0, 0, 0, 0, 1]
    assert response.last == RowPosition(1, response.rows[-1]["key"].encode(), response.rows[-1]["start"])
    rest = read_store(tasks, "s", StoreQuery(rows_max=5, after=response.last))
    assert (len(rest.rows), rest.last, rest.position.keys()) == (3, None, {0, 1})
    assert read_store({0: driver.task}, "s", StoreQuery(rows_max=4)).last is None
    for wrong in (0, QUERY_ROWS_MAX + 1):
        with pytest.raises(ConfigError, match="rows_max"):
            read_store({0: driver.task}, "s", StoreQuery(rows_max=wrong))


@pytest.mark.parametrize("store", ["memory", "disk", "disk and memory"])
@pytest.mark.parametrize(
    ("kind", "key_type"), [("session", "string"), ("tumbling", "bytes"), ("table", "string"), ("aggregate", "bytes")]
)
def test_pages_have_each_row_once(
    kind: str, key_type: Any, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a query have the rows of the whole response in its order, in memory, on disk or in both. The same
    holds for a query with bounds."""
    monkeypatch.setattr("penstock.shared.streams.runtime.queries.SLICE_ROWS", 50)
    monkeypatch.setattr("penstock.shared.streams.state.rocksdb.PAGE_ROWS", 30)
    builder = StreamsBuilder()
    if kind == "table":
        builder.table("in", name="s")
    elif kind == "aggregate":
        builder.stream("in", key=key_type).group_by_key().aggregate("s", n=Count(), sum=Sum("x"))
    else:
        windowed(kind, builder, key_type).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    state = None
    if store != "memory":
        cache = 0 if store == "disk" else 400 * 100
        state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=cache)
    driver = TopologyTestDriver(builder.build(), state=state)
    for at in (5, 60):  # two windows of each key
        driver.pipe_columns("in", [(b"k%05d" % i, b'{"x":1}', at) for i in range(210)])
    if store != "disk":
        driver.pipe_columns("in", [(b"new%d" % i, b'{"x":1}', 70) for i in range(9)])
    tasks = {0: driver.task, 3: driver.task}
    rows_each = 1 if kind in ("table", "aggregate") else 2
    for bounds in ({}, {"key_from": "k00100", "key_to": "k00149", "from_ms": 50}):
        whole = read_store(tasks, "s", StoreQuery(rows_max=QUERY_ROWS_MAX, **bounds))
        at = [query_position(row) for row in whole.rows]
        assert at == sorted(at, key=lambda one: (one.partition, row_order(one.key, one.start)))
        for rows_max in (17, len(whole.rows) // 2, len(whole.rows) + 1):
            found, after = [], None
            while True:
                page = read_store(tasks, "s", StoreQuery(rows_max=rows_max, after=after, **bounds))
                found += page.rows
                if (after := page.last) is None:
                    break
                assert len(page.rows) == rows_max
            assert found == whole.rows
            if bounds:
                assert len(found) == len(whole.rows) == 100
            else:
                new = 0 if store == "disk" else 9
                assert len(found) == 2 * (rows_each * 210 + new)
    driver.close()


@pytest.mark.parametrize(
    ("kind", "cache_rows"),
    [(kind, cache) for kind in ("session", "table", "aggregate") for cache in (None, 0, 500, 5_000)]
    + [("global table", None)],
)
def test_a_small_page_of_a_large_store_reads_few_rows(
    kind: str, cache_rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a few rows is read in at most two small slices, however many rows the store has before and after them.
    A store on disk has none, some or all of its keys in memory."""
    monkeypatch.setattr("penstock.shared.streams.runtime.queries.SLICE_ROWS", 500)
    builder = StreamsBuilder()
    if kind == "table":
        builder.table("in", name="s")
    elif kind == "global table":
        builder.stream("x").join(builder.global_table("in"), lambda a, b: b, key=lambda r: r.key).to("out")
    elif kind == "aggregate":
        builder.stream("in").group_by_key().aggregate("s", n=Count())
    else:
        windowed(kind, builder).aggregate("s", n=Count()).on_close().to("out")
    state = None
    if cache_rows is not None:
        cache = cache_rows * 3 * CACHED_ROW_BYTES
        state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 << 20, cache_bytes_max=cache)
    driver = TopologyTestDriver(builder.build(), state=state)
    tables = driver.global_tables
    records = [(b"k%d" % i, b"{}", 5) for i in range(1_500)]
    driver.pipe_columns("in", records) if not tables else [tables["in"].apply(*one[:2]) for one in records]
    if cache_rows is not None:
        in_memory = len(driver.task.stores["s"].keys_in_memory())
        assert min(cache_rows, len(records)) <= in_memory <= 2 * cache_rows
    keys, after = set(), None
    for _ in range(3):
        query = StoreQuery(rows_max=5, after=after)
        store = "in" if tables else "s"
        page, slices = rest_of(read_in_slices({0: driver.task}, store, query, driver.topology, tables))
        keys |= {row["key"] for row in page.rows}
        after = page.last
        assert slices <= 1
    driver.close()
    assert len(keys) == 15


@pytest.mark.parametrize("wanted", [{}, {"key": "many"}, {"key": "plumless"}])
@pytest.mark.parametrize("store", ["memory", "disk", "disk and memory"])
def test_a_key_of_many_windows_is_read_in_slices(
    wanted: dict[str, Any], store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The windows of a key are read in slices, and pages have each of them once, in order of start. The same holds if
    another key has the same hash."""
    assert key_hash(b"plumless") == key_hash(b"buckeroo")
    monkeypatch.setattr("penstock.shared.streams.runtime.queries.SLICE_ROWS", 20)
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10, 10_000).aggregate("s", n=Count()).on_close().to("out")
    state = StateDirectory(
        str(tmp_path), "app", memory_bytes_max=8 << 20, cache_bytes_max=0 if store == "disk" else 64 << 20
    )
    driver = TopologyTestDriver(builder.build(), state=None if store == "memory" else state)
    counts = {"buckeroo": 70, "many": 110, "plumless": 70, "a": 1}
    records = [(key.encode(), b"{}", at) for key, count in counts.items() for at in range(0, 11 * count, 11)]
    driver.pipe_columns("in", records)
    tasks = {0: driver.task}
    reading = slices_of(tasks, "s", StoreQuery(**wanted))
    assert next(reading) is None
    whole, slices = rest_of(reading)
    for rows_max in (7, 20, 33):
        found, after = [], None
        while True:
            page = read_store(tasks, "s", StoreQuery(rows_max=rows_max, after=after, **wanted))
            found += page.rows
            if (after := page.last) is None:
                break
        assert found == whole.rows
    driver.close()
    starts: dict[str, list[int]] = {}
    for row in whole.rows:
        starts.setdefault(row["key"], []).append(row["start"])
    assert starts == {
        key: list(range(0, 11 * count, 11)) for key, count in counts.items() if key == wanted.get("key", key)
    }
    assert slices >= 2


@pytest.mark.parametrize("is_global", [False, True])
def test_a_table_that_changes_between_pages_has_each_other_row_once(is_global: bool) -> None:
    """Keys that are added or removed between two pages neither skip nor repeat another row."""
    builder = StreamsBuilder()
    if is_global:
        builder.stream("in").join(builder.global_table("t"), lambda a, b: b, key=lambda r: r.key).to("out")
    else:
        builder.table("t", name="t")
    driver = TopologyTestDriver(builder.build())
    for i in range(1_000):
        driver.pipe("t", key=b"%d" % i, value=b"1")
    found, after, turn = [], None, 0
    while True:
        query = StoreQuery(rows_max=60, after=after)
        page, _ = rest_of(read_in_slices({0: driver.task}, "t", query, driver.topology, driver.global_tables))
        found += [row["key"] for row in page.rows]
        if (after := page.last) is None:
            break
        for i in range(turn * 20, turn * 20 + 20):
            driver.pipe("t", key=b"%d" % i, value=None)
            driver.pipe("t", key=b"new%d" % i, value=b"1")
        turn += 1
    stay = {str(i) for i in range(turn * 20, 1_000)}
    assert turn > 10
    assert len(found) == len(set(found))
    assert stay <= set(found)


def test_a_row_that_stays_is_returned_once_whatever_changes() -> None:
    """Windows that open or close between two pages neither skip nor repeat another row."""
    builder = StreamsBuilder()
    windowed("session", builder).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe_columns("in", [(b"go%d" % i, b'{"x":1}', 1) for i in range(50)])
    driver.pipe_columns("in", [(b"stay%d" % i, b'{"x":1}', 100) for i in range(50)])
    found, after, turn = [], None, 0
    while True:
        page = read_store({0: driver.task}, "s", StoreQuery(rows_max=7, after=after))
        found += [row["key"] for row in page.rows if row["key"].startswith("stay")]
        if (after := page.last) is None:
            break
        turn += 1
        driver.pipe("in", key=b"come%d" % turn, value=b'{"x":1}', timestamp=100 + turn * 10)
    assert len(driver.task.stores["s"]) == 50 + turn
    assert sorted(found) == sorted(f"stay{i}" for i in range(50))


def test_a_partition_that_goes_takes_no_other_ones_rows_along() -> None:
    """If a partition is lost after it has filled the page, the next page starts with the next partition."""
    tasks = {0: driver_of("session").task, 1: driver_of("session").task}
    reading = slices_of(tasks, "s", StoreQuery(rows_max=4))
    for _ in range(2):
        assert next(reading) is None
    del tasks[0]
    response, _ = rest_of(reading)
    assert (response.rows, set(response.position)) == ([], {1})
    assert len(read_store(tasks, "s", StoreQuery(after=response.last)).rows) == 4


def test_bytes_as_keys() -> None:
    """A query accepts a key or a bound as bytes or as text (encoded in UTF-8), for both key types of a store."""
    for key_type, kept in (("bytes", b"ann"), ("string", "ann")):
        tasks = {0: driver_of("tumbling", key_type).task}
        for query in (StoreQuery(key="ann"), StoreQuery(key=b"ann"), StoreQuery(key_to=b"b"), StoreQuery(key_to="b")):
            assert [row["key"] for row in read_store(tasks, "s", query).rows] == [kept]
    with pytest.raises(ConfigError, match=r"b'.xff'"):
        read_store(tasks, "s", StoreQuery(key=b"\xff"))


@pytest.mark.parametrize("kind", ["session", "table", "aggregate"])
def test_a_key_that_is_queried_stays_on_disk(kind: str, tmp_path: Path) -> None:
    """A query of a key reads its rows from the disk, and keeps neither them nor a missing key in memory."""
    builder = StreamsBuilder()
    if kind == "table":
        builder.table("in", name="s")
    elif kind == "aggregate":
        builder.stream("in").group_by_key().aggregate("s", n=Count())
    else:
        windowed(kind, builder).aggregate("s", n=Count()).on_close().to("out")
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(builder.build(), state=state)
    for at in (5, 40):
        driver.pipe("in", key=b"ann", value=b'{"x":1}', timestamp=at)
    used = state.budget.bytes_used
    found = [read_store({0: driver.task}, "s", StoreQuery(key=key)).rows for key in ("ann", "ann", "bob")]
    assert (state.budget.bytes_used, found[1], found[2]) == (used, found[0], [])
    assert [row.get("start") for row in found[0]] == ([5, 40] if kind == "session" else [None])
    driver.close()


SLICE_ROWS = 200


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("kind", ["session", "tumbling", "table"])
def test_a_store_is_walked_in_slices(kind: str, on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store is read in slices. Rows that are added or removed between two slices cause no duplicate row."""
    monkeypatch.setattr("penstock.shared.streams.runtime.queries.SLICE_ROWS", SLICE_ROWS)
    builder = StreamsBuilder()
    if kind == "table":
        builder.table("in", name="s")
    else:
        windowed(kind, builder).aggregate("s", n=Count(), sum=Sum("x")).on_close().to("out")
    state = None
    if on_disk:
        state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(builder.build(), state=state)
    names = [f"k{i:05}" for i in range(2 * SLICE_ROWS + 7)]
    driver.pipe_columns("in", [(name.encode(), b'{"x":1}', 5) for name in names])
    reading = slices_of({0: driver.task}, "s", StoreQuery(key_from="k00001"))
    assert next(reading) is None
    end = 5 if kind == "table" else 1_000_000  # closes all that there is
    driver.pipe_columns("in", [(name.encode(), b'{"x":1}', end) for name in ("a", *names[:3], "k00000x")])
    response, slices = rest_of(reading)
    keys = [row["key"] for row in response.rows]
    driver.close()
    assert slices >= 1
    assert response.position == {0: {"in": len(names)}}
    assert len(set(keys)) == len(keys) >= SLICE_ROWS - 1
    assert "a" not in keys


@pytest.mark.parametrize("kind", ["session", "hopping", "table", "aggregate"])
def test_rows_in_memory_and_on_disk_are_read_in_slices(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One turn reads at most a slice of a store on disk, also if all keys are in memory and have several rows:
    later slices have the rows as they are by then."""
    monkeypatch.setattr("penstock.shared.streams.runtime.queries.SLICE_ROWS", SLICE_ROWS)
    builder = StreamsBuilder()
    if kind == "table":
        builder.table("in", name="s")
    elif kind == "aggregate":
        builder.stream("in").group_by_key().aggregate("s", x=Sum("x"))
    else:
        windowed(kind, builder).aggregate("s", x=Sum("x")).on_close().to("out")
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=64 * 1024 * 1024)
    driver = TopologyTestDriver(builder.build(), state=state)
    keys = [b"k%05d" % i for i in range(SLICE_ROWS if kind == "hopping" else 2 * SLICE_ROWS)]
    driver.pipe_columns("in", [(key, b'{"x":1}', 5) for key in keys])
    reading = slices_of({0: driver.task}, "s", StoreQuery())
    assert next(reading) is None
    driver.pipe_columns("in", [(key, b'{"x":2}', 5) for key in keys])
    response, slices = rest_of(reading)
    before = [row for row in response.rows if (row["value"]["x"] if kind == "table" else row["x"]) == 1]
    driver.close()
    assert len(response.rows) == 2 * SLICE_ROWS
    assert 0.8 * SLICE_ROWS < len(before) <= SLICE_ROWS + 1
    assert 2 <= slices <= 4


def test_a_task_that_goes_meanwhile_is_left_out() -> None:
    """If a task is closed between two slices, the response has neither its rows nor its position."""
    tasks = {0: driver_of("session").task, 1: driver_of("session").task}
    reading = slices_of(tasks, "s", StoreQuery())
    assert next(reading) is None
    del tasks[0]
    response, _ = rest_of(reading)
    assert ({row["partition"] for row in response.rows}, set(response.position)) == ({1}, {1})


def test_a_global_table_can_be_read() -> None:
    """A global table is read by key, by range and in pages. The position has the offsets of its topic, and no row has a
    partition."""
    builder = StreamsBuilder()
    builder.stream("in").join(builder.global_table("users"), lambda a, b: b, key=lambda r: r.key).to("out")
    driver = TopologyTestDriver(builder.build())
    for key in (b"ann", b"bob", b"cat"):
        driver.pipe("users", key=key, value=b'{"name":"%s"}' % key)
    tables = driver.global_tables
    tables["users"].position[2] = 3

    def read(**wanted: Any) -> Any:
        return rest_of(read_in_slices({0: driver.task}, "users", StoreQuery(**wanted), driver.topology, tables))[0]

    assert read(key="ann").rows == [{"key": "ann", "value": {"name": "ann"}}]
    assert (read().kind, len(read().rows), read().position) == ("global table", 3, {2: {"users": 3}})
    assert sorted(row["key"] for row in read(key_from=b"b").rows) == ["bob", "cat"]
    first = read(rows_max=2)
    second = read(rows_max=2, after=first.last)
    assert (len(first.rows), len(second.rows), second.last, read(rows_max=3).last) == (2, 1, None, None)
    assert first.rows + second.rows == read().rows


def test_tables_and_what_cannot_be_read() -> None:
    """The rows of a table have values. An instance without tasks has no rows. The store of a join and an unknown store
    raise a ConfigError."""
    builder = StreamsBuilder()
    stream, table = builder.stream("in"), builder.table("users")
    stream.join(table, lambda a, b: b).to("out")
    stream.join(builder.stream("other"), lambda a, b: b, JoinWindows.of(5), name="j").to("out2")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("users", key=b"ann", value=b'{"city":"Oslo"}')
    response = read_store({0: driver.task}, "users", StoreQuery(from_ms=5))
    assert response.rows == [{"partition": 0, "key": "ann", "value": {"city": "Oslo"}}]
    response, _ = rest_of(read_in_slices({}, "users", StoreQuery(), driver.topology, {}))
    assert (response.rows, response.position) == ([], {})
    with pytest.raises(ConfigError, match="records of a join"):
        read_store({0: driver.task}, "j-left", StoreQuery())
    with pytest.raises(ConfigError, match="store 'x'"):
        read_store({0: driver.task}, "x", StoreQuery())


A, B, C = "http://a", "http://b", "http://c"


def table(*entries: tuple[str, Registration | None]) -> Instances:
    """The topic's records in their order."""
    made = Instances()
    for offset, (url, registration) in enumerate(entries):
        made.apply(offset, url.encode(), None if registration is None else encode_registration(registration), 0)
    return made


def test_the_highest_epoch_owns_a_partition() -> None:
    """A zombie that repeats its old claim does not become the owner again."""
    made = table(
        (A, Registration("a", {0: 3})),
        (B, Registration("b", {0: 4})),
        (A, Registration("a", {0: 3})),
    )
    assert made.claims() == {0: Claim(B, 4)}
    assert partition_owners(made, A, Registration("a", {0: 3}, 1)).others == {B: [0]}
    assert partition_owners(made, B, Registration("b", {0: 4}, 1)).own == {0}


def test_a_partition_that_is_being_restored_is_missing_until_it_runs() -> None:
    """A claim to restore counts from when it was made: against an owner from before, not against one from after."""
    restoring = ((A, Registration("a", {0: 3}, 2)), (B, Registration("b", {}, 2, [0])))
    parts = partition_owners(table(*restoring, (A, Registration("a", {0: 3}, 2))), C, Registration("c", {1: 1}, 2))
    assert parts == (frozenset({1}), {}, {0: f"being restored by {B}"}, {B: [0]})
    done = table(*restoring, (C, Registration("c", {0: 5}, 2)))
    assert done.claims() == {0: Claim(C, 5)}
    assert partition_owners(table(), A, Registration("a", {}, 1, [0])).missing == {0: f"being restored by {A}"}


def test_an_instance_that_left_owns_no_partition() -> None:
    """An instance that has sent its tombstone is not listed, and its partitions are missing until another instance has
    them."""
    made = table((A, Registration("a", {0: 3}, 1)), (A, None))
    assert (made.urls(), partition_owners(made, B, Registration("b", {}, 1)).missing) == ([], {0: "no instance has it"})


def test_the_number_of_partitions_is_learned_from_others() -> None:
    """An instance that has not seen the topics yet learns from others how many partitions it lacks. Without others it
    knows none."""
    parts = partition_owners(table((B, Registration("b", {0: 1}, 3))), A, Registration("a"))
    assert (parts.others, sorted(parts.missing)) == ({B: [0]}, [1, 2])
    assert partition_owners(table(), A, Registration("a")) == (frozenset(), {}, {}, {})


DEEP = b'{"x":' + b"[" * 100_000


def test_records_that_cannot_be_read_are_skipped() -> None:
    """They do not change the known instances."""
    made = table((A, Registration("a", {0: 3}, 1)))
    for key, value in ((b"\xff", b"{}"), (A.encode(), b"{"), (A.encode(), b'{"instance": 3}'), (A.encode(), DEEP)):
        made.apply(9, key, value, 0)
    assert made.claims() == {0: Claim(A, 3)}


def test_a_killed_instances_record_is_removed_once_others_have_its_partitions() -> None:
    """It is removed only after a delay, never while the instance owns a partition, and never by the instance itself."""
    made = table(
        (A, Registration("a", {0: 1}, 2)), (B, Registration("b", {0: 2}, 2)), (C, Registration("c", {1: 1}, 2))
    )
    assert made.expired(FORGET_MS - 1, []) == []
    assert made.expired(FORGET_MS, []) == [A]
    assert made.expired(FORGET_MS, [A]) == []
    assert "http://b" in repr(made)


class Failing(InstanceRegistry):
    """A registry whose first attempt fails with an error."""

    tries = 0
    error: PenstockError

    async def _run_once(self) -> None:
        self.tries += 1
        if self.tries == 1:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "wait_ms"),
    [
        (DeliveryTimeout("not acknowledged within 120000 ms"), RETRY_MS),
        (AuthorizationFailed("topic app-instances"), REGISTER_MS),
    ],
)
def test_a_failed_registration_is_tried_again(error: PenstockError, wait_ms: int) -> None:
    """A registration that fails in a long outage, or for lack of a right, is sent again after a wait."""

    async def outage() -> list[int]:
        registry = Failing(KafkaSettings(), "app-instances", 1, lambda: Registration("a"))
        registry.error = error
        running = asyncio.create_task(registry.run(A))
        tries = []
        for _ in range(2):
            await virtual_time.let_pass(0.75 * wait_ms / 1000)
            tries.append(registry.tries)
        running.cancel()
        return tries

    assert virtual_time.run(outage()) == [1, 2]


async def test_an_unsent_goodbye_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Kafka does not answer, the registry ends after GOODBYE_MS, and not after the producer's delivery timeout."""
    monkeypatch.setattr("penstock.shared.streams.runtime.instances.GOODBYE_MS", 10)
    async with FakeCluster() as cluster, asyncio.timeout(10):
        cluster.create_topic("instances")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        running = asyncio.create_task(InstanceRegistry(kafka, "instances", 1, lambda: Registration("a")).run(A))
        while not cluster.records("instances"):  # noqa: ASYNC110 - the registry is another task
            await asyncio.sleep(0)
        cluster.control(Api.PRODUCE, Drop())
        running.cancel()
        await asyncio.wait({running})
