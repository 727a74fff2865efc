"""Compaction of a real changelog in a real broker into real Delta tables."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from prometheus_client import CollectorRegistry

from examples.lake_duckdb import connect
from penstock import spark as penstock_spark
from penstock.services.aggregator.compaction_lag import CompactionLag, CompactionLagWatch, measure_compaction_lag
from penstock.services.aggregator.compaction_supervisor import CompactionSupervisor
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.compact import AfterHookFailed, CompactionJob, call_after_hook
from penstock.services.spark.compaction.delta_reader import progress_rows
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import ChangelogHole, ConfigError, SchemaMismatch
from penstock.shared.common.lake import compaction_history, state_snapshot, window_queries
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.settings import StreamsSettings
from tests.shared_broker import Broker

DAY_MS = 86_400_000


@pytest.fixture
def job(spark: Any, kafka: Broker, tmp_path: Path) -> Callable[..., Any]:
    """Makes a compaction of a simulation into a lake of the test's own."""

    def make(simulation: Any, kind: type[CompactionJob] = CompactionJob, **more: Any) -> CompactionJob:
        broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        shorter = {name: more.pop(name) for name in ("retention_hours",) if name in more}  # than a user may have it
        settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker, **more)
        settings = settings.model_copy(update=shorter)
        return kind(spark, settings, print)

    return make


def live_in_lake(root: Path, simulation: Any) -> list[Any]:
    """The rows that a restore loads: (partition, key, start, end, state columns); later changes replace earlier
    ones."""
    snapshot = state_snapshot.read_snapshot(str(root), simulation.name, [t.partition for t in simulation.tasks])
    assert snapshot is not None
    found = dict[Any, Any]()
    for task in simulation.tasks:
        columns = [c.name for c in task.store.state_columns()]
        for batch in state_snapshot.read_window_changes(
            str(root), simulation.name, task.partition, "banks", snapshot.version, columns
        ):
            assert batch.schema.names == ["key", "start_ms", "end_ms", "live", *columns]
            for key, start, end, is_live, *state in (row.values() for row in batch.to_pylist()):
                found.pop((task.partition, key, start), None)
                if is_live:
                    found[task.partition, key, start] = (end, *state)
    return sorted((*window, *rest) for window, rest in found.items())


def live_in_tasks(simulation: Any) -> list[Any]:
    codec = StateCodec(simulation.tasks[0].store.state_columns())
    return sorted(
        (task.partition, key, start, end, *codec.unpack(state))
        for task in simulation.tasks
        for (key, start), (end, state) in task.written.items()
    )


def closed_in_lake(root: Path, simulation: Any) -> list[Any]:
    results = '"count", total, mean, least, most, places, "last"'
    bounds = ", ".join(f"date_part('epoch', {name}) * 1000" for name in ("window_start", "window_end"))
    table = DeltaTable(str(root / simulation.name / "closed" / "banks"))
    query = f"SELECT partition, key, {bounds}, {results} FROM t"
    rows = pa.table(QueryBuilder().register("t", table).execute(query).read_all()).to_pylist()
    return sorted(((p, k, round(s), round(e), *own) for p, k, s, e, *own in (row.values() for row in rows)), key=repr)


def closed_in_tasks(simulation: Any) -> list[Any]:
    published = [(t.partition, msgspec.json.decode(value)) for t in simulation.tasks for _, value, _, _ in t.results]
    rows = [
        (p, *(msgspec.json.encode(v).decode() if k == "last" else v for k, v in row.items())) for p, row in published
    ]
    return sorted(rows, key=repr)


def is_right(root: Path, simulation: Any) -> bool:
    """Return True if the tables hold exactly the committed work of the tasks."""
    assert live_in_lake(root, simulation) == live_in_tasks(simulation)
    assert closed_in_lake(root, simulation) == closed_in_tasks(simulation)
    assert late_in_lake(root, simulation) == late_in_tasks(simulation)
    return True


def late_in_lake(root: Path, simulation: Any) -> list[tuple[int, int]]:
    """The partition and source offset of each row of `late`."""
    folder = root / simulation.name / "late" / "banks"
    rows = DeltaTable(str(folder)).to_pyarrow_table().to_pylist() if folder.exists() else []
    return sorted((row["partition"], row["source_offset"]) for row in rows)


