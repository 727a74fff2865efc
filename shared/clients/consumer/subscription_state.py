"""The partitions that a consumer reads, and their positions (Java: `SubscriptionState`).

The partitions are decided in one of three ways: 1. the group assigns them; 2. without a group, a subscription reads all
partitions of its topics; 3. the user assigns them. `SubscriptionState` holds the consumer's connection, its
subscription, its group membership, and the `FetchRequestManager`, which has every new
assignment before a listener is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from penstock.shared.clients.connection import Connection, default_client_id
from penstock.shared.clients.consumer.assignors import ASSIGNORS, Assignor
from penstock.shared.clients.consumer.consumer_coordinator import ConsumerCoordinator, Rebalances
from penstock.shared.clients.consumer.fetch_request_manager import FetchCommitted, FetchRequestManager
from penstock.shared.clients.consumer.fetcher import EARLIEST, LATEST, Fetcher, FetchLimits, Move
from penstock.shared.clients.consumer.group_state import GroupState
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.settings import ConsumerSettings, ResetPolicy
from penstock.shared.clients.group.member_states import GroupConfig
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import AuthorizationFailed, IllegalState, PenstockError
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings

Partitions = frozenset[TopicPartition]
NONE: Partitions = frozenset()
LEAVE_TIME_MS = 200
"""The time that a close always has for LeaveGroup. Without it the partitions would be idle for a session timeout."""
UNKNOWN_TOPIC_REFRESH_MS = 1_000
"""The interval of metadata requests while a subscribed topic does not exist."""


class SubscriptionState:
    """One consumer's subscription, group membership, partitions and positions."""

    def __init__(
        self, kafka_settings: KafkaSettings, settings: ConsumerSettings, metrics: ConsumerMetrics | None = None
    ) -> None:
        self.settings = kafka_settings
        self.client_id = kafka_settings.client_id or default_client_id()
        self.connection = Connection(kafka_settings.model_copy(update={"client_id": self.client_id}))
        self._consumer_settings = settings
        self._mode: Literal["none", "topics", "pattern", "partitions"] = "none"
        self._topics: frozenset[str] = frozenset()
        self._pattern: re.Pattern[str] | None = None
        self._assignment = NONE
        self._rebalances: Rebalances | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self._group: GroupState | None = None
        self.assignor: Assignor | None = None
        """The caller's own assignor; it has the name of the assignor in the settings."""
        self._coordinator: ConsumerCoordinator | None = None
        self._polls = 0
        self._next_refresh_ms = 0
        self._polled_ms = SYSTEM_CLOCK.monotonic_ms()
        limits = FetchLimits(
            fetch_min_bytes=settings.fetch_min_bytes,
            fetch_max_bytes=settings.fetch_max_bytes,
            fetch_max_wait_ms=settings.fetch_max_wait_ms,
            max_partition_fetch_bytes=settings.max_partition_fetch_bytes,
            fetch_buffer_bytes=settings.fetch_buffer_bytes,
            retry_backoff_ms=kafka_settings.retry_backoff_ms,
        )
        self._fetcher = Fetcher(
            limits,
            ResetPolicy.parse(settings.auto_offset_reset),
            read_committed=settings.isolation_level == "read_committed",
            has_group=settings.group_id is not None,
        )
        self._reader = FetchRequestManager(self.connection, self._fetcher, SYSTEM_CLOCK, metrics)

    async def start(self, fetch_committed: FetchCommitted, on_move: Callable[[TopicPartition, Move], None]) -> None:
        """Connect. `fetch_committed` finds the offsets to start from.

        `on_move` is called for each position that changes without a record taken.
        """
        self._reader.on_move = on_move
        await self._connect_and_prepare_group()
        self._reader.open(fetch_committed)

    async def _connect_and_prepare_group(self) -> None:
        """Connect, and prepare the group membership."""
        await self.connection.open()
        self._waiters = self._reader.waiters
        self.connection.on_metadata(self._on_metadata_update)
        settings = self._consumer_settings
        if settings.group_id is None:
            return
        config = GroupConfig(
            settings.group_id,
            self.client_id,
            settings.group_instance_id,
            settings.session_timeout_ms,
            settings.heartbeat_interval_ms,
            settings.max_poll_interval_ms,
            self.settings.retry_backoff_ms,
        )
        self._group = GroupState(config, self.assignor or ASSIGNORS[settings.partition_assignment_strategy])
        self._coordinator = ConsumerCoordinator(
            self.connection,
            self._group,
            self,
            SYSTEM_CLOCK,
            idle_ms=lambda: self.idle_ms,
            on_news=self.wake_poll,
            before_step=self._note_metadata,
        )

    async def stop_joining(self, timeout_ms: float) -> None:
        """Take no further part in rebalances before the last commit; the membership is kept."""
        if self._coordinator is not None:
            await self._coordinator.stop_joining(timeout_ms)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Stop fetching, leave the group and close the sockets.

        After `timeout_ms`, at least LEAVE_TIME_MS, the sockets are closed without the group's response.
        """
        await self._reader.close()
        coordinator = self._coordinator
        self._coordinator = None
        try:
            if coordinator is not None:
                # A task of its own: at the limit the sockets are closed without the answer. A broker that does not
                # answer must not hold up the close.
                leaving = asyncio.ensure_future(coordinator.close())
                await asyncio.wait(
                    {leaving}, timeout=None if timeout_ms is None else max(timeout_ms, LEAVE_TIME_MS) / 1000
                )
                leaving.cancel()
        finally:
            await self.connection.close()

    @property
    def generation(self) -> int:
        """The group's generation that this member is in; -1 outside of one."""
        return NO_GENERATION if self._group is None else self._group.generation

    @property
    def member_id(self) -> str:
        return "" if self._group is None else self._group.member_id

    @property
    def gone_because(self) -> str:
        """Why the group membership was lost, "" if this process did not cause it."""
        return "" if self._coordinator is None else self._coordinator.gone_because

    @property
    def identity(self) -> tuple[int, str]:
        """The generation and member id of the last assignment; -1 and "" before."""
        return (NO_GENERATION, "") if self._group is None else self._group.identity

    @property
    def owned(self) -> Partitions:
        """The partitions that are read and may be committed: the assigned ones, without those that were lost."""
        # After the group has removed the member, its partitions stay assigned until the listener is called. Another
        # member may own them already, so they must not be committed.
        return NONE if self.is_managed and self.generation == NO_GENERATION else self._assignment

    @property
    def is_owner(self) -> bool:
        """Whether this member owns partitions, and takes part in the group's rebalances."""
        return self._coordinator is not None and self._coordinator.is_owner

    def on_commit_rejected(self, sent_as: tuple[int, str], code: int) -> None:
        """Handle a rejected commit: the group no longer knows this member, or its generation."""
        if self._coordinator is not None:
            self._coordinator.on_commit_rejected(sent_as, code)

    @property
    def rebalance_ms(self) -> float:
        """The ms since the current rebalance began."""
        return 0.0 if self._coordinator is None else self._coordinator.rebalance_ms

    @property
    def is_subscribed(self) -> bool:
        """Whether there is a subscription, or the user has assigned partitions."""
        return self._mode != "none"

    @property
    def is_managed(self) -> bool:
        """Whether the group assigns the partitions."""
        return self._group is not None and self._mode in ("topics", "pattern")

    @property
    def idle_ms(self) -> float:
        """The ms since the last poll."""
        return 0.0 if self._polls else float(SYSTEM_CLOCK.monotonic_ms() - self._polled_ms)

    def leave_if_overdue(self) -> None:
        """Leave the group if the last poll ended more than `max_poll_interval_ms` ago.

        The group's own task cannot notice it if blocking code took so long.
        """
        if self._coordinator is not None:
            self._coordinator.leave_if_overdue()

    @property
    def is_listener_due(self) -> bool:
        """Whether the listener must be called before more records are handed out."""
        return self._coordinator is not None and self._coordinator.is_listener_due

    async def call_listener(self) -> None:
        """Let the listener be called if it is due, and wait until the call has ended."""
        if self._coordinator is not None:
            await self._coordinator.call_listener()

    def listening(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which the listener may be called: the caller processes no records."""
        return contextlib.nullcontext() if self._coordinator is None else self._coordinator.listening()

    def polled(self, now_ms: int) -> None:
        """Note a poll: the consumer counts as alive for `max_poll_interval_ms` from now, unless that had passed."""
        # Check before the time is replaced. Otherwise this poll would hide that the interval has passed, and a member
        # that was blocked would go on as an owner.
        if now_ms - self._polled_ms >= self._consumer_settings.max_poll_interval_ms:
            self.leave_if_overdue()
        self._polled_ms = now_ms

    def subscribe(self, topics: Sequence[str] | re.Pattern[str], rebalances: Rebalances) -> None:
        """Read topics, or all whose whole name matches a pattern; `rebalances` gets the group's assignments."""
        if isinstance(topics, re.Pattern):
            self._set_subscription_mode("pattern")
            self._pattern = topics
            self.connection.watch_all()
        else:
            if not topics:
                raise ValueError("subscribe needs a topic")
            self._set_subscription_mode("topics")
            self._topics = frozenset(topics)
            for topic in self._topics:
                self.connection.watch(topic)
        self._rebalances = rebalances
        # The interval between polls begins now, not when the consumer was made.
        self._polled_ms = SYSTEM_CLOCK.monotonic_ms()
        self._note_metadata()
        if self._coordinator is not None:
            self._coordinator.start()
            self._coordinator.wake()

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """Read these partitions, without the group's assignment."""
        self._set_subscription_mode("partitions")
        self._read_assigned_partitions(frozenset(partitions), NONE)

    def assignment(self) -> Partitions:
        return self._assignment

    def look_for_topics(self, now_ms: int) -> None:
        """Request metadata if a subscribed topic does not exist."""
        if now_ms < self._next_refresh_ms:
            return
        # Without this request a topic that is created later would be found only with the next regular refresh.
        if any(self.connection.partitions(topic) is None for topic in self._topics):
            self._next_refresh_ms = now_ms + UNKNOWN_TOPIC_REFRESH_MS
            self.connection.refresh_metadata()

    def enforce_rebalance(self) -> None:
        """Join the group again."""
        if self._group is not None and self._coordinator is not None:
            self._group.rejoin("enforced")
            self._coordinator.wake()

    def check_errors(self) -> None:
        """Raise the error that keeps the member out of the group, or AuthorizationFailed for a topic."""
        if forbidden := self.connection.unauthorized_topics() & self._topics:
            raise AuthorizationFailed(f"client {self.client_id}: may not read {', '.join(sorted(forbidden))}")
        if self._coordinator is not None:
            self._coordinator.check_errors()
        self.connection.check_authentication()

    def polling(self) -> SubscriptionState:
        """Return a block in which the consumer counts as alive for `max_poll_interval_ms`."""
        return self

    def __enter__(self) -> None:
        self._polls += 1
        if self._group is not None and self._coordinator is not None:
            self._group.polled()
            self._coordinator.wake()

    def __exit__(self, *_: object) -> None:
        self._polls -= 1
        self._polled_ms = SYSTEM_CLOCK.monotonic_ms()

    async def on_revoked(self, partitions: Partitions, *, lost: bool) -> None:
        """Handle a revocation. The partitions stay assigned until the listener returns, unless they are lost."""
        left = self._assignment - partitions
        # 1. Lost: another member may own the partitions already. Stop reading before the listener is called.
        if lost:
            self._read_assigned_partitions(left, left)
        # 2. Revoked: the member owns the partitions until the listener returns. It may still look up their positions
        #    and commit.
        try:
            if self._rebalances is not None:
                await self._rebalances.on_revoked(partitions, lost=lost)
        finally:
            self._read_assigned_partitions(left, left)

    async def on_assigned(self, assigned: Partitions, added: Partitions) -> None:
        """Handle an assignment by the group."""
        # Before the listener, so that it can seek and pause the new partitions.
        self._read_assigned_partitions(assigned, assigned - added)
        if self._rebalances is not None:
            await self._rebalances.on_assigned(assigned, added)

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the next record to hand out. Returns None while it is being looked up."""
        self._check_partitions_assigned([tp])
        return self._fetcher.position(tp)

    def error_of(self, tp: TopicPartition) -> PenstockError | None:
        """Return the error that keeps the partition from being read, until `take` has raised it."""
        return self._fetcher.error_of(tp)

    def is_at_end(self, tp: TopicPartition) -> bool:
        """Whether there was no record at or after the position, not even of an open transaction."""
        return self._fetcher.is_at_end(tp)

    def known_lag(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the lag of each position behind the last known end (under read_committed: the last stable offset)."""
        return {tp: lag for tp in partitions if (lag := self._fetcher.lag(tp)) is not None}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Continue from `offset`."""
        self._check_partitions_assigned([tp])
        self._reader.seek(tp, offset)

    def reset(self, partitions: Iterable[TopicPartition], to: str) -> None:
        """Continue from a partition's start or end; the position is None until it is known."""
        wanted = self._check_partitions_assigned(partitions)
        self._reader.reset(wanted, EARLIEST if to == "earliest" else LATEST)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reader.pause(self._check_partitions_assigned(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reader.resume(self._check_partitions_assigned(partitions))

    def paused(self) -> frozenset[TopicPartition]:
        return self._fetcher.paused()

    def take(self, max_records: int | None) -> dict[TopicPartition, Columns]:
        """Return buffered records of partitions that are not paused; see `Fetcher.take`."""
        return self._reader.take(max_records)

    async def wait_for_data(self, timeout_ms: float) -> None:
        """Wait until data or an error arrives, or `timeout_ms` has passed."""
        await self._reader.wait_for_data(timeout_ms)

    def _set_subscription_mode(self, mode: Literal["topics", "pattern", "partitions"]) -> None:
        if self._mode not in ("none", mode):
            raise IllegalState(f"client {self.client_id}: {mode} and {self._mode} cannot be subscribed to together")
        self._mode = mode

    def _read_assigned_partitions(self, assigned: Partitions, kept: Partitions) -> None:
        self._assignment = assigned
        self._reader.assign(sorted(assigned), kept)

    def _on_metadata_update(self) -> None:
        if self._coordinator is not None:
            self._coordinator.wake()
        else:
            self._note_metadata()

    def _note_metadata(self) -> None:
        """Apply the topics of the metadata: tell the group, or (without one) read all their partitions."""
        if self._pattern is not None:
            self._topics = frozenset(topic for topic in self.connection.topics() if self._pattern.fullmatch(topic))
        if self._mode not in ("topics", "pattern"):
            return
        if self._group is not None and self._coordinator is not None:
            self._group.subscribe(self._topics)
            # The leader assigns the topics of all members, also those that it has not subscribed to itself.
            self._group.metadata(self._coordinator.known_partitions(self._topics | self._group.group_topics))
        elif self._group is None:
            known = {topic: self.connection.partitions(topic) or () for topic in self._topics}
            every = frozenset(TopicPartition(topic, p) for topic, found in known.items() for p in found)
            # Partitions that are read already keep their position and buffer.
            if every != self._assignment:
                self._read_assigned_partitions(every, every & self._assignment)

    def wake_poll(self) -> None:
        """Wake a poll that waits."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _check_partitions_assigned(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        wanted = list(partitions)
        assigned = self._fetcher.assignment()
        for tp in wanted:
            if tp not in assigned:
                raise IllegalState(f"{tp}: not assigned to client {self.client_id}")
        return wanted
