"""Compaction and restore while history, `closed` and `state` grow, on an embedded broker and Spark's local[2].

Changelogs are written by the engine's own format: `--sessions` live ones, and history in 1, 4 and 16 compactions. The
first has `--history` closed ones, each that follows closes as many, opens as many new ones and changes all the others,
so that the changelog, `closed`, files, deletion vectors and versions all grow with history. Then comes a delta that
closes, changes and opens `--delta` sessions; it is compacted, and tasks are restored: from the snapshots in turn, since
what else a machine does comes and goes (the median of five), and once from the whole changelog. The same with 1, 4 and
16 times `--state-sessions` live ones and no history. Asked for: restore flat within 1.5 while history grows, compaction
of the delta flat within 2 while `closed` and while `state` grow, 300,000 sessions a second from a snapshot, each of
them at every size. Then the changelog's partitions grow (see `_compaction_partitions`), of which nothing is asked for.
Each part can be run by itself.

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
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import _compaction_partitions
from bench._changelogs import NUMBERS, OBJECTS, SKETCHES, ChangelogWriter, Kind
from bench._compactions import Compactions
from bench._plot import chart
from penstock.services.local.broker_config import EmbeddedKafkaSettings
from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark import tables, upkeep
from penstock.services.spark.session import spark_session
from penstock.services.spark.settings import CompactSettings, SparkSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.restoring import RestoreReport

PARTS = ("history", "state", "others", "partitions")
FACTORS = (1, 4, 16)
OTHER_KINDS_SHARE = 10  # of the sessions: a tenth as many with sketches, and with JSON
FILES_MAX = CompactSettings.model_fields["optimize_files_max"].default
RESTORE_FLAT, COMPACTION_FLAT, RESTORE_RATE = 1.5, 2.0, 300_000


class Line(NamedTuple):
    """What was measured at one size; times in seconds, rates in sessions a second.

    `first` is the compaction of the first `records` of `changelog` in all, the delta apart; `kept_up` is the delta's
    with its share of OPTIMIZE. `copied` and `rewritten` are rows of `state` for each row that the delta changed,
    without and with OPTIMIZE; `optimize` and `optimize_closed` are what that takes.
    """

    factor: int
    changelog: int
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
    """Live sessions, and compactions (`runs`), each of all of them and of as many closed ones as `closed` says."""

    factor: int
    live: int
    closed: int
    runs: int


class Asked(NamedTuple):
    """Sessions that are live, closed in each compaction, live while that grows, and of a delta in each of three ways.

    Then the numbers of partitions, and how many rounds of deltas these get.
    """

    sessions: int
    closed: int
    state_sessions: int
    delta: int
    partitions: Sequence[int]
    rounds: int


class Filled(NamedTuple):
    """What was compacted (`records` at first) and how long it took; the delta `added` so many files to `state`."""

    size: Size
    writer: ChangelogWriter
    changelog: int
    records: int
    first: float
    delta: float
    added: int


class Growth(Compactions):
    """Compactions and restores of one partition while what is there grows."""

    async def measure(self, sizes: Iterable[Size], delta: int) -> list[Line]:
        """Fill and compact each size and add a delta, then restore all of them in turn; each line is said at once."""
        filled = [await self._fill(size, delta) for size in sizes]
        restored = await self.median_restores([of.writer for of in filled])
        return [await self._line(of, found.reports[0], delta) for of, found in zip(filled, restored, strict=True)]

    async def _fill(self, size: Size, delta: int) -> Filled:
        """As many compactions as `size` says, each of as many entries, and that of the delta."""
        writer = await self.application(NUMBERS)
        records = await writer.fill(size.live, size.closed)
        first, changelog = await self.compact(writer), records
        for _ in range(size.runs - 1):
            changelog += await writer.change(size.closed, size.live - size.closed)
            await self.compact(writer)
        files = await asyncio.to_thread(self._files, writer.application)
        seconds = await self.compact_delta(writer, delta)
        added = await asyncio.to_thread(self._files, writer.application) - files
        return Filled(size, writer, changelog, records, first, seconds, added)

    async def _line(self, filled: Filled, snapshot: RestoreReport, delta: int) -> Line:
        size, writer = filled.size, filled.writer
        assert snapshot.snapshot_windows == size.live, snapshot
        (replay,) = (await self.restore(writer, None)).reports
        copied, optimize, optimize_closed = await asyncio.to_thread(self._upkeep, writer.application)
        await self.forget(writer)
        changed, share = 3 * delta, min(1.0, max(1, filled.added) / FILES_MAX)
        line = Line(
            size.factor,
            filled.changelog,
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
        writer = await self.application(kind)
        await writer.fill(live, 0)
        await self.compact(writer)
        (found,) = await self.median_restores([writer])
        (report,) = found.reports
        assert report.snapshot_windows == live, report
        await self.forget(writer)
        return _rate(report)

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


def _rate(report: RestoreReport) -> float:
    return report.snapshot_windows / max(0.001, report.snapshot_milliseconds / 1000)


async def run(asked: Asked, only: Collection[str] = PARTS) -> dict[str, Any]:
    """The figures of the parts in `only`; each is said on standard error as soon as it is there."""
    sessions, closed, state_sessions, delta, partitions, rounds = asked
    found: dict[str, Any] = {"sessions": sessions, "closed": closed, "state_sessions": state_sessions, "delta": delta}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        async with EmbeddedKafka(Path(name) / "kafka", EmbeddedKafkaSettings()) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            started = time.monotonic()
            with spark_session(SparkSettings(master="local[2]"), "bench") as spark:
                found["spark_start"] = time.monotonic() - started
                bench = Growth(spark, kafka, Path(name))

                await bench.measure([Size(1, 1_000, 1_000, 1)], 500)  # warms the JVM up
                if "history" in only:
                    found["history"] = await bench.measure([Size(f, sessions, closed, f) for f in FACTORS], delta)
                if "state" in only:
                    found["state"] = await bench.measure([Size(f, f * state_sessions, 0, 1) for f in FACTORS], delta)
                if "others" in only:
                    found["others"] = {
                        kind.name: await bench.restore_rate(kind, max(1, sessions // OTHER_KINDS_SHARE))
                        for kind in (SKETCHES, OBJECTS)
                    }
                if "partitions" in only:
                    found["partitions"] = await _compaction_partitions.measure(
                        bench, partitions, sessions, closed, delta, rounds
                    )
    return found


def show(found: dict[str, Any]) -> int:
    """Print the tables of what was measured; how many of what is asked for was missed."""
    print(f"a delta of {found['delta']:,} sessions changed, as many closed and as many new")
    print(f"Spark's start: {found['spark_start']:.1f} s")
    missed = _show_growth(found)
    for name, of in found.get("others", {}).items():
        print(f"restored from a snapshot, with {name}: {of:,.0f} sessions/s")
    if "partitions" in found:
        _compaction_partitions.show(found["partitions"])
    return missed


def _show_growth(found: dict[str, Any]) -> int:
    """What was measured while history and while live state grow; how many of what is asked for was missed."""
    history, state = found.get("history", []), found.get("state", [])
    live = {"history": found["sessions"], "live state": found["state_sessions"]}
    head = f"{'':>4} {'changelog':>11} {'compact s':>10} {'records/s':>10} {'delta s':>8} {'kept up':>8}"
    head += f" {'rewritten':>16} {'optimize s':>13} {'restore s':>9} {'sessions/s':>11} {'replay s':>9}"
    for what, lines in (("history", history), ("live state", state)):
        if not lines:
            continue
        each = f", each compaction closes {found['closed']:,}" if what == "history" else ""
        print(f"while {what} grows, from {live[what]:,} live sessions{each}\n{head}")
        for line in lines:
            print(
                f"{line.factor:>3}x {line.changelog:>11,} {line.first:>10.1f} {line.records / line.first:>10,.0f} "
                f"{line.delta:>8.1f} {line.kept_up:>8.1f} {line.copied:>7.2f}, {line.rewritten:>7.2f} "
                f"{line.optimize:>5.1f}, {line.optimize_closed:>6.1f} "
                f"{line.restore:>9.2f} {line.load_rate:>11,.0f} {line.replay:>9.2f}"
            )
    ratios = {
        "restore while history grows": ([line.restore for line in history], RESTORE_FLAT),
        "delta while closed grows": ([line.kept_up for line in history], COMPACTION_FLAT),
        "delta while state grows": ([line.kept_up for line in state], COMPACTION_FLAT),
    }
    missed = 0
    for name, (seconds, most) in ratios.items():
        if seconds:
            worst = max(seconds[1:]) / seconds[0]
            missed += worst > most
            print(f"{name}: the worst over 1x is {worst:.2f} (asked for: {most} at most)")
    if history or state:
        rate = min(line.load_rate for line in (*history, *state))
        missed += rate < RESTORE_RATE
        print(f"restored from a snapshot, the slowest: {rate:,.0f} sessions/s (asked for: {RESTORE_RATE:,})")
    return missed


def draw(found: dict[str, Any], path: Path) -> None:
    """The chart of what was measured while history and while live state grow, where there is any."""
    series: dict[str, list[float]] = {}
    if history := found.get("history"):
        series["restore from snapshot, history grows"] = [line.restore for line in history]
        series["replay of the whole changelog, history grows"] = [line.replay for line in history]
        series["compaction of the delta, closed grows"] = [line.kept_up for line in history]
    if state := found.get("state"):
        series["compaction of the delta, state grows"] = [line.kept_up for line in state]
    if series:
        title = f"{found['sessions']:,} live sessions while history grows"
        title += f", {found['state_sessions']:,} at 1x while state grows"
        chart(path, title, FACTORS, "history or state", "seconds", series)
        print(f"chart: {path}")


def parser() -> argparse.ArgumentParser:
    """What is told on the command line."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sessions", type=int, default=20_000, help="live sessions (for figures: 1000000)")
    options.add_argument("--history", type=int, default=None, help="closed in each compaction; default: a tenth")
    options.add_argument("--state-sessions", type=int, default=None, help="the same where live state grows")
    options.add_argument("--delta", type=int, default=None, help="sessions changed, closed and new; default: a tenth")
    options.add_argument("--partitions", type=_counts, default=(1, 8), help="of the changelog (for figures: 1,8,64)")
    options.add_argument("--rounds", type=int, default=1, help="of deltas while partitions grow (for figures: 3)")
    options.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="what is measured; default: all")
    options.add_argument("--plot", type=Path, default=Path("compaction.png"), help="where the chart is written")
    options.add_argument("--json", action="store_true")
    return options


def main() -> int:
    """Measure, print and draw; 1 where something that is asked for was missed."""
    given = parser().parse_args()
    tenth = max(1, given.sessions // 10)
    sizes = (given.sessions, given.history or tenth, given.state_sessions or given.sessions, given.delta or tenth)
    found = asyncio.run(run(Asked(*sizes, given.partitions, given.rounds), given.only))
    missed = show(found)
    draw(found, given.plot)
    if given.json:
        lists = {name: [line._asdict() for line in found[name]] for name in PARTS if isinstance(found.get(name), list)}
        print(json.dumps(found | lists))
    return 1 if missed else 0


def _counts(text: str) -> tuple[int, ...]:
    """Numbers of partitions, comma-separated: the first is what the others are compared with."""
    try:
        counts = tuple(int(one) for one in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"positive numbers such as 1,8,64 are meant, not {text!r}")
    return counts


if __name__ == "__main__":
    raise SystemExit(main())
