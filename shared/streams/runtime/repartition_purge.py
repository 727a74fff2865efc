"""Deletes the records of repartition topics that the application has processed. Nothing else reads these topics.

A task's position in a repartition topic is part of its progress record. Records before a committed position are never
read again. Kafka Streams deletes them too, at the interval of KIP-811.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from penstock.shared.clients.admin import Admin
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.topology import Topology

log = get_logger(__name__)

# Beyond this, the deletion is tried again `interval_ms` later, because the tasks wait for it.
PURGE_TIMEOUT_MS = 5_000


class RepartitionPurge:
    """Keeps the committed positions, and deletes the records before them every `interval_ms`."""

    def __init__(self, kafka: KafkaSettings, topology: Topology, clock: Clock, interval_ms: int) -> None:
        self._kafka = kafka
        self._clock = clock
        self._interval_ms = interval_ms
        self._topics = topology.internal_topics()
        self._committed: dict[TopicPartition, int] = {}
        self._deleted: dict[TopicPartition, int] = {}
        self._last_ms = clock.monotonic_ms()

    def committed(self, partition: int, sources: Mapping[str, int]) -> None:
        """Keep the positions, by topic, of a task's commit."""
        for topic in self._topics:
            if topic in sources:
                self._committed[TopicPartition(topic, partition)] = sources[topic]

    async def run(self) -> None:
        """Delete if that is due. A failure is logged, and the deletion is tried again `interval_ms` later."""
        if not self._topics or self._clock.monotonic_ms() - self._last_ms < self._interval_ms:
            return
        self._last_ms = self._clock.monotonic_ms()
        due = {tp: offset for tp, offset in self._committed.items() if offset > self._deleted.get(tp, 0)}
        if not due:
            return
        try:
            async with asyncio.timeout(PURGE_TIMEOUT_MS / 1000), Admin(self._kafka) as admin:
                await admin.delete_records(due)
        except (PenstockError, TimeoutError) as e:
            reason = str(e) or f"not done within {PURGE_TIMEOUT_MS} ms"
            log.warning("records that were read could not be deleted", topics=self._topics, reason=reason)
        else:
            # Only after success, so that a failed request is repeated.
            self._deleted |= due
