"""Windows of running tasks are counted, ordered, paged and found by key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.aggregator.key_filter import KeyFilter
from penstock.services.aggregator.live_state import describe_live_stores, open_windows
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state.rocksdb import StoredRow, _unpack_row
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowRule
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


def store_of(name: str) -> WindowStore:
    """A store of sessions with a count and an object."""
    columns = StateColumns([Count(), Aggregate(dict, lambda state, value: state, lambda a, b: a)])
    return WindowStore(name, WindowRule("session", 10), columns, text_keys=False)


def tasks() -> dict[int, Any]:
    """Two partitions with sessions of three keys, and a third that is restoring."""
    held: dict[int, Any] = {2: SimpleNamespace(task=None)}
    for partition, keys in ((0, [b"ann", b"bob"]), (1, [b"anna"])):
        store = store_of("sessions")
        for i, key in enumerate(keys):
            store.load(key, i * 10, i * 10 + 5 + partition, [i, {"x": b"y"}])
        held[partition] = SimpleNamespace(task=task_of(store, "bytes"))
    return held


def task_of(
    store: WindowStore, key_type: str, kind: str = "session", names: Sequence[str] = ("count", "objects")
) -> Any:
    builder = SimpleNamespace(
        schema=SimpleNamespace(key=key_type, kind=kind, aggregations=[SimpleNamespace(name=name) for name in names]),
        aggregations=[
            SimpleNamespace(result=lambda state: state),
            SimpleNamespace(result=lambda state: [state]),
        ][: len(names)],
    )
    return SimpleNamespace(stores={store.name: store}, topology=SimpleNamespace(stores={store.name: builder}))


def found(store: str | None, key: str, limit: int) -> list[Any]:
    return list(open_windows(tasks(), store, KeyFilter(key), limit).windows)


def test_stores_are_counted_by_partition() -> None:
    """Rows are counted by partition, and a restoring task has none yet."""
    assert describe_live_stores(tasks()) == [{"store": "sessions", "rows": {"0": 2, "1": 1}, "total": 3}]


def test_windows_are_ordered_by_end_and_found_by_key() -> None:
    """Windows of all partitions are returned up to the limit, the latest end first."""
    assert [w["key"] for w in found(None, "", 10)] == ["bob", "anna", "ann"]
    assert [w["key"] for w in found("sessions", "an", 10)] == ["anna", "ann"]
    assert [w["key"] for w in found(None, "", 1)] == ["bob"]
    assert found("other", "", 10) == []
    (row,) = found(None, "bob", 10)
    assert (row["partition"], row["start_ms"], row["end_ms"], row["results"]) == (
        0,
        10,
        15,
        {"count": 1, "objects": [{"x": "y"}]},
    )


@pytest.mark.parametrize("name", [None, "sessions"])
def test_a_store_without_windows_has_none(name: str | None) -> None:
    """The rows of a table are not windows, also if the table is named."""
    store = store_of("sessions")
    store.load(b"ann", 0, 0, [1, {}])
    held: dict[int, Any] = {0: SimpleNamespace(task=task_of(store, "bytes", "table"))}
    assert open_windows(held, name, KeyFilter(""), 10) == ([], None, 0)


def test_a_closed_sliding_window_is_not_open() -> None:
    """A sliding window that is closed and kept for later windows is not found, neither by search nor by its key.

    The results of an open one lack the highest timestamp, which is not the user's.
    """
    store = WindowStore("s", WindowRule("sliding", 10), StateColumns([Latest(), Count()]), text_keys=True)
    store.load("k", 10, 20, [20, 1])
    store.load("k", 21, 31, [31, 1])
    store.begin(31, 31)
    held: Any = {0: SimpleNamespace(task=task_of(store, "string", names=(LATEST, "count")))}
    for search in ("", "k"):
        (row,) = open_windows(held, None, KeyFilter(search), 10).windows
        assert (row["start_ms"], row["results"]) == (21, {"count": [1]})


def test_pages_of_windows() -> None:
    """The pages contain each window once, the latest end first."""
    seen, last = [], None
    while True:
        page = open_windows(tasks(), None, KeyFilter(""), 1, last)
        seen += [window["key"] for window in page.windows]
        if (last := page.last) is None:
            break
    assert seen == ["bob", "anna", "ann"]


def test_an_exact_key_is_found_in_a_large_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limited number of rows is searched and the others are counted, but an exact key is always found."""
    monkeypatch.setattr("penstock.services.aggregator.live_state.ROWS_LOOKED_AT_MAX", 3)
    for key_type, keys in (
        ("string", ["7", *"abcd", "ee"]),
        ("bytes", [bytes(3) + b"\x07", *(b"a%d" % i for i in range(4)), b"ee"]),
    ):
        store = store_of("s")
        for i, key in enumerate(reversed(keys)):
            store.load(key, i, i, [1, {}])
        held: Any = {0: SimpleNamespace(task=task_of(store, key_type))}
        for search, count in (("", 3), ("ee", 1), ("7", 1), ("e", 1), ("a", 1 if key_type == "string" else 2)):
            page = open_windows(held, None, KeyFilter(search), 10)
            assert (len(page.windows), page.unseen) == (count, 3)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_an_exact_key_of_many_windows_is_searched_page_by_page(
    is_on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has the next windows of the key, also if many overlap. It reads few others, also on disk."""
    monkeypatch.setattr("penstock.services.aggregator.live_state.ROWS_LOOKED_AT_MAX", 1)
    monkeypatch.setattr("penstock.shared.streams.state.rocksdb.PAGE_ROWS", 1)
    read = []

    def is_open(row: Any) -> bool:
        read.append(row)
        return True

    monkeypatch.setattr("penstock.services.aggregator.live_state.is_open", is_open)
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().hopping_window(100, 5, 1_000)
    windows.aggregate("s", n=Count()).on_close().to("out")
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 << 20, cache_bytes_max=0)
    driver = TopologyTestDriver(builder.build(), state=state if is_on_disk else None)
    for key in (b"k", b"other"):
        driver.pipe_columns("in", [(key, b"{}", at) for at in range(15, 500, 5)])
    unpacked = []

    def unpack(value: bytes) -> StoredRow:
        unpacked.append(value)
        return _unpack_row(value)

    monkeypatch.setattr("penstock.shared.streams.state.rocksdb._unpack_row", unpack)
    held: Any = {0: SimpleNamespace(task=driver.task)}
    starts: list[int] = []
    last, pages = None, 0
    while True:
        page = open_windows(held, None, KeyFilter("k"), 7, last)
        starts += [window["start_ms"] for window in page.windows if window["key"] == "k"]
        pages += 1
        if (last := page.last) is None:
            break
    driver.close()
    assert starts == list(range(495, -1, -5))
    assert max(len(read), len(unpacked)) <= pages * (7 + 2 + 1)


@pytest.mark.parametrize(("searched", "windows", "unseen"), [(None, 4, 8), ("s", 4, 2), ("none", 0, 0)])
def test_all_searched_stores_share_the_limit(
    searched: str | None, windows: int, unseen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search does not block the event loop longer with more partitions or stores."""
    monkeypatch.setattr("penstock.services.aggregator.live_state.ROWS_LOOKED_AT_MAX", 4)
    held: dict[int, Any] = {}
    for partition in range(2):
        task = task_of(store_of("s"), "string")
        other = task_of(store_of("t"), "string")
        for store in (task.stores["s"], other.stores["t"]):
            for i in range(3):
                store.load("abc"[i], i, i, [1, {}])
        task.stores |= other.stores
        task.topology.stores |= other.topology.stores
        held[partition] = SimpleNamespace(task=task)
    page = open_windows(held, searched, KeyFilter(""), 10)
    assert (len(page.windows), page.unseen) == (windows, unseen)


def test_a_large_store_gets_the_rows_that_small_stores_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search reads as many rows as it may, whatever the order and the sizes of the stores."""
    monkeypatch.setattr("penstock.services.aggregator.live_state.ROWS_LOOKED_AT_MAX", 9)
    held: dict[int, Any] = {}
    for partition, size in enumerate((8, 0, 2)):
        store = store_of("s")
        for i in range(size):
            store.load(b"%d" % i, i, i, [1, {}])
        held[partition] = SimpleNamespace(task=task_of(store, "bytes"))
    page = open_windows(held, None, KeyFilter(""), 10)
    assert (len(page.windows), page.unseen) == (9, 1)


@pytest.mark.parametrize(
    ("typed", "found", "passed_over"),
    [
        ("", ["ann", b"\xff"], []),
        ("nn", ["ann", b"ann"], ["bob", b"NN"]),
        ("\\xff", [b"a\xff"], [b"a\xfe"]),
        ('{"user": 5}', ['{"user": 5}', b'{"user":5}', '{ "user" :5.0}'], ['{"user": 6}', '{"user": 5, "a": 1}']),
        ("[1, 2]", [b"[1,2]"], [b"[2,1]", b"[" * 100_000]),
        ("[" * 100_000, [b"[" * 100_000], [b"[1,2]"]),
        ('{"user"', ['{"user": 5}'], ["user"]),
        ("12", ["12", "a12", bytes(3) + b"\x0c", bytes(7) + b"\x0c"], [b"\x0c", "1", bytes(8)]),
        ("-2", [b"\xff\xff\xff\xfe", b"\xff" * 7 + b"\xfe"], [b"\xff" * 8]),
        ("9" * 30, ["9" * 31], [b"9"]),
    ],
)
def test_matching_keys(typed: str, found: list[str | bytes], passed_over: list[str | bytes]) -> None:
    """Text matches a part of a key, JSON matches its value in any notation, and a number also matches 4 or 8 bytes."""
    key_filter = KeyFilter(typed)
    assert [key for key in (*found, *passed_over) if key_filter.has(key)] == found


def test_whole_keys() -> None:
    """A filter has the exact keys to look up: the text in the store's key type, and a number
    as serializers write it.
    """
    assert KeyFilter("").exact("string") == []
    assert KeyFilter("7").exact("string") == ["7"]
    assert KeyFilter("7").exact("bytes") == [b"7", bytes(3) + b"\x07", bytes(7) + b"\x07"]
