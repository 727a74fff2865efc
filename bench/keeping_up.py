"""Whether compaction keeps up with the engine: an aggregator at a steady rate, with compactions beside it.

It uses one embedded broker, one `penstock aggregator` with a session count and a lake, and a producer in this process
that sends at a fixed rate. Every 15 s it samples the aggregator's lag, the changelog's length, the snapshot's age and
the aggregator's memory. It also samples the share of a core that the broker, the aggregator, its compactions (JVM and
Python workers) and the producer use. The exit status is 1 if the rate was not held, if the aggregator was more than
LAG_MAX_S behind, or if the second half is not flat: its longest changelog, its oldest snapshot or its memory is more
than FLAT_MAX times that of the first half.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench._processes import Process, processes
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.lake import compaction_history
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import RecordColumns, TopicPartition
from penstock.shared.common.settings import KafkaSettings

APPLICATION, TOPIC, PARTITIONS = "keeping-up", "clicks", 4
KEYS, ACTIVE = 80_000, 4  # one in ACTIVE keys is active at a time
ACTIVE_MS = 3_600_000
VALUE = b'{"n": 1}'
GAP_MS = 1_800_000
TURN_S, TURN_MS = 0.1, 20_000  # event time advances by TURN_MS in each turn of TURN_S
SAMPLE_S = 15
INTERVAL_MS = 30_000
FLAT_MAX, HELD_MIN, LAG_MAX_S = 1.3, 0.95, 5.0
START_S = 60.0
MODULE = f"""
from penstock import Count, StreamsBuilder

def topology():
    builder = StreamsBuilder()
    windows = builder.stream({TOPIC!r}).group_by_key().session_window(gap={GAP_MS}, grace=60_000)
    windows.aggregate("visits", n=Count()).on_close().to("visits")
    return builder.build()
