"""Maintains the global tables of one instance: reads all partitions of their topics to the end, then follows them."""

from __future__ import annotations

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.runtime.global_table import GlobalTableRows
from penstock.shared.streams.topology import Topology

log = get_logger(__name__)

LOAD_POLL_MS = 200
LOAD_IDLE_MS_MAX = 60_000  # loading a table fails if there is no record and no movement for this long


class GlobalTables:
    """All global tables of a topology; opens nothing if there are none."""

    def __init__(self, kafka: KafkaSettings, topology: Topology, clock: Clock) -> None:
        self.rows = {name: GlobalTableRows(node) for name, node in topology.global_tables.items()}
        self._by_topic = {rows.topic: rows for rows in self.rows.values()}
        self._kafka = kafka
        self._clock = clock
        self._consumer: Consumer | None = None

    async def load(self) -> None:
        """Read every topic to its current end. Raises KafkaTimeout if the position does not move."""
        if not self.rows:
            return
        settings = ConsumerSettings(
            auto_offset_reset="earliest", isolation_level="read_committed", commit_strategy="none"
        )
        self._consumer = consumer = Consumer(self._kafka, settings)
        await consumer.__aenter__()
        async with Admin(self._kafka) as admin:
            described = await admin.describe_topics(self._by_topic)
        partitions = [TopicPartition(name, p.partition) for name, topic in described.items() for p in topic.partitions]
        consumer.assign(partitions)
        await consumer.seek_to_beginning(*partitions)
        ends = await consumer.end_offsets(partitions)
        moved = self._clock.monotonic_ms()
        at: dict[TopicPartition, int] = {}
        while any(at.get(tp, 0) < end for tp, end in ends.items()):
            self._apply_records(await consumer.poll(LOAD_POLL_MS))
            before = at
            at = {tp: await consumer.position(tp) for tp in partitions}
            now = self._clock.monotonic_ms()
            # Positions count and not records, because the end of a topic may be transaction markers.
            if at != before:
                moved = now
            elif now - moved > LOAD_IDLE_MS_MAX:
                raise KafkaTimeout(f"global tables: loading stands at {at} of {ends} for {now - moved} ms")
        log.info("global tables loaded", rows={name: len(rows) for name, rows in self.rows.items()})

    async def poll(self) -> None:
        """Apply the records that have come since."""
        if self._consumer is not None:
            self._apply_records(await self._consumer.poll(0))

    async def close(self) -> None:
        """Stop reading; the tables keep their rows."""
        consumer = self._consumer
        self._consumer = None
        if consumer is not None:
            await consumer.close()

    def _apply_records(self, batches: dict[TopicPartition, Columns]) -> None:
        for tp, columns in batches.items():
            table = self._by_topic[tp.topic]
            for offset, key, value in zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True):
                table.position[tp.partition] = offset + 1
                if (error := table.apply(key, value)) is not None:
                    log.warning("a record of a global table is left out", at=f"{tp}@{offset}", reason=str(error))
