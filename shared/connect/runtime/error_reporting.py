"""The reports of a sink's and a source's errors: the log and the dead-letter topic.

Dead letters are sent beside the task's work. They are awaited before offsets are committed, so that none is lost with a
worker. A dead letter that cannot be written fails the task.
"""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ConsumerRecord
from penstock.shared.connect.errors import ConnectError, ToleranceExceeded
from penstock.shared.connect.record import SinkRecord, SourceRecord
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.dead_letters import RawRecords, dead_letter, log_fields
from penstock.shared.connect.runtime.error_handling import ErrorSettings, Failure, RetryWithToleranceOperator, Stage
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.task_thread import TaskThread

log = get_logger(__name__)

PENDING_MAX = 10_000
"""The maximum number of unacknowledged dead letters. The next one waits for all of them."""


class ErrorReporters:
    """Reports the failures of one task."""

    def __init__(
        self,
        id: ConnectorTaskId,
        settings: ErrorSettings,
        metrics: TaskMetrics,
        producer: Producer | None = None,
        admin: Admin | None = None,
    ) -> None:
        """`producer` and `admin` are for the dead-letter topic, if there is one. This closes both."""
        self._id = id
        self._settings = settings
        self._metrics = metrics
        self._producer = producer
        self._admin = admin
        self._pending: list[asyncio.Future[Any]] = []
        self._failed: ConnectError | None = None

    def __repr__(self) -> str:
        return f"<ErrorReporters {self._id}, {len(self._pending)} dead letters pending>"

    async def start(self) -> None:
        """Creates the dead-letter topic with one partition if it does not exist."""
        if self._producer is None or self._admin is None:
            return
        async with self._admin:
            topic = NewTopic(self._settings.dead_letter_topic, 1, self._settings.dead_letter_replication_factor)
            await self._admin.create_topics([topic], exist_ok=True)
        await self._producer.start()

    async def report(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> None:
        """Logs the failure and sends the dead letter, without waiting for it to be stored."""
        written = await self.send(record, failure)
        if written is not None:
            self.await_before_commit(written)
            if len(self._pending) >= PENDING_MAX:
                await self.flush()

    def await_before_commit(self, future: asyncio.Future[Any]) -> None:
        """Delays every commit of offsets until this is done, and prevents it if this fails."""
        self._pending.append(future)

    async def send(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> asyncio.Future[object] | None:
        """Logs the failure and sends the dead letter. Returns a future of its storage, or None if there is none."""
        if self._settings.log:
            self._metrics.add("total_errors_logged")
            log.error("record failed", **log_fields(record, failure, self._id, messages=self._settings.log_messages))
        # As in Kafka Connect (KIP-298), only sinks have a dead letter queue.
        if self._producer is None or not isinstance(record, ConsumerRecord):
            return None
        self._metrics.add("deadletterqueue_produce_requests")
        headers = self._settings.dead_letter_headers
        written = dead_letter(self._settings.dead_letter_topic, record, failure, self._id, headers=headers)
        delivery = await self._producer.send(
            written.topic, written.value, key=written.key, headers=written.headers, timestamp=written.timestamp
        )
        return asyncio.ensure_future(_await_delivery(delivery))

    async def flush(self) -> None:
        """Waits until every dead letter is stored. Raises ConnectError, also on every later call, if one cannot be."""
        if self._failed is None and self._pending:
            self._failed = await self._wait_for_pending()
        if self._failed is not None:
            raise self._failed

    async def _wait_for_pending(self) -> ConnectError | None:
        pending = self._pending
        self._pending = []
        errors = [e for e in await asyncio.gather(*pending, return_exceptions=True) if isinstance(e, BaseException)]
        if not errors:
            return None
        # An error that the task reported and that is not tolerated. It is not a failed write.
        if isinstance(errors[0], ToleranceExceeded):
            return errors[0]
        self._metrics.add("deadletterqueue_produce_failures", len(errors))
        failed = ConnectError(f"{len(errors)} dead letters could not be written: {errors[0]}")
        failed.__cause__ = errors[0]
        return failed

    async def close(self) -> None:
        for pending in self._pending:
            pending.cancel()
        if self._producer is not None:
            await self._producer.close(timeout_ms=0)


async def _await_delivery(delivery: object) -> object:
    return await delivery  # type: ignore[misc]


class WorkerErrantRecordReporter:
    """Takes records that a sink task cannot write."""

    def __init__(
        self,
        reporters: ErrorReporters,
        operator: RetryWithToleranceOperator,
        raw: RawRecords,
        task_class: type,
        clock: Clock,
        conversion: Conversion,
        thread: TaskThread,
    ) -> None:
        """`raw` holds records as they were read. Records that it no longer holds are converted back."""
        self._reporters = reporters
        self._operator = operator
        self._raw = raw
        self._task_class = task_class
        self._clock = clock
        self._conversion = conversion
        self._thread = thread

    def report(self, record: SinkRecord, error: Exception) -> asyncio.Future[None]:
        return self._thread.on_loop(self._begin_report, record, error)

    def _begin_report(self, record: SinkRecord, error: Exception) -> asyncio.Future[None]:
        reported = asyncio.ensure_future(self._report_errant_record(record, error))
        self._reporters.await_before_commit(reported)
        return reported

    async def _report_errant_record(self, record: SinkRecord, error: Exception) -> None:
        # By the original coordinates: a transform may have changed the record's topic.
        raw = self._raw.find(*record.original) or self._convert_back_to_consumer_record(record)
        failure = Failure(Stage.TASK_PUT, self._task_class, error)
        written = await self._reporters.send(raw, failure)
        self._operator.failed(failure, self._clock.now_ms())
        if written is not None:
            await written

    def _convert_back_to_consumer_record(self, record: SinkRecord) -> ConsumerRecord:
        topic, partition, offset = record.original
        try:
            key = self._conversion.key.from_connect_data(topic, record.key_schema, record.key)
            value = self._conversion.value.from_connect_data(topic, record.value_schema, record.value)
            made = self._conversion.header.from_connect_header
            headers = tuple((one.name, made(topic, one.name, one.schema, one.value)) for one in record.headers)
        except PenstockError as e:
            raise ConnectError(f"{topic}-{partition}@{offset} cannot be converted to a dead letter: {e}") from e
        timestamp = -1 if record.timestamp is None else record.timestamp
        return ConsumerRecord(topic, partition, offset, timestamp, key, value, headers)
