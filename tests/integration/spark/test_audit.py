"""The audit over real topics and tables: the engine's output passes, and each forgery is found and named."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiokafka import AIOKafkaProducer

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.audit.audit import run_audit
from penstock.services.spark.audit.audit_inputs import Inputs, NotAuditable, deleted_until_ms_of
from penstock.services.spark.audit.common_checks import SESSION_CHECKS, unknown_coordinates
from penstock.services.spark.audit.report import AuditReport, print_report, report_as_json
from penstock.services.spark.audit.settings import AuditSettings
from penstock.services.spark.main import AUDIT_DIFFERENCES, AUDIT_FAILED, audit_exit_status
from penstock.shared.clients.dead_letters.dead_letter import NODE
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Max, Mean, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.testing.topology_test_driver import APPLICATION, TopologyTestDriver
from tests.lake_tables import LakeWriter
from tests.shared_broker import Broker

GAP, SIZE, ADVANCE, GRACE = 10, 40, 20, 25
COMMIT_RECORDS = 10
KINDS = ("session", "tumbling", "hopping", "sliding")
AGGREGATIONS = {"n": Count(), "total": Sum("x"), "mean": Mean("x"), "most": Max("x"), "tags": CountDistinct("tag")}
# The audit does not compute these from the records. It compares only their result columns with their states.
NOT_COMPUTED = {"first": First("x"), "last": Last("tag"), "listed": CollectList("tag", limit=100)}
Rows = list[dict[str, Any]]


def topology(topic: str, kind: str, grace: int = GRACE, *, filtered: bool = False) -> Any:
    builder = StreamsBuilder()
    stream = builder.stream(topic)
    if filtered:
        stream = stream.filter(lambda record: True)
    grouped = stream.group_by_key()
    made: dict[str, Callable[[], Any]] = {
        "session": lambda: grouped.session_window(gap=GAP, grace=grace),
        "tumbling": lambda: grouped.tumbling_window(size=SIZE, grace=grace),
        "hopping": lambda: grouped.hopping_window(size=SIZE, advance=ADVANCE, grace=grace),
        "sliding": lambda: grouped.sliding_window(difference=SIZE, grace=grace),
    }
    made[kind]().aggregate("s", **AGGREGATIONS, **NOT_COMPUTED).on_close().to(f"{topic}-out")
    return builder.build()


def play(
    topic: str, kind: str, partition: int, *, seed: int = 1, records: int = 150, **more: Any
) -> TopologyTestDriver:
    """A random out-of-order stream, with some keys in order, dead letters, and records without a key. With sliding
    windows, some records have no value."""
    rnd = random.Random(seed)
    given = {name: more.pop(name) for name in ("grace", "filtered") if name in more}
    built = topology(topic, kind, **given)
    driver = TopologyTestDriver(built, partition=partition, errors=ErrorHandlers(), commit_each=False, **more)
    driver.task.keeps_late, now = True, 0
    for number in range(1, records + 1):
        now += rnd.choice([0, 1, 3, 8, 10, 11, 30, 60])
        key = rnd.choice([b"a", b"a", b"b", b"c", None if rnd.random() < 0.2 else b"d"])
        at = now if key in (b"c", b"d") else max(0, now - rnd.choice([0, 0, 5, 20, 40, 60, 150]))
        value = {"x": rnd.choice([None, 1.5, -2.25, 10.125]), "tag": rnd.choice(["x", "y", "z", ""])}
        body: bytes | None = b"{" if rnd.random() < 0.05 else msgspec.json.encode(value)
        if kind == "sliding" and rnd.random() < 0.1:
            body = rnd.choice([None, None, b"null", b" null\r\n"])
            # aiokafka rejects a record without both key and value.
            body = b"null" if body is None and key is None else body
        driver.pipe(topic, key=key, value=body, timestamp=at)
        if number % COMMIT_RECORDS == 0 or number == records:
            driver.commit()
    driver.commit_each = True
    return driver


class Lake(NamedTuple):
    """Writes topics and tables of a test, and audits them."""

    kafka: KafkaSettings
    topic: str
    folder: Path
    spark: Any
    topics: Any

    def send(self, played: list[TopologyTestDriver], more: int = 0) -> None:
        """Send the sources and dead letters, and `more` records that no task has processed yet."""

        async def run() -> None:
            await self.topics.create(self.topic, len(played))
            async with AIOKafkaProducer(bootstrap_servers=self.kafka.bootstrap_servers) as producer:
                sent = []
                for partition, one in enumerate(played):
                    for r in one.source_log[self.topic]:
                        own = {"partition": partition, "timestamp_ms": r.timestamp}
                        sent.append(await producer.send(self.topic, r.value, r.key, **own))
                    beyond = {"partition": partition, "timestamp_ms": 9}
                    sent += [await producer.send(self.topic, b"{}", b"a", **beyond) for _ in range(more)]
                    for dead in one.outputs.get(f"{self.topic}-dlq", []):
                        target = {"partition": partition, "headers": list(dead.headers)}
                        sent.append(await producer.send(f"{self.topic}-dlq", dead.value, dead.key, **target))
                await asyncio.gather(*sent)

        asyncio.run(run())

    def write(self, played: list[TopologyTestDriver], forge: Callable[[str, Rows], None] | None = None) -> None:
        writer = LakeWriter(self.folder / APPLICATION, forge=forge)
        writer.run({p: one.changelog for p, one in enumerate(played)})

    def audit(self, **more: Any) -> AuditReport:
        settings = AuditSettings(application=APPLICATION, lake=str(self.folder), kafka=self.kafka, **more)
        report = run_audit(self.spark, settings, print)
        print_report(report, as_json=True)
        return report


@pytest.fixture
def lake(kafka: Broker, topic_name: str, tmp_path: Path, spark: Any, topics: Any) -> Lake:
    """A lake of the test's own."""
    return Lake(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), topic_name, tmp_path, spark, topics)


