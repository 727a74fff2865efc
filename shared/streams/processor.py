"""The Processor API: the base class of a topology's nodes, and the context that gives them access to their task.

A processor is created for each task, so it needs no locks. The task calls `init` once, `process` for each record,
`commit` before each commit, and `close` at the end. A processor is plain code: it never awaits and never reads a clock.
`TimedProcessor` is the base class of the engine's own operators with event time.
"""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

from typing_extensions import TypeVar

from penstock.shared.common.errors import ConfigError, IllegalState
from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule, Start
from penstock.shared.streams.record import ProcessorRecordContext, Record

if TYPE_CHECKING:
    from penstock.shared.streams.windows.late_changelog_entries import LateRows
    from penstock.shared.streams.windows.result_batch import ResultBatch


KIn = TypeVar("KIn", contravariant=True, default=Any)
VIn = TypeVar("VIn", contravariant=True, default=Any)
KOut = TypeVar("KOut", covariant=True, default=Any)
VOut = TypeVar("VOut", covariant=True, default=Any)
KForward = TypeVar("KForward", contravariant=True, default=Any)
VForward = TypeVar("VForward", contravariant=True, default=Any)

NO_TIME = -1
"""A time before the first record."""

PROCESSOR_METHODS = ("init", "process", "commit", "close")
"""The methods of a processor that a task calls."""


class ProcessorContext(Protocol[KForward, VForward]):
    """A processor's view of its task; the type parameters are the keys and values that it forwards."""

    @property
    def partition(self) -> int:
        """The task's partition."""
        ...

    @property
    def deduplicate_updates(self) -> bool:
        """Whether each commit forwards only the last result of each window or row, for results on update."""
        ...

    @property
    def state_bytes_max(self) -> int:
        """The maximum bytes of the key and states of one window or row in the changelog.

        A record that would make them larger is rejected.
        """
        ...

    @property
    def key_bytes_max(self) -> int:
        """The maximum number of bytes that a key may take in a result. A result has the key's JSON twice.

        Aggregations, tables and joins of two streams reject a record whose key exceeds it.
        """
        ...

    @property
    def record_metadata(self) -> ProcessorRecordContext | None:
        """The coordinates of the current source record; None if there is none, as in a punctuation or a commit."""
        ...

    @property
    def stream_time_ms(self) -> int:
        """The stream time of the node's sub-topology: the highest timestamp of its source topics' records that were not
        rejected; -1 before the first. Idleness also advances it.
        """
        ...

    @property
    def now_ms(self) -> int:
        """The wall clock as of this turn of the worker's loop."""
        ...

    def forward(self, record: Record[KForward, VForward], to: str | None = None) -> None:
        """Forward a record to all children, or to the one named `to`.

        Raises TypeError for anything but a Record, DataError for an invalid timestamp, ConfigError if no child is named
        `to`, and IllegalState in `init` and outside of a callback.
        """
        ...

    def forward_results(
        self,
        results: ResultBatch,
        source: Columns | None = None,
        indexes: Int64Array | None = None,
    ) -> None:
        """Forward the results of many windows or rows to all children.

        `indexes` has for each result the index of the record in `source` that caused it.
        """
        ...

    def schedule(
        self,
        interval: timedelta | int,
        type: PunctuationType,
        callback: Punctuator,
        *,
        start: Start = None,
        name: str | None = None,
    ) -> Schedule:
        """Call the processor's `callback` every `interval` (timedelta or ms). `start` is the first due time.

        `start` is ms since the epoch, or an equivalent timedelta or datetime. If it is None, a STREAM_TIME schedule is
        first due at 0, and a WALL_CLOCK_TIME schedule one interval from now. Later due times are the first one plus
        multiples of the interval. A schedule with a `name` keeps its due times across restarts while its type and
        interval stay the same. Names are separate for each node.

        Raises ConfigError for an invalid argument, or if another live schedule of the node has the `name`. Raises
        RecordTooLarge if the task's named schedules would take more than three quarters of the bytes that a commit's
        progress record may have. Raises IllegalState outside of a callback, and in `close`.
        """
        ...

    def store(self, name: str) -> Any:
        """Return a state store or global table that this processor is connected to. Raises ConfigError for any other
        name."""
        ...

    def emit_late(self, record: Record, close_time_ms: int, operator_time_ms: int) -> None:
        """Count the record as late and send its source record to the late topic.

        In two cases `record` itself is sent: behind a node with a store that is no join with a table, and without a
        source record, as in a punctuation or a commit.
        """
        ...

    def emit_late_columns(
        self, columns: Columns, indexes: Int64Array, close_times_ms: Int64Array, operator_times_ms: Int64Array
    ) -> None:
        """As `emit_late`, for the source records at these indexes of a batch, each with its own times."""
        ...

    @property
    def keeps_late(self) -> bool:
        """Whether late records are written to the changelog: True exactly if a lake is configured."""
        ...

    def keep_late(self, rows: LateRows) -> None:
        """Add to the next commit what late records would have added to the windows that they missed."""
        ...

    def late_offsets(self, source: Columns | None, offsets: Int64Array | None, count: int) -> Int64Array:
        """Return the offsets of `count` late records in the source topic of this node's store.

        They are `offsets` for a batch `source`, otherwise the current record's. Records of another topic get NO_OFFSET,
        and so do those that are not the source record (`emit_late`).
        """
        ...

    def takes_time(self, timestamp: int, span_ms: int) -> bool:
        """Return True if windows of `span_ms` may take a record of this `timestamp`.

        Raises DataError if a window's bound would not fit into 64 bits, or if `timestamp` is more than `max_future_ms`
        ahead of the wall clock. Without a source record, as in a punctuation or a commit, such a record is counted as
        skipped instead, and the result is False.
        """
        ...

    def reject_output(self, record: Record, error: Exception) -> None:
        """Drop one output of this node because of `error`, or make it a dead letter, as the error handlers decide.

        `record` has what is known of the output, such as its key. Raises `error` if the handler is `fail`, or if no
        handler may decide, as for a ConfigError. Also raises it if no store has taken the current source record: the
        whole source record is then rejected.
        """
        ...

    def count_missed(self, windows: int) -> None:
        """Add `windows` to the number of windows that records were too late for."""
        ...

    def count_skipped(self, reason: str, records: int = 1) -> None:
        """Count the current record and others of its batch, `records` in all, as skipped for this reason."""
        ...


