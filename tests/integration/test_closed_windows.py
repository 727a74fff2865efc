"""Closed windows from a long changelog on a real broker, without a lake."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from penstock.api.keys import StoreQuestion
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.window_search import CLOSED, WindowSearch
from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.settings import KafkaSettings
from tests.services.aggregator.closed_logs import STORE, Log, records

COMMITS, KEYS = 1_000, 97
WINDOWS_A_COMMIT = 150
TICK_S, HELD_UP_MAX_S = 0.005, 0.5
"""A tick that comes later than that was held up; the bound is that of a machine with other work."""


async def test_a_key_of_a_long_changelog(kafka: EmbeddedKafka, topic_name: str) -> None:
    """300,000 records in two partitions: a key's windows come page by page, each once, and the service goes on; those
    since a time need few of the records."""
    windows = COMMITS * WINDOWS_A_COMMIT
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
    async with Producer(settings) as producer:
        for partition, log in enumerate(logs):
            delivery = await producer.send_many(records(log.entries, partition, changelog))
            assert await delivery.first_error() is None

    async def read_store(store: str, question: StoreQuestion) -> Any:
        return {"rows": [], "position": {}, "continuation": None}

    values: Any = {
        "topology": "a:b",
        "kafka": settings.model_dump(),
        "streams": {"application_id": topic_name},
        "queries": {"changelog_records_max": 100_000},
    }
    search = WindowSearch(AggregatorSettings(**values), read_store)

    async def all_of(**narrowing: Any) -> tuple[list[Any], int]:
        nothing: dict[str, Any] = dict.fromkeys(("key_from", "key_to", "from_ms", "to_ms", "continuation"))
        question: Any = {**nothing, "key": "k5", "rows_max": 1_000, **narrowing}
        rows, pages = list[Any](), 0
        while True:
            page = await search.find(STORE, "all", question)
            rows, pages = rows + page["windows"], pages + 1
            if page["continuation"] is None:
                return rows, pages
            assert page["continuation"].startswith(CLOSED)
            question["continuation"] = page["continuation"]

    gaps = list[float]()
    ticking = asyncio.create_task(_tick(gaps))
    rows, pages = await all_of()
    ticking.cancel()
    expected = [(p, *one) for p, log in enumerate(logs) for one in log.closed if one[0] == "k5"]
    assert [(one["partition"], one["key"], one["start_ms"], one["end_ms"]) for one in rows] == expected
    assert pages > 3
    assert max(gaps) < HELD_UP_MAX_S
    from_ms = (windows - 1_000) * 10
    late, pages_of_late = await all_of(from_ms=from_ms)
    assert [one["end_ms"] for one in late] == [end for _, _, _, end in expected if end >= from_ms]
    assert pages_of_late < pages


async def _tick(gaps: list[float]) -> None:
    """How long each tick took."""
    while True:
        began = time.monotonic()
        await asyncio.sleep(TICK_S)
        gaps.append(time.monotonic() - began)
