"""Transactions on both brokers: isolation, fencing, and offsets that are committed with them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from penstock.shared.testing.fake_broker import Api, ErrorCode, Message
from tests.contract.conftest import Log, Wire, batch, created, until
from tests.contract.test_groups import Member, single_member

LATEST = -1
NO_MEMBER = {"generation_id": -1, "member_id": "", "group_instance_id": None}


@dataclass
class Producer:
    """A transactional producer made of bare requests."""

    log: Log
    transactional_id: str
    producer_id: int = -1
    epoch: int = -1
    sequence: int = 0
    timeout_ms: int = 60_000

    async def init(self) -> str:
        response = await self.log.wire.request(
            Api.INIT_PRODUCER_ID,
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
        )
        if not response.error_code:
            self.producer_id, self.epoch, self.sequence = response.producer_id, response.producer_epoch, 0
        return ErrorCode(response.error_code).name

    @property
    def identity(self) -> dict[str, object]:
        return {
            "transactional_id": self.transactional_id,
            "producer_id": self.producer_id,
            "producer_epoch": self.epoch,
        }

    async def add(self) -> str:
        topics = [Message(name=self.log.topic, partitions=[0])]
        response = await self.log.wire.request(Api.ADD_PARTITIONS_TO_TXN, topics=topics, **self.identity)
        return ErrorCode(response.topics[0].partitions[0].error_code).name

    async def write(self, *values: bytes, version: int | None = None) -> str:
        producer = (self.producer_id, self.epoch, self.sequence)
        data = batch(*values, producer=producer, transactional=True)
        row = await self.log.produce(data, transactional_id=self.transactional_id, version=version)
        if not row.error_code:
            self.sequence += len(values)
        return ErrorCode(row.error_code).name

    async def end(self, *, committed: bool) -> str:
        response = await self.log.wire.request(Api.END_TXN, committed=committed, **self.identity)
        return ErrorCode(response.error_code).name

    async def add_offsets(self, group_id: str) -> str:
        response = await self.log.wire.request(Api.ADD_OFFSETS_TO_TXN, group_id=group_id, **self.identity)
        return ErrorCode(response.error_code).name

    async def commit_offset(self, group_id: str, offset: int, **member: object) -> str:
        response = await self.log.wire.request(
            Api.TXN_OFFSET_COMMIT,
            group_id=group_id,
            topics=self.log.topics(offset=offset, metadata=""),
            **self.identity,
            **{**NO_MEMBER, **member},
        )
        return ErrorCode(response.topics[0].partitions[0].error_code).name


@pytest.fixture
async def producer(log: Log, name: str, wire: Wire) -> Producer:
    """A producer with an id and an epoch."""
    await wire.request(Api.FIND_COORDINATOR, key=name, key_type=1)
    one = Producer(log, name)
    assert await one.init() == "NONE"
    return one


async def end_offsets(log: Log) -> tuple[int, int]:
    """The last stable offset and the high watermark."""
    return (await log.offset(LATEST, committed=True))[1], (await log.offset(LATEST))[1]


async def until_settled(log: Log, end: int) -> None:
    """Wait until the markers are written, which Kafka does after its response."""

    async def is_settled() -> bool:
        return await end_offsets(log) == (end, end)

    await until(is_settled)


async def test_an_open_transaction_is_not_stable(producer: Producer) -> None:
    """The last stable offset is the start of the first open transaction, until its marker is written."""
    log = producer.log
    await log.produce(batch(b"plain"))
    assert await producer.add() == "NONE"
    assert await producer.write(b"a", b"b") == "NONE"
    await log.produce(batch(b"after"))
    assert await end_offsets(log) == (1, 4)
    row = await log.fetch(0, committed=True)
    assert (row.last_stable_offset, row.high_watermark) == (1, 4)
    assert await producer.end(committed=True) == "NONE"
    await until_settled(log, 5)


async def test_aborted_transactions_are_named(producer: Producer) -> None:
    """A fetch of committed records lists the aborted transactions in its range, with producer and first offset."""
    log = producer.log
    for committed in (False, True, False):
        assert await producer.add() == "NONE"
        assert await producer.write(b"a", b"b") == "NONE"
        assert await producer.end(committed=committed) == "NONE"
    await until_settled(log, 9)

    async def aborted(offset: int) -> list[tuple[int, int]]:
        row = await log.fetch(offset, committed=True)
        return [(one.producer_id, one.first_offset) for one in row.aborted_transactions]

    assert await aborted(0) == [(producer.producer_id, 0), (producer.producer_id, 6)]
    assert await aborted(3) == [(producer.producer_id, 6)]
    assert (await log.fetch(0)).aborted_transactions is None


async def test_a_partition_must_be_in_the_transaction(producer: Producer) -> None:
    """A write to a partition that was not added to the transaction is an error."""
    assert await producer.write(b"a", version=10) == "INVALID_TXN_STATE"
    assert await producer.write(b"a", version=11) == "TRANSACTION_ABORTABLE"
    assert await producer.add() == "NONE"
    assert await producer.write(b"a") == "NONE"


async def test_a_transaction_ends_once(producer: Producer) -> None:
    """A transaction can be ended again in the same way but not in the other; without a
    transaction an end is an error.
    """
    assert await producer.end(committed=True) == "INVALID_TXN_STATE"
    assert await producer.add() == "NONE"
    assert await producer.end(committed=True) == "NONE"
    assert await producer.end(committed=True) == "NONE"
    assert await producer.end(committed=False) == "INVALID_TXN_STATE"


async def test_the_next_producer_fences_the_last(producer: Producer) -> None:
    """A second producer with the same id aborts the open transaction and fences the first."""
    assert await producer.add() == "NONE"
    assert await producer.write(b"a") == "NONE"
    second = Producer(producer.log, producer.transactional_id)
    assert await second.init() == "NONE"
    assert second.producer_id == producer.producer_id
    assert second.epoch > producer.epoch
    await until_settled(producer.log, 2)
    assert await producer.write(b"b") == "INVALID_PRODUCER_EPOCH"
    assert await producer.add() == "PRODUCER_FENCED"
    assert await producer.end(committed=True) == "PRODUCER_FENCED"
    assert await producer.add_offsets("group") == "PRODUCER_FENCED"
    assert await producer.init() == "PRODUCER_FENCED"
    assert await second.add() == "NONE"
    assert await second.write(b"c") == "NONE"
    assert await second.end(committed=True) == "NONE"


async def test_a_fenced_producer_is_known_before_it_has_written(producer: Producer) -> None:
    """A fenced producer cannot write to a partition either to which it never wrote before."""
    assert await Producer(producer.log, producer.transactional_id).init() == "NONE"
    assert await producer.write(b"a") == "INVALID_PRODUCER_EPOCH"


async def test_a_producer_can_raise_its_own_epoch(producer: Producer) -> None:
    """InitProducerId with the current id and epoch returns the next epoch, and the same one when it is repeated."""
    before = (producer.producer_id, producer.epoch)
    assert await producer.init() == "NONE"
    assert (producer.producer_id, producer.epoch) == (before[0], before[1] + 1)
    producer.epoch = before[1]
    assert await producer.init() == "NONE"
    assert producer.epoch == before[1] + 1


async def test_a_transaction_times_out(producer: Producer) -> None:
    """A transaction that is open too long is aborted, and its producer is fenced until it requests its next epoch."""
    slow = Producer(producer.log, producer.transactional_id, timeout_ms=100)
    assert await slow.init() == "NONE"
    assert await slow.add() == "NONE"
    assert await slow.write(b"a") == "NONE"
    await until_settled(producer.log, 2)
    assert await slow.end(committed=True) == "PRODUCER_FENCED"
    assert await slow.add() == "PRODUCER_FENCED"
    assert await slow.write(b"b") == "INVALID_PRODUCER_EPOCH"
    before = slow.epoch
    for _ in range(2):
        slow.epoch = before
        assert await slow.init() == "NONE"
        assert slow.epoch == before + 1
    assert await slow.add() == "NONE"
    assert await slow.write(b"c") == "NONE"
    assert await slow.end(committed=True) == "NONE"
    await until_settled(producer.log, 4)
    row = await producer.log.fetch(0, committed=True)
    assert [(one.producer_id, one.first_offset) for one in row.aborted_transactions] == [(slow.producer_id, 0)]


async def test_a_foreign_producer_id_is_an_error(producer: Producer) -> None:
    """A producer id that does not belong to the transactional id is an error."""
    stranger = Producer(producer.log, producer.transactional_id, producer.producer_id + 1_000_000, 0)
    assert await stranger.add() == "INVALID_PRODUCER_ID_MAPPING"
    unknown = Producer(producer.log, f"{producer.transactional_id}-none", producer.producer_id, 0)
    assert await unknown.end(committed=True) == "INVALID_PRODUCER_ID_MAPPING"


async def test_an_expired_transactional_id_has_a_new_producer_id(producer: Producer) -> None:
    """A producer that continues an unknown transactional id gets a new producer id."""
    expired = Producer(producer.log, f"{producer.transactional_id}-none", producer.producer_id, 3)
    assert await expired.init() == "NONE"
    assert (expired.producer_id != producer.producer_id, expired.epoch) == (True, 0)


async def test_a_timeout_has_limits(log: Log, name: str) -> None:
    """A transaction's timeout above `transaction.max.timeout.ms` is an error."""
    response = await log.wire.request(Api.INIT_PRODUCER_ID, transactional_id=name, transaction_timeout_ms=900_001)
    assert ErrorCode(response.error_code) is ErrorCode.INVALID_TRANSACTION_TIMEOUT


