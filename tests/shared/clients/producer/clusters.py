"""A real connection without sockets whose metadata a test sets, a producer for a fake cluster, and its records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.metadata import MetadataResponse_v1

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

NO_LEADER = -1


def connection() -> Connection:
    """A connection without topics that never connects. Call it within a running event loop."""
    made = Connection(KafkaSettings(bootstrap_servers="localhost:1"))
    made.adopt(AIOKafkaClient(bootstrap_servers="localhost:1"))
    return made


def know(connection: Connection, leaders: Mapping[str, Mapping[int, int]]) -> None:
    """Sets the metadata to the given partitions and leaders of each topic."""
    nodes = sorted({node for of in leaders.values() for node in of.values() if node != NO_LEADER})
    topics = [
        (0, name, False, [(5 if node == NO_LEADER else 0, number, node, [node], [node]) for number, node in of.items()])
        for name, of in leaders.items()
    ]
    response = MetadataResponse_v1([(node, "localhost", 1, None) for node in nodes], 1, topics)
    connection.cluster.update_metadata(response)


@asynccontextmanager
async def producing(
    nodes: int = 1, partitions: int = 1, **settings: object
) -> AsyncIterator[tuple[FakeCluster, Producer]]:
    """A cluster with the topic `t`, and a producer without linger that retries at once."""
    async with FakeCluster(nodes) as cluster:
        cluster.create_topic("t", partitions)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5, reconnect_backoff_ms=5)
        given = {"linger_ms": 0, "retry_backoff_max_ms": 20, **settings}
        async with Producer(kafka, ProducerSettings.model_validate(given)) as producer:
            yield cluster, producer


def values(cluster: FakeCluster) -> list[bytes | None]:
    """The values of the topic `t`."""
    return [record.value for record in cluster.records("t")]
