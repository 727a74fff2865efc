"""The audit over real topics and tables, as a user runs it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import tables
from penstock.services.spark.audit import Report, run_audit
from penstock.services.spark.audit_report import as_object, print_report
from penstock.services.spark.audit_topics import held_by
from penstock.services.spark.compact import Compaction
from penstock.services.spark.kafka import KAFKA_SOURCE_MS_MAX
from penstock.services.spark.origins import NotAuditable
from penstock.services.spark.settings import AuditSettings, CompactSettings
from penstock.shared.common.errors import ChangelogHole
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.test_compact import Crashing
from tests.integration.test_stream_worker import chain_of, kafka_of
from tests.integration.test_stream_worker_parts import send


@pytest.fixture
def jobs(spark: Any, kafka: EmbeddedKafka, tmp_path: Path) -> tuple[Callable[..., Any], Callable[..., Report]]:
    """`compact(simulation, kind, **settings)` and `audit(simulation, **settings)`."""
    common: dict[str, Any] = {
        "lake": str(tmp_path),
        "kafka": KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
    }
    return (
        lambda s, kind=Compaction, **more: kind(
            spark, CompactSettings(**{"application": s.name, **common, **more}), print
        ).run(),
        lambda s, **more: run_audit(spark, AuditSettings(application=s.name, **common, **more), print),
    )


@pytest.mark.soak
def test_lake_and_changelog_together_are_what_spark_makes_of_the_source(
    simulate: Any, topics: Any, jobs: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stream whose state lies in lake and changelog passes; a result too many or an unprocessed record does not."""
    compact, audit = jobs
    simulation = simulate()
    for seed in (1, 2):
        simulation.feed(150, seed)
        topics.write(simulation)
        compact(simulation)
    simulation.feed(150, seed=3)
    topics.write(simulation)
    report = audit(simulation, expect_records=450)
    print_report(report, as_json=True)
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == as_object(report)
    assert report.ok, told
    tasks = simulation.tasks
    assert (told["late"], told["dead_letters"]) == (sum(len(t.late) for t in tasks), sum(len(t.dead) for t in tasks))
    null_keys = sum(key is None and value != b"{" for t in tasks for key, value, _, _ in t.source)
    assert null_keys
    assert told["skipped"] == null_keys
    assert told["records"] == sum(told[n] for n in ("in_sessions", "late", "dead_letters", "skipped", "unprocessed"))
    assert told["not_compared"] == ["last: states that Spark cannot make anew from the records"]
    assert told["sessions_closed"] == sum(len(t.closed) for t in tasks)
    assert told["sessions_open"] == sum(len(own) for t in tasks for own in t.live.values())

    tasks[0].results.append(tasks[0].results[0])
    tasks[1].source.append((b"a", b"{}", 0, []))
    topics.write(simulation)
    differences = as_object(audit(simulation, expect_records=450))["differences"]
    assert {name: n for name, n in differences.items() if n} == {"records": 1, "processed": 1, "published": 1}


