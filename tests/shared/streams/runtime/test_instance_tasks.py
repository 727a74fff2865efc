"""The tasks of an instance: where their state is, how they share fetching and a turn's time, and how they are
closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import ConfigError, IllegalState
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, LogReplaced
from penstock.shared.streams.runtime.source_positions import AheadPartition, GroupAhead
from penstock.shared.streams.runtime.stream_task_factory import CLEAN_INTERVAL_MS, StreamTaskFactory
from penstock.shared.streams.runtime.stream_worker import (
    QUIET_MS,
    StreamWorker,
    _advance_idle_tasks,
    _punctuate_wall_clock_of_all,
    pause_full_partitions,
)
from penstock.shared.streams.runtime.task_commits import TaskCommits
from penstock.shared.streams.runtime.turn_time import PROCESSING_MS_MAX, TurnTime
from penstock.shared.streams.runtime.worker_tasks import OwnedTask, RunningTask, WorkerTasks
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.persistent_stores import PersistentWindowStore
from penstock.shared.streams.task.metrics import RestoreMetrics
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.windows.window_store import WindowStore
from penstock.shared.testing.fake_broker import FakeCluster
from penstock.shared.testing.manual_clock import ManualClock


def owned_of(partition: int) -> OwnedTask:
    """A task that is assigned and not restored yet."""
    of = (
        KafkaSettings(),
        StreamsSettings(),
        partition,
        "here",
        ManualClock(),
        RestoreMetrics(CollectorRegistry()),
    )
    return OwnedTask(ChangelogPartition(*of))


def begin(owned: OwnedTask, settings: StreamsSettings | None = None) -> None:
    settings = settings or StreamsSettings()
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    owned.begin(StreamTask(builder.build(), owned.partition, application="app"), settings, 0)


def test_a_partition_is_held_while_the_group_meets() -> None:
    """The partition of a suspended task is still held."""
    tasks = WorkerTasks()
    assert not tasks.holds(5)
    tasks.owned[5] = owned_of(5)
    assert tasks.holds(5)
    tasks.suspended[5] = tasks.owned.pop(5)
    assert tasks.holds(5)
    tasks.suspended.clear()
    assert not tasks.holds(5)


def worker_of(*restores: Coroutine[Any, Any, StreamTask], **more: Any) -> StreamWorker:
    """A worker without a broker; its partitions from 0 on are paused, and restored by these coroutines."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    worker = StreamWorker(KafkaSettings(), StreamsSettings(application_id="app"), builder.build(), **more)
    consumer: Any = Fetching(*(TopicPartition("in", partition) for partition in range(len(restores))))
    worker._consumer = consumer
    worker._is_started = True
    for partition, restore in enumerate(restores):
        consumer.pause(TopicPartition("in", partition))
        worker._owned[partition] = owned = owned_of(partition)
        owned.restoring = asyncio.create_task(restore)
    return worker


async def restored(partition: int) -> StreamTask:
    """Restore a task whose next record is at offset 7, past a transaction marker that it has not committed."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    task = StreamTask(builder.build(), partition, application="app")
    task.sources["in"] = 6
    task.advance_position("in", 7)
    return task


async def ended(worker: StreamWorker, *partitions: int) -> None:
    """Wait until the restores of these partitions have ended."""
    restores = [worker.tasks()[partition].restoring for partition in partitions]
    await asyncio.wait([one for one in restores if one is not None])


async def test_a_worker_is_started_once() -> None:
    """A turn before `startup`, and a second `startup`, raise IllegalState that says so."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    async with FakeCluster() as cluster:
        cluster.create_topic("in", 1)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        worker = StreamWorker(kafka, StreamsSettings(application_id="app"), builder.build())
        try:
            with pytest.raises(IllegalState, match=r"the worker is new; call startup\(\) first"):
                await worker.run_once()
            await worker.startup()
            with pytest.raises(IllegalState, match="the worker was started already"):
                await worker.startup()
            await worker.run_once()
        finally:
            await worker.shutdown()


