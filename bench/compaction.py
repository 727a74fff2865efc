"""Compaction and restore while history, `closed` and `state` grow, on an embedded broker and Spark's local[2].

Changelogs are written by the engine's own format: `--sessions` live ones and 1, 4 and 16 times as many closed. Each is
compacted, then a delta of `--delta` closed and as many changed sessions; then a task is restored, from the snapshot and
once more from the whole changelog. The same with 1, 4 and 16 times the live sessions and no history. What is asked for:
restore flat within 1.5 while history grows, compaction of the delta flat within 2 while `closed` and while `state`
grow, 300,000 sessions a second from a snapshot.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench._plot import chart
from services.compactor import tables
from services.compactor.compact import Compaction
from services.compactor.settings import CompactSettings, SparkSettings
from services.compactor.spark import spark_session
from services.local.broker_config import EmbeddedKafkaSettings
from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, NewTopic
from shared.clients.producer import Producer, ProducerSettings
from shared.common.records import ProducerRecord
from shared.common.settings import KafkaSettings
from shared.streams import changelog_format as log
from shared.streams.aggregations import Count, Sum
from shared.streams.changelog import ChangelogPartition
from shared.streams.dsl import StreamsBuilder
from shared.streams.restoring import RestoreReport
from shared.streams.settings import StreamsSettings
from shared.streams.stream_task import StreamTask
from shared.streams.topics import CHANGELOG_CONFIGS
from shared.streams.topology import Topology

FACTORS = (1, 4, 16)
COMMIT_ENTRIES = 10_000
DAY_MS = 86_400_000
CLOSED_DAYS = 30  # over which the closed windows lie
RESTORE_FLAT, COMPACTION_FLAT, RESTORE_RATE = 1.5, 2.0, 300_000
Entry = tuple[bytes | None, bytes]


def topology() -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream("source").group_by_key().session_window(1_800_000)
    windows.aggregate("s", n=Count(), total=Sum("x")).on_close().to("out")
    return builder.build()


STATE = log.StateCodec(topology().schemas()[0].state_columns())


class Line(NamedTuple):
    """What was measured at one size; times in seconds."""

    factor: int
    records: int
    first: float
    delta: float
    rewritten: float
    restore: float
    load_rate: float
    replay: float


class Writer:
    """Writes one application's changelog, commit by commit."""

    def __init__(self, kafka: KafkaSettings, application: str) -> None:
        self.kafka, self.application, self.commit, self.closed = kafka, application, 0, 0

    async def create(self) -> None:
        async with Admin(self.kafka) as admin:
            await admin.create_topics([NewTopic(f"{self.application}-changelog", 1, 1, CHANGELOG_CONFIGS)])
        await self._send([(None, log.encode_takeover(1, log.Takeover(self.application, "bench", 0)))])

    async def write(self, live: range, closed: int) -> int:
        """Live sessions of these keys, then closed ones of keys that never come back; how many entries."""
        entries, done = self._entries(live, closed), 0
        while part := [entry for entry, _ in zip(entries, range(COMMIT_ENTRIES), strict=False)]:
            progress = log.Progress(
                self.application, "exactly_once", {"source": done}, 0, {"s": 0}, {}, topology().schemas(), 0
            )
            part.append((None, log.encode_progress(1, self.commit, progress)))
            await self._send(part)
            done += len(part)
            self.commit += 1
        return done

    def _entries(self, live: range, closed: int) -> Iterator[Entry]:
        for i in live:
            state = STATE.pack([self.commit + 1, 0.5 * i])
            yield b"live-%d" % i, log.encode_live(0, 1, self.commit, i, i + 1_000, state)
        for i in range(self.closed, self.closed + closed):
            start = i * 7919 % (CLOSED_DAYS * DAY_MS)
            state = STATE.pack([3, 0.5 * i])
            yield b"closed-%d" % i, log.encode_final(0, 1, self.commit, start, start + 1_000, start + 9, state)
        self.closed += closed

    async def _send(self, entries: list[Entry]) -> None:
        topic = f"{self.application}-changelog"
        async with Producer(self.kafka, ProducerSettings(linger_ms=0, batch_size=256 * 1024)) as producer:
            await (await producer.send_many([ProducerRecord(topic, v, k, (), 0, None) for k, v in entries]))


