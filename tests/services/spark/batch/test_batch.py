"""The plan of a batch and the rows of its tasks: where each continues, and the inputs that it rejects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry

from penstock.services.spark.batch import batch, batch_task
from penstock.services.spark.batch.batch import (
    BatchJob,
    batch_report,
    live_from_offsets,
    next_offsets,
    partitions_done,
    ranges_to_read,
    require_whole_partitions,
)
from penstock.services.spark.batch.batch_task import (
    FileInput,
    PartitionRange,
    TaskOptions,
    TaskResult,
    first_row_to_read,
    record_columns,
)
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.compact import CompactionReport
from penstock.services.spark.topic_offsets import TopicOffsets
from penstock.shared.common.errors import (
    ChangelogHole,
    ConfigError,
    CorruptRecord,
    DeliveryTimeout,
    InvalidTxnState,
    KafkaTimeout,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PenstockError,
    ProcessingFailed,
    ProducerFenced,
    SchemaMismatch,
    SourceOffsetsMissing,
    TransactionAborted,
)
from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import BatchInput, Progress
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.metrics import Totals
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.manual_clock import ManualClock
from tests import lake_tables


def progress(**given: Any) -> Progress:
    return Progress("app", "exactly_once", given.pop("sources", {}), {}, {}, {}, (), 0, **given)


def held(latest: dict[str, dict[int, int]]) -> dict[str, TopicOffsets]:
    return {topic: TopicOffsets(topic, "id", dict.fromkeys(of, 2), of) for topic, of in latest.items()}


def test_a_topology_that_needs_more_than_its_partition_is_rejected() -> None:
    """If keys change before a window, records pass an internal topic, which the error names."""
    builder = StreamsBuilder()
    rekeyed = builder.stream("in").group_by(str)
    rekeyed.session_window(10).aggregate("s", n=Count()).on_close().to("out")
    with pytest.raises(ConfigError, match=r"this topology needs \S*repartition"):
        require_whole_partitions(builder.build())
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    require_whole_partitions(builder.build())


def test_files_of_one_of_several_source_topics_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The aggregator would never read the records of the other topics before `live_from`."""
    one, two = StreamsBuilder(), StreamsBuilder()
    one.stream("clicks").to("out")
    two.stream("clicks").join(two.table("users"), lambda click, user: click).to("out")
    topologies = {"a:one": one.build(), "a:two": two.build()}
    monkeypatch.setattr(batch, "load_topology", lambda name, options: topologies[name])
    common: dict[str, Any] = {"application": "app", "lake": "lake"}
    session: Any = None
    with pytest.raises(ConfigError, match="this topology reads clicks, users"):
        BatchJob(session, BatchSettings(**common, topology="a:two", files="f", live_from="latest"), str)
    BatchJob(session, BatchSettings(**common, topology="a:one", files="f", live_from="latest"), str)
    BatchJob(session, BatchSettings(**common, topology="a:two"), str)


def test_the_tasks_have_the_drivers_aws_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They restore from the lake on Spark's executors, which do not have the environment of the driver."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    monkeypatch.setattr(batch, "load_topology", lambda name, options: builder.build())
    options = {"AWS_ENDPOINT_URL": "http://s3"}
    settings = BatchSettings(application="app", lake="lake", topology="a:b", lake_options=options)
    session: Any = None
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    job = BatchJob(session, settings, str)
    monkeypatch.delenv("AWS_REGION")
    in_task = job.task_options.settings.streams().lake_options
    assert {name: in_task.get(name) for name in ("AWS_REGION", *options)} == {"AWS_REGION": "eu-west-1", **options}


def test_partitions_with_something_to_read_are_planned() -> None:
    """They are read from the tables' offsets, else from the first offset.

    Partitions with the most records come first.
    """
    ends = {"a": {0: 10, 1: 10, 2: 10, 3: 2}, "b": {0: 5, 1: 5, 2: 5, 3: 2}}
    known = {0: progress(sources={"a": 10, "b": 5}), 1: progress(sources={"a": 9}), 2: progress(sources={"a": 99})}
    assert ranges_to_read(ends, held(ends), known) == [
        PartitionRange(1, {"a": 10, "b": 5}),
        PartitionRange(2, {"a": 10, "b": 5}),
    ]
    assert [part.partition for part in ranges_to_read(ends, held(ends), {})] == [0, 1, 2]


