"""Source topics, source records and changelog records that are lost, recreated or foreign."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common import log
from penstock.shared.common.errors import (
    ConfigError,
    CorruptRecord,
    DataError,
    KafkaTimeout,
    ProducerFenced,
    SchemaMismatch,
    SourceOffsetsMissing,
    SourceTopicChanged,
)
from penstock.shared.common.records import GroupMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import LogSettings
from penstock.shared.streams.changelog.entry_columns import EntryColumns
from penstock.shared.streams.changelog.format import (
    EPOCH_MAX,
    PROGRESS,
    Takeover,
    decode_entry,
    encode_live,
    encode_takeover,
)
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.application_topics import CHANGELOG_CONFIGS
from penstock.shared.streams.runtime.changelog_partition import LogReplaced, find_takeover
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.task.outputs import TaskCommit
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import (
    WAIT_SECONDS,
    Chain,
    chain_of,
    commit,
    offline,
    owner,
    process_records,
    running,
    topology,
    until,
)
from tests.shared_broker import Broker

FETCH_SECONDS = 1.0  # longer than a fetch that is in flight when a partition is paused
FOREIGN = [(None, b'{"id":1}'), (b"k", b"text"), (b"k", None)]


async def work(chain: Chain, number: int, **given: Any) -> None:
    """Send `number` events and process them with a new worker."""
    await chain.send(number)
    worker = chain.worker(**given)
    async with running(worker):
        await chain.wait_processed(worker)


async def run_until_error(worker: StreamWorker) -> None:
    """Run the worker until it raises an error."""
    async with running(worker) as loop:
        await asyncio.wait_for(loop, WAIT_SECONDS)


async def put(chain: Chain, topic: str, *records: tuple[bytes | None, bytes | None]) -> int:
    """Write records to partition 0 of a topic, and return the last one's offset."""
    async with Producer(chain.kafka, ProducerSettings(linger_ms=0)) as producer:
        results = await (await producer.send_many([ProducerRecord(topic, v, k, (), 0, None) for k, v in records]))
    assert not [result for result in results if isinstance(result, BaseException)]
    return results[-1].offset  # type: ignore[union-attr]


async def recreate(chain: Chain, topic: NewTopic) -> None:
    async with Admin(chain.kafka) as admin:
        await admin.delete_topics([topic.name])

        async def gone() -> bool:
            return topic.name not in await admin.list_topics()

        await until(gone)
        await admin.create_topics([topic])


# --- the changelog ---


