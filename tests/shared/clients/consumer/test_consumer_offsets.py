"""What can be asked and said about offsets: what is none is refused, and what is not known is not waited for."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from penstock.shared.common.errors import AuthorizationFailed, NoOffsetForPartition
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests.shared.clients.consumer.filled import filled, opened

A = TopicPartition("t", 0)
RECORDS = 10


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(RECORDS) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("offsets", "error", "says"),
    [
        ({A: -5}, ValueError, "t-0: offset -5 is below 0"),
        ({A: 1.5}, TypeError, "t-0: 1.5 is not an offset"),
        ({A: "3"}, TypeError, "t-0: '3' is not an offset"),
        ({A: True}, TypeError, "t-0: True is not an offset"),
        ({"t": 3}, TypeError, "'t' is not a TopicPartition"),
        ({A: OffsetAndMetadata(3, "é" * 2_049)}, ValueError, "t-0: 4098 bytes of metadata, above the 4096"),
        ({A: OffsetAndMetadata(3, 5)}, TypeError, "t-0: the metadata is not a text"),  # type: ignore[arg-type]
    ],
)
async def test_what_cannot_be_committed_is_refused(
    cluster: FakeCluster, offsets: dict[TopicPartition, int], error: type[Exception], says: str
) -> None:
    """At once and by name, before it is sent, and nothing is left of it that later commits would stumble over."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await consumer.commit({A: 4})
        with pytest.raises(error, match=says):
            await consumer.commit(offsets)
        with pytest.raises(error, match=says):
            consumer.commit_async(offsets)
        assert cluster.committed("g") == {A: OffsetAndMetadata(4)}
        await consumer.commit({A: 5})


async def test_wrong_positions_and_limits_are_refused(cluster: FakeCluster) -> None:
    """A seek to what is no offset, a poll for no records."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(TypeError, match=r"t-0: 1\.5 is not an offset"):
            consumer.seek(A, 1.5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="t-0: offset -1 is below 0"):
            consumer.seek(A, -1)
        for records in (0, -1):
            with pytest.raises(ValueError, match=f"max_records={records} must be above 0"):
                await consumer.poll(10, records)
        assert len((await consumer.poll(1_000))[A]) == RECORDS


async def test_a_position_that_nothing_gives_is_not_waited_for(cluster: FakeCluster) -> None:
    """Without a commit under `auto_offset_reset=none` position and lag say so at once, and poll says it too."""
    async with opened(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([A])
        started = time.monotonic()
        with pytest.raises(NoOffsetForPartition, match=r"client .*, group g, .*t-0 holds 0 to 10"):
            await consumer.position(A)
        with pytest.raises(NoOffsetForPartition):
            await consumer.lag()
        assert time.monotonic() - started < 0.4
        with pytest.raises(NoOffsetForPartition):
            await consumer.poll(1_000)


async def test_what_a_fetch_ends_in_names_who_asked(cluster: FakeCluster) -> None:
    """Client, group and generation stand before the partition and the broker's reason."""
    cluster.control(Api.FETCH, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(AuthorizationFailed, match=r"client .*, group g, generation -1: Fetch: .*t-0"):
            await consumer.poll(5_000)