"""


class Sample(NamedTuple):
    """The measurements at one moment: records, seconds, KiB, and CPU seconds by part since the start.

    `lag` is the number of records that the aggregator has not committed.
    """

    seconds: float
    sent: int
    lag: int
    changelog_records: int
    snapshot_age_s: float
    aggregator_kib: int
    cpu_s: dict[str, float]


class CpuByPart:
    """CPU seconds of this process and its descendants, ended ones included, by part.

    Compactions are the aggregator's child processes. No process waits for Spark's own children, so their CPU time must
    be read while they run: call `look` often.
    """

    def __init__(self, aggregator: int) -> None:
        self._aggregator = aggregator
        self._seen: dict[int, tuple[str, float]] = {}

    def look(self) -> None:
        found = processes()
        for pid, process in found.items():
            if (part := self._part(pid, found)) is not None:
                self._seen[pid] = part, process.own_s

    def totals(self) -> dict[str, float]:
        totals = dict.fromkeys(("broker", "aggregator", "compaction", "producer"), 0.0)
        for part, seconds in self._seen.values():
            totals[part] += seconds
        return totals

    def _part(self, pid: int, found: dict[int, Process]) -> str | None:
        if pid == os.getpid():
            return "producer"
        above = pid
        while above in found:
            if above == self._aggregator:
                return "aggregator" if pid == above else "compaction"
            if above == os.getpid():
                return "broker"
            above = found[above].parent
        return None


def turn(nth: int, records: int) -> RecordColumns:
    """One turn's records: of the active keys, with times slightly out of order."""
    random = np.random.default_rng(nth)
    now_ms = nth * TURN_MS + ACTIVE_MS
    own = random.integers(0, KEYS // ACTIVE, records) * ACTIVE + now_ms // ACTIVE_MS % ACTIVE
    keys = np.char.encode(np.char.zfill(own.astype("U"), 8)).view(np.uint8)
    times = now_ms + random.integers(0, TURN_MS, records)
    values = PackedBytes.of_width(np.tile(np.frombuffer(VALUE, np.uint8), records), len(VALUE))
    return RecordColumns(TOPIC, PackedBytes.of_width(np.ascontiguousarray(keys), 8), values, times, None)


async def send(kafka: KafkaSettings, rate: int, seconds: float, sent: list[int]) -> None:
    """Send at the rate. `sent` counts the acknowledged records."""
    records = int(rate * TURN_S)
    async with Producer(kafka, ProducerSettings(linger_ms=5, batch_size=256 * 1024)) as producer:
        started = time.monotonic()
        for nth in range(int(seconds / TURN_S)):
            delivery = await producer.send_many(turn(nth, records))
            if (error := await delivery.first_error()) is not None:
                raise error
            sent[0] += records
            await asyncio.sleep(max(0.0, started + (nth + 1) * TURN_S - time.monotonic()))


async def sample(
    admin: Admin, folder: str, aggregator: int, started: float, sent: int, cpu_s: dict[str, float]
) -> Sample:
    changelog = f"{APPLICATION}-changelog"
    partitions = [TopicPartition(changelog, p) for p in range(PARTITIONS)]
    first = await admin.list_offsets(dict.fromkeys(partitions, "earliest"))
    last = await admin.list_offsets(dict.fromkeys(partitions, "latest"))
    records = sum(last[at] - first[at] for at in partitions)
    committed = sum(at.offset for at in (await admin.group_offsets(APPLICATION)).values())
    newest = await asyncio.to_thread(compaction_history.read_compactions, folder, APPLICATION, 1)
    age_s = time.time() - newest[0].ended_at_ms / 1000 if newest else time.monotonic() - started
    status = await asyncio.to_thread(Path(f"/proc/{aggregator}/status").read_text)
    kib = int(status.partition("VmRSS:")[2].split()[0])
    lag = max(0, sent - committed)
    return Sample(time.monotonic() - started, sent, lag, records, age_s, kib, cpu_s)


async def until_it_has_started(admin: Admin, aggregator: asyncio.subprocess.Process) -> None:
    """Wait until the aggregator has its changelog and its partitions."""
    async with asyncio.timeout(START_S):
        while (
            f"{APPLICATION}-changelog" not in await admin.list_topics()
            or not (await admin.describe_group(APPLICATION)).members
        ):
            assert aggregator.returncode is None
            await asyncio.sleep(0.2)


async def run(rate: int, minutes: float, work: Path) -> list[Sample]:
    (work / "keeping.py").write_text(MODULE)
    async with EmbeddedKafka(work / "kafka") as broker:
        kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
        async with Admin(kafka) as admin:
            old_times = {"retention.ms": "-1", "segment.bytes": str(256 * 1024 * 1024), "retention.bytes": "1000000000"}
            await admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, old_times), NewTopic("visits", PARTITIONS)])
            flags = {
                "topology": "keeping:topology",
                "kafka.bootstrap-servers": broker.bootstrap_servers,
                "streams.application-id": APPLICATION,
                "streams.lake": str(work / "lake"),
                "compaction.interval-ms": str(INTERVAL_MS),
                "http.port": "0",
            }
            command = [sys.executable, "-m", "penstock.services.cli", "aggregator"]
            command += [f"--{name}={value}" for name, value in flags.items()]
            with (work / "aggregator.log").open("wb") as log:
                aggregator = await asyncio.create_subprocess_exec(*command, cwd=work, stdout=log, stderr=log)
            try:
                await until_it_has_started(admin, aggregator)
                cpu, sent, started = CpuByPart(aggregator.pid), [0], time.monotonic()
                sending = asyncio.create_task(send(kafka, rate, minutes * 60, sent))
                samples = []
                while not sending.done():
                    for _ in range(SAMPLE_S):
                        await asyncio.wait({sending}, timeout=1.0)
                        cpu.look()
                    where = (admin, str(work / "lake"), aggregator.pid)
                    samples.append(await sample(*where, started, sent[0], cpu.totals()))
                    print(samples[-1], flush=True)
                await sending
                dead_letters = await admin.list_offsets({TopicPartition(f"{TOPIC}-dlq", 0): "latest"})
                assert not any(dead_letters.values()), dead_letters
                return samples
            finally:
                aggregator.terminate()
                await aggregator.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench keeping_up", description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", type=int, default=500_000, help="records a second")
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="keeping-up-") as work:
        samples = asyncio.run(run(arguments.rate, arguments.minutes, Path(work)))
    return report(samples, arguments.rate)


def report(samples: list[Sample], rate: int) -> int:
    """Print the shares of a core and both halves; return the exit status."""
    begin, end = samples[1], samples[-1]
    seconds = end.seconds - begin.seconds
    held = (end.sent - begin.sent) / seconds / rate
    print(f"rate held: {held:.2f} of {rate:,} records/s")
    for part in end.cpu_s:
        print(f"{part}: {(end.cpu_s[part] - begin.cpu_s[part]) / seconds:.2f} of a core")
    half = len(samples) // 2
    lag_s = max(one.lag for one in samples[1:]) / rate
    print(f"maximum lag of the aggregator: {lag_s:.1f} s")
    status = int(held < HELD_MIN or lag_s > LAG_MAX_S)
    for name in ("changelog_records", "snapshot_age_s", "aggregator_kib"):
        first, second = (max(getattr(one, name) for one in part) for part in (samples[1:half], samples[half:]))
        flat = second <= FLAT_MAX * first
        status |= not flat
        verdict = "flat" if flat else "GROWS"
        print(f"{name}: at most {first:,.0f} in the first half, {second:,.0f} in the second: {verdict}")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
