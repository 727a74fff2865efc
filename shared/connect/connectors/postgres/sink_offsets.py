"""A sink's offsets in the target database: one row for each partition, updated in the same transaction as the data.

A transaction locks the rows of its partitions and compares their offsets with those that the task knows. If they
differ, another task has written to the partition, and the transaction fails. So two tasks never write the same records,
even if one has lost the partition without noticing.

There is one exception: the offset may be the end of the task's own last transaction. If the connection broke before
the response, Postgres may have committed this transaction, so the task continues from there. Perhaps Postgres rolled
it back, and another task has written the same records up to the same offset. The task then continues too: in both
cases the records are written once.

Records that are delivered again are skipped if they are already written. But a task starts at the offset in the table,
and after a complete batch no earlier record is delivered again. So a record below the end of the last complete batch
comes from a topic that was deleted and created again. It raises an error. A new topic that already reaches the stored
offset is not detected, and its records before that offset are skipped. So reset the connector's offsets before you
delete a topic. The broker deletes the group's offsets with the topic, and a later reset covers this topic only if the
group has no other offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.connectors.postgres.database import change_schema
from penstock.shared.connect.connectors.postgres.sql import quoted
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord

NONE = -1
"""The offset of a partition without written records."""


class OffsetTable:
    """The offsets of one connector."""

    def __init__(self, table: str, connector: str) -> None:
        self._table = quoted(table)
        self._connector = connector
        self._known: dict[TopicPartition, int] = {}
        self._written: dict[TopicPartition, int] = {}
        """The end of each partition's last transaction, until it is known to be committed. It may have been rolled
        back."""
        self._begun: dict[TopicPartition, int] = {}

    def __repr__(self) -> str:
        return f"<OffsetTable of {self._connector}, {len(self._known)} partitions>"

    async def open(self, connection: Any, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Create the table and the rows of partitions if they are missing. Returns the next offset of each partition
        with written records."""
        # IF NOT EXISTS alone needs the privilege to create tables, also if the table exists.
        if await connection.fetchval("SELECT to_regclass($1)", self._table) is None:
            await change_schema(
                connection,
                f"CREATE TABLE IF NOT EXISTS {self._table} (connector text, topic text, kafka_partition integer, "
                "next_offset bigint NOT NULL, PRIMARY KEY (connector, topic, kafka_partition))",
            )
        found = {}
        for tp in partitions:
            await connection.execute(
                f"INSERT INTO {self._table} VALUES ($1, $2, $3, {NONE}) ON CONFLICT DO NOTHING",
                self._connector, tp.topic, tp.partition,
            )  # fmt: skip
            self._known[tp] = await self._read_next_offset(connection, tp, "")
            if self._known[tp] != NONE:
                found[tp] = self._known[tp]
            self._begun[tp] = self._known[tp]
        return found

    def close(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._known.pop(tp, None)
            self._written.pop(tp, None)
            self._begun.pop(tp, None)

    async def _read_next_offset(self, connection: Any, tp: TopicPartition, lock: str) -> int:
        row = await connection.fetchrow(
            f"SELECT next_offset FROM {self._table} "
            f"WHERE connector=$1 AND topic=$2 AND kafka_partition=$3 {lock}",
            self._connector, tp.topic, tp.partition,
        )  # fmt: skip
        return NONE if row is None else int(row["next_offset"])

    async def advance(self, connection: Any, records: list[SinkRecord]) -> list[SinkRecord]:
        """Within a transaction, advance the offsets past these records. Returns the records that were not written
        before.

        Raises ConnectError if another task has changed a partition's row to an offset that is not the end of this
        task's last transaction of the partition. Also raises it if a record's offset shows that its topic was deleted
        and created again.
        """
        ends: dict[TopicPartition, int] = {}
        for record in records:
            tp = record.original_tp
            offset = record.kafka_offset
            ends[tp] = max(ends.get(tp, NONE), offset + 1)
            # Earlier records are written and not delivered again: this one is of a topic that was created again.
            if offset < self._begun.get(tp, NONE):
                raise ConnectError(
                    f"{tp} is read from offset {offset}, and the database has it up to {self._begun[tp]}: was the "
                    "topic deleted and created again? Alter the partition's offset to null to have its records written"
                )
        for tp in sorted(ends):
            found = await self._read_next_offset(connection, tp, "FOR UPDATE")
            # The last transaction was committed without a response, or another task has written up to its end. In both
            # cases its records are written.
            if found == self._written.get(tp):
                self._known[tp] = found
            # Another task has written since: the partition belongs to it, and this task is a zombie.
            if found != self._known.get(tp):
                raise ConnectError(f"{tp} was written by another task, up to {found}: this task cannot continue")
            if ends[tp] > found:
                await connection.execute(
                    f"UPDATE {self._table} SET next_offset=$4 "
                    "WHERE connector=$1 AND topic=$2 AND kafka_partition=$3",
                    self._connector, tp.topic, tp.partition, ends[tp],
                )  # fmt: skip
        # The ends of other partitions stay: it may still be unknown whether their last transaction was committed.
        self._written |= {tp: max(end, self._known[tp]) for tp, end in ends.items()}
        return [record for record in records if record.kafka_offset >= self._known[record.original_tp]]

    def committed(self, records: list[SinkRecord]) -> None:
        """Note that the transaction is committed in which `advance` was called with these records."""
        for tp in {record.original_tp for record in records}:
            self._known[tp] = self._written.pop(tp)

    def settled(self) -> None:
        """Note that the delivered records are processed: none of them is delivered again."""
        self._begun.update(self._known)

    async def forget(self, connection: Any) -> None:
        """Note that no partition has written records. Does nothing if the table is missing, or if the user lacks the
        privilege to update it."""
        if await connection.fetchval("SELECT has_table_privilege(to_regclass($1), 'UPDATE')", self._table):
            await self._forget_all(connection)

    async def _forget_all(self, connection: Any) -> None:
        await connection.execute(
            f"UPDATE {self._table} SET next_offset={NONE} WHERE connector=$1 AND next_offset<>{NONE}", self._connector
        )

    async def alter(self, connection: Any, offsets: Mapping[TopicPartition, int | None]) -> None:
        """Set offsets by hand. None means that the partition has no written records.

        No offsets at all mean a reset while the group has none: no partition has written records.
        """
        await self.open(connection, offsets)
        if not offsets:
            await self._forget_all(connection)
        for tp, offset in offsets.items():
            await connection.execute(
                f"UPDATE {self._table} SET next_offset=$4 "
                "WHERE connector=$1 AND topic=$2 AND kafka_partition=$3",
                self._connector, tp.topic, tp.partition, NONE if offset is None else offset,
            )  # fmt: skip
