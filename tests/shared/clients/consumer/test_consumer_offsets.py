"""Calls that take or return offsets: invalid arguments are rejected, and unknown offsets are not waited for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.shared.clients.consumer import Consumer
from penstock.shared.common.errors import AuthorizationFailed, InvalidTopic, NoOffsetForPartition, OffsetOutOfRange
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.shared.clients.consumer.filled import filled, opened

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 10


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(RECORDS) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ({A: -5}, ValueError, "t-0: offset -5"),
        ({A: 1.5}, TypeError, "t-0: 1.5"),
        ({A: "3"}, TypeError, "t-0: '3'"),
        ({A: True}, TypeError, "t-0: True"),
        ({"t": 3}, TypeError, "'t' is not a TopicPartition"),
        ({A: OffsetAndMetadata(3, "é" * 2_049)}, ValueError, "t-0: 4098 bytes.*4096"),
        ({A: OffsetAndMetadata(3, 5)}, TypeError, "t-0: the metadata"),  # type: ignore[arg-type]
    ],
)
async def test_invalid_commits_are_rejected(
    cluster: FakeCluster, offsets: dict[TopicPartition, int], error: type[Exception], message: str
) -> None:
    """An invalid commit is rejected with its partition before it is sent, and does not affect later commits."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await consumer.commit({A: 4})
        with pytest.raises(error, match=message):
            await consumer.commit(offsets)
        with pytest.raises(error, match=message):
            consumer.commit_async(offsets)
        assert cluster.committed("g") == {A: OffsetAndMetadata(4)}
        await consumer.commit({A: 5})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([A, TopicPartition("t", "0")], TypeError, "t-0: '0' is not the number of a partition"),  # type: ignore[arg-type]
        ([TopicPartition("t", -1)], ValueError, "t--1: partition -1"),
        ([TopicPartition("t t", 0)], InvalidTopic, "t t"),
        ([("t", 0)], TypeError, r"\('t', 0\) is not a TopicPartition"),
        (A, TypeError, "'t' is not a TopicPartition"),
    ],
)
async def test_invalid_partitions_are_rejected(given: Any, error: type[Exception], message: str) -> None:
    """`assign` and the lookups of offsets reject a partition that cannot exist. What was assigned before is read on."""
    with pytest.raises(error, match=message):
        Consumer("127.0.0.1:1").assign(given)
    async with filled(RECORDS) as cluster, opened(cluster, group_id=None) as consumer:
        consumer.assign([A])
        with pytest.raises(error, match=message):
            consumer.assign(given)
        with pytest.raises(error, match=message):
            await consumer.end_offsets(given)
        assert len((await consumer.poll(1_000))[A]) == RECORDS


async def _on_commit(_offsets: object, _error: object) -> None: ...


@pytest.mark.parametrize("callback", [_on_commit, 5])
def test_a_commit_callback_is_a_function_that_is_not_async(callback: Any) -> None:
    """`commit_async` rejects a callback that it could not call, or that nothing would await."""
    with pytest.raises(TypeError, match="callback must be a function that is not async"):
        Consumer("127.0.0.1:1").commit_async(callback=callback)


async def test_wrong_positions_and_limits_are_rejected(cluster: FakeCluster) -> None:
    """A seek to an invalid offset and a poll for zero records are rejected."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(TypeError, match=r"t-0.*1\.5"):
            consumer.seek(A, 1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"t-0.*-1"):
            consumer.seek(A, -1)
        for records in (0, -1):
            with pytest.raises(ValueError, match=f"max_records={records}"):
                await consumer.poll(10, records)
        assert len((await consumer.poll(1_000))[A]) == RECORDS


async def test_partitions_that_stay_assigned_are_read_on() -> None:
    """A second `assign` keeps the position, the unread records and the pause of a partition that stays."""
    async with filled(RECORDS, partitions=2) as cluster, opened(cluster) as consumer:
        consumer.assign([A])
        assert (await anext(consumer)).offset == 0
        consumer.assign([A, B])
        assert (await anext(consumer)).offset == 1
        consumer.seek(A, 5)
        consumer.pause(A)
        consumer.assign([B, A])
        assert (await consumer.position(A), consumer.paused()) == (5, {A})


async def test_an_undefined_position_is_not_waited_for(cluster: FakeCluster) -> None:
    """With `auto_offset_reset=none` and no commit, `position`, lag and `poll` raise an error at once."""
    async with opened(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([A])
        started = time.monotonic()
        with pytest.raises(NoOffsetForPartition, match=r"group g.*t-0"):
            await consumer.position(A)
        with pytest.raises(NoOffsetForPartition):
            await consumer.lag()
        assert time.monotonic() - started < 0.4
        with pytest.raises(NoOffsetForPartition):
            await consumer.poll(1_000)


async def test_an_offset_error_waits_for_no_other_partition() -> None:
    """With `auto_offset_reset=none`, a missing or invalid offset is an error also if another partition has no
    leader."""
    async with filled(RECORDS, partitions=2) as cluster, opened(cluster, auto_offset_reset="none") as consumer:
        for api in (Api.FETCH, Api.LIST_OFFSETS):
            cluster.control(api, Fail(ErrorCode.LEADER_NOT_AVAILABLE, [B]))
        consumer.assign([A, B])
        consumer.seek(B, 0)
        with pytest.raises(NoOffsetForPartition, match=r"group g.*t-0.*auto_offset_reset=none"):
            await consumer.poll(5_000)
        consumer.seek(A, 99)
        with pytest.raises(OffsetOutOfRange, match=r"group g.*t-0.*99.*auto_offset_reset=none"):
            await consumer.poll(5_000)


async def test_fetch_errors_name_client_and_group(cluster: FakeCluster) -> None:
    """Client, group and generation precede the partition and the broker's reason in the error."""
    cluster.control(Api.FETCH, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(AuthorizationFailed, match=r"group g.*Fetch.*t-0"):
            await consumer.poll(5_000)
