"""Late records of a real late topic as corrections in a real Delta table."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deltalake import DeltaTable

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import rules, tables
from penstock.services.spark.audit import run_audit
from penstock.services.spark.audit_rules import Shorter, shorter_before
from penstock.services.spark.compact import Compaction
from penstock.services.spark.corrections import Corrected, Corrections, NotCorrectable, _Range
from penstock.services.spark.failures import CompactionConflict
from penstock.services.spark.generations import layouts_of
from penstock.services.spark.kafka import topic_name, topic_offsets
from penstock.services.spark.late_coverage import LateCoverage
from penstock.services.spark.late_runs import next_late_run, notes, pending
from penstock.services.spark.nearby import newest_windows
from penstock.services.spark.settings import AuditSettings, CompactSettings
from penstock.shared.common import lake
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.collecting import CollectList, Last
from penstock.shared.streams.latest import Latest


def value(delay: float | None) -> bytes:
    return msgspec.json.encode({"delay": delay, "place": "x"})


READ = _Range(3, "t-late", "id", {}, {0: 5, 1: 7, 2: 9})


class Crashing(Corrections):
    """Ends after the append and before it is covered."""

    def _cover(self, *arguments: Any) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def settings(kafka: EmbeddedKafka, tmp_path: Path, topic_name: str) -> CompactSettings:
    """A compaction with late records into a lake of the test's own."""
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    return CompactSettings(application=topic_name, lake=str(tmp_path), kafka=broker, with_late=True)


def windows(spark: Any, settings: CompactSettings) -> list[Any]:
    """What readers see, by key and start: key, start, end, count, total, least, places, revision."""
    closed = newest_windows(spark.read.format("delta").load(f"{settings.tables}/closed/banks"))
    columns = ("key", "start_ms", "end_ms", "count", "total", "least", "places", "revision")
    return sorted(tuple(row) for row in closed.select(*columns).collect())


def corrected(spark: Any, settings: CompactSettings) -> Corrected | None:
    """What one more compaction corrects."""
    job = Compaction(spark, settings, print)
    job.run()
    return job.corrected