def differences(report: AuditReport) -> dict[str, int]:
    return {check.name: check.differences for check in report.checks if check.differences}


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_output_of_the_engine_passes(lake: Lake, kind: str) -> None:
    """Every record is in exactly one group. Records beyond the covered offsets are counted, which is not a difference.
    (The quick tests below have partitions without differences, and test_audit_worker.py audits two kinds.)"""
    played = [play(lake.topic, kind, partition, seed=partition) for partition in range(2)]
    lake.send(played, more=3)
    lake.write(played)
    report = lake.audit(expect_records=306)
    assert (differences(report), audit_exit_status(report)) == ({}, ExitStatus.OK)
    assert (report.records, report.uncovered, report.unaccounted, report.left_out) == (306, 6, 0, 0)
    assert min(report.late, report.dead_letters, report.skipped, report.windows_closed, report.windows_open) > 0
    assert (report.kind, report.store, report_as_json(report)["audit_ok"]) == (kind, "s", True)
    assert report.assumed == [f"the grace of {GRACE} ms was in force for all records"]
    assert [check.name for check in report.checks if check.name in ("windows", "lateness")] == ["windows", "lateness"]


def doubled(table: str, rows: Rows) -> None:
    if table == "closed/s":
        rows.append(dict(rows[5]))


def lost(table: str, rows: Rows) -> None:
    if table == "closed/s":
        del rows[5]


def moved(table: str, rows: Rows) -> None:
    if table == "closed/s":
        rows[5]["key"] = "nobody"


def changed(table: str, rows: Rows) -> None:
    if table == "closed/s":
        row = next(row for row in rows if row["state"]["total_n"])
        row["state"] = row["state"] | {"total_sum": row["state"]["total_sum"] + 1e-3}


def other_results(table: str, rows: Rows) -> None:
    if table == "closed/s":
        rows[5] |= {"n": rows[5]["n"] + 1, "listed": "[]"}


def other_tags(table: str, rows: Rows) -> None:
    """A sketch of as many distinct values, but of others."""
    if table == "closed/s":
        sketch = AGGREGATIONS["tags"].initial()
        row = next(row for row in rows if row["tags"] == 1)
        sketch = AGGREGATIONS["tags"].add(sketch, {"tag": "elsewhere"})
        row["state"] = row["state"] | {"tags_hll": AGGREGATIONS["tags"].to_columns(sketch)[0]}


def late_lost(table: str, rows: Rows) -> None:
    if table == "late/s":
        del rows[1]


def late_doubled(table: str, rows: Rows) -> None:
    if table == "late/s":
        rows.append(dict(rows[1]))


def late_moved(table: str, rows: Rows) -> None:
    if table == "late/s":
        rows[1]["source_offset"] = 1_000_000


