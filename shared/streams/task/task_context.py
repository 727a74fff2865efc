"""The interface of a task for its parts: a protocol, so that none of the parts imports `StreamTask`.

The parts are the vectorized executor, the operator chain, the processor nodes, late records, the output guard and
idleness. They read the task's settings and times, and report the outcome of records. `StreamTask` implements the
protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol

from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.tables import TableLookup
from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule, Start, TaskSchedules
from penstock.shared.streams.record import ProcessorRecordContext, Record
from penstock.shared.streams.state_store import StateStore
from penstock.shared.streams.task.metrics import StreamTaskMetrics
from penstock.shared.streams.task.operator_times import OperatorTimes
from penstock.shared.streams.task.outputs import TaskOutputs
from penstock.shared.streams.topology import SourceNode, Topology
from penstock.shared.streams.windows.late_changelog_entries import LateRows

Guarantee = Literal["exactly_once", "at_least_once"]


class TaskMark(NamedTuple):
    """The numbers of outputs and late records before a record or an output, for `roll_back`."""

    outputs: int
    late_records: int
    late_rows: int


class TaskContext(Protocol):
    """A task, as its parts see it."""

    topology: Topology
    partition: int
    application: str
    changelog_id: str | None

    # Times and positions.
    now_ms: int
    times: OperatorTimes
    schedules: TaskSchedules
    sources: dict[str, int]

    # Outcomes of records.
    outputs: TaskOutputs
    metrics: StreamTaskMetrics
    late_records: int
    late_stores: dict[str, int]
    late_rows: list[LateRows]
    record_metadata: ProcessorRecordContext | None
    needs_commit: bool
    is_initialized: bool
    failed: ProcessingFailed | None

    # Settings and limits.
    handlers: ErrorHandlers
    global_tables: Mapping[str, TableLookup]
    deduplicate_updates: bool
    keeps_late: bool
    record_bytes_max: int
    key_bytes_max: int
    state_bytes_max: int
    max_future_ms: int | None
    has_time: Callable[[], bool]

    @property
    def stores(self) -> Mapping[str, StateStore]:
        """Return the task's state stores by name."""

    def set_current_record(self, record: ConsumerRecord) -> None:
        """Set the record that is processed from now on."""

    def current_record(self) -> ConsumerRecord | None:
        """Return the current record, if any, as it is in the topic that the task reads."""

    def source_record(self) -> ConsumerRecord | None:
        """Return the current record, if any; behind a repartition topic it has its source record's coordinates."""

    def source_node(self, node: str) -> SourceNode:
        """Return the source of the current record; without one, the first source whose records can reach `node`."""

    def take_records(self, columns: Columns, forward: Callable[[Record], None] | None = None) -> None:
        """Process records one by one until `has_time` returns False, but at least one record."""

    def processed(self, last: ConsumerRecord, count: int) -> None:
        """Set the topic's position after this record. Call the STREAM_TIME schedules that are due, if the topic drives
        them.

        `count` records were processed since the last call.
        """

    def half_processed(self, error: Exception) -> ProcessingFailed:
        """Mark the task as failed, because its stores hold half of a record; return the error to raise."""

    def count_skipped(self, reason: str, records: int = 1) -> None:
        """Count skipped records."""

    def stream_time_of(self, node: str) -> int:
        """Return the stream time of the node's sub-topology."""

    def mark(self) -> TaskMark:
        """Return the task's current mark."""

    def roll_back(self, mark: TaskMark) -> None:
        """Return to a mark."""

    def advance_time(self, ms: int) -> None:
        """Advance the task's times without a record."""

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start: Start = None,
        name: str | None = None,
        node: str | None = None,
    ) -> Schedule:
        """Schedule a punctuator."""
