"""aiokafka's consumer from inside: its group membership and fetcher, with the records taken out as columns.

aiokafka hands out one object a record and drops what is buffered for a paused partition. So `take` reads the fetcher's
buffer itself: every batch is decoded once, straight into lists, and handed out in slices; a paused partition's
buffer stays.

What is used of aiokafka's inside is listed in the contract test, which fails when it changes.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from aiokafka import TopicPartition as AioTopicPartition
from aiokafka import errors as kafka
from aiokafka.consumer.fetcher import READ_COMMITTED, FetchError, FetchResult
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.structs import OffsetAndMetadata as AioOffsetAndMetadata

from shared.clients.connection.client import Connection, bootstrap, default_client_id, translated
from shared.clients.connection.errors import translate
from shared.clients.connection.security import aiokafka_options
from shared.clients.connection.sockets import Client, close_all_of
from shared.common.errors import CorruptRecord, IllegalState, PenstockError, RetriableError
from shared.common.records import Columns, Headers, OffsetAndMetadata, TopicPartition
from shared.common.settings import KafkaSettings

ASSIGNORS = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "sticky": StickyPartitionAssignor,
}
NO_GENERATION = -1
CLOSE_GRACE_MS = 500
"""How long a group member whose sockets were closed has to notice it."""

OnRebalance = Callable[[frozenset[TopicPartition]], Awaitable[None]]
FetchCommitted = Callable[[Sequence[TopicPartition]], Awaitable[dict[TopicPartition, OffsetAndMetadata]]]


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]
    def __init__(self, revoked: OnRebalance, assigned: OnRebalance) -> None:
        self._revoked, self._assigned = revoked, assigned

    async def on_partitions_revoked(self, revoked: Iterable[Any]) -> None:
        await self._revoked(frozenset(TopicPartition(*tp) for tp in revoked))

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        await self._assigned(frozenset(TopicPartition(*tp) for tp in assigned))


class Buffered:
    """One fetched piece of a partition, decoded; `at` is the first record not yet handed out."""

    __slots__ = ("at", "columns", "error", "next_offset", "position", "source")

    def __init__(self, source: Any, topic: str, partition: int) -> None:
        self.source = source
        self.at = 0
        self.position = source._partition_records.next_fetch_offset
        self.columns, self.next_offset, self.error = decode(source._partition_records, topic, partition)


class Fetching:
    """The subscription, the group membership and the fetched records of one consumer."""

    def __init__(self, kafka_settings: KafkaSettings, *, assignor: str, **options: Any) -> None:
        self.settings = kafka_settings
        self.client_id = kafka_settings.client_id or default_client_id()
        self.connection = Connection(kafka_settings.model_copy(update={"client_id": self.client_id}))
        self._options = {
            **options,
            "partition_assignment_strategy": (ASSIGNORS[assignor],),
            "enable_auto_commit": False,
        }
        self._aio: Any = None
        self._buffers: dict[TopicPartition, Buffered] = {}

    async def open(self, fetch_committed: FetchCommitted) -> None:
        """Connect; `fetch_committed` finds the offsets to start from."""
        aio = AIOKafkaConsumer(**aiokafka_options(self.settings, self.client_id), **self._options)
        aio._client = Client(self.settings, self.client_id)
        try:
            await bootstrap(aio._client, self.settings)
            with translated(f"client {self.client_id}"):
                await aio.start()
        except BaseException:
            await aio.stop()
            raise
        if self._options["group_id"] is not None:
            aio._coordinator._do_fetch_commit_offsets = _committed_for_aiokafka(fetch_committed)
        aio._fetcher.close = close_all_of(aio._fetcher)
        self._aio = aio
        self.connection.adopt(aio._client)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Leave the group and close the sockets; after `timeout_ms` they are closed without a word to the group."""
        aio, self._aio = self._aio, None
        if aio is None:
            return
        stopping = asyncio.ensure_future(aio.stop())
        try:
            await asyncio.wait({stopping}, timeout=None if timeout_ms is None else timeout_ms / 1000)
        finally:
            if not stopping.done():
                await aio._client.close()  # what waits for an answer ends with its socket
                await asyncio.wait({stopping}, timeout=CLOSE_GRACE_MS / 1000)
        if not stopping.done():
            stopping.cancel()
            await asyncio.wait({stopping}, timeout=CLOSE_GRACE_MS / 1000)
        elif not stopping.cancelled():
            stopping.result()

    @property
    def generation(self) -> int:
        """The group's generation this member is in; -1 outside of one."""
        return int(getattr(self._aio._coordinator, "generation", NO_GENERATION))

    @property
    def member_id(self) -> str:
        return str(getattr(self._aio._coordinator, "member_id", ""))

    @property
    def is_subscribed(self) -> bool:
        """Whether there is a subscription, or partitions assigned by hand."""
        return bool(self._aio._subscription._subscription_type.value != 1)

    @property
    def is_managed(self) -> bool:
        """Whether the group assigns the partitions."""
        return self._options["group_id"] is not None and bool(self._aio._subscription.partitions_auto_assigned())

    @property
    def idle_ms(self) -> float:
        """How long nothing has been polled."""
        return float(self._aio._subscription.fetcher_idle_time) * 1000

    def subscribe(self, topics: Sequence[str] | re.Pattern[str], revoked: OnRebalance, assigned: OnRebalance) -> None:
        """Take part in the group for topics, or for all that a pattern matches from their start."""
        listener = _Listener(revoked, assigned)
        with translated("subscribe"):
            if isinstance(topics, re.Pattern):
                self._aio.subscribe(pattern=topics.pattern, listener=listener)
            else:
                self._aio.subscribe(topics=list(topics), listener=listener)

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions, outside of any group's assignment."""
        with translated("assign"):
            self._aio.assign([AioTopicPartition(*tp) for tp in partitions])

    def unsubscribe(self) -> None:
        """Read nothing; leaves the group."""
        self._aio.unsubscribe()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition(*tp) for tp in self._aio.assignment())

    def topics(self) -> frozenset[str]:
        """The topics subscribed to."""
        return frozenset(self._aio.subscription() or ())

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to hand out, None while it is being found out."""
        state = self._state(tp)
        return int(state.position) if state.has_valid_position else None

    def known_lag(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """How far these positions are behind the end (under read_committed: the stable end) last told."""
        lags = {}
        for tp, position in positions.items():
            state = self._state(tp)
            end = state.lso if self._options["isolation_level"] == "read_committed" else state.highwater
            if end is not None:
                lags[tp] = max(0, int(end) - position)
        return lags

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on from `offset`."""
        self._state(tp)
        self._buffers.pop(tp, None)
        self._aio._fetcher.seek_to(tp, offset)

    def reset(self, partitions: Iterable[TopicPartition], to: Literal["earliest", "latest"]) -> None:
        """Go on from a partition's start or end; the position is None until it is known."""
        wanted = list(partitions)
        for tp in wanted:
            self._state(tp)
            self._buffers.pop(tp, None)
        # Not awaited: after a rebalance in between it would never end.
        waiting = self._aio._fetcher.request_offset_reset(wanted, {"earliest": -2, "latest": -1}[to])
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())  # asyncio reports what nobody saw
        waiting.cancel()

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._state(tp).pause()

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._state(tp).resume()
        self._wake_poll()

    def paused(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition(*tp) for tp in self._aio.paused())

    def enforce_rebalance(self) -> None:
        """Join the group anew."""
        self._aio._coordinator.request_rejoin()

    def check_errors(self) -> None:
        """Raise what went wrong in the group's background work, or AuthenticationFailed where a broker keeps us out."""
        with translated(f"client {self.client_id}"):
            self._aio._coordinator.check_errors()
        if (refused := self._aio._client.refused()) is not None:
            raise type(refused)(f"client {self.client_id}: {refused}")

    def take(self, max_records: int | None) -> dict[TopicPartition, Columns]:
        """What is buffered and not paused, as columns; the position moves past it.

        Raises what the fetch of a partition ended in, once nothing else is there to hand out.
        """
        subscription = self._aio._subscription
        taken: dict[TopicPartition, Columns] = {}
        if subscription.reassignment_in_progress:
            return taken
        fetcher, left = self._aio._fetcher, max_records
        for aio_tp in list(fetcher._records):
            tp, entry = TopicPartition(*aio_tp), fetcher._records[aio_tp]
            if not subscription.is_assigned(aio_tp):
                self._release(tp)
                continue
            if isinstance(entry, FetchError):
                if taken:
                    break
                self._release(tp)
                raise translate(entry._error, f"{tp}, client {self.client_id}")
            assert isinstance(entry, FetchResult)
            if self._state(tp).paused:
                continue
            columns = self._slice(tp, entry, left, raising=not taken)
            if columns is None:
                continue
            taken[tp] = columns
            if left is not None and (left := left - len(columns)) == 0:
                break
        return taken

    async def wait_for_data(self, timeout_ms: float) -> None:
        """Until something was fetched, an error came up, or the time is over."""
        waiter = self._aio._fetcher._create_fetch_waiter()
        await asyncio.wait([waiter], timeout=timeout_ms / 1000)
        if not waiter.done():
            waiter.cancel()
        elif not waiter.cancelled():
            waiter.exception()  # seen here; `check_errors` raises it

    def polling(self) -> _Polling:
        """A block in which the consumer counts as alive for `max_poll_interval_ms`."""
        return _Polling(self._aio._subscription)

    def _slice(self, tp: TopicPartition, entry: Any, left: int | None, *, raising: bool) -> Columns | None:
        state = self._state(tp)
        buffer = self._buffers.get(tp)
        if buffer is None or buffer.source is not entry:
            if not entry._assignment.active or state.position != entry._partition_records.next_fetch_offset:
                self._release(tp)
                return None
            buffer = self._buffers[tp] = Buffered(entry, *tp)
        elif state.position != buffer.position:
            self._release(tp)
            return None
        columns = buffer.columns
        end = len(columns) if left is None else min(len(columns), buffer.at + left)
        part = columns if buffer.at == 0 and end == len(columns) else columns[buffer.at : end]
        buffer.at = end
        if end < len(columns):
            buffer.position = int(columns.offsets[end - 1]) + 1
            state.consumed_to(buffer.position)
        elif buffer.error is not None and not len(part):
            self._release(tp)
            raise buffer.error
        else:
            buffer.position = buffer.next_offset
            state.consumed_to(buffer.position)
            if buffer.error is None:
                self._release(tp)
        return part if len(part) else None

    def _release(self, tp: TopicPartition) -> None:
        self._buffers.pop(tp, None)
        self._aio._fetcher._records.pop(tp, None)
        self._aio._fetcher._notify(self._aio._fetcher._wait_consume_future)

    def _wake_poll(self) -> None:
        for waiter in self._aio._fetcher._fetch_waiters:
            self._aio._fetcher._notify(waiter)

    def _state(self, tp: TopicPartition) -> Any:
        subscription = self._aio._subscription
        if not subscription.is_assigned(tp):
            raise IllegalState(f"{tp}: not assigned to client {self.client_id}")
        return subscription.subscription.assignment.state_value(tp)


