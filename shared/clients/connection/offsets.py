"""Checks the offsets and partitions that a caller passes, and looks up offsets at the leaders of partitions.

Offsets are checked before a request, because a broker interprets some negative numbers in its own way.

>>> checked_offset(TopicPartition("clicks", 0), 7)
7
>>> checked_time("clicks-0", -1)  # in a lookup: the end
Traceback (most recent call last):
...
ValueError: clicks-0: time -1 is not a time in ms since the epoch, from 0 to 9223372036854775807
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, SupportsIndex

from penstock.shared.clients.connection.connection import Connection
from penstock.shared.clients.protocol import requests
from penstock.shared.clients.protocol.errors import error_for_code
from penstock.shared.clients.protocol.requests import CONSUMER, NO_UUID
from penstock.shared.common.errors import NotLeaderOrFollower, UnknownTopicOrPartition
from penstock.shared.common.records import INT64_MAX, OFFSET_METADATA_MAX_BYTES, OffsetAndMetadata, TopicPartition
from penstock.shared.common.topic_names import checked_topic_names

SPECS = {"earliest": -2, "latest": -1}
"""The times that stand for a position in ListOffsets."""
NO_LEADER_EPOCH = -1
"""Without the current leader epoch the broker does not fence the request (KIP-320)."""
INT32_MAX = (1 << 31) - 1


def checked_offset(tp: TopicPartition, offset: object) -> int:
    """Return the offset as an int, also if it is an integer of numpy, such as those of columns.

    Raises TypeError if it is no integer or `tp` is no TopicPartition, ValueError if it is below 0 or has more than 64
    bits.
    """
    _check_type(tp)
    return _checked_int(tp, offset, "offset", "a position in a partition")


def checked_partitions(given: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Return the partitions, each number as an int, also if it is an integer of numpy.

    Raises TypeError for what is no TopicPartition or whose number is no integer, ValueError for a number that is below
    0 or has more than 32 bits, and InvalidTopic for a name that Kafka does not allow.
    """
    checked = []
    for tp in given:
        _check_type(tp)
        number = _checked_int(tp, tp.partition, "partition", "the number of a partition", 0, INT32_MAX)
        checked.append(TopicPartition(tp.topic, number))
    checked_topic_names(dict.fromkeys(tp.topic for tp in checked))
    return checked


def _check_type(tp: object) -> None:
    if not isinstance(tp, TopicPartition):
        raise TypeError(f"{tp!r} is not a TopicPartition")


def _checked_int(what: object, value: object, kind: str, meaning: str, least: int = 0, most: int = INT64_MAX) -> int:
    # True is an int too.
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{what}: {value!r} is not {meaning}, which is an int")
    if not least <= (checked := index(value)) <= most:
        raise ValueError(f"{what}: {kind} {checked} is not {meaning}, from {least} to {most}")
    return checked


def checked_offsets(
    given: Mapping[TopicPartition, OffsetAndMetadata | int],
) -> dict[TopicPartition, OffsetAndMetadata]:
    """Return the offsets to commit, each as an OffsetAndMetadata.

    Raises TypeError or ValueError, which names the partition, for an invalid offset or invalid metadata.
    """
    checked = {}
    for tp, value in given.items():
        at = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
        at = at._replace(offset=checked_offset(tp, at.offset))
        _checked_int(tp, at.leader_epoch, "leader epoch", "an epoch", NO_LEADER_EPOCH, INT32_MAX)
        if not isinstance(at.metadata, str):
            raise TypeError(f"{tp}: the metadata is not a text but {at.metadata!r}")
        if (size := len(at.metadata.encode())) > OFFSET_METADATA_MAX_BYTES:
            raise ValueError(f"{tp}: {size} bytes of metadata, above the {OFFSET_METADATA_MAX_BYTES} that are kept")
        checked[tp] = at
    return checked


def checked_time(what: object, time_ms: object) -> int:
    """Return the time to look up, in ms since the epoch, as an int.

    Raises TypeError if it is no integer, ValueError if it is below 0 or has more than 64 bits.
    """
    return _checked_int(what, time_ms, "time", "a time in ms since the epoch")


def checked_spec(what: object, spec: object) -> str | int:
    """Return `earliest`, `latest` or a time in ms, as an int. Raises ValueError or TypeError for anything else."""
    if not isinstance(spec, str):
        return checked_time(what, spec)
    if spec not in SPECS:
        raise ValueError(f"{what}: {spec!r} is neither earliest nor latest, nor a time")
    return spec


async def list_offsets(
    connection: Connection, specs: Mapping[TopicPartition, str | int], isolation_level: str, timeout_ms: float
) -> dict[TopicPartition, int]:
    """Return for each partition the offset of `earliest`, `latest` or a time in ms; -1 if all records are earlier than
    the time.

    The latest offset is the high watermark, or the last stable offset under `read_committed`.
    """
    stamps = {tp: SPECS[spec] if isinstance(spec, str) else spec for tp, spec in specs.items()}
    level = int(isolation_level == "read_committed")
    found: dict[TopicPartition, int] = {}

    async def request_missing_offsets() -> None:
        # A retry requests only what an earlier attempt did not find.
        missing = [tp for tp in stamps if tp not in found]
        for node, topics in (await by_leader(connection, missing)).items():
            rows = [(t, [(p, NO_LEADER_EPOCH, stamps[TopicPartition(t, p)]) for p in ps]) for t, ps in topics.items()]
            request = requests.LIST_OFFSETS(CONSUMER, level, rows)
            # Do not queue behind a fetch, which the broker may hold while there is no data.
            response = await connection.send(node, request, "list offsets", coordination=True)
            for topic in response.topics:
                for row in topic.partitions:
                    tp = TopicPartition(topic.name, row.partition)
                    if row.error_code:
                        raise error_for_code(row.error_code, str(tp))
                    found[tp] = row.offset

    await connection.retrying(request_missing_offsets, "list offsets", timeout_ms)
    return found


async def by_leader(connection: Connection, partitions: Iterable[TopicPartition]) -> dict[int, dict[str, list[int]]]:
    """Return the partitions grouped by leader and topic, from new metadata.

    Raises NotLeaderOrFollower if a partition has no leader, and UnknownTopicOrPartition if it does not exist. Both are
    retriable. Raises InvalidTopic without a request for a name that Kafka does not allow.
    """
    wanted = list(partitions)
    names = checked_topic_names(dict.fromkeys(tp.topic for tp in wanted))
    rows: list[Any] = [(NO_UUID, name, {}) for name in names]
    request = requests.METADATA(rows, False, False, False)
    response = await connection.send(connection.any_node(), request, "metadata", coordination=True)
    leaders: dict[TopicPartition, int] = {}
    for topic in response.topics:
        if topic.error_code:
            raise error_for_code(topic.error_code, f"topic {topic.name}")
        leaders.update({TopicPartition(topic.name, row.partition): row.leader for row in topic.partitions})
    nodes: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for tp in wanted:
        if tp not in leaders:
            raise UnknownTopicOrPartition(f"{tp}: the topic has {sum(t.topic == tp.topic for t in leaders)} partitions")
        if leaders[tp] < 0:
            raise NotLeaderOrFollower(f"{tp}: no leader")
        nodes[leaders[tp]][tp.topic].append(tp.partition)
    return nodes
