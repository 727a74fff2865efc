"""The aggregator's settings, exit statuses and health: failures at start-up, missing topics, idle instances."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from penstock.api.http.health import CheckResult
from penstock.api.http.problem import Problem
from penstock.services import service_lifecycle
from penstock.services.aggregator.application_view import INCOMPLETE
from penstock.services.aggregator.main import Aggregator, main
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common import log
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError, SchemaMismatch
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.streams.runtime.partition_restore import NEWEST_RECORDS
from penstock.shared.streams.runtime.source_positions import committed_position
from penstock.shared.testing.fake_broker import FakeCluster

TOPOLOGY = "--topology=my.topologies:build"


def load(*flags: str) -> AggregatorSettings:
    return AggregatorSettings.load(flags, program="penstock aggregator", environ={})


def test_only_the_topology_is_required() -> None:
    """All settings but the topology have defaults, and the lake is unset."""
    settings = load(TOPOLOGY)
    assert settings.topology == "my.topologies:build"
    assert (settings.streams.processing_guarantee, settings.streams.lake) == ("exactly_once", None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--topology, PENSTOCK_TOPOLOGY"),
        (["--topology=module"], "--topology, PENSTOCK_TOPOLOGY"),
        ([TOPOLOGY, "--streams.application-id=a b"], "streams.application_id"),
        ([TOPOLOGY, "--streams.application-id=.."], "streams.application_id"),
        ([TOPOLOGY, "--streams.processing-guarantee=at_most_once"], "streams.processing_guarantee"),
        ([TOPOLOGY, "--streams.lake="], "streams.lake"),
        ([TOPOLOGY, "--streams.heartbeat-interval-ms=45000"], "must be below session_timeout_ms=45000"),
        ([TOPOLOGY, "--compaction.interval-ms=0"], "compaction.interval_ms"),
        ([TOPOLOGY, "--compaction.spark.driver-memory=lots"], "compaction.spark.driver_memory"),
        ([TOPOLOGY, "--compaction.retention-hours=23"], "compaction.retention_hours"),
    ],
)
def test_an_invalid_value_is_an_error_that_names_it(flags: list[str], message: str) -> None:
    """Missing and invalid settings are a ConfigError that names them."""
    with pytest.raises(ConfigError) as raised:
        load(*flags)
    assert message in str(raised.value)


WAIT_S = 30
Health = Callable[[bool, str], Awaitable[list[CheckResult]]]

MODULE = """
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
    return builder.build()

def sessions():
    builder = StreamsBuilder()
    visits = builder.stream("in").group_by_key().session_window(10)
    visits.aggregate("visits", n=Count()).on_close().to("out")
    return builder.build()

def with_users():
    builder = StreamsBuilder()
    users = builder.global_table("users")
    builder.stream("in").join(users, lambda a, b: b, key=lambda record: record.key).to("out")
    return builder.build()

def of_missed():
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(10)
    sessions.aggregate("visits", missed=Count()).on_close().to("out")
    return builder.build()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_topologies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    sys.modules.pop("my_topologies", None)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize(("ends", "logged"), [("raises", "ZeroDivisionError"), ("returns", "'backlog' has ended")])
