"""The stores of source offsets: in memory, in a file, or in the offset topic.

Each one is an `OffsetBackingStore`. Keys are compared by their content, not by bytes, because the members of a JSON
object have no order. Later records of a partition have the key that is already stored.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic

log = get_logger(__name__)

_SORTED = msgspec.json.Encoder(order="deterministic")
_NULL = b"null"


class OffsetCache:
    """The newest offset of each source partition, by connector. All records must be applied in order.

    A key is the JSON array of the connector's name and the source partition. The order of the partition's members does
    not matter.

    >>> cache = OffsetCache()
    >>> cache.apply(b'["files",{"b":1,"a":2}]', b'{"position":17}')
    >>> cache.value(b'["files",{"a":2,"b":1}]'), cache.key_for(b'["files",{"a":2,"b":1}]')
    (b'{"position":17}', b'["files",{"b":1,"a":2}]')
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[bytes, bytes]] = {}
        # Compaction compares bytes: a new record must have the key that the topic already has.
        self._keys: dict[bytes, bytes] = {}
        """Each key as the topic has it, by the key with its members in order."""

    def __repr__(self) -> str:
        return f"<OffsetCache of {sum(map(len, self._values.values()))} partitions>"

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Apply one record. Raises SerializationError if it is invalid."""
        connector, name = _read_key(key or b"")
        self._keys[name] = key or b""
        if value is None or value == _NULL:
            self._values.get(connector, {}).pop(name, None)
        else:
            _check_offset(value)
            self._values.setdefault(connector, {})[name] = value

    def key_for(self, key: bytes) -> bytes:
        """Return the partition's key in the topic. If there is none, return the key with its members in order.

        So every writer gives a new partition the same key.
        """
        name = _read_key(key)[1]
        return self._keys.get(name, name)

    def value(self, key: bytes) -> bytes | None:
        """Return the offset of the partition that a key names."""
        connector, name = _read_key(key)
        return self._values.get(connector, {}).get(name)

    def of_connector(self, connector: str) -> dict[bytes, bytes]:
        """Return every offset of a connector by its key."""
        return {self._keys[name]: value for name, value in self._values.get(connector, {}).items()}

    def raw(self) -> dict[bytes, bytes]:
        """Return every current record."""
        return {key: value for connector in self._values for key, value in self.of_connector(connector).items()}


def _read_key(key: bytes) -> tuple[str, bytes]:
    """Return the key's connector, and the key with its members in order."""
    parts = _decode_offset_json(key, "offset key")
    if not isinstance(parts, list) or len(parts) != 2 or not isinstance(parts[0], str):
        raise SerializationError(f"offset key {key!r}: not an array of connector and partition")
    if parts[1] is not None and not isinstance(parts[1], dict):
        raise SerializationError(f"offset key {key!r}: the partition is not an object")
    return parts[0], _SORTED.encode(parts)


def _check_offset(value: bytes) -> None:
    if not isinstance(_decode_offset_json(value, "offset"), dict):
        raise SerializationError(f"offset {value!r}: not an object")


def _decode_offset_json(data: bytes, what: str) -> Any:
    try:
        return decode_json(data)
    except InvalidJson as e:
        raise SerializationError(f"{what} {data!r}: {e}") from None


class MemoryOffsetStore:
    """Stores the offsets in memory. They are lost when the process ends."""

    def __init__(self) -> None:
        self.cache = OffsetCache()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cache!r}>"

    @property
    def topic(self) -> str | None:
        return None

    async def start(self) -> None:
        """Read the existing offsets."""

    async def stop(self) -> None:
        """Stop reading."""

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        await self._read_offsets_to_end()
        return {key: self.cache.value(key) for key in keys}

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._write_offsets(await self.records(values))

    async def records(self, values: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        return {self.cache.key_for(key): value for key, value in values.items()}

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        await self._read_offsets_to_end()
        return self.cache.of_connector(connector)

    async def _read_offsets_to_end(self) -> None:
        """Read all that was written up to now."""

    async def _write_offsets(self, values: Mapping[bytes, bytes | None]) -> None:
        for key, value in values.items():
            self.cache.apply(key, value)


JAVA_SERIALIZATION = b"\xac\xed"
"""The first bytes of an object in Java's serialization, in which Kafka Connect's standalone worker stores offsets."""


class FileOffsetStore(MemoryOffsetStore):
    """Stores the offsets of a standalone worker in one JSON file, which is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        # With one thread, the newest offsets are written last, even if a caller stopped waiting for an earlier write.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offsets")

    async def start(self) -> None:
        """Read the file if it exists. Raises ConfigError if it has another format or cannot be read."""
        try:
            data = await asyncio.to_thread(self._path.read_bytes)
        except FileNotFoundError:
            return
        except OSError as e:
            raise self._file_error(e.strerror) from None
        if data.startswith(JAVA_SERIALIZATION):
            raise self._file_error(
                "a file of Kafka Connect, in Java's serialization: name a new file, and write the connectors' offsets "
                "with PATCH /connectors/NAME/offsets"
            )
        try:
            stored = decode_json(data or b"{}", dict[str, str])
            for key, value in stored.items():
                self.cache.apply(base64.b64decode(key, validate=True), base64.b64decode(value, validate=True))
        except (ValueError, SerializationError) as e:
            raise self._file_error(f"not a file of offsets: {e}") from None

    async def _write_offsets(self, values: Mapping[bytes, bytes | None]) -> None:
        await super()._write_offsets(values)
        stored = {base64.b64encode(k).decode(): base64.b64encode(v).decode() for k, v in self.cache.raw().items()}
        try:
            data = msgspec.json.encode(stored)
            await asyncio.get_running_loop().run_in_executor(self._writer, self._replace_offset_file, data)
        except OSError as e:
            raise self._file_error(e.strerror) from None

    def _replace_offset_file(self, data: bytes) -> None:
        # Written beside the file and renamed: after a crash there is the old file or the new one, and no partial one.
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

    def _file_error(self, reason: str | None) -> ConfigError:
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

    async def _read_offsets_to_end(self) -> None:
        await self._log.read_to_end()

    async def _write_offsets(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._log.send_all(list(values.items()))

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            self.cache.apply(record.key, record.value)
        except SerializationError as e:
            # The record is skipped, because the offsets of other connectors must stay readable.
            log.error("a record of the offset topic cannot be read", offset=record.offset, reason=str(e))