class _Polling:
    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription

    def __enter__(self) -> None:
        self._subscription._fetch_count += 1

    def __exit__(self, *_: object) -> None:
        # aiokafka's own context manager does not count down where the block raises.
        self._subscription._fetch_count -= 1
        if self._subscription._fetch_count == 0:
            self._subscription._last_fetch_ended = time.monotonic()


def _committed_for_aiokafka(fetch: FetchCommitted) -> Callable[[Collection[Any]], Awaitable[dict[Any, Any]]]:
    async def fetch_committed(partitions: Collection[Any]) -> dict[Any, Any]:
        try:
            found = await fetch([TopicPartition(*tp) for tp in partitions])
        except RetriableError as e:
            raise kafka.GroupLoadInProgressError(str(e)) from e
        except PenstockError as e:
            raise kafka.KafkaError(str(e)) from e
        return {AioTopicPartition(*tp): AioOffsetAndMetadata(*value) for tp, value in found.items()}

    return fetch_committed


def decode(records: Any, topic: str, partition: int) -> tuple[Columns, int, CorruptRecord | None]:
    """The records of one fetched piece, the offset after it, and what ended it early.

    Control batches are left out, under `read_committed` also those of aborted transactions. Before a corrupt batch
    the records end.
    """
    keys: list[bytes | None] = []
    values: list[bytes | None] = []
    timestamps: list[int] = []
    offsets: list[int] = []
    headers: list[Headers] = []
    any_headers = False
    next_offset = start = records.next_fetch_offset
    error = None
    source = records._records
    while source.has_next():
        batch = source.next_batch()
        if not batch.validate_crc():
            error = CorruptRecord(f"{topic}-{partition} at offset {next_offset}: a batch fails its checksum")
            break
        if _is_aborted(records, batch) or batch.is_control_batch:
            next_offset = batch.next_offset
            continue
        for record in batch:
            if record.offset < start:
                continue
            keys.append(record.key)
            values.append(record.value)
            timestamps.append(record.timestamp)
            offsets.append(record.offset)
            own = record.headers
            headers.append(tuple(own) if own else ())
            any_headers = any_headers or bool(own)
        next_offset = batch.next_offset
    columns = Columns(
        topic,
        partition,
        keys,
        values,
        np.array(timestamps, np.int64),
        np.array(offsets, np.int64),
        headers if any_headers else None,
    )
    return columns, max(next_offset, start), error


def _is_aborted(records: Any, batch: Any) -> bool:
    if records._isolation_level != READ_COMMITTED or batch.producer_id is None:
        return False
    records._consume_aborted_up_to(batch.base_offset)
    if batch.is_control_batch and records._contains_abort_marker(batch):
        records._aborted_producers.discard(batch.producer_id)
    return bool(batch.is_transactional and batch.producer_id in records._aborted_producers)
