"""Batches on Spark over a real topic: between live workers, retried, killed, fenced, stopped and rejected."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable

from penstock import spark as penstock_spark
from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.audit_inputs import NotAuditable
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.batch.batch import BatchFenced, BatchJob, BatchRejected, BatchReport
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.common.errors import ConfigError, ProcessingFailed
from penstock.shared.streams.changelog.format import BatchInput
from penstock.shared.streams.topology_loading import load_topology
from tests.integration.spark.conftest import INTERPRETED
from tests.integration.test_stream_worker import (
    GUARANTEES,
    KEYS,
    Chain,
    Event,
    chain_of,
    kafka_of,
    offline,
    running,
    until,
    wait_or_raise,
)
from tests.shared_broker import Broker

TOPOLOGY = '''
"""Topologies of a test."""

import os
from pathlib import Path

from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder


def sessions(topic):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def raising(spark, tables):
    """A step after a run."""
    raise ValueError("no such luck")


def fatal(topic, mark, number, error=""):
    """The same, and the process of the record of that number ends, once; or its user's code raises."""

    def see(value):
        if value["id"] == int(number):
            if error:
                raise RuntimeError(error)
            try:
                os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return value
            os._exit(1)
        return value

    builder = StreamsBuilder()
    windows = builder.stream(topic).map_values(see).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def slow(topic, mark, seconds="20", number="0"):
    """The same, and the record of that number waits until a file is there."""
    import time

    def see(value):
        if value["id"] == int(number):
            Path(mark + "-waits").touch()
            for _ in range(int(seconds) * 100):
                if Path(mark).exists():
                    break
                time.sleep(0.01)
        return value

    builder = StreamsBuilder()
    windows = builder.stream(topic).map_values(see).group_by_key().session_window(100, 50)
    windows.aggregate("s", n=Count(), sum=Sum("id")).on_close().to(f"{topic}-out")
    return builder.build()


def dying(topic, mark, point):
    """The same, and the process of the fourth commit ends, once: before it, within it, or after it."""
    from penstock.shared.clients.producer import Producer
    from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition

    def die():
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os._exit(1)

    commit, offsets, count = ChangelogPartition.commit, Producer.send_offsets_to_transaction, [0]

    async def dying_commit(self, *given):
        count[0] += 1
        if count[0] == 4 and point == "before":
            die()
        done = await commit(self, *given)
        if count[0] == 4 and point == "after":
            die()
        return done

    async def dying_offsets(self, *given):
        await offsets(self, *given)
        if count[0] == 4 and point == "within":
            die()

    ChangelogPartition.commit, Producer.send_offsets_to_transaction = dying_commit, dying_offsets
    return sessions(topic)


def by_another_key(topic):
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by(lambda value: value["id"]).session_window(100, 50)
    windows.aggregate("s", n=Count()).on_close().to(f"{topic}-out")
    return builder.build()


def with_global_table(topic):
    builder = StreamsBuilder()
    table = builder.global_table(f"{topic}-table")
    builder.stream(topic).join(table, lambda a, b: a, key=lambda record: record.value["id"]).to(f"{topic}-out")
    return builder.build()
