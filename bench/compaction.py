"""Compaction and restore while history, `closed` and `state` grow, on an embedded broker and Spark's local[2].

Changelogs are written by the engine's own format: `--sessions` live ones, and history in 1, 4 and 16 compactions. The
first has `--history` closed ones, each that follows closes as many, changes as many and opens as many new ones, so that
files, deletion vectors and versions grow with the rows. Then comes a delta that does the same with `--delta` sessions;
it is compacted, and tasks are restored: from the snapshots in turn, since what else a machine does comes and goes (the
median of five), and once from the whole changelog. The same with 1, 4 and 16 times `--state-sessions` live ones and no
history. Asked for: restore flat within 1.5 while history grows, compaction of the delta flat within 2 while `closed`
and while `state` grow, 300,000 sessions a second from a snapshot, each of them at every size.

The policy's OPTIMIZE rewrites a partition once it has `optimize_files_max` files, and so comes every that many runs.
One of `state` and one of `closed`, of all that is there, is timed by itself, and a delta is judged with its share of
both. `rewritten` is rows of `state` rewritten for each row that the delta changed: by the MERGE itself (deletion
vectors leave none to it), and with its share of the OPTIMIZE. Sessions with sketches and with JSON are restored apart,
a tenth as many.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench._changelogs import NUMBERS, OBJECTS, SKETCHES, ChangelogWriter, Kind
from bench._plot import chart
from services.compactor import tables, upkeep
from services.compactor.compact import Compaction
from services.compactor.fold import Summary
from services.compactor.settings import CompactSettings, SparkSettings
from services.compactor.spark import spark_session
from services.local.broker_config import EmbeddedKafkaSettings
from services.local.kafka import EmbeddedKafka
from shared.common.settings import KafkaSettings
from shared.streams.changelog import ChangelogPartition
from shared.streams.restoring import RestoreReport
from shared.streams.settings import StreamsSettings
from shared.streams.stream_task import StreamTask

FACTORS = (1, 4, 16)
RESTORES = 5  # from each snapshot; the median is taken
OTHER_KINDS_SHARE = 10  # of the sessions: a tenth as many with sketches, and with JSON
FILES_MAX = CompactSettings.model_fields["optimize_files_max"].default
RESTORE_FLAT, COMPACTION_FLAT, RESTORE_RATE = 1.5, 2.0, 300_000


class Line(NamedTuple):
    """What was measured at one size; times in seconds, rates in sessions a second.

    `first` is the compaction of the first `records`; `kept_up` is the delta's with its share of OPTIMIZE. `copied` and
    `rewritten` are rows of `state` for each row that the delta changed, without and with OPTIMIZE; `optimize` and
    `optimize_closed` are what that takes.
    """

    factor: int
    records: int
    first: float
    delta: float
    kept_up: float
    copied: float
    rewritten: float
    optimize: float
    optimize_closed: float
    restore: float
    load_rate: float
    replay: float


class Size(NamedTuple):
    """Live sessions, and compactions (`runs`) each of which closes, changes and opens as many as `closed` says."""

    factor: int
    live: int
    closed: int
    runs: int


class Filled(NamedTuple):
    """What was compacted and how long it took; the delta `added` so many files to `state`."""

    size: Size
    writer: ChangelogWriter
    records: int
    first: float
    delta: float
    added: int


class Bench:
    """One Spark session and one broker for all sizes."""

    def __init__(self, spark: Any, kafka: KafkaSettings, folder: Path) -> None:
        self.spark, self.kafka, self.lake = spark, kafka, str(folder / "lake")

    async def measure(self, sizes: Iterable[Size], delta: int) -> list[Line]:
        """Fill and compact each size and add a delta, then restore all of them in turn; each line is said at once."""
        filled = [await self._fill(size, delta) for size in sizes]
        reports = await self._median_restores([of.writer for of in filled])
        return [await self._line(of, report, delta) for of, report in zip(filled, reports, strict=True)]

    async def _fill(self, size: Size, delta: int) -> Filled:
        """As many compactions as `size` says, each over as many closed windows, and that of the delta."""
        writer = ChangelogWriter(self.kafka, f"bench-{uuid.uuid4().hex[:8]}", NUMBERS)
        await writer.create()
        records = await writer.fill(size.live, size.closed)
        first, _ = await asyncio.to_thread(self._compact, writer.application)
        for _ in range(size.runs - 1):
            await writer.change(size.closed)
            await asyncio.to_thread(self._compact, writer.application)
        files = await asyncio.to_thread(self._files, writer.application)
        entries = await writer.change(delta)
        seconds, runs = await asyncio.to_thread(self._compact, writer.application)
        (done,) = runs
        assert (done.entries, done.merged_rows, done.deleted_rows, done.finals) == (entries, 2 * delta, delta, delta)
        added = await asyncio.to_thread(self._files, writer.application) - files
        return Filled(size, writer, records, first, seconds, added)

    async def _line(self, filled: Filled, snapshot: RestoreReport, delta: int) -> Line:
        size, writer = filled.size, filled.writer
        assert snapshot.snapshot_windows == size.live, snapshot
        replay = await self._restore(writer, None)
        copied, optimize, optimize_closed = await asyncio.to_thread(self._upkeep, writer.application)
        await self._forget(writer)
        changed, share = 3 * delta, min(1.0, max(1, filled.added) / FILES_MAX)
        line = Line(
            size.factor,
            filled.records,
            filled.first,
            filled.delta,
            filled.delta + (optimize + optimize_closed) * share,
            copied / changed,
            (copied + size.live * share) / changed,
            optimize,
            optimize_closed,
            snapshot.milliseconds / 1000,
            _rate(snapshot),
            replay.milliseconds / 1000,
        )
        print(line, file=sys.stderr, flush=True)
        return line

    async def restore_rate(self, kind: Kind, live: int) -> float:
        """Sessions a second from a snapshot of `live` sessions of that kind."""
        writer = ChangelogWriter(self.kafka, f"bench-{uuid.uuid4().hex[:8]}", kind)
        await writer.create()
        await writer.fill(live, 0)
        await asyncio.to_thread(self._compact, writer.application)
        (report,) = await self._median_restores([writer])
        assert report.snapshot_windows == live, report
        await self._forget(writer)
        return _rate(report)

    def _compact(self, application: str) -> tuple[float, list[Summary]]:
        """Seconds, and the runs that it took."""
        settings = CompactSettings(application=application, lake=self.lake, kafka=self.kafka)
        started, runs = time.monotonic(), list[Summary]()
        while not runs or runs[-1].records_left:
            runs.append(Compaction(self.spark, settings, lambda text: None).run())
        return time.monotonic() - started, runs

    def _files(self, application: str) -> int:
        return sum(upkeep.files_by_partition(self.spark, f"{self.lake}/{application}/state").values())

    def _upkeep(self, application: str) -> tuple[int, float, float]:
        """Rows that the newest MERGE copied, and the seconds that an OPTIMIZE of `state` and of `closed` takes."""
        state, closed = (f"{self.lake}/{application}/{table}" for table in ("state", "closed/s"))
        merge = next(row for row in tables.history(self.spark, state) if row.operation == "MERGE")
        copied = int((merge.operationMetrics or {}).get("numTargetRowsCopied", 0))
        return copied, self._optimize(state), self._optimize(closed)

    def _optimize(self, path: str) -> float:
        started = time.monotonic()
        upkeep.optimize(self.spark, path, 1)
        return time.monotonic() - started

    async def _median_restores(self, writers: Sequence[ChangelogWriter]) -> list[RestoreReport]:
        rounds = [[await self._restore(writer, self.lake) for writer in writers] for _ in range(RESTORES)]
        return [sorted(of, key=lambda report: report.milliseconds)[RESTORES // 2] for of in zip(*rounds, strict=True)]

    async def _restore(self, writer: ChangelogWriter, lake: str | None) -> RestoreReport:
        settings = StreamsSettings(application_id=writer.application, lake=lake)
        partition = ChangelogPartition(self.kafka, settings, 0, "bench")
        topology = writer.kind.topology()
        await partition.open()
        try:
            task, report = await partition.take_over(lambda: StreamTask(topology, 0, application=writer.application))
            assert len(task.stores["s"]) == len(writer.live), report
        finally:
            await partition.close()
        return report

    async def _forget(self, writer: ChangelogWriter) -> None:
        """Leave the disk as it was."""
        await writer.delete()
        await asyncio.to_thread(shutil.rmtree, f"{self.lake}/{writer.application}")


def _rate(report: RestoreReport) -> float:
    return report.snapshot_windows / max(0.001, report.snapshot_milliseconds / 1000)


async def run(sessions: int, closed: int, state_sessions: int, delta: int) -> dict[str, Any]:
    """All figures; each is said on standard error as soon as it is there."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        async with EmbeddedKafka(Path(name) / "kafka", EmbeddedKafkaSettings()) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            started = time.monotonic()
            with spark_session(SparkSettings(master="local[2]"), "bench") as spark:
                start = time.monotonic() - started
                bench = Bench(spark, kafka, Path(name))

                await bench.measure([Size(1, 1_000, 1_000, 1)], 500)  # warms the JVM up
                history = await bench.measure([Size(f, sessions, closed, f) for f in FACTORS], delta)
                state = await bench.measure([Size(f, f * state_sessions, 0, 1) for f in FACTORS], delta)
                others = {
                    kind.name: await bench.restore_rate(kind, max(1, sessions // OTHER_KINDS_SHARE))
                    for kind in (SKETCHES, OBJECTS)
                }
    sizes = {"sessions": sessions, "closed": closed, "state_sessions": state_sessions, "delta": delta}
    return {**sizes, "spark_start": start, "history": history, "state": state, "others": others}


def show(found: dict[str, Any]) -> int:
    """Print the tables; how many of what is asked for was missed."""
    print(f"{found['sessions']:,} live sessions and {found['closed']:,} closed ones, while history grows")
    print(f"{found['state_sessions']:,} live ones, while they grow")
    print(f"a delta of {found['delta']:,} sessions changed, as many closed and as many new")
    print(f"Spark's start: {found['spark_start']:.1f} s")
    head = f"{'':>4} {'records':>11} {'compact s':>10} {'records/s':>10} {'delta s':>8} {'kept up':>8}"
    head += f" {'rewritten':>16} {'optimize s':>13} {'restore s':>9} {'sessions/s':>11} {'replay s':>9}"
    for name in ("history", "state"):
        print(f"while {'history' if name == 'history' else 'live state'} grows\n{head}")
        for line in found[name]:
            print(
                f"{line.factor:>3}x {line.records:>11,} {line.first:>10.1f} {line.records / line.first:>10,.0f} "
                f"{line.delta:>8.1f} {line.kept_up:>8.1f} {line.copied:>7.2f}, {line.rewritten:>7.2f} "
                f"{line.optimize:>5.1f}, {line.optimize_closed:>6.1f} "
                f"{line.restore:>9.2f} {line.load_rate:>11,.0f} {line.replay:>9.2f}"
            )
    history, state = found["history"], found["state"]
    ratios = {
        "restore while history grows": ([line.restore for line in history], RESTORE_FLAT),
        "delta while closed grows": ([line.kept_up for line in history], COMPACTION_FLAT),
        "delta while state grows": ([line.kept_up for line in state], COMPACTION_FLAT),
    }
    missed = 0
    for what, (seconds, most) in ratios.items():
        worst = max(seconds[1:]) / seconds[0]
        missed += worst > most
        print(f"{what}: the worst over 1x is {worst:.2f} (asked for: {most} at most)")
    rate = min(line.load_rate for line in (*history, *state))
    print(f"restored from a snapshot, the slowest: {rate:,.0f} sessions/s (asked for: {RESTORE_RATE:,})")
    for name, of in found["others"].items():
        print(f"restored from a snapshot, with {name}: {of:,.0f} sessions/s")
    return missed + int(rate < RESTORE_RATE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=20_000, help="live sessions (for figures: 1000000)")
    parser.add_argument("--history", type=int, default=None, help="closed in each compaction; default: a tenth")
    parser.add_argument("--state-sessions", type=int, default=None, help="the same where live state grows")
    parser.add_argument("--delta", type=int, default=None, help="sessions changed, closed and new; default: a tenth")
    parser.add_argument("--plot", type=Path, default=Path("compaction.png"), help="where the chart is written")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    closed = given.history or max(1, given.sessions // 10)
    state = given.state_sessions or given.sessions
    found = asyncio.run(run(given.sessions, closed, state, given.delta or max(1, given.sessions // 10)))
    missed = show(found)
    series = {
        "restore from snapshot, history grows": [line.restore for line in found["history"]],
        "replay of the whole changelog, history grows": [line.replay for line in found["history"]],
        "compaction of the delta, closed grows": [line.kept_up for line in found["history"]],
        "compaction of the delta, state grows": [line.kept_up for line in found["state"]],
    }
    title = f"{given.sessions:,} live sessions while history grows, {state:,} at 1x while state grows"
    chart(given.plot, title, FACTORS, "history or state", "seconds", series)
    print(f"chart: {given.plot}")
    if given.json:
        lists = {name: [line._asdict() for line in found[name]] for name in ("history", "state")}
        print(json.dumps(found | lists))
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
