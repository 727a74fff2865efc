"""Session windows from Kafka back to Kafka, beside a bare fetch of the same records into columns.

One real embedded broker; a topic of four partitions with a day of clicks (`_sessions_data`). Each contestant runs in a
process of its own, in turns, and its best round counts. `fetch` only reads columns. The others run a stream worker with
a session count (gap 30 min, grace 5 min) that writes closed sessions to a topic and its state to its changelog, with a
commit every 200 ms: `count` of values left as bytes, `mean` with a mean of a field decoded from the JSON besides. Time
runs from when the first task is restored to when all records are committed; CPU is the process' own. What comes out is
checked: every record is in a closed session, in a live one, or late.

Besides: what a live session with count and mean takes of memory, with a million of them, and how long after it was due
a record's result can be read at 10,000 records a second (`_sessions_latency`); the exit status is 1 also where that
rate was not held. Bytewax and Quix Streams run beside it on the same broker, where an environment has them (`_peers`);
that one is absent is said. With `--profile` each of ours runs once under the profiler instead.

With `--windows tumbling` (30 min) or `hopping` (1 h every 5 min, so that a record is in twelve) the same is measured of
those, from Kafka back to Kafka and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import json
import pstats
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench._peers import absent, available, race
from bench._session_peers import PEERS
from bench._session_peers import TOPIC as PEERS_TOPIC
from bench._sessions_data import BULK, GAP_MS, GRACE_MS, PARTITIONS, TOPIC, fill
from bench._sessions_latency import RATE_HELD_MIN, RECORDS_PER_SECOND, latency
from bench._side_by_side import Figures, best_of, report
from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations import Count, Mean
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.grouped_stream import GroupedStream, WindowedGroup
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.stream_task import Guarantee
from penstock.shared.streams.stream_worker import StreamWorker
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.compilation import compile_kernels
from penstock.shared.streams.windows.kinds import SessionWindows
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_store import WindowStore

COMMIT_INTERVAL_MS = 200
PROFILE_LINES = 30
PEERS_SLOWER = 10  # at least: they get so many times fewer records, or would take minutes
POLL_MS = 100
SESSIONS, SESSION_BYTES_MAX = 1_000_000, 400
LATENCY_SECONDS, P99_MS_MAX = 8, 250
SESSION = "session"
WINDOWS: dict[str, Callable[[GroupedStream], WindowedGroup]] = {
    SESSION: lambda grouped: grouped.session_window(gap=GAP_MS, grace=GRACE_MS),
    "tumbling": lambda grouped: grouped.tumbling_window(size=GAP_MS, grace=GRACE_MS),
    "hopping": lambda grouped: grouped.hopping_window(size=2 * GAP_MS, advance=GRACE_MS, grace=GRACE_MS),
}
PER_RECORD = {SESSION: 1, "tumbling": 1, "hopping": 2 * GAP_MS // GRACE_MS}
"""How many windows a record is in."""
FETCH = "fetch"
CONTESTANTS = (
    FETCH,
    "at_least_once count",
    "exactly_once count",
    "at_least_once mean",
    "exactly_once mean",
)
WANTED = (
    ("at_least_once count", FETCH, 0.30),
    ("exactly_once count", FETCH, 0.22),
    ("at_least_once mean", FETCH, 0.17),
)


class Click(msgspec.Struct):
    """What the mean needs of a value; the rest of the JSON is passed over."""

    ms: int


def topology(results: str, kind: str, *, mean: bool) -> Topology:
    """Windows by key, to the topic `results`."""
    builder = StreamsBuilder()
    grouped = builder.stream(TOPIC, value=Click if mean else bytes).group_by_key()
    windows = WINDOWS[kind](grouped)
    table = (
        windows.aggregate("sessions", n=Count(), ms=Mean("ms")) if mean else windows.aggregate("sessions", n=Count())
    )
    table.on_close().to(results)
    return builder.build()


class Stopwatch:
    """Wall and CPU time from `start`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def start(self) -> None:
        if not self.wall:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

    def figures(self, count: int) -> Figures:
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return {"records_per_second": count / wall, "cpu_us_per_record": cpu / count * 1e6}


async def fetch(kafka: KafkaSettings, count: int) -> Figures:
    """The records as columns, and nothing else."""
    settings = ConsumerSettings(auto_offset_reset="earliest", max_poll_records=None)
    async with Consumer(kafka, settings) as consumer:
        watch, seen = Stopwatch(), 0
        watch.start()
        consumer.assign([TopicPartition(TOPIC, p) for p in range(PARTITIONS)])
        while seen < count:
            seen += sum(map(len, (await consumer.poll(POLL_MS)).values()))
        return watch.figures(count)


