"""What a consumer can ask about offsets: positions, commits, ends, times, lag."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import overload

from penstock.shared.clients.connection import list_offsets
from penstock.shared.clients.consumer.committer import Committer
from penstock.shared.clients.consumer.fetching import Fetching
from penstock.shared.clients.consumer.membership import Membership
from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    IllegalState,
    KafkaTimeout,
    NoOffsetForPartition,
    OffsetOutOfRange,
    PenstockError,
)
from penstock.shared.common.offset_checks import checked_time
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

POSITION_POLL_MS = 20


class OffsetLookups:
    """The part of `Consumer` that looks offsets up; each call within `request_timeout_ms`, then KafkaTimeout."""

    _fetching: Fetching
    _committer: Committer
    _settings: ConsumerSettings
    _membership: Membership

    def _check_open(self) -> None: ...

    async def position(self, tp: TopicPartition) -> int:
        """The offset of the next record that poll gives; IllegalState where the partition is not assigned.

        Raises at once what keeps the position from being known: NoOffsetForPartition under `auto_offset_reset=none`.
        """
        self._check_open()
        if (unread := self._membership.positions.unread.position(tp)) is not None:
            return unread
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._fetching.settings.request_timeout_ms
        while (position := self._fetching.position(tp)) is None:
            self._fetching.check_errors()
            if (error := self._fetching.error_of(tp)) is not None:
                raise await self._with_offsets(error) from error
            if SYSTEM_CLOCK.monotonic_ms() >= deadline_ms:
                limit_ms = self._fetching.settings.request_timeout_ms
                raise KafkaTimeout(f"{self._who()}: position of {tp} not known after {limit_ms} ms")
            await asyncio.sleep(POSITION_POLL_MS / 1000)
        return position

    def known_position(self, tp: TopicPartition) -> int | None:
        """As `position`, without waiting: None while it is not known, or the partition is not assigned."""
        self._check_open()
        if tp not in self._fetching.assignment():
            return None
        unread = self._membership.positions.unread.position(tp)
        return self._fetching.position(tp) if unread is None else unread

    def known_lag(self, tp: TopicPartition) -> int | None:
        """How many records the position is behind the end that was told last; None while either is not known."""
        self._check_open()
        return self._fetching.known_lag([tp]).get(tp) if tp in self._fetching.assignment() else None

    def is_at_end(self, tp: TopicPartition) -> bool:
        """Whether the position was the high watermark when that was told last; under an open transaction it is not."""
        self._check_open()
        return tp in self._fetching.assignment() and self._fetching.is_at_end(tp)

    def forget_commits(self) -> None:
        """Drop offsets whose commit is still pending, which would otherwise be sent with the next generation."""
        self._check_open()
        self._committer.keep(())

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
        found = await self._committer.fetch(wanted, self._fetching.settings.request_timeout_ms) if wanted else {}
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
        partitions = self._fetching.assignment()
        ends = await self.end_offsets(partitions)
        return {tp: max(0, ends[tp] - await self.position(tp)) for tp in partitions}

    async def _list(self, specs: Mapping[TopicPartition, str | int]) -> dict[TopicPartition, int]:
        self._check_open()
        if not specs:
            return {}
        return await list_offsets(
            self._fetching.connection, specs, self._settings.isolation_level, self._fetching.settings.request_timeout_ms
        )

    async def _with_offsets(self, error: PenstockError) -> PenstockError:
        """The error with who met it, under `auto_offset_reset=none` with what each partition holds."""
        if not isinstance(error, NoOffsetForPartition | OffsetOutOfRange):
            return type(error)(f"{self._who()}: Fetch: {error}")
        unplaced = sorted(self._fetching.assignment())
        first, end = await self.beginning_offsets(unplaced), await self.end_offsets(unplaced)
        held = ", ".join(f"{tp} holds {first[tp]} to {end[tp]}" for tp in unplaced)
        return type(error)(f"{self._who()}: {error} (auto_offset_reset=none; {held})")

    def _who(self) -> str:
        """What an error about an offset starts with."""
        group_id, fetching = self._settings.group_id, self._fetching
        group = f", group {group_id}, generation {fetching.generation}" if group_id else ""
        return f"client {fetching.client_id}{group}"
