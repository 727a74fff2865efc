"""A request as the fake broker's handlers and a test's hooks get it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.protocol import Api


@dataclass
class Request:
    """A decoded request: its sender, the node that received it, and its body, whose fields are attributes.

    `body` has the fields of Kafka's message definition in snake_case, with one name for one concept. Topics are in
    `body.topics`, each with a `name` and, if the request has them, its `partitions`. A partition's number is
    `partition`. Only DeleteTopics has `topic_names`. OffsetFetch, AddPartitionsToTxn and Fetch's `forgotten_topics`
    have plain numbers as `partitions`.
    """

    api: Api
    version: int
    node: int
    client_id: str
    client_host: str
    body: Message
    now_ms: int

    def partitions(self) -> list[TopicPartition]:
        """The partitions that the request names, in its order."""
        return [TopicPartition(topic.name, partition_number(row)) for topic, row in self.rows()]

    def rows(self) -> Iterator[tuple[Message, Any]]:
        """Pairs (topic, partition), one for each partition of the request, both as they are in the body."""
        for topic in getattr(self.body, "topics", None) or ():
            for row in getattr(topic, "partitions", None) or ():
                yield topic, row


def partition_number(row: Any) -> int:
    """The number of a partition in a request, which has structs of partitions or plain numbers."""
    return int(row if isinstance(row, int) else row.partition)
