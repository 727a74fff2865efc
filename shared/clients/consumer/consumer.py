"""The consumer returns records as columns. An automatic commit covers only processed records.

    async with Consumer("localhost:9092", ConsumerSettings(group_id="g", auto_offset_reset="earliest")) as consumer:
        consumer.subscribe(["clicks"])
        while True:
            for tp, columns in (await consumer.poll(timeout_ms=1_000)).items():
                ...
            consumer.commit_async()

The records that a poll returned count as processed when the next poll is made. Heartbeats are sent in the background.
In a group, the rebalance listener is only called from polls and `close`. The returned records count as processed by
then, so a commit by the listener covers them.

    async for record in consumer:
        ...

Here each record counts as processed when the next one is requested. A `commit` in the body includes the body's record.
The automatic commit of `close` does not include the last record, also after a `break`. Nor does a `commit` by the
listener during `close`.
No automatic commit goes below an offset that the user has committed, unless the position has moved back since.

Outside of polls, each lookup of an offset ends within `request_timeout_ms`, or raises KafkaTimeout. Polls retry their
lookups instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from asyncio import current_task
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Self, overload

from prometheus_client import CollectorRegistry
from typing_extensions import TypeVar

from penstock.shared.clients.connection import Connection, list_offsets
from penstock.shared.clients.connection.offsets import checked_offset, checked_offsets, checked_partitions, checked_time
from penstock.shared.clients.consumer.assignors import ASSIGNORS, Assignor
from penstock.shared.clients.consumer.commit_request_manager import CommitRequestManager, OnCommit
from penstock.shared.clients.consumer.consumer_coordinator import UNKNOWN_TOPIC_REFRESH_MS, ConsumerCoordinator
from penstock.shared.clients.consumer.fetch_request_manager import FetchRequestManager
from penstock.shared.clients.consumer.fetcher import Fetcher
from penstock.shared.clients.consumer.membership_manager import ConsumerMembershipManager
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.rebalance_listener import (
    RebalanceListener,
    RebalanceListenerInvoker,
    check_listener,
)
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscription_state import (
    EARLIEST,
    LATEST,
    ConsumedPositions,
    PolledRecords,
    SubscriptionState,
)
from penstock.shared.clients.group.member import GroupConfig
from penstock.shared.clients.interceptors.interceptors import ConsumerInterceptor, ConsumerInterceptors
from penstock.shared.clients.protocol.completed_fetch import compile_decoding
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    CommitFailed,
    IllegalState,
    InvalidTopic,
    KafkaTimeout,
    NoOffsetForPartition,
    OffsetOutOfRange,
    PenstockError,
    SerializationError,
    UnknownTopicOrPartition,
    Wakeup,
)
from penstock.shared.common.kernel_loading import loaded
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.common.serialization import Deserializer, bytes_deserializer, check_serializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import check_topic_name

POSITION_POLL_MS = 20
LEAVE_TIME_MS = 200
"""The time that a close always has for LeaveGroup. Without it the partitions would be idle for a session timeout."""
ITERATION_TIMEOUT_MS = 1_000
ITERATION_YIELD_MS = 5
"""An iteration whose body never awaits yields to the event loop at this interval, for heartbeats, joins and fetches."""

K = TypeVar("K", default=bytes | None)
V = TypeVar("V", default=bytes | None)

_Subscription = tuple[Sequence[str] | re.Pattern[str], RebalanceListener | None]


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The first record that cannot be decoded."""

    offset: int
    error: SerializationError


@dataclass(frozen=True, slots=True)
class Deserializers:
    """A consumer's deserializers of keys and of values; bytes stay as they are by default.

    A record that cannot be decoded blocks its partition. After the records before it, polls raise SerializationError
    with the record's offset until the user seeks past it. Between these errors they return records of other partitions.

    >>> from penstock.shared.common.serialization import json_deserializer
    >>> columns = Columns.of([ConsumerRecord("clicks", 0, 7 + i, 0, b"ann", v) for i, v in enumerate([b"1", b"{"])])
    >>> decoded, error = Deserializers(value=json_deserializer).decode(columns)
    >>> decoded.values, decoded.keys, error.offset, str(error.error)
    ([1], [b'ann'], 8, 'clicks-0 at offset 8: value: clicks: not JSON: Input data was truncated')
    """

    key: Deserializer = bytes_deserializer
    value: Deserializer = bytes_deserializer

    def __post_init__(self) -> None:
        for name, deserializer in (("key", self.key), ("value", self.value)):
            check_serializer(f"{name}_deserializer", deserializer)

    @property
    def is_plain(self) -> bool:
        """Whether there are no deserializers to call."""
        return self.key is bytes_deserializer and self.value is bytes_deserializer

    def decode(self, columns: Columns) -> tuple[Columns[Any, Any] | None, Undecodable | None]:
        """Return the decoded records before the first undecodable one, and that one; each is None if there is none."""
        keys, wrong_key = _decode_column(self.key, columns.topic, columns.keys)
        values, wrong_value = _decode_column(self.value, columns.topic, columns.values[: len(keys)])
        keys = keys[: len(values)]
        decoded = replace(columns[: len(values)], keys=keys, values=values) if values else None
        cause, part = (wrong_value, "value") if wrong_value is not None else (wrong_key, "key")
        if cause is None:
            return decoded, None
        offset = int(columns.offsets[len(values)])
        where = f"{columns.topic_partition} at offset {offset}"
        error = SerializationError(f"{where}: {part}: {cause}")
        error.__cause__ = cause
        return decoded, Undecodable(offset, error)


