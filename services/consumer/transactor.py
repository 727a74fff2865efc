"""Runs transactions over a producer: each writes records and the group's offsets atomically.

If a commit request has no response, it is sent again until there is a response. Both alternatives would be wrong:
repeating the transaction could write it twice, abandoning it could lose it. If a transaction takes longer than
`transaction_timeout_ms`, the coordinator aborts it and fences the producer. A new producer replaces a fenced one. That
is safe, because the group's generation fences offsets too. The new producer's first request ends any open transaction
of the transactional id. After that, the group's committed offsets show whether the earlier transaction was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import (
    PRODUCER_LOST,
    CommitFailed,
    DataError,
    FatalError,
    PenstockError,
    RetriableError,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import (
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)

log = get_logger(__name__)

Offsets = Mapping[TopicPartition, OffsetAndMetadata]
FetchOffset = Callable[[TopicPartition], Awaitable[OffsetAndMetadata | None]]

RETRY_MS = 500
CLOSE_TIMEOUT_MS = 1_000
"""How long the close of a client may take: to end a transaction, or to leave the group.

Two such closes and the last commit fit into GIVE_UP_RESERVE_MS.
"""


class OutputRejected(DataError):
    """Some records can never be written. `errors` has the error of each, by its index in the records."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        index, first = next(iter(errors.items()))
        super().__init__(f"{len(errors)} records are rejected, the first (number {index}): {first}")
        self.errors = dict(errors)


class OutputTransactor:
    """Runs one transaction at a time and replaces its producer if necessary.

    `make_producer` returns a new producer with the same transactional id. `committed` returns the group's committed
    offset of a partition. It first waits for the end of an open transaction that commits an offset of the partition.
    """

    def __init__(self, make_producer: Callable[[], Producer], committed: FetchOffset) -> None:
        self._make_producer = make_producer
        self._committed = committed
        self._producer: Producer | None = None

    def __repr__(self) -> str:
        return f"OutputTransactor({self._producer!r})"

    async def start(self) -> None:
        """Start a producer and take the transactional id over.

        Raises the errors of `Producer.start` and `Producer.init_transactions`.
        """
        await self._ready_producer()

    async def close(self) -> None:
        """Close the producer within CLOSE_TIMEOUT_MS.

        A commit without a response is requested again. If no commit was requested, the open transaction is aborted. A
        transaction that is still open then is ended by the next start.
        """
        producer = self._producer
        self._producer = None
        if producer is not None:
            await producer.close(CLOSE_TIMEOUT_MS)

    async def transact(self, records: Sequence[ProducerRecord], offsets: Offsets, group: GroupMetadata) -> None:
        """Write records and commit offsets in one transaction. Returns when it is committed. Do not cancel this call.

        Raises OutputRejected for records that can never be written, CommitFailed if the member is no longer in the
        group, and RetriableError or TransactionAborted for temporary errors. Then nothing is committed. After a
        FatalError the transaction may be committed.
        """
        producer = await self._ready_producer()
        await self._find_topics(producer, records)
        try:
            await producer.begin_transaction()
        # No transaction is open, so there is nothing to abort.
        except PRODUCER_LOST as e:
            await self.close()
            raise TransactionAborted(f"the producer is replaced: {e}") from e
        try:
            await self._send_records(producer, records)
            await producer.send_offsets_to_transaction(offsets, group)
        except PenstockError as e:
            await self._abort_transaction(producer)
            if isinstance(e, PRODUCER_LOST):
                raise TransactionAborted(f"the producer is replaced: {e}") from e
            raise
        await self._commit_transaction(producer, offsets)

    async def _ready_producer(self) -> Producer:
        if self._producer is None:
            producer = self._make_producer()
            try:
                await producer.start()
                await producer.init_transactions()
            except BaseException:
                await producer.close(CLOSE_TIMEOUT_MS)
                raise
            self._producer = producer
        return self._producer

    async def _find_topics(self, producer: Producer, records: Sequence[ProducerRecord]) -> None:
        """Wait for the metadata of unknown topics before the transaction begins and its timeout runs."""
        missing: dict[str, Exception] = {}
        for topic in {record.topic for record in records}:
            try:
                await producer.partitions_for(topic)
            except (UnknownTopicOrPartition, DataError) as e:
                missing[topic] = e
        if missing:
            raise OutputRejected({i: missing[r.topic] for i, r in enumerate(records) if r.topic in missing})

    async def _send_records(self, producer: Producer, records: Sequence[ProducerRecord]) -> None:
        results = await (await producer.send_many(records)) if records else ()
        failed = {i: result for i, result in enumerate(results) if not isinstance(result, RecordMetadata)}
        # 1. Records that no retry can write. Errors of other records may be consequences of theirs.
        if rejected := {i: e for i, e in failed.items() if isinstance(e, DataError | UnknownTopicOrPartition)}:
            raise OutputRejected(rejected)
        # 2. A fatal error takes precedence over the others. 3. Any other error may pass.
        if failed:
            error = next((e for e in failed.values() if isinstance(e, FatalError)), next(iter(failed.values())))
            raise error if isinstance(error, FatalError) else TransactionAborted(str(error)) from error

    async def _abort_transaction(self, producer: Producer) -> None:
        while True:
            try:
                await producer.abort_transaction()
                return
            except PRODUCER_LOST:
                # The next producer's init_transactions aborts the transaction.
                await self.close()
                return
            except RetriableError as e:
                log.warning("the abort has no response yet", reason=str(e))
                await asyncio.sleep(RETRY_MS / 1000)

    async def _commit_transaction(self, producer: Producer, offsets: Offsets) -> None:
        while True:
            try:
                await producer.commit_transaction()
                return
            # 1. The coordinator has aborted the transaction: nothing is written.
            except TransactionAborted:
                await self._abort_transaction(producer)
                raise
            # 2. No response: the commit may have happened. Only a repeated request shows whether it has.
            except RetriableError as e:
                log.warning("the commit has no response yet", reason=str(e))
                await asyncio.sleep(RETRY_MS / 1000)
            # 3. The producer cannot be used any more, and may have committed before. The group's offsets show it.
            except PenstockError as e:
                if isinstance(e, FatalError) and not isinstance(e, PRODUCER_LOST):
                    raise
                await self.close()
                if not await self._committed_offsets_hold(offsets):
                    raise TransactionAborted(f"not committed, and the producer is replaced: {e}") from e
                return

    async def _committed_offsets_hold(self, offsets: Offsets) -> bool:
        """Return whether a transaction whose commit request failed was committed: the group has its `offsets`.

        A later offset counts too: it is of the new owner of a partition that this member has lost meanwhile. Waits,
        without a time limit, until the transaction has ended.
        """
        while True:
            try:
                await self._ready_producer()
                for tp, own in offsets.items():
                    found = await self._committed(tp)
                    if found is None or (found != own and found.offset <= own.offset):
                        return False
                return True
            except CommitFailed:
                return False
            except RetriableError as e:
                log.warning("the offsets cannot be read back yet", reason=str(e))
                await asyncio.sleep(RETRY_MS / 1000)
