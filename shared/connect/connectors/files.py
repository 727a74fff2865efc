"""The files sink: Parquet or JSON lines on a local disk or an object store, with `flush.size` records in each file.

A file has the offset of its first record in its name, and is written as a whole. A restarted task writes the same files
with the same content again, so each record is in the files once. Offsets are committed only when their records are in
files, or were dropped by a transform or a tolerated error. `rotate.interval.ms` closes files after a time, for fresher
data. The price is that two files can overlap after a crash. A record that cannot be written is reported as an error,
and its file has fewer records.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.extras import needs
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.connect.allowed_files import FILES_ALLOWED, local_path
from penstock.shared.connect.config_def import (
    HIGH,
    LOW,
    MEDIUM,
    NO_DEFAULT,
    ConfigDef,
    ConfigValue,
    Type,
    at_least,
    one_of,
)
from penstock.shared.connect.connector import Props, SinkConnector
from penstock.shared.connect.connectors.arrow_rows import NothingInIt, check_row, columns_of_file, table_of
from penstock.shared.connect.connectors.retries import Retries
from penstock.shared.connect.converters.json import decimals_are_numeric, value_to_json, with_decimal_format
from penstock.shared.connect.errors import ConnectError, summary_of
from penstock.shared.connect.properties import with_prefix
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.redaction import without_passwords
from penstock.shared.connect.task import Offsets, SinkTask

NEVER_MS = float("inf")
SUFFIX = {"parquet": ".parquet", "json": ".jsonl"}


def file_system_of(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """Return the file system for a URL, and the path in it.

    It has pyarrow's interface. For `s3`, `gs` and `hdfs` without options it is pyarrow's own. Otherwise it wraps
    fsspec's.
    """
    scheme = url.partition("://")[0]
    if not options and scheme in ("s3", "gs", "hdfs"):
        found: tuple[Any, str] = pa_fs.FileSystem.from_uri(url)
        return found
    if "protocol" in options:
        raise ConfigError(f"storage.protocol={options['protocol']}: the url names the store; remove this setting")
    try:
        with needs("the files sink", "files"):
            fsspec = importlib.import_module("fsspec")
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as e:
        raise ConfigError(f"url: {without_passwords(url)}: {e}") from None
    return pa_fs.PyFileSystem(pa_fs.FSSpecHandler(system)), path


def _reject_options_of_local_folder(url: str, options: Mapping[str, str]) -> None:
    """Raise ConfigError if the files sink has `storage.` options for a local folder, which takes none."""
    if options and local_path("url", url) is not None:
        raise ConfigError(
            f"storage.{next(iter(options))}: url={url} is a folder of this machine, which takes no options"
        )


class FilesSinkTask(SinkTask):
    """Writes each of a task's partitions to its own files."""

    async def start(self, props: Mapping[str, str]) -> None:
        self._values = FilesSinkConnector.config().parse(props)
        url = self._values["url"]
        options = with_prefix(props, "storage.")
        _reject_options_of_local_folder(url, options)
        # Without a store, `url` is a folder of this machine.
        self._system: Any = None
        self._root = url
        if local_path("url", url) is None:
            self.context.files.resolved("url", url)
            self._system, self._root = await asyncio.to_thread(file_system_of, url, options)
        self._retries = Retries(self._values["max.retries"])
        self._buffers: dict[TopicPartition, list[SinkRecord]] = {}
        self._since: dict[TopicPartition, float] = {}
        self._taken: dict[TopicPartition, int] = {}
        self._rejected: dict[TopicPartition, set[int]] = {}
        self._written: dict[TopicPartition, int] = {}
        """The offset after each partition's last file, until `put` returns."""

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        self._forget_partitions(partitions)

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        # Records that are not yet in a file are read again.
        self._forget_partitions(partitions)

    def _forget_partitions(self, partitions: frozenset[TopicPartition]) -> None:
        kept: dict[TopicPartition, Any]
        for kept in (self._buffers, self._since, self._taken, self._rejected, self._written):
            for tp in partitions:
                kept.pop(tp, None)

    async def put(self, records: list[SinkRecord]) -> None:
        for record in records:
            tp = record.original_tp
            # After a temporary error the same records are delivered again. Those taken are in a buffer or in a file.
            if record.kafka_offset >= self._taken.get(tp, 0):
                self._taken[tp] = record.kafka_offset + 1
                self._buffers.setdefault(tp, []).append(record)
        size = self._values["flush.size"]
        for tp, buffer in self._buffers.items():
            while len(buffer) >= size:
                await self._write_partition_file(tp, size)
            if buffer and self._due_in_ms(tp) <= 0:
                await self._write_partition_file(tp, len(buffer))
        # All records are taken, so this batch is not delivered again.
        self._taken.clear()
        self._written.clear()
        due_in_ms = min((self._due_in_ms(tp) for tp, buffer in self._buffers.items() if buffer), default=NEVER_MS)
        if due_in_ms < NEVER_MS:
            # Without the timeout, `put` may be called only when the next commit is due.
            self.context.timeout(max(1, int(due_in_ms)))

    def _due_in_ms(self, tp: TopicPartition) -> float:
        """Return the ms until a partition's file is closed at any size; NEVER_MS without `rotate.interval.ms`."""
        interval_ms = self._values["rotate.interval.ms"]
        now = time.monotonic()
        if interval_ms == 0:
            return NEVER_MS
        return float(interval_ms - (now - self._since.setdefault(tp, now)) * 1000)

    async def _write_partition_file(self, tp: TopicPartition, count: int) -> None:
        buffer = self._buffers[tp]
        first = buffer[0].kafka_offset
        last = buffer[count - 1].kafka_offset
        # The name has the first offset, so a file that is written again after a failure replaces itself.
        name = f"{tp.topic}+{tp.partition}+{first:020d}{SUFFIX[self._values['format']]}"
        path = f"{self._root.rstrip('/')}/{tp.topic}/partition={tp.partition}/{name}"
        data = await self._encode_valid_records(tp, buffer[:count])
        try:
            if data is not None:
                await asyncio.to_thread(self._store_file, path, data)
        except Exception as e:
            # The stores of fsspec raise errors of their own, such as gcsfs' HttpError.
            if self._system is None and not isinstance(e, OSError):
                raise
            self.context.timeout(self._values["retry.backoff.ms"])
            raise self._retries.failed(f"{path}: {summary_of(e)}") from e
        self._retries.succeeded()
        del buffer[:count]
        for kept in (self._since, self._rejected):
            kept.pop(tp, None)
        self._written[tp] = last + 1

    async def _encode_valid_records(self, tp: TopicPartition, records: list[SinkRecord]) -> bytes | None:
        """Return the bytes of a file with the valid records, or None if no record is valid.

        Each invalid record is reported once. Raises ConnectError for an invalid record if the task has no reporter, or
        if the error is not tolerated.
        """
        rejected = self._rejected.setdefault(tp, set())
        if self._values["format"] == "parquet":
            for record in records:
                if record.kafka_offset not in rejected:
                    try:
                        check_row(record)
                    except DataError as e:
                        await self._reject(record, e, rejected)
        while fit := [record for record in records if record.kafka_offset not in rejected]:
            try:
                return await asyncio.to_thread(self._encode_file, fit)
            except NothingInIt as e:
                for record in fit:
                    await self._reject(record, e, rejected)
            except DataError as e:
                for record, error in await asyncio.to_thread(self._unfit, fit, e):
                    await self._reject(record, error, rejected)
        return None

    async def _reject(self, record: SinkRecord, error: DataError, rejected: set[int]) -> None:
        """Report an invalid record, and add its offset to `rejected`.

        Raises ConnectError if there is no reporter, or if the error is not tolerated.
        """
        reporter = self.context.errant_record_reporter
        if reporter is None:
            raise ConnectError(f"a record cannot be in a file: {error}") from error
        rejected.add(record.kafka_offset)
        await reporter.report(record, error)

    def _unfit(self, records: list[SinkRecord], error: DataError) -> list[tuple[SinkRecord, DataError]]:
        """Return the first record that cannot be in one file with the records before it, and later ones with the same
        conflict, each with its error. `error` is the error of all `records` in one file.

        A bisection for each invalid record would take minutes if a file has thousands of them. So there are three
        steps:

        1. Find the first unfit record, by bisection.
        2. Find the record before it that it conflicts with, by bisection. There is none before the first record.
        3. Find each later record that does not fit the record of step 2 alone.
        """
        end, error = self._shortest_unfit(records, [], error)
        before = records[: end - 1]
        first = records[end - 1]
        conflict, _ = self._shortest_unfit(before, [first], error)
        fixed = before[conflict - 1 : conflict]
        unfit = [(first, error)]
        for record in records[end:]:
            try:
                self._rows_of([*fixed, record])
            except DataError as e:
                unfit.append((record, e))
        return unfit

    def _shortest_unfit(
        self, records: list[SinkRecord], last: list[SinkRecord], error: DataError
    ) -> tuple[int, DataError]:
        """Return the length of the shortest prefix of `records` that does not fit one file together with `last`, and
        its error.

        The length is at least 1, or 0 if `records` is empty. `error` is the error of all of them.
        """
        fine = 0
        unfit = len(records)
        while unfit - fine > 1:
            middle = (fine + unfit) // 2
            try:
                self._rows_of([*records[:middle], *last])
                fine = middle
            except DataError as e:
                unfit = middle
                error = e
        return unfit, error

    def _rows_of(self, records: list[SinkRecord]) -> Any:
        """Return the rows of a file: a list for JSON, an Arrow table for Parquet. Raises DataError if a record does not
        fit."""
        if self._values["format"] == "json":
            numeric = decimals_are_numeric(self._values)
            return [value_to_json(record.value_schema, record.value, numeric) for record in records]
        return table_of(records)

    def _encode_file(self, records: list[SinkRecord]) -> bytes:
        rows = self._rows_of(records)
        if self._values["format"] == "json":
            return msgspec.json.Encoder(decimal_format="number").encode_lines(rows)
        sink = pa.BufferOutputStream()
        pq.write_table(columns_of_file(rows), sink, compression=self._values["parquet.codec"])
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded

    def _store_file(self, path: str, data: bytes) -> None:
        if self._system is None:
            self.context.files.write_whole("url", path, data)
            return
        self._system.create_dir(path.rpartition("/")[0], recursive=True)
        with self._system.open_output_stream(path) as stream:
            # An object store shows an object only when it is complete.
            stream.write(data)

    async def pre_commit(self, offsets: Offsets) -> Offsets:
        found = {}
        for tp, delivered in offsets.items():
            # There are three cases:
            # 1. A file ends with records of a batch that waits for redelivery. Nothing is committed: a restart at an
            #    offset within the file would write its records to another file again.
            # 2. Records are buffered. They are not committed: after a failure they are read again.
            # 3. All records are in files, or were dropped before `put`. All offsets are committed.
            if self._written.get(tp, 0) <= delivered.offset:
                first = next((record.kafka_offset for record in self._buffers.get(tp, ())), delivered.offset)
                found[tp] = OffsetAndMetadata(min(first, delivered.offset))
        return found

    async def stop(self) -> None:
        """Nothing to do: records that are not yet in a file are read again."""


