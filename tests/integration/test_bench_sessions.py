"""The benchmark of sessions, on few records: what it measures is what it says."""

from __future__ import annotations

import pytest

from bench import sessions
from bench._sessions_data import PARTITIONS, TOPIC, fill
from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.settings import KafkaSettings

RECORDS = 30_000


CONTESTS = [
    ("fetch", "session"),
    ("at_least_once mean", "session"),
    ("exactly_once count", "session"),
    ("at_least_once count", "tumbling"),
    ("exactly_once mean", "hopping"),
]


@pytest.mark.parametrize(("contestant", "windows"), CONTESTS)
async def test_each_contestant_takes_all_records(contestant: str, windows: str, kafka: EmbeddedKafka) -> None:
    """Every record is read, and counted in each of its windows or found late: a round that loses one ends otherwise."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin:
        if TOPIC not in await admin.list_topics():
            await admin.create_topics([event_time_topic(TOPIC, PARTITIONS)])
            await fill(settings, RECORDS)
    figures = await sessions.contest(contestant, settings, RECORDS, windows)
    assert figures["records_per_second"] > 0
    assert figures["cpu_us_per_record"] > 0
    assert (figures.get("windows_closed", 0) > 0) == (contestant != "fetch")
