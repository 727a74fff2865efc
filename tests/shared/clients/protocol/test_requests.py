"""Requests and responses on the wire: each struct in its pinned version, Fetch, Produce, and Kafka's flexible encoding.

Fetch, Produce and the flexible encoding are checked against the fake broker's codec, which is a second implementation,
and against literal bytes.
"""

from __future__ import annotations

import struct
import uuid
from io import BytesIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.errors import CODE_OF, NO_ERROR
from penstock.shared.clients.protocol.fetch import FetchedPartition, FetchRequest, FetchResponse
from penstock.shared.clients.protocol.flexible_types import (
    NO_TAGS,
    FlexibleReader,
    encode_compact_string,
    encode_unsigned_varint,
    leader_in,
)
from penstock.shared.clients.protocol.produce import PartitionProduceResponse, ProduceResponse, produce_request
from penstock.shared.clients.protocol.requests import NO_UUID, ApiVersion, Uuid
from penstock.shared.common.errors import UnsupportedVersion
from penstock.shared.testing.fake_broker import Api, Message
from penstock.shared.testing.fake_broker.codec import MessageSchema
from penstock.shared.testing.fake_broker.protocol import SUPPORTED_APIS
from penstock.shared.testing.fake_broker.schemas import PRODUCE

NOT_LEADER = CODE_OF["NOT_LEADER_OR_FOLLOWER"]
NOT_ENOUGH_REPLICAS = CODE_OF["NOT_ENOUGH_REPLICAS"]

REQUESTS: dict[str, tuple[Any, ...]] = {
    "METADATA": ([(NO_UUID, "t", {})], False, False, False),
    "CREATE_TOPICS": ([("t", 1, -1, [], [("retention.ms", "-1")])], 1_000, False),
    "DELETE_TOPICS": (["t"], 1_000),
    "CREATE_PARTITIONS": ([("t", 3, None)], 1_000, False),
    "DESCRIBE_CONFIGS": ([(2, "t", None)], False),
    "INCREMENTAL_ALTER_CONFIGS": ([(2, "t", [("retention.ms", 0, "5"), ("cleanup.policy", 1, None)])], False),
    "LIST_OFFSETS": (-1, 0, [("t", [(0, -1, -2)])]),
    "DELETE_RECORDS": ([("t", [(0, 5)])], 1_000),
    "LIST_GROUPS": ([],),
    "DESCRIBE_GROUPS": (["g"], False),
    "DELETE_GROUPS": (["g"],),
    "OFFSET_DELETE": ("g", [("t", [0, 1])]),
    "OFFSET_COMMIT": ("g", 1, "m", None, [("t", [(0, 5, -1, "")])]),
    "OFFSET_FETCH": ("g", [("t", [0, 1], {})], True),
    "INIT_PRODUCER_ID": (None, 1_000, -1, -1),
    "ADD_PARTITIONS_TO_TXN": ("tx", 7, 0, [("t", [0])]),
    "ADD_OFFSETS_TO_TXN": ("tx", 7, 0, "g"),
    "END_TXN": ("tx", 7, 0, True),
    "TXN_OFFSET_COMMIT": ("tx", "g", 7, 0, 1, "m", None, [("t", [(0, 5, -1, "", {})], {})]),
    "DESCRIBE_LOG_DIRS": ([("t", [0, 1])],),
    "CONSUMER_GROUP_DESCRIBE": (["g"], False),
}


def group_requests(instance: str | None) -> dict[str, tuple[Any, ...]]:
    return {
        "JOIN_GROUP": ("g", 10_000, 60_000, "m", instance, "consumer", [("range", b"\x00\x01")]),
        "SYNC_GROUP": ("g", 3, "m", instance, [("m", b"\x00")]),
        "HEARTBEAT": ("g", 3, "m", instance),
        "LEAVE_GROUP": ("g", [("m", instance)]),
    }


