"""The topics that are created, and the checks of topics that already exist."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.admin.types import DEFAULT_MAX_MESSAGE_BYTES
from penstock.shared.clients.consumer.assignors import ASSIGNORS, GroupMember
from penstock.shared.clients.protocol.consumer_protocol import Subscription
from penstock.shared.common import log
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import AuthorizationFailed, ConfigError, UnknownTopicOrPartition
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime import application_topics
from penstock.shared.streams.runtime.application_topics import (
    CHANGELOG_CONFIGS,
    prepare_topics,
    require_assignor_of_source_topics,
    require_changelog,
    require_same_partitions,
    retention_of_topic,
    warn_of_retention,
)
from penstock.shared.streams.settings import DEAD_LETTER_OVERHEAD_MAX, StreamsSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Request
from penstock.shared.testing.manual_clock import ManualClock


async def test_a_topic_that_is_written_and_read_is_created() -> None:
    """Only topics that nothing of the topology writes to are waited for, and name the number of partitions.

    A source record's dead letter fits into its topic, whichever source it is from.
    """
    builder = StreamsBuilder()
    builder.stream("in").to("between")
    joined = builder.stream("between", dead_letters="between-dlq")
    joined.join(builder.global_table("names"), lambda value, name: value, key=lambda record: record.key).to("out")
    builder.stream("between-dlq").to("names")
    settings = StreamsSettings(application_id="app", topic_wait_ms=1)
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic("in", 3, configs={"max.message.bytes": "1000"})
        waited: list[list[str]] = []
        assert await prepare_topics(kafka, settings, builder.build(), SYSTEM_CLOCK, waited.append) == 3
        assert waited == []
        async with Admin(kafka) as admin:
            names = ["between", "between-dlq", "names", "out", "app-changelog"]
            found = await admin.describe_topics(names)
            assert {name: len(found[name].partitions) for name in names} == dict.fromkeys(names, 3)
            between = await admin.describe_configs("between")
            rejected = await admin.describe_configs("in-dlq")
            largest = int(between["max.message.bytes"] or 0) + DEAD_LETTER_OVERHEAD_MAX
            assert rejected["max.message.bytes"] == str(largest)


async def test_a_source_topic_may_have_the_largest_record_limit() -> None:
    """Topics for its rejected records then have the same `max.message.bytes`, because Kafka allows no larger one."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    settings = StreamsSettings(application_id="app")
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic("in", configs={"max.message.bytes": str(2**31 - 1)})
        await prepare_topics(kafka, settings, builder.build(), SYSTEM_CLOCK)
        async with Admin(kafka) as admin:
            for name in ("in-dlq", "in-late"):
                assert (await admin.describe_configs(name))["max.message.bytes"] == str(2**31 - 1)


