"""The bytes that group members exchange equal those of the Java consumer."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.consumer_protocol import (
    Assignment,
    Subscription,
    decode_assignment,
    decode_generation,
    decode_sticky,
    decode_subscription,
    encode_assignment,
    encode_generation,
    encode_sticky,
    encode_subscription,
)
from penstock.shared.common.errors import SerializationError
from penstock.shared.common.records import TopicPartition

T2_1, T1_3, T1_0 = TopicPartition("t2", 1), TopicPartition("t1", 3), TopicPartition("t1", 0)
SUBSCRIPTION = Subscription(("t2", "t1"), b"\x01\x02", (T2_1, T1_3, T1_0), 7, "r1")
HEAD = "000000020002743100027432000000020102"
OWNED = "0000000200027431000000020000000000000003000274320000000100000001"
# Written by kafka-clients 4.1.1: ConsumerProtocol.serializeSubscription, serializeAssignment, subscriptionUserData.
JAVA = {0: "0000" + HEAD, 1: "0001" + HEAD + OWNED, 2: "0002" + HEAD + OWNED + "00000007"}
JAVA[3] = "0003" + HEAD + OWNED + "00000007" + "00027231"
JAVA_ASSIGNMENT = "000300000002000274320000000100000001000274310000000200000003000000000000000109"
JAVA_STICKY = "000000020002743100000002000000000000000300027432000000010000000100000007"

names = st.text("abc.-_é", min_size=1, max_size=5)
partitions = st.lists(st.builds(TopicPartition, names, st.integers(0, 2**31 - 1)), unique=True, max_size=6)


@pytest.mark.parametrize("version", JAVA)
def test_each_version_of_a_subscription_is_decoded(version: int) -> None:
    """Each version of the Java consumer's bytes is decoded, with the fields that it has."""
    read = decode_subscription(bytes.fromhex(JAVA[version]))
    assert (read.topics, read.user_data) == (("t1", "t2"), b"\x01\x02")
    assert read.owned == ((T1_0, T1_3, T2_1) if version >= 1 else ())
    assert read.generation == (7 if version >= 2 else -1)
    assert read.rack_id == ("r1" if version >= 3 else None)


def test_subscriptions_are_java_s() -> None:
    """An encoded subscription equals the newest version of the Java consumer's bytes."""
    assert encode_subscription(SUBSCRIPTION).hex() == JAVA[3]


def test_an_empty_subscription_is_java_s() -> None:
    """An empty subscription equals the Java consumer's bytes."""
    assert encode_subscription(Subscription(("t",))).hex() == "000300000001000174ffffffff00000000ffffffffffff"
    assert encode_assignment(Assignment(())).hex() == "000300000000ffffffff"


def test_assignments_are_java_s() -> None:
    """An assignment keeps the order of partitions within a topic. Empty bytes decode to an empty assignment."""
    data = bytes.fromhex(JAVA_ASSIGNMENT)
    assert encode_assignment(Assignment((T2_1, T1_3, T1_0), b"\x09")) == data
    assert decode_assignment(data) == Assignment((T2_1, T1_3, T1_0), b"\x09")
    assert decode_assignment(b"") == Assignment(())


def test_user_data_is_java_s() -> None:
    """The sticky assignors' user data equals Java's. The first schema, without a generation, is decoded too."""
    data = bytes.fromhex(JAVA_STICKY)
    assert encode_sticky((T1_0, T1_3, T2_1), 7) == data
    assert decode_sticky(data) == ((T1_0, T1_3, T2_1), 7)
    assert decode_sticky(data[:-4]) == ((T1_0, T1_3, T2_1), -1)
    assert decode_sticky(None) == ((), -1)
    assert (encode_generation(7).hex(), encode_generation(-1).hex()) == ("00000007", "ffffffff")
    assert (decode_generation(b"\0\0\0\7"), decode_generation(None)) == (7, -1)


def test_a_newer_version_is_read_as_the_newest_known() -> None:
    """A newer version is decoded as the newest known one, because versions only add fields at the end."""
    data = encode_subscription(SUBSCRIPTION)
    assert decode_subscription(b"\0\x09" + data[2:] + b"more") == decode_subscription(data)


@given(
    topics=st.lists(names, unique=True), owned=partitions, data=st.none() | st.binary(), generation=st.integers(-1, 9)
)
def test_round_trips(topics: list[str], owned: list[TopicPartition], data: bytes | None, generation: int) -> None:
    """Encoded values decode to equal values in the same order."""
    read = decode_subscription(encode_subscription(Subscription(tuple(topics), data, tuple(owned), generation)))
    assert read == Subscription(tuple(sorted(topics)), data, tuple(sorted(owned)), generation)
    assert set(decode_assignment(encode_assignment(Assignment(tuple(owned), data))).partitions) == set(owned)


@given(st.binary(max_size=60), st.integers(0, 40))
def test_invalid_bytes_are_a_serialization_error(noise: bytes, cut: int) -> None:
    """Invalid bytes raise a SerializationError that names the expected type."""
    cut_off = bytes.fromhex(JAVA[3])[: min(cut, 40)]
    with pytest.raises(SerializationError, match="subscription: "):
        decode_subscription(cut_off)
    for decode in (decode_subscription, decode_assignment):
        with contextlib.suppress(SerializationError):  # anything else fails
            decode(noise)
