"""The Fetch request and response on the wire, checked against the fake broker's codec."""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any

import pytest

from penstock.shared.clients.protocol.fetch import FetchedPartition, FetchRequest, FetchResponse
from penstock.shared.common.errors import UnsupportedVersion
from penstock.shared.testing.fake_broker import Api, Message
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS

VERSION = 12


def frame(body: bytes) -> bytearray:
    return bytearray(b"\0\0\0\x07" + b"\0" + body)


def both_ways(body: bytes) -> FetchResponse:
    """Decodes the response from a stream (after its header) and from a frame, and requires equal results."""
    stream = BytesIO(b"\0\0\0\x07" + b"\0" + body)
    stream.seek(5)
    one, other = FetchResponse.decode(stream), FetchResponse.decode_frame(frame(body))
    assert one.partitions == other.partitions
    return other


def test_a_request() -> None:
    """Every field is encoded at the position that Kafka's protocol defines. No fetch session is opened."""
    topics = [("a", [(0, 7, -1, 100), (1, 1 << 40, 5, 200)]), ("ü", [(2, 0, -1, 300)])]
    made = FetchRequest(500, 2, 1 << 20, True, topics).prepare({1: (4, 17)})
    assert (made.API_KEY, made.API_VERSION) == (1, VERSION)
    body, end = SUPPORTED_APIS[Api.FETCH].request.decode(made.encode(), VERSION, 0)
    assert end == len(made.encode())
    assert (body.replica_id, body.max_wait_ms, body.min_bytes, body.max_bytes) == (-1, 500, 2, 1 << 20)
    assert (body.isolation_level, body.session_id, body.session_epoch, body.rack_id) == (1, 0, -1, "")
    assert body.forgotten_topics == []
    requested = [
        (t.name, [(p.partition, p.fetch_offset, p.last_fetched_epoch, p.partition_max_bytes) for p in t.partitions])
        for t in body.topics
    ]
    assert requested == topics
    first = body.topics[0].partitions[0]
    assert (first.current_leader_epoch, first.log_start_offset) == (-1, -1)
    assert FetchRequest(0, 0, 1, False, []).prepare({1: (12, 12)}).encode()[16] == 0


@pytest.mark.parametrize("versions", [{}, {1: (0, 11)}, {1: (13, 17)}])
def test_a_broker_without_the_version(versions: dict[int, tuple[int, int]]) -> None:
    """The error lists the versions that the broker supports."""
    with pytest.raises(UnsupportedVersion, match="Fetch v12"):
        FetchRequest(500, 1, 1, True, []).prepare(versions)


def test_a_response() -> None:
    """Records, end offsets, aborted transactions, errors, a new leader and a truncation are decoded from both kinds of
    input."""
    large = b"r" * 1_000
    rows: list[Any] = [
        Message(
            partition=0,
            error_code=0,
            high_watermark=9,
            last_stable_offset=8,
            log_start_offset=1,
            aborted_transactions=[Message(producer_id=5, first_offset=2), Message(producer_id=6, first_offset=3)],
            records=large,
        ),
        Message(partition=1, error_code=6, current_leader=Message(leader_id=3, leader_epoch=4), records=None),
        Message(partition=2, error_code=0, high_watermark=0, aborted_transactions=None, records=b"small"),
        Message(partition=3, error_code=0, diverging_epoch=Message(epoch=2, end_offset=44), records=None),
    ]
    topics = [Message(name="ü", partitions=rows)]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(
        Message(throttle_time_ms=11, error_code=0, session_id=0, topics=topics), VERSION
    )
    response = both_ways(body)
    assert (response.throttle_ms, response.error_code, list(response.partitions)) == (
        11,
        0,
        [("ü", 0), ("ü", 1), ("ü", 2), ("ü", 3)],
    )
    assert response.partitions["ü", 0] == FetchedPartition(0, 9, 8, 1, ((5, 2), (6, 3)), large)
    assert response.partitions["ü", 1] == FetchedPartition(6, -1, -1, -1, (), b"", 3)
    assert response.partitions["ü", 2].records == b"small"
    assert [response.diverged_at for response in response.partitions.values()] == [None, None, None, 44]
    assert repr(response) == "<FetchResponse 4 partitions, 1005 bytes, error 0>"


def test_small_record_sets_are_copied_out_of_a_response() -> None:
    """Records that fill most of a response are a view of it. A small part is copied, so that it does not keep the
    response in memory."""
    rows = [Message(partition=i, error_code=0, records=b"r" * size) for i, size in enumerate((1_000, 10))]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(Message(topics=[Message(name="t", partitions=rows)]), VERSION)
    partitions = FetchResponse.decode_frame(frame(body)).partitions
    assert [type(partitions["t", i].records) for i in (0, 1)] == [memoryview, bytes]


def test_a_response_that_ends_early() -> None:
    """A response that is shorter than its length fields require is an error."""
    rows = [Message(partition=0, error_code=0, records=b"r" * 100)]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(Message(topics=[Message(name="t", partitions=rows)]), VERSION)
    for end in range(0, len(body) - 1, 7):
        with pytest.raises((ValueError, IndexError, struct.error)):
            FetchResponse.decode_frame(frame(body[:end]))
