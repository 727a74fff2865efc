"""A restore: where a task continues, how far it is, and state that is discarded or does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.admin import Admin, TopicDescription
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    CorruptRecord,
    KafkaTimeout,
    LogTruncation,
    OffsetOutOfRange,
    SchemaMismatch,
    SourceOffsetsMissing,
    SourceTopicChanged,
)
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import Takeover, encode_deleted, encode_takeover
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime import source_positions
from penstock.shared.streams.runtime.changelog_partition import (
    ChangelogPartition,
    ChangelogPosition,
    LogReplaced,
    _find_takeover,
)
from penstock.shared.streams.runtime.partition_restore import RESTORE_RECORDS_MAX, PartitionRestore
from penstock.shared.streams.runtime.restore_progress import LOG_INTERVAL_MS, RestoreProgress
from penstock.shared.streams.runtime.source_positions import (
    AheadPartition,
    GroupAhead,
    OnMissing,
    PartitionExtent,
    SourcePositions,
    StartPosition,
    ahead_of,
    committed_position,
    has_record_between,
    position_of,
    raise_unread,
    start_position_of,
    unread_repartition_topics,
)
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import Checkpoint, CommitPosition
from penstock.shared.streams.state.local_state import LocalState
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.metrics import RestoreMetrics
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster, Request
from penstock.shared.testing.manual_clock import ManualClock
from tests.integration.test_stream_worker import (
    Chain,
    chain_of,
    commit,
    owner,
    process_records,
    running,
    topology,
    until,
    wait_or_raise,
)
from tests.shared.clients.consumer.filled import filled, opened


class Steps:
    """A log whose reader advances by a hundred transaction markers and a second with each poll."""

    def __init__(self, clock: ManualClock, owned: OwnedTask) -> None:
        self.at, self.seen, self._clock, self._owned = 0, [], clock, owned  # type: ignore[var-annotated]

    async def position(self, at: TopicPartition) -> int:
        return self.at

    async def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, object]:
        self.seen.append(self._owned.describe())
        self.at += 100
        self._clock.advance(1_000)
        return {}


async def test_a_restore_shows_how_far_it_is() -> None:
    """During a restore the task's description has the remaining records, the rate and the remaining time."""
    builder, clock = StreamsBuilder(), ManualClock(0)
    builder.stream("in").to("out")
    kafka, settings = KafkaSettings(bootstrap_servers="localhost:1"), StreamsSettings(application_id="app")
    owned = OwnedTask(ChangelogPartition(kafka, settings, 2, "here", clock))
    restoring = PartitionRestore(kafka, settings, StreamTask(builder.build(), 2, application="app"), clock)
    owned.changelog.progress = restoring.progress
    steps = Steps(clock, owned)
    await restoring.read_until(300, steps)  # type: ignore[arg-type]
    assert [(s["state"], s["remaining_records"], s["records_per_second"], s["eta_ms"]) for s in steps.seen] == [
        ("restoring", 300, None, None),
        ("restoring", 200, 100, 2_000),
        ("restoring", 100, 100, 1_000),
    ]
    assert owned.describe()["remaining_records"] == 0


async def test_a_restore_yields_to_the_event_loop() -> None:
    """The changelog is processed in slices, so that other tasks of the event loop run in between."""
    turns: list[int] = []

    class AtHand:
        """A consumer that has everything, and so awaits nothing."""

        def __init__(self) -> None:
            self.at = 0

        async def position(self, at: TopicPartition) -> int:
            return self.at

        async def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, object]:
            self.at += max_records
            return {}

    consumer = AtHand()

    async def beside() -> None:
        while True:
            turns.append(consumer.at)
            await asyncio.sleep(0)

    builder = StreamsBuilder()
    builder.stream("in").to("out")
    task = StreamTask(builder.build(), 2, application="app")
    kafka = KafkaSettings(bootstrap_servers="localhost:1")
    restoring = PartitionRestore(kafka, StreamsSettings(application_id="app"), task, ManualClock(0))
    other = asyncio.create_task(beside())
    await restoring.read_until(10 * RESTORE_RECORDS_MAX, consumer)  # type: ignore[arg-type]
    other.cancel()
    assert turns == [step * RESTORE_RECORDS_MAX for step in range(10)]


