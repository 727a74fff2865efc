"""The Processor API: what a node of a topology is, and what it may ask of the task that runs it.

A processor is made anew for each task, so it needs no locks: `init` once, `process` for each record in offset order,
`close` at the end. It is plain code: it never awaits and never reads a clock.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

from typing_extensions import TypeVar

from penstock.shared.common.errors import ConfigError, DataError, IllegalState
from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.punctuation import PunctuationType, Punctuator, Schedule, Start
from penstock.shared.streams.record import Record, RecordMetadata

if TYPE_CHECKING:
    from penstock.shared.streams.windows.late_entries import LateRows
    from penstock.shared.streams.windows.window_results import WindowResults


KIn = TypeVar("KIn", contravariant=True, default=Any)
VIn = TypeVar("VIn", contravariant=True, default=Any)
KOut = TypeVar("KOut", covariant=True, default=Any)
VOut = TypeVar("VOut", covariant=True, default=Any)
KForward = TypeVar("KForward", contravariant=True, default=Any)
VForward = TypeVar("VForward", contravariant=True, default=Any)

INT64_MAX = 2**63 - 1

PROCESSOR_METHODS = ("init", "process", "commit", "close")
"""What a task calls of a processor."""


class ProcessorContext(Protocol[KForward, VForward]):
    """What a processor may ask of its task; the type parameters are the keys and values that it forwards."""

    @property
    def partition(self) -> int:
        """The task's partition."""
        ...

    @property
    def deduplicate_updates(self) -> bool:
        """Whether results on update are reduced to the last per window and commit."""
        ...

    @property
    def state_bytes_max(self) -> int:
        """What a key and its states may take in the changelog; what would make them larger refuses the record."""
        ...

    @property
    def key_bytes_max(self) -> int:
        """What a windowed key may take in a result, as `window_limits` measures it; a larger one refuses the record."""
        ...

    @property
    def record_metadata(self) -> RecordMetadata | None:
        """The source record being processed; None in a punctuation and in a commit."""
        ...

    @property
    def stream_time_ms(self) -> int:
        """The highest timestamp the task has seen; -1 before the first record."""
        ...

    @property
    def now_ms(self) -> int:
        """The wall clock as of this turn of the worker's loop."""
        ...

    def forward(self, record: Record[KForward, VForward], to: str | None = None) -> None:
        """Hand a record to all children, or to the one of that name; DataError for a timestamp that is none."""
        ...

    def forward_results(
        self,
        results: WindowResults,
        source: Columns | None = None,
        places: Int64Array | None = None,
    ) -> None:
        """Hand results of many windows, or rows, to all children.

        `places` says which records of `source` brought them about.
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
        """Call `callback` every `interval` (timedelta or ms), on the grid that `start` begins.

        `start` is ms since the epoch, or a timedelta or datetime that says as much; without one a STREAM_TIME grid
        begins at 0 and a WALL_CLOCK_TIME one an interval from now. The grid of a schedule with a name survives a
        restart, as long as its type and interval stay as they are; the name is the node's own. ConfigError names the
        argument that does not do, also a name that another live schedule of the node has; IllegalState where the task
        is not at work.
        """
        ...

    def store(self, name: str) -> Any:
        """A state store this processor was connected to; ConfigError for one it was not."""
        ...

    def emit_late(self, record: Record, close_time_ms: int, operator_time_ms: int) -> None:
        """Count the record as late and send its source record to the late topic.

        What a punctuation or a commit forwarded has no source record: the record itself goes there.
        """
        ...

    def emit_late_columns(
        self, columns: Columns, places: Int64Array, close_times_ms: Int64Array, operator_times_ms: Int64Array
    ) -> None:
        """As `emit_late`, of the source records in these places of a batch: each with the times of its moment."""
        ...

    @property
    def keeps_late(self) -> bool:
        """Whether the changelog is to have late records: where there is a lake."""
        ...

    def keep_late(self, rows: LateRows) -> None:
        """Have the next commit write what late records would have brought to the windows that they missed."""
        ...

    def late_offsets(self, source: Columns | None, offsets: Int64Array | None, count: int) -> Int64Array:
        """Where so many records stand in the store's source: these of a batch at `offsets`, else the one in hand."""
        ...

    def takes_time(self, timestamp: int, span_ms: int) -> bool:
        """Whether windows of this span may take a record of this time.

        Not where a window's bounds would leave 64 bits, nor further ahead of the clock than `max_future_ms`: then
        DataError, which refuses the source record; without one, in a punctuation or a commit, it is counted as
        skipped, and False.
        """
        ...

    def reject_output(self, record: Record, error: Exception) -> None:
        """Leave out an output that cannot be made, behind a store, as the error handlers say; else raise `error`.

        `record` is what is known of it.
        """
        ...

    def count_missed(self, windows: int) -> None:
        """Count windows that the record that is being processed came too late for."""
        ...

    def count_skipped(self, reason: str, records: int = 1) -> None:
        """Count the record, and others of its batch before it, as skipped, by reason."""
        ...