'''
MODULE = "topologies_of_batches"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The driver's working folder, which has the topologies' module."""
    (tmp_path / f"{MODULE}.py").write_text(TOPOLOGY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings_of(chain: Chain, folder: Path, build: str = "sessions", **given: Any) -> BatchSettings:
    options = {"topic": chain.topic} | given.pop("topology_options", {})
    names = {"application": chain.topic, "lake": str(folder / "lake"), "kafka": chain.kafka}
    return BatchSettings(
        **{**names, "topology": f"{MODULE}:{build}", "topology_options": options, "kafka_timeout_ms": 10_000, **given}
    )


async def batch(spark: Any, settings: BatchSettings) -> BatchReport:
    """Run one batch in a thread, because a driver has its own event loop."""
    return await asyncio.to_thread(lambda: BatchJob(spark, settings, print).run())


@asynccontextmanager
async def command(
    kafka: Broker, folder: Path, build: str, options: dict[str, str], *more: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `penstock batch` as a process with small commits and without generated code. It is killed at the end if it
    still runs."""
    flags = [f"--application={options['topic']}", f"--lake={folder / 'lake'}", "--commit-records=20"]
    flags += [f"--kafka.bootstrap-servers={kafka.bootstrap_servers}", f"--topology={MODULE}:{build}"]
    flags += [f"--topology-options={msgspec.json.encode(options).decode()}", "--spark.master=local[2]"]
    flags += [*(f"--spark.conf={name}={value}" for name, value in INTERPRETED.items()), *more]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "penstock", "batch", *flags, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def exists(file: Path) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return await asyncio.to_thread(file.exists)

    return there


async def live(chain: Chain, folder: Path) -> None:
    """Run a live worker until it has processed all records."""
    worker = chain.worker(lake=str(folder / "lake"))
    async with running(worker) as loop:
        await wait_or_raise(loop, chain.wait_processed(worker))


def rows_of(folder: Path, application: str, table: str, columns: tuple[str, ...]) -> list[tuple[Any, ...]]:
    rows = DeltaTable(str(folder / "lake" / application / table)).to_pyarrow_table().to_pylist()
    return sorted(tuple(row[name] for name in columns) for row in rows)


def in_lake(folder: Path, application: str) -> tuple[list[Any], list[Any]]:
    """Closed windows and late records."""
    closed = rows_of(folder, application, "closed/s", ("key", "window_start", "window_end", "n", "sum"))
    late = rows_of(folder, application, "late/s", ("key", "event_time", "source_offset", "partition"))
    return closed, late


async def require_right(spark: Any, chain: Chain, folder: Path, *, may_repeat: bool = False) -> None:
    """Require topics, and tables after a compaction, to be those of an uninterrupted stream.

    With `may_repeat`, a result may be in a topic more than once, as under at-least-once. Tables have each window once.
    """
    closed, late = offline(chain.topic, chain.sent)
    results, late_values = await chain.values("out"), await chain.values("late")
    if may_repeat:
        results, late_values = sorted(set(results)), sorted(set(late_values))
    assert (results, late_values) == (closed, late)
    settings = CompactSettings(application=chain.topic, lake=str(folder / "lake"), kafka=chain.kafka)
    await asyncio.to_thread(CompactionJob(spark, settings, print).run)
    closed_rows, late_rows = in_lake(folder, chain.topic)
    fields = ("key", "start", "end", "n", "sum")
    windows = [tuple(msgspec.json.decode(value)[name] for name in fields) for value in closed]
    assert [(key, ms(start), ms(end), n, sum_) for key, start, end, n, sum_ in closed_rows] == sorted(windows)
    positions = [0, 0]
    numbers = {}
    for partition, _, _, number in chain.sent:
        numbers[partition, positions[partition]] = number
        positions[partition] += 1
    late_numbers = sorted(numbers[partition, offset] for _, _, offset, partition in late_rows)
    assert late_numbers == sorted(msgspec.json.decode(value)["id"] for value in late)
    live = await asyncio.to_thread(penstock_spark.live(spark, str(folder / "lake"), chain.topic, "s").collect)
    counted = sum(row[3] for row in closed_rows) + sum(row.n for row in live) + len(late_rows)
    assert counted == len(chain.sent)


def ms(time: datetime) -> int:
    return round(time.timestamp() * 1_000)


async def test_live_then_batch_then_live(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """Results, late records and tables are those of a live worker alone. Each part continues from the previous one."""
    async with chain_of(kafka, topic_name) as chain, chain_of(kafka, f"{topic_name}-alone") as alone:
        await chain.send(300)
        await live(chain, folder)
        await chain.send(300)
        done = await batch(spark, settings_of(chain, folder, commit_records=70))
        assert (done.partitions, done.read, done.commits) == (2, 300, 6)
        assert done.to_offsets == {topic_name: {0: 300, 1: 300}}
        again = await batch(spark, settings_of(chain, folder))
        assert (again.partitions, again.read, again.compaction) == (0, 0, None)
        assert [(await chain.confirmed(p)).epoch for p in range(2)] == [2, 2]
        await chain.send(300)
        await live(chain, folder)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        async with Admin(chain.kafka) as admin:
            offsets = await admin.group_offsets(topic_name)
        assert {at.partition: to.offset for at, to in offsets.items()} == {0: 450, 1: 450}

        for _ in range(3):
            await alone.send(300)
        await live(alone, folder)
        for one in (chain, alone):
            settings = CompactSettings(application=one.topic, lake=str(folder / "lake"), kafka=one.kafka)
            await asyncio.to_thread(CompactionJob(spark, settings, print).run)
        assert in_lake(folder, chain.topic) == in_lake(folder, alone.topic)


async def test_until_a_time(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """Each partition is read up to its first record of that time. The next batch reads the rest."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(200)
        done = await batch(spark, settings_of(chain, folder, until="1970-01-01T00:00:01.300Z"))
        first = {p: next(i for i, e in enumerate(own(chain, p)) if e[2] >= 1_300) for p in (0, 1)}
        assert done.to_offsets == {topic_name: first}
        assert done.read == sum(first.values())
        rest = await batch(spark, settings_of(chain, folder))
        assert rest.read == 200 - done.read
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


def own(chain: Chain, partition: int) -> list[Any]:
    return [event for event in chain.sent if event[0] == partition]


async def test_a_rejected_batch_changes_nothing(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """A batch is rejected while live instances run, and names them. It is also rejected if the topology needs more than
    its partition, and names that."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(20)
        worker = chain.worker(lake=str(folder / "lake"))
        async with running(worker) as loop:
            await wait_or_raise(loop, chain.wait_processed(worker))
            with pytest.raises(BatchRejected, match=rf"{topic_name}.*penstock-"):
                await batch(spark, settings_of(chain, folder))
        for build, needed in (("by_another_key", "repartition"), ("with_global_table", "-table")):
            with pytest.raises(ConfigError, match=rf"needs {topic_name}\S*{needed}"):
                await batch(spark, settings_of(chain, folder, build))
        assert [(await chain.confirmed(p)).epoch for p in range(2)] == [1, 1]


async def test_a_record_that_cannot_be_handled_is_named(
    spark: Any, kafka: Broker, topic_name: str, folder: Path
) -> None:
    """The error is that of a worker. Earlier commits are kept, and the next batch continues from them."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(40)
        options = {"mark": str(folder / "mark"), "number": "25", "error": "not this one"}
        given: dict[str, Any] = {"topology_options": options, "commit_records": 10}
        failing = settings_of(chain, folder, "fatal", processing_exception_handler="fail", **given)
        with pytest.raises(ProcessingFailed, match=rf"{topic_name}-0@25.*not this one"):
            await batch(spark, failing)
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert progress.sources == {topic_name: 20}
        done = await batch(spark, settings_of(chain, folder, "fatal", **given))
        assert (done.read, done.dead_letters) == (20, 1)


@asynccontextmanager
async def taken_over(chain: Chain, folder: Path, guarantee: str) -> AsyncIterator[None]:
    """Within the context, a live worker has taken over the partitions of a batch that waits within a record."""
    await until(exists(folder / "mark-waits"), 120.0)
    at_once = {"topic": chain.topic, "mark": str(folder / "none"), "seconds": "0"}
    topology = load_topology(f"{MODULE}:slow", at_once)
    worker = chain.worker(topology, lake=str(folder / "lake"), processing_guarantee=guarantee)
    async with running(worker) as loop:
        await wait_or_raise(loop, chain.wait_processed(worker))
        yield


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_live_start_fences_a_batch(
    spark: Any, kafka: Broker, topic_name: str, folder: Path, guarantee: str
) -> None:
    """A batch whose partitions a live instance takes over ends with an error that names the members of the group. The
    live instance's guarantee makes no difference, except that a result may be in a topic more than once."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(300)
        mark = folder / "mark"
        settings = settings_of(chain, folder, "slow", topology_options={"mark": str(mark)}, commit_records=20)
        fenced = asyncio.create_task(batch(spark, settings))
        async with taken_over(chain, folder, guarantee):
            mark.touch()
            with pytest.raises(BatchFenced, match=f"the group {topic_name} has members"):
                await fenced
        await require_right(spark, chain, folder, may_repeat=guarantee == "at_least_once")


async def test_a_batch_that_is_killed_is_continued_by_the_next(
    spark: Any, kafka: Broker, topic_name: str, folder: Path
) -> None:
    """If the driver is killed while a task works, the next batch continues from the last commits."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(300)
        mark = folder / "mark"
        options = {"topic": topic_name, "mark": str(mark), "number": "200"}
        async with command(kafka, folder, "slow", options) as first:
            await until(exists(Path(f"{mark}-waits")), 120.0)
            first.kill()
        mark.touch()
        done = await batch(spark, settings_of(chain, folder, "slow", topology_options=options))
        assert done.read < 300
        assert done.to_offsets == {topic_name: {0: 150, 1: 150}}
        await require_right(spark, chain, folder)


async def test_a_task_that_dies_is_tried_again(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """Spark starts another worker for it, which continues from the last commit."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(300)
        mark = folder / "mark"
        options = {"mark": str(mark), "number": "201"}
        done = await batch(spark, settings_of(chain, folder, "fatal", topology_options=options, commit_records=20))
        assert mark.exists()
        assert done.read < 300
        await require_right(spark, chain, folder)
        assert [(await chain.confirmed(p)).epoch for p in range(2)] in ([1, 2], [2, 2])


@pytest.mark.soak
@pytest.mark.parametrize("point", ["before", "within", "after"])
async def test_a_task_that_dies_at_a_commit(
    spark: Any, kafka: Broker, topic_name: str, folder: Path, point: str
) -> None:
    """Whether or not its commit was written, the next attempt continues from the last valid commit."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(300)
        options = {"topic": topic_name, "mark": str(folder / "mark"), "point": point}
        async with command(kafka, folder, "dying", options) as process:
            output, _ = await process.communicate()
        assert process.returncode == 0
        assert await exists(folder / "mark")()
        assert msgspec.json.decode(output)["to_offsets"] == {topic_name: {"0": 150, "1": 150}}
        await require_right(spark, chain, folder)


async def test_batches_every_so_often(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """In one session, each batch reads the records since the previous one. A failed step does not end it.

    SIGTERM cancels Spark's tasks at once, within a record, with status 0. The next batch continues from the last
    commits.
    """
    async with chain_of(kafka, topic_name) as chain:
        mark = folder / "mark"
        options = {"topic": topic_name, "mark": str(mark), "number": "350", "seconds": "60"}
        step = f"--after={MODULE}:raising"
        async with command(kafka, folder, "slow", options, "--every=500ms", step) as process:
            assert process.stdout is not None
            read = 0
            for wanted in (100, 200):
                await chain.send(100)
                while read < wanted:
                    done = msgspec.json.decode(await process.stdout.readline())
                    read += done["read"]
                    assert "no such luck" in done["compaction"]["failed"][0]
            await chain.send(200)
            await until(exists(Path(f"{mark}-waits")), 120.0)
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 30) == 0
        mark.touch()
        rest = await batch(spark, settings_of(chain, folder, "slow", topology_options=options))
        assert 0 < rest.read < 200
        await require_right(spark, chain, folder)


# --- files ---


def rows_of_events(events: list[Event]) -> list[dict[str, Any]]:
    return [{"who": key.decode(), "at": at, "id": number} for _, key, at, number in events]


def write_files(folder: Path, format: str, rows: list[dict[str, Any]]) -> Path:
    """Two files, in an order that is not that of time."""
    there = folder / f"files-{format}"
    there.mkdir()
    for nth, some in enumerate((rows[1::2], rows[::2])):
        file = there / f"{nth}.{format}"
        if format == "parquet":
            pyarrow.parquet.write_table(pa.Table.from_pylist(some), file)
        elif format == "json":
            file.write_text("\n".join(msgspec.json.encode(row).decode() for row in some))
        else:
            lines = (",".join(str(value) for value in row.values()) for row in some)
            file.write_text("\n".join([",".join(rows[0]), *lines, ""]))
    return there


@pytest.mark.parametrize(("format", "live_from"), [("parquet", "latest"), ("csv", "offsets"), ("json", "time")])
async def test_history_from_files_then_live(
    spark: Any, kafka: Broker, topic_name: str, folder: Path, format: str, live_from: str
) -> None:
    """History and topic form one stream of windows, and the live instance begins at `live_from`."""
    history = [(for_key(key, 2), key, i * 13, i) for i in range(300) for key in [KEYS[i % 7]]]
    files = write_files(folder, format, rows_of_events(history))
    async with chain_of(kafka, topic_name) as chain:
        chain.sent = history[:]
        await chain.send(50)  # which are in the files, as it were
        before = [sum(1 for e in chain.sent[300:] if e[0] == p) for p in (0, 1)]
        newest = datetime.fromtimestamp((max(e[2] for e in chain.sent[300:]) + 1) / 1_000, UTC)
        if live_from != "latest":
            live_from = newest.isoformat() if live_from == "time" else f"0:{before[0]},1:{before[1]}"
        del chain.sent[300:]
        of_files = {"files": str(files), "format": format, "key_column": "who", "timestamp_column": "at"}
        settings = settings_of(chain, folder, commit_records=40, live_from=live_from, **of_files)
        done = await batch(spark, settings)
        assert (done.partitions, done.read, done.late) == (2, 300, 0)
        assert done.to_offsets == {topic_name: {0: before[0], 1: before[1]}}
        again = await batch(spark, settings)
        assert (again.partitions, again.read) == (0, 0)
        with pytest.raises(ConfigError, match="other files"):
            await batch(spark, settings.model_copy(update={"value_column": "id"}))
        audit = AuditSettings(application=topic_name, lake=str(folder / "lake"), kafka=kafka_of(kafka))
        with pytest.raises(NotAuditable, match="partitions 0, 1"):
            await asyncio.to_thread(run_audit, spark, audit, print)
        chain.sent = history[:]
        await chain.send(100)
        worker = chain.worker(lake=str(folder / "lake"))
        async with running(worker) as loop:
            ends = {p: before[p] + 50 for p in (0, 1)}

            async def done_() -> bool:
                tasks = {p: one.task for p, one in worker.tasks().items() if one.task is not None}
                return {p: task.sources[topic_name] for p, task in tasks.items() if not task.needs_commit} == ends

            await wait_or_raise(loop, until(done_))
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        more = await batch(spark, settings_of(chain, folder))
        assert more.partitions == 0


async def test_a_partition_without_a_commit_of_its_files_is_not_begun_without_them(
    spark: Any, kafka: Broker, topic_name: str, folder: Path
) -> None:
    """If a batch over files fails before a partition's first commit, a batch over topics and a live instance reject the
    partition."""
    history = [(for_key(key, 2), key, i * 13, i) for i in range(100) for key in [KEYS[i % 7]]]
    failing = next(number for partition, _, _, number in history if partition == 1 and number > 50)
    files = write_files(folder, "parquet", rows_of_events(history))
    async with chain_of(kafka, topic_name, partitions=2) as chain:
        options = {"mark": str(folder / "mark"), "number": str(failing), "error": "not this one"}
        of_files = {"files": str(files), "key_column": "who", "timestamp_column": "at", "live_from": "latest"}
        given = of_files | {"topology_options": options}
        with pytest.raises(ProcessingFailed, match="not this one"):
            await batch(spark, settings_of(chain, folder, "fatal", processing_exception_handler="fail", **given))
        await chain.send(1)
        with pytest.raises(ConfigError, match="after 0 rows"):
            await batch(spark, settings_of(chain, folder))
        with pytest.raises(ConfigError, match="after 0 rows"):
            async with running(worker := chain.worker(lake=str(folder / "lake"))) as loop:
                await wait_or_raise(loop, chain.wait_processed(worker))
        chain.sent = history + chain.sent
        done = await batch(spark, settings_of(chain, folder, **of_files))
        assert done.read == sum(partition == 1 for partition, *_ in history)
        await batch(spark, settings_of(chain, folder))
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_files_that_were_not_read_to_their_end(spark: Any, kafka: Broker, topic_name: str, folder: Path) -> None:
    """If a batch over files fails, only the same batch may continue, from the rows that it reached. Other inputs are
    rejected."""
    files = write_files(folder, "parquet", rows_of_events([(0, KEYS[i % 7], i * 13, i) for i in range(100)]))
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        options = {"mark": str(folder / "mark"), "number": "55", "error": "not this one"}
        of_files = {"files": str(files), "key_column": "who", "timestamp_column": "at", "live_from": "latest"}
        given = of_files | {"topology_options": options, "commit_records": 10}
        with pytest.raises(ProcessingFailed, match="not this one"):
            await batch(spark, settings_of(chain, folder, "fatal", processing_exception_handler="fail", **given))
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert isinstance(progress.input, BatchInput)
        assert (progress.sources, progress.input.rows, progress.input.is_done) == ({}, 50, False)
        await chain.send(1)
        with pytest.raises(ConfigError, match="ended after 50 rows"):
            await batch(spark, settings_of(chain, folder))
        with pytest.raises(ConfigError, match="ended after 50 rows"):
            async with running(worker := chain.worker(lake=str(folder / "lake"))) as loop:
                await wait_or_raise(loop, chain.wait_processed(worker))
        for other in ({"time_unit": "s"}, {"live_from": "0:1"}):
            with pytest.raises(ConfigError, match="50 rows"):
                await batch(spark, settings_of(chain, folder, **of_files | other))
        done = await batch(spark, settings_of(chain, folder, "fatal", **given))
        assert (done.read, done.dead_letters) == (50, 1)
        assert done.to_offsets == {topic_name: {0: 0}}, "what came between the attempts is the live one's"
