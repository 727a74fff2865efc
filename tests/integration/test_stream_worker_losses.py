"""The stream worker where something was lost or put in from outside: source topics, source records, the changelog."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock.services.local.embedded_kafka import EmbeddedKafka
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
from penstock.shared.streams.changelog.entries import Entries
from penstock.shared.streams.changelog.format import (
    EPOCH_MAX,
    PROGRESS,
    Takeover,
    decode,
    encode_live,
    encode_takeover,
)
from penstock.shared.streams.changelog.restore_io import changelog_consumer, find_takeover
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.application_topics import CHANGELOG_CONFIGS
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.state.checkpoint import LogReplaced
from penstock.shared.streams.task.outputs import TaskCommit
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import (
    WAIT_SECONDS,
    Chain,
    chain_of,
    commit,
    offline,
    owner,
    running,
    take,
    topology,
    until,
)

FETCH_SECONDS = 1.0  # longer than the fetch that is under way when a partition is paused
FOREIGN = [(None, b'{"id":1}'), (b"k", b"text"), (b"k", None)]


async def work(chain: Chain, number: int, **given: Any) -> None:
    """Send that many events and have a new worker process them."""
    await chain.send(number)
    worker = chain.worker(**given)
    async with running(worker):
        await chain.wait_processed(worker)


async def fails(worker: StreamWorker) -> None:
    """Run the worker until it ends, which it must do by raising."""
    async with running(worker) as loop:
        await asyncio.wait_for(loop, WAIT_SECONDS)


async def put(chain: Chain, topic: str, *records: tuple[bytes | None, bytes | None]) -> int:
    """Write records to partition 0 of a topic; the last one's offset."""
    async with Producer(chain.kafka, ProducerSettings(linger_ms=0)) as producer:
        results = await (await producer.send_many([ProducerRecord(topic, v, k, (), 0, None) for k, v in records]))
    assert not [result for result in results if isinstance(result, BaseException)]
    return results[-1].offset  # type: ignore[union-attr]


async def remake(chain: Chain, topic: NewTopic) -> None:
    async with Admin(chain.kafka) as admin:
        await admin.delete_topics([topic.name])

        async def gone() -> bool:
            return topic.name not in await admin.list_topics()

        await until(gone)
        await admin.create_topics([topic])


# --- the changelog ---


async def test_foreign_records_in_the_changelog_change_nothing(
    kafka: EmbeddedKafka, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What others wrote to a live application's changelog is passed over, counted, and named once with its offset."""
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
        said = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        assert [
            (line["level"], line["topic"], line["partition"], line["first_offset"], line["records"])
            for line in said
            if line["event"].startswith("records that are no changelog entries")
        ] == [("warning", f"{topic_name}-changelog", 0, last - len(FOREIGN) + 1, len(FOREIGN))]
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_a_corrupt_changelog_record_is_refused(kafka: EmbeddedKafka, topic_name: str) -> None:
    """A record that claims to be an entry ends the worker with its place and the ways out."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        at = await put(chain, f"{topic_name}-changelog", (b"k", b"\x02L of a layout to come"))
        said = rf"changelog-0 at offset {at}: .* version 2; .* version 1\. .*streams reset"
        for _ in range(2):
            with pytest.raises(CorruptRecord, match=said):
                await fails(chain.worker())


async def test_no_owner_takes_an_epoch_that_no_reader_takes(kafka: EmbeddedKafka, topic_name: str) -> None:
    """The record above which there is none ends the worker before it has written anything."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        highest = encode_takeover(EPOCH_MAX, Takeover(topic_name, "other", 0))
        at = await put(chain, f"{topic_name}-changelog", (None, highest))
        for _ in range(2):
            with pytest.raises(CorruptRecord, match=rf"at offset {at}: .* no owner can take over.*streams reset"):
                await fails(chain.worker())
        assert (await chain.read(f"{topic_name}-changelog"))[-1].offset == at


async def test_an_owner_that_another_takes_over_unseen_restores(
    kafka: EmbeddedKafka, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under at_least_once, by one that lost the partition while it was stopped, and takes it over when it wakes.

    What the rightful owner commits behind that counts for no reader, so the group is not told of it.
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
        assert "another owner has taken it over at offset" in capsys.readouterr().err
        await work(chain, 100, processing_guarantee="at_least_once")
        closed, late = offline(topic_name, chain.sent)
        assert set(await chain.values("out")) == set(closed)
        assert set(await chain.values("late")) == set(late)


@pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])
async def test_an_owner_whose_log_is_another_one_does_not_go_on(
    kafka: EmbeddedKafka, topic_name: str, tmp_path: Path, guarantee: str
) -> None:
    """A topic that was made again has an owner of the same epoch, so the place of what is written has to tell."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, guarantee) as (changelog, task):
        for at in range(3):
            take(task, chain, at)
            await commit(changelog, task, chain)
        await remake(chain, NewTopic(f"{topic_name}-changelog", 1, -1, CHANGELOG_CONFIGS))
        take(task, chain, 30)
        with pytest.raises(LogReplaced, match=rf"{topic_name}-changelog-0: a commit is at offset \d, and 1?\d was"):
            await commit(changelog, task, chain)
        there = await chain.read(f"{topic_name}-changelog")
        assert PROGRESS not in [decode(record.value).operation for record in there]


async def test_an_owner_among_others_records_in_another_log_does_not_go_on(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    """However long the log is that took its place: the topic's id is looked at before its records."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "at_least_once") as (changelog, task):
        await remake(chain, NewTopic(f"{topic_name}-changelog", 1, -1, CHANGELOG_CONFIGS))
        await put(chain, f"{topic_name}-changelog", *FOREIGN)
        take(task, chain, 30)
        with pytest.raises(LogReplaced, match=r"the topic was deleted and created again: its id was .* and is now "):
            await commit(changelog, task, chain)