async def test_foreign_records_in_the_changelog_change_nothing(
    kafka: Broker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Foreign records in the changelog are skipped, counted, and logged once with their offset."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
            last = await put(chain, f"{topic_name}-changelog", *FOREIGN)
            await chain.send(100)
            await chain.wait_processed(worker)
        log.configure(LogSettings(format="json"), "test")
        await chain.send(100)
        registry = CollectorRegistry()
        worker = StreamWorker(chain.kafka, chain.settings(), topology(topic_name), registry=registry)
        async with running(worker):
            await chain.wait_processed(worker)
        counted = registry.get_sample_value("penstock_streams_foreign_changelog_records_total", {"partition": "0"})
        assert counted == len(FOREIGN)
        lines = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        assert [
            (line["level"], line["topic"], line["partition"], line["first_offset"], line["records"])
            for line in lines
            if line["event"].startswith("records that are no changelog entries")
        ] == [("warning", f"{topic_name}-changelog", 0, last - len(FOREIGN) + 1, len(FOREIGN))]
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_a_corrupt_changelog_record_ends_the_worker(kafka: Broker, topic_name: str) -> None:
    """A changelog record of an unknown version ends the worker with its offset and the possible fixes."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        at = await put(chain, f"{topic_name}-changelog", (b"k", b"\x02L of a layout to come"))
        message = rf"changelog-0 at offset {at}:.*version 2.*streams reset"
        for _ in range(2):
            with pytest.raises(CorruptRecord, match=message):
                await run_until_error(chain.worker())


async def test_the_highest_epoch_ends_the_worker(kafka: Broker, topic_name: str) -> None:
    """A takeover with the highest epoch ends the worker before it writes a record."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        highest = encode_takeover(EPOCH_MAX, Takeover(topic_name, "other", 0))
        at = await put(chain, f"{topic_name}-changelog", (None, highest))
        for _ in range(2):
            with pytest.raises(CorruptRecord, match=rf"offset {at}:.*streams reset"):
                await run_until_error(chain.worker())
        assert (await chain.read(f"{topic_name}-changelog"))[-1].offset == at


async def test_an_owner_that_was_overtaken_restores(
    kafka: Broker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under at_least_once a member that was stopped may take over a partition that it has lost.

    Readers ignore what the rightful owner commits after that, so that owner must not commit to the group but restore.
    """
    log.configure(LogSettings(format="json"), "test")
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker(processing_guarantee="at_least_once")
        async with running(worker):
            await chain.wait_processed(worker)
            await put(chain, f"{topic_name}-changelog", *FOREIGN)
            await chain.send(100)
            await chain.wait_processed(worker)
            assert "fenced: " not in capsys.readouterr().err
            async with owner(chain, "at_least_once"):
                pass
            await chain.send(100)
            await chain.wait_processed(worker)
        assert "another owner" in capsys.readouterr().err
        await work(chain, 100, processing_guarantee="at_least_once")
        closed, late = offline(topic_name, chain.sent)
        assert set(await chain.values("out")) == set(closed)
        assert set(await chain.values("late")) == set(late)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_an_owner_finds_a_recreated_changelog_by_offsets(
    kafka: Broker, topic_name: str, tmp_path: Path, guarantee: str
) -> None:
    """The owner of a changelog that was deleted and created again finds this by the offsets of its commit, although its
    epoch fits.
    """
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, guarantee) as (changelog, task):
        for at in range(3):
            process_records(task, chain, at)
            await commit(changelog, task, chain)
        await recreate(chain, NewTopic(f"{topic_name}-changelog", 1, -1, CHANGELOG_CONFIGS))
        process_records(task, chain, 30)
        with pytest.raises(LogReplaced, match=rf"{topic_name}-changelog-0.*offset \d"):
            await commit(changelog, task, chain)
        there = await chain.read(f"{topic_name}-changelog")
        assert PROGRESS not in [decode_entry(record.value).operation for record in there]


async def test_an_owner_finds_a_recreated_changelog_by_its_id(kafka: Broker, topic_name: str) -> None:
    """The owner of a changelog with foreign records finds by the topic's id that it was deleted and created again."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "at_least_once") as (changelog, task):
        await recreate(chain, NewTopic(f"{topic_name}-changelog", 1, -1, CHANGELOG_CONFIGS))
        await put(chain, f"{topic_name}-changelog", *FOREIGN)
        process_records(task, chain, 30)
        with pytest.raises(LogReplaced, match=r"id was .* is now "):
            await commit(changelog, task, chain)


async def test_a_foreign_open_transaction_blocks_no_owner(kafka: Broker, topic_name: str) -> None:
    """An owner reads the records of a foreign open transaction, and a takeover in it counts from its offset."""
    changelog_topic = f"{topic_name}-changelog"
    other = ProducerSettings(transactional_id=f"{topic_name}-other", linger_ms=0)
    async with (
        chain_of(kafka, topic_name, 1) as chain,
        owner(chain, "at_least_once") as (changelog, task),
        Producer(chain.kafka, other) as producer,
    ):
        await producer.init_transactions()
        async with producer.transaction():
            await producer.send(changelog_topic, b"{}", partition=0)
            process_records(task, chain, 0)
            async with asyncio.timeout(WAIT_SECONDS):
                await commit(changelog, task, chain)
            takeover = encode_takeover(2, Takeover("app", "other", 0))
            at = await (await producer.send(changelog_topic, takeover, partition=0))
            process_records(task, chain, 1)
            with pytest.raises(ProducerFenced, match=f"offset {at.offset}"):
                await commit(changelog, task, chain)


async def test_waiting_for_foreign_records_has_a_timeout(kafka: Broker, topic_name: str) -> None:
    """Foreign records that do not come within the timeout raise KafkaTimeout with their offsets."""
    at = TopicPartition(f"{topic_name}-changelog", 0)
    async with (
        chain_of(kafka, topic_name, 1) as chain,
        owner(chain, "at_least_once"),
        changelog_consumer(chain.kafka) as consumer,
    ):
        end = (await consumer.end_offsets([at]))[at]
        assert await find_takeover(consumer, at, range(end), 0) == 0
        assert await find_takeover(consumer, at, range(end), 1) is None
        with pytest.raises(KafkaTimeout, match=rf"{at}.*0 to {end}.*600 ms"):
            await find_takeover(consumer, at, range(end + 1), 1, timeout_ms=600)


async def test_without_transactions_progress_is_written_after_its_entries(kafka: Broker, topic_name: str) -> None:
    """Under at_least_once a commit has no progress record if one of its entries could not be written."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "at_least_once") as (changelog, task):
        process_records(task, chain, 0, 10)
        commit = task.prepare_commit(0)
        *entries, progress = commit.changelog
        too_large = (
            b"b",
            encode_live(0, task.epoch, task.commit_number, 0, 0, bytes(2 * ProducerSettings().max_request_size)),
        )
        torn: TaskCommit = commit._replace(changelog=EntryColumns.of([*entries, too_large, progress]))
        with pytest.raises(DataError, match="max_request_size"):
            await changelog.commit(torn, GroupMetadata(topic_name))
        written = [decode_entry(record.value).operation for record in await chain.read(f"{topic_name}-changelog")]
        assert PROGRESS not in written
        assert len(written) == 1 + len(entries), "the takeover and the entries that could be written"
        async with owner(chain, "at_least_once") as (_, restored):
            assert (restored.sources, list(restored.stores["s"].rows())) == ({}, [])


async def test_a_changelog_that_would_lose_state_ends_startup(kafka: Broker, topic_name: str) -> None:
    """A changelog with a retention or another number of partitions ends the start with an error."""
    async with chain_of(kafka, topic_name, 2) as chain, Admin(chain.kafka) as admin:
        changelog = f"{topic_name}-changelog"
        await admin.create_topics([NewTopic(changelog, 2, -1, {**CHANGELOG_CONFIGS, "retention.ms": "86400000"})])
        worker = chain.worker()
        with pytest.raises(
            ConfigError, match=rf"{changelog} has retention.ms=86400000: .* --add-config retention.ms=-1"
        ):
            await worker.startup()
        await worker.shutdown()
        await recreate(chain, NewTopic(changelog, 1, -1, CHANGELOG_CONFIGS))
        worker = chain.worker()
        with pytest.raises(ConfigError, match=rf"{changelog}.*1 partitions.*2"):
            await worker.startup()
        await worker.shutdown()
        await recreate(chain, NewTopic(changelog, 2, -1, CHANGELOG_CONFIGS))
        await work(chain, 100)


# --- the source ---


@pytest.mark.parametrize("events", [10, 300], ids=["shorter", "longer"])
async def test_a_recreated_source_topic_is_an_error(kafka: Broker, topic_name: str, events: int) -> None:
    """A recreated source topic ends the worker with both ids, whether the position is within it or not."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        async with Admin(chain.kafka) as admin:
            before = (await admin.describe_topics([topic_name]))[topic_name].topic_id
            await recreate(chain, event_time_topic(topic_name, 1))
            after = (await admin.describe_topics([topic_name]))[topic_name].topic_id
        await chain.send(events)
        message = rf"{topic_name}.*{after}.*{before}\."
        with pytest.raises(SourceTopicChanged, match=message):
            await run_until_error(chain.worker(on_missing_source_offsets="skip"))


async def recreate_while_running(chain: Chain, events: int) -> None:
    """Recreate the source topic while a worker runs, fill it, and wait until the worker ends."""
    worker = chain.worker()
    async with running(worker) as loop:
        await chain.wait_processed(worker)
        await recreate(chain, event_time_topic(chain.topic, 1))
        await chain.send(events)
        await asyncio.wait_for(loop, WAIT_SECONDS)


@pytest.mark.parametrize("events", [10, 300], ids=["shorter", "longer"])
async def test_a_source_topic_recreated_while_running_is_an_error(kafka: Broker, topic_name: str, events: int) -> None:
    """A running worker ends when its source topic is recreated, whether its position is within it or not."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        with pytest.raises(SourceTopicChanged, match=f"{topic_name} .*created again"):
            await recreate_while_running(chain, events)


async def lose(chain: Chain, before: int) -> None:
    """Delete the source's records below an offset."""
    async with Admin(chain.kafka) as admin:
        await admin.delete_records({TopicPartition(chain.topic, 0): before})


async def lose_while_running(chain: Chain, before: int) -> None:
    """Delete source records that a running worker has not read, and wait until the worker ends."""
    worker = chain.worker()
    async with running(worker) as loop:
        await chain.wait_processed(worker)
        owned = worker.tasks()[0]
        assert owned.running is not None
        inputs = owned.running.inputs
        inputs.is_full = lambda topic: True  # type: ignore[method-assign]  # the worker pauses the partition
        await asyncio.sleep(FETCH_SECONDS)
        await chain.send(100)
        await lose(chain, before)
        del inputs.is_full  # type: ignore[method-assign]
        await asyncio.wait_for(loop, WAIT_SECONDS)


@pytest.mark.parametrize("live", [False, True], ids=["stopped", "running"])
async def test_source_records_deleted_before_they_were_read(kafka: Broker, topic_name: str, live: bool) -> None:
    """Unread source records that were deleted end the worker with their offsets; with `skip` they are counted."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        await chain.send(100)

        if live:
            with pytest.raises(SourceOffsetsMissing, match=f"{topic_name}-0.*200 to 239"):
                await lose_while_running(chain, 240)
            first, lost = 200, 40
        else:
            await lose(chain, 130)
            with pytest.raises(SourceOffsetsMissing, match=f"{topic_name}-0.*100 to 129"):
                await run_until_error(chain.worker())
            first, lost = 100, 30
        registry = CollectorRegistry()
        settings = chain.settings(on_missing_source_offsets="skip")
        worker = StreamWorker(chain.kafka, settings, topology(topic_name), registry=registry)
        async with running(worker):
            await chain.wait_processed(worker)
        labels = {"topic": topic_name, "partition": "0"}
        assert registry.get_sample_value("penstock_streams_skipped_offsets_total", labels) == lost
        read = chain.sent[:first] + chain.sent[first + lost :]
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, read)
        await work(chain, 100)  # the position past the gap is in the changelog: it is not counted again


async def test_transaction_markers_are_no_missing_records(kafka: Broker, topic_name: str) -> None:
    """If only a transaction's marker was deleted after the last read record, no record is missing."""
    async with chain_of(kafka, topic_name, 1) as chain:
        worker = chain.worker()
        async with running(worker):
            settings = ProducerSettings(transactional_id=f"{topic_name}-writer", linger_ms=0)
            async with Producer(chain.kafka, settings) as producer:
                await producer.init_transactions()
                async with producer.transaction():
                    await (await producer.send_many([ProducerRecord(topic_name, b'{"id":1}', b"k", (), 0, 5)]))

            async def is_past_the_end() -> bool:
                tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
                return any(task.sources.get(topic_name) == 2 and not task.needs_commit for task in tasks)

            await until(is_past_the_end)
        async with Admin(chain.kafka) as admin:
            await admin.delete_records({TopicPartition(topic_name, 0): -1})
        worker = chain.worker()
        async with running(worker):

            async def restored() -> bool:
                return any(owned.task is not None for owned in worker.tasks().values())

            await until(restored)


# --- the application's own topics ---


async def test_unread_records_of_a_renamed_topic_are_an_error(
    kafka: Broker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unnamed key_by gets another topic if a node is inserted before it; unread records of the old topic are an
    error.
    """

    def build(*, filtered: bool) -> Topology:
        builder = StreamsBuilder()
        stream = builder.stream(topic_name)
        if filtered:
            stream = stream.filter(lambda record: True)
        stream.key_by(lambda record: str(record.value["id"] % 3)).repartition().to(f"{topic_name}-out")
        return builder.build()

    log.configure(LogSettings(format="json"), "test")
    old = f"{topic_name}-key_by-2-repartition"
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker(build(filtered=False), commit_interval_ms=60_000)
        async with running(worker):

            async def all_processed() -> bool:
                return [o.task.sources.get(topic_name) for o in worker.tasks().values() if o.task] == [100]

            await until(all_processed)
        with pytest.raises(SchemaMismatch, match=f"{old}-0.*offset 0.*key_by-2"):
            await run_until_error(chain.worker(build(filtered=True)))
        for filtered, number in ((False, 100), (True, 200)):

            async def all_written(number: int = number) -> bool:
                return len(await chain.values("out")) == number

            async with running(chain.worker(build(filtered=filtered))):
                if filtered:
                    await chain.send(100)
                await until(all_written)
    assert "was read to its end" in capsys.readouterr().err
