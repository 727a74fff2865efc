"""The Delta sink: each record once, since a commit carries the offsets it brings the table to.

Records are kept until there are `flush.size` of them or offsets are committed; then they are one append to the table.
A task that begins reads on where the table is, whatever the group has committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from shared.common.lake_append import append_once, table_versions
from shared.common.records import TopicPartition
from shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type, at_least
from shared.connect.connector import Props, SinkConnector
from shared.connect.connectors.arrow_rows import row_of, table_of
from shared.connect.errors import ConnectError, DataError
from shared.connect.record import SinkRecord
from shared.connect.task import Offsets, SinkTask
from shared.connect.worker_config import with_prefix

HIGH, MEDIUM = Importance.HIGH, Importance.MEDIUM


class DeltaSinkTask(SinkTask):
    """Appends one task's records to a Delta table."""

    async def start(self, props: Mapping[str, str]) -> None:
        values = DeltaSinkConnector.config().parse(props)
        self._uri, self._flush_size = values["table.uri"], values["flush.size"]
        self._partition_by = values["partition.by"] or None
        self._options = with_prefix(props, "storage.")
        self._name = props["name"]
        self._buffer: list[SinkRecord] = []
        self._versions: dict[TopicPartition, int | None] = {}

    def _application(self, tp: TopicPartition) -> str:
        return f"{self._name}/{tp.topic}/{tp.partition}"

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        names = {self._application(tp): tp for tp in partitions}
        found = await asyncio.to_thread(table_versions, self._uri, list(names), self._options)
        for application, tp in names.items():
            self._versions[tp] = found.get(application)
            if application in found:
                self.context.offset(tp, found[application])

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        for tp in partitions:
            self._versions.pop(tp, None)
        self._buffer = [record for record in self._buffer if _partition_of(record) not in partitions]

    async def put(self, records: list[SinkRecord]) -> None:
        for record in records:
            try:
                row_of(record)
            except DataError as e:
                reporter = self.context.errant_record_reporter
                if reporter is None:
                    raise ConnectError(f"a record cannot be a row: {e}") from e
                await reporter.report(record, e)
                continue
            self._buffer.append(record)
        if len(self._buffer) >= self._flush_size:
            self.context.request_commit()

    async def flush(self, offsets: Offsets) -> None:
        """One append. Where it fails the task reads again from the offsets last committed: nothing is half there."""
        records, self._buffer = self._buffer, []
        fresh = [r for r in records if r.kafka_offset >= (self._versions.get(_partition_of(r)) or 0)]
        if not fresh:
            return
        ends = {tp: (before, offsets[tp].offset) for tp, before in self._versions.items() if tp in offsets}
        moved = {tp: (before, after) for tp, (before, after) in ends.items() if after > (before or 0)}
        versions = {self._application(tp): pair for tp, pair in moved.items()}
        await asyncio.to_thread(append_once, self._uri, table_of(fresh), versions, self._options, self._partition_by)
        self._versions.update({tp: after for tp, (_, after) in moved.items()})

    async def stop(self) -> None:
        """What was not appended is read again."""


def _partition_of(record: SinkRecord) -> TopicPartition:
    topic, partition, _ = record.original
    return TopicPartition(topic, partition)


class DeltaSinkConnector(SinkConnector):
    """Appends records to a Delta table, each once."""

    task_class = DeltaSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("table.uri", Type.STRING, NO_DEFAULT, HIGH, "The table: a path or a URL such as s3://bucket/table.")
            .define("flush.size", Type.INT, 50_000, HIGH, "After so many records they are appended.", at_least(1))
            .define("partition.by", Type.LIST, "", MEDIUM, "The columns that a new table is partitioned by.")
        )

    async def start(self, props: Props) -> None:
        self._props = dict(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [self._props for _ in range(max_tasks)]