def test_an_application_that_goes_on_is_audited_up_to_a_commit(
    simulate: Any, topics: Any, jobs: Any, spark: Any, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """Late records, dead letters and results of commits that came while it was read are no differences.

    Once the source's first records are gone, it is refused, unless it is told where the application began.
    """
    compact, audit = jobs
    simulation = simulate()
    simulation.feed(100, seed=21)
    topics.write(simulation)

    def goes_on(said: str) -> None:
        """The stream goes on, and a compaction, with the changelog read and the other topics not."""
        if said.startswith("store "):
            late, dead, closed = (
                sum(len(getattr(task, name)) for task in simulation.tasks) for name in ("late", "dead", "closed")
            )
            simulation.feed(100, seed=22)
            for task in simulation.tasks:
                assert task.offset > 50
            assert late < sum(len(task.late) for task in simulation.tasks)
            assert dead < sum(len(task.dead) for task in simulation.tasks)
            assert closed < sum(len(task.closed) for task in simulation.tasks)
            topics.write(simulation)
            compact(simulation)

    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    settings = AuditSettings(application=simulation.name, lake=str(tmp_path), kafka=broker, allow_unprocessed=True)
    report = run_audit(spark, settings, goes_on)
    assert report.ok, report
    assert (report.records, report.unprocessed) == (200, 100)

    topics.delete_before(simulation.name, {0: 7})
    with pytest.raises(NotAuditable, match=rf"the beginning of {simulation.name}-0 \(offsets 0 to 6\) is gone"):
        audit(simulation)


def test_nodes_before_the_window_are_refused_by_name(simulate: Any, topics: Any, jobs: Any) -> None:
    """A store above whose window a filter stands is not compared at all: what Spark makes of its topic says nothing."""
    _, audit = jobs
    simulation = simulate(1)
    (task,) = simulation.tasks
    task.store = msgspec.structs.replace(task.store, upstream=("filter-2", "mine"))
    simulation.feed(20, seed=4)
    topics.write(simulation)
    with pytest.raises(NotAuditable, match="store 'banks' cannot be audited: filter-2, mine stands before"):
        audit(simulation)


def test_results_of_others_are_no_differences(simulate: Any, topics: Any, jobs: Any) -> None:
    """What is no window is counted as another node's; a topic that two stores write to is not compared, by name."""
    _, audit = jobs
    simulation = simulate(1)
    (task,) = simulation.tasks
    simulation.feed(40, seed=7)
    task.results += [(b"a", value, 0, []) for value in (b'{"flights": 3}', b"mine")]
    topics.write(simulation)
    report = audit(simulation)
    assert report.ok, report.checks
    assert f"2 records of {simulation.name}-results that are no window: another node's" in report.not_compared
    assert "published" in {check.name for check in report.checks}

    task.others = (msgspec.structs.replace(task.store, name="days", kind="tumbling", gap_ms=0, size_ms=200),)
    task.results.append((b"a", b'{"key": "a", "start": 0, "end": 200, "count": 3}', 200, []))
    task.commit()
    topics.write(simulation)
    report = audit(simulation, store="banks")
    assert report.ok, report.checks
    why = f"{simulation.name}-results has those of days too, and a result does not say which store it is of"
    assert f"published results: {why}" in report.not_compared


@pytest.fixture
def changed(simulate: Any, topics: Any, jobs: Any) -> tuple[Any, str, dict[int, int]]:
    """A simulation whose grace changed after its first compaction, what is said of it, and what is covered since."""
    compact, _ = jobs
    simulation = simulate()
    new = simulation.tasks[0].store
    for task in simulation.tasks:
        task.store = msgspec.structs.replace(new, grace_ms=500)
    simulation.feed(60, seed=8)
    for task in simulation.tasks:  # neither of these moves time, so that no --start lies behind them
        task.take(b"a", b"{", 1_700_000_000_000)
        task.take(None, b"{}", 1_700_000_000_000)
        task.commit()
    topics.write(simulation)
    compact(simulation)
    since = ", ".join(f"{simulation.name}-{task.partition} offset {task.offset}" for task in simulation.tasks)
    for task in simulation.tasks:
        task.store = new
    simulation.feed(100, seed=9)
    topics.write(simulation)
    with pytest.raises(KeyboardInterrupt):
        compact(simulation, Crashing)
    return simulation, f"grace was 500 ms and is 50 ms from {since} on", compact(simulation).to_offsets


def rules_in(tmp_path: Path, simulation: Any) -> list[tuple[int, int]]:
    """Partition and changelog offset of each row of a rule."""
    table = DeltaTable(str(tmp_path / simulation.name / "state"))
    found = QueryBuilder().register("t", table).execute("SELECT * FROM t WHERE row = 'rule'").read_all()
    return sorted((row["partition"], row["changelog_offset"]) for row in pa.table(found).to_pylist())


def require_the_rest_whole(audit: Callable[..., Report], simulation: Any, said: str) -> None:
    """An audit of everything is refused with the --start from which on one is whole."""
    with pytest.raises(NotAuditable, match=said) as refused:
        audit(simulation)
    report = audit(simulation, start=str(refused.value).split("--start ")[1].split()[0])
    assert report.ok, report.checks
    assert 0 < report.sessions_closed < sum(len(task.closed) for task in simulation.tasks)
    assert not any("the changelog of then" in left_out for left_out in report.not_compared)


@pytest.mark.soak
def test_a_rule_that_changed_is_known_when_the_changelog_is_deleted(
    changed: tuple[Any, str, dict[int, int]], topics: Any, jobs: Any, tmp_path: Path
) -> None:
    """It is a row of each partition, once, though a run crashed; it stays when the source has none of its records."""
    compact, audit = jobs
    simulation, said, covered = changed
    known = rules_in(tmp_path, simulation)
    assert [partition for partition, _ in known] == [0, 0, 1, 1]
    before = {task.partition: task.offset for task in simulation.tasks}
    simulation.feed(20, seed=10)
    topics.write(simulation)
    compact(simulation, delete_covered=True)
    assert all(offset < covered[partition] for partition, offset in known)
    deleted = "|".join(f"{partition}: offsets 0 to {end - 1}" for partition, end in covered.items())
    with pytest.raises(ChangelogHole, match=rf"-changelog-({deleted}) are gone"):
        compact(simulation, application=f"{simulation.name}-2", changelog=f"{simulation.name}-changelog")
    require_the_rest_whole(audit, simulation, said)

    topics.delete_before(simulation.name, before)
    for task in simulation.tasks:
        task.store = msgspec.structs.replace(task.store, grace_ms=500)
    simulation.feed(20, seed=11)
    topics.write(simulation)
    live = compact(simulation).live_rows
    assert live == sum(len(task.written) for task in simulation.tasks)
    left = rules_in(tmp_path, simulation)
    assert [partition for partition, _ in left] == [0, 0, 0, 1, 1, 1]
    assert set(known) < set(left)
    with pytest.raises(NotAuditable, match="grace was 50 ms and is 500 ms from "):
        audit(simulation, began_at="earliest")


@pytest.mark.soak
def test_what_an_earlier_release_compacted_is_asked_of_the_changelog(
    changed: tuple[Any, str, dict[int, int]], topics: Any, jobs: Any, spark: Any, tmp_path: Path
) -> None:
    """As far as it is there; where it is not, up to which source offsets nobody can know."""
    _, audit = jobs
    simulation, said, covered = changed
    spark.sql(f"DELETE FROM {tables.delta(str(tmp_path / simulation.name / 'state'))} WHERE row = 'rule'")
    require_the_rest_whole(audit, simulation, said)
    topics.delete_before(f"{simulation.name}-changelog", covered)
    places = ", ".join(f"{simulation.name}-{task.partition} offset {task.offset}" for task in simulation.tasks)
    said = f"whether gap, grace or topics changed before {places}: the changelog of then is deleted"
    assert said in audit(simulation).not_compared


async def test_times_that_spark_cannot_read_are_refused_by_place(
    kafka: EmbeddedKafka, spark: Any, topic_name: str, tmp_path: Path
) -> None:
    """The first record of nanoseconds in each partition is named; times that are far ahead and can be read are not."""
    settings = AuditSettings(application=topic_name, lake=str(tmp_path), kafka=kafka_of(kafka))
    async with chain_of(kafka, topic_name, 2) as chain:
        for place, timestamp in ((0, 1_000), (0, KAFKA_SOURCE_MS_MAX), (1, 1_000)):
            await send(chain, ProducerRecord(topic_name, b"{}", b"k", (), place, timestamp))
        held = await asyncio.to_thread(held_by, spark, settings, topic_name)
        assert held.latest == {0: 2, 1: 1}
        for timestamp in (KAFKA_SOURCE_MS_MAX + 1, 1_700_000_000 * 10**9):
            await send(chain, ProducerRecord(topic_name, b"{}", b"k", (), 1, timestamp))
        with pytest.raises(NotAuditable, match=f"^{topic_name}-1 at offset 1: the first record"):
            await asyncio.to_thread(held_by, spark, settings, topic_name)


@pytest.mark.soak
def test_what_json_does_not_have_is_not_compared(simulate: Any, topics: Any, jobs: Any) -> None:
    """Fields under another name and distinct counts of other values than text are left out, by name."""
    _, audit = jobs
    simulation = simulate(1)
    (task,) = simulation.tasks
    renamed = [msgspec.structs.replace(a, verbatim=a.name == "places") for a in task.store.aggregations]
    task.store = msgspec.structs.replace(task.store, aggregations=tuple(renamed))
    simulation.feed(20, seed=5)
    task.take(b"a", b'{"delay": 1, "place": 7}', task.time)
    task.commit()
    topics.write(simulation)
    report = audit(simulation)
    assert report.ok, report
    assert report.not_compared == [
        "total, mean, least, most, places, last: states that Spark cannot make anew from the records"
    ]


@pytest.mark.soak
def test_what_others_refused_is_in_our_sessions(simulate: Any, topics: Any, jobs: Any) -> None:
    """What was late for another store, or a dead letter of another group, or refused before a reset (also by a release
    that did not say so), is no difference where it was taken in."""
    _, audit = jobs
    simulation = simulate(1)
    (task,) = simulation.tasks
    simulation.feed(60, seed=6)
    offset = next(o for o, (key, value, _, _) in enumerate(task.source) if key and value != b"{")
    where = [("topic", simulation.name), ("partition", "0"), ("offset", str(offset))]
    for records, prefix, whose in ((task.late, "late", "store"), (task.dead, "dlq", "group")):
        headers = [(f"penstock.{prefix}.{name}", value.encode()) for name, value in [*where, (whose, "others")]]
        records.append((b"a", b"{}", None, headers))
        ours = [(f"penstock.{prefix}.{name}", value.encode()) for name, value in where]
        another = (f"penstock.{prefix}.changelog_id", b"of a life before a reset")
        records[:0] = [(b"a", b"{}", None, ours), (b"a", b"{}", None, [*ours, another])]
    topics.write(simulation)
    report = audit(simulation)
    assert report.ok, report
