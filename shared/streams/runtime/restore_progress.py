"""The progress of one partition's restore while it runs, and the figures of a finished one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from penstock.shared.common.log import get_logger
from penstock.shared.streams.task.metrics import RestoreMetrics

log = get_logger(__name__)


# The progress of a restore is logged at most once in this time.
LOG_INTERVAL_MS = 5_000


class ProgressDescription(TypedDict):
    """A restore's progress as plain values; see `RestoreProgress`."""

    remaining_records: int | None
    records_per_second: int | None
    eta_ms: int | None


class RestoreProgress:
    """The progress of one partition's restore: the rest of the changelog to read, the rate, and the estimated time.

    Records are counted by offsets, so transaction markers count too. The rate is the average since the first `moved`.
    Fields are None as long as they are not known.

    >>> progress = RestoreProgress(0)
    >>> progress.moved(1_000, 5_000, now_ms=0)
    >>> progress.moved(3_000, 5_000, now_ms=500)
    >>> progress.describe()
    {'remaining_records': 2000, 'records_per_second': 4000, 'eta_ms': 500}
    """

    def __init__(self, partition: int, metrics: RestoreMetrics | None = None) -> None:
        self._partition = partition
        self._metrics = metrics
        self._first: tuple[int, int] | None = None
        self._logged_at_ms = 0
        self.remaining_records: int | None = None
        self.records_per_second: int | None = None
        self.eta_ms: int | None = None
        self.is_accepted = False
        """Whether the newest commit is known to fit the topology, before the commits that precede it are read."""

    def __repr__(self) -> str:
        return f"RestoreProgress(partition {self._partition}, {self.describe()})"

    def moved(self, position: int, end: int, now_ms: int) -> None:
        """Set how far the restore is: it reads next at `position`, and ends at `end`; `now_ms` is monotonic."""
        if self._first is None:
            self._first = (position, now_ms)
            self._logged_at_ms = now_ms
        first, since_ms = self._first
        self.remaining_records = max(0, end - position)
        if now_ms > since_ms and position > first:
            rate = (position - first) * 1000 / (now_ms - since_ms)
            self.records_per_second = round(rate)
            self.eta_ms = round(self.remaining_records * 1000 / rate)
        elif self.remaining_records == 0:
            self.eta_ms = 0
        if self._metrics is not None:
            self._metrics.progress(self._partition, self.remaining_records, self.records_per_second, self.eta_ms)
        if now_ms - self._logged_at_ms >= LOG_INTERVAL_MS and self.remaining_records:
            self._logged_at_ms = now_ms
            log.info("state is being restored", partition=self._partition, position=position, **self.describe())

    def describe(self) -> ProgressDescription:
        """Return the remaining records, the rate and the estimated time as plain values."""
        return {
            "remaining_records": self.remaining_records,
            "records_per_second": self.records_per_second,
            "eta_ms": self.eta_ms,
        }


@dataclass(slots=True)
class RestoreReport:
    """The figures of a restore: the rows that it began with, and the changelog that it read after them."""

    snapshot_version: int | None = None
    """The version of the snapshot; None if there was no snapshot."""
    snapshot_windows: int = 0
    """The rows from the snapshot that the restore began with."""
    changelog_records: int = 0
    """All records of the changelog that it read, including takeover and progress records."""
    changelog_windows: int = 0
    """The entries of the changelog that it applied."""
    foreign_records: int = 0
    """The skipped records of the changelog that are no changelog entries."""
    milliseconds: int = 0
    """The duration of the whole restore."""
    local_windows: int = 0
    """The rows from the instance's disk that the restore began with."""
    standby_windows: int = 0
    """The rows from the instance's standby that the restore began with."""
