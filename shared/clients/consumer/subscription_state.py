"""The subscription of a consumer: topics, a pattern of topics, or partitions.

Java's `SubscriptionState` also has the assigned partitions and their positions. Here these are in other modules: the
positions from which records are handed out are in `fetcher` (`Fetcher`), and those that may be committed are in
`consumed_positions` (`ConsumedPositions`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.shared.common.errors import IllegalState


class SubscriptionState:
    """The subscription of one consumer: topics, a pattern of topics, or partitions that the user assigns."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._mode: Literal["none", "topics", "pattern", "partitions"] = "none"
        self._pattern: re.Pattern[str] | None = None
        self.topics: frozenset[str] = frozenset()
        """The subscribed topics; those that match the pattern, if there is one."""

    def __repr__(self) -> str:
        return f"<SubscriptionState {self._mode}, topics {sorted(self.topics)}>"

    @property
    def is_subscribed(self) -> bool:
        """Whether there is a subscription, or the user has assigned partitions."""
        return self._mode != "none"

    @property
    def is_by_topic(self) -> bool:
        """Whether the consumer subscribes to topics. Then the group, if there is one, assigns the partitions."""
        return self._mode in ("topics", "pattern")

    def subscribe(self, topics: Sequence[str] | re.Pattern[str]) -> None:
        """Subscribe to these topics, or to all whose whole name matches a pattern.

        Raises IllegalState if another kind of subscription is in use, ValueError without a topic.
        """
        if isinstance(topics, re.Pattern):
            self._change_mode("pattern")
            self._pattern = topics
            return
        if not topics:
            raise ValueError("subscribe needs a topic")
        self._change_mode("topics")
        self.topics = frozenset(topics)

    def assign(self) -> None:
        """Note that the user assigns the partitions. Raises IllegalState if the consumer subscribes to topics."""
        self._change_mode("partitions")

    def match(self, topics: Iterable[str]) -> None:
        """Apply the pattern, if there is one, to the topics of the cluster."""
        if self._pattern is not None:
            self.topics = frozenset(topic for topic in topics if self._pattern.fullmatch(topic))

    def _change_mode(self, mode: Literal["topics", "pattern", "partitions"]) -> None:
        if self._mode not in ("none", mode):
            raise IllegalState(f"client {self._client_id}: {mode} and {self._mode} cannot be subscribed to together")
        self._mode = mode