def states(worker: StreamWorker) -> list[str]:
    return [one["state"] for one in worker.describe()["tasks"]]


async def test_a_restored_task_starts_when_the_worker_collects_it() -> None:
    """Until then it is not running, even if its restore has ended. So it takes no records and commits nothing."""
    punctuated: list[int] = []

    def schedule(task: StreamTask) -> None:
        task.schedule(1, PunctuationType.WALL_CLOCK_TIME, punctuated.append)

    worker = worker_of(restored(0), on_task=schedule, clock=ManualClock())
    consumer: Any = worker._consumer

    def turn() -> int:
        """Punctuate, and prepare a commit; return the number of prepared tasks."""
        _punctuate_wall_clock_of_all(worker.tasks().values(), 1_000, 500, ManualClock())
        commits = TaskCommits(StreamsSettings(), ManualClock(), CollectorRegistry())
        return len(commits.prepare(list(worker.tasks().values())))

    await ended(worker, 0)
    assert (turn(), punctuated, states(worker)) == (0, [], ["restoring"])
    assert (worker._tasks.running(), consumer.positions) == ({}, {})
    await worker._collect_restored_tasks()
    assert (list(worker._tasks.running()), consumer.paused()) == ([0], frozenset())
    assert consumer.positions == {TopicPartition("in", 0): 7}
    assert (turn(), punctuated, states(worker)) == (1, [1_000], ["running"])


@pytest.mark.parametrize(
    ("ran_ms", "needs_commit", "attempts"),
    [(QUIET_MS - 1, False, [1, 2]), (QUIET_MS, False, [1, 1]), (QUIET_MS, True, [1, 2])],
    ids=["briefly", "quietly", "with a commit due"],
)
async def test_failures_are_forgotten_once_a_task_runs_quietly(
    monkeypatch: pytest.MonkeyPatch, ran_ms: int, needs_commit: bool, attempts: list[int]
) -> None:
    """A failed commit is the first in a row again if the task has run for QUIET_MS and has nothing to commit."""

    async def fail(*given: object) -> None:
        raise LogReplaced("recreated")

    async def restore(worker: StreamWorker, partition: int, owned: OwnedTask) -> StreamTask:
        return await restored(partition)

    monkeypatch.setattr(ChangelogPartition, "commit", fail)
    monkeypatch.setattr(StreamWorker, "_restore_task", restore)
    worker = worker_of(restored(0), clock=(clock := ManualClock()))

    async def running_task() -> StreamTask:
        await ended(worker, 0)
        await worker._collect_restored_tasks()
        task = worker.tasks()[0].task
        assert task is not None
        return task

    async def fail_commit(task: StreamTask) -> None:
        task.needs_commit = True
        await worker._begin_commit()
        # Before the next commit begins, the failure of this one is handled.
        await worker._begin_commit()

    with capture_logs() as logged:
        await fail_commit(await running_task())
        task = await running_task()
        task.needs_commit = needs_commit
        clock.advance(ran_ms)
        await worker._begin_commit()
        await fail_commit(task)
    assert [one["attempt"] for one in logged if one["event"] == "task failed: restoring it"] == attempts


async def test_a_restored_task_that_cannot_start_ends_the_worker() -> None:
    """An error of `on_task` is raised, and the task is not running."""

    def fail(task: StreamTask) -> None:
        raise ValueError(f"partition {task.partition}")

    worker = worker_of(restored(0), on_task=fail)
    await ended(worker, 0)
    with pytest.raises(ValueError, match="partition 0"):
        await worker._collect_restored_tasks()
    assert worker._tasks.running() == {}