def test_a_topic_that_was_made_again_is_left_to_the_task() -> None:
    """The task rejects it by name. Otherwise a different topic would be reported as having nothing to read."""
    ends = {"a": {0: 10, 1: 10, 2: 10}}
    known = {
        0: progress(sources={"a": 11}),
        1: progress(sources={"a": 10}, source_ids={"a": "other"}),
        2: progress(sources={"a": 10}, source_ids={"a": "id"}),
    }
    assert [part.partition for part in ranges_to_read(ends, held(ends), known)] == [0, 1]


def test_where_the_next_one_goes_on() -> None:
    """It continues after the tasks' offsets, else the tables' offsets, else the planned ends."""
    ends = {"a": {0: 10, 1: 10, 2: 10}}
    outcomes = [TaskResult(0, 10, sources={"a": 9})]
    assert next_offsets(outcomes, {0: progress(sources={"a": 3}), 1: progress(sources={"a": 12})}, ends) == {
        "a": {0: 9, 1: 12, 2: 10}
    }


def test_files_that_were_read_are_known_by_their_fingerprint() -> None:
    """Finished partitions are left out. A state of other files, or of none, is rejected by its partition."""
    done, begun = BatchInput("aa", 7, is_done=True), BatchInput("aa", 3, is_done=False)
    assert partitions_done("app", {}, "aa") == ()
    assert partitions_done("app", {0: progress(input=done), 1: progress(input=begun)}, "aa") == (0,)
    with pytest.raises(ConfigError, match=r"partition 0.*aa.*bb"):
        partitions_done("app", {0: progress(input=done)}, "bb")
    with pytest.raises(ConfigError, match=r"partition 0.*3 rows"):
        partitions_done("app", {0: progress(input=begun)}, "bb")
    with pytest.raises(ConfigError, match=r"partition 4.*state already"):
        partitions_done("app", {4: progress(sources={"a": 1})}, "aa")


def test_topics_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch over topics continues only if the files of all partitions were read to their end."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    monkeypatch.setattr(batch, "load_topology", lambda name, options: builder.build())
    session: Any = None
    job = BatchJob(session, BatchSettings(application="app", lake="lake", topology="a:b"), str)
    known = {p: progress(input=BatchInput("aa", 3, is_done=p == 0)) for p in (0, 1)}
    monkeypatch.setattr(job, "_prepare_batch", lambda: (None, {}, known))
    with pytest.raises(ConfigError, match=r"partition 1.*3 rows"):
        job.run()


def test_tables_of_a_deleted_changelog_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise their progress would count as done, though the changelog has none of it. No topic is created."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    monkeypatch.setattr(batch, "load_topology", lambda name, options: builder.build())
    body = msgspec.json.encode(progress(input=BatchInput("aa", 3, is_done=True)))
    lake_tables.write_state(tmp_path, "app", [], [lake_tables.progress(0, 7, body)])
    session: Any = None
    settings = BatchSettings(application="app", lake=str(tmp_path), topology="a:b", files="f", live_from="latest")
    job = BatchJob(session, settings, str)

    async def nothing() -> set[str]:
        return set()

    monkeypatch.setattr(job, "_require_no_live_instances", nothing)
    monkeypatch.setattr(job, "_list_topics", nothing)
    with pytest.raises(ChangelogHole, match=r"app was made from app-changelog, which does not exist"):
        job.run()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("0:1", r"partitions \[1\]"),
        ("0:1,1:1,2:1", r"no other \(partitions \[2\]\)"),
        ("0:1,1:9", "clicks-1: offset 9.*8"),
        ("0:1,1:1,0:1", "clicks-0: two offsets"),
    ],
)
def test_offsets_that_a_topic_does_not_have(text: str, named: str) -> None:
    """There must be exactly one offset for each partition, within the topic's offsets."""
    with pytest.raises(ConfigError, match=f"live_from: .*{named}"):
        live_from_offsets("clicks", text, {0: 0, 1: 0}, {0: 8, 1: 8})


