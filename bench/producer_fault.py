"""One partition of four answers NOT_ENOUGH_REPLICAS for 5 s: the throughput of the other three.

The fake broker runs in the same process, and on the same processor, as the producer in every window. So senders at full
speed show little: one that is blocked leaves the others its share of the processor. The load that counts therefore has
headroom. First the full rate of four tasks, one for each partition, is measured. Then each task offers 60 % of that
rate. For partitions 1 to 3, the share of the offered records that is acknowledged within the window is measured, and
the p99 latency from a record's due time. The windows follow each other in turns, and the best of each kind counts:
without the fault; with it; and without a sender for partition 0, which is the upper limit for the other three. Both
ratios count for the exit status. It is also 1 if the failing partition did not fill its half of the buffer within the
window: a shorter fault, or smaller records, would end before anything is blocked.

The same at full speed is printed too: with a task for each partition, and with one task that sends to all four in turn.
That one has to wait itself once partition 0 has filled its share of the buffer. At the end of each window every record
of every partition must be in the log once, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Literal, NamedTuple

from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster

TOPIC = "bench"
PARTITIONS = 4
FAULT_SECONDS = 5.0
RATIO_WANTED = 0.9
VALUE = b"x" * 592 + b"%08d"
BUFFER_BYTES = ProducerSettings().buffer_memory
FULL_AFTER = 0.4
"""The part of the window after which the failing partition must have filled its half of the buffer.