async def test_a_turn_that_is_cancelled_after_its_poll_loses_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The records that the cancelled turn fetched are processed by the next one."""
    polled = asyncio.Event()

    async def hang() -> None:
        polled.set()
        await asyncio.Event().wait()

    worker = worker_of(restored(0), clock=ManualClock())
    await ended(worker, 0)
    await worker._collect_restored_tasks()
    consumer: Any = worker._consumer
    consumer.fetched = {TopicPartition("in", 0): Columns.of([ConsumerRecord("in", 0, 7, 0, None, b"{}")])}
    with monkeypatch.context() as patched:
        patched.setattr(worker._tables, "poll", hang)
        turn = asyncio.create_task(worker.run_once(0))
        await polled.wait()
        turn.cancel()
        await asyncio.wait({turn})
    await worker.run_once(0)
    task = worker.tasks()[0].task
    assert task is not None
    assert (task.sources["in"], task.metrics.totals().records) == (8, 1)


async def test_partitions_with_offsets_ahead_are_reported_together() -> None:
    """GroupAhead is raised once every restore has ended, and names the partitions of all of them."""
    gate = asyncio.Event()

    async def ahead(partition: int, *, waits: bool = False) -> StreamTask:
        if waits:
            await gate.wait()
        raise GroupAhead("app", [AheadPartition(TopicPartition("in", partition), 5, None, True)])

    worker = worker_of(ahead(0), ahead(1, waits=True), restored(2))
    await ended(worker, 0, 2)
    await worker._collect_restored_tasks()
    assert list(worker._tasks.running()) == [2]
    gate.set()
    await ended(worker, 1)
    with pytest.raises(GroupAhead) as raised:
        await worker._collect_restored_tasks()
    assert [one.at.partition for one in raised.value.ahead] == [0, 1]


def test_a_task_that_was_begun_is_running() -> None:
    """A task runs once it was begun. The text of the tasks has their partitions."""
    tasks = WorkerTasks()
    tasks.owned[0] = owned = owned_of(0)
    assert tasks.running() == {}
    begin(owned)
    assert tasks.running() == {0: owned.running}
    assert repr(tasks) == "WorkerTasks(owned [0], suspended [])"


@pytest.mark.parametrize(("given", "limit"), [({}, 1_000), ({"buffered_records_per_partition": 4}, 4)])
def test_how_many_records_wait_is_a_setting(given: dict[str, Any], limit: int) -> None:
    """A partition is full with more than `buffered_records_per_partition` records, by default Kafka Streams' 1,000."""
    owned = owned_of(3)
    begin(owned, StreamsSettings(**given))
    assert owned.running is not None
    inputs = owned.running.inputs
    full = []
    for at in range(limit + 1):
        inputs.add(Columns.of([ConsumerRecord("in", 3, at, 0, b"k", b"{}")]))
        full.append(inputs.is_full("in"))
    assert full == [False] * limit + [True]


def test_a_task_that_cannot_be_closed_is_in_the_log() -> None:
    """All tasks are removed, and the log names the one whose closing failed, with the reason."""
    tasks = WorkerTasks()
    tasks.owned |= {3: owned_of(3), 4: owned_of(4)}
    with capture_logs() as lines:
        tasks.closed([None, OSError("no response")])
    assert [(line["event"], line["log_level"], line["partition"], line["reason"]) for line in lines] == [
        ("a task cannot be closed", "error", 4, "no response")
    ]
    assert tasks.all() == []


async def test_an_error_while_closing_a_processor_is_logged() -> None:
    """An error while closing a processor is logged with task and node. The other processors and the task are still
    closed."""
    calls: list[str] = []

    class Closing(Processor):
        def __init__(self, message: str) -> None:
            self._message = message

        def close(self) -> None:
            calls.append(self._message)
            if self._message:
                raise ValueError(self._message)

    builder = StreamsBuilder()
    stream = builder.stream("in")
    for name, message in (("first", "disk full"), ("second", ""), ("third", "no such file")):
        stream.process(partial(Closing, message), name=name)
    owned = owned_of(5)
    task = StreamTask(builder.build(), 5, application="app")
    owned.begin(task, StreamsSettings(), 0)
    with capture_logs() as lines:
        await owned.close(100)
        await owned.close(100)
    assert calls == ["disk full", "", "no such file"]
    ((line),) = [line for line in lines if line["log_level"] == "error"]
    assert (line["event"], line["partition"]) == ("a task was not closed as it should be", 5)
    assert line["reason"] == (
        "the processors of partition 5 cannot be closed: node 'first': ValueError: disk full; "
        "node 'third': ValueError: no such file"
    )