class Processor(Generic[KIn, VIn, KOut, VOut]):
    """Base of processors: keeps its context, forwards nothing.

    The type parameters are the keys and values that it takes, then those that it forwards; each is `Any` by default.
    """

    context: ProcessorContext[KOut, VOut]
    sees_time: ClassVar[bool] = True
    """Whether it may ask what time it is, or schedule: what is given to it must then come at its moment."""

    def __getattr__(self, name: str) -> Any:
        if name == "context":  # not there until init() has set it
            raise IllegalState(
                f"{type(self).__name__} has no context yet: forwarding, stores and scheduling are for init() and after "
                "(an init() of your own calls super().init(context) first)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def init(self, context: ProcessorContext[KOut, VOut], /) -> None:
        """Called once before the first record."""
        self.context = context

    def process(self, record: Record[KIn, VIn], /) -> None:
        """Take one record.

        DataError sends the source record to the dead-letter topic, and so does any other error unless
        `processing_exception_handler` is `fail`; not so ConfigError and FatalError, which end the worker. Behind a
        store, or for what a punctuation or a commit forwarded, it is this record alone that is left out; an error
        after a store of the processor's own took something ends the worker.
        """
        raise ConfigError(f"{type(self).__name__} does not define process()")

    def commit(self) -> None:
        """Called before each commit: forward what was held back. A record brings a commit about, as does a
        punctuation; holding back alone does not."""

    def close(self) -> None:
        """Called once at the end."""


def is_own(processor: object) -> bool:
    """Whether a processor's class is one of the engine's, and none of a user's."""
    return type(processor).__module__.startswith("penstock.shared.streams.")


def interval_ms(interval: timedelta | int, argument: str = "a duration", least: int = 1) -> int:
    """A duration as whole ms; ConfigError naming the argument where it is below `least` ms, not whole, or none at all.

    >>> interval_ms(timedelta(minutes=30)), interval_ms(5.0)
    (1800000, 5)
    >>> interval_ms("30m", "gap")
    Traceback (most recent call last):
        ...
    penstock.errors.ConfigError: gap must be a timedelta or a whole number of ms and at least 1, got '30m'
    """
    ms = interval / timedelta(milliseconds=1) if isinstance(interval, timedelta) else interval
    is_number = isinstance(ms, int | float) and not isinstance(ms, bool) and math.isfinite(ms)
    if not is_number or ms != int(ms) or ms < least:
        said = f"{argument} must be a timedelta or a whole number of ms and at least {least}"
        raise ConfigError(f"{said}, got {interval!r}")
    return int(ms)


def check_timestamp(timestamp: Any) -> None:
    """Refuse a record's time that is none: DataError for what is not a whole number of ms from 0 to 2^63 - 1."""
    if not isinstance(timestamp, int) or not 0 <= timestamp <= INT64_MAX:
        raise DataError(f"a record's timestamp must be a whole number of ms from 0 to 2^63 - 1, got {timestamp!r}")