class Whole:
    """A consumer of a changelog partition that has its first ten records."""

    async def beginning_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 0)

    async def end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        return dict.fromkeys(partitions, 10)


async def test_discarded_state_on_disk_leaves_no_epoch_or_progress(tmp_path: Path) -> None:
    """After discarding a state on disk, a restore keeps neither its epoch nor its progress."""
    builder, consumer = StreamsBuilder(), Whole()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    local = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    task = StreamTask(builder.build(), 0, application="app", local=local)
    task.initialize(0)
    kafka = KafkaSettings(bootstrap_servers="localhost:1")
    local.write(Checkpoint("id", 3, covered_offset=5, progress=None))
    restoring = PartitionRestore(kafka, StreamsSettings(application_id="app"), task, ManualClock(0))
    restoring.topic_id = "id"
    assert await restoring._take_up_local(consumer) == local.checkpoint  # type: ignore[arg-type]
    assert (restoring.reader.epoch, restoring.next_epoch()) == (3, 4)
    restoring = PartitionRestore(kafka, StreamsSettings(application_id="app"), task, ManualClock(0))
    restoring.topic_id = "another"
    assert await restoring._take_up_local(consumer) is None  # type: ignore[arg-type]
    reader = restoring.reader
    assert (reader.epoch, reader.progress, restoring.next_epoch(), local.checkpoint) == (0, None, 1, None)
    local.close()


@asynccontextmanager
async def committed_changelog() -> AsyncIterator[tuple[FakeCluster, Chain]]:
    """A cluster with an application that has committed ten records, and still runs."""
    async with (
        FakeCluster() as cluster,
        chain_of(cluster, "clicks", 1) as chain,
        owner(chain, "at_least_once") as (changelog, task),
    ):
        process_records(task, chain, 0, 10)
        await commit(changelog, task, chain)
        yield cluster, chain


def restore_on_disk(chain: Chain, local: LocalState) -> PartitionRestore:
    """The restore of a standby with state on disk."""
    standby = StreamTask(topology("clicks"), 0, application="clicks", local=local)
    return PartitionRestore(chain.kafka, chain.settings(), standby, ManualClock(0))


async def test_state_on_disk_of_lost_records_is_deleted(tmp_path: Path) -> None:
    """If the changelog has lost records that a standby has read, its state on disk is deleted, because it contains
    them."""
    at = TopicPartition("clicks-changelog", 0)
    local = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0).state_of(0)
    async with committed_changelog() as (cluster, chain):
        restoring = restore_on_disk(chain, local)
        standby = restoring.task
        async with restoring.consumer() as consumer:
            await restoring.read_until(await restoring.begin(consumer), consumer)
            restoring.write()
            assert (local.checkpoint is not None, len(standby.stores["s"])) == (True, 1)
            cluster.lose_records(at, 1)
            with pytest.raises(LogTruncation, match="clicks-changelog-0"):
                await restoring.read_until(1_000, consumer)
    assert (local.checkpoint, len(standby.stores["s"])) == (None, 0)
    local.close()


@pytest.mark.parametrize("lost", ["after it begins", "before it continues"])
async def test_state_on_disk_above_the_changelogs_end_is_deleted(tmp_path: Path, lost: str) -> None:
    """State on disk is deleted if its position is above the changelog's end, also if the records are lost after a
    restore has begun from the state, or before a standby's restore continues."""
    at = TopicPartition("clicks-changelog", 0)
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    async with committed_changelog() as (cluster, chain):
        local = state.state_of(0)
        restoring = restore_on_disk(chain, local)
        async with restoring.consumer() as consumer:
            await restoring.read_until(await restoring.begin(consumer), consumer)
            restoring.write()
        if lost == "after it begins":
            local.close()
            local = state.state_of(0)
            restoring = restore_on_disk(chain, local)
        standby = restoring.task
        async with restoring.consumer() as consumer:
            if lost == "after it begins":
                await restoring.begin(consumer)
            assert (local.checkpoint is not None, len(standby.stores["s"])) == (True, 1)
            cluster.lose_records(at, 1)
            with pytest.raises(OffsetOutOfRange, match="clicks-changelog-0"):
                await restoring.begin(consumer) if lost == "before it continues" else await restoring.poll(consumer)
    assert (local.checkpoint, len(standby.stores["s"])) == (None, 0)
    local.close()


