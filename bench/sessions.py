"""Session windows from Kafka to Kafka, compared with librdkafka's bare consume and Kafka Streams.

It uses one real embedded broker, and topics of four partitions with a day of clicks, one for each law of keys
(`_sessions_data`). Each contestant runs in its own process, in turns, and its best round counts. `confluent-kafka
consume` takes 10,000 messages at a time and leaves their values unread. `fetch` only reads columns. The others run a
stream worker with a session count (gap 30 min, grace 5 min). It writes closed sessions to a topic and its state to its
changelog, with a commit every 200 ms. `count` leaves values as bytes; `mean` also computes the mean of a field decoded
from the JSON. Time runs from the first restored task to the commit of all records. CPU is the process' own. The output
is checked: every record is in a closed session, in an open one, or late.

Kafka Streams counts the same sessions on the first records of each topic (`_kafka_streams`), in one round, after as
many for warm-up. Its time runs from the first measured record to the last. Bytewax and Quix Streams run too if an
environment has them (`_peers`). A missing peer is reported. With `--workers 2` the worker processes of `penstock
aggregator` share a topic of their own, and their CPU a record is compared with that of one worker
(`_sessions_workers`).

Two more figures: the memory of an open session with count and mean, among a million of them; and the latency from a
record's due time to its readable result, at 10,000 records a second (`_sessions_latency`). The exit status is 1 if a
figure misses its target, or if that rate was not held. With `--profile` each of Penstock's contestants runs once under
the profiler instead.

With `--windows tumbling` (30 min), `hopping` (1 h every 5 min, so that a record is in twelve) or `sliding` (difference
1 min, over 2,000 keys with as many records each) the same is measured for those windows, from Kafka to Kafka only. For
sliding windows the only check is that all results are written: the number of windows with a record depends on its
neighbours.
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
from typing import Any, NamedTuple

import msgspec
import numpy as np

from bench import _kafka_streams, _sessions_workers, consumer
from bench._peers import absent, available, race
from bench._session_peers import PEERS
from bench._sessions_data import BULK, GAP_MS, GRACE_MS, LAWS, PARTITIONS, fill, make_topic, topic_of
from bench._sessions_latency import RATE_HELD_MIN, RECORDS_PER_SECOND, latency
from bench._side_by_side import Figures, best_of, report
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, Mean
from penstock.shared.streams.compile_kernels import compile_kernels
from penstock.shared.streams.dsl.builder import GroupedStream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.task_context import Guarantee
from penstock.shared.streams.topology import Topology

COMMIT_INTERVAL_MS = 200
PROFILE_LINES = 30
PEERS_SLOWER = 10  # they get this many times fewer records, since they would take minutes
POLL_MS = 100
SESSIONS, SESSION_BYTES_MAX = 1_000_000, 150
FIRST_MS = 1_700_000_000_000
LATENCY_SECONDS = 8
P99_MS_MAX: dict[Guarantee, int] = {"at_least_once": 121, "exactly_once": 250}
DIFFERENCE_MS = 60_000
WORKERS_CPU_MAX = 1.15  # CPU a record of several worker processes over that of one
SESSION, HOPPING, SLIDING = "session", "hopping", "sliding"
WINDOWS: dict[str, Callable[[GroupedStream], WindowedGroup]] = {
    SESSION: lambda grouped: grouped.session_window(gap=GAP_MS, grace=GRACE_MS),
    "tumbling": lambda grouped: grouped.tumbling_window(size=GAP_MS, grace=GRACE_MS),
    HOPPING: lambda grouped: grouped.hopping_window(size=2 * GAP_MS, advance=GRACE_MS, grace=GRACE_MS),
    SLIDING: lambda grouped: grouped.sliding_window(difference=DIFFERENCE_MS, grace=GRACE_MS),
}
PER_RECORD = {SESSION: 1, "tumbling": 1, HOPPING: 2 * GAP_MS // GRACE_MS}
"""The number of windows that contain a record, if it is fixed."""
LAWS_OF = {SESSION: ("zipf", "power"), "tumbling": ("zipf",), HOPPING: ("zipf",), SLIDING: ("even",)}
"""The laws of keys that each kind of window is measured with, unless `--keys` names one."""
CONSUME, FETCH, KAFKA_STREAMS = "confluent-kafka consume", "fetch", "kafka streams"
OURS = ("at_least_once count", "exactly_once count", "at_least_once mean", "exactly_once mean")


def row(what: str, law: str) -> str:
    """A contestant's name.

    >>> row("fetch", "zipf")
    'fetch, zipf keys'
    """
    return f"{what}, {law} keys"


def parts_of(row: str) -> tuple[str, str]:
    """The kind of a contestant, and the law of its keys.

    >>> parts_of("at_least_once count, power keys")
    ('at_least_once count', 'power')
    """
    what, _, law = row.removesuffix(" keys").partition(", ")
    return what, law


def contestants(laws: Sequence[str]) -> list[str]:
    """All contestants that run in turns. Those that only read run on the first law's topic.

    >>> contestants(["power"])[:3]
    ['confluent-kafka consume, power keys', 'fetch, power keys', 'at_least_once count, power keys']
    """
    return [row(what, laws[0]) for what in (CONSUME, FETCH)] + [row(what, law) for law in laws for what in OURS]


WANTED = (
    (row("at_least_once count", "zipf"), row(CONSUME, "zipf"), 1.8),
    (row("exactly_once count", "zipf"), row(CONSUME, "zipf"), 1.7),
    (row("at_least_once count", "power"), row(f"{KAFKA_STREAMS} at_least_once count", "power"), 45.0),
    (row("exactly_once count", "power"), row(f"{KAFKA_STREAMS} exactly_once count", "power"), 70.0),
)
"""For session windows: the minimum ratio of the first contestant's rate to the second's."""
RATES_WANTED = {
    SESSION: {row("at_least_once mean", "zipf"): 1_300_000},
    HOPPING: {row("at_least_once count", "zipf"): 400_000},
    SLIDING: {row("at_least_once count", "even"): 500_000},
}
"""The target rates in records a second, by the kind of window."""


class Click(msgspec.Struct):
    """The field of a value that the mean needs. The rest of the JSON is skipped."""

    ms: int


def topology(topic: str, results: str, kind: str, *, mean: bool) -> Topology:
    """Windows by key, to the topic `results`."""
    builder = StreamsBuilder()
    grouped = builder.stream(topic, value=Click if mean else bytes).group_by_key()
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


def consume(kafka: KafkaSettings, topic: str, count: int) -> Figures:
    """librdkafka's messages with unread values: the upper limit for a Python consumer on top of it."""
    seen, _, wall, cpu = consumer.confluent(kafka.bootstrap_servers, count, topic, unread=True)
    if seen != count:
        raise SystemExit(f"confluent-kafka consumed {seen} records instead of {count}")
    return {"records_per_second": count / wall, "cpu_us_per_record": cpu / count * 1e6}