def test_a_step_that_failed_in_any_compaction_fails_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch compacts until no records are left. The failed step of an earlier round is raised and reported."""
    failures = [[("VACUUM", ConfigError("broken"))], []]

    class Rounds:
        def __init__(self, *_: object) -> None:
            self.maintenance = SimpleNamespace(failed=failures.pop(0))

        def run(self) -> CompactionReport:
            return CompactionReport(1, {0: 0}, {0: 9}, 7, remaining_records=len(failures))

    monkeypatch.setattr(batch, "CompactionJob", Rounds)
    monkeypatch.setattr(batch, "require_whole_partitions", lambda topology: None)
    topology = SimpleNamespace(of_application=lambda name: SimpleNamespace(schemas=tuple))
    monkeypatch.setattr(batch, "load_topology", lambda name, options: topology)
    settings = BatchSettings(application="app", lake="lake", topology="a:b")
    session: Any = None
    job = BatchJob(session, settings, str)
    job._compact_changelog(with_hook=False)
    assert failures == []
    assert job.failed.lines() == ("VACUUM: ConfigError: broken",)
    with pytest.raises(ConfigError, match="broken"):
        job.failed.raise_first()


def test_a_summary_adds_up() -> None:
    """Counts are summed over the tasks. The end offsets are the plan's."""
    outcomes = [TaskResult(p, 10, Totals(10, 4, 1, 2, 3), 2) for p in (0, 1)]
    found = batch_report(outcomes, {"a": {0: 10, 1: 10}}, 3.0, None)
    assert found[:7] == (2, 20, 8, 2, 4, 6, 4)


OPTIONS = TaskOptions(BatchSettings(application="app", lake="lake", topology="a:b"), "")
SOURCE = FileInput("aa", "in", {"in": {0: 5}}, {"in": "id"}, ())


async def test_source_records_are_deleted_while_a_task_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch fails with SourceOffsetsMissing, since no record of the changelog is missing."""

    async def deleted(*_: object) -> None:
        raise OffsetOutOfRange("in-3: offset 5")

    monkeypatch.setattr(batch_task, "find_live_instances", deleted)
    result = await batch_task._run_partition_batch(OPTIONS, 3, deleted)
    assert result.failure is not None
    error = result.failure.to_error("partition 3: ")
    assert type(error) is SourceOffsetsMissing
    assert "in-3: offset 5" in str(error)


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (KafkaTimeout("slow"), True),
        (DeliveryTimeout("slow"), True),
        (TransactionAborted("aborted"), True),
        (ProducerFenced("other attempt"), True),
        (InvalidTxnState("expired"), True),
        (OutOfOrderSequence("lost"), True),
        (SchemaMismatch("other topology"), False),
        (CorruptRecord("bytes"), False),
        (ConfigError("wrong"), False),
    ],
)
async def test_spark_retries_a_task_if_that_can_help(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError, is_retried: bool
) -> None:
    """A retry restores the state and has a new producer. An error that this cannot fix is the task's result."""

    async def no_members(*_: object) -> None:
        pass

    async def fail(*_: object) -> None:
        raise error

    @asynccontextmanager
    async def owned() -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(batch_task, "find_live_instances", no_members)
    monkeypatch.setattr(batch_task, "PartitionBatch", lambda options, partition: SimpleNamespace(owned=owned))
    if is_retried:
        with pytest.raises(type(error)):
            await batch_task._run_partition_batch(OPTIONS, 3, fail)
    else:
        result = await batch_task._run_partition_batch(OPTIONS, 3, fail)
        assert result.failure is not None
        assert type(result.failure.to_error()) is type(error)


class Polls:
    """A consumer of `in-0` that returns the next of these results each time it is polled. A poll takes 500 ms."""

    def __init__(self, clock: ManualClock, results: list[list[int]]) -> None:
        self._clock = clock
        self._results = results
        self._position: int | None = None

    async def __aenter__(self) -> Polls:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def assign(self, partitions: object) -> None:
        pass

    def seek(self, at: TopicPartition, offset: int) -> None:
        self._position = offset

    def paused(self) -> set[TopicPartition]:
        return set()

    def known_position(self, at: TopicPartition) -> int | None:
        return self._position

    async def poll(self, timeout_ms: int, max_records: int) -> dict[TopicPartition, Columns]:
        self._clock.advance(timeout_ms)
        offsets = self._results.pop(0)
        if not offsets:
            return {}
        self._position = offsets[-1] + 1
        return {TopicPartition("in", 0): Columns.of([ConsumerRecord("in", 0, n, n, b"k", b"{}") for n in offsets])}


