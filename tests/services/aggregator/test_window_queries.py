"""Queries of windows by keys and time: from lake and changelog, or the open windows of the tasks."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.http.problem import Problem
from penstock.api.streams.query_params import StoreQueryParams
from penstock.services.aggregator import changelog_tail
from penstock.services.aggregator.changelog_tail import TailChange, TailChanges, decode_tail_change
from penstock.services.aggregator.continuations import row_pages
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.stored_windows import (
    StoredWindow,
    closed_window_of_lake,
    stored_window_results,
    stored_windows_of_partition,
)
from penstock.services.aggregator.window_search import FINDING_MAX, WindowSearch, run_search_in_thread
from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.clients.producer import Producer
from penstock.shared.common.continuation_codec import WrongContinuation
from penstock.shared.common.errors import ConfigError, DataError, KafkaTimeout
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake.window_queries import ClosedWindow
from penstock.shared.common.row_positions import RowPosition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Mean, Min
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.changelog.changelog_reader import Change, ChangelogReader, apply_one_by_one
from penstock.shared.streams.changelog.format import (
    DELETED,
    FINAL,
    LIVE,
    Progress,
    Takeover,
    decode_entry,
    encode_live,
    encode_progress,
    encode_takeover,
)
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.state_store import NEVER
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

    async def read_store(store: str, query: StoreQueryParams) -> Any:
        pages = row_pages("app", store, query)
        after = pages.decode(query["continuation"])
        first = 0 if after is None else OPEN_KEYS.index(after.key) + 1
        page = OPEN_KEYS[first : first + query["rows_max"]]
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


AGGREGATIONS: dict[str, Any] = {"n": Count(), "mean": Mean("x"), "least": Min("x"), "ids": CountDistinct("id")}
SCHEMAS = tuple(AggregationSchema.of(name, a) for name, a in AGGREGATIONS.items())
FOUR_RESULTS = StoreSchema("s", "session", "string", 10, 5, "on_close", "in", None, None, None, SCHEMAS)
ALWAYS = (-(2**62), 2**62)


def state(*records: dict[str, Any]) -> dict[str, Any]:
    """The state columns of these records, by name."""
    columns = {}
    for name, aggregation in AGGREGATIONS.items():
        made = aggregation.initial()
        for record in records:
            made = aggregation.add(made, record)
        for column, value in zip(aggregation.state_columns, aggregation.to_columns(made), strict=True):
            columns[f"{name}_{column.name}"] = value
    return columns


def tail_change(operation: bytes, start: int, end: int = 0, *records: dict[str, Any]) -> TailChange:
    packed = StateCodec(FOUR_RESULTS.state_columns()).pack(list(state(*records).values())) if records else b""
    return decode_tail_change(Change(operation, "s", b"k", start, end, packed, FOUR_RESULTS))


ONE, TWO = {"x": 4.0, "id": "a"}, {"x": 8.0, "id": "b"}


def test_results_are_the_aggregations_own() -> None:
    """The result of a state is the one that its aggregation forwards, and a missing column is None."""
    assert stored_window_results(FOUR_RESULTS, state(ONE, TWO)) == {"n": 2, "mean": 6.0, "least": 4.0, "ids": 2}
    assert stored_window_results(FOUR_RESULTS, state()) == {"n": 0, "mean": None, "least": None, "ids": 0}
    assert stored_window_results(FOUR_RESULTS, {"n_n": 3}) == {"n": 3, "mean": None, "least": None, "ids": None}


def test_internal_states_are_not_results() -> None:
    """The internal highest timestamp of a fixed-size window is not in the results, whether the
    window is open or closed.
    """
    own = AggregationSchema.of(LATEST, Latest())
    store = msgspec.structs.replace(FOUR_RESULTS, kind="tumbling", aggregations=(own, *SCHEMAS[:1]))
    assert stored_window_results(store, {"latest_ms_ms": 7, "n_n": 3}) == {"n": 3}
    row = ClosedWindow(0, 0, 9, "k", 5, "topic", {LATEST: 7, "n": 3})
    assert closed_window_of_lake(store, row) == StoredWindow(0, 0, 9, "closed", {"n": 3}, "k")


def test_results_of_closed_windows_equal_those_of_open_ones() -> None:
    """JSON in a table is decoded, and an aggregation that was added later is None."""
    listed = AggregationSchema.of("all", CollectList("x", 5))
    store = msgspec.structs.replace(FOUR_RESULTS, aggregations=(listed, *SCHEMAS[:2]))
    row = ClosedWindow(0, 0, 9, b"k", 5, "topic", {"all": "[1,null]", "n": 3})
    assert closed_window_of_lake(store, row).results == {"all": [1, None], "n": 3, "mean": None}


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_a_result_that_is_not_json_is_an_error(text: str) -> None:
    """A result that is not JSON, or nested too deeply, is a DataError with the aggregation's name."""
    store = msgspec.structs.replace(FOUR_RESULTS, aggregations=(AggregationSchema.of("all", CollectList("x", 5)),))
    with pytest.raises(DataError, match="'all'"):
        closed_window_of_lake(store, ClosedWindow(0, 0, 9, b"k", 5, "topic", {"all": text}))
    with pytest.raises(DataError, match="'all'"):
        stored_window_results(store, {"all_json": text.encode(), "all_n": 1})


