"""The arguments and results of `Admin`."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.shared.common.records import INT64_MAX, TopicPartition

DEAD = "Dead"
"""The state that DescribeGroups returns for a group that does not exist."""

DEFAULT_CONFIG = "DEFAULT_CONFIG"
CONFIG_SOURCES: Mapping[int, str] = {
    1: "DYNAMIC_TOPIC_CONFIG",
    2: "DYNAMIC_BROKER_CONFIG",
    3: "DYNAMIC_DEFAULT_BROKER_CONFIG",
    4: "STATIC_BROKER_CONFIG",
    5: DEFAULT_CONFIG,
    6: "DYNAMIC_BROKER_LOGGER_CONFIG",
    7: "DYNAMIC_CLIENT_METRICS_CONFIG",
    8: "DYNAMIC_GROUP_CONFIG",
}
"""The sources of a config's value, by Kafka's numbers (ConfigSource in DescribeConfigsResponse)."""

DEFAULT_MAX_MESSAGE_BYTES = 1_048_588
"""Kafka's default of the config `max.message.bytes` of topics."""
MAX_MESSAGE_BYTES_MAX = 2**31 - 1
"""The largest value of the config `max.message.bytes`, which is a signed 32-bit integer."""

UNLIMITED_TIMESTAMPS: Mapping[str, str] = {
    # The broker rejects a whole batch if one record's timestamp is further behind or ahead than these (KIP-937).
    "message.timestamp.before.max.ms": str(INT64_MAX),
    "message.timestamp.after.max.ms": str(INT64_MAX),
}
UNLIMITED_TIMESTAMPS_BEFORE_3_6: Mapping[str, str] = {"message.timestamp.difference.max.ms": str(INT64_MAX)}
"""Kafka before 3.6 has only this limit, and Kafka 4.0 has removed it."""

EVENT_TIME_CONFIGS: Mapping[str, str] = {
    # Kafka deletes by record timestamp: with a retention, records with old event times are deleted within minutes.
    "retention.ms": "-1",
    # A jump of event time over segment.ms rolls a segment each time.
    "segment.ms": str(INT64_MAX),
    # With LogAppendTime the broker would replace event times by the time of writing.
    "message.timestamp.type": "CreateTime",
    **UNLIMITED_TIMESTAMPS,
}


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create; `replication_factor` -1 is the broker's default."""

    name: str
    partitions: int
    replication_factor: int = -1
    configs: Mapping[str, str] = field(default_factory=dict)


def event_time_topic(name: str, partitions: int, *, replication_factor: int = -1, **configs: str) -> NewTopic:
    """Return a new topic for records with event times.

    It accepts and keeps any timestamp, and no record is deleted because of its age, whatever the broker's defaults are.
    Kafka before 3.6 rejects two of its configs as unknown. `create_topics` then replaces them by the older
    `message.timestamp.difference.max.ms`.

    In the names of configs, underscores stand for dots: `event_time_topic("t", 4, cleanup_policy="compact")`.
    """
    configured = {name_.replace("_", "."): value for name_, value in configs.items()}
    return NewTopic(name, partitions, replication_factor, {**EVENT_TIME_CONFIGS, **configured})


def max_message_bytes_with(configs: Mapping[str, str | None], added_bytes: int) -> int:
    """Return the `max.message.bytes` that a topic needs for another topic's records with up to `added_bytes` added to
    each.

    `configs` are those of the other topic. If they lack `max.message.bytes`, it counts as Kafka's default. The result
    is at most MAX_MESSAGE_BYTES_MAX.
    """
    record_bytes_max = int(configs.get("max.message.bytes") or DEFAULT_MAX_MESSAGE_BYTES)
    return min(record_bytes_max + added_bytes, MAX_MESSAGE_BYTES_MAX)


def topic_before_3_6(topic: NewTopic) -> NewTopic:
    """Return the topic with UNLIMITED_TIMESTAMPS_BEFORE_3_6 in place of UNLIMITED_TIMESTAMPS.

    Returns the topic unchanged if its configs lack UNLIMITED_TIMESTAMPS.
    """
    if not UNLIMITED_TIMESTAMPS.items() <= topic.configs.items():
        return topic
    others = {name: value for name, value in topic.configs.items() if name not in UNLIMITED_TIMESTAMPS}
    return replace(topic, configs={**others, **UNLIMITED_TIMESTAMPS_BEFORE_3_6})


@dataclass(frozen=True, slots=True)
class PartitionDescription:
    """A partition's leader (None while there is none), replicas and in-sync replicas, as node ids."""

    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic's id and its partitions in order.

    The id is in Kafka's text form; it changes if the topic is recreated.
    """

    name: str
    topic_id: str
    is_internal: bool
    partitions: tuple[PartitionDescription, ...]


def topic_id_text(topic_id: uuid.UUID) -> str:
    """Return a topic id as Kafka's tools write it, and as a TopicDescription has it: base64 of 22 characters.

    >>> topic_id_text(uuid.UUID("da26b76d-ab0e-47e2-9b95-658fb13b8b6f"))
    '2ia3basOR-KblWWPsTuLbw'
    """
    return base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=").decode()


@dataclass(frozen=True, slots=True)
class ConfigSynonym:
    """A config from which a `ConfigEntry` may take its value; `source` as in `ConfigEntry`."""

    name: str
    value: str | None
    source: str


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """A config with the value in force and the source of that value.

    `source` has Kafka's name (DYNAMIC_TOPIC_CONFIG, STATIC_BROKER_CONFIG, DEFAULT_CONFIG, …). `synonyms` are the values
    of all sources, the one in force first. The value of a sensitive config is None.
    """

    name: str
    value: str | None
    source: str
    is_read_only: bool = False
    is_sensitive: bool = False
    synonyms: tuple[ConfigSynonym, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether the value is Kafka's default: the config is set neither for the topic nor for the broker."""
        return self.source == DEFAULT_CONFIG


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """A member of a group."""

    member_id: str
    client_id: str
    host: str
    group_instance_id: str | None
    assignment: frozenset[TopicPartition]

    def __str__(self) -> str:
        return f"{self.member_id} (client {self.client_id}, host {self.host})"


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group. `state` has Kafka's name (Stable, Empty, Dead, …)."""

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    coordinator: int
    members: tuple[MemberDescription, ...]


@dataclass(frozen=True, slots=True)
class GroupListing:
    """A group as its coordinator lists it."""

    group_id: str
    state: str
    protocol_type: str


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """The lag of a group in one partition, in offsets.

    Without a committed offset `committed` is None, and `lag` counts from the first offset. If the partition has no
    leader, or does not exist any more, `end` and `lag` are None.
    """

    topic_partition: TopicPartition
    committed: int | None
    end: int | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """One partition's committed offset before (None: no commit) and after a change."""

    before: int | None
    after: int


@dataclass(frozen=True, slots=True)
class BrokerDescription:
    """A broker's node id and address."""

    node_id: int
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True, slots=True)
class ClusterDescription:
    """The cluster's id, controller and brokers."""

    cluster_id: str | None
    controller: int
    brokers: tuple[BrokerDescription, ...]
