"""The base classes of tasks, and the contexts that the worker passes to them.

A method may be `async def` or `def`. The worker awaits an `async def` method on its event loop, so the method must not
block. A `def` method runs in the task's own thread, as in Kafka Connect, so it may block without a delay for other
tasks. All `def` methods of a task run in the same thread, but `initialize` runs on the event loop if `start` is
`async def`. In that thread, `context.wait_for` waits for an awaitable, such as
`context.offset_storage_reader.offset(partition)`.

The worker makes one call at a time for each task, with one exception under at-least-once. While an `async def` method
of a source task waits (`poll`, `commit` or `commit_record`), `commit` and `commit_record` may be called. The semantics
are those of org.apache.kafka.connect.source.SourceTask and sink.SinkTask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Generator, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from penstock.shared.common.records import OffsetAndMetadata, RecordMetadata, TopicPartition
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.record import Offset, Partition, SinkRecord, SourceRecord
from penstock.shared.connect.version import CONNECT_VERSION

T = TypeVar("T")

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class _Nothing:
    """The result of a default method: it may be awaited, or ignored."""

    def __await__(self) -> Generator[None, None, None]:
        yield from ()


NOTHING = _Nothing()


class OffsetStorageReader(Protocol):
    """Returns to a source task the offsets at which it continues."""

    async def offset(self, partition: Partition) -> Offset | None:
        """Return the stored source offset of a source partition, or None if none is stored."""
        ...

    async def offsets(self, partitions: Iterable[Partition]) -> list[Offset | None]:
        """Return the stored source offsets of many source partitions, in their order. None stands for a missing one."""
        ...


class TransactionContext(Protocol):
    """Marks the ends of a source task's transactions, under `transaction.boundary=connector`.

    A call without a record ends the transaction after the next return of `poll`. Inside `poll`, this is the return of
    the same call. The transaction includes the records that this `poll` returns. If it returns none, the transaction
    ends all the same, with the records of earlier polls. A poll that raises RetriableError or is cancelled by a stop
    counts as a return without records: request an end only when the records are at hand.
    """

    def commit_transaction(self, record: SourceRecord | None = None) -> None:
        """Commit the transaction once `record`, its last record, is sent or dropped.

        Without a record, commit it after the next return of `poll`. `record` must be an object that `poll` returns, and
        not a copy.
        """
        ...

    def abort_transaction(self, record: SourceRecord | None = None) -> None:
        """Abort the transaction after `record`, or without a record after the next return of `poll`.

        `record` must be an object that `poll` returns. No record of the transaction is committed. The source offsets of
        its records are stored nevertheless.
        """
        ...


class SourceTaskContext(Protocol):
    """The calls that a source task may make to its worker."""

    @property
    def configs(self) -> Mapping[str, str]:
        """The task's configuration in force."""
        ...

    @property
    def files(self) -> AllowedFiles:
        """The files that the task may read and write: `connect.files.allowed` of the worker."""
        ...

    @property
    def offset_storage_reader(self) -> OffsetStorageReader: ...

    @property
    def transaction_context(self) -> TransactionContext | None:
        """The transaction context under exactly-once with `transaction.boundary=connector`; otherwise None."""
        ...

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Await an awaitable on the worker's event loop and return its result.

        Only for `def` methods; elsewhere it raises IllegalState.
        """
        ...


class ErrantRecordReporter(Protocol):
    """Takes records that a sink task cannot write."""

    def report(self, record: SinkRecord, error: Exception) -> Awaitable[None]:
        """Log a record that cannot be written, and send it to the DLQ, as `errors.*` configures.

        The record's offset is committed only after the dead letter is stored. An error that is not tolerated fails the
        task. The result may be ignored. If awaited, it waits until the dead letter is stored. It raises ConnectError if
        the error is not tolerated. If the dead letter cannot be stored, it raises the error that prevents this.
        """
        ...


class SinkTaskContext(Protocol):
    """The calls that a sink task may make to its worker."""

    @property
    def configs(self) -> Mapping[str, str]: ...

    @property
    def files(self) -> AllowedFiles:
        """The files that the task may read and write: `connect.files.allowed` of the worker."""
        ...

    @property
    def errant_record_reporter(self) -> ErrantRecordReporter | None:
        """The reporter, or None if errors are neither tolerated, logged nor sent to the DLQ."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that are assigned to this task."""
        ...

    def offset(self, tp: TopicPartition, offset: int) -> None:
        """Continue reading from this offset at the next poll. For a sink that stores its offsets in its own system."""
        ...

    def pause(self, *partitions: TopicPartition) -> None:
        """Read no more records of these partitions until `resume`. `resume` does not end the worker's own pauses.

        A batch that `put` has rejected with RetriableError is still delivered again.
        """
        ...

    def resume(self, *partitions: TopicPartition) -> None: ...

    def timeout(self, timeout_ms: int) -> None:
        """Set the maximum time until the next `put`, which after RetriableError is the redelivery. 0 sets none."""
        ...

    def request_commit(self) -> None:
        """Request a commit before the next poll, not at the interval. A commit in progress must end first."""
        ...

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Await an awaitable on the worker's event loop and return its result.

        Only for `def` methods; elsewhere it raises IllegalState.
        """
        ...


class Task(ABC):
    """One part of a connector's work."""

    kafka_class: str | None = None
    """The name of the Kafka class that this class replaces."""

    def version(self) -> str:
        """Return the task's version: by default, that of Connect."""
        return CONNECT_VERSION

    @abstractmethod
    def start(self, props: Mapping[str, str]) -> Awaitable[None] | None:
        """Open the resources that the task needs. An error that it raises fails the task."""

    @abstractmethod
    def stop(self) -> Awaitable[None] | None:
        """Release all resources. Called once, after all other calls, even if `start` failed. Errors are only
        logged."""