APIS = {name: api for name, api in vars(requests).items() if isinstance(api, ApiVersion)}


def test_every_request_is_listed_here() -> None:
    """Every API has a round trip below."""
    assert REQUESTS.keys() | group_requests(None).keys() == APIS.keys()


@pytest.mark.parametrize("name", sorted(REQUESTS))
def test_round_trip(name: str) -> None:
    """An encoded message decodes to equal fields and is consumed to the last byte."""
    api = APIS[name]
    struct = api(*REQUESTS[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again == struct


@pytest.mark.parametrize("instance", [None, "i"])
@pytest.mark.parametrize("name", sorted(group_requests(None)))
def test_group_round_trip(name: str, instance: str | None) -> None:
    """A request of a group's member decodes to the same fields, with and without an instance id."""
    api = APIS[name]
    struct = api(*group_requests(instance)[name]).prepare({api.key: (0, 99)})
    data = BytesIO(struct.encode())
    again = type(struct).decode(data)
    assert data.read() == b""
    assert again.encode() == struct.encode()
    assert (b"\x00\x01i" in struct.encode()) == (instance == "i")


def test_a_broker_that_is_too_old() -> None:
    """A version that the broker does not support is rejected with the versions that it supports, if there are any."""
    request = requests.END_TXN("tx", 7, 0, True)
    with pytest.raises(UnsupportedVersion, match=r"EndTxn v2.*v0.*v1"):
        request.prepare({26: (0, 1)})
    with pytest.raises(UnsupportedVersion, match="EndTxn v2: the broker does not support this API"):
        request.prepare({})


def test_uuid() -> None:
    """A UUID is encoded as its sixteen bytes."""
    value = uuid.uuid4()
    assert Uuid.decode(BytesIO(Uuid.encode(value))) == value


def test_rows_have_named_fields() -> None:
    """A struct in an array decodes to a named tuple."""
    request = requests.LEAVE_GROUP("g", [("m", "i")]).prepare({13: (0, 99)})
    (member,) = type(request).decode(BytesIO(request.encode())).members
    assert (member.member_id, member.group_instance_id) == ("m", "i")


FETCH_VERSION = 12


def frame(body: bytes) -> bytearray:
    return bytearray(b"\0\0\0\x07" + b"\0" + body)


def both_ways(body: bytes) -> FetchResponse:
    """Decodes the response from a stream (after its header) and from a frame, and requires equal results."""
    stream = BytesIO(b"\0\0\0\x07" + b"\0" + body)
    stream.seek(5)
    one, other = FetchResponse.decode(stream), FetchResponse.decode_frame(frame(body))
    assert one.partitions == other.partitions
    return other


def test_a_fetch_request() -> None:
    """Every field is encoded at the position that Kafka's protocol defines. No fetch session is opened."""
    topics = [("a", [(0, 7, -1, 100), (1, 1 << 40, 5, 200)]), ("ü", [(2, 0, -1, 300)])]
    made = FetchRequest(500, 2, 1 << 20, True, topics).prepare({1: (4, 17)})
    assert (made.API_KEY, made.API_VERSION) == (1, FETCH_VERSION)
    body, end = SUPPORTED_APIS[Api.FETCH].request.decode(made.encode(), FETCH_VERSION, 0)
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
def test_a_broker_without_the_version_of_fetch(versions: dict[int, tuple[int, int]]) -> None:
    """The error lists the versions that the broker supports."""
    with pytest.raises(UnsupportedVersion, match="Fetch v12"):
        FetchRequest(500, 1, 1, True, []).prepare(versions)


def test_a_fetch_response() -> None:
    """Records, end offsets, aborted transactions, errors and a truncation are decoded from both kinds of input. A new
    leader is ignored: brokers name it only from version 16 on."""
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
        Message(partition=1, error_code=NOT_LEADER, current_leader=Message(leader_id=3, leader_epoch=4), records=None),
        Message(partition=2, error_code=0, high_watermark=0, aborted_transactions=None, records=b"small"),
        Message(partition=3, error_code=0, diverging_epoch=Message(epoch=2, end_offset=44), records=None),
    ]
    topics = [Message(name="ü", partitions=rows)]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(
        Message(throttle_time_ms=11, error_code=0, session_id=0, topics=topics), FETCH_VERSION
    )
    response = both_ways(body)
    assert (response.error_code, list(response.partitions)) == (0, [("ü", 0), ("ü", 1), ("ü", 2), ("ü", 3)])
    assert response.partitions["ü", 0] == FetchedPartition(0, 9, 8, ((5, 2), (6, 3)), large)
    assert response.partitions["ü", 1] == FetchedPartition(NOT_LEADER, -1, -1, (), b"")
    assert response.partitions["ü", 2].records == b"small"
    assert [response.diverged_at for response in response.partitions.values()] == [None, None, None, 44]
    assert repr(response) == "<FetchResponse 4 partitions, 1005 bytes, error 0>"


def test_small_record_sets_are_copied_out_of_a_response() -> None:
    """Records that fill most of a response are a view of it. A small part is copied, so that it does not keep the
    response in memory."""
    rows = [Message(partition=i, error_code=0, records=b"r" * size) for i, size in enumerate((1_000, 10))]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(
        Message(topics=[Message(name="t", partitions=rows)]), FETCH_VERSION
    )
    partitions = FetchResponse.decode_frame(frame(body)).partitions
    assert [type(partitions["t", i].records) for i in (0, 1)] == [memoryview, bytes]


def test_a_fetch_response_that_ends_early() -> None:
    """A response that is shorter than its length fields require is an error."""
    rows = [Message(partition=0, error_code=0, records=b"r" * 100)]
    body = SUPPORTED_APIS[Api.FETCH].response.encode(
        Message(topics=[Message(name="t", partitions=rows)]), FETCH_VERSION
    )
    for end in range(0, len(body) - 1, 7):
        with pytest.raises((ValueError, IndexError, struct.error)):
            FetchResponse.decode_frame(frame(body[:end]))


PRODUCE_REQUEST, PRODUCE_RESPONSE = (MessageSchema(text, flexible=9) for text in PRODUCE)

produced_topics = st.lists(
    st.tuples(
        st.text(max_size=200),
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.binary(max_size=300)), max_size=4),
    ),
    max_size=4,
)


