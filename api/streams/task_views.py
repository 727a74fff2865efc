"""The views of tasks that the routes of streams need, and the state that they return.

The service that runs the tasks implements `StreamsView` for its own tasks. An application with several instances also
implements `InstancesView`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Protocol, Required

from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.streams.query_params import ContinuationOf

ProcessingGuarantee = Literal["exactly_once", "at_least_once"]
TopologyText = Annotated[str, Field(examples=["Source: flights (topic: flights) --> sessions"])]
"""A topology as text, with one line for each node."""


class TaskState(TypedDict, total=False):
    """One task. A field that is missing or None is unknown or does not apply.

    Records and windows of the task are counted from its last restore to its last commit.
    """

    partition: Required[of.Partition]
    state: Required[Literal["restoring", "running"]]
    instance: Required[of.Instance]
    """The instance that runs or restores the task."""
    epoch: of.Count
    """The owner epoch of the task's changelog entries. Each new owner of the partition has a higher one."""
    sources: Annotated[dict[str, int], Field(examples=[{"flights": 17}])]
    """By source topic: the offset of the next record that the task processes."""
    stream_time_ms: of.TimeMs | None
    """The highest event time of a record that the task processed, in ms since the epoch, without dead letters; -1 if
    there is no such record. With `idle_timeout_ms` it also advances while the source is idle."""
    operator_times_ms: Annotated[dict[str, int], Field(examples=[{"sessions": 1357016700000}])] | None
    """By store: the highest event time of a record with a key that its operator processed; -1 if there is none. Windows
    close by it. With `idle_timeout_ms` it also advances while the source is idle."""
    state_rows: of.Count | None
    """The live rows: open windows, kept closed sliding windows, rows of tables, aggregations and joins."""
    records: of.Count
    """Records that the task processed."""
    closed_windows: of.Count | None
    late_records: of.Count | None
    """Records that came after all their windows had closed."""
    dead_letters: of.Count | None
    """Records and outputs that were sent to the dead-letter topic."""
    skipped_records: of.Count
    """Records without a key or a value that an operation needs, records whose time is too far ahead, and records and
    outputs that an error handler skipped."""
    restore_ms: of.Count | None
    """The duration of the last restore."""
    restored_windows: of.Count
    """The rows from the snapshot that the last restore began with."""
    restored_changelog_records: of.Count
    """All records of the changelog that the last restore read."""
    restored_changelog_windows: of.Count
    """The entries of the changelog that the last restore applied."""
    restored_local_windows: of.Count
    """The rows from the instance's disk that the last restore began with."""
    restored_standby_windows: of.Count
    """The rows from the instance's standby that the last restore began with."""
    snapshot_version: of.Count | None
    """The version of the snapshot that the last restore began with; None if it began without a snapshot."""
    remaining_records: of.Count | None
    """During a restore: changelog records that are still to be read."""
    records_per_second: of.Count | None
    """During a restore: changelog records read per second."""
    eta_ms: of.Count | None
    """During a restore: the remaining time at that rate."""


class StandbyState(TypedDict):
    """One standby: a copy of a task's state that an instance keeps beside the partition's owner."""

    partition: of.Partition
    state: Literal["catching up", "current", "failed"]
    state_rows: of.Count
    """The rows of the standby's stores."""
    lag: of.Lag | None
    """Changelog offsets that the standby has not read yet; None while they are unknown."""
    instance: of.Instance
    """The instance that keeps the standby."""


class InstanceRow(TypedDict):
    """One instance of the application, as it has registered itself."""

    instance: of.Instance
    url: Annotated[str, Field(examples=["http://10.0.0.7:8080"])]
    """The address at which the other instances query it."""
    partitions: Annotated[list[int], Field(examples=[[0, 2]])]
    """The partitions whose tasks it runs."""
    restoring: Annotated[list[int], Field(examples=[[1]])]
    """The partitions whose tasks it restores."""


class CompactionState(TypedDict, total=False):
    """One compaction."""

    started_at_ms: of.TimeMs
    seconds: of.Seconds | None
    status: Annotated[str, Field(examples=["done"])]
    """running; done; failed; lost: another job committed first; stopped: partition 0 moved to another instance."""
    rows: of.Count | None
    """Rows that the compaction appended: changed and deleted live rows, closed windows and late records."""
    progress: of.Text
    """The last progress that the compaction reported."""
    detail: of.Text


