"""A consumer's connection to Kafka: who decides what is read (`Subscribing`) and who reads it (`Reader`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.shared.clients.consumer.fetch_state import FetchLimits, Move
from penstock.shared.clients.consumer.fetcher import EARLIEST, LATEST, Fetcher
from penstock.shared.clients.consumer.metrics import ConsumerMetrics
from penstock.shared.clients.consumer.reader import FetchCommitted, Reader
from penstock.shared.clients.consumer.reset_policy import ResetPolicy
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.consumer.subscribing import Subscribing
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import IllegalState, PenstockError
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings


class Fetching(Subscribing):
    """The subscription, the group membership and the fetched records of one consumer."""

    def __init__(
        self, kafka_settings: KafkaSettings, settings: ConsumerSettings, metrics: ConsumerMetrics | None = None
    ) -> None:
        super().__init__(kafka_settings, settings, self._assigned)
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
        self._reader = Reader(self.connection, self._fetcher, SYSTEM_CLOCK, metrics)

    async def start(self, fetch_committed: FetchCommitted, on_move: Callable[[TopicPartition, Move], None]) -> None:
        """Connect; `fetch_committed` finds the offsets to start from, `on_move` is told of positions that change
        without a record taken."""
        self._reader.on_move = on_move
        await self.open(self._reader.waiters)
        self._reader.open(fetch_committed)

    async def close(self, timeout_ms: float | None = None) -> None:
        """Fetch no more, leave the group and close the sockets; see `Subscribing.close`."""
        await self._reader.close()
        await super().close(timeout_ms)

    def position(self, tp: TopicPartition) -> int | None:
        """The offset of the next record to hand out, None while it is being found out."""
        self._check_assigned([tp])
        return self._fetcher.position(tp)

    def error_of(self, tp: TopicPartition) -> PenstockError | None:
        """What keeps the partition from being read, until `take` has raised it."""
        return self._fetcher.error_of(tp)

    def is_at_end(self, tp: TopicPartition) -> bool:
        """Whether there was nothing at or after the position, not even of an open transaction."""
        return self._fetcher.is_at_end(tp)

    def known_lag(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """How far the positions are behind the end (under read_committed: the stable end) last told."""
        return {tp: lag for tp in partitions if (lag := self._fetcher.lag(tp)) is not None}

    @property
    def buffered_bytes(self) -> int:
        """What is fetched and not yet handed out, in bytes as fetched."""
        return self._fetcher.buffered_bytes

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on from `offset`."""
        self._check_assigned([tp])
        self._reader.seek(tp, offset)

    def reset(self, partitions: Iterable[TopicPartition], to: str) -> None:
        """Go on from a partition's start or end; the position is None until it is known."""
        wanted = self._check_assigned(partitions)
        self._reader.reset(wanted, EARLIEST if to == "earliest" else LATEST)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reader.pause(self._check_assigned(partitions))

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reader.resume(self._check_assigned(partitions))

    def paused(self) -> frozenset[TopicPartition]:
        return self._fetcher.paused()

    def take(self, max_records: int | None) -> dict[TopicPartition, Columns]:
        """What is buffered and not paused; see `Fetcher.take`."""
        return self._reader.take(max_records)

    async def wait_for_data(self, timeout_ms: float) -> None:
        """Until something was fetched, an error came up, or the time is over."""
        await self._reader.wait_for_data(timeout_ms)

    def _assigned(self, partitions: frozenset[TopicPartition], kept: frozenset[TopicPartition]) -> None:
        self._reader.assign(sorted(partitions), kept)

    def _check_assigned(self, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
        wanted, assigned = list(partitions), self._fetcher.assignment()
        for tp in wanted:
            if tp not in assigned:
                raise IllegalState(f"{tp}: not assigned to client {self.client_id}")
        return wanted
