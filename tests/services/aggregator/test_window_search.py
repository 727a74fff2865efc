"""Windows by keys and time over HTTP: from lake and changelog, or the open windows of the tasks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.problem import Problem
from penstock.api.streams.key_params import StoreQueryParams
from penstock.services.aggregator.continuations import row_pages
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.window_search import FINDING_MAX, WindowSearch
from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.clients.producer import Producer
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import ConfigError, KafkaTimeout
from penstock.shared.common.row_positions import RowPosition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import decode_entry
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.testing.fake_broker import FakeCluster
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.lake_tables import LakeWriter, live, progress, write_closed, write_state
from tests.services.aggregator.closed_logs import STORE, TOPIC, Log, records

LOGS = (Log.of([[(f"k{t}", 100 - t)] for t in range(5)]), Log.of([[("x", 5), ("y", 6)]]))
CLOSED_WINDOWS = [(p, *one) for p, log in enumerate(LOGS) for one in log.closed]
OPEN_KEYS = [b"ann", b"bob", b"cat"]


async def write(cluster: FakeCluster, *logs: Log) -> None:
    cluster.create_topic(TOPIC, len(logs))
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
        for partition, log in enumerate(logs):
            assert await (await producer.send_many(records(log.entries, partition))).first_error() is None


async def described(cluster: FakeCluster) -> TopicDescription:
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        return (await admin.describe_topics([TOPIC]))[TOPIC]


def query_params(continuation: str | None = None, rows_max: int = 2, **narrowing: Any) -> Any:
    nothing: dict[str, Any] = dict.fromkeys(("key", "key_from", "key_to", "from_ms", "to_ms"))
    return {**nothing, "rows_max": rows_max, "continuation": continuation, **narrowing}


def search(cluster: FakeCluster | None = None, lake: Path | None = None, **more: Any) -> WindowSearch:
    """A search whose tasks return a window for each open key, page by page."""
    values: dict[str, Any] = {"topology": "a:b", "streams": {"application_id": "app"}, "queries": more}
    if lake is not None:
        values["streams"]["lake"] = str(lake)
    if cluster is not None:
        values["kafka"] = {"bootstrap_servers": cluster.bootstrap_servers}

    async def read_store(store: str, question: StoreQueryParams) -> Any:
        pages = row_pages("app", store, question)
        after = pages.decode(question["continuation"])
        first = 0 if after is None else OPEN_KEYS.index(after.key) + 1
        page = OPEN_KEYS[first : first + question["rows_max"]]
        rows = [{"partition": 0, "key": key.decode(), "start": 200, "end": 201, "n": 7} for key in page]
        is_last = first + len(page) == len(OPEN_KEYS)
        more = None if is_last else pages.encode(RowPosition(0, page[-1], 200))
        return {"rows": rows, "position": {0: {"in": 9}}, "continuation": more}

    return WindowSearch(AggregatorSettings(**values), read_store)


async def all_pages(searching: WindowSearch, status: Any, **narrowing: Any) -> list[Any]:
    pages, continuation = list[Any](), None
    while True:
        pages.append(await searching.find(STORE, status, query_params(continuation, **narrowing)))
        if (continuation := pages[-1]["continuation"]) is None:
            return pages


def windows_with_status(pages: list[Any], status: str) -> list[tuple[int, str, int, int]]:
    rows = [one for page in pages for one in page["windows"] if one["status"] == status]
    return [(one["partition"], one["key"], one["start_ms"], one["end_ms"]) for one in rows]


async def test_before_the_first_compaction_the_changelog_is_read(tmp_path: Path) -> None:
    """Without a snapshot all windows are read from the changelog, ordered by start."""
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        pages = await all_pages(search(cluster, tmp_path), "closed")
    assert windows_with_status(pages, "closed") == sorted(CLOSED_WINDOWS, key=lambda one: one[2])


@pytest.mark.parametrize("status", ["closed", "all"])
async def test_closed_windows_come_from_lake_and_tail(status: Any, tmp_path: Path) -> None:
    """Compacted windows are read from the lake and later ones from the changelog, each once."""
    value = LOGS[0].entries[-1][1]
    assert value is not None
    covered = 1 + 3 * 4  # This covers the takeover and three commits of four records.
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        topic_id = str((await described(cluster)).topic_id)
        rows = [progress(0, covered, decode_entry(value).body, epoch=1, topic_id=topic_id)]
        rows.append(live(0, "s", b"live", 3, 3, covered - 2, {"n_n": 1}))
        write_state(tmp_path, "app", [STORE], rows)
        closed = [
            {"key": key, "window_start": start, "window_end": end, "n": 1, "changelog_offset": offset}
            for offset, (key, start, end) in enumerate(LOGS[0].closed[:3])
        ]
        write_closed(tmp_path, "app", STORE, [{**c, "topic_id": topic_id} for c in closed])
        pages = await all_pages(search(cluster, tmp_path), status)
        (page,) = await all_pages(search(cluster, tmp_path), "all", key="k1", rows_max=9)
    assert sorted(windows_with_status(pages, "closed")) == sorted(CLOSED_WINDOWS)
    assert len(windows_with_status(pages, "open")) == (0 if status == "closed" else 4)
    window = {"partition": 0, "key": "k1", "start_ms": 96, "end_ms": 99, "status": "closed", "results": {"n": 1}}
    assert page["windows"] == [window]


@pytest.mark.parametrize("rows_max", [1, 9])
@pytest.mark.parametrize("compacted", ["nothing", "before closing", "all"])
@pytest.mark.parametrize("status", ["open", "closed", "all"])
async def test_a_sliding_window_is_open_or_closed(status: Any, compacted: str, rows_max: int, tmp_path: Path) -> None:
    """A closed sliding window, which the store keeps for later ones, is found once and is closed, wherever it is."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"k", value=b"{}", timestamp=20)
    driver.commit()
    half = len(driver.changelog)
    for at in (31, 35):
        driver.pipe("in", key=b"k", value=b"{}", timestamp=at)
    driver.commit()
    async with FakeCluster() as cluster:
        await write(cluster, Log(driver.changelog, []))
        writer = LakeWriter(tmp_path / "app", str((await described(cluster)).topic_id))
        if compacted != "nothing":
            writer.run({0: driver.changelog[: half if compacted == "before closing" else None]})
        (schema,) = driver.topology.schemas()
        searching = search(cluster, tmp_path)
        found, continuation = list[Any](), None
        while True:
            page = await searching.find(schema, status, query_params(continuation, rows_max))
            found += [(one["start_ms"], one["end_ms"], one["status"]) for one in page["windows"]]
            if (continuation := page["continuation"]) is None:
                break
    expected = [(10, 20, "closed"), (21, 31, "closed"), (25, 35, "open"), (32, 42, "open")]
    assert found == [one for one in expected if status in ("all", one[2])]


