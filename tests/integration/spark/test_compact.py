"""Compaction of a real changelog in a real broker into real Delta tables."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from prometheus_client import CollectorRegistry

from penstock.services.aggregator.backlog import Backlog, BacklogWatch, measure
from penstock.services.aggregator.compaction import CompactionSupervisor
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import upkeep
from penstock.services.spark.compact import Compaction
from penstock.services.spark.failures import CompactionConflict
from penstock.services.spark.fold import Merged, Plan
from penstock.services.spark.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common import lake
from penstock.shared.common.errors import ChangelogHole, CorruptRecord, SchemaMismatch
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.settings import StreamsSettings


@pytest.fixture
def job(spark: Any, kafka: EmbeddedKafka, tmp_path: Path) -> Callable[..., Any]:
    """Makes a compaction of a simulation into a lake of the test's own."""

    def make(simulation: Any, kind: type[Compaction] = Compaction, **more: Any) -> Compaction:
        broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        shorter = {name: more.pop(name) for name in ("retention_hours",) if name in more}  # than a user may have it
        settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker, **more)
        settings = settings.model_copy(update=shorter)
        return kind(spark, settings, print)

    return make


def live_in_lake(root: Path, simulation: Any) -> list[Any]:
    """What a restore would load: (partition, key, start, end, state columns)."""
    snapshot = lake.read_snapshot(str(root), simulation.name, [t.partition for t in simulation.tasks])
    assert snapshot is not None
    found = []
    for task in simulation.tasks:
        columns = [c.name for c in task.store.state_columns()]
        for batch in lake.read_windows(str(root), simulation.name, task.partition, "banks", snapshot.version, columns):
            assert batch.schema.names == ["key", "start_ms", "end_ms", *columns]
            found += [(task.partition, *row.values()) for row in batch.to_pylist()]
    return sorted(found)


def live_in_tasks(simulation: Any) -> list[Any]:
    codec = log.StateCodec(simulation.tasks[0].store.state_columns())
    return sorted(
        (task.partition, key, start, end, *codec.unpack(state))
        for task in simulation.tasks
        for (key, start), (end, state) in task.written.items()
    )


def closed_in_lake(root: Path, simulation: Any) -> list[Any]:
    columns = 'key, start_ms, end_ms, "count", total, mean, least, most, places, "last"'
    table = DeltaTable(str(root / simulation.name / "closed" / "banks"))
    rows = QueryBuilder().register("t", table).execute(f"SELECT partition, {columns} FROM t").read_all()
    return sorted((tuple(row.values()) for row in pa.table(rows).to_pylist()), key=repr)


def closed_in_tasks(simulation: Any) -> list[Any]:
    published = [(t.partition, msgspec.json.decode(value)) for t in simulation.tasks for _, value, _, _ in t.results]
    rows = [
        (p, *(msgspec.json.encode(v).decode() if k == "last" else v for k, v in row.items())) for p, row in published
    ]
    return sorted(rows, key=repr)


def test_a_life_of_compactions(simulate: Any, topics: Any, job: Any, aggregations: Any, tmp_path: Path) -> None:
    """After each run the tables hold exactly what committed work left, whoever else wrote; a rerun changes nothing."""
    simulation = simulate()
    simulation.feed(200, seed=1)
    topics.write(simulation)
    first = job(simulation).run()
    assert (first.run, first.finals) == (1, sum(len(t.closed) for t in simulation.tasks))
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)

    # A new owner of partition 0; the old one goes on for a whole commit, which must not count. Then a torn commit.
    owner = simulation.tasks[0]
    state = owner.pack([a.initial() for a in aggregations.values()])
    owner.epoch = 2
    owner.changelog.append((None, log.encode_takeover(2, log.Takeover(simulation.name, "new", 0))))
    owner.changelog.append((b"zombie", log.encode_live(0, 1, 99, 5, 6, state)))
    owner.changelog.append((b"zombie", log.encode_final(0, 1, 99, 5, 6, 7, state)))
    stale = log.Progress(simulation.name, "exactly_once", {simulation.name: 9}, 1, {}, {}, (owner.store,), 0)
    owner.changelog.append((None, log.encode_progress(1, 99, stale)))
    simulation.feed(200, seed=2)
    owner.changelog.append((b"torn", log.encode_live(0, 2, owner.commit_number + 1, 5, 6, state)))
    topics.write(simulation)
    second = job(simulation, delete_covered=True).run()
    assert (second.run, second.from_offsets) == (2, first.to_offsets)
    assert second.deleted_rows > 0
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)

    vectors = list((tmp_path / simulation.name / "state").rglob("deletion_vector_*.bin"))
    assert vectors, "the second run must have left deletion vectors for the reader to respect"

    again = job(simulation, retention_hours=0).run()
    assert (again.run, again.entries) == (2, 0)
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    with pytest.MonkeyPatch.context() as short_history:  # as after a hundred upkeeps of an idle store
        short_history.setattr("penstock.services.spark.tables.HISTORY_VERSIONS_MAX", 1)
        short_history.delattr("penstock.services.spark.tables.appended_before")
        plan = job(simulation).plan()
    assert (plan.run, plan.ahead) == (3, frozenset()), "its append is found however far back it lies"
    assert plan.offsets.earliest == second.from_offsets, "no further than the snapshot before"
    told = lake.describe(str(tmp_path), simulation.name)
    assert told["live_rows"] == second.live_rows == len(live_in_tasks(simulation))
    assert told["closed_rows"] == {"banks": first.finals + second.finals}

    live_before = live_in_lake(tmp_path, simulation)
    changed = msgspec.structs.replace(owner.store, aggregations=owner.store.aggregations[:-1])
    progress = log.Progress(simulation.name, "exactly_once", {}, 1, {}, {}, (changed,), 0)
    owner.changelog.append((None, log.encode_progress(2, owner.commit_number + 2, progress)))
    topics.write(simulation)
    with pytest.raises(SchemaMismatch, match="banks"):
        job(simulation).run()
    owner.changelog.append((b"k", b"\x02L not of this format version"))
    topics.write(simulation)
    with pytest.raises(
        CorruptRecord, match=rf"{simulation.name}-changelog-0 at offset \d+: changelog format version 2"
    ):
        job(simulation).run()
    assert live_in_lake(tmp_path, simulation) == live_before

    topics.delete_before(f"{simulation.name}-changelog", {0: second.to_offsets[0] + 1})
    with pytest.raises(ChangelogHole, match=f"offsets {second.to_offsets[0]} to {second.to_offsets[0]} are gone"):
        job(simulation).run()


