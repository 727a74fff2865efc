"""Looks up partitions of topics for the metadata routes of REST Proxy v2 and v3."""

from __future__ import annotations

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import NOT_FOUND
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.admin.types import PartitionDescription
from penstock.shared.common.records import TopicPartition


async def describe_partition(admin: Admin, topic: str, partition: int) -> PartitionDescription:
    """Return the admin client's description of one partition.

    Raises Problem (404) for an unknown partition, and UnknownTopicOrPartition for an unknown topic.
    """
    for description in (await admin.describe_topics([topic]))[topic].partitions:
        if description.partition == partition:
            return description
    raise Problem(ErrorKind(NOT_FOUND, "UNKNOWN_PARTITION", "Partition not found"), "Partition not found.")


async def first_and_next_offset(admin: Admin, tp: TopicPartition) -> tuple[int, int]:
    """Return a partition's first offset and its high watermark, for REST Proxy."""
    return (await admin.list_offsets({tp: "earliest"}))[tp], (await admin.list_offsets({tp: "latest"}))[tp]