class Processor(Generic[KIn, VIn, KOut, VOut]):
    """The base class of processors. It keeps the context; a subclass must define `process`.

    The type parameters are the types of the keys and values that the processor takes, then of those that it forwards.
    Each is `Any` by default.
    """

    context: ProcessorContext[KOut, VOut]
    sees_time: ClassVar[bool] = True
    """Whether the processor may read the time or schedule. If so, records reach it one by one, each at its own time."""

    def __getattr__(self, name: str) -> Any:
        if name == "context":
            # Python calls `__getattr__` for the context only until `init` has set it.
            raise IllegalState(
                f"{type(self).__name__} has no context yet: it is for init() and after (an init() of your own calls "
                "super().init(context) first)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def init(self, context: ProcessorContext[KOut, VOut], /) -> None:
        """Initialize; called once before the first record."""
        self.context = context

    def process(self, record: Record[KIn, VIn], /) -> None:
        """Process one record.

        If this method raises an error, the source record is rejected: `processing_exception_handler` decides about it,
        and by default it becomes a dead letter. Under `fail` the worker ends, except for a DataError, which still makes
        the record a dead letter.

        Behind a store, and for a record that a punctuation or a commit forwarded, only the record given to this
        processor is rejected in this way.

        The worker always ends after ConfigError, FatalError, IllegalState and MemoryError. It also ends if the
        processor, or a node below it, changed a store before the error. And it ends if a store of another branch has
        taken the record, and this processor or a node below it has a store too.
        """
        raise ConfigError(f"{type(self).__name__} does not define process()")

    def commit(self) -> None:
        """Forward the records that the processor has held back; called before each commit.

        Held-back records do not make a commit due. A processed record or a punctuation does.
        """

    def close(self) -> None:
        """Close; called once at the end."""


class TimedProcessor(Processor):
    """The base class of operators with event time. Progress records contain the operators' times by store name."""

    store_name: str
    stream_time_ms: int = NO_TIME
    """The highest timestamp of a record. With `idle_timeout_ms` it also advances when the source is idle."""
    close_time_ms: int | None = None
    """Stream time minus the grace, and for sessions also minus the gap; None before the first record, and always for an
    aggregation without windows. Windows whose last moment is below it are closed. It never goes back: if the grace is
    made longer, it stays until stream time has caught up."""

    @abstractmethod
    def advance_time(self, stream_time_ms: int) -> None:
        """Advance the operator's time without a record."""

    @abstractmethod
    def results_from_ms(self) -> int:
        """The lowest timestamp to expect of later results; NO_TIME if unknown. Records out of order may go below it."""