@given(st.none() | st.text(max_size=200), st.sampled_from((-1, 0, 1)), st.integers(0, 2**31 - 1), produced_topics)
def test_a_produce_request_round_trips(
    transactional_id: str | None, acks: int, timeout_ms: int, sent: list[tuple[str, list[tuple[int, bytes]]]]
) -> None:
    """Transactional id, acks, timeout and every batch are decoded to the last byte, in both versions."""
    for version in (9, 10):
        request = produce_request(transactional_id, acks, timeout_ms, [(name, list(rows)) for name, rows in sent])
        made = request.prepare({0: (3, version)})
        assert version == made.API_VERSION
        data = made.encode()
        body, end = PRODUCE_REQUEST.decode(data, version)
        assert end == len(data)
        assert (body.transactional_id, body.acks, body.timeout_ms) == (transactional_id, acks, timeout_ms)
        got = [(topic.name, [(row.partition, row.records) for row in topic.partitions]) for topic in body.topics]
        assert got == sent


def test_a_produce_request_by_hand() -> None:
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
    body, _ = PRODUCE_REQUEST.decode(
        produce_request(None, 1, 1, [("t", [(0, data)])]).prepare({0: (0, 10)}).encode(), 10
    )
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
    with pytest.raises(UnsupportedVersion, match="Produce v9 to v10: the broker"):
        produce_request(None, 1, 1, []).prepare(spoken)


