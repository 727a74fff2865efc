"""Topics, their configs and metadata on both brokers."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from penstock.shared.testing.fake_broker import Api, Message
from penstock.shared.testing.fake_broker.configs import TOPIC_CONFIGS
from tests.contract.conftest import Wire, code_name, created, until

TOPIC = 2


async def create(wire: Wire, name: str, partitions: int = 1, replicas: int = 1, **configs: str | None) -> str:
    rows = [Message(name=key.replace("_", "."), value=value) for key, value in configs.items()]
    topic = Message(name=name, num_partitions=partitions, replication_factor=replicas, configs=rows)
    response = await wire.request(Api.CREATE_TOPICS, topics=[topic], timeout_ms=5_000)
    return code_name(response.topics[0].error_code)


async def test_a_topic_is_created_and_deleted(wire: Wire, name: str) -> None:
    """A topic exists from its creation to its deletion, with the requested number of partitions."""
    await created(wire, name, 3)
    assert await create(wire, name) == "TOPIC_ALREADY_EXISTS"
    row = (await wire.request(Api.METADATA, topics=[Message(name=name)])).topics[0]
    assert (row.error_code, row.name, sorted(one.partition for one in row.partitions)) == (0, name, [0, 1, 2])
    assert row.topic_id != uuid.UUID(int=0)
    assert all(one.leader_id in one.replica_nodes and one.isr_nodes == one.replica_nodes for one in row.partitions)
    response = await wire.request(Api.DELETE_TOPICS, topic_names=[name, f"{name}-none"], timeout_ms=5_000)
    codes = {topic.name: code_name(topic.error_code) for topic in response.topics}
    assert codes == {name: "NONE", f"{name}-none": "UNKNOWN_TOPIC_OR_PARTITION"}
    while not (await wire.request(Api.METADATA, topics=[Message(name=name)])).topics[0].error_code:
        continue
    assert await create(wire, name) == "NONE"


@pytest.mark.parametrize(
    ("policy", "code"), [("delete", "NONE"), ("compact,delete", "NONE"), ("compact", "POLICY_VIOLATION")]
)
async def test_records_of_a_compacted_topic_cannot_be_deleted(wire: Wire, name: str, policy: str, code: str) -> None:
    """Unless its old records are deleted, too."""
    assert await create(wire, name, cleanup_policy=policy) == "NONE"
    rows = [Message(name=name, partitions=[Message(partition=0, offset=0)])]
    found = "NOT_LEADER_OR_FOLLOWER"
    while found in ("NOT_LEADER_OR_FOLLOWER", "UNKNOWN_TOPIC_OR_PARTITION"):
        response = await wire.request(Api.DELETE_RECORDS, topics=rows, timeout_ms=5_000)
        found = code_name(response.topics[0].partitions[0].error_code)
    assert found == code


async def test_invalid_topics(wire: Wire, name: str) -> None:
    """Invalid names, counts and configs are errors."""
    assert await create(wire, f"{name}/slash") == "INVALID_TOPIC_EXCEPTION"
    assert await create(wire, "..") == "INVALID_TOPIC_EXCEPTION"
    assert await create(wire, "x" * 250) == "INVALID_TOPIC_EXCEPTION"
    assert await create(wire, name, 0) == "INVALID_PARTITIONS"
    assert await create(wire, name, 1, 0) == "INVALID_REPLICATION_FACTOR"
    assert await create(wire, name, 1, 99) == "INVALID_REPLICATION_FACTOR"
    assert await create(wire, name, no_such_config="1") == "INVALID_CONFIG"
    assert await create(wire, name, retention_ms="soon") == "INVALID_CONFIG"
    assert await create(wire, name, cleanup_policy="shred") == "INVALID_CONFIG"
    assert await create(wire, name, retention_ms=None) == "INVALID_CONFIG"


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ("min_insync_replicas", ["0.5", "0"]),
        ("max_message_bytes", ["-1", "1e3", str(1 << 31)]),
        ("retention_ms", ["-2", "inf", str(1 << 63)]),
        ("segment_bytes", [str((1 << 20) - 1)]),
        ("min_cleanable_dirty_ratio", ["1.1", "-0.1", "nan"]),
        ("compression_gzip_level", ["-2", "0", "10", "1,9"]),
        ("compression_lz4_level", ["0", "18"]),
        ("compression_zstd_level", ["-131073", "23"]),
        ("local_retention_bytes", ["-3"]),
    ],
)
async def test_numbers_in_configs(wire: Wire, name: str, config: str, wrong: list[str]) -> None:
    """A number must be in its range, and only the dirty ratio may have a fraction."""
    for value in wrong:
        assert await create(wire, name, **{config: value}) == "INVALID_CONFIG"
    assert await create(wire, name, min_cleanable_dirty_ratio="0.25", retention_bytes="-2") == "NONE"


async def test_booleans_and_replicas_in_configs(wire: Wire, name: str) -> None:
    """A boolean may have any case, and throttled replicas are pairs of numbers or "*"."""
    assert await create(wire, name, preallocate="yes") == "INVALID_CONFIG"
    assert await create(wire, name, leader_replication_throttled_replicas="none") == "INVALID_CONFIG"
    replicas = {"leader_replication_throttled_replicas": "0:1,1:2", "follower_replication_throttled_replicas": "*"}
    assert await create(wire, name, preallocate="True", remote_storage_enable=" FALSE", **replicas) == "NONE"


@pytest.mark.parametrize(
    ("assignments", "result"),
    [
        ({0: [1], 1: [1]}, ("NONE", 2, 1)),
        ({0: [7]}, ("INVALID_REPLICA_ASSIGNMENT", -1, -1)),
        ({0: []}, ("INVALID_REPLICA_ASSIGNMENT", -1, -1)),
        ({0: [1, 1]}, ("INVALID_REPLICA_ASSIGNMENT", -1, -1)),
        ({1: [1]}, ("INVALID_REPLICA_ASSIGNMENT", -1, -1)),
    ],
    ids=["valid", "unknown node", "no node", "same node", "no partition 0"],
)
async def test_assigned_replicas(
    wire: Wire, name: str, assignments: dict[int, list[int]], result: tuple[str, int, int]
) -> None:
    """The nodes of each partition can be chosen: different nodes of the cluster, for each partition from 0 on."""
    rows = [Message(partition=partition, broker_ids=nodes) for partition, nodes in assignments.items()]
    topic = Message(name=name, num_partitions=-1, replication_factor=-1, assignments=rows)
    row = (await wire.request(Api.CREATE_TOPICS, topics=[topic], timeout_ms=5_000)).topics[0]
    assert (code_name(row.error_code), row.num_partitions, row.replication_factor) == result


async def test_validate_only_creates_nothing(wire: Wire, name: str) -> None:
    """With `validate_only` a topic is checked and not created."""
    topic = Message(name=name, num_partitions=1, replication_factor=1)
    response = await wire.request(Api.CREATE_TOPICS, topics=[topic], timeout_ms=5_000, validate_only=True)
    assert code_name(response.topics[0].error_code) == "NONE"
    assert await create(wire, name) == "NONE"


async def test_metadata_of_unknown_topics(wire: Wire, name: str) -> None:
    """Unknown names, unknown ids and invalid names have their own errors, and an empty list requests no topic."""

    async def described(**row: Any) -> str:
        response = await wire.request(Api.METADATA, topics=[Message(**row)], allow_auto_topic_creation=True)
        return code_name(response.topics[0].error_code)

    assert await described(name=name) == "UNKNOWN_TOPIC_OR_PARTITION"
    assert await described(name="a/b") == "INVALID_TOPIC_EXCEPTION"
    assert await described(name=None, topic_id=uuid.uuid4()) == "UNKNOWN_TOPIC_ID"
    response = await wire.request(Api.METADATA, topics=[])
    assert (response.topics, len(response.brokers)) == ([], 1)
    assert response.controller_id == response.brokers[0].node_id


async def test_metadata_of_everything(wire: Wire, name: str) -> None:
    """Null requests every topic, as does an empty list in version 0."""
    await created(wire, name)
    assert name in [one.name for one in (await wire.request(Api.METADATA, topics=None)).topics]
    assert name in [one.name for one in (await wire.request(Api.METADATA, 0, topics=[])).topics]


async def test_configs_are_described_and_changed(wire: Wire, name: str) -> None:
    """A topic has the configs it was given and defaults for the rest, and both can be changed."""
    await created(wire, name, retention_ms="-1")

    async def configs(*keys: str) -> dict[str, tuple[str, int]]:
        row = Message(resource_type=TOPIC, resource_name=name, configuration_keys=list(keys))
        response = await wire.request(Api.DESCRIBE_CONFIGS, resources=[row])
        return {one.name: (one.value, one.config_source) for one in response.resources[0].configs}

    async def alter(key: str, operation: int, value: str | None, topic: str = name) -> str:
        change = Message(name=key, config_operation=operation, value=value)
        row = Message(resource_type=TOPIC, resource_name=topic, configs=[change])
        return code_name((await wire.request(Api.INCREMENTAL_ALTER_CONFIGS, resources=[row])).resources[0].error_code)

    assert await configs("retention.ms", "cleanup.policy") == {
        "retention.ms": ("-1", 1),
        "cleanup.policy": ("delete", 5),
    }
    row = Message(resource_type=TOPIC, resource_name=name, configuration_keys=["retention.ms"])
    config = (await wire.request(Api.DESCRIBE_CONFIGS, resources=[row], include_synonyms=True)).resources[0].configs[0]
    assert (config.synonyms[0].name, config.synonyms[0].value, config.synonyms[0].source) == ("retention.ms", "-1", 1)
    assert await alter("max.message.bytes", 0, "1000") == "NONE"
    assert await alter("retention.ms", 1, None) == "NONE"

    async def are_changed() -> bool:  # a broker applies the changes one by one
        found = await configs("max.message.bytes", "retention.ms")
        return found["max.message.bytes"] == ("1000", 1) and found["retention.ms"][1] != 1

    await until(are_changed)
    assert await alter("max.message.bytes", 0, "many") == "INVALID_CONFIG"
    assert await alter("max.message.bytes", 0, "1", f"{name}-none") == "UNKNOWN_TOPIC_OR_PARTITION"
    assert set(await configs()) == set(TOPIC_CONFIGS)


async def test_topics_grow(wire: Wire, name: str) -> None:
    """A topic's number of partitions can be raised, never lowered."""
    await created(wire, name, 2)

    async def grow(count: int, topic: str = name) -> str:
        row = Message(name=topic, count=count, assignments=None)
        return code_name(
            (await wire.request(Api.CREATE_PARTITIONS, topics=[row], timeout_ms=5_000)).topics[0].error_code
        )

    assert await grow(4) == "NONE"
    assert await grow(4) == "INVALID_PARTITIONS"
    assert await grow(3) == "INVALID_PARTITIONS"
    assert await grow(3, f"{name}-none") == "UNKNOWN_TOPIC_OR_PARTITION"
    while len((await wire.request(Api.METADATA, topics=[Message(name=name)])).topics[0].partitions) != 4:
        continue
