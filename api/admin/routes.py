"""Administration over HTTP: the cluster, topics, groups and their offsets.

Every route is a thin layer over `penstock.shared.clients.admin`. The table in `problem` maps errors to responses.
Offsets change only while a group has no members. Otherwise, except for a dry run, the response is 409 and names the
members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.status_codes import NO_CONTENT
from penstock.shared.clients.admin import (
    Admin,
    GroupDescription,
    OffsetChange,
    PartitionLag,
    ShiftBy,
)
from penstock.shared.clients.admin.admin import Reset
from penstock.shared.clients.admin.types import DEAD
from penstock.shared.common.errors import DataError, GroupNotFound, UnknownTopicOrPartition
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)

Int64 = Field(ge=-(2**63), le=2**63 - 1)
Offset = Field(ge=0, le=2**63 - 1)
State = Annotated[str, Field(examples=["Stable"])]


class ToOffset(BaseModel):
    """The same offset in every selected partition."""

    model_config = ConfigDict(extra="forbid")
    offset: int = Offset


class ToTimestamp(BaseModel):
    """The offset of the first record at or after a time (ms since the epoch); the end offset if there is none.

    Kafka also counts a transaction's marker as a record, with the time at which the broker wrote it.
    """

    model_config = ConfigDict(extra="forbid")
    timestamp_ms: int = Offset


class ToShift(BaseModel):
    """The committed offset plus `shift_by`. Without a commit, the partition's first offset plus `shift_by`."""

    model_config = ConfigDict(extra="forbid")
    shift_by: int = Int64


class OffsetsRequest(BaseModel):
    """The offsets that a group is to continue from.

    An offset outside of the log becomes the first or the end offset of the log.
    """

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"to": "earliest", "dry_run": True},
                {"to": {"timestamp_ms": 1357016400000}, "topics": {"flights": [0, 1]}},
            ]
        },
    )
    to: Literal["earliest", "latest"] | ToOffset | ToTimestamp | ToShift
    topics: list[str] | dict[str, list[int]] | None = Field(
        None, description="topic names, or partitions by topic; default: all that the group has committed"
    )
    dry_run: bool = Field(False, description="return the changes without making them")

    @model_validator(mode="after")
    def _topics_are_named(self) -> OffsetsRequest:
        if self.topics is not None and not self.topics:
            raise ValueError("topics: name at least one, or leave it out for all")
        return self


class BrokerRow(TypedDict):
    """A broker."""

    node_id: of.Broker
    host: of.Host
    port: of.Port
    rack: str | None


class ClusterResponse(TypedDict):
    """The cluster."""

    cluster_id: of.ClusterId | None
    controller: of.Broker
    brokers: list[BrokerRow]


class TopicsResponse(TypedDict):
    """Topic names."""

    topics: list[of.Topic]


class PartitionRow(TypedDict):
    """A partition with its first offset and its high watermark. Both are null if it has no leader."""

    partition: of.Partition
    leader: of.Broker | None
    replicas: list[of.Broker]
    isr: list[of.Broker]
    earliest_offset: of.Offset | None
    latest_offset: of.Offset | None


class TopicResponse(TypedDict):
    """A topic."""

    topic: of.Topic
    topic_id: Annotated[str, Field(examples=["8sJ0Yh2aQF6kR3m0u2Zb1g"])]
    internal: bool
    partitions: list[PartitionRow]
    configs: Annotated[dict[str, str | None], Field(examples=[{"cleanup.policy": "delete"}])]


class GroupRow(TypedDict):
    """A group in a list."""

    group: of.Group
    state: State
    protocol_type: Annotated[str, Field(examples=["consumer"])]


class GroupsResponse(TypedDict):
    """All groups."""

    groups: list[GroupRow]


class TopicPartitionRow(TypedDict):
    """A partition of a member."""

    topic: of.Topic
    partition: of.Partition


