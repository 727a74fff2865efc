"""The common base of at-least-once and exactly-once source tasks: poll, transform, convert, send.

The records of a `poll` are sent one by one, in order. If the producer does not take a record because of a retriable
error, an at-least-once task waits briefly and continues with that record. After it has taken a record, the producer
reports the outcome through a callback.

A second asyncio task watches the destinations of the records that are not in Kafka yet. It fails the task if such a
topic or partition is still missing after `topic.wait.timeout.ms`, even while a send waits.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import (
    IllegalState,
    PenstockError,
    RetriableError,
    TopicAlreadyExists,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.errors import ConnectError, summary_of
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.error_handling import Failure, Interrupted, Stage
from penstock.shared.connect.runtime.error_reporting import ErrorReporters
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.task_thread import TaskThread
from penstock.shared.connect.runtime.topic_creation import TopicCreationGroups
from penstock.shared.connect.runtime.worker_task import WorkerTask
from penstock.shared.connect.task import OffsetStorageReader, SourceTask, TransactionContext

log = get_logger(__name__)

T = TypeVar("T")

SEND_FAILED_BACKOFF_MS = 100
HELD_UP_CHECK_MS = 100
"""How often the loop checks whether one record blocks the task."""
BLOCKED_LOG_MS = 10_000
"""The delay before the log reports that a record cannot be handed to the producer, and the interval of reports."""
TOPIC_LOOKUP_MS = 2_000
"""How long Kafka may take to describe a topic. A task that is to stop waits for the response, and must end within
`task.shutdown.graceful.timeout.ms` (five seconds)."""
TOPIC_LOOKUP_AGAIN_MS = 10_000
"""The delay before the topic is looked up again, if there was no response or the topic exists."""
TOPIC_WATCH_MS = 100
"""The minimum interval between checks for topics to look up."""
CLOSE_TIMEOUT_MS = 30_000
"""How long the producer may take to send its remaining records."""


Destination = tuple[str, int | None]
"""A topic, and the partition that a record names, if it names one."""


@dataclass
class Waiting:
    """Records for one destination that are not in Kafka yet."""

    due_ms: int
    """When the topic is looked up, unless the number of records decreases before."""
    records: int = 0


@dataclass
class WorkerSourceTaskContext:
    """The context of a source task; see `SourceTaskContext`."""

    configs: Mapping[str, str]
    files: AllowedFiles
    offset_storage_reader: OffsetStorageReader
    transaction_context: TransactionContext | None = None
    thread: TaskThread = field(default_factory=TaskThread)

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        return self.thread.wait_for(awaitable)


@dataclass
class SourceParts:
    """The collaborators and settings of a source task."""

    task: SourceTask
    props: Mapping[str, str]
    context: WorkerSourceTaskContext
    producer: Producer
    conversion: Conversion
    reporters: ErrorReporters
    admin: Admin
    topic_wait_ms: int
    """How long records may wait for a topic that does not exist (`topic.wait.timeout.ms`)."""
    topic_groups: TopicCreationGroups | None = None
    """The settings of new topics, or None if the worker does not create topics."""


class AbstractWorkerSourceTask(WorkerTask):
    """The loop of a source task."""

    _pause_takes_back = True
    """Whether a pause cancels the send of a record that the producer has not taken yet, as a stop does."""

    def __init__(
        self, id: ConnectorTaskId, listener: StatusListener, parts: SourceParts, metrics: TaskMetrics, clock: Clock
    ) -> None:
        super().__init__(id, listener, metrics, clock)
        self.parts = parts
        self.task = parts.task
        self.producer = parts.producer
        self.to_send: list[SourceRecord] | None = None
        self.send_error: Exception | None = None
        self._known_topics: set[str] = set()
        self._reported_topics: set[str] = set()
        self._initialized = False
        self._in_hand: ProducerRecord | None = None
        """The record that waits for its topic or for room in the producer's buffer."""
        self._waiting: dict[Destination, Waiting] = {}
        self._admin_open = False
        self._topic_error: PenstockError | None = None
        """Why the last attempt to create the topic of the record in hand failed."""
        parts.context.thread = self.thread
        self._bind_retry_waits(parts.conversion.waits)

    @abstractmethod
    async def _prepare_to_send(self, record: SourceRecord, produced: ProducerRecord) -> object:
        """Called before a record is sent. The result is the `token` that `_record_sent`, `_record_skipped` or
        `_record_not_sent` gets with the record's outcome."""

    @abstractmethod
    def _record_sent(self, record: SourceRecord, token: object, metadata: RecordMetadata) -> None:
        """Called when Kafka has the record."""

    @abstractmethod
    def _record_skipped(self, record: SourceRecord, token: object) -> None:
        """Called when the record could not be written to Kafka, and the error is tolerated."""

    @abstractmethod
    async def _record_dropped(self, record: SourceRecord) -> None:
        """Called when a transform dropped the record, or when a transform or converter failed and the error is
        tolerated."""

    @abstractmethod
    def _record_not_sent(self, token: object) -> None:
        """Called when the producer did not take the record, unless the error is tolerated (`_record_skipped`).
        The record is sent again later, unless the task ends."""

    async def _record_dispatched(self, record: SourceRecord) -> None:
        """Called after the producer took the record, or rejected it with an error that is tolerated. Does nothing by
        default.

        Any error fails the task, even a retriable one: a retry would send the record again.
        """

    @abstractmethod
    async def _batch_sent(self) -> None:
        """Called after each poll, when none of its records is left to send."""

    @abstractmethod
    async def _before_loop(self) -> None:
        """Called before the first poll, and before the first poll after a pause."""

    @abstractmethod
    async def _commit_last_offsets(self, *, failed: bool) -> None:
        """Called when no more records are polled or sent, unless the task was cancelled. `failed` is True after an
        error."""

    async def _start_task(self) -> None:
        await self.parts.reporters.start()
        if self.parts.topic_groups is not None:
            await self._open_admin()
        await self.producer.start()
        await self._before_initialize()
        self._initialized = True
        await self._call_task(self.task.initialize, self.parts.context, like=self.task.start)
        await self._call_task(self.task.start, dict(self.parts.props))

    async def _before_initialize(self) -> None:
        """Called before the connector's task may read its offsets."""

    async def _execute_task(self) -> None:
        failed = True
        loop = asyncio.ensure_future(self._poll_and_send_until_stopped())
        watch = asyncio.ensure_future(self._watch_topics())
        try:
            done, _ = await asyncio.wait((loop, watch), return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            failed = False
        finally:
            loop.cancel()
            watch.cancel()
            await asyncio.gather(loop, watch, return_exceptions=True)
            if not self.cancelled:
                await self._commit_last_offsets(failed=failed)

    async def _poll_and_send_until_stopped(self) -> None:
        if not self.should_pause:
            await self._before_loop()
        while not self.stopping:
            await self.iteration()

    async def iteration(self) -> None:
        """Run one turn: pause if required, poll if no records are left to send, send.

        As in AbstractWorkerSourceTask.execute, a poll without records counts as a batch: a transaction may be due.
        """
        # A producer callback may have reported an error since the last turn.
        self._raise_send_error()
        if self.should_pause:
            await self._wait_while_paused()
            return
        if self.to_send is None:
            self.to_send = await self._poll_source_task()
        if not await self._send_polled():
            await self._wait_for_target_state_change(SEND_FAILED_BACKOFF_MS)

    async def _before_pause(self) -> None:
        """Called before a pause of unknown length."""

    async def _wait_while_paused(self) -> None:
        await self._before_pause()
        if self.state.name != "PAUSED":
            self.moved(Event.PAUSED)
        while self.should_pause and not self.stopping:
            self._changed.clear()
            await self._changed.wait()
        if not self.stopping:
            self.moved(Event.RUNNING)
            await self._before_loop()

    async def _wait_for_target_state_change(self, timeout_ms: float) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def _poll_source_task(self) -> list[SourceRecord]:
        """Return the next batch. It is empty if `poll` returned no records or raised RetriableError, or if a stop of
        the task ended the call."""
        started_ms = self._clock.monotonic_ms()
        poll = asyncio.ensure_future(self._call_task(self.task.poll))
        changed: asyncio.Future[Any] | None = None
        try:
            await asyncio.sleep(0)
            while not poll.done():
                changed = asyncio.ensure_future(self._changed.wait())
                waiting: list[asyncio.Future[Any]] = [poll, changed]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                # A stop ends the call. The records that it would have returned are polled by the next task.
                if self.stopping and not poll.done():
                    return []
                if not poll.done():
                    # A pause takes effect when the poll is over.
                    self._changed.clear()
            records = _polled_records(poll.result())
        except RetriableError as e:
            log.warning("poll will be retried", task=str(self.id), error=self.mask(f"{type(e).__name__}: {e}"))
            await self._wait_for_target_state_change(SEND_FAILED_BACKOFF_MS)
            return []
        finally:
            if changed is not None:
                changed.cancel()
            if not poll.done():
                poll.cancel()
                await asyncio.gather(poll, return_exceptions=True)
        if records:
            self.metrics.timed("poll_batch", self._clock.monotonic_ms() - started_ms)
            self.metrics.add("source_record_poll_total", len(records))
            self.metrics.sized("batch_size", len(records))
        return records

    async def _send_polled(self) -> bool:
        """Send the polled records. Returns False if some of them are not sent yet."""
        sending = asyncio.ensure_future(self._send_records())
        blocked_ms = 0
        try:
            while not sending.done():
                # After each interval, one of three cases:
                # 1. Another record is in hand, or none: the task makes progress.
                # 2. The same record blocks a task that is to stop or pause: it is taken back. It is sent after the
                #    pause, or polled again by the next task.
                # 3. The same record blocks the task: wait on, and log it. By default the producer waits without a limit
                #    until it knows the topic and has room, as in Kafka Connect (max.block.ms=Long.MAX_VALUE).
                before = self._in_hand
                await asyncio.wait((sending,), timeout=HELD_UP_CHECK_MS / 1000)
                if before is None or before is not self._in_hand:
                    blocked_ms = 0
                elif self.stopping or (self.should_pause and self._pause_takes_back):
                    break
                else:
                    blocked_ms += HELD_UP_CHECK_MS
                    self._log_blocked(before, blocked_ms)
        finally:
            self.metrics.set("source_send_blocked_ms", 0)
            if not sending.done():
                sending.cancel()
                await asyncio.wait((sending,))
        return not sending.cancelled() and sending.result()

    async def _watch_topics(self) -> None:
        """Look up each destination whose number of pending records has not decreased for `topic.wait.timeout.ms`.

        Raises ConnectError as `_fail_without_topic` does.
        """
        wait_ms = self.parts.topic_wait_ms
        while True:
            now_ms = self._clock.monotonic_ms()
            for destination, waiting in list(self._waiting.items()):
                # Unlike Kafka Connect, whose producers wait for a missing topic without a limit. A paused task does
                # not fail, since it sends nothing.
                if waiting.due_ms <= now_ms and self.state is not State.PAUSED:
                    await self._fail_without_topic(destination, f"topic.wait.timeout.ms={wait_ms}")
                    waiting.due_ms = self._clock.monotonic_ms() + TOPIC_LOOKUP_AGAIN_MS
            now_ms = self._clock.monotonic_ms()
            next_ms = min((waiting.due_ms for waiting in self._waiting.values()), default=now_ms + wait_ms)
            await asyncio.sleep(max(TOPIC_WATCH_MS, min(next_ms - now_ms, wait_ms)) / 1000)

    def _on_its_way(self, destination: Destination) -> None:
        """Count one more record for this destination. Kafka does not have it yet, nor perhaps the producer."""
        waiting = self._waiting.get(destination)
        if waiting is None:
            due_ms = self._clock.monotonic_ms() + self.parts.topic_wait_ms
            waiting = Waiting(due_ms)
            self._waiting[destination] = waiting
        waiting.records += 1

    def _count_down_waiting_records(self, destination: Destination) -> None:
        """Decrease the number of pending records of this destination, and restart the wait for its topic."""
        waiting = self._waiting[destination]
        waiting.records -= 1
        waiting.due_ms = self._clock.monotonic_ms() + self.parts.topic_wait_ms
        if not waiting.records:
            del self._waiting[destination]

    async def _fail_without_topic(self, destination: Destination, waited: str) -> None:
        """Raises ConnectError if the topic does not exist, or lacks the partition that a record names.

        Returns with a warning if the topic cannot be looked up, for example because no broker answers.
        """
        topic, partition = destination
        # Four cases: 1. no response, 2. all exists, 3. the partition is missing, 4. the topic is missing.
        try:
            async with asyncio.timeout(TOPIC_LOOKUP_MS / 1000):
                await self._open_admin()
                count = len((await self.parts.admin.describe_topics([topic]))[topic].partitions)
        except UnknownTopicOrPartition:
            count = 0
        except (PenstockError, TimeoutError) as e:
            log.warning("a topic cannot be looked up", task=str(self.id), topic=topic, error=self.mask(summary_of(e)))
            return
        if count and (partition is None or partition < count):
            return
        if count:
            raise ConnectError(
                f"a record is for partition {partition} of topic {topic}, which has {count} partitions, also after "
                f"{waited}: add partitions to the topic, or have the connector send to another partition"
            )
        if self.parts.topic_groups is None:
            todo = (
                "create it, or have the worker create it: set topic.creation.default.partitions and "
                "topic.creation.default.replication.factor in the connector's configuration"
            )
        elif topic in self._known_topics:
            todo = "it was deleted while the task ran: restart the task, which then creates it"
        else:
            why = "Kafka has not answered" if self._topic_error is None else str(self._topic_error)
            todo = f"create it, since the worker could not ({why})"
        raise ConnectError(f"topic {topic}, which a record is for, does not exist, also after {waited}: {todo}")

    async def _open_admin(self) -> None:
        if not self._admin_open:
            await self.parts.admin.__aenter__()
            self._admin_open = True

    def _log_blocked(self, record: ProducerRecord, blocked_ms: int) -> None:
        self.metrics.set("source_send_blocked_ms", blocked_ms)
        if blocked_ms % BLOCKED_LOG_MS == 0:
            log.warning(
                "a record cannot be handed to the producer: its topic is missing, or the broker does not answer",
                task=str(self.id), topic=record.topic, for_ms=blocked_ms,
            )  # fmt: skip

    async def _send_records(self) -> bool:
        records = self.to_send or []
        self._reported_topics.clear()
        for index, record in enumerate(records):
            # If a record is not sent, `to_send` keeps the records from it on, so that none is lost or sent twice.
            try:
                produced = await self.parts.conversion.producer_record(record)
            except (Interrupted, asyncio.CancelledError) as e:
                self.to_send = records[index:]
                if isinstance(e, Interrupted):
                    return False
                raise
            if produced is None:
                await self._record_dropped(record)
                continue
            token: object = None
            try:
                await self._have_topic(produced)
                token = await self._prepare_to_send(record, produced)
                await self._send_record(record, produced, token)
            except RetriableError as e:
                # As in AbstractWorkerSourceTask.sendRecords, the task retries from this record on.
                self._record_not_sent(token)
                self.to_send = records[index:]
                # Only with the connector's own producer.override.max.block.ms. Otherwise `_watch_topics` sees it first.
                if isinstance(e, UnknownTopicOrPartition):
                    await self._fail_without_topic(_destination_partition(produced), "the producer's max.block.ms")
                self._raise_send_error()
                log.warning("send will be retried", task=str(self.id), error=self.mask(f"{type(e).__name__}: {e}"))
                return False
            # Not the record's own error, also that of an ended producer: `errors.tolerance` does not apply.
            except (ConnectError, IllegalState):
                self._record_not_sent(token)
                raise
            except PenstockError as e:
                await self._handle_rejected_record(record, token, e)
            except asyncio.CancelledError:
                self._record_not_sent(token)
                self.to_send = records[index:]
                raise
            if self.send_error is not None:
                self._raise_send_error()
            await self._record_dispatched(record)
        self.to_send = None
        await self._batch_sent()
        return True

    async def _send_record(self, record: SourceRecord, produced: ProducerRecord, token: object) -> None:
        destination = _destination_partition(produced)

        def on_delivery(metadata: RecordMetadata | None, error: Exception | None) -> None:
            self._count_down_waiting_records(destination)
            if metadata is not None and error is None:
                self.metrics.add("source_record_write_total")
                self._record_sent(record, token, metadata)
            # The producer of a cancelled task fails its remaining records when it is closed.
            elif error is not None and not self.cancelled:
                self._handle_failed_delivery(record, token, error)

        self._in_hand = produced
        self._on_its_way(destination)
        try:
            await self.producer.send(
                produced.topic,
                produced.value,
                key=produced.key,
                headers=produced.headers,
                partition=produced.partition,
                timestamp=produced.timestamp,
                on_delivery=on_delivery,
            )
        except BaseException:
            self._count_down_waiting_records(destination)
            raise
        finally:
            self._in_hand = None
        if produced.topic not in self._reported_topics:
            self._reported_topics.add(produced.topic)
            self._listener.on_topic_used(self.id, produced.topic)

    def _handle_failed_delivery(self, record: SourceRecord, token: object, error: Exception) -> None:
        failure = Failure(Stage.KAFKA_PRODUCE, type(self.task), error)
        if self._tolerates_send_errors and not isinstance(error, IllegalState):
            self._record_skipped(record, token)
            self.metrics.add("total_records_skipped")
            self.parts.reporters.await_before_commit(
                asyncio.ensure_future(self.parts.reporters.report(record, failure))
            )
        elif self.send_error is None:
            # The first error counts: later ones are often its consequences.
            self.send_error = error

    async def _handle_rejected_record(self, record: SourceRecord, token: object, error: PenstockError) -> None:
        """Skip a source record that the producer did not accept, if such errors are tolerated; else raise."""
        if not self._tolerates_send_errors:
            self._record_not_sent(token)
            raise ConnectError(f"Unrecoverable exception from producer send: {error}") from error
        await self.parts.reporters.report(record, Failure(Stage.KAFKA_PRODUCE, type(self.task), error))
        self.metrics.add("total_records_skipped")
        self._record_skipped(record, token)

    @property
    def _tolerates_send_errors(self) -> bool:
        return self.parts.conversion.operator.settings.tolerate

    async def _log_commit_error(self, method: str, call: Awaitable[None]) -> None:
        """Await a call of the connector's `commit_record` or `commit`, and only log its error, since the outcome of the
        records is final."""
        try:
            await call
        except Exception as e:
            log.error(
                "a commit method of the connector's task failed",
                task=str(self.id), method=method, error=self.mask(summary_of(e)),
            )  # fmt: skip

    def _raise_send_error(self) -> None:
        if self.send_error is not None:
            raise ConnectError(
                f"Unrecoverable exception from producer send callback: {self.send_error}"
            ) from self.send_error

    async def _have_topic(self, produced: ProducerRecord) -> None:
        """Create the record's topic if it does not exist and the connector configures new topics.

        Raises ConnectError if Kafka rejects the topic. A retriable error is retried without a limit here;
        `_watch_topics` limits the wait.
        """
        topic = produced.topic
        groups = self.parts.topic_groups
        if topic in self._known_topics or groups is None:
            return
        destination = _destination_partition(produced)
        self._in_hand = produced
        self._on_its_way(destination)
        try:
            while True:
                if await self._create_topic_if_missing(groups.topic(topic)):
                    break
                await asyncio.sleep(SEND_FAILED_BACKOFF_MS / 1000)
        finally:
            self._in_hand = None
            self._count_down_waiting_records(destination)
        self._known_topics.add(topic)

    async def _create_topic_if_missing(self, topic: NewTopic) -> bool:
        """Return whether the topic exists now. If not, the caller can try again, and `_topic_error` is the reason."""
        try:
            # Looked up first, as in maybeCreateTopic: an existing topic then needs no right to create topics.
            if topic.name not in await self.parts.admin.list_topics(internal=True):
                await self.parts.admin.create_topics([topic])
        except TopicAlreadyExists:
            log.info("topic was created by another client meanwhile", topic=topic.name)
        except RetriableError as e:
            if self._topic_error is None:
                log.warning("creating a topic will be retried", task=str(self.id), topic=topic.name,
                            error=self.mask(summary_of(e)))  # fmt: skip
            self._topic_error = e
            return False
        except PenstockError as e:
            raise ConnectError(f"topic {topic.name}, which a record is for, cannot be created: {e}") from e
        self._topic_error = None
        return True

    async def _close_task(self) -> None:
        try:
            if self._initialized:
                await self._call_stop(self.task.stop)
        finally:
            self.parts.conversion.chain.close(self.mask)
            await self.parts.reporters.close()
            if self._admin_open:
                await self.parts.admin.close()
            await self.producer.close(0 if self.cancelled else CLOSE_TIMEOUT_MS)


def _polled_records(polled: Any) -> list[SourceRecord]:
    """Return the result of `poll` as a list. Raises ConnectError if it is not a list of records or None."""
    if polled is None:
        return []
    if not isinstance(polled, Iterable):
        raise ConnectError(f"poll must return a list or None, and not {type(polled).__name__}")
    records = list(polled)
    for record in records:
        if not isinstance(record, SourceRecord):
            raise ConnectError(f"poll must return a list of SourceRecord, and not of {type(record).__name__}")
    return records


def _destination_partition(produced: ProducerRecord) -> Destination:
    return produced.topic, produced.partition
