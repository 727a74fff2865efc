"""Offset lookups at the partitions' leaders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.shared.clients.connection import wire
from penstock.shared.clients.connection.client import Connection
from penstock.shared.clients.connection.errors import error_for_code
from penstock.shared.clients.connection.wire_types import NO_UUID
from penstock.shared.common.errors import NotLeaderOrFollower, UnknownTopicOrPartition
from penstock.shared.common.records import TopicPartition

SPECS = {"earliest": -2, "latest": -1}
"""The times that stand for a position in ListOffsets."""
CONSUMER = -1
"""The replica id of a client that is no broker."""
NO_LEADER_EPOCH = -1
"""Without the current leader epoch the broker does not fence the request (KIP-320)."""
READ_UNCOMMITTED = 0
READ_COMMITTED = 1


async def list_offsets(
    connection: Connection, specs: Mapping[TopicPartition, str | int], isolation_level: str, timeout_ms: float
) -> dict[TopicPartition, int]:
    """Return for each partition the offset of `earliest`, `latest` or a time in ms; -1 if no record is as late as the
    time.

    The latest is the high watermark, under `read_committed` the last stable offset.
    """
    stamps = {tp: SPECS[spec] if isinstance(spec, str) else spec for tp, spec in specs.items()}
    level = READ_COMMITTED if isolation_level == "read_committed" else READ_UNCOMMITTED
    found: dict[TopicPartition, int] = {}

    async def ask_leaders_for_offsets() -> None:
        # A retry requests only what an earlier attempt did not find.
        missing = [tp for tp in stamps if tp not in found]
        for node, topics in (await by_leader(connection, missing)).items():
            rows = [(t, [(p, NO_LEADER_EPOCH, stamps[TopicPartition(t, p)]) for p in ps]) for t, ps in topics.items()]
            request = wire.LIST_OFFSETS(CONSUMER, level, rows)
            # Do not queue behind a fetch, which the broker may hold while there is no data.
            response = await connection.send(node, request, "list offsets", coordination=True)
            for topic, partitions in response.topics:
                for partition, code, _, offset, _ in partitions:
                    tp = TopicPartition(topic, partition)
                    if code:
                        raise error_for_code(code, str(tp))
                    found[tp] = offset

    await connection.retrying(ask_leaders_for_offsets, "list offsets", timeout_ms)
    return found


async def by_leader(connection: Connection, partitions: Iterable[TopicPartition]) -> dict[int, dict[str, list[int]]]:
    """Return partitions by leader and topic, from fresh metadata.

    Raises NotLeaderOrFollower (retriable) if a partition has no leader.
    """
    wanted = list(partitions)
    rows: list[Any] = [(NO_UUID, name, {}) for name in dict.fromkeys(tp.topic for tp in wanted)]
    request = wire.METADATA(rows, False, False, False)
    response = await connection.send(connection.any_node(), request, "metadata", coordination=True)
    leaders: dict[TopicPartition, int] = {}
    for code, name, _, _, partition_rows, *_ in response.topics:
        if code:
            raise error_for_code(code, f"topic {name}")
        leaders.update({TopicPartition(name, p): leader for _, p, leader, *_ in partition_rows})
    nodes: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for tp in wanted:
        if tp not in leaders:
            raise UnknownTopicOrPartition(f"{tp}: the topic has {sum(t.topic == tp.topic for t in leaders)} partitions")
        if leaders[tp] < 0:
            raise NotLeaderOrFollower(f"{tp}: no leader")
        nodes[leaders[tp]][tp.topic].append(tp.partition)
    return nodes