@pytest.fixture
def correctable(simulate: Callable[..., Any], aggregations: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A simulation of one task without the user's own aggregate, which nobody can correct."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    monkeypatch.delitem(aggregations, "last")
    task.store = msgspec.structs.replace(task.store, aggregations=task.store.aggregations[:-1])
    return simulation


@pytest.mark.soak
def test_late_records_become_corrections(
    spark: Any,
    correctable: Any,
    topics: Any,
    settings: CompactSettings,
    tmp_path: Path,
) -> None:
    """Late records extend, join and make sessions, once, even after a crash; the audit sees what the stream closed."""
    (task,) = correctable.tasks
    for key, delay, time in (
        (b"a", 1.5, 1000),
        (b"a", 2.5, 1150),  # out of the gap of the one before
        (b"b", 4.0, 1000),
        (b"z", None, 5000),  # closes all
        (b"a", -1.0, 1080),  # joins both
        (b"b", 8.0, 1000),  # within its session
        (b"c", 16.0, 2000),  # a session of its own
        (b"c", 32.0, 2100),  # extends that, later in the same run
        (b"d", None, 0),
    ):
        task.take(key, value(delay), time)
    task.take(b"a", b'{"delay": "much", "place": "x"}', 1000)
    task.commit()
    topics.write(correctable)
    job = Compaction(spark, settings, print)
    first = job.run()
    assert first.finals == 3
    assert job.corrected == Corrected(late_records=5, late_refused=1, corrected_windows=4, superseded_windows=2)
    expected = [
        ("a", 1000, 1150, 3, 3.0, -1.0, 1, 1),
        ("b", 1000, 1000, 2, 12.0, 4.0, 1, 1),
        ("c", 2000, 2100, 2, 48.0, 16.0, 1, 1),
        ("d", 0, 0, 1, None, None, 1, 1),
    ]
    assert windows(spark, settings) == expected
    found = lake.find_closed(str(tmp_path), correctable.name, "banks", "a", (0, 9_999))
    assert [(row["start_ms"], row["end_ms"], row["revision"]) for row in found] == [(1000, 1150, 1)]

    again = Compaction(spark, settings, print)
    again.run()
    assert again.corrected == Corrected()

    task.take(b"b", value(1.0), 1100)
    task.take(b"c", value(None), 9000)
    task.commit()
    topics.write(correctable)
    Compaction(spark, settings.model_copy(update={"with_late": False}), print).run()
    with pytest.raises(KeyboardInterrupt):
        Crashing(spark, settings, print, "crashed").run()
    task.take(b"b", value(2.0), 1200)
    task.commit()
    topics.write(correctable)
    last = Compaction(spark, settings, print)
    last.run()
    assert last.corrected == Corrected(late_records=1, corrected_windows=1, superseded_windows=1)
    expected[1] = ("b", 1000, 1200, 4, 15.0, 1.0, 1, 3)
    assert windows(spark, settings) == [*expected, ("z", 5000, 5000, 1, None, None, 1, 0)]
    told = lake.read_snapshot(str(tmp_path), correctable.name, [0])
    assert told is not None
    assert list(told.partitions) == [0]
    audit = AuditSettings(application=correctable.name, lake=str(tmp_path), kafka=settings.kafka)
    assert run_audit(spark, audit, print).ok


def test_late_records_that_the_run_does_not_cover_wait(
    spark: Any,
    correctable: Any,
    topics: Any,
    settings: CompactSettings,
) -> None:
    """What the stream closes while a run is under way is not hidden by the late records that came with it."""
    (task,) = correctable.tasks
    task.take(b"a", value(1.0), 1000)
    task.take(b"z", value(None), 1500)
    task.take(b"d", value(4.0), 1000)  # late, and covered by the first run
    task.commit()
    topics.write(correctable)

    class Overtaken(Compaction):
        """The stream goes on between what the run read of the changelog and what it reads of the late topic."""

        def after_merge(self, *arguments: Any) -> None:
            task.take(b"z", value(None), 1600)
            task.take(b"b", value(1.0), 1600)
            task.take(b"y", value(None), 5000)
            task.take(b"b", value(2.0), 1600)  # late for a window that the run has not seen closed
            task.take(b"z", value(8.0), 1500)
            task.commit()
            topics.write(correctable)
            super().after_merge(*arguments)

    first = Overtaken(spark, settings, print)
    first.run()
    assert first.corrected == Corrected(late_records=1, corrected_windows=1, late_waiting=2)
    second = Compaction(spark, settings, print)
    second.run()
    assert second.corrected == Corrected(late_records=2, corrected_windows=2)
    assert windows(spark, settings) == [
        ("a", 1000, 1000, 1, 1.0, 1.0, 1, 0),
        ("b", 1600, 1600, 2, 3.0, 1.0, 1, 1),
        ("d", 1000, 1000, 1, 4.0, 4.0, 1, 1),
        ("z", 1500, 1600, 3, 8.0, 8.0, 1, 1),
    ]


@pytest.mark.soak
def test_late_records_of_an_earlier_life_and_of_no_source_record(
    spark: Any,
    correctable: Any,
    topics: Any,
    settings: CompactSettings,
) -> None:
    """What was late before a reset, and what names a source record that there is not, are left out and counted; what
    stands behind them is taken."""
    (task,) = correctable.tasks

    def put(*headers: tuple[str, bytes]) -> None:
        names = {"topic": correctable.name.encode(), "partition": b"0", "offset": b"0"} | dict(headers)
        told = [(f"penstock.late.{name}", text) for name, text in names.items() if text]
        task.late.append((b"b", value(1.0), 1000, told))

    task.take(b"a", value(1.0), 1000)
    task.take(b"z", value(None), 5000)
    put()  # an earlier release's, and before one of an earlier life
    put(("changelog_id", b"that of another life"))
    put(("partition", b"7"), ("offset", b"5"))
    put(("partition", b""))
    put(("offset", b"900"))
    task.commit()
    topics.write(correctable)
    changelog = topic_offsets(spark, settings.kafka, settings.changelog_topic, 10_000)
    task.take(b"c", value(2.0), 1000)
    *_, (key, content, time, headers) = task.late
    task.late[-1] = (key, content, time, [*headers, ("penstock.late.changelog_id", changelog.topic_id.encode())])
    task.commit()
    topics.write(correctable)
    told: list[str] = []
    job = Compaction(spark, settings, told.append)
    job.run()
    assert job.corrected == Corrected(1, late_refused=3, corrected_windows=1, late_of_earlier_lives=2)
    assert [(row[0], row[3]) for row in windows(spark, settings)] == [("a", 1), ("c", 1)]
    late = f"{correctable.name}-late-0 at offset"
    assert [line.split(late)[1][:2] for line in told if late in line] == [" 2", " 3", " 4"]


def records_in_windows(spark: Any, settings: CompactSettings) -> int:
    """Of closed and of live windows."""
    live = spark.read.format("delta").load(f"{settings.tables}/state").filter("row = 'window'")
    counts = [row.n for row in live.selectExpr("banks.count_n AS n").collect()]
    return sum(counts) + sum(row[3] for row in windows(spark, settings))


@pytest.mark.soak
def test_a_late_topic_of_another_name_and_back(
    spark: Any,
    correctable: Any,
    topics: Any,
    settings: CompactSettings,
) -> None:
    """Each topic is read to its end, also one that no run with late records saw; going back repeats nothing, and one
    that is gone is said once."""
    (task,) = correctable.tasks
    task.take(b"a", value(1.0), 1000)
    task.take(b"z", value(None), 5000)
    kept: dict[str, list[Any]] = {}
    told: list[str] = []

    def late(topic: str, time: int, compact: bool = True) -> Corrected | None:
        """A late record by way of the topic; what a run did with late records."""
        kept[task.store.late] = task.late
        task.late = kept.get(topic, [])
        task.store = msgspec.structs.replace(task.store, late=topic)
        task.take(b"a", value(1.0), time)
        task.commit()
        topics.write(correctable)
        told.clear()
        job = Compaction(spark, settings, told.append)
        if compact:
            job.run()
        return job.corrected

    first, second, third = (f"{correctable.name}{part}-late" for part in ("", "-b", "-c"))
    for name in ("b", "c"):
        topics.make(f"{correctable.name}-{name}")
    late(first, 1010)
    late(first, 1020, compact=False)
    assert late(second, 1030) == Corrected(2, corrected_windows=2, superseded_windows=2)
    late(third, 1040, compact=False)
    topics.delete(second)
    assert late(first, 1050) == Corrected(2, corrected_windows=2, superseded_windows=2)
    said = f"banks: its earlier late topic {second} is gone: what stood in it from 0:"
    assert [line[: len(said)] for line in told if "gone" in line] == [said]
    assert late(first, 1060) == Corrected(1, corrected_windows=1, superseded_windows=1)
    assert not [line for line in told if "gone" in line or "made again" in line]
    assert records_in_windows(spark, settings) == len(task.source) == 8


@pytest.mark.soak
def test_corrections_of_several_topics_that_state_lacks_are_not_made_again(
    spark: Any,
    correctable: Any,
    topics: Any,
    settings: CompactSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier `state` was put back, or its rows of late topics are lost: `closed` says how far each was read."""
    (task,) = correctable.tasks
    task.take(b"a", value(1.0), 1000)
    task.take(b"z", value(None), 5000)
    topics.make(f"{correctable.name}-b")

    def late(time: int) -> None:
        task.take(b"a", value(1.0), time)
        task.commit()
        topics.write(correctable)

    late(1010)
    corrected(spark, settings)
    state = Path(settings.tables) / "state"
    shutil.copytree(state, tmp_path / "copy")
    late(1020)
    task.late, task.store = [], msgspec.structs.replace(task.store, late=f"{correctable.name}-b-late")
    late(1030)
    assert corrected(spark, settings) == Corrected(2, corrected_windows=2, superseded_windows=2)
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "copy", state)
    monkeypatch.setattr(tables, "HISTORY_VERSIONS_MAX", 1)  # as if there were many of the topic of now since
    assert corrected(spark, settings) == Corrected()
    assert records_in_windows(spark, settings) == len(task.source)
    spark.sql(f"DELETE FROM {tables.delta(str(state))} WHERE row = 'late'")
    assert corrected(spark, settings) == Corrected()
    assert records_in_windows(spark, settings) == len(task.source)


class Late:
    """One late record after the other, and tables that are put back."""

    def __init__(self, spark: Any, correctable: Any, topics: Any, settings: CompactSettings, copies: Path) -> None:
        self.spark, self.simulation, self.topics, self.settings = spark, correctable, topics, settings
        (self.task,) = correctable.tasks
        self.copies, self.told, self.closed = copies, list[str](), f"{settings.tables}/closed/banks"

    def take(self, time: int, key: bytes = b"a", **more: Any) -> Corrected | None:
        """What the compaction after this record corrects, once it leaves nothing."""
        self.task.take(key, value(1.0), time)
        self.task.commit()
        self.topics.write(self.simulation)
        self.told = []
        settings = self.settings.model_copy(update=more)
        while (job := Compaction(self.spark, settings, self.told.append)).run().remaining_records:
            assert job.corrected is None
        return job.corrected

    def copy_rows(self, table: str, column: str) -> None:
        rows = self.spark.read.format("delta").load(f"{self.settings.tables}/{table}")
        rows.write.partitionBy(column).format("delta").save(str(self.copies / table))

    def put_back(self, table: str) -> None:
        shutil.rmtree(f"{self.settings.tables}/{table}")
        shutil.copytree(self.copies / table, f"{self.settings.tables}/{table}")
        self.spark._jvm.org.apache.spark.sql.delta.DeltaLog.clearCache()

    def forget_log(self) -> None:
        """As Delta's log retention does: a checkpoint says what is there, and what is older than it goes."""
        DeltaTable(self.closed).create_checkpoint()
        *forgotten, _ = sorted(Path(self.closed, "_delta_log").glob("*.json"))
        for file in [*forgotten, *Path(self.closed, "_delta_log").rglob("*.crc")]:
            file.unlink()

    def windows(self) -> list[Any]:
        """Bounds and count of the sessions of the key that is late."""
        return [row[1:4] for row in windows(self.spark, self.settings) if row[0] == "a"]


@pytest.fixture
def late(spark: Any, correctable: Any, topics: Any, settings: CompactSettings, tmp_path: Path) -> Late:
    """A session of one record that has been closed."""
    made = Late(spark, correctable, topics, settings, tmp_path / "copies")
    made.task.take(b"a", value(1.0), 1000)
    made.take(3000, b"z", with_late=False)
    return made


@pytest.mark.soak
def test_corrections_in_copies_of_rows_are_not_made_again(late: Late) -> None:
    """Where corrections came between the copies of `state` and of `closed`, rows say what they took; those of an
    earlier release do not, and then nothing is corrected before all of it is made anew."""
    late.copy_rows("state", "partition")
    assert late.take(1010) == Corrected(1, corrected_windows=1, superseded_windows=1)
    late.copy_rows("closed/banks", "day")
    for table in ("state", "closed/banks"):
        late.put_back(table)
    assert late.take(3010, b"z", with_late=False) is None
    assert late.take(3020, b"z") == Corrected()
    assert f"the log of {late.closed} does not go back to corrections 0, " in "".join(late.told)
    assert late.windows() == [(1000, 1010, 2)]
    for table in ("state", "closed/banks"):
        late.put_back(table)
    late.spark.sql(f"UPDATE {tables.delta(late.closed)} SET corrected_by = NULL")
    with pytest.raises(NotCorrectable, match="could count twice") as refused:
        late.take(3030, b"z")
    for sql in re.findall(r"(?:DELETE|UPDATE) .*?(?=, then |$)", str(refused.value)):
        late.spark.sql(sql)
    assert late.take(1020) == Corrected(2, corrected_windows=1, superseded_windows=1)
    assert late.windows() == [(1000, 1020, 3)]


@pytest.mark.soak
def test_corrections_that_the_log_has_forgotten_are_known(late: Late) -> None:
    """An earlier `state` is put back where Delta's log retention took the notes: rows say what was taken, and Delta
    which numbers were. Where the rows are gone too, their late records are corrected anew."""
    assert late.take(1010) == Corrected(1, corrected_windows=1, superseded_windows=1)
    shutil.copytree(f"{late.settings.tables}/state", late.copies / "state")
    assert late.take(1020) == Corrected(1, corrected_windows=1, superseded_windows=1)
    late.take(5000, b"z", with_late=False)
    late.forget_log()
    late.put_back("state")
    assert late.take(5010, b"z") == Corrected()
    assert f"the log of {late.closed} does not go back to corrections 1, " in "".join(late.told)
    assert late.take(1030) == Corrected(1, corrected_windows=1, superseded_windows=1)
    assert not [line for line in late.told if line.startswith("the log of")]
    assert late.windows() == [(1000, 1030, 4)]
    late.spark.sql(f"DELETE FROM {tables.delta(late.closed)} WHERE revision > 0")
    late.forget_log()
    late.put_back("state")
    assert late.take(5020, b"z") == Corrected(2, corrected_windows=1, superseded_windows=1)
    assert late.windows() == [(1000, 1030, 3)]


def test_a_late_topic_is_found_by_its_id(spark: Any, topics: Any, settings: CompactSettings) -> None:
    """Earlier releases kept that alone."""
    topics.make(settings.application)
    held = topic_offsets(spark, settings.kafka, f"{settings.application}-late", 10_000)
    assert topic_name(spark, settings.kafka, held.topic_id, 10_000) == held.topic
    assert topic_name(spark, settings.kafka, "1Jf0gZk2QjS7n5cL0mA3Bg", 10_000) is None


def corrected_rows(
    spark: Any,
    settings: CompactSettings,
    store: log.StoreSchema,
    finals: list[Any],
    late: list[Any],
    gone: tuple[str, ...] = (),
) -> list[Any]:
    """What is appended: partition, start, end, count, latest, revision, when it closed; folders `gone` are removed."""
    (layout,) = layouts_of((store,))
    closed = spark.createDataFrame(finals, tables.final_schema(layout))
    path = f"{settings.tables}/closed/{store.name}"
    tables.append_closed(tables.closed_frame(closed, store), store, path, ("finals", 1), "{}")
    for folder in gone:
        shutil.rmtree(Path(path) / folder)
    columns = "partition INT, key BINARY, timestamp_ms BIGINT, closed_ms BIGINT"
    schema = f"{columns}, state {tables.struct_type(layout)}, source_offset BIGINT, is_own BOOLEAN, late_partition INT"
    frame = spark.createDataFrame([(*row, nth, False, row[0]) for nth, row in enumerate(late)], schema)
    rows = Corrections(spark, settings, print, "job")._rows(store, layout, frame, READ)
    found = rows.selectExpr("partition", "start_ms", "end_ms", "n", "latest", "revision", "unix_millis(closed_at)")
    return sorted(tuple(row) for row in found.collect())


def schema(kind: Any, gap_ms: int, **more: int) -> log.StoreSchema:
    latest, count = (log.AggregationSchema.of(n, a) for n, a in (("latest", Latest()), ("n", Count())))
    return log.StoreSchema(
        "s", kind, "string", gap_ms, 0, "on_close", "t", None, "t-late", None, (latest, count), **more
    )


def test_corrections_of_hopping_windows(spark: Any, settings: CompactSettings) -> None:
    """A late record counts in each window that it lies in: a closed one is corrected, one that was not there is new."""
    finals = [(b"k", 0, 10, 30, (3, 2), 30, 0, 7)]
    late = [(0, b"k", 7, 40, (7, 1)), (0, b"k", 3, None, (3, 1)), (1, b"k", 2, 41, (2, 1))]
    found = corrected_rows(spark, settings, schema("hopping", 0, size_ms=10, advance_ms=5), finals, late)
    assert found == [(0, 0, 10, 4, 7, 1, 40), (0, 5, 15, 1, 7, 1, 40), (1, 0, 10, 1, 2, 1, 41)]


def test_a_late_record_joins_closed_sessions(spark: Any, settings: CompactSettings) -> None:
    """Sessions within the gap become one of a higher revision and are no more themselves; others are left alone."""
    finals = [(b"k", *bounds, 50, (bounds[1], 2), 50, 0, 7) for bounds in ((0, 10), (28, 30), (41, 45), (46, 47))]
    found = corrected_rows(spark, settings, schema("session", 10), finals, [(0, b"k", 18, 60, (18, 1))])
    assert found == [(0, 0, 10, None, None, 1, 60), (0, 0, 30, 5, 30, 1, 60), (0, 28, 30, None, None, 1, 60)]


@pytest.mark.soak
def test_lists_are_in_the_order_in_which_records_came(spark: Any, settings: CompactSettings) -> None:
    """An earlier session's values, a later one's, then those of late records by their offsets; the last is by time."""
    aggregations = {"pages": CollectList("page", 4), "last": Last("page")}
    described = tuple(log.AggregationSchema.of(n, a) for n, a in aggregations.items())
    store = msgspec.structs.replace(schema("session", 10), aggregations=described)
    finals = [
        (b"k", at, at, 50, (f'["{page}"]'.encode(), 1, at, f'"{page}"'.encode()), 50, 0, 7)
        for at, page in ((30, "c"), (20, "b"))
    ]
    late = [
        (0, b"k", at, 60, (f'["{page}"]'.encode(), 1, at, f'"{page}"'.encode()))
        for at, page in ((25, "y"), (10, "a"), (15, "z"))
    ]
    (layout,) = layouts_of((store,))
    path = f"{settings.tables}/closed/s"
    closed = spark.createDataFrame(finals, tables.final_schema(layout))
    tables.append_closed(tables.closed_frame(closed, store), store, path, ("finals", 1), "{}")
    columns = "partition INT, key BINARY, timestamp_ms BIGINT, closed_ms BIGINT"
    form = f"{columns}, state {tables.struct_type(layout)}, source_offset BIGINT, is_own BOOLEAN, late_partition INT"
    frame = spark.createDataFrame([(*row, nth, False, nth % 2) for nth, row in enumerate(late)], form)
    rows = Corrections(spark, settings, print, "job")._rows(store, layout, frame, READ).filter("state IS NOT NULL")
    (found,) = rows.select("start_ms", "end_ms", "pages", "last", "state.pages_n", "corrected_by").collect()
    assert tuple(found[:-1]) == (10, 30, '["b","c","y","a"]', '"c"', 5)
    by = {"run": 3, "topic": "t-late", "topic_id": "id", "to_offsets": {"0": 5, "1": 7}}
    assert msgspec.json.decode(found.corrected_by) == by


DAY_MS = 86_400_000


def test_days_without_late_records_are_not_read(spark: Any, settings: CompactSettings) -> None:
    """Of many days of one key those near its late records alone are read: the files of the others may be gone."""
    finals = [(b"k", day * DAY_MS, day * DAY_MS + 5, 50, (day, 2), 50, 0, 7) for day in range(9)]
    gone = tuple(f"day=1970-01-0{day + 1}" for day in range(9) if day not in (3, 7))
    late = [(0, b"k", 3 * DAY_MS + 9, 60, (9, 1)), (0, b"j", 7 * DAY_MS, 60, (1, 1))]
    found = corrected_rows(spark, settings, schema("session", 10), finals, late, gone)
    start = 3 * DAY_MS
    assert found == [
        (0, start, start + 5, None, None, 1, 60),
        (0, start, start + 9, 3, 9, 1, 60),
        (0, 7 * DAY_MS, 7 * DAY_MS, 1, 1, 1, 60),
    ]
    with pytest.raises(Exception, match="FILE_NOT_EXIST"):
        spark.read.format("delta").load(f"{settings.tables}/closed/s").groupBy("key").count().collect()


@pytest.mark.soak
def test_late_records_join_what_they_reach_and_no_further(spark: Any, settings: CompactSettings) -> None:
    """Of sessions that the stream cut, each near the one before, those near late records, over midnight."""
    bounds = [(DAY_MS + at, DAY_MS + at + 8) for at in range(-100, 100, 10)]
    finals = [(b"k", *of, 50, (of[1], 2), 50, 0, 7) for of in bounds]
    late = [(0, b"k", DAY_MS + at, 60, (18, 1)) for at in (-11, -1, 9, 19)]
    found = corrected_rows(spark, settings, schema("session", 10), finals, late)
    joined = [of for of in bounds if of[1] >= DAY_MS - 21 and of[0] <= DAY_MS + 29]
    assert [row for row in found if row[3]] == [(0, joined[0][0], joined[-1][1], 14, joined[-1][1], 1, 60)]
    assert (len(joined), len(found)) == (5, 6)


@pytest.mark.soak
def test_a_longer_gap_joins_nothing_that_was_closed(
    spark: Any, correctable: Any, topics: Any, settings: CompactSettings
) -> None:
    """Late records reach as far as the gap had it that took them, and what is closed later joins them by that too."""
    (task,) = correctable.tasks

    def take(*records: tuple[bytes, int]) -> None:
        for key, at in records:
            task.take(key, value(1.0), at)
        task.commit()
        topics.write(correctable)

    closed = [(key, at) for at in (1000, 2000, 3000) for key in (b"a", b"b")]
    take(*closed, (b"a", 1050), (b"c", 2840), (b"d", 2840))
    assert corrected(spark, settings) == Corrected(3, corrected_windows=3, superseded_windows=1)
    take((b"b", 2050))
    task.store = msgspec.structs.replace(task.store, gap_ms=1500)
    take((b"c", 2900), (b"d", 3000), (b"z", 10_000))
    assert corrected(spark, settings) == Corrected(1, corrected_windows=2, superseded_windows=3)
    expected = [
        *(("a", 1000, 1050, 2), ("a", 2000, 2000, 1), ("a", 3000, 3000, 1)),
        *(("b", 1000, 1000, 1), ("b", 2000, 2050, 2), ("b", 3000, 3000, 1)),
        *(("c", 2840, 2900, 2), ("d", 2840, 2840, 1), ("d", 3000, 3000, 1)),
    ]
    assert [row[:4] for row in windows(spark, settings)] == expected
    take((b"b", 1050))
    assert corrected(spark, settings) == Corrected(1, corrected_windows=1, superseded_windows=2)
    expected[3:5] = [("b", 1000, 2050, 4)]
    assert [row[:4] for row in windows(spark, settings)] == expected


@pytest.mark.soak
def test_a_rule_is_known_though_its_source_records_are_gone(
    spark: Any, correctable: Any, topics: Any, settings: CompactSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late record that waited goes by the gap that took it, and an audit knows what was shorter; of too many rules in
    a partition the oldest go, with a word."""
    (task,) = correctable.tasks
    told: list[str] = []

    def compact(time: int, **more: Any) -> None:
        task.store = msgspec.structs.replace(task.store, **more)
        task.take(b"z", value(None), time)
        task.commit()
        topics.write(correctable)
        Compaction(spark, settings.model_copy(update={"with_late": not more}), told.append).run()

    for at in (1000, 1500, 3000, 1250):
        task.take(b"a", value(1.0), at)
    compact(3000, grace_ms=40)
    topics.delete_before(correctable.name, {0: 5})
    compact(6000, gap_ms=1000)
    compact(9000, grace_ms=60)
    compact(12_000)
    assert [row[:4] for row in windows(spark, settings)][:3] == [("a", at, at, 1) for at in (1000, 1250, 1500)]
    state = f"{settings.tables}/state"
    known = rules.kept(spark.table(tables.delta(state)))
    assert shorter_before(known, task.store) == [Shorter(0, 5, 140), Shorter(0, 6, 1040)]
    assert not [line for line in told if "rules" in line]
    monkeypatch.setattr(rules, "RULES_MAX", 2)
    compact(15_000, grace_ms=70)
    assert [line for line in told if line.startswith("partitions [0] have had more than 2 rules: the 2 oldest are")]
    left = rules.kept(spark.table(tables.delta(state))).values()
    assert sorted(rule.stores[0].grace_ms for rule in left) == [60, 70]


@pytest.mark.soak
def test_of_two_jobs_with_corrections_one_wins(spark: Any, settings: CompactSettings) -> None:
    """The append of the same run by another job is refused, and who is overtaken takes nothing back."""
    store = schema("session", 10)
    path, state = f"{settings.tables}/closed/s", f"{settings.tables}/state"
    tables.ensure_state(spark, state, layouts_of((store,)))
    closed = [(b"k", 0, 10, 30, (3, 2), 30, 0, 7)]
    rows = tables.closed_frame(spark.createDataFrame(closed, tables.final_schema(layouts_of((store,))[0])), store)
    first, second = (Corrections(spark, settings, print, job) for job in ("first", "second"))
    read = _Range(1, "t-late", "id", {0: 0}, {0: 5})
    first._append(store, rows, path, read)
    with pytest.raises(CompactionConflict, match="another job has made corrections 1"):
        second._append(store, rows, path, read)
    assert spark.read.format("delta").load(path).count() == 1
    (lacking,) = pending({}, notes(second._log(path)))
    assert (next_late_run(0, second._log(path), 1), lacking["to_offsets"]) == (1, {"0": 5})
    second._cover(store, read._replace(run=2, end={0: 9}))
    first._cover(store, read)
    (row,) = spark.read.format("delta").load(state).filter("row = 'late'").collect()
    assert (row.run, row.changelog_offset) == (2, 9)
    second._cover(store, _Range(1, "t-late", "id of a topic made again", {0: 0}, {0: 2}))
    known = LateCoverage(spark, state, "s", print).known()
    assert [(one.topic_id, one.run, one.offsets) for one in known] == [
        ("id of a topic made again", 1, {0: 2}),
        ("id", 2, {0: 9}),
    ]


@pytest.mark.soak
def test_upkeep_does_not_wait_for_what_cannot_be_corrected(
    spark: Any, simulate: Callable[..., Any], topics: Any, settings: CompactSettings
) -> None:
    """Late records are refused by the name of what refuses them, with the changelog deleted and files optimized."""
    simulation = simulate(1)
    (task,) = simulation.tasks
    simulation.feed(40, seed=1)
    topics.write(simulation)
    first = Compaction(spark, settings.model_copy(update={"with_late": False}), print).run()
    with pytest.raises(NotCorrectable, match=r"store 'banks': the aggregations last \(aggregate\) are the application"):
        Corrections(spark, settings, print, "job").run()
    simulation.feed(40, seed=2)
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    loose = msgspec.structs.replace(done, guarantee="at_least_once")
    task.changelog[-1] = (None, log.encode_progress(task.epoch, task.commit_number, loose))
    topics.write(simulation)
    told: list[str] = []
    job = Compaction(spark, settings.model_copy(update={"delete_covered": True, "optimize_files_max": 1}), told.append)
    with pytest.raises(NotCorrectable, match="--with-late needs exactly_once"):
        job.run()
    assert any(line.startswith("optimized ") for line in told)
    assert job.plan().offsets.earliest == first.to_offsets
