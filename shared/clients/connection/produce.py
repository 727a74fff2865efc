"""Produce, versions 9 and 10, written and read by hand: this is the request whose cost a record feels.

Version 10 answers a refused batch with the partition's new leader (KIP-951); versions 8 and later say which record of
a batch was refused. Kafka 2.8 and later speak version 9.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka.protocol.api import RequestHeader_v2, ResponseHeader_v1
from aiokafka.protocol.produce import ProduceRequest

from shared.common.errors import UnsupportedVersion

API_KEY = 0
VERSION_MIN, VERSION_MAX = 9, 10
LEADER_TAG = ENDPOINTS_TAG = 0

_int16, _int32 = struct.Struct(">h"), struct.Struct(">i")
_acks_timeout = struct.Struct(">hi")
_partition = struct.Struct(">ihqqq")
_leader = struct.Struct(">ii")

Topics = list[tuple[str, list[tuple[int, bytes | bytearray]]]]
"""`[(topic, [(partition, record batch)])]`."""


class ProduceAnswer(NamedTuple):
    """What a broker says of one batch: Kafka's error code, and where the batch is in the log."""

    error_code: int
    base_offset: int = -1
    log_append_time: int = -1
    log_start_offset: int = -1
    detail: str = ""
    leader: int | None = None
    """The partition's new leader, where the broker asked is not the leader and knows who is."""


class ProduceResponse:
    """The answers by (topic, partition), and for how many ms the broker wants no more requests."""

    __slots__ = ("answers", "throttle_ms")

    def __init__(self, answers: dict[tuple[str, int], ProduceAnswer], throttle_ms: int) -> None:
        self.answers, self.throttle_ms = answers, throttle_ms

    def __repr__(self) -> str:
        return f"<ProduceResponse {self.answers}>"

    @classmethod
    def decode(cls, data: BytesIO) -> ProduceResponse:
        """From the bytes after the header."""
        reader = _Reader(data.read())
        answers: dict[tuple[str, int], ProduceAnswer] = {}
        for _ in range(reader.uvarint() - 1):
            topic = reader.text()
            for _ in range(reader.uvarint() - 1):
                partition, answer = _read_partition(reader)
                answers[topic or "", partition] = answer
            reader.tags()
        return cls(answers, reader.take(_int32)[0])


def _read_partition(reader: _Reader) -> tuple[int, ProduceAnswer]:
    partition, code, offset, append_time, log_start = reader.take(_partition)
    refused = []
    for _ in range(reader.uvarint() - 1):
        (index,) = reader.take(_int32)
        why = reader.text()
        refused.append(f"record {index} of the batch" + (f": {why}" if why else ""))
        reader.tags()
    message = reader.text()
    leader = None
    if (tagged := reader.tags().get(LEADER_TAG)) is not None and code:
        node, _ = _leader.unpack_from(tagged)
        leader = node if node >= 0 else None
    detail = "; ".join([*([message] if message else []), *refused])
    return partition, ProduceAnswer(code, offset, append_time, log_start, detail, leader)


class _Reader:
    """Kafka's flexible encoding, from the front."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, shape: struct.Struct) -> tuple[Any, ...]:
        values = shape.unpack_from(self._data, self._at)
        self._at += shape.size
        return values

    def uvarint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def text(self) -> str | None:
        size = self.uvarint() - 1
        if size < 0:
            return None
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def tags(self) -> dict[int, bytes]:
        found = {}
        for _ in range(self.uvarint()):
            tag, size = self.uvarint(), self.uvarint()
            found[tag] = self._data[self._at : self._at + size]
            self._at += size
        return found


class ProduceStruct:
    """A request of one version, as aiokafka's connection wants it."""

    API_KEY = API_KEY
    RESPONSE_TYPE = ProduceResponse

    __slots__ = ("API_VERSION", "_parts")

    def __init__(self, version: int, parts: list[bytes | bytearray]) -> None:
        self.API_VERSION = version
        self._parts = parts

    def build_request_header(self, correlation_id: int, client_id: str) -> Any:
        return RequestHeader_v2(self, correlation_id=correlation_id, client_id=client_id)

    def parse_response_header(self, data: Any) -> Any:
        return ResponseHeader_v1.decode(data)

    def encode(self) -> bytes:
        return b"".join(self._parts)

    def __repr__(self) -> str:
        return f"<Produce v{self.API_VERSION}, {sum(map(len, self._parts))} bytes>"


class Produce(ProduceRequest):  # type: ignore[misc]
    """The request in the newest version the broker speaks; UnsupportedVersion where that is below 9.

    It derives from aiokafka's, whose client expects no response to a ProduceRequest with acks=0.
    """

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        low, high = versions.get(API_KEY, (0, -1))
        version = min(high, VERSION_MAX)
        if version < max(low, VERSION_MIN):
            raise UnsupportedVersion(
                f"Produce: v{VERSION_MIN} to v{VERSION_MAX} wanted, the broker has v{low} to v{high}"
            )
        transactional_id: str | None = self._transactional_id
        parts: list[bytes | bytearray] = [
            _text(transactional_id),
            _acks_timeout.pack(self._required_acks, self._timeout),
            _uvarint(len(self._topics) + 1),
        ]
        for topic, partitions in self._topics:
            parts += (_text(topic), _uvarint(len(partitions) + 1))
            for partition, data in partitions:
                parts += (_int32.pack(partition), _uvarint(len(data) + 1), data, NO_TAGS)
            parts.append(NO_TAGS)
        parts.append(NO_TAGS)
        return ProduceStruct(version, parts)


NO_TAGS = b"\x00"


def _uvarint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _text(value: str | None) -> bytes:
    if value is None:
        return b"\x00"
    data = value.encode()
    return _uvarint(len(data) + 1) + data
