"""The benchmark of session windows, on few records."""

from __future__ import annotations

import pytest

from bench import _sessions_workers, sessions
from bench._kafka_streams import GUARANTEES, launcher, results_of, session_count
from bench._sessions_data import fill, make_topic, topic_of
from penstock.shared.clients.admin import Admin
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker

RECORDS = 30_000
CONTESTS = [
    ("confluent-kafka consume, zipf keys", "session"),
    ("at_least_once mean, zipf keys", "session"),
    ("exactly_once count, zipf keys", "hopping"),
]
SOAKS = [
    ("fetch, zipf keys", "session"),
    ("exactly_once count, power keys", "session"),
    ("at_least_once count, zipf keys", "tumbling"),
    ("exactly_once mean, zipf keys", "hopping"),
    ("at_least_once count, even keys", "sliding"),
]


@pytest.mark.parametrize(
    ("contestant", "windows"), [*CONTESTS, *(pytest.param(*each, marks=pytest.mark.soak) for each in SOAKS)]
)
async def test_each_contestant_reads_all_records(contestant: str, windows: str, kafka: Broker) -> None:
    """Every contestant reads all records, and finishes only if each is counted in its windows or late."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    what, law = sessions.parts_of(contestant)
    async with Admin(settings) as admin:
        is_there = topic_of(law) in await admin.list_topics()
    if not is_there:
        await make_topic(settings, topic_of(law))
        await fill(settings, RECORDS, law, topic_of(law))
    figures = await sessions.contest(contestant, settings, RECORDS, windows)
    assert figures["records_per_second"] > 0
    assert figures["cpu_us_per_record"] > 0
    assert (figures.get("windows_closed", 0) > 0) == (what in sessions.OURS)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.soak), 2])
async def test_worker_processes_read_all_records(workers: int, kafka: Broker) -> None:
    """Worker processes start on an empty topic, receive all records at once, and end once these are committed."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    figures = await _sessions_workers.session_count(settings, workers, RECORDS, "zipf", 200)
    assert figures["records_per_second"] > 0
    assert figures["cpu_us_per_record"] > 0


@pytest.mark.soak
@pytest.mark.parametrize("guarantee", list(GUARANTEES))
async def test_kafka_streams_reads_all_records(guarantee: str, kafka: Broker) -> None:
    """Kafka Streams counts the sessions of a real topic under each guarantee and prints its figures."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    launch = await launcher()
    assert not isinstance(launch, str), launch
    topic, name = f"{guarantee}-clicks", f"kafka streams {guarantee}"
    for each in (topic, results_of(name)):
        await make_topic(settings, each)
    await fill(settings, RECORDS, "power", topic)
    given = (launch, kafka.bootstrap_servers, topic, guarantee, 200, RECORDS // 2)
    figures = await session_count(name, *given)
    assert figures is not None
    assert figures["cpu_us_per_record"] > 0
