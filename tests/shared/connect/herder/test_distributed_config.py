"""Settings of distributed workers."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.group.connect_protocol import COMPATIBLE, EAGER, SESSIONED
from penstock.shared.connect.herder.distributed_config import DistributedConfig

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
    """Defaults are Kafka Connect's."""
    config = DistributedConfig(PROPS)
    assert config["scheduled.rebalance.max.delay.ms"] == 300_000
    assert config["session.timeout.ms"] == 10_000
    assert config.offered_versions == (SESSIONED, COMPATIBLE, EAGER)
    assert not config.exactly_once
    assert config.kafka.bootstrap_servers == "a:9092"


def test_topics_follow_their_settings() -> None:
    """Topics have their settings' partitions, replicas and configs; the config topic has one
    partition, and the cleanup policy is ignored.
    """
    config = DistributedConfig(
        PROPS | {"offset.storage.partitions": "3", "offset.storage.min.insync.replicas": "2",
                 "config.storage.replication.factor": "1", "offset.storage.cleanup.policy": "delete"}
    )  # fmt: skip
    offsets, configs = config.topic("offset"), config.topic("config")
    assert (offsets.name, offsets.partitions, dict(offsets.configs)) == ("offsets", 3, {"min.insync.replicas": "2"})
    assert (configs.partitions, configs.replication_factor, configs.is_single) == (1, 1, True)


def test_transactional_ids_are_kafka_connects() -> None:
    """Transactional ids are Kafka Connect's, so that workers of both kinds fence each other."""
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
def test_invalid_settings_are_named(wrong: dict[str, str | None], named: str) -> None:
    """Missing, contradictory and invalid settings are errors that name the setting."""
    props = {name: value for name, value in (PROPS | wrong).items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        DistributedConfig(props)


def test_distributed_workers_may_run_tasks_in_processes() -> None:
    """A distributed worker accepts process isolation."""
    assert DistributedConfig(PROPS | {"penstock.task.isolation": "process"})["penstock.task.isolation"] == "process"
