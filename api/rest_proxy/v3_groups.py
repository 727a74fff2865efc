"""Consumer groups in Confluent REST Proxy v3's shapes: groups, consumers, assignments, lag and its summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import NOT_FOUND
from penstock.api.rest_proxy.v3_resources import (
    Link,
    Metadata,
    check_cluster,
    list_of,
    metadata_of,
    related,
    rows_of,
)
from penstock.shared.clients.admin import Admin, GroupDescription, MemberDescription
from penstock.shared.clients.admin.types import DEAD
from penstock.shared.common.errors import GroupNotFound
from penstock.shared.common.records import TopicPartition

GROUPS = "/v3/clusters/{cluster_id}/consumer-groups"


class KafkaConsumerGroup(TypedDict):
    """A consumer group."""

    kind: Literal["KafkaConsumerGroup"]
    metadata: Metadata
    cluster_id: of.ClusterId
    consumer_group_id: of.Group
    is_simple: bool
    partition_assignor: Annotated[str, Field(examples=["range"])]
    state: Annotated[str, Field(examples=["STABLE"])]
    coordinator_id: of.Broker
    coordinator: Link
    consumers: Link
    lag_summary: Link


class KafkaConsumer(TypedDict):
    """A member of a group."""

    kind: Literal["KafkaConsumer"]
    metadata: Metadata
    cluster_id: of.ClusterId
    consumer_group_id: of.Group
    consumer_id: of.MemberId
    instance_id: str | None
    client_id: of.ClientId
    assignments: Link


class KafkaConsumerAssignment(TypedDict):
    """A partition that is assigned to a consumer."""

    kind: Literal["KafkaConsumerAssignment"]
    metadata: Metadata
    cluster_id: of.ClusterId
    consumer_group_id: of.Group
    consumer_id: of.MemberId
    topic_name: of.Topic
    partition_id: of.Partition
    partition: Link
    lag: Link


class KafkaConsumerLag(TypedDict):
    """A group's lag in a partition with a committed offset and a leader.

    `consumer_id` is empty if the partition is not assigned.
    """

    kind: Literal["KafkaConsumerLag"]
    metadata: Metadata
    cluster_id: of.ClusterId
    consumer_group_id: of.Group
    topic_name: of.Topic
    partition_id: of.Partition
    current_offset: of.Offset
    log_end_offset: of.Offset
    lag: of.Lag
    consumer_id: of.MemberId
    instance_id: str | None
    client_id: of.ClientId


class KafkaConsumerGroupLagSummary(TypedDict):
    """A group's largest and total lag in the partitions with a committed offset and a leader."""

    kind: Literal["KafkaConsumerGroupLagSummary"]
    metadata: Metadata
    cluster_id: of.ClusterId
    consumer_group_id: of.Group
    max_lag_consumer_id: of.MemberId
    max_lag_instance_id: str | None
    max_lag_client_id: of.ClientId
    max_lag_topic_name: of.Topic
    max_lag_partition_id: of.Partition
    max_lag: of.Lag
    total_lag: of.Lag
    max_lag_partition: Link


def v3_groups_router(admin: Admin) -> APIRouter:
    """Return all routes under `/v3/clusters/{cluster_id}/consumer-groups`."""
    router = APIRouter(tags=["rest proxy v3"])
    # An id may have slashes, so `{group:id}` also matches the longer paths. The first match counts, so they come first.
    _add_lag_routes(router, admin)
    _add_group_routes(router, admin)
    return router


