"""Commits of an instance's tasks: the group's offsets, commits that are aborted or interrupted by a crash, and purged
records.

After any aborted commit a task is discarded and restored, so that its outputs are written again, once. A task that kept
its state would never write the removed windows of that commit again. A process is killed between kernel, encoding and
commit. The next one produces the output of an uninterrupted run.
"""

from __future__ import annotations

import asyncio
import signal
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import IllegalState, PenstockError, ProducerFenced, RecordTooLarge, UnknownMember
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    TopicPartition,
)
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.runtime import repartition_purge
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, LogReplaced, RecordRejected
from penstock.shared.streams.runtime.repartition_purge import RepartitionPurge
from penstock.shared.streams.runtime.task_commits import TaskCommits
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.local_state import CommitOffsetUnknown
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import Action, Api, ErrorCode, Fail, FakeCluster, Request
from penstock.shared.testing.manual_clock import ManualClock
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.stream_worker_child import POINTS
from tests.integration.test_soak_crashes import State, rows_of
from tests.integration.test_stream_worker import (
    GAP_MS,
    GRACE_MS,
    GUARANTEES,
    Chain,
    chain_of,
    child,
    events,
    running,
    topology,
    until,
    wait_or_raise,
)


class Member:
    """A group member as commits see it: it accepts or rejects offsets, and keeps those that it could not commit."""

    def __init__(self, error: PenstockError | None = None, *, is_closed: bool = False) -> None:
        self._error, self._is_closed = error, is_closed
        self.pending: dict[TopicPartition, OffsetAndMetadata] = {}
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}

    def group_metadata(self) -> GroupMetadata:
        return GroupMetadata("app")

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if self._error is not None:
            self.pending |= offsets
            raise self._error
        self.committed |= offsets

    def forget_commits(self) -> None:
        if self._is_closed:
            raise IllegalState("closed")
        self.pending.clear()


async def group_offsets(member: Any) -> None:
    """Commit the offsets of two tasks under at-least-once."""
    commits = TaskCommits(StreamsSettings(processing_guarantee="at_least_once"), SYSTEM_CLOCK, CollectorRegistry())
    held: Any = [(SimpleNamespace(partition=p), SimpleNamespace(sources={"in": 10 + p})) for p in range(2)]
    await commits._commit_group_offsets(held, member)


async def test_group_offsets_follow_the_progress_records() -> None:
    """Without transactions a task's position is committed after its progress record is written."""
    member = Member()
    await group_offsets(member)
    assert {at.partition: to.offset for at, to in member.committed.items()} == {0: 10, 1: 11}


@pytest.mark.parametrize("is_closed", [False, True])
async def test_group_offsets_that_were_rejected_are_not_sent_later(is_closed: bool) -> None:
    """In a later generation they would be from commits that a new owner has overtaken, and it could not restore."""
    member = Member(UnknownMember("gone"), is_closed=is_closed)
    await group_offsets(member)
    assert (member.committed, bool(member.pending)) == ({}, is_closed)


class Elsewhere:
    """A changelog partition whose topic was replaced by another."""

    topic_partition = TopicPartition("app-changelog", 0)

    async def commit(self, commit: object, group: GroupMetadata) -> CommitPosition:
        raise LogReplaced("made again")

    async def close(self, timeout_ms: float | None = None) -> None:
        pass


def test_a_rejected_record_names_the_settings_that_do_not_fit() -> None:
    """The topic must take the record. A dead letter or a late record may be larger than `max_request_size`, so to lower
    that setting is not enough."""
    record = ProducerRecord("t", b"x" * 1_000, b"k")
    size = record_size(b"k", record.value, [])
    for bytes_max in (size - 1, size + 1):
        error = RecordRejected(record, 0, bytes_max, RecordTooLarge("too large"))
        assert f"max.message.bytes must be at least {size}" in str(error)
        assert f"max_request_size={bytes_max}" in str(error)


