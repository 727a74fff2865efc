"""`penstock dlq`: how it finds the dead-letter topic, and a replay of a large record on the fake broker."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from penstock.services.consumer.dlq_command import find_dead_letter_topic, main
from penstock.shared.clients.dead_letters.dead_letter import DeadLetter, dead_letter_record
from penstock.shared.clients.dead_letters.dead_letter_log import replay_producer_settings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


@pytest.mark.parametrize(
    ("named", "existing", "taken"),
    [
        ("clicks", ["clicks", "clicks-dlq"], "clicks-dlq"),
        ("clicks", ["clicks-dlq"], "clicks-dlq"),
        ("clicks-dlq", ["clicks", "clicks-dlq"], "clicks-dlq"),
        ("clicks-dlq", ["clicks-dlq", "clicks-dlq-dlq"], "clicks-dlq-dlq"),
    ],
)
def test_the_source_or_its_dead_letter_topic_may_be_named(named: str, existing: list[str], taken: str) -> None:
    """A source names its dead-letter topic; a dead-letter topic names itself, unless it has a dead-letter topic too."""
    assert find_dead_letter_topic(named, existing) == taken


def test_an_unknown_topic_is_an_error_with_the_existing_ones() -> None:
    """The error names the expected topic, asks for a source, and lists the existing dead-letter topics."""
    with pytest.raises(UnknownTopicOrPartition, match=r"click-dlq.*clicks-dlq"):
        find_dead_letter_topic("click", ["clicks", "clicks-dlq"])
    with pytest.raises(UnknownTopicOrPartition, match="ends in -dlq"):
        find_dead_letter_topic("clicks-dlq", ["clicks"])
    many = [f"t{n:02}-dlq" for n in range(11)]
    with pytest.raises(UnknownTopicOrPartition, match=r"t09-dlq, …\)"):
        find_dead_letter_topic("clicks", many)


@pytest.mark.parametrize("command", ["list", "replay"])
def test_an_unknown_stage_is_an_error(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error has the stages that exist."""
    assert main([command, "clicks", "--stage", "produced"]) == 2
    assert "'produce'" in capsys.readouterr().err


async def test_a_record_larger_than_the_default_buffer_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    """A replay sends a record that is larger than the default `buffer_memory` of a producer."""
    value = bytes(ProducerSettings().buffer_memory + 1)
    source = ConsumerRecord("clicks", 0, 0, 1, b"k", value)
    async with FakeCluster() as cluster:
        for topic in ("clicks", "clicks-dlq"):
            cluster.create_topic(topic, partitions=1)
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers), replay_producer_settings()) as producer:
            await (
                await producer.send(dead_letter_record("clicks-dlq", DeadLetter(source, "process", "E", "", 1, "g")))
            )
        arguments = ["replay", "clicks", "--bootstrap-servers", servers, "--json"]
        assert await asyncio.to_thread(main, arguments) == 0
    assert json.loads(capsys.readouterr().out)["sent"] == 1


async def test_a_replay_without_earlier_progress_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    """If Kafka has deleted the progress, a dry run shows that all dead letters would be sent again, and why."""
    source = ConsumerRecord("clicks", 0, 0, 1, b"k", b"v")
    record = dead_letter_record("clicks-dlq", DeadLetter(source, "process", "E", "", 1, "g"))
    async with FakeCluster() as cluster:
        for topic in ("clicks", "clicks-dlq"):
            cluster.create_topic(topic, partitions=1)
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
            await producer.send_and_wait(record)
        arguments = ["replay", "clicks", "--bootstrap-servers", servers]
        for more, is_said in ((["--dry-run"], True), ([], True), (["--dry-run"], False), ([], False)):
            assert await asyncio.to_thread(main, [*arguments, *more]) == 0
            assert ("offsets.retention.minutes" in capsys.readouterr().err) is is_said