async def test_an_open_transaction_of_another_hangs_no_owner(kafka: EmbeddedKafka, topic_name: str) -> None:
    """Its records are looked at while it is open: a takeover in it counts from where it stands."""
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
            take(task, chain, 0)
            async with asyncio.timeout(WAIT_SECONDS):
                await commit(changelog, task, chain)
            takeover = encode_takeover(2, Takeover("app", "other", 0))
            at = await (await producer.send(changelog_topic, takeover, partition=0))
            take(task, chain, 1)
            with pytest.raises(ProducerFenced, match=f"another owner has taken it over at offset {at.offset}"):
                await commit(changelog, task, chain)


async def test_what_others_wrote_is_waited_for_so_long(kafka: EmbeddedKafka, topic_name: str) -> None:
    """Records that do not come are an error that names them, and no wait for ever."""
    at = TopicPartition(f"{topic_name}-changelog", 0)
    async with (
        chain_of(kafka, topic_name, 1) as chain,
        owner(chain, "at_least_once"),
        changelog_consumer(chain.kafka) as consumer,
    ):
        end = (await consumer.end_offsets([at]))[at]
        assert await find_takeover(consumer, at, range(end), 0) == 0
        assert await find_takeover(consumer, at, range(end), 1) is None
        with pytest.raises(KafkaTimeout, match=rf"{at}: records 0 to {end} did not come in 600 ms"):
            await find_takeover(consumer, at, range(end + 1), 1, timeout_ms=600)