def test_headers_of_a_request_and_its_response() -> None:
    """The flexible request header has correlation id and client id. The response header is consumed completely."""
    made = produce_request(None, 1, 1, []).prepare({0: (0, 9)})
    header = made.build_request_header(correlation_id=7, client_id="me")
    assert header.encode() == bytes.fromhex("0000 0009 00000007 0002 6d65 00")
    rest = BytesIO(bytes.fromhex("00000007 00 ff"))
    assert made.parse_response_header(rest).correlation_id == 7
    assert rest.read() == b"\xff"


def produce_response(body: Message, version: int) -> ProduceResponse:
    return ProduceResponse.decode(BytesIO(PRODUCE_RESPONSE.encode(body, version)))


def test_a_produce_response() -> None:
    """Each partition's result has its offset and timestamp. The response has the throttle time."""
    rows = [
        Message(partition=3, error_code=0, base_offset=70, log_append_time_ms=900, log_start_offset=5),
        Message(partition=4, error_code=NOT_ENOUGH_REPLICAS),
    ]
    body = Message(topics=[Message(name="a", partitions=rows), Message(name="b", partitions=[])], throttle_time_ms=250)
    for version in (9, 10):
        response = produce_response(body, version)
        assert response.throttle_ms == 250
        assert response.partitions == {
            ("a", 3): PartitionProduceResponse(0, 70, 900),
            ("a", 4): PartitionProduceResponse(NOT_ENOUGH_REPLICAS),
        }
        assert repr(response).startswith("<ProduceResponse {('a', 3)")


def test_the_new_leader() -> None:
    """The current leader is decoded from the tagged fields of an error. There is none without an error, in version 9,
    or if it is -1."""

    def leader(version: int, code: int, node: int) -> int | None:
        row = Message(partition=0, error_code=code, current_leader=Message(leader_id=node, leader_epoch=8))
        endpoints = [Message(node_id=node, host="h", port=9, rack=None)]
        body = Message(topics=[Message(name="a", partitions=[row])], node_endpoints=endpoints)
        return produce_response(body, version).partitions["a", 0].leader

    assert leader(10, NOT_LEADER, 2) == 2
    assert leader(10, NOT_LEADER, 0) == 0
    assert leader(10, NOT_LEADER, -1) is None
    assert leader(10, NO_ERROR, 2) is None
    assert leader(9, NOT_LEADER, 2) is None


def test_addresses_of_new_leaders() -> None:
    """The response lists the brokers' addresses, with or without a rack. Version 9 has none."""
    row = Message(partition=0, error_code=NOT_LEADER, current_leader=Message(leader_id=3, leader_epoch=8))
    endpoints = [Message(node_id=3, host="h", port=9, rack=None), Message(node_id=4, host="i", port=10, rack="r")]
    body = Message(topics=[Message(name="a", partitions=[row])], node_endpoints=endpoints, throttle_time_ms=7)
    assert list(produce_response(body, 10).endpoints) == [(3, "h", 9), (4, "i", 10)]
    assert (produce_response(body, 10).throttle_ms, produce_response(body, 9).throttle_ms) == (7, 7)
    assert list(produce_response(body, 9).endpoints) == []


def test_error_messages_of_the_batch_and_its_records() -> None:
    """The batch's error message and the messages of single records are joined in the detail."""
    errors = [
        Message(batch_index=1, batch_index_error_message="no key"),
        Message(batch_index=4, batch_index_error_message=None),
    ]
    for message, wanted in ((None, ""), ("refused", "refused; ")):
        row = Message(partition=0, error_code=CODE_OF["INVALID_RECORD"], record_errors=errors, error_message=message)
        response = produce_response(Message(topics=[Message(name="a", partitions=[row])]), 9).partitions["a", 0]
        assert response.detail == wanted + "record 1 of the batch: no key; record 4 of the batch"
        assert response.invalid == (1, 4)


