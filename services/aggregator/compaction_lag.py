"""The distance between changelog and lake: records that no snapshot covers, and the age of the newest snapshot.

Without compaction the changelog grows without limit, and a restore reads all of it. The distance is measured from the
changelog's offsets and the lake's tables. So the measurement is right whether a compaction succeeds, fails, hangs or is
never started.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from penstock.services.aggregator.settings import AggregatorSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import AuthorizationFailed, PenstockError, UnsupportedVersion
from penstock.shared.common.lake import compaction_history, state_snapshot
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import gauge
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.repeated_failure import RepeatedFailure
from penstock.shared.streams.settings import StreamsSettings

log = get_logger(__name__)

# At most this many of the compactions in the lake are read for REST and the dashboard.
COMPACTIONS_MAX = 20


class PartitionSize(NamedTuple):
    """A partition's end offset and size on disk, as of one measurement, and the estimated bytes of one offset.

    `grown_bytes` and `grown_offsets` are the sums over the intervals in which the size did not shrink.
    """

    end: int
    bytes: int
    bytes_per_offset: float
    grown_bytes: int = 0
    grown_offsets: int = 0


class CompactionLag(NamedTuple):
    """The number of changelog records that no snapshot covers, their size, and the time of the newest snapshot."""

    records: int
    """Counted by offsets, so transaction markers are included."""
    snapshot_ms: int | None
    """None if there is no snapshot."""
    bytes: int | None = None
    """The size on disk, estimated from the number of offsets (`uncovered_bytes`). None if the brokers do not report
    sizes.
    """
    compactions: tuple[compaction_history.Compaction, ...] = ()
    """The last compactions in the lake, newest first."""
    sizes: Mapping[int, PartitionSize] = {}
    """The changelog's partitions, for the next measurement."""