@pytest.mark.parametrize(("empty_polls", "is_too_many"), [(1, False), (120, False), (121, True)])
async def test_only_time_that_a_task_waits_for_records_is_limited(
    monkeypatch: pytest.MonkeyPatch, empty_polls: int, is_too_many: bool
) -> None:
    """The user's code takes longer than the limit for each record. Polls without records together may reach it."""
    clock = ManualClock()
    builder = StreamsBuilder()
    builder.stream("in").peek(lambda record: clock.advance(2 * batch_task.IDLE_MS_MAX)).to("out")
    of = object.__new__(batch_task.PartitionBatch)
    of._settings = OPTIONS.settings.model_copy(update={"commit_records": 10, "commit_bytes": 1_000})
    of._streams = OPTIONS.settings.streams()
    of._registry = CollectorRegistry()
    of._partition = of._records = of._bytes = of._read = 0
    of._topology = builder.build()
    of._task = StreamTask(of._topology, 0, application="app")
    of._task.sources = {"in": 0}
    of._task_factory = cast(Any, SimpleNamespace(start=lambda started, tables: started.initialize(0)))
    polls = Polls(clock, [[0], *[[]] * empty_polls, [1]])
    committed = list[int]()

    async def nothing(*_: object) -> None:
        pass

    async def commit() -> None:
        committed.append(of._task.sources["in"])

    monkeypatch.setattr(of, "_commit_task", commit)
    monkeypatch.setattr(batch_task, "SYSTEM_CLOCK", clock)
    monkeypatch.setattr(batch_task, "Consumer", lambda *_: polls)
    monkeypatch.setattr(batch_task, "SourcePositions", lambda *_: SimpleNamespace(find=nothing))
    if is_too_many:
        with pytest.raises(KafkaTimeout, match="still to read"):
            await of.read_topics({"in": 2})
    else:
        await of.read_topics({"in": 2})
    assert committed == ([] if is_too_many else [2])


@pytest.mark.parametrize(
    ("is_initialized", "error", "close_error"),
    [
        (True, None, None),
        (True, ProducerFenced("other attempt"), None),
        (True, None, ProcessingFailed("close")),
        (True, ProducerFenced("other attempt"), ProcessingFailed("close")),
        (False, None, None),
    ],
)
async def test_a_task_closes_the_processors_that_it_initialized(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, error: Exception | None, close_error: Exception | None
) -> None:
    """It closes them also after an error. An error of `close` does not fail the task, as its commits stay valid."""
    calls = list[str]()

    def close() -> None:
        calls.append("processors")
        if close_error is not None:
            raise close_error

    async def call(name: str) -> None:
        calls.append(name)

    async def take_over(make: object) -> tuple[object, None]:
        return SimpleNamespace(is_initialized=is_initialized, close=close), None

    of = object.__new__(batch_task.PartitionBatch)
    of._partition = 0
    of._task_factory = cast(Any, SimpleNamespace(task=str))
    changelog = SimpleNamespace(open=lambda: call("open"), take_over=take_over, close=lambda: call("changelog"))
    of._changelog = cast(Any, changelog)
    monkeypatch.setattr(of, "_wait_until_commit_stable", lambda: call("stable"))
    with nullcontext() if error is None else pytest.raises(type(error)):
        async with of.owned():
            if error is not None:
                raise error
    closed, stable = ["processors"] * is_initialized, ["stable"] * (error is None)
    assert calls == ["open", *closed, *stable, "changelog"]


def task() -> StreamTask:
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    return StreamTask(builder.build(), 0, application="app")


@pytest.mark.parametrize("binary", [pa.binary(), pa.large_binary()], ids=str)
def test_rows_are_records_by_their_numbers(binary: Any) -> None:
    """Nulls stay nulls, also in Spark's large types. A slice of a batch begins at the given row number."""
    rows = {"timestamp_ms": [5, 6, 7], "key": [b"a", None, b""], "value": [b"x", b"yy", None]}
    kinds = {"timestamp_ms": pa.int64(), "key": binary, "value": binary}
    batch = pa.record_batch({name: pa.array(values, kinds[name]) for name, values in rows.items()})
    columns = record_columns(batch.slice(1), "in", 3, 41)
    assert [(r.offset, r.timestamp, r.key, r.value) for r in columns] == [(41, 6, None, b"yy"), (42, 7, b"", None)]
    assert str(columns.topic_partition) == "in-3"


def test_a_task_goes_on_where_its_rows_ended() -> None:
    """Without state it starts at the first row, else after the committed rows.

    It reads nothing once all rows are committed.
    """
    of = task()
    assert first_row_to_read(of, SOURCE) == 0
    of.input = BatchInput("aa", 7, is_done=False)
    assert first_row_to_read(of, SOURCE) == 7
    of.input = BatchInput("aa", 7, is_done=True)
    assert first_row_to_read(of, SOURCE) is None


def test_a_task_with_another_state_is_rejected() -> None:
    """A state from other files or from the topic is rejected."""
    of = task()
    of.sources = {"in": 0}
    with pytest.raises(ConfigError, match=r"partition 0.*state already"):
        first_row_to_read(of, SOURCE)
    of.input = BatchInput("bb", 7, is_done=True)
    with pytest.raises(ConfigError, match="other files"):
        first_row_to_read(of, SOURCE)