def late_of_another_time(table: str, rows: Rows) -> None:
    if table == "late/s":
        rows[1]["event_time"] = rows[0]["event_time"]


def closed_early(table: str, rows: Rows) -> None:
    if table == "closed/s":
        rows[5]["closed_at"] = rows[5]["window_end"]


FORGED: dict[Callable[[str, Rows], None], tuple[set[str], set[str]]] = {
    doubled: {"unbalanced", "windows"},
    lost: {"unbalanced", "windows"},
    moved: {"unbalanced", "windows", "outside"},
    changed: {"unbalanced", "windows", "results"},
    other_results: {"results"},
    other_tags: {"windows"},
    late_lost: {"unbalanced", "lateness"},
    late_doubled: {"twice"},
    late_moved: {"unknown", "unbalanced", "lateness"},
    late_of_another_time: {"unknown"},
    closed_early: {"closing"},
}  # type: ignore[assignment]


@pytest.mark.parametrize("kind", ["session", pytest.param("tumbling", marks=pytest.mark.soak), "hopping"])
def test_each_forgery_is_found_and_named(lake: Lake, kind: str) -> None:
    """Each partition is forged in another way, and one is left alone. Each forgery is found in its partition. Records
    beyond the covered offsets are counted, which is not a difference.

    A record of the last partition has the header of a rejected output, as in an application that reads a dead-letter
    topic. Its dead letter counts as that of any other record."""
    played = [play(lake.topic, kind, partition) for partition in range(len(FORGED) + 1)]
    played[-1].pipe(lake.topic, key=b"a", value=b"{", timestamp=0, headers=[(NODE, b"map_values-2")])
    records = 153 * len(played) + 1

    def forge(table: str, rows: Rows) -> None:
        for partition, one in enumerate(FORGED):
            own = [row for row in rows if row["partition"] == partition]
            rows[:] = [row for row in rows if row["partition"] != partition]
            one(table, own)
            rows += own

    lake.send(played, more=3)
    lake.write(played, forge)
    report = lake.audit(differences_max=1000, expect_records=records)
    assert audit_exit_status(report) == AUDIT_DIFFERENCES
    assert (report.records, report.uncovered, report.left_out) == (records, 3 * len(played), 0)
    assert min(report.late, report.dead_letters, report.skipped, report.windows_closed, report.windows_open) > 0
    assert (report.kind, report.store, report_as_json(report)["audit_ok"]) == (kind, "s", False)
    assert report.assumed == [f"the grace of {GRACE} ms was in force for all records"]
    found: dict[int, set[str]] = {}
    for check in report.checks:
        for row in check.shown:
            if row["partition"] is not None:
                found.setdefault(row["partition"], set()).add(check.name)
    wanted: dict[int, set[str]] = {}
    for partition, (one, checks) in enumerate(FORGED.items()):
        own = set(checks)
        if kind != "session":
            own -= {"outside"}
            own = own - {"unbalanced"} | ({"windows"} if "unbalanced" in own else set())
        wanted[partition] = own | ({"windows"} if one in (late_lost, late_moved) and kind != "session" else set())
    assert found == wanted


def test_key_of_a_late_record_is_that_of_its_source_record(spark: Any) -> None:
    """A late record with a key differs from a source record without one, and from one with another key."""
    columns = "partition int, offset bigint, timestamp_ms bigint, key binary"
    source = [(0, 0, 5, b"a"), (0, 1, 5, None), (0, 2, 5, b"b")]
    inputs = Inputs(
        records=spark.createDataFrame(source, columns),
        late=spark.createDataFrame([(0, i, 5, b"a", [5]) for i in range(3)], f"{columns}, missed array<bigint>"),
        dead=spark.createDataFrame([], "partition int, offset bigint"),
        stream=spark.createDataFrame([], columns),
        store=StoreSchema("s", "session", "string", GAP, GRACE, "on_close", "in", None, None, None, ()),
    )
    found = [row.detail for row in unknown_coordinates(inputs).orderBy("detail").collect()]
    assert found == [f"late: offset {i} has another key or time in the source" for i in (1, 2)]


def test_inputs_that_spark_cannot_recompute_are_rejected(lake: Lake) -> None:
    """Nodes before the window, topics of another id or that lost records, and a lake without tables."""
    played = [play(lake.topic, "session", 0, records=30, filtered=True)]
    lake.send(played)
    lake.write(played)
    with pytest.raises(NotAuditable, match=r"'s' .*: filter"):
        lake.audit()