class StreamsState(TypedDict):
    """The state of an application, or of one of its instances. Only an application's has `instances` and `missing`."""

    application_id: of.Application
    instance: of.Instance
    """The instance that responds."""
    processing_guarantee: ProcessingGuarantee
    """The guarantee in force: with internal topics it is `exactly_once`, whatever the setting."""
    topology: TopologyText
    tasks: list[TaskState]
    standbys: list[StandbyState]
    compactions: list[CompactionState]
    """Newest first, a bounded number of them."""
    instances: NotRequired[list[InstanceRow]]
    """The instances that are known, whether or not they answer."""
    missing: NotRequired[list[MissingPartition]]
    """Partitions that the response lacks."""


class MissingPartition(TypedDict):
    """A partition that the response lacks, and the reason."""

    partition: of.Partition
    reason: Annotated[str, Field(examples=["no instance has it"])]


class WindowRow(TypedDict):
    """One open window of a store; `results` are those of its aggregations by name, as JSON values."""

    store: of.Store
    partition: of.Partition
    key: of.RecordKey
    start_ms: of.TimeMs
    end_ms: of.TimeMs
    results: Annotated[dict[str, Any], Field(examples=[{"events": 3}])]


class OpenWindows(TypedDict):
    """Open windows, latest end first.

    `continuation` is None on the last page. `unseen` is the number of rows that were not read.
    """

    windows: list[WindowRow]
    continuation: ContinuationOf | None
    unseen: of.Count


class WindowsResponse(OpenWindows):
    """A response with open windows. `is_cut` is true if more windows follow."""

    is_cut: bool
    missing: NotRequired[list[MissingPartition]]


class TopologyResponse(TypedDict):
    """The topology of the application."""

    application_id: of.Application
    topology: TopologyText
    processing_guarantee: ProcessingGuarantee


class TasksResponse(TypedDict):
    """The tasks of the application, or of one of its instances."""

    tasks: list[TaskState]
    missing: NotRequired[list[MissingPartition]]


class StoreRow(TypedDict):
    """The number of a store's live rows, by partition and in total."""

    store: of.Store
    rows: Annotated[dict[str, int], Field(examples=[{"0": 3}])]
    total: of.Count


class StoresResponse(TypedDict):
    """The state stores of the application, or of one of its instances."""

    stores: list[StoreRow]
    missing: NotRequired[list[MissingPartition]]


class CompactionsResponse(TypedDict):
    """The last compactions, newest first, and the last one that succeeded."""

    compactions: list[CompactionState]
    last: CompactionState | None


class CompactionStarted(TypedDict):
    """A compaction was started."""

    started: Literal[True]


class StreamsView(Protocol):
    """The view of a service's own tasks that the routes need. No method waits for the network."""

    async def describe(self) -> StreamsState:
        """Return the state of this instance, for the route `/v1/streams`."""
        ...

    def stores(self) -> list[dict[str, Any]]:
        """Return the number of live rows of each store, by partition of this instance."""
        ...

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> OpenWindows:
        """Return open windows, only those that match `key` unless it is empty.

        Raises ConfigError if `store` is not a store with windows, and WrongContinuation for an invalid continuation.
        """
        ...

    def compact(self) -> str:
        """Request a compaction. Returns "" if it will start, else the reason why it does not."""
        ...


class InstancesView(Protocol):
    """The view of all instances that the routes need. It queries them over the network.

    A returned object has `missing`: the partitions that it lacks, with the reasons.
    """

    async def describe(self) -> StreamsState:
        """Return the state of all instances that answer, for the route `/v1/streams`."""
        ...

    async def stores(self) -> dict[str, Any]:
        """Return the number of live rows of each store, of all instances, for the route `/v1/streams/stores`.

        Raises Problem (503) if the source topics are unknown.
        """
        ...

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        """Return open windows of all instances, for the route `/v1/streams/windows`.

        Raises ConfigError if `store` is not a store with windows, WrongContinuation for an invalid continuation, and
        Problem (503) if the source topics are unknown.
        """
        ...

    async def compact(self) -> str:
        """Request a compaction from the instance that runs compactions, for the route `POST /v1/compactions`.

        Returns "" if it will start, else the reason why it does not. Raises Problem (503) if that instance is unknown
        or returns no usable response.
        """
        ...