def test_remaining_records_rate_and_time_are_estimated() -> None:
    """It has the remaining records, the rate since the beginning and the remaining time.

    These are unknown before the first record.
    """
    progress = RestoreProgress(3)
    assert progress.describe() == {"remaining_records": None, "records_per_second": None, "eta_ms": None}
    progress.moved(100, 1_100, now_ms=50)
    assert progress.describe() == {"remaining_records": 1_000, "records_per_second": None, "eta_ms": None}
    progress.moved(350, 1_100, now_ms=550)
    assert progress.describe() == {"remaining_records": 750, "records_per_second": 500, "eta_ms": 1_500}
    progress.moved(1_100, 1_100, now_ms=1_050)
    assert progress.describe() == {"remaining_records": 0, "records_per_second": 1_000, "eta_ms": 0}


def test_an_empty_log() -> None:
    """An empty log is done at once."""
    progress = RestoreProgress(0)
    progress.moved(7, 7, now_ms=1)
    assert (progress.remaining_records, progress.eta_ms) == (0, 0)


def test_gauges_while_it_runs() -> None:
    """The metrics have the partition's remaining records after every step."""
    registry = CollectorRegistry()
    progress = RestoreProgress(3, RestoreMetrics(registry))

    def shown(name: str) -> float | None:
        return registry.get_sample_value(f"penstock_streams_restore_{name}", {"partition": "3"})

    progress.moved(0, 1_000, now_ms=0)
    assert (shown("remaining_records"), shown("eta_seconds")) == (1_000, None)
    progress.moved(250, 1_000, now_ms=500)
    assert (shown("remaining_records"), shown("records_per_second"), shown("eta_seconds")) == (750, 500, 1.5)


@pytest.mark.parametrize("error", [None, SchemaMismatch("another topology"), asyncio.CancelledError()])
async def test_gauges_end_with_the_restore(monkeypatch: pytest.MonkeyPatch, error: BaseException | None) -> None:
    """After the end of a restore, which may have failed or been cancelled, no metric says that it is still running."""
    registry, shown = CollectorRegistry(), []

    def gauges() -> list[str]:
        kinds = ("remaining_records", "records_per_second", "eta_seconds")
        names = [f"penstock_streams_restore_{kind}" for kind in kinds]
        return [name for name in names if registry.get_sample_value(name, {"partition": "3"}) is not None]

    async def restore(self: ChangelogPartition, restoring: PartitionRestore) -> None:
        restoring.progress.moved(0, 1_000, now_ms=0)
        restoring.progress.moved(250, 1_000, now_ms=500)
        shown.extend(gauges())
        if error is not None:
            raise error

    monkeypatch.setattr(ChangelogPartition, "_restore_stores", restore)
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    task = StreamTask(builder.build(), 3, application="app")
    settings, metrics = StreamsSettings(application_id="app"), RestoreMetrics(registry)
    changelog = ChangelogPartition(KafkaSettings(), settings, 3, "here", ManualClock(0), metrics=metrics)
    with nullcontext() if error is None else pytest.raises(type(error)):
        await changelog.take_over(lambda: task)
    assert (len(shown), gauges()) == (3, [])


