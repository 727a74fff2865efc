"""A source task under at-least-once: records are written first, their offsets later.

Every `offset.flush.interval.ms` the task stores the source offsets up to which every record is in Kafka or was skipped.
If that fails, the next flush stores them. After the last poll the task waits up to `offset.flush.timeout.ms` for
pending records.

When the outcome of a record is known, the connector's `commit_record` is called: before the next poll, or with the next
flush. After a flush that succeeds, `commit` is called, unless its last call still runs. These calls may have to wait
until a blocking `poll` returns.
"""

from __future__ import annotations

import asyncio
from typing import cast

from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime.abstract_source_task import AbstractWorkerSourceTask, SourceParts
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore, encode_offsets
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.submitted_records import PartitionOffset, SubmittedRecord, SubmittedRecords
from penstock.shared.connect.runtime.task_metrics import TaskMetrics

log = get_logger(__name__)


class WorkerSourceTask(AbstractWorkerSourceTask):
    """A source task under at-least-once."""

    def __init__(
        self,
        id: ConnectorTaskId,
        listener: StatusListener,
        parts: SourceParts,
        store: OffsetBackingStore,
        metrics: TaskMetrics,
        clock: Clock,
        *,
        flush_interval_ms: int,
        flush_timeout_ms: int,
    ) -> None:
        super().__init__(id, listener, parts, metrics, clock)
        self.submitted = SubmittedRecords()
        self.committable: dict[bytes, PartitionOffset] = {}
        self._store = store
        self._interval_ms = flush_interval_ms
        self._timeout_ms = flush_timeout_ms
        self._committer: asyncio.Task[None] | None = None
        self._notifier: asyncio.Task[None] | None = None
        self._flushing = asyncio.Lock()
        self._acknowledged: list[tuple[SourceRecord, RecordMetadata | None]] = []

    async def _before_loop(self) -> None:
        if self._committer is None and not self.cancelled:
            self._committer = asyncio.create_task(self._commit_regularly(), name=f"offsets-{self.id}")

    async def _commit_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            if await self.commit_offsets() and (self._notifier is None or self._notifier.done()):
                self._notifier = asyncio.create_task(self._notify_committed(), name=f"committed-{self.id}")

    def cancel(self) -> None:
        """Cancel the task and its regular commits."""
        super().cancel()
        for commits in (self._committer, self._notifier):
            if commits is not None:
                commits.cancel()

    async def iteration(self) -> None:
        await self._report_acknowledged()
        await super().iteration()

    async def _prepare_to_send(self, record: SourceRecord, produced: ProducerRecord) -> SubmittedRecord:
        self.metrics.active(self.submitted.pending + 1)
        return self.submitted.submit(record.source_partition, record.source_offset)

    def _record_sent(self, record: SourceRecord, token: object, metadata: RecordMetadata) -> None:
        cast(SubmittedRecord, token).ack()
        self.metrics.active(self.submitted.pending)
        self._acknowledged.append((record, metadata))

    def _record_skipped(self, record: SourceRecord, token: object) -> None:
        if token is not None:
            cast(SubmittedRecord, token).ack()
            self.metrics.active(self.submitted.pending)
        self._acknowledged.append((record, None))

    async def _record_dropped(self, record: SourceRecord) -> None:
        # Unlike Kafka Connect, which stores only the offsets of sent records: a source may wait for its last offset.
        self.submitted.submit(record.source_partition, record.source_offset).ack()
        self._acknowledged.append((record, None))

    def _record_not_sent(self, token: object) -> None:
        if token is not None:
            cast(SubmittedRecord, token).drop()

    async def _batch_sent(self) -> None:
        self.metrics.active(self.submitted.pending)

    async def _report_acknowledged(self) -> None:
        """Call the connector's task for records whose outcome is known."""
        acknowledged = self._acknowledged
        self._acknowledged = []
        for record, metadata in acknowledged:
            await self._log_commit_error("commit_record", self._call_task(self.task.commit_record, record, metadata))

    async def commit_offsets(self) -> bool:
        """Store the source offsets up to which every record is in Kafka or was skipped.

        Returns False if they were not stored: the next call stores them. Returns True if there are none.
        """
        async with self._flushing:
            self.committable |= self.submitted.committable()
            # The task is about to fail. Its last commit stores the offsets before the failed record.
            if self.send_error is not None:
                return False
            started_ms = self._clock.monotonic_ms()
            if self.committable:
                try:
                    async with asyncio.timeout(self._timeout_ms / 1000):
                        await self.parts.reporters.flush()
                        await self._store.set(encode_offsets(self.id.connector, self.committable.values()))
                # The offsets stay in `committable` for the next flush, as after OffsetStorageWriter.cancelFlush.
                except (PenstockError, TimeoutError) as e:
                    self.metrics.add("offset_commit_failure_total")
                    log.error(
                        "offsets could not be stored", task=str(self.id), error=self.mask(f"{type(e).__name__}: {e}")
                    )
                    return False
            self.committable = {}
            self.metrics.timed("offset_commit", self._clock.monotonic_ms() - started_ms)
            self.metrics.add("offset_commit_success_total")
        return True

    async def _notify_committed(self) -> None:
        """Call the connector's task for acknowledged records and for the stored offsets."""
        await self._report_acknowledged()
        await self._log_commit_error("commit", self._call_task(self.task.commit))

    async def _commit_last_offsets(self, *, failed: bool) -> None:
        if self._committer is not None:
            self._committer.cancel()
            await asyncio.gather(self._committer, return_exceptions=True)
        # As in WorkerSourceTask.finalOffsetCommit: a limited wait for pending records, then the offsets so far.
        if self.submitted.pending and self.send_error is None:
            try:
                async with asyncio.timeout(self._timeout_ms / 1000):
                    await self.producer.flush()
            except (TimeoutError, PenstockError):
                log.warning("records are still pending", task=str(self.id), records=self.submitted.pending)
        error = self.send_error
        # Without the error, `commit_offsets` stores the offsets before the failed record.
        self.send_error = None
        is_stored = await self.commit_offsets()
        self.send_error = error
        if self._notifier is not None:
            await self._notifier
        await (self._notify_committed() if is_stored else self._report_acknowledged())