@pytest.mark.parametrize("sketch", [b"", b"x", state(ONE)["ids_hll"][:-1], bytes(40)])
def test_a_sketch_that_cannot_be_decoded_is_an_error(sketch: bytes) -> None:
    """Bytes that are not an HLL are a DataError with the aggregation's name."""
    with pytest.raises(DataError, match="'ids' cannot be decoded: "):
        stored_window_results(FOUR_RESULTS, state(ONE) | {"ids_hll": sketch})


def test_the_tail_overrides_the_snapshot() -> None:
    """Windows that the tail changes, closes or removes are taken from the tail, and the others from the snapshot."""
    rows = [(0, 0, 5), (0, 50, 60), (0, 100, 110), (0, 200, 205), (1, 0, 9)]
    live = [{"partition": p, "key": b"k", "start_ms": s, "end_ms": e, "state": state(ONE)} for p, s, e in rows]
    tail = [
        tail_change(LIVE, 50, 70, ONE, TWO),
        tail_change(FINAL, 0, 5, ONE),
        tail_change(DELETED, 100),
        tail_change(LIVE, 300, 300, TWO),
    ]
    found = sorted(
        stored_windows_of_partition(0, FOUR_RESULTS, live, tail, ALWAYS, NEVER), key=lambda one: one.start_ms
    )
    assert [(one.start_ms, one.end_ms, one.status, one.results["n"]) for one in found] == [
        (0, 5, "closed", 1),
        (50, 70, "open", 2),
        (200, 205, "open", 1),
        (300, 300, "open", 1),
    ]
    assert [one.start_ms for one in stored_windows_of_partition(0, FOUR_RESULTS, live, tail, (65, 250), NEVER)] == [
        50,
        200,
    ]


def test_a_kept_closed_window_is_reported_once() -> None:
    """The live row of a sliding window after its final row is not a separate window."""
    tail = [tail_change(FINAL, 0, 5, ONE), tail_change(LIVE, 0, 5, ONE)]
    assert [one.status for one in stored_windows_of_partition(0, FOUR_RESULTS, [], tail, ALWAYS, 6)] == ["closed"]


def test_a_kept_closed_window_of_the_snapshot_is_not_open() -> None:
    """A live row of the snapshot that ends before the time from which windows are open is left out."""
    live = [{"partition": 0, "key": b"k", "start_ms": end - 5, "end_ms": end, "state": state(ONE)} for end in (19, 20)]
    assert [one.end_ms for one in stored_windows_of_partition(0, FOUR_RESULTS, live, [], ALWAYS, 20)] == [20]


def entries(store: StoreSchema, commit: int, live: bytes) -> list[tuple[bytes | None, bytes]]:
    """A commit of one live window from 0 to 5 with this state, written with this schema."""
    progress = Progress("app", "exactly_once", {}, {}, {}, {}, (store,), 0)
    return [(b"k", encode_live(0, 1, commit, 0, 5, live)), (None, encode_progress(1, commit, progress))]


def test_a_tail_is_decoded_by_the_schema_that_wrote_it() -> None:
    """Windows written before an aggregation was added have no result for it."""
    whole = list(state(ONE).values())
    old = msgspec.structs.replace(FOUR_RESULTS, aggregations=SCHEMAS[:1] + SCHEMAS[2:])
    kept = [v for c, v in zip(FOUR_RESULTS.state_columns(), whole, strict=True) if not c.name.startswith("mean_")]
    log = [(None, encode_takeover(1, Takeover("app", "here", 0)))]
    log += entries(old, 1, StateCodec(old.state_columns()).pack(kept))
    seen: list[TailChange] = []
    reader = ChangelogReader(apply_one_by_one(lambda change: seen.append(decode_tail_change(change))))
    for offset, (key, value) in enumerate(log):
        reader.feed_record(offset, key, value)
    (found,) = stored_windows_of_partition(0, FOUR_RESULTS, [], seen, ALWAYS, NEVER)
    assert found.results == {"n": 1, "mean": None, "least": 4.0, "ids": 1}
    for offset, (key, value) in enumerate(
        entries(FOUR_RESULTS, 2, StateCodec(FOUR_RESULTS.state_columns()).pack(whole)), len(log)
    ):
        reader.feed_record(offset, key, value)
    (found,) = stored_windows_of_partition(0, FOUR_RESULTS, [], seen, ALWAYS, NEVER)
    assert found.results == {"n": 1, "mean": 4.0, "least": 4.0, "ids": 1}


def test_windows_of_several_keys_are_independent() -> None:
    """Changes of one key do not affect other keys' windows, and each window has its key."""
    live = [{"partition": 0, "key": key, "start_ms": 0, "end_ms": 4, "state": state(ONE)} for key in (b"k", b"l")]
    found = stored_windows_of_partition(
        0, FOUR_RESULTS, live, [tail_change(FINAL, 0, 4, ONE, TWO), tail_change(LIVE, 20, 30, TWO)], ALWAYS, NEVER
    )
    assert sorted((one.key, one.start_ms, one.status, one.results["n"]) for one in found) == [
        ("k", 0, "closed", 2),
        ("k", 20, "open", 1),
        ("l", 0, "open", 1),
    ]
    assert stored_windows_of_partition(0, FOUR_RESULTS, live, [tail_change(FINAL, 0, 4, ONE)], (5, 9), NEVER) == []