class Crashing(Compaction):
    """Ends after the finals were appended and before the state is merged."""

    def _merge(self, *arguments: Any) -> Merged:
        raise KeyboardInterrupt


class Overtaken(Compaction):
    """Another job does its whole run between this one's plan and its work."""

    def plan(self) -> Plan:
        plan = super().plan()
        Compaction(self.spark, self.settings, print).run()
        return plan


def test_a_crashed_run_that_two_jobs_go_on_with(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """What it had appended is not appended again; of the two one wins and the other says so."""
    simulation = simulate(1)
    simulation.feed(60, seed=3)
    topics.write(simulation)
    with pytest.raises(KeyboardInterrupt):
        job(simulation, Crashing).run()
    assert live_in_lake(tmp_path, simulation) == []
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)
    with pytest.raises(CompactionConflict, match=r"another job has done run 1 of .*/state"):
        job(simulation, Overtaken).run()
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation) != []
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation) != []


@pytest.mark.soak
def test_crashed_and_overtaken_runs(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """A run after a crashed one appends nothing twice and skips nothing; of two at once one wins and one says so."""
    simulation = simulate()
    simulation.feed(120, seed=3)
    topics.write(simulation)
    with pytest.raises(KeyboardInterrupt):
        job(simulation, Crashing).run()
    assert lake.read_snapshot(str(tmp_path), simulation.name, [0, 1]).partitions == {}
    closed_before = closed_in_lake(tmp_path, simulation)
    simulation.feed(120, seed=4)
    topics.write(simulation)
    adopted = job(simulation).run()
    assert adopted.adopted
    assert closed_in_lake(tmp_path, simulation) == closed_before
    with pytest.raises(CompactionConflict):
        job(simulation, Overtaken).run()
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)