def task_factory(clock: Clock = SYSTEM_CLOCK, result: str = "n", **given: str) -> StreamTaskFactory:
    settings, registry = StreamsSettings(**given), CollectorRegistry()  # type: ignore[arg-type]
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(10)
    sessions.aggregate("s", **{result: Count()}).on_close().to("out")
    return StreamTaskFactory(settings, builder.build(), clock, registry)


def test_state_is_in_memory_by_default() -> None:
    """By default state is in memory, without a local folder."""
    made = task_factory()
    made.startup()
    assert made.open_state(0) is None
    assert type(made.task(0, None).stores["s"]) is WindowStore
    made.shutdown()


def test_state_on_disk_is_below_the_applications_folder(tmp_path: Path) -> None:
    """With rocksDB each partition has a folder, with the stores of its task."""
    made = task_factory(default_dsl_store="rocksDB", state_dir=str(tmp_path), application_id="app")
    made.startup()
    state = made.open_state(3)
    assert state is not None
    assert type(made.task(3, state).stores["s"]) is PersistentWindowStore
    assert (tmp_path / "app" / "3" / "CURRENT").is_file()
    state.close()
    made.shutdown()


def test_a_standby_is_counted_only_once_it_runs() -> None:
    """A standby task cannot schedule punctuations and has no metrics of the instance. Both begin when it becomes
    active."""
    made = task_factory()
    task = made.standby_task(3)
    with pytest.raises(IllegalState, match=r"partition 3.*schedule"):
        task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    labels = {"partition": "3"}
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) is None
    made.start(task, {})
    task.schedule(5, PunctuationType.WALL_CLOCK_TIME, print)
    assert made._registry.get_sample_value("penstock_streams_records_total", labels) == 0


def test_state_of_partitions_elsewhere_is_deleted_now_and_then(tmp_path: Path) -> None:
    """State that no task has used for the delay is searched for once a minute."""
    clock = ManualClock(int(time.time() * 1000) + 3_600_000)
    made = task_factory(clock, default_dsl_store="rocksDB", state_dir=str(tmp_path), application_id="app")
    made.startup()
    state = made.open_state(3)
    assert state is not None
    state.close()
    made.clean()
    assert (tmp_path / "app" / "3").is_dir()
    clock.advance(CLEAN_INTERVAL_MS)
    made.clean()
    assert not (tmp_path / "app" / "3").exists()
    made.shutdown()


def test_names_that_a_lake_cannot_have_are_rejected_where_there_is_one() -> None:
    """With a lake, a name that collides with a column of its tables is rejected at the start. Without a lake the name
    is valid."""
    assert task_factory(result="state").task(0, None).stores
    with pytest.raises(ConfigError, match=r"'s'.*'state'.*closed/s"):
        task_factory(result="state", lake="lake")
    assert task_factory(lake="lake").task(0, None).stores


SIZE = 100


class Fetching:
    """A consumer's partitions, and which of them are paused."""

    def __init__(self, *partitions: TopicPartition) -> None:
        self._assigned, self._paused = frozenset(partitions), set[TopicPartition]()
        self.positions: dict[TopicPartition, int] = {}
        self.fetched: dict[TopicPartition, Columns] = {}
        self.end_ages_ms: dict[TopicPartition, int] = dict.fromkeys(partitions, 0)

    async def poll(self, timeout_ms: float, max_records: int | None) -> dict[TopicPartition, Columns]:
        fetched = self.fetched
        self.fetched = {}
        self.positions |= {at: int(columns.offsets[-1]) + 1 for at, columns in fetched.items()}
        return fetched

    def known_position(self, at: TopicPartition) -> int | None:
        return self.positions.get(at)

    def known_lag(self, at: TopicPartition) -> int | None:
        return None

    def assignment(self) -> frozenset[TopicPartition]:
        return self._assigned

    def paused(self) -> frozenset[TopicPartition]:
        return frozenset(self._paused)

    def pause(self, at: TopicPartition) -> None:
        assert at not in self._paused
        self._paused.add(at)

    def resume(self, *at: TopicPartition) -> None:
        for one in at:
            self._paused.remove(one)

    def seek(self, at: TopicPartition, offset: int) -> None:
        self.positions[at] = offset

    def group_metadata(self) -> GroupMetadata:
        return GroupMetadata("app")

    def end_age_ms(self, at: TopicPartition) -> int | None:
        return self.end_ages_ms.get(at)


