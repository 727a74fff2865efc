"""Transactions of records and offsets against a fake broker that loses, rejects and delays requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.services.consumer.transactor import OutputRejected, OutputTransactor
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import CommitFailed, FencedInstanceId, RetriableError, TransactionAborted
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Close, Drop, ErrorCode, Fail, FakeCluster, Request

IN = TopicPartition("in", 0)
GROUP = GroupMetadata("g")
OFFSETS = {IN: OffsetAndMetadata(3, "beyond")}
RECORDS = [ProducerRecord("out", b"%d" % i) for i in range(5)]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster() as cluster:
        cluster.create_topic("in")
        cluster.create_topic("out", configs={"max.message.bytes": "2000"})
        yield cluster


@asynccontextmanager
async def transactor(cluster: FakeCluster) -> AsyncIterator[OutputTransactor]:
    kafka = KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=150, retry_backoff_ms=5, reconnect_backoff_ms=5
    )
    settings = ProducerSettings(transactional_id="t", linger_ms=0, max_block_ms=300, delivery_timeout_ms=500)
    reading = ConsumerSettings(group_id="g", isolation_level="read_committed")
    async with Consumer(kafka, reading) as consumer:
        own = OutputTransactor(lambda: Producer(kafka, settings), consumer.committed)
        try:
            yield own
        finally:
            await own.close()


async def until_committed(own: OutputTransactor) -> int:
    """Repeat the transaction while its error is temporary, and return the number of failures."""
    for failures in range(20):
        try:
            await own.transact(RECORDS, OFFSETS, GROUP)
        except (RetriableError, TransactionAborted):
            continue
        return failures
    pytest.fail("never committed")


def values(cluster: FakeCluster) -> list[bytes | None]:
    return [record.value for record in cluster.records("out")]


async def test_records_and_offsets_share_a_transaction(cluster: FakeCluster) -> None:
    """A transaction holds the output and the group's offsets with their metadata."""
    async with transactor(cluster) as own:
        await own.transact(RECORDS, OFFSETS, GROUP)
        await own.transact([], {IN: OffsetAndMetadata(4)}, GROUP)
    assert values(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == {IN: OffsetAndMetadata(4)}


@pytest.mark.parametrize("fault", [Close(), Close(handled=True), Drop(), Drop(handled=True)], ids=repr)
@pytest.mark.parametrize(
    "api",
    [
        Api.INIT_PRODUCER_ID,
        Api.ADD_PARTITIONS_TO_TXN,
        Api.PRODUCE,
        Api.ADD_OFFSETS_TO_TXN,
        Api.TXN_OFFSET_COMMIT,
        Api.END_TXN,
    ],
    ids=lambda api: api.name,
)
async def test_lost_requests_and_responses_cause_no_duplicates(cluster: FakeCluster, api: Api, fault: Action) -> None:
    """If a request or its response is lost twice, the output is written once, with the offsets."""
    control = cluster.control(api, fault, times=2)
    async with transactor(cluster) as own:
        await until_committed(own)
    assert control.acted == 2
    assert values(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == OFFSETS


@pytest.mark.parametrize(
    ("api", "code"),
    [
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.ADD_OFFSETS_TO_TXN, ErrorCode.INVALID_TXN_STATE),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.END_TXN, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.END_TXN, ErrorCode.INVALID_TXN_STATE),
    ],
)
async def test_a_fenced_producer_is_replaced(cluster: FakeCluster, api: Api, code: ErrorCode) -> None:
    """A new producer replaces one that was fenced by its own timeout, and nothing of the transaction is visible."""
    cluster.control(api, Fail(code), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(TransactionAborted, match="replaced"):
            await own.transact(RECORDS, OFFSETS, GROUP)
        assert (values(cluster), cluster.committed("g")) == ([], {})
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert values(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == OFFSETS


async def test_the_outcome_of_a_lost_commit_is_read_from_the_offsets(cluster: FakeCluster) -> None:
    """If the response to a commit is lost and the next request is fenced, the transaction
    counts as committed if the group has its offsets.
    """
    cluster.control(Api.END_TXN, Close(handled=True), times=1)
    cluster.control(Api.END_TXN, Fail(ErrorCode.INVALID_PRODUCER_EPOCH), times=1)
    async with transactor(cluster) as own:
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert values(cluster) == [r.value for r in RECORDS]


async def test_a_rejected_record_is_named(cluster: FakeCluster) -> None:
    """A record that is too large or for a missing topic is named, and the transaction is aborted."""
    async with transactor(cluster) as own:
        with pytest.raises(OutputRejected) as raised:
            await own.transact([RECORDS[0], ProducerRecord("out", b"x" * 5_000)], OFFSETS, GROUP)
        assert list(raised.value.errors) == [1]
        with pytest.raises(OutputRejected) as raised:
            await own.transact([ProducerRecord("nowhere", b""), RECORDS[0]], OFFSETS, GROUP)
        assert list(raised.value.errors) == [0]
        assert (values(cluster), cluster.committed("g")) == ([], {})
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert values(cluster) == [r.value for r in RECORDS]


@pytest.mark.parametrize("code", [ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID])
async def test_a_member_outside_of_the_group_writes_nothing(cluster: FakeCluster, code: ErrorCode) -> None:
    """If the group rejects the offsets, the output is aborted and the producer stays usable."""
    cluster.control(Api.TXN_OFFSET_COMMIT, Fail(code), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(CommitFailed):
            await own.transact(RECORDS, OFFSETS, GROUP)
        assert values(cluster) == []
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert values(cluster) == [r.value for r in RECORDS]


async def test_a_fenced_instance_is_an_error(cluster: FakeCluster) -> None:
    """If another member has the instance id, that error is raised and nothing is written."""
    cluster.control(Api.TXN_OFFSET_COMMIT, Fail(ErrorCode.FENCED_INSTANCE_ID), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(FencedInstanceId):
            await own.transact(RECORDS, OFFSETS, GROUP)
    assert values(cluster) == []


async def test_offsets_are_committed_with_their_generation(cluster: FakeCluster) -> None:
    """Group, generation and member are those of the time at which the caller took the offsets."""
    seen: list[Request] = []
    cluster.control(Api.TXN_OFFSET_COMMIT, seen.append)
    async with transactor(cluster) as own:
        with pytest.raises(CommitFailed):
            await own.transact(RECORDS, OFFSETS, GroupMetadata("g", 7, "m", "i"))
    body = seen[0].body
    assert (body.group_id, body.generation_id, body.member_id, body.group_instance_id) == ("g", 7, "m", "i")
