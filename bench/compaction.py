"""Compaction and restore, on an embedded broker and Spark's local[2]; Spark's start is measured separately.

Changelogs are written in the engine's own format. The parts:

- `first`: `--sessions` open sessions and a twentieth as many closed ones are compacted for the first time, cold (the
  first job of the session) and warm. Then an empty change and ten changes are compacted. CPU is that of the driver, its
  JVM and its Python workers together.
- `delta`: a change of three times `--delta` entries to 1.6 times `--sessions` live ones, without and with a rewrite.
- `history`: the first compaction again, then with 4 and 16 times as many entries that leave as many sessions. Tasks are
  restored right after a rewrite, before one with half as many superseded rows, and once from the whole changelog.
- `partitions`: a first compaction with 64 partitions, compared with one.

The targets are in TARGETS.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from bench._changelogs import NUMBERS, ChangelogWriter
from bench._compactions import Compactions
from bench._targets import missed, show
from penstock.services.compaction_settings import SparkSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.spark.spark_session import spark_session
from penstock.shared.common.settings import KafkaSettings

PARTS = ("first", "delta", "history", "partitions")
FACTORS = (1, 4, 16)
PARTITIONS = (1, 64)
LIVE_FACTOR = 1.6  # a delta changes this many times --sessions open sessions
TARGETS: dict[str, tuple[float, str]] = {
    "cold first compaction, entries/s": (120_000, "least"),
    "warm first compaction, entries/s": (200_000, "least"),
    "warm first compaction, CPU us an entry": (8, "most"),
    "nothing new, CPU s": (2, "most"),
    "ten changes, CPU s": (2, "most"),
    "delta without a rewrite, s": (4, "most"),
    "rewrite, rows/s": (250_000, "least"),
    "restore after a rewrite, s": (1, "most"),
    "restore after 16 times the history over 1": (1.3, "most"),
    "restore before a rewrite over after": (1.5, "most"),
    "replay without a snapshot, entries/s": (500_000, "least"),
    "64 partitions over 1": (1.25, "most"),
}


class Bench(Compactions):
    """The parts, one after the other. Each figure is printed at once."""

    def __init__(
        self, spark: Any, kafka: KafkaSettings, folder: Path, broker_pid: int, sessions: int, delta: int
    ) -> None:
        super().__init__(spark, kafka, folder, broker_pid)
        self.sessions = sessions
        self.delta = delta
        self.found: dict[str, float] = {}

    def note(self, name: str, value: float) -> None:
        self.found[name] = value
        print(f"{name}: {value:,.2f}", file=sys.stderr, flush=True)

    async def filled(self, live: int, closed: int, partitions: int = 1) -> tuple[ChangelogWriter, int]:
        """An application with a filled changelog, and the number of its entries."""
        writer = await self.application(NUMBERS, partitions)
        return writer, await writer.fill(live, closed)

    async def first_compaction(self) -> None:
        for name in ("cold", "warm"):
            writer, entries = await self.filled(self.sessions, self.sessions // 20, 2)
            done = await self.compact(writer)
            self.note(f"{name} first compaction, entries/s", entries / done.seconds)
            self.note(f"{name} first compaction, CPU us an entry", done.cpu_s / entries * 1e6)
            if name == "warm":
                self.note("nothing new, CPU s", (await self.compact(writer)).cpu_s)
                await writer.change(3)
                self.note("ten changes, CPU s", (await self.compact(writer)).cpu_s)
            await self.forget(writer)

    async def delta_into_live(self) -> None:
        writer, _ = await self.filled(int(self.sessions * LIVE_FACTOR), 0, 2)
        await self.compact(writer)
        done = await self.compact_delta(writer, self.delta)
        assert not done.rewrite_rows
        self.note("delta without a rewrite, s", done.seconds)
        while not done.rewrite_rows:
            done = await self.compact_delta(writer, self.delta)
        self.note("rewrite, rows/s", done.rewrite_rows / done.rewrite_s)
        await self.forget(writer)

    async def history(self) -> None:
        restores = [await self._restore_after(factor) for factor in FACTORS]
        self.note("restore after a rewrite, s", restores[0])
        self.note("restore after 16 times the history over 1", restores[-1] / restores[0])
        # A restore takes the changelog over, so nothing is written after it.
        writer, _ = await self.filled(self.sessions, 0)
        await self.compact(writer)
        assert not (await self.compact_delta(writer, self.sessions // 6)).rewrite_rows
        mixed = (await self.median_restores([writer]))[0].seconds
        self.note("restore before a rewrite over after", mixed / restores[0])
        (replayed,) = (await self.restore(writer, None)).reports
        seconds = max(0.001, replayed.milliseconds / 1000)
        self.note("replay without a snapshot, entries/s", replayed.changelog_records / seconds)
        await self.forget(writer)

    async def _restore_after(self, factor: int) -> float:
        """The seconds of a restore right after a rewrite, with `factor` times the history."""
        writer, _ = await self.filled(self.sessions, 0)
        done = await self.compact(writer)
        for _ in range(factor - 1):
            await writer.change(1, self.sessions - 2)
            done = await self.compact(writer)
        while not done.rewrite_rows:
            done = await self.compact_delta(writer, self.sessions // 6)
        seconds = (await self.median_restores([writer]))[0].seconds
        self.note(f"restore after {factor} times the history, s", seconds)
        await self.forget(writer)
        return seconds

    async def partitions(self) -> None:
        seconds = []
        for count in PARTITIONS:
            writer, _ = await self.filled(self.sessions, self.sessions // 20, count)
            seconds.append((await self.compact(writer)).seconds)
            self.note(f"first compaction of {count} partitions, s", seconds[-1])
            await self.forget(writer)
        self.note("64 partitions over 1", seconds[1] / seconds[0])


async def run(sessions: int, delta: int, only: Collection[str] = PARTS) -> dict[str, float]:
    """The figures of the parts in `only`, by name."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        async with EmbeddedKafka(Path(name) / "kafka") as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            started = time.monotonic()
            with spark_session(SparkSettings(master="local[2]"), "bench") as spark:
                bench = Bench(spark, kafka, Path(name), broker.child.pid, sessions, delta)
                bench.note("Spark's start, s", time.monotonic() - started)
                steps = (bench.first_compaction, bench.delta_into_live, bench.history, bench.partitions)
                for part, step in zip(PARTS, steps, strict=True):
                    if part in only:
                        await step()
            return bench.found


def main() -> int:
    """Measure and print. The status is 1 if a target was missed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sessions", type=int, default=20_000, help="open sessions (for figures: 1000000)")
    options.add_argument(
        "--delta", type=int, default=1_000, help="sessions to close, change and open (for figures: 66000)"
    )
    options.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="the parts to measure (default: all)")
    options.add_argument("--json", action="store_true")
    given = options.parse_args()
    found = asyncio.run(run(given.sessions, given.delta, given.only))
    show(found, TARGETS)
    if given.json:
        print(json.dumps(found))
    return 1 if missed(found, TARGETS) else 0


if __name__ == "__main__":
    raise SystemExit(main())