def test_a_long_restore_logs_once_an_interval() -> None:
    """A long restore logs its progress once an interval. A short restore and the end of a restore log nothing."""
    progress = RestoreProgress(3)
    with capture_logs() as lines:
        for now_ms in range(0, 2 * LOG_INTERVAL_MS + 1, 1_000):
            progress.moved(now_ms, 4 * LOG_INTERVAL_MS, now_ms=now_ms)
        progress.moved(4 * LOG_INTERVAL_MS, 4 * LOG_INTERVAL_MS, now_ms=4 * LOG_INTERVAL_MS)
    assert [(line["event"], line["partition"], line["remaining_records"], line["eta_ms"]) for line in lines] == [
        ("state is being restored", 3, 3 * LOG_INTERVAL_MS, 3 * LOG_INTERVAL_MS),
        ("state is being restored", 3, 2 * LOG_INTERVAL_MS, 2 * LOG_INTERVAL_MS),
    ]


AT = TopicPartition("flights", 3)
ID, OTHER = "2ia3basOR-KblWWPsTuLbw", "AAAAAAAAAAAAAAAAAAAAAA"
offsets = st.integers(0, 1_000)


@pytest.mark.parametrize(
    ("known", "committed", "from_group", "position"),
    [
        (None, None, False, None),
        (None, 0, False, None),
        (None, 0, True, 0),
        (None, 7, True, 7),
        (5, None, False, 5),
        (5, 5, False, 5),
        (5, 3, False, 5),
        (5, 3, True, 5),
    ],
)
def test_the_position_in_the_changelog_counts(
    known: int | None, committed: int | None, from_group: bool, position: int | None
) -> None:
    """The position in the changelog counts. The group's committed offset counts only if there is none, and only if
    requested."""
    offset = None if committed is None else OffsetAndMetadata(committed)
    assert ahead_of(AT, known, offset, from_group=from_group) is None
    assert position_of(known, offset, from_group=from_group) == position


@pytest.mark.parametrize(("known", "from_group"), [(None, False), (5, False), (5, True), (0, False)])
@pytest.mark.parametrize("offset", [committed_position(7), OffsetAndMetadata(7), OffsetAndMetadata(7, "x")])
def test_a_group_that_is_ahead(known: int | None, from_group: bool, offset: OffsetAndMetadata) -> None:
    """The group's offset is above the changelog's position. The offset's metadata tells whether the application
    committed it."""
    by_application = offset.metadata == committed_position(0).metadata
    assert ahead_of(AT, known, offset, from_group=from_group) == AheadPartition(AT, 7, known, by_application)


FOREIGN, LOST = (
    AheadPartition(TopicPartition("flights", 0), 7, 5, False),
    AheadPartition(TopicPartition("flights", 1), 8, 6, True),
)
GONE = AheadPartition(TopicPartition("banks", 0), 9, None, True)
UNKNOWN = AheadPartition(TopicPartition("banks", 2), 9, None, False)
COMMAND = "run `penstock streams restore-offsets --application-id app --execute"


@pytest.mark.parametrize(
    ("ahead", "named", "not_named"),
    [
        ([FOREIGN], ["flights-0 (committed 7, changelog 5)", "not lost state", f"{COMMAND}`"], ["lost the", "empty"]),
        ([LOST], ["flights-1 (committed 8, changelog 6)", "has lost the commits", f"{COMMAND}`"], ["not lost"]),
        ([GONE], ["banks-0 (committed 9, changelog none)", "was lost", "--start-over banks`"], ["not lost", "or its"]),
        ([UNKNOWN], ["banks-2 (committed 9, changelog none)", f"{COMMAND} --start-over banks`"], ["not lost state"]),
        (
            [UNKNOWN, LOST, FOREIGN],
            ["flights-0", "flights-1", "banks-2", f"{COMMAND} --start-over banks`"],
            [],
        ),
    ],
    ids=["another client's", "the application's own", "the changelog's loss", "nothing known", "all"],
)
def test_the_error_names_partitions_cause_and_command(
    ahead: list[AheadPartition], named: list[str], not_named: list[str]
) -> None:
    """The error lists all partitions, mentions lost state only if it is possible, and has one command that is
    sufficient."""
    message = str(GroupAhead("app", ahead))
    assert [part for part in named if part not in message] == []
    assert [part for part in not_named if part in message] == []
    assert message.count("penstock streams") == 1