If the load is too small for that, as on a busy machine, the buffer is made smaller in every window with that load.
"""
BUFFER_BYTES_MIN = 2 * PARTITIONS * ProducerSettings().batch_size
"""Half of this buffer has a batch of each partition. In a smaller one the failing partition could leave the others no
memory at all."""
AT_A_TIME = 50
LOOK_EVERY_SECONDS = 0.05

OFFERED_SHARE = 0.6
"""The offered share of the full rate. It leaves room for the cost of the fault itself."""

Senders = Literal["one each", "none for the first", "one for all"]


class Window(NamedTuple):
    """The acknowledged records per second of partitions 1 to 3 in a window, and their p99 latency; the maximum of
    used buffer bytes, and of sends that waited for buffer memory."""

    per_second: float
    p99_ms: float
    taken_bytes: float = 0.0
    waiting: float = 0.0


class Log:
    """Counts the acknowledged records of each partition, and times the last record of each group sent at once.

    Senders send until the window is `over`.
    """

    def __init__(self) -> None:
        self.over = False
        self.acknowledged = [0] * PARTITIONS
        self.latencies_ms: list[float] = []

    async def send_some(self, producer: Producer, partition: int, first: int, due: float) -> int:
        """Send a few records with the due time `due` to one partition; return their number."""

        def on_delivery(metadata: object, error: Exception | None) -> None:
            assert error is None, error
            self.acknowledged[partition] += 1

        def on_last(metadata: object, error: Exception | None) -> None:
            on_delivery(metadata, error)
            if partition:
                self.latencies_ms.append((time.perf_counter() - due) * 1000)

        for number in range(first, first + AT_A_TIME):
            callback = on_last if number == first + AT_A_TIME - 1 else on_delivery
            await producer.send(TOPIC, VALUE % number, partition=partition, on_delivery=callback)
        return AT_A_TIME

    async def send_to(self, producer: Producer, partition: int, rate: float | None) -> int:
        """Send to one partition until the window is over, at `rate` a second or at full speed; return the number."""
        sent, due = 0, time.perf_counter()
        while not self.over:
            sent += await self.send_some(producer, partition, sent, due)
            due = time.perf_counter() if rate is None else due + AT_A_TIME / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return sent

    async def send_to_all(self, producer: Producer) -> list[int]:
        """Send to every partition in turn until the window is over; return the number of records for each."""
        sent = [0] * PARTITIONS
        while not self.over:
            now = time.perf_counter()
            for partition in range(PARTITIONS):
                sent[partition] += await self.send_some(producer, partition, sent[partition], now)
            await asyncio.sleep(0)
        return sent


class Watched(NamedTuple):
    """The length of a window, the maximum of used buffer bytes, and the maximum of sends that waited for memory."""

    seconds: float
    taken_bytes: float
    waiting: float


async def watched(
    producer: Producer, log: Log, sending: asyncio.Future[list[int]], seconds: float, buffer_bytes: int
) -> Watched:
    """Wait for the end of the window: its time is up, and partitions 1 to 3 each have an acknowledged record.

    On a busy machine the first acknowledgements may take longer than a short window. If a partition gets none, the
    senders fail with BufferExhausted, which also ends the window.
    """
    taken, waiting, start = 0.0, 0.0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or not (all(log.acknowledged[1:]) or sending.done()):
        left = seconds - passed
        await asyncio.sleep(min(left, LOOK_EVERY_SECONDS) if left > 0 else LOOK_EVERY_SECONDS)
        figures = producer.metrics()
        taken = max(taken, buffer_bytes - figures["buffer_available_bytes"])
        waiting = max(waiting, figures["buffer_waiting"])
    return Watched(passed, taken, waiting)


async def window(
    seconds: float, senders: Senders, *, fault: bool, rate: float | None = None, buffer_bytes: int = BUFFER_BYTES
) -> Window:
    """One window. With `rate` each task offers that many records a second."""
    log, settings = Log(), ProducerSettings(buffer_memory=buffer_bytes)
    async with FakeCluster() as cluster:
        cluster.create_topic(TOPIC, partitions=PARTITIONS)
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), settings) as producer:
            await asyncio.gather(*(producer.send(TOPIC, b"first", partition=p) for p in range(PARTITIONS)))
            await producer.flush()
            rejection = Fail(ErrorCode.NOT_ENOUGH_REPLICAS, partitions=[TopicPartition(TOPIC, 0)])
            control = cluster.control(Api.PRODUCE, rejection) if fault else None
            if senders == "one for all":
                sending: asyncio.Future[list[int]] = asyncio.ensure_future(log.send_to_all(producer))
            else:
                first = 1 if senders == "none for the first" else 0
                sending = asyncio.gather(*(log.send_to(producer, p, rate) for p in range(first, PARTITIONS)))
            seen = await watched(producer, log, sending, seconds, buffer_bytes)
            log.over = True
            healthy = sum(log.acknowledged[1:]) / seen.seconds
            latencies_ms = sorted(log.latencies_ms) or [seen.seconds * 1000]
            if control is not None:
                control.remove()
            sent = await sending
            await producer.flush()
            for partition, count in enumerate(sent, PARTITIONS - len(sent)):
                values = [record.value for record in cluster.records(TOPIC, partition)][1:]
                assert values == [VALUE % i for i in range(count)], (
                    f"partition {partition}: lost, doubled, or disordered"
                )
    return Window(healthy, latencies_ms[int(0.99 * (len(latencies_ms) - 1))], seen.taken_bytes, seen.waiting)


WINDOWS: dict[str, tuple[Senders, bool]] = {
    "without_fault": ("one each", False),
    "with_fault": ("one each", True),
    "first_idle": ("none for the first", False),
}
FREE: dict[str, tuple[Senders, bool]] = {
    **{f"free_{name}": kind for name, kind in WINDOWS.items()},
    "free_one_task_without_fault": ("one for all", False),
    "free_one_task_with_fault": ("one for all", True),
}
COUNTED = {"ratio": ("with_fault", "without_fault"), "ratio_to_idle": ("with_fault", "first_idle")}
RATIOS = {
    **COUNTED,
    "free_ratio": ("free_with_fault", "free_without_fault"),
    "free_ratio_to_idle": ("free_with_fault", "free_first_idle"),
    "free_one_task_ratio": ("free_one_task_with_fault", "free_one_task_without_fault"),
}


async def measure(seconds: float, rounds: int) -> dict[str, float]:
    """The best of each window in records per second, under load also its share and p99, and the ratios."""
    best = dict.fromkeys((*FREE, *WINDOWS), Window(0.0, 0.0))
    for _ in range(rounds):
        for name, (senders, fault) in FREE.items():
            best[name] = max(best[name], await window(seconds, senders, fault=fault))
    rate = OFFERED_SHARE * best["free_without_fault"].per_second / (PARTITIONS - 1)
    buffer = min(BUFFER_BYTES, max(BUFFER_BYTES_MIN, int(2 * rate * len(VALUE) * seconds * FULL_AFTER)))
    for _ in range(rounds):
        for name, (senders, fault) in WINDOWS.items():
            got = await window(seconds, senders, fault=fault, rate=rate, buffer_bytes=buffer)
            best[name] = max(best[name], got)
    offered = rate * (PARTITIONS - 1)
    figures = {f"{name}_per_second": best[name].per_second for name in FREE} | {"offered_per_second": offered}
    for name in WINDOWS:
        figures |= {f"{name}_share": best[name].per_second / offered, f"{name}_p99_ms": best[name].p99_ms}
    ratios = {name: best[over].per_second / best[under].per_second for name, (over, under) in RATIOS.items()}
    held = {
        "buffer_mib": buffer / 2**20,
        "with_fault_taken_mib": best["with_fault"].taken_bytes / 2**20,
        "with_fault_waiting": best["with_fault"].waiting,
    }
    return {**figures, **held, **ratios, "ratio_wanted": RATIO_WANTED}


def main() -> int:
    """Measure, print and compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench producer_fault", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FAULT_SECONDS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = asyncio.run(measure(given.seconds, given.rounds))
    for name, value in figures.items():
        print(f"{name:<36} {value:>12,.2f}")
    if given.json:
        print(json.dumps(figures))
    if not figures["with_fault_waiting"]:
        print("the failing partition never filled its half of the buffer: the load was too small", file=sys.stderr)
        return 1
    return 0 if min(figures[name] for name in COUNTED) >= RATIO_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
