"""Requests to the coordinators of a transaction: each is retried within its deadline.

What a refusal costs is said by its code and by the request. Being fenced, or not allowed the transactional id, ends the
producer; a topic or group that the principal may not use, a member that is no longer its group's, an id that has
expired cost the transaction alone: such an error is `abortable`, whatever its class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Literal, TypeVar

from penstock.shared.clients.connection import Connection, error_for_code, wire
from penstock.shared.clients.producer.sequences import SequenceLedger
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transactions import fenced_by
from penstock.shared.common.errors import AuthorizationFailed, CoordinatorNotAvailable, ProducerFenced
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, TopicPartition

T = TypeVar("T")

log = get_logger(__name__)

TOPIC_AUTHORIZATION_FAILED = 29
GROUP_AUTHORIZATION_FAILED = 30
INVALID_PRODUCER_ID_MAPPING = 49
OPERATION_NOT_ATTEMPTED = 55
UNKNOWN_PRODUCER_ID = 59
FENCED_INSTANCE_ID = 82
EXPIRED = frozenset({INVALID_PRODUCER_ID_MAPPING, UNKNOWN_PRODUCER_ID})
"""The coordinator has forgotten the producer: an abort asks it for a new id."""


class TransactionCoordinator:
    """Speaks for one transactional id (or, without one, fetches a producer id for idempotence)."""

    def __init__(self, connection: Connection, settings: ProducerSettings, ledger: SequenceLedger) -> None:
        self._connection = connection
        self._settings = settings
        self._ledger = ledger

    @property
    def _id(self) -> str:
        assert self._settings.transactional_id is not None
        return self._settings.transactional_id

    async def init_producer_id(self, *, bump: bool = False) -> None:
        """Fetch producer id and epoch; with a transactional id this fences every older producer that has it.

        `bump` asks for the next epoch of the id that is held, which the coordinator refuses where somebody newer has
        it.
        """
        ledger, transactional_id = self._ledger, self._settings.transactional_id
        held = (ledger.producer_id, ledger.epoch) if bump else (-1, -1)
        timeout_ms = self._settings.transaction_timeout_ms if transactional_id else 2**31 - 1
        request = wire.INIT_PRODUCER_ID(transactional_id, timeout_ms, *held)
        where = f"transactional id {transactional_id}" if transactional_id else "producer id"

        async def ask() -> None:
            if transactional_id is None:
                response = await self._connection.send(self._connection.any_node(), request, where)
            else:
                response = await self._connection.ask_coordinator("transaction", transactional_id, request, where)
            self._check(response.error_code, "transaction", transactional_id or "", where)
            if transactional_id is not None:
                ledger.forget()  # between transactions nothing is under way, and a new epoch starts at 0
            ledger.adopt(response.producer_id, response.producer_epoch)
            log.info(
                "producer id",
                client_id=self._connection.client_id,
                transactional_id=transactional_id,
                producer_id=ledger.producer_id,
                epoch=ledger.epoch,
            )

        await self._run(ask, where)

    async def add_partitions(self, partitions: Iterable[TopicPartition], *, first: bool = False) -> None:
        """Tell the coordinator which partitions the transaction writes to; `first` where that opens it there."""
        where = f"transactional id {self._id}"
        topics: dict[str, list[int]] = defaultdict(list)
        for tp in partitions:
            topics[tp.topic].append(tp.partition)
        request = wire.ADD_PARTITIONS_TO_TXN(*self._identity(), list(topics.items()))

        async def ask() -> None:
            response = await self._connection.ask_coordinator("transaction", self._id, request, where)
            refused = [
                (TopicPartition(topic, at), code) for topic, rows in response.topics for at, code in rows if code
            ]
            # One partition's refusal leaves the others unattempted: those do not say why.
            for tp, code in sorted(refused, key=lambda one: one[1] == OPERATION_NOT_ATTEMPTED):
                self._check(code, "transaction", self._id, f"{where}, {tp}", EXPIRED | {TOPIC_AUTHORIZATION_FAILED})

        await self._run(ask, where, soon=first)

    async def add_offsets(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        *,
        known: bool,
        first: bool = False,
    ) -> None:
        """Make a group's offsets part of the transaction, under the group's generation and member.

        `known` says that the coordinator knows of the group already, `first` that this opens the transaction there.
        """
        member = f"member {group.member_id}, generation {group.generation_id}"
        where = f"transactional id {self._id}, group {group.group_id} ({member})"
        if not known:
            announce = wire.ADD_OFFSETS_TO_TXN(*self._identity(), group.group_id)

            async def ask() -> None:
                response = await self._connection.ask_coordinator("transaction", self._id, announce, where)
                abortable = EXPIRED | {GROUP_AUTHORIZATION_FAILED}
                self._check(response.error_code, "transaction", self._id, where, abortable)

            await self._run(ask, where, soon=first)
        topics: dict[str, list[Any]] = defaultdict(list)
        for tp, at in offsets.items():
            topics[tp.topic].append((tp.partition, at.offset, at.leader_epoch, at.metadata, {}))
        transactional_id, producer_id, epoch = self._identity()
        request = wire.TXN_OFFSET_COMMIT(
            transactional_id,
            group.group_id,
            producer_id,
            epoch,
            group.generation_id,
            group.member_id,
            group.group_instance_id,
            [(topic, rows, {}) for topic, rows in topics.items()],
        )

        async def commit() -> None:
            try:
                response = await self._connection.ask_coordinator("group", group.group_id, request, where)
            except AuthorizationFailed as e:  # of looking up the group's coordinator
                e.abortable = True
                raise
            abortable = frozenset({GROUP_AUTHORIZATION_FAILED, FENCED_INSTANCE_ID})
            for topic, rows, _ in response.topics:
                for partition, code, _ in rows:
                    at = f"{where}, {TopicPartition(topic, partition)}"
                    self._check(code, "group", group.group_id, at, abortable)

        await self._run(commit, where)

    async def end(self, *, commit: bool) -> None:
        """Commit or abort what the coordinator knows of the transaction."""
        where = f"transactional id {self._id}"
        request = wire.END_TXN(*self._identity(), commit)

        async def ask() -> None:
            response = await self._connection.ask_coordinator("transaction", self._id, request, where)
            self._check(response.error_code, "transaction", self._id, where, EXPIRED)

        await self._run(ask, where)

    def _identity(self) -> tuple[str, int, int]:
        return self._id, self._ledger.producer_id, self._ledger.epoch

    def _check(
        self,
        code: int,
        kind: Literal["group", "transaction"],
        key: str,
        where: str,
        abortable: frozenset[int] = frozenset(),
    ) -> None:
        if code:
            error = error_for_code(code, where)
            if isinstance(error, CoordinatorNotAvailable):
                self._connection.forget_coordinator(kind, key)
            if isinstance(error, ProducerFenced):
                error = error_for_code(code, where, fenced_by(self._settings.transaction_timeout_ms))
            error.abortable |= code in abortable
            raise error

    async def _run(self, call: Callable[[], Awaitable[T]], where: str, *, soon: bool = False) -> T:
        return await self._connection.retrying(call, where, self._settings.max_block_ms, soon=soon)