async def fetch(kafka: KafkaSettings, topic: str, count: int) -> Figures:
    """Only fetch the records as columns."""
    settings = ConsumerSettings(auto_offset_reset="earliest", max_poll_records=None)
    async with Consumer(kafka, settings) as consumer:
        watch, seen = Stopwatch(), 0
        watch.start()
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        while seen < count:
            seen += sum(map(len, (await consumer.poll(POLL_MS)).values()))
        return watch.figures(count)


async def windowed(
    kafka: KafkaSettings, topic: str, count: int, guarantee: Any, kind: str, *, mean: bool, keep: str
) -> Figures:
    """Run the stream worker until all is committed. `keep` distinguishes this round's topics from others'."""
    settings = StreamsSettings(
        application_id=f"bench-{keep}",
        processing_guarantee=guarantee,
        commit_interval_ms=COMMIT_INTERVAL_MS,
        replication_factor=1,
    )
    results = f"results-{keep}"
    await make_topic(kafka, results)
    watch = Stopwatch()
    worker = StreamWorker(
        kafka, settings, topology(topic, results, kind, mean=mean), on_task=lambda task: watch.start()
    )
    await worker.startup()
    try:
        while not _all_committed(worker, count):
            await worker.run_once()
        figures = watch.figures(count)
        tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
        counted = 0 if kind == SESSION else 1  # after the time of the latest record
        live = sum(s.states[counted] for task in tasks for s in task.stores["sessions"].rows())
        missed = [t.metrics.late_total if kind == SESSION else t.metrics.missed_windows_total for t in tasks]
        figures["windows_closed"] = sum(task.metrics.closed_total for task in tasks)
    finally:
        await worker.shutdown()
    windows, closed = await _results_in(kafka, results, int(figures["windows_closed"]))
    if windows != figures["windows_closed"]:
        raise SystemExit(f"{windows} windows were written, of {figures['windows_closed']:.0f} that closed")
    if kind in PER_RECORD and closed + live + sum(missed) != count * PER_RECORD[kind]:
        raise SystemExit(f"{closed} counted in closed windows, {live} in open ones, {sum(missed)} late: not {count}")
    return figures


