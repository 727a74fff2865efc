"""The calls of a transactional producer.

    async with producer.transaction():
        await producer.send("out", b"...")
        await producer.send_offsets_to_transaction(offsets, consumer.group_metadata())

Everything sent between begin and commit becomes visible to `read_committed` at once, or never. An error of any record
or offset makes the transaction abortable; `transaction()` aborts on any exception and hands it on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer.accumulator import RecordAccumulator
from penstock.shared.clients.producer.sender import Sender
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transactions import Transaction, TxnState, is_fatal
from penstock.shared.common.errors import (
    IllegalState,
    InvalidProducerIdMapping,
    PenstockError,
    ProducerFenced,
    RetriableError,
    TransactionAborted,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition

log = get_logger(__name__)


class TransactionalCalls:
    """The part of `Producer` that deals with transactions; raises IllegalState without a `transactional_id`."""

    _transaction: Transaction | None
    _sender: Sender
    _accumulator: RecordAccumulator
    _connection: Connection
    _settings: ProducerSettings

    async def _flush(self) -> None: ...

    def _check_usable(self) -> None: ...

    async def init_transactions(self) -> None:
        """Take over the transactional id: older producers that have it are fenced, their open transaction is aborted.

        Raises KafkaTimeout after `max_block_ms` (may be called again), ProducerFenced.
        """
        self._check_usable()
        txn = self._transactional()
        if txn.state is not TxnState.UNINITIALIZED:
            raise IllegalState(f"transactional id {txn.transactional_id}: init_transactions was called before")
        with self._noting(txn):
            await self._sender.coordinator.init_producer_id()
        txn.move(TxnState.READY)

    async def begin_transaction(self) -> None:
        """Open a transaction; IllegalState where one is open or `init_transactions` is missing.

        Where the last one's abort failed in passing it is finished first; raises what `abort_transaction` raises.
        """
        self._check_usable()
        txn = self._transactional()
        if txn.abort_failed:
            await self.abort_transaction()
        txn.begin()

    async def commit_transaction(self) -> None:
        """Flush, which takes up to `delivery_timeout_ms`, then commit.

        Raises TransactionAborted where a record or offset failed (abort, then do the work again), ProducerFenced,
        KafkaTimeout `max_block_ms` after the flush: whether it is committed is then unknown, and the call may be made
        again. Cancelled during the flush it leaves the transaction open, to be aborted or committed.
        """
        self._check_usable()
        await self._commit()

    async def _commit(self) -> None:
        txn = self._transactional()
        again = txn.state is TxnState.COMMITTING
        if not again:
            txn.check_open("commit")
        txn.move(TxnState.COMMITTING)
        try:
            await self._flush()
            await self._sender.until_prepared()
        except BaseException:
            if not again:
                txn.not_committed()
            raise
        txn.check_fatal()
        if txn.state is TxnState.ABORTABLE_ERROR:
            raise TransactionAborted(
                f"transactional id {txn.transactional_id}: not committed: {txn.error}"
            ) from txn.error
        if not txn.is_empty:
            with self._noting(txn):
                await self._sender.coordinator.end(commit=True)
        txn.ended()

    async def abort_transaction(self) -> None:
        """Drop what is not sent, then abort; the deliveries of dropped records end in TransactionAborted.

        Raises ProducerFenced, KafkaTimeout after `max_block_ms` for what is under way and as long for the coordinator
        (may be called again).
        """
        txn = self._transactional()
        txn.move(TxnState.ABORTING)
        txn.abort_failed = False
        try:
            await self._abort(txn)
        except BaseException:
            txn.abort_failed = txn.state is TxnState.ABORTING
            raise
        txn.ended()

    async def _abort(self, txn: Transaction) -> None:
        dropped = TransactionAborted(f"transactional id {txn.transactional_id}: aborted before the record was sent")
        self._sender.fail_all(dropped, out=False)
        await self._sender.until_landed(self._settings.max_block_ms)
        txn.check_fatal()
        self._sender.fail_all(dropped, out=False)
        with self._noting(txn):
            if not txn.is_empty:
                try:
                    await self._sender.coordinator.end(commit=False)
                except (ProducerFenced, InvalidProducerIdMapping):
                    # Where the coordinator has aborted it itself, after its timeout, it grants the next epoch, and
                    # where it has forgotten the id, a new one; where somebody newer has the id it refuses.
                    txn.epoch_is_spent = True
            if txn.epoch_is_spent:
                # A lost batch may still be under way with sequence numbers that are used again: have it refused.
                await self._sender.coordinator.init_producer_id(bump=True)
                txn.epoch_is_spent = False

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """Begin; commit at the end, abort where the block raises.

        A commit that failed is aborted before that is raised, unless its outcome is unknown: then `close` asks again.
        Where the abort fails too, that is logged and a note on what is raised; a fatal error of it is raised instead.
        """
        await self.begin_transaction()
        txn = self._transactional()
        try:
            yield
            await self.commit_transaction()
        except BaseException as e:
            if txn.state in (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR):
                try:
                    await self.abort_transaction()
                except PenstockError as also:
                    log.warning("abort failed", transactional_id=txn.transactional_id, reason=str(also))
                    if isinstance(e, PenstockError) and is_fatal(also):
                        raise also from e
                    e.add_note(f"the abort failed as well: {also}")
            raise

    async def send_offsets_to_transaction(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata
    ) -> None:
        """Commit a consumer's offsets with the transaction, fenced by the group's generation and member.

        Raises IllegalGeneration, UnknownMember, FencedInstanceId, AuthorizationFailed (of the group): abort the
        transaction, and the producer can go on. Raises ProducerFenced.
        """
        self._check_usable()
        txn = self._transactional()
        txn.check_open("send_offsets_to_transaction")
        if not offsets:
            return
        with self._noting(txn):
            known, first = group.group_id in txn.groups, txn.is_empty
            txn.groups.add(group.group_id)
            await self._sender.coordinator.add_offsets(offsets, group, known=known, first=first)

    async def _abort_on_close(self) -> None:
        txn = self._transactional()
        if txn.state in (TxnState.IN_TRANSACTION, TxnState.ABORTABLE_ERROR, TxnState.ABORTING):
            try:
                await self.abort_transaction()
            except PenstockError as e:
                log.warning("abort on close failed", transactional_id=txn.transactional_id, reason=str(e))
        elif txn.state is TxnState.COMMITTING:  # the commit was asked for; its answer is not known
            try:
                await self._commit()
            except PenstockError as e:
                log.warning("commit on close failed", transactional_id=txn.transactional_id, reason=str(e))

    def _transactional(self) -> Transaction:
        if self._transaction is None:
            raise IllegalState("no transactional_id is set")
        return self._transaction

    def _noting(self, txn: Transaction) -> _Noting:
        return _Noting(self._sender, txn)


class _Noting:
    """Errors that leave the block become the transaction's, except a passing one of commit, abort and init."""

    def __init__(self, sender: Sender, txn: Transaction) -> None:
        self._sender, self._txn = sender, txn

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, asyncio.CancelledError) or not isinstance(error, PenstockError):
            return
        ending = self._txn.state in (TxnState.COMMITTING, TxnState.ABORTING, TxnState.UNINITIALIZED)
        if not (ending and isinstance(error, RetriableError)):
            self._sender.fail_transaction(error)