def test_a_produce_response_by_hand() -> None:
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
    assert response.partitions == {("a", 3): PartitionProduceResponse(NOT_LEADER, leader=2)}
    assert response.throttle_ms == 10


def test_a_produce_response_that_ends_early() -> None:
    """A truncated response is an error, not a shorter response."""
    row = Message(partition=0, error_code=0, base_offset=1, error_message="ok")
    data = PRODUCE_RESPONSE.encode(Message(topics=[Message(name="abc", partitions=[row])]), 9)
    for end in range(len(data) - 1):
        with pytest.raises((IndexError, struct.error)):
            ProduceResponse.decode(BytesIO(data[:end]))


TAGGED = MessageSchema(
    """
number int8
leader {} 0+ tag 0
  pair int64
words ?string 0+ tag 5
""",
    flexible=0,
)
"""The leader's struct as one number, since its own tags would come after it: node and epoch, 32 bits each."""


@given(st.integers(0, 2**40))
def test_varints_round_trip(value: int) -> None:
    """A varint is decoded to the value that was encoded, and exactly its bytes are consumed."""
    reader = FlexibleReader(memoryview(encode_unsigned_varint(value) + b"\xff"))
    assert reader.unsigned_varint() == value
    assert reader.read_struct(struct.Struct("B")) == (0xFF,)


@pytest.mark.parametrize(
    ("value", "data"), [(0, "00"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**32, "8080808010")]
)
def test_varints_by_hand(value: int, data: str) -> None:
    """A varint has seven bits a byte, the lowest first. The eighth bit marks that more bytes follow."""
    assert encode_unsigned_varint(value) == bytes.fromhex(data)


@given(st.none() | st.text(max_size=300))
def test_strings_round_trip(value: str | None) -> None:
    """None, the empty string and a string with a two-byte length are distinct."""
    reader = FlexibleReader(memoryview(encode_compact_string(value)))
    assert reader.compact_string() == value
    with pytest.raises(IndexError):
        reader.unsigned_varint()


def test_data_is_not_copied() -> None:
    """Decoded bytes are a view of the response. Null and empty bytes both decode to empty."""
    response = bytearray(b"\x03ab\x01\x00")
    reader = FlexibleReader(memoryview(response))
    data = reader.compact_bytes()
    response[1:3] = b"cd"
    assert bytes(data) == b"cd"
    assert (bytes(reader.compact_bytes()), bytes(reader.compact_bytes())) == (b"", b"")
    assert reader.size == len(response)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x05abc", b"\x01\x00\x09a"])
def test_data_that_ends_too_early(data: bytes) -> None:
    """A length that points past the end is an error. Shorter data is never returned."""
    reader = FlexibleReader(memoryview(data))
    with pytest.raises(IndexError):
        reader.tagged_fields() if data[:1] == b"\x01" else reader.compact_bytes()


def test_a_shape_that_ends_too_early() -> None:
    """A struct of fixed size that is cut off is an error."""
    with pytest.raises(struct.error):
        FlexibleReader(memoryview(b"\x00\x01\x02")).read_struct(struct.Struct(">i"))


@given(st.integers(-1, 2**31 - 1), st.integers(-1, 2**31 - 1), st.none() | st.text(max_size=200))
def test_the_leader_among_other_tags(node: int, epoch: int, words: str | None) -> None:
    """The leader is found at any position among the tagged fields. A negative node id means no leader."""
    pair = (node << 32) + (epoch & 0xFFFF_FFFF)
    message = Message(number=1, leader=Message(pair=pair), words=words)
    reader = FlexibleReader(memoryview(TAGGED.encode(message, 0)), 1)
    tags = reader.tagged_fields()
    assert leader_in(tags, 0) == (node if node >= 0 else None)
    assert leader_in(tags, 7) is None


def test_no_tags() -> None:
    """A struct without tagged fields ends with a zero byte."""
    assert FlexibleReader(memoryview(NO_TAGS)).tagged_fields() == {}
