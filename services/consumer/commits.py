"""Commits finished records: by their offsets alone, or by transactions that include the handlers' output.

Under `exactly_once`, a handler's output is kept until the next commit. At its start a commit takes the finished
records' offsets, the output of exactly these records, and the member's group metadata. Handlers continue during the
transaction, and the records that they finish belong to the next transaction. If a transaction is aborted, its output is
kept for the next one while the member owns the partition. When a partition is revoked, its uncommitted output is
discarded, and the next owner handles the records again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.services.consumer.executor import Outcome
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.transactor import Offsets, OutputRejected, OutputTransactor
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.dead_letters.dead_letter import shortened
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution, KeyScheduler
from penstock.shared.clients.parallel_consumer.partition_progress import Work
from penstock.shared.common.errors import AbortableError, CommitFailed, RecordTooLarge, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, ProducerRecord, TopicPartition

log = get_logger(__name__)

PENDING_RECORDS_MAX = 20_000
PENDING_BYTES_MAX = 16 * 1024 * 1024
"""The limits of the output that waits for its transaction, in records and in bytes of keys and values.

No handler starts while a limit is exceeded.
"""

MakeDeadLetters = Callable[[Iterable[Work], Exception], list[ProducerRecord]]


class Commits(Protocol):
    """Commits as the runner uses them."""

    @property
    def is_full(self) -> bool:
        """True if no handler may start before the next commit."""

    @property
    def pending_records(self) -> int:
        """The number of finished records whose output is not written."""

    def settled(self, execution: Execution, outcome: Outcome) -> None:
        """Take the outcome of an execution whose partition is still owned.

        The caller has passed the outcome to the scheduler's `settle` just before, without an await in between.
        """

    async def commit(self, partitions: Iterable[TopicPartition] | None = None, timeout_ms: float | None = None) -> bool:
        """Commit the finished records of at least these partitions (default: all).

        Returns False after `timeout_ms`, or if the commit failed and its records are committed later or handled again.
        Raises any other error.
        """

    async def close(self, timeout_ms: float) -> None:
        """Release the resources. `commit` is not called again."""


class OffsetCommits:
    """Commits for at-least-once, which consist of offsets: the output is already written."""

    is_full = False
    pending_records = 0

    def __init__(self, consumer: Consumer, scheduler: KeyScheduler, metrics: RunnerMetrics) -> None:
        self._consumer = consumer
        self._scheduler = scheduler
        self._metrics = metrics

    def settled(self, execution: Execution, outcome: Outcome) -> None:
        """Keep nothing."""

    async def commit(self, partitions: Iterable[TopicPartition] | None = None, timeout_ms: float | None = None) -> bool:
        """See `Commits`."""
        offsets = self._scheduler.committable(partitions)
        if not offsets:
            return True
        try:
            await self._consumer.commit(offsets, timeout_ms)
        # The next commit includes these offsets. After CommitFailed the member has lost the partitions, and the next
        # owner handles the records again.
        except (RetriableError, CommitFailed) as e:
            self._metrics.commit_failures.inc()
            log.warning("commit failed", error=type(e).__name__, reason=str(e))
            return False
        self._scheduler.committed(offsets)
        return True

    async def close(self, timeout_ms: float) -> None:
        """Do nothing: the owner of the consumer closes it."""


@dataclass(slots=True, eq=False)
class _Output:
    """The output of one execution (`records`), and the handled records that it belongs to (`works`).

    The first `returned` records are the handler's. Dead letters follow, one for each of the last works.
    """

    execution: Execution
    works: Sequence[Work]
    records: list[ProducerRecord]
    returned: int


class TransactionalCommits:
    """Commits for exactly-once. `make_dead_letters` returns the dead letters of records whose output Kafka rejects."""

    def __init__(
        self,
        transactor: OutputTransactor,
        group: Callable[[], GroupMetadata],
        scheduler: KeyScheduler,
        make_dead_letters: MakeDeadLetters,
        metrics: RunnerMetrics,
    ) -> None:
        self._transactor = transactor
        self._group = group
        self._scheduler = scheduler
        self._make_dead_letters = make_dead_letters
        self._metrics = metrics
        self._pending: list[_Output] = []
        self._bytes = 0
        self._count = 0
        self._works = 0
        self._task: asyncio.Task[bool] | None = None

    def __repr__(self) -> str:
        return f"TransactionalCommits({self.pending_records} records pending, {self._count} of output)"

    @property
    def is_full(self) -> bool:
        return self._count > PENDING_RECORDS_MAX or self._bytes > PENDING_BYTES_MAX

    @property
    def pending_records(self) -> int:
        return self._works

    def settled(self, execution: Execution, outcome: Outcome) -> None:
        """See `Commits`."""
        if outcome.outputs:
            self._pending.append(output := _Output(execution, outcome.finished, outcome.outputs, outcome.returned))
            self._change_pending_size(output, 1)

    async def commit(self, partitions: Iterable[TopicPartition] | None = None, timeout_ms: float | None = None) -> bool:
        """See `Commits`. All partitions are committed together.

        Returns False after `timeout_ms`. The transaction then continues in the background.
        """
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                while self._task is not None and not self._task.done():
                    await asyncio.wait({self._task})
                if self._task is not None and (error := self._task.exception()) is not None:
                    # Perhaps no caller has received this error: the one that started the task may have timed out.
                    raise error
                self._task = asyncio.create_task(self._commit_pending_outputs(), name="transaction")
                return await asyncio.shield(self._task)
        # Two cases, both harmless when the partition moves to another member:
        # 1. The coordinator has the transaction's offsets: the next owner waits for its end to read them (KIP-447).
        # 2. It does not have them yet: it will reject them, because the member's generation is over.
        except TimeoutError:
            log.warning("the transaction is not done yet", waited_ms=timeout_ms)
            return False

    async def close(self, timeout_ms: float) -> None:
        """Wait for the open transaction, at most `timeout_ms`, then close the producer."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_ms / 1000)
            self._task.cancel()
        await self._transactor.close()

    async def _commit_pending_outputs(self) -> bool:
        # No await up to the metadata: offsets, output and generation belong to one moment. Output of a partition that
        # was revoked or lost meanwhile is discarded, since its offset is not committed either.
        taken = []
        pending = self._pending
        self._pending = []
        for output in pending:
            if self._scheduler.holds(output.execution):
                taken.append(output)
            else:
                self._change_pending_size(output, -1)
        offsets = self._scheduler.committable()
        group = self._group()
        if not offsets:
            self._pending[:0] = taken
            return True
        try:
            await self._write_outputs(taken, offsets, group)
        except (RetriableError, AbortableError, CommitFailed) as e:
            self._metrics.transactions["failed"].inc()
            self._metrics.commit_failures.inc()
            log.warning("transaction aborted", error=type(e).__name__, reason=str(e), outputs=len(taken))
            # The output goes before newer output, so that each key's output stays in order.
            self._pending[:0] = taken
            return False
        self._metrics.transactions["ok"].inc()
        for output in taken:
            self._change_pending_size(output, -1)
            self._metrics.produced(output.execution.topic_partition.topic).inc(output.returned)
        self._scheduler.committed(offsets)
        return True

    async def _write_outputs(self, outputs: list[_Output], offsets: Offsets, group: GroupMetadata) -> None:
        """Write the outputs in one transaction.

        If Kafka rejects records of handlers, all outputs are written in another transaction. In it, dead letters
        replace the records of each handler call that returned a rejected record.
        """
        while True:
            try:
                await self._transactor.transact([r for output in outputs for r in output.records], offsets, group)
                return
            except OutputRejected as e:
                self._metrics.transactions["failed"].inc()
                self._replace_rejected_outputs(outputs, e)

    def _replace_rejected_outputs(self, outputs: list[_Output], rejection: OutputRejected) -> None:
        """Replace the records of each handler call that returned a rejected record with dead letters.

        A rejected dead letter that is too large is shortened if possible. Raises the error of any other rejected dead
        letter.
        """
        index = 0
        for output in outputs:
            indices = range(index, index + len(output.records))
            index = indices.stop
            records = list(output.records)
            errors = []
            # Three cases of a rejected record:
            # 1. A handler's: dead letters replace all of the handler's records, which are written together or not.
            # 2. A dead letter that is too large, and can be shortened: shortened, and written again.
            # 3. Another dead letter: raised, since nothing could replace it.
            for at, error in ((i - indices.start, rejection.errors[i]) for i in indices if i in rejection.errors):
                if at < output.returned:
                    errors.append(error)
                elif isinstance(error, RecordTooLarge) and (short := shortened(records[at])) is not None:
                    records[at] = short
                else:
                    raise error
            self._change_pending_size(output, -1)
            output.records = records
            if errors:
                self._metrics.produce_failures(output.execution.topic_partition.topic).inc(len(errors))
                dead_letters = records[output.returned :]
                handled = output.works[: len(output.works) - len(dead_letters)]
                output.records = [*self._make_dead_letters(handled, errors[0]), *dead_letters]
                output.returned = 0
            self._change_pending_size(output, 1)

    def _change_pending_size(self, output: _Output, sign: int) -> None:
        """Add an output to the sizes of the output that is not committed (sign 1), or subtract it (sign -1)."""
        self._works += sign * len(output.works)
        self._count += sign * len(output.records)
        self._bytes += sign * sum(len(record.key or b"") + len(record.value or b"") for record in output.records)