def late_in_tasks(simulation: Any) -> list[tuple[int, int]]:
    """The partition and source offset of each record that the tasks reported as late."""
    return sorted((task.partition, int(headers[2][1])) for task in simulation.tasks for *_, headers in task.late)


def test_tables_equal_the_committed_work_after_each_compaction(
    simulate: Any, topics: Any, job: Any, aggregations: Any, tmp_path: Path
) -> None:
    """After each compaction the tables hold exactly the committed work, whatever zombies wrote. A repeated compaction
    changes nothing."""
    simulation = simulate()
    simulation.feed(200, seed=1)
    topics.write(simulation)
    first = job(simulation).run()
    assert first.closed_rows == sum(len(t.closed) for t in simulation.tasks)
    assert is_right(tmp_path, simulation)

    # Partition 0 gets a new owner. The old owner's next commit must not count, nor a torn commit of the new owner.
    owner = simulation.tasks[0]
    state = owner.pack([a.initial() for a in aggregations.values()])
    owner.epoch = 2
    owner.changelog.append((None, log.encode_takeover(2, log.Takeover(simulation.name, "new", 0))))
    owner.changelog.append((b"zombie", log.encode_live(0, 1, 99, 5, 6, state)))
    owner.changelog.append((b"zombie", log.encode_final(0, 1, 99, 5, 6, 7, state)))
    stale = log.Progress(simulation.name, "exactly_once", {simulation.name: 9}, {}, {}, {}, (owner.store,), 0)
    owner.changelog.append((None, log.encode_progress(1, 99, stale)))
    simulation.feed(200, seed=2)
    owner.changelog.append((b"torn", log.encode_live(0, 2, owner.commit_number + 1, 5, 6, state)))
    topics.write(simulation)
    second = job(simulation, delete_covered=True).run()
    assert second.from_offsets == first.to_offsets
    assert second.deleted_rows > 0
    assert is_right(tmp_path, simulation)

    again = job(simulation).run()
    assert (again.entries, again.to_offsets, again.state_version) == (0, second.to_offsets, second.state_version)
    plan = job(simulation).plan()
    assert plan.offsets.earliest == second.from_offsets, "no further than the snapshot before"
    counts = window_queries.count_windows(str(tmp_path), simulation.name)
    assert counts == (len(live_in_tasks(simulation)), {"banks": first.closed_rows + second.closed_rows})

    live_before = live_in_lake(tmp_path, simulation)
    changed = msgspec.structs.replace(owner.store, aggregations=owner.store.aggregations[:-1])
    progress = log.Progress(simulation.name, "exactly_once", {}, {}, {}, {}, (changed,), 0)
    owner.changelog.append((None, log.encode_progress(2, owner.commit_number + 2, progress)))
    topics.write(simulation)
    with pytest.raises(SchemaMismatch, match=r"'banks'.* aggregations"):
        job(simulation).run()
    assert live_in_lake(tmp_path, simulation) == live_before
    topics.delete_before(f"{simulation.name}-changelog", {0: second.to_offsets[0] + 1})
    with pytest.raises(ChangelogHole, match="continue at offset"):
        job(simulation).run()


class Crash(Exception):
    """A job that ends there."""


