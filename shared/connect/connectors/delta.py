"""The Delta sink. It writes each record once, because each commit to the table also stores the offsets of its records.

Records are buffered until there are `flush.size` of them or offsets are committed. One append then writes them to the
table. If the table has an offset of a partition, a task starts there, and ignores the group's committed offset.

A record with a lower offset than the table's fails the task, because its topic was deleted and created again. The same
holds for an offset below that of the previous record, unless a temporary error came in between. A new topic that
already reaches the table's offset is not detected, and its records before that offset are skipped. So reset the
connector's offsets before you delete a topic. The broker deletes the group's offsets with the topic, and a later reset
does not know the topic's partitions. Their offsets can then only be altered to null, one by one.

After a temporary error of an append the task reads the records again, at most APPEND_RETRIES_MAX times in a row. The
next `put` raises any other error, and the error after these retries, which fails the task. An error of `flush` alone
does not: the worker would read the records again, forever.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.lake.append_once import append_once, has_table, set_table_versions, table_versions
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.allowed_files import FILES_ALLOWED, local_path
from penstock.shared.connect.config_def import HIGH, MEDIUM, NO_DEFAULT, ConfigDef, Type, at_least
from penstock.shared.connect.connector import Props, SinkConnector
from penstock.shared.connect.connectors.arrow_rows import check_row, table_of
from penstock.shared.connect.connectors.retries import Retries
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.task import Offsets, SinkTask

APPEND_RETRIES_MAX = 10
"""The retries of a failed append. Delta's errors do not tell whether they are temporary."""


class DeltaSinkTask(SinkTask):
    """Appends one task's records to a Delta table."""

    async def start(self, props: Mapping[str, str]) -> None:
        values = DeltaSinkConnector.config().parse(props)
        self._uri = values["table.uri"]
        self._flush_size = values["flush.size"]
        self._partition_by = values["partition.by"] or None
        self._options = with_prefix(props, "storage.")
        self._name = props["name"]
        self._buffer: list[SinkRecord] = []
        self._versions: dict[TopicPartition, int | None] = {}
        self._opened: dict[TopicPartition, int] = {}
        self._begun: dict[TopicPartition, int] = {}
        # The offsets that the last failed append would have stored. It may be in the table: a response can be lost.
        self._maybe_appended: dict[TopicPartition, int] = {}
        self._retries = Retries(APPEND_RETRIES_MAX)
        self._failure: Exception | None = None

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        names = {delta_application_id(self._name, tp): tp for tp in partitions}
        found = await asyncio.to_thread(table_versions, self._allowed_table_uri(), list(names), self._options)
        for name, tp in names.items():
            self._versions[tp] = found.get(name)
            self._opened[tp] = found.get(name, 0)
            self._begun[tp] = self._opened[tp]
            if name in found:
                self.context.offset(tp, found[name])

    def _allowed_table_uri(self) -> str:
        """Return the table's resolved location. Raises ConfigError if the table or its log is not allowed.

        Checked again before each use, since the table or its log may have become a link.
        """
        files = self.context.files
        uri = files.resolved("table.uri", self._uri)
        if local_path("table.uri", self._uri) is not None:
            files.resolved("table.uri", f"{uri}/_delta_log")
        return uri

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        for tp in partitions:
            self._versions.pop(tp, None)
            self._opened.pop(tp, None)
            self._begun.pop(tp, None)
            self._maybe_appended.pop(tp, None)
        self._buffer = [record for record in self._buffer if record.original_tp not in partitions]

    async def put(self, records: list[SinkRecord]) -> None:
        if self._failure is not None:
            raise self._failure
        begun = dict(self._begun)
        rows = []
        for record in records:
            _check_begun(record, begun)
            try:
                check_row(record)
            except DataError as e:
                await self._report_errant_record(record, e)
                continue
            rows.append(record)
        # Only now: if a report has raised RetriableError, all these records are delivered again.
        self._begun = begun
        self._buffer += rows
        if len(self._buffer) >= self._flush_size:
            self.context.request_commit()

    async def _report_errant_record(self, record: SinkRecord, error: DataError) -> None:
        reporter = self.context.errant_record_reporter
        if reporter is None:
            raise ConnectError(f"a record cannot be a row: {error}") from error
        await reporter.report(record, error)

    async def flush(self, offsets: Offsets) -> None:
        """Append the buffered records of these partitions. After a temporary error the worker delivers the records of
        all partitions again.

        Records that the table has already are skipped. Records of other partitions stay in the buffer, since their
        offsets are not committed now.
        """
        mine = [record for record in self._buffer if record.original_tp in offsets]
        self._buffer = [record for record in self._buffer if record.original_tp not in offsets]
        try:
            await self._find_failed_append()
            fresh = [record for record in mine if record.kafka_offset >= (self._versions.get(record.original_tp) or 0)]
            await self._append_to_delta_table(fresh, {tp: offset.offset for tp, offset in offsets.items()})
        except RetriableError as e:
            # The worker reads all partitions again, also those whose offsets are not committed now.
            self._buffer = []
            self._begun = dict(self._opened)
            error = self._retries.failed(str(e))
            if not isinstance(error, RetriableError):
                self._failure = error
            raise error from e
        except Exception as e:
            self._failure = e
            raise

    async def _find_failed_append(self) -> None:
        """If the table has the last failed append, continue from its offsets.

        Offsets that another writer has stored are not taken, and fence the next append.
        """
        if not self._maybe_appended:
            return
        names = {delta_application_id(self._name, tp): tp for tp in self._maybe_appended}
        found = await asyncio.to_thread(table_versions, self._allowed_table_uri(), list(names), self._options)
        self._versions.update(
            {tp: found[name] for name, tp in names.items() if found.get(name) == self._maybe_appended[tp]}
        )
        self._maybe_appended = {}

    async def _append_to_delta_table(self, records: list[SinkRecord], ends: Mapping[TopicPartition, int]) -> None:
        """Append records, and in the same commit store `ends`, the next offsets of the partitions. Records that do not
        fit the table are reported as errors."""
        if not records:
            return
        moved = {tp: (at, ends[tp]) for tp, at in self._versions.items() if tp in ends and ends[tp] > (at or 0)}
        versions = {delta_application_id(self._name, tp): pair for tp, pair in moved.items()}
        try:
            rows = await asyncio.to_thread(table_of, records, decimal256=False)
            await asyncio.to_thread(
                append_once, self._allowed_table_uri(), rows, versions, self._options, self._partition_by
            )
        except RetriableError:
            self._maybe_appended = {tp: after for tp, (_, after) in moved.items()}
            raise
        except DataError as e:
            if len(records) == 1 or self.context.errant_record_reporter is None:
                await self._report_errant_record(records[0], e)
                return
            # Each half is appended alone, to find the records that do not fit.
            half = len(records) // 2
            await self._append_to_delta_table(
                records[:half], {record.original_tp: record.kafka_offset + 1 for record in records[:half]}
            )
            await self._append_to_delta_table(records[half:], ends)
            return
        self._versions.update({tp: after for tp, (_, after) in moved.items()})
        self._retries.succeeded()

    async def stop(self) -> None:
        """Nothing to do: records that were not appended are read again."""


