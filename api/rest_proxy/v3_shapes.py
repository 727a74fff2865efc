"""Resources in Confluent REST Proxy v3's shapes: kind, metadata with self and resource name, and links to others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from penstock.api.http.problem import json_response
from penstock.shared.clients.admin import ConfigEntry, TopicDescription
from penstock.shared.clients.admin.types import BrokerDescription, PartitionDescription
from penstock.shared.common.records import TopicPartition

BOTH_OFFSETS = "earliest_and_latest"
"""The one `offset_type` that REST Proxy has."""


def link(request: Request, path: str) -> str:
    """Return the address of a resource for the requesting client."""
    return f"{str(request.base_url).rstrip('/')}{path}"


def resource(request: Request, kind: str, path: str, name: str) -> dict[str, Any]:
    """Return the members that every resource begins with."""
    return {"kind": kind, "metadata": {"self": link(request, path), "resource_name": f"crn:///{name}"}}


def rows_of(request: Request, kind: str, rows: Sequence[dict[str, Any]]) -> Response:
    """Return a list of resources. It is never split into pages."""
    metadata = {"self": link(request, request.url.path), "next": None}
    return json_response({"kind": kind, "metadata": metadata, "data": list(rows)})


def topic_row(request: Request, cluster_id: str, topic: TopicDescription) -> dict[str, Any]:
    """A topic."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic.name}"
    return resource(request, "KafkaTopic", path, f"kafka={cluster_id}/topic={topic.name}") | {
        "cluster_id": cluster_id,
        "topic_name": topic.name,
        "is_internal": topic.is_internal,
        "replication_factor": len(topic.partitions[0].replicas) if topic.partitions else 0,
        "partitions_count": len(topic.partitions),
        "partitions": {"related": link(request, f"{path}/partitions")},
        "configs": {"related": link(request, f"{path}/configs")},
        "authorized_operations": [],
    }


def partition_row(request: Request, cluster_id: str, topic: str, found: PartitionDescription) -> dict[str, Any]:
    """A partition."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic}/partitions/{found.partition}"
    name = f"kafka={cluster_id}/topic={topic}/partition={found.partition}"
    return resource(request, "KafkaPartition", path, name) | {
        "cluster_id": cluster_id,
        "topic_name": topic,
        "partition_id": found.partition,
        "leader_id": found.leader,
        "replica_ids": list(found.replicas),
        "isr_ids": list(found.isr),
    }


def broker_row(request: Request, cluster_id: str, found: BrokerDescription) -> dict[str, Any]:
    """A broker."""
    path, name = f"/v3/clusters/{cluster_id}/brokers/{found.node_id}", f"kafka={cluster_id}/broker={found.node_id}"
    return resource(request, "KafkaBroker", path, name) | {
        "cluster_id": cluster_id,
        "broker_id": found.node_id,
        "host": found.host,
        "port": found.port,
        "rack": found.rack,
    }


def config_row(request: Request, cluster_id: str, topic: str, found: ConfigEntry) -> dict[str, Any]:
    """Return a config of a topic."""
    path = f"/v3/clusters/{cluster_id}/topics/{topic}/configs/{found.name}"
    name = f"kafka={cluster_id}/topic={topic}/config={found.name}"
    return resource(request, "KafkaTopicConfig", path, name) | {
        "cluster_id": cluster_id,
        "topic_name": topic,
        "name": found.name,
        "value": found.value,
        "is_default": found.is_default,
        "is_read_only": found.is_read_only,
        "is_sensitive": found.is_sensitive,
        "source": found.source,
        "synonyms": [{"name": one.name, "value": one.value, "source": one.source} for one in found.synonyms],
    }


def offsets_row(request: Request, cluster_id: str, tp: TopicPartition, earliest: int, latest: int) -> dict[str, Any]:
    """Return a partition's first offset and the one after its last record."""
    path = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}/offset"
    name = f"kafka={cluster_id}/topic={tp.topic}/partition={tp.partition}/offset_type={BOTH_OFFSETS}"
    return resource(request, "KafkaPartitionWithOffsets", path, name) | {
        "cluster_id": cluster_id,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "earliest_offset": earliest,
        "latest_offset": latest,
    }
