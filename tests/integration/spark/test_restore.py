"""From a task's stores through a changelog, a compaction and a snapshot back into a task's stores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.services.spark.compaction.compact import CompactionJob
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.streams.aggregations.aggregation import (
    Aggregate,
    Aggregation,
    Count,
    CountDistinct,
    Max,
    Mean,
    Sum,
)
from penstock.shared.streams.aggregations.quantiles import Quantiles
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.partition_restore import PartitionRestore
from penstock.shared.streams.runtime.restore_progress import RestoreReport
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.test_stream_worker import Chain, chain_of, kafka_of, offline, running, until
from tests.shared_broker import Broker

SKETCHES = ("count_distinct", "quantiles")
OUTPUTS = ("plain", "rich", "tumbled", "hopped", "slid", "counted", "joined", "noted")


class Notes(Processor):
    """Keeps the last three ids of each key, and forgets a key at every tenth id."""

    def init(self, context: ProcessorContext) -> None:
        self.context, self._store = context, context.store("notes")

    def process(self, record: Record) -> None:
        number = record.value["id"]
        kept = [*((self._store.get(record.key) or {"ids": []})["ids"]), number][-3:]
        if number % 10:
            self._store.put(record.key, {"ids": kept})
        else:
            self._store.delete(record.key)
        self.context.forward(record._replace(value={"ids": kept}))


def every_kind() -> Topology:
    """A topology with a store of every kind, windows of text and of bytes, and states of numbers, text and sketches."""
    builder = StreamsBuilder()
    left, right = builder.stream("left"), builder.stream("right", key="bytes")
    by_key = left.group_by_key()
    by_key.session_window(40, 20).aggregate("plain", n=Count(), sum=Sum("id")).on_close().to("plain")
    last = Aggregate(list, lambda state, value: [*state, value["id"]][-2:], lambda one, other: (one + other)[-2:])
    rich = {"ids": CountDistinct("id"), "half": Quantiles("id", [0.5]), "last": last}
    by_key.session_window(40, 20).aggregate("rich", **rich).on_close().to("rich")
    right.group_by_key().tumbling_window(50, 30).aggregate("tumbled", most=Max("id")).on_close().to("tumbled")
    by_key.hopping_window(60, 20, 30).aggregate("hopped", mean=Mean("id")).on_close().to("hopped")
    by_key.sliding_window(30, 20).aggregate("slid", n=Count(), ids=CountDistinct("id")).on_close().to("slid")
    total = by_key.aggregate("counted", n=Count(), most=Max("id"), ids=CountDistinct("id"), last=last)
    total.to_stream().to("counted")
    table = builder.table("rows")
    other = builder.stream("other")
    pairs = left.join(other, lambda one, two: [one["id"], two["id"]], JoinWindows.of(25, 20), value=list, name="pairs")
    pairs.to("joined")
    left.join(table, lambda one, row: [one["id"], row["id"]], value=list).to("joined")
    left.process_values(Notes, builder.add_store("notes")).to("noted")
    return builder.build()


def given(first: int, last: int) -> list[tuple[str, bytes, bytes | None, int]]:
    """Topic, key, value and time of records first to last: in time but for a few, some rows deleted."""
    topics = ("left", "other", "left", "right", "rows")
    return [
        (
            topics[i % 5],
            b"key-%d" % (i * 7 % 4),
            None if i % 5 == 4 and i % 3 == 0 else b'{"id":%d}' % i,
            max(0, i * 4 - (30 if i % 11 == 0 else 0)),
        )
        for i in range(first, last)
    ]


def rows_of(task: StreamTask) -> dict[str, list[Any]]:
    """The keys, bounds and states of the rows of each store; sketches by their estimate."""
    found = {}
    for name, store in task.stores.items():
        aggregations = task.topology.stores[name].aggregations
        found[name] = sorted(
            (
                row.key,
                row.start,
                row.end,
                [final_value(a, state) for a, state in zip(aggregations, row.states, strict=True)],
            )
            for row in store.rows()
        )
    return found


def final_value(aggregation: Aggregation[Any], state: Any) -> Any:
    return aggregation.result(state) if aggregation.function in SKETCHES else aggregation.to_columns(state)


def written(records: Any) -> list[Any]:
    return [(r.topic, r.key, r.value, r.timestamp) for r in records]


async def restored(kafka: Broker, task: StreamTask, lake: Path) -> RestoreReport:
    """Restore an empty task of partition 0 as its new owner does, and prepare it for the first record."""
    settings = StreamsSettings(application_id=task.application, lake=str(lake))
    restoring = PartitionRestore(kafka_of(kafka), settings, task, SYSTEM_CLOCK)
    async with restoring.consumer() as consumer:
        await restoring.read_until(await restoring.begin(consumer), consumer)
    restoring.finish(2)
    task.initialize(0)
    return restoring.report


@contextmanager
def empty_task(name: str, folder: Path | None) -> Iterator[StreamTask]:
    """A task with its stores in memory, or in a folder."""
    with ExitStack() as stack:
        local = None
        if folder is not None:
            state = StateDirectory(str(folder), name, memory_bytes_max=8 << 20, cache_bytes_max=1 << 20)
            state.acquire()
            stack.callback(state.release)
            local = state.state_of(0)
            stack.callback(local.close)
        yield StreamTask(every_kind(), 0, application=name, deduplicate_updates=False, local=local)


@pytest.mark.soak
def test_stores_of_every_kind_are_restored(
    spark: Any, kafka: Broker, topics: Any, topic_name: str, tmp_path: Path
) -> None:
    """Rows of all kinds, from the compaction and after it, are restored. The task continues as if it had never
    stopped."""
    driver = TopologyTestDriver(every_kind(), commit_each=False, errors=ErrorHandlers())

    def pipe(first: int, last: int) -> None:
        for topic, key, value, at in given(first, last):
            driver.pipe(topic, key=key, value=value, timestamp=at)
            if at % 7 == 0:
                driver.commit()
        driver.commit()

    asyncio.run(topics.create(topic_name, 1))
    pipe(0, 200)
    topics.send_changelog(topic_name, driver.changelog)
    settings = CompactSettings(application=topic_name, lake=str(tmp_path / "lake"), kafka=kafka_of(kafka))
    done = CompactionJob(spark, settings, print).run()
    assert all(rows_of(driver.task).values())
    assert done.live_rows == sum(map(len, driver.task.stores.values()))
    covered = len(driver.changelog)
    pipe(200, 260)
    topics.send_changelog(topic_name, driver.changelog)
    topics.delete_before(f"{topic_name}-changelog", {0: covered})
    records, rows, progress = len(driver.changelog), rows_of(driver.task), progress_of(driver.task)

    for topic in OUTPUTS:
        driver.read(topic)
    seen = {topic: len(records) for topic, records in driver.source_log.items()}
    pipe(260, 330)
    outputs = {topic: written(driver.read(topic)) for topic in OUTPUTS}
    assert all(outputs.values())
    for folder in (None, tmp_path / "disk"):
        with empty_task(topic_name, folder) as task:
            report = asyncio.run(restored(kafka, task, tmp_path / "lake"))
            assert (report.snapshot_windows, report.changelog_records) == (done.live_rows, records - covered)
            assert (rows_of(task), progress_of(task)) == (rows, progress)
            following = {topic: iter(records[seen[topic] :]) for topic, records in driver.source_log.items()}
            for topic, *_ in given(260, 330):
                task.process(Columns.of([next(following[topic])]), 0)
            assert rows_of(task) == rows_of(driver.task)
            found = written(task.prepare_commit(0).outputs)
            assert {topic: [record for record in found if record[0] == topic] for topic in OUTPUTS} == outputs


def progress_of(task: StreamTask) -> Any:
    return task.stream_time_ms, dict(task.sources), {o.store_name: o.stream_time_ms for o in task.times.operators}


async def run(chain: Chain, workers: int, lake: Path) -> list[dict[int, RestoreReport]]:
    """Run several workers to the end of the topic. Returns the rows that each restored, by partition."""
    made = [chain.worker(lake=str(lake)) for _ in range(workers)]
    async with AsyncExitStack() as stack:
        for worker in made:
            await stack.enter_async_context(running(worker))

        async def shared_out() -> bool:
            held = [worker.tasks() for worker in made]
            tasks = [owned.task for own in held for owned in own.values()]
            return all(held) and len(tasks) == chain.partitions and None not in tasks

        await until(shared_out)
        await chain.wait_processed(*made)
        return [{p: owned.report for p, owned in worker.tasks().items()} for worker in made]


@pytest.mark.soak
async def test_another_number_of_instances_continues_from_a_compaction(
    spark: Any, kafka: Broker, topic_name: str, tmp_path: Path
) -> None:
    """The state of two instances is compacted and deleted from the changelog. Three instances restore it, and continue
    without a difference."""
    async with chain_of(kafka, topic_name, 6) as chain:
        await chain.send(900)
        await run(chain, 2, tmp_path)
        settings = CompactSettings(application=topic_name, lake=str(tmp_path), kafka=chain.kafka)
        done = await asyncio.to_thread(CompactionJob(spark, settings, print).run)
        assert done.partitions == 6
        at = {TopicPartition(f"{topic_name}-changelog", p): offset for p, offset in done.to_offsets.items()}
        async with Admin(chain.kafka) as admin:
            await admin.delete_records(at)
        await chain.send(300)
        reports = await run(chain, 3, tmp_path)
        assert [len(own) for own in reports] == [2, 2, 2]
        restored_windows = sum(one.snapshot_windows for own in reports for one in own.values())
        assert restored_windows == done.live_rows > 6
        await chain.send(300)
        await run(chain, 1, tmp_path)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