def _add_group_routes(router: APIRouter, admin: Admin) -> None:
    @router.get(
        GROUPS, summary="REST Proxy v3: consumer groups", responses={200: {"model": list_of(KafkaConsumerGroup)}}
    )
    async def list_groups(cluster_id: of.ClusterId, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        listed = [g.group_id for g in await admin.list_groups() if g.protocol_type in ("consumer", "")]
        rows = [_group_row(request, cluster_id, await admin.describe_group(name)) for name in sorted(listed)]
        return rows_of(request, "KafkaConsumerGroupList", rows)

    path = f"{GROUPS}/{{group:id}}/consumers/{{consumer:id}}/assignments/{{topic}}/partitions/{{partition}}"

    @router.get(
        path, summary="REST Proxy v3: a partition of a consumer", responses={200: {"model": KafkaConsumerAssignment}}
    )
    async def get_assignment(
        cluster_id: of.ClusterId,
        group: of.Group,
        consumer: of.MemberId,
        topic: of.Topic,
        partition: of.Partition,
        request: Request,
    ) -> Response:
        member = _find_consumer(await _describe_group(admin, cluster_id, group), consumer)
        tp = TopicPartition(topic, partition)
        if tp not in member.assignment:
            kind = ErrorKind(NOT_FOUND, "NOT_ASSIGNED", "No such assignment")
            raise Problem(kind, f"{tp} is not assigned to {consumer} of {group}")
        return json_response(_assignment_row(request, cluster_id, group, consumer, tp))

    @router.get(
        f"{GROUPS}/{{group:id}}/consumers/{{consumer:id}}/assignments",
        summary="REST Proxy v3: a consumer's partitions",
        responses={200: {"model": list_of(KafkaConsumerAssignment)}},
    )
    async def list_assignments(
        cluster_id: of.ClusterId, group: of.Group, consumer: of.MemberId, request: Request
    ) -> Response:
        member = _find_consumer(await _describe_group(admin, cluster_id, group), consumer)
        rows = [_assignment_row(request, cluster_id, group, consumer, tp) for tp in sorted(member.assignment)]
        return rows_of(request, "KafkaConsumerAssignmentList", rows)

    @router.get(
        f"{GROUPS}/{{group:id}}/consumers/{{consumer:id}}",
        summary="REST Proxy v3: a consumer",
        responses={200: {"model": KafkaConsumer}},
    )
    async def get_consumer(
        cluster_id: of.ClusterId, group: of.Group, consumer: of.MemberId, request: Request
    ) -> Response:
        member = _find_consumer(await _describe_group(admin, cluster_id, group), consumer)
        return json_response(_consumer_row(request, cluster_id, group, member))

    @router.get(
        f"{GROUPS}/{{group:id}}/consumers",
        summary="REST Proxy v3: a group's consumers",
        responses={200: {"model": list_of(KafkaConsumer)}},
    )
    async def list_consumers(cluster_id: of.ClusterId, group: of.Group, request: Request) -> Response:
        description = await _describe_group(admin, cluster_id, group)
        rows = [_consumer_row(request, cluster_id, group, member) for member in description.members]
        return rows_of(request, "KafkaConsumerList", rows)

    @router.get(
        f"{GROUPS}/{{group:id}}",
        summary="REST Proxy v3: a consumer group",
        responses={200: {"model": KafkaConsumerGroup}},
    )
    async def get_group(cluster_id: of.ClusterId, group: of.Group, request: Request) -> Response:
        return json_response(_group_row(request, cluster_id, await _describe_group(admin, cluster_id, group)))


def _add_lag_routes(router: APIRouter, admin: Admin) -> None:
    @router.get(
        f"{GROUPS}/{{group:id}}/lags",
        summary="REST Proxy v3: a group's lag by partition",
        responses={200: {"model": list_of(KafkaConsumerLag)}},
    )
    async def list_lags(cluster_id: of.ClusterId, group: of.Group, request: Request) -> Response:
        description, lag = await _describe_group_with_lag(admin, cluster_id, group)
        rows = [_lag_row(request, cluster_id, group, row, _owner_of_partition(description, row)) for row in lag]
        return rows_of(request, "KafkaConsumerLagList", rows)

    path = f"{GROUPS}/{{group:id}}/lags/{{topic}}/partitions/{{partition}}"

    @router.get(
        path, summary="REST Proxy v3: a group's lag in a partition", responses={200: {"model": KafkaConsumerLag}}
    )
    async def get_partition_lag(
        cluster_id: of.ClusterId, group: of.Group, topic: of.Topic, partition: of.Partition, request: Request
    ) -> Response:
        description, lag = await _describe_group_with_lag(admin, cluster_id, group)
        for row in lag:
            if row.topic_partition == (topic, partition):
                return json_response(_lag_row(request, cluster_id, group, row, _owner_of_partition(description, row)))
        raise Problem(
            ErrorKind(NOT_FOUND, "NO_LAG", "No such lag"),
            f"{topic}-{partition} has no offset committed by {group}, or no leader",
        )

    @router.get(
        f"{GROUPS}/{{group:id}}/lag-summary",
        summary="REST Proxy v3: a group's largest and total lag",
        responses={200: {"model": KafkaConsumerGroupLagSummary}},
    )
    async def get_lag_summary(cluster_id: of.ClusterId, group: of.Group, request: Request) -> Response:
        description, lag = await _describe_group_with_lag(admin, cluster_id, group)
        return json_response(_lag_summary(request, cluster_id, group, description, lag))


async def _describe_group(admin: Admin, cluster_id: str, group: str) -> GroupDescription:
    """Return a group of the cluster. Raises GroupNotFound, and what `check_cluster` raises."""
    await check_cluster(admin, cluster_id)
    description = await admin.describe_group(group)
    if description.state == DEAD:
        raise GroupNotFound(f"group {group}: it does not exist")
    return description


class _KnownLag(NamedTuple):
    """The lag of a group in a partition with a committed offset and a leader."""

    topic_partition: TopicPartition
    committed: int
    end: int
    lag: int


async def _describe_group_with_lag(
    admin: Admin, cluster_id: str, group: str
) -> tuple[GroupDescription, list[_KnownLag]]:
    """Return a group and its lag in each partition with a committed offset and a leader.

    Raises Problem (404) if there is no such partition, and what `_describe_group` raises.
    """
    description = await _describe_group(admin, cluster_id, group)
    lag = [
        _KnownLag(row.topic_partition, row.committed, row.end, row.lag)
        for row in await admin.group_lag(group)
        if row.committed is not None and row.end is not None and row.lag is not None
    ]
    if not lag:
        raise Problem(
            ErrorKind(NOT_FOUND, "NO_LAG", "No lag"), f"{group} has no committed offset in a partition with a leader"
        )
    return description, lag


def _find_consumer(description: GroupDescription, consumer: str) -> MemberDescription:
    for member in description.members:
        if member.member_id == consumer:
            return member
    kind = ErrorKind(NOT_FOUND, "UNKNOWN_CONSUMER", "No such consumer")
    raise Problem(kind, f"{description.group_id} has no member {consumer}")


def _owner_of_partition(description: GroupDescription, row: _KnownLag) -> MemberDescription | None:
    """Return the member to which the partition is assigned; None if there is none."""
    return next((member for member in description.members if row.topic_partition in member.assignment), None)


def state_of(state: str) -> str:
    """Return a group's state in v3's notation.

    >>> state_of("PreparingRebalance"), state_of("Stable")
    ('PREPARING_REBALANCE', 'STABLE')
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", state).upper()


def _group_row(request: Request, cluster_id: str, description: GroupDescription) -> KafkaConsumerGroup:
    path, name = _path_and_name(cluster_id, description.group_id)
    return {
        "kind": "KafkaConsumerGroup",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "consumer_group_id": description.group_id,
        "is_simple": not description.protocol_type,
        "partition_assignor": description.protocol,
        "state": state_of(description.state),
        "coordinator_id": description.coordinator,
        "coordinator": related(request, f"/v3/clusters/{cluster_id}/brokers/{description.coordinator}"),
        "consumers": related(request, f"{path}/consumers"),
        "lag_summary": related(request, f"{path}/lag-summary"),
    }


def _consumer_row(request: Request, cluster_id: str, group: str, member: MemberDescription) -> KafkaConsumer:
    path, name = _path_and_name(
        cluster_id, group, f"/consumers/{quote(member.member_id, safe='')}", f"/consumer={member.member_id}"
    )
    return {
        "kind": "KafkaConsumer",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "consumer_id": member.member_id,
        "instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "assignments": related(request, f"{path}/assignments"),
    }


def _assignment_row(
    request: Request, cluster_id: str, group: str, consumer: str, tp: TopicPartition
) -> KafkaConsumerAssignment:
    path, name = _path_and_name(
        cluster_id,
        group,
        f"/consumers/{quote(consumer, safe='')}/assignments/{tp.topic}/partitions/{tp.partition}",
        f"/consumer={consumer}/assignment={tp.topic}/partition={tp.partition}",
    )
    topic = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}"
    lag, _ = _path_and_name(cluster_id, group, f"/lags/{tp.topic}/partitions/{tp.partition}")
    return {
        "kind": "KafkaConsumerAssignment",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "consumer_id": consumer,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "partition": related(request, topic),
        "lag": related(request, lag),
    }


def _lag_row(
    request: Request, cluster_id: str, group: str, row: _KnownLag, owner: MemberDescription | None
) -> KafkaConsumerLag:
    tp = row.topic_partition
    path, name = _path_and_name(
        cluster_id, group, f"/lags/{tp.topic}/partitions/{tp.partition}", f"/lag={tp.topic}/partition={tp.partition}"
    )
    return {
        "kind": "KafkaConsumerLag",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "current_offset": row.committed,
        "log_end_offset": row.end,
        "lag": row.lag,
        "consumer_id": "" if owner is None else owner.member_id,
        "instance_id": None if owner is None else owner.group_instance_id,
        "client_id": "" if owner is None else owner.client_id,
    }


def _lag_summary(
    request: Request, cluster_id: str, group: str, description: GroupDescription, lag: Sequence[_KnownLag]
) -> KafkaConsumerGroupLagSummary:
    largest = max(lag, key=lambda row: row.lag)
    owner = _owner_of_partition(description, largest)
    tp = largest.topic_partition
    path, name = _path_and_name(cluster_id, group, "/lag-summary", "/lag-summary")
    partition = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}"
    return {
        "kind": "KafkaConsumerGroupLagSummary",
        "metadata": metadata_of(request, path, name),
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "max_lag_consumer_id": "" if owner is None else owner.member_id,
        "max_lag_instance_id": None if owner is None else owner.group_instance_id,
        "max_lag_client_id": "" if owner is None else owner.client_id,
        "max_lag_topic_name": tp.topic,
        "max_lag_partition_id": tp.partition,
        "max_lag": largest.lag,
        "total_lag": sum(row.lag for row in lag),
        "max_lag_partition": related(request, partition),
    }


def _path_and_name(cluster_id: str, group: str, path: str = "", name: str = "") -> tuple[str, str]:
    """Return the path and the resource name of a group, or of a resource below it.

    `path` is percent-encoded.
    """
    own = f"/v3/clusters/{cluster_id}/consumer-groups/{quote(group, safe='')}"
    return own + path, f"kafka={cluster_id}/consumer-group={group}{name}"
