"""Closed windows over HTTP, from a lake and a long changelog on a real broker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from penstock.api.streams.query_params import StoreQueryParams
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.window_search import WindowSearch
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import decode_entry
from tests.lake_tables import progress, write_closed, write_state
from tests.services.aggregator.closed_logs import STORE, Log, records
from tests.shared_broker import Broker

COMMITS, COMPACTED, KEYS = 400, 300, 97
WINDOWS_A_COMMIT = 150
RECORDS_A_COMMIT = WINDOWS_A_COMMIT + 3
TICK_S, HELD_UP_MAX_S = 0.005, 0.5
"""A tick later than this is too late; the limit is for a machine with other work."""


async def test_a_key_of_a_lake_and_a_long_changelog(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """Of 120,000 windows, most are in the lake and the others in the changelog.

    A key's windows come page by page, each once, ordered by start, and the event loop is not blocked meanwhile.
    """
    logs = [
        Log.of(
            [
                [(f"k{(p + i) % KEYS}", i * 10) for i in range(c * WINDOWS_A_COMMIT, (c + 1) * WINDOWS_A_COMMIT)]
                for c in range(COMMITS)
            ]
        )
        for p in (0, 1)
    ]
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    changelog = f"{topic_name}-changelog"
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(changelog, 2)])
        topic_id = (await admin.describe_topics([changelog]))[changelog].topic_id
    async with Producer(settings) as producer:
        for partition, log in enumerate(logs):
            delivery = await producer.send_many(records(log.entries, partition, changelog))
            assert await delivery.first_error() is None
    for partition, log in enumerate(logs):
        compact(tmp_path, topic_name, partition, log, topic_id)

    async def read_store(store: str, query: StoreQueryParams) -> Any:
        raise AssertionError("the tasks are not asked")

    values: Any = {
        "topology": "a:b",
        "kafka": settings.model_dump(),
        "streams": {"application_id": topic_name, "lake": str(tmp_path)},
    }
    search = WindowSearch(AggregatorSettings(**values), read_store)

    async def all_of(**narrowing: Any) -> tuple[list[Any], int]:
        nothing: dict[str, Any] = dict.fromkeys(("key_from", "key_to", "from_ms", "to_ms", "continuation"))
        query: Any = {**nothing, "key": "k5", "rows_max": 500, **narrowing}
        rows, pages = list[Any](), 0
        while True:
            page = await search.find(STORE, "closed", query)
            rows, pages = rows + page["windows"], pages + 1
            if page["continuation"] is None:
                return [(one["start_ms"], one["end_ms"], one["partition"], one["key"]) for one in rows], pages
            query["continuation"] = page["continuation"]

    gaps = list[float]()
    ticking = asyncio.create_task(_tick(gaps))
    rows, pages = await all_of()
    ticking.cancel()
    expected = sorted((start, end, p, key) for p, log in enumerate(logs) for key, start, end in log.closed)
    assert rows == [one for one in expected if one[3] == "k5"]
    assert pages == 3
    assert max(gaps) < HELD_UP_MAX_S
    from_ms = COMMITS * WINDOWS_A_COMMIT * 10 // 2
    late, _ = await all_of(from_ms=from_ms)
    assert late == [one for one in rows if one[1] >= from_ms]


def compact(root: Path, application: str, partition: int, log: Log, topic_id: str | None) -> None:
    """Write the lake as a compaction of the first commits leaves it, and windows of the next commit as of an
    interrupted compaction.
    """
    windows = log.closed[: (COMPACTED + 1) * WINDOWS_A_COMMIT]
    covered = 1 + COMPACTED * RECORDS_A_COMMIT
    rows = [
        {"key": key, "window_start": start, "window_end": end, "n": 1, "partition": partition, "topic_id": topic_id}
        | {"changelog_offset": 1 + number // WINDOWS_A_COMMIT * RECORDS_A_COMMIT + number % WINDOWS_A_COMMIT}
        for number, (key, start, end) in enumerate(windows)
    ]
    write_closed(root, application, STORE, rows)
    value = log.entries[covered - 1][1]
    assert value is not None
    of_run = [progress(partition, covered, decode_entry(value).body, epoch=1, topic_id=topic_id)]
    write_state(root, application, [STORE], of_run)


async def _tick(gaps: list[float]) -> None:
    """Record how long each tick takes."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        gaps.append(time.monotonic() - began)
