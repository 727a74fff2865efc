"""A producer whose unknown topics are known to be unknown at once.

A Producer waits up to `max_block_ms` for a topic that is not there, in case it is just being created, and keeps asking
meanwhile. A client of HTTP is better served by a quick 404, so a topic's first use is looked up through the admin
client; afterwards the producer's own metadata is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.clients.admin import Admin
from shared.clients.producer import Deliveries, Producer
from shared.common.records import ProducerRecord

LOOKUP_TIMEOUT_MS = 5_000
ROOM_BYTES_MIN = 1_048_576
"""Free bytes of the producer's buffer under which it counts as full for records that nobody waits for."""


class LookedUpProducer:
    """Implements `api.ingest_request.IngestProducer` over a Producer and an Admin."""

    def __init__(self, producer: Producer, admin: Admin) -> None:
        self._producer = producer
        self._admin = admin
        self._seen: set[str] = set()

    def __repr__(self) -> str:
        return f"LookedUpProducer({len(self._seen)} topics seen, {self._producer!r})"

    async def partitions_for(self, topic: str) -> Sequence[int]:
        """The topic's partitions; UnknownTopicOrPartition after about a second where there is none."""
        if topic not in self._seen:
            await self._admin.describe_topics([topic], timeout_ms=LOOKUP_TIMEOUT_MS)
            self._seen.add(topic)
        return await self._producer.partitions_for(topic)

    async def send_many(self, records: Iterable[ProducerRecord]) -> Deliveries:
        """As `Producer.send_many`."""
        return await self._producer.send_many(records)

    def has_room(self) -> bool:
        """Whether the producer's buffer takes another batch without waiting."""
        figures = self._producer.metrics()
        return figures["buffer_waiting"] == 0 and figures["buffer_available_bytes"] >= ROOM_BYTES_MIN