class MemberRow(TypedDict):
    """A member of a group."""

    member_id: of.MemberId
    client_id: of.ClientId
    host: Annotated[str, Field(examples=["/127.0.0.1"])]
    group_instance_id: str | None
    partitions: list[TopicPartitionRow]


class LagRow(TypedDict):
    """A group's lag in a partition. `committed` is null without a commit. `end` and `lag` are null if the partition has
    no leader, or does not exist any more."""

    topic: of.Topic
    partition: of.Partition
    committed: of.Offset | None
    end: of.Offset | None
    lag: of.Lag | None


class GroupResponse(TypedDict):
    """A group. `lag` is the sum over the rows of `partitions` that have a lag."""

    group: of.Group
    state: State
    protocol: Annotated[str, Field(examples=["range"])]
    coordinator: of.Broker
    members: list[MemberRow]
    lag: of.Lag
    partitions: list[LagRow]


class OffsetChangeRow(TypedDict):
    """A committed offset before and after a change."""

    topic: of.Topic
    partition: of.Partition
    before: of.Offset | None
    after: of.Offset


class OffsetsResponse(TypedDict):
    """The changes of a group's offsets."""

    group: of.Group
    dry_run: bool
    partitions: list[OffsetChangeRow]


def admin_router(admin: Admin) -> APIRouter:
    """Return all admin routes over one admin client."""
    router = APIRouter(tags=["admin"])
    _topic_routes(router, admin)
    _group_routes(router, admin)
    return router


def _topic_routes(router: APIRouter, admin: Admin) -> None:
    @router.get(
        "/v1/cluster", summary="The cluster's id, controller and brokers", responses={200: {"model": ClusterResponse}}
    )
    async def describe_cluster() -> Response:
        description = await admin.cluster()
        brokers = [BrokerRow(node_id=b.node_id, host=b.host, port=b.port, rack=b.rack) for b in description.brokers]
        return json_response(
            ClusterResponse(cluster_id=description.cluster_id, controller=description.controller, brokers=brokers)
        )

    @router.get(
        "/v1/topics", summary="Topic names; Kafka's own are left out", responses={200: {"model": TopicsResponse}}
    )
    async def list_topics() -> Response:
        return json_response(TopicsResponse(topics=await admin.list_topics()))

    @router.get(
        "/v1/topics/{topic}",
        summary="A topic's partitions with offsets, and its configs",
        responses={200: {"model": TopicResponse}},
    )
    async def topic_description(topic: of.Topic) -> Response:
        description = (await admin.describe_topics([topic]))[topic]
        online = [TopicPartition(topic, p.partition) for p in description.partitions if p.leader is not None]
        earliest = await admin.list_offsets(dict.fromkeys(online, "earliest"))
        latest = await admin.list_offsets(dict.fromkeys(online, "latest"))
        rows: list[PartitionRow] = [
            {
                "partition": p.partition,
                "leader": p.leader,
                "replicas": list(p.replicas),
                "isr": list(p.isr),
                "earliest_offset": earliest.get(TopicPartition(topic, p.partition)),
                "latest_offset": latest.get(TopicPartition(topic, p.partition)),
            }
            for p in description.partitions
        ]
        configs = dict(sorted((await admin.describe_configs(topic)).items()))
        response: TopicResponse = {
            "topic": topic,
            "topic_id": description.topic_id,
            "internal": description.is_internal,
            "partitions": rows,
            "configs": configs,
        }
        return json_response(response)


