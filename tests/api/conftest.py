"""In-memory producers for the ingest tests, with the methods that ingest uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence

import pytest

from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.common.records import ProducerRecord, RecordMetadata

Outcome = RecordMetadata | BaseException


class MemoryProducer:
    """Acknowledges immediately, in `partitions` partitions, unless `errors_by_value` has an error for the value."""

    def __init__(self, topics: Sequence[str] = ("t",), partitions: int = 2) -> None:
        self.logs: dict[str, list[list[ProducerRecord]]] = {t: [[] for _ in range(partitions)] for t in topics}
        self.errors_by_value: dict[bytes, Exception] = {}
        self.fail_all: Exception | None = None
        self.batches: list[int] = []
        self.is_full = False

    async def partitions_for(self, topic: str) -> Sequence[int]:
        if topic not in self.logs:
            raise UnknownTopicOrPartition(f"{topic}: no such topic")
        return range(len(self.logs[topic]))

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Outcome]]:
        if self.fail_all is not None:
            raise self.fail_all
        taken = list(records)
        self.batches.append(len(taken))
        return self._acknowledged([self._append(record) for record in taken])

    def has_room(self) -> bool:
        return not self.is_full

    def values(self, topic: str = "t") -> list[bytes | None]:
        return [record.value for log in self.logs[topic] for record in log]

    def _append(self, record: ProducerRecord) -> Outcome:
        error = self.errors_by_value.get(record.value or b"")
        if error is not None:
            return error
        log = self.logs[record.topic]
        partition = len(record.value or b"") % len(log)
        log[partition].append(record)
        return RecordMetadata(record.topic, partition, len(log[partition]) - 1, record.timestamp or 0)

    async def _acknowledged(self, outcomes: list[Outcome]) -> Sequence[Outcome]:
        return outcomes


class HeldProducer(MemoryProducer):
    """Acknowledges once `release` is set; `most` is the maximum number of records that it held."""

    def __init__(self) -> None:
        super().__init__()
        self.release = asyncio.Event()
        self.held = 0
        self.most = 0

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Outcome]]:
        taken = list(records)
        self.held += len(taken)
        self.most = max(self.most, self.held)
        return self._later(taken)

    async def _later(self, taken: list[ProducerRecord]) -> Sequence[Outcome]:
        await self.release.wait()
        self.held -= len(taken)
        return [self._append(record) for record in taken]


@pytest.fixture
def producer() -> MemoryProducer:
    """A producer that acknowledges immediately."""
    return MemoryProducer()


@pytest.fixture
def held_producer() -> HeldProducer:
    """A producer that acknowledges once it is released."""
    return HeldProducer()
