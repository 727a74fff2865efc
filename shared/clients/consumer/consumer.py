"""The consumer: records as columns, positions that are committed only when they were processed.

    async with Consumer("localhost:9092", ConsumerSettings(group_id="g", auto_offset_reset="earliest")) as consumer:
        consumer.subscribe(["clicks"])
        while True:
            for tp, columns in (await consumer.poll(timeout_ms=1_000)).items():
                ...
            consumer.commit_async()

What a poll returned counts as processed when the next poll is made. Rebalances happen inside polls alone: heartbeats go
on in the background, the listener is called by the next poll. So a listener that commits takes what was processed.

    async for record in consumer:
        ...

Here each record counts as processed when the next one is requested. A `commit` in the body includes the body's record.
Automatic commits (`commit_strategy`, revocation, close) leave it out, also after a `break`, and so does a listener that
commits in close. An offset that the user commits is registered in the positions like an automatic commit: no automatic
commit goes below it.

Each lookup of an offset ends within `request_timeout_ms`, or raises KafkaTimeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from asyncio import current_task
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Self, overload

from prometheus_client import CollectorRegistry
from typing_extensions import TypeVar

from penstock.shared.clients.connection import compile_decoding, list_offsets
from penstock.shared.clients.consumer.assignors import Assignor
from penstock.shared.clients.consumer.decoding import Decoding, Undecodable
from penstock.shared.clients.consumer.interceptors import ConsumerInterceptor, ConsumerInterceptors
from penstock.shared.clients.consumer.listener import RebalanceListener
from penstock.shared.clients.consumer.membership import Membership
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.offset_commits import OffsetCommits, OnCommit
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscription_state import (
    LEAVE_TIME_MS,
    UNKNOWN_TOPIC_REFRESH_MS,
    SubscriptionState,
)
from penstock.shared.clients.consumer.unread import Taken
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.compilation import loaded
from penstock.shared.common.errors import (
    CommitFailed,
    IllegalState,
    KafkaTimeout,
    NoOffsetForPartition,
    OffsetOutOfRange,
    PenstockError,
    UnknownTopicOrPartition,
    Wakeup,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.offset_checks import checked_offset, checked_offsets, checked_time
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.common.serialization import Deserializer, bytes_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.common.topic_names import check_topic_name

log = get_logger(__name__)

POSITION_POLL_MS = 20
ITERATION_TIMEOUT_MS = 1_000
ITERATION_YIELD_MS = 5
"""An iteration whose body never awaits lets the event loop run so often, for heartbeats, joins and fetches."""

K = TypeVar("K", default=bytes | None)
V = TypeVar("V", default=bytes | None)

_Subscription = tuple[Sequence[str] | re.Pattern[str], RebalanceListener | None]


class Consumer(Generic[K, V]):
    """Reads records; use it from one event loop, in `async with`."""

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
        """`kafka` says where the brokers are: settings, or bootstrap servers as text.

        Deserializers are `(topic, bytes | None) -> value`; what they return is in the columns and the records. Without
        one these have the bytes.

        `interceptors` see the records that are handed out and what is committed (`ConsumerInterceptor`).
        An `assignor` of the caller's own takes the place of the settings' one, and should have its name.
        """
        self._settings = settings = ConsumerSettings.given(settings)
        self._decoding = Decoding(
            bytes_deserializer if key_deserializer is None else key_deserializer,
            bytes_deserializer if value_deserializer is None else value_deserializer,
        )
        self._interceptors = ConsumerInterceptors(interceptors)
        self._undecodable: dict[TopicPartition, Undecodable] = {}
        self._metrics = ConsumerMetrics(registry, settings.group_id or "")
        self._subscription = SubscriptionState(KafkaSettings.of(kafka), settings, self._metrics)
        self._subscription.assignor = assignor
        self._commits = OffsetCommits(
            self._subscription.connection,
            self.group_metadata,
            self._metrics,
            SYSTEM_CLOCK,
            is_managed=lambda: self._subscription.is_managed,
            require_stable=settings.isolation_level == "read_committed",
            gone_because=lambda: self._subscription.gone_because,
            is_owner=lambda: self._subscription.is_owner,
            on_refused=self._subscription.on_commit_refused,
            on_committed=self._interceptors.on_commit,
        )
        self._membership = Membership(self._subscription, self._commits, settings, self._metrics)
        self._next_commit_ms = 0
        self._state = "new"
        self._wanted: _Subscription | list[TopicPartition] | None = None
        self._positions = self._membership.positions
        self._is_polling = False
        self._is_woken = False
        self._iterating: asyncio.Task[object] | None = None
        self._yielded_ms = 0

    def __repr__(self) -> str:
        return f"<Consumer {self._state}, client {self._subscription.client_id}, group {self._settings.group_id}>"

    async def start(self) -> None:
        """Connect; BrokerNotAvailable with the address within `request_timeout_ms`, AuthenticationFailed at once."""
        if self._state != "new":
            raise IllegalState(f"the consumer is {self._state}; make a new one")
        if not compile_decoding.cache_info().currsize:
            await loaded(compile_decoding, "the decoding of records")
        await self._subscription.start(
            lambda tps: self._commits.fetch(tps, self._settings.commit_timeout_ms), self._positions.moved
        )
        self._state = "open"
        self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
        if isinstance(self._wanted, list):
            self.assign(self._wanted)
        elif self._wanted is not None:
            self.subscribe(*self._wanted)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Commit what was polled (unless the strategy is `none`), have the listener revoke, leave the group.

        Of an `async for` that was the record before the last, as the last one may not have been processed; after an
        exception in `async with` it is the poll before the last. A listener's `commit` takes no more than that.

        `timeout_ms` bounds all of it, but for the 200 ms that telling the group always has; by default
        `listener_timeout_ms` bounds commit and listener, and the answers to the last requests are waited for.
        """
        await self._close(timeout_ms, processed=True)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Where the block failed, what the last poll returned may not have been processed.
        await self._close(None, processed=kind is None)

    def subscribe(self, topics: Sequence[str] | re.Pattern[str], listener: RebalanceListener | None = None) -> None:
        """Read topics by name, or all whose whole name a pattern matches, shared among the group's members.

        InvalidTopic for a name that no topic can have, ValueError for no topic at all.
        """
        if isinstance(topics, str):
            raise TypeError("subscribe takes a list of topics or a compiled pattern, not one name")
        if not isinstance(topics, re.Pattern):
            for topic in (topics := list(topics)):
                check_topic_name(topic)
        if self._state == "new":
            self._wanted = (topics, listener)
            return
        self._check_open()
        self._membership.listener = listener
        self._subscription.subscribe(topics, self._membership)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read exactly these partitions; a `group_id` is then used for commits alone."""
        partitions = list(partitions)
        if self._state == "new":
            self._wanted = partitions
            return
        self._check_open()
        self._subscription.assign(partitions)
        self._commits.keep(partitions)
        self._positions.forget_except(partitions)
        self._positions.unread.keep(())

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions read now."""
        self._check_open()
        return self._subscription.assignment()

    async def poll(self, timeout_ms: float, max_records: int | None = None) -> dict[TopicPartition, Columns[K, V]]:
        """Up to `max_records` (default `max_poll_records`) records, as soon as there are any, {} after `timeout_ms`.

        Also makes what earlier polls returned count as processed, commits it as `commit_strategy` says, and calls the
        rebalance listener where it is due, whatever `timeout_ms` says. A poll that is cancelled leaves the listener's
        call to its end, and the next one waits for it.

        Raises what a listener raised, NoOffsetForPartition and OffsetOutOfRange (under `auto_offset_reset=none`),
        CorruptRecord, SerializationError (a deserializer's, with the record's place), AuthorizationFailed, IllegalState
        (closed), Wakeup (after `wakeup`); under a `commit_strategy` CommitFailed, once, where partitions were lost with
        records that were handed out and not committed; under `sync` what `commit` raises; ValueError for `max_records`
        below 1.
        """
        taken = await self._poll(timeout_ms, max_records)
        positions = {tp: each.position for tp, each in taken.items()}
        self._positions.returned(positions, {tp: each.columns.leader_epoch for tp, each in taken.items()})
        return {tp: each.columns for tp, each in taken.items()}

    async def _poll(self, timeout_ms: float, max_records: int | None) -> dict[TopicPartition, Taken]:
        self._check_reading("poll")
        if self._is_polling:
            raise IllegalState("another task is in poll, or waits for the next record: a consumer is one task's")
        if max_records is not None and max_records < 1:
            raise ValueError(f"poll: max_records={max_records} must be above 0")
        if not self._subscription.is_subscribed:
            raise IllegalState("poll needs a subscription or assigned partitions")
        limit = self._settings.max_poll_records if max_records is None else max_records
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + timeout_ms
        self._positions.processed()
        self._subscription.polled(SYSTEM_CLOCK.monotonic_ms())
        with self._subscription.polling(), self._until_polled():
            await self._subscription.call_listener()
            self._membership.raise_pending()
            await self._commit_as_configured()
            await asyncio.sleep(0)  # heartbeats, joins and fetches go on, also where records are always at hand
            while True:
                await self._subscription.call_listener()
                self._check_reading("poll")
                self._membership.raise_pending()
                self._raise_wakeup()
                self._subscription.check_errors()
                self._raise_undecodable()
                if taken := await self._take(limit):
                    return taken
                now_ms = SYSTEM_CLOCK.monotonic_ms()
                if now_ms >= deadline_ms:
                    return {}
                self._subscription.look_for_topics(now_ms)
                await self._membership.wait(min(deadline_ms - now_ms, UNKNOWN_TOPIC_REFRESH_MS))

    def wakeup(self) -> None:
        """End the poll, or the wait for the next record, that is under way with Wakeup; the next one where none is.

        It ends before it takes records, and the call after it goes on. From another thread:
        `loop.call_soon_threadsafe(consumer.wakeup)`.
        """
        self._is_woken = True
        self._subscription.wake_poll()

    def _raise_wakeup(self) -> None:
        woken, self._is_woken = self._is_woken, False
        if woken:
            raise Wakeup(f"client {self._subscription.client_id}: wakeup was called")

    def __aiter__(self) -> Self:
        """Records one by one; one counts as processed when the next is asked for. Raises what `poll` raises; another
        `async for` then goes on where this one ended. IllegalState where two tasks iterate at once."""
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
            self._check_reading("the next record")  # a close may have begun meanwhile
        positions, unread = self._positions, self._positions.unread
        positions.processed()
        self._subscription.polled(now_ms)
        while self._subscription.is_listener_due or (found := unread.next(self._subscription.paused())) is None:
            positions.taken(await self._poll(ITERATION_TIMEOUT_MS, None))
        record, position, epoch = found
        positions.returned_one(record.topic_partition, position, epoch)
        return record

    def _begin_iterating(self, task: asyncio.Task[object] | None) -> None:
        """Let another task iterate: raises IllegalState while the previous task still works on a record."""
        if self._iterating is not None and not self._iterating.done():
            raise IllegalState("another task iterates over this consumer: the record it works on would count as done")
        self._iterating = task

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, timeout_ms: float | None = None
    ) -> None:
        """Commit `offsets` (each the next to read), by default everything handed out, and wait.

        Pending asynchronous commits go first or with it, also where there is nothing else to commit. Raises
        CommitFailed (IllegalGeneration, UnknownMember) where this member did not commit an offset that the call
        covers: one of `offsets`, or one handed out since the last commit, also of a partition that was revoked or lost
        meanwhile, which is reported once. All others are committed. Raises FencedInstanceId, KafkaTimeout after
        `timeout_ms` (default `commit_timeout_ms`), IllegalState without a group, ValueError and TypeError for an
        invalid offset.
        """
        positions = self._membership.positions
        wanted, lost = self._covered(offsets)
        # Register before the wait: a rebalance during the wait must not commit a lower offset.
        positions.registered(wanted)
        try:
            await self._commits.commit(wanted, self._settings.commit_timeout_ms if timeout_ms is None else timeout_ms)
        except CommitFailed:
            positions.reported({tp: at.offset for tp, at in wanted.items()} | lost)
            raise
        positions.recovered({tp: at.offset for tp, at in wanted.items()})
        if lost:
            positions.reported(lost)
            raise self._membership.not_committed(lost)

    def commit_async(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata | int] | None = None, callback: OnCommit | None = None
    ) -> None:
        """Commit `offsets`, by default everything handed out, beside the caller.

        Passing failures are retried while no newer offset covers them. `callback(offsets, error)` is called once on the
        event loop: None when these offsets or newer ones are committed, CommitFailed where `commit` would raise it.
        """
        positions = self._membership.positions
        wanted, lost = self._covered(offsets)
        positions.registered(wanted)
        if callback is None:
            self._commits.commit_async(wanted)
            return

        def answered(offsets: Mapping[TopicPartition, OffsetAndMetadata], error: Exception | None) -> None:
            at = {tp: each.offset for tp, each in offsets.items()}
            if error is None:
                positions.recovered(at)
            elif isinstance(error, CommitFailed):
                positions.reported(at)
            callback(offsets, error)

        if lost:
            self._commits.commit_async(wanted)
            both = {**{tp: OffsetAndMetadata(offset) for tp, offset in lost.items()}, **wanted}
            asyncio.get_running_loop().call_soon(answered, both, self._membership.not_committed(lost))
        elif wanted:
            self._commits.commit_async(wanted, answered)
        else:
            asyncio.get_running_loop().call_soon(callback, wanted, None)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Read on from `offset`, also in the `async for` under way; IllegalState where the partition is not assigned,
        ValueError and TypeError for what is no offset."""
        self._check_open()
        checked_offset(tp, offset)
        self._subscription.seek(tp, offset)
        self._positions.sought(tp, offset)

    async def seek_to_beginning(self, *partitions: TopicPartition) -> None:
        """Read on from the first record of these, by default of all assigned partitions."""
        await self._reset(partitions, "earliest")

    async def seek_to_end(self, *partitions: TopicPartition) -> None:
        """Read on after the last record of these, by default of all assigned partitions."""
        await self._reset(partitions, "latest")

    def pause(self, *partitions: TopicPartition) -> None:
        """Give no records of these until `resume`; what is buffered is kept, the group is not told."""
        self._check_open()
        self._subscription.pause(partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        """Give records of these again."""
        self._check_open()
        self._subscription.resume(partitions)

    def paused(self) -> frozenset[TopicPartition]:
        """The paused partitions; a rebalance forgets them."""
        self._check_open()
        return self._subscription.paused()

    def enforce_rebalance(self) -> None:
        """Have the group assign again, in the next polls."""
        self._check_open()
        if self._settings.group_id is None:
            raise IllegalState("enforce_rebalance needs a group_id")
        self._subscription.enforce_rebalance()

    def silent_ms(self) -> float | None:
        """How long no broker has answered this client anything; None while it is not open."""
        return self._subscription.connection.silent_ms() if self._state == "open" else None

    def rebalance_ms(self) -> float:
        """How long the rebalance has taken that goes on now, the first join included; 0 where there is none."""
        return self._subscription.rebalance_ms

    def ask_for_answer(self) -> None:
        """Send what any broker answers at once, so that silence is never for want of a question; does not wait."""
        if self._state == "open":
            self._subscription.connection.refresh_metadata()

    def group_metadata(self) -> GroupMetadata:
        """Who this member is in the generation of its last assignment; IllegalState without a group.

        A member that has lost its place keeps the old identity, so that commits under it are refused. Generation -1
        and no member id before the first assignment, and where partitions were assigned by hand.
        """
        if self._settings.group_id is None:
            raise IllegalState("no group_id is set")
        return GroupMetadata(self._settings.group_id, *self._subscription.identity, self._settings.group_instance_id)

    async def position(self, tp: TopicPartition) -> int:
        """The offset of the next record that poll gives; IllegalState where the partition is not assigned.

        Raises at once what keeps the position from being known: NoOffsetForPartition under `auto_offset_reset=none`.
        """
        self._check_open()
        if (unread := self._membership.positions.unread.position(tp)) is not None:
            return unread
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._subscription.settings.request_timeout_ms
        while (position := self._subscription.position(tp)) is None:
            self._subscription.check_errors()
            if (error := self._subscription.error_of(tp)) is not None:
                raise await self._with_offsets(error) from error
            if SYSTEM_CLOCK.monotonic_ms() >= deadline_ms:
                limit_ms = self._subscription.settings.request_timeout_ms
                raise KafkaTimeout(f"{self._who()}: position of {tp} not known after {limit_ms} ms")
            await asyncio.sleep(POSITION_POLL_MS / 1000)
        return position

    def known_position(self, tp: TopicPartition) -> int | None:
        """As `position`, without waiting: None while it is not known, or the partition is not assigned."""
        self._check_open()
        if tp not in self._subscription.assignment():
            return None
        unread = self._membership.positions.unread.position(tp)
        return self._subscription.position(tp) if unread is None else unread

    def known_lag(self, tp: TopicPartition) -> int | None:
        """How many records the position is behind the end that was told last; None while either is not known."""
        self._check_open()
        return self._subscription.known_lag([tp]).get(tp) if tp in self._subscription.assignment() else None

    def is_at_end(self, tp: TopicPartition) -> bool:
        """Whether the position was the high watermark when that was told last; under an open transaction it is not."""
        self._check_open()
        return tp in self._subscription.assignment() and self._subscription.is_at_end(tp)

    def forget_commits(self) -> None:
        """Drop offsets whose commit is still pending, which would otherwise be sent with the next generation."""
        self._check_open()
        self._commits.keep(())

    @overload
    async def committed(self, partitions: TopicPartition) -> OffsetAndMetadata | None: ...

    @overload
    async def committed(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, OffsetAndMetadata | None]: ...

    async def committed(
        self, partitions: TopicPartition | Iterable[TopicPartition]
    ) -> OffsetAndMetadata | dict[TopicPartition, OffsetAndMetadata | None] | None:
        """What the group has committed of a partition, or of each of several in one request; None without a commit."""
        self._check_open()
        if self._settings.group_id is None:
            raise IllegalState("committed needs a group_id")
        wanted = [partitions] if isinstance(partitions, TopicPartition) else list(partitions)
        found = await self._commits.fetch(wanted, self._subscription.settings.request_timeout_ms) if wanted else {}
        return found.get(partitions) if isinstance(partitions, TopicPartition) else {tp: found.get(tp) for tp in wanted}

    async def beginning_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The first offset each partition holds."""
        return await self._list(dict.fromkeys(partitions, "earliest"))

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The offset after the last record, under `read_committed` the last stable offset."""
        return await self._list(dict.fromkeys(partitions, "latest"))

    async def offsets_for_times(self, times: Mapping[TopicPartition, int]) -> dict[TopicPartition, int | None]:
        """The first offset with a timestamp at or after each time (ms since the epoch), None where there is none;
        ValueError and TypeError for what is no time."""
        times = {tp: checked_time(tp, time_ms) for tp, time_ms in times.items()}
        found = await self._list(times)
        return {tp: None if offset < 0 else offset for tp, offset in found.items()}

    async def lag(self) -> dict[TopicPartition, int]:
        """For each assigned partition how many offsets lie between its position and its end."""
        self._check_open()
        partitions = self._subscription.assignment()
        ends = await self.end_offsets(partitions)
        return {tp: max(0, ends[tp] - await self.position(tp)) for tp in partitions}

    @contextlib.contextmanager
    def _until_polled(self) -> Iterator[None]:
        self._is_polling = True
        try:
            yield
        finally:
            self._is_polling = False

    async def _take(self, limit: int | None) -> dict[TopicPartition, Taken]:
        if unread := self._positions.unread.take(limit, self._subscription.paused()):
            return unread
        try:
            fetched = self._subscription.take(limit)
        except PenstockError as e:
            await asyncio.sleep(0)  # a caller that polls on must not keep the other partitions from being fetched
            raise await self._with_offsets(e) from e
        taken: dict[TopicPartition, Columns[Any, Any]] = fetched
        if taken and not self._decoding.is_plain:
            taken = self._decoded(fetched)
        if self._interceptors:
            taken = {tp: self._interceptors.on_consume(tp, columns) for tp, columns in taken.items()}
        for tp, columns in taken.items():
            self._metrics.consumed(tp.topic, len(columns))
        positions = {tp: p for tp in taken if (p := self._subscription.position(tp)) is not None}
        self._metrics.lag(self._subscription.known_lag(positions))
        return {tp: Taken(taken[tp], position) for tp, position in positions.items()}

    def _decoded(self, taken: dict[TopicPartition, Columns]) -> dict[TopicPartition, Columns[Any, Any]]:
        """Return the decoded records. The error of an undecodable one is raised once no record before it is left."""
        given = {}
        for tp, columns in taken.items():
            decoded, wrong = self._decoding.decode(columns)
            if decoded is not None:
                given[tp] = decoded
            if wrong is not None:
                self._subscription.seek(tp, wrong.offset)
                self._undecodable[tp] = wrong
        if not given:
            self._raise_undecodable()
        return given

    def _raise_undecodable(self) -> None:
        """Raise the error of a record that is still the next of its partition."""
        while self._undecodable:
            tp, wrong = self._undecodable.popitem()
            if self.known_position(tp) == wrong.offset:
                raise wrong.error

    async def _reset(self, partitions: tuple[TopicPartition, ...], to: Literal["earliest", "latest"]) -> None:
        self._check_open()
        wanted = partitions or tuple(self.assignment())
        self._positions.unread.drop(wanted)
        self._subscription.reset(wanted, to)
        for tp in wanted:
            self._positions.sought(tp, await self.position(tp))

    async def _commit_as_configured(self) -> None:
        strategy, positions = self._settings.commit_strategy, self._membership.positions
        if strategy == "none":
            return
        owned = self._subscription.owned
        offsets = {tp: at for tp, at in positions.uncommitted().items() if tp in owned}
        if not offsets:
            return
        if strategy == "sync":
            try:
                await self._commits.commit(offsets, self._settings.commit_timeout_ms)
            except UnknownTopicOrPartition:  # given up: raised once, the other partitions are committed
                positions.registered(offsets)
                raise
            except CommitFailed:
                positions.reported({tp: at.offset for tp, at in offsets.items()})
                raise
        elif strategy == "auto" and SYSTEM_CLOCK.monotonic_ms() < self._next_commit_ms and not positions.has_drifting:
            return
        else:
            self._next_commit_ms = SYSTEM_CLOCK.monotonic_ms() + self._settings.auto_commit_interval_ms
            self._commits.commit_async(offsets)
        positions.registered(offsets)

    def _covered(
        self, given: Mapping[TopicPartition, OffsetAndMetadata | int] | None
    ) -> tuple[dict[TopicPartition, OffsetAndMetadata], dict[TopicPartition, int]]:
        """The offsets that a commit of `given` sends, and those that this member can no longer commit.

        A member commits only partitions that the group has assigned to it: another member may be ahead with the rest.
        """
        self._check_open()
        if self._settings.group_id is None:
            raise IllegalState("commit needs a group_id")
        positions = self._membership.positions
        wanted = positions.polled() if given is None else checked_offsets(given)
        self._subscription.leave_if_overdue()
        if not self._subscription.is_managed:
            return wanted, {}
        owned = self._subscription.owned
        mine = {tp: at for tp, at in wanted.items() if tp in owned}
        if given is not None:
            return mine, {tp: at.offset for tp, at in wanted.items() if tp not in owned}
        gone = wanted.keys() - owned
        lost = positions.handed_out(gone, self._commits.committed(gone))
        return mine, lost | positions.forfeited({tp: at.offset for tp, at in mine.items()})

    async def _list(self, specs: Mapping[TopicPartition, str | int]) -> dict[TopicPartition, int]:
        self._check_open()
        if not specs:
            return {}
        limit_ms = self._subscription.settings.request_timeout_ms
        return await list_offsets(self._subscription.connection, specs, self._settings.isolation_level, limit_ms)

    async def _with_offsets(self, error: PenstockError) -> PenstockError:
        """The error with the client's name; under `auto_offset_reset=none` also with the offsets of each partition."""
        if not isinstance(error, NoOffsetForPartition | OffsetOutOfRange):
            return type(error)(f"{self._who()}: Fetch: {error}")
        unplaced = sorted(self._subscription.assignment())
        first, end = await self.beginning_offsets(unplaced), await self.end_offsets(unplaced)
        held = ", ".join(f"{tp} holds {first[tp]} to {end[tp]}" for tp in unplaced)
        return type(error)(f"{self._who()}: {error} (auto_offset_reset=none; {held})")

    def _who(self) -> str:
        """The client, and its group and generation, for error messages about offsets."""
        group_id = self._settings.group_id
        group = f", group {group_id}, generation {self._subscription.generation}" if group_id else ""
        return f"client {self._subscription.client_id}{group}"

    async def _close(self, timeout_ms: float | None, *, processed: bool) -> None:
        if self._state == "new":
            self._state = "closed"
        if self._state != "open":
            return
        self._check_reading("close")
        self._state = "closing"
        if processed and not self._positions.is_one_by_one:
            self._positions.processed()
        else:  # nor does a listener that commits take it
            self._positions.unprocessed()
        started_ms = SYSTEM_CLOCK.monotonic_ms()
        # LeaveGroup comes last and has time of its own.
        work_ms = None if timeout_ms is None else max(0.0, timeout_ms - LEAVE_TIME_MS)
        try:
            await self._membership.leave(work_ms)
        finally:
            await self._commits.close()
            self._state = "closed"
            waited_ms = SYSTEM_CLOCK.monotonic_ms() - started_ms
            await self._subscription.close(None if timeout_ms is None else max(0.0, timeout_ms - waited_ms))

    def _check_open(self) -> None:
        if self._state not in ("open", "closing"):
            raise IllegalState(f"the consumer is {self._state}")

    def _check_reading(self, what: str) -> None:
        """Raise unless a call that runs the listener is allowed: not inside the listener, and not during a close."""
        if self._state != "open":
            raise IllegalState(f"the consumer is {self._state}")
        if self._membership.is_called(current_task()):
            raise IllegalState(f"{what}: not inside a rebalance listener")
