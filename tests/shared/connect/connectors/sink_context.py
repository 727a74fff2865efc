"""Records and settings of sinks, and a task's context without a worker, which records its calls and reports."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from typing import Any

from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.record import SinkRecord
from tests.shared.connect.harness import Running

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
JSON = {
    "value_converter": "org.apache.kafka.connect.json.JsonConverter",
    "value_converter_schemas_enable": "false",
}


async def produce(run: Running, *values: Any) -> None:
    """Send each value to the topic `t` as JSON."""
    async with Producer(KafkaSettings(bootstrap_servers=run.cluster.bootstrap_servers)) as producer:
        for value in values:
            await producer.send("t", json.dumps(value).encode())


class Reporter:
    """Records every reported record and error."""

    def __init__(self) -> None:
        self.reported: list[tuple[TopicPartition, int]] = []
        self.errors: list[str] = []

    def report(self, record: SinkRecord, error: Exception) -> asyncio.Future[None]:
        self.reported.append((record.original_tp, record.kafka_offset))
        self.errors.append(str(error))
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Context:
    """Records timeouts, rewinds and requests to commit."""

    configs: Mapping[str, str] = {}
    files = AllowedFiles(("/",))

    def __init__(self, reporter: Reporter | None = None) -> None:
        self.errant_record_reporter = reporter
        self.timeouts: list[int] = []
        self.rewinds: dict[TopicPartition, int] = {}
        self.commit_requests = 0

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset()

    def offset(self, tp: TopicPartition, offset: int) -> None:
        self.rewinds[tp] = offset

    def pause(self, *partitions: TopicPartition) -> None:
        raise AssertionError("not expected")

    def resume(self, *partitions: TopicPartition) -> None:
        raise AssertionError("not expected")

    def timeout(self, timeout_ms: int) -> None:
        self.timeouts.append(timeout_ms)

    def wait_for(self, awaitable: Awaitable[Any]) -> Any:
        raise AssertionError("not expected")

    def request_commit(self) -> None:
        self.commit_requests += 1


def record(tp: TopicPartition, offset: int, value: Any = ...) -> SinkRecord:
    """A record whose default value contains its partition and offset."""
    value = {"p": tp.partition, "n": offset} if value is ... else value
    return SinkRecord(tp.topic, tp.partition, None, None, None, value, kafka_offset=offset)


def records(tp: TopicPartition, first: int, end: int) -> list[SinkRecord]:
    return [record(tp, offset) for offset in range(first, end)]