@pytest.mark.parametrize("known_id", [None, ID])
@pytest.mark.parametrize("on_missing", ["fail", "skip"])
@given(first=offsets, length=offsets, into=offsets)
def test_a_position_within_is_kept(
    known_id: str | None, on_missing: OnMissing, first: int, length: int, into: int
) -> None:
    """A position between the first offset and the end is kept, whatever the policy for missing offsets."""
    position = first + min(into, length)
    held = PartitionExtent(ID, first, first + length)
    assert start_position_of(AT, position, known_id, held, on_missing) == StartPosition(position)


@given(first=offsets)
def test_a_partition_that_was_never_read_starts_at_its_first_offset(first: int) -> None:
    """Records that were deleted before the application first read the partition are not missing."""
    assert start_position_of(AT, None, None, PartitionExtent(ID, first, first), "fail") == StartPosition(first)


def test_deleted_records_stop_or_are_counted() -> None:
    """If records after the position were deleted, `fail` raises an error with their offsets, and `skip` counts them."""
    held = PartitionExtent(ID, 40, 90)
    with pytest.raises(SourceOffsetsMissing, match=r"flights-3.*25 to 39.*streams.on_missing_source_off"):
        start_position_of(AT, 25, ID, held, "fail")
    assert start_position_of(AT, 25, ID, held, "skip") == StartPosition(40, skipped=15)


@pytest.mark.parametrize("on_missing", ["fail", "skip"])
def test_another_topic_of_the_same_name_is_rejected(on_missing: OnMissing) -> None:
    """A recreated topic is rejected with both ids, even if the position fits. No setting allows it."""
    with pytest.raises(SourceTopicChanged, match=rf"{OTHER}.*{ID}.*application_id"):
        start_position_of(AT, 5, ID, PartitionExtent(OTHER, 0, 90), on_missing)


@pytest.mark.parametrize("on_missing", ["fail", "skip"])
def test_a_position_past_the_end_is_rejected(on_missing: OnMissing) -> None:
    """A topic that ends before the position has lost records, or is another topic whose id was not recorded."""
    with pytest.raises(SourceTopicChanged, match=r"flights-3.*91.*90"):
        start_position_of(AT, 91, None, PartitionExtent(ID, 0, 90), on_missing)


async def test_lost_records_of_a_source_end_a_running_worker() -> None:
    """If a source's log has lost records that a running worker has read, the worker ends, even if the log has grown
    past its position since."""
    at, sent = TopicPartition("clicks", 0), asyncio.Event()

    async def grown() -> bool:
        task = worker.tasks()[0].task
        return task is not None and task.sources["clicks"] > 30

    async def hold(_: Request) -> None:
        await sent.wait()

    async def lose_and_grow() -> None:
        async with running(worker) as loop:
            await wait_or_raise(loop, chain.wait_processed(worker))
            cluster.control(Api.FETCH, hold)
            cluster.lose_records(at, 10)
            await chain.send(40)
            sent.set()
            await wait_or_raise(loop, until(grown))

    configs = {"group.min.session.timeout.ms": "10"}
    async with FakeCluster(configs=configs) as cluster, chain_of(cluster, "clicks", 1) as chain:
        await chain.send(10)
        await chain.send(10)
        worker = chain.worker()
        with pytest.raises(SourceTopicChanged, match=r"clicks-0 at offset 20: .* offset 10 on"):
            await lose_and_grow()


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_a_source_topic_that_is_recreated_before_a_rebalance_ends_a_running_worker(strategy: str) -> None:
    """If a rebalance leaves a task its partition, but the source topic was deleted and created again, the worker ends,
    even if the task's position is within the new topic."""
    sent = asyncio.Event()

    async def grown() -> bool:
        tasks = worker.tasks().values()
        return any(one.task is not None and one.task.sources["clicks"] > 10 for one in tasks)

    async def hold(_: Request) -> None:
        await sent.wait()

    async def recreate_and_rebalance() -> None:
        async with running(worker) as loop:
            await wait_or_raise(loop, chain.wait_processed(worker))
            cluster.control(Api.FETCH, hold)
            cluster.delete_topic("clicks")
            cluster.create_topic("clicks")
            await chain.send(40)
            worker.consumer.enforce_rebalance()
            sent.set()
            await wait_or_raise(loop, until(rebalanced))
            await wait_or_raise(loop, until(grown))

    async def rebalanced() -> bool:
        return worker.consumer.group_metadata().generation_id > 1

    configs = {"group.min.session.timeout.ms": "10"}
    async with FakeCluster(configs=configs) as cluster, chain_of(cluster, "clicks", 1) as chain:
        await chain.send(10)
        worker = chain.worker(partition_assignment_strategy=strategy)
        with pytest.raises(SourceTopicChanged, match=r"clicks was deleted and created again"):
            await recreate_and_rebalance()