def _all_committed(worker: StreamWorker, count: int) -> bool:
    return sum(o.task.metrics.committed.records for o in worker.tasks().values() if o.task is not None) >= count


async def _results_in(kafka: KafkaSettings, topic: str, windows: int) -> tuple[int, int]:
    """The number of windows written to a topic, after waiting for `windows` of them, and of the records in them."""
    settings = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None)
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    async with Consumer(kafka, settings) as consumer:
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        seen = records = 0
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + 20_000
        while seen < windows and SYSTEM_CLOCK.monotonic_ms() < deadline_ms:
            for columns in (await consumer.poll(POLL_MS)).values():
                seen += len(columns)
                records += sum(decode(value or b"")["n"] for value in columns.values)
    return seen, records


async def contest(contestant: str, kafka: KafkaSettings, count: int, kind: str) -> Figures:
    """One round of one contestant."""
    what, law = parts_of(contestant)
    topic = topic_of(law)
    if what == CONSUME:
        return consume(kafka, topic, count)
    if what == FETCH:
        return await fetch(kafka, topic, count)
    guarantee, aggregations = what.split()
    keep = f"{guarantee}-{aggregations}-{time.time_ns()}".replace("_", "-")
    return await windowed(kafka, topic, count, guarantee, kind, mean=aggregations == "mean", keep=keep)


