"""Reports the errors of sinks and sources to the log and the dead-letter topic, as Kafka Connect does.

A dead letter is the record as it was read: key, value, headers and timestamp. If
`errors.deadletterqueue.context.headers.enable` is set, ten headers that describe the failure follow. Their values are
UTF-8 text. Until a sink task's offsets are committed, `RawRecords` keeps the records as they were read, up to
`CACHED_BYTES_MAX`. The dead letter of a record that is no longer kept is converted from its `SinkRecord`.

Dead letters are stored in the background. Before records are delivered to a sink's `put`, which may store their
offsets, and before offsets are committed, the task waits for them, so that none is lost if the worker ends. If a dead
letter cannot be written, the task fails.
"""

from __future__ import annotations

import asyncio
import traceback
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import DataError, PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.connect.errors import ConnectError, MoreNeeded, ToleranceExceeded
from penstock.shared.connect.record import SinkRecord, SourceRecord
from penstock.shared.connect.redaction import Mask, unmasked
from penstock.shared.connect.runtime.conversion import FETCHES_MAX, Conversion
from penstock.shared.connect.runtime.error_handling import ErrorSettings, Failure, RetryWithToleranceOperator, Stage
from penstock.shared.connect.runtime.plugins import class_name
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.task_thread import TaskThread

log = get_logger(__name__)

T = TypeVar("T")

PENDING_MAX = 10_000
"""The number of pending dead letters at which `ErrorReporters.report` waits until all are stored."""
PREFIX = "__connect.errors."
CACHED_BYTES_MAX = 64 << 20
"""The limit of kept keys and values, in bytes. The batch in delivery counts, but is never dropped. Of the others, the
oldest are dropped first. The dead letter of a dropped record is converted from its `SinkRecord`."""
TRACE_BYTES_MAX = 32_768
"""A longer context header, such as a trace, is cut: it must not make the dead letter too large to write."""
KAFKA_ERRORS: tuple[tuple[type[Exception], str], ...] = (
    (DataError, "org.apache.kafka.connect.errors.DataException"),
    (RetriableError, "org.apache.kafka.connect.errors.RetriableException"),
    (ConnectError, "org.apache.kafka.connect.errors.ConnectException"),
)
"""The names of our errors in dead letters. Errors of a user's code keep their own names."""