async def committed_offset(log: Log, group_id: str, *, require_stable: bool) -> tuple[str, int]:
    response = await log.wire.request(
        Api.OFFSET_FETCH,
        group_id=group_id,
        topics=[Message(name=log.topic, partitions=[0])],
        require_stable=require_stable,
    )
    row = response.topics[0].partitions[0]
    return ErrorCode(row.error_code).name, row.offset


async def stable_offset(log: Log, group_id: str) -> tuple[str, int]:
    """The committed offset, once no transaction is about to commit."""

    async def is_stable() -> bool:
        return (await committed_offset(log, group_id, require_stable=True))[0] != "UNSTABLE_OFFSET_COMMIT"

    await until(is_stable)
    return await committed_offset(log, group_id, require_stable=True)


async def test_offsets_come_with_the_commit(producer: Producer, name: str) -> None:
    """Offsets of a transaction are visible once it is committed; until then `require_stable` is an error."""
    log, group_id = producer.log, f"{name}-group"
    await log.wire.request(Api.FIND_COORDINATOR, key=group_id)
    assert await producer.add_offsets(group_id) == "NONE"
    assert await producer.commit_offset(group_id, 7) == "NONE"
    assert await committed_offset(log, group_id, require_stable=False) == ("NONE", -1)
    assert await committed_offset(log, group_id, require_stable=True) == ("UNSTABLE_OFFSET_COMMIT", -1)
    assert await producer.end(committed=True) == "NONE"
    assert await stable_offset(log, group_id) == ("NONE", 7)