def profiled(contestant: str, kafka: KafkaSettings, count: int, kind: str) -> str:
    """One round under the profiler: each function's own time, and each file's share of the total."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(lambda: asyncio.run(contest(contestant, kafka, count, kind)))
    stats = pstats.Stats(profiler, stream=text)
    stats.sort_stats("tottime").print_stats(PROFILE_LINES)
    own: dict[str, float] = {}
    for (file, _, _), row in stats.stats.items():  # type: ignore[attr-defined]
        name = Path(file).name if Path(file).is_file() else "built in: numpy, msgspec, Cython, sockets"
        own[name] = own.get(name, 0.0) + row[2]
    return "\n".join([f"{contestant}, {count:,} records:", text.getvalue(), *shares(own, count, PROFILE_LINES)])


def shares(seconds: dict[str, float], count: int, lines_max: int) -> list[str]:
    """Each name's share of the total time, the largest first. The last line is the sum of all others.

    >>> shares({"a.py": 1.0, "b.py": 2.0, "c.py": 0.5, "d.py": 0.5}, 1_000_000, 2)
    [' 50.0%   2.00 µs a record  b.py', ' 25.0%   1.00 µs a record  a.py', ' 25.0%   1.00 µs a record  all others']
    """
    largest = sorted(seconds.items(), key=lambda each: -each[1])
    others = sum(own for _, own in largest[lines_max:])
    whole = sum(seconds.values())
    rows = [*largest[:lines_max], ("all others", others)]
    return [f"{own / whole:6.1%}  {own / count * 1e6:5.2f} µs a record  {name}" for name, own in rows]


def bytes_per_session(count: int) -> float:
    """Memory of an open session with count and mean, for `count` sessions: all that a task keeps after commits."""
    compile_kernels()
    task = StreamTask(topology("clicks", "sessions", SESSION, mean=True), 0, application="bench")
    task.initialize(FIRST_MS)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for first in range(0, count, BULK):
        numbers = np.arange(first, min(first + BULK, count))
        keys: list[bytes | None] = [b"user-%09d" % n for n in numbers.tolist()]
        task.process(Columns("clicks", 0, keys, [b'{"ms":1}'] * len(keys), FIRST_MS + numbers, numbers), FIRST_MS)
        del keys  # so that the last bulk's are not counted
        task.prepare_commit(FIRST_MS)
        task.commit_succeeded()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(task.stores["sessions"]) == count
    return (after - before) / count


class Beside(NamedTuple):
    """The peers to run: the Python that has them, their names, the number of records, and of worker processes."""

    python: str
    peers: Sequence[str]
    records: int
    workers: int


async def run_peers(kafka: KafkaSettings, beside: Beside, law: str, count: int) -> dict[str, Figures]:
    """One round of each Python peer, on the first records."""
    if not beside.peers:
        return {}
    topic = f"{topic_of(law)}-peers"
    for each in (topic, *(f"results-{module}" for module in PEERS.values())):
        await make_topic(kafka, each)
    await fill(kafka, count, law, topic, beside.records)
    return await race(beside.python, beside.peers, kafka.bootstrap_servers, topic, beside.records)


async def run_kafka_streams(kafka: KafkaSettings, law: str, count: int, records: int) -> dict[str, Figures]:
    """One round of Kafka Streams under each guarantee, on the first records, after as many for warm-up."""
    launch, topic = await _kafka_streams.launcher(), f"{topic_of(law)}-kafka-streams"
    if isinstance(launch, str):
        print(f"{row(KAFKA_STREAMS, law)}: not measured: {launch}", file=sys.stderr)
        return {}
    await make_topic(kafka, topic)
    await fill(kafka, count, law, topic, 2 * records)
    figures: dict[str, Figures] = {}
    for guarantee in _kafka_streams.GUARANTEES:
        name = row(f"{KAFKA_STREAMS} {guarantee} count", law)
        await make_topic(kafka, _kafka_streams.results_of(name))
        given = (launch, kafka.bootstrap_servers, topic, guarantee, COMMIT_INTERVAL_MS, records)
        if (of := await _kafka_streams.session_count(name, *given)) is not None:
            figures[name] = of
    return figures


async def run_workers(kafka: KafkaSettings, workers: int, count: int, rounds: int) -> dict[str, Figures]:
    """One worker process and `workers` of them, `rounds` times in turns. The round with the least CPU counts."""
    best: dict[str, Figures] = {}
    for _ in range(rounds):
        for number in (1, workers):
            figures = await _sessions_workers.session_count(kafka, number, count, "zipf", COMMIT_INTERVAL_MS)
            known = best.get(workers_row(number))
            if known is None or figures["cpu_us_per_record"] < known["cpu_us_per_record"]:
                best[workers_row(number)] = figures
    return best


def workers_row(number: int) -> str:
    """The name of a contestant with this number of worker processes.

    >>> workers_row(2)
    'at_least_once count, --workers 2, zipf keys'
    """
    return row(f"at_least_once count, --workers {number}", "zipf")


async def profile(count: int, kind: str, laws: Sequence[str]) -> int:
    """Profile each of Penstock's contestants once, in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            await fill_topics(kafka, count, laws)
            rest = ("--profile", "--servers", broker.bootstrap_servers, "--records", str(count), "--windows", kind)
            for contestant in contestants(laws)[1:]:  # the first one is not Penstock's
                own = (sys.executable, "-m", "bench.sessions", "--one", contestant, *rest)
                if await (await asyncio.create_subprocess_exec(*own)).wait():
                    return 1
    return 0


async def fill_topics(kafka: KafkaSettings, count: int, laws: Sequence[str]) -> None:
    """Write a topic with all records for each law."""
    for law in laws:
        await make_topic(kafka, topic_of(law))
        await fill(kafka, count, law, topic_of(law))


