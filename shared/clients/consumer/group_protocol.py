"""The messages between members of a group: a subscription to the leader, and an assignment back.

The coordinator forwards these bytes unread. They are Kafka's ConsumerProtocolSubscription and
ConsumerProtocolAssignment, versions 0 to 3, encoded as the Java consumer does, so that members of both kinds can share
a group. A version only adds fields at the end. A newer version is read as the newest known one.

    Subscription => version topics user_data owned_partitions(1+) generation_id(2+) rack_id(3+)
    Assignment   => version assigned_partitions user_data

The sticky assignors add user data to the subscription. For `sticky` it is the member's last assignment and its
generation (the first schema lacks the generation). For `cooperative-sticky` it is the generation alone, since the
subscription itself has the owned partitions.

>>> data = encode_subscription(Subscription(("clicks",), owned=(TopicPartition("clicks", 2),), generation=7))
>>> decode_subscription(data).owned
(TopicPartition(topic='clicks', partition=2),)
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.shared.clients.group.steps import NO_GENERATION
from penstock.shared.common.errors import SerializationError
from penstock.shared.common.records import TopicPartition

PROTOCOL_TYPE = "consumer"
NEWEST_VERSION = 3
OWNED_SINCE, GENERATION_SINCE, RACK_SINCE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's message to the leader. `generation` is the generation of `owned`, -1 if there is none."""

    topics: tuple[str, ...]
    user_data: bytes | None = None
    owned: tuple[TopicPartition, ...] = ()
    generation: int = NO_GENERATION
    rack_id: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The leader's message to a member."""

    partitions: tuple[TopicPartition, ...]
    user_data: bytes | None = None


def encode_subscription(subscription: Subscription, version: int = NEWEST_VERSION) -> bytes:
    """Encode a subscription; topics and partitions are sorted as in Java."""
    parts = [
        struct.pack(">h", version),
        _encode_array(_encode_string(topic) for topic in sorted(subscription.topics)),
        _encode_bytes(subscription.user_data),
    ]
    if version >= OWNED_SINCE:
        parts.append(_encode_partitions(sorted(subscription.owned)))
    if version >= GENERATION_SINCE:
        parts.append(struct.pack(">i", subscription.generation))
    if version >= RACK_SINCE:
        parts.append(_encode_string(subscription.rack_id))
    return b"".join(parts)


def decode_subscription(data: bytes) -> Subscription:
    """Decode a subscription. Raises SerializationError if the bytes are invalid."""
    read = _Reader(data, "subscription")
    version = read.version()
    topics = tuple(read.text() or "" for _ in range(read.count()))
    user_data = read.blob()
    owned = read.partitions() if version >= OWNED_SINCE else ()
    generation = read.int32() if version >= GENERATION_SINCE else NO_GENERATION
    rack_id = read.text() if version >= RACK_SINCE else None
    return Subscription(topics, user_data, owned, generation, rack_id)


def encode_assignment(assignment: Assignment, version: int = NEWEST_VERSION) -> bytes:
    """Encode an assignment; all versions have the same fields."""
    return struct.pack(">h", version) + _encode_partitions(assignment.partitions) + _encode_bytes(assignment.user_data)


def decode_assignment(data: bytes) -> Assignment:
    """Decode an assignment; no bytes are an empty one. Raises SerializationError if the bytes are invalid."""
    if not data:
        return Assignment(())
    read = _Reader(data, "assignment")
    read.version()
    return Assignment(read.partitions(), read.blob())


def encode_sticky(partitions: Iterable[TopicPartition], generation: int) -> bytes:
    """Encode the `sticky` assignor's user data: the member's last assignment and its generation."""
    return _encode_partitions(partitions) + struct.pack(">i", generation)


def decode_sticky(data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    """Decode the last assignment and its generation; () and -1 if there is none."""
    if not data:
        return (), NO_GENERATION
    read = _Reader(data, "sticky user data")
    return read.partitions(), NO_GENERATION if read.at_end else read.int32()


def encode_generation(generation: int) -> bytes:
    """Encode the `cooperative-sticky` assignor's user data."""
    return struct.pack(">i", generation)


def decode_generation(data: bytes | None) -> int:
    """Decode the generation; -1 if there is none."""
    return _Reader(data, "cooperative-sticky user data").int32() if data else NO_GENERATION


def _encode_array(items: Iterable[bytes]) -> bytes:
    encoded = list(items)
    return struct.pack(">i", len(encoded)) + b"".join(encoded)


def _encode_string(value: str | None) -> bytes:
    if value is None:
        return struct.pack(">h", -1)
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def _encode_bytes(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def _encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return _encode_array(
        _encode_string(topic) + _encode_array(struct.pack(">i", p) for p in found) for topic, found in topics.items()
    )


class _Reader:
    """Reads fields from the front. Raises SerializationError with the position if a field does not fit."""

    def __init__(self, data: bytes, description: str) -> None:
        self._data = data
        self._at = 0
        self._description = description

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)

    def version(self) -> int:
        version = self._read_number(">h", 2)
        if version < 0:
            raise SerializationError(f"{self._description}: version {version}")
        return version

    def int32(self) -> int:
        return self._read_number(">i", 4)

    def count(self) -> int:
        count = self.int32()
        if not 0 <= count <= len(self._data):
            raise SerializationError(f"{self._description}: an array of {count} at byte {self._at - 4}")
        return count

    def text(self) -> str | None:
        length = self._read_number(">h", 2)
        if length < 0:
            return None
        try:
            return self._read_bytes(length).decode()
        except UnicodeDecodeError as e:
            raise SerializationError(f"{self._description}: no UTF-8 before byte {self._at}") from e

    def blob(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self._read_bytes(length)

    def partitions(self) -> tuple[TopicPartition, ...]:
        found: list[TopicPartition] = []
        for _ in range(self.count()):
            topic = self.text() or ""
            found += [TopicPartition(topic, self.int32()) for _ in range(self.count())]
        return tuple(found)

    def _read_number(self, form: str, size: int) -> int:
        return int(struct.unpack(form, self._read_bytes(size))[0])

    def _read_bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise SerializationError(f"{self._description}: ends at byte {len(self._data)}, within a field")
        read = self._data[self._at : end]
        self._at = end
        return read
