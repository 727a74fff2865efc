"""The messages between the consumers of a group (Java: `ConsumerProtocol`). Members send subscriptions to the leader,
which sends assignments back.

The coordinator forwards these bytes without decoding them. They are Kafka's ConsumerProtocolSubscription and
ConsumerProtocolAssignment, versions 0 to 3, encoded as by the Java consumer. So consumers of both kinds can share a
group. A new version only adds fields at the end, so that a newer version is read as the newest known one.

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

from penstock.shared.clients.protocol.primitive_types import PrimitiveReader, encode_array, encode_bytes, encode_string
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.records import TopicPartition

PROTOCOL_TYPE = "consumer"
NEWEST_VERSION = 3
OWNED_SINCE = 1
GENERATION_SINCE = 2
RACK_SINCE = 3
_HEAD = struct.pack(">h", NEWEST_VERSION)


@dataclass(frozen=True, slots=True)
class Subscription:
    """A member's message to the leader.

    `generation` is the member's last generation of the group, and shows how recent `owned` is. It is -1 if the member
    is in no generation now, or if its message has no field for it.
    """

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


def encode_subscription(subscription: Subscription) -> bytes:
    """Encode a subscription in the newest version; topics and partitions are sorted as in Java."""
    return (
        _HEAD
        + encode_array(encode_string(topic) for topic in sorted(subscription.topics))
        + encode_bytes(subscription.user_data)
        + _encode_partitions(sorted(subscription.owned))
        + struct.pack(">i", subscription.generation)
        + encode_string(subscription.rack_id)
    )


def decode_subscription(data: bytes) -> Subscription:
    """Decode a subscription. Raises SerializationError if the bytes are invalid."""
    read = PrimitiveReader(data, "subscription")
    version = read.version()
    topics = tuple(read.string() or "" for _ in range(read.array_length()))
    user_data = read.blob()
    owned = _read_partitions(read) if version >= OWNED_SINCE else ()
    generation = read.int32() if version >= GENERATION_SINCE else NO_GENERATION
    rack_id = read.string() if version >= RACK_SINCE else None
    return Subscription(topics, user_data, owned, generation, rack_id)


def encode_assignment(assignment: Assignment) -> bytes:
    """Encode an assignment in the newest version; all versions have the same fields."""
    return _HEAD + _encode_partitions(assignment.partitions) + encode_bytes(assignment.user_data)


def decode_assignment(data: bytes | None) -> Assignment:
    """Decode an assignment; it is empty for None or no bytes. Raises SerializationError if the bytes are invalid."""
    if not data:
        return Assignment(())
    read = PrimitiveReader(data, "assignment")
    read.version()
    return Assignment(_read_partitions(read), read.blob())


def encode_sticky(partitions: Iterable[TopicPartition], generation: int) -> bytes:
    """Encode the `sticky` assignor's user data: the member's last assignment and its generation."""
    return _encode_partitions(partitions) + struct.pack(">i", generation)


def decode_sticky(data: bytes | None) -> tuple[tuple[TopicPartition, ...], int]:
    """Decode the `sticky` assignor's user data: the member's last assignment and its generation.

    The assignment is () if there is no data. The generation is -1 if there is no data or if the data lacks it.
    """
    if not data:
        return (), NO_GENERATION
    read = PrimitiveReader(data, "sticky user data")
    return _read_partitions(read), NO_GENERATION if read.at_end else read.int32()


def encode_generation(generation: int) -> bytes:
    """Encode the `cooperative-sticky` assignor's user data."""
    return struct.pack(">i", generation)


def decode_generation(data: bytes | None) -> int:
    """Decode the `cooperative-sticky` assignor's user data, a generation. Returns -1 if there is no data."""
    return PrimitiveReader(data, "cooperative-sticky user data").int32() if data else NO_GENERATION


def _encode_partitions(partitions: Iterable[TopicPartition]) -> bytes:
    topics: dict[str, list[int]] = {}
    for topic, partition in partitions:
        topics.setdefault(topic, []).append(partition)
    return encode_array(
        encode_string(topic) + encode_array(struct.pack(">i", p) for p in found) for topic, found in topics.items()
    )


def _read_partitions(read: PrimitiveReader) -> tuple[TopicPartition, ...]:
    found: list[TopicPartition] = []
    for _ in range(read.array_length()):
        topic = read.string() or ""
        found += [TopicPartition(topic, read.int32()) for _ in range(read.array_length())]
    return tuple(found)
