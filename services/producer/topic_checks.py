"""A producer that reports an unknown topic quickly.

A Producer waits up to `max_block_ms` for a topic that does not exist, in case it is being created. An HTTP client needs
a quick 404 instead. A known topic may also be deleted. So each use looks up the topic through the admin client, unless
a look-up found it less than LOOKUP_EVERY_MS ago. Between look-ups the producer's own metadata is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Deliveries, Producer
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.records import ProducerRecord

LOOKUP_TIMEOUT_MS = 5_000
LOOKUP_EVERY_MS = 5_000
TOPICS_MAX = 10_000
"""The most topics whose look-up is remembered. Beyond it all are looked up again."""
FREE_BYTES_MIN = 1_048_576
"""Below this many free bytes the producer's buffer counts as full for unacknowledged records (`ack=none`)."""


class TopicCheckingProducer:
    """Implements `penstock.api.ingest.event_sender.IngestProducer` over a Producer and an Admin."""

    def __init__(self, producer: Producer, admin: Admin, clock: Clock = SYSTEM_CLOCK) -> None:
        self._producer = producer
        self._admin = admin
        self._clock = clock
        self._looked_up_ms: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"TopicCheckingProducer({len(self._looked_up_ms)} topics, {self._producer!r})"

    async def partitions_for(self, topic: str) -> Sequence[int]:
        """Return the topic's partitions. Raises UnknownTopicOrPartition at once if a look-up finds no topic."""
        looked_up_ms = self._looked_up_ms.get(topic)
        now_ms = self._clock.monotonic_ms()
        if looked_up_ms is None or now_ms - looked_up_ms >= LOOKUP_EVERY_MS:
            if len(self._looked_up_ms) >= TOPICS_MAX:
                self._looked_up_ms.clear()
            if looked_up_ms is not None:
                # Note the time before the look-up, so that concurrent requests do not look up the topic too.
                self._looked_up_ms[topic] = now_ms
            try:
                await self._admin.describe_topics([topic], timeout_ms=LOOKUP_TIMEOUT_MS)
            except BaseException:
                self._looked_up_ms.pop(topic, None)
                raise
            self._looked_up_ms[topic] = now_ms
        return await self._producer.partitions_for(topic)

    async def send_many(self, records: Iterable[ProducerRecord]) -> Deliveries:
        """Like `Producer.send_many`."""
        return await self._producer.send_many(records)

    def has_room(self) -> bool:
        """Return whether the producer's buffer accepts another batch without waiting."""
        metrics = self._producer.metrics()
        return metrics["buffer_waiting"] == 0 and metrics["buffer_available_bytes"] >= FREE_BYTES_MIN