async def test_a_rejected_progress_record_is_described() -> None:
    """It has no key. The named schedules make it large, so the error has their number."""
    task = StreamTask(topology(TOPIC), 0, application="app")
    task.initialize(0)
    for i in range(40):
        task.schedule(1, PunctuationType.STREAM_TIME, print, name=f"timer-{i}")
    settings = StreamsSettings(application_id="app")
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        cluster.create_topic(settings.changelog_topic, 1, configs={"max.message.bytes": "1000"})
        changelog = ChangelogPartition(kafka, settings, 0, "me")
        await changelog.open()
        with pytest.raises(RecordRejected, match=r"progress record .* 40 named schedules"):
            await changelog.commit(task.prepare_commit(0), GroupMetadata("app"))
        await changelog.close()


async def test_a_dead_letter_may_be_as_large_as_its_topic_allows() -> None:
    """A record that its topic accepted only compressed becomes a dead letter if the dead-letter topic takes it."""
    large = b"{" + b" " * 3_000_000
    compressed = ProducerSettings(compression_type="gzip", max_request_size=2 * len(large))
    async with FakeCluster(configs=BROKER) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        cluster.create_topic(f"{TOPIC}-dlq", 1, configs={"max.message.bytes": str(2 * len(large))})
        async with Producer(chain.kafka, compressed) as producer:
            await (await producer.send(TOPIC, large, key=b"k"))
        async with running(chain.worker()) as loop:
            await wait_or_raise(loop, until(lambda: has_offset(chain, 1)))
        assert await chain.values("dlq") == [large]


async def has_offset(chain: Chain, offset: int) -> bool:
    """Whether the application has committed this offset of its source partition."""
    async with Admin(chain.kafka) as admin:
        at = (await admin.group_offsets(chain.topic)).get(TopicPartition(chain.topic, 0))
    return at is not None and at.offset == offset


def owned_on_disk(state: StateDirectory, topology: Topology, changelog: object) -> tuple[OwnedTask, StreamTask]:
    """A started task of partition 0 with stores on disk."""
    owned = OwnedTask(changelog)  # type: ignore[arg-type]
    owned.local = state.state_of(0)
    task = StreamTask(topology, 0, application="app", local=owned.local)
    owned.begin(task, StreamsSettings(), 0)
    task.initialize(0)
    return owned, task


async def test_state_on_disk_is_deleted_if_the_log_lost_its_end(tmp_path: Path) -> None:
    """If a log has lost its end, the offsets on disk belong to other records, so the state on disk is deleted."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    builder, member = StreamsBuilder(), Member()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    owned, task = owned_on_disk(state, builder.build(), Elsewhere())
    task.process(Columns.of([ConsumerRecord("in", 0, 0, 5, b"a", b"{}")]), 0)
    task.prepare_commit(0)
    task.commit_succeeded(CommitPosition("id", 7))
    commits = TaskCommits(StreamsSettings(), SYSTEM_CLOCK, CollectorRegistry())
    with pytest.raises(LogReplaced):
        await commits._write_commit(owned, task, task.prepare_commit(0), member)  # type: ignore[arg-type]
    assert owned.local.checkpoint is not None
    await owned.close()
    again = state.state_of(0)
    assert again.checkpoint is None
    again.close()


class OffsetLost:
    """A changelog partition whose broker does not return the offset of a commit."""

    topic_partition = TopicPartition("app-changelog", 0)

    async def commit(self, commit: object, group: GroupMetadata) -> CommitPosition:
        return CommitPosition("id", 0)

    async def close(self, timeout_ms: float | None = None) -> None:
        pass


async def test_a_task_whose_commit_is_not_on_disk_is_not_committed_again(tmp_path: Path) -> None:
    """If a commit cannot be confirmed on disk, the last commit of a shutdown leaves the task out. Its checkpoint would
    cover rows that were never written."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    builder, member = StreamsBuilder(), Member()
    builder.table("users")
    owned, task = owned_on_disk(state, builder.build(), OffsetLost())
    task.process(Columns.of([ConsumerRecord("users", 0, 0, 5, b"ann", b"{}")]), 0)
    commits = TaskCommits(StreamsSettings(), SYSTEM_CLOCK, CollectorRegistry())
    with pytest.raises(CommitOffsetUnknown):
        await commits._write_commit(owned, task, task.prepare_commit(0), member)  # type: ignore[arg-type]
    task.process(Columns.of([ConsumerRecord("users", 0, 1, 6, b"bob", b"{}")]), 0)
    assert commits.prepare([owned]) == []
    assert task.needs_commit
    await owned.close()


