"""Keys that are fetched together: of which stores, and that nothing else changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.fetch_ahead import FetchAhead
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


class Keeps(Processor):
    """A processor with its own store."""

    def process(self, record: Record) -> None:
        self.context.forward(record)


class Recorder(PersistentStore[Any]):
    """Records the keys that it is asked to fetch."""

    def __init__(self) -> None:
        self.requests: list[list[bytes | None]] = []

    def __repr__(self) -> str:
        return f"Recorder({self.requests})"

    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> Any:
        return key, start, end, states

    def fetch_ahead(self, keys: Any) -> None:
        self.requests.append(list(keys))


def columns_of(topic: str, keys: list[bytes | None]) -> Columns:
    count = len(keys)
    return Columns(topic, 0, keys, [b"{}"] * count, np.full(count, 5), np.arange(count))


def test_a_source_reaches_the_stores_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of records are fetched for the windows and tables below their topic, but not behind another topic, nor
    for the store of a processor."""
    monkeypatch.setattr("penstock.shared.streams.task.fetch_ahead.KEYS_AT_ONCE", 2)
    builder = StreamsBuilder()
    own = builder.add_store("own")
    clicks = builder.stream("clicks").process_values(Keeps, own)
    clicks.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    clicks.join(builder.table("users", name="users"), lambda click, user: user).to("joined")
    other = clicks.key_by(lambda record: record.value["user"], name="by-user")
    other.group_by_key().tumbling_window(10).aggregate("t", n=Count()).on_close().to("out2")
    topology = builder.build().of_application("app")
    stores = {name: Recorder() for name in topology.stores}
    ahead = FetchAhead(topology, stores)
    slices = ahead.slices(columns_of("clicks", [b"a", None, b"c"]))
    assert list(next(slices).keys) == [b"a", None]
    requests = {name: store.requests for name, store in stores.items() if store.requests}
    assert requests == {"s": [[b"a", None]], "users": [[b"a", None]]}
    assert [list(rest.keys) for rest in slices] == [[b"c"]]
    (internal,) = topology.internal_topics()
    list(ahead.slices(columns_of(internal, [b"x"])))
    assert (stores["t"].requests, stores["s"].requests[1:]) == ([[b"x"]], [[b"c"]])


def test_in_memory_there_is_nothing_to_fetch() -> None:
    """With state in memory, a batch is not sliced."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    columns = columns_of("in", [b"a"] * 5_000)
    assert list(FetchAhead(driver.task.topology, driver.task.stores).slices(columns)) == [columns]


def test_keys_are_in_memory_before_they_are_asked_for(tmp_path: Path) -> None:
    """Fetching ahead loads keys with their windows from disk. A value that is not a valid key is ignored."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(10, 5).aggregate("s", n=Count()).on_close().to("out")
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(builder.build(), state=state)
    for at in (1, 2, 30):
        driver.pipe_columns("in", [(b"k%d" % i, b"{}", at) for i in range(9)])
    store: Any = driver.task.stores["s"]
    count = len(store)
    assert "0 keys in memory" in repr(store)
    store.fetch_ahead([b"k1", None, b"k1", b"\xff", b"new"])
    assert "2 keys in memory" in repr(store)
    assert (len(store), {row.key for row in store.rows()}) == (count, {f"k{i}" for i in range(9)})
    assert [row.start for row in store.windows.rows_of("k1")] == [row.start for row in store.rows_of("k2")]
    driver.close()