def test_runs_that_end_between_two_commits(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Rows that `closed` already has are not appended again, whether new records came or a rewrite happened in
    between."""

    class AfterClosed(CompactionJob):
        def _ensure_table(self, plan: Any, name: str, schema: Any) -> Any:
            if name == "state":
                raise Crash
            return super()._ensure_table(plan, name, schema)

    simulation = simulate()
    for seed in (1, 2, 3):
        simulation.feed(90, seed)
        topics.write(simulation)
        for _ in range(2):
            with pytest.raises(Crash):
                job(simulation, AfterClosed).run()
        if seed == 2:
            simulation.feed(50, 7)
            topics.write(simulation)
        job(simulation, delete_covered=True).run()
        assert is_right(tmp_path, simulation)


def test_of_two_jobs_with_the_same_plan_one_goes_through(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """The other job ends before it changes anything, also if the winner rewrites `state`."""
    simulation = simulate()
    rewritten = list[int]()
    for seed, at in enumerate(("_compact_and_commit", "_commit_tables", "_ensure_table")):
        simulation.feed(90, seed)
        topics.write(simulation)

        class Overtaken(CompactionJob):
            """Another job runs to its end before this one's step."""

        def step(self: Any, *given: Any, name: str = at, kind: Any = Overtaken) -> Any:
            setattr(kind, name, getattr(CompactionJob, name))
            rewritten.append(job(simulation, delete_covered=True, optimize_files_max=1).run().rewritten_partitions)
            return getattr(self, name)(*given)

        setattr(Overtaken, at, step)
        with pytest.raises(delta_writer.CompactionConflict, match="another job"):
            job(simulation, Overtaken).run()
        assert is_right(tmp_path, simulation)
    assert rewritten[-1] == 2


def test_a_rewrite_that_another_job_overtakes(
    simulate: Any, topics: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rewrite that another job overtakes is left to the next compaction, and the tables are right."""
    monkeypatch.setattr("penstock.services.spark.compaction.compact.REWRITE_ROWS_MIN", 0)
    simulation = simulate()
    simulation.feed(60, 1)
    topics.write(simulation)
    job(simulation).run()

    class Overtaken(CompactionJob):
        def _run_tasks(self, items: Any, size: Any, step: Any) -> Any:
            done = super()._run_tasks(items, size, step)
            if type(items[0]).__name__ == "RewriteInput":
                simulation.feed(60, 9)
                topics.write(simulation)
                job(simulation).run()
            return done

    simulation.feed(60, 2)
    topics.write(simulation)
    done = job(simulation, Overtaken).run()
    assert (done.rewritten_partitions, done.failed) == (0, ())
    assert is_right(tmp_path, simulation)


def test_a_backlog_is_compacted_in_bounded_compactions(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Several small compactions leave the same tables as a large one. Each reports the remaining records, and reads on
    to the end of a long commit."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    simulation.feed(60, seed=6, commit_every=math.inf)  # one commit, of more entries than one compaction reads
    task.commit()
    longest = len(task.changelog)
    simulation.feed(80, seed=7)
    topics.write(simulation)
    first = job(simulation, changelog_records_max=longest * 2 // 3).run()
    assert first.remaining_records > 0
    assert longest <= first.to_offsets[0] < len(task.changelog)
    second = job(simulation, changelog_records_max=first.remaining_records + 2).run()
    assert (second.from_offsets, second.remaining_records) == (first.to_offsets, 0)
    assert is_right(tmp_path, simulation)


def data_files(table: Path) -> int:
    return len(DeltaTable(str(table)).file_uris())


def test_many_runs_leave_few_files(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """A table never has more files than its policy allows, rows stay the same, and old files are removed when due."""
    simulation = simulate(1)
    folder = tmp_path / simulation.name
    vacuumed, optimized, rewritten = [], 0, 0
    for seed in range(1, 8):
        simulation.feed(40, seed)
        topics.write(simulation)
        done = job(simulation, optimize_files_max=2, retention_hours=0, vacuum_every=4).run()
        vacuumed.append(done.vacuumed)
        optimized, rewritten = optimized + done.optimized_tables, rewritten + done.rewritten_partitions
        assert data_files(folder / "state") <= 4
        assert data_files(folder / "closed/banks") <= 3
        assert is_right(tmp_path, simulation)
    assert vacuumed == [False, False, False, True, False, False, False]
    assert min(optimized, rewritten) >= 2
    (row,) = [rows[0] for rows in progress_rows(DeltaTable(str(folder / "state"))).values()]
    assert row["added_files"] <= 2


def test_an_idle_application_writes_nothing(
    simulate: Any, topics: Any, job: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Commits that only change schedules and the wall clock make no table version and no file."""
    simulation = simulate()
    simulation.feed(60, seed=8)
    topics.write(simulation)
    first = job(simulation).run()
    idle, busy = simulation.tasks

    def punctuate(task: Any, **moved: Any) -> None:
        task.commit_number += 1
        done = log.decode_progress(log.decode_entry(task.changelog[-1][1]).body)
        later = msgspec.structs.replace(done, grids_ms={"compaction": task.commit_number}, wall_ms=5, **moved)
        task.changelog.append((None, log.encode_progress(task.epoch, task.commit_number, later)))

    for task in (idle, busy):
        punctuate(task)
    topics.write(simulation)
    files = sorted((tmp_path / simulation.name).rglob("*.parquet"))
    second = job(simulation).run()
    assert (second.state_version, second.to_offsets) == (first.state_version, first.to_offsets)
    assert sorted((tmp_path / simulation.name).rglob("*.parquet")) == files

    punctuate(idle)
    punctuate(busy, sources={simulation.name: busy.offset + 1})
    topics.write(simulation)
    third = job(simulation).run()
    assert third.to_offsets[idle.partition] == first.to_offsets[idle.partition]
    assert third.to_offsets[busy.partition] > first.to_offsets[busy.partition]

    for _ in range(1_001):  # until the tail grows too long for a restore
        punctuate(idle)
    topics.write(simulation)
    assert job(simulation).run().to_offsets[idle.partition] > first.to_offsets[idle.partition]


def test_closed_windows_go_by_retention(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Closed windows older than the retention, by event time, are deleted and stay deleted. Newer and live windows stay
    unchanged."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    for day in range(4):
        task.take(b"a", b'{"delay": 1.5, "place": "x"}', day * DAY_MS)
    task.commit()
    topics.write(simulation)
    assert job(simulation, closed_retention_days=1).run().closed_rows == 3
    assert [row[2] for row in closed_in_lake(tmp_path, simulation)] == [2 * DAY_MS]
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
    task.take(b"b", b'{"delay": 1.5, "place": "x"}', 3 * DAY_MS)
    task.commit()
    topics.write(simulation)
    assert job(simulation, closed_retention_days=1).run().closed_rows == 0
    assert [row[2] for row in closed_in_lake(tmp_path, simulation)] == [2 * DAY_MS]


def test_twenty_years_of_event_time_are_few_files(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """`closed` ends up in one file, ordered by start, with less than 60 bytes a row."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    closed = optimized = 0
    for n in range(7_300):
        task.take(b"abcd"[n % 4 :][:1], b'{"delay": 1.5, "place": "x"}', n * DAY_MS)
        if n % 500 == 499:
            task.commit()
        if n % 1_000 == 999 or n == 7_299:
            task.commit()
            topics.write(simulation)
            done = job(simulation, optimize_files_max=3).run()
            closed, optimized = closed + done.closed_rows, optimized + done.optimized_tables
    assert closed > 7_000
    assert optimized == 2
    files = DeltaTable(str(tmp_path / simulation.name / "closed/banks")).file_uris()
    assert len(files) == 1
    assert sum(Path(file).stat().st_size for file in files) < 60 * closed
    for file in files:
        starts = pa.parquet.read_table(file, columns=["window_start"]).column(0).to_numpy()
        assert (np.diff(starts.astype(np.int64)) >= 0).all()
    assert is_right(tmp_path, simulation)


def test_other_engines_read_a_range_of_time(spark: Any, simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """DuckDB, Polars and Spark skip files by the statistics that a compaction and an OPTIMIZE write, and no others."""
    simulation = simulate()
    for seed in (1, 2, 3, 4):
        simulation.feed(150, seed)
        topics.write(simulation)
        done = job(simulation, optimize_files_max=2 if seed == 3 else 0).run()
        assert done.optimized_tables == (2 if seed == 3 else 0)
    windows = sorted((key.decode(), start, end) for t in simulation.tasks for key, start, end, *_ in t.closed)
    folder, starts = tmp_path / simulation.name, sorted(start for _, start, _ in windows)
    low, high = starts[len(starts) // 3], starts[2 * len(starts) // 3]
    wanted = [window for window in windows if low <= window[1] < high]
    assert 0 < len(wanted) < len(windows)
    since, before = (datetime.fromtimestamp(at / 1_000, UTC) for at in (low, high))
    where = f"window_start >= TIMESTAMP '{since.isoformat()}' AND window_start < TIMESTAMP '{before.isoformat()}'"
    columns = ("key", "window_start", "window_end")

    def plain(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
        return sorted((key, ms(start), ms(end)) for key, start, end in (map(row.get, columns) for row in rows))

    by_duckdb = connect(str(folder), "banks").sql(f"SELECT * FROM closed WHERE {where}").to_arrow_table()
    assert plain(by_duckdb.to_pylist()) == wanted
    is_within = (pl.col("window_start") >= since) & (pl.col("window_start") < before)
    assert plain(pl.scan_delta(str(folder / "closed/banks")).filter(is_within).collect().to_dicts()) == wanted
    by_spark = penstock_spark.closed(spark, str(tmp_path), simulation.name, "banks").where(where).select(*columns)
    as_longs = by_spark.selectExpr("key", "unix_millis(window_start) AS start", "unix_millis(window_end) AS end")
    assert sorted(map(tuple, as_longs.collect())) == wanted


def ms(time: datetime) -> int:
    return round(time.timestamp() * 1_000)


def test_the_after_hook(
    spark: Any, simulate: Any, topics: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook gets each table of the compaction by name, with live windows as of their newest rows. Its failure is
    reported and raised, and the compaction stays committed. A missing hook is reported by name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steps_after_compactions.py").write_text(
        "def after(spark, tables):\n"
        "    counts = [tables.pop('closed/banks').count()]\n"
        "    open('counted', 'a').write(f'{counts[0]} ')\n"
        "    assert counts[0] > 30, 'too few'\n"
        "    open('others', 'w').write(repr({name: rows.count() for name, rows in sorted(tables.items())}))\n"
    )
    simulation = simulate()
    simulation.feed(60, seed=1)
    topics.write(simulation)
    first_job = job(simulation, after="steps_after_compactions:after")
    first = first_job.run()
    assert "AssertionError: too few" in first.failed[0]
    with pytest.raises(AfterHookFailed, match="steps_after_compactions:after: AssertionError: too few"):
        first_job.maintenance.failed.raise_first()
    assert is_right(tmp_path, simulation)
    simulation.feed(200, seed=2)
    topics.write(simulation)
    second = job(simulation, after="steps_after_compactions:after").run()
    assert second.failed == ()
    counts = [first.closed_rows, second.closed_rows]
    assert (tmp_path / "counted").read_text() == f"{counts[0]} {sum(counts)} "
    others = {"late/banks": len(late_in_tasks(simulation)), "live/banks": len(live_in_tasks(simulation))}
    assert (tmp_path / "others").read_text() == repr(others)
    with pytest.raises(ConfigError, match="after: steps_after_compactions:nothing"):
        call_after_hook(spark, "steps_after_compactions:nothing", str(tmp_path / simulation.name))


def test_the_backlog_is_what_no_snapshot_covers(simulate: Any, topics: Any, job: Any, tmp_path: Path) -> None:
    """Before the first compaction the whole changelog is uncovered. Afterwards only transaction markers are."""
    simulation = simulate()
    simulation.feed(60, seed=9)
    topics.write(simulation)
    ready = job(simulation)
    streams = StreamsSettings(application_id=simulation.name, lake=str(tmp_path))

    async def backlog() -> CompactionLag:
        async with Admin(ready.settings.kafka) as admin:
            return await measure_compaction_lag(admin, streams)

    before = asyncio.run(backlog())
    assert before.records >= sum(len(task.changelog) for task in simulation.tasks)
    assert before.snapshot_ms is None
    ready.run()
    after = asyncio.run(backlog())
    assert after.records <= len(simulation.tasks)
    assert before.bytes is not None
    assert after.bytes is not None
    assert before.bytes > 1_000 > after.bytes
    (compaction,) = compaction_history.read_compactions(str(tmp_path), simulation.name, 1)
    assert after.snapshot_ms == compaction.ended_at_ms


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
    watch = CompactionLagWatch(given, registry, lambda: True, request=lambda: supervisor.request())
    supervisor = CompactionSupervisor(given, registry, lag_watch=watch)
    running = [asyncio.create_task(each.run()) for each in (supervisor, watch)]
    try:
        deadline = time.monotonic() + 300
        while not (found := supervisor.describe()) or found[-1]["status"] == "running":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await asyncio.sleep(2)
        assert [one["status"] for one in supervisor.describe()] == ["done"]
        assert watch.last is not None
        assert watch.last.bytes is not None
        assert watch.last.bytes < 1_000
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert live_in_lake(tmp_path, simulation) == live_in_tasks(simulation)