async def test_a_task_is_restored_after_a_rebalance_if_its_topics_cannot_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restore repeats a lookup that fails in a rebalance. Without it, a task may continue in another topic."""
    lookups: list[Admin] = []
    describe_topics = Admin.describe_topics

    async def fail_once(self: Admin, names: Iterable[str]) -> dict[str, TopicDescription]:
        lookups.append(self)
        if len(lookups) == 1:
            raise KafkaTimeout("no answer")
        return await describe_topics(self, names)

    async def again() -> bool:
        owned = worker.tasks().get(0)
        return bool(lookups) and owned is not None and owned.task is not None

    async with FakeCluster() as cluster, chain_of(cluster, "clicks", 1) as chain:
        await chain.send(10)
        worker = chain.worker(session_timeout_ms=10_000)
        async with running(worker) as loop:
            await wait_or_raise(loop, chain.wait_processed(worker))
            before = worker.tasks()[0].task
            monkeypatch.setattr(Admin, "describe_topics", fail_once)
            worker.consumer.enforce_rebalance()
            await wait_or_raise(loop, until(again))
            assert worker.tasks()[0].task is not before
            await chain.send(10)
            await wait_or_raise(loop, chain.wait_processed(worker))


async def test_a_group_offset_in_an_open_transaction_is_valid() -> None:
    """A task may start at an offset that another client committed above the last stable offset."""
    at, builder, own = TopicPartition("t", 0), StreamsBuilder(), StreamsSettings(start_from_group_offsets=True)
    builder.stream("t").to("out")
    task = StreamTask(builder.build(), 0, application="app")
    async with filled(3) as cluster, opened(cluster, isolation_level="read_committed") as consumer:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, ProducerSettings(transactional_id="other")) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send("t", b"{}", partition=0))
            consumer.assign([at])
            await consumer.commit({at: OffsetAndMetadata(4)})
            assert (await consumer.end_offsets([at]))[at] == 3
            await SourcePositions(kafka, own, CollectorRegistry()).find(task, consumer, [at])
            assert task.sources == {"t": 4}
            await producer.abort_transaction()


def test_own_topics_that_the_topology_left() -> None:
    """Positions in internal topics that no node reads any more are returned. Source topics may be removed."""
    sources = {"app-key_by-2-repartition": 5, "app-by-user-repartition": 7, "clicks": 1, "other-x-repartition": 9}
    assert unread_repartition_topics(sources, ["app-by-user-repartition"], "app") == ["app-key_by-2-repartition"]


def test_unread_records_of_a_topic_with_another_name_are_rejected() -> None:
    """The message has the coordinates, the topics that the topology reads now, and the name that keeps the topic."""
    at = TopicPartition("app-key_by-2-repartition", 3)
    with pytest.raises(SchemaMismatch) as raised:
        raise_unread(at, 5, ["clicks", "app-key_by-3-repartition"], "app")
    message = str(raised.value)
    assert "app-key_by-2-repartition-3 holds records" in message
    assert "its own topics are app-key_by-3-repartition." in message
    assert "name='key_by-2'" in message
    assert "until everything is read" in message
    assert "penstock streams reset" in message


async def test_a_topic_that_cannot_be_read_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for unread records in a topic that the topology left raises KafkaTimeout, which is retried."""
    at = TopicPartition("t", 0)
    async with filled(3) as cluster, opened(cluster, auto_offset_reset="none") as consumer:
        assert await has_record_between(consumer, at, 2, 3)
        assert not await has_record_between(consumer, at, 3, 3)
        cluster.control(Api.FETCH, Fail(ErrorCode.LEADER_NOT_AVAILABLE))
        monkeypatch.setattr(source_positions, "UNREAD_TIMEOUT_MS", 50)
        with pytest.raises(KafkaTimeout, match=r"t-0.*1 to 2.*50 ms"):
            await has_record_between(consumer, at, 1, 3)


