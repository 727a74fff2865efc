"""Consumer groups in Confluent REST Proxy v3's shapes: groups, consumers, assignments, lag and its summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from penstock.api.admin.routes import DEAD, AdminClient
from penstock.api.http.problem import ErrorKind, Problem, json_response
from penstock.api.rest_proxy.v3 import check_cluster
from penstock.api.rest_proxy.v3_shapes import link, resource, rows_of
from penstock.shared.clients.admin import GroupDescription, MemberDescription, PartitionLag
from penstock.shared.common.errors import GroupNotFound
from penstock.shared.common.records import TopicPartition

GROUPS = "/v3/clusters/{cluster_id}/consumer-groups"


def v3_groups_router(admin: AdminClient) -> APIRouter:
    """Return all routes under `/v3/clusters/{cluster_id}/consumer-groups`."""
    router = APIRouter(tags=["rest proxy v3"])
    _groups(router, admin)
    _lags(router, admin)
    return router


def _groups(router: APIRouter, admin: AdminClient) -> None:
    @router.get(GROUPS, summary="REST Proxy v3: consumer groups")
    async def groups(cluster_id: str, request: Request) -> Response:
        await check_cluster(admin, cluster_id)
        listed = [g.group_id for g in await admin.list_groups() if g.protocol_type in ("consumer", "")]
        rows = [_group(request, cluster_id, await admin.describe_group(name)) for name in sorted(listed)]
        return rows_of(request, "KafkaConsumerGroupList", rows)

    @router.get(f"{GROUPS}/{{group}}", summary="REST Proxy v3: a consumer group")
    async def group_(cluster_id: str, group: str, request: Request) -> Response:
        return json_response(_group(request, cluster_id, await _found(admin, cluster_id, group)))

    @router.get(f"{GROUPS}/{{group}}/consumers", summary="REST Proxy v3: a group's consumers")
    async def consumers(cluster_id: str, group: str, request: Request) -> Response:
        found = await _found(admin, cluster_id, group)
        rows = [_consumer(request, cluster_id, group, member) for member in found.members]
        return rows_of(request, "KafkaConsumerList", rows)

    @router.get(f"{GROUPS}/{{group}}/consumers/{{consumer}}", summary="REST Proxy v3: a consumer")
    async def consumer_(cluster_id: str, group: str, consumer: str, request: Request) -> Response:
        member = _member(await _found(admin, cluster_id, group), consumer)
        return json_response(_consumer(request, cluster_id, group, member))

    @router.get(f"{GROUPS}/{{group}}/consumers/{{consumer}}/assignments", summary="REST Proxy v3: its partitions")
    async def assignments(cluster_id: str, group: str, consumer: str, request: Request) -> Response:
        member = _member(await _found(admin, cluster_id, group), consumer)
        rows = [_assignment(request, cluster_id, group, consumer, tp) for tp in sorted(member.assignment)]
        return rows_of(request, "KafkaConsumerAssignmentList", rows)

    path = f"{GROUPS}/{{group}}/consumers/{{consumer}}/assignments/{{topic}}/partitions/{{partition}}"

    @router.get(path, summary="REST Proxy v3: one of its partitions")
    async def assignment_(
        cluster_id: str, group: str, consumer: str, topic: str, partition: int, request: Request
    ) -> Response:
        member, tp = _member(await _found(admin, cluster_id, group), consumer), TopicPartition(topic, partition)
        if tp not in member.assignment:
            kind = ErrorKind(404, "NOT_ASSIGNED", "No such assignment")
            raise Problem(kind, f"{consumer} of {group} does not have {tp}")
        return json_response(_assignment(request, cluster_id, group, consumer, tp))


def _lags(router: APIRouter, admin: AdminClient) -> None:
    @router.get(f"{GROUPS}/{{group}}/lags", summary="REST Proxy v3: a group's lag by partition")
    async def lags(cluster_id: str, group: str, request: Request) -> Response:
        found, lag = await _with_lag(admin, cluster_id, group)
        rows = [_lag(request, cluster_id, group, row, _owner(found, row)) for row in lag]
        return rows_of(request, "KafkaConsumerLagList", rows)

    path = f"{GROUPS}/{{group}}/lags/{{topic}}/partitions/{{partition}}"

    @router.get(path, summary="REST Proxy v3: a group's lag in a partition")
    async def lag_of(cluster_id: str, group: str, topic: str, partition: int, request: Request) -> Response:
        found, lag = await _with_lag(admin, cluster_id, group)
        for row in lag:
            if row.topic_partition == (topic, partition):
                return json_response(_lag(request, cluster_id, group, row, _owner(found, row)))
        raise Problem(ErrorKind(404, "NO_LAG", "No such lag"), f"{group} has no offset in {topic}-{partition}")

    @router.get(f"{GROUPS}/{{group}}/lag-summary", summary="REST Proxy v3: a group's largest and total lag")
    async def summary(cluster_id: str, group: str, request: Request) -> Response:
        found, lag = await _with_lag(admin, cluster_id, group)
        if not lag:
            raise Problem(ErrorKind(404, "NO_LAG", "No lag"), f"{group} has no offsets")
        return json_response(_summary(request, cluster_id, group, found, lag))


async def _found(admin: AdminClient, cluster_id: str, group: str) -> GroupDescription:
    await check_cluster(admin, cluster_id)
    found = await admin.describe_group(group)
    if found.state == DEAD:
        raise GroupNotFound(f"group {group}: it does not exist")
    return found


async def _with_lag(admin: AdminClient, cluster_id: str, group: str) -> tuple[GroupDescription, list[PartitionLag]]:
    return await _found(admin, cluster_id, group), await admin.group_lag(group)


def _member(found: GroupDescription, consumer: str) -> MemberDescription:
    for member in found.members:
        if member.member_id == consumer:
            return member
    raise Problem(ErrorKind(404, "UNKNOWN_CONSUMER", "No such consumer"), f"{found.group_id} has no member {consumer}")


def _owner(found: GroupDescription, row: PartitionLag) -> MemberDescription | None:
    return next((member for member in found.members if row.topic_partition in member.assignment), None)


def state_of(state: str) -> str:
    """Return Kafka's name of a group's state in v3's notation.

    >>> state_of("PreparingRebalance"), state_of("Stable")
    ('PREPARING_REBALANCE', 'STABLE')
    """
    return re.sub(r"(?<!^)(?=[A-Z])", "_", state).upper()


def _group(request: Request, cluster_id: str, found: GroupDescription) -> dict[str, Any]:
    path, name = _place(cluster_id, found.group_id)
    return resource(request, "KafkaConsumerGroup", path, name) | {
        "cluster_id": cluster_id,
        "consumer_group_id": found.group_id,
        "is_simple": not found.protocol_type,
        "partition_assignor": found.protocol,
        "state": state_of(found.state),
        "coordinator_id": found.coordinator,
        "coordinator": {"related": link(request, f"/v3/clusters/{cluster_id}/brokers/{found.coordinator}")},
        "consumers": {"related": link(request, f"{path}/consumers")},
        "lag_summary": {"related": link(request, f"{path}/lag-summary")},
    }


def _consumer(request: Request, cluster_id: str, group: str, member: MemberDescription) -> dict[str, Any]:
    path, name = _place(cluster_id, group, f"/consumers/{member.member_id}", f"/consumer={member.member_id}")
    return resource(request, "KafkaConsumer", path, name) | {
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "consumer_id": member.member_id,
        "instance_id": member.group_instance_id,
        "client_id": member.client_id,
        "assignments": {"related": link(request, f"{path}/assignments")},
    }


def _assignment(request: Request, cluster_id: str, group: str, consumer: str, tp: TopicPartition) -> dict[str, Any]:
    where = f"/consumers/{consumer}/assignments/{tp.topic}/partitions/{tp.partition}"
    path, name = _place(
        cluster_id, group, where, f"/consumer={consumer}/assignment={tp.topic}/partition={tp.partition}"
    )
    topic = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}"
    lag, _ = _place(cluster_id, group, f"/lags/{tp.topic}/partitions/{tp.partition}")
    return resource(request, "KafkaConsumerAssignment", path, name) | {
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "consumer_id": consumer,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "partition": {"related": link(request, topic)},
        "lag": {"related": link(request, lag)},
    }


def _lag(
    request: Request, cluster_id: str, group: str, row: PartitionLag, owner: MemberDescription | None
) -> dict[str, Any]:
    tp = row.topic_partition
    path, name = _place(
        cluster_id, group, f"/lags/{tp.topic}/partitions/{tp.partition}", f"/lag={tp.topic}/partition={tp.partition}"
    )
    return resource(request, "KafkaConsumerLag", path, name) | {
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "topic_name": tp.topic,
        "partition_id": tp.partition,
        "current_offset": row.committed or 0,
        "log_end_offset": row.end,
        "lag": row.lag,
        "consumer_id": "" if owner is None else owner.member_id,
        "instance_id": None if owner is None else owner.group_instance_id,
        "client_id": "" if owner is None else owner.client_id,
    }


def _summary(
    request: Request, cluster_id: str, group: str, found: GroupDescription, lag: Sequence[PartitionLag]
) -> dict[str, Any]:
    most = max(lag, key=lambda row: row.lag)
    owner, tp = _owner(found, most), most.topic_partition
    path, name = _place(cluster_id, group, "/lag-summary", "/lag-summary")
    partition = f"/v3/clusters/{cluster_id}/topics/{tp.topic}/partitions/{tp.partition}"
    return resource(request, "KafkaConsumerGroupLagSummary", path, name) | {
        "cluster_id": cluster_id,
        "consumer_group_id": group,
        "max_lag_consumer_id": "" if owner is None else owner.member_id,
        "max_lag_instance_id": None if owner is None else owner.group_instance_id,
        "max_lag_client_id": "" if owner is None else owner.client_id,
        "max_lag_topic_name": tp.topic,
        "max_lag_partition_id": tp.partition,
        "max_lag": most.lag,
        "total_lag": sum(row.lag for row in lag),
        "max_lag_partition": {"related": link(request, partition)},
    }


def _named(tp: TopicPartition) -> str:
    return f"{tp.topic}/partition={tp.partition}"


def _place(cluster_id: str, group: str, path: str = "", name: str = "") -> tuple[str, str]:
    own = f"/v3/clusters/{cluster_id}/consumer-groups/{group}"
    return own + path, f"kafka={cluster_id}/consumer-group={group}{name}"
