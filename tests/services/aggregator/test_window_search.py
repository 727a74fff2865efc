"""Windows by keys and time as they are answered over HTTP: from the whole of a short changelog, or page by page."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.api.keys import StoreQuestion
from penstock.api.problem import Problem
from penstock.services.aggregator.pages import row_pages
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.window_search import CLOSED, FINDING_MAX, OPEN, WindowSearch
from penstock.shared.common.continuation import RowPlace, WrongContinuation
from penstock.shared.common.errors import ConfigError, KafkaTimeout
from penstock.shared.testing.fake_broker import FakeCluster
from tests.services.aggregator.closed_logs import STORE, Log
from tests.services.aggregator.test_closed_pages import write

LOGS = (Log.of([[(f"k{t}", 100 - t)] for t in range(5)]), Log.of([[("x", 5), ("y", 6)]]))
CLOSED_WINDOWS = [(p, *one) for p, log in enumerate(LOGS) for one in log.closed]
OPEN_KEYS = [b"ann", b"bob", b"cat"]


def asked(continuation: str | None = None, rows_max: int = 2, **narrowing: Any) -> Any:
    nothing: dict[str, Any] = dict.fromkeys(("key", "key_from", "key_to", "from_ms", "to_ms"))
    return {**nothing, "rows_max": rows_max, "continuation": continuation, **narrowing}


def search(cluster: FakeCluster | None = None, records_max: int = 10, **more: Any) -> WindowSearch:
    """Whose tasks hold a window of each open key, page by page."""
    values: dict[str, Any] = {
        "topology": "a:b",
        "streams": {"application_id": "app"},
        "queries": {"changelog_records_max": records_max, **more},
    }
    if cluster is not None:
        values["kafka"] = {"bootstrap_servers": cluster.bootstrap_servers}

    async def read_store(store: str, question: StoreQuestion) -> Any:
        pages = row_pages("app", store, question)
        after = pages.place(question["continuation"])
        first = 0 if after is None else OPEN_KEYS.index(after.key) + 1
        page = OPEN_KEYS[first : first + question["rows_max"]]
        rows = [{"partition": 0, "key": key.decode(), "start": 200, "end": 201, "n": 7} for key in page]
        is_last = first + len(page) == len(OPEN_KEYS)
        more = None if is_last else pages.text(RowPlace(0, page[-1], 200))
        return {"rows": rows, "position": {0: {"in": 9}}, "continuation": more}

    return WindowSearch(AggregatorSettings(**values), read_store)


async def all_pages(searching: WindowSearch, status: Any, **narrowing: Any) -> list[Any]:
    pages, continuation = list[Any](), None
    while True:
        pages.append(await searching.find(STORE, status, asked(continuation, **narrowing)))
        if (continuation := pages[-1]["continuation"]) is None:
            return pages


def of(pages: list[Any], status: str) -> list[tuple[int, str, int, int]]:
    rows = [one for page in pages for one in page["windows"] if one["status"] == status]
    return [(one["partition"], one["key"], one["start_ms"], one["end_ms"]) for one in rows]


async def test_a_short_changelog_is_read_as_a_whole() -> None:
    """The windows that begin first come first, whatever partition they are of."""
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        pages = await all_pages(search(cluster, records_max=1_000), "closed")
    assert of(pages, "closed") == sorted(CLOSED_WINDOWS, key=lambda one: one[2])


@pytest.mark.parametrize("status", ["open", "closed", "all"])
async def test_a_long_one_is_read_page_by_page(status: Any) -> None:
    """What the tasks hold first, then what was closed, by partition in that order; each window once."""
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        pages = await all_pages(search(cluster), status)
    opened = [(0, key.decode(), 200, 201) for key in OPEN_KEYS]
    assert of(pages, "open") == ([] if status == "closed" else opened)
    assert of(pages, "closed") == ([] if status == "open" else CLOSED_WINDOWS)
    assert all(len(page["windows"]) <= 2 for page in pages)
    if status != "closed":
        assert pages[0]["windows"][0] == {
            "partition": 0,
            "key": "ann",
            "start_ms": 200,
            "end_ms": 201,
            "status": "open",
            "revision": 0,
            "results": {"n": 7},
        }
        assert pages[0]["position"] == {0: {"in": 9}}


async def test_a_key_of_a_long_one() -> None:
    """Pages without a row of it lead on to those that have one."""
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        pages = await all_pages(search(cluster, records_max=2), "closed", key="x")
    assert of(pages, "closed") == [(1, "x", 2, 5)]
    assert [len(page["windows"]) for page in pages] == [0, 1]


@pytest.mark.parametrize("begins", ["", OPEN, CLOSED])
async def test_a_continuation_of_another_question_is_refused(begins: str) -> None:
    """Whatever it goes on with."""
    with pytest.raises(WrongContinuation):
        await search().find(STORE, "all", asked(begins + "abc"))
    async with FakeCluster() as cluster:
        await write(cluster, *LOGS)
        searching = search(cluster, records_max=1_000 if not begins else 10)
        status: Any = "closed" if begins == CLOSED else "all"
        page = await searching.find(STORE, status, asked())
        assert page["continuation"] is not None
        assert page["continuation"].startswith(begins)
        with pytest.raises(WrongContinuation):
            await searching.find(STORE, status, asked(page["continuation"], key="k1"))


async def test_what_is_not_read_in_time_names_the_limits() -> None:
    """Its own setting, and the one that makes the reading needless."""
    said = r"^app-changelog: not read within queries.changelog_timeout_ms=1. \d+ records .*set streams.lake"
    log = Log.of([[("k" * 300_000, t)] for t in range(10)])
    async with FakeCluster() as cluster:
        await write(cluster, log)
        with pytest.raises(KafkaTimeout, match=said):
            await search(cluster, records_max=1_000, changelog_timeout_ms=1).find(STORE, "closed", asked())


async def test_few_questions_at_once() -> None:
    """Each reads much: the next one is told to come again."""
    searching: Any = search()
    held = asyncio.Event()

    async def never(*_: Any) -> Any:
        await held.wait()

    searching._whole = never
    tasks = [asyncio.create_task(searching.find(STORE, "all", asked())) for _ in range(FINDING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Problem, match="such questions"):
        await searching.find(STORE, "all", asked())
    held.set()
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("kind", ["table", "aggregate", "join"])
async def test_a_store_without_windows(kind: str) -> None:
    """A table's rows are asked for elsewhere."""
    table = STORE.__class__(**{f: getattr(STORE, f) for f in STORE.__struct_fields__} | {"kind": kind})
    with pytest.raises(ConfigError, match="no store with windows 's'"):
        await search().find(table, "all", asked())
