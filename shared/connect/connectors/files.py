"""Files on a local disk or an object store: Parquet or JSON lines, each of exactly `flush.size` records.

A file's name is its first record's offset and it is written whole, so that a task that begins again writes the same
files again, with the same content: each record is in the files once. Only what is in a file is committed. With
`rotate.interval.ms` a file may be closed earlier by time, which trades that for freshness: a crash can then leave two
files that overlap.
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

from shared.common.records import OffsetAndMetadata, TopicPartition
from shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type, at_least, one_of
from shared.connect.connector import Props, SinkConnector
from shared.connect.connectors.arrow_rows import table_of
from shared.connect.converters.json_schema import value_to_json
from shared.connect.errors import ConfigError, RetriableError
from shared.connect.record import SinkRecord
from shared.connect.task import Offsets, SinkTask
from shared.connect.worker_config import with_prefix

HIGH, MEDIUM, LOW = Importance.HIGH, Importance.MEDIUM, Importance.LOW
SUFFIX = {"parquet": ".parquet", "json": ".jsonl"}


def file_system(url: str, options: Mapping[str, str]) -> tuple[Any, str]:
    """The file system of a URL with the path in it: pyarrow's own, or fsspec's where that has options or knows more."""
    scheme = url.partition("://")[0] if "://" in url else "file"
    if not options and scheme in ("file", "s3", "gs", "hdfs"):
        if "://" not in url:
            return pa_fs.LocalFileSystem(), url
        found: tuple[Any, str] = pa_fs.FileSystem.from_uri(url)
        return found
    try:
        fsspec = importlib.import_module("fsspec")
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as e:
        raise ConfigError(f"url: {url}: {e}") from None
    return pa_fs.PyFileSystem(pa_fs.FSSpecHandler(system)), path


class FilesSinkTask(SinkTask):
    """Writes one task's partitions, each to files of its own."""

    async def start(self, props: Mapping[str, str]) -> None:
        self._values = FilesSinkConnector.config().parse(props)
        self._system, self._root = await asyncio.to_thread(
            file_system, self._values["url"], with_prefix(props, "storage.")
        )
        self._buffers: dict[TopicPartition, list[SinkRecord]] = {}
        self._since: dict[TopicPartition, float] = {}
        self._written: dict[TopicPartition, int] = {}

    async def open(self, partitions: frozenset[TopicPartition]) -> None:
        for tp in partitions:
            self._buffers[tp] = []

    async def close(self, partitions: frozenset[TopicPartition]) -> None:
        for tp in partitions:  # what is in no file yet is read again
            for kept in (self._buffers, self._since, self._written):
                kept.pop(tp, None)

    async def put(self, records: list[SinkRecord]) -> None:
        for record in records:
            topic, partition, _ = record.original
            buffer = self._buffers.setdefault(TopicPartition(topic, partition), [])
            # After a passing failure the same records come again, and some of them may be here already.
            if not buffer or record.kafka_offset > buffer[-1].kafka_offset:
                buffer.append(record)
        size = self._values["flush.size"]
        for tp, buffer in self._buffers.items():
            while len(buffer) >= size:
                await self._write(tp, size)
            if buffer and self._is_due(tp):
                await self._write(tp, len(buffer))

    def _is_due(self, tp: TopicPartition) -> bool:
        interval_ms, now = self._values["rotate.interval.ms"], time.monotonic()
        return bool(interval_ms > 0 and now - self._since.setdefault(tp, now) >= interval_ms / 1000)

    async def _write(self, tp: TopicPartition, count: int) -> None:
        buffer = self._buffers[tp]
        records = buffer[:count]
        first, last = records[0].kafka_offset, records[-1].kafka_offset
        name = f"{tp.topic}+{tp.partition}+{first:020d}{SUFFIX[self._values['format']]}"
        path = f"{self._root.rstrip('/')}/{tp.topic}/partition={tp.partition}/{name}"
        data = await asyncio.to_thread(self._encoded, records)
        try:
            await asyncio.to_thread(self._store, path, data)
        except OSError as e:
            self.context.timeout(self._values["retry.backoff.ms"])
            raise RetriableError(f"{path}: {e}") from e
        del buffer[:count]
        self._since.pop(tp, None)
        self._written[tp] = last + 1

    def _encoded(self, records: list[SinkRecord]) -> bytes:
        if self._values["format"] == "json":
            rows = [value_to_json(record.value_schema, record.value) for record in records]
            return msgspec.json.Encoder().encode_lines(rows)
        sink = pa.BufferOutputStream()
        pq.write_table(table_of(records), sink, compression=self._values["parquet.codec"])
        encoded: bytes = sink.getvalue().to_pybytes()
        return encoded

    def _store(self, path: str, data: bytes) -> None:
        self._system.create_dir(path.rpartition("/")[0], recursive=True)
        is_local = isinstance(self._system, pa_fs.LocalFileSystem)
        beside = f"{path}.new" if is_local else path  # an object appears whole; a file must be put in its place
        with self._system.open_output_stream(beside) as stream:
            stream.write(data)
        if is_local:
            self._system.move(beside, path)

    async def pre_commit(self, offsets: Offsets) -> Offsets:
        written, self._written = self._written, {}
        return {tp: OffsetAndMetadata(offset) for tp, offset in written.items() if tp in offsets}

    async def stop(self) -> None:
        """Whatever is in no file yet is read again."""


class FilesSinkConnector(SinkConnector):
    """Writes records to Parquet or JSON files, on disk or an object store."""

    task_class = FilesSinkTask

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("url", Type.STRING, NO_DEFAULT, HIGH,
                    "The folder: a path, or a URL such as s3://bucket/folder?region=eu-west-1.")
            .define("format", Type.STRING, "parquet", HIGH, "parquet or json (lines).", one_of(*SUFFIX))
            .define("flush.size", Type.INT, 10_000, HIGH, "Records of one file.", at_least(1))
            .define("rotate.interval.ms", Type.LONG, 0, MEDIUM, "After how long a smaller file is closed; 0: never.",
                    at_least(0))
            .define("parquet.codec", Type.STRING, "snappy", LOW, "The compression of Parquet.",
                    one_of("none", "snappy", "gzip", "zstd", "lz4"))
            .define("retry.backoff.ms", Type.INT, 3_000, LOW, "How long after a failed write.", at_least(0))
        )  # fmt: skip

    async def start(self, props: Props) -> None:
        self._props = dict(props)

    async def task_configs(self, max_tasks: int) -> list[dict[str, str]]:
        return [self._props for _ in range(max_tasks)]

    async def alter_offsets(self, props: Props, offsets: object) -> bool:
        return True
