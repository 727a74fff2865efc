"""One partition of four answers NOT_ENOUGH_REPLICAS for 5 s: what the other three still get through.

On the fake broker, which runs in the same process in both halves. Four tasks send as fast as they can, one to each
partition; counted are the records of partitions 1 to 3 that were acknowledged within the window. First a window without
the fault, then one with it, in turns; the best of each counts. At the end every record of every partition must be in
the log once, in order.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from shared.clients.producer import Producer, ProducerSettings
from shared.common.records import TopicPartition
from shared.common.settings import KafkaSettings
from shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster

TOPIC = "bench"
PARTITIONS = 4
FAULT_SECONDS = 5.0
RATIO_WANTED = 0.9
VALUE = b"x" * 92 + b"%08d"


async def send_to(producer: Producer, partition: int, until: float, acknowledged: list[int]) -> int:
    """Send to one partition until the time is up; gives how many records were handed over."""
    sent = 0

    def on_delivery(metadata: object, error: Exception | None) -> None:
        assert error is None, error
        acknowledged[partition] += 1

    while time.perf_counter() < until:
        for _ in range(50):
            await producer.send(TOPIC, VALUE % sent, partition=partition, on_delivery=on_delivery)
            sent += 1
        await asyncio.sleep(0)
    return sent


async def window(seconds: float, *, fault: bool) -> tuple[float, float]:
    """Records per second that partitions 1 to 3 got acknowledged in the window, and those of partition 0."""
    async with FakeCluster() as cluster:
        cluster.create_topic(TOPIC, partitions=PARTITIONS)
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers), ProducerSettings()) as producer:
            await asyncio.gather(*(producer.send(TOPIC, b"first", partition=p) for p in range(PARTITIONS)))
            await producer.flush()
            refusal = Fail(ErrorCode.NOT_ENOUGH_REPLICAS, partitions=[TopicPartition(TOPIC, 0)])
            control = cluster.control(Api.PRODUCE, refusal) if fault else None
            acknowledged = [0] * PARTITIONS
            started = time.perf_counter()
            tasks = [
                asyncio.ensure_future(send_to(producer, p, started + seconds, acknowledged)) for p in range(PARTITIONS)
            ]
            await asyncio.sleep(seconds)
            healthy, faulty = sum(acknowledged[1:]) / seconds, acknowledged[0] / seconds
            if control is not None:
                control.remove()
            sent = await asyncio.gather(*tasks)
            await producer.flush()
            for partition, count in enumerate(sent):
                values = [record.value for record in cluster.records(TOPIC, partition)][1:]
                assert values == [VALUE % i for i in range(count)], (
                    f"partition {partition}: lost, doubled, or disordered"
                )
    return healthy, faulty


async def measure(seconds: float, rounds: int) -> dict[str, float]:
    """The best windows without and with the fault."""
    without = with_fault = refused = 0.0
    for _ in range(rounds):
        without = max(without, (await window(seconds, fault=False))[0])
        healthy, faulty = await window(seconds, fault=True)
        with_fault, refused = max(with_fault, healthy), max(refused, faulty)
    return {
        "without_fault_per_second": without,
        "with_fault_per_second": with_fault,
        "faulty_partition_per_second": refused,
        "ratio": with_fault / without,
        "ratio_wanted": RATIO_WANTED,
    }


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench producer_fault", description=__doc__)
    parser.add_argument("--seconds", type=float, default=FAULT_SECONDS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = asyncio.run(measure(given.seconds, given.rounds))
    for name, value in figures.items():
        print(f"{name:<28} {value:>12,.2f}")
    if given.json:
        print(json.dumps(figures))
    return 0 if figures["ratio"] >= RATIO_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