async def test_without_a_lake_open_windows_come_from_the_tasks() -> None:
    """Without a lake, open windows are read page by page from the tasks of all instances."""
    pages = await all_pages(search(), "open")
    assert windows_with_status(pages, "open") == [(0, key.decode(), 200, 201) for key in OPEN_KEYS]
    assert [len(page["windows"]) for page in pages] == [2, 1]
    window = {"partition": 0, "key": "ann", "start_ms": 200, "end_ms": 201, "status": "open", "results": {"n": 7}}
    assert pages[0]["windows"][0] == window
    assert pages[0]["position"] == {0: {"in": 9}}


@pytest.mark.parametrize("status", ["closed", "all"])
async def test_without_a_lake_there_are_no_closed_windows(status: Any) -> None:
    """Without a lake a query of closed windows is a 409 that names the required setting."""
    with pytest.raises(Problem, match="lake is not set") as problem:
        await search().find(STORE, status, query_params())
    assert problem.value.kind.status == 409


async def test_a_continuation_of_another_query_is_an_error(tmp_path: Path) -> None:
    """A continuation of another query is an error, with and without a lake."""
    with pytest.raises(WrongContinuation):
        await search().find(STORE, "open", query_params("abc"))
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        searching = search(cluster, tmp_path)
        page = await searching.find(STORE, "all", query_params())
        assert page["continuation"] is not None
        with pytest.raises(WrongContinuation):
            await searching.find(STORE, "all", query_params(page["continuation"], key="k1"))


async def test_a_slow_changelog_is_a_timeout(tmp_path: Path) -> None:
    """If the changelog is not read in time, the error names the setting and the number of
    records after the newest compaction.
    """
    message = r"^app-changelog.*queries.changelog_timeout_ms=1\."
    log = Log.of([[("k" * 300_000, t)] for t in range(10)])
    async with FakeCluster() as cluster:
        await write(cluster, log)
        with pytest.raises(KafkaTimeout, match=message):
            await search(cluster, tmp_path, changelog_timeout_ms=1).find(STORE, "closed", query_params())


async def test_concurrent_queries_are_limited(tmp_path: Path) -> None:
    """A query above the limit of concurrent queries is a Problem, since each reads much."""
    searching: Any = search(lake=tmp_path)
    held = asyncio.Event()

    async def never(*_: Any) -> Any:
        await held.wait()

    searching._windows_of_lake_and_changelog = never
    tasks = [asyncio.create_task(searching.find(STORE, "all", query_params())) for _ in range(FINDING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Problem, match="such queries"):
        await searching.find(STORE, "all", query_params())
    held.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("kind", ["table", "aggregate", "join"])
async def test_a_store_without_windows(kind: str) -> None:
    """A query of windows in a store without windows is a ConfigError."""
    table = STORE.__class__(**{f: getattr(STORE, f) for f in STORE.__struct_fields__} | {"kind": kind})
    with pytest.raises(ConfigError, match="windows 's'"):
        await search().find(table, "all", query_params())
