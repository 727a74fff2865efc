"""Fetch version 12, encoded and decoded by hand, since every record arrives in a fetch response.

The records of a partition stay in the received buffer, unless they are only a small part of it (SHARED_BY_MAX). Kafka
2.8 and later support version 12. No fetch session is opened (KIP-227), so each request names all partitions to fetch.

>>> request = FetchRequest(500, 1, 1 << 20, True, [("clicks", [(0, 7, NO_EPOCH, 65_536)])])
>>> request.prepare({1: (4, 17)})
<Fetch v12, 1 topics>
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import NamedTuple

from penstock.shared.clients.protocol.flexible_types import (
    NO_TAGS,
    FlexibleReader,
    FlexibleStruct,
    encode_compact_string,
    encode_unsigned_varint,
)
from penstock.shared.clients.protocol.requests import CONSUMER, supported_version

API_KEY = 1
VERSION = 12
CORRELATION_BYTES = 4
DIVERGING_TAG = 0
NO_SESSION = 0
FULL_FETCH = -1
"""The session epoch of a request outside of a fetch session (KIP-227)."""
SHARED_BY_MAX = 4
"""A partition's records are copied out of the response if they make up less than 1/SHARED_BY_MAX of it. So buffered
records keep at most this many times their own size in memory."""
NO_OFFSET = -1
NO_EPOCH = -1

_int32 = struct.Struct(">i")
_request = struct.Struct(">iiiibii")
"""Replica id, max wait, min bytes, max bytes, isolation level, session id, session epoch."""
_wanted = struct.Struct(">iiqiqi")
"""Partition, current leader epoch, fetch offset, last fetched epoch, log start offset, partition max bytes."""
_head = struct.Struct(">ihi")
"""Throttle time, error code, session id."""
_partition = struct.Struct(">ihqqq")
"""Partition, error code, high watermark, last stable offset, log start offset."""
_aborted = struct.Struct(">qq")
_diverging = struct.Struct(">iq")
"""The largest epoch and its end offset such that subsequent records are known to diverge (KIP-595)."""

Wanted = list[tuple[str, list[tuple[int, int, int, int]]]]
"""`[(topic, [(partition, offset, epoch of the batch before it, max bytes)])]`. With an epoch (else NO_EPOCH) the broker
checks whether its log still contains the batch before the offset."""


class FetchedPartition(NamedTuple):
    """A broker's response for one partition: Kafka's error code, the log's offsets, and the bytes of batches."""

    error_code: int
    high_watermark: int = NO_OFFSET
    last_stable_offset: int = NO_OFFSET
    aborted: tuple[tuple[int, int], ...] = ()
    """`(producer id, first offset)` of the aborted transactions within the records."""
    records: bytes | memoryview = b""
    diverged_at: int | None = None
    """The offset from which the broker's log differs from the log that was read; None if the broker reports none."""


class FetchResponse:
    """The partitions by (topic, partition), and the error code of the whole response."""

    __slots__ = ("error_code", "partitions")

    def __init__(self, partitions: dict[tuple[str, int], FetchedPartition], error_code: int = 0) -> None:
        self.partitions = partitions
        self.error_code = error_code

    def __repr__(self) -> str:
        size = sum(len(response.records) for response in self.partitions.values())
        return f"<FetchResponse {len(self.partitions)} partitions, {size} bytes, error {self.error_code}>"

    @classmethod
    def decode(cls, data: BytesIO) -> FetchResponse:
        """Decode the bytes after the header."""
        return cls._read(FlexibleReader(memoryview(data.getvalue()), data.tell()))

    @classmethod
    def decode_frame(cls, frame: bytearray) -> FetchResponse:
        """Decode a whole frame. The response keeps the frame, which must not be changed afterwards."""
        reader = FlexibleReader(memoryview(frame), CORRELATION_BYTES)
        reader.tagged_fields()
        return cls._read(reader)

    @classmethod
    def _read(cls, reader: FlexibleReader) -> FetchResponse:
        _, error_code, _ = reader.read_struct(_head)
        partitions: dict[tuple[str, int], FetchedPartition] = {}
        for _ in range(reader.unsigned_varint() - 1):
            topic = reader.compact_string() or ""
            for _ in range(reader.unsigned_varint() - 1):
                partition, response = _read_partition(reader)
                partitions[topic, partition] = response
            reader.tagged_fields()
        return cls(partitions, error_code)


