"""The store of the statuses of connectors and tasks.

A caller that reports a status does not wait. A background task writes the statuses one after another, in the order of
the reports. A safe status is checked when its turn comes, and dropped if a newer status forbids it (`StatusCache`).
"""

from __future__ import annotations

import asyncio
import contextlib

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import SerializationError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import (
    ConnectorStatus,
    Forgotten,
    StatusRecord,
    TaskStatus,
    TopicStatus,
    decode,
    encode,
)

log = get_logger(__name__)

REPORTS_WAITING_MAX = 100_000
"""The maximum number of reports that wait to be written. Beyond it the oldest is dropped, with a warning."""
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
        """Write the pending reports, then stop reading."""

    async def flush(self) -> None:
        """Return when all reports up to now are written, after `FLUSH_MS` at the latest."""

    async def refresh(self) -> None:
        """Read all records that other workers have written up to now. A store in memory has none. Raises KafkaTimeout
        if that takes too long."""

    def put(self, status: StatusRecord) -> None:
        """Report a status, whatever the current one is."""
        self.cache.apply(status)

    def put_safe(self, status: ConnectorStatus | TaskStatus) -> None:
        """Report a status, unless another worker has reported one in a later generation."""
        if self.cache.may_write(status):
            self.cache.apply(status)


class KafkaStatusStore(StatusStore):
    """Stores the statuses in the status topic."""

    def __init__(self, kafka: KafkaSettings, admin: Admin, producer: Producer, topic: LogTopic) -> None:
        super().__init__()
        self._log = KafkaBasedLog(kafka, admin, producer, topic, self._on_record)
        self._reports: asyncio.Queue[tuple[StatusRecord, bool]] = asyncio.Queue()
        self._writing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._log.start()
        self._writing = asyncio.create_task(self._write_queued_statuses(), name="write statuses")

    async def stop(self) -> None:
        await self.flush()
        writing = self._writing
        self._writing = None
        if writing is not None:
            writing.cancel()
            await asyncio.wait([writing])
        await self._log.stop()

    async def flush(self) -> None:
        if self._writing is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_MS / 1000):
                    await self._reports.join()

    async def refresh(self) -> None:
        await self._log.read_to_end()

    def put(self, status: StatusRecord) -> None:
        self._queue_status(status, safe=False)

    def put_safe(self, status: ConnectorStatus | TaskStatus) -> None:
        self._queue_status(status, safe=True)

    def _queue_status(self, status: StatusRecord, *, safe: bool) -> None:
        # The oldest is dropped, since later reports of the same connector or task replace it.
        if self._reports.qsize() >= REPORTS_WAITING_MAX:
            lost, _ = self._reports.get_nowait()
            self._reports.task_done()
            log.warning("a status is dropped, since too many wait to be written", status=repr(lost))
        self._reports.put_nowait((status, safe))

    async def _write_queued_statuses(self) -> None:
        while True:
            status, safe = await self._reports.get()
            try:
                # Checked when its turn comes: another worker's status may have been read since the report.
                if not safe or isinstance(status, TopicStatus | Forgotten) or self.cache.may_write(status):
                    await self._log.send(*encode(status))
                    # Applied at once, so that a worker sees its own reports before it has read them back. The topic may
                    # hold something newer of another worker, which is then read next.
                    self.cache.apply(status)
            except Exception as e:  # any error: the other statuses are still written
                log.error("a status could not be written", status=repr(status), reason=str(e))
            finally:
                self._reports.task_done()

    def _on_record(self, record: ConsumerRecord) -> None:
        try:
            decoded = decode(record.key, record.value)
        except SerializationError as e:
            log.error("a record of the status topic cannot be read", offset=record.offset, reason=str(e))
            return
        if decoded is not None:
            self.cache.apply(decoded)