async def test_a_late_topic_that_nothing_writes_to_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream without windows writes no late records, also if another stream has windows."""
    builder = StreamsBuilder()
    builder.stream("clicks").to("a")
    builder.stream("clicks-late").to("b")
    builder.stream("orders").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("c")
    settings = StreamsSettings(application_id="app", topic_wait_ms=1)
    clock = ManualClock()
    monkeypatch.setattr(application_topics, "TOPIC_CHECK_INTERVAL_MS", 1)
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic("clicks", 1)
        cluster.create_topic("orders", 1)
        with pytest.raises(UnknownTopicOrPartition, match="clicks-late"):
            await prepare_topics(kafka, settings, builder.build(), clock, lambda _: clock.advance(2))


async def test_configs_of_source_and_output_topics_need_not_be_readable() -> None:
    """Topics are created as for a source with Kafka's default of `max.message.bytes`.

    The changelog's configs must be readable: they could let Kafka delete state.
    """
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    settings = StreamsSettings(application_id="app", topic_wait_ms=1)
    unreadable = {"in", "out"}
    default = DEFAULT_MAX_MESSAGE_BYTES + DEAD_LETTER_OVERHEAD_MAX

    def reject(request: Request) -> Fail | None:
        names = {resource.resource_name for resource in request.body.resources}
        return Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED) if names & unreadable else None

    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic("in", configs={"max.message.bytes": "1000"})
        cluster.control(Api.DESCRIBE_CONFIGS, reject)
        await prepare_topics(kafka, settings, builder.build(), SYSTEM_CLOCK)
        async with Admin(kafka) as admin:
            assert (await admin.describe_configs("in-dlq"))["max.message.bytes"] == str(default)
        unreadable.add("app-changelog")
        with pytest.raises(AuthorizationFailed, match="app-changelog"):
            await prepare_topics(kafka, settings, builder.build(), SYSTEM_CLOCK)


WANTED = NewTopic("app-changelog", 4, -1, CHANGELOG_CONFIGS)
ALTER = "kafka-configs.sh --bootstrap-server host:1 --alter --entity-type topics --entity-name app-changelog"


def changed(**given: str) -> dict[str, str | None]:
    return {**CHANGELOG_CONFIGS, **{name.replace("_", "."): value for name, value in given.items()}}


@pytest.mark.parametrize("configs", [changed(), changed(message_timestamp_type="CreateTime", segment_ms="1000")])
def test_a_changelog_that_keeps_everything_is_taken(configs: dict[str, str | None]) -> None:
    """Settings that lose nothing are the topic's owner's to choose."""
    require_changelog(WANTED, 4, configs, "host:1")


@pytest.mark.parametrize(
    ("given", "has", "fixed"),
    [
        ({"cleanup_policy": "compact"}, "cleanup.policy=compact", "cleanup.policy=delete"),
        ({"cleanup_policy": "compact,delete"}, "cleanup.policy=compact,delete", "cleanup.policy=delete"),
        ({"retention_ms": "604800000"}, "retention.ms=604800000", "retention.ms=-1"),
        ({"retention_bytes": "1024"}, "retention.bytes=1024", "retention.bytes=-1"),
        (
            {"retention_ms": "1", "retention_bytes": "2"},
            "retention.ms=1, retention.bytes=2",
            "retention.ms=-1,retention.bytes=-1",
        ),
    ],
)
def test_a_changelog_that_would_lose_state_is_rejected(given: dict[str, str], has: str, fixed: str) -> None:
    """Each setting that deletes state is named as it is, with the one command that corrects them all."""
    with pytest.raises(ConfigError) as raised:
        require_changelog(WANTED, 4, changed(**given), "host:1")
    message = str(raised.value)
    assert message.startswith(f"the changelog topic app-changelog has {has}: Kafka would delete state")
    assert message.endswith(f"{ALTER} --add-config {fixed}")


def test_source_topics_must_have_as_many_partitions_each() -> None:
    """Different partition counts are rejected, with the count of each topic. Equal counts and a single topic are
    accepted."""
    assert require_same_partitions({"in": 3}) == 3
    assert require_same_partitions({"a": 4, "b": 4}) == 4
    with pytest.raises(ConfigError, match="a: 4, b: 2"):
        require_same_partitions({"c": 4, "a": 4, "b": 2})
    # More partitions of a repartition topic would split its keys' state.
    with pytest.raises(ConfigError, match=r"app-k-repartition: 2, in: 4.*`penstock streams reset`"):
        require_same_partitions({"in": 4, "app-k-repartition": 2})


def test_several_topics_need_the_range_assignor() -> None:
    """Any other one may give a number to one member from one topic and to another from the next."""
    require_assignor_of_source_topics("range", ["a", "b"])
    require_assignor_of_source_topics("cooperative-sticky", ["a"])
    with pytest.raises(ConfigError, match=r"streams\.partition_assignment_strategy=cooperative-sticky.*a, b"):
        require_assignor_of_source_topics("cooperative-sticky", ["a", "b"])


@given(members=st.integers(1, 5), partitions=st.integers(1, 9), static=st.sets(st.integers(0, 4)))
def test_the_assignor_assigns_equal_numbers_to_one_instance(members: int, partitions: int, static: set[int]) -> None:
    """If all topics have the same number of partitions, a partition number of all topics is assigned to the same
    member."""
    topics = ("ta", "tb", "tc")
    group = {f"m{i}": GroupMember(Subscription(topics), f"i{i}" if i in static else None) for i in range(members)}
    owners: dict[int, set[str]] = {}
    for member, assigned in ASSIGNORS["range"].assign(dict.fromkeys(topics, partitions), group).items():
        for at in assigned:
            owners.setdefault(at.partition, set()).add(member)
    assert {number: len(who) for number, who in owners.items()} == dict.fromkeys(range(partitions), 1)


def test_a_changelog_with_too_few_partitions_is_rejected() -> None:
    """If a source got more partitions, the error names both counts, the consequence and the command."""
    with pytest.raises(ConfigError, match=r"2 partitions.*4") as raised:
        require_changelog(WANTED, 2, changed(), "host:1")
    assert "kafka-topics.sh --bootstrap-server host:1 --alter --topic app-changelog --partitions 4" in str(raised.value)
    assert "`penstock streams reset`" in str(raised.value)


def test_a_changelog_with_too_many_partitions_is_rejected() -> None:
    """Kafka cannot remove partitions, so the changelog belongs to other source topics."""
    with pytest.raises(ConfigError, match=r"5 partitions.*4"):
        require_changelog(WANTED, 5, changed(), "host:1")


@pytest.mark.parametrize(
    ("configs", "found"),
    [
        ({"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}, []),
        (
            {"cleanup.policy": "delete", "retention.ms": "604800000", "retention.bytes": "-1"},
            ["retention.ms=604800000"],
        ),
        ({"cleanup.policy": "compact,delete", "retention.bytes": "9"}, ["retention.bytes=9"]),
        ({"cleanup.policy": "compact", "retention.ms": "604800000"}, []),
    ],
)
def test_a_retention_is_found(configs: dict[str, str | None], found: list[str]) -> None:
    """A retention deletes records only under the policy `delete`."""
    assert retention_of_topic(configs) == found


def test_a_retention_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """A topic with a retention is logged as a warning, and a topic without one is not."""
    log.configure(LogSettings(format="json"), "test")
    warn_of_retention("kept", {"retention.ms": "-1"})
    warn_of_retention("flights-late", {"cleanup.policy": "delete", "retention.ms": "1000"})
    lines: list[Any] = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["level"], line["topic"], line["configs"]) for line in lines] == [
        ("warning", "flights-late", "retention.ms=1000")
    ]
