"""Confluent REST Proxy v3: the routes of clusters, brokers, topics with their configs, and partitions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import BAD_REQUEST, NOT_FOUND
from penstock.api.rest_proxy.partitions import describe_partition, first_and_next_offset
from penstock.api.rest_proxy.v3_resources import (
    BOTH_OFFSETS,
    KafkaBroker,
    KafkaCluster,
    KafkaPartition,
    KafkaPartitionWithOffsets,
    KafkaTopic,
    KafkaTopicConfig,
    broker_row,
    check_cluster,
    cluster_row,
    config_row,
    list_of,
    offsets_row,
    partition_row,
    rows_of,
    topic_row,
)
from penstock.shared.clients.admin import Admin
from penstock.shared.common.records import TopicPartition


def v3_metadata_router(admin: Admin) -> APIRouter:
    """Return the routes of clusters, brokers, topics with their configs, and partitions with their offsets."""
    router = APIRouter(tags=["rest proxy v3"])
    _cluster_routes(router, admin)
    _topic_routes(router, admin)
    _partition_routes(router, admin)
    return router


def _cluster_routes(router: APIRouter, admin: Admin) -> None:
    @router.get(
        "/v3/clusters",
        summary="REST Proxy v3: the cluster, as a list of one",
        responses={200: {"model": list_of(KafkaCluster)}},
    )
    async def list_clusters(request: Request) -> Response:
        return rows_of(request, "KafkaClusterList", [cluster_row(request, await admin.cluster())])

    @router.get(
        "/v3/clusters/{cluster_id}", summary="REST Proxy v3: the cluster", responses={200: {"model": KafkaCluster}}
    )
    async def get_cluster(cluster_id: of.ClusterId, request: Request) -> Response:
        return json_response(cluster_row(request, await check_cluster(admin, cluster_id)))

    @router.get(
        "/v3/clusters/{cluster_id}/brokers",
        summary="REST Proxy v3: brokers",
        responses={200: {"model": list_of(KafkaBroker)}},
    )
    async def list_brokers(cluster_id: of.ClusterId, request: Request) -> Response:
        description = await check_cluster(admin, cluster_id)
        rows = [broker_row(request, cluster_id, broker) for broker in description.brokers]
        return rows_of(request, "KafkaBrokerList", rows)

    @router.get(
        "/v3/clusters/{cluster_id}/brokers/{broker_id}",
        summary="REST Proxy v3: a broker",
        responses={200: {"model": KafkaBroker}},
    )
    async def get_broker(cluster_id: of.ClusterId, broker_id: of.Broker, request: Request) -> Response:
        for broker in (await check_cluster(admin, cluster_id)).brokers:
            if broker.node_id == broker_id:
                return json_response(broker_row(request, cluster_id, broker))
        raise Problem(ErrorKind(NOT_FOUND, "UNKNOWN_BROKER", "No such broker"), f"Broker {broker_id} cannot be found.")


def _topic_routes(router: APIRouter, admin: Admin) -> None:
    @router.get(
        "/v3/clusters/{cluster_id}/topics",
        summary="REST Proxy v3: topics",
        responses={200: {"model": list_of(KafkaTopic)}},
    )
    async def list_topics(cluster_id: of.ClusterId, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        descriptions = await admin.describe_topics(await admin.list_topics())
        rows = [topic_row(request, cluster_id, descriptions[name]) for name in sorted(descriptions)]
        return rows_of(request, "KafkaTopicList", rows)

    @router.get(
        "/v3/clusters/{cluster_id}/topics/-/configs",
        summary="REST Proxy v3: the configs of all topics",
        responses={200: {"model": list_of(KafkaTopicConfig)}},
    )
    async def all_configs(cluster_id: of.ClusterId, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        configs = await admin.topic_configs(await admin.list_topics())
        rows = [config_row(request, cluster_id, topic, entry) for topic in sorted(configs) for entry in configs[topic]]
        return rows_of(request, "KafkaTopicConfigList", rows)

    @router.get(
        "/v3/clusters/{cluster_id}/topics/{topic}",
        summary="REST Proxy v3: a topic",
        responses={200: {"model": KafkaTopic}},
    )
    async def get_topic(cluster_id: of.ClusterId, topic: of.Topic, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        return json_response(topic_row(request, cluster_id, (await admin.describe_topics([topic]))[topic]))

    @router.get(
        "/v3/clusters/{cluster_id}/topics/{topic}/configs",
        summary="REST Proxy v3: a topic's configs",
        responses={200: {"model": list_of(KafkaTopicConfig)}},
    )
    async def list_topic_configs(cluster_id: of.ClusterId, topic: of.Topic, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        entries = (await admin.topic_configs([topic]))[topic]
        rows = [config_row(request, cluster_id, topic, entry) for entry in entries]
        return rows_of(request, "KafkaTopicConfigList", rows)

    @router.get(
        "/v3/clusters/{cluster_id}/topics/{topic}/configs/{config}",
        summary="REST Proxy v3: a config of a topic",
        responses={200: {"model": KafkaTopicConfig}},
    )
    async def get_topic_config(
        cluster_id: of.ClusterId, topic: of.Topic, config: of.ConfigName, request: Request
    ) -> Response:
        await check_cluster(admin, cluster_id)
        for entry in (await admin.topic_configs([topic]))[topic]:
            if entry.name == config:
                return json_response(config_row(request, cluster_id, topic, entry))
        raise Problem(ErrorKind(NOT_FOUND, "UNKNOWN_CONFIG", "No such config"), f"Config {config} cannot be found.")


def _partition_routes(router: APIRouter, admin: Admin) -> None:
    path = "/v3/clusters/{cluster_id}/topics/{topic}/partitions"

    @router.get(
        path, summary="REST Proxy v3: a topic's partitions", responses={200: {"model": list_of(KafkaPartition)}}
    )
    async def list_partitions(cluster_id: of.ClusterId, topic: of.Topic, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        description = (await admin.describe_topics([topic]))[topic]
        rows = [partition_row(request, cluster_id, topic, p) for p in description.partitions]
        return rows_of(request, "KafkaPartitionList", rows)

    @router.get(f"{path}/{{number}}", summary="REST Proxy v3: a partition", responses={200: {"model": KafkaPartition}})
    async def get_partition(
        cluster_id: of.ClusterId, topic: of.Topic, number: of.Partition, request: Request
    ) -> Response:
        await check_cluster(admin, cluster_id)
        return json_response(partition_row(request, cluster_id, topic, await describe_partition(admin, topic, number)))

    @router.get(
        f"{path}/{{number}}/offset",
        summary="REST Proxy v3: a partition's first and next offset",
        responses={200: {"model": KafkaPartitionWithOffsets}},
    )
    async def get_partition_offsets(
        cluster_id: of.ClusterId,
        topic: of.Topic,
        number: of.Partition,
        request: Request,
        offset_type: Annotated[str, Query(examples=[BOTH_OFFSETS], description=f"only {BOTH_OFFSETS}")] = BOTH_OFFSETS,
    ) -> Response:
        if offset_type != BOTH_OFFSETS:
            detail = f"offset_type: {offset_type!r} is not supported; leave it out, or use {BOTH_OFFSETS}"
            raise Problem(ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request"), detail)
        await check_cluster(admin, cluster_id)
        tp = TopicPartition(topic, (await describe_partition(admin, topic, number)).partition)
        return json_response(offsets_row(request, cluster_id, tp, *await first_and_next_offset(admin, tp)))
