"""Settings of distributed workers."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.group.connect_protocol import COMPATIBLE, EAGER, SESSIONED
from penstock.shared.connect.herder.settings import DistributedConfig, StandaloneConfig

PROPS = {
    "bootstrap.servers": "a:9092",
    "group.id": "g",
    "config.storage.topic": "configs",
    "offset.storage.topic": "offsets",
    "status.storage.topic": "statuses",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
}


def test_defaults_are_kafka_connects() -> None:
    """What is not given is as in Kafka Connect."""
    config = DistributedConfig(PROPS)
    assert config["scheduled.rebalance.max.delay.ms"] == 300_000
    assert config["session.timeout.ms"] == 10_000
    assert config.offered_versions == (SESSIONED, COMPATIBLE, EAGER)
    assert not config.exactly_once
    assert config.kafka.bootstrap_servers == "a:9092"


def test_topics_are_as_the_settings_say() -> None:
    """Partitions and replicas by their settings, anything else handed on to the topic; of configs one partition."""
    config = DistributedConfig(
        PROPS | {"offset.storage.partitions": "3", "offset.storage.min.insync.replicas": "2",
                 "config.storage.replication.factor": "1", "offset.storage.cleanup.policy": "delete"}
    )  # fmt: skip
    offsets, configs = config.topic("offset"), config.topic("config")
    assert (offsets.name, offsets.partitions, dict(offsets.configs)) == ("offsets", 3, {"min.insync.replicas": "2"})
    assert (configs.partitions, configs.replication_factor, configs.is_single) == (1, 1, True)


def test_transactional_ids_are_kafka_connects() -> None:
    """So that a worker of either kind fences the other's."""
    config = DistributedConfig(PROPS | {"exactly.once.source.support": "enabled"})
    assert config.exactly_once
    assert config.source_transactional_id("c", 2) == "g-c-2"
    assert config.leader_transactional_id == "connect-cluster-g"
    preparing = DistributedConfig(PROPS | {"exactly.once.source.support": "preparing"})
    assert (preparing.exactly_once, preparing.transactional_leader) == (False, True)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"group.id": None}, "group.id"),
        ({"heartbeat.interval.ms": "10000"}, "heartbeat.interval.ms"),
        ({"status.storage.topic": "configs"}, "storage"),
        ({"connect.protocol": "psychic"}, "connect.protocol"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, str | None], named: str) -> None:
    """Missing, contradicting and impossible ones."""
    props = {name: value for name, value in (PROPS | wrong).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        DistributedConfig(props)


def test_standalone_needs_a_file() -> None:
    """Offsets of a standalone worker lie in a file, which must be named."""
    with pytest.raises(ConfigError, match=r"offset\.storage\.file\.filename"):
        StandaloneConfig(PROPS)
    assert not StandaloneConfig(PROPS | {"offset.storage.file.filename": "x"}).exactly_once


def test_standalone_workers_have_no_processes() -> None:
    """Their offsets lie in a file of one process."""
    with pytest.raises(ConfigError, match=r"penstock\.task\.isolation"):
        StandaloneConfig(PROPS | {"offset.storage.file.filename": "x", "penstock.task.isolation": "process"})
    assert DistributedConfig(PROPS | {"penstock.task.isolation": "process"})["penstock.task.isolation"] == "process"
