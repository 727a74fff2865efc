"""A stream task's metrics, labelled by partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry

from penstock.shared.common.metrics import counter, gauge


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the task was restored.

    `rejected_at` describes the last late, the last dead-lettered and the last skipped record. It has the coordinates
    (topic-partition@offset) of the source record, if there is one. If an error handler dropped only an output of a
    node, it also names the node, store or window, as far as they are known. A late record without a source record has
    the name of the store. If a record of a repartition topic was dead-lettered as a whole, or a node skipped a record
    while the task processed it, the coordinates are those in that topic.
    """

    records: int = 0
    closed: int = 0
    late: int = 0
    dead_letters: int = 0
    skipped: int = 0
    rejected_at: Mapping[str, str] = field(default_factory=dict)


class StreamTaskMetrics:
    """Counts a task's work, in `registry` or else in a new registry. The totals are also plain attributes."""

    def __init__(self, registry: CollectorRegistry | None, partition: int) -> None:
        registry = registry or CollectorRegistry()
        own = {"partition": str(partition)}
        self.records_total = 0
        self.late_total = 0
        self.dead_letters_total = 0
        self.skipped_total = 0
        self.closed_total = 0
        self.missed_windows_total = 0
        self._records = counter(registry, "streams_records", "Records processed.", "partition").labels(**own)
        self._late = counter(
            registry, "streams_late_records", "Records that came after their windows had closed.", "partition", "topic"
        )
        self._dead_letters = counter(
            registry,
            "streams_dead_letters",
            "Records and outputs sent to the dead-letter topic.",
            "partition",
            "topic",
            "stage",
        )
        self._skipped = counter(registry, "streams_skipped_records", "Records skipped.", "partition", "reason")
        missed = ("streams_missed_windows", "Time windows that had closed before a record came.")
        self._missed = counter(registry, *missed, "partition").labels(**own)
        self._closed = counter(registry, "streams_closed_windows", "Windows closed.", "partition").labels(**own)
        self._time = gauge(
            registry,
            "streams_stream_time_seconds",
            "The stream time of the task, as Unix time.",
            "partition",
        )
        description = "The stream time of a store's operator, as Unix time."
        self._operator_time = gauge(registry, "streams_operator_time_seconds", description, "partition", "store")
        description = "Live rows: open windows, kept closed sliding windows, rows of tables, aggregations and joins."
        self._state_rows = gauge(registry, "streams_state_rows", description, "partition")
        self._own = own
        self.committed = Totals()
        """The totals as of the last commit. Later work may be repeated by another task."""
        self.rejected_at: dict[str, str] = {}
        """As in `Totals`."""
        self._prepared = self.committed

    def processed(self, records: int) -> None:
        """Count processed records."""
        self.records_total += records
        self._records.inc(records)

    def set_gauges(self, stream_time_ms: int, operator_times_ms: Mapping[str, int], state_rows: int) -> None:
        """Set the stream time, the operators' times by the names of their stores, and the number of live rows.

        Called at the start and with each commit, because every change of these numbers is committed. A time is -1 ms
        before the first record that advances it.
        """
        self._time.labels(**self._own).set(stream_time_ms / 1000)
        self._state_rows.labels(**self._own).set(state_rows)
        for store, time_ms in operator_times_ms.items():
            self._operator_time.labels(store=store, **self._own).set(time_ms / 1000)

    def remove_gauges(self, stores: Iterable[str]) -> None:
        """Remove the gauges, with those of the operators of these stores: the partition's next owner has its own."""
        partition = self._own["partition"]
        self._time.remove(partition)
        self._state_rows.remove(partition)
        for store in stores:
            self._operator_time.remove(partition, store)

    def late(self, topic: str, records: int) -> None:
        """Count late records of a topic."""
        if records:
            self.late_total += records
            self._late.labels(topic=topic, **self._own).inc(records)

    def dead_letter(self, topic: str, stage: str) -> None:
        self.dead_letters_total += 1
        self._dead_letters.labels(topic=topic, stage=stage, **self._own).inc()

    def missed(self, windows: int) -> None:
        self.missed_windows_total += windows
        self._missed.inc(windows)

    def skipped(self, reason: str, records: int = 1) -> None:
        self.skipped_total += records
        self._skipped.labels(reason=reason, **self._own).inc(records)

    def totals(self) -> Totals:
        """Return the current totals; the number of closed windows is as of the last commit."""
        return Totals(
            records=self.records_total,
            closed=self.closed_total,
            late=self.late_total,
            dead_letters=self.dead_letters_total,
            skipped=self.skipped_total,
            rejected_at=dict(self.rejected_at),
        )

    def commit_prepared(self) -> None:
        """Keep the totals that the prepared commit contains. Later work belongs to the next commit."""
        self._prepared = self.totals()

    def commit_succeeded(self, closed_windows: int) -> None:
        """Record that the prepared commit succeeded, and how many windows it closed."""
        self.closed_total += closed_windows
        self._closed.inc(closed_windows)
        self.committed = replace(self._prepared, closed=self.closed_total)


class RestoreMetrics:
    """Metrics of the restores of an instance's tasks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = gauge(registry, "streams_restore_seconds", "Duration of the last restore.", "partition")
        self._restored = gauge(
            registry,
            "streams_restored_records",
            "Windows and changelog records that the last restore read.",
            "partition",
        )
        self._left = gauge(
            registry,
            "streams_restore_remaining_records",
            "Changelog records that a running restore has not read yet.",
            "partition",
        )
        self._rate = gauge(
            registry,
            "streams_restore_records_per_second",
            "Changelog records that a running restore reads per second.",
            "partition",
        )
        self._eta = gauge(
            registry, "streams_restore_eta_seconds", "Estimated time until a running restore ends.", "partition"
        )
        foreign = ("streams_foreign_changelog_records", "Changelog records of other writers, which a restore skips.")
        self._foreign = counter(registry, *foreign, "partition")

    def progress(
        self, partition: int, remaining_records: int, records_per_second: int | None, eta_ms: int | None
    ) -> None:
        """Report a restore in progress; a figure that is not known yet keeps its previous value, if it has one."""
        self._left.labels(partition=partition).set(remaining_records)
        if records_per_second is not None:
            self._rate.labels(partition=partition).set(records_per_second)
        if eta_ms is not None:
            self._eta.labels(partition=partition).set(eta_ms / 1000)

    def remove_progress(self, partition: int) -> None:
        """Remove the gauges of a restore in progress: it has ended, failed or been cancelled."""
        for one in (self._left, self._rate, self._eta):
            one.remove(partition)

    def restored(self, partition: int, milliseconds: int, records: int, foreign_records: int) -> None:
        """Report a finished restore: its duration, the windows and records read, and the records of other writers."""
        self._seconds.labels(partition=partition).set(milliseconds / 1000)
        self._restored.labels(partition=partition).set(records)
        self._foreign.labels(partition=partition).inc(foreign_records)