def delta_application_id(connector: str, tp: TopicPartition) -> str:
    """Return the application id under which the Delta sink stores a partition's offset in the table's log."""
    return f"{connector}/{tp.topic}/{tp.partition}"


def _check_begun(record: SinkRecord, begun: dict[TopicPartition, int]) -> None:
    """Move a partition's next offset in `begun` past the record. Raises ConnectError if the record is before it."""
    tp = record.original_tp
    offset = record.kafka_offset
    if offset < begun.get(tp, 0):
        raise ConnectError(
            f"{tp} is read from offset {offset}, and was read up to {begun[tp]}: was the topic "
            "deleted and created again? Alter the partition's offset to null to have its records appended"
        )
    begun[tp] = offset + 1


class DeltaSinkConnector(SinkConnector):
    """Appends records to a Delta table, each once."""

    task_class = DeltaSinkTask
    file_settings = ("table.uri",)

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("table.uri", Type.STRING, NO_DEFAULT, HIGH,
                    "Path or URL of the table, such as s3://bucket/table. The worker's "
                    f"{FILES_ALLOWED} must allow it.")
            .define("flush.size", Type.INT, 50_000, HIGH,
                    "Number of records after which they are appended to the table.", at_least(1))
            .define("partition.by", Type.LIST, "", MEDIUM, "Partition columns of a new table.")
        )  # fmt: skip

    async def alter_offsets(self, props: Props, offsets: Mapping[TopicPartition, int | None]) -> bool:
        uri = DeltaSinkConnector.config().parse(props)["table.uri"]
        if (path := local_path("table.uri", uri)) is not None:
            # The worker has just checked that the path is allowed.
            uri = await asyncio.to_thread(os.path.realpath, path)
        options = with_prefix(props, "storage.")
        # Only a reset has no partitions, if the group has no offsets. The table cannot list those that it has.
        if not offsets and await asyncio.to_thread(has_table, uri, options):
            raise ConnectError(
                "the connector's group has no offsets, so a reset does not know which offsets of the table to remove: "
                "alter the offset of each partition to null instead"
            )
        versions = {delta_application_id(props["name"], tp): offset for tp, offset in offsets.items()}
        await asyncio.to_thread(set_table_versions, uri, versions, options)
        return True