async def run(
    count: int, rounds: int, kind: str, laws: Sequence[str], beside: Beside | None = None
) -> tuple[dict[str, Figures], dict[Guarantee, Figures]]:
    """Run every contestant `rounds` times in turns, then the peers; for sessions also the latencies by guarantee."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            await fill_topics(kafka, count, laws)
            arguments = ["--servers", broker.bootstrap_servers, "--records", str(count), "--windows", kind]
            figures = await best_of("bench.sessions", contestants(laws), arguments, rounds)
            if beside is not None and beside.records:
                for law in laws:
                    figures |= await run_kafka_streams(kafka, law, count, beside.records)
                figures |= await run_peers(kafka, beside, laws[0], count)
            if beside is not None and beside.workers > 1:
                figures |= await run_workers(kafka, beside.workers, count, rounds)
            guarantees: tuple[Guarantee, ...] = ("at_least_once", "exactly_once") if kind == SESSION else ()
            return figures, {each: await latency(kafka, LATENCY_SECONDS, each) for each in guarantees}


def latency_holds(guarantee: Guarantee, figures: dict[str, float]) -> bool:
    """Whether the latency is below its limit, and the target rate was held."""
    is_held = figures["offered_per_second"] >= RATE_HELD_MIN * RECORDS_PER_SECOND
    return is_held and figures["p99_ms"] <= P99_MS_MAX[guarantee]


def workers_missed(figures: dict[str, Figures], workers: int) -> bool:
    """Print the ratio of CPU a record of several workers to one; return whether it is too high."""
    one, several = (figures[workers_row(number)]["cpu_us_per_record"] for number in (1, workers))
    print(f"CPU a record, --workers {workers} / --workers 1: {several / one:.2f} (at most {WORKERS_CPU_MAX})")
    return several / one > WORKERS_CPU_MAX


def main() -> int:
    """Run, print and compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench sessions", description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--windows", choices=WINDOWS, default=SESSION)
    parser.add_argument("--keys", choices=LAWS, help="one law of keys (default: the laws of the kind of window)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="only profile the CPU time of Penstock's contestants")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also run Kafka Streams, and Bytewax and Quix Streams if they are installed",
    )
    parser.add_argument("--peers-python", metavar="PATH", default=sys.executable, help="the Python with these two")
    parser.add_argument("--peer-records", type=int, help="records for each peer (default: a tenth)")
    parser.add_argument(
        "--workers", type=int, choices=(1, 2, 4), default=2, help="worker processes to compare with one; 1: do not"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--servers", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        kafka = KafkaSettings(bootstrap_servers=given.servers)
        if given.profile:
            print(profiled(given.one, kafka, given.records, given.windows))
            return 0
        print(json.dumps(asyncio.run(contest(given.one, kafka, given.records, given.windows))))
        return 0
    laws = LAWS_OF[given.windows] if given.keys is None else (given.keys,)
    if given.profile:
        return asyncio.run(profile(given.records, given.windows, laws))
    rates = RATES_WANTED.get(given.windows, {})
    if given.windows != SESSION:
        figures, _ = asyncio.run(run(given.records, given.rounds, given.windows, laws))
        title = f"{given.windows} windows: {given.records:,} records, best of {given.rounds}"
        return report(title, figures, (), rates=rates, as_json=given.json)
    peer_records = (given.peer_records or max(1, given.records // PEERS_SLOWER)) if given.peers else 0
    found = available(given.peers_python) if given.peers else []
    beside = Beside(given.peers_python, found, peer_records, given.workers)
    figures, latencies = asyncio.run(run(given.records, given.rounds, SESSION, laws, beside))
    size = bytes_per_session(SESSIONS)
    missed = size > SESSION_BYTES_MAX
    print(f"an open session of {SESSIONS:,}: {size:.0f} bytes (target: at most {SESSION_BYTES_MAX})")
    for guarantee, of in latencies.items():
        missed |= not latency_holds(guarantee, of)
        rate, p50, p99 = f"{of['offered_per_second']:,.0f}", of["p50_ms"], of["p99_ms"]
        print(
            f"{guarantee}: at {rate} records/s (target: {RECORDS_PER_SECOND:,}) result after {p50:.0f} ms, "
            f"p99 {p99:.0f} ms (at most {P99_MS_MAX[guarantee]})"
        )
    if given.peers:
        share = f"{peer_records / given.records:.0%} of ours, which are so much faster"
        lines = absent(given.peers_python, found)
        lines.append(
            f"peers: one round of the first {peer_records:,} records each, {share}; rates are by what each took"
        )
        print("\n".join(lines))
    title = f"{given.records:,} records, best of {given.rounds}"
    if given.workers > 1:
        missed |= workers_missed(figures, given.workers)
    more = {"bytes_per_session": size, "latency": latencies}
    return report(title, figures, WANTED, rates=rates, as_json=given.json, more=more) or int(missed)


if __name__ == "__main__":
    sys.exit(main())
