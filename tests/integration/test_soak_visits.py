"""Soak: workers of a topology with several features are killed repeatedly at a high rate of records, under both
guarantees.

Clicks go through a repartition topic, are joined with a table, aggregated in sessions, and summed in a store that a
named wall-clock schedule empties. In whatever order a worker gets its partitions, each click is in `joined` once. By
user, counts and sums are exact: of sessions and late clicks, and of the schedule's output.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Sum
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from tests.integration.stream_worker_child import WorkerProcess, visits
from tests.integration.test_stream_worker import GUARANTEES, Chain, chain_of, child, running, until
from tests.shared_broker import Broker

SOAK_SECONDS, KILLS_MIN, DONE_SECONDS = 60.0, 3, 300.0
PARTITIONS, USERS, CLICKS_A_TIME, EVERY_SECONDS = 4, 50, 1_000, 0.4
PATIENT = {"session_timeout_ms": 10_000}  # on a busy machine a turn may take seconds
FLUSH_MS = 3_600_000
FIRST_MS = 1_790_000_000_000


class Clicks:
    """Sends numbered clicks, one a millisecond of event time, and records what it sent."""

    def __init__(self, chain: Chain) -> None:
        self._chain, self.random, self.sent = chain, random.Random(5), 0
        self.by_user: Counter[tuple[str, str]] = Counter()
        self.all: list[tuple[str, int, int]] = []
        """User, timestamp and ms of each."""

    async def users(self) -> None:
        """Send the table's rows, before any click."""
        rows = [
            ProducerRecord(f"{self._chain.topic}-users", b'{"city":"c%d"}' % i, b"u%d" % i, (), None, FIRST_MS - 1)
            for i in range(USERS)
        ]
        await self._send(rows)

    async def some(self) -> None:
        """Send the next clicks, over all source partitions."""
        await self._send([self._click(f"u{int(USERS * self.random.random() ** 2)}") for _ in range(CLICKS_A_TIME)])

    async def last(self) -> None:
        """Send one click of each user, so much later that every earlier session closes."""
        await self._send([self._click(f"u{i}", FLUSH_MS) for i in range(USERS)])

    def _click(self, user: str, later_ms: int = 0) -> ProducerRecord:
        ms, number = self.random.randrange(1_000), self.sent
        self.sent += 1
        self.by_user[user, "n"] += 1
        self.by_user[user, "ms"] += ms
        value = msgspec.json.encode({"id": number, "user": user, "ms": ms})
        partition, at = self.random.randrange(PARTITIONS), FIRST_MS + number + later_ms
        self.all.append((user, at, ms))
        return ProducerRecord(self._chain.topic, value, None, (), partition, at)

    async def _send(self, records: list[ProducerRecord]) -> None:
        async with Producer(self._chain.kafka, ProducerSettings(linger_ms=0)) as producer:
            assert await (await producer.send_many(records)).first_error() is None


def sums(rows: Iterable[tuple[str, int, int]]) -> Counter[tuple[str, str]]:
    """Counts and sums by user, of (user, n, ms)."""
    got: Counter[tuple[str, str]] = Counter()
    for user, n, ms in rows:
        got[user, "n"] += n
        got[user, "ms"] += ms
    return got


def decoded(records: Iterable[ConsumerRecord]) -> Iterator[tuple[bytes, dict[str, int]]]:
    for record in records:
        yield record.key or b"", msgspec.json.decode(record.value or b"")


async def kill_and_load(chain: Chain, clicks: Clicks, guarantee: str) -> int:
    """Send clicks to two workers of which one is killed every few seconds, and return the number of kills."""
    kills = 0
    async with contextlib.AsyncExitStack() as stack:

        async def start() -> WorkerProcess:
            process = await stack.enter_async_context(child(chain, guarantee, "visits", **PATIENT))
            assert await process.has_committed(DONE_SECONDS)
            return process

        async def send() -> None:
            while not ended.is_set():
                await clicks.some()
                await asyncio.sleep(EVERY_SECONDS)

        ended = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send())
            try:
                crew = [await start(), await start()]
                deadline = time.monotonic() + SOAK_SECONDS
                while time.monotonic() < deadline or kills < KILLS_MIN:
                    await asyncio.sleep(clicks.random.uniform(0.2, 2))
                    index = kills % 2
                    crew[index].kill()
                    await crew[index].wait()
                    kills += 1
                    crew[index] = await start()
            finally:
                ended.set()
    return kills


async def until_done(worker: StreamWorker) -> None:
    """Wait until all records are read, processed, forwarded by the schedule and committed."""

    async def done() -> bool:
        tasks = [owned.task for owned in worker.tasks().values()]
        at = worker.consumer.assignment()
        return (
            len(tasks) == PARTITIONS
            and all(worker.consumer.known_lag(one) == 0 for one in at)
            and all(task is not None and not task.needs_commit and not len(task.stores["sums"]) for task in tasks)
        )

    for _ in range(3):  # records that a task wrote to another one's partition are in flight
        await until(done, DONE_SECONDS)
        await asyncio.sleep(0.5)


@pytest.mark.soak
@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_soak_of_visits(kafka: Broker, topic_name: str, guarantee: str) -> None:
    """Every click is in `joined` once, and each user's counts and sums are exact, in sessions and in the schedule's
    output.
    """
    async with chain_of(kafka, topic_name, PARTITIONS) as chain:
        async with Admin(chain.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{topic_name}-users", PARTITIONS)])
        clicks = Clicks(chain)
        await clicks.users()
        kills = await kill_and_load(chain, clicks, guarantee)
        worker = chain.worker(visits(topic_name), processing_guarantee=guarantee)
        async with running(worker):
            await until_done(worker)
            await clicks.last()
            await until_done(worker)
            open_rows = [
                (row.key, row.states[0], int(Sum("ms").result(row.states[1]) or 0))
                for owned in worker.tasks().values()
                if owned.task is not None
                for row in owned.task.stores["visits"].rows()
            ]
        joined = [row["id"] for _, row in decoded(await chain.read(f"{topic_name}-joined"))]
        closed = [(str(row["key"]), row["n"], row["ms"]) for _, row in decoded(await chain.read(f"{topic_name}-out"))]
        late = [(str(row["user"]), 1, row["ms"]) for _, row in decoded(await chain.read(f"{topic_name}-late"))]
        deltas = [(key.decode(), row["n"], row["ms"]) for key, row in decoded(await chain.read(f"{topic_name}-deltas"))]
        print(f"\n{clicks.sent} clicks, {kills} kills, {len(closed)} sessions, {len(late)} late, {len(deltas)} deltas")
        assert sorted(joined) == list(range(clicks.sent))
        assert sums(deltas) == clicks.by_user
        assert sums([*closed, *late, *open_rows]) == clicks.by_user
        assert len(closed) > 0
        assert all(n == 1 for _, n, _ in open_rows)
