"""What goes by partition is planned and computed for thousands of them as for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import advances, tables
from penstock.services.spark.audit_part import Part
from penstock.services.spark.changelog import Newest, read_window
from penstock.services.spark.compact import Compaction
from penstock.services.spark.kafka import READ_SCHEMA, read_range, topic_offsets
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog import format as log

PARTITIONS = 2_000
LAST = PARTITIONS - 1
PLACE = "partition int, offset bigint"


def test_each_partition_goes_on_with_its_own_epoch(spark: Any, new_simulation: Callable[[str, int], Any]) -> None:
    """What a former owner still wrote counts nothing, in any of thousands of partitions that tables cover already."""
    (task,) = new_simulation("many", 1).tasks
    task.commit()
    done = log.decode_progress(log.decode(task.changelog[-1][1]).body)
    epochs = {p: 1 + p * p for p in range(PARTITIONS)}
    records = []
    for partition in (0, 15, 16, 300, LAST, PARTITIONS):
        in_force = epochs.get(partition, 1)
        for offset, epoch in enumerate((in_force, in_force - 1)):
            records.append((partition, offset, 0, None, log.encode_progress(epoch, 1, done)))
    takeover = log.encode_takeover(1, log.Takeover("many", "test", 0))
    records.append((PARTITIONS, -1, 0, None, takeover))  # this one is new: a record of its own says which epoch it has
    covered = {p: Newest(0, epoch, 0, b"", done) for p, epoch in epochs.items()}
    window = read_window(spark, "many", spark.createDataFrame(records, READ_SCHEMA), covered)
    found = {p: (newest.epoch, newest.covered_offset) for p, newest in window.newest.items()}
    assert found == {
        0: (1, 1),
        15: (226, 1),
        16: (257, 1),
        300: (90_001, 1),
        LAST: (LAST**2 + 1, 1),
        PARTITIONS: (1, 1),
    }
    assert window.rules.keys() == {(PARTITIONS, 0)}


def test_each_partition_has_its_own_number(spark: Any) -> None:
    """One that has none has another one, before, between and after those that have."""
    rows = [(p, offset) for p in (0, 3, LAST, PARTITIONS) for offset in (-1, 9, 2**40)]
    frame = spark.createDataFrame(rows, PLACE)
    numbers = {p: 10 if p != LAST else 2**40 for p in range(1, PARTITIONS) if p != 3}
    below = frame.filter(F.col("offset") < tables.by_partition(numbers))
    assert sorted(map(tuple, below.collect())) == [(0, -1), (3, -1), (LAST, -1), (LAST, 9), (PARTITIONS, -1)]
    assert frame.filter(F.col("offset") < tables.by_partition({}, other=10)).count() == 2 * 4


def test_parts_and_advances_of_thousands_of_partitions(spark: Any) -> None:
    """An audit's part ends where a partition was read to, advances go by the source's first offset."""
    settled = {p: p for p in range(PARTITIONS)}
    frame = spark.createDataFrame([(p, 5) for p in (2, LAST, PARTITIONS)], PLACE)
    ends = frame.select("partition", Part(None, 1_000, settled).high().alias("ms")).collect()
    assert sorted(map(tuple, ends)) == [(2, 2), (LAST, 1_000), (PARTITIONS, 1_000)]
    rows = F.explode(F.expr(f"sequence(0L, {advances.SPENT_MAX}L)")).alias("position")
    times = [F.lit(0).cast("bigint").alias(name) for name in ("time_ms", "from_ms", "total_ms")]
    told = frame.select("partition", F.lit("s").alias("store"), rows, *times)
    spent = advances.spent(told, {p: advances.SPENT_MAX if p == LAST else 5 for p in range(PARTITIONS)})
    assert {row.partition for row in spent.collect()} == {LAST}


def test_a_few_tasks_read_and_fold_many_partitions(
    spark: Any, simulate: Callable[[int], Any], topics: Any, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    """As many as there are cores, each partition of a topic in its order; the tables are those of all partitions."""
    simulation = simulate(24)
    simulation.feed(500, seed=7)
    topics.write(simulation)
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    held = topic_offsets(spark, broker, simulation.name, 10_000)
    rows = read_range(spark, broker, simulation.name, held.earliest, held.latest).select("partition", "value")
    assert rows.rdd.getNumPartitions() == spark.sparkContext.defaultParallelism
    found: dict[int, list[bytes]] = {}
    for row in rows.collect():
        found.setdefault(row.partition, []).append(bytes(row.value))
    assert found == {task.partition: [value for _, value, _, _ in task.source] for task in simulation.tasks}
    summary = Compaction(
        spark, CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker), print
    ).run()
    assert (summary.partitions, summary.finals) == (24, sum(len(task.closed) for task in simulation.tasks))
    state = spark.read.format("delta").load(str(tmp_path / simulation.name / "state")).filter("row = 'window'")
    live = {(t.partition, key, s[0]) for t in simulation.tasks for key, sessions in t.live.items() for s in sessions}
    assert {(row.partition, bytes(row.key), row.start_ms) for row in state.collect()} == live
