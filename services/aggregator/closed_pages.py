"""Closed windows of an application without a lake, page by page, straight from its changelog however long it is.

Partitions are read one after the other. A page ends after so many rows, so many records, or so much time; what has no
row yet goes on all the same. Where only windows from some time on are asked for, the place to begin at is searched for:
the operator's time, which each commit has, never goes back, and no window is closed before that has passed its end.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from penstock.services.aggregator.closed_scan import ClosedScan, Wanted
from penstock.services.aggregator.found_windows import Found
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.errors import ChangelogHole, CorruptRecord, KafkaTimeout
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import (
    FORMAT_VERSION,
    PROGRESS,
    Progress,
    decode,
    decode_progress,
)

POLL_MS = 500
SEARCHED_RECORDS = 20_000
"""A stretch that is no longer is read rather than searched."""
COMMITTED = bytes((FORMAT_VERSION,)) + PROGRESS


class Limits(NamedTuple):
    """Of one page; a page that has nothing to show for `timeout_ms` is an error."""

    rows_max: int
    records_max: int
    timeout_ms: int


class Page(NamedTuple):
    """Rows in log order by partition; the source offsets of the partitions read; where it goes on, None: it is done."""

    rows: list[Found]
    position: dict[int, dict[str, int]]
    last: ChangelogPlace | None


class ClosedPages:
    """Reads pages of one application's changelog."""

    def __init__(self, kafka: KafkaSettings, topic: str, wanted: Wanted, limits: Limits) -> None:
        self._kafka, self._topic, self._wanted, self._limits = kafka, topic, wanted, limits
        self.records_read = 0
        """Of the changelog, for the page at hand, those included that were looked at in search of its beginning."""
        self._deadline_ms = 0.0

    async def read(self, place: ChangelogPlace) -> Page:
        """The page that begins at a place.

        Raises ChangelogHole where the log begins later, CorruptRecord naming the place, or KafkaTimeout.
        """
        settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="none", max_poll_records=None)
        self.records_read, self._deadline_ms = 0, SYSTEM_CLOCK.monotonic_ms() + self._limits.timeout_ms
        async with Admin(self._kafka) as admin:
            description = (await admin.describe_topics([self._topic]))[self._topic]
        partitions = sorted(p.partition for p in description.partitions)
        rows: list[Found] = []
        position: dict[int, dict[str, int]] = {}
        async with Consumer(self._kafka, settings) as consumer:
            for p in partitions:
                if p < place.partition:
                    continue
                at = place if p == place.partition else ChangelogPlace(p)
                scan, is_whole = await self._scan(consumer, at, self._limits.rows_max - len(rows))
                rows += scan.rows
                if scan.progress is not None:
                    position[p] = dict(scan.progress.sources)
                if not is_whole:
                    return Page(rows, position, scan.place)
                if self._is_used_up(len(rows)) and p != partitions[-1]:
                    return Page(rows, position, ChangelogPlace(p + 1))
        return Page(rows, position, None)

    def _is_used_up(self, rows: int) -> bool:
        limits = self._limits
        over = SYSTEM_CLOCK.monotonic_ms() > self._deadline_ms
        return over or rows >= limits.rows_max or self.records_read >= limits.records_max

    async def _scan(self, consumer: Consumer, place: ChangelogPlace, rows_max: int) -> tuple[ClosedScan, bool]:
        """A partition from a place on, and whether it was read to its end."""
        at = TopicPartition(self._topic, place.partition)
        consumer.assign([at])
        first, end = (await consumer.beginning_offsets([at]))[at], (await consumer.end_offsets([at]))[at]
        if first > max(place.offset, 0):
            raise ChangelogHole(f"{at}: offsets {max(place.offset, 0)} to {first - 1} are gone: ask from the beginning")
        begun = place
        if place.offset < 0:
            place = await self._first(consumer, at, end)
        scan = ClosedScan(self._wanted, place, rows_max)
        consumer.seek(at, place.offset)
        while not scan.is_past and await consumer.position(at) < end:
            if scan.is_full or (self._is_used_up(0) and scan.place != begun):
                return scan, False
            if SYSTEM_CLOCK.monotonic_ms() > self._deadline_ms:
                raise KafkaTimeout(self._too_slow(scan.place))
            for columns in (await consumer.poll(POLL_MS)).values():
                self.records_read += len(columns)
                scan.feed(columns)
        return scan, not scan.is_full

    def _too_slow(self, place: ChangelogPlace) -> str:
        return (
            f"{self._topic}-{place.partition}: the commit after offset {place.offset} was not read within "
            f"queries.changelog_timeout_ms={self._limits.timeout_ms}: raise it, or set streams.lake, where closed "
            "windows are found without the changelog"
        )

    async def _first(self, consumer: Consumer, at: TopicPartition, end: int) -> ChangelogPlace:
        """From where on there can be windows that end late enough: as late as a search finds it in a few steps.

        Only commits of transactions are gone by: of others a zombie's may be among them, which no reader would apply.
        """
        low, high, epoch = 0, end, 0
        from_ms, store = self._wanted.reach[0], self._wanted.store.name
        while from_ms > 0 and high - low > SEARCHED_RECORDS:
            middle = (low + high) // 2
            found = await self._commit_after(consumer, at, middle, high)
            if found is not None and found[0] < high and _is_before(found[2], store, from_ms):
                low, epoch = found[0] + 1, found[1]
            else:
                high = middle
        return ChangelogPlace(at.partition, low, epoch)

    async def _commit_after(
        self, consumer: Consumer, at: TopicPartition, offset: int, end: int
    ) -> tuple[int, int, Progress] | None:
        """The first commit from an offset on: where its progress record is, its epoch and what it says."""
        consumer.seek(at, offset)
        while await consumer.position(at) < end and SYSTEM_CLOCK.monotonic_ms() <= self._deadline_ms:
            for columns in (await consumer.poll(POLL_MS)).values():
                self.records_read += len(columns)
                for own, value in zip(columns.offsets.tolist(), columns.values, strict=True):
                    if value is not None and value[:2] == COMMITTED:
                        with contextlib.suppress(CorruptRecord):  # to be named by who reads on from there
                            entry = decode(value)
                            return own, entry.epoch, decode_progress(entry.body)
        return None


def _is_before(progress: Progress, store: str, from_ms: int) -> bool:
    """Whether all that was closed so far ended before a time."""
    return progress.guarantee == "exactly_once" and progress.operator_times_ms.get(store, -1) < from_ms
