"""A producer whose unknown topics are known to be unknown at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from services.producer.looked_up import LookedUpProducer
from shared.common.errors import UnknownTopicOrPartition


class Admin:
    """Knows some topics and counts what it is asked."""

    def __init__(self, *topics: str) -> None:
        self.topics = list(topics)
        self.asked: list[str] = []

    async def describe_topics(self, names: Iterable[str], *, timeout_ms: int) -> dict[str, Any]:
        self.asked += names
        for name in names:
            if name not in self.topics:
                raise UnknownTopicOrPartition(f"topic {name}")
        return {}


class Producer:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def partitions_for(self, topic: str) -> list[int]:
        self.asked.append(topic)
        return [0, 1]


async def test_an_unknown_topic_never_reaches_the_producer() -> None:
    """Neither the first time nor later, and it is found as soon as it exists."""
    admin, producer = Admin(), Producer()
    looked_up = LookedUpProducer(producer, admin)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(UnknownTopicOrPartition):
            await looked_up.partitions_for("t")
    assert producer.asked == []
    admin.topics.append("t")
    assert await looked_up.partitions_for("t") == [0, 1]


async def test_a_known_topic_is_looked_up_once() -> None:
    """Afterwards the producer's metadata is enough."""
    admin, producer = Admin("t"), Producer()
    looked_up = LookedUpProducer(producer, admin)  # type: ignore[arg-type]
    for _ in range(3):
        await looked_up.partitions_for("t")
    assert admin.asked == ["t"]
    assert producer.asked == ["t"] * 3