async def test_without_transactions_progress_is_written_after_its_entries(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    """Under at_least_once a commit of which one entry could not be written is confirmed by nothing."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "at_least_once") as (changelog, task):
        take(task, chain, 0, 10)
        commit = task.prepare_commit(0)
        *entries, progress = commit.changelog
        too_large = (
            b"b",
            encode_live(0, commit.epoch, commit.commit, 0, 0, bytes(2 * ProducerSettings().max_request_size)),
        )
        torn: TaskCommit = commit._replace(changelog=Entries.of([*entries, too_large, progress]))
        with pytest.raises(DataError, match="max_request_size"):
            await changelog.commit(torn, GroupMetadata(topic_name))
        written = [decode(record.value).operation for record in await chain.read(f"{topic_name}-changelog")]
        assert PROGRESS not in written
        assert len(written) == 1 + len(entries), "the takeover and the entries that could be written"
        async with owner(chain, "at_least_once") as (_, restored):
            assert (restored.sources, list(restored.stores["s"].rows())) == ({}, [])


async def test_a_changelog_that_would_lose_state_ends_startup(kafka: EmbeddedKafka, topic_name: str) -> None:
    """A changelog that was made by hand with a retention, or with other partitions, is refused before anything runs."""
    async with chain_of(kafka, topic_name, 2) as chain, Admin(chain.kafka) as admin:
        changelog = f"{topic_name}-changelog"
        await admin.create_topics([NewTopic(changelog, 2, -1, {**CHANGELOG_CONFIGS, "retention.ms": "86400000"})])
        worker = chain.worker()
        with pytest.raises(
            ConfigError, match=rf"{changelog} has retention.ms=86400000: .* --add-config retention.ms=-1"
        ):
            await worker.startup()
        await worker.shutdown()
        await remake(chain, NewTopic(changelog, 1, -1, CHANGELOG_CONFIGS))
        worker = chain.worker()
        with pytest.raises(ConfigError, match=rf"{changelog} has 1 partitions, the source topics have 2"):
            await worker.startup()
        await worker.shutdown()
        await remake(chain, NewTopic(changelog, 2, -1, CHANGELOG_CONFIGS))
        await work(chain, 100)


# --- the source ---


@pytest.mark.parametrize("events", [10, 300], ids=["shorter", "longer"])
async def test_a_source_topic_that_was_made_again_is_refused(
    kafka: EmbeddedKafka, topic_name: str, events: int
) -> None:
    """A new topic under the old name ends the worker with both ids, whether the position fits into it or not."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        async with Admin(chain.kafka) as admin:
            before = (await admin.describe_topics([topic_name]))[topic_name].topic_id
            await remake(chain, event_time_topic(topic_name, 1))
            after = (await admin.describe_topics([topic_name]))[topic_name].topic_id
        await chain.send(events)
        said = rf"{topic_name} was deleted and created again: its id is {after}, the state .* id {before}\."
        with pytest.raises(SourceTopicChanged, match=said):
            await fails(chain.worker(on_missing_source_offsets="skip"))


async def remake_while_running(chain: Chain, events: int) -> None:
    """Make the source topic again under a running worker, fill it, and wait for the worker's end."""
    worker = chain.worker()
    async with running(worker) as loop:
        await chain.wait_processed(worker)
        await remake(chain, event_time_topic(chain.topic, 1))
        await chain.send(events)
        await asyncio.wait_for(loop, WAIT_SECONDS)


@pytest.mark.parametrize("events", [10, 300], ids=["shorter", "longer"])
async def test_a_source_topic_that_is_made_again_meanwhile_is_refused(
    kafka: EmbeddedKafka, topic_name: str, events: int
) -> None:
    """A running worker ends as well: it does not wait for its position to come, and does not go on in the middle."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        with pytest.raises(SourceTopicChanged, match=f"{topic_name} was deleted and created again"):
            await remake_while_running(chain, events)


async def lose(chain: Chain, before: int) -> None:
    """Delete the source's records below an offset."""
    async with Admin(chain.kafka) as admin:
        await admin.delete_records({TopicPartition(chain.topic, 0): before})


async def lose_while_running(chain: Chain, before: int) -> None:
    """Delete source records below an offset that a running worker has yet to read, and wait for its end."""
    worker = chain.worker()
    async with running(worker) as loop:
        await chain.wait_processed(worker)
        worker.pause_task(0)
        await asyncio.sleep(FETCH_SECONDS)
        await chain.send(100)
        await lose(chain, before)
        worker.resume_task(0)
        await asyncio.wait_for(loop, WAIT_SECONDS)


@pytest.mark.parametrize("live", [False, True], ids=["stopped", "running"])
async def test_source_records_deleted_before_they_were_read(kafka: EmbeddedKafka, topic_name: str, live: bool) -> None:
    """Deleted unread records end the worker, which names them, or are counted to the offset where that is asked for."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await work(chain, 100)
        await chain.send(100)

        if live:
            with pytest.raises(SourceOffsetsMissing, match=f"{topic_name}-0: offsets 200 to 239 were deleted"):
                await lose_while_running(chain, 240)
            first, lost = 200, 40
        else:
            await lose(chain, 130)
            with pytest.raises(SourceOffsetsMissing, match=f"{topic_name}-0: offsets 100 to 129 were deleted"):
                await fails(chain.worker())
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
        await work(chain, 100)  # the position past the gap is in the changelog: it is no gap any more


async def test_the_marks_of_transactions_are_no_missing_records(kafka: EmbeddedKafka, topic_name: str) -> None:
    """Where retention has deleted all that was read, and the last mark of a transaction, nothing is missing."""
    async with chain_of(kafka, topic_name, 1) as chain:
        worker = chain.worker()
        async with running(worker):
            settings = ProducerSettings(transactional_id=f"{topic_name}-writer", linger_ms=0)
            async with Producer(chain.kafka, settings) as producer:
                await producer.init_transactions()
                async with producer.transaction():
                    await (await producer.send_many([ProducerRecord(topic_name, b'{"id":1}', b"k", (), 0, 5)]))

            async def past_the_mark() -> bool:
                tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
                return any(task.sources.get(topic_name) == 2 and not task.needs_commit for task in tasks)

            await until(past_the_mark)
        async with Admin(chain.kafka) as admin:
            await admin.delete_records({TopicPartition(topic_name, 0): -1})
        worker = chain.worker()
        async with running(worker):

            async def restored() -> bool:
                return any(owned.task is not None for owned in worker.tasks().values())

            await until(restored)


# --- the application's own topics ---


async def test_what_a_topic_with_another_name_still_holds_is_refused(
    kafka: EmbeddedKafka, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A key_by without a name gets another topic when a node comes before it: not before the old one is read."""

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

            async def all_taken() -> bool:
                return [o.task.sources.get(topic_name) for o in worker.tasks().values() if o.task] == [100]

            await until(all_taken)
        with pytest.raises(
            SchemaMismatch, match=f"{old}-0 holds records from offset 0 on that were not read.*key_by-2"
        ):
            await fails(chain.worker(build(filtered=True)))
        for filtered, number in ((False, 100), (True, 200)):

            async def all_written(number: int = number) -> bool:
                return len(await chain.values("out")) == number

            async with running(chain.worker(build(filtered=filtered))):
                if filtered:
                    await chain.send(100)
                await until(all_written)
    assert "was read to its end" in capsys.readouterr().err