def _read_partition(reader: FlexibleReader) -> tuple[int, FetchedPartition]:
    partition, code, high_watermark, stable, _ = reader.read_struct(_partition)
    aborted = []
    for _ in range(reader.unsigned_varint() - 1):
        aborted.append(reader.read_struct(_aborted))
        reader.tagged_fields()
    # The preferred read replica (KIP-392), which only a client with a rack gets.
    reader.read_struct(_int32)
    records: bytes | memoryview = reader.compact_bytes()
    # Records stay buffered until they are polled. A few small ones must not keep a large response in memory.
    if len(records) * SHARED_BY_MAX < reader.size:
        records = bytes(records)
    diverged_at = None
    if (tagged := reader.tagged_fields().get(DIVERGING_TAG)) is not None:
        # The broker's log does not contain the batch before the fetch offset any more (KIP-595).
        end_offset = _diverging.unpack_from(tagged)[1]
        diverged_at = end_offset if end_offset >= 0 else None
    return partition, FetchedPartition(code, high_watermark, stable, tuple(aborted), records, diverged_at)


class _FetchStruct(FlexibleStruct):
    """The request in the form of aiokafka's connection."""

    API_KEY = API_KEY
    API_VERSION = VERSION
    RESPONSE_TYPE = FetchResponse

    __slots__ = ("_body", "_topics")

    def __init__(self, body: bytes, topics: int) -> None:
        self._body = body
        self._topics = topics

    def encode(self) -> bytes:
        return self._body

    def __repr__(self) -> str:
        return f"<Fetch v{VERSION}, {self._topics} topics>"


class FetchRequest:
    """A request for the records of partitions from given offsets on.

    The broker answers when it has `min_bytes`, or after `max_wait_ms`. It sends at most `max_bytes`, but at least one
    batch if there is any, and serves partitions in the order of `topics`. `prepare` raises UnsupportedVersion if the
    broker lacks version 12.
    """

    __slots__ = ("_max_bytes", "_max_wait_ms", "_min_bytes", "_read_committed", "_topics")

    def __init__(self, max_wait_ms: int, min_bytes: int, max_bytes: int, read_committed: bool, topics: Wanted) -> None:
        self._max_wait_ms = max_wait_ms
        self._min_bytes = min_bytes
        self._max_bytes = max_bytes
        self._read_committed = read_committed
        self._topics = topics

    def prepare(self, versions: dict[int, tuple[int, int]]) -> _FetchStruct:
        supported_version(versions, "Fetch", API_KEY, VERSION, VERSION)
        level = int(self._read_committed)
        parts = [
            _request.pack(CONSUMER, self._max_wait_ms, self._min_bytes, self._max_bytes, level, NO_SESSION, FULL_FETCH),
            encode_unsigned_varint(len(self._topics) + 1),
        ]
        for topic, partitions in self._topics:
            parts += (encode_compact_string(topic), encode_unsigned_varint(len(partitions) + 1))
            for partition, offset, epoch, max_bytes in partitions:
                # Without the current leader epoch the broker does not fence this client (KIP-320). The epoch of the
                # last fetched batch lets it detect a truncated log (KIP-595).
                parts += (_wanted.pack(partition, NO_EPOCH, offset, epoch, NO_OFFSET, max_bytes), NO_TAGS)
            parts.append(NO_TAGS)
        # No forgotten topics, no rack.
        parts.append(b"\x01\x01" + NO_TAGS)
        return _FetchStruct(b"".join(parts), len(self._topics))

    def __repr__(self) -> str:
        return f"Fetch v{VERSION}"