def task_of(partition: int) -> RunningTask:
    """A task that merges two topics."""
    builder, settings = StreamsBuilder(), StreamsSettings()
    builder.stream("a").merge(builder.stream("b")).to("out")
    owned = owned_of(partition)
    owned.begin(StreamTask(builder.build(), partition, application="app"), settings, 0)
    assert owned.running is not None
    return owned.running


def records(topic: str, partition: int, number: int) -> Columns:
    values = [ConsumerRecord(topic, partition, i, i, None, b"x" * SIZE) for i in range(number)]
    return Columns.of(values)


def test_bytes_of_all_tasks_hold_the_fetching_up() -> None:
    """Partitions with buffered records are not fetched until enough of them are processed. A partition without buffered
    records is fetched, because the others may wait for it."""
    tasks = {p: task_of(p) for p in (0, 1)}
    at = {(topic, p): TopicPartition(topic, p) for topic in ("a", "b") for p in tasks}
    consumer: Any = Fetching(*at.values())
    for p, running in tasks.items():
        running.inputs.add(records("a", p, 5))
    pause_full_partitions(tasks, consumer, 10 * SIZE)
    assert consumer.paused() == frozenset()
    pause_full_partitions(tasks, consumer, 10 * SIZE - 1)
    assert consumer.paused() == {at["a", 0], at["a", 1]}
    tasks[0].inputs.process(0, {"b": 0})
    pause_full_partitions(tasks, consumer, 10 * SIZE - 1)
    assert consumer.paused() == frozenset()


@pytest.mark.parametrize("is_slow", [False, True])
def test_wall_clock_schedules_that_block_the_heartbeats_are_logged(is_slow: bool) -> None:
    """The log names the punctuations and their partition if they take longer than `blocking_ms_max`."""
    clock, owned = ManualClock(), owned_of(5)
    begin(owned)
    assert owned.task is not None
    owned.task.initialize(0)
    owned.task.schedule(10, PunctuationType.WALL_CLOCK_TIME, lambda now_ms: clock.advance(500 + is_slow))
    with capture_logs() as logs:
        _punctuate_wall_clock_of_all([owned], 0, 500, clock)
        _punctuate_wall_clock_of_all([owned], 1_000, 500, clock)
    assert blocked_steps(logs) == [("the WALL_CLOCK_TIME punctuations of partition 5", 501)] * is_slow


@pytest.mark.parametrize("is_slow", [False, True])
def test_an_advance_of_idle_time_that_blocks_the_heartbeats_is_logged(is_slow: bool) -> None:
    """The step includes all windows that the advance closes."""
    clock, builder, owned = ManualClock(), StreamsBuilder(), owned_of(5)
    windows = builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count())
    windows.on_close().peek(lambda record: clock.advance(250 + is_slow))
    task = StreamTask(builder.build(), 5, application="app")
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("in", 5, at, 5, key, b"{}") for at, key in enumerate((b"a", b"b"))]), 0)
    owned.begin(task, StreamsSettings(idle_timeout_ms=1_000), 0)
    assert owned.running is not None
    consumer: Any = Fetching(TopicPartition("in", 5))
    with capture_logs() as logs:
        for _ in range(2):
            _advance_idle_tasks({5: owned.running}, consumer, 8, 500, clock)
            clock.advance(1_000)
    assert clock.now_ms() == 2_000 + 2 * (250 + is_slow)
    assert blocked_steps(logs) == [("the advance of partition 5's idle time", 502)] * is_slow