async def test_a_topic_with_an_open_transaction_was_not_read_to_its_end() -> None:
    """The search for unread records in a topic that the topology left waits for the end of a transaction there."""
    at, builder, own = (
        TopicPartition("app-gone-repartition", 0),
        StreamsBuilder(),
        StreamsSettings(application_id="app"),
    )
    builder.stream("t").to("out")
    task = StreamTask(builder.build(), 0, application="app")
    task.sources = {"t": 3, at.topic: 0}
    async with filled(3) as cluster, opened(cluster) as consumer:
        cluster.create_topic(at.topic)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka, ProducerSettings(transactional_id="other")) as producer:
            await producer.init_transactions()
            await producer.begin_transaction()
            await (await producer.send(at.topic, b"{}", partition=0))

            async def commit_once(_: Request) -> None:
                control.remove()
                await producer.commit_transaction()

            control = cluster.control(Api.FETCH, commit_once)
            with pytest.raises(SchemaMismatch, match=str(at)):
                await SourcePositions(kafka, own, CollectorRegistry()).find(task, consumer, [TopicPartition("t", 0)])


def test_a_commit_before_the_end_of_the_one_before_is_in_another_log() -> None:
    """A log with the earlier commit has no room for it there. An unknown offset proves nothing."""
    position = ChangelogPosition("id", 5, markers=1)
    position.written(8)
    assert position.between(2, -1) == range(9, 9)
    assert position.written(-1) == CommitPosition("id", 0)
    assert position.between(2, 14) == range(9, 14)
    with pytest.raises(LogReplaced, match=r"offset 11.*12.*before"):
        position.between(2, 11)


def test_records_of_others_before_a_marker_are_searched() -> None:
    """Others may write between a commit's progress record and its transaction marker, too."""
    position = ChangelogPosition("id", 5, markers=1)
    assert position.between(2, 8) == range(5, 5)
    assert position.between(2, 9) == range(5, 9)


def test_a_takeover_record_that_cannot_be_decoded_is_an_error() -> None:
    """Then an owner cannot know whether its own commits count. Another entry of a later version is no takeover."""
    own, later = (encode_takeover(epoch, Takeover("app", "i", 0)) for epoch in (3, 4))
    values = [later, own, encode_deleted(0, 4, 1, 1), b"foreign", None, later, b"\x03L", b"\x03" + later[1:]]
    offsets = np.arange(40, 40 + len(values))
    columns = Columns("app-changelog", 2, [None] * len(values), values, offsets, offsets)
    assert _find_takeover(columns, range(41, 45), 3) is None
    assert _find_takeover(columns, range(41, 47), 3) == 45
    with pytest.raises(CorruptRecord, match=r"app-changelog-2 at offset 47.*version 3"):
        _find_takeover(columns, range(46, 48), 3)


async def test_state_that_does_not_fit_is_reported_with_its_partition() -> None:
    """The error of a takeover names the changelog's topic and partition, and the difference."""
    async with FakeCluster() as cluster, chain_of(cluster, "clicks", 1) as chain:
        async with owner(chain, "exactly_once") as (changelog, task):
            process_records(task, chain, 0, 10)
            await commit(changelog, task, chain)
        other = ChangelogPartition(chain.kafka, chain.settings(), 0, "other")
        await other.open()
        with pytest.raises(SchemaMismatch, match=r"^clicks-changelog-0: .*'s'.*sum"):
            await other.take_over(lambda: StreamTask(topology("clicks", sum=Count()), 0, application="clicks"))
        await other.close()
