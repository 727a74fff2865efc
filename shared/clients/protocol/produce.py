"""Produce, versions 9 and 10, encoded and decoded by hand for speed: every record goes through it.

Kafka 2.8 and later support version 9, whose response names the invalid records of a rejected batch (KIP-467). In
version 10 a broker that no longer leads the partition responds with the new leader and its address (KIP-951).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

from aiokafka.protocol.produce import ProduceRequest

from penstock.shared.clients.protocol.flexible_types import (
    NO_TAGS,
    Endpoint,
    FlexibleReader,
    FlexibleStruct,
    encode_compact_string,
    encode_unsigned_varint,
    endpoints_in,
    leader_in,
)
from penstock.shared.clients.protocol.requests import supported_version

API_KEY = 0
VERSION_MIN = 9
VERSION_MAX = 10
"""From version 12 on the broker adds partitions to the transaction (KIP-890). This client adds them itself."""
LEADER_TAG = 0
ENDPOINTS_TAG = 0

_int32 = struct.Struct(">i")
_acks_timeout = struct.Struct(">hi")
_partition = struct.Struct(">ihqqq")
"""Partition, error code, base offset, log append time, log start offset."""

Topics = list[tuple[str, list[tuple[int, bytes | bytearray | memoryview]]]]
"""`[(topic, [(partition, record batch)])]`."""


class PartitionProduceResponse(NamedTuple):
    """A broker's response for one batch: Kafka's error code, and the batch's offset in the log."""

    error_code: int
    base_offset: int = -1
    log_append_time: int = -1
    detail: str = ""
    leader: int | None = None
    """The partition's new leader, if the queried broker is not the leader and knows it (KIP-951)."""
    invalid: tuple[int, ...] = ()
    """The indices in the batch of all invalid records, if the batch was rejected because of them (KIP-467)."""


class ProduceResponse:
    """The responses of partitions by (topic, partition), the throttle time in ms, and the addresses of the leaders that
    they name."""

    __slots__ = ("endpoints", "partitions", "throttle_ms")

    def __init__(
        self,
        partitions: dict[tuple[str, int], PartitionProduceResponse],
        throttle_ms: int,
        endpoints: Sequence[Endpoint] = (),
    ) -> None:
        self.partitions = partitions
        self.throttle_ms = throttle_ms
        self.endpoints = endpoints

    def __repr__(self) -> str:
        return f"<ProduceResponse {self.partitions}>"

    @classmethod
    def decode(cls, data: BytesIO) -> ProduceResponse:
        """Decode the bytes after the header."""
        reader = FlexibleReader(memoryview(data.getvalue()), data.tell())
        partitions: dict[tuple[str, int], PartitionProduceResponse] = {}
        for _ in range(reader.unsigned_varint() - 1):
            topic = reader.compact_string()
            for _ in range(reader.unsigned_varint() - 1):
                partition, response = _read_partition(reader)
                partitions[topic or "", partition] = response
            reader.tagged_fields()
        (throttle_ms,) = reader.read_struct(_int32)
        return cls(partitions, throttle_ms, endpoints_in(reader.tagged_fields(), ENDPOINTS_TAG))


def _read_partition(reader: FlexibleReader) -> tuple[int, PartitionProduceResponse]:
    partition, code, offset, append_time, _ = reader.read_struct(_partition)
    rejected = []
    invalid = []
    for _ in range(reader.unsigned_varint() - 1):
        (index,) = reader.read_struct(_int32)
        why = reader.compact_string()
        invalid.append(index)
        rejected.append(f"record {index} of the batch" + (f": {why}" if why else ""))
        reader.tagged_fields()
    message = reader.compact_string()
    tags = reader.tagged_fields()
    # The new leader comes only with an error (KIP-951).
    leader = leader_in(tags, LEADER_TAG) if code else None
    # The message is about the batch, the others about single records of it (KIP-467).
    detail = "; ".join([*([message] if message else []), *rejected])
    return partition, PartitionProduceResponse(code, offset, append_time, detail, leader, tuple(invalid))


class ProduceStruct(FlexibleStruct):
    """A request of one version in the form of aiokafka's connection."""

    API_KEY = API_KEY
    RESPONSE_TYPE = ProduceResponse

    __slots__ = ("API_VERSION", "_parts")

    def __init__(self, version: int, parts: list[bytes | bytearray | memoryview]) -> None:
        self.API_VERSION = version
        self._parts = parts

    def encode(self) -> bytes:
        return b"".join(self._parts)

    def __repr__(self) -> str:
        return f"<Produce v{self.API_VERSION}, {sum(map(len, self._parts))} bytes>"


class Produce(ProduceRequest):  # type: ignore[misc]
    """A Produce request, which `prepare` encodes.

    It is a subclass of aiokafka's ProduceRequest, because aiokafka's client then expects no response under acks=0.
    """

    def prepare(self, versions: dict[int, tuple[int, int]]) -> Any:
        """Encode the request in the newest version that the broker and this client support. Raises UnsupportedVersion
        if there is none."""
        version = supported_version(versions, "Produce", API_KEY, VERSION_MIN, VERSION_MAX)
        transactional_id: str | None = self._transactional_id
        parts: list[bytes | bytearray | memoryview] = [
            encode_compact_string(transactional_id),
            _acks_timeout.pack(self._required_acks, self._timeout),
            encode_unsigned_varint(len(self._topics) + 1),
        ]
        for topic, partitions in self._topics:
            parts += (encode_compact_string(topic), encode_unsigned_varint(len(partitions) + 1))
            for partition, data in partitions:
                parts += (_int32.pack(partition), encode_unsigned_varint(len(data) + 1), data, NO_TAGS)
            parts.append(NO_TAGS)
        parts.append(NO_TAGS)
        return ProduceStruct(version, parts)


def produce_request(transactional_id: str | None, acks: int, timeout_ms: int, topics: Topics) -> Any:
    """Return a Produce request; its response is a `ProduceResponse`."""
    return Produce(transactional_id, acks, timeout_ms, topics)