class Bench:
    """One Spark session and one broker for all sizes."""

    def __init__(self, spark: Any, kafka: KafkaSettings, folder: Path) -> None:
        self.spark, self.kafka, self.lake = spark, kafka, str(folder / "lake")

    async def measure(self, factor: int, live: int, closed: int, delta: int) -> Line:
        """Fill, compact, add a delta, compact that, restore both ways."""
        writer = Writer(self.kafka, f"bench-{uuid.uuid4().hex[:8]}")
        await writer.create()
        records = await writer.write(range(live), closed)
        first, _ = await asyncio.to_thread(self._compact, writer.application)
        await writer.write(range(min(delta, live)), delta)
        seconds, rewritten = await asyncio.to_thread(self._compact, writer.application)
        snapshot = await self._restore(writer.application, self.lake)
        replay = await self._restore(writer.application, None)
        assert snapshot.snapshot_windows == live, snapshot
        restore = snapshot.milliseconds / 1000
        rate = live / max(0.001, snapshot.snapshot_milliseconds / 1000)
        return Line(factor, records, first, seconds, rewritten, restore, rate, replay.milliseconds / 1000)

    def _compact(self, application: str) -> tuple[float, float]:
        """Seconds, and rows of `state` rewritten for each row that was changed."""
        settings = CompactSettings(application=application, lake=self.lake, kafka=self.kafka, optimize_files_max=0)
        started = time.monotonic()
        Compaction(self.spark, settings, lambda text: None).run()
        seconds = time.monotonic() - started
        metrics = tables.history(self.spark, f"{settings.tables}/state")[0].operationMetrics
        names = ("numTargetRowsInserted", "numTargetRowsUpdated", "numTargetRowsDeleted")
        changed = sum(int(metrics.get(name, 0)) for name in names)
        return seconds, int(metrics.get("numTargetRowsCopied", 0)) / max(1, changed)

    async def _restore(self, application: str, lake: str | None) -> RestoreReport:
        settings = StreamsSettings(application_id=application, lake=lake)
        partition = ChangelogPartition(self.kafka, settings, 0, "bench")
        await partition.open()
        try:
            _, report = await partition.take_over(lambda: StreamTask(topology(), 0, application=application))
        finally:
            await partition.close()
        return report


async def run(sessions: int, delta: int) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        async with EmbeddedKafka(Path(name) / "kafka", EmbeddedKafkaSettings()) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            started = time.monotonic()
            with spark_session(SparkSettings(master="local[2]"), "bench") as spark:
                start = time.monotonic() - started
                bench = Bench(spark, kafka, Path(name))
                await bench.measure(1, 1_000, 1_000, 1_000)  # warms the JVM up
                history = [await bench.measure(f, sessions, f * sessions, delta) for f in FACTORS]
                state = [await bench.measure(f, f * sessions, 0, delta) for f in FACTORS]
    return {"sessions": sessions, "delta": delta, "spark_start": start, "history": history, "state": state}


def show(found: dict[str, Any]) -> int:
    """Print the tables; how many of what is asked for was missed."""
    print(f"{found['sessions']:,} live sessions, a delta of {found['delta']:,} closed and as many changed")
    print(f"Spark's start: {found['spark_start']:.1f} s")
    head = f"{'':>4} {'records':>11} {'compact s':>10} {'records/s':>10} {'delta s':>8} {'rewritten':>9}"
    head += f" {'restore s':>9} {'sessions/s':>11} {'replay s':>9}"
    for name in ("history", "state"):
        print(f"while {'history' if name == 'history' else 'live state'} grows\n{head}")
        for line in found[name]:
            print(
                f"{line.factor:>3}x {line.records:>11,} {line.first:>10.1f} {line.records / line.first:>10,.0f} "
                f"{line.delta:>8.1f} {line.rewritten:>9.2f} {line.restore:>9.2f} {line.load_rate:>11,.0f} "
                f"{line.replay:>9.2f}"
            )
    history, state = found["history"], found["state"]
    ratios = {
        "restore at 16x history / 1x": (history[-1].restore / history[0].restore, RESTORE_FLAT),
        "delta at 16x closed / 1x": (history[-1].delta / history[0].delta, COMPACTION_FLAT),
        "delta at 16x state / 1x": (state[-1].delta / state[0].delta, COMPACTION_FLAT),
    }
    for what, (ratio, most) in ratios.items():
        print(f"{what}: {ratio:.2f} (asked for: {most} at most)")
    rate = max(line.load_rate for line in (*history, *state))
    print(f"restored from a snapshot: {rate:,.0f} sessions/s (asked for: {RESTORE_RATE:,})")
    return sum(ratio > most for ratio, most in ratios.values()) + (rate < RESTORE_RATE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20_000, help="live sessions at 1x (for figures: 1000000)")
    parser.add_argument("--delta", type=int, default=5_000, help="closed and changed sessions of the second compaction")
    parser.add_argument("--plot", type=Path, default=Path("compaction.png"), help="where the chart is written")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(run(given.sessions, given.delta))
    missed = show(found)
    history, state = found["history"], found["state"]
    series = {
        "restore from snapshot, history grows": [line.restore for line in history],
        "replay of the whole changelog, history grows": [line.replay for line in history],
        "compaction of the delta, closed grows": [line.delta for line in history],
        "compaction of the delta, state grows": [line.delta for line in state],
    }
    chart(given.plot, f"seconds, {given.sessions} live sessions", FACTORS, "size of history or state", series)
    print(f"chart: {given.plot}")
    if given.json:
        print(json.dumps({name: [x._asdict() for x in v] if isinstance(v, list) else v for name, v in found.items()}))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