class FilesSinkConnector(SinkConnector):
    """Writes records to Parquet or JSON files, on disk or in an object store."""

    task_class = FilesSinkTask
    file_settings = ("url",)

    @classmethod
    def config(cls) -> ConfigDef:
        return with_decimal_format(
            ConfigDef()
            .define("url", Type.STRING, NO_DEFAULT, HIGH,
                    "Path or URL of the folder, such as s3://bucket/folder?region=eu-west-1. The worker's "
                    f"{FILES_ALLOWED} must allow it.")
            .define("format", Type.STRING, "parquet", HIGH,
                    "File format: parquet, or json (one object a line).", one_of(*SUFFIX))
            .define("flush.size", Type.INT, 10_000, HIGH, "Number of records in a file.", at_least(1))
            .define("rotate.interval.ms", Type.LONG, 0, MEDIUM, "Time after which a smaller file is closed. 0: never.",
                    at_least(0))
            .define("parquet.codec", Type.STRING, "snappy", LOW, "Compression codec of Parquet files.",
                    one_of("none", "snappy", "gzip", "zstd", "lz4"))
            .define("max.retries", Type.INT, 10, LOW, "Maximum number of retries of a failed write.", at_least(0))
            .define("retry.backoff.ms", Type.INT, 3_000, LOW, "Delay before a failed write is retried.", at_least(1))
        )  # fmt: skip

    def validate(self, props: Props) -> list[ConfigValue]:
        found = super().validate(props)
        for value in found:
            if value.name == "url" and value.value and not value.errors:
                try:
                    _reject_options_of_local_folder(value.value, with_prefix(props, "storage."))
                except ConfigError as e:
                    value.errors.append(str(e))
        return found

    async def alter_offsets(self, props: Props, offsets: object) -> bool:
        return True