async def test_a_dry_run_shows_what_a_replay_sends(capsys: pytest.CaptureFixture[str]) -> None:
    """A dead letter that was cut, and a record that is no dead letter, are not shown and do not count for --limit."""
    source = ConsumerRecord("clicks", 0, 0, 1, b"k", b"v")
    record = dead_letter_record("clicks-dlq", DeadLetter(source, "process", "E", "", 1, "g"))
    cut = replace(record, headers=(*record.headers, ("penstock.dlq.cut", b"value=3000000")))
    async with FakeCluster() as cluster:
        for topic in ("clicks", "clicks-dlq"):
            cluster.create_topic(topic, partitions=1)
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
            await (await producer.send_many([ProducerRecord("clicks-dlq", b"{"), cut, record, record, record]))
        arguments = ["clicks", "--bootstrap-servers", servers, "--limit", "2", "--json"]
        assert await asyncio.to_thread(main, ["replay", *arguments, "--dry-run"]) == 0
        assert json.loads(capsys.readouterr().out) == {"would_send": 2}
        assert await asyncio.to_thread(main, ["list", *arguments]) == 0
        assert [json.loads(line)["dead_letter"]["offset"] for line in capsys.readouterr().out.splitlines()] == [0, 1]


async def test_a_shared_dead_letter_topic_is_replayed_by_source(capsys: pytest.CaptureFixture[str]) -> None:
    """Only the dead letters of the source topic are listed and sent. A later replay sends those of another source."""
    async with FakeCluster() as cluster:
        for topic in ("clicks", "views", "all-dlq"):
            cluster.create_topic(topic, partitions=1)
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
            for topic in ("clicks", "views"):
                source = ConsumerRecord(topic, 0, 0, 1, b"k", topic.encode())
                await producer.send_and_wait(
                    dead_letter_record("all-dlq", DeadLetter(source, "process", "E", "", 1, "g"))
                )
        options = ["--dead-letter-topic", "all-dlq", "--bootstrap-servers", servers, "--json"]
        assert await asyncio.to_thread(main, ["list", "views", *options]) == 0
        assert [json.loads(line)["topic"] for line in capsys.readouterr().out.splitlines()] == ["views"]
        for sent, topic in enumerate(("clicks", "views")):
            assert [len(cluster.records(name)) for name in ("clicks", "views")] == [sent, 0]
            assert await asyncio.to_thread(main, ["replay", topic, *options]) == 0
            assert json.loads(capsys.readouterr().out)["sent"] == 1
        assert [record.value for record in cluster.records("views")] == [b"views"]


async def test_a_list_that_is_cut_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without --json, standard error names the limit if there are more dead letters."""
    source = ConsumerRecord("clicks", 0, 0, 1, b"k", b"v")
    record = dead_letter_record("clicks-dlq", DeadLetter(source, "process", "E", "", 1, "g"))
    async with FakeCluster() as cluster:
        for topic in ("clicks", "clicks-dlq"):
            cluster.create_topic(topic, partitions=1)
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
            await (await producer.send_many([record, record]))
        for limit, is_cut in (("1", True), ("2", False)):
            for more in ([], ["--json"]):
                arguments = ["list", "clicks", "--bootstrap-servers", servers, "--limit", limit, *more]
                assert await asyncio.to_thread(main, arguments) == 0
                assert ("only the first 1 are shown" in capsys.readouterr().err) is is_cut


async def test_a_table_shows_all_coordinates_and_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No topic or offset is cut on a terminal of any width. A time beyond the calendar is shown in ms."""
    monkeypatch.setenv("COLUMNS", "80")
    source = ConsumerRecord("orders" * 20, 3, 123456, 1, b"k", b"v")
    record = dead_letter_record("orders-dlq", DeadLetter(source, "process", "E", "", 1, "g"))
    async with FakeCluster() as cluster:
        cluster.create_topic("orders-dlq", configs={"message.timestamp.after.max.ms": str(10**15)})
        servers = cluster.bootstrap_servers
        async with Producer(KafkaSettings(bootstrap_servers=servers)) as producer:
            await producer.send_and_wait(replace(record, timestamp=10**15))
        assert await asyncio.to_thread(main, ["list", "orders-dlq", "--bootstrap-servers", servers]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = ["".join(parts).replace(" ", "") for parts in zip(*rows, strict=True)]
    assert cells[1] == f"{'orders' * 20}-3@123456"
    assert cells[2] == "1000000000000000"