async def windowed(kafka: KafkaSettings, count: int, guarantee: Any, kind: str, *, mean: bool, keep: str) -> Figures:
    """The stream worker, from empty to all committed. `keep` tells this round's topics from others'."""
    settings = StreamsSettings(
        application_id=f"bench-{keep}",
        processing_guarantee=guarantee,
        commit_interval_ms=COMMIT_INTERVAL_MS,
        replication_factor=1,
    )
    results = f"results-{keep}"
    async with Admin(kafka) as admin:
        await admin.create_topics([event_time_topic(results, PARTITIONS)])
    watch = Stopwatch()
    worker = StreamWorker(kafka, settings, topology(results, kind, mean=mean), on_task=lambda task: watch.start())
    await worker.startup()
    try:
        while not _all_committed(worker, count):
            await worker.run_once()
        figures = watch.figures(count)
        tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
        counted = 0 if kind == SESSION else 1  # behind the time of the latest record
        live = sum(s.states[counted] for task in tasks for s in task.stores["sessions"].rows())
        missed = [t.metrics.late_total if kind == SESSION else t.metrics.missed_windows_total for t in tasks]
        figures["windows_closed"] = sum(task.metrics.closed_total for task in tasks)
    finally:
        await worker.shutdown()
    closed = await _records_in(kafka, results, int(figures["windows_closed"]))
    if closed + live + sum(missed) != count * PER_RECORD[kind]:
        raise SystemExit(f"{closed} counted in closed windows, {live} in live ones, {sum(missed)} late: not {count}")
    return figures


def _all_committed(worker: StreamWorker, count: int) -> bool:
    return sum(o.task.metrics.committed.records for o in worker.tasks().values() if o.task is not None) >= count


async def _records_in(kafka: KafkaSettings, topic: str, sessions: int) -> int:
    """How many records are in the sessions that were written."""
    settings = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None)
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    async with Consumer(kafka, settings) as consumer:
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        seen = records = 0
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + 20_000
        while seen < sessions and SYSTEM_CLOCK.monotonic_ms() < deadline_ms:
            for columns in (await consumer.poll(POLL_MS)).values():
                seen += len(columns)
                records += sum(decode(value or b"")["n"] for value in columns.values)
    return records


async def contest(contestant: str, kafka: KafkaSettings, count: int, kind: str) -> Figures:
    """One round of one contestant."""
    if contestant == FETCH:
        return await fetch(kafka, count)
    guarantee, what = contestant.split()
    keep = f"{guarantee}-{what}-{time.time_ns()}".replace("_", "-")
    return await windowed(kafka, count, guarantee, kind, mean=what == "mean", keep=keep)


def profiled(contestant: str, kafka: KafkaSettings, count: int, kind: str) -> str:
    """One round under the profiler: each function's own time, and each file's share of it all."""
    profiler, said = cProfile.Profile(), io.StringIO()
    profiler.runcall(lambda: asyncio.run(contest(contestant, kafka, count, kind)))
    stats = pstats.Stats(profiler, stream=said)
    stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    own: dict[str, float] = {}
    for (file, _, _), row in stats.stats.items():  # type: ignore[attr-defined]
        name = Path(file).name if Path(file).is_file() else "built in: numpy, msgspec, Cython, sockets"
        own[name] = own.get(name, 0.0) + row[2]
    return "\n".join([f"{contestant}, {count:,} records:", said.getvalue(), *shares(own, count, PROFILE_LINES)])


def shares(seconds: dict[str, float], count: int, lines_max: int) -> list[str]:
    """Each name's part of all the time, the largest first; the last line is all others', so that nothing is left out.

    >>> shares({"a.py": 1.0, "b.py": 2.0, "c.py": 0.5, "d.py": 0.5}, 1_000_000, 2)
    [' 50.0%   2.00 µs a record  b.py', ' 25.0%   1.00 µs a record  a.py', ' 25.0%   1.00 µs a record  all others']
    """
    largest = sorted(seconds.items(), key=lambda each: -each[1])
    others = sum(own for _, own in largest[lines_max:])
    whole = sum(seconds.values())
    rows = [*largest[:lines_max], ("all others", others)]
    return [f"{own / whole:6.1%}  {own / count * 1e6:5.2f} µs a record  {name}" for name, own in rows]


def bytes_per_session(count: int) -> float:
    """Memory of a live session with count and mean, of so many with a key each, all that the store has counted in."""
    compile_kernels()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    columns = StateColumns([Count(), Mean("ms").bind(Click)])
    store = WindowStore("sessions", SessionWindows(GAP_MS, GRACE_MS).rule, columns, text_keys=True)
    for first in range(0, count, BULK):
        numbers = np.arange(first, min(first + BULK, count))
        codes = store.index.codes_of([b"user-%09d" % n for n in numbers.tolist()])
        store.take(1_700_000_000_000 + numbers, codes, *columns.take([Click(1)] * len(codes), numbers))
        store.committed()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(store) == count
    return (after - before) / count


