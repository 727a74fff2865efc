"""One transaction after another over a producer: records and the group's offsets, all of it or nothing (an edge).

A transaction whose commit got no answer is asked about until there is one: nothing else could be right, neither doing
it again nor letting it be. Where the producer itself is of no more use (the transaction took longer than
`transaction_timeout_ms`, so that the coordinator aborted it and fenced its writer), a new one takes its place. Its
first request ends what was open under the transactional id, so the group's offsets then say what became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import (
    CommitFailed,
    DataError,
    FatalError,
    InvalidTxnState,
    OutOfOrderSequence,
    PenstockError,
    ProducerFenced,
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

SPENT = (ProducerFenced, InvalidTxnState, OutOfOrderSequence)
"""What ends a producer and not its process: offsets are fenced by the group's generation as well, so that a new
producer can do no harm."""
ASK_AGAIN_MS = 500
CLOSE_TIMEOUT_MS = 2_000


class OutputRefused(DataError):
    """Kafka takes some records neither now nor later; `errors` has the error of each, by its index."""

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        index, first = next(iter(errors.items()))
        super().__init__(f"{len(errors)} records are refused, the first (number {index}): {first}")
        self.errors = dict(errors)


class Transactor:
    """`make_producer` gives a new producer under the same transactional id; `committed` one of the group's offsets,
    waiting for those of an open transaction."""

    def __init__(self, make_producer: Callable[[], Producer], committed: FetchOffset) -> None:
        self._make_producer, self._committed = make_producer, committed
        self._producer: Producer | None = None
        self._known_topics: set[str] = set()

    def __repr__(self) -> str:
        return f"Transactor({self._producer!r})"

    async def start(self) -> None:
        """Take the transactional id over; raises what `Producer.init_transactions` raises."""
        await self._ready()

    async def close(self) -> None:
        """An open transaction is aborted, one whose commit has no answer is asked about once more."""
        producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close(CLOSE_TIMEOUT_MS)

    async def transact(self, records: Sequence[ProducerRecord], offsets: Offsets, group: GroupMetadata) -> None:
        """Write and commit in one transaction. It is ended when this returns or raises.

        Raises OutputRefused for records that can never be written, CommitFailed where the member has lost its place,
        RetriableError and TransactionAborted for what may pass: nothing of it is written then. Do not cancel.
        """
        producer = await self._ready()
        await self._find_topics(producer, records)
        await producer.begin_transaction()
        try:
            await self._send(producer, records)
            await producer.send_offsets_to_transaction(offsets, group)
        except PenstockError as e:
            await self._abort(producer)
            if isinstance(e, SPENT):
                raise TransactionAborted(f"the producer is given up: {e}") from e
            raise
        await self._commit(producer, offsets)

    async def _ready(self) -> Producer:
        if self._producer is None:
            producer = self._make_producer()
            await producer.start()
            try:
                await producer.init_transactions()
            except BaseException:
                await producer.close(CLOSE_TIMEOUT_MS)
                raise
            self._producer = producer
        return self._producer

    async def _find_topics(self, producer: Producer, records: Sequence[ProducerRecord]) -> None:
        """Wait for topics that are not known yet while no transaction's time runs."""
        missing: dict[str, Exception] = {}
        for topic in {record.topic for record in records} - self._known_topics:
            try:
                await producer.partitions_for(topic)
                self._known_topics.add(topic)
            except (UnknownTopicOrPartition, DataError) as e:
                missing[topic] = e
        if missing:
            raise OutputRefused({i: missing[r.topic] for i, r in enumerate(records) if r.topic in missing})

    async def _send(self, producer: Producer, records: Sequence[ProducerRecord]) -> None:
        results = await (await producer.send_many(records)) if records else ()
        failed = {i: result for i, result in enumerate(results) if not isinstance(result, RecordMetadata)}
        if refused := {i: e for i, e in failed.items() if isinstance(e, DataError | UnknownTopicOrPartition)}:
            self._known_topics -= {records[i].topic for i in refused}
            raise OutputRefused(refused)
        if failed:
            error = next((e for e in failed.values() if isinstance(e, FatalError)), next(iter(failed.values())))
            raise error if isinstance(error, FatalError) else TransactionAborted(str(error)) from error

    async def _abort(self, producer: Producer) -> None:
        while True:
            try:
                await producer.abort_transaction()
                return
            except SPENT:
                await self.close()
                return
            except RetriableError as e:
                log.warning("the abort has no answer yet", reason=str(e))
                await asyncio.sleep(ASK_AGAIN_MS / 1000)

    async def _commit(self, producer: Producer, offsets: Offsets) -> None:
        while True:
            try:
                await producer.commit_transaction()
                return
            except TransactionAborted:
                await self._abort(producer)
                raise
            except RetriableError as e:
                log.warning("the commit has no answer yet", reason=str(e))
                await asyncio.sleep(ASK_AGAIN_MS / 1000)
            except PenstockError as e:
                if isinstance(e, FatalError) and not isinstance(e, SPENT):
                    raise
                await self.close()
                if not await self._holds(offsets):
                    raise TransactionAborted(f"not committed, and the producer is given up: {e}") from e
                return

    async def _holds(self, offsets: Offsets) -> bool:
        """Whether the group's offsets are those of a commit whose fate is not known, once nothing is open any more."""
        while True:
            try:
                await self._ready()
                return {tp: await self._committed(tp) for tp in offsets} == dict(offsets)
            except CommitFailed:
                return False
            except RetriableError as e:
                log.warning("the offsets cannot be read back yet", reason=str(e))
                await asyncio.sleep(ASK_AGAIN_MS / 1000)
