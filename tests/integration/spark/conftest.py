"""A small reference stream in plain Python, the topics that it writes, and one Spark session for all tests of the
jobs."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.records_to_delete import RecordsToDelete
from aiokafka.structs import TopicPartition

from penstock.services.compaction_settings import SparkSettings
from penstock.services.local.demo.service_specs import SPARK_CONF
from penstock.services.spark.spark_session import spark_session
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Max, Mean, Min, Sum
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from tests.shared_broker import Broker

GAP_MS, GRACE_MS = 100, 50
POLL_S = 0.05
INTERPRETED = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Generated code costs more than it saves on a few hundred rows."""
SECRET_NAME, SECRET = "penstock.test.secret.key", "a=b:c#d\\ü"  # passed to Spark, which must not show it
AGGREGATIONS = {
    "count": Count(),
    "total": Sum("delay"),
    "mean": Mean("delay"),
    "least": Min("delay"),
    "most": Max("delay"),
    "places": CountDistinct("place"),
    "last": Aggregate(lambda: None, lambda state, value: value["place"], lambda a, b: b),
}
Entry = tuple[bytes | None, bytes]
Sent = tuple[bytes | None, bytes | None, int | None, list[tuple[str, bytes]]]
"""Key, value, timestamp, headers."""


def schema(name: str, **changes: Any) -> StoreSchema:
    """The store of a simulation whose topics are called after it."""
    aggregations = tuple(AggregationSchema.of(n, a) for n, a in AGGREGATIONS.items())
    base = StoreSchema(
        name="banks",
        kind="session",
        key="string",
        gap_ms=GAP_MS,
        grace_ms=GRACE_MS,
        emit="on_close",
        source=name,
        results=f"{name}-results",
        late=f"{name}-late",
        dead_letters=f"{name}-dlq",
        aggregations=aggregations,
    )
    return msgspec.structs.replace(base, **changes)


