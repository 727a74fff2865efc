"""A connection whose metadata a test writes: the real one, over no socket."""

from __future__ import annotations

from collections.abc import Mapping

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.metadata import MetadataResponse_v1

from shared.clients.connection import Connection
from shared.common.settings import KafkaSettings

NO_LEADER = -1


def connection() -> Connection:
    """A connection that knows no topic and never connects; call it within a running event loop."""
    made = Connection(KafkaSettings(bootstrap_servers="localhost:1"))
    made.adopt(AIOKafkaClient(bootstrap_servers="localhost:1"))
    return made


def know(connection: Connection, leaders: Mapping[str, Mapping[int, int]]) -> None:
    """Have the metadata say which partitions each topic has and who leads them."""
    nodes = sorted({node for of in leaders.values() for node in of.values() if node != NO_LEADER})
    topics = [
        (0, name, False, [(5 if node == NO_LEADER else 0, number, node, [node], [node]) for number, node in of.items()])
        for name, of in leaders.items()
    ]
    response = MetadataResponse_v1([(node, "localhost", 1, None) for node in nodes], 1, topics)
    connection.cluster.update_metadata(response)
