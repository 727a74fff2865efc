"""The requests for a producer id and to the coordinators of a transaction. Each is retried within its deadline.

The error code and the request together decide what an error ends. Being fenced, and a missing permission for the
transactional id, end the producer. These end the transaction alone: a topic that the principal may not write to, a
group that it may not use, a member that has left its group, an expired producer id. If such an error is a FatalError,
it is marked as `abortable`.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import NO_IDENTITY, SequenceLedger, Transaction, fenced_by
from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.errors import CODE_OF, codes_of, error_for_code
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    CoordinatorNotAvailable,
    KafkaTimeout,
    ProducerFenced,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition

log = get_logger(__name__)

TOPIC_AUTHORIZATION_FAILED = CODE_OF["TOPIC_AUTHORIZATION_FAILED"]
GROUP_AUTHORIZATION_FAILED = CODE_OF["GROUP_AUTHORIZATION_FAILED"]
OPERATION_NOT_ATTEMPTED = CODE_OF["OPERATION_NOT_ATTEMPTED"]
FENCED_INSTANCE_ID = CODE_OF["FENCED_INSTANCE_ID"]
EXPIRED = codes_of("INVALID_PRODUCER_ID_MAPPING", "UNKNOWN_PRODUCER_ID")
"""The coordinator has forgotten the producer id: an abort requests a new one (KIP-360)."""

NO_TIMEOUT_MS = 2**31 - 1
"""The transaction timeout of a producer without transactions; brokers ignore it."""


class TransactionRequests:
    """Sends the requests of one transactional id. Without a transactional id, it fetches a producer id for
    idempotence."""

    def __init__(
        self,
        connection: Connection,
        settings: ProducerSettings,
        ledger: SequenceLedger,
        transaction: Transaction | None,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._ledger = ledger
        self._transaction = transaction

    @property
    def _transactional_id(self) -> str:
        assert self._settings.transactional_id is not None
        return self._settings.transactional_id

    async def init_producer_id(self, *, bump: bool = False) -> None:
        """Fetch a producer id and epoch. With a transactional id this fences every older producer that uses it.

        `bump` requests the next epoch of the current producer id (KIP-360). The coordinator rejects that if a newer
        producer has the id.
        """
        ledger = self._ledger
        transactional_id = self._settings.transactional_id
        held = (ledger.producer_id, ledger.epoch) if bump else NO_IDENTITY
        timeout_ms = self._settings.transaction_timeout_ms if transactional_id else NO_TIMEOUT_MS
        request = requests.INIT_PRODUCER_ID(transactional_id, timeout_ms, *held)
        where = f"transactional id {transactional_id}" if transactional_id else "producer id"

        async def request_producer_id() -> None:
            # Without a transactional id every broker grants producer ids (KIP-98).
            if transactional_id is None:
                response = await self._connection.send(self._connection.any_node(), request, where)
            else:
                response = await self._connection.request_coordinator("transaction", transactional_id, request, where)
            self._check_error_code(response.error_code, "transaction", transactional_id or "", where)
            # Between transactions no batch is in flight, and the numbers of a new epoch start at 0. An idempotent
            # producer keeps its numbers until the batches in flight are done, see `SequenceLedger.assign`.
            if self._transaction is not None:
                ledger.forget()
                self._transaction.epoch_is_spent = False
            ledger.adopt(response.producer_id, response.producer_epoch)
            log.info(
                "producer id",
                client_id=self._connection.client_id,
                transactional_id=transactional_id,
                producer_id=ledger.producer_id,
                epoch=ledger.epoch,
            )

        # `max_block_ms` bounds only calls of the user. Without a transactional id the sender itself fetches the id, and
        # repeats the call until it has one.
        if transactional_id is None:
            await self._connection.retrying(request_producer_id, where, self._connection.settings.request_timeout_ms)
        else:
            await self._retry_request(request_producer_id, where)

    async def add_partitions(self, partitions: Iterable[TopicPartition], *, first: bool) -> None:
        """Add partitions to the transaction at its coordinator. `first` means that this request begins the
        transaction there."""
        where = f"transactional id {self._transactional_id}"
        topics: dict[str, list[int]] = defaultdict(list)
        for tp in partitions:
            topics[tp.topic].append(tp.partition)
        request = requests.ADD_PARTITIONS_TO_TXN(*self._producer_identity(), list(topics.items()))

        async def request_add_partitions() -> None:
            response = await self._connection.request_coordinator("transaction", self._transactional_id, request, where)
            rejected = [
                (TopicPartition(topic, at), code) for topic, rows in response.topics for at, code in rows if code
            ]
            # One rejected partition leaves the others with OPERATION_NOT_ATTEMPTED: report the cause first.
            for tp, code in sorted(rejected, key=lambda one: one[1] == OPERATION_NOT_ATTEMPTED):
                self._check_error_code(
                    code,
                    "transaction",
                    self._transactional_id,
                    f"{where}, {tp}",
                    EXPIRED | {TOPIC_AUTHORIZATION_FAILED},
                )

        await self._retry_request(request_add_partitions, where, soon=first)

    async def add_offsets(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        *,
        first: bool,
    ) -> None:
        """Add a group's offsets to the transaction. The group coordinator checks the generation and the member id.

        `first` means that this begins the transaction at its coordinator.
        """
        member = f"member {group.member_id}, generation {group.generation_id}"
        where = f"transactional id {self._transactional_id}, group {group.group_id} ({member})"
        # 1. The transaction coordinator must know the group: it will write its marker to the group's partition of
        #    `__consumer_offsets` (KIP-98).
        announce = requests.ADD_OFFSETS_TO_TXN(*self._producer_identity(), group.group_id)

        async def request_add_offsets() -> None:
            response = await self._connection.request_coordinator(
                "transaction", self._transactional_id, announce, where
            )
            abortable = EXPIRED | {GROUP_AUTHORIZATION_FAILED}
            self._check_error_code(response.error_code, "transaction", self._transactional_id, where, abortable)

        await self._retry_request(request_add_offsets, where, soon=first)
        # 2. The group coordinator stores the offsets as pending. It checks generation and member, which fences a
        #    consumer that has lost its partitions (KIP-447).
        topics: dict[str, list[Any]] = defaultdict(list)
        for tp, at in offsets.items():
            topics[tp.topic].append((tp.partition, at.offset, at.leader_epoch, at.metadata, {}))
        transactional_id, producer_id, epoch = self._producer_identity()
        request = requests.TXN_OFFSET_COMMIT(
            transactional_id,
            group.group_id,
            producer_id,
            epoch,
            group.generation_id,
            group.member_id,
            group.group_instance_id,
            [(topic, rows, {}) for topic, rows in topics.items()],
        )

        async def commit_offsets() -> None:
            try:
                response = await self._connection.request_coordinator("group", group.group_id, request, where)
            except AuthorizationFailed as e:
                # FindCoordinator raised it for the group: the producer may still use other groups.
                e.abortable = True
                raise
            # Being fenced ends the consumer (KIP-345), not the producer.
            abortable = frozenset({GROUP_AUTHORIZATION_FAILED, FENCED_INSTANCE_ID})
            for topic, rows, _ in response.topics:
                for partition, code, _ in rows:
                    at = f"{where}, {TopicPartition(topic, partition)}"
                    self._check_error_code(code, "group", group.group_id, at, abortable)

        await self._retry_request(commit_offsets, where)

    async def end(self, *, commit: bool) -> None:
        """Commit or abort the transaction at the coordinator."""
        where = f"transactional id {self._transactional_id}"
        request = requests.END_TXN(*self._producer_identity(), commit)

        async def request_end_transaction() -> None:
            response = await self._connection.request_coordinator("transaction", self._transactional_id, request, where)
            self._check_error_code(response.error_code, "transaction", self._transactional_id, where, EXPIRED)

        await self._retry_request(request_end_transaction, where)

    def _producer_identity(self) -> tuple[str, int, int]:
        return self._transactional_id, self._ledger.producer_id, self._ledger.epoch

    def _check_error_code(
        self,
        code: int,
        kind: Literal["group", "transaction"],
        key: str,
        where: str,
        abortable: frozenset[int] = frozenset(),
    ) -> None:
        if code:
            error = error_for_code(code, where)
            # The coordinator loads, is unknown or has moved: the retry looks it up again.
            if isinstance(error, CoordinatorNotAvailable):
                self._connection.forget_coordinator(kind, key)
            if isinstance(error, ProducerFenced):
                error = error_for_code(code, where, fenced_by(self._settings.transaction_timeout_ms))
            error.abortable |= code in abortable
            raise error

    async def _retry_request(self, call: Callable[[], Awaitable[None]], where: str, *, soon: bool = False) -> None:
        assert self._transaction is not None
        transaction = self._transaction

        async def attempt() -> None:
            try:
                await call()
            except (KafkaTimeout, BrokerNotAvailable, CancelledError):
                # The coordinator may still carry the request out, even after the transaction has ended (KIP-890).
                transaction.epoch_is_spent = True
                raise

        await self._connection.retrying(attempt, where, self._settings.max_block_ms, soon=soon)
