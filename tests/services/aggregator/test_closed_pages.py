"""Pages of closed windows from the changelog of a broker."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.aggregator.closed_pages import SEARCHED_RECORDS, ClosedPages, Limits, Page
from penstock.services.aggregator.closed_scan import Wanted
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.errors import ChangelogHole, KafkaTimeout
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster
from tests.services.aggregator.closed_logs import STORE, TOPIC, Log, final, records

EVER = (-(2**62), 2**62)
LIMITS = Limits(1_000, 10**6, 60_000)
LARGE = 300_000  # bytes of a key: more records than one fetch brings
LONG = 2 * SEARCHED_RECORDS // 4  # commits of four records
LOGS = (Log.of([[(f"k{t}", t * 10)] for t in range(30)]), Log.of([]), Log.of([[("x", 5), ("y", 6)], [("z", 9)]]))


async def write(cluster: FakeCluster, *logs: Log) -> KafkaSettings:
    cluster.create_topic(TOPIC, len(logs))
    settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
    async with Producer(settings) as producer:
        for partition, log in enumerate(logs):
            assert await (await producer.send_many(records(log.entries, partition))).first_error() is None
    return settings


def wanted(from_ms: int = EVER[0]) -> Wanted:
    return Wanted(STORE, KeyRange.of(), (from_ms, EVER[1]))


async def all_pages(kafka: KafkaSettings, limits: Limits) -> list[Page]:
    pages, place = list[Page](), ChangelogPlace(0)
    while True:
        pages.append(await ClosedPages(kafka, TOPIC, wanted(), limits).read(place))
        last = pages[-1].last
        if last is None:
            return pages
        assert last > place, "it gets on"
        place = last


@pytest.mark.parametrize(("rows_max", "records_max"), [(1_000, 10**6), (4, 10**6), (1_000, 1), (7, 20)])
async def test_all_partitions_one_after_the_other(rows_max: int, records_max: int) -> None:
    """Each window once, by partition in the order of closing, however pages are cut; positions are those read."""
    async with FakeCluster() as cluster:
        pages = await all_pages(await write(cluster, *LOGS), Limits(rows_max, records_max, 60_000))
    found = [(one.partition, one.key, one.start_ms, one.end_ms) for page in pages for one in page.rows]
    assert found == [(p, *one) for p, log in enumerate(LOGS) for one in log.closed]
    assert all(len(page.rows) <= rows_max for page in pages)
    assert {p: at for page in pages for p, at in page.position.items()} == {0: {"in": 30}, 2: {"in": 2}}
    assert len(pages) == 1 if rows_max > len(found) and records_max > 1 else len(pages) > 2


@pytest.mark.parametrize(("guarantee", "is_searched"), [("exactly_once", True), ("at_least_once", False)])
async def test_the_beginning_is_searched_for(guarantee: Any, is_searched: bool) -> None:
    """By the operator's time in each commit, where no zombie can have written it; all windows are found either way."""
    log = Log.of([[(f"k{t}", t)] for t in range(LONG)], guarantee)
    from_ms = LONG - 100
    async with FakeCluster() as cluster:
        kafka = await write(cluster, log)
        reading = ClosedPages(kafka, TOPIC, wanted(from_ms), LIMITS)
        page = await reading.read(ChangelogPlace(0))
    assert [one.end_ms for one in page.rows] == list(range(from_ms, LONG))
    assert page.last is None
    assert (reading.records_read < len(log.entries)) == is_searched


async def test_a_log_that_begins_later_is_refused() -> None:
    """A page whose place was deleted meanwhile: the question has to be asked anew."""
    async with FakeCluster() as cluster:
        kafka = await write(cluster, LOGS[0])
        async with Admin(kafka) as admin:
            await admin.delete_records({TopicPartition(TOPIC, 0): 50})
        with pytest.raises(ChangelogHole, match=f"{TOPIC}-0: offsets 9 to 49 are gone"):
            await ClosedPages(kafka, TOPIC, wanted(), LIMITS).read(ChangelogPlace(0, 9, 1))


async def test_a_commit_that_cannot_be_read_in_time_names_the_limits() -> None:
    """Where nothing got on, the error has the setting, and the one that makes the reading needless."""
    log = Log.of([])
    log.entries.extend([final("k" * LARGE, i, 1, 1) for i in range(10)])
    said = rf"{TOPIC}-0: .*offset 0 .*queries.changelog_timeout_ms=1:.*streams.lake"
    async with FakeCluster() as cluster:
        kafka = await write(cluster, log._replace(entries=log.entries[1:]))
        with pytest.raises(KafkaTimeout, match=said):
            await ClosedPages(kafka, TOPIC, wanted(), Limits(10, 10, 1)).read(ChangelogPlace(0, 0, 1))