@pytest.mark.soak
def test_a_backlog_is_made_up_for_in_bounded_runs(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Runs that read little each leave what one does, say what they left, and read on where a commit is longer."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    simulation.feed(60, seed=6, commit_every=math.inf)  # one commit, of more entries than a run reads at first
    task.commit()
    longest = len(task.changelog)
    simulation.feed(80, seed=7)
    topics.write(simulation)
    first = job(simulation, run_records_max=longest * 2 // 3).run()
    assert first.remaining_records > 0
    assert first.to_offsets[0] < len(task.changelog)
    assert (first.merged_rows, first.deleted_rows) == (first.live_rows, 0)
    second = job(simulation, run_records_max=first.remaining_records + 2).run()
    assert (second.from_offsets, second.remaining_records) == (first.to_offsets, 0)
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)


def data_files(table: Path) -> int:
    return sum(1 for file in table.rglob("*.parquet") if "_delta_log" not in file.parts)


@pytest.mark.soak
def test_many_runs_leave_few_files(simulate: Any, topics: Any, job: Any, spark: Any, tmp_path: Path) -> None:
    """A partition never has more files than the policy says, rows stay what they were, and old files go when due."""
    simulation = simulate(1)
    folder = tmp_path / simulation.name
    most, optimized = 0, 0
    for seed in range(1, 6):
        simulation.feed(40, seed)
        topics.write(simulation)
        done = job(simulation, optimize_files_max=2, retention_hours=0, vacuum_every=4).run()
        if done.vacuumed:
            assert data_files(folder / "closed/banks") <= 2
        optimized += done.optimized_partitions
        for table in ("state", "closed/banks"):
            files = upkeep.files_by_partition(spark, str(folder / table))
            assert all(number <= 2 for number in files.values()), files
            assert set(files) <= {"partition=0", "day=1970-01-01"}
            most = max(most, data_files(folder / table))
        assert done.vacuumed is (done.run == 4)
    assert optimized >= 1
    assert most > 3, "there must have been old files for VACUUM to remove"
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(tmp_path, simulation) == closed_in_tasks(simulation)


@pytest.mark.soak
def test_an_idle_application_writes_nothing(
    simulate: Any, topics: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits that move grids and the wall clock alone make no new version, until their tail grows too long."""
    simulation = simulate()
    simulation.feed(60, seed=8)
    topics.write(simulation)
    first = job(simulation).run()
    idle, busy = simulation.tasks

    def punctuate(task: Any, **moved: Any) -> None:
        task.commit_number += 1
        done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
        later = msgspec.structs.replace(done, grids_ms={"compaction": task.commit_number}, wall_ms=5, **moved)
        task.changelog.append((None, log.encode_progress(task.epoch, task.commit_number, later)))

    for task in (idle, busy):
        punctuate(task)
    topics.write(simulation)
    second = job(simulation).run()
    assert (second.run, second.state_version) == (first.run, first.state_version)
    assert second.to_offsets == first.to_offsets

    punctuate(idle)
    punctuate(busy, sources={simulation.name: busy.offset + 1})
    topics.write(simulation)
    third = job(simulation).run()
    assert third.run == first.run + 1
    assert third.to_offsets[idle.partition] == first.to_offsets[idle.partition]
    assert third.to_offsets[busy.partition] > first.to_offsets[busy.partition]

    monkeypatch.setattr("penstock.services.spark.fold.IDLE_RECORDS_MAX", 1)
    assert job(simulation).run().to_offsets[idle.partition] > first.to_offsets[idle.partition]


@pytest.mark.soak
def test_closed_windows_go_by_retention(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Days further back than the retention go whole, by event time; newer ones and live windows stay as they are."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    day_ms = 86_400_000
    for day in range(4):
        task.take(b"a", b'{"delay": 1.5, "place": "x"}', day * day_ms)
    task.commit()
    topics.write(simulation)
    done = job(simulation, closed_retention_days=1).run()
    assert (done.finals, done.expired_days) == (3, 2)
    assert [row[2] for row in closed_in_lake(tmp_path, simulation)] == [2 * day_ms]
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    assert job(simulation, closed_retention_days=1).run().expired_days == 0


def test_the_backlog_is_what_no_snapshot_covers(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Before the first compaction all of the changelog is uncovered; afterwards only what transactions' ends take."""
    simulation = simulate()
    simulation.feed(60, seed=9)
    topics.write(simulation)
    ready = job(simulation)
    streams = StreamsSettings(application_id=simulation.name, lake=str(tmp_path))

    async def ask() -> Backlog:
        async with Admin(ready.settings.kafka) as admin:
            return await measure(admin, streams)

    before = asyncio.run(ask())
    assert before.records >= sum(len(task.changelog) for task in simulation.tasks)
    assert before.snapshot_ms is None
    ready.run()
    after = asyncio.run(ask())
    assert after.records <= len(simulation.tasks)
    assert before.bytes is not None
    assert after.bytes is not None
    assert before.bytes > 1_000 > after.bytes
    assert after.snapshot_ms == lake.describe(str(tmp_path), simulation.name)["compacted_at_ms"]
    assert after.snapshot_ms is not None


@pytest.mark.soak
async def test_bytes_start_the_job(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """A changelog that has grown by enough starts the real job as a child process, long before its time, and once."""
    simulation = simulate()
    simulation.feed(60, seed=9)
    await asyncio.to_thread(topics.write, simulation)
    flags = ["--compaction.interval-ms=86400000", "--compaction.changelog-bytes=1000", "--streams.lake", str(tmp_path)]
    flags += ["--compaction.backlog-interval-ms=200", "--streams.application-id", simulation.name, "--topology=a:b"]
    kafka = job(simulation).settings.kafka
    given = AggregatorSettings.load([*flags, f"--kafka.bootstrap-servers={kafka.bootstrap_servers}"], environ={})
    registry = CollectorRegistry()
    supervisor = CompactionSupervisor(given, registry)
    watch = BacklogWatch(given, registry, lambda: True, ask=supervisor.ask)
    running = [asyncio.create_task(each.run()) for each in (supervisor, watch)]
    try:
        deadline = time.monotonic() + 300
        while not (runs := supervisor.describe()) or runs[-1]["status"] == "running":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        assert [run["status"] for run in supervisor.describe()] == ["done"]
        assert watch.last is not None
        assert watch.last.bytes is not None
        assert watch.last.bytes < 1_000
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