class ErrorReporters:
    """Reports the failures of one task."""

    def __init__(
        self,
        id: ConnectorTaskId,
        settings: ErrorSettings,
        metrics: TaskMetrics,
        producer: Producer | None = None,
        admin: Admin | None = None,
        *,
        mask: Mask = unmasked,
    ) -> None:
        """`producer` and `admin` are for the dead-letter topic, if there is one. `start` opens both and closes `admin`
        again, and `close` closes `producer`. `mask` takes secrets out of the errors."""
        self._id = id
        self._settings = settings
        self._metrics = metrics
        self._producer = producer
        self._admin = admin
        self._mask = mask
        self._pending: list[asyncio.Future[Any]] = []
        self._failed: ConnectError | None = None

    def __repr__(self) -> str:
        return f"<ErrorReporters {self._id}, {len(self._pending)} dead letters pending>"

    async def start(self) -> None:
        """Create the dead-letter topic with one partition if it does not exist, and start the producer.

        Does nothing without a dead-letter topic.
        """
        if self._producer is None or self._admin is None:
            return
        async with self._admin:
            topic = NewTopic(self._settings.dead_letter_topic, 1, self._settings.dead_letter_replication_factor)
            await self._admin.create_topics([topic], exist_ok=True)
        await self._producer.start()

    async def report(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> None:
        """Log the failure and send the dead letter, without waiting for it to be stored.

        If PENDING_MAX dead letters are pending, calls `flush`, and raises as it does.
        """
        written = await self.send(record, failure)
        if written is not None:
            self.await_before_commit(written)
            if len(self._pending) >= PENDING_MAX:
                await self.flush()

    def await_before_commit(self, future: asyncio.Future[Any]) -> None:
        """Delay every commit of offsets until `future` is done. If `future` fails, the task fails without a commit."""
        self._pending.append(future)

    async def send(self, record: ConsumerRecord | SourceRecord, failure: Failure) -> asyncio.Future[object] | None:
        """Log the failure and send the dead letter, each if it is configured. Returns a future that is done when the
        dead letter is stored, or None without a dead letter."""
        if self._settings.log:
            self._metrics.add("total_errors_logged")
            fields = log_fields(record, failure, self._id, messages=self._settings.log_messages, mask=self._mask)
            log.error("record failed", **fields)
        # As in Kafka Connect (KIP-298), only sinks have a dead letter queue.
        if self._producer is None or not isinstance(record, ConsumerRecord):
            return None
        self._metrics.add("deadletterqueue_produce_requests")
        topic = self._settings.dead_letter_topic
        headers = self._settings.dead_letter_headers
        written = dead_letter(topic, record, failure, self._id, headers=headers, mask=self._mask)
        delivery = await self._producer.send(
            written.topic, written.value, key=written.key, headers=written.headers, timestamp=written.timestamp
        )
        return asyncio.ensure_future(delivery)

    async def flush(self) -> None:
        """Wait until every dead letter is stored and every report of the task is handled.

        If a dead letter cannot be stored, or a reported error is not tolerated, this and every later call raises
        ConnectError.
        """
        if self._failed is None and self._pending:
            # The dead letters stay in `_pending` until they are stored: another flush must wait for them too.
            await asyncio.wait(self._pending)
            if self._failed is None:
                self._failed = self._take_done()
        if self._failed is not None:
            raise self._failed

    def _take_done(self) -> ConnectError | None:
        """Remove the futures that are done, and count the dead letters among them that were not written.

        Returns the first error: a ToleranceExceeded as it is, any other as a ConnectError. None if nothing failed.
        """
        done = [one for one in self._pending if one.done()]
        self._pending = [one for one in self._pending if not one.done()]
        errors = [asyncio.CancelledError() if one.cancelled() else one.exception() for one in done]
        failures = [error for error in errors if error is not None]
        if not failures:
            return None
        # A ToleranceExceeded is an error that the task reported and that is not tolerated. It is not a failed write.
        unwritten = sum(not isinstance(error, ToleranceExceeded) for error in failures)
        self._metrics.add("deadletterqueue_produce_failures", unwritten)
        first = failures[0]
        if isinstance(first, ToleranceExceeded):
            return first
        failed = ConnectError(f"{unwritten} dead letters could not be written: {first}")
        failed.__cause__ = first
        return failed

    async def close(self) -> None:
        for pending in self._pending:
            pending.cancel()
        if self._producer is not None:
            await self._producer.close(timeout_ms=0)


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
        """`raw` has the records as they were read. A record that it no longer has is converted back to bytes."""
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
        raw = self._raw.find(record.original_tp, record.kafka_offset)
        if raw is None:
            raw = await self._convert_back_to_consumer_record(record)
        failure = Failure(Stage.TASK_PUT, self._task_class, error)
        written = await self._reporters.send(raw, failure)
        # First the dead letter: an error that is not tolerated ends the task, whose producer would drop it.
        if written is not None:
            await written
        self._operator.failed(failure, self._clock.now_ms())

    async def _convert_back_to_consumer_record(self, record: SinkRecord) -> ConsumerRecord:
        topic, partition = record.original_tp
        convert = self._conversion
        try:
            key = await _convert(lambda: convert.key.from_connect_data(topic, record.key_schema, record.key))
            value = await _convert(lambda: convert.value.from_connect_data(topic, record.value_schema, record.value))
            made = convert.header.from_connect_header
            headers = tuple((one.name, made(topic, one.name, one.schema, one.value)) for one in record.headers)
        except PenstockError as e:
            raise ConnectError(f"{record.coordinates} cannot be converted to a dead letter: {e}") from e
        timestamp = -1 if record.timestamp is None else record.timestamp
        return ConsumerRecord(topic, partition, record.kafka_offset, timestamp, key, value, headers)


async def _convert(operation: Callable[[], T]) -> T:
    """Return the result of a converter. After MoreNeeded the operation is repeated when the data is fetched."""
    for _ in range(FETCHES_MAX):
        try:
            return operation()
        except MoreNeeded as e:
            await e.fetch()
    return operation()


def kafka_error_name(error: Exception) -> str:
    """Return the class of an error that Connect's dead letters name: Kafka's if there is one, else Python's.

    >>> kafka_error_name(KeyError("k"))
    'KeyError'
    """
    kind = type(error)
    if kind.__module__.startswith("penstock."):
        for base, name in KAFKA_ERRORS:
            if isinstance(error, base):
                return name
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dead_letter(
    topic: str, record: ConsumerRecord, failure: Failure, id: ConnectorTaskId, *, headers: bool, mask: Mask = unmasked
) -> ProducerRecord:
    """Return the dead letter that reports a failed record: the record for Connect's dead-letter topic. `mask` takes
    secrets out of the error."""
    own: tuple[tuple[str, bytes | None], ...] = ()
    if headers:
        error = failure.error
        name = kafka_error_name(error)
        trace = "".join(traceback.format_tb(error.__traceback__))
        headers_by_name = {
            "topic": record.topic,
            "partition": str(record.partition),
            "offset": str(record.offset),
            "connector.name": id.connector,
            "task.id": str(id.task),
            "stage": failure.stage.name,
            "class.name": class_name(failure.executing_class),
            "exception.class.name": name,
            "exception.message": mask(str(error)),
            "exception.stacktrace": mask(f"{name}: {error}\n{trace}"),
        }
        own = tuple((PREFIX + key, _encode_header_text(value)) for key, value in headers_by_name.items())
    timestamp = record.timestamp if record.timestamp >= 0 else None
    return ProducerRecord(topic, record.value, record.key, (*record.headers, *own), None, timestamp)


def log_fields(
    record: ConsumerRecord | SourceRecord,
    failure: Failure,
    id: ConnectorTaskId,
    *,
    messages: bool,
    mask: Mask = unmasked,
) -> dict[str, Any]:
    """Return the log fields that report a failure. `mask` takes secrets out of the error.

    With `messages` there are also fields for the record's timestamp, topic, partition and offset. A source record has
    its source partition and source offset instead of the offset. No field is for the key, value or headers.
    """
    fields: dict[str, Any] = {
        "task": str(id),
        "stage": failure.stage.name,
        "class_name": class_name(failure.executing_class),
        "error": mask(f"{type(failure.error).__name__}: {failure.error}"),
        "attempt": failure.attempt,
    }
    if messages:
        partition = record.partition if isinstance(record, ConsumerRecord) else record.kafka_partition
        fields |= {"topic": record.topic, "partition": partition, "timestamp": record.timestamp}
        if isinstance(record, ConsumerRecord):
            fields["offset"] = record.offset
        else:
            fields |= {"source_partition": dict(record.source_partition), "source_offset": dict(record.source_offset)}
    return fields


def _encode_header_text(value: str) -> bytes:
    data = value.encode(errors="backslashreplace")
    return data if len(data) <= TRACE_BYTES_MAX else data[:TRACE_BYTES_MAX].decode(errors="ignore").encode()


@dataclass(frozen=True)
class _CachedBatch:
    columns: Columns
    poll: int
    bytes: int

    @property
    def last(self) -> int:
        return self.columns.offsets.item(-1)


class RawRecords:
    """The uncommitted records of a sink task as they were read, for dead letters.

    Transforms may have changed the `SinkRecord` that the task reports. If keys and values exceed `bytes_max` bytes, the
    oldest records are dropped, except those of the latest poll.
    """

    def __init__(self, bytes_max: int = CACHED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._polls = 0
        self._cached: dict[TopicPartition, deque[_CachedBatch]] = {}

    def __repr__(self) -> str:
        return f"<RawRecords of {len(self._cached)} partitions, {self._bytes} bytes>"

    def add(self, polled: Mapping[TopicPartition, Columns]) -> None:
        """Add the records of one poll, which are delivered next. Above the limit of bytes, the oldest other records
        are dropped."""
        self._polls += 1
        for tp, columns in polled.items():
            own = self._cached.setdefault(tp, deque())
            first = columns.offsets.item(0)
            # After a rewind the same offsets are read again.
            while own and own[-1].last >= first:
                self._bytes -= own.pop().bytes
            size = sum(map(len, filter(None, columns.keys))) + sum(map(len, filter(None, columns.values)))
            own.append(_CachedBatch(columns, self._polls, size))
            self._bytes += size
        while self._bytes > self._bytes_max:
            oldest = min((own for own in self._cached.values() if own), key=lambda own: own[0].poll)
            # The batch in delivery is kept beyond the limit: its records are the likeliest to be reported.
            if oldest[0].poll == self._polls:
                return
            self._bytes -= oldest.popleft().bytes

    def find(self, tp: TopicPartition, offset: int) -> ConsumerRecord | None:
        """Return a record as it was read, or None if it is not kept."""
        own = self._cached.get(tp, deque())
        at = bisect_left(own, offset, key=lambda cached: cached.last)
        if at == len(own):
            return None
        columns = own[at].columns
        index = int(columns.offsets.searchsorted(offset))
        return columns.record(index) if columns.offsets.item(index) == offset else None

    def committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """Drop the batches that end before the group's committed offsets: they are not reported any more."""
        for tp, at in offsets.items():
            own = self._cached.get(tp, deque())
            while own and own[0].last < at.offset:
                self._bytes -= own.popleft().bytes

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the records of revoked partitions: they are not reported any more."""
        for tp in partitions:
            self._bytes -= sum(cached.bytes for cached in self._cached.pop(tp, ()))