class CompactionLagWatch:
    """Measures the lag while this instance is the one that compacts (`is_owned`).

    `last` is the last measurement; None if it failed or another instance compacts.

    Calls `request` if the bytes that no snapshot covers reach the limit in the settings. Until there is a newer
    snapshot, it calls `request` again only when the bytes have grown by the limit.
    """

    def __init__(
        self,
        settings: AggregatorSettings,
        registry: CollectorRegistry,
        is_owned: Callable[[], bool],
        clock: Clock = SYSTEM_CLOCK,
        request: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self.is_owned = is_owned
        self._request = request
        self.last: CompactionLag | None = None
        self.compactions: tuple[compaction_history.Compaction, ...] = ()
        """The compactions in the lake, as of the last measurement."""
        self.owned_since_ms: int | None = None
        self._failure = RepeatedFailure()
        self._requested_at: CompactionLag | None = None
        self._sizes: Mapping[int, PartitionSize] = {}
        self._records = gauge(
            registry,
            "compaction_changelog_records",
            "Changelog records that no snapshot covers; NaN if this instance does not measure them.",
        )
        self._records.set(math.nan)
        self._bytes = gauge(
            registry,
            "compaction_changelog_bytes",
            "Estimated changelog bytes that no snapshot covers; NaN if this instance does not know them.",
        )
        self._bytes.set(math.nan)
        age = gauge(
            registry,
            "compaction_snapshot_age_seconds",
            "Age of the newest snapshot; NaN if there is none or another instance compacts.",
        )
        age.set_function(self._age_seconds)

    def __repr__(self) -> str:
        return f"CompactionLagWatch({self.last!r})"

    async def run(self) -> None:
        """Measure until cancelled. While measuring fails, the lag is unknown."""
        while True:
            is_owned = self.is_owned()
            self.owned_since_ms = (self.owned_since_ms or self._clock.now_ms()) if is_owned else None
            self.note(await self._measure_lag() if is_owned else None)
            await asyncio.sleep(self._settings.compaction.backlog_interval_ms / 1000)

    def note(self, lag: CompactionLag | None) -> None:
        """Keep a measurement as `last`, also None if there is none. Calls `request` if a compaction is due."""
        self.last = lag
        self.compactions = self.compactions if lag is None else lag.compactions
        self._records.set(math.nan if lag is None else lag.records)
        size = None if lag is None else lag.bytes
        limit = self._settings.compaction.changelog_bytes
        self._bytes.set(math.nan if size is None else size)
        if lag is None or size is None or limit is None or size < limit:
            return
        requested = self._requested_at
        since = requested.bytes if requested is not None and requested.snapshot_ms == lag.snapshot_ms else 0
        if size >= (since or 0) + limit:
            self._requested_at = lag
            self._request()

    def newest_sign_ms(self) -> int | None:
        """The later of the newest snapshot's time and the time since which this instance compacts.

        None if this instance does not compact.
        """
        if self.owned_since_ms is None:
            return None
        return max(self.owned_since_ms, (self.last.snapshot_ms if self.last is not None else None) or 0)

    async def _measure_lag(self) -> CompactionLag | None:
        try:
            async with Admin(self._settings.kafka) as admin:
                found = await measure_compaction_lag(admin, self._settings.streams, self._sizes)
        except PenstockError as e:
            if (times := self._failure.failed(self._clock.monotonic_ms())) is not None:
                log.warning("the distance between changelog and lake cannot be measured", reason=str(e), **times)
            return None
        if (times := self._failure.succeeded(self._clock.monotonic_ms())) is not None:
            log.info("the distance between changelog and lake can be measured again", **times)
        self._sizes = found.sizes
        return found

    def _age_seconds(self) -> float:
        if self.last is None or self.last.snapshot_ms is None:
            return math.nan
        return max(0, self._clock.now_ms() - self.last.snapshot_ms) / 1000


async def measure_compaction_lag(
    admin: Admin, streams: StreamsSettings, previous: Mapping[int, PartitionSize] = {}
) -> CompactionLag:
    """Measure with Kafka and the lake; `previous` has the sizes of the last measurement.

    Raises the errors of Kafka and the lake, such as UnknownTopicOrPartition and LakeUnavailable.
    """
    topic = streams.changelog_topic
    description = (await admin.describe_topics([topic]))[topic]
    partitions_of_topic = [TopicPartition(topic, p.partition) for p in description.partitions]
    earliest = await admin.list_offsets(dict.fromkeys(partitions_of_topic, "earliest"))
    latest = await admin.list_offsets(dict.fromkeys(partitions_of_topic, "latest"))
    ends = {at.partition: offset for at, offset in latest.items()}
    starts = {at.partition: offset for at, offset in earliest.items()}
    # Sizes are compared with end offsets, so they are read right after them.
    sizes: Mapping[int, PartitionSize] | None = None
    try:
        found = await admin.partition_bytes(partitions_of_topic)
        sizes = measured_sizes(previous, ends, starts, {at.partition: size for at, size in found.items()})
    except (AuthorizationFailed, UnsupportedVersion) as e:
        log.debug("the brokers do not report the changelog's size on disk", reason=str(e))
    covered: dict[int, int] = {}
    compactions: tuple[compaction_history.Compaction, ...] = ()
    if streams.lake is not None:
        covered, compactions = await asyncio.to_thread(
            _read_covered_offsets, streams, [at.partition for at in partitions_of_topic]
        )
    return CompactionLag(
        uncovered_records(ends, starts, covered),
        snapshot_ms=compactions[0].ended_at_ms if compactions else None,
        bytes=None if sizes is None else uncovered_bytes(ends, starts, covered, sizes),
        compactions=compactions,
        sizes=sizes or {},
    )


def measured_sizes(
    previous: Mapping[int, PartitionSize],
    latest: Mapping[int, int],
    earliest: Mapping[int, int],
    sizes: Mapping[int, int],
) -> dict[int, PartitionSize]:
    """Return the partitions' sizes. All growth since the first measurement gives the bytes of one offset.

    The size on disk includes deleted records, until the broker removes their segment. So only its growth shows how
    large records are. An interval in which the size shrank is left out. The sums also balance that sizes and end
    offsets are not of the same moment. Until a partition has grown, the first measurement's size is divided by its
    number of remaining offsets, which is an upper bound.

    >>> first = measured_sizes({}, {0: 10}, {0: 0}, {0: 300})
    >>> second = measured_sizes(first, {0: 12}, {0: 10}, {0: 340})
    >>> measured_sizes(second, {0: 15}, {0: 10}, {0: 350})
    {0: PartitionSize(end=15, bytes=350, bytes_per_offset=10.0, grown_bytes=50, grown_offsets=5)}
    """
    measured = {}
    for partition, size in sizes.items():
        end = latest[partition]
        before = previous.get(partition)
        if before is None:
            offsets = end - earliest[partition]
            measured[partition] = PartitionSize(end, size, size / offsets if offsets else 0.0)
            continue
        _, _, bytes_per_offset, grown_bytes, grown_offsets = before
        if end >= before.end and size >= before.bytes:
            grown_bytes += size - before.bytes
            grown_offsets += end - before.end
        if grown_bytes and grown_offsets:
            bytes_per_offset = grown_bytes / grown_offsets
        measured[partition] = PartitionSize(end, size, bytes_per_offset, grown_bytes, grown_offsets)
    return measured


def uncovered_bytes(
    latest: Mapping[int, int],
    earliest: Mapping[int, int],
    covered: Mapping[int, int],
    sizes: Mapping[int, PartitionSize],
) -> int:
    """Return the estimated size of the changelog records that no snapshot covers, in bytes.

    For each partition it is their number times the bytes of one offset, at most the partition's size on disk.

    >>> uncovered_bytes({0: 10}, {0: 0}, {0: 5}, {0: PartitionSize(10, bytes=300, bytes_per_offset=30.0)})
    150
    """
    total = 0
    for partition, size in sizes.items():
        own = uncovered_records({partition: latest[partition]}, earliest, covered)
        total += min(size.bytes, round(own * size.bytes_per_offset))
    return total


def uncovered_records(latest: Mapping[int, int], earliest: Mapping[int, int], covered: Mapping[int, int]) -> int:
    """Return the number of offsets that still exist and that no snapshot covers, in all partitions together.

    >>> uncovered_records({0: 10, 1: 4}, {0: 2, 1: 0}, {0: 7})
    7
    """
    return sum(max(0, end - max(covered.get(p, 0), earliest.get(p, 0))) for p, end in latest.items())


def _read_covered_offsets(
    streams: StreamsSettings, partitions: list[int]
) -> tuple[dict[int, int], tuple[compaction_history.Compaction, ...]]:
    assert streams.lake is not None
    where = (streams.lake, streams.application_id)
    snapshot = state_snapshot.read_snapshot(*where, partitions, streams.lake_options)
    if snapshot is None:
        return {}, ()
    compactions = compaction_history.read_compactions(*where, COMPACTIONS_MAX, streams.lake_options)
    return {p: covered.covered_offset for p, covered in snapshot.partitions.items()}, tuple(compactions)