def _group_routes(router: APIRouter, admin: Admin) -> None:
    @router.get("/v1/groups", summary="All groups with their state", responses={200: {"model": GroupsResponse}})
    async def list_groups() -> Response:
        listings = await admin.list_groups()
        rows = [GroupRow(group=g.group_id, state=g.state, protocol_type=g.protocol_type) for g in listings]
        return json_response(GroupsResponse(groups=rows))

    @router.get(
        "/v1/groups/{group:id}",
        summary="A group's members with their partitions, and its lag",
        responses={200: {"model": GroupResponse}},
    )
    async def group_description(group: of.Group) -> Response:
        description = await admin.describe_group(group)
        lags = await admin.group_lag(group)
        if description.state == DEAD and not lags:
            raise GroupNotFound(f"group {group}: it does not exist")
        return json_response(_group_response(description, lags))

    @router.post(
        "/v1/groups/{group:id}/offsets",
        summary="Set the offsets of a group without members",
        responses={200: {"model": OffsetsResponse}},
    )
    async def reset_offsets(group: of.Group, request: OffsetsRequest) -> Response:
        partitions = await _partitions_to_reset(admin, request.topics)
        to: Reset
        match request.to:
            case ToOffset(offset=offset):
                if partitions is None:
                    partitions = list(await admin.group_offsets(group))
                to = dict.fromkeys(partitions, offset)
            case ToTimestamp(timestamp_ms=timestamp_ms):
                to = timestamp_ms
            case ToShift(shift_by=shift_by):
                to = ShiftBy(shift_by)
            case _:
                to = request.to
        changes = await admin.reset_group_offsets(group, to, partitions, request.dry_run)
        if not request.dry_run:
            log.info("offsets reset", group=group, to=request.model_dump()["to"], partitions=len(changes))
        return json_response(
            OffsetsResponse(group=group, dry_run=request.dry_run, partitions=_offset_change_rows(changes))
        )

    @router.delete(
        "/v1/groups/{group:id}", summary="Delete a group without members, with its offsets", status_code=NO_CONTENT
    )
    async def delete_group(group: of.Group) -> Response:
        await admin.delete_group(group)
        log.info("group deleted", group=group)
        return Response(status_code=NO_CONTENT)


async def _partitions_to_reset(
    admin: Admin, topics: Sequence[str] | Mapping[str, Sequence[int]] | None
) -> list[TopicPartition] | None:
    """Return the partitions that `topics` selects, sorted: all partitions of a topic, or those that a mapping lists for
    it.

    Returns None if `topics` is None. Raises UnknownTopicOrPartition for a topic or partition that does not exist, and
    DataError if a mapping lists no partition of a topic.
    """
    if topics is None:
        return None
    descriptions = await admin.describe_topics(list(topics))
    selected = set()
    for name in topics:
        existing = [p.partition for p in descriptions[name].partitions]
        requested = topics[name] if isinstance(topics, Mapping) else existing
        if not requested:
            raise DataError(f"topics.{name}: name at least one partition")
        for partition in requested:
            if partition not in existing:
                raise UnknownTopicOrPartition(f"{name}-{partition}: the topic has {len(existing)} partitions")
            selected.add(TopicPartition(name, partition))
    return sorted(selected)


def _group_response(description: GroupDescription, lags: Sequence[PartitionLag]) -> GroupResponse:
    members: list[MemberRow] = [
        {
            "member_id": m.member_id,
            "client_id": m.client_id,
            "host": m.host,
            "group_instance_id": m.group_instance_id,
            "partitions": [{"topic": tp.topic, "partition": tp.partition} for tp in sorted(m.assignment)],
        }
        for m in description.members
    ]
    rows: list[LagRow] = [
        {
            "topic": row.topic_partition.topic,
            "partition": row.topic_partition.partition,
            "committed": row.committed,
            "end": row.end,
            "lag": row.lag,
        }
        for row in lags
    ]
    return {
        "group": description.group_id,
        "state": description.state,
        "protocol": description.protocol,
        "coordinator": description.coordinator,
        "members": members,
        "lag": sum(row.lag for row in lags if row.lag is not None),
        "partitions": rows,
    }


def _offset_change_rows(changes: Mapping[TopicPartition, OffsetChange]) -> list[OffsetChangeRow]:
    return [
        {"topic": tp.topic, "partition": tp.partition, "before": change.before, "after": change.after}
        for tp, change in sorted(changes.items())
    ]