def _decode_column(
    deserializer: Deserializer, topic: str, column: Sequence[bytes | None]
) -> tuple[Sequence[Any], Exception | None]:
    if deserializer is bytes_deserializer:
        return column, None
    decoded: list[Any] = []
    try:
        for data in column:
            decoded.append(deserializer(topic, data))  # noqa: PERF401 - keeps the values before an error
    except Exception as e:
        # A user's deserializer may raise any error.
        return decoded, e
    return decoded, None


class Consumer(Generic[K, V]):
    """Reads records; use it in `async with`.

    It belongs to the process and the event loop in which it was started. Elsewhere, all methods but the getters and
    `wakeup` raise IllegalState.
    """

    def __init__(
        self,
        kafka: KafkaSettings | str,
        settings: ConsumerSettings | None = None,
        *,
        key_deserializer: Deserializer[K] | None = None,
        value_deserializer: Deserializer[V] | None = None,
        registry: CollectorRegistry | None = None,
        assignor: Assignor | None = None,
        interceptors: Sequence[ConsumerInterceptor] = (),
    ) -> None:
        """`kafka` is settings, or the bootstrap servers as text.

        Deserializers are `(topic, bytes | None) -> value`. If one is None, its keys or values stay bytes.
        `interceptors` see the handed-out records and the committed offsets. `assignor` replaces the one that
        `partition_assignment_strategy` names.
        """
        settings = ConsumerSettings.given(settings)
        self._settings = settings
        self._deserializers = Deserializers(
            bytes_deserializer if key_deserializer is None else key_deserializer,
            bytes_deserializer if value_deserializer is None else value_deserializer,
        )
        self._interceptors = ConsumerInterceptors(interceptors)
        self._undecodable: dict[TopicPartition, Undecodable] = {}
        self._metrics = ConsumerMetrics(registry, settings.group_id or "")
        kafka_settings = KafkaSettings.of(kafka)
        self._connection = Connection(kafka_settings)
        client_id = self._connection.client_id
        self._fetcher = Fetcher(settings, kafka_settings.retry_backoff_ms, has_group=settings.group_id is not None)
        self._positions = ConsumedPositions()
        self._fetches = FetchRequestManager(
            self._connection,
            self._fetcher,
            SYSTEM_CLOCK,
            self._metrics,
            fetch_committed=lambda tps: self._commits.fetch(tps, settings.commit_timeout_ms),
            on_move=self._positions.moved,
        )
        self._subscription = SubscriptionState(client_id)
        coordinator = ConsumerCoordinator(
            self._connection,
            ConsumerMembershipManager(
                GroupConfig(
                    group_id=settings.group_id or "",
                    client_id=client_id,
                    instance_id=settings.group_instance_id,
                    session_timeout_ms=settings.session_timeout_ms,
                    heartbeat_interval_ms=settings.heartbeat_interval_ms,
                    max_poll_interval_ms=settings.max_poll_interval_ms,
                    retry_backoff_ms=kafka_settings.retry_backoff_ms,
                ),
                assignor or ASSIGNORS[settings.partition_assignment_strategy],
            ),
            self._subscription,
            self._fetches,
            SYSTEM_CLOCK,
            has_group=settings.group_id is not None,
        )
        self._coordinator = coordinator
        self._commits = CommitRequestManager(
            self._connection,
            coordinator,
            self._metrics,
            SYSTEM_CLOCK,
            on_committed=self._interceptors.on_commit,
        )
        self._invoker = RebalanceListenerInvoker(
            coordinator, self._fetcher, self._commits, self._positions, settings, self._metrics
        )
        self._next_commit_ms = 0
        self._state = "new"
        self._disconnecting: asyncio.Task[None] | None = None
        self._wanted: _Subscription | list[TopicPartition] | None = None
        self._is_polling = False
        self._is_woken = False
        self._iterating: asyncio.Task[object] | None = None
        self._yielded_ms = 0

    def __repr__(self) -> str:
        return f"<Consumer {self._state}, client {self._connection.client_id}, group {self._settings.group_id}>"

    async def start(self) -> None:
        """Connect to the cluster.

        Raises BrokerNotAvailable with the addresses if no broker is reached within `request_timeout_ms`. Raises
        AuthenticationFailed as soon as a broker rejects the credentials.
        """
        if self._state == "open":
            raise IllegalState("the consumer is started already")
        if self._state != "new":
            raise IllegalState(f"the consumer is {self._state}; make a new one")
        if not compile_decoding.cache_info().currsize:
            await loaded(compile_decoding, "the decoding of records")
        await self._connection.open()
        self._connection.on_metadata(self._coordinator.on_metadata)
        self._fetches.open()
        self._state = "open"
        self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
        if isinstance(self._wanted, list):
            self.assign(self._wanted)
        elif self._wanted is not None:
            self.subscribe(*self._wanted)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Commit the processed records unless `commit_strategy` is `none`, call the listener, and leave the group.

        All polled records count as processed, with two exceptions: the last record of an `async for`, and after an
        exception in `async with` the records of the last poll.

        `timeout_ms` limits the commit, the listener and LeaveGroup together, but LeaveGroup has at least 200 ms. If
        `timeout_ms` is None, `listener_timeout_ms` limits the commit and the listener, or `max_poll_interval_ms` if
        that is shorter. A static member stays in the group.

        If the call is cancelled, so are the commit and the listener. LeaveGroup then has 200 ms. If only LeaveGroup was
        left, it continues in the background. A second call waits for LeaveGroup and the sockets within its own
        `timeout_ms`. It does not wait for the listener.
        """
        await self._close_consumer(timeout_ms, processed=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # If the block raised, the records of the last poll may not have been processed.
        await self._close_consumer(None, processed=kind is None)

    def subscribe(self, topics: Sequence[str] | re.Pattern[str], listener: RebalanceListener | None = None) -> None:
        """Read topics by name, or those whose whole name matches a pattern, without Kafka's internal ones. The group's
        members share the partitions.

        Raises InvalidTopic for an invalid topic name or an empty list, TypeError for a listener that is not a
        RebalanceListener with async methods, and IllegalState for a listener without a `group_id`.
        """
        check_listener(listener)
        if listener is not None and self._settings.group_id is None:
            raise IllegalState("a rebalance listener needs a group_id: without a group there are no rebalances")
        if isinstance(topics, str):
            raise TypeError("subscribe takes a list of topics or a compiled pattern, not one name")
        if not isinstance(topics, re.Pattern):
            topics = list(topics)
            if not topics:
                raise InvalidTopic("subscribe needs at least one topic")
            for topic in topics:
                check_topic_name(topic)
        if self._state == "new":
            self._wanted = (topics, listener)
            return
        self._check_usable()
        self._invoker.listener = listener
        self._coordinator.subscribe(topics, self._invoker)
        # In a group the revocation does this.
        if self._settings.group_id is None:
            self._positions.retain(self._fetcher.assignment)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions. Those that are read already keep their position and pause.

        A `group_id` is then used only for committed offsets: reading starts at them, and `commit` stores them.

        Unless `commit_strategy` is `none`, first commits the processed records, without waiting. The returned records
        of partitions that are no longer read count as processed, except the last record of an `async for`.

        Raises InvalidTopic, TypeError or ValueError for a partition that cannot exist.
        """
        partitions = checked_partitions(partitions)
        if self._state == "new":
            self._wanted = partitions
            return
        self._check_usable()
        self._subscription.assign()
        positions = self._positions
        if self._settings.commit_strategy != "none":
            if not positions.is_one_by_one:
                positions.processed(self._fetcher.assignment.difference(partitions))
            offsets = positions.uncommitted()
            self._commits.commit_async(offsets)
            positions.registered(offsets)
        self._fetches.assign(sorted(set(partitions)), partitions)
        positions.retain(partitions)

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions read now."""
        self._check_open()
        return self._fetcher.assignment

    async def poll(self, timeout_ms: float, max_records: int | None = None) -> dict[TopicPartition, Columns[K, V]]:
        """Return at most `max_records` (default `max_poll_records`) records as soon as there are any, or {} after
        `timeout_ms`.

        From now on the records of earlier polls count as processed. The poll commits them according to
        `commit_strategy`. It calls the rebalance listener if that is due. Both may take longer than `timeout_ms`. If
        the poll is cancelled, the listener's call continues.

        Raises the listener's errors, SerializationError and CorruptRecord (with the record's offset),
        NoOffsetForPartition and OffsetOutOfRange (if `auto_offset_reset` is `none`), AuthorizationFailed,
        AuthenticationFailed, errors of the group such as FencedInstanceId, Wakeup, IllegalState (closed, not
        subscribed, or another task polls), and ValueError (`max_records` below 1).

        If handed-out records were not committed before their partition was lost, raises CommitFailed once, unless
        `commit_strategy` is `none`. If it is `sync`, also raises the errors of `commit`.
        """
        fetched_rows = await self._poll_records(timeout_ms, max_records)
        positions = {tp: each.position for tp, each in fetched_rows.items()}
        self._positions.returned(positions, {tp: each.columns.leader_epoch for tp, each in fetched_rows.items()})
        return {tp: each.columns for tp, each in fetched_rows.items()}

    async def _poll_records(
        self, timeout_ms: float, max_records: int | None, *, one_by_one: bool = False
    ) -> dict[TopicPartition, PolledRecords]:
        """Poll. With `one_by_one`, unread records stay where they are: {} is returned if there are any."""
        self._check_reading("poll")
        if self._is_polling:
            raise IllegalState("another task is in poll, or waits for the next record: a consumer is one task's")
        if max_records is not None and max_records < 1:
            raise ValueError(f"poll: max_records={max_records} must be above 0")
        if not self._subscription.is_subscribed:
            raise IllegalState("poll needs a subscription or assigned partitions")
        limit = self._settings.max_poll_records if max_records is None else max_records
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        deadline_ms = now_ms + timeout_ms
        # 1. The records of earlier polls are processed. The listener and the commits below may then include them.
        self._positions.processed()
        self._coordinator.polled(now_ms)
        # Also here, since a poll may never wait: it has no time, or another topic always has records.
        self._coordinator.look_for_topics(now_ms)
        with self._coordinator.polling(), self._mark_polling():
            # 2. A due rebalance comes first: it commits the revoked partitions itself, and they must not be committed
            #    after another member owns them.
            await self._coordinator.call_listener()
            self._invoker.raise_pending()
            # 3. Commit as configured.
            await self._commit_as_configured()
            # Let heartbeats, joins and fetches run even if records are always buffered.
            await asyncio.sleep(0)
            # 4. Take records, or wait for them. Each wait may end with a rebalance, a close, a wakeup or an error.
            #    These are handled before records are taken, so no taken record is lost.
            while True:
                await self._coordinator.call_listener()
                self._check_reading("poll")
                self._invoker.raise_pending()
                self._raise_wakeup()
                self._coordinator.check_errors()
                self._raise_undecodable()
                if one_by_one and self._positions.unread.has_next(self._fetcher.paused):
                    return {}
                if fetched_rows := await self._take_records(limit):
                    return fetched_rows
                now_ms = SYSTEM_CLOCK.monotonic_ms()
                if now_ms >= deadline_ms:
                    return {}
                self._coordinator.look_for_topics(now_ms)
                with self._coordinator.listening():
                    await self._fetches.wait_for_data(min(deadline_ms - now_ms, UNKNOWN_TOPIC_REFRESH_MS))

    def wakeup(self) -> None:
        """Raise Wakeup in the call that waits for records (`poll` or `async for`).

        If no call waits, the next `poll` raises it, even if records are available. An `async for` then raises it after
        the records that its last poll returned.

        The call that raises it has taken no records, so the following call continues as usual. From another thread, use
        `loop.call_soon_threadsafe(consumer.wakeup)`.
        """
        self._is_woken = True
        self._fetches.wake_pollers()

    def _raise_wakeup(self) -> None:
        woken = self._is_woken
        self._is_woken = False
        if woken:
            raise Wakeup(f"client {self._connection.client_id}: wakeup was called")

    def __aiter__(self) -> Self:
        """Iterate over the records. Each record counts as processed when the next one is requested.

        Raises the errors of `poll`. After such an error, a new `async for` continues with the next record. Raises
        IllegalState if two tasks iterate at once.
        """
        self._iterating = None
        return self

    async def __anext__(self) -> ConsumerRecord[K, V]:
        task = current_task()
        if task is not self._iterating or self._state != "open":
            self._check_reading("the next record")
            self._begin_iterating(task)
        now_ms = SYSTEM_CLOCK.monotonic_ms()
        if now_ms - self._yielded_ms >= ITERATION_YIELD_MS:
            self._yielded_ms = now_ms
            await asyncio.sleep(0)
            # A close may have begun meanwhile.
            self._check_reading("the next record")
        positions = self._positions
        unread = self._positions.unread
        positions.processed()
        self._coordinator.polled(now_ms)
        # The next poll may be far away: it comes after the last unread record. This commit does not wait. If a call of
        # the listener is due, a poll commits after it.
        is_commit_due = now_ms >= self._next_commit_ms and self._settings.commit_strategy == "auto"
        if is_commit_due and not self._coordinator.is_listener_due:
            await self._commit_as_configured()
        # A due call of the listener precedes unread records: their partition may be revoked. A poll makes the call,
        # and drops the records of partitions that are gone.
        while self._coordinator.is_listener_due or (found := unread.next(self._fetcher.paused)) is None:
            positions.add_unread(await self._poll_records(ITERATION_TIMEOUT_MS, None, one_by_one=True))
        record, position, epoch = found
        positions.returned_one(record.topic_partition, position, epoch)
        return record

    def _begin_iterating(self, task: asyncio.Task[object] | None) -> None:
        """Register the task that iterates. Raises IllegalState if another one is registered and has not ended."""
        if self._iterating is not None and not self._iterating.done():
            raise IllegalState("another task iterates over this consumer: the record it works on would count as done")
        self._iterating = task

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, timeout_ms: float | None = None
    ) -> None:
        """Commit `offsets`, by default everything handed out, and wait. Each offset is that of the next record to read.
        Pending asynchronous commits of other partitions are sent before or with this one.

        Raises CommitFailed if this member may no longer commit one of the offsets; those that it may are committed. If
        `offsets` is None, also raises CommitFailed if records were handed out and their partition was revoked or lost
        before they were committed; each loss is reported once.

        Also raises FencedInstanceId, AuthorizationFailed, UnknownTopicOrPartition, KafkaTimeout after `timeout_ms`
        (default `commit_timeout_ms`), IllegalState if there is no `group_id`, ValueError or TypeError for an invalid
        offset.
        """
        positions = self._positions
        wanted, lost = self._committable_offsets(offsets)
        # Register before the wait: a rebalance during the wait must not commit a lower offset.
        positions.registered(wanted)
        try:
            await self._commits.commit(wanted, self._settings.commit_timeout_ms if timeout_ms is None else timeout_ms)
        except CommitFailed:
            positions.reported({tp: at.offset for tp, at in wanted.items()} | lost)
            raise
        # An offset that was reported as not committed may be committed after all, by a later commit of a regained
        # partition.
        positions.recovered({tp: at.offset for tp, at in wanted.items()})
        if lost:
            positions.reported(lost)
            raise self._invoker.not_committed(lost)

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, callback: OnCommit | None = None
    ) -> None:
        """Commit `offsets`, by default everything handed out, without waiting.

        Retriable errors are retried, that of an unknown partition for 5 s, unless newer offsets replace these.
        `callback(offsets, error)` is called once on the event loop. The error is None if these offsets or newer ones
        are committed. Otherwise it is CommitFailed as in `commit`, or the first error that is not retried. If 10,000
        callbacks already wait, the oldest one gets CoordinatorNotAvailable.

        Raises TypeError for a callback that is async or not callable, ValueError or TypeError for an invalid offset,
        and IllegalState if there is no `group_id`.
        """
        if callback is not None and (not callable(callback) or inspect.iscoroutinefunction(callback)):
            raise TypeError(f"commit_async: callback must be a function that is not async, got {callback!r}")
        positions = self._positions
        wanted, lost = self._committable_offsets(offsets)
        positions.registered(wanted)
        if callback is None:
            self._commits.commit_async(wanted)
            return

        def on_commit_answered(offsets: Mapping[TopicPartition, OffsetAndMetadata], error: Exception | None) -> None:
            at = {tp: each.offset for tp, each in offsets.items()}
            if error is None:
                positions.recovered(at)
            elif isinstance(error, CommitFailed):
                positions.reported(at)
            callback(offsets, error)

        # A callback is called once. If a part of the offsets is lost it reports the loss; the rest is committed all
        # the same.
        if lost:
            self._commits.commit_async(wanted)
            both = {**{tp: OffsetAndMetadata(offset) for tp, offset in lost.items()}, **wanted}
            asyncio.get_running_loop().call_soon(on_commit_answered, both, self._invoker.not_committed(lost))
        elif wanted:
            self._commits.commit_async(wanted, on_commit_answered)
        # Nothing to send. Call the callback from the event loop, as in the other cases.
        else:
            asyncio.get_running_loop().call_soon(callback, wanted, None)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Continue from `offset`, also in a running `async for`.

        Raises IllegalState if the partition is not assigned, ValueError and TypeError for an invalid offset.
        """
        self._check_usable()
        offset = checked_offset(tp, offset)
        self._fetches.seek(tp, offset)
        self._positions.sought(tp, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Continue from the first record of these partitions, by default of all assigned ones."""
        await self._reset_positions(partitions, "earliest")

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Continue from the `end_offsets` of these partitions, by default of all assigned ones."""
        await self._reset_positions(partitions, "latest")

    def pause(self, *partitions: TopicPartition) -> None:
        """Return no records of these partitions until `resume`. The group does not rebalance."""
        self._check_usable()
        self._fetches.pause(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        """Return records of these partitions again."""
        self._check_usable()
        self._fetches.resume(partitions)

    def paused(self) -> frozenset[TopicPartition]:
        """The paused partitions. A partition that is revoked is no longer paused."""
        self._check_open()
        return frozenset(self._fetcher.paused)

    def enforce_rebalance(self) -> None:
        """Request a new assignment by the group; it happens in the next polls."""
        self._check_usable()
        if self._settings.group_id is None:
            raise IllegalState("enforce_rebalance needs a group_id")
        self._coordinator.enforce_rebalance()

    def silent_ms(self) -> float | None:
        """Return the ms since a broker last answered this client. Returns None while the consumer is not open."""
        return self._connection.silent_ms() if self._state == "open" else None

    def missing_topics(self) -> frozenset[str]:
        """Return the subscribed topics that do not exist by the current metadata, or whose metadata is not known yet.

        Topics that the principal may not read are left out.
        """
        if self._state != "open":
            return frozenset()
        topics = self._subscription.topics - self._connection.unauthorized_topics()
        return frozenset(topic for topic in topics if self._connection.partitions(topic) is None)

    def known_partitions(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the partition counts of these topics by the current metadata, without the topics it lacks."""
        self._check_open()
        return self._coordinator.known_partitions(topics)

    def rebalance_ms(self) -> float:
        """Return the ms since the current rebalance began, including the first join; 0 if there is none."""
        return self._coordinator.rebalance_ms

    def ping(self) -> None:
        """Request a response from any broker, so that `silent_ms` shows whether the brokers answer. Does not wait.

        Raises IllegalState in another event loop, or after a fork.
        """
        if self._state == "open":
            self._connection.check_loop()
            self._connection.refresh_metadata()

    def group_metadata(self) -> GroupMetadata:
        """Return this member's identity, with the generation that its commits carry. Raises IllegalState if there is no
        `group_id`.

        A removed member keeps its old identity, so that the group rejects its commits. Before the first assignment, and
        after `assign`, the generation is -1 and the member id is empty.
        """
        return self._coordinator.group_metadata()

    async def position(self, tp: TopicPartition) -> int:
        """Return the offset of the next record to poll. Raises IllegalState if the partition is not assigned.

        If the offset cannot be looked up, the error is raised at once, such as NoOffsetForPartition under
        `auto_offset_reset=none`. Raises KafkaTimeout if the offset is not known after `request_timeout_ms`.
        """
        self._check_usable()
        # In an iteration the fetcher's position is after the whole batch. The user's is before the unread records.
        if (unread := self._positions.unread.position(tp)) is not None:
            return unread
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._connection.settings.request_timeout_ms
        while (position := self._fetches.position(tp)) is None:
            self._coordinator.check_errors()
            if (error := self._fetcher.error_of(tp)) is not None:
                raise self._describe_fetch_error(error) from error
            if SYSTEM_CLOCK.monotonic_ms() >= deadline_ms:
                limit_ms = self._connection.settings.request_timeout_ms
                raise KafkaTimeout(f"{self._client_and_group()}: position of {tp} not known after {limit_ms} ms")
            await asyncio.sleep(POSITION_POLL_MS / 1000)
        return position

    def known_position(self, tp: TopicPartition) -> int | None:
        """Return the `position` without waiting.

        Returns None if it is not known yet, or if the partition is not assigned.
        """
        self._check_open()
        if tp not in self._fetcher.assignment:
            return None
        unread = self._positions.unread.position(tp)
        return self._fetches.position(tp) if unread is None else unread

    def known_lag(self, tp: TopicPartition) -> int | None:
        """Return the number of offsets between the position and the last known end.

        Returns None while the position or the end is unknown, or if the partition is not assigned.
        """
        position = self.known_position(tp)
        return None if position is None else self._fetcher.lag(tp, position)

    def is_at_end(self, tp: TopicPartition) -> bool:
        """Whether the position is the high watermark of the last fetch. False if that fetch failed.

        Under `read_committed`, polls do not move the position past the first record of an open transaction.
        """
        position = self.known_position(tp)
        return position is not None and position == self._fetcher.high_watermark(tp)

    def end_age_ms(self, tp: TopicPartition) -> int | None:
        """Return how long ago the position was known to be the end (`is_at_end`); None if it is not the end.

        It was known when the last fetch that succeeded was sent. If the broker hangs, records may have come since then.
        """
        return int(SYSTEM_CLOCK.monotonic_ms() - self._fetcher.answered_ms(tp)) if self.is_at_end(tp) else None

    def forget_commits(self) -> None:
        """Drop all pending commits: they are sent neither now nor in the next generation."""
        self._check_usable()
        self._commits.retain(())

    @overload
    async def committed(self, partitions: TopicPartition) -> OffsetAndMetadata | None: ...

    @overload
    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]: ...

    async def committed(
        self, partitions: TopicPartition | Iterable[TopicPartition]
    ) -> OffsetAndMetadata | dict[TopicPartition, OffsetAndMetadata | None] | None:
        """Return the group's committed offset of a partition, or of several partitions in one request.

        None means that there is no committed offset.
        """
        self._check_usable()
        if self._settings.group_id is None:
            raise IllegalState("committed needs a group_id")
        wanted = [partitions] if isinstance(partitions, TopicPartition) else list(partitions)
        found = await self._commits.fetch(wanted, self._connection.settings.request_timeout_ms) if wanted else {}
        return found.get(partitions) if isinstance(partitions, TopicPartition) else {tp: found.get(tp) for tp in wanted}

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the first offset of each partition."""
        return await self._list_offsets(dict.fromkeys(partitions, "earliest"))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offset after the last record, under `read_committed` the last stable offset."""
        return await self._list_offsets(dict.fromkeys(partitions, "latest"))

    async def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """Return the first offset with a timestamp at or after each time (ms since the epoch), None if there is none.

        Raises ValueError and TypeError for an invalid time.
        """
        times = {tp: checked_time(tp, time_ms) for tp, time_ms in times.items()}
        found = await self._list_offsets(times)
        return {tp: None if offset < 0 else offset for tp, offset in found.items()}

    async def lag(self) -> dict[TopicPartition, int]:
        """Return for each assigned partition the number of offsets between its position and its end."""
        self._check_open()
        partitions = self._fetcher.assignment
        ends = await self.end_offsets(partitions)
        return {tp: max(0, ends[tp] - await self.position(tp)) for tp in partitions}

    @contextlib.contextmanager
    def _mark_polling(self) -> Iterator[None]:
        self._is_polling = True
        try:
            yield
        finally:
            self._is_polling = False

    async def _take_records(self, limit: int | None) -> dict[TopicPartition, PolledRecords]:
        if unread := self._positions.unread.take(limit, self._fetcher.paused):
            return unread
        try:
            fetched = self._fetches.take(limit)
        except PenstockError as e:
            # Let fetches of the other partitions run if the caller polls again at once.
            await asyncio.sleep(0)
            raise self._describe_fetch_error(e) from e
        fetched_rows: dict[TopicPartition, Columns[Any, Any]] = fetched
        if fetched_rows and not self._deserializers.is_plain:
            fetched_rows = self._decode_records(fetched)
        if self._interceptors:
            fetched_rows = {tp: self._interceptors.on_consume(tp, columns) for tp, columns in fetched_rows.items()}
        for tp, columns in fetched_rows.items():
            self._metrics.consumed(tp.topic, len(columns))
        positions = {tp: p for tp in fetched_rows if (p := self._fetches.position(tp)) is not None}
        return {tp: PolledRecords(fetched_rows[tp], position) for tp, position in positions.items()}

    def _decode_records(self, fetched_rows: dict[TopicPartition, Columns]) -> dict[TopicPartition, Columns[Any, Any]]:
        """Return the decoded records: of each partition those before the first one that cannot be decoded.

        If there are none in any partition, raises the error of a record that cannot be decoded. Otherwise the next poll
        raises it.
        """
        given = {}
        for tp, columns in fetched_rows.items():
            decoded, wrong = self._deserializers.decode(columns)
            if decoded is not None:
                given[tp] = decoded
            if wrong is not None:
                # The position stays at the undecodable record, so that the user can seek past it. The records after
                # it are fetched again.
                self._fetches.seek(tp, wrong.offset)
                self._undecodable[tp] = wrong
        if not given:
            self._raise_undecodable()
        return given

    def _raise_undecodable(self) -> None:
        """Raise the error of a record that could not be decoded, if this is still the next record of its partition."""
        while self._undecodable:
            tp, wrong = self._undecodable.popitem()
            # After a seek or a rebalance the record is no longer the next one, and its error is outdated.
            if self.known_position(tp) == wrong.offset:
                raise wrong.error

    async def _reset_positions(self, partitions: tuple[TopicPartition, ...], to: Literal["earliest", "latest"]) -> None:
        self._check_usable()
        wanted = partitions or tuple(self.assignment())
        # Before the unread records are dropped: it raises IllegalState if a partition is not assigned.
        self._fetches.reset(wanted, EARLIEST if to == "earliest" else LATEST)
        self._positions.unread.drop(wanted)
        for tp in wanted:
            self._positions.sought(tp, await self.position(tp))

    async def _commit_as_configured(self) -> None:
        strategy = self._settings.commit_strategy
        positions = self._positions
        if strategy == "none":
            return
        # Another member may be ahead with a lost partition. A commit would set it back.
        committable = self._coordinator.committable_partitions
        offsets = {tp: at for tp, at in positions.uncommitted().items() if tp in committable}
        if not offsets:
            return
        if strategy == "sync":
            try:
                await self._commits.commit(offsets, self._settings.commit_timeout_ms)
            except UnknownTopicOrPartition:
                # The other partitions are committed. Register the offsets, so that the error is raised only once.
                positions.registered(offsets)
                raise
            except CommitFailed:
                positions.reported({tp: at.offset for tp, at in offsets.items()})
                raise
        # A drifting position is committed without waiting for the interval (see `ConsumedPositions.drifting`).
        elif (
            strategy == "auto"
            and SYSTEM_CLOCK.monotonic_ms() < self._next_commit_ms
            and positions.drifting.isdisjoint(offsets)
        ):
            return
        else:
            self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
            self._commits.commit_async(offsets)
        positions.registered(offsets)

    def _committable_offsets(
        self, given: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, int]]:
        """Return the offsets that a commit sends, and those that it must report as not committed.

        If the group assigns the partitions, the commit sends only offsets of this member's partitions. It reports
        `given` offsets of other partitions. If `given` is None, it reports positions that were handed out and not
        committed before their partition was lost. Raises IllegalState if there is no `group_id`.
        """
        self._check_usable()
        if self._settings.group_id is None:
            raise IllegalState("commit needs a group_id")
        positions = self._positions
        wanted = positions.all_consumed() if given is None else checked_offsets(given)
        # Blocking code may have kept the member from polling for too long, and the group's task from noticing it.
        # Then the partitions count as lost before the commit, not after it.
        self._coordinator.leave_if_overdue()
        if not self._coordinator.is_managed:
            return wanted, {}
        # Another member may be ahead in the other partitions.
        committable = self._coordinator.committable_partitions
        mine = {tp: at for tp, at in wanted.items() if tp in committable}
        if given is not None:
            return mine, {tp: at.offset for tp, at in wanted.items() if tp not in committable}
        # Records of partitions that are gone are lost only if this member did not commit them before.
        gone = wanted.keys() - committable
        lost = positions.handed_out(gone, self._commits.committed(gone))
        return mine, lost | positions.forfeited({tp: at.offset for tp, at in mine.items()})

    async def _list_offsets(self, specs: Mapping[TopicPartition, str | int]) -> dict[TopicPartition, int]:
        self._check_usable()
        checked_partitions(specs)
        if not specs:
            return {}
        limit_ms = self._connection.settings.request_timeout_ms
        return await list_offsets(self._connection, specs, self._settings.isolation_level, limit_ms)

    def _describe_fetch_error(self, error: PenstockError) -> PenstockError:
        """Return the error with the client and its group."""
        if isinstance(error, NoOffsetForPartition | OffsetOutOfRange):
            return type(error)(f"{self._client_and_group()}: {error} (auto_offset_reset=none)")
        return type(error)(f"{self._client_and_group()}: Fetch: {error}")

    def _client_and_group(self) -> str:
        """Return the client, its group and generation, for error messages about offsets."""
        group_id = self._settings.group_id
        group = f", group {group_id}, generation {self._coordinator.member.generation}" if group_id else ""
        return f"client {self._connection.client_id}{group}"

    async def _close_consumer(self, timeout_ms: float | None, *, processed: bool) -> None:
        if self._state == "new":
            self._state = "closed"
        if self._state != "open":
            # Until the listener has returned there is no task to wait for: the listener may wait for this call.
            ending = self._disconnecting
            if ending is not None and not ending.done() and not self._invoker.is_called(current_task()):
                self._connection.check_loop()
                limit_s = None if timeout_ms is None else max(timeout_ms, LEAVE_TIME_MS) / 1000
                if not (await asyncio.wait({ending}, timeout=limit_s))[0]:
                    # This ends the LeaveGroup that gets no response.
                    await self._connection.close()
            return
        self._check_reading("close")
        self._state = "closing"
        if processed and not self._positions.is_one_by_one:
            self._positions.processed()
        # The last records may not have been processed. A commit by the listener leaves them out too.
        else:
            self._positions.unprocessed()
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        # LeaveGroup comes last and has its own time limit.
        work_ms = None if timeout_ms is None else max(0.0, timeout_ms - LEAVE_TIME_MS)
        try:
            await self._invoker.leave(work_ms)
        except asyncio.CancelledError:
            # The caller wants to wait no longer: LeaveGroup has only LEAVE_TIME_MS.
            timeout_ms = 0
            raise
        finally:
            waited_ms = SYSTEM_CLOCK.monotonic_ms() - started_ms
            left_ms = None if timeout_ms is None else max(0.0, timeout_ms - waited_ms)
            # A task of its own, which a cancellation of the caller does not reach. Otherwise the member's heartbeats
            # could go on, and it would keep its partitions.
            self._disconnecting = asyncio.create_task(self._leave_group_and_disconnect(left_ms))
            await asyncio.shield(self._disconnecting)

    async def _leave_group_and_disconnect(self, timeout_ms: float | None) -> None:
        """Stop the commits and the fetches, leave the group and close the sockets.

        The wait for the response to LeaveGroup is limited by `timeout_ms`, but not below LEAVE_TIME_MS.
        """
        try:
            await self._commits.close()
            self._state = "closed"
            await self._fetches.close()
            # A task of its own: at the limit the sockets are closed without the response. A broker that does not answer
            # must not hold up the close.
            leaving = asyncio.ensure_future(self._coordinator.close())
            await asyncio.wait({leaving}, timeout=None if timeout_ms is None else max(timeout_ms, LEAVE_TIME_MS) / 1000)
            leaving.cancel()
        finally:
            await self._connection.close()

    def _check_open(self) -> None:
        """Raise IllegalState if the consumer is not started, or is closed."""
        if self._state == "new":
            raise IllegalState("the consumer is not started; use it in `async with`, or call start() first")
        if self._state == "closed":
            raise IllegalState("the consumer is closed; make a new one")

    def _check_usable(self) -> None:
        """Raise IllegalState if the consumer is not open, or if the caller is not in its event loop."""
        self._check_open()
        self._connection.check_loop()

    def _check_reading(self, operation: str) -> None:
        """Raise IllegalState if the consumer is not open, or if the caller is not in its event loop or is inside a
        rebalance listener."""
        self._check_usable()
        if self._state != "open":
            raise IllegalState(f"{operation}: the consumer is {self._state}")
        if self._invoker.is_called(current_task()):
            raise IllegalState(f"{operation}: not inside a rebalance listener")
