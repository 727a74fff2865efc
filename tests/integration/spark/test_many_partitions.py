"""Many partitions: a few tasks read them all, and each has its own covered offset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from penstock.services.spark.audit.kafka_source import read_topic
from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.topic_offsets import topic_offsets
from penstock.shared.common.settings import KafkaSettings
from tests.integration.spark.test_compact import is_right
from tests.shared_broker import Broker


def test_a_few_tasks_read_many_partitions(
    spark: Any, simulate: Callable[[int], Any], topics: Any, kafka: Broker, tmp_path: Path
) -> None:
    """There are as many tasks as cores, each partition is read in its order, and the tables have the rows of all
    partitions."""
    simulation = simulate(24)
    simulation.feed(400, seed=7)
    topics.write(simulation)
    broker = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    held = topic_offsets(broker, [simulation.name], 10_000)[simulation.name]
    rows = read_topic(spark, broker, simulation.name, held.earliest, held.latest).select("partition", "value")
    assert rows.rdd.getNumPartitions() == spark.sparkContext.defaultParallelism
    found: dict[int, list[bytes]] = {}
    for row in rows.collect():
        found.setdefault(row.partition, []).append(bytes(row.value))
    sources = {task.partition: [value for _, value, _, _ in task.source] for task in simulation.tasks}
    assert found == {partition: values for partition, values in sources.items() if values}
    settings = CompactSettings(application=simulation.name, lake=str(tmp_path), kafka=broker)
    first = CompactionJob(spark, settings, print).run()
    assert (first.partitions, first.closed_rows) == (24, sum(len(task.closed) for task in simulation.tasks))
    assert is_right(tmp_path, simulation)
    closed = DeltaTable(str(tmp_path / simulation.name / "closed" / "banks")).file_uris()
    assert len(closed) == spark.sparkContext.defaultParallelism  # and not a file for each partition
    for task in simulation.tasks[:3]:
        task.take(b"k", b'{"delay": 1.5, "place": "x"}', task.time + 1_000)
        task.commit()
    topics.write(simulation)
    second = CompactionJob(spark, settings, print).run()
    moved = {p for p, to in second.to_offsets.items() if to != first.to_offsets[p]}
    assert moved == {0, 1, 2}
    assert is_right(tmp_path, simulation)