@dataclass
class Task:
    """The sessions of one partition by Kafka's rule, and the records that their task writes."""

    name: str
    partition: int
    store: StoreSchema
    epoch: int = 1
    commit_number: int = 0
    time: int = -1
    offset: int = 0
    live: dict[bytes, list[list[Any]]] = field(default_factory=dict)
    written: dict[tuple[bytes, int], tuple[int, list[Any]]] = field(default_factory=dict)
    finals: list[tuple[bytes, int, int, int, list[Any]]] = field(default_factory=list)
    missed: list[tuple[bytes, int, int, list[Any]]] = field(default_factory=list)
    closed: list[tuple[bytes, int, int, int, list[Any]]] = field(default_factory=list)
    source: list[Sent] = field(default_factory=list)
    late: list[Sent] = field(default_factory=list)
    dead: list[Sent] = field(default_factory=list)
    results: list[Sent] = field(default_factory=list)
    changelog: list[Entry] = field(default_factory=list)
    others: tuple[StoreSchema, ...] = ()

    def __post_init__(self) -> None:
        takeover = log.Takeover(self.name, "test", 0)
        self.changelog.append((None, log.encode_takeover(self.epoch, takeover)))

    def take(self, key: bytes | None, value: bytes, timestamp: int) -> None:
        """Process one source record."""
        offset, self.offset = self.offset, self.offset + 1
        self.source.append((key, value, timestamp, []))
        where = (self.name.encode(), str(self.partition).encode(), str(offset).encode())
        try:
            fields = msgspec.json.decode(value)
        except msgspec.DecodeError:
            names = ("penstock.dlq.topic", "penstock.dlq.partition", "penstock.dlq.offset")
            self.dead.append((key, value, None, list(zip(names, where, strict=True))))
            return
        if key is None:
            return
        self.time = max(self.time, timestamp)
        close = self.time - GRACE_MS - GAP_MS
        own = self.live.setdefault(key, [])
        found = [s for s in own if s[1] >= max(timestamp - GAP_MS, close) and s[0] <= timestamp + GAP_MS]
        start, end = min([timestamp, *(s[0] for s in found)]), max([timestamp, *(s[1] for s in found)])
        if end < close:
            names = ("penstock.late.topic", "penstock.late.partition", "penstock.late.offset")
            self.late.append((key, value, timestamp, list(zip(names, where, strict=True))))
            alone = [a.add(a.initial(), fields) for a in AGGREGATIONS.values()]
            self.missed.append((key, timestamp, offset, alone))
        else:
            states = [a.initial() for a in AGGREGATIONS.values()]
            for other in sorted(found):
                states = [a.merge(x, y) for a, x, y in zip(AGGREGATIONS.values(), states, other[2], strict=True)]
            states = [a.add(s, fields) for a, s in zip(AGGREGATIONS.values(), states, strict=True)]
            own[:] = [s for s in own if s not in found] + [[start, end, states]]
        for name, sessions in self.live.items():
            for s in [s for s in sessions if s[1] < close]:
                sessions.remove(s)
                self.finals.append((name, s[0], s[1], self.time, s[2]))

    def pack(self, states: list[Any]) -> bytes:
        columns = [v for a, s in zip(AGGREGATIONS.values(), states, strict=True) for v in a.to_columns(s)]
        return StateCodec(self.store.state_columns()).pack(columns)

    def commit(self, progress: bool = True) -> None:
        """Write the changes to the changelog and the results, and a progress record that confirms them."""
        self.commit_number += 1
        at = (0, self.epoch, self.commit_number)
        now = {(k, s[0]): (s[1], list(s[2])) for k, sessions in self.live.items() for s in sessions}
        for key, start, end, closed, states in self.finals:
            self.changelog.append((key, log.encode_final(*at, start, end, closed, self.pack(states))))
            self.written.pop((key, start), None)
            named = {n: a.result(s) for (n, a), s in zip(AGGREGATIONS.items(), states, strict=True)}
            body = {"key": key.decode(), "start": start, "end": end, **named}
            self.results.append((key, msgspec.json.encode(body), end, []))
        for key, time, offset, states in self.missed:
            self.changelog.append((key, log.encode_late(*at, time, offset, [time], self.pack(states))))
        for key, start in self.written.keys() - now.keys():
            self.changelog.append((key, log.encode_deleted(*at, start)))
        for (key, start), (end, states) in now.items():
            state = self.pack(states)
            if self.written.get((key, start)) != (end, state):
                self.changelog.append((key, log.encode_live(*at, start, end, state)))
        self.closed += self.finals
        self.finals, self.missed = [], []
        self.written = {at: (end, self.pack(states)) for at, (end, states) in now.items()}
        if progress:
            done = log.Progress(
                self.name,
                "exactly_once",
                {self.name: self.offset},
                {"banks": self.time},
                {self.name: self.time},
                {},
                (self.store, *self.others),
                0,
            )
            self.changelog.append((None, log.encode_progress(self.epoch, self.commit_number, done)))


@dataclass
class Simulation:
    """A few tasks over random records of few keys, with some late, some broken and some without a key."""

    name: str
    tasks: list[Task]
    records: int = 0

    def feed(self, records: int, seed: int, commit_every: float = 25) -> None:
        """Processes random records. With `commit_every=math.inf` the caller commits."""
        random_ = random.Random(seed)
        for _ in range(records):
            self.records += 1
            task = random_.choice(self.tasks)
            time = max(0, task.time) + random_.choice([0, 1, 10, 40, 100, 101, 160, -20, -60, -120, -300])
            key = random_.choice([b"a", b"b", b"c", b"d", b"a", b"b", None if random_.random() < 0.1 else b"e"])
            delay = random_.choice([None, 1.5, -2.25, 10.125])
            value = msgspec.json.encode({"delay": delay, "place": random_.choice(["x", "y", "z"])})
            task.take(key, b"{" if random_.random() < 0.03 else value, max(0, time))
            if random_.random() < 1 / commit_every:
                task.commit()
        for task in self.tasks if commit_every < math.inf else ():
            task.commit()


@pytest.fixture(scope="session")
def new_simulation() -> Callable[[str, int], Simulation]:
    """Creates simulations that are not written to a broker."""
    return lambda name, partitions: Simulation(name, [Task(name, p, schema(name)) for p in range(partitions)])


@pytest.fixture(scope="session")
def aggregations() -> dict[str, Any]:
    """The aggregations of all simulations, by name."""
    return AGGREGATIONS