@pytest.mark.parametrize("kind", ["tumbling", *(pytest.param(k, marks=pytest.mark.soak) for k in KINDS[2:])])
def test_deleted_source_records_are_left_out(lake: Lake, kind: str) -> None:
    """Windows that may have held deleted records are not compared, and the report says so. (Sessions: below.)"""
    played = [play(lake.topic, kind, partition, seed=partition, records=300) for partition in range(2)]
    lake.send(played)
    lake.write(played)
    lake.topics.delete_before(lake.topic, {0: 40})
    report = lake.audit()
    assert (differences(report), audit_exit_status(report)) == ({}, ExitStatus.OK)
    assert (report.records, report.unaccounted) == (560, 0)
    assert report.left_out > 0
    assert sum("before offset 40" in text for text in report.not_compared) == 1


def test_sessions_that_cannot_be_compared_are_left_out(lake: Lake) -> None:
    """For a partition whose time advanced without records (0), the audit checks only conservation. Sessions that may
    have held deleted records (2) are not compared. The other sessions are (1, 2), and differences are found."""
    played = [
        play(lake.topic, "session", 0, idle_timeout_ms=500, now_ms=10**6),
        play(lake.topic, "session", 1),
        play(lake.topic, "session", 2, records=300),
    ]
    for at in (20_000, 20_001):
        played[0].advance_wall_clock(1_000)
        played[0].pipe(lake.topic, key=b"a", value=b'{"x": 1, "tag": "x"}', timestamp=at)

    def early(table: str, rows: Rows) -> None:
        if table == "closed/s":
            for partition in range(3):
                own = [row for row in rows if row["partition"] == partition]
                row = own[-1] if partition == 2 else own[0]
                row["closed_at"] = row["window_end"]

    lake.send(played)
    lake.write(played, early)
    lake.topics.delete_before(lake.topic, {2: 40})
    report = lake.audit()
    assert differences(report) == {"closing": 2}
    assert sorted(row["partition"] for check in report.checks for row in check.shown) == [1, 2]
    assert any("windows of partitions 0" in text for text in report.not_compared)
    assert (report.records, report.unaccounted) == (152 + 150 + 260, 0)
    assert report.left_out > 0
    assert sum("before offset 40" in text for text in report.not_compared) == 1


def test_the_end_of_an_open_session_bounds_the_time_of_deleted_records(spark: Any) -> None:
    """An open session accepts a record that is far behind stream time. So the end of this session bounds the time of
    the deleted records before it. If the tables lack the session, the record's own time bounds it."""
    records = [(p, offset, ms, b"a") for p in (0, 1) for offset, ms in [(101, 5_000), (102, 90_500)]]
    sessions = [(0, b"a", 0, 90_500), (0, b"b", 5_000, 95_000), (0, b"a", 95_000, 99_000), (1, b"a", 90_500, 90_500)]
    empty = spark.createDataFrame([], "partition int, offset bigint")
    bounds = deleted_until_ms_of(
        spark.createDataFrame(records, "partition int, offset bigint, timestamp_ms bigint, key binary"),
        late=empty,
        dead=empty,
        stream=spark.createDataFrame(sessions, "partition int, key binary, start_ms bigint, end_ms bigint"),
        store=StoreSchema("s", "session", "string", GAP, GRACE, "on_close", "in", None, None, None, ()),
        earliest={0: 101, 1: 101},
    )
    assert bounds == {0: 90_500 + GAP + GRACE, 1: 5_000 + GAP + GRACE}


def test_nothing_to_compare_is_no_success(lake: Lake) -> None:
    """The audit of an application that has processed nothing ends with status 3. With `conservation_only` it has no
    check of what depends on stream time."""
    driver = TopologyTestDriver(topology(lake.topic, "session"), errors=ErrorHandlers())
    driver.pipe(lake.topic, key=None, value=b"{}", timestamp=1)
    lake.send([driver])
    lake.write([driver])
    report = lake.audit(conservation_only=True)
    assert (report.is_empty, report.skipped, audit_exit_status(report)) == (True, 1, AUDIT_FAILED)
    checks = {"conserved", *SESSION_CHECKS} - {"windows", "closing", "lateness"}
    assert {check.name for check in report.checks} == checks
    assert report.assumed == []
