"""`penstock batch` over a topic of clicks, compared with the live engine on the same records; the cost of partitions.

It uses one embedded broker, Spark's local[2] and one session, which a small batch has warmed up. The clicks, the
session count and the live engine are those of the benchmark `sessions` (exactly once). They run in turns, and the best
round counts. A batch is timed as a whole: its plan, its tasks and the compaction that follows.

Then up to PARTITIONS_RECORDS of the clicks are written to topics of 1, 2, 4 and 8 partitions. The CPU time of a record
in a batch is compared: that of driver, JVM and Python workers together. The targets are in TARGETS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench._processes import own_tree_cpu_s
from bench._sessions_data import GAP_MS, GRACE_MS, PARTITIONS, fill, topic_of
from bench._side_by_side import best_of
from bench._targets import missed, show
from bench.sessions import SESSION, row
from penstock.services.compaction_settings import SparkSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.spark.batch.batch import BatchJob
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.spark_session import spark_session
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

LAW = "zipf"
LIVE = row("exactly_once count", LAW)
WARM_RECORDS = 20_000
PARTITIONS_RECORDS = 4_000_000
COUNTS = (1, 2, 4, 8)
TARGETS: dict[str, tuple[float, str]] = {
    "batch over live": (0.5, "least"),
    "CPU a record, 8 partitions over 1": (1.25, "most"),
}


class Timed(NamedTuple):
    """The time of a batch, and of its compaction."""

    seconds: float
    compaction_s: float
    cpu_s: float


def sessions(topic: str, results: str) -> Topology:
    """The topology of the live engine in the benchmark `sessions`."""
    builder = StreamsBuilder()
    windows = builder.stream(topic, value=bytes).group_by_key().session_window(gap=GAP_MS, grace=GRACE_MS)
    windows.aggregate("sessions", n=Count()).on_close().to(results)
    return builder.build()


class Bench:
    """One session and one broker. Each batch is its own application."""

    def __init__(self, spark: Any, kafka: KafkaSettings, lake: Path, broker_pid: int) -> None:
        self.spark = spark
        self.kafka = kafka
        self.lake = lake
        self.broker_pid = broker_pid
        self.found: dict[str, float] = {}

    def note(self, name: str, value: float) -> None:
        self.found[name] = value
        print(f"{name}: {value:,.2f}", file=sys.stderr, flush=True)

    async def filled(self, topic: str, records: int, partitions: int) -> None:
        async with Admin(self.kafka) as admin:
            await admin.create_topics([event_time_topic(topic, partitions)])
        await fill(self.kafka, records, LAW, topic)

    async def batch(self, topic: str, records: int, partitions: int) -> Timed:
        """Run a batch over all records of a topic."""
        application = f"batch-{time.time_ns()}"
        async with Admin(self.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{application}-results", partitions)])
        settings = BatchSettings(
            application=application,
            lake=str(self.lake),
            kafka=self.kafka,
            topology="bench.batch:sessions",
            topology_options={"topic": topic, "results": f"{application}-results"},
            replication_factor=1,
        )
        started, cpu_s = time.monotonic(), own_tree_cpu_s(self.broker_pid)
        done = await asyncio.to_thread(BatchJob(self.spark, settings, lambda text: None).run)
        took = time.monotonic() - started
        assert done.read == records, done
        assert done.compaction is not None
        return Timed(took, done.compaction["seconds"], own_tree_cpu_s(self.broker_pid) - cpu_s)

    async def beside_live(self, records: int, rounds: int) -> None:
        topic = topic_of(LAW)
        await self.filled(topic, records, PARTITIONS)
        arguments = ["--servers", self.kafka.bootstrap_servers, "--records", str(records), "--windows", SESSION]
        live, batches = 0.0, list[Timed]()
        for _ in range(rounds):
            figures = await best_of("bench.sessions", [LIVE], arguments, 1)
            live = max(live, figures[LIVE]["records_per_second"])
            batches.append(await self.batch(topic, records, PARTITIONS))
        best = min(batches, key=lambda timed: timed.seconds)
        self.note("live, records/s", live)
        self.note("batch, records/s", records / best.seconds)
        self.note("batch, of that compaction, s", best.compaction_s)
        self.note("batch, CPU us a record", best.cpu_s / records * 1e6)
        self.note("batch over live", records / best.seconds / live)

    async def by_partitions(self, records: int, rounds: int) -> None:
        cost = {}
        for count in COUNTS:
            topic = f"clicks-of-{count}"
            await self.filled(topic, records, count)
            cost[count] = min([(await self.batch(topic, records, count)).cpu_s for _ in range(rounds)]) / records * 1e6
            self.note(f"CPU us a record, {count} partitions", cost[count])
        self.note(f"CPU a record, {COUNTS[-1]} partitions over 1", cost[COUNTS[-1]] / cost[1])


async def run(records: int, rounds: int) -> dict[str, float]:
    """The figures by name."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        async with EmbeddedKafka(Path(name) / "kafka") as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            with spark_session(SparkSettings(master="local[2]"), "bench") as spark:
                bench = Bench(spark, kafka, Path(name) / "lake", broker.child.pid)
                await bench.filled("warm", WARM_RECORDS, 2)
                await bench.batch("warm", WARM_RECORDS, 2)
                await bench.beside_live(records, rounds)
                await bench.by_partitions(min(records, PARTITIONS_RECORDS), rounds)
            return bench.found


def main() -> int:
    """Measure and print. The status is 1 if a target was missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--records", type=int, default=200_000, help="clicks in the topic (for figures: 20000000)")
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    found = asyncio.run(run(given.records, given.rounds))
    show(found, TARGETS)
    if given.json:
        print(json.dumps(found))
    return 1 if missed(found, TARGETS) else 0


if __name__ == "__main__":
    raise SystemExit(main())
