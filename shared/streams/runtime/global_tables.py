"""Global tables: the last value of each key, over all partitions of a topic, in every instance.

An instance reads all partitions of the tables' topics to the end before its tasks start, and then follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import DataError, KafkaTimeout
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.state.key_value_store import KeysByHash, TableRow, key_of_store
from penstock.shared.streams.topology import GlobalTableNode, Topology
from penstock.shared.streams.user_code import user_copy

log = get_logger(__name__)

LOAD_POLL_MS = 200
POLL_RECORDS_MAX = 5_000
"""The most records that are applied at once. A running instance applies records once a turn, and a turn without source
records lasts up to `poll_ms`."""
# Loading fails if no partition's position advances for this long.
LOAD_IDLE_MS_MAX = 60_000


class GlobalTableRows:
    """One instance's copy of a global table, shared by its tasks.

    `get` and `items` return copies of the values, so only the topic's records change a row.
    """

    def __init__(self, node: GlobalTableNode) -> None:
        self.name = node.name
        self.topic = node.topic
        self._node = node
        self.key_type = node.key
        self._rows: dict[Any, Any] = {}
        self._keys = KeysByHash()
        self.position: dict[int, int] = {}
        """The next offset to read, by partition."""

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"GlobalTableRows({self.name!r}, {len(self._rows)} rows)"

    def get(self, key: Any) -> Any:
        """Return the value of the key's row, or None. A text and its UTF-8 bytes are the same key.

        Raises DataError for a key that is neither text nor bytes.
        """
        return user_copy(self._rows.get(key_of_store(self.name, key, self.key_type == "string")))

    def rows_of(self, key: Any) -> list[TableRow]:
        """Return the key's row in a list, or an empty list."""
        return [TableRow(key, self._rows[key])] if key in self._rows else []

    def keys_between(self, low: int, high: int) -> list[Any]:
        """Return the keys whose `key_hash` is from `low` to `high`, in no order."""
        return self._keys.between(low, high)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield all keys and values."""
        return ((key, user_copy(row)) for key, row in self._rows.items())

    def apply(self, key: bytes | None, value: bytes | None) -> DataError | None:
        """Apply a record of the topic: a value decoded as None deletes the row. If it is invalid, return the error."""
        try:
            if key is None:
                raise DataError(f"{self.topic}: a record without a key cannot be a row")
            own = key if self.key_type == "bytes" else string_deserializer(self.topic, key)
            row = self._node.value(self.topic, value)
        except Exception as e:
            # A user's deserializer may raise any error. The row keeps its last valid value, and the other rows stay
            # current.
            return e if isinstance(e, DataError) else DataError(f"{self.topic}: {type(e).__name__}: {e}")
        if row is None:
            if self._rows.pop(own, None) is not None:
                self._keys.remove(own)
            return None
        if own not in self._rows:
            self._keys.add(own)
        self._rows[own] = row
        return None


class GlobalTables:
    """Maintains all global tables of a topology for one instance; opens nothing if there are none."""

    def __init__(self, kafka: KafkaSettings, topology: Topology, clock: Clock) -> None:
        self.rows = {name: GlobalTableRows(node) for name, node in topology.global_tables.items()}
        self._by_topic = {rows.topic: rows for rows in self.rows.values()}
        self._kafka = kafka
        self._clock = clock
        self._consumer: Consumer | None = None

    async def load(self) -> None:
        """Read every topic to its current end.

        Raises KafkaTimeout if the positions do not advance for too long, and the errors of `poll`.
        """
        if not self.rows:
            return
        settings = ConsumerSettings(
            # After a reset, the tables would keep rows of records that a truncated or recreated topic lacks. So the
            # worker stops, as Kafka Streams does, and its next start loads the tables again.
            auto_offset_reset="none",
            isolation_level="read_committed",
            commit_strategy="none",
            max_poll_records=POLL_RECORDS_MAX,
        )
        consumer = Consumer(self._kafka, settings)
        self._consumer = consumer
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
            # Records beyond a partition's end offset in `ends` are no progress.
            at = {tp: min(await consumer.position(tp), end) for tp, end in ends.items()}
            now = self._clock.monotonic_ms()
            # Positions count and not records, because the end of a topic may be transaction markers.
            if at != before:
                moved = now
            elif now - moved > LOAD_IDLE_MS_MAX:
                message = f"global tables: no records for {now - moved} ms; positions {at}, end offsets {ends}"
                raise KafkaTimeout(message)
        log.info("global tables loaded", rows={name: len(rows) for name, rows in self.rows.items()})

    async def poll(self) -> None:
        """Apply the records that have come since the last call, or since `load`, also of added partitions.

        Raises OffsetOutOfRange, LogTruncation included, if a topic no longer has the position.
        """
        if self._consumer is not None:
            self._assign_added_partitions(self._consumer, self._by_topic)
            self._apply_records(await self._consumer.poll(0))

    async def close(self) -> None:
        """Stop reading; the tables keep their rows."""
        consumer = self._consumer
        self._consumer = None
        if consumer is not None:
            await consumer.close()

    @staticmethod
    def _assign_added_partitions(consumer: Consumer, topics: Iterable[str]) -> None:
        assigned = consumer.assignment()
        counts = consumer.known_partitions(topics)
        if sum(counts.values()) <= len(assigned):
            return
        added = {TopicPartition(topic, i) for topic, count in counts.items() for i in range(count)} - assigned
        consumer.assign(assigned | added)
        for tp in added:
            # Without a request, because a new partition may not have a leader yet.
            consumer.seek(tp, 0)
        log.info("global tables: partitions were added", added=sorted(map(str, added)))

    def _apply_records(self, batches: dict[TopicPartition, Columns]) -> None:
        for tp, columns in batches.items():
            table = self._by_topic[tp.topic]
            for offset, key, value in zip(columns.offsets.tolist(), columns.keys, columns.values, strict=True):
                table.position[tp.partition] = offset + 1
                if (error := table.apply(key, value)) is not None:
                    log.warning("a record of a global table is left out", at=f"{tp}@{offset}", reason=str(error))