PACKED = StateCodec(STORE.state_columns()).pack([1])


def change(operation: bytes, start: int, end: int = 0, key: bytes = b"k", store: str = "s") -> Change:
    return Change(operation, store, key, start, end, b"" if operation == DELETED else PACKED, STORE)


def kept(
    *changes: Change, time_range: tuple[int, int] = (100, 200), keys: KeyRange | None = None
) -> list[tuple[str, int]]:
    """The kind and end of the kept changes."""
    own = TailChanges(keys or KeyRange.of(), time_range, "s")
    for one in changes:
        own.keep(one)
    names = {LIVE: "live", FINAL: "final", DELETED: "deleted"}
    return [(names[kept_change.operation], kept_change.end) for kept_change in own]


def test_the_newest_change_of_each_window_is_kept() -> None:
    """Only the newest change of a window is kept.

    A closed window is not open, and windows with one start may be closed with several ends.
    """
    assert kept(*(change(LIVE, 90, 90 + i) for i in range(50))) == [("live", 139)]
    assert kept(change(LIVE, 90, 120), change(FINAL, 90, 120)) == [("final", 120)]
    closed_twice = (change(FINAL, 90, 120), change(LIVE, 90, 130), change(FINAL, 90, 140), change(LIVE, 90, 150))
    assert kept(*closed_twice) == [("final", 120), ("final", 140), ("live", 150)]
    assert kept(change(LIVE, 90, 120), change(DELETED, 90)) == [("deleted", 0)]
    assert kept(change(LIVE, 90, 120), change(LIVE, 90, 120, b"other")) == [("live", 120)] * 2


def test_changes_outside_the_query_are_not_kept() -> None:
    """Windows outside the queried times, other keys and other stores are not kept."""
    assert kept(change(LIVE, 90, 99), change(FINAL, 90, 99), change(LIVE, 201, 250), change(DELETED, 201)) == []
    assert kept(change(LIVE, 200, 250), change(FINAL, 90, 100)) == [("live", 250), ("final", 100)]
    assert kept(change(LIVE, 100, 110, store="t")) == []
    assert kept(change(LIVE, 100, 110), change(LIVE, 100, 120, b"j"), keys=KeyRange.of("k")) == [("live", 110)]


def test_a_busy_key_can_be_queried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit applies to windows, not to changes; above it the query is a ConfigError, and a
    shorter time has fewer windows.
    """
    monkeypatch.setattr(changelog_tail, "CHANGES_MAX", 3)
    grown = [change(LIVE, start, start + i) for start in (100, 120, 140) for i in range(9)]
    assert len(kept(*grown)) == 3
    old = [change(FINAL, start, start + 5) for start in range(90)]
    assert len(kept(*old, *grown)) == 3
    with pytest.raises(ConfigError, match="over 3 windows"):
        kept(*grown, change(LIVE, 160, 170))
    assert len(kept(*grown, change(LIVE, 160, 170), time_range=(100, 150))) == 3


WAIT_S = 20


async def test_a_search_that_blocks_does_not_block_the_caller() -> None:
    """The caller's loop continues while the work blocks its own loop."""
    has_begun, may_end = threading.Event(), threading.Event()

    async def work() -> bool:
        has_begun.set()
        return may_end.wait(WAIT_S)

    async def beside() -> None:
        await asyncio.to_thread(has_begun.wait, WAIT_S)
        may_end.set()

    task = asyncio.create_task(beside())
    assert await run_search_in_thread(work)
    await task


async def test_an_error_of_a_search_is_raised_to_the_caller() -> None:
    """An error is raised to the caller unchanged."""

    async def work() -> None:
        raise KafkaTimeout("no response")

    with pytest.raises(KafkaTimeout, match="no response"):
        await run_search_in_thread(work)


async def test_a_search_is_cancelled_with_its_caller() -> None:
    """A cancelled caller cancels the work, whose clean-up runs."""
    has_begun, has_ended = threading.Event(), threading.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    task = asyncio.create_task(run_search_in_thread(work))
    await asyncio.to_thread(has_begun.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(has_ended.wait, WAIT_S)


def test_a_search_that_has_not_begun_is_cancelled_with_its_caller() -> None:
    """If no thread was free until the caller was cancelled, the work never begins."""
    begun = threading.Event()

    async def work() -> None:
        begun.set()

    async def cancel_before_a_thread_is_free() -> None:
        loop = asyncio.get_running_loop()
        is_free = threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        occupied = loop.run_in_executor(None, is_free.wait, WAIT_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await run_search_in_thread(work)
        is_free.set()
        await occupied
        await asyncio.to_thread(bool)  # the only thread has run the search before

    asyncio.run(cancel_before_a_thread_is_free())
    assert not begun.is_set()