async def test_aborted_offsets_are_dropped(producer: Producer, name: str) -> None:
    """Offsets of an aborted transaction are never committed."""
    log, group_id = producer.log, f"{name}-group"
    assert await producer.add_offsets(group_id) == "NONE"
    assert await producer.commit_offset(group_id, 7) == "NONE"
    assert await producer.end(committed=False) == "NONE"
    assert await stable_offset(log, group_id) == ("NONE", -1)


async def test_offsets_of_an_unknown_generation_are_an_error(producer: Producer, name: str) -> None:
    """A generation that the group does not have cannot commit in a transaction."""
    group_id = f"{name}-group"
    assert await producer.add_offsets(group_id) == "NONE"
    assert await producer.commit_offset(group_id, 7, generation_id=3, member_id="gone") == "ILLEGAL_GENERATION"


async def test_transactional_commits_need_no_member(producer: Producer, other_wire: Wire, name: str) -> None:
    """In a group with members, a plain commit without a member id is an error, and one in a transaction is not."""
    log, group_id = producer.log, f"{name}-group"
    await single_member(other_wire, group_id)
    assert await Member(log.wire, group_id).commit(log, 5) == "UNKNOWN_MEMBER_ID"
    assert await producer.add_offsets(group_id) == "NONE"
    assert await producer.commit_offset(group_id, 7) == "NONE"
    assert await producer.end(committed=True) == "NONE"
    assert await stable_offset(log, group_id) == ("NONE", 7)


async def test_an_unknown_partition_prevents_the_addition_of_all(producer: Producer, wire: Wire, name: str) -> None:
    """Either all or no partitions are added."""
    await created(wire, f"{name}-other")
    topics = [Message(name=f"{name}-other", partitions=[0]), Message(name=f"{name}-none", partitions=[0])]
    response = await wire.request(Api.ADD_PARTITIONS_TO_TXN, topics=topics, **producer.identity)
    codes = {topic.name: topic.partitions[0].error_code for topic in response.topics}
    assert codes == {f"{name}-other": 55, f"{name}-none": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
