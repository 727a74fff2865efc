"""The store of the statuses of connectors and tasks.

A caller that reports a status does not wait. For each connector, task or topic, the newest report is written. After a
retriable error or a timeout it is sent again, unless there is a newer one. After any other error it is dropped. A safe
status is checked before it is sent, and dropped if a newer status forbids it (`StatusCache`).
"""

from __future__ import annotations

import asyncio

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import DeliveryTimeout, RetriableError, SerializationError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import Status, StatusRecord, decode, encode

log = get_logger(__name__)

RETRY_MS = 1_000
"""The wait before a report is sent again that Kafka did not take."""
FLUSH_MS = 5_000
"""How long `flush` waits for pending reports."""


class StatusStore:
    """Stores the statuses in the memory of one process. It is the base class of the store in Kafka."""

    def __init__(self) -> None:
        self.cache = StatusCache()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.cache!r}>"

    async def start(self) -> None:
        """Read the existing statuses."""

    async def stop(self) -> None:
        """Write the pending reports, for `FLUSH_MS` at most, then stop reading. The other reports are dropped."""

    async def flush(self) -> None:
        """Return when all reports up to now are written, after `FLUSH_MS` at the latest."""

    async def refresh(self) -> None:
        """Read all records that other workers have written up to now. A store in memory has none. Raises KafkaTimeout
        after `READ_TO_END_MS`."""

    def put(self, status: StatusRecord, *, safe: bool = False) -> None:
        """Report a status. If `safe`, do so only if no other worker has reported one in a later generation."""
        if self._may_write(status, safe=safe):
            self.cache.apply(status)

    def _may_write(self, status: StatusRecord, *, safe: bool) -> bool:
        return not safe or not isinstance(status, Status) or self.cache.may_write(status)


class KafkaStatusStore(StatusStore):
    """Stores the statuses in the status topic."""

    def __init__(self, kafka: KafkaSettings, admin: Admin, producer: Producer, topic: LogTopic) -> None:
        super().__init__()
        self._log = KafkaBasedLog(kafka, admin, producer, topic, self._on_record)
        self._newest: dict[bytes, tuple[StatusRecord, bool]] = {}
        """The reports that are to be sent, by the record's key, with whether they are safe."""
        self._writing: dict[bytes, asyncio.Task[None]] = {}

    async def start(self) -> None:
        await self._log.start()

    async def stop(self) -> None:
        await self.flush()
        writing = tuple(self._writing.values())
        for task in writing:
            task.cancel()
        if writing:
            await asyncio.wait(writing)
        await self._log.stop()

    async def flush(self) -> None:
        if writing := tuple(self._writing.values()):
            await asyncio.wait(writing, timeout=FLUSH_MS / 1000)

    async def refresh(self) -> None:
        await self._log.read_to_end()

    def put(self, status: StatusRecord, *, safe: bool = False) -> None:
        try:
            key, _ = encode(status)
        except ValueError as e:
            log.error("a status could not be written", status=repr(status), reason=str(e))
            return
        self._newest[key] = (status, safe)
        if key not in self._writing:
            self._writing[key] = asyncio.create_task(self._write_newest(key), name="write statuses")

    async def _write_newest(self, key: bytes) -> None:
        try:
            while (report := self._newest.pop(key, None)) is not None:
                try:
                    await self._write_status(*report)
                except (RetriableError, DeliveryTimeout) as e:
                    log.warning("a status is sent again", status=repr(report[0]), reason=str(e))
                    await asyncio.sleep(RETRY_MS / 1000)
                    self._newest.setdefault(key, report)
                except Exception as e:
                    # A retry does not help. The next report with the same key is still written.
                    log.error("a status could not be written", status=repr(report[0]), reason=str(e))
        finally:
            del self._writing[key]

    async def _write_status(self, status: StatusRecord, safe: bool) -> None:
        # Another worker's status may have been read since the report.
        if self._may_write(status, safe=safe):
            await self._log.send(*encode(status))
            # Applied at once, so that a worker sees its own reports before it has read them back. The topic may hold
            # something newer of another worker, which is then read next.
            self.cache.apply(status)

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            decoded = decode(record.key, record.value)
        except SerializationError as e:
            log.error("a record of the status topic cannot be read", offset=record.offset, reason=str(e))
            return
        if decoded is not None:
            self.cache.apply(decoded)
