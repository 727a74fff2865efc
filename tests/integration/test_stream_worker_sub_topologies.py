"""Topologies with several sub-topologies on a real broker: repartition topics, tables, global tables and joins."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import msgspec
import pytest

from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import ConfigError, KafkaTimeout
from penstock.shared.common.records import ProducerRecord, RecordMetadata, TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, OutputBulk
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import Chain, chain_of, offline, running, until
from tests.shared_broker import Broker

USERS = ("ann", "bob", "cat")
GRACE_MS = 10_000
IDLE_TIMEOUT_MS, WINDOW_MS = 150, 400
SLOW_RECORDS, SLOW_RECORD_MS = 1_000, 1
FETCH_SECONDS = 0.8
FIRST_MS = 100  # of the orders: rows of users and countries are older, so they are processed first in any case
CITIES = {"ann": "Oslo", "bob": "Rome", "cat": None}


def orders_topology(topic: str) -> Topology:
    """Orders by user, joined with the user's row and the city's country, counted in tumbling windows and joined with
    visits.
    """
    builder = StreamsBuilder()
    users, countries = builder.table(f"{topic}-users"), builder.global_table(f"{topic}-countries")
    orders = builder.stream(topic).key_by(lambda record: record.value["user"], name="by-user")
    known = orders.left_join(users, lambda order, user: {**order, "city": user and user["city"]})
    located = known.left_join(
        countries, lambda order, country: {**order, "country": country}, key=lambda record: record.value["city"]
    )
    located.to(f"{topic}-placed")
    # The grace covers records that arrive later since they go through the repartition topic.
    windows = orders.group_by_key().tumbling_window(100, grace=GRACE_MS)
    windows.aggregate("w", n=Count(), sum=Sum("n")).on_update().to(f"{topic}-out")
    within = JoinWindows.of(5, grace=GRACE_MS)
    joined = orders.join(builder.stream(f"{topic}-visits"), lambda a, b: [a["n"], b], within, name="j")
    joined.to(f"{topic}-joined")
    return builder.build()


async def send(chain: Chain, *records: ProducerRecord) -> None:
    async with Producer(chain.kafka, ProducerSettings(linger_ms=0)) as producer:
        results = await (await producer.send_many(list(records)))
    assert not [r for r in results if isinstance(r, BaseException)]


def order_ms(number: int) -> int:
    return FIRST_MS + number * 10


def orders(topic: str, first: int, number: int) -> list[ProducerRecord]:
    """Orders whose keys are unrelated to their users, spread over all partitions."""
    return [
        ProducerRecord(topic, b'{"n":%d,"user":"%s"}' % (i, USERS[i % 3].encode()), b"o%d" % i, (), i % 2, order_ms(i))
        for i in range(first, first + number)
    ]


async def test_all_sub_topologies_over_a_restart(kafka: Broker, topic_name: str) -> None:
    """Over a restart every order is joined with its user's row, its country and its visit, and is counted once."""
    async with chain_of(kafka, topic_name) as chain:
        async with Admin(chain.kafka) as admin:
            more = ("users", "countries", "visits")
            await admin.create_topics([event_time_topic(f"{topic_name}-{name}", 2) for name in more])
        rows = {user: msgspec.json.encode({"city": city}) for user, city in CITIES.items()}
        known = [(f"{topic_name}-users", row, user.encode()) for user, row in rows.items()]
        known.append((f"{topic_name}-countries", b'"Norway"', b"Oslo"))
        await send(chain, *(ProducerRecord(topic, row, key, (), None, 0) for topic, row, key in known))
        visits = [
            ProducerRecord(f"{topic_name}-visits", b"%d" % i, USERS[i % 3].encode(), (), None, order_ms(i))
            for i in range(60)
        ]
        own = f"{topic_name}-by-user-repartition"
        for first in (0, 30):
            await send(chain, *visits[first : first + 30], *orders(topic_name, first, 30))
            worker = chain.worker(orders_topology(topic_name), repartition_purge_interval_ms=50)
            async with running(worker):

                async def done(total: int = first + 30, worker: StreamWorker = worker) -> bool:
                    tasks = [owned.task for owned in worker.tasks().values()]
                    read = [0 if t is None or t.needs_commit else t.sources.get(topic_name, 0) for t in tasks]
                    written = [len(await chain.read(f"{topic_name}-{name}")) for name in ("placed", "joined")]
                    return sum(read) == total and written == [total, total]

                async def is_purged() -> bool:
                    async with Admin(chain.kafka) as admin:
                        first = await admin.list_offsets({TopicPartition(own, p): "earliest" for p in range(2)})
                    return sum(first.values()) > 0

                await until(done)
                await until(is_purged)
        located = [msgspec.json.decode(record.value or b"") for record in await chain.read(f"{topic_name}-placed")]
        assert sorted((r["n"], r["city"], r["country"]) for r in located) == [
            (i, CITIES[USERS[i % 3]], "Norway" if i % 3 == 0 else None) for i in range(60)
        ]
        joined = [msgspec.json.decode(record.value or b"") for record in await chain.read(f"{topic_name}-joined")]
        assert sorted(joined) == [[i, i] for i in range(60)]
        counted = [msgspec.json.decode(record.value or b"") for record in await chain.read(f"{topic_name}-out")]
        expected = Counter((USERS[i % 3], order_ms(i) // 100 * 100) for i in range(60))
        assert {(r["key"], r["start"]): r["n"] for r in counted} == expected


async def test_at_least_once_counts_once_behind_a_repartition_topic(
    kafka: Broker, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that fails after its records were written to a repartition topic is repeated, and the records count
    once.
    """
    torn, write = list[str](), ChangelogPartition._write_records

    async def tearing(self: ChangelogPartition, *bulks: OutputBulk) -> RecordMetadata:
        last = await write(self, *bulks)
        topics = {one.topic for bulk in bulks for one in (bulk if isinstance(bulk, list) else [bulk])}
        if (own := f"{topic_name}-by-user-repartition") in topics and len(torn) < 2:
            torn.append(own)
            raise KafkaTimeout("the response was lost")
        return last

    monkeypatch.setattr(ChangelogPartition, "_write_records", tearing)
    builder = StreamsBuilder()
    orders_ = builder.stream(topic_name).key_by(lambda record: record.value["user"], name="by-user")
    windows = orders_.group_by_key().tumbling_window(100, grace=GRACE_MS)
    windows.aggregate("w", n=Count(), sum=Sum("n")).on_update().to(f"{topic_name}-out")
    async with chain_of(kafka, topic_name) as chain:
        await send(chain, *orders(topic_name, 0, 30))
        worker = chain.worker(builder.build(), processing_guarantee="at_least_once")
        expected = Counter((USERS[i % 3], order_ms(i) // 100 * 100) for i in range(30))
        counted: dict[tuple[str, int], int] = {}

        async def is_counted() -> bool:
            rows = [msgspec.json.decode(value) for value in await chain.values("out")]
            counted.update({(row["key"], row["start"]): row["n"] for row in sorted(rows, key=lambda row: row["n"])})
            return sum(counted.values()) >= sum(expected.values())

        async with running(worker):
            assert worker.describe()["processing_guarantee"] == "exactly_once"
            await until(is_counted)
        await is_counted()
    assert len(torn) == 2
    assert counted == expected


async def test_a_repartition_topic_with_other_partitions_is_an_error(kafka: Broker, topic_name: str) -> None:
    """An existing repartition topic with another number of partitions is an error, since keys would be separated from
    their state.
    """
    async with chain_of(kafka, topic_name) as chain:
        async with Admin(chain.kafka) as admin:
            await admin.create_topics([event_time_topic(f"{topic_name}-by-user-repartition", 3)])
        builder = StreamsBuilder()
        builder.stream(topic_name).key_by(lambda r: "k", name="by-user").repartition().to(f"{topic_name}-out")
        worker = chain.worker(builder.build())
        with pytest.raises(ConfigError, match="different numbers of partitions"):
            await worker.startup()
        await worker.shutdown()


async def test_a_quiet_topic_closes_its_last_windows(kafka: Broker, topic_name: str) -> None:
    """With `idle_timeout_ms` windows close without another record, but not while a transaction is open."""
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        settings = ProducerSettings(transactional_id=f"{topic_name}-writer", linger_ms=0)
        worker = chain.worker(sessions(topic_name), idle_timeout_ms=IDLE_TIMEOUT_MS)
        async with Producer(chain.kafka, settings) as producer, running(worker):
            await producer.init_transactions()
            async with producer.transaction():
                await send_to(producer, topic_name, 1_000)

            def times() -> list[int]:
                return [o.task.stream_time_ms for o in worker.tasks().values() if o.task is not None]

            async def read() -> bool:
                return times() >= [1_000]

            await until(read)
            async with producer.transaction():
                await send_to(producer, topic_name, 1_050)
                await producer.flush()
                await asyncio.sleep(FETCH_SECONDS)  # until the next fetch response contains the record
                before = times()
                await asyncio.sleep(3 * IDLE_TIMEOUT_MS / 1000)
                assert times() == before

            async def closed() -> bool:
                tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
                return any(task.metrics.records_total == 2 and not len(task.stores["s"]) for task in tasks)

            await until(closed)
        results = [msgspec.json.decode(value) for value in await chain.values("out")]
        assert sum(result["n"] for result in results) + len(await chain.values("late")) == 2
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert progress.idle_ms
        assert progress.stream_time_ms > 1_050 + WINDOW_MS


async def test_windows_behind_quiet_windows_lose_no_record(kafka: Broker, topic_name: str) -> None:
    """Sessions that close by idleness are in time for windows behind a repartition topic with several writers."""
    builder = StreamsBuilder()
    first = builder.stream(topic_name).group_by_key().session_window(40).aggregate("first", n=Count()).on_close()
    windows = first.key_by(lambda record: "all", name="all").group_by_key().tumbling_window(100)
    windows.aggregate("second", n=Count()).on_close().to(f"{topic_name}-out")
    records = [ProducerRecord(topic_name, b"{}", b"k", (), 0, i * 50) for i in range(20)]
    async with chain_of(kafka, topic_name) as chain:
        await send(chain, *records)
        async with running(chain.worker(builder.build(), idle_timeout_ms=IDLE_TIMEOUT_MS)):

            async def all_closed() -> bool:
                return len(await chain.values("out")) + len(await chain.values("late")) >= 10

            await until(all_closed)
        results = [msgspec.json.decode(value) for value in await chain.values("out")]
        assert {one["start"]: one["n"] for one in results} == dict.fromkeys(range(0, 1_000, 100), 2)
        assert await chain.values("late") == []


def sessions(topic: str) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(WINDOW_MS)
    windows.aggregate("s", n=Count()).on_close().to(f"{topic}-out")
    return builder.build()


async def send_to(producer: Producer, topic: str, timestamp_ms: int) -> None:
    await (await producer.send(topic, b"{}", key=b"k", partition=0, timestamp=timestamp_ms))


async def test_a_slow_worker_loses_its_partitions(kafka: Broker, topic_name: str) -> None:
    """A worker without a turn within `max_poll_interval_ms` loses its tasks to another; when it returns no record is
    lost or repeated.
    """
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(100)
        slow, other = chain.worker(max_poll_interval_ms=1_000), chain.worker()
        await slow.startup()
        while len(slow.tasks()) < 2 or any(owned.task is None for owned in slow.tasks().values()):
            await slow.run_once()
        async with running(other):
            await chain.wait_processed(other)
            assert sorted(other.tasks()) == [0, 1]
            await chain.send(100)
            deadline = asyncio.get_running_loop().time() + 20
            while len(other.tasks()) == 2 or any(owned.task is None for owned in slow.tasks().values()):
                await slow.run_once()
                assert asyncio.get_running_loop().time() < deadline
            await slow.shutdown()
            await chain.wait_processed(other)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_slow_records_delay_neither_heartbeats_nor_commits(kafka: Broker, topic_name: str) -> None:
    """However many records were fetched at once, a turn processes few of them if they are slow: the member stays in the
    group, and commits continue.
    """
    calls: list[float] = []

    def slow(record: Record) -> bool:
        calls.append(time.monotonic())
        while time.monotonic() < calls[-1] + SLOW_RECORD_MS / 1000:
            pass
        return True

    builder = StreamsBuilder()
    windows = builder.stream(topic_name).filter(slow).group_by_key().session_window(WINDOW_MS)
    windows.aggregate("s", n=Count()).on_close().to(f"{topic_name}-out")
    turns: list[int] = []
    committed: list[int] = []
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(SLOW_RECORDS)
        worker = chain.worker(builder.build())
        await worker.startup()
        try:
            deadline = time.monotonic() + 60
            while not committed or committed[-1] < SLOW_RECORDS:
                before = len(calls)
                await worker.run_once()
                turns.append(len(calls) - before)
                done = [owned.task.metrics.committed.records for owned in worker.tasks().values() if owned.task]
                committed += done[:1]
                assert time.monotonic() < deadline, (len(calls), committed[-1:])
        finally:
            await worker.shutdown()
    assert len(calls) == SLOW_RECORDS, "none of them was taken again"
    assert max(turns) < SLOW_RECORDS / 2
    assert len(set(committed) - {0, SLOW_RECORDS}) > 1, "there were commits meanwhile"


async def test_run_once_takes_the_wall_clock_as_an_argument(kafka: Broker, topic_name: str) -> None:
    """`run_once(now_ms)` uses that time as the wall clock: an hourly schedule fires in the turn with its time."""
    fired: list[int] = []

    class Hourly(Processor):
        """Records when it is called."""

        def init(self, context: ProcessorContext) -> None:
            self.schedule = context.schedule(3_600_000, PunctuationType.WALL_CLOCK_TIME, fired.append)

        def process(self, record: Record) -> None:
            pass

    builder = StreamsBuilder()
    builder.stream(topic_name).process(Hourly, name="hourly")
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        worker = chain.worker(builder.build())
        await worker.startup()
        try:

            async def runs() -> bool:
                await worker.run_once()
                return any(owned.task is not None for owned in worker.tasks().values())

            await until(runs)
            task = worker.tasks()[0].task
            assert task is not None
            due_ms = task._processors["hourly"].schedule.due_ms  # type: ignore[attr-defined]
            assert fired == []
            await worker.run_once(due_ms)
            assert fired == [due_ms]
        finally:
            await worker.shutdown()