@pytest.mark.parametrize("missing", ["", "a", "b"])
def test_a_task_is_not_idle_while_a_topic_is_missing_or_gets_no_answer(missing: str) -> None:
    """Time advances only as far as the partition whose end was known the longest ago allows, and only while each source
    topic is assigned."""
    clock, builder, owned, a, b = ManualClock(), StreamsBuilder(), owned_of(5), *(TopicPartition(t, 5) for t in "ab")
    merged = builder.stream("a").merge(builder.stream("b"))
    merged.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = StreamTask(builder.build(), 5, application="app")
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("a", 5, 0, 7, b"k", b"{}")]), 0)
    owned.begin(task, StreamsSettings(idle_timeout_ms=1_000), 0)
    assert owned.running is not None
    fetching = Fetching(*(at for at in (a, b) if at.topic != missing))
    consumer: Any = fetching
    for age_ms, expected in ((0, 7), (1_000, 7), (2_000, 7), (100, 7 + 2_900)):
        fetching.end_ages_ms[b] = age_ms
        _advance_idle_tasks({5: owned.running}, consumer, 8, 500, clock)
        assert task.stream_time_ms == (7 if missing else expected)
        clock.advance(1_000)


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
@pytest.mark.parametrize("is_slow", [False, True])
def test_a_commit_whose_preparation_blocks_the_heartbeats_is_logged(is_slow: bool, error: Exception | None) -> None:
    """The step includes all windows that the commit updates, and it is logged even if one of them raises."""
    clock, builder, owned = ManualClock(), StreamsBuilder(), owned_of(5)
    settings = StreamsSettings()

    def wait(record: object) -> None:
        clock.advance(settings.blocking_ms_max + is_slow)
        if error is not None:
            raise error

    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_update().peek(wait)
    task = StreamTask(builder.build(), 5, application="app", handlers=ErrorHandlers(process="fail"))
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("in", 5, 0, 5, b"a", b"{}")]), 0)
    owned.begin(task, settings, 0)
    with capture_logs() as logs:
        [(_, _, commit)] = TaskCommits(settings, clock, CollectorRegistry()).prepare([owned])
    assert isinstance(commit, Exception) is (error is not None)
    step = ("the preparation of partition 5's commit", settings.blocking_ms_max + 1)
    assert blocked_steps(logs) == [step] * is_slow


def blocked_steps(logs: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return [(line["step"], line["ms"]) for line in logs if "heartbeats" in line["event"]]


def test_equal_shares() -> None:
    """Each task gets an equal share of the turn. The unused rest of one goes to the tasks after it."""
    clock = ManualClock()
    turn = TurnTime(clock)
    turn.begin(4)
    assert turn.share().ms == PROCESSING_MS_MAX // 4
    clock.advance(10)
    assert turn.share().ms == (PROCESSING_MS_MAX - 10) // 3


def test_a_slow_task_does_not_reduce_the_next_share() -> None:
    """A task that exceeds its share does not reduce the share of the next task."""
    clock = ManualClock()
    turn = TurnTime(clock)
    turn.begin(2)
    slow = turn.share()
    clock.advance(10 * PROCESSING_MS_MAX)
    assert (slow.is_left(), slow.used_ms()) == (False, 10 * PROCESSING_MS_MAX)
    assert turn.share().ms == PROCESSING_MS_MAX // 2


def test_each_share_is_at_least_1_ms() -> None:
    """With very many tasks each share is at least 1 ms. A turn without tasks can begin."""
    turn = TurnTime(ManualClock())
    turn.begin(10 * PROCESSING_MS_MAX)
    assert turn.share().ms == 1
    turn.begin(0)
    assert turn.share().ms == PROCESSING_MS_MAX
