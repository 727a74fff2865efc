"""The stores of source offsets (an edge): in memory, in a file, or in the offset topic.

Each is an `OffsetBackingStore`. Keys are compared by content and not by bytes, since an object's members have no order.
A later write of a partition uses the existing key.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from penstock.shared.connect.storage.offset_cache import OffsetCache

log = get_logger(__name__)


class MemoryOffsetStore:
    """Stores the offsets in memory. They end with the process."""

    def __init__(self) -> None:
        self.cache = OffsetCache()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cache!r}>"

    @property
    def topic(self) -> str | None:
        return None

    async def start(self) -> None:
        """Reads the existing offsets."""

    async def stop(self) -> None:
        """Stops reading."""

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        await self._refresh()
        return {key: self.cache.value(key) for key in keys}

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._write({self.cache.key_for(key): value for key, value in values.items()})

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        await self._refresh()
        return self.cache.of_connector(connector)

    async def _refresh(self) -> None:
        """Reads all that was written up to now."""

    async def _write(self, values: Mapping[bytes, bytes | None]) -> None:
        for key, value in values.items():
            self.cache.apply(key, value)


class FileOffsetStore(MemoryOffsetStore):
    """Stores the offsets of a standalone worker in one JSON file, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    async def start(self) -> None:
        """Reads the file. Raises ConfigError if it has another format, or cannot be read."""
        try:
            data = await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return
        except OSError as e:
            raise self._refusal(e.strerror) from None
        try:
            stored = msgspec.json.decode(data or b"{}", type=dict[str, str])
            for key, value in stored.items():
                self.cache.apply(base64.b64decode(key, validate=True), base64.b64decode(value, validate=True))
        except (msgspec.DecodeError, binascii.Error, SerializationError) as e:
            raise self._refusal(f"not a file of offsets: {e}") from None

    async def _write(self, values: Mapping[bytes, bytes | None]) -> None:
        await super()._write(values)
        stored = {base64.b64encode(k).decode(): base64.b64encode(v).decode() for k, v in self.cache.raw().items()}
        try:
            await asyncio.to_thread(self._replace, msgspec.json.encode(stored))
        except OSError as e:
            raise self._refusal(e.strerror) from None

    def _replace(self, data: bytes) -> None:
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

    def _refusal(self, reason: str | None) -> ConfigError:
        return ConfigError(f"offset.storage.file.filename: {self._path}: {reason}")


class KafkaOffsetStore(MemoryOffsetStore):
    """Stores the offsets in the offset topic."""

    def __init__(self, kafka: KafkaSettings, admin: Admin, producer: Producer, topic: LogTopic) -> None:
        super().__init__()
        self._topic = topic.name
        self._log = KafkaBasedLog(kafka, admin, producer, topic, self._on_record)

    @property
    def topic(self) -> str | None:
        return self._topic

    async def start(self) -> None:
        await self._log.start()

    async def stop(self) -> None:
        await self._log.stop()

    async def _refresh(self) -> None:
        await self._log.read_to_end()

    async def _write(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._log.send_all(list(values.items()))

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            self.cache.apply(record.key, record.value)
        except SerializationError as e:
            log.error("a record of the offset topic cannot be read", offset=record.offset, reason=str(e))
