"""One partition of four answers NOT_ENOUGH_REPLICAS for 5 s: what the other three still get through.

On the fake broker, which runs in the same process in every window. Four tasks send as fast as they can, one to each
partition; counted are the records of partitions 1 to 3 that were acknowledged within the window. The windows follow
each other in turns, and the best of each kind counts: without the fault; with it; and without a sender for partition 0,
which is what the other three could get at most, since a sender that is held up leaves them its share of the processor.
Then the same with one task that sends to all four in turn, which has to wait itself once partition 0 has its share of
the buffer. At the end of each window every record of every partition must be in the log once, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Literal

from shared.clients.producer import Producer, ProducerSettings
from shared.common.records import TopicPartition
from shared.common.settings import KafkaSettings
from shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster

TOPIC = "bench"
PARTITIONS = 4
FAULT_SECONDS = 5.0
RATIO_WANTED = 0.9
VALUE = b"x" * 92 + b"%08d"
AT_A_TIME = 50

Senders = Literal["one each", "none for the first", "one for all"]


async def send_some(producer: Producer, partition: int, first: int, acknowledged: list[int]) -> int:
    """Send a few records to one partition; gives how many."""

    def on_delivery(metadata: object, error: Exception | None) -> None:
        assert error is None, error
        acknowledged[partition] += 1

    for number in range(first, first + AT_A_TIME):
        await producer.send(TOPIC, VALUE % number, partition=partition, on_delivery=on_delivery)
    return AT_A_TIME


async def send_to(producer: Producer, partition: int, until: float, acknowledged: list[int]) -> int:
    """Send to one partition until the time is up; gives how many records were handed over."""
    sent = 0
    while time.perf_counter() < until:
        sent += await send_some(producer, partition, sent, acknowledged)
        await asyncio.sleep(0)
    return sent


async def send_to_all(producer: Producer, until: float, acknowledged: list[int]) -> list[int]:
    """Send to every partition in turn until the time is up; gives how many records were handed over to each."""
    sent = [0] * PARTITIONS
    while time.perf_counter() < until:
        for partition in range(PARTITIONS):
            sent[partition] += await send_some(producer, partition, sent[partition], acknowledged)
        await asyncio.sleep(0)
    return sent


async def window(seconds: float, senders: Senders, *, fault: bool) -> float:
    """Records per second that partitions 1 to 3 got acknowledged in the window."""
    async with FakeCluster() as cluster:
        cluster.create_topic(TOPIC, partitions=PARTITIONS)
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), ProducerSettings()) as producer:
            await asyncio.gather(*(producer.send(TOPIC, b"first", partition=p) for p in range(PARTITIONS)))
            await producer.flush()
            refusal = Fail(ErrorCode.NOT_ENOUGH_REPLICAS, partitions=[TopicPartition(TOPIC, 0)])
            control = cluster.control(Api.PRODUCE, refusal) if fault else None
            acknowledged = [0] * PARTITIONS
            until = time.perf_counter() + seconds
            if senders == "one for all":
                sending: asyncio.Future[list[int]] = asyncio.ensure_future(send_to_all(producer, until, acknowledged))
            else:
                first = 1 if senders == "none for the first" else 0
                each = (send_to(producer, p, until, acknowledged) for p in range(first, PARTITIONS))
                sending = asyncio.gather(*each)
            await asyncio.sleep(seconds)
            healthy = sum(acknowledged[1:]) / seconds
            if control is not None:
                control.remove()
            sent = await sending
            await producer.flush()
            for partition, count in enumerate(sent, PARTITIONS - len(sent)):
                values = [record.value for record in cluster.records(TOPIC, partition)][1:]
                assert values == [VALUE % i for i in range(count)], (
                    f"partition {partition}: lost, doubled, or disordered"
                )
    return healthy


WINDOWS: dict[str, tuple[Senders, bool]] = {
    "without_fault": ("one each", False),
    "with_fault": ("one each", True),
    "first_idle": ("none for the first", False),
    "one_task_without_fault": ("one for all", False),
    "one_task_with_fault": ("one for all", True),
}
RATIOS = {
    "ratio": ("with_fault", "without_fault"),
    "ratio_to_idle": ("with_fault", "first_idle"),
    "one_task_ratio": ("one_task_with_fault", "one_task_without_fault"),
}


async def measure(seconds: float, rounds: int) -> dict[str, float]:
    """The best of each window, in records per second, and the ratios."""
    best = dict.fromkeys(WINDOWS, 0.0)
    for _ in range(rounds):
        for name, (senders, fault) in WINDOWS.items():
            best[name] = max(best[name], await window(seconds, senders, fault=fault))
    ratios = {name: best[over] / best[under] for name, (over, under) in RATIOS.items()}
    return {**{f"{name}_per_second": value for name, value in best.items()}, **ratios, "ratio_wanted": RATIO_WANTED}


def main() -> int:
    """Measure, print, compare."""
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
    return 0 if min(figures["ratio"], figures["one_task_ratio"]) >= RATIO_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
