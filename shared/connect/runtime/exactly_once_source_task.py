"""A source task under exactly-once: its records and their offsets are in one transaction.

Each instance of a task has the same transactional id. A new instance therefore fences the old one before it reads the
offsets. If a record cannot be written, the task fails, even under `errors.tolerance=all`. The next instance continues
from the offsets of the last committed transaction.

If the connector's task aborts a transaction itself, the records are not committed. Their offsets are still committed,
in a separate transaction, so that the records are not read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError, RetriableError, TransactionAborted
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.errors import ConnectError, summary_of
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime.abstract_source_task import AbstractWorkerSourceTask, SourceParts
from penstock.shared.connect.runtime.offset_backing_store import OffsetBackingStore, encode_offsets
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.submitted_records import PartitionOffset, source_partition_key
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.transaction_boundaries import Ending, TransactionBoundary

log = get_logger(__name__)

FENCED_AT_ONCE_MAX = 10
"""The number of transactional ids fenced at a time: each needs a connection."""


def transactional_id(group_id: str, id: ConnectorTaskId) -> str:
    """Return the transactional id of an exactly-once source task. All instances of the task have the same id, for
    fencing."""
    return f"{group_id}-{id.connector}-{id.task}"


async def fence_producers(kafka: KafkaSettings, transactional_ids: Iterable[str]) -> None:
    """Fence the producers of earlier exactly-once source tasks, by their transactional ids.

    Afterwards, none of them can write, and none has an open transaction.

    Raises RetriableError if the first error is one, such as KafkaTimeout, else ConnectError. The message has the first
    error. After an error, any of the producers may still write.
    """
    limit = asyncio.Semaphore(FENCED_AT_ONCE_MAX)

    async def fence_producer(transactional_id: str) -> None:
        async with limit, Producer(kafka, ProducerSettings(transactional_id=transactional_id)) as producer:
            await producer.init_transactions()

    try:
        async with asyncio.TaskGroup() as tasks:
            for transactional_id in transactional_ids:
                tasks.create_task(fence_producer(transactional_id))
    except ExceptionGroup as e:
        error = e.exceptions[0]
        kind = RetriableError if isinstance(error, RetriableError) else ConnectError
        raise kind(f"earlier tasks cannot be fenced: {summary_of(error)}") from e


class ExactlyOnceSourceTask(AbstractWorkerSourceTask):
    """A source task under exactly-once."""

    # The producer can only abort a transaction in which a send was cancelled. So a pause waits for the record.
    _pause_takes_back = False

    def __init__(
        self,
        id: ConnectorTaskId,
        listener: StatusListener,
        parts: SourceParts,
        store: OffsetBackingStore,
        boundary: TransactionBoundary,
        metrics: TaskMetrics,
        clock: Clock,
    ) -> None:
        super().__init__(id, listener, parts, metrics, clock)
        if store.topic is None:
            raise ConnectError("exactly-once sources need offsets in a Kafka topic: run a distributed worker")
        self._store = store
        self._offsets_topic = store.topic
        self._boundary = boundary
        self._open = False
        self._records: list[tuple[SourceRecord, RecordMetadata | None]] = []

    async def _before_initialize(self) -> None:
        # As in ExactlyOnceWorkerSourceTask (KIP-618): fences the earlier instance, and ends its open transaction,
        # before this one reads the offsets.
        await self.producer.init_transactions()
        # An isolated connector reads the offset topic at its first use: now, and not within the first transaction.
        await self._store.records({})

    async def _before_loop(self) -> None:
        """Do nothing: no work runs beside the loop."""

    async def _begin_transaction(self) -> None:
        if not self._open:
            await self.producer.begin_transaction()
            self._open = True

    async def _prepare_to_send(self, record: SourceRecord, produced: ProducerRecord) -> int:
        await self._begin_transaction()
        self._records.append((record, None))
        self.metrics.active(len(self._records))
        return len(self._records) - 1

    def _last_source_offsets(self) -> dict[bytes, PartitionOffset]:
        """Return the last offset of each source partition in `_records`, by `source_partition_key`."""
        return {
            source_partition_key(record.source_partition): PartitionOffset(
                record.source_partition, record.source_offset
            )
            for record, _ in self._records
        }

    def _record_sent(self, record: SourceRecord, token: object, metadata: RecordMetadata) -> None:
        # Compared, since a callback may come after an abort.
        if isinstance(token, int) and token < len(self._records) and self._records[token][0] is record:
            self._records[token] = (record, metadata)

    def _record_skipped(self, record: SourceRecord, token: object) -> None:
        """Is never called: a transaction in which a record failed cannot be committed."""

    @property
    def _tolerates_send_errors(self) -> bool:
        # As in ExactlyOnceWorkerSourceTask, `errors.tolerance` does not apply: a transaction with a failed record
        # cannot be committed.
        return False

    async def _record_dropped(self, record: SourceRecord) -> None:
        # Its offset is committed as well, so that the record is not polled again.
        self._records.append((record, None))
        await self._end_transaction(self._boundary.after_record(record))

    def _record_not_sent(self, token: object) -> None:
        # The producer can only abort a transaction in which a send failed or was cancelled. The next instance of the
        # task polls its records again.
        if token is not None and self.send_error is None:
            self.send_error = TransactionAborted("a record could not be sent, so its transaction cannot be committed")

    async def _record_dispatched(self, record: SourceRecord) -> None:
        await self._end_transaction(self._boundary.after_record(record))

    async def _batch_sent(self) -> None:
        await self._end_transaction(self._boundary.after_batch(self._clock.monotonic_ms()))

    async def _end_transaction(self, ending: Ending) -> None:
        # As in Kafka Connect: the records of an aborted transaction are dropped. Their offsets are committed in another
        # transaction, or the task would poll the same records again.
        if ending is Ending.ABORT:
            await self._abort_transaction()
            self._records = [(record, None) for record, _ in self._records]
        if ending is not Ending.NOT:
            await self._commit_transaction()

    async def _commit_transaction(self) -> None:
        """Add the offsets to the transaction and commit it. Does nothing if no record was sent or dropped."""
        if not self._records:
            return
        await self._begin_transaction()
        started_ms = self._clock.monotonic_ms()
        await self.parts.reporters.flush()
        offsets = encode_offsets(self.id.connector, self._last_source_offsets().values())
        for key, value in (await self._store.records(offsets)).items():
            await self.producer.send(self._offsets_topic, value, key=key)
        await self.producer.commit_transaction()
        self._open = False
        self._raise_send_error()
        self.metrics.timed("offset_commit", self._clock.monotonic_ms() - started_ms)
        self.metrics.add("offset_commit_success_total")
        self.metrics.sized("transaction_size", len(self._records))
        acknowledged = self._records
        self._records = []
        self.metrics.active(0)
        # Only after the commit: a task may release the records in its system here.
        for record, metadata in acknowledged:
            await self._log_commit_error("commit_record", self._call_task(self.task.commit_record, record, metadata))
        await self._log_commit_error("commit", self._call_task(self.task.commit))

    async def _abort_transaction(self) -> None:
        """Abort the open transaction, if there is one, and clear `send_error`."""
        if self._open:
            await self.producer.abort_transaction()
            self._open = False
            self.metrics.active(0)
        self.send_error = None

    async def _before_pause(self) -> None:
        """End the transaction before a pause if `TransactionBoundary.at_end` decides so.

        If it stays open, the coordinator aborts it after `transaction.timeout.ms`."""
        await self._end_transaction(self._boundary.at_end(is_whole=self.to_send is None))

    async def _commit_last_offsets(self, *, failed: bool) -> None:
        """End the last transaction.

        Without an error it ends as `TransactionBoundary.at_end` decides. If it is still open after that, or after an
        error, it is aborted."""
        if not failed and self.send_error is None:
            await self._end_transaction(self._boundary.at_end(is_whole=self.to_send is None))
        try:
            await self._abort_transaction()
        except PenstockError as e:
            if not failed:
                raise
            # What failed the task is the error to report. The coordinator aborts the transaction after its timeout.
            log.warning("the transaction could not be aborted", task=str(self.id), error=self.mask(summary_of(e)))