TOPIC = "clicks"
BROKER = {"group.min.session.timeout.ms": "10"}
OUT, CHANGELOG = TopicPartition(f"{TOPIC}-out", 0), TopicPartition(f"{TOPIC}-changelog", 0)
Window = tuple[str, int, int, tuple[object, ...]]


def hopping() -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(TOPIC).group_by_key().hopping_window(GAP_MS, GAP_MS // 3, GRACE_MS)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{TOPIC}-out")
    return builder.build()


KINDS = {"session": topology(TOPIC), "hopping": hopping()}


@cache
def uninterrupted(kind: str, number: int) -> tuple[list[bytes], list[bytes], set[Window], State]:
    """Closed windows and late records, sorted, the live windows and the changelog's state after the first events."""
    driver = TopologyTestDriver(KINDS[kind], errors=ErrorHandlers())
    for _, key, timestamp, at in events(number, 1):
        driver.pipe(TOPIC, key=key, value=b'{"id":%d}' % at, timestamp=timestamp)
    closed, late = ([record.value or b"" for record in driver.read(f"{TOPIC}-{name}")] for name in ("out", "late"))
    rows = {(s.key, s.start, s.end, tuple(s.states)) for s in driver.task.stores["s"].rows()}
    return sorted(closed), sorted(late), rows, State.of(driver.changelog)


@pytest.mark.parametrize(
    ("kind", "api", "code", "partition", "before"),
    [
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, OUT, 300),
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, CHANGELOG, 300),
        ("session", Api.TXN_OFFSET_COMMIT, ErrorCode.ILLEGAL_GENERATION, None, 300),
        ("session", Api.END_TXN, ErrorCode.UNKNOWN_SERVER_ERROR, None, 300),
        ("session", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, OUT, 0),
        ("session", Api.PRODUCE, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, OUT, 300),
        ("session", Api.PRODUCE, ErrorCode.INVALID_TXN_STATE, CHANGELOG, 300),
        ("session", Api.END_TXN, ErrorCode.INVALID_PRODUCER_ID_MAPPING, None, 300),
        ("hopping", Api.PRODUCE, ErrorCode.INVALID_REQUIRED_ACKS, CHANGELOG, 300),
        ("hopping", Api.END_TXN, ErrorCode.UNKNOWN_SERVER_ERROR, None, 300),
    ],
)
async def test_an_aborted_commit_is_done_again(
    kind: str, api: Api, code: ErrorCode, partition: TopicPartition | None, before: int
) -> None:
    """Whichever step of the first or a later commit fails, results, late records and state are those of an
    uninterrupted run."""

    def fail(request: Request) -> Action | None:
        if partition is None or partition in request.partitions():
            return Fail(code)
        return None

    async with FakeCluster(configs=BROKER) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        worker = chain.worker(KINDS[kind])
        async with running(worker):
            await chain.send(before)
            await chain.wait_processed(worker)
            fault = cluster.control(api, fail, times=1)
            await chain.send(600 - before)
            await chain.wait_processed(worker)
            assert fault.acted == 1
            (owned,) = worker.tasks().values()
            assert owned.task is not None
            assert owned.task.epoch == 2
            rows = {(s.key, s.start, s.end, tuple(s.states)) for s in owned.task.stores["s"].rows()}
            assert owned.task.vectorized_executors
        closed, late, live, _ = uninterrupted(kind, len(chain.sent))
        assert rows == live
        assert (await chain.values("out"), await chain.values("late")) == (closed, late)
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert progress.sources == {TOPIC: 600}


