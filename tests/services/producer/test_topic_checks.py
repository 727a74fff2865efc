"""A producer that detects unknown topics immediately."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from penstock.services.producer.topic_checks import LOOKUP_EVERY_MS, TopicCheckingProducer
from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.testing.manual_clock import ManualClock


class Admin:
    """Knows some topics and counts its requests."""

    def __init__(self, *topics: str) -> None:
        self.topics = list(topics)
        self.requests: list[str] = []

    async def describe_topics(self, names: Iterable[str], *, timeout_ms: int) -> dict[str, Any]:
        self.requests += names
        for name in names:
            if name not in self.topics:
                raise UnknownTopicOrPartition(f"topic {name}")
        return {}


class Producer:
    """Counts its requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def partitions_for(self, topic: str) -> list[int]:
        self.requests.append(topic)
        return [0, 1]


async def test_an_unknown_topic_never_reaches_the_producer() -> None:
    """An unknown topic is rejected each time, and found as soon as it exists."""
    admin, producer = Admin(), Producer()
    checking_producer = TopicCheckingProducer(producer, admin)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(UnknownTopicOrPartition):
            await checking_producer.partitions_for("t")
    assert producer.requests == []
    admin.topics.append("t")
    assert await checking_producer.partitions_for("t") == [0, 1]


async def test_a_known_topic_is_looked_up_at_intervals() -> None:
    """Between look-ups the producer's metadata is used, and a deleted topic is detected at the next one."""
    admin, producer, clock = Admin("t"), Producer(), ManualClock()
    checking_producer = TopicCheckingProducer(producer, admin, clock)  # type: ignore[arg-type]
    for _ in range(3):
        await checking_producer.partitions_for("t")
    assert admin.requests == ["t"]
    assert producer.requests == ["t"] * 3
    clock.advance(LOOKUP_EVERY_MS)
    for _ in range(2):
        await checking_producer.partitions_for("t")
    assert admin.requests == ["t"] * 2
    admin.topics.clear()
    clock.advance(LOOKUP_EVERY_MS)
    for _ in range(2):
        with pytest.raises(UnknownTopicOrPartition):
            await checking_producer.partitions_for("t")
    assert producer.requests == ["t"] * 5