class SourceTask(Task):
    """Reads from a system into Kafka."""

    context: SourceTaskContext

    def initialize(self, context: SourceTaskContext) -> None:
        """Take the context. Called first, before `start`."""
        self.context = context

    @abstractmethod
    def poll(self) -> Awaitable[Sequence[SourceRecord] | None] | Sequence[SourceRecord] | None:
        """Return the next records; None or an empty list if there are none yet. Wait at most about 1 s.

        After RetriableError the worker polls again. If the task stops, an `async def poll` is cancelled, and the result
        of a `def poll` is dropped. The next task reads from the committed offsets.
        """

    def commit(self) -> Awaitable[None] | None:
        """Called after a commit of source offsets, under at-least-once also if there were none to store."""
        return NOTHING

    def commit_record(self, record: SourceRecord, metadata: RecordMetadata | None) -> Awaitable[None] | None:
        """Called after the record is in Kafka; under exactly-once, after its transaction is committed.

        `metadata` is None if a transform dropped the record, its error was tolerated, or the task aborted its
        transaction.
        """
        return NOTHING


class SinkTask(Task):
    """Writes from Kafka into a system."""

    context: SinkTaskContext

    def initialize(self, context: SinkTaskContext) -> None:
        """Take the context. Called first, before `start`."""
        self.context = context

    def open(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None:
        """Prepare for new partitions. Called before any of their records is delivered."""
        return NOTHING

    @abstractmethod
    def put(self, records: list[SinkRecord]) -> Awaitable[None] | None:
        """Write the records, or keep them until `flush`. The list is empty if there is nothing to write.

        If it raises RetriableError, the same records are delivered again before any others, after at most
        `context.timeout` ms (by default 3 s).
        """

    def flush(self, offsets: Offsets) -> Awaitable[None] | None:
        """Write everything up to these offsets before it returns."""
        return NOTHING

    def pre_commit(self, offsets: Offsets) -> Awaitable[Offsets] | Offsets:
        """Return the offsets that may be committed. The default flushes and returns all of them.

        No offset is committed for a partition that is left out. If this method raises an error, the task reads again
        from the last committed offsets.
        """
        flushed = self.flush(offsets)
        return offsets if flushed is None else _offsets_after_flush(flushed, offsets)

    def close(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None:
        """Release the resources of these partitions. Called after their last `pre_commit`.

        If the group has removed the task's consumer, other tasks may own the partitions, and `close` is called without
        a last `pre_commit`.
        """
        return NOTHING


async def _offsets_after_flush(flushed: Awaitable[None], offsets: Offsets) -> Offsets:
    await flushed
    return offsets
