"""The Produce request and response on the wire, checked against a second implementation and against literal bytes."""

from __future__ import annotations

import struct
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.produce import PartitionProduceResponse, ProduceResponse, produce_request
from penstock.shared.common.errors import UnsupportedVersion
from penstock.shared.testing.fake_broker.codec import Message, MessageSchema
from penstock.shared.testing.fake_broker.schemas import PRODUCE

REQUEST, RESPONSE = (MessageSchema(text, flexible=9) for text in PRODUCE)

topics = st.lists(
    st.tuples(
        st.text(max_size=200),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=300)), max_size=4),
    ),
    max_size=4,
)


@given(st.none() | st.text(max_size=200), st.sampled_from((-1, 0, 1)), st.integers(0, 2**31 - 1), topics)
def test_a_request_round_trips(
    transactional_id: str | None, acks: int, timeout_ms: int, sent: list[tuple[str, list[tuple[int, bytes]]]]
) -> None:
    """Transactional id, acks, timeout and every batch are decoded to the last byte, in both versions."""
    for version in (9, 10):
        request = produce_request(transactional_id, acks, timeout_ms, [(name, list(rows)) for name, rows in sent])
        made = request.prepare({0: (3, version)})
        assert version == made.API_VERSION
        data = made.encode()
        body, end = REQUEST.decode(data, version)
        assert end == len(data)
        assert (body.transactional_id, body.acks, body.timeout_ms) == (transactional_id, acks, timeout_ms)
        got = [(topic.name, [(row.partition, row.records) for row in topic.partitions]) for topic in body.topics]
        assert got == sent


def test_a_request_by_hand() -> None:
    """The bytes match Kafka's protocol guide: compact strings and arrays, tagged fields after structs."""
    made = produce_request("tx", -1, 1_500, [("ab", [(3, b"\x01\x02"), (4, bytearray(b"\x05"))])]).prepare({0: (0, 9)})
    assert made.encode() == bytes.fromhex(
        "03 7478"  # transactional id
        "ffff 000005dc"  # acks, timeout
        "02 03 6162"  # one topic
        "03 00000003 03 0102 00 00000004 02 05 00"  # two partitions
        "00 00"  # tags of the topic, tags of the request
    )
    assert repr(made) == f"<Produce v9, {len(made.encode())} bytes>"


def test_a_long_batch() -> None:
    """A length above 127 is encoded in several bytes."""
    data = bytes(range(256)) * 70
    body, _ = REQUEST.decode(produce_request(None, 1, 1, [("t", [(0, data)])]).prepare({0: (0, 10)}).encode(), 10)
    assert body.topics[0].partitions[0].records == data


@pytest.mark.parametrize(
    ("spoken", "version"), [((3, 9), 9), ((0, 10), 10), ((3, 13), 10), ((9, 11), 9 + 1), ((10, 10), 10)]
)
def test_the_newest_version_both_speak(spoken: tuple[int, int], version: int) -> None:
    """Version 10 is used if the broker supports it, else version 9."""
    assert version == produce_request(None, 1, 1, []).prepare({0: spoken}).API_VERSION


@pytest.mark.parametrize("spoken", [{0: (0, 8)}, {0: (11, 13)}, {1: (0, 13)}])
def test_no_version_in_common(spoken: dict[int, tuple[int, int]]) -> None:
    """Without a common version the error lists the broker's versions, or that it does not support Produce."""
    with pytest.raises(UnsupportedVersion, match="Produce: v9 to v10"):
        produce_request(None, 1, 1, []).prepare(spoken)


def test_headers() -> None:
    """The flexible request header has correlation id and client id. The response header is consumed completely."""
    made = produce_request(None, 1, 1, []).prepare({0: (0, 9)})
    header = made.build_request_header(correlation_id=7, client_id="me")
    assert header.encode() == bytes.fromhex("0000 0009 00000007 0002 6d65 00")
    rest = BytesIO(bytes.fromhex("00000007 00 ff"))
    assert made.parse_response_header(rest).correlation_id == 7
    assert rest.read() == b"\xff"


def decoded(body: Message, version: int) -> ProduceResponse:
    return ProduceResponse.decode(BytesIO(RESPONSE.encode(body, version)))