@pytest.fixture
def simulate(topic_name: str) -> Callable[..., Simulation]:
    """Makes simulations of two partitions (by default) named after the test."""

    def make(partitions: int = 2) -> Simulation:
        return Simulation(topic_name, [Task(topic_name, p, schema(topic_name)) for p in range(partitions)])

    return make


@dataclass
class Topics:
    """Writes a simulation's topics to a broker. Each call sends the records that are new since the previous call."""

    bootstrap_servers: str
    sent: dict[tuple[str, int], int] = field(default_factory=dict)

    def write(self, simulation: Simulation) -> None:
        asyncio.run(self._write(simulation))

    def delete_before(self, topic: str, before: dict[int, int]) -> None:
        async def delete() -> None:
            records = {TopicPartition(topic, p): RecordsToDelete(before_offset=o) for p, o in before.items()}
            async with self._admin() as admin:
                await admin.delete_records(records)

        asyncio.run(delete())

    def make(self, name: str) -> None:
        """Topics of one partition each, as a simulation of that name has them."""
        asyncio.run(self.create(name, 1))

    def delete(self, topic: str) -> None:
        async def delete() -> None:
            async with self._admin() as admin:
                await admin.delete_topics([topic])
                while topic in await admin.list_topics():  # noqa: ASYNC110 - brokers learn of it a little later
                    await asyncio.sleep(POLL_S)

        asyncio.run(delete())

    def send_changelog(self, name: str, entries: list[Entry]) -> None:
        """Write changelog entries to partition 0."""

        async def send() -> None:
            async with AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers) as producer:
                await self._send(producer, f"{name}-changelog", 0, [(key, value, None, []) for key, value in entries])

        asyncio.run(send())

    async def create(self, name: str, partitions: int) -> None:
        log_time = {"message.timestamp.type": "LogAppendTime"}
        old_times = {"retention.ms": "-1"}
        suffixes = ("", "-late", "-dlq", "-results", "-changelog")
        async with self._admin() as admin:
            await admin.create_topics(
                [
                    NewTopic(f"{name}{s}", partitions, 1, topic_configs=log_time if s == "-changelog" else old_times)
                    for s in suffixes
                ]
            )
            while not {f"{name}{s}" for s in suffixes} <= set(await admin.list_topics()):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    @asynccontextmanager
    async def _admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.bootstrap_servers)
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()

    async def _write(self, simulation: Simulation) -> None:
        name = simulation.name
        if (name, 0) not in self.sent:
            await self.create(name, len(simulation.tasks))
        # The source is written without transactions, because markers would shift the offsets that the tasks expect.
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers) as producer:
            for task in simulation.tasks:
                await self._send(producer, name, task.partition, task.source)
        producer = AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers, transactional_id=f"{name}-writer")
        await producer.start()
        try:
            async with producer.transaction():
                for task in simulation.tasks:
                    changelog = [(key, value, None, []) for key, value in task.changelog]
                    for topic, records in (
                        (task.store.late or f"{name}-late", task.late),
                        (f"{name}-dlq", task.dead),
                        (f"{name}-results", task.results),
                        (f"{name}-changelog", changelog),
                    ):
                        await self._send(producer, topic, task.partition, records)
        finally:
            await producer.stop()
        # The commit is decided when it returns, its markers are written later; the next owner of the id waits for them.
        async with AIOKafkaProducer(bootstrap_servers=self.bootstrap_servers, transactional_id=f"{name}-writer"):
            pass

    async def _send(self, producer: AIOKafkaProducer, topic: str, partition: int, records: list[Sent]) -> None:
        first = self.sent.get((topic, partition), 0)
        self.sent[topic, partition] = len(records)
        futures = [
            await producer.send(topic, v, k, partition=partition, timestamp_ms=t, headers=h)
            for k, v, t, h in records[first:]
        ]
        for future in futures:
            await future


@pytest.fixture
def topics(kafka: Broker) -> Topics:
    """Writes simulations to the broker of the run."""
    return Topics(kafka.bootstrap_servers)


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """The one Spark session of the run."""
    conf = {**INTERPRETED, **SPARK_CONF, f"spark.hadoop.{SECRET_NAME}": SECRET}
    with spark_session(SparkSettings(master="local[2]", shuffle_partitions=1, conf=conf), "tests") as session:
        yield session
