"""Resources of Confluent REST Proxy v3. Each has a kind and metadata with its address; some have links to others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, Literal, cast

from fastapi import Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import NOT_FOUND
from penstock.shared.clients.admin import Admin, ClusterDescription, ConfigEntry, TopicDescription
from penstock.shared.clients.admin.types import BrokerDescription, PartitionDescription
from penstock.shared.common.records import TopicPartition

BOTH_OFFSETS = "earliest_and_latest"
"""The only `offset_type` of REST Proxy."""

Address = Annotated[str, Field(examples=["http://localhost:8080/v3/clusters/lkc-1"])]
ConfigValue = Annotated[str, Field(examples=["compact"])]
ConfigSource = Annotated[str, Field(examples=["DYNAMIC_TOPIC_CONFIG"])]


class Metadata(TypedDict):
    """The metadata of a resource."""

    self: Address
    resource_name: Annotated[str, Field(examples=["crn:///kafka=lkc-1"])]


class ListMetadata(TypedDict):
    """The metadata of a list."""

    self: Address
    next: None


class Link(TypedDict):
    """A link to another resource."""

    related: Address


class ConfigSynonymRow(TypedDict):
    """One of the configs from which a config may take its value. The config itself may be among them."""

    name: of.ConfigName
    value: ConfigValue | None
    source: ConfigSource


class KafkaCluster(TypedDict):
    """The cluster."""

    kind: Literal["KafkaCluster"]
    metadata: Metadata
    cluster_id: of.ClusterId
    controller: Link
    brokers: Link
    consumer_groups: Link
    topics: Link


class KafkaBroker(TypedDict):
    """A broker."""

    kind: Literal["KafkaBroker"]
    metadata: Metadata
    cluster_id: of.ClusterId
    broker_id: of.Broker
    host: of.Host
    port: of.Port
    rack: str | None


class KafkaTopic(TypedDict):
    """A topic."""

    kind: Literal["KafkaTopic"]
    metadata: Metadata
    cluster_id: of.ClusterId
    topic_name: of.Topic
    is_internal: bool
    replication_factor: of.Count
    partitions_count: of.Count
    partitions: Link
    configs: Link
    authorized_operations: Annotated[list[str], Field(examples=[[]])]


class KafkaPartition(TypedDict):
    """A partition."""

    kind: Literal["KafkaPartition"]
    metadata: Metadata
    cluster_id: of.ClusterId
    topic_name: of.Topic
    partition_id: of.Partition
    leader_id: of.Broker | None
    replica_ids: list[of.Broker]
    isr_ids: list[of.Broker]


class KafkaPartitionWithOffsets(TypedDict):
    """A partition's first offset and its high watermark."""

    kind: Literal["KafkaPartitionWithOffsets"]
    metadata: Metadata
    cluster_id: of.ClusterId
    topic_name: of.Topic
    partition_id: of.Partition
    earliest_offset: of.Offset
    latest_offset: of.Offset


class KafkaTopicConfig(TypedDict):
    """A config of a topic."""

    kind: Literal["KafkaTopicConfig"]
    metadata: Metadata
    cluster_id: of.ClusterId
    topic_name: of.Topic
    name: of.ConfigName
    value: ConfigValue | None
    is_default: bool
    is_read_only: bool
    is_sensitive: bool
    source: ConfigSource
    synonyms: list[ConfigSynonymRow]


# KafkaTopicConfig has two routes, which share the type: FastAPI would give two types of the same name longer names.
@cache
def list_of(row: Any) -> Any:
    """Return the type of a list of resources, for the OpenAPI document."""
    kind = f"{row.__name__}List"
    rows = cast("Any", TypedDict)(kind, {"kind": Literal[kind], "metadata": ListMetadata, "data": list[row]})
    rows.__doc__ = f"A list of {row.__name__}."
    return rows


def link(request: Request, path: str) -> str:
    """Return the address of a resource of REST Proxy v3 for the requesting client."""
    return f"{str(request.base_url).rstrip('/')}{path}"


def related(request: Request, path: str) -> Link:
    """Return the link to a resource of REST Proxy v3."""
    return {"related": link(request, path)}


def metadata_of(request: Request, path: str, name: str) -> Metadata:
    """Return the metadata of a resource of REST Proxy v3."""
    return {"self": link(request, path), "resource_name": f"crn:///{name}"}


