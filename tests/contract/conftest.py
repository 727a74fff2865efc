"""Fixtures with which each test here runs on the fake broker and on Apache Kafka.

`wire` is a client of bare requests, so that the brokers' responses are compared and not a client
library's interpretation of them.
"""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.shared.clients.protocol.record_batches import new_batch_builder, seal_batch
from penstock.shared.testing.fake_broker import Api, ErrorCode, FakeCluster, Message
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS
from tests.shared.testing.fake_broker.frames import decode_response, encode_request
from tests.shared_broker import Broker

CONFIGS = {
    "group.min.session.timeout.ms": "100",
    "transaction.max.timeout.ms": "900000",
}
"""The fake broker's configs, as the real broker of tests/conftest.py has them."""
READER_BYTES = 1 << 22
PATIENCE_S = 20
PASSING = {
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.CONCURRENT_TRANSACTIONS,
}


@pytest.fixture(params=["fake", "kafka"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """Either broker."""
    if request.param == "kafka":
        yield request.getfixturevalue("kafka")
    else:
        async with FakeCluster(configs=CONFIGS, transaction_completion_ms=10) as cluster:
            yield cluster


class Wire:
    """A connection that sends bare requests and repeats those with a temporary error."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._correlation_id = 0

    async def frame(self, api: Api, version: int, body: Message) -> bytes:
        """Return the bytes of the response."""
        self._correlation_id += 1
        data = encode_request(SUPPORTED_APIS[api], version, self._correlation_id, "contract", body)
        self._writer.write(struct.pack(">i", len(data)) + data)
        size = struct.unpack(">i", await self._reader.readexactly(4))[0]
        return await self._reader.readexactly(size)

    async def request(self, api: Api, version: int | None = None, **body: Any) -> Message:
        """Return the decoded response, by default in the newest version."""
        version = SUPPORTED_APIS[api].max_version if version is None else version
        for _ in range(200):
            _, response, _ = decode_response(
                SUPPORTED_APIS[api], version, await self.frame(api, version, Message(**body))
            )
            if error_of(response) not in PASSING:
                return response
            await asyncio.sleep(0.02)
        raise AssertionError(f"{api.name}: {response}")


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the check is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not await check():  # noqa: ASYNC110 - a broker is polled
            await asyncio.sleep(0.01)


def error_of(response: Message) -> int:
    """The first error code in a response, of the whole, a row, or a partition."""
    if getattr(response, "error_code", 0):
        return int(response.error_code)
    for name in ("topics", "groups", "resources"):
        for row in getattr(response, name, None) or ():
            if getattr(row, "error_code", 0):
                return int(row.error_code)
            for partition in getattr(row, "partitions", None) or ():
                if getattr(partition, "error_code", 0):
                    return int(partition.error_code)
    return 0


def code_name(code: int) -> str:
    return ErrorCode(code).name


@asynccontextmanager
async def connected(broker: Broker) -> AsyncIterator[Wire]:
    host, port = broker.bootstrap_servers.split(":")
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(host, int(port), limit=READER_BYTES)
        try:
            yield Wire(reader, writer)
        finally:
            writer.close()


@pytest.fixture
async def wire(broker: Broker) -> AsyncIterator[Wire]:
    """A connection to the broker."""
    async with connected(broker) as one:
        yield one


@pytest.fixture
async def other_wire(broker: Broker) -> AsyncIterator[Wire]:
    """A second connection, for actions while the first one waits."""
    async with connected(broker) as one:
        yield one


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"contract-{uuid.uuid4().hex[:12]}"


@dataclass
class Log:
    """A topic with one partition, and requests for it."""

    wire: Wire
    topic: str

    def topics(self, **row: Any) -> list[Message]:
        return [Message(name=self.topic, partitions=[Message(partition=0, **row)])]

    async def produce(
        self, records: bytes | None, acks: int = -1, transactional_id: str | None = None, version: int | None = None
    ) -> Message:
        """Return the partition's row of the response."""
        body = {"acks": acks, "timeout_ms": 5_000, "transactional_id": transactional_id}
        response = await self.wire.request(Api.PRODUCE, version, topics=self.topics(records=records), **body)
        return response.topics[0].partitions[0]

    async def fetch(
        self, offset: int, *, committed: bool = False, max_bytes: int = 1 << 20, wait_ms: int = 0
    ) -> Message:
        """Return the partition's row of the response."""
        topics = self.topics(fetch_offset=offset, partition_max_bytes=max_bytes, current_leader_epoch=-1)
        response = await self.wire.request(
            Api.FETCH,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=max_bytes,
            isolation_level=int(committed),
            topics=topics,
        )
        return response.topics[0].partitions[0]

    async def offset(self, timestamp: int, *, committed: bool = False) -> tuple[int, int]:
        """Return error code and offset."""
        topics = self.topics(timestamp=timestamp)
        response = await self.wire.request(Api.LIST_OFFSETS, isolation_level=int(committed), topics=topics)
        row = response.topics[0].partitions[0]
        return row.error_code, row.offset


async def created(wire: Wire, name: str, partitions: int = 1, **configs: str) -> None:
    rows = [Message(name=key.replace("_", "."), value=value) for key, value in configs.items()]
    topic = Message(name=name, num_partitions=partitions, replication_factor=1, configs=rows)
    response = await wire.request(Api.CREATE_TOPICS, topics=[topic], timeout_ms=10_000)
    assert response.topics[0].error_code == 0, response
    topics = [Message(name=name, partitions=[Message(partition=p, timestamp=-1) for p in range(partitions)])]

    async def has_leaders() -> bool:
        return error_of(await wire.request(Api.LIST_OFFSETS, topics=topics)) == 0

    await until(has_leaders)


@pytest.fixture
async def log(wire: Wire, name: str) -> Log:
    """A topic of one partition."""
    await created(wire, name)
    return Log(wire, name)


def batch(
    *values: bytes,
    producer: tuple[int, int, int] = (-1, -1, -1),
    transactional: bool = False,
    at_ms: int | None = None,
) -> bytes:
    """Build a record batch.

    `producer` is id, epoch and first sequence; timestamps count up from `at_ms`, by default now.

    (With old timestamps beside new ones Kafka begins a new segment, and a fetch ends with its segment.)
    """
    at_ms = int(time.time() * 1000) if at_ms is None else at_ms
    builder = new_batch_builder(1 << 24, transactional)
    for index, value in enumerate(values):
        builder.append(index, at_ms + index, None, value, [])
    return seal_batch(builder, producer)