async def run_peers(kafka: KafkaSettings, python: str, names: Sequence[str], count: int) -> dict[str, Figures]:
    """One round of each peer that `python` has, on a topic of their own."""
    topics = (PEERS_TOPIC, *(f"results-{module}" for module in PEERS.values()))
    async with Admin(kafka) as admin:
        await admin.create_topics([event_time_topic(topic, PARTITIONS) for topic in topics])
    await fill(kafka, count, PEERS_TOPIC)
    return await race(python, names, kafka.bootstrap_servers, count)


async def profile(count: int, kind: str) -> int:
    """Each of ours once under the profiler, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            async with Admin(kafka) as admin:
                await admin.create_topics([event_time_topic(TOPIC, PARTITIONS)])
            await fill(kafka, count)
            rest = ("--profile", "--servers", broker.bootstrap_servers, "--records", str(count), "--windows", kind)
            for contestant in CONTESTANTS:
                own = (sys.executable, "-m", "bench.sessions", "--one", contestant, *rest)
                if await (await asyncio.create_subprocess_exec(*own)).wait():
                    return 1
    return 0


async def run(
    count: int, rounds: int, kind: str, peers: tuple[str, Sequence[str], int] | None = None
) -> tuple[dict[str, Figures], dict[str, Figures]]:
    """Every contestant on one topic, `rounds` times in turns; and of sessions latencies by guarantee.

    `peers`: see `run_peers`.
    """
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            async with Admin(kafka) as admin:
                await admin.create_topics([event_time_topic(TOPIC, PARTITIONS)])
            await fill(kafka, count)
            arguments = ["--servers", broker.bootstrap_servers, "--records", str(count), "--windows", kind]
            figures = await best_of("bench.sessions", CONTESTANTS, arguments, rounds)
            if peers is not None:
                figures |= await run_peers(kafka, *peers)
            guarantees: tuple[Guarantee, ...] = ("at_least_once", "exactly_once") if kind == SESSION else ()
            return figures, {each: await latency(kafka, LATENCY_SECONDS, each) for each in guarantees}


def latency_holds(figures: dict[str, float]) -> bool:
    """Whether results came soon enough, and that at the rate that was asked for."""
    is_held = figures["offered_per_second"] >= RATE_HELD_MIN * RECORDS_PER_SECOND
    return is_held and figures["p99_ms"] <= P99_MS_MAX


def main() -> int:
    """Run, print, compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench sessions", description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--windows", choices=WINDOWS, default=SESSION)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the CPU time of ours goes, and end")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Bytewax and Quix Streams beside it, where they are installed",
    )
    parser.add_argument("--peers-python", metavar="PATH", default=sys.executable, help="the Python that has them")
    parser.add_argument("--peer-records", type=int, help="how many records each of them gets; default: a tenth")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--servers", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kafka = KafkaSettings(bootstrap_servers=given.servers)
        if given.profile:
            print(profiled(given.one, kafka, given.records, given.windows))
            return 0
        print(json.dumps(asyncio.run(contest(given.one, kafka, given.records, given.windows))))
        return 0
    if given.profile:
        return asyncio.run(profile(given.records, given.windows))
    if given.windows != SESSION:
        figures, _ = asyncio.run(run(given.records, given.rounds, given.windows))
        title = f"{given.windows} windows: {given.records:,} records, best of {given.rounds}"
        return report(title, figures, (), as_json=given.json)
    peer_records = given.peer_records or max(1, given.records // PEERS_SLOWER)
    found = available(given.peers_python) if given.peers else []
    peers = (given.peers_python, found, peer_records) if found else None
    figures, latencies = asyncio.run(run(given.records, given.rounds, SESSION, peers))
    size = bytes_per_session(SESSIONS)
    missed = size > SESSION_BYTES_MAX
    print(f"a live session of {SESSIONS:,}: {size:.0f} bytes (asked for: at most {SESSION_BYTES_MAX})")
    for guarantee, of in latencies.items():
        missed |= not latency_holds(of)
        rate, p50, p99 = f"{of['offered_per_second']:,.0f}", of["p50_ms"], of["p99_ms"]
        print(
            f"{guarantee}: at {rate} records/s (asked for: {RECORDS_PER_SECOND:,}) result after {p50:.0f} ms, "
            f"p99 {p99:.0f} ms (at most {P99_MS_MAX})"
        )
    title = f"{given.records:,} records, best of {given.rounds}"
    if given.peers:
        lines = absent(given.peers_python, found)
        if found:
            share = f"{peer_records / given.records:.0%} of ours, which are so much faster"
            lines.append(f"peers: one round of {peer_records:,} records each, {share}; rates are by what each took")
        print("\n".join(lines))
    more = {"bytes_per_session": size, "latency": latencies}
    return report(title, figures, WANTED, as_json=given.json, more=more) or int(missed)


if __name__ == "__main__":
    sys.exit(main())