def rows_of(request: Request, kind: str, rows: Sequence[Any]) -> Response:
    """Return a list of resources of REST Proxy v3. It is never split into pages."""
    metadata: ListMetadata = {"self": link(request, request["raw_path"].decode("latin-1")), "next": None}
    return json_response({"kind": kind, "metadata": metadata, "data": list(rows)})


def topic_row(request: Request, cluster_id: str, topic: TopicDescription) -> KafkaTopic:
    """Return a topic as a resource of REST Proxy v3."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic.name}"
    return {
        "kind": "KafkaTopic",
        "metadata": metadata_of(request, path, f"kafka={cluster_id}/topic={topic.name}"),
        "cluster_id": cluster_id,
        "topic_name": topic.name,
        "is_internal": topic.is_internal,
        "replication_factor": len(topic.partitions[0].replicas) if topic.partitions else 0,
        "partitions_count": len(topic.partitions),
        "partitions": related(request, f"{path}/partitions"),
        "configs": related(request, f"{path}/configs"),
        "authorized_operations": [],
    }


def partition_row(request: Request, cluster_id: str, topic: str, description: PartitionDescription) -> KafkaPartition:
    """Return a partition as a resource of REST Proxy v3."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic}/partitions/{description.partition}"
    name = f"kafka={cluster_id}/topic={topic}/partition={description.partition}"
    return {
        "kind": "KafkaPartition",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "topic_name": topic,
        "partition_id": description.partition,
        "leader_id": description.leader,
        "replica_ids": list(description.replicas),
        "isr_ids": list(description.isr),
    }


def broker_row(request: Request, cluster_id: str, broker: BrokerDescription) -> KafkaBroker:
    """Return a broker as a resource of REST Proxy v3."""
    path = f"/v3/clusters/{cluster_id}/brokers/{broker.node_id}"
    name = f"kafka={cluster_id}/broker={broker.node_id}"
    return {
        "kind": "KafkaBroker",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "broker_id": broker.node_id,
        "host": broker.host,
        "port": broker.port,
        "rack": broker.rack,
    }


def config_row(request: Request, cluster_id: str, topic: str, entry: ConfigEntry) -> KafkaTopicConfig:
    """Return a config of a topic as a resource of REST Proxy v3."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic}/configs/{entry.name}"
    name = f"kafka={cluster_id}/topic={topic}/config={entry.name}"
    return {
        "kind": "KafkaTopicConfig",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "topic_name": topic,
        "name": entry.name,
        "value": entry.value,
        "is_default": entry.is_default,
        "is_read_only": entry.is_read_only,
        "is_sensitive": entry.is_sensitive,
        "source": entry.source,
        "synonyms": [{"name": s.name, "value": s.value, "source": s.source} for s in entry.synonyms],
    }


def offsets_row(
    request: Request, cluster_id: str, tp: TopicPartition, earliest: int, latest: int
) -> KafkaPartitionWithOffsets:
    """Return a partition's first offset and its high watermark, as a resource of REST Proxy v3."""
    path = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}/offset"
    name = f"kafka={cluster_id}/topic={tp.topic}/partition={tp.partition}/offset_type={BOTH_OFFSETS}"
    return {
        "kind": "KafkaPartitionWithOffsets",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "earliest_offset": earliest,
        "latest_offset": latest,
    }


def cluster_row(request: Request, cluster: ClusterDescription) -> KafkaCluster:
    """Return the cluster as a resource of REST Proxy v3."""
    cluster_id = cluster.cluster_id or ""
    path = f"/v3/clusters/{cluster_id}"
    return {
        "kind": "KafkaCluster",
        "metadata": metadata_of(request, path, f"kafka={cluster_id}"),
        "cluster_id": cluster_id,
        "controller": related(request, f"{path}/brokers/{cluster.controller}"),
        "brokers": related(request, f"{path}/brokers"),
        "consumer_groups": related(request, f"{path}/consumer-groups"),
        "topics": related(request, f"{path}/topics"),
    }


async def check_cluster(admin: Admin, cluster_id: str) -> ClusterDescription:
    """Return the cluster that a v3 path names. Raises Problem (404) for another cluster id."""
    cluster = await admin.cluster()
    if cluster_id != (cluster.cluster_id or ""):
        raise Problem(
            ErrorKind(NOT_FOUND, "UNKNOWN_CLUSTER", "No such cluster"), f"Cluster {cluster_id} cannot be found."
        )
    return cluster
