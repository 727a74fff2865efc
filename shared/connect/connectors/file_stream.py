"""FileStreamSource and FileStreamSink: lines of a file to a topic, and records to lines of a file.

They have the names, settings and source offsets of Kafka Connect's connectors. The record of a line has a string
schema and no key. Its source offset is the position in the file after the line's end. A line becomes a record
only when it has an end. A source whose file does not exist waits for it.
"""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import Mapping
from typing import IO

from penstock.shared.connect.config_def import NO_DEFAULT, ConfigDef, Importance, Type, at_least, non_empty
from penstock.shared.connect.connector import ExactlyOnceSupport, Props, SinkConnector, SourceConnector
from penstock.shared.connect.converters.plain import java_text
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition, SinkRecord, SourceRecord
from penstock.shared.connect.schema import STRING
from penstock.shared.connect.task import SinkTask, SourceTask

READ_BYTES = 1 << 18
LINE_BYTES_MAX = 64 << 20
"""A longer line fails the task before it uses up memory."""
IDLE_MS = 1_000
"""The wait of a poll without data."""


class FileStreamSourceTask(SourceTask):
    kafka_class = "org.apache.kafka.connect.file.FileStreamSourceTask"

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._buffer = b""
        self._position: int | None = None

    async def start(self, props: Mapping[str, str]) -> None:
        self._path = props.get("file") or None
        self._topic = props["topic"]
        self._batch_size = int(props.get("batch.size", "2000"))
        self._partition = {"filename": self._path}

    async def poll(self) -> list[SourceRecord] | None:
        if self._file is None and not await self._open_source_file():
            await asyncio.sleep(IDLE_MS / 1000)
            return None
        lines = self._take_complete_lines()
        if not lines:
            file = self._file
            assert file is not None
            if file is sys.stdin.buffer:
                data = _read_if_ready(file)
            else:
                data = await asyncio.to_thread(file.read, READ_BYTES)
            self._buffer += data
            if len(self._buffer) > LINE_BYTES_MAX:
                raise ConnectError(f"{self._path}: a line has more than {LINE_BYTES_MAX} bytes")
            lines = self._take_complete_lines()
            if not lines:
                await asyncio.sleep(0 if data else IDLE_MS / 1000)
                return None
        return [self._record_of_line(line, size) for line, size in lines]

    async def _open_source_file(self) -> bool:
        if self._path is None:
            self._file = sys.stdin.buffer
            return True
        try:
            file = await asyncio.to_thread(self.context.files.open, "file", self._path, "rb")
        except FileNotFoundError:
            return False
        stored = await self.context.offset_storage_reader.offset(self._partition)
        position = 0 if stored is None else stored.get("position", 0)
        if type(position) is not int or position < 0:
            raise ConnectError(f"{self._path}: the stored position {position!r} is not a byte offset")
        await asyncio.to_thread(file.seek, position)
        self._position = position
        self._file = file
        return True

    def _take_complete_lines(self) -> list[tuple[bytes, int]]:
        """Take at most `batch.size` complete lines out of the buffer. \\n, \\r\\n or \\r ends a line.

        A line that ends with \\r at the end of the buffer stays there, since \\n may follow.

        Returns each line without its end, and its size in bytes with the end.
        """
        found: list[tuple[bytes, int]] = []
        lines = self._buffer.splitlines(keepends=True) if self._buffer else []
        used = 0
        for at, whole in enumerate(lines):
            last = at == len(lines) - 1
            # The last line may be incomplete: a \r at the end of the buffer may be the first half of \r\n.
            if len(found) == self._batch_size or (last and not whole.endswith(b"\n")):
                break
            found.append((whole.rstrip(b"\r\n"), len(whole)))
            used += len(whole)
        self._buffer = self._buffer[used:]
        return found

    def _record_of_line(self, line: bytes, size: int) -> SourceRecord:
        offset = None
        if self._position is not None:
            self._position += size
            offset = {"position": self._position}
        return SourceRecord(
            self._topic, None, None, None, STRING, line.decode(errors="replace"),
            source_partition=self._partition, source_offset=offset or {},
        )  # fmt: skip

    async def stop(self) -> None:
        if self._file is not None and self._file is not sys.stdin.buffer:
            self._file.close()


def _read_if_ready(file: IO[bytes]) -> bytes:
    """Return at most READ_BYTES of the input that is available now."""
    # A read that waits in a thread would outlive the task, and take the next task's input.
    ready, _, _ = select.select([file], [], [], 0)
    return os.read(file.fileno(), READ_BYTES) if ready else b""


class FileStreamSourceConnector(SourceConnector):
    """Reads a file line by line, and continues as it grows."""

    kafka_class = "org.apache.kafka.connect.file.FileStreamSourceConnector"
    task_class = FileStreamSourceTask
    file_settings = ("file",)

    @classmethod
    def config(cls) -> ConfigDef:
        return (
            ConfigDef()
            .define("file", Type.STRING, None, Importance.HIGH, "File to read. Default: standard input.")
            .define("topic", Type.STRING, NO_DEFAULT, Importance.HIGH, "Topic to write to.", non_empty)
            .define("batch.size", Type.INT, 2000, Importance.LOW, "Maximum number of records of one poll.", at_least(1))
        )

    def exactly_once_support(self, props: Props) -> ExactlyOnceSupport:
        return ExactlyOnceSupport.SUPPORTED if props.get("file") else ExactlyOnceSupport.UNSUPPORTED

    async def alter_offsets(self, props: Props, offsets: list[tuple[Partition, Offset | None]]) -> bool:
        if not props.get("file"):
            raise ConnectError(
                "Offsets cannot be modified if the 'file' configuration is unspecified: standard input has none"
            )
        for partition, offset in offsets:
            if offset is None:
                continue
            if set(partition) != {"filename"}:
                raise ConnectError("Partition objects should contain the key 'filename' alone")
            position = offset.get("position")
            if type(position) is not int or position < 0:
                raise ConnectError(f"The value of 'position' must be a non-negative number, not {position!r}")
        return True


class FileStreamSinkTask(SinkTask):
    kafka_class = "org.apache.kafka.connect.file.FileStreamSinkTask"

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    async def start(self, props: Mapping[str, str]) -> None:
        path = props.get("file") or None
        try:
            opened = None if path is None else await asyncio.to_thread(self.context.files.open, "file", path, "a")
            self._file = opened or sys.stdout
        except OSError as e:
            raise ConnectError(f"Couldn't find or create file '{path}' for FileStreamSinkTask: {e.strerror}") from e

    async def put(self, records: list[SinkRecord]) -> None:
        if records and self._file is not None:
            lines = [java_text(record.value, record.value_schema) for record in records]
            lines.append("")
            self._file.write("\n".join(lines))
            # As in Kafka Connect, a reader of the file sees each batch immediately.
            self._file.flush()

    async def stop(self) -> None:
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()


class FileStreamSinkConnector(SinkConnector):
    """Writes each record's value as a line at a file's end."""

    kafka_class = "org.apache.kafka.connect.file.FileStreamSinkConnector"
    task_class = FileStreamSinkTask
    file_settings = ("file",)

    @classmethod
    def config(cls) -> ConfigDef:
        documentation = "File to write to. Default: standard output."
        return ConfigDef().define("file", Type.STRING, None, Importance.HIGH, documentation)

    async def alter_offsets(self, props: Props, offsets: object) -> bool:
        return True