@pytest.mark.parametrize(
    ("error", "events"),
    [
        (LogReplaced("recreated"), ["task failed: restoring it"] * 2),
        (ProducerFenced("took too long"), ["fenced: the instance joins its group again"] * 2),
    ],
    ids=["replaced", "fenced"],
)
async def test_a_commit_that_always_fails_ends_the_worker(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError, events: list[str]
) -> None:
    """A changelog that is recreated again and again, or a transaction that is always too long, ends the worker after
    `restore_attempts_max` retries. Only a fenced task makes the instance join its group again."""

    async def fail(self: ChangelogPartition, *given: object) -> None:
        raise error

    monkeypatch.setattr(ChangelogPartition, "commit", fail)
    async with FakeCluster(configs=BROKER) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        await chain.send(10)
        with capture_logs() as logged, pytest.raises(type(error)):
            async with running(chain.worker(KINDS["session"], restore_attempts_max=2)) as loop:
                await wait_or_raise(loop, asyncio.Event().wait())
        attempts = [(one["event"], one["attempt"]) for one in logged if one["event"] in events]
        assert attempts == list(zip(events, (1, 2), strict=True))


QUICK = {"session_timeout_ms": 500, "heartbeat_interval_ms": 100, "poll_ms": 10}
EVENTS_BETWEEN = 200
DEADLINE_SECONDS = 60
DEATHS = [(point, calls) for point in POINTS for calls in ((1, 2, 3) if point == "a write" else (2,))]
"""A commit writes twice at least once: results and entries, then the progress record; once in a transaction."""


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_killed_at_each_point(guarantee: str) -> None:
    """A task that is killed at each point in turn has the results and state of an uninterrupted run. With
    at_least_once, results may repeat."""
    async with FakeCluster(configs=BROKER) as cluster, chain_of(cluster, TOPIC, 1) as chain:
        for death in DEATHS:
            await chain.send(EVENTS_BETWEEN)
            async with child(chain, guarantee, dies_after=death, **QUICK) as process:
                async with asyncio.timeout(DEADLINE_SECONDS):
                    assert await process.wait() == -signal.SIGKILL
        async with running(worker := chain.worker(processing_guarantee=guarantee, **QUICK)):
            await chain.wait_processed(worker)
            (owned,) = worker.tasks().values()
            rows = rows_of(owned)
        state = State.of((entry.key, entry.value) for entry in await chain.read(f"{TOPIC}-changelog"))
        closed, late, _, expected = uninterrupted("session", len(chain.sent))
        assert state == expected
        assert state.reader.epoch == len(DEATHS) + 1
        assert rows == {at: end for at, (end, _) in state.live.items()}
        got = await chain.values("out"), await chain.values("late")
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:
            assert len(got[0]) > len(closed), "nobody was killed between results and progress"
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))


OWN = TopicPartition("app-by-user-repartition", 0)


def repartitioned() -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").key_by(lambda record: "k", name="by-user").repartition().to("out")
    return builder.build().of_application("app")


async def test_committed_repartition_records_are_deleted() -> None:
    """At most once an interval, records of a repartition topic are deleted up to the last committed position."""
    async with FakeCluster() as cluster:
        kafka, clock = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), ManualClock(0)
        cluster.create_topic(OWN.topic, 1)
        async with Producer(kafka) as producer, Admin(kafka) as admin:
            await (await producer.send_many([ProducerRecord(OWN.topic, b"{}", b"k")] * 10))

            async def first_offset() -> int:
                return (await admin.list_offsets({OWN: "earliest"}))[OWN]

            purge = RepartitionPurge(kafka, repartitioned(), clock, 1_000)
            purge.committed(0, {"in": 50, OWN.topic: 4})
            await purge.run()
            assert await first_offset() == 0
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 4
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 4
            purge.committed(0, {"in": 90, OWN.topic: 9})
            clock.advance(1_000)
            await purge.run()
            assert await first_offset() == 9


async def test_a_failed_deletion_of_records_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing topic is logged and ends nothing. An application without repartition topics sends no request."""
    monkeypatch.setattr(repartition_purge, "PURGE_TIMEOUT_MS", 50)
    clock = ManualClock(0)
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        purge = RepartitionPurge(kafka, repartitioned(), clock, 1_000)
        purge.committed(0, {OWN.topic: 4})
        clock.advance(1_000)
        await purge.run()
        assert purge._deleted == {}
    plain = StreamsBuilder()
    plain.stream("in").to("out")
    await RepartitionPurge(kafka, plain.build(), clock, 0).run()