async def test_a_background_task_that_ends_ends_the_service(
    ends: str, logged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a background task ends, the service logs an error and exits with status 1."""
    log.configure(LogSettings(format="json"), "test")
    aggregator = Aggregator(AggregatorSettings.load(["--topology=my_topologies:build"], environ={}))

    async def beside() -> None:
        if ends == "raises":
            raise ZeroDivisionError

    class Alone:
        """The aggregator without the parts that need Kafka."""

        main_loop = aggregator.main_loop

        async def startup(self) -> None:
            aggregator.run_beside({"backlog": beside()})
            await asyncio.sleep(0)

        async def shutdown(self) -> None:
            pass

    assert await service_lifecycle.run(Alone(), 1_000) == 1
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert {"level": "error", "event": "a background task has ended", "task": "backlog"}.items() <= lines[0].items()
    assert lines[1]["event"] == "failed"
    assert logged in str(lines[1])


def test_an_unloadable_topology_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A topology that cannot be loaded ends the service at start-up with one line and exit status 2."""
    assert main(["--topology=my_topologies:biuld"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("penstock aggregator: topology: my_topologies:biuld: ")


def test_a_name_conflict_in_the_lake_ends_the_service_at_start_up(capsys: pytest.CaptureFixture[str]) -> None:
    """An aggregation whose name conflicts with a column of the lake ends the service at
    start-up, not at the first compaction.
    """
    assert main(["--topology=my_topologies:of_missed", "--streams.lake=lake"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    expected = "store 'visits': aggregation 'missed': the lake's table late/visits has a column 'missed' of its own"
    assert line.startswith(f"penstock aggregator: {expected}")


async def test_an_instance_without_partitions_is_healthy() -> None:
    """An instance without partitions is healthy and reports it, since a restart would not change it."""
    aggregator = Aggregator(AggregatorSettings.load(["--topology=my_topologies:build"], environ={}))
    aggregator._turned_ms = SYSTEM_CLOCK.monotonic_ms()
    aggregator.worker.source_partitions = 4
    aggregator.worker._is_assigned = True
    result = aggregator._check_tasks()
    assert result.ok
    assert result.detail.startswith("owns no partition: others have them")
    assert (result.facts["partitions_running"], result.facts["partitions"]) == (0, 4)


async def test_a_query_before_the_topics_are_known_is_rejected() -> None:
    """Without a number of partitions the instance cannot know whether it has all of them."""
    flags = ["--topology=my_topologies:sessions", "--no-queries.all-instances"]
    aggregator = Aggregator(AggregatorSettings.load(flags, environ={}))
    narrowing: Any = dict.fromkeys(("key", "key_from", "key_to", "from_ms", "to_ms", "continuation"))
    with pytest.raises(Problem, match="source topics") as raised:
        await aggregator.find_windows("visits", status="open", **narrowing, rows_max=2)
    assert raised.value.kind is INCOMPLETE


@asynccontextmanager
async def health_of(cluster: FakeCluster, *arguments: str) -> AsyncIterator[Health]:
    """Run the aggregator and yield a wait for a result of its task check; errors of its loop are raised."""
    given = [f"--kafka.bootstrap-servers={cluster.bootstrap_servers}", "--http.port=0", *arguments]
    aggregator = Aggregator(AggregatorSettings.load(given, environ={}))
    seen: list[CheckResult] = []

    async def run() -> None:
        await aggregator.startup()
        await aggregator.main_loop()

    running = asyncio.create_task(run())
    try:

        async def until(ok: bool, text: str) -> list[CheckResult]:
            """Return all results up to the first one with this state and text."""
            async with asyncio.timeout(WAIT_S):
                while not seen or seen[-1].ok != ok or text not in seen[-1].detail:
                    if running.done():
                        await running
                    seen.append(aggregator._check_tasks())
                    await asyncio.sleep(0)
            return seen

        yield until
    finally:
        running.cancel()
        await asyncio.wait([running])
        await aggregator.shutdown()


async def test_a_missing_topic_is_reported_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    """A missing topic is reported in health and log immediately, and the service starts once it exists. Health fails
    when it is deleted.
    """
    log.configure(LogSettings(format="json"), "test")
    async with FakeCluster() as cluster, health_of(cluster, "--topology=my_topologies:build") as until:
        results = await until(False, "starting: waiting for the topic in, which Kafka does not have")
        cluster.create_topic("in", partitions=2)
        await until(True, "")
        assert [result.ok for result in results].index(True) == len(results) - 1
        assert results[-1].facts["partitions_running"] == 2
        cluster.delete_topic("in")
        # The warning follows at the rebalance, which revokes the topic's partitions.
        while (await until(False, "source topics are not in Kafka's metadata: in"))[-1].facts["partitions_running"]:
            results.clear()
    lines = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    (missing,) = [line for line in lines if line["event"].startswith("topics that the topology reads do not exist")]
    assert (missing["level"], missing["topics"]) == ("warning", ["in"])
    (deleted,) = [line for line in lines if line["event"].startswith("source topics are not in Kafka's metadata")]
    assert (deleted["level"], deleted["topics"]) == ("warning", ["in"])


async def test_the_load_of_global_tables_is_reported() -> None:
    """The group is joined after the load, so health does not name the group before."""
    async with FakeCluster() as cluster:
        for topic in ("in", "users", "out"):
            cluster.create_topic(topic, partitions=1)
        async with health_of(cluster, "--topology=my_topologies:with_users") as until:
            details = [result.detail for result in await until(True, "")]
    names = ["Kafka", "the global tables", "the group's assignment"]
    named = list(dict.fromkeys(name for detail in details for name in names if f"waiting for {name}" in detail))
    assert named == names


@pytest.mark.parametrize("records", [10, NEWEST_RECORDS + 10], ids=["short changelog", "long changelog"])
async def test_health_fails_until_the_topology_is_accepted(records: int) -> None:
    """A topology without a store of the state is rejected before health is ever ok; the right one is accepted, with a
    long changelog before it is restored.
    """
    async with FakeCluster() as cluster:
        cluster.create_topic("in", partitions=1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with health_of(cluster, "--topology=my_topologies:sessions") as until:
            await until(True, "")
            async with Producer(kafka) as producer:
                sent = [ProducerRecord("in", b"{}", b"%d" % i, timestamp=0) for i in range(records)]
                assert await (await producer.send_many(sent)).first_error() is None
            at = TopicPartition("in", 0)
            async with Admin(kafka) as admin, asyncio.timeout(WAIT_S):
                while (await admin.group_offsets("penstock")).get(at) != committed_position(records):
                    pass
        with pytest.raises(SchemaMismatch):
            async with health_of(cluster, "--topology=my_topologies:build") as until:
                await until(True, "")
        async with health_of(cluster, "--topology=my_topologies:sessions") as until:
            details = [result.detail for result in await until(True, "")]
            assert details[0].startswith("starting: ")
            assert details[-1] == ("" if records < NEWEST_RECORDS else "restoring partitions [0]")
