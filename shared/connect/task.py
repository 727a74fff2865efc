"""What a connector's author writes: tasks.

A method may be `async def` or `def`. The worker awaits an `async def` method on its event loop, so it must not block.
It calls a `def` method in the task's own thread, as Kafka Connect does, so it may block without delaying other tasks.
All `def` methods of a task are called from the same thread. From there, `context.wait_for` waits for an awaitable, such
as `context.offset_storage_reader.offset(partition)`.

The worker makes one call at a time for each task. The exception is a source task whose `poll` is `async def`: `commit`
and `commit_record` may be called while it waits. The semantics are those of
org.apache.kafka.connect.source.SourceTask and sink.SinkTask.
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


_NOTHING = _Nothing()


class OffsetStorageReader(Protocol):
    """What source tasks ask where to go on."""

    async def offset(self, partition: Partition) -> Offset | None:
        """How far the part of the source was read; None where it never was."""
        ...

    async def offsets(self, partitions: Iterable[Partition]) -> list[Offset | None]:
        """The same for many parts, in their order."""
        ...


class TransactionContext(Protocol):
    """Where a source task says its transactions end, under `transaction.boundary=connector`."""

    def commit_transaction(self, record: SourceRecord | None = None) -> None:
        """Commit after this record, or after the batch that the next poll returns."""
        ...

    def abort_transaction(self, record: SourceRecord | None = None) -> None:
        """Abort after this record, or after the batch that the next poll returns: none of it is written."""
        ...


class SourceTaskContext(Protocol):
    """What a source task may ask its worker."""

    @property
    def configs(self) -> Mapping[str, str]:
        """The task's configuration as it is in force."""
        ...

    @property
    def files(self) -> AllowedFiles:
        """What the task may read and write: `connect.files.allowed` of the worker."""
        ...

    @property
    def offset_storage_reader(self) -> OffsetStorageReader: ...

    @property
    def transaction_context(self) -> TransactionContext | None:
        """None unless the task defines its transactions itself."""
        ...

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Await this on the worker's event loop and return its result; for `def` methods, IllegalState elsewhere."""
        ...


class ErrantRecordReporter(Protocol):
    """Where a sink task hands a record that it cannot write."""

    def report(self, record: SinkRecord, error: Exception) -> Awaitable[None]:
        """Take it as an error under `errors.tolerance`; awaiting waits until the dead letter is stored.

        Raises ConnectError where the error is not tolerated. Its offset is not committed before it is stored.
        """
        ...


class SinkTaskContext(Protocol):
    """What a sink task may ask its worker."""

    @property
    def configs(self) -> Mapping[str, str]: ...

    @property
    def files(self) -> AllowedFiles:
        """What the task may read and write: `connect.files.allowed` of the worker."""
        ...

    @property
    def errant_record_reporter(self) -> ErrantRecordReporter | None:
        """None where errors are neither tolerated, logged nor dead-lettered."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """The partitions that are this task's now."""
        ...

    def offset(self, tp: TopicPartition, offset: int) -> None:
        """Read on from here before the next poll: for a sink that keeps its offsets itself."""
        ...

    def pause(self, *partitions: TopicPartition) -> None:
        """Deliver nothing of these until `resume`; what the worker pauses by itself it resumes by itself."""
        ...

    def resume(self, *partitions: TopicPartition) -> None: ...

    def timeout(self, timeout_ms: int) -> None:
        """How long to wait before the batch is delivered again, after RetriableError."""
        ...

    def request_commit(self) -> None:
        """Commit before the next poll instead of when the interval is over."""
        ...

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Await this on the worker's event loop and return its result; for `def` methods, IllegalState elsewhere."""
        ...


class Task(ABC):
    """One part of a connector's work."""

    kafka_class: str | None = None
    """The name of Kafka's class that this one stands for."""

    def version(self) -> str:
        return CONNECT_VERSION

    @abstractmethod
    def start(self, props: Mapping[str, str]) -> Awaitable[None] | None:
        """Open what is needed; what it raises fails the task."""

    @abstractmethod
    def stop(self) -> Awaitable[None] | None:
        """Release everything; called once, after the last of all other calls, also if `start` failed."""


class SourceTask(Task):
    """Reads from a system into Kafka."""

    context: SourceTaskContext

    def initialize(self, context: SourceTaskContext) -> None:
        """Called first, before `start`."""
        self.context = context

    @abstractmethod
    def poll(self) -> Awaitable[Sequence[SourceRecord] | None] | Sequence[SourceRecord] | None:
        """The next records, None or none at all where there are none for now; it may wait, best for less than 1 s.

        RetriableError: poll again later. If the task is to stop, an `async def poll` is cancelled; what a `def poll`
        returns is dropped, and read again from the committed offsets.
        """

    def commit(self) -> Awaitable[None] | None:
        """Offsets up to some of the records returned so far were stored."""
        return _NOTHING

    def commit_record(self, record: SourceRecord, metadata: RecordMetadata | None) -> Awaitable[None] | None:
        """Kafka has the record; `metadata` None: it was filtered out or skipped as an error."""
        return _NOTHING


class SinkTask(Task):
    """Writes from Kafka into a system."""

    context: SinkTaskContext

    def initialize(self, context: SinkTaskContext) -> None:
        """Called first, before `start`."""
        self.context = context

    def open(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None:
        """These partitions are this task's from now on; called before any record of them."""
        return _NOTHING

    @abstractmethod
    def put(self, records: list[SinkRecord]) -> Awaitable[None] | None:
        """Write them, or keep them until `flush`; empty where there was nothing to read.

        RetriableError: the same records are delivered again, in `context.timeout` ms, and no others before.
        """

    def flush(self, offsets: Offsets) -> Awaitable[None] | None:
        """Have everything up to these offsets written when it returns."""
        return _NOTHING

    def pre_commit(self, offsets: Offsets) -> Awaitable[Offsets] | Offsets:
        """The offsets that may be committed: by default all, once flushed; none of a partition that is left out.

        What it raises makes the task read again from the offsets last committed.
        """
        flushed = self.flush(offsets)
        return offsets if flushed is None else _after(flushed, offsets)

    def close(self, partitions: frozenset[TopicPartition]) -> Awaitable[None] | None:
        """These partitions will be another's; called after their last `pre_commit`."""
        return _NOTHING


async def _after(flushed: Awaitable[None], offsets: Offsets) -> Offsets:
    await flushed
    return offsets