def test_a_response() -> None:
    """Each partition's result has its offset, timestamp and log start offset. The response has the throttle time."""
    rows = [
        Message(partition=3, error_code=0, base_offset=70, log_append_time_ms=900, log_start_offset=5),
        Message(partition=4, error_code=19),
    ]
    body = Message(topics=[Message(name="a", partitions=rows), Message(name="b", partitions=[])], throttle_time_ms=250)
    for version in (9, 10):
        response = decoded(body, version)
        assert response.throttle_ms == 250
        assert response.partitions == {
            ("a", 3): PartitionProduceResponse(0, 70, 900, 5),
            ("a", 4): PartitionProduceResponse(19),
        }
        assert repr(response).startswith("<ProduceResponse {('a', 3)")


def test_the_new_leader() -> None:
    """The current leader is decoded from the tagged fields of an error. There is none without an error, in version 9,
    or if it is -1."""

    def leader(version: int, code: int, node: int) -> int | None:
        row = Message(partition=0, error_code=code, current_leader=Message(leader_id=node, leader_epoch=8))
        endpoints = [Message(node_id=node, host="h", port=9, rack=None)]
        body = Message(topics=[Message(name="a", partitions=[row])], node_endpoints=endpoints)
        return decoded(body, version).partitions["a", 0].leader

    assert leader(10, 6, 2) == 2
    assert leader(10, 6, 0) == 0
    assert leader(10, 6, -1) is None
    assert leader(10, 0, 2) is None
    assert leader(9, 6, 2) is None


def test_addresses_of_new_leaders() -> None:
    """The response lists the brokers' addresses, with or without a rack. Version 9 has none."""
    row = Message(partition=0, error_code=6, current_leader=Message(leader_id=3, leader_epoch=8))
    endpoints = [Message(node_id=3, host="h", port=9, rack=None), Message(node_id=4, host="i", port=10, rack="r")]
    body = Message(topics=[Message(name="a", partitions=[row])], node_endpoints=endpoints, throttle_time_ms=7)
    assert list(decoded(body, 10).endpoints) == [(3, "h", 9), (4, "i", 10)]
    assert (decoded(body, 10).throttle_ms, decoded(body, 9).throttle_ms) == (7, 7)
    assert list(decoded(body, 9).endpoints) == []


def test_error_messages_of_the_batch_and_its_records() -> None:
    """The batch's error message and the messages of single records are joined in the detail."""
    errors = [
        Message(batch_index=1, batch_index_error_message="no key"),
        Message(batch_index=4, batch_index_error_message=None),
    ]
    for message, wanted in ((None, ""), ("refused", "refused; ")):
        row = Message(partition=0, error_code=87, record_errors=errors, error_message=message)
        answer = decoded(Message(topics=[Message(name="a", partitions=[row])]), 9).partitions["a", 0]
        assert answer.detail == wanted + "record 1 of the batch: no key; record 4 of the batch"


def test_a_response_by_hand() -> None:
    """Unknown tagged fields before and after the leader's, and after the body, are skipped."""
    data = bytes.fromhex(
        "02"  # one topic
        "02 61"
        "02"  # one partition
        "00000003 0006 ffffffffffffffff ffffffffffffffff ffffffffffffffff"
        "01 00"  # no record errors, no message
        "02 00 09 00000002 00000008 00 07 02 abcd"  # tag 0: leader 2, epoch 8; tag 7
        "00"
        "0000000a"
        "01 05 01 ff"
    )
    response = ProduceResponse.decode(BytesIO(data))
    assert response.partitions == {("a", 3): PartitionProduceResponse(6, leader=2)}
    assert response.throttle_ms == 10


def test_cut_off() -> None:
    """A truncated response is an error, not a shorter response."""
    row = Message(partition=0, error_code=0, base_offset=1, error_message="ok")
    data = RESPONSE.encode(Message(topics=[Message(name="abc", partitions=[row])]), 9)
    for end in range(len(data) - 1):
        with pytest.raises((IndexError, struct.error)):
            ProduceResponse.decode(BytesIO(data[:end]))
